"""What training can tell of the decoding to come: counts, summed over batches and processes.

Shapes: B rows, T tokens, V vocabulary, N new tokens of a row, K draft tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric

from lightning_specdec.data import IGNORED, Batch
from lightning_specdec.rules import Sampling
from lightning_specdec.training.round_metrics import Rounds
from lightning_specdec.training.rounds import overlap

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


class Speculation(Rounds):
    """What speculation would bring, read off the logits of draft and target along known texts (teacher forcing).

    Theory: given the text before it, a guess is kept with probability

        beta = sum over the vocabulary of min(draft_probs, target_probs)

    (Leviathan et al. 2023, theorem 3.5). At temperature 0 both distributions are one-hot and beta is 1 where the two
    models' likeliest tokens agree, 0 elsewhere: greedy matching is the same formula. `Rounds` counts what follows from
    that. If the texts are what the target itself would decode greedily, the counts at temperature 0 are exactly those
    of the decoding; on other texts they are an estimate.

    A draft that reads its own guesses gives logits `[B, T, V]`: along the text, beta_j is the same whatever round the
    guess belongs to. Heads guess all K tokens from where the round starts and give `[B, T, K, V]`; then beta depends on
    the start and on the number of the guess, and what is tested is weighed by how likely a round is to get there.

    Args:
        num_draft_tokens: K, guesses of a round.
        sampling: how both models' logits become probabilities.
        first_round: whether there are guesses before the target has read anything.
    """

    def __init__(self, num_draft_tokens: int, sampling: Sampling, *, first_round: bool = True) -> None:
        super().__init__(num_draft_tokens, first_round=first_round)
        self.sampling = sampling

    def update(  # type: ignore[override]
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
        super().update(acceptance, num_new)


class RoundMetrics(nn.Module, ABC):
    """What rounds would keep over one data set; a kind of training adds what it learns by.

    Args:
        greedy, sampling: counts the rounds at temperature 0, and at temperature 1.
    """

    def __init__(self, greedy: Rounds, sampling: Rounds) -> None:
        super().__init__()
        self.greedy, self.sampling = greedy, sampling

    @abstractmethod
    def compute(self) -> dict[str, Tensor]:
        """Every rate by its name, over all processes."""

    def rates(self) -> dict[str, Tensor]:
        """What all kinds of training have in common."""
        greedy, sampling = self.greedy.compute(), self.sampling.compute()
        return {
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


class PairMetrics(RoundMetrics):
    """All metrics of a draft and its target that both score the next token.

    Args:
        num_draft_tokens: guesses of a round.
        first_round: whether there are guesses before the target has read anything.
    """

    greedy: Speculation
    sampling: Speculation

    def __init__(self, num_draft_tokens: int, *, first_round: bool = True) -> None:
        super().__init__(
            Speculation(num_draft_tokens, Sampling(), first_round=first_round),
            Speculation(num_draft_tokens, Sampling(temperature=1.0), first_round=first_round),
        )
        self.draft = NextToken()
        self.target = NextToken()

    def update(self, draft_logits: Tensor, target_logits: Tensor, batch: Batch) -> None:
        """Count one batch; logits as of `Speculation.update`, of which the first guess makes the draft's loss."""
        labels = batch.next_tokens()
        self.draft.update(draft_logits if draft_logits.dim() == 3 else draft_logits[:, :, 0], labels)
        self.target.update(target_logits, labels)
        self.greedy.update(draft_logits, target_logits, batch)
        self.sampling.update(draft_logits, target_logits, batch)

    def compute(self) -> dict[str, Tensor]:
        draft, target = self.draft.compute(), self.target.compute()
        return {
            "loss": draft.loss + target.loss,
            "draft_loss": draft.loss,
            "target_loss": target.loss,
            "draft_perplexity": draft.perplexity,
            "target_perplexity": target.perplexity,
            "draft_accuracy": draft.accuracy,
            "target_accuracy": target.accuracy,
            **self.rates(),
        }
