"""Laws of a benchmark's run: every cell is measured as often as was asked, once each, and says what it did."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import random
import signal
import time
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import pytest
import tiny_bench
import torch
from tiny_bench import PROMPTS, config, measured, plain, subject

from lightning_specdec.bench import isolated, remembered
from lightning_specdec.bench import results as results_module
from lightning_specdec.bench import run as run_module
from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.matrix import Cell, cells, config_hash
from lightning_specdec.bench.prompts import Prompt
from lightning_specdec.bench.report.summary import summarize
from lightning_specdec.bench.results import read
from lightning_specdec.bench.subject import Subject
from lightning_specdec.bench.usage import gpu_utilization
from lightning_specdec.drafters import ModelDrafter, NGramDrafter
from lightning_specdec.inference import PHASES

ALPHAS, CALLS = run_module.alphas, run_module.timed_calls


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What comes before the cells takes longer than they do."""
    monkeypatch.setattr(run_module, "timed_calls", lambda *more: {})
    monkeypatch.setattr(run_module, "alphas", lambda *more: [])
    monkeypatch.setattr("lightning_specdec.bench.isolated.SECONDS", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_row_says_what_its_run_did(tmp_path: Path) -> None:
    chosen = config(temperatures=[0, 1], num_draft_tokens=[1, 2], max_new_tokens=5, rolled=True, warmup=1)
    found = measured(tmp_path / "r", chosen, subject(rolled=True))
    assert len(found.rows) == 2 * 2 * (2 + 2 * 2) and found.rows == read(tmp_path / "r").rows
    for row in found.rows:
        assert row["error"] is None and row["num_prompts"] == 2 and row["seed"] == row["repeat"]
        phases = row["phase_seconds"]
        assert tuple(phases) == PHASES and min(phases.values()) >= 0
        assert sum(phases.values()) == pytest.approx(row["seconds"], rel=1e-9), "the phases add up to the whole"
        for steps, seconds, first in zip(
            row["token_seconds"], row["prompt_seconds"], row["time_to_first_token"], strict=True
        ):
            assert len(steps) == 5 and sum(steps) == pytest.approx(seconds, abs=1e-5) and steps[0] == first
        assert row["seconds"] >= sum(row["prompt_seconds"])
        assert row["num_new_tokens"] == sum(row["prompt_new_tokens"]) == 10
        if row["way"] == "speculative":
            assert sum(row["histogram"]) == row["num_row_rounds"] == row["num_target_calls"]
            assert sum(row["tested_at"]) == row["num_tested"] <= row["num_proposed"]
            assert sum(row["accepted_at"]) == row["num_accepted"] == row["num_new_tokens"] - row["num_row_rounds"]
            assert all(kept <= tested for kept, tested in zip(row["accepted_at"], row["tested_at"], strict=True))
            assert len(row["tested_at"]) <= row["num_draft_tokens"]
        else:
            assert row["histogram"] is None and row["rule"] is None
        assert row["same_tokens"] is True, "ExactMatch gives standard decoding's tokens"
    memory = [row["peak_memory_bytes"] for row in found.rows if row["draft"] == "model"]
    assert all(min(each.values()) > 10**6 for each in memory if isinstance(each, dict))
    assert any(sum(row["tested_at"] or []) > 0 for row in found.rows if row["draft"] == "model")


def test_the_manifest_says_what_a_prediction_starts_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "timed_calls", CALLS)
    monkeypatch.setattr(run_module, "alphas", ALPHAS)
    manifest = measured(tmp_path / "r", config(num_draft_tokens=[1, 3])).manifest
    calls = manifest["calls"]["tiny"]
    assert calls["one_token_seconds"] > 0 and set(calls["wide_seconds"]) == {"2", "4"}
    assert set(calls["draft_step_seconds"]) == {"model", "ngram"}
    tested = next(each for each in manifest["alpha_at"]["tiny"] if each["draft"] == "model")
    assert manifest["alpha"]["tiny"]["model"]["sequences"] == tested["num_accepted"] / tested["num_tested"]
    assert manifest["pairs"]["tiny"]["draft_parameters"]["ngram"] is None
    assert manifest["prompts"]["tiny"]["sequences"]["p0"] == cases.PROMPTS[0]
    machine = {"threads", "processor", "cores", "memory_bytes", "cuda", "torch"}
    assert machine | {"commit", "config", "config_hash"} <= manifest.keys()


