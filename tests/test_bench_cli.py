"""Laws of `lightning_specdec bench`: what is measured is kept and shown, goes on, repeats; bad input is one line."""

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

from lightning_specdec import SpeculativeDecoder, cli_bench_pairs, cli_bench_repeat, cli_bench_shown, manifest
from lightning_specdec.bench import compare as compare_module
from lightning_specdec.bench import measure as measure_module
from lightning_specdec.bench import results as results_module
from lightning_specdec.bench import run as run_module
from lightning_specdec.bench.config import read_config
from lightning_specdec.bench.report.analysis import cells_of
from lightning_specdec.bench.results import read
from lightning_specdec.cli_bench_shown import Bar
from lightning_specdec.drafters import ModelDrafter

RATIO = r"[0-9.]+ (?:\[[0-9.]+, [0-9.]+\]|\(no interval\))"
CONFIGS = Path(__file__).parent.parent / "configs" / "bench"
DRAFTS: dict[str, Any] = {"model": {}, "ngram": {"drafter": "NGramDrafter", "drafter_arguments": {"max_ngram": 2}}}
TINY: dict[str, Any] = {
    "pairs": {"rnn": {"ckpt": "tiny.ckpt", "drafts": DRAFTS}},
    **{"num_prompts": 2, "num_draft_tokens": [2], "max_new_tokens": 4, "repeats": 2, "warmup": 0, "threads": 1},
}


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory with a tiny checkpoint and a config for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("lightning_specdec.bench.isolated.SECONDS", 0.01)
    monkeypatch.setattr("lightning_specdec.bench.isolated.NUM_TRIES", 1)
    target = cases.MODELS["rnn"]()
    SpeculativeDecoder(target, ModelDrafter(cases.near(target)), prompts=cases.PROMPTS).save("tiny.ckpt")
    write("tiny.yaml")


def write(path: str, /, **more: Any) -> None:
    values = {key: value for key, value in (TINY | more).items() if value is not None}
    Path(path).write_text(yaml.safe_dump(values, sort_keys=False))


def test_a_benchmark_is_kept_and_shown_and_its_command_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = succeed("bench", "--config", "tiny.yaml")
    lines = shown.out.splitlines()
    assert lines[0].split()[:4] == ["pair", "domain", "T", "batch"] and "walltime_speedup" in lines[0]
    assert [line.split()[4] for line in lines[1:4]] == ["standard", "model", "ngram"] and shown.err == ""
    assert all(len(re.findall(r"[0-9.]+ ± [0-9.]+", line)) == 2 for line in lines[1:4]), "mean and deviation"
    assert [len(re.findall(RATIO, line)) for line in lines[1:4]] == [0, 1, 1], "an interval"
    rows = read("results/tiny").rows
    assert len(rows) == 6 and {row["num_prompts"] for row in rows} == {2}
    monkeypatch.setattr(run_module, "measure", lambda *more, **others: pytest.fail("measured again"))
    assert succeed("bench", "--config", "tiny.yaml").out == shown.out
    markdown = succeed("bench", "--config", "tiny.yaml", "--format", "markdown").out.splitlines()
    assert markdown[1].startswith("| --- |") and len({line.count("|") for line in markdown[:5]}) == 1
    table = list(csv.DictReader(io.StringIO(succeed("bench", "--config", "tiny.yaml", "--format", "csv").out)))
    document = json.loads(succeed("bench", "--config", "tiny.yaml", "--format", "json").out)[0]
    assert len(table) == len(document["cells"]) == 3 and table[1]["draft"] == "model"
    cell = document["cells"][1]
    of_cell = [row["seconds"] for row in rows if row["draft"] == "model"]
    assert cell["seconds_mean"] == pytest.approx(sum(of_cell) / 2) and float(table[1]["seconds_mean"]) > 0
    reported = next(each for each in cells_of(rows) if each.draft == "model").walltime_speedup
    assert reported is not None and cell["walltime_speedup"] == reported.value, "the report says the same"
    assert cell["walltime_speedup_low"] == reported.low < reported.high == float(table[1]["walltime_speedup_high"])
    assert document["manifest"]["config"]["max_new_tokens"] == 4
    shares = [float(table[1][f"seconds_per_token_p{share}"]) for share in (50, 95, 99)]
    assert 0 <= shares[0] <= shares[1] <= shares[2] == cell["seconds_per_token_p99"]


