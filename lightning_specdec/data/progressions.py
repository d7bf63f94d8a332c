"""Arithmetic progressions: the smallest task on which a draft can be worse than its target and still useful."""

from __future__ import annotations

from lightning_specdec.checks import require_int
from lightning_specdec.data.base import PlainValues
from lightning_specdec.data.sequences import SequenceData


class ArithmeticProgressions(SequenceData):
    """Sequences start, start + step, start + 2 step, ... over the integers below `vocab_size`.

    Theory: the first token is a matter of chance and so is the second; from the third on the sequence is determined,
    so a model that has learned the rule continues any prompt of two tokens or more, and how often the draft
    agrees with the target shows how well it learned. Without wrapping, vocabulary 50, length 10 and steps 1 to 5 give
    49 * 5 - 9 * (1 + 2 + 3 + 4 + 5) + 5 = 115 progressions.

    Args:
        vocab_size: tokens are 0 to `vocab_size` - 1.
        length: tokens of a progression.
        max_step: steps are 1 to `max_step`.
        modulo: whether a progression wraps around at `vocab_size`; then there are vocab_size * max_step of them.
        num_train: sequences to train on.
        num_val: sequences that choose the best checkpoint.
        num_test: sequences kept for the end; their first tokens are the prompts.
        batch_size: sequences for each step of the optimizer.
        seed: of the split and of the order of the batches.
        prompt_length: how many tokens of a test sequence are its prompt.
    """

    def __init__(
        self,
        vocab_size: int = 50,
        length: int = 10,
        *,
        max_step: int = 5,
        modulo: bool = False,
        num_train: int = 100,
        num_val: int = 12,
        num_test: int = 3,
        batch_size: int = 5,
        seed: int = 0,
        prompt_length: int = 3,
    ) -> None:
        super().__init__(
            vocab_size,
            num_train=num_train,
            num_val=num_val,
            num_test=num_test,
            batch_size=batch_size,
            seed=seed,
            prompt_length=prompt_length,
        )
        self.length = require_int("length", length, 2)
        self.max_step = require_int("max_step", max_step, 1, vocab_size - 1)
        self.modulo = modulo

    def sequences(self) -> list[list[int]]:
        """Every progression, by step and then by start."""
        progressions = []
        for step in range(1, self.max_step + 1):
            span = (self.length - 1) * step
            for start in range(self.vocab_size if self.modulo else self.vocab_size - span):
                progressions.append([(start + i * step) % self.vocab_size for i in range(self.length)])
        return progressions

    def shortage(self) -> tuple[str, str]:
        rule = f"length {self.length} and steps 1 to {self.max_step} over {self.vocab_size} tokens"
        wrap = "" if self.modulo else ", or set modulo to true"
        return f"{rule} give", f"raise vocab_size or max_step{wrap}"

    def arguments(self) -> PlainValues:
        own = {"length": self.length, "max_step": self.max_step, "modulo": self.modulo}
        return {**super().arguments(), **own}