@pytest.mark.parametrize("others", [tiny_bench.OTHERS, {}], ids=["others", "none"])
def test_what_a_prediction_starts_from_is_taken_from_no_prompt_that_is_measured(
    monkeypatch: pytest.MonkeyPatch, others: Any
) -> None:
    given, decoded = subject(others=others), isolated.autoregressive_decode
    read: list[list[int]] = []

    def watched(target: Any, prompt: list[int], **more: Any) -> Any:
        read.append(prompt)
        return decoded(target, prompt, **more)

    monkeypatch.setattr(isolated, "autoregressive_decode", watched)
    CALLS(given, config())
    assert len(read) == 4 and all(tuple(each) not in {p.tokens for p in PROMPTS["sequences"]} for each in read)


def test_the_ways_take_turns(tmp_path: Path) -> None:
    rows = measured(tmp_path / "r", config(repeats=3, temperatures=[0, 1])).rows
    ways = [(row["temperature"], row["repeat"], row["draft"]) for row in rows]
    assert ways == [(t, repeat, draft) for t in (0, 1) for repeat in range(3) for draft in (None, "model", "ngram")]


CHANGES: dict[str, Any] = {
    "name": "other",
    "pairs": {"tiny": {"ckpt": "tiny.ckpt", "drafts": {"model": {}}}},
    "prompts": "mine.jsonl",
    "domains": ["code"],
    "num_prompts": 5,
    "other_prompts": "shipped",
    "num_other_prompts": 5,
    "num_draft_tokens": [3],
    "temperatures": [0.5],
    "batch_sizes": [2],
    "rules": ["RejectionSampling"],
    "rolled": True,
    "outside": [],
    "max_new_tokens": 4,
    "ignore_eos": True,
    "repeats": 3,
    "warmup": 1,
    "seed": 1,
    "device": "cuda",
    "threads": 2,
}


def test_every_setting_is_among_the_changes() -> None:
    assert set(CHANGES) == set(config().to_dict())


@pytest.mark.parametrize("name", CHANGES)
def test_the_hash_of_a_config_changes_with_any_setting_and_not_with_their_order(name: str) -> None:
    assert config_hash(config(**{name: CHANGES[name]})) != config_hash(config())
    turned = {key: plain()[key] for key in reversed(plain())}
    turned["pairs"] = {"tiny": {"drafts": {"ngram": {"drafter": "NGramDrafter"}, "model": {}}, "ckpt": "tiny.ckpt"}}
    assert config_hash(BenchConfig.from_dict(turned)) == config_hash(config())
    assert BenchConfig.from_dict(json.loads(json.dumps(config().to_dict()))) == config()


def hashes(chosen: BenchConfig, given: Subject) -> list[str]:
    return [cell.hash for group in cells(chosen, given) for cell in group]


def test_rules_that_would_do_the_same_are_measured_once() -> None:
    lossy: Any = {"EpsilonThreshold": {"epsilon": 0.2}}
    chosen = config(temperatures=[0, 1], num_draft_tokens=[2], rules=[lossy, "RejectionSampling", "ExactMatch"])
    rules = [
        [cell.rule.label for cell in group if cell.rule and cell.draft == "ngram"] for group in cells(chosen, subject())
    ]
    assert [len(each) for each in rules] == [2, 3] and rules[0] == rules[1][:2]