def test_ctrl_c_leaves_a_file_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    measure, runs = run_module.measure, []

    def interrupted(*more: Any, **others: Any) -> Any:
        runs.append(more)
        if len(runs) == 4:
            raise KeyboardInterrupt
        return measure(*more, **others)

    monkeypatch.setattr(run_module, "measure", interrupted)
    outcome = call("bench", "--config", "tiny.yaml")
    assert outcome.code == 130 and outcome.out.count("rnn ") >= 3
    assert outcome.err == "interrupted: what is finished stays, and the same command goes on from there\n"
    assert len(read("results/tiny").rows) == 3
    succeed("bench", "--config", "tiny.yaml")
    assert len(runs) == 4 + 3 and len(read("results/tiny").rows) == 6


def test_a_run_goes_on_at_another_commit_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_commit", lambda: "a1")
    succeed("bench", "--config", "tiny.yaml")
    path = Path("results/tiny/rows.jsonl")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    monkeypatch.setattr(manifest, "_commit", lambda: "b2")
    told = succeed("bench", "--config", "tiny.yaml")
    assert told.err == "WARNING: results/tiny goes on with commit a1 -> b2: each row says what it was measured by\n"
    assert [row["commit"] for row in read("results/tiny").rows] == ["a1"] * 3 + ["b2"] * 3
    assert told.out.endswith(", commit a1, then b2\n")
    monkeypatch.setattr(manifest, "_commit", lambda: "c3")
    assert succeed("bench", "--config", "tiny.yaml") == told._replace(err=""), "nothing was added"


def test_each_config_has_its_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before, chosen = torch.get_num_threads(), list[int]()
    write("two.yaml", threads=None)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    succeed("bench", "--config", "tiny.yaml", "two.yaml")
    assert chosen == [1, before], "of one that names none, those that torch began with"


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


def test_a_pair_that_cannot_be_loaded_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = {"torn": {"ckpt": "torn.ckpt", "drafts": DRAFTS}, **TINY["pairs"]}
    Path("torn.ckpt").write_bytes(Path("tiny.ckpt").read_bytes()[:1000])
    write("tiny.yaml", pairs=pairs)
    measure = run_module.measure
    with monkeypatch.context() as patch:
        fail(patch, run_module, "measure", KeyboardInterrupt(), lambda cell, *more: cell.draft == "ngram")
        assert call("bench", "--config", "tiny.yaml").code == 130 and run_module.measure is not measure
    assert read("results/tiny").manifest["failed_pairs"].keys() == {"torn"}, "kept at once"
    outcome = call("bench", "--config", "tiny.yaml")
    assert outcome.code == 1 and len(read("results/tiny").rows) == 6
    (told,) = outcome.err.splitlines()
    assert told.startswith("WARNING: failed: torn: ") and "torn.ckpt" in told
    assert told.removeprefix("WARNING: ") in succeed("report", "results/tiny").err
    compared = call("bench", "--config", "tiny.yaml", "--compare", "model", "ngram")
    assert compared.code == 1 and "torn.ckpt" in compared.err and "rnn" in compared.out
    Path("torn.ckpt").write_bytes(Path("tiny.ckpt").read_bytes())
    assert succeed("bench", "--config", "tiny.yaml").err == ""
    assert len(read("results/tiny").rows) == 12 and read("results/tiny").manifest["failed_pairs"] == {}


def test_configs_may_be_named_one_by_one() -> None:
    write("two.yaml", name="two")
    succeed("bench", "--config", "tiny.yaml", "--config", "two.yaml")
    assert len(read("results/tiny").rows) == len(read("results/two").rows) == 6


def test_a_prompts_file_is_looked_at_before_anything_is_written() -> None:
    Path("torn.jsonl").write_text('{"prompt": "a"}\n{"prompt": ')
    for name, told in (("absent.jsonl", "absent.jsonl"), ("torn.jsonl", "torn.jsonl, line 2: this is no JSON")):
        write("tiny.yaml", prompts=name)
        refused("bench", "--config", "tiny.yaml", told=told)


