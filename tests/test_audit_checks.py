"""Laws of the parts of an audit: shares of uniform numbers, and where outputs diverge."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import cases
import pytest
import torch
from torch import Tensor

from lightning_specdec.audit import identity
from lightning_specdec.audit.exact_round import find_shares
from lightning_specdec.audit.identity import Divergence, find_divergence
from lightning_specdec.audit.stage import STEPS
from lightning_specdec.decoding import autoregressive_decode
from lightning_specdec.models import RNN, LanguageModel
from lightning_specdec.rules import Sampling

PROMPT = [3, 1]


def test_the_share_of_each_value_is_found() -> None:
    """Step functions: the value at a number counts the steps up to it."""
    generator = torch.Generator().manual_seed(0)
    all_steps = []
    for num_steps in (0, 1, 5):
        steps = torch.randint(1, STEPS, (num_steps,), generator=generator)
        all_steps.append(steps.sort().values)

    def ask(functions: Tensor, uniform: Tensor) -> Tensor:
        numbers = (uniform.double() * STEPS).long()
        values = []
        for function, number in zip(functions.tolist(), numbers.tolist(), strict=True):
            values.append(int((all_steps[function] <= number).sum()))
        return torch.tensor(values)

    for shares, steps in zip(find_shares(ask, 3, name="a table"), all_steps, strict=True):
        ends = [0, *steps.tolist(), STEPS]
        expected = {}
        for value, (start, end) in enumerate(pairwise(ends)):
            expected[value] = (end - start) / STEPS
        assert shares == expected


def test_the_search_ends_if_there_is_no_function() -> None:
    generator = torch.Generator().manual_seed(0)

    def toss(functions: Tensor, uniform: Tensor) -> Tensor:
        return torch.randint(0, 3, functions.shape, generator=generator)

    with pytest.raises(ValueError, match="the coin is not a function of its random numbers"):
        find_shares(toss, 8, name="the coin")


def maybe_divergence(
    target: LanguageModel,
    standard_tokens: list[int],
    other_tokens: list[int],
    sampling: Sampling,
) -> Divergence | None:
    return find_divergence(
        target,
        PROMPT,
        standard_tokens,
        other_tokens,
        prompt_index=0,
        sampling=sampling,
        seed=0,
        width=4,
    )


def divergence(
    target: LanguageModel,
    standard_tokens: list[int],
    other_tokens: list[int],
    sampling: Sampling,
) -> Divergence:
    result = maybe_divergence(target, standard_tokens, other_tokens, sampling)
    assert result is not None
    return result


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_divergence_that_rounding_cannot_explain_is_a_bug(temperature: float) -> None:
    sampling = Sampling(temperature)
    target = cases.MODELS["rnn"](4, sharpness=1.5)
    tokens = autoregressive_decode(target, [PROMPT], max_new_tokens=8, sampling=sampling).tokens[0]
    assert maybe_divergence(target, tokens, tokens, sampling) is None

    cut = divergence(target, tokens, tokens[:-1], sampling)
    assert (cut.position, cut.tokens, cut.verdict) == (7, None, "bug")

    wrong_token = (tokens[5] + 2) % target.vocab_size
    wrong = divergence(target, tokens, [*tokens[:5], wrong_token, 0, 0], sampling)
    assert (wrong.position, wrong.tokens, wrong.verdict) == (5, (tokens[5], wrong_token), "bug")
    assert wrong.gap is not None
    assert wrong.margin is not None
    assert wrong.rounding is not None
    assert wrong.margin > 100 * wrong.rounding > 0


@pytest.mark.parametrize(("gap", "verdict"), [(1e-7, "tie"), (1e-3, "bug")])
def test_a_divergence_between_logits_that_rounding_may_swap_is_a_tie(
    gap: float, verdict: str
) -> None:
    target = cases.MODELS["rnn"](4, sharpness=1.5)
    tokens = autoregressive_decode(target, [PROMPT], max_new_tokens=8).tokens[0]
    # Another token, with the same logit but for the gap.
    near_token = (tokens[5] + 2) % target.vocab_size
    assert isinstance(target, RNN)
    with torch.no_grad():
        target.output.weight[near_token] = target.output.weight[tokens[5]]
        target.output.bias[near_token] = target.output.bias[tokens[5]] - gap
    other_tokens = [*tokens[:5], near_token, 0, 0]
    assert divergence(target, tokens, other_tokens, Sampling()).verdict == verdict


@pytest.mark.parametrize(("distance", "verdict"), [(1e-8, "tie"), (1e-3, "bug")])
def test_a_divergence_of_draws_near_the_end_of_an_interval_is_a_tie(
    distance: float, verdict: str
) -> None:
    target = cases.MODELS["rnn"](4, sharpness=1.5)
    sampling = Sampling(1.0)
    logits = target(torch.tensor([PROMPT])).logits[0, -1].detach()
    interval_ends = sampling.probs(logits).cumsum(0)
    # A number just below the end draws token 3, one above it token 4.
    noise = torch.full((1, 3), float(interval_ends[3]) - distance)
    with mock.patch.object(identity, "noise_table", lambda *keys: noise):
        assert divergence(target, [3], [4], sampling).verdict == verdict