def test_the_hash_of_a_cell_changes_with_what_it_decodes() -> None:
    chosen = config(temperatures=[0, 1], num_draft_tokens=["1-3", "auto"], rules=["ExactMatch", "RejectionSampling"])
    before = hashes(chosen, subject())
    assert len(set(before)) == len(before) == (1 + 2 * 4) + (1 + 2 * 4 * 2) and hashes(chosen, subject()) == before
    target = cases.MODELS["rnn"]()
    near = cases.near(target)
    for change in ("target", "draft", "prompt", "seed", "ignore_eos"):
        other, guess, prompts = deepcopy(target), deepcopy(near), dict(tiny_bench.PROMPTS)
        if change == "prompt":
            prompts = {"sequences": [Prompt("p0", "sequences", (4,)), *prompts["sequences"][1:]]}
        elif change in ("target", "draft"):
            changed = other if change == "target" else guess
            with torch.no_grad():
                next(changed.parameters())[0, 0] += 1e-6
        drafts = {"model": ModelDrafter(guess), "ngram": NGramDrafter()}
        values: dict[str, Any] = {"seed": 9, "ignore_eos": True}
        again = config(**chosen.to_dict() | {name: value for name, value in values.items() if name == change})
        after = hashes(again, subject(other, drafts, prompts=prompts))
        same = set(before) & set(after)
        if change == "draft":
            assert len(same) == (1 + 4) + (1 + 4 * 2), "standard decoding and look-up are what they were"
        else:
            assert not same


def test_windows_are_lists_and_ranges_and_no_more_than_a_draft_can() -> None:
    assert config(num_draft_tokens="1-3").num_draft_tokens == (1, 2, 3)
    assert config(num_draft_tokens=["2-4", 8, "auto"]).num_draft_tokens == (2, 3, 4, 8, "auto")
    target = cases.MODELS["transformer"]()
    drafts = {"heads": cases.DRAFTERS["heads"](target)}
    most = drafts["heads"].max_draft_tokens
    group = cells(config({"heads": {}}, num_draft_tokens="1-9"), subject(target, drafts))[0]
    assert [cell.num_draft_tokens for cell in group] == [None, *range(1, (most or 0) + 1)]


def count_runs(
    monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None, error: Any = KeyboardInterrupt
) -> list[Any]:
    """The cells and repeats that are measured from now on; the one of that number is interrupted."""
    runs: list[Any] = []
    measure = run_module.measure

    def counted(cell: Cell, *more: Any, repeat: int, **others: Any) -> Any:
        if len(runs) == stop_at:
            raise error
        runs.append((cell.hash, repeat))
        return measure(cell, *more, repeat=repeat, **others)

    monkeypatch.setattr(run_module, "measure", counted)
    return runs


@pytest.mark.parametrize("number", [0, 1, 4, 5])
def test_a_run_that_was_interrupted_goes_on_and_runs_no_finished_cell_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    given, measure = subject(), run_module.measure
    runs = count_runs(monkeypatch, number)
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path / "r", config(), given)
    left = (tmp_path / "r" / "rows.jsonl").read_bytes()
    assert left.count(b"\n") == number and left[-1:] in (b"", b"\n")
    monkeypatch.setattr(run_module, "measure", measure)
    again = count_runs(monkeypatch)
    rows = measured(tmp_path / "r", config(), given).rows
    assert (tmp_path / "r" / "rows.jsonl").read_bytes().startswith(left)
    assert len(again) == 6 - number and not set(runs) & set(again)
    assert len({(row["cell"], row["repeat"]) for row in rows}) == len(rows) == 6
    measured(tmp_path / "r", config(), given)
    assert len(again) == 6 - number, "nothing is left to do"