def test_fewer_prompts_than_were_asked_for_are_said() -> None:
    write("tiny.yaml", num_prompts=100)
    told = succeed("bench", "--config", "tiny.yaml").err.splitlines()
    assert re.fullmatch(r"WARNING: sequences: \d+ prompts of the 100 that num_prompts asks for", told[0])


def test_a_config_whose_only_pair_cannot_be_loaded_stops_no_other() -> None:
    Path("torn.ckpt").write_bytes(Path("tiny.ckpt").read_bytes()[:1000])
    write("alone.yaml", pairs={"torn": {"ckpt": "torn.ckpt", "drafts": DRAFTS}})
    for more in ((), ("--compare", "model", "ngram")):
        alone = call("bench", "--config", "alone.yaml", *more)
        assert alone.code == 2 and alone.out == "" and "torn.ckpt is truncated" in alone.err
        assert alone.err.startswith("error: ") and alone.err.count("\n") == 1
    both = call("bench", "--config", "alone.yaml", "tiny.yaml")
    assert both.code == 2 and both.err.startswith("WARNING: alone: torn.ckpt") and len(read("results/tiny").rows) == 6


def test_a_cell_that_failed_is_in_the_table_and_the_exit_code() -> None:
    write("tiny.yaml", rules=["EpsilonThreshold"])
    outcome = call("bench", "--config", "tiny.yaml")
    told = "1 cell of results/tiny failed, and what failed is not tried again: to try it, remove the lines that have an"
    assert outcome.code == 1 and outcome.err.startswith(f"WARNING: {told} error from results/tiny/rows.jsonl, or give")
    failed = next(line for line in outcome.out.splitlines() if " ngram " in line)
    assert "failed: EpsilonThreshold compares the draft's logits, and NGramDrafter has none" in failed
    assert "lossy" in next(line for line in outcome.out.splitlines() if " model " in line)


def test_text_for_a_spreadsheet_is_no_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, run_module, "measure", RuntimeError("=HYPERLINK(1)"), lambda cell, *more: cell.draft == "ngram")
    table = list(csv.DictReader(io.StringIO(call("bench", "--config", "tiny.yaml", "--format", "csv").out)))
    assert [line["error"] for line in table] == ["", "", "'=HYPERLINK(1)"]


def test_a_row_is_repeated_from_its_own_record() -> None:
    more = {"temperatures": [1], "num_draft_tokens": ["auto"], "rules": ["RejectionSampling"]}
    write("tiny.yaml", **more)
    succeed("bench", "--config", "tiny.yaml")
    os.rename("tiny.yaml", "away.yaml")
    rows = read("results/tiny").rows
    told = json.loads(succeed("bench", "--repeat", "results/tiny:5", "--format", "json").out)
    assert told["same_tokens"] is True and told["repeat"] == rows[4]["repeat"] == 1 and told["cell"] == rows[4]["cell"]
    assert told["seconds"][0] == rows[4]["seconds"] != told["seconds"][1]
    for place in (f"results/tiny/rows.jsonl:{rows[1]['cell']}", "results/tiny:1"):
        assert succeed("bench", "--repeat", place).out.endswith("the same tokens\n")
    path = Path("results/tiny/rows.jsonl")
    path.write_text(path.read_text().replace(rows[4]["tokens_sha256"], "0" * 64))
    outcome = call("bench", "--repeat", "results/tiny:5")
    assert outcome.code == 1 and outcome.out.endswith("OTHER TOKENS\n")
    SpeculativeDecoder(cases.MODELS["rnn"](4), ModelDrafter(cases.MODELS["rnn"](5)), prompts=[[1]]).save("tiny.ckpt")
    refused("bench", "--repeat", "results/tiny:5", told="target_sha256 and draft_sha256 is not what it was")


def fail(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, error: Any, when: Any) -> None:
    """Let calls of a function fail."""
    before = getattr(module, name)

    def failing(*more: Any, **others: Any) -> Any:
        if when(*more):
            raise error
        return before(*more, **others)

    monkeypatch.setattr(module, name, failing)


