"""Laws of measuring: cases take turns beside standard decoding, figures are their formulas, what fails or differs is
told, and `decode`, `sweep` and `bench` agree."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cases
import pytest
import tiny_bench
from report_rows import cells_of, timed
from torch import Tensor

from lightning_specdec import ExactMatch, ModelDrafter, Sampling, SpeculativeDecoder
from lightning_specdec.bench import measure as measure_module
from lightning_specdec.bench.measure import Case, best, measure, sweep
from lightning_specdec.bench.rows import Comparison, comparisons
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


def pair(**settings: Any) -> SpeculativeDecoder:
    target = cases.target("rnn")
    return SpeculativeDecoder(target, cases.near(target), **settings)


def swept(target: Any, drafters: Any, prompts: Any, **given: Any) -> list[Comparison]:
    options = {
        name: given.pop(name)
        for name in ("windows", "repeats", "warmup", "batch_size")
        if name in given
    }
    return list(sweep(target, drafters, prompts, DecodingConfig(**given), **options))


def test_figures_are_their_formulas() -> None:
    """Of 8 tokens: 8 calls in 8 seconds, beside 2 rounds in 3 seconds with 6 of 8 draft tokens accepted, 7 tested."""
    plain, drafted = timed([4.0, 4.0], "standard", tokens=[4, 4]), timed([1.5, 1.5], tokens=[4, 4])
    alone, found = cells_of([plain, drafted])
    assert found.walltime_speedup is not None and found.walltime_speedup.value == pytest.approx(
        8 / 3
    )
    assert found.latency_reduction == pytest.approx(1 - 3 / 8) and found.tokens_per_second == 8 / 3
    assert (
        found.acceptance_rate == 6 / 7
        and found.draft_utilization == 6 / 8
        and found.block_efficiency == 8 / 2
    )
    assert found.cost_ratio == pytest.approx((0.75 / 8) / (8.0 / 8))
    summary = found.summary()
    assert summary["standard"]["verify_seconds"] == 8.0 and summary["speculative"]["runs"][
        "seconds"
    ] == [3.0]
    assert alone.walltime_speedup is alone.cost_ratio is alone.predicted_speedup is None
    assert alone.summary()["speculative"] is None and alone.block_efficiency == 1.0


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_benchmark_decodes_what_decoding_does(batch_size: int, temperature: float) -> None:
    more: dict[str, Any] = {"max_new_tokens": 9, "temperature": temperature, "eos": cases.EOS}
    found = pair().benchmark(cases.PROMPTS, repeats=4, warmup=1, batch_size=batch_size, **more)
    expected = measure_module.tokens_sha256(cases.standard("rnn", Sampling(temperature), 9).tokens)
    assert len(found.rows) == len(found.standard) == 4
    assert all(
        each.same_tokens and each.repeat == each.seed for each in (*found.rows, *found.standard)
    )
    assert found.rows[0].tokens_sha256 == expected, "the first repeat has the seed of the config"
    assert (
        found.cost_ratio
        and found.predicted_speedup
        and sum((found.phase_seconds or {}).values()) > 0
    )
    assert "speculative" in repr(
        pair().benchmark([[1, 2]], repeats=1, mode="speculative").summary()
    )
    with pytest.raises(ValueError, match="mode must be both, standard or speculative"):
        pair().benchmark([[1, 2]], mode="twice")


def test_a_heading_keeps_an_import_path_and_spells_a_figures_name() -> None:
    shown = grid(["", "my_drafter.BigramDrafter, window 3"], [["block_efficiency", "1.00"]])
    assert "my_drafter.BigramDrafter," in shown
    assert "block efficiency" in " ".join(grid(["", "block_efficiency"], [["a", "1.00"]]).split())


def test_columns_stay_aligned_below_characters_of_two_columns() -> None:
    """A Chinese character takes two columns of a terminal, a combining accent none."""
    lines = grid(
        ["domain", "seconds", ""], [["\u4ee3\u7801", "1.5", "a"], ["cafe\u0301", "2", "b"]]
    )
    _, wide, accented = lines.splitlines()
    assert wide == "\u4ee3\u7801        1.5  a"
    assert accented == "cafe\u0301          2  b"


def test_a_draft_behind_a_lookup_has_no_cost_of_a_token() -> None:
    """Copied tokens cost nothing: a mean over both kinds is neither's cost."""
    drafter = NGramWithFallback(NGramDrafter(), pair().drafter)
    found = pair().with_drafter(drafter).benchmark(cases.PROMPTS, repeats=2, max_new_tokens=9)
    assert (
        found.cost_ratio is found.predicted_speedup is None
        and (found.phase_seconds or {})["draft"] > 0
    )


