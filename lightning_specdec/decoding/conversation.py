"""A text that grows turn by turn, of which nothing is read twice."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_specdec.config.decoding import MAX_TOKENS, DecodingConfig
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
        self.config = config
        limits = (max_length, target.max_positions, drafter.max_positions)
        self.max_length = min((limit for limit in limits if limit is not None), default=MAX_TOKENS)
        self.session = Session(target, drafter, config, max_length=FIRST_LENGTH)
        self.row: Row | None = None

    def begin(self, prompt: Sequence[int]) -> Row:
        """Begin a turn with the whole text so far; `session.step` until the row is no longer live.

        Raises:
            ValueError: the prompt leaves no room for an answer, or the last answer has not ended.
        """
        wanted = min(self.config.max_new_tokens, self.max_length - len(prompt))
        if wanted < 1:
            raise ValueError(f"{len(prompt)} tokens fill the chat's context of {self.max_length}: begin a new one")
        if self.session.max_length < (needed := len(prompt) + wanted):
            models = self.session.target, self.session.drafter
            del self.session  # the old room goes before the new one is made
            self.session = Session(*models, self.config, max_length=power_of_two(needed))
        if self.row is None:
            self.row = self.session.add(prompt, max_new_tokens=wanted)
        else:
            self.row = self.session.resume(self.row, prompt, max_new_tokens=wanted)
        return self.row