def test_a_row_that_failed_before_it_was_ready_is_made_ready_again(monkeypatch: pytest.MonkeyPatch) -> None:
    write("tiny.yaml", num_draft_tokens=["auto"], repeats=1)
    with monkeypatch.context() as patch:
        fail(patch, run_module, "warm_up", MemoryError("no memory"), lambda cell, *more: cell.draft == "ngram")
        assert call("bench", "--config", "tiny.yaml").code == 1
        assert read("results/tiny").rows[0]["error"] == "no memory" and read("results/tiny").rows[0]["window"] is None
        told = succeed("bench", "--repeat", "results/tiny:1")
        assert told.out.endswith("then  failed: no memory\n  now   failed: no memory\nit fails as it did\n")
    outcome = call("bench", "--repeat", "results/tiny:1")
    assert outcome.code == 1 and outcome.out.endswith("it fails no more\n")
    fail(monkeypatch, cli_bench_repeat, "measure", MemoryError(), lambda *more: True)
    outcome = call("bench", "--repeat", "results/tiny:2")
    assert outcome.code == 1 and outcome.out.endswith("now   failed: MemoryError\nIT FAILS NOW\n")


def damage(number: int, **more: Any) -> None:
    path = Path("results/tiny/rows.jsonl")
    lines = path.read_text().splitlines()
    lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | more)
    path.write_text("\n".join([*lines, ""]))


def test_a_row_whose_record_is_damaged_is_one_line() -> None:
    write("tiny.yaml", num_draft_tokens=["auto"], repeats=1)
    succeed("bench", "--config", "tiny.yaml")
    damage(1, domain="code")
    refused(
        "bench", "--repeat", "results/tiny:1", told="results/tiny:1 is damaged, or its manifest.json is (no 'code')"
    )
    damage(1, domain="sequences", seconds=None)
    refused("bench", "--repeat", "results/tiny:1", told="it did not fail and has no seconds")
    damage(2, window={"kind": "AdaptiveWindow"})
    refused("bench", "--repeat", "results/tiny:2", told="(no 'calibration')")
    damage(3, pair="other")
    refused("bench", "--repeat", "results/tiny:3", told="(no 'other')")


def test_two_drafts_are_set_against_each_other() -> None:
    write("tiny.yaml", repeats=5, num_draft_tokens=[1, 2])
    found = json.loads(
        succeed("bench", "--config", "tiny.yaml", "--compare", "model:2", "ngram", "--format", "json").out
    )
    assert len(found) == 1 and found[0]["first"].startswith("model 2") and found[0]["second"].startswith("ngram 1")
    low, high = found[0]["interval"]
    assert low <= found[0]["ratio"] <= high and found[0]["same_tokens"] is True
    assert [len(seconds) for seconds in found[0]["seconds"]] == [5, 5] and not Path("results").exists()
    shown = succeed("bench", "--config", "tiny.yaml", "--compare", "model:1", "standard").out
    assert re.search(f"model 1 ExactMatch +standard +{RATIO}", shown)


@pytest.mark.parametrize(("cut", "repeats"), [(1, []), (2, []), (4, [1]), (5, [2])])
def test_ctrl_c_compares_what_both_have_finished(monkeypatch: pytest.MonkeyPatch, cut: int, repeats: list[int]) -> None:
    write("tiny.yaml", repeats=3)
    measure, runs = compare_module.measure, []

    def interrupted(*more: Any, **others: Any) -> Any:
        runs.append(more)
        if len(runs) == cut:
            raise KeyboardInterrupt
        return measure(*more, **others)

    monkeypatch.setattr(compare_module, "measure", interrupted)
    outcome = call("bench", "--config", "tiny.yaml", "--compare", "model", "ngram", "--format", "json")
    what = "what both have finished is compared" if repeats else "nothing was compared"
    assert outcome.code == 130 and outcome.err == f"interrupted: {what}\n"
    assert [len(each["seconds"][0]) for each in outcome.json] == repeats
    runs.clear()
    shown = call("bench", "--config", "tiny.yaml", "--compare", "model", "ngram")
    assert bool(shown.out) == bool(repeats), "no bare headings"


