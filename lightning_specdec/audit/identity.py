"""Where two outputs that should be equal part, and whether rounding can have done it: a tie, or a bug.

A target gives the same text slightly different logits in calls of other widths or batches. How much these move is
measured where the outputs part, in a few ways to read the text; a difference that is larger is a bug.

Shapes: N texts of one length, P places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec.decoding.rows import num_shared
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Draft, Purpose, Sampling, draw, noise_table

if TYPE_CHECKING:
    from jaxtyping import Float

COPIES = 4
"""Rows of the reading as one of several."""
NUM_FORGED, NUM_RANKS = 16, 4
"""Forged rounds of each of the target's likeliest tokens."""


@torch.inference_mode()
def readings(
    target: LanguageModel,
    texts: Sequence[Sequence[int]],
    num_places: int,
    widths: Sequence[int | None] = (None,),
) -> list[Float[Tensor, "N P V"]]:
    """The target's logits behind the last `num_places` tokens of each text, in float32, read in several ways.

    Args:
        texts: of one length.
        widths: how many of those tokens it reads in a call, behind one that reads what comes before; the text in one
            call, without a state, when None. Standard decoding reads it with a width of 1.
    """
    tokens, found = torch.tensor(texts, device=target.device), []
    first = tokens.shape[1] - num_places
    for width in widths:
        if width is None:
            logits = target(tokens, logits_for=slice(-num_places, None)).logits
        else:
            state = target.init_state(*tokens.shape)
            if first:
                target(tokens[:, :first], state, logits_for=slice(-1, None))
            logits = torch.cat(
                [target(piece, state).logits for piece in tokens[:, first:].split(width, dim=1)],
                dim=1,
            )
        found.append(logits.float())
    return found


def rounding(target: LanguageModel, ways: Sequence[Float[Tensor, "*P V"]]) -> float:
    """By how much rounding moves a logit of the target: the largest difference of other ways to read a text from the
    first.

    At least the distance of neighbouring numbers of the target's type, as large as its largest logit.
    """
    kinds = [weight.dtype for weight in target.parameters() if weight.dtype.is_floating_point]
    spacing = max(torch.finfo(kind).eps for kind in (kinds or [torch.float32]))
    largest = max(float(way[way.isfinite()].abs().max()) for way in ways)
    return max([largest * spacing, *(difference(way, ways[0]) for way in ways[1:])])


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference between two tensors; infinite where they are not finite alike."""
    apart = torch.where(one == other, 0.0, (one.float() - other.float()).abs())
    return float(apart.nan_to_num(nan=torch.inf).max()) if apart.numel() else 0.0


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
    tokens: tuple[int, int] | None = None
    gap: float | None = None
    margin: float | None = None
    rounding: float | None = None
    verdict: str = "bug"


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
        return Divergence(number, at)
    one, two = tokens = standard[at], other[at]
    text = [*prompt, *standard[:at]]
    num_places = min(len(text), 2 * width + 1)
    read = readings(target, [text], num_places, (None, 1, width))
    read += readings(target, [text] * COPIES, num_places, (None, width))
    ways = [sampling.process(way[:1, -1:], [text])[0, 0] for way in read]
    if sampling.greedy:
        margin = min(abs(float(way[one] - way[two])) for way in ways)
        moved = 2 * rounding(target, ways)
    else:
        margin, moved = _draws(
            sampling, ways, tokens, float(noise_table(seed, number, at + 1)[at, Purpose.CORRECT])
        )
    gap = abs(float(ways[0][one] - ways[0][two]))
    return Divergence(number, at, tokens, gap, margin, moved, "tie" if margin <= moved else "bug")


def _draws(
    sampling: Sampling, ways: Sequence[Tensor], tokens: tuple[int, int], uniform: float
) -> tuple[float, float]:
    """How far the number is from drawing both tokens, in the way that is nearest to it; how far the ends move."""
    tables = [sampling.probs(way) for way in ways]
    ends = [table.double().cumsum(-1) / table.double().sum(-1) for table in tables]
    moved = (
        max(difference(one, another) for one, another in combinations(ends, 2))
        + 4 * torch.finfo(torch.float32).eps
    )
    margin = 1.0
    for table, each in zip(tables, ends, strict=True):
        drawn = int(draw(table, torch.tensor(uniform, dtype=torch.float64, device=table.device)))
        starts = torch.nn.functional.pad(each, (1, 0))
        far = [
            max(float(starts[t]) - uniform, uniform - float(each[t]), 0.0)
            for t in tokens
            if t != drawn
        ]
        margin = min(margin, max(far, default=0.0))
    return margin, moved


@torch.inference_mode()
def num_wrong_rounds(
    target: LanguageModel,
    text: Sequence[int],
    *,
    rule: AcceptanceRule,
    sampling: Sampling,
    width: int,
    seed: int,
) -> int:
    """Rounds in which a rule that keeps the target's own tokens commits another one.

    Drafts are mostly right where both sides draw with the same numbers, so here they are forged: the target's
    likeliest tokens, by rank, whatever the numbers.

    Args:
        text: its last tokens lend their logits to the rounds.
        width: tokens that a round's call reads.
    """
    logits = readings(target, [text], min(width, len(text)))[0]
    ranked = logits.argsort(-1, descending=True)[0, :-1, :NUM_RANKS]
    tokens = ranked.T.repeat(NUM_FORGED, 1)
    logits = logits.expand(len(tokens), -1, -1)
    noise = torch.rand(
        *logits.shape[:2], len(Purpose), generator=torch.Generator().manual_seed(seed)
    )
    noise = noise.to(logits.device)
    verdict = rule.judge(Draft(tokens), logits, sampling, noise)
    own = sampling.sample(logits, noise[..., Purpose.CORRECT].contiguous())
    agreed = (own[:, :-1] == tokens).cumprod(1).sum(1)
    right = (verdict.num_accepted == agreed) & (
        verdict.next_tokens == own.gather(1, agreed[:, None])[:, 0]
    )
    return int((~right).sum())