def test_cases_take_turns_after_the_warm_up_and_nothing_is_collected_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[tuple[str, int]] = []
    decode = Case._decode

    def watched(self: Case, texts: Any, indices: Any, seed: int) -> Any:
        assert not gc.isenabled()
        order.append((self.method, seed))
        return decode(self, texts, indices, seed)

    monkeypatch.setattr(Case, "_decode", watched)
    pair().benchmark([[1], [2], [3]], repeats=2, warmup=1, batch_size=2, seed=5, max_new_tokens=4)
    both = ("standard", "speculative")
    warm, timed = (
        [(m, 5) for m in both for _ in range(2)],
        [(m, 5 + r) for r in range(2) for m in both for _ in (0, 1)],
    )
    assert order == warm + timed and gc.isenabled()


def exits(*layers: int) -> dict[str, EarlyExitDrafter]:
    return {f"exit {layer}": EarlyExitDrafter(layer) for layer in layers}


class Failing(cases.Repeater):
    """Fails with an error where it is asked for so many draft tokens at first."""

    def __init__(self, window: int, error: BaseException) -> None:
        super().__init__()
        self.window, self.error = window, error

    def propose(
        self, state: DraftState, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        if max(windows) == self.window and len(request.texts[0]) == 2:
            raise self.error
        return super().propose(state, request, windows, sampling)


class KeepsAll(ExactMatch):
    """Says that it is lossless, and accepts everything: what the check of the tokens is there for."""

    def judge(
        self, draft: Draft, target_logits: Tensor, sampling: Sampling, noise: Tensor | None
    ) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)
        return Verdict(verdict.kept | True, verdict.endings)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_drafter_is_measured_with_every_window_beside_standard_decoding(
    batch_size: int,
) -> None:
    settings = {**BRIEF, "repeats": 2, "batch_size": batch_size}
    found = swept(cases.target("llama"), exits(1, 2), cases.PROMPTS, windows=(2, 3), **settings)
    names = [(each.case.draft, each.case.num_draft_tokens) for each in found]
    assert names == [("exit 1", 2), ("exit 1", 3), ("exit 2", 2), ("exit 2", 3)]
    expected = measure_module.tokens_sha256(cases.standard("llama", Sampling(), 6, None).tokens)
    for each in found:
        assert {done.tokens_sha256 for done in (*each.rows, *each.standard)} == {expected}
        assert each.same_tokens and each.error is None and each.cost_ratio and len(each.rows) == 2
    assert best(found) is max(
        found, key=lambda each: each.walltime_speedup and each.walltime_speedup.low or 0.0
    )
    lines = comparison_table(found).splitlines()
    assert lines[-5].split()[:2] == ["method", "window"], "settings that do not vary are left out"
    assert len({len(line) for line in lines[-4:]}) == 1


@pytest.mark.parametrize(
    "error", [ValueError("no\nroom"), RuntimeError("out of memory"), MemoryError()], ids=repr
)
def test_a_case_that_fails_is_given_with_its_error_and_the_others_go_on(error: Exception) -> None:
    drafters = {"first": Failing(3, error), "second": cases.Repeater()}
    found = swept(cases.target("rnn"), drafters, [[1, 2]], windows=(2, 3, 4), **BRIEF)
    told = " ".join(str(error).split()) or "MemoryError"
    assert [each.error for each in found] == [None, told, None, None, None, None]
    assert found[1].walltime_speedup is found[1].acceptance_rate is found[1].same_tokens is None
    assert best(found) is not found[1] and f"failed: {told}" in comparison_table(found)
    with pytest.raises(AssertionError, match="a bug"):
        swept(
            cases.target("rnn"),
            {"x": Failing(2, AssertionError("a bug"))},
            [[1, 2]],
            windows=(2,),
            **BRIEF,
        )


