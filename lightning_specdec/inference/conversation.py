"""A text that grows turn by turn, a prompt and an answer at a time, of which nothing is read twice."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_specdec.checks import require_int
from lightning_specdec.drafters import Drafter
from lightning_specdec.inference.rows import Row
from lightning_specdec.inference.session import Session
from lightning_specdec.inference.stopping import StopStrings
from lightning_specdec.inference.windows import Window
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Sampling

FIRST_LENGTH = 1024
"""Tokens that a conversation has room for at first; the room doubles when it is needed."""


class Conversation:
    """One row that is resumed again and again.

    Theory: what a model has read of a text stays true while the text only grows, so a turn costs its own tokens,
    however long the conversation. Where a prompt departs from what was said (a template that rewrites
    earlier turns), the states go back as far as they can or begin anew. Room for the states is made as it is
    needed, in powers of two, at the price of reading the text once more each time.

    Args:
        target: the model that answers.
        drafter: what guesses.
        max_length: most tokens of all turns together; what the models were made for when None.
        num_draft_tokens: guesses per round, or what chooses their number.
        rule: what decides; `ExactMatch()` when None.
        sampling: greedy when None.
        eos: tokens that end an answer.
        seed: the same seed and the same prompts give the same answers.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        *,
        max_length: int | None = None,
        num_draft_tokens: int | Window = 3,
        rule: AcceptanceRule | None = None,
        sampling: Sampling | None = None,
        eos: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        self.target, self.drafter = target, drafter
        limits = [n for n in (max_length, target.max_positions, drafter.max_positions) if n is not None]
        self.max_length = require_int("max_length", min(limits), 2) if limits else None
        self.num_draft_tokens, self.rule, self.sampling = num_draft_tokens, rule, sampling
        self.eos, self.seed = eos, seed
        self.session: Session | None = None
        self.row: Row | None = None
        self.num_reused = 0
        """Tokens of the present prompt that did not have to be read."""

    def begin(self, prompt: Sequence[int], *, max_new_tokens: int, stop: StopStrings | None = None) -> Row:
        """Begin a turn; `step` until its row is no longer live.

        Args:
            prompt: the whole text so far. What it shares with the last turn's text is not read again.
            max_new_tokens: tokens of the answer at most; fewer where `max_length` leaves less room.
            stop: strings that end the answer.

        Raises:
            ValueError: the prompt leaves no room for an answer, or the last answer has not ended.
        """
        require_int("max_new_tokens", max_new_tokens, 1)
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
        return Session(
            self.target,
            self.drafter,
            max_length=room if self.max_length is None else min(room, self.max_length),
            rule=self.rule,
            sampling=self.sampling,
            num_draft_tokens=self.num_draft_tokens,
            eos=self.eos,
            seed=self.seed,
        )
