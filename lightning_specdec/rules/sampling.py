"""Logits become probabilities and draws here, and nowhere else; randomness is a table of uniform numbers."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from lightning_specdec.checks import require_int, require_number
from lightning_specdec.rules import processors
from lightning_specdec.rules.processors import LogitsProcessor

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class SamplingOptions(TypedDict, total=False):
    """The arguments of `Sampling`, for callers that pass them on."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    processors: Sequence[LogitsProcessor]


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits.

    Theory: the distribution that speculative decoding must keep is the one after these settings, so draft and target
    must turn logits into probabilities by the same code. These are float32, whatever the models compute in; tokens are
    drawn from exactly them, in float64.

    Args:
        temperature: logits are divided by it; 0 puts all probability on the largest logit.
        top_k: only the k likeliest tokens stay.
        top_p: only the smallest set of likeliest tokens that holds this much probability stays (Holtzman et al. 2020).
        min_p: only tokens at least this times as likely as the likeliest stay (Nguyen et al. 2024).
        processors: change the logits by the text before them, ahead of all the rest; transformers' own will do. Each is
            asked about one row's unpadded prefix at a time, drafted tokens included, so it must have an answer for any
            prefix, and no memory.

    The filters apply in this order, each to what the one before left.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    processors: Sequence[LogitsProcessor] = field(default=(), hash=False)
    _checked: set[tuple[int, str]] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, low=0)
        if 0 < self.temperature < 1e-6:  # logits divided by it would overflow
            raise ValueError(f"temperature must be 0 or at least 1e-06, got {self.temperature:g}: use 0 for greedy")
        if self.top_k is not None:
            require_int("top_k", self.top_k, 1)
        if self.top_p is not None:
            require_number("top_p", self.top_p, low=0, high=1, low_open=True)
        if self.min_p is not None:
            require_number("min_p", self.min_p, low=0, high=1)
        object.__setattr__(self, "processors", processors.flat(self.processors))

    @property
    def greedy(self) -> bool:
        """Whether no randomness is left: temperature 0."""
        return self.temperature == 0

    def process(
        self,
        logits: Float[Tensor, "B N V"],
        texts: Sequence[Sequence[int] | None],
        guesses: Sequence[Sequence[int]] | None = None,
        *,
        stop_at_impossible: bool = False,
    ) -> Float[Tensor, "B N V"]:
        """The logits as the processors leave them, in float32; untouched where there are none.

        Position i of a row is that after its text and its first i guesses; positions behind a row's guesses stay as
        they are. Every position costs a call of each processor.

        Args:
            texts: each row's tokens so far; None for a row that nobody wants.
            guesses: the drafted tokens of each row, at most N - 1.
            stop_at_impossible: whether the rest of a row may stay as it is behind a guess that was given no chance.

        Raises:
            ValueError: for a processor with a memory.
        """
        if not self.processors:
            return logits
        first = next((i for i, text in enumerate(texts) if text is not None), None)
        kind = logits.shape[-1], str(logits.device)
        if first is not None and kind not in self._checked:
            for processor in self.processors:
                processors.check_memory(processor, texts[first] or (), logits[first, :1].float())
            self._checked.add(kind)
        return processors.process(self.processors, logits, texts, guesses, stop_at_impossible=stop_at_impossible)

    def probs(self, logits: Float[Tensor, "*B V"]) -> Float[Tensor, "*B V"]:
        """The distribution that a token is drawn from, in float32."""
        logits = logits.float()
        if self.greedy:
            return torch.zeros_like(logits).scatter_(-1, largest(logits)[..., None], 1.0)
        probs = (logits if self.temperature == 1 else logits / self.temperature).softmax(-1)
        if self.top_k is not None and self.top_k < probs.shape[-1]:
            kept = torch.zeros_like(probs, dtype=torch.bool)
            probs = probs * kept.scatter_(-1, probs.topk(self.top_k).indices, True)
            probs = probs / probs.sum(-1, keepdim=True)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = probs.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            probs = probs * torch.zeros_like(probs).scatter_(-1, order, (before < self.top_p).float())
            probs = probs / probs.sum(-1, keepdim=True)
        if self.min_p is not None and self.min_p > 0:
            probs = probs * (probs >= self.min_p * probs.amax(-1, keepdim=True))
            probs = probs / probs.sum(-1, keepdim=True)
        return probs

    def sample(self, logits: Float[Tensor, "*B V"], uniform: Float[Tensor, "*B"] | None) -> Int[Tensor, "*B"]:
        """Draw a token from each distribution; `uniform` is not read at temperature 0, and may be None then."""
        return self.sample_with_probs(logits, uniform)[0]

    def sample_with_probs(
        self, logits: Float[Tensor, "*B V"], uniform: Float[Tensor, "*B"] | None
    ) -> tuple[Int[Tensor, "*B"], Float[Tensor, "*B V"] | None]:
        """As `sample`, with the distributions drawn from; None at temperature 0, where the draw is certain."""
        if self.greedy:
            return largest(logits), None
        assert uniform is not None, f"temperature {self.temperature} needs uniform numbers"
        probs = self.probs(logits)
        return draw(probs, uniform), probs

    @staticmethod
    def log_probs(logits: Float[Tensor, "*B V"], tokens: Int[Tensor, "*B"]) -> Float[Tensor, "*B"]:
        """Each token's log probability under the model itself: temperature 1, no filters."""
        return logits.float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


SOFTMAX = Sampling(temperature=1.0)
"""The model's own distribution, which some rules compare whatever the sampling."""


_BLOCK, _LARGE = 256, 4096
"""Tokens of a block, and of a vocabulary from which on blocks pay."""


def largest(logits: Float[Tensor, "*B V"]) -> Int[Tensor, "*B"]:
    """The first of the largest logits' tokens: what `argmax` gives, found by blocks in large vocabularies on a CPU.

    Theory: torch finds a largest value eight lanes at a time, its place one number after the other. So the blocks'
    largest values are compared first, and only the winning block is searched.
    """
    size = logits.shape[-1]
    if size < _LARGE or logits.device.type != "cpu":
        return logits.argmax(-1)
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
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, uniform[..., None] * cumulative[..., -1:], right=True).squeeze(-1)


class Purpose(IntEnum):
    """What a uniform number is used for; each purpose has a column of its own in the noise."""

    DRAFT = 0
    ACCEPT = 1
    CORRECT = 2


def column(noise: Float[Tensor, "*B 3"] | None, purpose: Purpose) -> Float[Tensor, "*B"] | None:
    """The uniform numbers of one purpose; None where nothing is drawn at random."""
    return None if noise is None else noise[..., purpose]


def noise_table(seed: int, prompt_index: int, num_positions: int) -> Float[Tensor, "N 3"]:
    """Uniform numbers in [0, 1) for one row: by position of the new token, then by `Purpose`.

    Theory: a row's numbers depend on the seed and the prompt's index alone, on all 64 bits of each; so its tokens do
    not depend on the batch that it is decoded in, on rows that leave, or on the number of processes. More positions
    extend a shorter table. Numbers have 53 bits: with float32's 24, tokens less likely than 2^-24 could not be drawn.
    """
    # A hash of any length: torch's generators on a CPU tell only 2^32 seeds apart.
    key = struct.pack("<QQ", seed, prompt_index % 2**64)
    drawn = bytearray(hashlib.shake_128(key).digest(8 * num_positions * len(Purpose)))
    bits = torch.frombuffer(drawn, dtype=torch.long).view(num_positions, len(Purpose)) & 2**53 - 1
    return bits.double() * 2**-53
