"""Sampling equals its definition, and noise depends on the seed and the prompt's index only."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import accumulate

import pytest
import torch

from lightning_specdec.rules import SOFTMAX, Purpose, Sampling, draw, noise_table
from lightning_specdec.rules.sampling import largest

LAST = 1 - 2**-53
"""The largest uniform number that is ever drawn."""


def slow_probs(logits: list[float], sampling: Sampling) -> list[float]:
    """The distribution by its definition, in plain Python."""
    largest_logit = max(logits)
    if sampling.temperature == 0:
        best_token = logits.index(largest_logit)
        return [float(token == best_token) for token in range(len(logits))]

    weights = [math.exp((logit - largest_logit) / sampling.temperature) for logit in logits]
    total_weight = sum(weights)
    probs = [weight / total_weight for weight in weights]
    ranked_tokens = sorted(range(len(probs)), key=lambda token: -probs[token])

    if sampling.top_k is not None:
        probs = restricted(probs, set(ranked_tokens[: sampling.top_k]))
    if sampling.top_p is not None:
        nucleus: set[int] = set()
        nucleus_prob = 0.0
        for token in ranked_tokens:
            if nucleus_prob >= sampling.top_p:
                break
            nucleus.add(token)
            nucleus_prob += probs[token]
        probs = restricted(probs, nucleus)
    if sampling.min_p is not None:
        threshold = sampling.min_p * max(probs)
        probs = restricted(probs, {token for token in ranked_tokens if probs[token] >= threshold})
    return probs


def restricted(probs: list[float], tokens: set[int]) -> list[float]:
    """The distribution restricted to some tokens."""
    total_prob = sum(probs[token] for token in tokens)
    return [prob / total_prob if token in tokens else 0.0 for token, prob in enumerate(probs)]


SETTINGS = [
    Sampling(0.0),
    Sampling(1.0),
    Sampling(0.3),
    Sampling(5.0),
    Sampling(1.0, top_k=1),
    Sampling(1.0, top_k=3),
    Sampling(1.0, top_k=50),
    Sampling(1.0, top_p=0.5),
    Sampling(1.0, top_p=1e-6),
    Sampling(1.0, top_p=1.0),
    Sampling(1.0, min_p=0.3),
    Sampling(1.0, min_p=0.0),
    Sampling(1.0, min_p=1.0),
    Sampling(0.7, top_k=5, top_p=0.9, min_p=0.1),
    Sampling(2.0, top_k=4, top_p=0.6),
    Sampling(0.0, top_k=2, top_p=0.5),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_filters_equal_their_definition(sampling: Sampling) -> None:
    generator = random.Random(3)
    rows = [[generator.gauss(0, 2) for _ in range(7)] for _ in range(50)]
    probs = sampling.probs(torch.tensor(rows))
    expected = torch.tensor([slow_probs(row, sampling) for row in rows])
    torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-6)
    assert probs.dtype == torch.float32


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999])
def test_top_p_of_a_large_vocabulary_keeps_what_sorting_keeps(top_p: float) -> None:
    generator = torch.Generator().manual_seed(0)
    # From a few likely tokens to all equally likely.
    spread = torch.tensor([8.0, 3.0, 1.0, 0.01, 0.0])[:, None, None]
    # bfloat16 makes many of them equal.
    logits = (torch.randn(5, 3, 3000, generator=generator) * spread).bfloat16().float()

    probs = logits.softmax(-1)
    ranked_probs, token_by_rank = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ranked_probs.cumsum(-1) - ranked_probs
    in_nucleus = torch.zeros_like(probs).scatter_(-1, token_by_rank, (mass_before < top_p).float())

    sampling = Sampling(1.0, top_p=top_p)
    assert torch.equal(sampling.probs(logits) > 0, in_nucleus > 0)
    assert torch.equal(sampling.probs(logits[0, 0]) > 0, in_nucleus[0, 0] > 0)
    assert sampling.probs(torch.full((3000,), torch.nan)).isnan().all()


@pytest.mark.parametrize("vocab_size", [11, 2000])
def test_a_top_p_below_the_range_of_float32_keeps_the_likeliest_token(vocab_size: int) -> None:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(1))
    probs = Sampling(1.0, top_p=1e-300).probs(logits)
    assert torch.equal(probs, Sampling(0.0).probs(logits))


def test_equal_logits_leave_exactly_k_tokens_and_one_greedy_token() -> None:
    logits = torch.zeros(2, 6)
    assert Sampling(1.0, top_k=2).probs(logits).count_nonzero(dim=-1).tolist() == [2, 2]
    assert Sampling().probs(logits).sum(-1).tolist() == [1.0, 1.0]
    assert Sampling().probs(logits).argmax(-1).tolist() == Sampling().sample(logits, None).tolist()


def test_forbidden_tokens_have_no_probability_and_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 2.0]])
    for sampling in SETTINGS:
        probs = sampling.probs(logits)
        assert probs[0, 0] == 0 and probs[0, 2] == 0 and bool(probs.isfinite().all())
        for uniform in (0.0, 0.5, LAST):
            token = sampling.sample(logits, torch.tensor([uniform], dtype=torch.float64))
            assert token.item() in (1, 3)


@pytest.mark.parametrize("zeros", [(0,), (3,), (0, 3), (0, 1, 3), (1, 2), ()])
@pytest.mark.parametrize("uniform", [0.0, 2**-24, 0.5, LAST])
def test_a_token_of_weight_zero_is_never_drawn(zeros: tuple[int, ...], uniform: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(500, 4, generator=generator)
    exponents = torch.randint(-20, 3, (500, 1), generator=generator)
    weights = weights * 10.0**exponents
    weights[:, list(zeros)] = 0
    tokens = draw(weights, torch.full((500,), uniform, dtype=torch.float64))
    assert bool((weights.gather(1, tokens[:, None]) > 0).all())


@pytest.mark.parametrize("size", [50_000, 200_000])
def test_each_token_of_a_large_vocabulary_is_drawn_by_numbers_of_its_own_probability(
    size: int,
) -> None:
    """The numbers that draw a token are those of its interval, to 1e-12.

    The least likely token has an interval of 4e-7.
    """
    zipf_logits = -torch.arange(1, size + 1).log()
    weights = Sampling(1.0).probs(zipf_logits)
    exact_sums = accumulate(map(Fraction, weights.tolist()))
    cumulative = torch.tensor(list(map(float, exact_sums)), dtype=torch.float64)
    interval_ends = cumulative / cumulative[-1]
    interval_starts = torch.cat((torch.zeros(1), cumulative[:-1])) / cumulative[-1]

    generator = torch.Generator().manual_seed(0)
    random_tokens = torch.randint(size, (60,), generator=generator).tolist()
    tokens = torch.tensor([*range(20), *random_tokens, *range(size - 40, size)])
    for chunk in tokens.split(20):
        chunk_weights = weights.expand(len(chunk), size)
        for uniform in (interval_starts[chunk] + 1e-12, interval_ends[chunk] - 1e-12):
            assert torch.equal(draw(chunk_weights, uniform), chunk)


def test_log_probs_are_the_models_own_whatever_the_sampling() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0]])
    token = torch.tensor([1])
    assert Sampling.log_probs(logits, token).item() == pytest.approx(
        math.log(SOFTMAX.probs(logits)[0, 1].item())
    )


def test_a_longer_table_begins_with_the_shorter_one() -> None:
    table = noise_table(3, 5, 100)
    for length in (1, 2, 5, 6, 16, 99):
        assert torch.equal(noise_table(3, 5, length), table[:length])
    assert table.shape == (100, len(Purpose))
    assert float(table.min()) >= 0 and float(table.max()) < 1


def test_every_bit_of_a_seed_and_of_an_index_changes_the_table() -> None:
    seeds = [0, 2**63 - 1, 2**32 + 1, *(1 << bit for bit in range(63))]
    indices = [0, 2**32 + 1, *(1 << bit for bit in range(63))]
    tables = {
        tuple(noise_table(seed, index, 2).flatten().tolist()) for seed in seeds for index in indices
    }
    assert len(tables) == len(set(seeds)) * len(set(indices))


def test_a_table_does_not_touch_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    noise_table(1, 1, 10)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_neighbouring_tables_are_independent(seed: int) -> None:
    """Means and correlations of 4000 rows are within 5 standard errors of their expectations.

    Correlations are those of neighbouring rows, of purposes and of positions. These are about 40
    comparisons of 5 sigma: a false alarm once in 40,000 choices of the seed.
    """
    num_rows = 4000
    rows = [noise_table(seed, index, 3) for index in range(num_rows)]
    tables = torch.stack(rows).double().flatten(1)
    assert float((tables.mean(0) - 0.5).abs().max()) < 5 * (1 / 12 / num_rows) ** 0.5

    standardized = (tables - 0.5) * 12**0.5
    bound = 5 / num_rows**0.5
    correlations = standardized.T @ standardized / num_rows
    off_diagonal = correlations - correlations.diag().diag()
    assert float(off_diagonal.abs().max()) < bound
    neighbour_correlations = (standardized[1:] * standardized[:-1]).mean(0)
    assert float(neighbour_correlations.abs().max()) < bound

    # Chi-square with 49 degrees of freedom: above 110 once in a million.
    cell_counts = torch.histc(tables[:, 0], 50, 0, 1)
    expected_count = num_rows / 50
    chi_square = ((cell_counts - expected_count) ** 2 / expected_count).sum()
    assert float(chi_square) < 110


@pytest.mark.parametrize("size", [11, 4096, 4097, 5000, 49_152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_logit_is_found_where_argmax_finds_it(size: int, dtype: torch.dtype) -> None:
    """Ties go to the first token; NaN is the largest; the last and first tokens can win."""
    logits = torch.randn(6, 2, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    logits[1, 0, -1] = logits[1, 1, 0] = 100
    logits[2, 0, [size - 2, size // 2, 3]] = 100
    logits[3, 0, size - 1] = logits[3, 1, 2] = torch.nan
    logits[4] = 1
    assert largest(logits).tolist() == logits.argmax(-1).tolist()
    assert largest(logits[0, 0]).tolist() == logits[0, 0].argmax(-1).tolist()
