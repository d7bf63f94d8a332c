"""The only place where logits become probabilities and tokens; randomness is a table of uniform numbers."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.config.decoding import SamplingSettings

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""Called with a prefix `[1, T]` and its float32 scores `[1, V]`; returns the scores `[1, V]` to draw from.

It must be a function of these two alone, for any prefix: it is also called for draft tokens that are rejected, for
other rows, and for the draft's scores, so one that remembers its calls breaks losslessness. Those of transformers that
keep no state qualify.
"""


@dataclass(frozen=True)
class RepetitionPenalty:
    """Divides positive scores of the prefix's tokens by `penalty`, multiplies negative ones (Keskar et al. 2019)."""

    penalty: float

    def __call__(
        self, prefix: Int[Tensor, "1 T"], scores: Float[Tensor, "1 V"]
    ) -> Float[Tensor, "1 V"]:
        found = scores.gather(1, prefix)
        return scores.scatter(
            1, prefix, torch.where(found < 0, found * self.penalty, found / self.penalty)
        )


@dataclass(frozen=True)
class Sampling(SamplingSettings):
    """Turns logits into probabilities and tokens, for target and draft alike.

    The steps are: repetition penalty, processors, temperature, top_k, top_p, min_p. Probabilities are float32 whatever
    the models compute in, and tokens are drawn from exactly these.
    """

    processors: Sequence[Any] | tuple[Any, ...] = field(default=(), hash=False)
    """Functions of a prefix `[1, T]` and its scores `[1, V]` that return new scores; see `LogitsProcessor`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in self.processors:
            if not callable(each):
                raise ValueError(
                    f"processors must be callables (prefix, scores) -> scores, got {each!r}"
                )
        given = tuple(each for each in self.processors if not isinstance(each, RepetitionPenalty))
        own = (
            () if self.repetition_penalty is None else (RepetitionPenalty(self.repetition_penalty),)
        )
        object.__setattr__(self, "processors", own + given)

    @classmethod
    def of(cls, config: SamplingSettings) -> Sampling:
        """The sampling of a `DecodingConfig` or other `SamplingSettings`, with its processors."""
        return cls(
            **{
                each.name: getattr(config, each.name)
                for each in fields(cls)
                if hasattr(config, each.name)
            }
        )

    def process(
        self,
        logits: Float[Tensor, "B N V"],
        texts: Sequence[Sequence[int] | None],
        draft_tokens: Sequence[Sequence[int]] | None = None,
        *,
        stop_at_impossible: bool = False,
    ) -> Float[Tensor, "B N V"]:
        """Apply the processors. Returns float32 logits, or `logits` itself if there are no processors.

        Position i of a row follows its text and its first i draft tokens; positions after these are not changed.

        Args:
            texts: each row's tokens so far; None skips a row.
            draft_tokens: each row's draft tokens, at most N - 1.
            stop_at_impossible: whether to skip the positions after a draft token whose score is -inf.

        Raises:
            ValueError: a processor returns something else than scores `[1, V]`.
        """
        if not self.processors:
            return logits
        processed = logits.float().clone()
        for row, (text, drafted) in enumerate(
            zip(texts, draft_tokens or [()] * len(texts), strict=True)
        ):
            if text is None:
                continue
            whole = torch.tensor([[*text, *drafted]], device=logits.device)
            for i in range(len(drafted) + 1):
                scores = processed[row, i : i + 1].clone()
                for processor in self.processors:
                    scores = processor(whole[:, : len(text) + i], scores)
                    if not isinstance(scores, Tensor) or scores.shape != processed[row, :1].shape:
                        raise ValueError(
                            f"the logits processor {processor} must return scores [1, V]"
                        )
                processed[row, i : i + 1] = scores
                if stop_at_impossible and i < len(drafted) and scores[0, drafted[i]] == -torch.inf:
                    break
        return processed

    def probs(self, logits: Float[Tensor, "*B V"]) -> Float[Tensor, "*B V"]:
        """The distribution that tokens are drawn from, in float32; one-hot at temperature 0. Without processors."""
        logits = logits.float()
        if self.greedy:
            return torch.zeros_like(logits).scatter_(-1, largest(logits)[..., None], 1.0)
        probs = (logits if self.temperature == 1 else logits / self.temperature).softmax(-1)
        if self.top_k is not None and self.top_k < probs.shape[-1]:
            kept = torch.zeros_like(probs, dtype=torch.bool)
            probs = _filtered(probs, kept.scatter_(-1, probs.topk(self.top_k).indices, True))
        if self.top_p is not None and self.top_p < 1:  # Holtzman et al. 2020
            probs = _filtered(probs, _nucleus(probs, self.top_p))
        if self.min_p is not None and self.min_p > 0:  # Nguyen et al. 2024
            probs = _filtered(probs, probs >= self.min_p * probs.amax(-1, keepdim=True))
        return probs

    def sample(
        self, logits: Float[Tensor, "*B V"], uniform: Float[Tensor, "*B"] | None
    ) -> Int[Tensor, "*B"]:
        """Draw a token from each distribution by a uniform number in [0, 1), which may be None at temperature 0."""
        return self.sample_with_probs(logits, uniform)[0]

    def sample_with_probs(
        self, logits: Float[Tensor, "*B V"], uniform: Float[Tensor, "*B"] | None
    ) -> tuple[Int[Tensor, "*B"], Float[Tensor, "*B V"] | None]:
        """As `sample`; also returns the distributions, or None at temperature 0, where tokens are certain."""
        if self.greedy:
            return largest(logits), None
        assert uniform is not None, f"temperature {self.temperature} needs uniform numbers"
        probs = self.probs(logits)
        return draw(probs, uniform), probs

    @staticmethod
    def log_probs(logits: Float[Tensor, "*B V"], tokens: Int[Tensor, "*B"]) -> Float[Tensor, "*B"]:
        """Each token's natural log probability under the model itself: temperature 1, no filters."""
        return logits.float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def _filtered(probs: Float[Tensor, "*B V"], kept: Tensor) -> Float[Tensor, "*B V"]:
    """The distribution of the tokens that are kept."""
    probs = probs * kept
    return probs / probs.sum(-1, keepdim=True)


