"""Laws of a benchmark: what its rows and manifest contain, that it resumes however it was stopped,
and Hugging Face's baselines."""

from __future__ import annotations

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
from lightning_specdec.bench.records import Record
from lightning_specdec.bench.results import read
from lightning_specdec.bench.run import BenchPair
from lightning_specdec.decoding import PHASES, merge_results
from lightning_specdec.drafters import ModelDrafter, NGramDrafter


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def check_row(row: Record) -> None:
    """A row of two prompts with 5 new tokens each."""
    assert row.error is None
    assert row.seed == row.repeat
    assert row.phase_seconds is not None
    assert tuple(row.phase_seconds) == PHASES
    assert min(row.phase_seconds.values()) >= 0
    assert sum(row.phase_seconds.values()) == pytest.approx(row.seconds, rel=1e-9), (
        "the phases add up to the whole"
    )
    assert row.prompt_new_tokens == [5, 5]
    assert row.num_new_tokens == 10
    assert row.time_to_first_token
    assert row.seconds >= sum(row.prompt_seconds)
    assert row.same_tokens is True, "ExactMatch generates standard decoding's tokens"


def check_counts(row: Record) -> None:
    if row.method == "standard":
        assert row.histogram is None
        assert row.rule is None
        return
    assert row.histogram is not None
    assert row.num_accepted is not None
    assert row.num_tested is not None
    assert row.num_proposed is not None
    assert sum(row.histogram) == row.num_row_rounds == row.num_target_calls
    assert row.num_accepted <= row.num_tested <= row.num_proposed
    assert row.num_accepted == row.num_new_tokens - row.num_row_rounds


def test_a_row_records_what_its_run_did(tmp_path: Path) -> None:
    bench_config = config(temperatures=[0, 1], num_draft_tokens=[1, 2], max_new_tokens=5, warmup=1)
    results = measured(tmp_path / "r", bench_config)
    assert len(results.rows) == 2 * 2 * (1 + 2 * 2)
    assert results.rows == read(tmp_path / "r").rows
    for row in results.rows:
        check_row(row)
        check_counts(row)


def test_cases_take_turns(tmp_path: Path) -> None:
    bench_config = config(temperatures=[0, 1], num_draft_tokens=[1, 2])
    rows = measured(tmp_path / "r", bench_config).rows
    order = [(row.temperature, row.repeat, row.draft, row.num_draft_tokens) for row in rows]
    choices = [(None, None), ("model", 1), ("model", 2), ("ngram", 1), ("ngram", 2)]
    expected_order = []
    for temperature in (0, 1):
        for repeat in range(2):
            expected_order += [(temperature, repeat, *choice) for choice in choices]
    assert order == expected_order


def test_the_manifest_records_models_prompts_and_machine(tmp_path: Path) -> None:
    manifest = measured(tmp_path / "r", config()).manifest
    assert manifest["pairs"]["tiny"]["draft_parameters"]["ngram"] is None
    assert manifest["prompts"]["tiny"]["sequences"]["p0"] == cases.PROMPTS[0]
    machine_entries = {"threads", "processor", "cores", "memory_bytes", "cuda", "torch", "commit"}
    assert machine_entries | {"config"} <= manifest.keys()


def test_every_case_has_a_cell() -> None:
    bench_config = rules_config()
    cells = [case.cell for group in pair().cases(bench_config) for case in group]
    assert len(cells) == (1 + 2 * 2 * 2) + (1 + 2 * 2 * 3)
    assert len(set(cells)) == len(cells)


def test_rules_with_the_same_outcome_are_measured_once() -> None:
    greedy_group, drawn_group = pair().cases(rules_config())
    greedy_rules = [case.row(0).rule for case in greedy_group if case.draft == "ngram"]
    drawn_rules = [case.row(0).rule for case in drawn_group if case.draft == "ngram"]
    lossy = "EpsilonThreshold(epsilon=0.2)"
    assert greedy_rules == [lossy] * 2 + ["RejectionSampling"] * 2
    assert drawn_rules == [lossy] * 2 + ["RejectionSampling"] * 2 + ["ExactMatch"] * 2


def rules_config() -> Any:
    """Two temperatures, two windows, and three rules, two of them lossless."""
    lossy = {"class_path": "EpsilonThreshold", "init_args": {"epsilon": 0.2}}
    return config(
        temperatures=[0, 1],
        num_draft_tokens=[1, "auto"],
        rules=[lossy, "RejectionSampling", "ExactMatch"],
    )


def test_windows_that_a_draft_cannot_fill_are_measured_once() -> None:
    target = cases.MODELS["transformer"]()
    heads = cases.DRAFTERS["heads"](target)
    assert heads.max_draft_tokens is not None
    bench_config = config({"heads": {}}, num_draft_tokens=list(range(1, 10)))
    (group,) = pair(target, {"heads": heads}).cases(bench_config)
    windows = [case.config.num_draft_tokens for case in group]
    assert windows == [None, *range(1, heads.max_draft_tokens + 1)]