def test_what_fails_in_one_group_leaves_the_comparisons_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    write("tiny.yaml", temperatures=[0, 0.5, 1], repeats=1)
    fail(monkeypatch, compare_module, "measure", MemoryError("too wide"), lambda cell, *more: cell.temperature == 0.5)
    outcome = call("bench", "--config", "tiny.yaml", "--compare", "model", "ngram", "--format", "json")
    assert [each["temperature"] for each in outcome.json] == [0, 1] and outcome.code == 1
    assert outcome.err == "WARNING: rnn, sequences, 0.5, batch 1: model 2 ExactMatch failed: too wide\n"


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_comparison_warms_up_as_its_config_says(monkeypatch: pytest.MonkeyPatch, warmup: int) -> None:
    write("tiny.yaml", repeats=1, warmup=warmup)
    decode, runs = measure_module.decode, list[Any]()

    def counted(*more: Any) -> Any:
        runs.append(more)
        return decode(*more)

    monkeypatch.setattr(measure_module, "decode", counted)
    succeed("bench", "--config", "tiny.yaml", "--compare", "model", "ngram")
    assert len(runs) == 2 * (warmup + 1)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"temperature": [0]}, "tiny.yaml: unknown entry temperature: did you mean temperatures?"),
        ({"pairs": None}, "tiny.yaml: pairs is missing"),
        ({"pairs": {"rnn": {"ckpt": "tiny.ckpt", "draft": {}}}}, "unknown entry pairs.rnn.draft: did you mean drafts?"),
        ({"pairs": {"rnn": {}}}, "pairs.rnn must name its models by one of ckpt, pair and target, got none"),
        ({"pairs": {"rnn": {"ckpt": "gone.ckpt"}}}, "gone.ckpt: No such file or directory"),
        ({"pairs": {"rnn": {"target": "./gone"}}}, "there is no directory ./gone"),
        ({"pairs": {"rnn": {"ckpt": "tiny.ckpt", "dtype": "float33"}}}, "pairs.rnn: dtype must be among float32, "),
        ({"pairs": {"rnn": {"pair": "rn"}}}, "there is no pair 'rn'"),
        ({"pairs": {"a/b": {"ckpt": "tiny.ckpt"}}}, "pairs must be a name of letters"),
        ({"repeats": 0}, "tiny.yaml: repeats must be at least 1, got 0"),
        ({"repeats": "many"}, "repeats must be an integer at least 1, got 'many'"),
        ({"rolled": 1}, "rolled must be true or false, got 1"),
        ({"temperatures": [-1]}, "temperatures must be in [0, inf), got -1"),
        ({"temperatures": []}, "temperatures is empty"),
        ({"num_draft_tokens": ["8-2"]}, "num_draft_tokens must be ranges that rise"),
        ({"num_draft_tokens": ["fast"]}, "num_draft_tokens must be integers, ranges such as 1-8, or auto, got 'fast'"),
        ({"num_draft_tokens": [2, "1-3"]}, "num_draft_tokens names 2 twice"),
        ({"rules": ["Luck"]}, "rules must be among ExactMatch"),
        ({"rules": [{"ExactMatch": {"epsilon": 1}}]}, "ExactMatch takes no such arguments as epsilon"),
        ({"outside": ["vllm"]}, "outside must be among generate"),
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
    refused("bench", told="say what is to be measured: --config FILE")
    refused("bench", "--config", "gone.yaml", told="gone.yaml: No such file or directory")
    refused("bench", "--config", "tiny.yaml", "tiny.yaml", told="two configs are called tiny")
    refused("bench", "--config", "tiny.yaml", "--compare", "model", told="--compare takes two names")
    refused("bench", "--config", "tiny.yaml", "--compare", "model", "other", told="'other' is nothing that this config")
    refused("bench", "--config", "tiny.yaml", "--compare", "model:²", "ngram", told="'model:²' is nothing that this")
    refused("bench", "--config", "tiny.yaml", "--compare", "model", "model:2", told="are the same")
    refused("bench", "--repeat", "results/tiny:1", told="results/tiny holds no results")
    refused("bench", "--repeat", "1", told="--repeat takes DIRECTORY:NUMBER")
    Path("tiny.yaml").write_text("pairs: [")
    refused("bench", "--config", "tiny.yaml", told="tiny.yaml is no YAML (line 1")
    Path("tiny.yaml").write_text("repeats: 1\nrepeats: 2\n")
    refused("bench", "--config", "tiny.yaml", told="tiny.yaml: repeats is there twice")
    Path("tiny.yaml").write_text("- 1\n")
    refused("bench", "--config", "tiny.yaml", told="tiny.yaml: a benchmark's config must be a mapping")


