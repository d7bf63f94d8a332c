"""What a frozen target makes of a batch, as far as a draft learns from it.

Theory: a draft is to guess what the target would say, not what the text says, so it learns from the target's
distributions (Zhou et al. 2024, "DistillSpec"), and most kinds of drafts read its hidden states. The target does not
change, so what it makes of a text never does either: it can be made at each step, or once and kept.

Shapes: B rows, T tokens, D width of a hidden state, V vocabulary, W tokens of the draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.data import Batch, TokenData
from lightning_specdec.models import LanguageModel

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_MOST_BYTES = 2**28
"""Of logits in float32 that are held at once."""


@dataclass(frozen=True)
class Reading:
    """What the target made of a batch's tokens; `[:, t]` belongs to token t, and speaks of token t + 1.

    Args:
        features: hidden states by layer, in the target's type.
        log_probs: the log probabilities of the draft's tokens in the target's whole distribution, at temperature 1.
        choices: the target's likeliest token, by its own number.
    """

    features: dict[int, Float[Tensor, "B T D"]]
    log_probs: Float[Tensor, "B T W"]
    choices: Int[Tensor, "B T"]


class TargetFeatures(ABC):
    """Where readings come from."""

    def prepare(self, target: LanguageModel, data: TokenData, layers: Sequence[int], splits: Sequence[str]) -> None:  # noqa: B027
        """Make ready for the rows of these splits; called by every process when a run begins. Nothing by default.

        Raises:
            ValueError: these data cannot be read so.
        """

    @abstractmethod
    def read(
        self,
        target: LanguageModel,
        batch: Batch,
        split: str,
        *,
        layers: Sequence[int],
        tokens: Int[Tensor, "W"] | None,
    ) -> Reading:
        """The reading of a batch.

        Args:
            split: where the batch's rows are from.
            layers: whose hidden states are wanted.
            tokens: those that the draft can say; all when None.
        """

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments as plain values, for the record."""


class OnTheFly(TargetFeatures):
    """The target reads each batch when it is trained on."""

    @torch.no_grad()
    def read(
        self,
        target: LanguageModel,
        batch: Batch,
        split: str,
        *,
        layers: Sequence[int],
        tokens: Int[Tensor, "W"] | None,
    ) -> Reading:
        num_rows = rows_at_once(batch.tokens.shape[1], target.vocab_size)
        parts = []
        # Autocast would round what is a record of the target: it computes as it decodes.
        with torch.autocast(batch.tokens.device.type, enabled=False):
            for rows in batch.tokens.split(num_rows):
                output = target(rows, features=tuple(layers))
                parts.append((output.features, *said(output.logits, tokens)))
        features = {layer: torch.cat([part[0][layer] for part in parts]) for layer in layers}
        return Reading(features, torch.cat([part[1] for part in parts]), torch.cat([part[2] for part in parts]))

    def arguments(self) -> dict[str, Any]:
        return {}


def rows_at_once(num_tokens: int, vocab_size: int) -> int:
    """How many rows of so many tokens may have their logits held at once."""
    return max(1, _MOST_BYTES // (4 * num_tokens * vocab_size))


def said(
    logits: Float[Tensor, "*B V"], tokens: Int[Tensor, "W"] | None
) -> tuple[Float[Tensor, "*B W"], Int[Tensor, "*B"]]:
    """The log probabilities of some tokens in the whole distribution, and the likeliest token of all."""
    scores = logits.float()
    normalizer = scores.logsumexp(-1, keepdim=True)
    chosen = scores if tokens is None else scores.index_select(-1, tokens)
    return chosen - normalizer, scores.argmax(-1)
