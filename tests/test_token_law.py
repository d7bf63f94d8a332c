"""Laws of the tests on sampled tokens, with distributions that are known exactly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_specdec.audit import token_law
from lightning_specdec.audit.token_law import TokenScores, chi_square_tail, examine, rank_places
from lightning_specdec.rules import Sampling, draw

NUM_RUNS = 400
NUM_TOKENS = 1000


def random_logits(num_tokens: int, seed: int = 0, vocab_size: int = 40) -> Tensor:
    """Logits of distributions from nearly certain to nearly uniform."""
    generator = torch.Generator().manual_seed(seed)
    scales = 6 * torch.rand(num_tokens, 1, generator=generator)
    return scales * torch.randn(num_tokens, vocab_size, generator=generator)


def draw_scores(
    logits: Tensor,
    known: Sampling,
    used: Sampling,
    seed: int,
) -> TokenScores:
    """Scores under one sampling of tokens that were drawn with another one."""
    # Other numbers than those of the logits and of the tests.
    generator = torch.Generator().manual_seed(10_000 + seed)
    tokens = draw(used.probs(logits), torch.rand(len(logits), generator=generator))
    return TokenScores.of(known.probs(logits), tokens)


def test_scores_are_their_formulas() -> None:
    probs = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    scores = TokenScores.of(probs, torch.tensor([2, 1]))
    assert scores.probs.tolist() == [0.2, 1.0]
    # Of two equally likely tokens, the lower number comes first.
    assert scores.mass_before.tolist() == pytest.approx([0.7, 0.0])
    assert scores.largest_probs.tolist() == [0.5, 1.0]

    entropy = -sum(p * math.log(p) for p in (0.5, 0.2, 0.2, 0.1))
    variance = sum(p * (math.log(p) + entropy) ** 2 for p in (0.5, 0.2, 0.2, 0.1))
    assert scores.entropies.tolist() == pytest.approx([entropy, 0.0])
    assert scores.varentropies.tolist() == pytest.approx([variance, 0.0])


def test_the_tail_of_chi_square_is_that_of_two_degrees_of_freedom() -> None:
    # With two degrees of freedom, the tail is exp(-x / 2).
    assert chi_square_tail(3.0, 2) == pytest.approx(math.exp(-1.5))
    assert chi_square_tail(0.0, 15) == 1.0


def test_places_fill_the_interval_of_their_token() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.2]]).repeat(1000, 1)
    scores = TokenScores.of(probs, torch.ones(1000, dtype=torch.long))
    places = rank_places(scores, torch.Generator().manual_seed(0))
    assert 0.5 <= float(places.min()) < 0.51
    assert 0.79 < float(places.max()) < 0.8


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.7, top_p=0.9), Sampling(1.3, top_k=5)]
)
def test_both_tests_hold_their_size(sampling: Sampling) -> None:
    """P-values below 5% and 1% occur in that share of runs.

    With 400 runs, counts outside of these bounds have odds of less than 1 in 10,000 (binomial).
    The seeds are fixed, so the outcome is the same in every run of the suite.
    """
    logits = random_logits(NUM_TOKENS)
    p_values: dict[str, list[float]] = {"likelihood": [], "ranks": []}
    for seed in range(NUM_RUNS):
        report = examine(draw_scores(logits, sampling, sampling, seed), seed=seed)
        assert report.has_power
        for test in report.tests:
            p_values[test.name].append(test.p_value)
    for values in p_values.values():
        small = sum(value < 0.05 for value in values)
        tiny = sum(value < 0.01 for value in values)
        assert 6 <= small <= 39
        assert tiny <= 14


def test_correct_tokens_are_rarely_rejected() -> None:
    """At odds of 1 in 1000, 400 runs have 4 or more false alarms with odds of 1 in 1,000."""
    logits = random_logits(NUM_TOKENS, seed=1)
    sampling = Sampling(1.0)
    reports = [examine(draw_scores(logits, sampling, sampling, seed)) for seed in range(NUM_RUNS)]
    assert sum(report.failed for report in reports) < 4
    for report in reports:
        assert report.failed == bool(report.direction)


@pytest.mark.parametrize(
    ("used", "direction"),
    [
        (Sampling(0.9), "too close to the favorites"),
        (Sampling(1.1), "too flat"),
        (Sampling(1.0, top_p=0.95), "truncated"),
        (Sampling(1.0, top_k=4), "truncated"),
    ],
)
def test_a_bias_is_found_with_its_direction(used: Sampling, direction: str) -> None:
    logits = random_logits(6000)
    for seed in range(10):
        report = examine(draw_scores(logits, Sampling(1.0), used, seed))
        assert report.failed
        assert report.direction.startswith(direction)


def test_the_temperature_is_estimated_within_its_error() -> None:
    logits = random_logits(6000)
    for temperature in (0.95, 1.0, 1.05):
        report = examine(draw_scores(logits, Sampling(1.0), Sampling(temperature), seed=3))
        assert report.temperature_ratio is not None and report.temperature_error is not None
        distance = abs(report.temperature_ratio - temperature)
        assert distance < 4 * report.temperature_error
        assert report.temperature_error < 0.02


def test_nearly_certain_tokens_change_no_verdict() -> None:
    """Their rare large terms would make the z-test find faults where there are none."""
    uncertain = draw_scores(random_logits(NUM_TOKENS), Sampling(1.0), Sampling(1.0), seed=5)
    nearly_certain = torch.tensor([[0.999, 0.0005, 0.0005]]).repeat(500, 1)
    surprising = TokenScores.of(nearly_certain, torch.full((500,), 2))
    joined = TokenScores.join([uncertain, surprising])
    assert examine(joined).tests == examine(uncertain).tests
    assert examine(joined).temperature_ratio == examine(uncertain).temperature_ratio


def test_certain_tokens_give_no_power_instead_of_a_verdict() -> None:
    probs = torch.eye(5)
    report = examine(TokenScores.of(probs, torch.arange(5)))
    assert not report.failed
    assert not report.has_power
    assert report.tests == ()
    assert examine(TokenScores.join([])).num_tokens == 0


def test_a_token_that_cannot_be_drawn_fails() -> None:
    """Even where the known distribution is nearly certain, which the rank test leaves out."""
    logits = random_logits(2000)
    sampling = Sampling(1.0)
    probs = sampling.probs(logits)
    scores = draw_scores(logits, sampling, sampling, seed=0)
    wrong = TokenScores.of(probs[:5], probs[:5].argmin(-1))
    report = examine(TokenScores.join([scores, *[wrong] * 10]))
    assert report.failed


def test_joined_scores_are_those_of_all_tokens() -> None:
    scores = draw_scores(random_logits(30), Sampling(1.0), Sampling(1.0), seed=0)
    halves = [scores.select(torch.arange(30) < 10), scores.select(torch.arange(30) >= 10)]
    assert torch.equal(TokenScores.join(halves).mass_before, scores.mass_before)
    assert len(halves[0]) == 10
    assert token_law.NUM_TESTS == 2
