"""What training can tell of the decoding to come: counts, summed over batches and processes.

Knows nothing of Lightning, nor of how the logits were made.

Shapes: B rows, T tokens, V vocabulary, N new tokens of a row, K draft tokens, W = K + 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric

from lightning_specdec.checks import require_int
from lightning_specdec.data import IGNORED, Batch
from lightning_specdec.rules import Sampling
from lightning_specdec.training.rounds import draft_windows, expected_rounds, overlap

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def next_token_loss(logits: Float[Tensor, "B T V"], labels: Int[Tensor, "B T"], reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats on the next token, over the labels that are not padding."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction=reduction)


class NextTokenCounts(NamedTuple):
    """How well one model predicts the next token, as sums over the tokens of a data set."""

    loss_sum: Tensor
    num_correct: Tensor
    num_tokens: Tensor

    @property
    def loss(self) -> Tensor:
        """loss_sum / num_tokens, in nats"""
        return self.loss_sum / self.num_tokens

    @property
    def perplexity(self) -> Tensor:
        """exp(loss): among how many equally likely tokens the model is left to guess"""
        return self.loss.exp()

    @property
    def accuracy(self) -> Tensor:
        """num_correct / num_tokens, where correct means that the likeliest token is the label"""
        return self.num_correct / self.num_tokens


class NextToken(Metric):
    """Loss, perplexity and accuracy of one model on the next token; every token counts the same, padding never."""

    full_state_update = False
    loss_sum: Tensor
    num_correct: Tensor
    num_tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("loss_sum", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("num_correct", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("num_tokens", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Float[Tensor, "B T V"], labels: Int[Tensor, "B T"]) -> None:
        """Count one batch; labels that are `IGNORED` are padding."""
        self.loss_sum += next_token_loss(logits, labels, "sum")
        self.num_correct += (logits.argmax(-1) == labels).sum()
        self.num_tokens += (labels != IGNORED).sum()

    def compute(self) -> NextTokenCounts:
        """The counts, with the rates as properties."""
        return NextTokenCounts(self.loss_sum, self.num_correct, self.num_tokens)


class SpeculationCounts(NamedTuple):
    """What speculative decoding would do along given texts, as expected counts.

    Args:
        acceptance_sum: sum over the tested guesses of the probability that the guess is kept.
        num_tested: guesses that were judged. Of a draft that reads its own guesses: one for each position.
        num_positions: new tokens, each once.
        num_rounds: rounds needed to decode them all.
        accepted_per_round: `[K + 1]`, how many rounds keep 0, 1, ..., K guesses.
    """

    acceptance_sum: Tensor
    num_tested: Tensor
    num_positions: Tensor
    num_rounds: Tensor
    accepted_per_round: Tensor

    @property
    def acceptance_rate(self) -> Tensor:
        """acceptance_sum / num_tested: E[beta], Leviathan et al. 2023, definition 3.1"""
        return self.acceptance_sum / self.num_tested

    @property
    def block_efficiency(self) -> Tensor:
        """num_positions / num_rounds: new tokens for each call of the target"""
        return self.num_positions / self.num_rounds


class Speculation(Metric):
    """What speculation would bring, read off the logits of draft and target along known texts (teacher forcing).

    Theory: given the text before it, a guess is kept with probability

        beta = sum over the vocabulary of min(draft_probs, target_probs)

    (Leviathan et al. 2023, theorem 3.5). At temperature 0 both distributions are one-hot and beta is 1 where the two
    models' likeliest tokens agree, 0 elsewhere: greedy matching is the same formula. The rounds are then laid end to
    end over the tokens behind the prompt. A round that starts at new token j, of N in that row, guesses
    w = min(K, N - j - 1) tokens, keeps exactly n < w of them with probability beta_j ... beta_(j+n-1) (1 - beta_(j+n))
    and all w with probability beta_j ... beta_(j+w-1); the next round starts at j + n + 1, because the target adds one
    token of its own. Summing over all ways to get there gives, for each j, the probability that a round starts there,
    and the sum of those is the expected number of rounds. If the texts are what the target itself would decode
    greedily, the counts at temperature 0 are exactly those of the decoding; on other texts they are an estimate.

    A draft that reads its own guesses gives logits `[B, T, V]`: along the text, beta_j is the same whatever round the
    guess belongs to. Heads guess all K tokens from where the round starts and give `[B, T, K, V]`; then beta depends on
    the start and on the number of the guess, and what is tested is weighed by how likely a round is to get there.

    Args:
        num_draft_tokens: K, guesses of a round.
        sampling: how both models' logits become probabilities.
        first_round: whether there are guesses before the target has read anything.
    """

    full_state_update = False
    acceptance_sum: Tensor
    num_tested: Tensor
    num_positions: Tensor
    num_rounds: Tensor
    accepted_per_round: Tensor

    def __init__(self, num_draft_tokens: int, sampling: Sampling, *, first_round: bool = True) -> None:
        super().__init__()
        self.num_draft_tokens = require_int("num_draft_tokens", num_draft_tokens, 1)
        self.sampling, self.first_round = sampling, first_round
        self.add_state("acceptance_sum", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("num_tested", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("num_positions", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("num_rounds", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("accepted_per_round", torch.zeros(num_draft_tokens + 1), dist_reduce_fx="sum")

    def update(
        self, draft_logits: Float[Tensor, "B T *K V"], target_logits: Float[Tensor, "B T V"], batch: Batch
    ) -> None:
        """Count one batch.

        Args:
            draft_logits: `[:, t]` score token t + 1 of `batch.tokens`; with an axis of guesses, `[:, t, i]` score token
                t + 1 + i where the round starts behind token t.
            target_logits: `[:, t]` score token t + 1.
        """
        num_new = batch.lengths - batch.prompt_lengths
        offsets = torch.arange(int(num_new.max()), device=target_logits.device)
        positions = (batch.prompt_lengths[:, None] - 1 + offsets).clamp(max=target_logits.shape[1] - 1)
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        draft_probs = self.sampling.probs(draft_logits[rows, positions])
        target_probs = self.sampling.probs(target_logits[rows, positions])
        if draft_probs.dim() == 3:
            acceptance = overlap(draft_probs, target_probs)
        else:
            if draft_probs.shape[2] != self.num_draft_tokens:
                raise ValueError(
                    f"these are logits of {draft_probs.shape[2]} guesses, the metric counts rounds of "
                    f"{self.num_draft_tokens}: give as many"
                )
            ahead = functional.pad(target_probs, (0, 0, 0, self.num_draft_tokens - 1))
            each = [overlap(guess, ahead[:, i : i + len(offsets)]) for i, guess in enumerate(draft_probs.unbind(dim=2))]
            acceptance = torch.stack(each, dim=-1)
        rounds = expected_rounds(acceptance, num_new, self.num_draft_tokens, first_round=self.first_round)
        if draft_probs.dim() == 3:
            is_new = offsets < num_new[:, None]
            self.acceptance_sum += acceptance.masked_fill(~is_new, 0).sum()
            self.num_tested += num_new.sum()
        else:
            windows = draft_windows(num_new, self.num_draft_tokens, first_round=self.first_round)
            kept = torch.arange(self.num_draft_tokens + 1, device=rounds.device)
            num_accepted = (rounds * kept).sum()
            self.acceptance_sum += num_accepted
            self.num_tested += num_accepted + (rounds * (kept < windows[..., None])).sum()
        self.num_positions += num_new.sum()
        self.num_rounds += rounds.sum()
        self.accepted_per_round += rounds.sum((0, 1))

    def compute(self) -> SpeculationCounts:
        """The counts, with the rates as properties."""
        return SpeculationCounts(
            self.acceptance_sum, self.num_tested, self.num_positions, self.num_rounds, self.accepted_per_round
        )


class PairMetrics(nn.Module):
    """All metrics of a draft and its target over one data set.

    Args:
        num_draft_tokens: guesses of a round.
        first_round: whether there are guesses before the target has read anything.
    """

    def __init__(self, num_draft_tokens: int, *, first_round: bool = True) -> None:
        super().__init__()
        self.draft = NextToken()
        self.target = NextToken()
        self.greedy = Speculation(num_draft_tokens, Sampling(), first_round=first_round)
        self.sampling = Speculation(num_draft_tokens, Sampling(temperature=1.0), first_round=first_round)

    def update(self, draft_logits: Tensor, target_logits: Tensor, batch: Batch) -> None:
        """Count one batch; logits as of `Speculation.update`, of which the first guess makes the draft's loss."""
        labels = batch.next_tokens()
        self.draft.update(draft_logits if draft_logits.dim() == 3 else draft_logits[:, :, 0], labels)
        self.target.update(target_logits, labels)
        self.greedy.update(draft_logits, target_logits, batch)
        self.sampling.update(draft_logits, target_logits, batch)

    def compute(self) -> dict[str, Tensor]:
        """Every rate by its name, over all processes."""
        draft, target = self.draft.compute(), self.target.compute()
        greedy, sampling = self.greedy.compute(), self.sampling.compute()
        return {
            "loss": draft.loss + target.loss,
            "draft_loss": draft.loss,
            "target_loss": target.loss,
            "draft_perplexity": draft.perplexity,
            "target_perplexity": target.perplexity,
            "draft_accuracy": draft.accuracy,
            "target_accuracy": target.accuracy,
            "acceptance_rate": greedy.acceptance_rate,
            "block_efficiency": greedy.block_efficiency,
            "sampling_acceptance_rate": sampling.acceptance_rate,
            "sampling_block_efficiency": sampling.block_efficiency,
        }

    def reset(self) -> None:
        """Forget all counts, those that a subclass adds too."""
        for metric in self.modules():
            if isinstance(metric, Metric):
                metric.reset()