_LIKELIEST = 512
"""Tokens that a CPU ranks first to find those that top_p keeps: sorting a large vocabulary takes ten times as long."""


def _nucleus(probs: Float[Tensor, "*B V"], top_p: float) -> Bool[Tensor, "*B V"]:
    """The likeliest tokens, of equals the first, up to the one with which their sum reaches top_p."""
    if probs.shape[-1] <= _LIKELIEST or probs.device.type != "cpu":
        return _sorted_nucleus(probs, top_p)
    rows = probs.reshape(-1, probs.shape[-1])
    ordered = rows.topk(_LIKELIEST).values
    count = (ordered.cumsum(-1) - ordered < top_p).sum(-1, keepdim=True)
    least = ordered.gather(-1, (count - 1).clamp(min=0))
    kept, equal = rows > least, rows == least
    kept |= equal & (equal.cumsum(-1) <= count - kept.sum(-1, keepdim=True))
    if (more := (count == _LIKELIEST).squeeze(-1)).any():
        kept[more] = _sorted_nucleus(rows[more], top_p)
    return kept.view(probs.shape)


def _sorted_nucleus(probs: Float[Tensor, "*B V"], top_p: float) -> Bool[Tensor, "*B V"]:
    """The same by sorting all tokens."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(probs, dtype=torch.bool).scatter_(
        -1, order, ordered.cumsum(-1) - ordered < top_p
    )


SOFTMAX = Sampling(temperature=1.0)
"""The model's own distribution, which some rules compare whatever the sampling."""


_BLOCK, _LARGE = 256, 4096
"""Tokens of a block, and of a vocabulary from which on blocks pay."""


def largest(logits: Float[Tensor, "*B V"]) -> Int[Tensor, "*B"]:
    """As `argmax`, the first of equals; faster for large vocabularies on a CPU.

    numpy finds an index with vector instructions, and on one thread: torch's others would keep their cores busy for a
    while. It has no bfloat16; there torch finds the maximum so, and only the winning block is searched.
    """
    size = logits.shape[-1]
    if size < _LARGE or logits.device.type != "cpu":
        return logits.argmax(-1)
    if logits.dtype == torch.float32:
        return torch.as_tensor(logits.detach().numpy().argmax(-1))
    whole = size - size % _BLOCK
    values = logits[..., :whole].unflatten(-1, (-1, _BLOCK)).amax(-1)
    if whole < size:
        values = torch.cat((values, logits[..., whole:].amax(-1, keepdim=True)), dim=-1)
    # The last block may be short: it is searched together with the end of the one before, which holds less.
    first = (values.argmax(-1, keepdim=True) * _BLOCK).clamp(max=size - _BLOCK)
    block = logits.gather(-1, first + torch.arange(_BLOCK, device=logits.device))
    return first.squeeze(-1) + block.argmax(-1)


def draw(weights: Float[Tensor, "*B V"], uniform: Float[Tensor, "*B"]) -> Int[Tensor, "*B"]:
    """Inverse transform sampling: the first token whose cumulative weight exceeds `uniform` times the total.

    Weights need no normalization, but a sum above 1e-30. A token of weight zero is never drawn: the comparison is
    strict, and uniform < 1. Sums are float64: in float32 those of a large vocabulary leave out its unlikely tokens.
    Weights that are NaN give V, which is no token.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(
        cumulative, uniform[..., None] * cumulative[..., -1:], right=True
    ).squeeze(-1)


class Purpose(IntEnum):
    """What a random number is used for (DRAFT, ACCEPT or CORRECT): each purpose is a column of the noise."""

    DRAFT = 0
    ACCEPT = 1
    CORRECT = 2


def column(noise: Float[Tensor, "*B 3"] | None, purpose: Purpose) -> Float[Tensor, "*B"] | None:
    """The uniform numbers of one purpose; None where nothing is drawn at random."""
    return None if noise is None else noise[..., purpose]


def noise_table(seed: int, prompt_index: int, num_positions: int) -> Float[Tensor, "N 3"]:
    """Uniform numbers in [0, 1) for one row: by position of the new token, then by `Purpose`.

    They depend on all 64 bits of seed and prompt index and on nothing else, so a row's tokens do not depend on its
    batch. More positions extend a shorter table. With float32's 24 bits, tokens less likely than 2^-24 could not be
    drawn; these have 53.
    """
    # A hash of any length: torch's generators on a CPU tell only 2^32 seeds apart.
    key = struct.pack("<QQ", seed, prompt_index % 2**64)
    drawn = bytearray(hashlib.shake_128(key).digest(8 * num_positions * len(Purpose)))
    bits = torch.frombuffer(drawn, dtype=torch.long).view(num_positions, len(Purpose)) & 2**53 - 1
    return bits.double() * 2**-53
