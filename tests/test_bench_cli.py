"""Laws of `lightning_specdec bench`: what is measured is kept and shown, and resumes; bad input is one line."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
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
from lightning_specdec.bench.results import read
from lightning_specdec.bench.rows import comparisons
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


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory with a tiny checkpoint and a config for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = cases.MODELS["rnn"]()
    SpeculativeDecoder(target, ModelDrafter(cases.near(target)), prompts=cases.PROMPTS).save(
        "tiny.ckpt"
    )
    write("tiny.yaml")


def write(path: str, /, **more: Any) -> None:
    values = {key: value for key, value in (TINY | more).items() if value is not None}
    Path(path).write_text(yaml.safe_dump(values, sort_keys=False))


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException, when: Any) -> None:
    """Let timed runs of cases fail."""
    run = Case.run

    def failing(self: Case, repeat: int) -> Any:
        if when(self):
            raise error
        return run(self, repeat)

    monkeypatch.setattr(Case, "run", failing)


def test_a_benchmark_is_kept_and_shown_and_its_command_resumes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = succeed("bench", "--config", "tiny.yaml")
    lines = shown.out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.split()[:2] == ["method", "window"])
    assert lines[first].endswith(" speedup") and shown.err == ""
    assert [line.split()[0] for line in lines[first + 1 : first + 4]] == [
        "standard",
        "model",
        "ngram",
    ]
    rows = read("results/tiny").rows
    assert len(rows) == 6 and {len(row.prompt_seconds) for row in rows} == {2}
    with monkeypatch.context() as patch:
        patch.setattr(Case, "run", lambda *more: pytest.fail("measured again"))
        assert succeed("bench", "--config", "tiny.yaml").out == shown.out
        markdown = succeed(
            "bench", "--config", "tiny.yaml", "--format", "markdown"
        ).out.splitlines()
        table = list(
            csv.DictReader(
                io.StringIO(succeed("bench", "--config", "tiny.yaml", "--format", "csv").out)
            )
        )
        document = json.loads(succeed("bench", "--config", "tiny.yaml", "--format", "json").out)[0]
    assert (
        markdown[1].startswith("| --- |") and len({line.count("|") for line in markdown[:5]}) == 1
    )
    assert len(table) == len(document["cells"]) == 3 and table[1]["draft"] == "model"
    cell, own = document["cells"][1], [row.seconds for row in rows if row.draft == "model"]
    assert (
        cell["speculative"]["runs"]["seconds"] == own and float(table[1]["tokens_per_second"]) > 0
    )
    found = next(each for each in comparisons(rows) if each.case.draft == "model").walltime_speedup
    assert (
        found is not None
        and cell["walltime_speedup"] == found.value
        and cell["walltime_speedup_low"] == found.low
    )
    assert document["manifest"]["config"]["max_new_tokens"] == 4


def test_ctrl_c_leaves_a_file_that_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter(range(10))
    with monkeypatch.context() as patch:
        fail(patch, KeyboardInterrupt(), lambda case: next(runs) == 3)
        outcome = call("bench", "--config", "tiny.yaml")
    assert outcome.code == 130 and "\nmethod " in outcome.out
    assert outcome.err == "interrupted: what is finished stays, and the same command resumes\n"
    assert len(read("results/tiny").rows) == 3
    monkeypatch.setattr(manifest, "_commit", lambda: "b2")
    assert succeed("bench", "--config", "tiny.yaml").err == ""
    assert [row.commit for row in read("results/tiny").rows[3:]] == ["b2"] * 3


def test_a_disk_that_is_full_in_the_middle_is_one_line_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, writing, written = Path("results/tiny/rows.jsonl"), os.write, []

    def full(file: int, content: bytes) -> int:
        written.append(content)
        if len(written) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writing(file, content[:10] if len(written) == 4 else content)

    monkeypatch.setattr(results_module.os, "write", full)
    outcome = call("bench", "--config", "tiny.yaml")
    assert outcome.code == 2 and outcome.out == "" and outcome.err.count("\n") == 1
    assert outcome.err.startswith(
        f"error: {place} cannot be written (No space left on device): what is finished"
    )
    assert len(read(place.parent).rows) == 3
    before = place.read_bytes()
    succeed("bench", "--config", "tiny.yaml")
    assert len(read(place.parent).rows) == 6 and place.read_bytes().startswith(before)


def test_a_pair_that_cannot_be_loaded_stops_no_other() -> None:
    Path("torn.ckpt").write_bytes(Path("tiny.ckpt").read_bytes()[:1000])
    torn = {"torn": {"ckpt": "torn.ckpt", "drafts": DRAFTS}}
    write("tiny.yaml", pairs={**torn, **TINY["pairs"]})
    outcome = call("bench", "--config", "tiny.yaml")
    assert outcome.code == 1 and len(read("results/tiny").rows) == 6
    assert outcome.err.startswith("WARNING: failed: torn: ") and outcome.err.count("\n") == 1
    assert read("results/tiny").manifest["failed_pairs"].keys() == {"torn"}
    assert "failed: torn: " in succeed("report", "results/tiny").err
    Path("torn.ckpt").write_bytes(Path("tiny.ckpt").read_bytes())
    assert succeed("bench", "--config", "tiny.yaml").err == ""
    assert (
        len(read("results/tiny").rows) == 12 and read("results/tiny").manifest["failed_pairs"] == {}
    )


def test_a_case_that_failed_is_in_the_table_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write("tiny.yaml", rules=["EpsilonThreshold"], num_prompts=100)
    outcome = call("bench", "--config", "tiny.yaml")
    assert (
        outcome.code == 1
        and "1 case of results/tiny failed and will not be tried again" in outcome.err
    )
    assert "of 100 prompts are there" in outcome.err
    failed = next(line for line in outcome.out.splitlines() if line.startswith("ngram "))
    assert (
        "failed: EpsilonThreshold compares the draft's logits, and NGramDrafter has none" in failed
    )
    assert "lossy" in next(line for line in outcome.out.splitlines() if line.startswith("model "))
    write("tiny.yaml", name="formula")
    fail(monkeypatch, RuntimeError("=HYPERLINK(1)"), lambda case: case.draft == "ngram")
    shown = call("bench", "--config", "tiny.yaml", "--format", "csv").out
    assert "'=HYPERLINK(1)" in shown, "no formula of a spreadsheet"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"temperature": [0]}, "unknown setting temperature: did you mean temperatures?"),
        ({"pairs": None}, "tiny.yaml: pairs is missing"),
        ({"pairs": {"rnn": {}}}, "name the models by one of"),
        ({"pairs": {"rnn": {"ckpt": "gone.ckpt"}}}, "gone.ckpt: No such file or directory"),
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
def test_a_config_that_is_wrong_is_one_line(more: dict[str, Any], told: str) -> None:
    write("tiny.yaml", **more)
    outcome = call("bench", "--config", "tiny.yaml")
    assert outcome.code == 2 and outcome.out == "" and outcome.err.count("\n") == 1, outcome
    assert outcome.err.startswith("error: ") and told in outcome.err


def test_other_bad_input_is_one_line() -> None:
    refused("bench", told="--config is missing: give a YAML file")
    refused("bench", "--config", "gone.yaml", told="gone.yaml: No such file or directory")
    refused("bench", "--config", "tiny.yaml", "tiny.yaml", told="two configs are called tiny")
    Path("tiny.yaml").write_text("pairs: [")
    refused("bench", "--config", "tiny.yaml", told="is not valid YAML")


def test_another_config_under_the_same_name_is_refused() -> None:
    succeed("bench", "--config", "tiny.yaml")
    write("other.yaml", name="tiny", seed=1)
    refused("bench", "--config", "other.yaml", told="config.seed changed from 0 to 1")
    succeed("bench", "--config", "other.yaml", "--name", "second")
    assert sorted(os.listdir("results")) == ["second", "tiny"]


def test_a_pretrained_pair_runs_beside_transformers() -> None:
    tiny_models.write_text_model(Path("target"))
    tiny_models.write_text_model(Path("draft"), seed=2, num_hidden_layers=1)
    early = {"class_path": "EarlyExitDrafter", "init_args": {"exit_layer": 1}}
    drafts = {
        "own": {},
        "small": {"draft": "draft"},
        "exit": {"drafter": early},
        "gpt": {"drafter": "ModelDrafter"},
    }
    more: dict[str, Any] = {"prompts": "shipped", "domains": ["code"], "num_prompts": 1}
    write("text.yaml", pairs={"text": {"target": "target", "drafts": drafts}}, repeats=1, **more)
    outcome = call("bench", "--config", "text.yaml", "--format", "json")
    assert outcome.code == 1, "a draft that cannot be made is a failed case"
    found = {(cell["method"], cell["draft"]): cell for cell in json.loads(outcome.out)[0]["cells"]}
    assert "needs a draft model" in found.pop(("speculative", "gpt"))["error"]
    names = [("standard", None), *(("speculative", name) for name in ("own", "small", "exit"))]
    names += [("generate", None), ("assisted", "small"), ("prompt_lookup", None)]
    assert set(found) == set(names)
    assert all(cell["error"] is None and cell["same_tokens"] is True for cell in found.values()), (
        found
    )


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_can_be_read(path: Path) -> None:
    found = read_config(path)
    assert found.name == path.stem and found.pairs