def test_another_config_under_the_same_name_is_refused() -> None:
    succeed("bench", "--config", "tiny.yaml")
    write("other.yaml", name="tiny", seed=1)
    refused("bench", "--config", "other.yaml", told="config.seed was 0 there and is 1 now")
    succeed("bench", "--config", "other.yaml", "--name", "second")
    assert sorted(os.listdir("results")) == ["second", "tiny"]


def test_a_draft_that_cannot_be_loaded_for_want_of_memory_is_a_failed_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    load = cli_bench_pairs.load_decoder

    def full(options: Any) -> Any:
        if options.drafter is None:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory\n")
        return load(options)

    with monkeypatch.context() as patch:
        patch.setattr(cli_bench_pairs, "load_decoder", full)
        outcome = call("bench", "--config", "tiny.yaml")
    assert outcome.code == 1 and "can't allocate memory" in next(x for x in outcome.out.splitlines() if " model " in x)
    rows = read("results/tiny").rows
    assert [row["draft"] for row in rows if row["error"] is None] == [None, "ngram"] * 2
    number = next(i for i, row in enumerate(rows, start=1) if row["error"] is not None)
    outcome = call("bench", "--repeat", f"results/tiny:{number}")
    assert outcome.code == 1 and outcome.out.endswith("it fails no more\n"), "there is memory now"
    fail(monkeypatch, cli_bench_pairs, "load_decoder", AssertionError(), lambda options: options.drafter is None)
    assert call("bench", "--config", "tiny.yaml").code == 1, "it is not loaded again"
    assert read("results/tiny").rows == rows


def test_a_pretrained_pair_runs_beside_transformers() -> None:
    tiny_models.write_text_model(Path("target"))
    tiny_models.write_text_model(Path("draft"), seed=2, num_hidden_layers=1)
    drafts = {"own": {}, "small": {"draft": "draft"}, "exit": {"drafter": "EarlyExitDrafter", "exit_layer": 1}}
    drafts["gpt"] = {"drafter": "ModelDrafter"}
    pairs = {"text": {"target": "target", "drafts": drafts}}
    write("text.yaml", pairs=pairs, prompts="shipped", domains=["code"], num_prompts=1, num_other_prompts=1, repeats=1)
    outcome = call("bench", "--config", "text.yaml", "--format", "json")
    assert outcome.code == 1, "a draft that cannot be made is a failed cell"
    cells = {(cell["way"], cell["draft"]): cell for cell in json.loads(outcome.out)[0]["cells"]}
    assert cells["speculative", "gpt"]["error"] == "ModelDrafter needs a model: give a draft"
    names = [("standard", None), *(("speculative", name) for name in ("own", "small", "exit"))]
    names += [("generate", None), ("assisted", "small"), ("prompt_lookup", None)]
    assert set(cells) == {*names, ("speculative", "gpt")}
    for name in names:
        assert cells[name]["error"] is None and cells[name]["same_tokens"] is True, (name, cells[name])
    number = next(i for i, row in enumerate(read("results/text").rows, start=1) if row["way"] == "generate")
    path = Path("results/text/rows.jsonl")
    lines = path.read_text().splitlines()
    failed = json.loads(lines[number - 1]) | {"error": "no memory", "setting": None}
    path.write_text("\n".join([*lines[: number - 1], json.dumps(failed), *lines[number:], ""]))
    assert call("bench", "--repeat", f"results/text:{number}").out.endswith("it fails no more\n")
    settings = read("results/text").manifest["outside"]["text"]
    assert {each["way"] for each in settings} == {"generate", "assisted", "prompt_lookup"}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_can_be_read(path: Path) -> None:
    found = read_config(path)
    assert found.name == path.stem and found.pairs


def test_the_bar_says_how_long_the_rest_will_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(cli_bench_shown.time, "monotonic", lambda: clock[0])
    bar = Bar()
    bar.plan(10, pairs_left=0)
    bar.say("standard")
    clock[0] = 20.0
    bar.advance(2)
    assert capsys.readouterr().err == "", "where nobody waits, no line before its time"
    assert bar.line() == "runs 2/10 |####....................| 0:20<1:20 standard"
    clock[0] = 31.0
    bar.advance(1)
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.startswith("runs 3/10 |")
    bar.plan(10, pairs_left=1)
    assert "0:00<?, then 1 pair " in bar.line()
