"""Do two samples of texts come from one distribution? A permutation test, and what many tests together may say.

Shapes: S rows of both samples, C categories, N permutations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

ENOUGH, CHUNK = 20, 256
"""Permutations as extreme as the data after which the p-value is known well enough; permutations made at a time."""
Name = TypeVar("Name", bound=Hashable)
Sample = Sequence[Sequence[Sequence[int]]]
"""Of every prompt some rows of new tokens."""


def permutation_test(one: Sample, other: Sample, *, num_permutations: int, seed: int) -> float:
    """The p-value of the hypothesis that the rows of both samples come, prompt by prompt, from one distribution.

    Theory: if they do, rows may change sides. So the statistic is as likely to be largest for the data as for any
    shuffle of the rows within a prompt, and p = (1 + shuffles at least as large) / (1 + shuffles) is exact, whatever
    the statistic. That is the sum of (a - b)^2 / (a + b) over all beginnings of rows, of every length, which one sample
    has a times and the other b times: chi-square for samples of one size, in which what is met once says nothing.

    Shuffling ends when 20 of them were as large: then p = 20 / shuffles, which is exact too (Besag & Clifford 1991).

    Args:
        one, other: as many rows of each prompt on both sides.
        num_permutations: shuffles at most, so that p is at least 1 / (1 + num_permutations).
        seed: keys the shuffles.
    """
    sizes = [len(rows) for rows in one]
    if sizes != [len(rows) for rows in other]:
        raise ValueError(f"the samples have {sizes} and {[len(rows) for rows in other]} rows: give as many of each")
    members = _members([[*a, *b] for a, b in zip(one, other, strict=True)])
    totals = members @ torch.ones(members.shape[1], 1)

    def statistic(sides: Float[Tensor, "N S"]) -> Float[Tensor, "N"]:
        return ((2 * (members @ sides.T) - totals) ** 2 / totals).sum(0)

    own = torch.cat([torch.cat((torch.ones(size), torch.zeros(size))) for size in sizes])
    observed = float(statistic(own[None])[0])
    generator, extreme, done = torch.Generator().manual_seed(seed), 0, 0
    while done < num_permutations:
        number = min(CHUNK, num_permutations - done)
        shuffled = torch.cat([_halves(number, size, generator) for size in sizes], dim=1)
        for large in (statistic(shuffled) >= observed * (1 - 1e-6)).tolist():
            done, extreme = done + 1, extreme + large
            if extreme == ENOUGH:
                return extreme / done
    return (extreme + 1) / (done + 1)


def _members(rows: Sample) -> Float[Tensor, "C S"]:
    """Which rows, of all prompts in their order, begin with each sequence of tokens that at least two of a prompt begin
    with: sparse, for there are many sequences and each row begins with few."""
    begun: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    number = 0
    for prompt, several in enumerate(rows):
        for row in several:
            for n in range(1, len(row) + 1):
                begun[prompt, tuple(row[:n])].append(number)
            number += 1
    shared = [numbers for numbers in begun.values() if len(numbers) > 1]
    places = torch.tensor([(i, j) for i, numbers in enumerate(shared) for j in numbers]).reshape(-1, 2).T
    size = len(shared), number
    return torch.sparse_coo_tensor(places, torch.ones(places.shape[1]), size, check_invariants=True).coalesce()


def _halves(number: int, size: int, generator: torch.Generator) -> Float[Tensor, "N S"]:
    """Shuffles of as many ones and zeros."""
    order = torch.rand(number, 2 * size, generator=generator).argsort(1)
    return (order < size).float()


def holm(p_values: Mapping[Name, float]) -> dict[Name, float]:
    """The p-values adjusted for their number: to reject those up to alpha errs anywhere with odds of alpha at most.

    Source: Holm 1979. It needs no independence, and rejects whatever Bonferroni's correction does.
    """
    adjusted: dict[Name, float] = {}
    largest = 0.0
    for i, name in enumerate(sorted(p_values, key=lambda each: p_values[each])):
        largest = max(largest, min(1.0, (len(p_values) - i) * p_values[name]))
        adjusted[name] = largest
    return adjusted
