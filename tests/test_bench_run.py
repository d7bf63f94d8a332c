"""Laws of a benchmark's run: every cell is measured as often as was asked, once each, and says what it did."""

from __future__ import annotations

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
from tiny_bench import config, measured, plain, subject

from lightning_specdec.bench import run as run_module
from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.isolated import best_setting
from lightning_specdec.bench.matrix import Cell, Subject, cells, config_hash
from lightning_specdec.bench.phase_timer import gpu_utilization
from lightning_specdec.bench.prompts import Prompt
from lightning_specdec.bench.report.summary import summarize
from lightning_specdec.bench.results import read
from lightning_specdec.bench.ways import Prepared, decode, way_of
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
    assert {"torch", "threads", "commit", "processor", "config", "config_hash"} <= manifest.keys()


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


def test_the_hash_of_a_cell_changes_with_what_it_decodes() -> None:
    chosen = config(temperatures=[0, 1], num_draft_tokens=["1-3", "auto"], rules=["ExactMatch", "RejectionSampling"])
    before = hashes(chosen, subject())
    assert len(set(before)) == len(before) == 2 * (1 + 2 * 4 * 2) and hashes(chosen, subject()) == before
    target = cases.MODELS["rnn"]()
    near = cases.near(target)
    for change in ("target", "draft", "prompt", "seed"):
        other, guess, prompts = deepcopy(target), deepcopy(near), dict(tiny_bench.PROMPTS)
        if change == "prompt":
            prompts = {"sequences": [Prompt("p0", "sequences", (4,)), *prompts["sequences"][1:]]}
        elif change != "seed":
            changed = other if change == "target" else guess
            with torch.no_grad():
                next(changed.parameters())[0, 0] += 1e-6
        drafts = {"model": ModelDrafter(guess), "ngram": NGramDrafter()}
        again = config(**{**chosen.to_dict(), "seed": 9}) if change == "seed" else chosen
        after = hashes(again, subject(other, drafts, prompts=prompts))
        same = set(before) & set(after)
        if change == "draft":
            assert len(same) == 2 * (1 + 4 * 2), "standard decoding and look-up are what they were"
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


def test_a_window_that_chooses_for_itself_is_recorded(tmp_path: Path) -> None:
    rows = measured(tmp_path / "r", config(num_draft_tokens=["auto"])).rows
    own = [row["window"] for row in rows if row["way"] == "speculative"]
    assert all(each["kind"] == "AdaptiveWindow" and each["calibration"] for each in own)
    assert all(row["num_draft_tokens"] == "auto" for row in rows if row["way"] == "speculative")


def transformer(**more: Any) -> Subject:
    target = cases.MODELS["llama"]()
    return subject(target, {"model": ModelDrafter(cases.near(target)), "ngram": NGramDrafter()}, outside=True, **more)


def test_transformers_ways_give_the_same_tokens_at_their_best_setting(tmp_path: Path) -> None:
    given = transformer()
    assert given.outside is not None
    models = (given.outside.target.plain, given.outside.assistants["model"].plain)
    before = [(model.generation_config, model.config._attn_implementation) for model in models]
    chosen = config(max_new_tokens=8, repeats=1, warmup=1, num_draft_tokens=[3])
    found = measured(tmp_path / "r", chosen, given)
    rows = {row["way"]: row for row in found.rows}
    assert set(rows) == {"standard", "speculative", "generate", "assisted", "prompt_lookup"}
    for way in ("generate", "assisted", "prompt_lookup"):
        row, best = rows[way], next(each for each in found.manifest["outside"]["tiny"] if each["way"] == way)
        assert row["error"] is None and row["same_tokens"] is True and row["setting"] == best["setting"]
        fastest = min(best["tried"], key=lambda each: float(each["seconds"]))
        assert best["setting"].items() <= fastest.items() and len(best["tried"]) >= 2
        assert row["prompt_new_tokens"] == [8, 8] and all(len(each) == 8 for each in row["token_seconds"])
        assert row["phase_seconds"] is None and row["seconds"] >= sum(row["prompt_seconds"])
    assert rows["generate"]["num_target_calls"] == 16 > rows["assisted"]["num_target_calls"]
    assert [(model.generation_config, model.config._attn_implementation) for model in models] == before


def test_transformers_generates_batches_and_draws_as_it_is_told() -> None:
    given, chosen = transformer(), config(max_new_tokens=6)
    cell = Cell("tiny", "generate", "sequences", 0.0, 2)
    prepared = Prepared(setting=best_setting(cell, given, chosen)["setting"])
    alone = decode(way_of(cell, given, chosen, prepared, seed=0), tiny_bench.PROMPTS["sequences"], 1)
    batch = decode(way_of(cell, given, chosen, prepared, seed=0), tiny_bench.PROMPTS["sequences"], 2)
    assert batch.tokens == alone.tokens and batch.num_target_calls == 6
    eos = alone.tokens[0][2]
    given.stops = (eos,)
    cut = decode(way_of(cell, given, chosen, prepared, seed=0), tiny_bench.PROMPTS["sequences"], 2)
    assert cut.tokens[0] == alone.tokens[0][: alone.tokens[0].index(eos) + 1]
    given.stops = ()
    state = torch.get_rng_state()
    drawn = Cell("tiny", "generate", "sequences", 5.0, 2)
    outputs = [
        decode(way_of(drawn, given, chosen, prepared, seed=seed), tiny_bench.PROMPTS["sequences"], 2).tokens
        for seed in (0, 0, 1)
    ]
    assert outputs[0] == outputs[1] != outputs[2] and torch.equal(torch.get_rng_state(), state)


def test_assisting_a_batch_fails_by_name(tmp_path: Path) -> None:
    rows = measured(tmp_path / "r", config(batch_sizes=[2], outside=["assisted"], repeats=1), transformer()).rows
    failed = [row for row in rows if row["error"] is not None]
    assert [row["way"] for row in failed] == ["assisted"] and "batch" in failed[0]["error"]


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
