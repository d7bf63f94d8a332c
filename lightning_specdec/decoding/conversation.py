"""A text that grows turn by turn, of which nothing is read twice."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_specdec.config.checks import require_int
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding.rows import Row, power_of_two
from lightning_specdec.decoding.session import Session
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel

FIRST_LENGTH = 1024
"""Tokens that a conversation has room for at first; the room doubles when it is needed."""


class Conversation:
    """One row that is resumed turn after turn.

    A turn costs only its own tokens, however long the conversation. Where a prompt departs from what was said (a
    template that rewrites earlier turns), the states go back as far as they can or begin again. When the room for the
    states doubles, the text is read once more.

    Args:
        config: how to decode; an answer has `max_new_tokens` at most, fewer where `max_length` leaves less room.
        max_length: most tokens of all turns together; what the models were made for when None.
    """

    def __init__(
        self, target: LanguageModel, drafter: Drafter, config: DecodingConfig, *, max_length: int | None = None
    ) -> None:
        self.target, self.drafter, self.config = target, drafter, config
        limits = [n for n in (max_length, target.max_positions, drafter.max_positions) if n is not None]
        self.max_length = require_int("max_length", min(limits), 2) if limits else None
        self.session: Session | None = None
        self.row: Row | None = None

    def begin(self, prompt: Sequence[int]) -> Row:
        """Begin a turn with the whole text so far; `step` until the row is no longer live.

        Raises:
            ValueError: the prompt leaves no room for an answer, or the last answer has not ended.
        """
        wanted = self.config.max_new_tokens
        if self.max_length is not None:
            if len(prompt) >= self.max_length:
                raise ValueError(
                    f"the conversation has {len(prompt)} tokens and the models a context of {self.max_length}: "
                    "begin a new one"
                )
            wanted = min(wanted, self.max_length - len(prompt))
        if self.session is None or self.session.max_length < len(prompt) + wanted:
            room = max(FIRST_LENGTH, power_of_two(len(prompt) + wanted))
            self.session = None  # the old room goes before the new one is made
            self.session = Session(self.target, self.drafter, self.config, max_length=room)
        if self.row is None:
            self.row = self.session.add(prompt, max_new_tokens=wanted)
        else:
            self.row = self.session.resume(self.row, prompt, max_new_tokens=wanted)
        return self.row

    def step(self) -> list[int]:
        """One round; gives the answer's new tokens."""
        assert self.session is not None, "there is no turn yet: begin one"
        return [token for _, tokens in self.session.step() for token in tokens]

    def cancel(self) -> None:
        """End the answer where it is; the conversation can go on from there."""
        if self.session is not None and self.row is not None:
            self.session.cancel(self.row)
