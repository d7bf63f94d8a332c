"""The only place where logits become probabilities and tokens. Randomness is a table of numbers."""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.config.decoding import SamplingSettings
from lightning_specdec.config.kinds import described
from lightning_specdec.models import LanguageModel

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""Called with a prefix `[1, T]` and its float32 scores `[1, V]`; returns new scores `[1, V]`.

It must be a pure function of these two arguments, for any prefix. It is also called for draft
tokens that are later rejected, for other rows, and for the draft's scores, so a processor that
remembers its calls breaks losslessness. Processors of transformers that keep no state qualify.
"""


class BoundProcessor(ABC):
    """A logits processor of one row, called with its text as integers on the host.

    Attributes:
        error: why the row cannot be continued; "" if it can.
    """

    error: str = ""

    @abstractmethod
    def process(
        self,
        text: Sequence[int],
        length: int,
        scores: Float[Tensor, "1 V"],
    ) -> Float[Tensor, "1 V"]:
        """The new scores after the first `length` tokens of a text; a pure function of these."""

    @abstractmethod
    def forced_tokens(self, text: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that are likely to follow a text, since nothing else may."""

    def __call__(
        self,
        prefix: Int[Tensor, "1 T"],
        scores: Float[Tensor, "1 V"],
    ) -> Float[Tensor, "1 V"]:
        text = prefix[0].tolist()
        return self.process(text, len(text), scores)


class RowProcessor(ABC):
    """A logits processor that is made for each row: it depends on where the new text begins."""

    @abstractmethod
    def check(self, target: LanguageModel, eos: frozenset[int]) -> None:
        """Raise ValueError if rows of this target with these EOS tokens cannot use it."""

    @abstractmethod
    def for_row(
        self,
        prompt_length: int,
        target: LanguageModel,
        eos: frozenset[int],
    ) -> BoundProcessor:
        """The processor of a row whose new text follows `prompt_length` tokens."""

    def __call__(self, prefix: Tensor, scores: Tensor) -> Tensor:
        raise ValueError(f"{type(self).__name__} processes rows of a session: use Sampling.for_row")


@dataclass(frozen=True)
class RepetitionPenalty:
    """Divides positive scores of the prefix's tokens by `penalty`, and multiplies negative ones.

    Keskar et al. 2019, "CTRL", section 4.1.
    """

    penalty: float

    def __call__(
        self,
        prefix: Int[Tensor, "1 T"],
        scores: Float[Tensor, "1 V"],
    ) -> Float[Tensor, "1 V"]:
        prefix_scores = scores.gather(1, prefix)
        multiplied = prefix_scores * self.penalty
        divided = prefix_scores / self.penalty
        penalized_scores = torch.where(prefix_scores < 0, multiplied, divided)
        return scores.scatter(1, prefix, penalized_scores)


@dataclass(frozen=True)
class PresencePenalty:
    """Lowers the scores of tokens that the new text has: once, and once more for each occurrence.

    Args:
        presence: subtracted from the score of every token of the new text.
        frequency: subtracted from it for each time that the token occurs there.
        prompt_length: tokens at the start of the prefix that do not count.
    """

    presence: float
    frequency: float
    prompt_length: int

    def __call__(
        self,
        prefix: Int[Tensor, "1 T"],
        scores: Float[Tensor, "1 V"],
    ) -> Float[Tensor, "1 V"]:
        new_tokens = prefix[0, self.prompt_length :]
        counts = torch.bincount(new_tokens, minlength=scores.shape[-1])
        return scores - self.presence * (counts > 0) - self.frequency * counts


@dataclass(frozen=True)
class LogitBias:
    """Adds a number to the scores of some tokens.

    Args:
        biases: pairs of a token and its number.
    """

    biases: tuple[tuple[int, float], ...]

    def __call__(
        self,
        prefix: Int[Tensor, "1 T"],
        scores: Float[Tensor, "1 V"],
    ) -> Float[Tensor, "1 V"]:
        tokens, biases = zip(*self.biases, strict=True)
        index = torch.tensor([tokens], device=scores.device)
        added = torch.tensor([biases], device=scores.device, dtype=scores.dtype)
        return scores.scatter_add(1, index, added)


