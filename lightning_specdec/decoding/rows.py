"""One prompt while it is decoded, and the checks of what is given to decode."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.config.checks import require_int
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding.results import Counts, Round, RowResult
from lightning_specdec.decoding.stopping import StopSearch, StopStrings
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Prompts = Sequence[Any] | Tensor | Mapping[str, Any]
"""Tokens of one prompt or of several, a tensor `[T]` or `[B, T]`, or a tokenizer's output with its attention mask."""
log = logging.getLogger(__name__)


class Row:
    """A prompt and its new tokens while they are decoded; `text` has both, `stop_reason` is "" until it ends.

    Args:
        index: the prompt's number, which with the seed decides its random numbers.
        prompt: tokens.
        max_new_tokens: most new tokens; with 0 the row has ended before it begins.
        eos: tokens that end the row; they are kept. Those in the prompt do not count.
        speculative: whether to count draft tokens.
        stop: strings that end the row; the token that completes one is kept.
        num_drawn: new tokens of earlier turns, whose random numbers are used up.
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
    ) -> None:
        self.index, self.text, self.eos, self.num_drawn = index, list(prompt), eos, num_drawn
        self.prompt_length = len(self.text)
        self.max_length = self.prompt_length + max_new_tokens
        self.resumed = False
        """Whether another row continues with its noise."""
        self._search = None if stop is None else StopSearch(stop)
        self.stop_reason = "" if max_new_tokens else "length"
        self.counts = Counts() if speculative else None
        self.rounds: list[Round] = []
        self.num_rounds = 0
        self.num_added = 1
        """New tokens of the last round; 1 before the first."""
        self.token_seconds: list[float] = []
        self.logprobs: list[float] | None = None

    @property
    def live(self) -> bool:
        """Whether the row has not ended."""
        return not self.stop_reason

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
        """Bytes at the end of the new text that are not shown: a stop string, or a part that may become one."""
        if self._search is None:
            return 0
        return self._search.num_held if self.live else self._search.num_cut

    def append(
        self, tokens: Sequence[int], seconds: float, logprobs: Sequence[float] | None = None
    ) -> list[int]:
        """Add tokens up to and with the first stop; gives those that were added."""
        added = list(tokens)
        for i, token in enumerate(tokens):
            if token in self.eos:
                del added[i + 1 :]
                self.stop_reason = "eos"
                break
        if self._search is not None and (num_kept := self._search.push(added)) is not None:
            del added[num_kept:]
            self.stop_reason = "stop"
        self.text += added
        self.token_seconds += [seconds] * len(added)
        self.num_rounds += 1
        self.num_added = len(added)
        if logprobs is not None:
            self.logprobs = (self.logprobs or []) + list(logprobs[: len(added)])
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
    ) -> list[int]:
        """Add a round's tokens and count what became of its draft tokens; gives the tokens that were added.

        Draft tokens behind a stop count neither as proposed nor as tested nor as accepted. Without a `next_token`
        nothing could be drawn there, and the row ends.
        """
        assert self.counts is not None
        own = [] if next_token is None else [next_token]
        added = self.append([*drafted[:num_accepted], *own], seconds, logprobs)
        if next_token is None:
            self.fail()
        stopped_early = self.stop_reason in ("eos", "stop") and len(added) <= len(drafted)
        proposed = len(added) if stopped_early else len(drafted)
        accepted = min(num_accepted, len(added))
        self.counts.record(
            proposed, min(num_accepted + 1, proposed), accepted, sum(changed[:accepted])
        )
        self.rounds.append(
            Round(drafted[:proposed], accepted, next_token if len(added) > num_accepted else None)
        )
        return added

    def fail(self) -> None:
        """End the row: its next token could not be drawn."""
        if self.live:
            self.stop_reason = "failed"
            log.warning(
                "prompt %d ends after %d new tokens: the target's logits are not finite: try --dtype float32",
                self.index,
                self.num_new,
            )

    def result(self) -> RowResult:
        """The row's outcome so far."""
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


def stops_of(config: DecodingConfig, target: LanguageModel) -> StopStrings | None:
    """What looks for the config's stop strings; None where there are none.

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
    """A list of prompts from whatever `Prompts` are; padding that an attention mask marks is left out."""
    mask: Any = None
    if isinstance(prompts, Mapping):
        mask, prompts = prompts.get("attention_mask"), prompts["input_ids"]
    values = [_plain(value) for value in _plain(prompts)]
    if not values:
        raise ValueError("there is no prompt: give at least one token")
    rows: list[Any] = values if all(isinstance(value, Sequence) for value in values) else [values]
    if mask is None:
        return rows
    both = zip(rows, as_prompts(mask), strict=True)
    return [[token for token, real in zip(row, seen, strict=True) if real] for row, seen in both]


def _plain(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def check_prompt(prompt: Sequence[Any], vocab_size: int, name: str) -> None:
    """Raise ValueError for an empty prompt or a token outside the vocabulary."""
    if not prompt:
        raise ValueError(f"{name} is empty: give at least one token")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(
                f"{name} holds {token!r}: tokens of this model are integers from 0 to {vocab_size - 1}"
            )


def check_padding(rows: Sequence[Sequence[int]], pad: int | None) -> None:
    """Raise ValueError where some rows begin or end with the pad token and others do not."""
    for end in (0, -1):
        padded = [bool(row) and row[end] == pad for row in rows]
        if any(padded) and not all(padded):
            raise ValueError(
                f"prompt {padded.index(True)} seems padded with token {pad}: give the tokenizer's whole output, with "
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
    """Raise ValueError for a text that would outgrow what a model was made for."""
    for owner, model in (("target", target), ("draft", drafter)):
        limit = None if model is None else model.max_positions
        if limit is not None and num_prompt_tokens + max_new_tokens > limit:
            raise ValueError(
                f"a prompt of {num_prompt_tokens} tokens and {max_new_tokens} new ones do not fit the {owner}'s "
                f"context of {limit}: shorten the prompt or ask for fewer"
            )


def flag_undrawable(tokens: Int[Tensor, "*B"], logits: Float[Tensor, "*B V"]) -> Int[Tensor, "*B"]:
    """The largest logits' tokens; the vocabulary's size, which no token is, where that logit is not a finite number.

    The largest of numbers with a NaN among them is that NaN, so one logit tells.
    """
    largest = logits.gather(-1, tokens[..., None]).squeeze(-1)
    return torch.where(largest.abs() < torch.inf, tokens, logits.shape[-1])


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common from the start on."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`: batches grow and shrink to these alone."""
    return 1 << (count - 1).bit_length()