def test_a_run_that_is_killed_twenty_times_has_every_finished_row_once(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    given, chosen, path = subject(), config(repeats=40), tmp_path / "r" / "rows.jsonl"
    draw, context, kept = random.Random(0), multiprocessing.get_context("fork"), b""
    for _ in range(20):
        child = context.Process(target=measured, args=(tmp_path / "r", chosen, given))
        child.start()
        assert child.pid is not None
        far = len(kept) + draw.choice((0, 0, 500, 1500, 3000))  # a row has about 1000 bytes; most are killed amid one
        while child.is_alive() and far and not (path.exists() and path.stat().st_size >= far):
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.01))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
        content = path.read_bytes() if path.exists() else b""
        finished = content[: content.rfind(b"\n") + 1]
        assert finished.startswith(kept), "a finished row stays as it is"
        kept = finished
    assert 5 < kept.count(b"\n") < 100, "cases that tell something"
    rows = measured(tmp_path / "r", chosen, given).rows
    assert path.read_bytes().startswith(kept)
    places = [(row["cell"], row["repeat"]) for row in rows]
    assert len(places) == len(set(places)) == 3 * 40
    assert {row["same_tokens"] for row in rows} == {True}
    assert sorted(each.name for each in path.parent.iterdir()) == ["manifest.json", "rows.jsonl"]


@pytest.mark.parametrize("name", ["timed_calls", "alphas", "_write_manifest"])
def test_a_run_that_is_killed_while_it_learns_what_a_pair_is_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    torch.set_num_threads(1)
    given, module = subject(), results_module if name == "_write_manifest" else run_module
    written: list[int] = []

    def killed(*more: Any) -> Any:
        written.append(1)
        if name != "_write_manifest" or len(written) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*more)

    write = getattr(module, name)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, killed)
        child = multiprocessing.get_context("fork").Process(target=measured, args=(tmp_path / "r", config(), given))
        child.start()
        child.join()
    assert child.exitcode == -signal.SIGKILL
    found = measured(tmp_path / "r", config(), given)
    assert len(found.rows) == len({(row["cell"], row["repeat"]) for row in found.rows}) == 6
    assert all("tiny" in found.manifest[each] for each in ("pairs", "prompts", "calls", "alpha", "alpha_at"))


def test_a_cell_that_fails_is_shown_with_its_error_and_stops_no_other(tmp_path: Path) -> None:
    chosen = config({"ngram": {}, "torn": {}}, rules=["ExactMatch", "EpsilonThreshold"])
    given = subject(drafts={"ngram": NGramDrafter(), "torn": "this draft does not fit"})
    rows = measured(tmp_path / "r", chosen, given).rows
    failed = [(row["draft"], row["rule"], row["error"]) for row in rows if row["error"] is not None]
    assert [each[:2] for each in failed] == [
        ("ngram", "EpsilonThreshold"),
        ("torn", "ExactMatch"),
        ("torn", "EpsilonThreshold"),
    ], "once each, however many repeats there are"
    assert "NGramDrafter has none" in failed[0][2] and failed[1][2] == "this draft does not fit"
    assert all(row["seconds"] is None and row["same_tokens"] is None for row in rows if row["error"] is not None)
    assert sum(row["error"] is None for row in rows) == 2 * 2
    lines = summarize(rows)
    assert [line["error"] is None for line in lines] == [True, True, False, False, False]
    assert len(measured(tmp_path / "r", chosen, given).rows) == len(rows), "and is not tried again"