@dataclass(frozen=True)
class Sampling(SamplingSettings):
    """Turns logits into probabilities and tokens, for target and draft alike.

    The steps are: repetition penalty, processors, temperature, top_k, top_p, min_p. Probabilities
    are float32 whatever the models compute in, and tokens are drawn from exactly these.
    """

    processors: Sequence[Any] | tuple[Any, ...] = field(default=(), hash=False)
    """Functions of a prefix `[1, T]` and its scores `[1, V]` that return new scores.

    See `LogitsProcessor`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for processor in self.processors:
            if not callable(processor):
                raise ValueError(
                    f"processors must be callables (prefix, scores) -> scores, got {processor!r}"
                )

        # `repetition_penalty` is the first processor. A copy made from the fields of another
        # Sampling already has one in its processors, which must not be applied twice.
        processors: list[Any] = []
        if self.repetition_penalty is not None:
            processors.append(RepetitionPenalty(self.repetition_penalty))
        for processor in self.processors:
            if not isinstance(processor, RepetitionPenalty):
                processors.append(processor)

        # The class is frozen.
        object.__setattr__(self, "processors", tuple(processors))

    @classmethod
    def of(cls, config: SamplingSettings) -> Sampling:
        """The sampling of a `DecodingConfig` or other `SamplingSettings`, with its processors."""
        arguments = {}
        for setting in fields(cls):
            # Only a `Sampling` has processors.
            if hasattr(config, setting.name):
                arguments[setting.name] = getattr(config, setting.name)
        return cls(**arguments)

    def check_rows(self, target: LanguageModel, eos: frozenset[int]) -> None:
        """Raise ValueError if a processor cannot process rows of this target."""
        for processor in self.processors:
            if isinstance(processor, RowProcessor):
                processor.check(target, eos)

    def for_row(
        self,
        prompt_length: int,
        target: LanguageModel,
        eos: frozenset[int],
    ) -> Sampling:
        """The sampling of one row; itself unless it has a `RowProcessor`."""
        if not any(isinstance(processor, RowProcessor) for processor in self.processors):
            return self
        processors = []
        for processor in self.processors:
            if isinstance(processor, RowProcessor):
                processor = processor.for_row(prompt_length, target, eos)
            processors.append(processor)
        return replace(self, processors=tuple(processors))

    @property
    def bound_processors(self) -> list[BoundProcessor]:
        """The processors that belong to one row."""
        return [processor for processor in self.processors if isinstance(processor, BoundProcessor)]

    @property
    def runs_on_host(self) -> bool:
        """Whether drawing needs the host, so that calls that draw cannot be recorded."""
        return bool(self.processors)

    @property
    def without_greedy(self) -> Sampling:
        """The same sampling, or the model's own distribution if the temperature is 0."""
        return SOFTMAX if self.greedy else self

    def mark_failed(
        self,
        tokens: Int[Tensor, "*B"],
        logits: Float[Tensor, "*B V"],
    ) -> Int[Tensor, "*B"]:
        """The drawn tokens, but V, which is no token, where the logits are not finite.

        A draw at random marks such rows itself; an argmax picks a token even from NaN.
        """
        if not self.greedy:
            return tokens
        return mark_failed(tokens, logits)

    def process(
        self,
        logits: Float[Tensor, "B N V"],
        texts: Sequence[Sequence[int] | None],
        draft_tokens: Sequence[Sequence[int]] | None = None,
        *,
        stop_at_impossible: bool = False,
    ) -> Float[Tensor, "B N V"]:
        """Apply the processors. Returns float32 logits, or `logits` itself without processors.

        Position i of a row follows its text and its first i draft tokens. Positions after a row's
        last draft token are unchanged.

        Args:
            texts: each row's tokens so far; None skips a row.
            draft_tokens: each row's draft tokens, at most N - 1.
            stop_at_impossible: whether to skip the positions after a draft token whose score is
                -inf.

        Raises:
            ValueError: a processor does not return scores `[1, V]`.
        """
        if not self.processors:
            return logits
        if not draft_tokens:
            draft_tokens = [()] * len(texts)

        processed = logits.float().clone()
        for row, (text, row_draft) in enumerate(zip(texts, draft_tokens, strict=True)):
            if text is not None:
                self._process_row(processed[row], text, row_draft, stop_at_impossible)
        return processed

    def _process_row(
        self,
        row_logits: Float[Tensor, "N V"],
        text: Sequence[int],
        row_draft: Sequence[int],
        stop_at_impossible: bool,
    ) -> None:
        """Apply the processors to one row, in place."""
        tokens = [*text, *row_draft]
        # A processor of one row needs no tensor.
        has_others = len(self.bound_processors) < len(self.processors)
        token_tensor = None
        if has_others:
            token_tensor = torch.tensor([tokens], device=row_logits.device)
        for i in range(len(row_draft) + 1):
            scores = row_logits[i : i + 1].clone()
            scores = self._process_position(tokens, token_tensor, len(text) + i, scores)
            row_logits[i : i + 1] = scores

            has_next = i < len(row_draft)
            if stop_at_impossible and has_next and scores[0, row_draft[i]] == -torch.inf:
                break

    def _process_position(
        self,
        tokens: Sequence[int],
        token_tensor: Int[Tensor, "1 T"] | None,
        length: int,
        scores: Float[Tensor, "1 V"],
    ) -> Float[Tensor, "1 V"]:
        """Apply all processors to the scores after the first `length` tokens."""
        expected_shape = scores.shape
        for processor in self.processors:
            if isinstance(processor, BoundProcessor):
                scores = processor.process(tokens, length, scores)
                continue
            assert token_tensor is not None
            scores = processor(token_tensor[:, :length], scores)
            if not isinstance(scores, Tensor) or scores.shape != expected_shape:
                name = getattr(processor, "__qualname__", type(processor).__qualname__)
                raise ValueError(
                    f"the logits processor {name} must return scores {list(expected_shape)}, "
                    f"got {described(scores)}"
                )
        return scores

    def probs(self, logits: Float[Tensor, "*B V"]) -> Float[Tensor, "*B V"]:
        """The distribution that tokens are drawn from, in float32; one-hot at temperature 0.

        Does not apply the processors, see `process`.
        """
        logits = logits.float()
        if self.greedy:
            tokens = largest(logits)
            one_hot = torch.zeros_like(logits)
            return one_hot.scatter_(-1, tokens[..., None], 1.0)

        if self.temperature != 1:
            logits = logits / self.temperature
        probs = logits.softmax(-1)

        # Each filter applies to the distribution that the one before it has left.
        vocab_size = probs.shape[-1]
        if self.top_k is not None and self.top_k < vocab_size:
            probs = _renormalize(probs, _top_k(probs, self.top_k))
        if self.top_p is not None and self.top_p < 1:
            probs = _renormalize(probs, _nucleus(probs, self.top_p))
        if self.min_p is not None and self.min_p > 0:
            # Nguyen et al. 2024: the threshold is relative to the most likely token.
            threshold = self.min_p * probs.amax(-1, keepdim=True)
            probs = _renormalize(probs, probs >= threshold)
        return probs

    def sample(
        self,
        logits: Float[Tensor, "*B V"],
        uniform: Float[Tensor, "*B"] | None,
    ) -> Int[Tensor, "*B"]:
        """Draw a token from each distribution.

        Args:
            uniform: numbers in [0, 1); may be None at temperature 0.
        """
        tokens, _ = self.sample_with_probs(logits, uniform)
        return tokens

    def sample_with_probs(
        self,
        logits: Float[Tensor, "*B V"],
        uniform: Float[Tensor, "*B"] | None,
    ) -> tuple[Int[Tensor, "*B"], Float[Tensor, "*B V"] | None]:
        """Like `sample`, but also return the distributions, or None at temperature 0."""
        if self.greedy:
            return largest(logits), None
        assert uniform is not None, f"temperature {self.temperature} needs uniform numbers"
        probs = self.probs(logits)
        return draw(probs, uniform), probs

    @staticmethod
    def log_probs(logits: Float[Tensor, "*B V"], tokens: Int[Tensor, "*B"]) -> Float[Tensor, "*B"]:
        """The natural log probability of each token under the model: temperature 1, no filters."""
        log_probs = logits.float().log_softmax(-1)
        return log_probs.gather(-1, tokens[..., None]).squeeze(-1)


