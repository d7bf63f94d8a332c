"""What training can say about the decoding to come: counts, summed over batches and processes.

Shapes: B rows, T tokens, V vocabulary, N new tokens of a row, K draft tokens, W = K + 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric

from lightning_specdec.config.checks import require_int
from lightning_specdec.data import IGNORED, Batch
from lightning_specdec.rules import Sampling

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
        """exp(loss)"""
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
        for name, zero in (("loss_sum", 0.0), ("num_correct", 0), ("num_tokens", 0)):
            self.add_state(name, torch.tensor(zero), dist_reduce_fx="sum")

    def update(self, logits: Float[Tensor, "B T V"], labels: Int[Tensor, "B T"]) -> None:
        """Count one batch; labels that are `IGNORED` are padding."""
        self.loss_sum += next_token_loss(logits, labels, "sum")
        self.num_correct += (logits.argmax(-1) == labels).sum()
        self.num_tokens += (labels != IGNORED).sum()

    def compute(self) -> NextTokenCounts:
        """The counts, with the rates as properties."""
        return NextTokenCounts(self.loss_sum, self.num_correct, self.num_tokens)


def overlap(draft_probs: Float[Tensor, "B N V"], target_probs: Float[Tensor, "B N V"]) -> Float[Tensor, "B N"]:
    """Probability that a draft token is accepted: sum over the vocabulary of min(draft_probs, target_probs).

    Leviathan et al. 2023, theorem 3.5; at temperature 0 it is 1 where both models' likeliest tokens agree.
    """
    return torch.minimum(draft_probs, target_probs).sum(-1).clamp(max=1.0)


def draft_windows(num_new: Int[Tensor, "B"], num_draft_tokens: int, *, first_round: bool = True) -> Int[Tensor, "B N"]:
    """Number of draft tokens of a round that starts at new token j; -1 behind a row's end, where none starts.

    Args:
        num_new: how many new tokens each row has; N is the most of them.
        num_draft_tokens: K, fewer where the text ends: the last token is the target's own.
        first_round: whether the round at new token 0 has draft tokens.
    """
    left = num_new[:, None] - torch.arange(int(num_new.max()), device=num_new.device) - 1
    windows = left.clamp(-1, num_draft_tokens)
    if not first_round:
        windows[:, 0] = 0
    return windows


def expected_rounds(
    acceptance: Float[Tensor, "B N *K"], num_new: Int[Tensor, "B"], num_draft_tokens: int, *, first_round: bool = True
) -> Float[Tensor, "B N W"]:
    """The probability that a round starts at new token j and keeps n draft tokens.

    A round with window w that starts at j keeps exactly n < w tokens with probability
    beta_j ... beta_(j+n-1) (1 - beta_(j+n)), all w with beta_j ... beta_(j+w-1); the next one starts at j + n + 1.

    Args:
        acceptance: `[B, N, K]`, the probability that draft token i of a round from new token j is accepted, given that
            those before it are; or `[B, N]`, where that depends on the new token j + i alone.
        num_new, num_draft_tokens, first_round: see `draft_windows`.
    """
    num_positions = acceptance.shape[1]
    windows = draft_windows(num_new, num_draft_tokens, first_round=first_round)
    if acceptance.dim() == 2:
        acceptance = functional.pad(acceptance, (0, num_draft_tokens - 1)).unfold(1, num_draft_tokens, 1)
    proposed = torch.arange(num_draft_tokens, device=acceptance.device) < windows[..., None]
    at_least = functional.pad((acceptance * proposed).cumprod(-1), (1, 0), value=1.0)
    exactly = at_least - functional.pad(at_least[..., 1:], (0, 1))
    exactly = exactly * (windows >= 0)[..., None]
    # By position first: the loop below has a few small operations for each.
    steps = exactly.movedim(0, 2).contiguous()
    reached = acceptance.new_zeros(num_positions + num_draft_tokens + 1, len(acceptance))
    reached[0] = 1
    for j, step in enumerate(steps.unbind(0)):
        reached[j + 1 : j + num_draft_tokens + 2].addcmul_(step, reached[j])
    return reached[:num_positions].T[..., None] * exactly


class SpeculationCounts(NamedTuple):
    """What speculative decoding would do along given texts, as expected counts.

    Args:
        acceptance_sum: sum over the tested draft tokens of the probability that they are accepted.
        num_tested: draft tokens that were judged. Of a draft that reads its own: one for each position.
        num_positions: new tokens, each once.
        num_rounds: rounds needed to decode them all.
        accepted_per_round: `[K + 1]`, how many rounds accept 0, 1, ..., K draft tokens.
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


