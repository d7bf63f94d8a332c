"""Teacher forcing: the rounds that speculative decoding is expected to run along known texts.

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
from lightning_specdec.rules import GREEDY, SOFTMAX

if TYPE_CHECKING:
    from jaxtyping import Float, Int

SAMPLINGS = {"": GREEDY, "sampling_": SOFTMAX}
"""The sampling settings under which rounds are counted, by the prefix of their rates."""
RATES = ("acceptance_rate", "block_efficiency")
Means = dict[str, tuple[Tensor, int]]
"""Means over tokens by name, with the number of tokens."""


def next_token_loss(
    logits: Float[Tensor, "B T V"],
    labels: Int[Tensor, "B T"],
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy in nats on the next token, over the labels that are not padding.

    It is 0 if all of them are.
    """
    all_ignored = bool((labels == IGNORED).all())
    if reduction == "mean" and all_ignored:
        # The mean over no label is NaN, and their sum is 0.
        reduction = "sum"
    flat_logits = logits.flatten(0, 1).float()
    return functional.cross_entropy(flat_logits, labels.flatten(), reduction=reduction)


def next_token_means(
    name: str,
    logits: Float[Tensor, "B T V"],
    labels: Int[Tensor, "B T"],
) -> Means:
    """`NAME_loss` and `NAME_accuracy`, the share of tokens that are the most likely ones."""
    loss = next_token_loss(logits, labels)
    num_tokens = int((labels != IGNORED).sum())
    is_correct = logits.argmax(-1) == labels
    accuracy = is_correct.sum() / max(1, num_tokens)
    return {
        f"{name}_loss": (loss, num_tokens),
        f"{name}_accuracy": (accuracy, num_tokens),
    }


def count_labels(batch: Batch) -> int:
    """Number of next tokens of a batch that are not padding: what `next_token_loss` sums over."""
    return int((batch.next_tokens() != IGNORED).sum())


def overlap(
    draft_probs: Float[Tensor, "B N V"], target_probs: Float[Tensor, "B N V"]
) -> Float[Tensor, "B N"]:
    """Probability that a draft token is accepted: the sum of min(draft_probs, target_probs).

    Leviathan et al. 2023, theorem 3.5. At temperature 0 it is 1 where the most likely tokens of
    both models agree.
    """
    common_probs = torch.minimum(draft_probs, target_probs)
    return common_probs.sum(-1).clamp(max=1.0)


def draft_windows(
    num_new: Int[Tensor, "B"],
    num_draft_tokens: int,
    *,
    first_round: bool = True,
) -> Int[Tensor, "B N"]:
    """Number of draft tokens of a round that starts at new token j.

    It is -1 after a row's end, where no round starts.

    Args:
        num_new: number of new tokens of each row; N is the largest.
        num_draft_tokens: K. A round near the end of the text has fewer: the target itself produces
            the last token.
        first_round: whether the round at new token 0 has draft tokens.
    """
    starts = torch.arange(int(num_new.max()), device=num_new.device)
    num_left = num_new[:, None] - starts - 1
    windows = num_left.clamp(-1, num_draft_tokens)
    if not first_round:
        windows[:, 0] = 0
    return windows


def expected_rounds(
    acceptance: Float[Tensor, "B N K"], windows: Int[Tensor, "B N"]
) -> Float[Tensor, "B N W"]:
    """The probability that a round starts at new token j and accepts n draft tokens.

    A round with window w that starts at j accepts exactly n < w tokens with probability
    beta_j ... beta_(j+n-1) (1 - beta_(j+n)), and all w with beta_j ... beta_(j+w-1). The next round
    starts at j + n + 1.

    Args:
        acceptance: the probability that draft token i of a round from new token j is accepted,
            given that those before it are.
        windows: see `draft_windows`.
    """
    num_rows, num_positions, num_draft_tokens = acceptance.shape

    # P(at least n accepted) is a product of acceptance probabilities, and P(exactly n) a difference
    # of two of them.
    draft_positions = torch.arange(num_draft_tokens, device=acceptance.device)
    is_proposed = draft_positions < windows[..., None]
    accepted_all = (acceptance * is_proposed).cumprod(-1)
    at_least = functional.pad(accepted_all, (1, 0), value=1.0)
    at_least_one_more = functional.pad(accepted_all, (0, 1))
    exactly = at_least - at_least_one_more

    # After a row's end no round starts.
    is_in_row = windows >= 0
    exactly = exactly * is_in_row[..., None]

    # The loop runs a few small operations for each position, so positions come first in memory.
    exactly_by_position = exactly.movedim(0, 2).contiguous()
    start_probs = acceptance.new_zeros(num_positions + num_draft_tokens + 1, num_rows)
    start_probs[0] = 1
    for position, outcome_probs in enumerate(exactly_by_position.unbind(0)):
        # After n accepted draft tokens, the next round starts n + 1 positions later.
        next_starts = start_probs[position + 1 : position + num_draft_tokens + 2]
        next_starts.addcmul_(outcome_probs, start_probs[position])
    start_probs_by_row = start_probs[:num_positions].T
    return start_probs_by_row[..., None] * exactly


