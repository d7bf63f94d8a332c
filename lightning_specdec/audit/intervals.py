"""Where a function of a uniform number changes its value, found by asking it.

A uniform number is one of the 2^24 that torch draws in float32, and a function is whatever turns it into an integer:
the token that is drawn with it, or whether a draft token is kept. Not every number is asked about: see `find_steps`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Int

STEPS = 2**24
LARGEST = 1 - 1 / STEPS
"""The largest uniform number."""
MOST_EACH = 256
"""Steps that the functions searched together may have: so many, and so many more for each."""
NUM_AGAIN, MOST_OTHERWISE = 256, 1 / 8
"""Where there are more: how many numbers are asked about again, and the share of other answers that rounding may do."""


class NoFunction(ValueError):
    """What should be a function of its uniform numbers was asked with the same ones again and answered otherwise."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is not a function of its random numbers, for with the same ones it came to something else: let it "
            "draw with the numbers that it is given, and remember nothing of earlier rounds"
        )


@dataclass(frozen=True)
class Steps:
    """A function that is constant between steps.

    Args:
        ends: behind which of the 2^24 numbers each value ends, ascending; the last is 2^24.
        values: as many.
    """

    ends: list[int]
    values: list[int]

    @property
    def parts(self) -> list[tuple[int, float, float]]:
        """The values in order, each with its share of the numbers and a number from the middle of them."""
        both = zip(self.values, [0, *self.ends], self.ends, strict=False)
        return [(value, (end - start) / STEPS, (start + end) // 2 / STEPS) for value, start, end in both]

    def share(self, value: int) -> float:
        """The share of the numbers that have this value."""
        return sum(size for each, size, _ in self.parts if each == value)

    def value(self, uniform: float) -> int:
        """The value at a number."""
        return self.values[bisect_right(self.ends, uniform * STEPS)]

    def is_near(self, uniform: float, slack: float) -> bool:
        """Whether a number is no further than `slack` from a step."""
        return any(abs(end / STEPS - uniform) <= slack for end in self.ends[:-1])


def find_steps(
    ask: Callable[[Tensor, Tensor], Tensor],
    num_functions: int,
    *,
    name: str,
    hints: Sequence[Sequence[int]] | None = None,
    resolution: int = 1,
    pieces: int = 8,
) -> list[Steps]:
    """The steps of each function, found by cutting what lies between numbers at which its values differ into pieces.

    A value that begins and ends between two numbers at which the function has one other value is not seen: where values
    ascend there is none.

    Args:
        ask: called with functions `[N]`, by number, and a uniform number `[N]` for each; gives their values `[N]`.
        name: of what is asked, for errors.
        hints: for each function numbers of the 2^24 to ask about first: near steps, they save most of the search.
        resolution: numbers by which a step may be off.
        pieces: many mean few calls of `ask` with many numbers each.

    Raises:
        NoFunction: the closer one looks the more steps there are, and there are others when asked again.
        ValueError: there are too many steps.
    """

    def values_at(which: Int[Tensor, "N"], numbers: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
        return ask(which, numbers.double().div(STEPS).float())

    if not num_functions:
        return []
    most = MOST_EACH * (1 + num_functions)
    first = [sorted({0, STEPS - 1, *(hints[i] if hints else ())}) for i in range(num_functions)]
    which = torch.tensor([i for i, numbers in enumerate(first) for _ in numbers])
    numbers = torch.tensor([n for each in first for n in each])
    values = values_at(which, numbers)
    lasts = dict(zip(which.tolist(), values.tolist(), strict=True))
    same = which[1:] == which[:-1]
    brackets = torch.stack((which[:-1], numbers[:-1], numbers[1:], values[:-1], values[1:]))[:, same]
    ends: list[list[tuple[int, int]]] = [[] for _ in first]
    cuts = torch.arange(pieces + 1)
    while (brackets := brackets[:, brackets[3] != brackets[4]]).numel():
        if brackets.shape[1] > most:
            which, numbers, _, values, _ = brackets[:, :NUM_AGAIN].flip(
                1
            )  # other rows in a call, for what goes by them
            if float((values_at(which, numbers) != values).float().mean()) > MOST_OTHERWISE:
                raise NoFunction(name)
            raise ValueError(f"{name} has more than {most} steps for its random numbers: draft from fewer (top_k)")
        narrow = brackets[2] - brackets[1] <= resolution
        for i, low, high, before, _ in brackets[:, narrow].T.tolist():
            ends[i].append(((low + high + 1) // 2, before))
        if bool(narrow.all()):
            break
        which, low, high, before, after = brackets[:, ~narrow]
        points = low[:, None] + (high - low)[:, None] * cuts // pieces
        inner = values_at(which.repeat_interleave(pieces - 1), points[:, 1:-1].flatten()).unflatten(0, (-1, pieces - 1))
        values = torch.cat((before[:, None], inner, after[:, None]), dim=1)
        each = which[:, None].expand(-1, pieces)
        parts = (each, points[:, :-1], points[:, 1:], values[:, :-1], values[:, 1:])
        brackets = torch.stack([part.flatten() for part in parts])
    found = [[*sorted(each), (STEPS, lasts[i])] for i, each in enumerate(ends)]
    return [Steps([end for end, _ in each], [value for _, value in each]) for each in found]
