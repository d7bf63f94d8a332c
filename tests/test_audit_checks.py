"""Laws of what an audit is made of: steps of functions, a permutation test, corrected p-values, where outputs part."""

from __future__ import annotations

import time
from unittest import mock

import cases
import pytest
import torch
from torch import Tensor

from lightning_specdec.audit import identity
from lightning_specdec.audit.findings import holm, permutation_test
from lightning_specdec.audit.identity import Divergence, find_divergence
from lightning_specdec.audit.intervals import STEPS, NoFunction, find_steps
from lightning_specdec.decoding import autoregressive_decode
from lightning_specdec.models import RNN, LanguageModel
from lightning_specdec.rules import Sampling

PROMPT = [3, 1]


def test_steps_are_found_where_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    ends = [sorted(torch.randint(1, STEPS, (n,), generator=generator).tolist()) + [STEPS] for n in (0, 1, 5)]
    tables = [torch.tensor(each) for each in ends]

    def ask(which: Tensor, uniform: Tensor) -> Tensor:
        numbers = (uniform.double() * STEPS).long()
        return torch.tensor(
            [int((tables[i] <= n).sum()) for i, n in zip(which.tolist(), numbers.tolist(), strict=True)]
        )

    for hints in (None, [[], [7], [end - 1 for end in ends[2]]]):
        found = find_steps(ask, 3, name="a table", hints=hints)
        assert [steps.ends for steps in found] == ends and found[2].values == [*range(6)]
        assert sum(size for _, size, _ in found[2].parts) == 1 and found[1].value(found[1].parts[1][2]) == 1


def test_the_search_for_steps_ends_where_there_is_no_function() -> None:
    generator = torch.Generator().manual_seed(0)

    def ask(which: Tensor, uniform: Tensor) -> Tensor:
        return torch.randint(0, 3, which.shape, generator=generator)

    started = time.process_time()
    with pytest.raises(NoFunction, match="the coin is not a function of its random numbers"):
        find_steps(ask, 2, name="the coin")
    with pytest.raises(ValueError, match="a saw has more than 512 steps for its random numbers"):
        find_steps(lambda which, uniform: (uniform * 9973).long() % 7, 1, name="a saw")
    assert time.process_time() - started < 1


def test_the_permutation_test_raises_false_alarms_as_often_as_it_may() -> None:
    """Of 200 tests of like samples 5% may be at most 0.05; 23 of them would be once in 10,000."""
    generator, alarms = torch.Generator().manual_seed(0), 0
    for seed in range(200):
        one, other = torch.randint(0, 3, (2, 2, 12, 2), generator=generator).tolist()
        alarms += permutation_test(one, other, num_permutations=199, seed=seed) <= 0.05
    assert alarms < 23


def test_the_permutation_test_tells_samples_apart_and_can_be_no_surer_than_its_shuffles() -> None:
    one, other = ([[[token]] * 20 for token in tokens] for tokens in ((0, 1), (0, 2)))
    assert permutation_test(one, other, num_permutations=999, seed=0) == 1 / 1000
    assert permutation_test(one, one, num_permutations=999, seed=0) == 1.0
    with pytest.raises(ValueError, match=r"the samples have \[20, 20\] and \[20\] rows"):
        permutation_test(one, other[:1], num_permutations=9, seed=0)


def test_p_values_are_corrected_for_their_number() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert holm({}) == {} and holm({"a": 0.7, "b": 0.9}) == {"a": 1.0, "b": 1.0}


def part(target: LanguageModel, standard: list[int], other: list[int], sampling: Sampling) -> Divergence:
    found = find_divergence(target, PROMPT, standard, other, number=0, sampling=sampling, seed=0, width=4)
    assert found is not None
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_divergence_that_rounding_cannot_have_made_is_a_bug(temperature: float) -> None:
    sampling, target = Sampling(temperature), cases.MODELS["rnn"](4, sharpness=1.5)
    tokens = autoregressive_decode(target, [PROMPT], max_new_tokens=8, sampling=sampling).tokens[0]
    assert find_divergence(target, PROMPT, tokens, tokens, number=0, sampling=sampling, seed=0, width=4) is None
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
