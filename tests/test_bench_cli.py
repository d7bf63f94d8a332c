"""Laws of `lightning_specdec bench`: what is measured is kept and shown, resumes, repeats; bad input is one line."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import cases
import pytest
import tiny_models
import torch
import yaml
from cli_fixtures import call, refused, succeed

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.bench import manifest, pairs
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
    **{"num_prompts": 2, "num_draft_tokens": [2], "max_new_tokens": 4, "repeats": 2, "warmup": 0, "threads": 1},
}


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory with a tiny checkpoint and a config for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("lightning_specdec.bench.costs.SECONDS", 0.01)
    monkeypatch.setattr("lightning_specdec.bench.huggingface.NUM_TRIES", 1)
    target = cases.MODELS["rnn"]()
    SpeculativeDecoder(target, ModelDrafter(cases.near(target)), prompts=cases.PROMPTS).save("tiny.ckpt")
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


def damage(number: int, **more: Any) -> None:
    path = Path("results/tiny/rows.jsonl")
    lines = path.read_text().splitlines()
    lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | more)
    path.write_text("\n".join([*lines, ""]))


def test_a_benchmark_is_kept_and_shown_and_its_command_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = succeed("bench", "--config", "tiny.yaml")
    lines = shown.out.splitlines()
    assert lines[0].split()[0] == "method" and lines[0].rstrip().endswith("walltime_speedup")
    assert [line.split()[0] for line in lines[1:4]] == ["standard", "model", "ngram"] and shown.err == ""
    rows = read("results/tiny").rows
    assert len(rows) == 6 and {row.num_prompts for row in rows} == {2}
    with monkeypatch.context() as patch:
        patch.setattr(Case, "run", lambda *more: pytest.fail("measured again"))
        assert succeed("bench", "--config", "tiny.yaml").out == shown.out
        markdown = succeed("bench", "--config", "tiny.yaml", "--format", "markdown").out.splitlines()
        table = list(csv.DictReader(io.StringIO(succeed("bench", "--config", "tiny.yaml", "--format", "csv").out)))
        document = json.loads(succeed("bench", "--config", "tiny.yaml", "--format", "json").out)[0]
    assert markdown[1].startswith("| --- |") and len({line.count("|") for line in markdown[:5]}) == 1
    assert len(table) == len(document["cells"]) == 3 and table[1]["draft"] == "model"
    cell, own = document["cells"][1], [row.seconds for row in rows if row.draft == "model"]
    assert cell["seconds_mean"] == pytest.approx(sum(own) / 2) and float(table[1]["seconds_mean"]) > 0
    found = next(each for each in comparisons(rows) if each.case.draft == "model").walltime_speedup
    assert found is not None and cell["walltime_speedup"] == found.value and cell["walltime_speedup_low"] == found.low
    assert document["manifest"]["config"]["max_new_tokens"] == 4
    write("two.yaml", name="two", threads=None)
    threads = list[int]()
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    succeed("bench", "--config", "tiny.yaml", "--config", "two.yaml")
    assert threads[0] == 1 and threads[2] == torch.get_num_threads(), "each config has its own threads"
    assert len(read("results/two").rows) == 6


def test_ctrl_c_leaves_a_file_that_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter(range(10))
    with monkeypatch.context() as patch:
        fail(patch, KeyboardInterrupt(), lambda case: next(runs) == 3)
        outcome = call("bench", "--config", "tiny.yaml")
    assert outcome.code == 130 and "walltime_speedup" in outcome.out
    assert outcome.err == "interrupted: what is finished stays, and the same command resumes\n"
    assert len(read("results/tiny").rows) == 3
    monkeypatch.setattr(manifest, "_commit", lambda: "b2")
    told = succeed("bench", "--config", "tiny.yaml")
    assert told.err.count("\n") == 1 and "goes on with commit" in told.err and told.out.endswith(", then b2\n")
    assert [row.commit for row in read("results/tiny").rows[3:]] == ["b2"] * 3


@pytest.mark.parametrize("output", ["results", "."])
def test_a_disk_that_is_full_in_the_middle_is_one_line_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    command, place = ("bench", "--config", "tiny.yaml", "--output", output), Path(output) / "tiny" / "rows.jsonl"
    writing, written = os.write, []

    def full(file: int, content: bytes) -> int:
        written.append(content)
        if len(written) == 4:
            return writing(file, content[:10])
        if len(written) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writing(file, content)

    monkeypatch.setattr(results_module.os, "write", full)
    outcome = call(*command)
    assert outcome.code == 2 and outcome.out == "" and outcome.err.count("\n") == 1
    assert outcome.err.startswith(f"error: {place} cannot be written (No space left on device): what is finished")
    assert len(read(place.parent).rows) == 3
    before = place.read_bytes()
    assert before.endswith(b"\n")
    succeed(*command)
    assert len(read(place.parent).rows) == 6 and place.read_bytes().startswith(before)


@pytest.mark.parametrize("name", ["manifest.json", "report.html", "cells.csv"])
def test_a_full_disk_loses_nothing_of_what_is_written_whole(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The manifest of a run that goes on at another commit, and a report that is made anew."""
    verb = ("bench", "--config", "tiny.yaml") if name == "manifest.json" else ("report", "results/tiny")
    succeed("bench", "--config", "tiny.yaml")
    succeed("report", "results/tiny")
    path = Path("results/tiny/rows.jsonl")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    monkeypatch.setattr(manifest, "_commit", lambda: "other")
    before = {path: path.read_bytes() for path in Path("results").rglob("*") if path.is_file()}
    sync = os.fsync

    def full(file: int) -> None:
        path = os.readlink(f"/proc/self/fd/{file}")
        if f".{name}." in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        sync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        outcome = call(*verb)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and "No space left on device" in outcome.err
    after = {path: path.read_bytes() for path in Path("results").rglob("*") if path.is_file()}
    assert after.keys() == before.keys() and (name != "manifest.json" or after == before)
    assert all(after[path] == before[path] for path in before if path.name == name)
    succeed(*verb)


