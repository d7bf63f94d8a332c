"""What a drafter can guess in one round, each with its chance: measured by drawing, whatever it reports."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_specdec.bench.audit.intervals import STEPS, NoFunction, Steps, find_steps
from lightning_specdec.bench.audit.scripted import Stage
from lightning_specdec.rules import Purpose

Prefix = tuple[int, ...]
LEAST_SHARE = 2**-18
"""Drafts that are rarer are left out: rounding would make them others."""
NEAR, RESOLUTION = 6, 12
"""Of the 2^24 uniform numbers: how far around the end of a reported interval its true end is looked for first, and by
how many it may be off."""
MOST_PATHS = 4096
NUM_AGAIN = 16
"""Rows of random numbers that a drafter is first asked about, twice."""


@dataclass(frozen=True)
class Path:
    """A draft, or the beginning of one: its tokens, numbers with which they are drawn, and its chance."""

    tokens: Prefix
    numbers: list[float]
    share: float


@dataclass
class Tree:
    """The drafts of a round.

    Args:
        paths: the whole drafts, but for the rarest.
        steps: which token each number draws, behind every beginning of one.
        left_out: the chance of those that are not among them.
    """

    paths: list[Path] = field(default_factory=list)
    steps: dict[Prefix, Steps] = field(default_factory=dict)
    left_out: float = 0.0


def draft_tree(stage: Stage, seed: int) -> Tree:
    """The drafts of a round, found by drawing with one number after the other.

    Theory: honest drafters draw by inverse transform from what they report, so the ends of the reported intervals are
    looked at first, and three more rounds are enough for two guesses. A drafter that draws otherwise takes more.

    Args:
        seed: keys the numbers that the drafter is first asked about, twice.

    Raises:
        NoFunction: the guesses depend on more than these numbers.
        ValueError: there are too many drafts.
    """
    name = type(stage.drafter).__name__
    noise = torch.rand(NUM_AGAIN, stage.width, len(Purpose), generator=torch.Generator().manual_seed(seed))
    if stage.play(noise).guesses != stage.play(noise).guesses:
        raise NoFunction(name)
    tree, level = Tree(), 0
    reported: dict[Prefix, Tensor] = {}
    begun = [Path((), [], 1.0)]
    _draw(stage, [[]], reported)
    while begun:
        lengths = [0] * len(begun)

        def ask(which: Tensor, uniform: Tensor) -> Tensor:
            functions = which.tolist()
            rows = [[*begun[i].numbers, number] for i, number in zip(functions, uniform.tolist(), strict=True)]  # noqa: B023
            tokens = []
            for i, guesses in zip(functions, _draw(stage, rows, reported), strict=True):
                lengths[i] = len(guesses)  # noqa: B023
                tokens.append(guesses[level] if level < len(guesses) else -1)  # noqa: B023
            return torch.tensor(tokens)

        hints = [_ends(reported.get(path.tokens)) for path in begun]
        following: list[Path] = []
        found = find_steps(ask, len(begun), name=name, hints=hints, resolution=RESOLUTION, pieces=4)
        for path, length, steps in zip(begun, lengths, found, strict=True):
            tree.steps[path.tokens] = steps
            for (token, size), middle in zip(steps.sizes, steps.middles, strict=True):
                longer = Path((*path.tokens, token), [*path.numbers, middle], path.share * size)
                if longer.share < LEAST_SHARE:
                    tree.left_out += longer.share
                else:
                    (tree.paths if level + 1 >= length else following).append(longer)
        begun, level = following, level + 1
        if len(begun) + len(tree.paths) > MOST_PATHS:
            raise ValueError(f"a round has more than {MOST_PATHS} drafts: draft fewer tokens, or from fewer (top_k)")
    return tree


def _draw(stage: Stage, rows: list[list[float]], reported: dict[Prefix, Tensor]) -> list[list[int]]:
    """What is guessed with these numbers, and into `reported` the distributions that the drafter says it drew from."""
    noise = torch.full((len(rows), stage.width, len(Purpose)), 0.5)
    for noisy, numbers in zip(noise, rows, strict=True):
        noisy[: len(numbers), stage.rule.draft_purpose] = torch.tensor(numbers)
    played = stage.play(noise)
    guesses = played.guesses
    if played.draft is not None and played.draft.probs is not None:
        for row, tokens in enumerate(guesses):
            for i in range(len(tokens)):
                reported.setdefault(tuple(tokens[:i]), played.draft.probs[row, i])
    return guesses


def _ends(probs: Tensor | None) -> list[int]:
    """Numbers around the ends of the intervals that a distribution has, of the 2^24."""
    if probs is None:
        return []
    cumulative = probs.double().cumsum(0)
    ends = (cumulative[probs > 0][:-1] / cumulative[-1] * STEPS).round().long().tolist()
    return [min(max(end + shift, 0), STEPS - 1) for end in ends for shift in (-NEAR, NEAR)]
