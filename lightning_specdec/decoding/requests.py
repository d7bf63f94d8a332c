"""One prompt while it is decoded, and checks of the prompts and limits of a decoding call."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_specdec.config.checks import require_int
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding.results import Counts, Round, RowResult
from lightning_specdec.decoding.stopping import StopSearch, StopStrings
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import DecodeState, LanguageModel
from lightning_specdec.models.state import crosses_switch
from lightning_specdec.rules import GREEDY, Sampling

Prompts = Sequence[Any] | Tensor | Mapping[str, Any]
"""Tokens of one prompt or of several, a tensor `[T]` or `[B, T]`, or a tokenizer's output with its
attention mask.
"""

TopLogprobs = list[tuple[int, float]]
"""The likeliest tokens of one position with their log probabilities, best first."""

log = logging.getLogger(__name__)


class Request:
    """A prompt and its new tokens while they are decoded.

    Args:
        index: the prompt's number, which with the seed decides its random numbers.
        prompt: tokens.
        max_new_tokens: most new tokens; with 0 the row has ended before it begins.
        eos: tokens that end the row; they are kept. Those in the prompt do not count.
        speculative: whether to count draft tokens.
        stop: strings that end the row; the token that completes one is kept.
        num_drawn: new tokens of earlier turns, whose random numbers are used up.
        sampling: how its tokens are drawn.
        seed: decides its random numbers, together with its number; None if nothing is drawn at
            random.
        wants_logprobs: whether to keep the log probability of each new token.
        num_top_logprobs: how many of the likeliest tokens to keep with each new token.
        settings: of a session's row, which its next turn keeps.

    Attributes:
        text: the prompt and all new tokens.
        max_length: most tokens of the text.
        stop_reason: why the row has ended; "" until then.
        failure: why it failed, if that was not for logits that are not finite.
        resumed: whether another row continues with its random numbers.
        num_prompt_read: tokens of the prompt that earlier rounds have read, or whose states were
            copied.
        num_withheld: tokens at the end of the prompt that the models do not see in this round,
            since the prompt is read in parts.
        num_added: new tokens of the last round; 1 before the first.
        top_logprobs: for each new token, the likeliest tokens in its place with their log
            probabilities; empty unless requested.
    """

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        eos: frozenset[int],
        speculative: bool,
        stop: StopStrings | None = None,
        num_drawn: int = 0,
        sampling: Sampling | None = None,
        seed: int | None = None,
        wants_logprobs: bool = False,
        num_top_logprobs: int = 0,
        settings: RowSettings | None = None,
    ) -> None:
        self.index = index
        self.settings = settings
        self.sampling = sampling or GREEDY
        self.seed = seed
        self.wants_logprobs = wants_logprobs
        self.num_top_logprobs = num_top_logprobs
        self.text = list(prompt)
        self.prompt_length = len(self.text)
        self.max_length = self.prompt_length + max_new_tokens
        self.eos = eos
        self.num_drawn = num_drawn
        self.resumed = False
        self.num_prompt_read = 0
        self.num_withheld = 0
        self._stop_search = None if stop is None else StopSearch(stop)
        self.stop_reason = "" if max_new_tokens else "length"
        self.failure = ""

        # What the result reports.
        self.counts = Counts() if speculative else None
        self.rounds: list[Round] = []
        self.num_rounds = 0
        self.num_added = 1
        self.token_seconds: list[float] = []
        self.logprobs: list[float] | None = None
        self.top_logprobs: list[TopLogprobs] = []

    def __repr__(self) -> str:
        state = "live" if self.live else f"ended by {self.stop_reason!r}"
        return f"Request(index={self.index}, {len(self.text)} tokens, {state})"

    @property
    def live(self) -> bool:
        """Whether the row has not ended."""
        return not self.stop_reason

    @property
    def is_reading(self) -> bool:
        """Whether this round reads a part of the prompt only, so that it has no new tokens."""
        return self.live and self.num_withheld > 0

    @property
    def visible_text(self) -> list[int]:
        """The text that the models see in this round."""
        if self.num_withheld == 0:
            return self.text
        return self.text[: -self.num_withheld]

    @property
    def num_final(self) -> int:
        """Tokens of the text that the target has read. What its state has beyond these may be draft
        tokens.
        """
        if self.num_new == 0:
            return self.num_prompt_read
        # The last token was drawn, and not read yet.
        return len(self.text) - 1

    @property
    def num_new(self) -> int:
        """Number of new tokens so far."""
        return len(self.text) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Number of new tokens that may still follow."""
        return self.max_length - len(self.text)

    @property
    def num_hidden(self) -> int:
        """Bytes at the end of the new text that are not shown: a stop string, or a part that may
        become one.
        """
        if self._stop_search is None:
            return 0
        if self.live:
            return self._stop_search.num_held
        return self._stop_search.num_cut

    def append(
        self,
        tokens: Sequence[int],
        seconds: float,
        logprobs: Sequence[float] | None = None,
        top_logprobs: Sequence[TopLogprobs] = (),
    ) -> list[int]:
        """Add tokens up to and including the first that stops the row.

        Returns those that were added.
        """
        added = list(tokens)
        for i, token in enumerate(tokens):
            if token in self.eos:
                del added[i + 1 :]
                self.stop_reason = "eos"
                break
        if self._stop_search is not None:
            num_until_stop = self._stop_search.push(added)
            if num_until_stop is not None:
                del added[num_until_stop:]
                self.stop_reason = "stop"

        self.text += added
        self.token_seconds += [seconds] * len(added)
        self.num_rounds += 1
        self.num_added = len(added)
        if logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += logprobs[: len(added)]
        self.top_logprobs += top_logprobs[: len(added)]

        assert self.remaining >= 0, "a drafter exceeded its window"
        if self.live and self.remaining == 0:
            self.stop_reason = "length"
        return added

    def commit(
        self,
        drafted: list[int],
        num_accepted: int,
        next_token: int | None,
        *,
        seconds: float,
        changed: Sequence[int] = (),
        logprobs: Sequence[float] | None = None,
        top_logprobs: Sequence[TopLogprobs] = (),
    ) -> list[int]:
        """Add a round's tokens and count its draft tokens.

        Draft tokens after a stop count neither as proposed nor as tested nor as accepted.

        Args:
            drafted: the row's draft tokens.
            num_accepted: how many of them the rule accepts.
            next_token: the target's token after them; None if it could not be drawn, which ends
                the row.
            seconds: time since decoding began.
            changed: for each draft token, whether the target drew another one.
            logprobs: log probabilities of the accepted tokens and of the next one.
            top_logprobs: the likeliest tokens in each of these positions.

        Returns:
            The tokens that were added.
        """
        assert self.counts is not None
        tokens = drafted[:num_accepted]
        if next_token is not None:
            tokens.append(next_token)
        added = self.append(tokens, seconds, logprobs, top_logprobs)
        if next_token is None:
            self.fail()

        num_proposed = len(drafted)
        if self.stop_reason in ("eos", "stop"):
            num_proposed = min(num_proposed, len(added))
        num_added_drafts = min(num_accepted, len(added))
        num_tested = min(num_accepted + 1, num_proposed)
        num_changed = sum(changed[:num_added_drafts])
        self.counts.record(num_proposed, num_tested, num_added_drafts, num_changed)

        if len(added) <= num_accepted:
            next_token = None
        self.rounds.append(Round(drafted[:num_proposed], num_added_drafts, next_token))
        return added

    def fail(self) -> None:
        """End the row: its next token could not be drawn."""
        if not self.live:
            return
        self.stop_reason = "failed"
        for processor in self.sampling.bound_processors:
            self.failure = self.failure or processor.error
        log.warning(
            "prompt %d ends after %d new tokens: %s",
            self.index,
            self.num_new,
            self.failure or "the target's logits are not finite: try --dtype float32",
        )

    def forced_tokens(self, count: int) -> list[int]:
        """Up to `count` tokens that are likely to follow, since a grammar allows no other text."""
        for processor in self.sampling.bound_processors:
            tokens = processor.forced_tokens(self.text, count)
            if tokens:
                return tokens
        return []

    def result(self) -> RowResult:
        """The row's result so far."""
        return RowResult(
            index=self.index,
            prompt=self.text[: self.prompt_length],
            tokens=self.text[self.prompt_length :],
            stop_reason=self.stop_reason or "interrupted",
            num_rounds=self.num_rounds,
            token_seconds=self.token_seconds,
            counts=self.counts,
            rounds=None if self.counts is None else self.rounds,
            logprobs=self.logprobs,
            num_hidden=self.num_hidden if self.stop_reason == "stop" else 0,
        )


