"""Where two outputs that should be equal part, and whether rounding can have done it: a tie, or a bug.

Theory: a target gives the same text slightly different logits when it reads it in calls of other widths or in other
batches, since sums are rounded in another order. So a greedy token may change where the two largest logits are closer
than that, and nowhere else. How much it is, is measured where the outputs part: the target reads the text in one call,
token by token, in calls as wide as a round's, and as one of several rows. The most that any logit moves from the first
of these to another, twice (both logits move), or the distance of neighbouring numbers of the type if that is more, is
what a tie may differ by. A drawn token changes where the uniform number is as close to the end of a token's interval as
the intervals' ends move between these readings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from lightning_specdec.bench.audit.scores import difference, rounding, several_scores
from lightning_specdec.inference.rows import num_shared
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import Purpose, Sampling, draw, noise_table

COPIES = 4
"""Rows of the reading as one of several."""


@dataclass(frozen=True)
class Divergence:
    """The first place where two outputs differ.

    Args:
        prompt: its number.
        position: of the new token.
        tokens: standard decoding's and the other; None where one output has ended.
        gap: between the two tokens' logits.
        margin: what would have to move for the other token: that gap, or the distance of the uniform number from the
            other token's interval.
        rounding: by how much that moves when the text is read in other ways.
        verdict: "tie", or "bug" where the margin is larger than the rounding.
    """

    prompt: int
    position: int
    tokens: tuple[int, int] | None
    gap: float | None
    margin: float | None
    rounding: float | None
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def find_divergence(
    target: LanguageModel,
    prompt: Sequence[int],
    standard: Sequence[int],
    other: Sequence[int],
    *,
    number: int,
    sampling: Sampling,
    seed: int,
    width: int,
) -> Divergence | None:
    """Where the outputs for a prompt part; None where they are equal.

    Args:
        number: the prompt's, which keys its noise together with `seed`.
        width: tokens that a round's call reads.
    """
    if list(standard) == list(other):
        return None
    at = num_shared(standard, other)
    if at in (len(standard), len(other)):
        return Divergence(number, at, None, None, None, None, "bug")
    tokens, text = (standard[at], other[at]), [*prompt, *standard[:at]]
    ways = _read(target, text, width)
    ways = [sampling.process(way[None, None], [text])[0, 0] for way in ways]
    gap = abs(float(ways[0][tokens[0]] - ways[0][tokens[1]]))
    if sampling.greedy:
        margin = min(abs(float(way[tokens[0]] - way[tokens[1]])) for way in ways)
        moved = 2 * rounding(target, ways)
    else:
        uniform = float(noise_table(seed, number, at + 1)[at, Purpose.CORRECT])
        margin, moved = _draws(sampling, ways, tokens, uniform)
    return Divergence(number, at, tokens, gap, margin, moved, "tie" if margin <= moved else "bug")


def _read(target: LanguageModel, text: Sequence[int], width: int) -> list[Tensor]:
    """The logits behind a text, `[V]` each, as several ways to read it give them."""
    num_places = min(len(text), 2 * width + 1)
    alone = several_scores(target, [text], num_places, widths=(None, 1, width))
    several = several_scores(target, [text] * COPIES, num_places, widths=(None, width))
    return [way[0, -1] for way in (*alone, *several)]


def _draws(sampling: Sampling, ways: Sequence[Tensor], tokens: tuple[int, int], uniform: float) -> tuple[float, float]:
    """How far the number is from drawing both tokens, in the way that is nearest to it; how far the ends move."""
    tables = [sampling.probs(way) for way in ways]
    ends = [table.double().cumsum(-1) / table.double().sum(-1) for table in tables]
    moved = max(difference(one, another) for one, another in combinations(ends, 2)) + 4 * torch.finfo(torch.float32).eps
    margin = 1.0
    for table, each in zip(tables, ends, strict=True):
        drawn = int(draw(table, torch.tensor(uniform, dtype=torch.float64, device=table.device)))
        far = [_distance(each, token, uniform) for token in tokens if token != drawn]
        margin = min(margin, max(far, default=0.0))
    return margin, moved


def _distance(ends: Tensor, token: int, uniform: float) -> float:
    """How far a number is from the interval of a token."""
    start = float(ends[token - 1]) if token else 0.0
    return max(start - uniform, uniform - float(ends[token]), 0.0)
