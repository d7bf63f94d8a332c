"""Quadratic progressions modulo the vocabulary: a task of any size on which the depth of a network pays.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec.checks import require_int
from lightning_specdec.data.base import SPLITS, Batch, PlainValues, Row, Rows, TokenData

if TYPE_CHECKING:
    from jaxtyping import Int

MOST = 2**24
"""Progressions that can be shuffled: their order takes 8 bytes each."""


class QuadraticProgressions(TokenData):
    """Sequences start + step t + change t (t - 1) / 2 modulo `vocab_size`: the step itself grows by `change`.

    Theory: x[t+1] = 3 x[t] - 3 x[t-1] + x[t-2], so a token hangs on the three before it. Their differences, the
    difference of those and the sum are work for layers on top of each other, and a model of few layers, or an exit
    from the first ones, errs more often than the whole: what a draft that is worse than its target is like. With
    `max_change` 0 these are arithmetic progressions modulo `vocab_size`, for which two tokens suffice.

    Start, step and change are the first token and the first differences at t = 0, so no two progressions of three
    tokens or more are equal, and there are exactly vocab_size * max_step * (max_change + 1) of them. A shuffle by the
    seed deals them out; each is computed when its batch is made.

    Args:
        vocab_size: tokens are 0 to `vocab_size` - 1, and sums are taken modulo it.
        length: tokens of a progression.
        max_step: steps at the beginning are 1 to `max_step`; to `vocab_size` - 1 when None.
        max_change: changes are 0 to `max_change`; to `vocab_size` - 1 when None.
        num_train: sequences to train on, each once an epoch; all that validation and test leave when None.
        num_val: sequences that choose the best checkpoint.
        num_test: sequences kept for the end; their first tokens are the prompts.
        batch_size: sequences for each step of the optimizer.
        seed: of the split and of the order of the batches.
        prompt_length: how many tokens of a test sequence are its prompt: from three on the rest is determined.
    """

    def __init__(
        self,
        vocab_size: int = 64,
        length: int = 160,
        *,
        max_step: int | None = None,
        max_change: int | None = None,
        num_train: int | None = None,
        num_val: int = 64,
        num_test: int = 16,
        batch_size: int = 32,
        seed: int = 0,
        prompt_length: int = 8,
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
        self.length = require_int("length", length, 3)
        most = vocab_size - 1
        self.max_step = most if max_step is None else require_int("max_step", max_step, 1, most)
        self.max_change = most if max_change is None else require_int("max_change", max_change, 0, most)
        self._numbers: dict[str, Int[Tensor, "B"]] = {}

    @property
    def num_sequences(self) -> int:
        """vocab_size * max_step * (max_change + 1)"""
        return self.vocab_size * self.max_step * (self.max_change + 1)

    @property
    def max_length(self) -> int:
        return self.length

    def sequences(self, numbers: Int[Tensor, "B"]) -> Int[Tensor, "B T"]:
        """The progressions of these numbers, which count by start first, then by step, then by change."""
        start, rest = numbers % self.vocab_size, numbers // self.vocab_size
        step, change = rest % self.max_step + 1, rest // self.max_step
        times = torch.arange(self.length)
        grown = times * (times - 1) // 2 % self.vocab_size
        return (start[:, None] + step[:, None] * times + change[:, None] * grown) % self.vocab_size

    def rows(self, split: str) -> Rows:
        if not self._numbers:
            self._numbers = dict(zip(SPLITS, self._split(), strict=True))
        return _Numbered(self._numbers[split])

    def _split(self) -> tuple[Tensor, Tensor, Tensor]:
        """The numbers of the progressions of each split, in the order of `SPLITS`."""
        rule = f"steps 1 to {self.max_step} and changes 0 to {self.max_change} over {self.vocab_size} tokens"
        if self.num_sequences > MOST:
            raise ValueError(
                f"{rule} give {self.num_sequences} progressions, and {MOST} are the most that are shuffled: "
                "lower max_step or max_change"
            )
        return self.deal(self.num_sequences, f"{rule} give", "raise vocab_size, max_step or max_change")

    def collate(self, rows: Sequence[Row]) -> Batch:
        """One batch of numbered progressions."""
        indices, numbers = torch.tensor(rows).unbind(1)
        return Batch(
            tokens=self.sequences(numbers),
            lengths=torch.full_like(indices, self.length),
            prompt_lengths=torch.full_like(indices, min(self.prompt_length, self.length - 1)),
            indices=indices,
        )

    def arguments(self) -> PlainValues:
        own = {"length": self.length, "max_step": self.max_step, "max_change": self.max_change}
        return {**super().arguments(), **own}


class _Numbered:
    """A split's rows: their numbers within it, and the numbers of their progressions."""

    def __init__(self, numbers: Int[Tensor, "B"]) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Row:
        return index, int(self.numbers[index])
