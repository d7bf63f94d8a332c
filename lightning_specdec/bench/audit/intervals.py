"""Where a function of a uniform number changes its value, found by asking it.

A uniform number is one of the 2^24 that torch draws in float32, and a function is whatever turns it into an integer:
the token that is drawn with it, or whether a guess is kept. Nothing is sampled, and not every number is asked about:
see `find_steps` for what may stay unseen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Int

STEPS = 2**24
LARGEST = 1 - 1 / STEPS
"""The largest uniform number."""
MOST_STEPS, MOST_EACH = 256, 256
"""Steps that the functions searched together may have: so many, and so many more for each."""
NUM_AGAIN, MOST_OTHERWISE = 256, 1 / 8
"""Where there are more: how many numbers are asked about again, and the share of other answers that rounding may do."""

Ask = Callable[[Tensor, Tensor], Tensor]
"""Called with functions `[N]`, by number, and a uniform number `[N]` for each; gives their values `[N]`."""


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
    def sizes(self) -> list[tuple[int, float]]:
        """The values in their order, each with its share of the numbers."""
        starts = [0, *self.ends[:-1]]
        return [
            (value, (end - start) / STEPS) for value, start, end in zip(self.values, starts, self.ends, strict=True)
        ]

    @property
    def middles(self) -> list[float]:
        """A number from the middle of each value's interval."""
        return [(start + end) // 2 / STEPS for start, end in zip([0, *self.ends[:-1]], self.ends, strict=True)]

    def share(self, value: int) -> float:
        """The share of the numbers that have this value."""
        return sum(size for each, size in self.sizes if each == value)

    def value(self, uniform: float) -> int:
        """The value at a number."""
        return self.values[bisect_right(self.ends, uniform * STEPS)]

    def is_near(self, uniform: float, slack: float) -> bool:
        """Whether a number is no further than `slack` from a step."""
        return any(abs(end / STEPS - uniform) <= slack for end in self.ends[:-1])


def find_steps(
    ask: Ask,
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
        name: of what is asked, for errors.
        hints: for each function numbers of the 2^24 to ask about first: near steps, they save most of the search.
        resolution: numbers by which a step may be off.
        pieces: many mean few calls of `ask` with many numbers each.

    Raises:
        NoFunction: the closer one looks the more steps there are, and there are others when asked again.
        ValueError: there are too many steps.
    """
    if not num_functions:
        return []
    most = MOST_STEPS + MOST_EACH * num_functions
    first = [sorted({0, STEPS - 1, *(hints[i] if hints else ())}) for i in range(num_functions)]
    which = torch.tensor([i for i, numbers in enumerate(first) for _ in numbers])
    numbers = torch.tensor([n for each in first for n in each])
    values = _ask(ask, which, numbers)
    known = which.tolist(), values.tolist()
    same = which[1:] == which[:-1]
    brackets = torch.stack((which[:-1], numbers[:-1], numbers[1:], values[:-1], values[1:]))[:, same]
    found: list[Int[Tensor, "3 N"]] = []
    cuts = torch.arange(pieces + 1)
    while True:
        brackets = brackets[:, brackets[3] != brackets[4]]
        if brackets.shape[1] > most:
            _refuse(ask, brackets[:, :NUM_AGAIN], name, most)
        which, low, high, before, after = brackets
        narrow = high - low <= resolution
        found.append(torch.stack((which, (low + high + 1) // 2, before))[:, narrow])
        if bool(narrow.all()):
            break
        which, low, high, before, after = brackets[:, ~narrow]
        points = low[:, None] + (high - low)[:, None] * cuts // pieces
        inner = _ask(ask, which.repeat_interleave(pieces - 1), points[:, 1:-1].flatten()).unflatten(0, (-1, pieces - 1))
        values = torch.cat((before[:, None], inner, after[:, None]), dim=1)
        each = which[:, None].expand(-1, pieces)
        parts = (each, points[:, :-1], points[:, 1:], values[:, :-1], values[:, 1:])
        brackets = torch.stack([part.flatten() for part in parts])
    ends: list[list[tuple[int, int]]] = [[] for _ in first]
    for i, end, value in torch.cat(found, dim=1).T.tolist():
        ends[i].append((end, value))
    lasts = dict(zip(known[0], known[1], strict=True))
    return [_steps(each, lasts[i]) for i, each in enumerate(ends)]


def _refuse(ask: Ask, brackets: Int[Tensor, "5 N"], name: str, most: int) -> NoReturn:
    """Say why there are more steps than so many."""
    which, numbers, _, values, _ = brackets.flip(1)  # in another order, for what goes by the order of rows
    if float((_ask(ask, which, numbers) != values).float().mean()) > MOST_OTHERWISE:
        raise NoFunction(name)
    raise ValueError(f"{name} has more than {most} steps for its random numbers: draft from fewer tokens (top_k)")


def _steps(ends: list[tuple[int, int]], last: int) -> Steps:
    ends = [*sorted(ends), (STEPS, last)]
    return Steps([end for end, _ in ends], [value for _, value in ends])


def _ask(ask: Ask, which: Int[Tensor, "N"], numbers: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
    """The values of these functions at these numbers of the 2^24."""
    return ask(which, numbers.double().div(STEPS).float())