class Rounds(Metric):
    """Rounds laid end to end over the tokens behind the prompt of known texts; see `expected_rounds`.

    Args:
        num_draft_tokens: K, draft tokens of a round.
        first_round: whether there are draft tokens before the target has read anything.
    """

    full_state_update = False

    def __init__(self, num_draft_tokens: int, *, first_round: bool = True) -> None:
        super().__init__()
        self.num_draft_tokens = require_int("num_draft_tokens", num_draft_tokens, 1)
        self.first_round = first_round
        for name in SpeculationCounts._fields:
            size = (num_draft_tokens + 1,) if name == "accepted_per_round" else ()
            self.add_state(name, torch.zeros(size), dist_reduce_fx="sum")

    def update(self, acceptance: Float[Tensor, "B N *K"], num_new: Int[Tensor, "B"]) -> None:
        """Count rows; arguments as of `expected_rounds`."""
        rounds = expected_rounds(acceptance, num_new, self.num_draft_tokens, first_round=self.first_round)
        if acceptance.dim() == 2:
            is_new = torch.arange(acceptance.shape[1], device=num_new.device) < num_new[:, None]
            acceptance_sum, num_tested = acceptance.masked_fill(~is_new, 0).sum(), num_new.sum()
        else:
            windows = draft_windows(num_new, self.num_draft_tokens, first_round=self.first_round)
            kept = torch.arange(self.num_draft_tokens + 1, device=rounds.device)
            acceptance_sum = (rounds * kept).sum()
            num_tested = acceptance_sum + (rounds * (kept < windows[..., None])).sum()
        added = (acceptance_sum, num_tested, num_new.sum(), rounds.sum(), rounds.sum((0, 1)))
        for name, value in zip(SpeculationCounts._fields, added, strict=True):
            setattr(self, name, getattr(self, name) + value)

    def compute(self) -> SpeculationCounts:
        """The counts, with the rates as properties."""
        return SpeculationCounts(*(getattr(self, name) for name in SpeculationCounts._fields))


class Speculation(Rounds):
    """What speculation would bring, read off the logits of draft and target along known texts (teacher forcing).

    Exact at temperature 0 if the texts are what the target itself would decode greedily, an estimate elsewhere.

    Args:
        num_draft_tokens: K, draft tokens of a round.
        sampling: how both models' logits become probabilities.
        first_round: whether there are draft tokens before the target has read anything.
    """

    def __init__(self, num_draft_tokens: int, sampling: Sampling, *, first_round: bool = True) -> None:
        super().__init__(num_draft_tokens, first_round=first_round)
        self.sampling = sampling

    def update(  # type: ignore[override]
        self, draft_logits: Float[Tensor, "B T *K V"], target_logits: Float[Tensor, "B T V"], batch: Batch
    ) -> None:
        """Count one batch.

        Args:
            draft_logits: `[:, t]` score token t + 1 of `batch.tokens`; with an axis of draft tokens, `[:, t, i]` score
                token t + 1 + i where the round starts behind token t.
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
                    f"expected logits of {self.num_draft_tokens} draft tokens, got {draft_probs.shape[2]}: give as many"
                )
            ahead = functional.pad(target_probs, (0, 0, 0, self.num_draft_tokens - 1))
            each = [overlap(draft, ahead[:, i : i + len(offsets)]) for i, draft in enumerate(draft_probs.unbind(dim=2))]
            acceptance = torch.stack(each, dim=-1)
        super().update(acceptance, num_new)


class RoundMetrics(nn.Module, ABC):
    """What rounds would accept over one data set; a kind of training adds what it learns by.

    Args:
        greedy, sampling: count the rounds at temperature 0, and at temperature 1.
    """

    def __init__(self, greedy: Rounds, sampling: Rounds) -> None:
        super().__init__()
        self.greedy, self.sampling = greedy, sampling

    @abstractmethod
    def compute(self) -> dict[str, Tensor]:
        """Every rate by its name, over all processes."""

    def rates(self) -> dict[str, Tensor]:
        """What all kinds of training have in common."""
        found = {}
        for prefix, rounds in (("", self.greedy), ("sampling_", self.sampling)):
            counts = rounds.compute()
            found[f"{prefix}acceptance_rate"] = counts.acceptance_rate
            found[f"{prefix}block_efficiency"] = counts.block_efficiency
        return found

    def reset(self) -> None:
        """Forget all counts, those that a subclass adds too."""
        for metric in self.modules():
            if isinstance(metric, Metric):
                metric.reset()


class PairMetrics(RoundMetrics):
    """All metrics of a draft and its target that both score the next token.

    Args:
        num_draft_tokens: draft tokens of a round.
        first_round: whether there are draft tokens before the target has read anything.
    """

    greedy: Speculation
    sampling: Speculation

    def __init__(self, num_draft_tokens: int, *, first_round: bool = True) -> None:
        samplings = (Sampling(), Sampling(temperature=1.0))
        super().__init__(*(Speculation(num_draft_tokens, each, first_round=first_round) for each in samplings))
        self.draft = NextToken()
        self.target = NextToken()

    def update(self, draft_logits: Tensor, target_logits: Tensor, batch: Batch) -> None:
        """Count one batch; logits as of `Speculation.update`."""
        labels = batch.next_tokens()
        self.draft.update(draft_logits if draft_logits.dim() == 3 else draft_logits[:, :, 0], labels)
        self.target.update(target_logits, labels)
        self.greedy.update(draft_logits, target_logits, batch)
        self.sampling.update(draft_logits, target_logits, batch)

    def compute(self) -> dict[str, Tensor]:
        counts = {"draft": self.draft.compute(), "target": self.target.compute()}
        rates = {"loss": counts["draft"].loss + counts["target"].loss}
        for rate in ("loss", "perplexity", "accuracy"):
            rates |= {f"{name}_{rate}": getattr(each, rate) for name, each in counts.items()}
        return {**rates, **self.rates()}