class ExpectedRounds(Metric):
    """Rounds end to end over the new tokens of known texts; see `expected_rounds`.

    Args:
        num_draft_tokens: K, draft tokens of a round.
        first_round: whether the drafter proposes tokens before the target has read anything.

    Attributes:
        num_tested: draft tokens that were accepted or rejected.
        accepted_per_round: `[K + 1]`, number of rounds that accept 0, 1, ..., K draft tokens.
    """

    full_state_update = False
    num_tested: Tensor
    accepted_per_round: Tensor

    def __init__(self, num_draft_tokens: int, *, first_round: bool = True) -> None:
        super().__init__()
        self.num_draft_tokens = num_draft_tokens
        self.first_round = first_round
        self.add_state("num_tested", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state(
            "accepted_per_round", torch.zeros(num_draft_tokens + 1), dist_reduce_fx="sum"
        )

    def update(self, acceptance: Float[Tensor, "B N K"], num_new: Int[Tensor, "B"]) -> None:
        """Count rows; arguments as of `expected_rounds` and `draft_windows`."""
        windows = draft_windows(num_new, self.num_draft_tokens, first_round=self.first_round)
        rounds = expected_rounds(acceptance, windows)

        # A round tests the tokens that it accepts, and the first rejected one if there is one.
        num_accepted = torch.arange(self.num_draft_tokens + 1, device=rounds.device)
        has_rejection = num_accepted < windows[..., None]
        num_tested = num_accepted + has_rejection
        self.num_tested += (rounds * num_tested).sum()
        self.accepted_per_round += rounds.sum((0, 1))

    def compute(self) -> dict[str, Tensor]:
        """The counts, and `RATES`: accepted / tested draft tokens, and new tokens / rounds."""
        device = self.accepted_per_round.device
        accepted_counts = torch.arange(self.num_draft_tokens + 1, device=device)
        num_accepted = (accepted_counts * self.accepted_per_round).sum()
        num_rounds = self.accepted_per_round.sum()
        return {
            "num_tested": self.num_tested,
            "accepted_per_round": self.accepted_per_round,
            "acceptance_rate": num_accepted / self.num_tested,
            "block_efficiency": 1 + num_accepted / num_rounds,
        }


class RoundMetrics(nn.ModuleDict):
    """The expected rounds of one or several drafts: `PREFIXrounds` and `PREFIXsampling_rounds`.

    Args:
        prefixes: prefixes of the drafts' rates; one of them is "".
        main: the prefix of the draft whose rates are also those without a prefix. They are counted
            once.
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
        rounds = {}
        for prefix in prefixes:
            for sampling_name in SAMPLINGS:
                rounds[f"{prefix}{sampling_name}rounds"] = ExpectedRounds(
                    num_draft_tokens, first_round=first_round
                )
        for sampling_name in SAMPLINGS:
            rounds[f"{sampling_name}rounds"] = rounds[f"{main}{sampling_name}rounds"]
        super().__init__(rounds)

    def of(self, prefix: str = "") -> ExpectedRounds:
        """The rounds whose rates have that prefix."""
        rounds = self[f"{prefix}rounds"]
        assert isinstance(rounds, ExpectedRounds)
        return rounds

    def count(
        self,
        draft_logits: Float[Tensor, "B T V"],
        target_logits: Float[Tensor, "B T V"],
        batch: Batch,
        prefix: str = "",
    ) -> None:
        """Count a batch of a draft whose acceptance does not depend on where a round starts.

        A draft model is one: it reads its own tokens.

        Exact at temperature 0 if the texts are the target's own greedy output, an estimate
        otherwise.

        Args:
            draft_logits, target_logits: `[:, t]` score token t + 1 of `batch.tokens`.
        """
        # The logits of each row's new tokens: each token is scored one position before its own.
        num_new = batch.lengths - batch.prompt_lengths
        device = target_logits.device
        offsets = torch.arange(int(num_new.max()), device=device)
        positions = batch.prompt_lengths[:, None] - 1 + offsets
        positions = positions.clamp(max=target_logits.shape[1] - 1)
        rows = torch.arange(len(positions), device=device)[:, None]
        new_draft_logits = draft_logits[rows, positions]
        new_target_logits = target_logits[rows, positions]

        for sampling_name, sampling in SAMPLINGS.items():
            rounds = self.of(prefix + sampling_name)
            draft_probs = sampling.probs(new_draft_logits)
            target_probs = sampling.probs(new_target_logits)
            token_acceptance = overlap(draft_probs, target_probs)

            # Draft token i of the round from new token j is new token j + i.
            num_draft_tokens = rounds.num_draft_tokens
            padded = functional.pad(token_acceptance, (0, num_draft_tokens - 1))
            acceptance = padded.unfold(1, num_draft_tokens, 1)
            rounds.update(acceptance, num_new)

    def compute(self) -> dict[str, Tensor]:
        """The acceptance rate and block efficiency of each draft, over all processes."""
        rates = {}
        for key in self:
            prefix = key.removesuffix("rounds")
            values = self.of(prefix).compute()
            for rate in RATES:
                rates[f"{prefix}{rate}"] = values[rate]
        return rates

    def reset(self) -> None:
        for key in self:
            self.of(key.removesuffix("rounds")).reset()