@pytest.mark.slow
def test_a_run_that_is_killed_ten_times_has_every_finished_row_once(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    bench_pair = pair()
    bench_config = config(repeats=100)
    path = tmp_path / "r" / "rows.jsonl"
    rng = random.Random(0)
    context = multiprocessing.get_context("fork")
    finished_lines = b""
    for _ in range(10):
        # A row has about 700 bytes; most runs are killed while they write one.
        size_at_kill = len(finished_lines) + rng.choice((0, 0, 500, 1500, 3000))
        child = context.Process(target=measured, args=(tmp_path / "r", bench_config, bench_pair))
        child.start()
        while child.is_alive() and size_at_kill and file_size(path) < size_at_kill:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.01))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()

        content = path.read_bytes() if path.exists() else b""
        lines = content[: content.rfind(b"\n") + 1]
        assert lines.startswith(finished_lines), "a finished row stays unchanged"
        finished_lines = lines

    assert finished_lines.count(b"\n") > 5
    rows = measured(tmp_path / "r", bench_config, bench_pair).rows
    assert path.read_bytes().startswith(finished_lines)
    assert len(rows) == 3 * 100
    assert len({(row.cell, row.repeat) for row in rows}) == len(rows)
    assert {row.same_tokens for row in rows} == {True}


def file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_other_weights_or_prompts_under_one_name_are_refused(tmp_path: Path) -> None:
    measured(tmp_path / "r", config())

    other_target = pair(cases.MODELS["rnn"](3))
    with pytest.raises(ValueError, match="another target_sha256 of tiny"):
        measured(tmp_path / "r", config(), other_target)

    target = cases.MODELS["rnn"]()
    draft_model = cases.near(target)
    with torch.no_grad():
        next(draft_model.parameters())[0, 0] += 1e-6
    other_draft = pair(target, {"model": ModelDrafter(draft_model), "ngram": NGramDrafter()})
    with pytest.raises(ValueError, match="another model of tiny"):
        measured(tmp_path / "r", config(), other_draft)

    other_prompts = pair(prompts={"sequences": PROMPTS["sequences"][:1]})
    with pytest.raises(ValueError, match="another prompts of tiny"):
        measured(tmp_path / "r", config(), other_prompts)


# --- Hugging Face's baselines ---


def transformer() -> BenchPair:
    target = cases.MODELS["llama"]()
    return pair(target, {"model": ModelDrafter(cases.near(target)), "ngram": NGramDrafter()})


@pytest.mark.slow
def test_hugging_faces_methods_generate_the_same_tokens_with_each_window(tmp_path: Path) -> None:
    bench_config = config(max_new_tokens=8, repeats=1, warmup=1, num_draft_tokens=[2, 3])
    rows = {}
    for row in measured(tmp_path / "r", bench_config, transformer()).rows:
        rows[row.method, row.num_draft_tokens] = row
    expected: set[tuple[str, int | None]] = {("standard", None), ("generate", None)}
    for method in ("speculative", "assisted", "prompt_lookup"):
        expected |= {(method, 2), (method, 3)}
    assert set(rows) == expected

    for (method, _), row in rows.items():
        if method in ("generate", "assisted", "prompt_lookup"):
            assert row.error is None
            assert row.same_tokens is True
            assert row.prompt_new_tokens == [8, 8]
            assert row.phase_seconds is None
            assert row.seconds >= sum(row.prompt_seconds)
    assert rows["generate", None].num_target_calls == 16
    assert rows["assisted", 3].num_target_calls < 16


def test_hugging_faces_models_are_left_unchanged(tmp_path: Path) -> None:
    bench_pair = transformer()
    assert bench_pair.baseline is not None
    models = (bench_pair.baseline.target, bench_pair.baseline.assistants["model"])

    def model_configs() -> list[Any]:
        return [
            deepcopy((model.generation_config.to_dict(), model.config.to_dict()))
            for model in models
        ]

    configs_before = model_configs()
    measured(tmp_path / "r", config(max_new_tokens=8, repeats=1), bench_pair)
    assert model_configs() == configs_before


def test_a_method_that_cannot_decode_batches_fails_alone(tmp_path: Path) -> None:
    bench_config = config(batch_sizes=[2], baselines=["assisted"], repeats=1)
    rows = measured(tmp_path / "b", bench_config, transformer()).rows
    (failed,) = [row for row in rows if row.error]
    assert failed.method == "assisted"
    assert "batch" in str(failed.error)


def decoded(case: Case, *, seed: int = 0) -> list[list[int]]:
    """The tokens of all prompts of a case."""
    tape = case.tape(seed)
    while not tape.is_over:
        tape.run_piece(tape.num_tokens + 1)
    return merge_results(tape.results()).tokens


def generate_case(bench_pair: BenchPair, **changes: Any) -> Case:
    bench_config = config(baselines=["generate"], max_new_tokens=6, **changes)
    group = bench_pair.cases(bench_config)[0]
    return next(case for case in group if case.method == "generate")


def test_generate_decodes_batches_and_stops_at_eos() -> None:
    bench_pair = transformer()
    single_tokens = decoded(generate_case(bench_pair))
    assert decoded(generate_case(bench_pair, batch_sizes=[2])) == single_tokens

    eos = single_tokens[0][2]
    bench_pair.eos = (eos,)
    batch_tokens = decoded(generate_case(bench_pair, batch_sizes=[2]))
    num_kept = single_tokens[0].index(eos) + 1
    assert batch_tokens[0] == single_tokens[0][:num_kept]


def test_generate_draws_with_its_seed_and_restores_torchs_generator() -> None:
    case = generate_case(transformer(), temperatures=[5.0], batch_sizes=[2])
    state = torch.get_rng_state()
    tokens = decoded(case)
    assert decoded(case) == tokens
    assert decoded(case, seed=1) != tokens
    assert torch.equal(torch.get_rng_state(), state)
