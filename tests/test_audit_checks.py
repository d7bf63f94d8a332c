"""Laws of what an audit is made of: shares of uniform numbers, where outputs part."""

from __future__ import annotations

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
    generator = torch.Generator().manual_seed(0)
    ends = [
        sorted(torch.randint(1, STEPS, (n,), generator=generator).tolist()) + [STEPS]
        for n in (0, 1, 5)
    ]
    tables = [torch.tensor(each) for each in ends]

    def ask(which: Tensor, uniform: Tensor) -> Tensor:
        numbers = (uniform.double() * STEPS).long()
        both = zip(which.tolist(), numbers.tolist(), strict=True)
        return torch.tensor([int((tables[i] <= n).sum()) for i, n in both])

    for found, each in zip(find_shares(ask, 3, name="a table"), ends, strict=True):
        sizes = [end - start for start, end in zip([0, *each], each, strict=False)]
        assert found == {value: size / STEPS for value, size in enumerate(sizes)}


def test_the_search_ends_where_there_is_no_function() -> None:
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match="the coin is not a function of its random numbers"):
        find_shares(
            lambda which, uniform: torch.randint(0, 3, which.shape, generator=generator),
            8,
            name="the coin",
        )


def part(
    target: LanguageModel, standard: list[int], other: list[int], sampling: Sampling
) -> Divergence:
    found = find_divergence(
        target, PROMPT, standard, other, number=0, sampling=sampling, seed=0, width=4
    )
    assert found is not None
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_divergence_that_rounding_cannot_have_made_is_a_bug(temperature: float) -> None:
    sampling, target = Sampling(temperature), cases.MODELS["rnn"](4, sharpness=1.5)
    tokens = autoregressive_decode(target, [PROMPT], max_new_tokens=8, sampling=sampling).tokens[0]
    assert (
        find_divergence(
            target, PROMPT, tokens, tokens, number=0, sampling=sampling, seed=0, width=4
        )
        is None
    )
    ended = part(target, tokens, tokens[:-1], sampling)
    assert (ended.position, ended.tokens, ended.verdict) == (7, None, "bug")
    wrong = (tokens[5] + 2) % target.vocab_size
    found = part(target, tokens, [*tokens[:5], wrong, 0, 0], sampling)
    assert (found.position, found.tokens, found.verdict) == (5, (tokens[5], wrong), "bug")
    assert found.gap is not None and found.margin is not None and found.rounding is not None
    assert found.margin > 100 * found.rounding > 0


@pytest.mark.parametrize("apart", [1e-7, 1e-3])
def test_a_divergence_between_logits_that_rounding_may_swap_is_a_tie(apart: float) -> None:
    target = cases.MODELS["rnn"](4, sharpness=1.5)
    tokens = autoregressive_decode(target, [PROMPT], max_new_tokens=8).tokens[0]
    other = (tokens[5] + 2) % target.vocab_size
    assert isinstance(target, RNN)
    with torch.no_grad():
        target.output.weight[other] = target.output.weight[tokens[5]]
        target.output.bias[other] = target.output.bias[tokens[5]] - apart
    verdict = part(target, tokens, [*tokens[:5], other, 0, 0], Sampling()).verdict
    assert verdict == ("tie" if apart < 1e-5 else "bug")


@pytest.mark.parametrize("apart", [1e-8, 1e-3])
def test_a_divergence_of_draws_beside_the_end_of_an_interval_is_a_tie(apart: float) -> None:
    target, sampling = cases.MODELS["rnn"](4, sharpness=1.5), Sampling(1.0)
    ends = sampling.probs(target(torch.tensor([PROMPT])).logits[0, -1].detach()).cumsum(0)
    table = torch.full((1, 3), float(ends[3]) - apart)
    with mock.patch.object(identity, "noise_table", lambda *keys: table):
        assert part(target, [3], [4], sampling).verdict == ("tie" if apart < 1e-5 else "bug")
