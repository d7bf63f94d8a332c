"""Laws of measuring, and of the object that trains, decodes and measures."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import cases
import pytest
import torch

from lightning_specdec import RNN, EpsilonThreshold, ModelDrafter, RejectionSampling, Sampling, SpeculativeDecoder
from lightning_specdec.bench.rolled import rolled_decode
from lightning_specdec.bench.runner import Benchmark, Runs, interleave
from lightning_specdec.bench.theory import predicted_speedup
from lightning_specdec.data import ArithmeticProgressions
from lightning_specdec.inference import Counts, DecodeResult, RowResult, open_session
from lightning_specdec.inference.timing import PHASES

SIDES = ("standard", "speculative", "rolled_standard", "rolled_speculative")


def pair(**settings: Any) -> SpeculativeDecoder:
    target = cases.target("rnn")
    return SpeculativeDecoder(target, cases.near(target), **settings)


def result(num_tokens: int, phases: tuple[float, ...], calls: int, counts: Counts | None = None) -> DecodeResult:
    """A row decoded in so many target calls, with these seconds in draft, verify, accept and rest."""
    row = RowResult(0, [1], list(range(num_tokens)), "length", calls, [0.1] * num_tokens, counts)
    seconds = dict(zip(PHASES, phases, strict=True))
    speculation: dict[str, Any] = {"num_draft_calls": 6, "num_draft_tokens": 3, "rule": "ExactMatch"} if counts else {}
    return DecodeResult([row], sum(phases), seconds, calls, 1000, **speculation)


STANDARD = result(8, (0.0, 8.0, 0.4, 0.4), 8)
SPECULATIVE = result(8, (0.6, 2.0, 0.2, 0.2), 2, Counts(6, 6, 6, [0, 0, 0, 2]))


def test_the_ratios_are_their_formulas() -> None:
    standard = Runs([4.0, 1.0, 2.0, 3.0], [STANDARD] * 4)
    speculative = Runs([1.0, 1.0, 9.0], [SPECULATIVE] * 3)
    bench = Benchmark(standard, speculative, Runs([3.0], [STANDARD]), Runs([6.0], [SPECULATIVE]), 0.5, 3)
    assert standard.median_seconds == 2.0 and standard.spread_seconds == (1.0, 4.0)
    assert standard.tokens_per_second == [2.0, 8.0, 4.0, 8 / 3]
    assert bench.walltime_speedup == 2.0 and bench.latency_reduction == pytest.approx(0.5)
    assert bench.equal_treatment_speedup == 0.5
    # Three seconds rolled out; two rounds at least for eight tokens, each a roll-out of 0.3 and a verification of 1.0.
    assert bench.equal_treatment_ceiling == pytest.approx(3.0 / (2 * (0.3 + 1.0)))
    assert bench.predicted_speedup == pytest.approx(
        predicted_speedup(
            1.0,
            3,
            draft_step_seconds=0.1,
            target_seconds=1.0,
            verify_seconds=1.0,
            round_overhead_seconds=0.2,
            step_overhead_seconds=0.1,
            num_new_tokens=8,
        )
    )
    summary = bench.summary()
    assert summary["acceptance_rate"] == 1.0 and summary["block_efficiency"] == 4.0
    assert summary["standard"]["seconds"] == 2.0 and summary["standard"]["runs"]["seconds"] == standard.seconds
    assert summary["speculative"]["draft_seconds"] == 0.6 and summary["speculative"]["num_target_calls"] == 2


def test_a_shorter_text_is_not_a_faster_way() -> None:
    """Half the tokens in half the seconds."""
    half = result(4, (0.3, 1.0, 0.1, 0.1), 1, Counts(3, 3, 3, [0, 0, 0, 1]))
    whole, short = (
        Benchmark(
            Runs([4.0], [STANDARD]), Runs([seconds], [each]), Runs([3.0], [STANDARD]), Runs([seconds], [each]), 0, 3
        )
        for seconds, each in ((1.0, SPECULATIVE), (0.5, half))
    )
    for name in ("walltime_speedup", "latency_reduction", "equal_treatment_speedup", "equal_treatment_ceiling"):
        assert getattr(short, name) == pytest.approx(getattr(whole, name)), name
    assert whole.walltime_speedup == 4.0 and short.speedup_quartiles == (4.0, 4.0)


def test_one_side_alone_has_no_ratio() -> None:
    bench = Benchmark(Runs([1.0], [STANDARD]), None, None, None, 0.0, 3)
    ratios = ("walltime_speedup", "latency_reduction", "equal_treatment_speedup", "equal_treatment_ceiling")
    assert all(getattr(bench, name) is None for name in (*ratios, "predicted_speedup"))
    assert bench.summary()["speculative"] is None and Runs([1.0], [STANDARD]).spread_seconds == (1.0, 1.0)


def test_the_figures_shown_together_come_from_one_repeat() -> None:
    slow, typical = result(8, (0.0, 9.0, 0.0, 0.0), 8), result(8, (0.0, 2.0, 0.0, 0.0), 8)
    assert Runs([9.0, 2.0, 1.9], [slow, typical, slow]).result is typical


@pytest.mark.parametrize("seconds", [[3.0], [9.0, 2.0], [9.0, 2.0, 1.9], [4.0, 1.0, 2.0, 3.0]])
def test_seconds_phases_and_rates_of_a_way_are_those_of_one_repeat(seconds: list[float]) -> None:
    results = [result(8 + i, (0.0, each, 0.0, 0.0), 8) for i, each in enumerate(seconds)]
    runs = Runs(seconds, results)
    bench = Benchmark(runs, Runs([1.0], [SPECULATIVE]), None, None, 0.0, 3)
    side = bench.summary()["standard"]
    assert side["seconds"] == side["verify_seconds"]
    per_token = side["seconds"] / side["num_new_tokens"]
    assert bench.walltime_speedup == pytest.approx(per_token / (1.0 / 8)), "of texts of two lengths, for each token"
    assert side["tokens_per_second"] == side["num_new_tokens"] / side["seconds"]
    first, third = side["seconds_quartiles"]
    assert first <= side["seconds"] <= third


def test_the_ways_take_turns_after_the_warm_up() -> None:
    calls: list[tuple[str, list[int]]] = []

    def way(name: str) -> Any:
        def decode(prompts: list[list[int]], indices: list[int]) -> DecodeResult:
            calls.append((name, indices))
            return STANDARD

        return decode

    prompts = [[1], [2], [3]]
    runs, _, interrupted = interleave({"a": way("a"), "b": way("b")}, prompts, repeats=2, warmup=1, batch_size=2)
    assert calls == [(name, batch) for _ in range(3) for name in "ab" for batch in ([0, 1], [2])]
    assert [len(runs[name].seconds) for name in "ab"] == [2, 2] and not interrupted
    assert len(runs["a"].results[0].rows) == 2, "the batches of a repeat are one result"


@pytest.mark.parametrize("cut", range(1, 8))
def test_ctrl_c_keeps_the_repeats_that_are_over(cut: int) -> None:
    count = itertools.count(1)

    def decode(prompts: list[list[int]], indices: list[int]) -> DecodeResult:
        if next(count) == cut:
            raise KeyboardInterrupt
        return STANDARD

    runs, _, interrupted = interleave({"a": decode, "b": decode}, [[1]], repeats=9, warmup=1, batch_size=1)
    assert interrupted and gc.isenabled()
    assert {name: len(each.results) for name, each in runs.items()} == {
        name: over for name, over in (("a", (cut - 2) // 2), ("b", (cut - 3) // 2)) if over > 0
    }
    assert all(len(each.seconds) == len(each.results) for each in runs.values())


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_benchmark_lists_every_run_and_decodes_what_decoding_does(batch_size: int) -> None:
    decoder, sampling = pair(), Sampling(1.0)
    bench = decoder.benchmark(
        cases.PROMPTS,
        max_new_tokens=9,
        temperature=sampling.temperature,
        eos=cases.EOS,
        repeats=4,
        warmup=1,
        batch_size=batch_size,
        equal_treatment=True,
    )
    expected = cases.standard("rnn", sampling, 9).tokens
    for side in SIDES:
        runs = getattr(bench, side)
        assert len(runs.seconds) == len(runs.tokens_per_second) == len(runs.results) == 4
        assert all(each.tokens == expected and each.rows[3].index == 3 for each in runs.results)
    assert bench.predicted_speedup is not None and bench.predicted_speedup > 0
    assert bench.warmup_seconds > 0 and not bench.interrupted
    assert bench.equal_treatment_speedup is not None and bench.equal_treatment_ceiling is not None


@pytest.mark.parametrize("mode", ["standard", "speculative"])
def test_one_mode_measures_that_way_alone(mode: str) -> None:
    bench = pair(prompts=[[1, 2]]).benchmark(mode=mode, repeats=1, warmup=0, equal_treatment=True)
    assert [side for side in SIDES if getattr(bench, side) is not None] == [mode]
    assert getattr(bench, mode).results[0].rows[0].prompt == [1, 2]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"mode": "twice"}, "mode must be both, standard or speculative"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"warmup": -1}, "warmup must be at least 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"num_draft_tokens": 0}, "num_draft_tokens must be at least 1"),
        ({"prompts": []}, "there is no prompt"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1], [2, 11]]}, "prompt 1 holds 11: tokens of this model are integers from 0 to 10"),
    ],
)
def test_a_wrong_setting_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        pair().benchmark(**{"prompts": [[1, 2]], "repeats": 1, "warmup": 0, **wrong})


@pytest.mark.parametrize("chunk", [1, 4, 7])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(1.0), Sampling(0.8, top_p=0.7)], ids=["greedy", "t1", "top_p"]
)
@pytest.mark.parametrize("target", ["rnn", "fused", "transformer"])
def test_rolled_decoding_gives_the_tokens_of_standard_decoding(
    target: str, sampling: Sampling, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_specdec.bench.rolled.CHUNK", chunk)
    rolled = rolled_decode(
        ModelDrafter(cases.target(target)),
        cases.PROMPTS,
        max_new_tokens=10,
        sampling=sampling,
        eos=cases.EOS,
    )
    expected = cases.standard(target, sampling, 10)
    assert rolled.tokens == expected.tokens
    assert [row.stop_reason for row in rolled.rows] == [row.stop_reason for row in expected.rows]


def test_decoding_notices_that_the_draft_has_changed() -> None:
    decoder = pair()
    assert decoder.ready_drafter() is decoder.ready_drafter()
    before = decoder.decode([1, 2, 3], max_new_tokens=20)
    with torch.no_grad():
        for weight in decoder.drafter.parameters():
            weight.zero_()
    after = decoder.decode([1, 2, 3], max_new_tokens=20)
    assert after.tokens == before.tokens and after.acceptance_rate != before.acceptance_rate


def test_training_teaches_both_and_decoding_goes_on_with_what_they_learned() -> None:
    torch.manual_seed(0)
    decoder = SpeculativeDecoder(RNN(50), RNN(50, hidden_size=32, num_layers=1))
    data = ArithmeticProgressions()
    before = decoder.decode([1, 2, 3], max_new_tokens=7)
    reached = decoder.train(data, max_epochs=2)
    assert reached["train/target_loss"] < 3.9 and {"train/draft_loss", "val/acceptance_rate"} <= reached.keys()
    after = decoder.decode(decoder.prompts, max_new_tokens=7)
    assert decoder.prompts == data.prompts() and decoder.recipe["epochs"] == 2
    assert after.tokens == decoder.decode_standard(decoder.prompts, max_new_tokens=7).tokens
    assert decoder.decode([1, 2, 3], max_new_tokens=7).tokens != before.tokens
    fresh = SpeculativeDecoder(decoder.target, decoder.drafter, fuse_draft=False)
    assert [row.rounds for row in fresh.decode(decoder.prompts, max_new_tokens=7).rows] == [
        r.rounds for r in after.rows
    ]


def test_only_a_model_draft_is_trained() -> None:
    with pytest.raises(ValueError, match="only a ModelDrafter is trained with its target, this is a Repeater"):
        SpeculativeDecoder(cases.target("rnn"), cases.Repeater()).train(ArithmeticProgressions())
    with pytest.raises(ValueError, match="max_epochs must be at least 1"):
        pair().train(ArithmeticProgressions(), max_epochs=0)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    decoder = pair(prompts=[[1, 2], [3]], recipe={"seed": 4})
    decoder.save(tmp_path / "new" / "pair.ckpt")
    again = SpeculativeDecoder.from_checkpoint(tmp_path / "new" / "pair.ckpt")
    assert again.prompts == [[1, 2], [3]] and again.recipe == {"seed": 4}
    first, second = (each.decode(each.prompts, max_new_tokens=9, temperature=1.0, seed=5) for each in (decoder, again))
    assert first.tokens == second.tokens
    assert [row.rounds for row in first.rows] == [row.rounds for row in second.rows]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["pair.ckpt"]
    half = SpeculativeDecoder.from_checkpoint(tmp_path / "new" / "pair.ckpt", dtype=torch.bfloat16)
    assert {weight.dtype for weight in half.target.parameters()} == {torch.bfloat16}


def test_what_could_not_be_built_again_is_not_saved(tmp_path: Path) -> None:
    for target in ("transformer", "fused"):
        with pytest.raises(ValueError, match="a checkpoint cannot hold a "):
            SpeculativeDecoder(cases.target(target), cases.target("rnn")).save(tmp_path / "pair.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_a_stream_yields_the_tokens_of_decoding_as_they_are_settled() -> None:
    decoder = pair()
    options: dict[str, Any] = {"max_new_tokens": 20, "num_draft_tokens": 3, "eos": cases.EOS, "seed": 3}
    pairs = list(decoder.stream(cases.PROMPTS, temperature=1.0, rule=RejectionSampling(), **options))
    whole = decoder.decode(cases.PROMPTS, temperature=1.0, rule=RejectionSampling(), **options)
    for i, tokens in enumerate(whole.tokens):
        assert [token for number, token in pairs if number == i] == tokens
    session = open_session(decoder.target, decoder.drafter, [1, 2], max_new_tokens=20, rule=EpsilonThreshold())
    session.step()
    assert 1 <= session.live[0].num_new <= 4, "a round settles at most the window and one token more"
