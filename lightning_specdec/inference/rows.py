"""One prompt on its way: its text, what stops it, and what has been counted so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_specdec.checks import require_int
from lightning_specdec.inference.results import Counts, Round, RowResult
from lightning_specdec.inference.stopping import StopStrings

Prompts = Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor


class Row:
    """A prompt and what follows it.

    Args:
        index: the prompt's number, which its noise is keyed by.
        prompt: at least one token.
        max_new_tokens: where it stops at the latest; 0 makes a row that is finished before it begins.
        eos: tokens that stop it; they are kept. Those in the prompt do not count.
        speculative: whether to count drafted tokens.
        stop: strings that stop it once its new text holds one; the token that completes it is kept.
        num_drawn: new tokens of earlier turns, whose noise is used up.
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
        self.text = list(prompt)
        self.prompt_length = len(self.text)
        self.max_length = self.prompt_length + max_new_tokens
        self.eos = eos
        self.num_drawn = num_drawn
        self.resumed = False
        """Whether another row goes on with its noise."""
        self._search = None if stop is None else stop.search()
        self.stop_reason = "" if max_new_tokens else "length"
        self.counts = Counts() if speculative else None
        self.rounds: list[Round] = []
        self.num_rounds = 0
        self.num_added = 1
        """New tokens of the last round; 1 before the first."""
        self.index = index
        self.token_seconds: list[float] = []
        self.logprobs: list[float] | None = None

    @property
    def live(self) -> bool:
        """Whether more tokens are wanted."""
        return not self.stop_reason

    @property
    def num_new(self) -> int:
        """New tokens so far."""
        return len(self.text) - self.prompt_length

    @property
    def remaining(self) -> int:
        """New tokens still wanted at most."""
        return self.max_length - len(self.text)

    @property
    def num_hidden(self) -> int:
        """Bytes at the end of the new text that are not to be shown: a stop string, or what may become one."""
        if self._search is None:
            return 0
        return self._search.num_held if self.live else self._search.num_cut

    def append(self, tokens: Sequence[int], seconds: float, logprobs: Sequence[float] | None = None) -> list[int]:
        """Add settled tokens up to and with the first stop; gives those that were added."""
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
        assert self.remaining >= 0, "a drafter guessed beyond its window"
        if self.live and self.remaining == 0:
            self.stop_reason = "length"
        return added

    def settle(
        self,
        drafted: list[int],
        num_accepted: int,
        next_token: int,
        *,
        seconds: float,
        changed: Sequence[int] = (),
        logprobs: Sequence[float] | None = None,
    ) -> list[int]:
        """Add a round's tokens and count what became of its guesses; gives the tokens that were added.

        Guesses behind a stop were never wanted, so they count neither as proposed nor as tested nor as accepted.
        """
        assert self.counts is not None
        added = self.append([*drafted[:num_accepted], next_token], seconds, logprobs)
        stopped_early = self.stop_reason in ("eos", "stop") and len(added) <= len(drafted)
        proposed = len(added) if stopped_early else len(drafted)
        accepted = min(num_accepted, len(added))
        tested = min(num_accepted + 1, proposed)
        self.counts.record(proposed, tested, accepted, sum(changed[:accepted]))
        self.rounds.append(Round(drafted[:proposed], accepted, next_token if len(added) > num_accepted else None))
        return added

    def result(self) -> RowResult:
        """The row's outcome so far."""
        speculative = self.counts is not None
        return RowResult(
            index=self.index,
            prompt=self.text[: self.prompt_length],
            tokens=self.text[self.prompt_length :],
            stop_reason=self.stop_reason or "interrupted",
            num_rounds=self.num_rounds,
            token_seconds=self.token_seconds,
            counts=self.counts,
            rounds=self.rounds if speculative else None,
            logprobs=self.logprobs,
        )


def as_prompts(prompts: Prompts) -> list[list[Any]]:
    """A list of prompts from a list of tokens, a list of such lists, or a tensor `[T]` or `[B, T]`."""
    if not isinstance(prompts, Tensor) and hasattr(prompts, "tolist"):  # an array of numpy's
        prompts = torch.as_tensor(prompts)
    values: list[Any] = torch.atleast_1d(prompts).tolist() if isinstance(prompts, Tensor) else list(prompts)
    if not values:
        raise ValueError("there is no prompt: give at least one token")
    if not all(isinstance(value, Sequence) or (isinstance(value, Tensor) and value.dim()) for value in values):
        return [values]  # of one prompt, or of what `check_prompt` refuses
    return [value.tolist() if isinstance(value, Tensor) else list(value) for value in values]


def check_prompt(prompt: Sequence[Any], vocab_size: int, name: str) -> None:
    """Raise ValueError for an empty prompt or a token outside the vocabulary."""
    if not prompt:
        raise ValueError(f"{name} is empty: give at least one token")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(f"{name} holds {token!r}: tokens of this model are integers from 0 to {vocab_size - 1}")


def check_drawn(token: int, vocab_size: int) -> int:
    """The token, unless it was drawn from logits that are not numbers."""
    if token >= vocab_size:
        raise ValueError("the target's logits are not finite, so nothing can be drawn from them: try --dtype float32")
    return token


def check_eos(eos: int | Sequence[int] | None, vocab_size: int) -> frozenset[int]:
    """The stop tokens as a set."""
    tokens = [] if eos is None else [eos] if isinstance(eos, int) else eos
    return frozenset(require_int("eos", token, 0, vocab_size - 1) for token in tokens)


def check_batch(
    prompts: Prompts, vocab_size: int, *, max_new_tokens: int, indices: Sequence[int] | None
) -> list[tuple[int, list[int]]]:
    """The prompts with their numbers (0, 1, ... when `indices` is None), checked."""
    require_int("max_new_tokens", max_new_tokens, 1)
    texts = as_prompts(prompts)
    for i, text in enumerate(texts):
        check_prompt(text, vocab_size, f"prompt {i}")
    numbers = range(len(texts)) if indices is None else indices
    if len(numbers) != len(texts):
        raise ValueError(f"there are {len(texts)} prompts but {len(numbers)} indices: give one for each")
    return list(zip(numbers, texts, strict=True))


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common from the start on."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`: the only batch sizes that shrinking and growing lead to."""
    return 1 << (count - 1).bit_length()
