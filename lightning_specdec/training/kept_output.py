"""What is kept of a target's logits, and how the log probabilities of some tokens are found again.

Theory: logits take V numbers for each token, 100 times what a hidden state takes, so they are not kept themselves. The
last state and the output head make them again, and the log of the sum of their exponentials, which needs all of them,
is one number. Or the n likeliest tokens are kept alone: they have nearly all of the probability (Hinton et al. 2015 and
later work on distillation take such a cut), and nothing has to be made again.

Shapes: B rows, T tokens, D width of a hidden state, V vocabulary, W tokens of the draft, n likeliest tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from lightning_specdec.models import LanguageModel
from lightning_specdec.training.feature_shards import Column
from lightning_specdec.training.target_reading import rows_at_once

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_LARGE = 64.0
"""What hidden states are multiplied by when a head is looked at: caps and norms are seen in large numbers."""


class KeptOutput(ABC):
    """What is kept for each token beside the hidden states that a draft reads."""

    @abstractmethod
    def check(self, target: LanguageModel) -> None:
        """Raise ValueError where it is not enough for this target."""

    @abstractmethod
    def layers(self, target: LanguageModel) -> list[int]:
        """Layers whose states are needed besides."""

    @abstractmethod
    def columns(self) -> dict[str, Column]:
        """What is kept, by name."""

    @abstractmethod
    def of(self, scores: Float[Tensor, "B T V"]) -> dict[str, Tensor]:
        """These columns, of logits in float32."""

    @abstractmethod
    def log_probs(
        self,
        target: LanguageModel,
        kept: Mapping[str, Tensor],
        states: Mapping[int, Float[Tensor, "B T D"]],
        tokens: Int[Tensor, "W"] | None,
    ) -> Float[Tensor, "B T W"]:
        """The log probabilities of some tokens, of all when None.

        Args:
            kept: the columns.
            states: of `layers`, in the target's type.
        """


class KeptNormalizer(KeptOutput):
    """The last layer's states and the normalizer: exact up to the type that the states are kept in."""

    def __init__(self) -> None:
        self._tokens: Tensor | None = None
        self._version = -1
        self._matrix: tuple[Tensor, Tensor] | None = None

    def check(self, target: LanguageModel) -> None:
        try:
            target.check_output_head()
        except ValueError as error:
            raise ValueError(f"{error}: keep its likeliest tokens, with target_features.top_n") from error

    def layers(self, target: LanguageModel) -> list[int]:
        assert target.num_layers is not None, "a model whose head can be called has layers"
        return [target.num_layers - 1]

    def columns(self) -> dict[str, Column]:
        return {"normalizer": Column(torch.float32)}

    def of(self, scores: Float[Tensor, "B T V"]) -> dict[str, Tensor]:
        return {"normalizer": scores.logsumexp(-1)}

    def log_probs(
        self,
        target: LanguageModel,
        kept: Mapping[str, Tensor],
        states: Mapping[int, Float[Tensor, "B T D"]],
        tokens: Int[Tensor, "W"] | None,
    ) -> Float[Tensor, "B T W"]:
        hidden = states[self.layers(target)[0]]
        if tokens is not None and (matrix := self._rows_for(target, tokens, hidden)) is not None:
            scores = linear(hidden, *matrix).float()
        else:
            pieces = hidden.split(rows_at_once(hidden.shape[1], target.vocab_size))
            scores = torch.cat([_chosen(target.output_logits(piece), tokens).float() for piece in pieces])
        return scores.sub_(kept["normalizer"][..., None])

    def _rows_for(
        self, target: LanguageModel, tokens: Int[Tensor, "W"], hidden: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "W D"], Float[Tensor, "W"]] | None:
        """The rows of the output head for these tokens, and what is added; None where it does more than multiply."""
        if tokens is not self._tokens or tokens._version != self._version:
            self._tokens, self._version = tokens, tokens._version
            self._matrix = _matrix(target, tokens, hidden)
        return self._matrix


class KeptTop(KeptOutput):
    """The likeliest tokens and their log probabilities; the others count as never said.

    Args:
        n: how many.
    """

    def __init__(self, n: int) -> None:
        self.n = n

    def check(self, target: LanguageModel) -> None:
        if self.n > target.vocab_size:
            raise ValueError(f"target_features.top_n is {self.n}, the target has {target.vocab_size} tokens: lower it")

    def layers(self, target: LanguageModel) -> list[int]:
        return []

    def columns(self) -> dict[str, Column]:
        return {"top_tokens": Column(torch.int32, (self.n,)), "top_log_probs": Column(torch.float32, (self.n,))}

    def of(self, scores: Float[Tensor, "B T V"]) -> dict[str, Tensor]:
        top = scores.topk(self.n)
        return {"top_tokens": top.indices, "top_log_probs": top.values - scores.logsumexp(-1, keepdim=True)}

    def log_probs(
        self,
        target: LanguageModel,
        kept: Mapping[str, Tensor],
        states: Mapping[int, Float[Tensor, "B T D"]],
        tokens: Int[Tensor, "W"] | None,
    ) -> Float[Tensor, "B T W"]:
        numbers, values = kept["top_tokens"].long(), kept["top_log_probs"]
        num_tokens = target.vocab_size if tokens is None else len(tokens)
        if tokens is not None:
            # What the draft cannot say goes to a place behind its tokens, which is cut off.
            places = numbers.new_full((target.vocab_size,), num_tokens)
            places[tokens] = torch.arange(num_tokens, device=numbers.device)
            numbers = places[numbers]
        room = values.new_full((*values.shape[:-1], num_tokens + 1), -torch.inf)
        return room.scatter_(-1, numbers, values)[..., :num_tokens]


def _matrix(
    target: LanguageModel, tokens: Int[Tensor, "W"], hidden: Float[Tensor, "B T D"]
) -> tuple[Float[Tensor, "W D"], Float[Tensor, "W"]] | None:
    """Some rows of a head's matrix and what it adds; None where that is not all it does with states like these."""
    try:
        weight = target.output_weight.index_select(0, tokens)
    except ValueError:  # it does not show it
        return None
    sample = hidden[:1, :8] * _LARGE
    offset = _chosen(target.output_logits(torch.zeros_like(sample[:, :1])), tokens)[0, 0]
    wanted = _chosen(target.output_logits(sample), tokens).float()
    off = (linear(sample, weight, offset).float() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)
    return (weight, offset) if off <= max(1e-3, 4 * torch.finfo(hidden.dtype).eps) else None


def _chosen(values: Float[Tensor, "B T V"], tokens: Int[Tensor, "W"] | None) -> Float[Tensor, "B T W"]:
    return values if tokens is None else values.index_select(-1, tokens)
