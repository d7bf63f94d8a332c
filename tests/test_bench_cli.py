"""Laws of `lightning_specdec bench`: results are stored, shown, resumed; bad input is one line."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import cases
import pytest
import tiny_models
import yaml
from cli_fixtures import call, refused, succeed

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.bench import manifest
from lightning_specdec.bench import results as results_module
from lightning_specdec.bench.config import read_config
from lightning_specdec.bench.measure import Case
from lightning_specdec.bench.records import Record, comparisons
from lightning_specdec.bench.results import read
from lightning_specdec.drafters import ModelDrafter

CONFIGS = Path(__file__).parent.parent / "configs" / "bench"
LOOKUP = {"class_path": "NGramDrafter", "init_args": {"max_ngram": 2}}
DRAFTS: dict[str, Any] = {"model": {}, "ngram": {"drafter": LOOKUP}}
TINY: dict[str, Any] = {
    "pairs": {"rnn": {"ckpt": "tiny.ckpt", "drafts": DRAFTS}},
    "num_prompts": 2,
    "num_draft_tokens": [2],
    "max_new_tokens": 4,
    "repeats": 2,
    "warmup": 0,
    "threads": 1,
}
BENCH = ("bench", "--config", "tiny.yaml")


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a directory with a tiny checkpoint and a config for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = cases.MODELS["rnn"]()
    drafter = ModelDrafter(cases.near(target))
    SpeculativeDecoder(target, drafter, prompts=cases.PROMPTS).save("tiny.ckpt")
    write_config("tiny.yaml")


def register(name: str, **fields: Any) -> None:
    """Register a pair that decodes with the tiny checkpoint."""
    path = Path("configs", "pairs", f"{name}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    pair = {"description": "tiny", "ckpt": "tiny.ckpt", "num_draft_tokens": 2, **fields}
    path.write_text(yaml.safe_dump(pair))


def write_config(path: str, /, **changes: Any) -> None:
    """Write the tiny config with changes; None removes an entry."""
    values = {**TINY, **changes}
    values = {name: value for name, value in values.items() if value is not None}
    Path(path).write_text(yaml.safe_dump(values, sort_keys=False))


def fail(
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    fails: Callable[[Case], bool],
) -> None:
    """Make answers of some cases fail."""
    open_stream = Case._open

    def failing_open(self: Case, number: int, repeat: int) -> Any:
        if fails(self):
            raise error
        return open_stream(self, number, repeat)

    monkeypatch.setattr(Case, "_open", failing_open)


KEPT = "kept in results/tiny: `lightning_specdec report results/tiny` summarizes the results\n"
"""What `bench` reports at its end."""


def rows_of(name: str = "tiny") -> list[Record]:
    return read(f"results/{name}").rows


def test_a_benchmark_is_stored_and_shown_as_a_table() -> None:
    outcome = succeed(*BENCH)
    assert outcome.err == KEPT
    lines = outcome.out.splitlines()
    is_heading = [line.split()[:2] == ["method", "window"] for line in lines]
    heading_index = is_heading.index(True)
    assert lines[heading_index].endswith(" speedup")
    table_lines = lines[heading_index + 1 : heading_index + 4]
    assert [line.split()[0] for line in table_lines] == ["standard", "model", "ngram"]

    rows = rows_of()
    assert len(rows) == 6
    assert {len(row.prompt_seconds) for row in rows} == {2}


def test_the_same_command_measures_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first_outcome = succeed(*BENCH)
    monkeypatch.setattr(Case, "_open", lambda *arguments: pytest.fail("measured again"))
    assert succeed(*BENCH).out == first_outcome.out


def test_results_are_shown_as_markdown_csv_and_json() -> None:
    succeed(*BENCH)
    markdown_lines = succeed(*BENCH, "--format", "markdown").out.splitlines()
    assert markdown_lines[1].startswith("| --- |")
    assert len({line.count("|") for line in markdown_lines[:5]}) == 1

    csv_text = succeed(*BENCH, "--format", "csv").out
    records = list(csv.DictReader(io.StringIO(csv_text)))
    assert len(records) == 3
    assert records[1]["draft"] == "model"
    assert float(records[1]["tokens_per_second"]) > 0

    (document,) = json.loads(succeed(*BENCH, "--format", "json").out)
    assert len(document["cells"]) == 3
    assert document["manifest"]["config"]["max_new_tokens"] == 4
    rows = rows_of()
    cell = document["cells"][1]
    seconds = [row.seconds for row in rows if row.draft == "model"]
    assert cell["speculative"]["runs"]["seconds"] == seconds
    _, comparison, _ = comparisons(rows)
    assert comparison.walltime_speedup is not None
    assert cell["walltime_speedup"] == comparison.walltime_speedup.value
    assert cell["walltime_speedup_low"] == comparison.walltime_speedup.low


def test_ctrl_c_leaves_a_file_that_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_numbers = count()
    with monkeypatch.context() as patch:
        # Three cases have two answers in each repeat.
        fail(patch, KeyboardInterrupt(), lambda case: next(answer_numbers) == 8)
        outcome = call(*BENCH)
    assert outcome.code == 130
    assert "\nmethod " in outcome.out
    assert outcome.err == "interrupted: what is finished stays, and the same command resumes\n"
    assert len(rows_of()) == 3

    monkeypatch.setattr(manifest, "_commit", lambda: "b2")
    assert succeed(*BENCH).err == KEPT
    assert [row.commit for row in rows_of()[3:]] == ["b2"] * 3


def test_a_disk_that_is_full_in_the_middle_is_one_line_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = Path("results/tiny/rows.jsonl")
    write = os.write
    num_writes = 0

    def failing_write(file: int, content: bytes) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if num_writes == 4:
            # The last bytes that fit.
            content = content[:10]
        return write(file, content)

    monkeypatch.setattr(results_module.os, "write", failing_write)
    outcome = call(*BENCH)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    message = f"error: {path} cannot be written (No space left on device): what is finished"
    assert outcome.err.startswith(message)
    assert len(rows_of()) == 3

    content_before = path.read_bytes()
    succeed(*BENCH)
    assert len(rows_of()) == 6
    assert path.read_bytes().startswith(content_before)


def test_a_pair_that_cannot_be_loaded_stops_no_other() -> None:
    checkpoint = Path("tiny.ckpt").read_bytes()
    Path("torn.ckpt").write_bytes(checkpoint[:1000])
    torn_pair = {"torn": {"ckpt": "torn.ckpt", "drafts": DRAFTS}}
    write_config("tiny.yaml", pairs={**torn_pair, **TINY["pairs"]})

    outcome = call(*BENCH)
    assert outcome.code == 1
    assert len(rows_of()) == 6
    warning, kept = outcome.err.splitlines(keepends=True)
    assert warning.startswith("WARNING: failed: torn: ")
    assert kept == KEPT
    assert read("results/tiny").manifest["failed_pairs"].keys() == {"torn"}
    assert "failed: torn: " in succeed("report", "results/tiny").err

    Path("torn.ckpt").write_bytes(checkpoint)
    assert succeed(*BENCH).err == KEPT
    assert len(rows_of()) == 12
    assert read("results/tiny").manifest["failed_pairs"] == {}


def test_a_case_that_failed_is_in_the_table_and_the_exit_code() -> None:
    write_config("tiny.yaml", rules=["EpsilonThreshold"], num_prompts=100)
    outcome = call(*BENCH)
    assert outcome.code == 1
    assert "1 case of results/tiny failed and will not be tried again" in outcome.err
    assert "of 100 prompts are there" in outcome.err
    lines = {line.split(" ")[0]: line for line in outcome.out.splitlines()}
    error = "failed: EpsilonThreshold compares the draft's logits, and NGramDrafter has none"
    assert error in lines["ngram"]
    assert "lossy" in lines["model"]


def test_an_error_is_no_formula_of_a_spreadsheet(monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, RuntimeError("=HYPERLINK(1)"), lambda case: case.draft == "ngram")
    assert "'=HYPERLINK(1)" in call(*BENCH, "--format", "csv").out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": [0]}, "unknown setting temperature: did you mean temperatures?"),
        ({"pairs": None}, "tiny.yaml: pairs is missing"),
        ({"pairs": {"rnn": {}}}, "name the models by one of"),
        (
            {"pairs": {"rnn": {"ckpt": "gone.ckpt"}}},
            "pairs.rnn.ckpt: there is no checkpoint gone.ckpt",
        ),
        (
            {"pairs": {"rnn": {"ckpt": "tiny.ckpt", "device": "cpu"}}},
            "pairs.rnn must be a mapping of ckpt, pair",
        ),
        ({"pairs": {"rnn": {"pair": "rn"}}}, "there is no pair 'rn'"),
        ({"name": "../up"}, "name must be named by letters"),
        ({"temperatures": [-1]}, "temperatures must be in [0, inf), got -1"),
        ({"num_draft_tokens": [2, 2]}, "num_draft_tokens must be different values"),
        ({"rules": ["Luck"]}, "there is no rule 'Luck'"),
        ({"baselines": ["vllm"]}, "baselines must be one of generate"),
        ({"prompts": "gone.jsonl"}, "gone.jsonl"),
        ({"device": "cuda:77"}, "no usable device 'cuda:77'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_is_wrong_is_one_line(changes: dict[str, Any], message: str) -> None:
    write_config("tiny.yaml", **changes)
    outcome = call(*BENCH)
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("error: ")
    assert message in outcome.err


def test_other_bad_input_is_one_line() -> None:
    refused("bench", message="--config is missing: give a YAML file")
    refused("bench", "--config", "gone.yaml", message="gone.yaml: No such file or directory")
    refused("bench", "--config", "tiny.yaml", "tiny.yaml", message="two configs are called tiny")
    Path("tiny.yaml").write_text("pairs: [")
    refused(*BENCH, message="is not valid YAML")


def test_another_config_under_the_same_name_is_refused() -> None:
    succeed(*BENCH)
    write_config("other.yaml", name="tiny", seed=1)
    refused("bench", "--config", "other.yaml", message="config.seed changed from 0 to 1")
    succeed("bench", "--config", "other.yaml", "--name", "second")
    assert sorted(os.listdir("results")) == ["second", "tiny"]


def test_a_pretrained_pair_runs_beside_transformers() -> None:
    tiny_models.write_text_model(Path("target"))
    tiny_models.write_text_model(Path("draft"), seed=2, num_hidden_layers=1)
    early_exit = {"class_path": "EarlyExitDrafter", "init_args": {"exit_layer": 1}}
    drafts = {
        "own": {},
        "small": {"draft": "draft"},
        "exit": {"drafter": early_exit},
        "gpt": {"drafter": "ModelDrafter"},
    }
    write_config(
        "text.yaml",
        pairs={"text": {"target": "target", "drafts": drafts}},
        repeats=1,
        prompts="shipped",
        domains=["code"],
        num_prompts=1,
    )
    outcome = call("bench", "--config", "text.yaml", "--format", "json")
    assert outcome.code == 1, "a draft that cannot be made is a failed case"
    (document,) = json.loads(outcome.out)
    cells = {(cell["method"], cell["draft"]): cell for cell in document["cells"]}

    failed_cell = cells.pop(("speculative", "gpt"))
    assert "needs a draft model" in failed_cell["error"]
    assert set(cells) == {
        ("standard", None),
        ("speculative", "own"),
        ("speculative", "small"),
        ("speculative", "exit"),
        ("generate", None),
        ("assisted", "small"),
        ("prompt_lookup", None),
    }
    for cell in cells.values():
        assert cell["error"] is None, cell
        assert cell["same_tokens"] is True, cell


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_can_be_read(path: Path) -> None:
    bench_config = read_config(path)
    assert bench_config.name == path.stem
    assert bench_config.pairs


@pytest.mark.parametrize(("own_threads", "expected"), [(None, 2), (1, 1)])
def test_a_registered_pair_runs_with_its_threads(own_threads: int | None, expected: int) -> None:
    register("mine", threads=2)
    register("plain")
    pairs = {"first": {"pair": "plain"}, "second": {"pair": "mine"}}
    write_config("tiny.yaml", pairs=pairs, threads=own_threads)
    document = succeed(*BENCH, "--format", "json").json
    results = document[0] if isinstance(document, list) else document
    assert results["manifest"]["threads"] == expected


def test_pairs_of_different_threads_need_a_number() -> None:
    register("mine", threads=2)
    register("other", threads=1)
    write_config(
        "tiny.yaml", pairs={"first": {"pair": "mine"}, "second": {"pair": "other"}}, threads=None
    )
    message = refused(*BENCH).err
    assert "its pairs name different threads (2 and 1)" in message
    assert "give it `threads:` of its own" in message


def test_a_registered_pair_runs_on_its_device() -> None:
    register("mine", device="cuda:77")
    write_config("other.yaml", name="other", pairs={"first": {"pair": "mine"}})
    # Before the first config is measured.
    outcome = refused(*BENCH, "other.yaml")
    assert "no usable device 'cuda:77'" in outcome.err
    assert not Path("results").exists()