def test_a_pair_that_cannot_be_loaded_stops_no_other() -> None:
    Path("torn.ckpt").write_bytes(Path("tiny.ckpt").read_bytes()[:1000])
    torn = {"torn": {"ckpt": "torn.ckpt", "drafts": DRAFTS}}
    write("tiny.yaml", pairs={**torn, **TINY["pairs"]})
    outcome = call("bench", "--config", "tiny.yaml")
    assert outcome.code == 1 and len(read("results/tiny").rows) == 6
    assert outcome.err.startswith("WARNING: failed: torn: ") and outcome.err.count("\n") == 1
    assert read("results/tiny").manifest["failed_pairs"].keys() == {"torn"}
    assert "failed: torn: " in succeed("report", "results/tiny").err
    compared = call("bench", "--config", "tiny.yaml", "--compare", "model", "ngram")
    assert compared.code == 1 and "torn.ckpt" in compared.err and "model" in compared.out
    Path("torn.ckpt").write_bytes(Path("tiny.ckpt").read_bytes())
    assert succeed("bench", "--config", "tiny.yaml").err == ""
    assert len(read("results/tiny").rows) == 12 and read("results/tiny").manifest["failed_pairs"] == {}
    Path("torn.ckpt").write_bytes(Path("tiny.ckpt").read_bytes()[:1000])
    write("alone.yaml", pairs=torn)
    for more in ((), ("--compare", "model", "ngram")):
        alone = call("bench", "--config", "alone.yaml", *more)
        assert alone.code == 2 and alone.out == "" and alone.err.startswith("error: torn.ckpt")
    write("tiny.yaml", name="again")
    both = call("bench", "--config", "alone.yaml", "tiny.yaml")
    assert both.code == 2 and both.err.startswith("WARNING: alone: ") and len(read("results/again").rows) == 6


