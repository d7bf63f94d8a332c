"""Laws of the sweep: every cell beside standard decoding, with the same treatment; what fails or differs is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cases
import pytest
from torch import Tensor

from lightning_specdec import ExactMatch, ModelDrafter, NGramDrafter, RejectionSampling, Sampling, SpeculativeDecoder
from lightning_specdec.bench import sweep as sweep_module
from lightning_specdec.bench.runner import Benchmark, Runs
from lightning_specdec.bench.sweep import SweepRow, best, num_draft_steps, sweep
from lightning_specdec.drafters import Context, DraftState, EarlyExitDrafter
from lightning_specdec.inference import Counts, DecodeResult, Round, RowResult
from lightning_specdec.rules import Draft, Verdict

BRIEF: dict[str, Any] = {"max_new_tokens": 6, "repeats": 1, "warmup": 0}


def exits(*layers: int) -> dict[str, EarlyExitDrafter]:
    return {f"exit {layer}": EarlyExitDrafter(layer) for layer in layers}


class Failing(cases.Repeater):
    """Fails in one way when it is asked for that many guesses at first."""

    def __init__(self, window: int, error: BaseException) -> None:
        super().__init__()
        self.window, self.error = window, error

    def propose(self, state: DraftState, context: Context, windows: Sequence[int], sampling: Sampling) -> Draft:
        if max(windows) == self.window and len(context.texts[0]) == 2:
            raise self.error
        return super().propose(state, context, windows, sampling)


class KeepsAll(ExactMatch):
    """Says that it is lossless, and keeps whatever is guessed: what the check of the tokens is there for."""

    def judge(self, draft: Draft, target_logits: Tensor, sampling: Sampling, noise: Tensor | None) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)
        return Verdict(verdict.kept | True, verdict.endings)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_draft_is_measured_with_every_window_beside_standard_decoding(batch_size: int) -> None:
    settings = {**BRIEF, "repeats": 2, "batch_size": batch_size}
    rows = list(sweep(cases.target("llama"), exits(1, 2), cases.PROMPTS, windows=(2, 3), **settings))
    assert [(row.draft, row.num_draft_tokens) for row in rows] == [
        ("exit 1", 2),
        ("exit 1", 3),
        ("exit 2", 2),
        ("exit 2", 3),
    ]
    expected = cases.standard("llama", Sampling(), 6, None).tokens
    for row in rows:
        found = row.benchmark
        assert found is not None and found.standard is not None and found.speculative is not None
        for runs in (found.standard, found.speculative):
            assert len(runs.seconds) == 2 and all(result.tokens == expected for result in runs.results)
        assert row.same_tokens is True and row.error is None and row.parting is None
        assert row.cost_ratio is not None and row.cost_ratio > 0
        values = row.to_dict()
        assert values["walltime_speedup"] == row.walltime_speedup == found.walltime_speedup
        assert values["block_efficiency"] >= 1 and 0 <= values["acceptance_rate"] <= 1
        first, third = values["speedup_quartiles"]
        assert 0 < first <= third and len(values["standard"]["runs"]["seconds"]) == 2
    assert best(rows) is max(rows, key=lambda row: row.walltime_speedup or 0)


@pytest.mark.parametrize("error", [ValueError("no\nroom"), RuntimeError("out of memory"), MemoryError()], ids=repr)
def test_a_row_that_fails_is_shown_with_its_error_and_the_others_go_on(error: Exception) -> None:
    drafts = {"first": Failing(3, error), "second": cases.Repeater()}
    rows = list(sweep(cases.target("rnn"), drafts, [[1, 2]], windows=(2, 3, 4), **BRIEF))
    assert [(row.draft, row.num_draft_tokens) for row in rows if row.error is None] == [
        ("first", 2),
        ("first", 4),
        *(("second", window) for window in (2, 3, 4)),
    ]
    assert rows[1].error == (" ".join(str(error).split()) or "MemoryError")
    failed = rows[1].to_dict()
    assert failed["error"] and failed["walltime_speedup"] is failed["acceptance_rate"] is failed["same_tokens"] is None
    assert best(rows) is not rows[1]


def test_a_fault_of_the_program_is_no_row() -> None:
    with pytest.raises(AssertionError, match="a bug"):
        list(sweep(cases.target("rnn"), {"x": Failing(2, AssertionError("a bug"))}, [[1, 2]], windows=(2,), **BRIEF))


def test_other_tokens_than_standard_decoding_s_are_seen_and_never_the_best() -> None:
    target = cases.target("rnn")
    drafts = {"wrong": cases.AlwaysWrong(target), "right": ModelDrafter(target)}
    rows = list(sweep(target, drafts, [[3], [1, 2]], windows=(2,), rule=KeepsAll(), **BRIEF))
    assert [row.same_tokens for row in rows] == [False, True]
    assert rows[0].parting == (0, 0) and rows[1].parting is None
    assert best(rows) is rows[1] and best(rows[:1]) is None


@pytest.mark.parametrize(
    ("rule", "temperature", "same"),
    [(ExactMatch(), 1.0, True), (RejectionSampling(), 0.0, True), (RejectionSampling(), 1.0, None)],
)
def test_tokens_are_compared_where_they_have_to_be_equal(rule: Any, temperature: float, same: bool | None) -> None:
    sampling = Sampling(temperature)
    (row,) = sweep(cases.target("llama"), exits(1), cases.PROMPTS, windows=(3,), rule=rule, sampling=sampling, **BRIEF)
    assert row.same_tokens is same and row.walltime_speedup is not None


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_ctrl_c_keeps_the_rows_that_are_over_and_what_both_ways_have_of_the_one_in_progress(cut: int) -> None:
    count = iter(range(1, 10))

    class Cut(cases.Repeater):
        def propose(self, state: DraftState, context: Context, windows: Sequence[int], sampling: Sampling) -> Draft:
            if len(context.texts[0]) == 2 and max(windows) == 3 and next(count) == cut:  # a repeat begins
                raise KeyboardInterrupt
            return super().propose(state, context, windows, sampling)

    settings = {**BRIEF, "repeats": 5}
    rows = list(sweep(cases.target("rnn"), {"x": Cut()}, [[1, 2]], windows=(2, 3, 4), **settings))
    assert [row.num_draft_tokens for row in rows] == ([2] if cut == 1 else [2, 3])
    if cut > 1:
        found = rows[1].benchmark
        assert found is not None and found.speculative is not None and found.interrupted
        assert len(found.speculative.seconds) == cut - 1 and rows[1].to_dict()["speedup_quartiles"][0] > 0


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"windows": (2, 0)}, "num_draft_tokens must be at least 1, got 0"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"max_new_tokens": 510}, "the target's context holds 512: ask for at most 509 new ones"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": []}, "there is no prompt"),
        ({"eos": 11}, "eos must be from 0 to 10"),
        ({"drafts": exits(1, 3)}, "exit_layer must be from 1 to 2, got 3"),
        ({"drafts": {}}, "there is no draft"),
        ({"windows": ()}, "there is no window"),
    ],
    ids=str,
)
def test_what_no_row_could_do_is_refused_before_anything_runs(
    wrong: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "compare", lambda *arguments, **options: pytest.fail("it ran"))
    given = {"drafts": exits(1), "prompts": [[1, 2, 3]], "windows": (2,), **BRIEF, **wrong}
    drafts, prompts = given.pop("drafts"), given.pop("prompts")
    with pytest.raises(ValueError, match=told):
        sweep(cases.target("llama"), drafts, prompts, **given)


def test_the_cost_ratio_is_counted_by_hand() -> None:
    def result(phases: dict[str, float], calls: int, rounds: list[list[int]] | None) -> DecodeResult:
        rows = [
            RowResult(
                i,
                [1],
                [7],
                "length",
                1,
                [0.1],
                None if rounds is None else Counts(),
                [Round([7] * n, 0, 7) for n in each],
            )
            for i, each in enumerate(rounds or [[], [], []])
        ]
        return DecodeResult(rows, 1.0, phases, calls, 0, rule=None if rounds is None else "ExactMatch")

    rounds = [[3, 3], [1], [2, 0, 4]]  # in batches of two: 3 + 3, then 2 + 0 + 4
    speculative = result({"draft": 1.2, "verify": 5.0, "accept": 0.0, "rest": 0.0}, 5, rounds)
    standard = result({"draft": 0.0, "verify": 6.0, "accept": 0.0, "rest": 0.0}, 12, None)
    assert num_draft_steps(speculative, 2) == 12 and num_draft_steps(speculative, 1) == 13
    assert num_draft_steps(standard, 2) == 0
    found = Benchmark(Runs([6.0, 3.0], [standard] * 2), Runs([2.0, 2.0], [speculative] * 2), None, None, 0.0, 3)
    row = SweepRow("x", 3, 2, True, found)
    assert row.cost_ratio == pytest.approx((1.2 / 12) / (6.0 / 12))
    assert found.speedup_quartiles == (1.5, 3.0) and row.walltime_speedup == 1.5
    nothing = Benchmark(Runs([6.0], [standard]), Runs([2.0], [standard]), None, None, 0.0, 3)
    assert SweepRow("x", 3, 2, True, nothing).cost_ratio is None and SweepRow("x", 3, 2, True).cost_ratio is None


@pytest.mark.parametrize("fuse", [True, False])
def test_both_sides_get_the_same_treatment(fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def compare(target: Any, drafter: Any, prompts: Any, **options: Any) -> Any:
        seen.append((type(target).__name__, type(drafter.model).__name__))
        raise ValueError("seen")

    monkeypatch.setattr(sweep_module, "compare", compare)
    target = cases.MODELS["rnn"]().train()
    decoder = SpeculativeDecoder(target, cases.near(target), prompts=[[1, 2]])
    (row,) = decoder.sweep(windows=(2,), fuse=fuse)
    assert row.error == "seen" and row.draft == "ModelDrafter" and not decoder.target.training
    assert seen == [("FusedRNN", "FusedRNN") if fuse else ("RNN", "RNN")]


def test_a_decoder_knows_its_targets_exits_and_takes_any_of_them() -> None:
    target = cases.target("llama")
    own = cases.drafter("early_exit_own", "llama")
    decoder = SpeculativeDecoder(target, own, prompts=cases.PROMPTS, num_draft_tokens=2)
    found = decoder.exits()
    assert list(found) == [1, 2] and list(decoder.exits([2])) == [2]
    assert isinstance(own, EarlyExitDrafter) and found[own.exit_layer].head is own.head is not None
    for layer in found:
        other = decoder.with_exit(layer)
        assert isinstance(other.drafter, EarlyExitDrafter) and other.drafter.exit_layer == layer
        result = other.decode(other.prompts, max_new_tokens=6, eos=())
        assert result.tokens == cases.standard("llama", Sampling(), 6, None).tokens and result.num_draft_tokens == 2
    looking = SpeculativeDecoder(target, NGramDrafter())
    assert isinstance(looking.with_exit(1).drafter, EarlyExitDrafter), "any draft gives way to an exit"
    with pytest.raises(ValueError, match="exit_layer must be from 1 to 2, got 3"):
        decoder.with_exit(3)
    with pytest.raises(ValueError, match="exit_layer must be at least 1"):
        decoder.with_exit(0)
    rnn = SpeculativeDecoder(cases.target("rnn"), NGramDrafter())
    for ask in (rnn.exits, lambda: rnn.with_exit(1)):
        with pytest.raises(ValueError, match="RNN has no layers to exit from"):
            ask()


def test_another_draft_keeps_everything_else(tmp_path: Path) -> None:
    target = cases.target("rnn")
    decoder = SpeculativeDecoder(
        target, cases.near(target), prompts=[[1, 2]], recipe={"seed": 3}, fuse_draft=False, num_draft_tokens=5
    )
    other = decoder.with_drafter(NGramDrafter(4))
    assert isinstance(other.drafter, NGramDrafter) and isinstance(decoder.drafter, ModelDrafter)
    for name in ("target", "prompts", "recipe", "fuse_draft", "num_draft_tokens"):
        assert getattr(other, name) == getattr(decoder, name), name
