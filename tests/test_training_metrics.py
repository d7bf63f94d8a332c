"""Laws of training's metrics: each is its formula, counted by hand, and along the target's own text a decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_specdec.data import ArithmeticProgressions, Batch
from lightning_specdec.decoding import speculative_decode
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.models import RNN, LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.rules import Sampling
from lightning_specdec.training import NextToken, PairMetrics, Speculation, next_token_loss
from lightning_specdec.training.metrics import expected_rounds


def pair(seed: int = 0) -> tuple[RNN, RNN]:
    torch.manual_seed(seed)
    return RNN(50, hidden_size=16), RNN(50, hidden_size=16, num_layers=1)


def one_hot_logits(tokens: list[list[int]], vocab_size: int = 9) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab_size).float() * 50


def batch_of(*sequences: list[int], prompt_length: int = 3) -> Batch:
    return ArithmeticProgressions(prompt_length=prompt_length).collate(list(enumerate(sequences)))


def test_padding_is_masked_out_of_loss_and_metrics() -> None:
    target, draft = pair()
    sequences = [[1, 2, 3, 4, 5, 6], [9, 8, 7, 6], [3, 30, 4]]
    together, apart = PairMetrics(3), PairMetrics(3)
    with torch.no_grad():
        for metrics, batches in ((together, [batch_of(*sequences)]), (apart, [batch_of(row) for row in sequences])):
            for batch in batches:
                inputs = batch.tokens[:, :-1]
                metrics.update(draft(inputs).logits, target(inputs).logits, batch)
        padded = batch_of(*sequences)
        loss = next_token_loss(target(padded.tokens[:, :-1]).logits, padded.next_tokens())
    assert together.target.num_tokens == 5 + 3 + 2
    torch.testing.assert_close(together.compute(), apart.compute())
    torch.testing.assert_close(loss, together.compute()["target_loss"])


def test_next_token_metrics_are_their_formulas() -> None:
    metric = NextToken()
    logits = torch.tensor([[[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]], [[0.0, 9.0, 0.0], [5.0, 5.0, 5.0]]])
    metric.update(logits, torch.tensor([[0, 0], [0, -100]]))
    counts = metric.compute()
    wrong = torch.tensor([0.0, 9.0, 0.0]).logsumexp(0)
    right = wrong - 9
    assert counts.num_tokens == 3 and counts.num_correct == 2  # a tie goes to the first token
    torch.testing.assert_close(counts.loss, (torch.tensor(3.0).log() + right + wrong) / 3)
    torch.testing.assert_close(counts.perplexity, counts.loss.exp())
    torch.testing.assert_close(counts.accuracy, torch.tensor(2 / 3))


def test_greedy_rounds_are_counted_by_hand() -> None:
    # Seven new tokens after a prompt of three; draft and target agree on new tokens 0, 1, 3, 4, 5 and 6.
    target = [[0, 0, 1, 1, 1, 1, 1, 1, 1]]
    draft = [[5, 5, 1, 1, 2, 1, 1, 1, 1]]
    metric = Speculation(3, Sampling())
    metric.update(one_hot_logits(draft), one_hot_logits(target), batch_of(list(range(10))))
    counts = metric.compute()
    # Round 1 keeps 2 of 3 and adds a correction: 3 tokens. Round 2 guesses 3 of the 4 left, keeps all, adds one.
    assert counts.accepted_per_round.tolist() == [0, 0, 1, 1]
    assert counts.num_rounds == 2 and counts.num_positions == 7 and counts.acceptance_sum == 6
    assert counts.block_efficiency == 3.5
    torch.testing.assert_close(counts.acceptance_rate, torch.tensor(6 / 7))


def test_expected_rounds_are_counted_by_hand() -> None:
    # Two new tokens, window 3: one guess at most, kept with probability 0.25; if not, a second round guesses nothing.
    rounds = expected_rounds(torch.tensor([[0.25, 0.9]]), torch.tensor([2]), 3)
    assert rounds[0].tolist() == [[0.75, 0.25, 0, 0], [0.75, 0, 0, 0]]


def test_expected_rounds_of_heads_follow_every_path() -> None:
    """Against a walk over all outcomes: what a guess is worth depends on where its round starts."""
    num_new, num_draft_tokens = 6, 3
    acceptance = torch.rand(num_new, num_draft_tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for first_round in (True, False):
        wanted = torch.zeros(num_new, num_draft_tokens + 1, dtype=torch.float64)

        def walk(j: int, probability: float, wanted: Tensor = wanted, first_round: bool = first_round) -> None:
            if j >= num_new:
                return
            window = min(num_draft_tokens, num_new - j - 1) if j or first_round else 0
            for n in range(window + 1):
                kept = float(acceptance[j, :n].prod()) * (1 if n == window else 1 - float(acceptance[j, n]))
                wanted[j, n] += probability * kept
                walk(j + n + 1, probability * kept)

        walk(0, 1.0)
        lengths = torch.tensor([num_new, 2])
        both = torch.stack((acceptance, acceptance))
        found = expected_rounds(both, lengths, num_draft_tokens, first_round=first_round)
        torch.testing.assert_close(found[0], wanted)
        assert found[1, 2:].sum() == 0


def test_a_chain_is_heads_whose_guess_does_not_mind_where_it_starts() -> None:
    generator = torch.Generator().manual_seed(1)
    chain, lengths = torch.rand(3, 9, generator=generator), torch.tensor([9, 4, 1])
    heads = torch.nn.functional.pad(chain, (0, 1)).unfold(1, 2, 1)
    torch.testing.assert_close(expected_rounds(chain, lengths, 2), expected_rounds(heads, lengths, 2))


def test_the_rounds_of_heads_are_counted_by_hand() -> None:
    # Seven new tokens after a prompt of three, the target says 1 throughout. Nothing is guessed in the first round;
    # the second starts at new token 1 and keeps one of its two guesses, the third, at new token 3, both; the last, at
    # new token 6, has no room for a guess.
    target = [[1] * 9]
    draft = [[[5, 5]] * 3 + [[1, 7], [5, 5], [1, 1], [5, 5], [5, 5], [5, 5]]]
    metric = Speculation(2, Sampling(), first_round=False)
    metric.update(one_hot_logits(draft), one_hot_logits(target), batch_of(list(range(10))))  # type: ignore[arg-type]
    counts = metric.compute()
    assert counts.accepted_per_round.tolist() == [2, 1, 1]
    assert counts.num_rounds == 4 and counts.num_positions == 7
    assert counts.acceptance_sum == 3 and counts.num_tested == 4
    with pytest.raises(ValueError, match="logits of 3 draft tokens, got 2"):
        Speculation(3, Sampling()).update(one_hot_logits(draft), one_hot_logits(target), batch_of(list(range(10))))  # type: ignore[arg-type]


def test_sampling_acceptance_is_the_mean_overlap() -> None:
    draft, target = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])
    metric = Speculation(2, Sampling(temperature=1.0))
    sequence = [0, 1, 2, 0, 1]
    metric.update(draft.log().expand(1, 4, 3), target.log().expand(1, 4, 3), batch_of(sequence, prompt_length=2))
    beta = 0.2 + 0.3 + 0.1
    counts = metric.compute()
    torch.testing.assert_close(counts.acceptance_rate, torch.tensor(beta))
    # Three new tokens. Round 1 guesses 2 and keeps 0, 1 or 2; what is left is 2, 1 or 0 tokens.
    rounds = 1 + (1 - beta) * (1 + (1 - beta)) + beta * (1 - beta) * 1
    torch.testing.assert_close(counts.num_rounds, torch.tensor(rounds))


def test_identical_models_keep_every_guess() -> None:
    logits = torch.randn(2, 10, 50, generator=torch.Generator().manual_seed(0))
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        metric = Speculation(3, sampling)
        metric.update(logits, logits, batch_of(list(range(11)), list(range(11))))
        torch.testing.assert_close(metric.compute().acceptance_rate, torch.tensor(1.0))
        torch.testing.assert_close(metric.compute().block_efficiency, torch.tensor(4.0))


def recurrent() -> tuple[LanguageModel, LanguageModel]:
    target, draft = pair(3)
    with torch.no_grad():
        draft.output.bias[:25] -= 1
    return target, draft


def transformers() -> tuple[LanguageModel, LanguageModel]:
    """Random models whose output wanders, and differs now and then."""
    config: dict[str, Any] = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "max_position_embeddings": 64, "model_type": "llama"}
    models = []
    for spread in (0.4, 0.39):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            models.append(HuggingFaceLM({**config, "initializer_range": spread}).eval())
    return models[0], models[1]


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("make", "num_prompts", "num_new"), [(recurrent, 12, 9), (transformers, 16, 20)])
def test_along_the_targets_own_text_the_counts_are_those_of_decoding(
    make: Callable[[], tuple[LanguageModel, LanguageModel]], num_prompts: int, num_new: int, num_draft_tokens: int
) -> None:
    target, draft = make()
    prompts = [[start, start + 1, start + 2] for start in range(num_prompts)]
    decoded = speculative_decode(
        target, ModelDrafter(draft), prompts, max_new_tokens=num_new, num_draft_tokens=num_draft_tokens
    )
    batch = batch_of(*(row.prompt + row.tokens for row in decoded.rows))
    metric = Speculation(num_draft_tokens, Sampling())
    with torch.no_grad():
        metric.update(draft(batch.tokens[:, :-1]).logits, target(batch.tokens[:, :-1]).logits, batch)
    counts = metric.compute()
    assert decoded.counts is not None
    histogram = decoded.counts.histogram + [0] * (num_draft_tokens + 1 - len(decoded.counts.histogram))
    assert counts.accepted_per_round.tolist() == histogram
    assert counts.block_efficiency == pytest.approx(decoded.block_efficiency)
    assert 0 < decoded.counts.num_accepted < decoded.counts.num_tested, "a case that tells something"
