"""A text that grows turn by turn, of which nothing is read twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_specdec.config.checks import require_int
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding.rows import Row
from lightning_specdec.decoding.session import Session
from lightning_specdec.decoding.stopping import StopStrings
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel

FIRST_LENGTH = 1024
"""Tokens that a conversation has room for at first; the room doubles when it is needed."""


class Conversation:
    """One row that is resumed turn after turn.

    A turn costs only its own tokens, however long the conversation. Where a prompt departs from what was said (a
    template that rewrites earlier turns), the states go back as far as they can or begin again. Room for the states
    grows in powers of two, at the price of reading the text once more each time.

    Args:
        config: how to decode; `changes` replace fields of it.
        max_length: most tokens of all turns together; what the models were made for when None.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        config: DecodingConfig | None = None,
        *,
        max_length: int | None = None,
        **changes: Any,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.config = DecodingConfig.of(config, **changes)
        limits = [n for n in (max_length, target.max_positions, drafter.max_positions) if n is not None]
        self.max_length = require_int("max_length", min(limits), 2) if limits else None
        self.session: Session | None = None
        self.row: Row | None = None
        self.num_reused = 0
        """Tokens of the current prompt that did not have to be read again."""

    def begin(
        self, prompt: Sequence[int], *, max_new_tokens: int | None = None, stop: StopStrings | None = None
    ) -> Row:
        """Begin a turn; `step` until its row is no longer live.

        Args:
            prompt: the whole text so far. What it shares with the last turn's text is not read again.
            max_new_tokens: tokens of the answer at most; fewer where `max_length` leaves less room.
            stop: strings that end the answer.

        Raises:
            ValueError: the prompt leaves no room for an answer, or the last answer has not ended.
        """
        wanted = self.config.max_new_tokens if max_new_tokens is None else max_new_tokens
        max_new_tokens = require_int("max_new_tokens", wanted, 1)
        if self.row is not None and self.row.live:
            raise ValueError("the last answer has not ended: step until it has, or cancel it")
        if self.max_length is not None:
            if len(prompt) >= self.max_length:
                raise ValueError(
                    f"the conversation has {len(prompt)} tokens and the models a context of {self.max_length}: "
                    "begin a new one"
                )
            max_new_tokens = min(max_new_tokens, self.max_length - len(prompt))
        needed, before = len(prompt) + max_new_tokens, self.row
        if self.session is None or self.session.max_length < needed:
            self.session = None  # the old room goes before the new one is made
            self.session = self._open(needed)
        if before is None:
            self.row = self.session.add(prompt, max_new_tokens=max_new_tokens, stop=stop)
        else:
            self.row = self.session.resume(before, prompt, max_new_tokens=max_new_tokens, stop=stop)
        self.num_reused = self.session.num_read(self.row)
        return self.row

    def step(self) -> list[int]:
        """One round; gives the answer's new tokens."""
        if self.session is None:
            raise ValueError("there is no turn yet: begin one")
        return [token for _, tokens in self.session.step() for token in tokens]

    def cancel(self) -> None:
        """End the answer where it is; the conversation can go on from there."""
        if self.session is not None and self.row is not None:
            self.session.cancel(self.row)

    def _open(self, length: int) -> Session:
        """A session with room for so many tokens."""
        room = FIRST_LENGTH
        while room < length:
            room *= 2
        most = room if self.max_length is None else min(room, self.max_length)
        return Session(self.target, self.drafter, self.config, max_length=most)
