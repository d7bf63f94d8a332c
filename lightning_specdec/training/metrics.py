"""Teacher forcing: the rounds that speculative decoding is expected to make along known texts.

Shapes: B rows, T tokens, V vocabulary, N new tokens of a row, K draft tokens, W = K + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric

from lightning_specdec.data import IGNORED, Batch
from lightning_specdec.rules import Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int

SAMPLINGS = {"": Sampling(), "sampling_": Sampling(temperature=1.0)}
"""How rounds are counted, by the prefix of their rates."""
RATES = ("acceptance_rate", "block_efficiency")
Means = dict[str, tuple[Tensor, int]]
"""Means over tokens by name, with the number of tokens."""


def next_token_loss(
    logits: Float[Tensor, "B T V"], labels: Int[Tensor, "B T"], reduction: str = "mean"
) -> Tensor:
    """Cross-entropy in nats on the next token, over the labels that are not padding."""
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction=reduction
    )


def next_token_means(
    name: str, logits: Float[Tensor, "B T V"], labels: Int[Tensor, "B T"]
) -> Means:
    """`NAME_loss` and `NAME_accuracy`, the share of tokens that are the likeliest."""
    num_tokens = int((labels != IGNORED).sum())
    accuracy = (logits.argmax(-1) == labels).sum() / max(1, num_tokens)
    return {
        f"{name}_loss": (next_token_loss(logits, labels), num_tokens),
        f"{name}_accuracy": (accuracy, num_tokens),
    }


def overlap(
    draft_probs: Float[Tensor, "B N V"], target_probs: Float[Tensor, "B N V"]
) -> Float[Tensor, "B N"]:
    """Probability that a draft token is accepted: sum over the vocabulary of min(draft_probs, target_probs).

    Leviathan et al. 2023, theorem 3.5; at temperature 0 it is 1 where both models' likeliest tokens agree.
    """
    return torch.minimum(draft_probs, target_probs).sum(-1).clamp(max=1.0)


def draft_windows(
    num_new: Int[Tensor, "B"], num_draft_tokens: int, *, first_round: bool = True
) -> Int[Tensor, "B N"]:
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
    acceptance: Float[Tensor, "B N K"], windows: Int[Tensor, "B N"]
) -> Float[Tensor, "B N W"]:
    """The probability that a round starts at new token j and keeps n draft tokens.

    A round with window w that starts at j keeps exactly n < w tokens with probability
    beta_j ... beta_(j+n-1) (1 - beta_(j+n)), all w with beta_j ... beta_(j+w-1); the next one starts at j + n + 1.

    Args:
        acceptance: the probability that draft token i of a round from new token j is accepted, given that those before
            it are.
        windows: see `draft_windows`.
    """
    _, num_positions, num_draft_tokens = acceptance.shape
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


class ExpectedRounds(Metric):
    """Rounds laid end to end over the tokens behind the prompt of known texts; see `expected_rounds`.

    Args:
        num_draft_tokens: K, draft tokens of a round.
        first_round: whether there are draft tokens before the target has read anything.

    Attributes:
        num_tested: draft tokens that were judged.
        accepted_per_round: `[K + 1]`, how many rounds accept 0, 1, ..., K draft tokens.
    """

    full_state_update = False
    num_tested: Tensor
    accepted_per_round: Tensor

    def __init__(self, num_draft_tokens: int, *, first_round: bool = True) -> None:
        super().__init__()
        self.num_draft_tokens, self.first_round = num_draft_tokens, first_round
        self.add_state("num_tested", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state(
            "accepted_per_round", torch.zeros(num_draft_tokens + 1), dist_reduce_fx="sum"
        )

    def update(self, acceptance: Float[Tensor, "B N K"], num_new: Int[Tensor, "B"]) -> None:
        """Count rows; arguments as of `expected_rounds` and `draft_windows`."""
        windows = draft_windows(num_new, self.num_draft_tokens, first_round=self.first_round)
        rounds = expected_rounds(acceptance, windows)
        kept = torch.arange(self.num_draft_tokens + 1, device=rounds.device)
        self.num_tested += (rounds * (kept + (kept < windows[..., None]))).sum()
        self.accepted_per_round += rounds.sum((0, 1))

    def compute(self) -> dict[str, Tensor]:
        """The counts, and the rates `RATES`: accepted / tested draft tokens, and new tokens / rounds."""
        kept = torch.arange(self.num_draft_tokens + 1, device=self.accepted_per_round.device)
        num_accepted = (kept * self.accepted_per_round).sum()
        return {
            "num_tested": self.num_tested,
            "accepted_per_round": self.accepted_per_round,
            "acceptance_rate": num_accepted / self.num_tested,
            "block_efficiency": 1 + num_accepted / self.accepted_per_round.sum(),
        }


class RoundMetrics(nn.ModuleDict):
    """The expected rounds of one or several drafts: `PREFIXrounds` and `PREFIXsampling_rounds` of each.

    Args:
        prefixes: of the drafts' rates; one is "".
        main: the prefix of the draft whose rates those without a prefix are: they are counted once.
        num_draft_tokens, first_round: see `ExpectedRounds`.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        num_draft_tokens: int,
        *,
        main: str = "",
        first_round: bool = True,
    ) -> None:
        rounds = {
            f"{prefix}{sampling}rounds": ExpectedRounds(num_draft_tokens, first_round=first_round)
            for prefix in prefixes
            for sampling in SAMPLINGS
        }
        super().__init__(
            rounds | {f"{each}rounds": rounds[f"{main}{each}rounds"] for each in SAMPLINGS}
        )

    def of(self, prefix: str = "") -> ExpectedRounds:
        """The rounds whose rates have that prefix."""
        found = self[f"{prefix}rounds"]
        assert isinstance(found, ExpectedRounds)
        return found

    def count(
        self,
        draft_logits: Float[Tensor, "B T V"],
        target_logits: Float[Tensor, "B T V"],
        batch: Batch,
        prefix: str = "",
    ) -> None:
        """Count a batch of a draft that reads its own tokens: a new token is accepted alike wherever its round started.

        Exact at temperature 0 if the texts are what the target itself decodes greedily, an estimate elsewhere.

        Args:
            draft_logits, target_logits: `[:, t]` score token t + 1 of `batch.tokens`.
        """
        num_new, device = batch.lengths - batch.prompt_lengths, target_logits.device
        offsets = torch.arange(int(num_new.max()), device=device)
        positions = (batch.prompt_lengths[:, None] - 1 + offsets).clamp(
            max=target_logits.shape[1] - 1
        )
        rows = torch.arange(len(positions), device=device)[:, None]
        for name, sampling in SAMPLINGS.items():
            rounds = self.of(prefix + name)
            both = (
                sampling.probs(logits[rows, positions]) for logits in (draft_logits, target_logits)
            )
            acceptance = functional.pad(overlap(*both), (0, rounds.num_draft_tokens - 1))
            rounds.update(acceptance.unfold(1, rounds.num_draft_tokens, 1), num_new)

    def compute(self) -> dict[str, Tensor]:
        """The acceptance rate and block efficiency of each draft, over all processes."""
        prefixes = [name.removesuffix("rounds") for name in self]
        counts = {prefix: self.of(prefix).compute() for prefix in prefixes}
        return {f"{prefix}{rate}": counts[prefix][rate] for prefix in prefixes for rate in RATES}

    def reset(self) -> None:
        for name in self:
            self.of(name.removesuffix("rounds")).reset()