@dataclass(frozen=True)
class RowSettings:
    """The settings of a decoding config that may differ from row to row, checked for a target."""

    sampling: Sampling
    seed: int
    eos: frozenset[int]
    stops: StopStrings | None
    logprobs: bool

    @classmethod
    def of(cls, config: DecodingConfig, target: LanguageModel) -> RowSettings:
        """Raises ValueError if a token or a stop string is none of the target's, or if a
        processor cannot be used with it.
        """
        sampling = Sampling.of(config)
        eos = check_eos(config.eos, target.vocab_size)
        sampling.check_rows(target, eos)
        return cls(
            sampling=sampling,
            seed=config.seed,
            eos=eos,
            stops=stops_of(config, target),
            logprobs=config.logprobs,
        )


def stops_of(config: DecodingConfig, target: LanguageModel) -> StopStrings | None:
    """The config's stop strings as bytes of the target's tokens; None if there are none.

    Raises:
        ValueError: the text of the target's tokens is not known.
    """
    if not config.stop:
        return None
    if target.vocabulary is None:
        raise ValueError(
            "stop strings need the text of the target's tokens: load it with its tokenizer"
        )
    return StopStrings(config.stop, target.vocabulary.token_bytes)


def as_prompts(prompts: Prompts) -> list[list[Any]]:
    """A list of prompts from any form of `Prompts`, without the padding that an attention mask
    marks.
    """
    mask: Any = None
    if isinstance(prompts, Mapping):
        mask = prompts.get("attention_mask")
        prompts = prompts["input_ids"]
    values = [_plain(value) for value in _plain(prompts)]
    if not values:
        raise ValueError("there is no prompt: give at least one token")

    texts: list[Any] = [values]
    if all(isinstance(value, Sequence) for value in values):
        texts = values
    if mask is None:
        return texts
    text_masks = as_prompts(mask)
    return [
        [token for token, is_real in zip(text, text_mask, strict=True) if is_real]
        for text, text_mask in zip(texts, text_masks, strict=True)
    ]


