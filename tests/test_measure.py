"""Laws of measuring: cases take turns beside standard decoding, figures are their formulas,
failures and differences are reported, and `decode`, `sweep` and `bench` agree."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cases
import pytest
import tiny_bench
from report_records import cells_of, timed
from torch import Tensor

from lightning_specdec import ExactMatch, ModelDrafter, Sampling, SpeculativeDecoder
from lightning_specdec.bench import measure as measure_module
from lightning_specdec.bench.measure import Case, best, measure, sweep
from lightning_specdec.bench.records import Comparison, comparisons
from lightning_specdec.bench.table import comparison_table, grid
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.drafters import (
    DraftRequest,
    DraftState,
    EarlyExitDrafter,
    NGramDrafter,
    NGramWithFallback,
)
from lightning_specdec.rules import Draft, Verdict

BRIEF: dict[str, Any] = {"max_new_tokens": 6, "repeats": 1, "warmup": 0}
SWEEP_OPTIONS = ("windows", "repeats", "warmup", "batch_size")


def pair() -> SpeculativeDecoder:
    target = cases.target("rnn")
    return SpeculativeDecoder(target, cases.near(target))


def run_sweep(target: Any, drafters: Any, prompts: Any, **settings: Any) -> list[Comparison]:
    """All comparisons of a sweep; settings that are not its options are those of decoding."""
    options = {}
    for name in SWEEP_OPTIONS:
        if name in settings:
            options[name] = settings.pop(name)
    return list(sweep(target, drafters, prompts, DecodingConfig(**settings), **options))


def test_figures_are_their_formulas() -> None:
    """8 tokens: 8 calls in 8 seconds, beside 2 rounds in 3 seconds with 6 of 8 draft tokens
    accepted, 7 tested."""
    standard_row = timed([4.0, 4.0], "standard", tokens=[4, 4])
    speculative_row = timed([1.5, 1.5], tokens=[4, 4])
    standard, speculative = cells_of([standard_row, speculative_row])

    assert speculative.walltime_speedup is not None
    assert speculative.walltime_speedup.value == pytest.approx(8 / 3)
    assert speculative.latency_reduction == pytest.approx(1 - 3 / 8)
    assert speculative.tokens_per_second == 8 / 3
    assert speculative.acceptance_rate == 6 / 7
    assert speculative.draft_utilization == 6 / 8
    assert speculative.block_efficiency == 8 / 2
    assert speculative.cost_ratio == pytest.approx((0.75 / 8) / (8.0 / 8))
    summary = speculative.summary()
    assert summary["standard"]["verify_seconds"] == 8.0
    assert summary["speculative"]["runs"]["seconds"] == [3.0]

    assert standard.walltime_speedup is None
    assert standard.cost_ratio is None
    assert standard.predicted_speedup is None
    assert standard.summary()["speculative"] is None
    assert standard.block_efficiency == 1.0


def test_a_summary_has_both_sides_and_one_more_for_other_methods() -> None:
    rows = [timed([4.0], "standard"), timed([1.5]), timed([2.0], "generate")]
    standard, speculative, generate = (cell.summary() for cell in cells_of(rows))
    assert list(standard)[-2:] == ["standard", "speculative"]
    assert standard["standard"]["seconds"] == 4.0
    assert list(speculative)[-2:] == ["standard", "speculative"]
    assert list(generate)[-3:] == ["standard", "speculative", "generate"]
    assert generate["speculative"] is None
    assert generate["generate"]["seconds"] == 2.0


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_benchmark_decodes_what_decoding_does(batch_size: int, temperature: float) -> None:
    comparison = pair().benchmark(
        cases.PROMPTS,
        repeats=4,
        warmup=1,
        batch_size=batch_size,
        max_new_tokens=9,
        temperature=temperature,
        eos=cases.EOS,
    )
    assert len(comparison.rows) == len(comparison.standard) == 4
    for row in (*comparison.rows, *comparison.standard):
        assert row.same_tokens
        assert row.repeat == row.seed
    expected_tokens = cases.standard("rnn", Sampling(temperature), 9).tokens
    assert comparison.rows[0].tokens_sha256 == measure_module.tokens_sha256(expected_tokens), (
        "the first repeat has the seed of the config"
    )
    assert comparison.cost_ratio
    assert comparison.predicted_speedup
    assert comparison.phase_seconds is not None
    assert sum(comparison.phase_seconds.values()) > 0


def test_one_method_can_be_measured_alone() -> None:
    summary = pair().benchmark([[1, 2]], repeats=1, mode="speculative").summary()
    assert summary["speculative"] is not None
    assert summary["standard"] is None
    with pytest.raises(ValueError, match="mode must be both, standard or speculative"):
        pair().benchmark([[1, 2]], mode="twice")


def test_a_heading_keeps_an_import_path_and_spells_a_figures_name() -> None:
    table = grid(["", "my_drafter.BigramDrafter, window 3"], [["block_efficiency", "1.00"]])
    assert "my_drafter.BigramDrafter," in table
    table = grid(["", "block_efficiency"], [["a", "1.00"]])
    assert "block efficiency" in " ".join(table.split())


def test_columns_stay_aligned_below_characters_of_two_columns() -> None:
    """A Chinese character takes two columns of a terminal, a combining accent none."""
    rows = [["\u4ee3\u7801", "1.5", "a"], ["cafe\u0301", "2", "b"]]
    _, chinese_line, accented_line = grid(["domain", "seconds", ""], rows).splitlines()
    assert chinese_line == "\u4ee3\u7801        1.5  a"
    assert accented_line == "cafe\u0301          2  b"


def test_a_draft_after_a_lookup_has_no_cost_of_a_token() -> None:
    """Copied tokens cost nothing: a mean over both kinds is the cost of neither."""
    drafter = NGramWithFallback(NGramDrafter(), pair().drafter)
    decoder = pair().with_drafter(drafter)
    comparison = decoder.benchmark(cases.PROMPTS, repeats=2, max_new_tokens=9)
    assert comparison.cost_ratio is None
    assert comparison.predicted_speedup is None
    assert comparison.phase_seconds is not None
    assert comparison.phase_seconds["draft"] > 0


def test_cases_take_turns_after_the_warm_up_and_nothing_is_collected_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, int]] = []
    open_stream = Case._open

    def recorded_open(self: Case, number: int, repeat: int) -> Any:
        assert not gc.isenabled()
        calls.append((self.method, self.config.seed + repeat))
        return open_stream(self, number, repeat)

    monkeypatch.setattr(Case, "_open", recorded_open)
    prompts = [[1], [2], [3]]
    pair().benchmark(prompts, repeats=2, warmup=1, batch_size=2, seed=5, max_new_tokens=4)
    # Three prompts are two batches.
    expected_calls = []
    for seed in (5, 5, 6):
        expected_calls += [("standard", seed)] * 2 + [("speculative", seed)] * 2
    assert calls == expected_calls
    assert gc.isenabled()


def exits(*layers: int) -> dict[str, EarlyExitDrafter]:
    return {f"exit {layer}": EarlyExitDrafter(layer) for layer in layers}


class Failing(cases.Repeater):
    """Fails with an error if the first round requests this number of draft tokens."""

    def __init__(self, window: int, error: BaseException) -> None:
        super().__init__()
        self.window = window
        self.error = error

    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        if max(windows) == self.window and len(request.texts[0]) == 2:
            raise self.error
        return super().propose(state, request, windows, sampling)


class KeepsAll(ExactMatch):
    """Claims to be lossless, and accepts everything: what the check of the tokens is for."""

    def judge(
        self,
        draft: Draft,
        target_logits: Tensor,
        sampling: Sampling,
        noise: Tensor | None,
    ) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)
        return Verdict(verdict.accepted | True, verdict.endings)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_drafter_is_measured_with_every_window_beside_standard_decoding(
    batch_size: int,
) -> None:
    settings = {**BRIEF, "repeats": 2, "batch_size": batch_size, "windows": (2, 3)}
    rows = run_sweep(cases.target("llama"), exits(1, 2), cases.PROMPTS, **settings)
    choices = [(row.case.draft, row.case.num_draft_tokens) for row in rows]
    assert choices == [("exit 1", 2), ("exit 1", 3), ("exit 2", 2), ("exit 2", 3)]

    expected_tokens = cases.standard("llama", Sampling(), 6, None).tokens
    expected_sha256 = measure_module.tokens_sha256(expected_tokens)
    lower_ends = []
    for row in rows:
        assert {run.tokens_sha256 for run in (*row.rows, *row.standard)} == {expected_sha256}
        assert row.same_tokens
        assert row.error is None
        assert row.cost_ratio
        assert len(row.rows) == 2
        assert row.walltime_speedup is not None
        lower_ends.append(row.walltime_speedup.low)
    assert best(rows) is rows[lower_ends.index(max(lower_ends))]

    lines = comparison_table(rows).splitlines()
    assert lines[-5].split()[:2] == ["method", "window"], "settings that do not vary are left out"
    assert len({len(line) for line in lines[-4:]}) == 1


@pytest.mark.parametrize(
    "error", [ValueError("no\nroom"), RuntimeError("out of memory"), MemoryError()], ids=repr
)
def test_a_case_that_fails_is_yielded_with_its_error_and_the_others_go_on(
    error: Exception,
) -> None:
    drafters = {"first": Failing(3, error), "second": cases.Repeater()}
    rows = run_sweep(cases.target("rnn"), drafters, [[1, 2]], windows=(2, 3, 4), **BRIEF)
    message = " ".join(str(error).split()) or "MemoryError"
    assert [row.error for row in rows] == [None, message, None, None, None, None]
    failed = rows[1]
    assert failed.walltime_speedup is None
    assert failed.acceptance_rate is None
    assert failed.same_tokens is None
    assert best(rows) is not failed
    assert f"failed: {message}" in comparison_table(rows)


def test_a_fault_of_the_program_is_raised() -> None:
    drafters = {"x": Failing(2, AssertionError("a bug"))}
    with pytest.raises(AssertionError, match="a bug"):
        run_sweep(cases.target("rnn"), drafters, [[1, 2]], windows=(2,), **BRIEF)


def test_other_tokens_than_standard_decodings_are_seen_and_never_the_best() -> None:
    target = cases.target("rnn")
    drafters = {"wrong": cases.AlwaysWrong(target), "right": ModelDrafter(target)}
    wrong, right = run_sweep(
        target, drafters, [[3], [1, 2]], windows=(2,), rule=KeepsAll(), **BRIEF
    )
    assert wrong.same_tokens is False
    assert wrong.rows[0].differs_at == [0, 0]
    assert right.same_tokens is True
    assert best([wrong, right]) is right
    assert best([wrong]) is None
    assert "OTHER TOKENS" in comparison_table([wrong, right])


class InterruptedAtRepeat(cases.Repeater):
    """Ctrl-C in the first round of a repeat with a window of 3."""

    def __init__(self, repeat: int) -> None:
        super().__init__()
        self.num_left = repeat

    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        if len(request.texts[0]) == 2 and max(windows) == 3:
            self.num_left -= 1
            if self.num_left == 0:
                raise KeyboardInterrupt
        return super().propose(state, request, windows, sampling)


@pytest.mark.parametrize("cut_repeat", [1, 2, 3])
def test_ctrl_c_keeps_what_both_methods_have_finished(cut_repeat: int) -> None:
    comparison_iterator = sweep(
        cases.target("rnn"),
        {"x": InterruptedAtRepeat(cut_repeat)},
        [[1, 2]],
        DecodingConfig(max_new_tokens=6),
        windows=(2, 3, 4),
        repeats=5,
        warmup=0,
    )
    rows: list[Comparison] = []
    with pytest.raises(KeyboardInterrupt):
        for row in comparison_iterator:
            rows.append(row)
    assert gc.isenabled()

    if cut_repeat == 1:
        assert [row.case.num_draft_tokens for row in rows] == [2]
    else:
        assert [row.case.num_draft_tokens for row in rows] == [2, 3]
        interrupted = rows[1]
        assert len(interrupted.rows) == len(interrupted.standard) == cut_repeat - 1
        assert interrupted.interrupted
        assert interrupted.walltime_speedup is not None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"windows": (2, 0)}, "num_draft_tokens must be from 1"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"max_new_tokens": 512}, "the target's context of 512"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"drafters": exits(1, 3)}, "exit_layer must be from 1 to 2, got 3"),
        ({"drafters": {}}, "there is no drafter"),
    ],
    ids=str,
)
def test_what_fails_in_every_case_is_refused_before_anything_runs(
    fault: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        measure_module, "measure", lambda *arguments, **options: pytest.fail("it ran")
    )
    settings = {
        "drafters": exits(1),
        "prompts": [[1, 2, 3]],
        "windows": (2,),
        **BRIEF,
        **fault,
    }
    with pytest.raises(ValueError, match=message):
        run_sweep(cases.target("llama"), **settings)


def test_decode_sweep_and_bench_agree_on_one_pair(tmp_path: Path) -> None:
    """The same prompts and settings: equal counts and tokens."""
    prompts = [list(prompt.tokens) for prompt in tiny_bench.PROMPTS["sequences"]]
    target = cases.MODELS["rnn"]()
    decoder = SpeculativeDecoder(target, cases.near(target), prompts=prompts)
    settings: dict[str, Any] = {"max_new_tokens": 24, "repeats": 1, "warmup": 0}

    decoded = decoder.benchmark(num_draft_tokens=2, **settings)
    (swept,) = decoder.sweep(windows=(2,), **settings)
    bench_config = tiny_bench.config({"model": {}}, **settings)
    bench_pair = tiny_bench.pair(target, {"model": ModelDrafter(cases.near(target))})
    results = tiny_bench.measured(tmp_path / "r", bench_config, bench_pair)
    _, benched = comparisons(results.rows)

    for name in (
        "num_target_calls",
        "num_draft_steps",
        "num_tested",
        "num_accepted",
        "tokens_sha256",
        "num_new_tokens",
    ):
        values = {getattr(row.rows[0], name) for row in (decoded, swept, benched)}
        assert len(values) == 1, name


def test_all_three_measure_the_packed_target(monkeypatch: pytest.MonkeyPatch) -> None:
    target = cases.MODELS["rnn"]().train()
    packed = target.packed()
    monkeypatch.setattr(type(target), "packed", lambda self: packed)
    measured_cases: list[Case] = []

    def recorded_measure(bench_cases: Sequence[Case], **options: Any) -> Any:
        measured_cases.extend(bench_cases)
        return measure(bench_cases, **options)

    monkeypatch.setattr(measure_module, "measure", recorded_measure)
    decoder = SpeculativeDecoder(target, cases.near(target), prompts=[[1, 2]])
    decoder.benchmark(repeats=1, warmup=0)
    list(decoder.sweep(windows=(2,), repeats=1, warmup=0))
    measured_cases += tiny_bench.pair(target).cases(tiny_bench.config())[0]

    assert all(case.target is packed for case in measured_cases)
    assert not decoder.target.training
    drafters = [case.drafter for case in measured_cases if isinstance(case.drafter, ModelDrafter)]
    assert len(drafters) == 3
    assert {type(drafter.model).__name__ for drafter in drafters} == {"FusedRNN"}