GREEDY = Sampling()
"""The likeliest token at every position."""
SOFTMAX = Sampling(temperature=1.0)
"""The model's own distribution, which some rules compare regardless of the sampling."""


@dataclass(frozen=True)
class RowSampling(Sampling):
    """Another sampling for each row of a batch.

    A row's tokens are those that its own sampling draws alone. The first dimension of logits and
    of uniform numbers are the rows.
    """

    rows: tuple[Sampling, ...] = ()

    @classmethod
    def of_rows(cls, rows: Sequence[Sampling]) -> Sampling:
        """The sampling of all rows: the single one that they share, or a `RowSampling`."""
        first_sampling = rows[0]
        if all(sampling is first_sampling or sampling == first_sampling for sampling in rows):
            return first_sampling
        return cls(rows=tuple(rows))

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn at random in any row."""
        return all(sampling.greedy for sampling in self.rows)

    @property
    def runs_on_host(self) -> bool:
        return True  # which rows are drawn together changes from round to round

    @property
    def without_greedy(self) -> Sampling:
        return RowSampling.of_rows([sampling.without_greedy for sampling in self.rows])

    def _groups(self) -> list[tuple[Sampling, list[int]]]:
        """A sampling with its rows, which draw equally once their logits are processed."""
        groups: dict[tuple[Any, ...], tuple[Sampling, list[int]]] = {}
        for row, sampling in enumerate(self.rows):
            key = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
            groups.setdefault(key, (sampling, []))[1].append(row)
        return list(groups.values())

    def mark_failed(
        self,
        tokens: Int[Tensor, "*B"],
        logits: Float[Tensor, "*B V"],
    ) -> Int[Tensor, "*B"]:
        marked_tokens = tokens.clone()
        for sampling, rows in self._groups():
            marked_tokens[rows] = sampling.mark_failed(tokens[rows], logits[rows])
        return marked_tokens

    def process(
        self,
        logits: Float[Tensor, "B N V"],
        texts: Sequence[Sequence[int] | None],
        draft_tokens: Sequence[Sequence[int]] | None = None,
        *,
        stop_at_impossible: bool = False,
    ) -> Float[Tensor, "B N V"]:
        if not any(sampling.processors for sampling in self.rows):
            return logits
        if not draft_tokens:
            draft_tokens = [()] * len(texts)

        processed = logits.float().clone()
        for row, sampling in enumerate(self.rows):
            text = texts[row]
            if text is not None and sampling.processors:
                sampling._process_row(processed[row], text, draft_tokens[row], stop_at_impossible)
        return processed

    def probs(self, logits: Float[Tensor, "*B V"]) -> Float[Tensor, "*B V"]:
        probs = torch.empty_like(logits, dtype=torch.float32)
        for sampling, rows in self._groups():
            probs[rows] = sampling.probs(logits[rows])
        return probs

    def sample_with_probs(
        self,
        logits: Float[Tensor, "*B V"],
        uniform: Float[Tensor, "*B"] | None,
    ) -> tuple[Int[Tensor, "*B"], Float[Tensor, "*B V"] | None]:
        if self.greedy:
            return largest(logits), None
        assert uniform is not None, "some rows draw at random, which needs uniform numbers"

        tokens = torch.empty(logits.shape[:-1], dtype=torch.long, device=logits.device)
        probs = torch.empty_like(logits, dtype=torch.float32)
        for sampling, rows in self._groups():
            row_tokens, row_probs = sampling.sample_with_probs(logits[rows], uniform[rows])
            tokens[rows] = row_tokens
            probs[rows] = sampling.probs(logits[rows]) if row_probs is None else row_probs
        return tokens, probs


def mark_failed(tokens: Int[Tensor, "*B"], logits: Float[Tensor, "*B V"]) -> Int[Tensor, "*B"]:
    """The tokens of the largest logits; V, which is no token, if that logit is not finite.

    The largest of numbers with a NaN among them is that NaN, so one logit is enough to look at.
    """
    largest_logits = logits.gather(-1, tokens[..., None]).squeeze(-1)
    return torch.where(largest_logits.abs() < torch.inf, tokens, logits.shape[-1])


def _renormalize(
    probs: Float[Tensor, "*B V"], is_allowed: Bool[Tensor, "*B V"]
) -> Float[Tensor, "*B V"]:
    """The distribution restricted to the allowed tokens."""
    probs = probs * is_allowed
    return probs / probs.sum(-1, keepdim=True)


def _top_k(probs: Float[Tensor, "*B V"], top_k: int) -> Bool[Tensor, "*B V"]:
    """Mask of the k most likely tokens."""
    likely_tokens = probs.topk(top_k).indices
    is_allowed = torch.zeros_like(probs, dtype=torch.bool)
    return is_allowed.scatter_(-1, likely_tokens, True)


NUCLEUS_CANDIDATES = 512
"""Tokens that a CPU ranks first to find the nucleus: sorting a large vocabulary takes ten times as
long."""


def _nucleus(probs: Float[Tensor, "*B V"], top_p: float) -> Bool[Tensor, "*B V"]:
    """Mask of the smallest set of most likely tokens whose probability reaches top_p.

    Holtzman et al. 2020, section 3.1. Among equally likely tokens, the lower numbers come first.
    """
    # In float32 a smaller number would be 0, and the most likely token would be outside.
    top_p = max(top_p, torch.finfo(probs.dtype).tiny)
    vocab_size = probs.shape[-1]
    if vocab_size <= NUCLEUS_CANDIDATES or probs.device.type != "cpu":
        return _nucleus_by_sorting(probs, top_p)

    # A token is in the nucleus if the tokens ranked before it do not reach top_p yet.
    rows = probs.reshape(-1, vocab_size)
    ranked_probs = rows.topk(NUCLEUS_CANDIDATES).values
    mass_before = ranked_probs.cumsum(-1) - ranked_probs
    nucleus_size = (mass_before < top_p).sum(-1, keepdim=True)

    # topk orders equal probabilities arbitrarily, so the mask is built from the lowest probability
    # in the nucleus: all tokens above it, and as many of the equal ones as there is room for.
    last_rank = (nucleus_size - 1).clamp(min=0)
    lowest_prob = ranked_probs.gather(-1, last_rank)
    is_above = rows > lowest_prob
    is_equal = rows == lowest_prob
    num_equal = nucleus_size - is_above.sum(-1, keepdim=True)
    is_among_first_equal = is_equal.cumsum(-1) <= num_equal
    is_in_nucleus = is_above | (is_equal & is_among_first_equal)

    # Where all candidates are in the nucleus, more tokens may be.
    needs_sorting = (nucleus_size == NUCLEUS_CANDIDATES).squeeze(-1)
    if needs_sorting.any():
        is_in_nucleus[needs_sorting] = _nucleus_by_sorting(rows[needs_sorting], top_p)
    return is_in_nucleus.view(probs.shape)


def _nucleus_by_sorting(probs: Float[Tensor, "*B V"], top_p: float) -> Bool[Tensor, "*B V"]:
    """`_nucleus` by sorting the whole vocabulary."""
    ranked_probs, token_by_rank = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ranked_probs.cumsum(-1) - ranked_probs
    is_rank_in_nucleus = mass_before < top_p

    # Back from ranks to tokens.
    is_in_nucleus = torch.zeros_like(probs, dtype=torch.bool)
    return is_in_nucleus.scatter_(-1, token_by_rank, is_rank_in_nucleus)


LARGE_VOCABULARY = 4096
"""Vocabulary size from which `largest` searches in blocks."""
BLOCK_SIZE = 256
"""Tokens in a block of that search."""


def largest(logits: Float[Tensor, "*B V"]) -> Int[Tensor, "*B"]:
    """Like `argmax`, the first of equal maxima, but faster for large vocabularies on a CPU.

    numpy's argmax uses vector instructions and a single thread; torch's would keep the other
    threads' cores busy for a while. numpy has no bfloat16, so there torch computes the maximum of
    each block of tokens, and only the best block is searched.
    """
    vocab_size = logits.shape[-1]
    if vocab_size < LARGE_VOCABULARY or logits.device.type != "cpu":
        return logits.argmax(-1)
    if logits.dtype == torch.float32:
        array = logits.detach().numpy()
        return torch.as_tensor(array.argmax(-1))

    # The maximum of every full block, and of the shorter one after them.
    remainder = vocab_size % BLOCK_SIZE
    full_size = vocab_size - remainder
    full_blocks = logits[..., :full_size].unflatten(-1, (-1, BLOCK_SIZE))
    block_maxima = full_blocks.amax(-1)
    if remainder:
        remainder_maximum = logits[..., full_size:].amax(-1, keepdim=True)
        block_maxima = torch.cat((block_maxima, remainder_maximum), dim=-1)

    # A short last block is searched together with the end of the block before it. That one's
    # maximum is lower, or it would have been chosen.
    best_block = block_maxima.argmax(-1, keepdim=True)
    block_start = (best_block * BLOCK_SIZE).clamp(max=vocab_size - BLOCK_SIZE)

    # The best token of the best block.
    token_offsets = torch.arange(BLOCK_SIZE, device=logits.device)
    block_logits = logits.gather(-1, block_start + token_offsets)
    best_offset = block_logits.argmax(-1)
    return block_start.squeeze(-1) + best_offset


def draw(weights: Float[Tensor, "*B V"], uniform: Float[Tensor, "*B"]) -> Int[Tensor, "*B"]:
    """Draw tokens by inverse transform sampling.

    Returns the first token whose cumulative weight exceeds `uniform` times the total. Weights need
    not be normalized, but must sum to more than 1e-30. A token of weight zero is never drawn,
    because the comparison is strict and uniform < 1. Sums are float64: in float32, those of a large
    vocabulary would lose its unlikely tokens. Weights that contain NaN return V, which is not a
    token.
    """
    cumulative_weights = weights.cumsum(-1, dtype=torch.float64)
    total_weight = cumulative_weights[..., -1:]
    thresholds = uniform[..., None] * total_weight
    tokens = torch.searchsorted(cumulative_weights, thresholds, right=True)
    return tokens.squeeze(-1)


class Purpose(IntEnum):
    """What a random number is used for; each purpose is a column of the noise."""

    DRAFT = 0
    """Drawing a draft token."""
    ACCEPT = 1
    """Accepting or rejecting a draft token."""
    CORRECT = 2
    """Drawing the target's token: a correction or the bonus token."""