def test_a_case_that_failed_is_in_the_table_and_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    write("tiny.yaml", rules=["EpsilonThreshold"], num_prompts=100)
    outcome = call("bench", "--config", "tiny.yaml")
    assert outcome.code == 1 and "1 case of results/tiny failed and will not be tried again" in outcome.err
    assert "prompts of the 100 that are asked for" in outcome.err
    failed = next(line for line in outcome.out.splitlines() if line.startswith("ngram "))
    assert "failed: EpsilonThreshold compares the draft's logits, and NGramDrafter has none" in failed
    assert "lossy" in next(line for line in outcome.out.splitlines() if line.startswith("model "))
    write("tiny.yaml", name="formula")
    fail(monkeypatch, RuntimeError("=HYPERLINK(1)"), lambda case: case.draft == "ngram")
    table = list(csv.DictReader(io.StringIO(call("bench", "--config", "tiny.yaml", "--format", "csv").out)))
    assert [line["error"] for line in table] == ["", "", "'=HYPERLINK(1)"], "no formula of a spreadsheet"


def test_a_draft_that_cannot_be_loaded_for_want_of_memory_is_a_failed_case(monkeypatch: pytest.MonkeyPatch) -> None:
    load = pairs.load_pair

    def full(source: Any, **more: Any) -> Any:
        if source.drafter is None:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory\n")
        return load(source, **more)

    with monkeypatch.context() as patch:
        patch.setattr(pairs, "load_pair", full)
        outcome = call("bench", "--config", "tiny.yaml")
    assert outcome.code == 1 and "can't allocate memory" in outcome.out
    rows = read("results/tiny").rows
    assert [row.draft for row in rows if row.error is None] == [None, "ngram"] * 2
    number = next(i for i, row in enumerate(rows, start=1) if row.error is not None)
    refused("bench", "--repeat", f"results/tiny:{number}", told="draft_sha256 is not what it was")


def test_a_row_is_repeated_from_its_own_record() -> None:
    write("tiny.yaml", temperatures=[1], num_draft_tokens=["auto"], rules=["RejectionSampling"])
    succeed("bench", "--config", "tiny.yaml")
    os.rename("tiny.yaml", "away.yaml")
    rows = read("results/tiny").rows
    told = json.loads(succeed("bench", "--repeat", "results/tiny:5", "--format", "json").out)
    assert told["same_tokens"] is True and told["repeat"] == rows[4].repeat == 1 and told["cell"] == rows[4].cell
    assert told["seconds"][0] == rows[4].seconds != told["seconds"][1]
    for place in (f"results/tiny/rows.jsonl:{rows[1].cell}", "results/tiny:1"):
        assert succeed("bench", "--repeat", place).out.endswith("the same tokens\n")
    damage(5, tokens_sha256="0" * 64)
    outcome = call("bench", "--repeat", "results/tiny:5")
    assert outcome.code == 1 and outcome.out.endswith("OTHER TOKENS\n")
    SpeculativeDecoder(cases.MODELS["rnn"](4), ModelDrafter(cases.MODELS["rnn"](5)), prompts=[[1]]).save("tiny.ckpt")
    refused("bench", "--repeat", "results/tiny:5", told="target_sha256 and draft_sha256 is not what it was")


def test_a_row_that_failed_is_tried_again_and_a_damaged_one_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    write("tiny.yaml", repeats=1)
    with monkeypatch.context() as patch:
        fail(patch, MemoryError("no memory"), lambda case: case.draft == "ngram")
        assert call("bench", "--config", "tiny.yaml").code == 1
        told = succeed("bench", "--repeat", "results/tiny:3").out
        assert told.endswith("then  failed: no memory\n  now   failed: no memory\nit fails as it did\n")
    outcome = call("bench", "--repeat", "results/tiny:3")
    assert outcome.code == 1 and outcome.out.endswith("it succeeds\n")
    fail(monkeypatch, MemoryError(), lambda case: True)
    outcome = call("bench", "--repeat", "results/tiny:2")
    assert outcome.code == 1 and outcome.out.endswith("now   failed: MemoryError\nIT FAILS NOW\n")
    damage(1, domain="code")
    refused("bench", "--repeat", "results/tiny:1", told="results/tiny is damaged (no 'code')")
    damage(2, pair="other")
    refused("bench", "--repeat", "results/tiny:2", told="(no 'other')")


