"""Laws of a benchmark: what its rows and manifest say, that it resumes however it was stopped, baselines."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from tiny_bench import PROMPTS, config, measured, pair

from lightning_specdec.bench.measure import Case
from lightning_specdec.bench.results import read
from lightning_specdec.bench.run import BenchPair
from lightning_specdec.decoding import PHASES
from lightning_specdec.drafters import ModelDrafter, NGramDrafter


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_row_says_what_its_run_did(tmp_path: Path) -> None:
    chosen = config(temperatures=[0, 1], num_draft_tokens=[1, 2], max_new_tokens=5, warmup=1)
    found = measured(tmp_path / "r", chosen)
    assert len(found.rows) == 2 * 2 * (1 + 2 * 2) and found.rows == read(tmp_path / "r").rows
    for row in found.rows:
        assert row.error is None and row.seed == row.repeat
        assert row.phase_seconds is not None and tuple(row.phase_seconds) == PHASES
        assert min(row.phase_seconds.values()) >= 0
        assert sum(row.phase_seconds.values()) == pytest.approx(row.seconds, rel=1e-9), (
            "the phases add up to the whole"
        )
        assert (
            row.prompt_new_tokens == [5, 5] and row.num_new_tokens == 10 and row.time_to_first_token
        )
        assert row.seconds >= sum(row.prompt_seconds)
        if row.method == "speculative":
            assert sum(row.histogram or []) == row.num_row_rounds == row.num_target_calls
            assert (row.num_accepted or 0) <= (row.num_tested or 0) <= (row.num_proposed or 0)
            assert row.num_accepted == row.num_new_tokens - row.num_row_rounds
        else:
            assert row.histogram is None and row.rule is None
        assert row.same_tokens is True, "ExactMatch gives standard decoding's tokens"
    order = [(row.temperature, row.repeat, row.draft, row.num_draft_tokens) for row in found.rows]
    each = [(None, None), ("model", 1), ("model", 2), ("ngram", 1), ("ngram", 2)]
    assert order == [(t, repeat, *one) for t in (0, 1) for repeat in range(2) for one in each], (
        "cases take turns"
    )
    made = found.manifest
    assert made["pairs"]["tiny"]["draft_parameters"]["ngram"] is None
    assert made["prompts"]["tiny"]["sequences"]["p0"] == cases.PROMPTS[0]
    assert {
        "threads",
        "processor",
        "cores",
        "memory_bytes",
        "cuda",
        "torch",
        "commit",
        "config",
    } <= made.keys()


def test_every_case_has_a_cell_and_those_that_would_do_the_same_are_measured_once() -> None:
    lossy = {"class_path": "EpsilonThreshold", "init_args": {"epsilon": 0.2}}
    chosen = config(
        temperatures=[0, 1],
        num_draft_tokens=[1, "auto"],
        rules=[lossy, "RejectionSampling", "ExactMatch"],
    )
    cells = [case.cell for group in pair().cases(chosen) for case in group]
    assert len(set(cells)) == len(cells) == (1 + 2 * 2 * 2) + (1 + 2 * 2 * 3)
    rules = [
        [case.row(0).rule for case in group if case.draft == "ngram"]
        for group in pair().cases(chosen)
    ]
    assert rules[0] == ["EpsilonThreshold(epsilon=0.2)"] * 2 + ["RejectionSampling"] * 2
    target = cases.MODELS["transformer"]()
    drafts = {"heads": cases.DRAFTERS["heads"](target)}
    most = drafts["heads"].max_draft_tokens or 0
    group = pair(target, drafts).cases(config({"heads": {}}, num_draft_tokens=list(range(1, 10))))[
        0
    ]
    assert [case.config.num_draft_tokens for case in group] == [None, *range(1, most + 1)]


def test_a_run_that_is_killed_ten_times_has_every_finished_row_once(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    given, chosen, path = pair(), config(repeats=100), tmp_path / "r" / "rows.jsonl"
    draw, context, kept = random.Random(0), multiprocessing.get_context("fork"), b""
    for _ in range(10):
        child = context.Process(target=measured, args=(tmp_path / "r", chosen, given))
        child.start()
        assert child.pid is not None
        far = len(kept) + draw.choice(
            (0, 0, 500, 1500, 3000)
        )  # a row has about 700 bytes; most are killed amid one
        while child.is_alive() and far and not (path.exists() and path.stat().st_size >= far):
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.01))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        content = path.read_bytes() if path.exists() else b""
        finished = content[: content.rfind(b"\n") + 1]
        assert finished.startswith(kept), "a finished row stays as it is"
        kept = finished
    assert kept.count(b"\n") > 5
    rows = measured(tmp_path / "r", chosen, given).rows
    assert path.read_bytes().startswith(kept)
    assert len({(row.cell, row.repeat) for row in rows}) == len(rows) == 3 * 100
    assert {row.same_tokens for row in rows} == {True}


def test_other_weights_or_prompts_under_one_name_are_refused(tmp_path: Path) -> None:
    measured(tmp_path / "r", config())
    target = cases.MODELS["rnn"]()
    near = cases.near(target)
    with torch.no_grad():
        next(near.parameters())[0, 0] += 1e-6
    drafts = {"model": ModelDrafter(near), "ngram": NGramDrafter()}
    others = {"target_sha256": pair(cases.MODELS["rnn"](3)), "model": pair(target, drafts)}
    others["prompts"] = pair(prompts={"sequences": PROMPTS["sequences"][:1]})
    for what, other in others.items():
        with pytest.raises(ValueError, match=f"another {what} of tiny"):
            measured(tmp_path / "r", config(), other)


# --- Hugging Face's baselines ---


def transformer(**more: Any) -> BenchPair:
    target = cases.MODELS["llama"]()
    return pair(
        target, {"model": ModelDrafter(cases.near(target)), "ngram": NGramDrafter()}, **more
    )


def case_of(given: BenchPair, method: str, **more: Any) -> Case:
    groups = given.cases(config(baselines=[method], **more))
    return next(case for case in groups[0] if case.method == method)


def test_hugging_faces_methods_give_the_same_tokens_with_each_window(tmp_path: Path) -> None:
    given = transformer()
    assert given.baseline is not None
    models = (given.baseline.target, given.baseline.assistants["model"])
    before = [
        deepcopy((model.generation_config.to_dict(), model.config.to_dict())) for model in models
    ]
    chosen = config(max_new_tokens=8, repeats=1, warmup=1, num_draft_tokens=[2, 3])
    rows = {
        (row.method, row.num_draft_tokens): row
        for row in measured(tmp_path / "r", chosen, given).rows
    }
    both = [
        (method, window)
        for method in ("speculative", "assisted", "prompt_lookup")
        for window in (2, 3)
    ]
    assert set(rows) == {("standard", None), ("generate", None), *both}
    for (method, _), row in rows.items():
        if method in ("generate", "assisted", "prompt_lookup"):
            assert row.error is None and row.same_tokens is True and row.prompt_new_tokens == [8, 8]
            assert row.phase_seconds is None and row.seconds >= sum(row.prompt_seconds)
    assert rows["generate", None].num_target_calls == 16 > rows["assisted", 3].num_target_calls
    assert [
        (model.generation_config.to_dict(), model.config.to_dict()) for model in models
    ] == before
    batches = measured(
        tmp_path / "b", config(batch_sizes=[2], baselines=["assisted"], repeats=1), given
    )
    (failed,) = [row for row in batches.rows if row.error]
    assert failed.method == "assisted" and "batch" in str(failed.error)


def test_generate_decodes_batches_stops_and_draws_as_it_is_told() -> None:
    given = transformer()
    generate = functools.partial(case_of, given, "generate", max_new_tokens=6)

    def tokens(seed: int = 0, **more: Any) -> list[list[int]]:
        return generate(**more).decode(seed=seed).tokens

    alone = tokens()
    assert tokens(batch_sizes=[2]) == alone
    given.eos = (alone[0][2],)
    assert tokens(batch_sizes=[2])[0] == alone[0][: alone[0].index(alone[0][2]) + 1]
    given.eos, state = (), torch.get_rng_state()
    outputs = [tokens(seed, temperatures=[5.0], batch_sizes=[2]) for seed in (0, 0, 1)]
    assert outputs[0] == outputs[1] != outputs[2] and torch.equal(torch.get_rng_state(), state)