def _plain(values: Any) -> Any:
    """Tensors and arrays as lists."""
    return values.tolist() if hasattr(values, "tolist") else values


def check_prompt(prompt: Sequence[Any], vocab_size: int, name: str) -> None:
    """Raise ValueError for an empty prompt or a token outside the vocabulary."""
    if not prompt:
        raise ValueError(f"{name} is empty: give at least one token")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(
                f"{name} holds {token!r}: tokens of this model are integers from 0 to "
                f"{vocab_size - 1}"
            )


def check_padding(rows: Sequence[Sequence[int]], pad: int | None) -> None:
    """Raise ValueError if some rows begin or end with the pad token and others do not.

    Rows of different lengths are not padded: they begin with a BOS that is also the pad token.
    """
    if len({len(row) for row in rows}) > 1:
        return
    for end in (0, -1):
        padded = [bool(row) and row[end] == pad for row in rows]
        if any(padded) and not all(padded):
            raise ValueError(
                f"prompt {padded.index(True)} seems padded with token {pad}: give the "
                "tokenizer's whole output, with "
                "its attention_mask"
            )


def check_batch(
    prompts: Prompts,
    target: LanguageModel,
    config: DecodingConfig,
    *,
    indices: Sequence[int] | None = None,
    drafter: Drafter | None = None,
) -> list[tuple[int, list[int]]]:
    """The prompts with their numbers (0, 1, ... when `indices` is None), checked."""
    texts = as_prompts(prompts)
    for i, text in enumerate(texts):
        check_prompt(text, target.vocab_size, f"prompt {i}")
        check_context(len(text), config.max_new_tokens, target, drafter)
    numbers = range(len(texts)) if indices is None else indices
    if len(numbers) != len(texts):
        raise ValueError(
            f"there are {len(texts)} prompts but {len(numbers)} indices: give one for each"
        )
    return list(zip(numbers, texts, strict=True))


def check_eos(eos: Sequence[int] | None, vocab_size: int) -> frozenset[int]:
    """The stop tokens as a set."""
    return frozenset(require_int("eos", token, 0, vocab_size - 1) for token in eos or ())


def check_context(
    num_prompt_tokens: int,
    max_new_tokens: int,
    target: LanguageModel,
    drafter: Drafter | None = None,
) -> None:
    """Raise ValueError for a text that exceeds the context of the target or of the draft, or that
    crosses the target's position switch.

    No model reads the last new token, so it needs no position.
    """
    limits = {"target": target.max_positions}
    if drafter is not None:
        limits["draft"] = drafter.max_positions
    for owner, limit in limits.items():
        if limit is not None and num_prompt_tokens + max_new_tokens - 1 > limit:
            advice = "shorten the prompt or ask for fewer"
            if owner == "target" and target.longer_texts_with is not None:
                advice = f"{advice}, or use {target.longer_texts_with}"
            raise ValueError(
                f"a prompt of {num_prompt_tokens} tokens and {max_new_tokens} new ones do not "
                f"fit the {owner}'s context of {limit}: {advice}"
            )
    check_switch(num_prompt_tokens, max_new_tokens, target.position_switch)


def check_switch(num_prompt_tokens: int, max_new_tokens: int, switch: int | None) -> None:
    """Raise ValueError for a text that begins on one side of a position switch and ends on the
    other.

    Args:
        switch: as `LanguageModel.position_switch`.
    """
    if switch is not None and crosses_switch(num_prompt_tokens, max_new_tokens, switch):
        most_new_tokens = switch + 1 - num_prompt_tokens
        raise ValueError(
            f"a prompt of {num_prompt_tokens} tokens and {max_new_tokens} new ones would pass "
            f"token {switch}, where this model changes its positions (LongRoPE): ask for up to "
            f"{most_new_tokens} new tokens, or give a prompt of more than {switch}"
        )


def num_shared(text: Sequence[int], other_text: Sequence[int]) -> int:
    """Length of the common prefix of two texts."""
    pairs = zip(text, other_text, strict=False)
    for i, (token, other_token) in enumerate(pairs):
        if token != other_token:
            return i
    return min(len(text), len(other_text))


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def batch_size_for(num_rows: int, state: DecodeState) -> int:
    """Rows of a batch with this many live ones: a power of two, so that shapes seldom change.

    Where each row has separate calls, empty rows would only cost time.
    """
    return power_of_two(num_rows) if state.shares_calls else num_rows