def test_two_cases_are_set_against_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    write("tiny.yaml", repeats=5, num_draft_tokens=[1, 2])
    command = ("bench", "--config", "tiny.yaml", "--compare")
    (found,) = json.loads(succeed(*command, "model:2", "ngram", "--format", "json").out)
    assert (found["draft"], found["num_draft_tokens"], found["same_tokens"]) == ("model", 2, True)
    assert found["walltime_speedup_low"] <= found["walltime_speedup"] <= found["walltime_speedup_high"]
    assert len(found["speculative"]["runs"]["seconds"]) == 5 and not Path("results").exists()
    shown = succeed(*command, "model:1", "standard").out
    assert "times as fast" in shown and "model:1 beside standard" in shown
    write("tiny.yaml", temperatures=[0, 0.5, 1], repeats=1)
    with monkeypatch.context() as patch:
        fail(patch, MemoryError("too wide"), lambda case: case.config.temperature == 0.5)
        outcome = call(*command, "model", "ngram", "--format", "json")
    assert outcome.code == 1
    assert [each["error"] is None for each in outcome.json] == [True, False, True] and "too wide" in outcome.out


@pytest.mark.parametrize(("cut", "repeats"), [(1, []), (2, []), (4, [1]), (5, [2])])
def test_ctrl_c_compares_what_both_have_finished(monkeypatch: pytest.MonkeyPatch, cut: int, repeats: list[int]) -> None:
    write("tiny.yaml", repeats=3)
    runs = iter(range(1, 20))
    fail(monkeypatch, KeyboardInterrupt(), lambda case: next(runs) == cut)
    outcome = call("bench", "--config", "tiny.yaml", "--compare", "model", "ngram", "--format", "json")
    assert outcome.code == 130 and outcome.err.startswith("interrupted: ")
    assert [each["repeats"] for each in outcome.json if each["walltime_speedup"]] == repeats


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"temperature": [0]}, "unknown setting temperature: did you mean temperatures?"),
        ({"pairs": None}, "tiny.yaml: pairs is missing"),
        ({"pairs": {"rnn": {"ckpt": "tiny.ckpt", "draft": {}}}}, "pairs.rnn.draft: did you mean drafts?"),
        ({"pairs": {"rnn": {}}}, "name the models by one of"),
        ({"pairs": {"rnn": {"ckpt": "gone.ckpt"}}}, "gone.ckpt: No such file or directory"),
        ({"pairs": {"rnn": {"target": "./gone"}}}, "there is no directory ./gone"),
        ({"pairs": {"rnn": {"ckpt": "tiny.ckpt", "dtype": "float33"}}}, "dtype must be one of float32, "),
        ({"pairs": {"rnn": {"pair": "rn"}}}, "there is no pair 'rn'"),
        ({"pairs": {"a/b": {"ckpt": "tiny.ckpt"}}}, "pairs must be named by letters"),
        ({"pairs": {"rnn": {"ckpt": "tiny.ckpt", "drafts": {"a": {"exit_layer": 1}}}}}, "EarlyExitDrafter"),
        ({"pairs": {"rnn": {"ckpt": "tiny.ckpt", "drafts": {"a": {"drafter_arguments": {}}}}}}, "init_args"),
        ({"pairs": {"rnn": {"ckpt": "tiny.ckpt", "drafts": {"a": {"dtype": "float32"}}}}}, "draft_dtype"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"repeats": "many"}, "repeats must be an integer at least 1, got 'many'"),
        ({"rolled": True}, "there is no rolled any more: drop it"),
        ({"outside": ["generate"]}, "it is called baselines now"),
        ({"temperatures": [-1]}, "temperatures must be in [0, inf), got -1"),
        ({"temperatures": []}, "temperatures is empty"),
        ({"num_draft_tokens": ["1-8"]}, "num_draft_tokens takes no '1-8': write each one"),
        ({"num_draft_tokens": ["fast"]}, "num_draft_tokens takes no 'fast'"),
        ({"num_draft_tokens": [2, 2]}, "num_draft_tokens names 2 twice"),
        ({"rules": ["Luck"]}, "there is no rule 'Luck'"),
        ({"rules": [{"ExactMatch": {"epsilon": 1}}]}, "unknown setting epsilon"),
        ({"baselines": ["vllm"]}, "baselines must be among generate"),
        ({"prompts": "gone.jsonl"}, "gone.jsonl"),
        ({"domains": ["code"]}, "code"),
        ({"device": "cuda:77"}, "there is no usable device 'cuda:77'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_is_wrong_is_one_line(more: dict[str, Any], told: str) -> None:
    write("tiny.yaml", **more)
    outcome = call("bench", "--config", "tiny.yaml")
    assert outcome.code == 2 and outcome.out == "" and outcome.err.count("\n") == 1, outcome
    assert outcome.err.startswith("error: ") and told in outcome.err


def test_other_bad_input_is_one_line() -> None:
    refused("bench", told="say what to measure: --config FILE")
    refused("bench", "--config", "gone.yaml", told="gone.yaml: No such file or directory")
    refused("bench", "--config", "tiny.yaml", "tiny.yaml", told="two configs are called tiny")
    refused("bench", "--config", "tiny.yaml", "--compare", "model", told="--compare takes two names")
    refused("bench", "--config", "tiny.yaml", "--compare", "model", "other", told="'other' is nothing that this config")
    refused("bench", "--config", "tiny.yaml", "--compare", "model:²", "ngram", told="'model:²' is nothing that this")
    refused("bench", "--config", "tiny.yaml", "--compare", "model", "model:2", told="are the same")
    refused("bench", "--repeat", "results/tiny:1", told="results/tiny holds no results")
    refused("bench", "--repeat", "1", told="--repeat takes DIRECTORY:NUMBER")
    for text, told in (("pairs: [", "is no YAML (line"), ("repeats: 1\nrepeats: 2\n", "repeats is there twice")):
        Path("tiny.yaml").write_text(text)
        refused("bench", "--config", "tiny.yaml", told=told)
    Path("tiny.yaml").write_text("- 1\n")
    refused("bench", "--config", "tiny.yaml", told="a benchmark's config must be a mapping")


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
    drafts = {"own": {}, "small": {"draft": "draft"}, "exit": {"drafter": early}, "gpt": {"drafter": "ModelDrafter"}}
    more: dict[str, Any] = {"prompts": "shipped", "domains": ["code"], "num_prompts": 1, "num_other_prompts": 1}
    write("text.yaml", pairs={"text": {"target": "target", "drafts": drafts}}, repeats=1, **more)
    outcome = call("bench", "--config", "text.yaml", "--format", "json")
    assert outcome.code == 1, "a draft that cannot be made is a failed case"
    found = {(cell["method"], cell["draft"]): cell for cell in json.loads(outcome.out)[0]["cells"]}
    assert "needs a draft model" in found.pop(("speculative", "gpt"))["error"]
    names = [("standard", None), *(("speculative", name) for name in ("own", "small", "exit"))]
    names += [("generate", None), ("assisted", "small"), ("prompt_lookup", None)]
    assert set(found) == set(names)
    assert all(cell["error"] is None and cell["same_tokens"] is True for cell in found.values()), found
    settings = read("results/text").manifest["huggingface"]["text"]
    assert {each["method"] for each in settings} == {"generate", "assisted", "prompt_lookup"}
    number = next(i for i, row in enumerate(read("results/text").rows, start=1) if row.method == "prompt_lookup")
    assert succeed("bench", "--repeat", f"results/text:{number}").out.endswith("the same tokens\n")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_can_be_read(path: Path) -> None:
    found = read_config(path)
    assert found.name == path.stem and found.pairs
    assert not re.search("rolled|exit_layer: [0-9]+$", path.read_text(), re.MULTILINE)