@pytest.mark.parametrize("way", ["loaded", "made ready"])
def test_a_draft_that_no_memory_is_left_for_fails_alone_and_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    def full(*more: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    told, chosen, whole, path = "CUDA out of memory. Tried to allocate 2 GiB", config(), subject(), tmp_path / "r"
    with monkeypatch.context() as patch:
        patch.setattr(ModelDrafter, "fused", full)
        poor = subject() if way == "made ready" else subject(drafts={"model": told, "ngram": NGramDrafter()})
    count_runs(monkeypatch, 4)
    with pytest.raises(KeyboardInterrupt):
        measured(path, chosen, poor)
    rows = read(path).rows
    assert [(row["draft"], row["error"]) for row in rows] == [
        (None, None),
        ("model", told),
        ("ngram", None),
        (None, None),
    ]
    monkeypatch.undo()
    monkeypatch.setattr(run_module, "timed_calls", lambda given, *more: {"ready": sorted(ready(given))})
    monkeypatch.setattr(run_module, "alphas", lambda *more: [])
    again = measured(path, chosen, whole)  # there is memory now
    assert again.rows[:4] == rows and [row["draft"] for row in again.rows[4:]] == ["ngram"]
    assert again.manifest["pairs"]["tiny"]["draft_sha256"]["model"] is None, "it was not even loaded"
    lines = (path / "rows.jsonl").read_text().splitlines(keepends=True)
    (path / "rows.jsonl").write_text("".join([lines[0], *lines[2:]]))
    tried = measured(path, chosen, whole)
    assert [(row["draft"], row["error"]) for row in tried.rows[4:]] == [("model", None)] * 2, "its line was removed"
    assert tried.manifest["pairs"]["tiny"] == whole.facts
    assert tried.manifest["calls"]["tiny"]["ready"] == ["model", "ngram"]


def ready(given: Subject) -> list[str]:
    return [name for name, drafter in given.drafts.items() if not isinstance(drafter, str)]


def test_what_a_draft_has_finished_stays_its_own_when_it_cannot_be_loaded_again(tmp_path: Path) -> None:
    target = cases.MODELS["transformer"]()
    heads = {"heads": cases.DRAFTERS["heads"](target)}
    chosen, whole = config({"heads": {}}, num_draft_tokens=[1, 9], repeats=1), subject(target, heads)
    before = measured(tmp_path / "r", chosen, whole).rows
    poor = subject(target, {"heads": "there is no memory"})
    assert measured(tmp_path / "r", chosen, poor).rows == before and len(before) == 3
    path = tmp_path / "r" / "rows.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    failed = measured(tmp_path / "r", chosen, poor).rows[2]
    assert failed["cell"] == before[2]["cell"] and failed["error"] == "there is no memory"
    assert len(measured(tmp_path / "r", chosen, whole).rows) == 3, "and is not tried again"


def test_a_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file, where there should be a directory")
    monkeypatch.setattr(remembered, "calibrate", functools.partial(remembered.calibrate, seconds=0.01))
    rows = measured(tmp_path / "r", config(num_draft_tokens=["auto"], repeats=1)).rows
    assert all(row["error"] is None for row in rows)
    told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(told) == 1 and "cannot be written (Not a directory): what calls cost is not remembered" in told[0]


def test_a_window_that_chooses_for_itself_is_recorded(tmp_path: Path) -> None:
    rows = measured(tmp_path / "r", config(num_draft_tokens=["auto"])).rows
    own = [row["window"] for row in rows if row["way"] == "speculative"]
    assert all(each["kind"] == "AdaptiveWindow" and each["calibration"] for each in own)
    assert all(row["num_draft_tokens"] == "auto" for row in rows if row["way"] == "speculative")


def test_other_weights_under_one_name_are_refused(tmp_path: Path) -> None:
    measured(tmp_path / "r", config())
    with pytest.raises(ValueError, match="another target_sha256 of tiny"):
        measured(tmp_path / "r", config(), subject(cases.MODELS["rnn"](3)))


def test_how_busy_a_gpu_was_is_what_its_tool_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$@" > told\necho 50\necho "[N/A]"\necho 70\n')
    tool.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="ab-cd"))
    with gpu_utilization(torch.device("cuda")) as shares:
        while not (tmp_path / "told").exists():
            time.sleep(0.001)
        time.sleep(0.02)
    assert shares == [0.5, 0.7] and "--id=GPU-ab-cd" in (tmp_path / "told").read_text()
    with gpu_utilization(torch.device("cpu")) as shares:
        pass
    assert shares == []