def column(noise: Float[Tensor, "*B 3"] | None, purpose: Purpose) -> Float[Tensor, "*B"] | None:
    """The uniform numbers for one purpose; None if nothing is drawn at random."""
    if noise is None:
        return None
    return noise[..., purpose]


RANDOM_BITS = 53
"""Random bits of a uniform number, the number that fits in a float64.

With the 24 bits of a float32, tokens less likely than 2^-24 could not be drawn.
"""


def noise_table(seed: int, prompt_index: int, num_positions: int) -> Float[Tensor, "N 3"]:
    """Uniform numbers in [0, 1) for one row, indexed by position of the new token and `Purpose`.

    They depend on all 64 bits of seed and prompt index and on nothing else, so a row's tokens do
    not depend on its batch. A longer table begins with the shorter one.
    """
    # A hash with extendable output, because torch's CPU generators distinguish only 2^32 seeds.
    key = struct.pack("<QQ", seed, prompt_index % 2**64)
    num_integers = num_positions * len(Purpose)
    random_bytes = hashlib.shake_128(key).digest(8 * num_integers)

    # frombuffer needs memory that can be written, as a bytearray's.
    integers = torch.frombuffer(bytearray(random_bytes), dtype=torch.long)
    low_bits = integers & (2**RANDOM_BITS - 1)
    uniform = low_bits.double() * 2**-RANDOM_BITS
    return uniform.view(num_positions, len(Purpose))