def test_other_tokens_than_standard_decodings_are_seen_and_never_the_best() -> None:
    target = cases.target("rnn")
    drafters = {"wrong": cases.AlwaysWrong(target), "right": ModelDrafter(target)}
    found = swept(target, drafters, [[3], [1, 2]], windows=(2,), rule=KeepsAll(), **BRIEF)
    assert [each.same_tokens for each in found] == [False, True] and found[0].rows[
        0
    ].differs_at == [0, 0]
    assert (
        best(found) is found[1]
        and best(found[:1]) is None
        and "OTHER TOKENS" in comparison_table(found)
    )


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_ctrl_c_keeps_what_both_methods_have_finished(cut: int) -> None:
    count = iter(range(1, 10))

    class Cut(cases.Repeater):
        def propose(
            self, state: Any, request: Any, windows: Sequence[int], sampling: Sampling
        ) -> Draft:
            if (
                len(request.texts[0]) == 2 and max(windows) == 3 and next(count) == cut
            ):  # a repeat begins
                raise KeyboardInterrupt
            return super().propose(state, request, windows, sampling)

    found: list[Comparison] = []
    config = DecodingConfig(max_new_tokens=6)
    with pytest.raises(KeyboardInterrupt):
        for each in sweep(
            cases.target("rnn"),
            {"x": Cut()},
            [[1, 2]],
            config,
            windows=(2, 3, 4),
            repeats=5,
            warmup=0,
        ):
            found.append(each)
    assert [each.case.num_draft_tokens for each in found] == (
        [2] if cut == 1 else [2, 3]
    ) and gc.isenabled()
    if cut > 1:
        assert len(found[1].rows) == len(found[1].standard) == cut - 1 and found[1].interrupted
        assert found[1].walltime_speedup is not None


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"windows": (2, 0)}, "num_draft_tokens must be from 1"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"max_new_tokens": 510}, "the target's context of 512"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"drafters": exits(1, 3)}, "exit_layer must be from 1 to 2, got 3"),
        ({"drafters": {}}, "there is no drafter"),
    ],
    ids=str,
)
def test_what_no_case_could_do_is_refused_before_anything_runs(
    wrong: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        measure_module, "measure", lambda *arguments, **options: pytest.fail("it ran")
    )
    given = {"drafters": exits(1), "prompts": [[1, 2, 3]], "windows": (2,), **BRIEF, **wrong}
    with pytest.raises(ValueError, match=told):
        swept(cases.target("llama"), given.pop("drafters"), given.pop("prompts"), **given)


def test_decode_sweep_and_bench_agree_on_one_pair(tmp_path: Path) -> None:
    """The same prompts and settings: equal counts and tokens."""
    prompts = [list(prompt.tokens) for prompt in tiny_bench.PROMPTS["sequences"]]
    target = cases.MODELS["rnn"]()
    decoder = SpeculativeDecoder(target, cases.near(target), prompts=prompts)
    settings: dict[str, Any] = {"repeats": 1, "warmup": 0}
    decoded = decoder.benchmark(num_draft_tokens=2, max_new_tokens=24, **settings)
    (swept_one,) = decoder.sweep(windows=(2,), max_new_tokens=24, **settings)
    config = tiny_bench.config({"model": {}}, max_new_tokens=24, **settings)
    kept = tiny_bench.measured(
        tmp_path / "r", config, tiny_bench.pair(target, {"model": ModelDrafter(cases.near(target))})
    )
    (benched,) = [each for each in comparisons(kept.rows) if each.case.method == "speculative"]
    three = (decoded, swept_one, benched)
    counts = (
        "num_target_calls",
        "num_draft_steps",
        "num_tested",
        "num_accepted",
        "tokens_sha256",
        "num_new_tokens",
    )
    for name in counts:
        assert len({getattr(each.rows[0], name) for each in three}) == 1, name


def test_all_three_measure_the_packed_target(monkeypatch: pytest.MonkeyPatch) -> None:
    target = cases.MODELS["rnn"]().train()
    packed, seen = target.packed(), list[Case]()
    monkeypatch.setattr(type(target), "packed", lambda self: packed)

    def watched(given: Sequence[Case], **options: Any) -> Any:
        seen.extend(given)
        return measure(given, **options)

    monkeypatch.setattr(measure_module, "measure", watched)
    decoder = SpeculativeDecoder(target, cases.near(target), prompts=[[1, 2]])
    decoder.benchmark(repeats=1, warmup=0)
    list(decoder.sweep(windows=(2,), repeats=1, warmup=0))
    seen.extend(tiny_bench.pair(target).cases(tiny_bench.config())[0])
    assert {id(case.target) for case in seen} == {id(packed)} and not decoder.target.training
    drafters = [case.drafter for case in seen if isinstance(case.drafter, ModelDrafter)]
    assert len(drafters) == 3 and {type(each.model).__name__ for each in drafters} == {"FusedRNN"}
