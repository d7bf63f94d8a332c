"""Where two outputs that should be equal diverge, and whether rounding can explain it: a tie, or a
bug.

A target computes slightly different logits for the same text in calls of other widths or batches.
How much they move is measured at the divergence, by reading the text in a few ways. A larger
difference is a bug.

Shapes: N texts of one length, P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec.decoding.requests import num_shared
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Draft, Purpose, Sampling, draw, noise_table

if TYPE_CHECKING:
    from jaxtyping import Float

COPIES = 4
"""Batch size for reading a text as one of several rows."""
NUM_FORGED = 16
"""Forged rounds of each rank of the target's tokens."""
NUM_RANKS = 4
"""Ranks of forged draft tokens: the target's most likely token has rank 0."""


@torch.inference_mode()
def readings(
    target: LanguageModel,
    texts: Sequence[Sequence[int]],
    num_positions: int,
    widths: Sequence[int | None] = (None,),
) -> list[Float[Tensor, "N P V"]]:
    """The target's logits after the last `num_positions` tokens of each text, in float32, read in
    several ways.

    Args:
        texts: of one length.
        widths: tokens per call. None reads the whole text in one call without a state. A number
            reads the earlier tokens in one call, then that many tokens at a time. Standard decoding
            has a width of 1.
    """
    tokens = torch.tensor(texts, device=target.device)
    num_earlier = tokens.shape[1] - num_positions
    results = []
    for width in widths:
        if width is None:
            logits = target(tokens, logits_for=slice(-num_positions, None)).logits
        else:
            state = target.init_state(*tokens.shape)
            if num_earlier:
                target(tokens[:, :num_earlier], state, logits_for=slice(-1, None))
            pieces = tokens[:, num_earlier:].split(width, dim=1)
            logits = torch.cat([target(piece, state).logits for piece in pieces], dim=1)
        results.append(logits.float())
    return results


def rounding(target: LanguageModel, logits: Sequence[Float[Tensor, "*P V"]]) -> float:
    """How much rounding moves a logit of the target: the largest difference between the first
    reading of a text and the others.

    At least the spacing of numbers of the target's dtype at its largest logit.

    Args:
        logits: of the same text, read in several ways.
    """
    spacings = []
    for weight in target.parameters():
        if weight.dtype.is_floating_point:
            spacings.append(torch.finfo(weight.dtype).eps)
    # A quantized target may have no floating-point weights.
    spacing = max(spacings, default=torch.finfo(torch.float32).eps)

    largest_logit = max(float(reading[reading.isfinite()].abs().max()) for reading in logits)
    differences = [difference(reading, logits[0]) for reading in logits[1:]]
    return max([largest_logit * spacing, *differences])


def difference(tensor: Tensor, other_tensor: Tensor) -> float:
    """The largest difference between two tensors; infinite if one is not finite where the other
    is."""
    if not tensor.numel():
        return 0.0
    differences = (tensor.float() - other_tensor.float()).abs()
    # Equal infinities have the difference NaN.
    differences = torch.where(tensor == other_tensor, 0.0, differences)
    return float(differences.nan_to_num(nan=torch.inf).max())


@dataclass(frozen=True)
class Divergence:
    """The first position at which two outputs differ.

    Args:
        prompt: index of the prompt.
        position: index of the new token.
        tokens: standard decoding's and the other; None if one output has ended.
        gap: between the two tokens' logits.
        margin: how far the deciding value is from choosing the other token. Greedy, the gap between
            the logits; else the distance of the uniform number from the other token's interval.
        rounding: how much that value moves if the text is read in other ways.
        verdict: "tie", or "bug" if the margin is larger than the rounding.
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
    """Where two outputs for a prompt diverge; None if they are equal.

    Args:
        number: index of the prompt, which keys its noise together with `seed`.
        width: number of tokens that a round's target call reads.
    """
    if list(standard) == list(other):
        return None
    position = num_shared(standard, other)
    if position in (len(standard), len(other)):
        # One output is the beginning of the other. No rounding of logits ends a text.
        return Divergence(number, position)

    tokens = (standard[position], other[position])
    text = [*prompt, *standard[:position]]
    logits = _next_token_logits(target, text, sampling, width)
    standard_token, other_token = tokens
    gaps = [abs(float(reading[standard_token] - reading[other_token])) for reading in logits]
    if sampling.greedy:
        margin = min(gaps)
        # Both logits of the gap may move.
        moved = 2 * rounding(target, logits)
    else:
        noise = noise_table(seed, number, position + 1)
        uniform = float(noise[position, Purpose.CORRECT])
        margin, moved = _draw_margin(sampling, logits, tokens, uniform)
    verdict = "tie" if margin <= moved else "bug"
    return Divergence(number, position, tokens, gaps[0], margin, moved, verdict)


def _next_token_logits(
    target: LanguageModel, text: Sequence[int], sampling: Sampling, width: int
) -> list[Float[Tensor, "V"]]:
    """The logits after a text, read alone and in a batch, in calls of several widths."""
    # Two rounds and the token before them are read in small calls.
    num_positions = min(len(text), 2 * width + 1)
    batches = readings(target, [text], num_positions, (None, 1, width))
    batches += readings(target, [text] * COPIES, num_positions, (None, width))
    return [sampling.process(batch[:1, -1:], [text])[0, 0] for batch in batches]


def _draw_margin(
    sampling: Sampling,
    logits: Sequence[Float[Tensor, "V"]],
    tokens: tuple[int, int],
    uniform: float,
) -> tuple[float, float]:
    """How far a uniform number is from drawing the other token, and how much rounding moves that.

    Args:
        logits: after the same text, read in several ways.
        tokens: what both sides have drawn with that number.

    Returns:
        The distance in the reading that is nearest to the other token, and the largest movement of
        an interval's end between two readings.
    """
    probs = [sampling.probs(reading) for reading in logits]
    # Token t is drawn by the numbers between ends t - 1 and t.
    interval_ends = []
    for reading_probs in probs:
        cumulative = reading_probs.double().cumsum(-1)
        interval_ends.append(cumulative / reading_probs.double().sum(-1))

    movements = [difference(*pair) for pair in combinations(interval_ends, 2)]
    moved = max(movements) + 4 * torch.finfo(torch.float32).eps

    margin = 1.0
    for reading_probs, highs in zip(probs, interval_ends, strict=True):
        number = torch.tensor(uniform, dtype=torch.float64, device=reading_probs.device)
        drawn_token = int(draw(reading_probs, number))
        lows = torch.nn.functional.pad(highs, (1, 0))
        distances = []
        for token in tokens:
            if token != drawn_token:
                below = float(lows[token]) - uniform
                above = uniform - float(highs[token])
                distances.append(max(below, above, 0.0))
        margin = min(margin, max(distances, default=0.0))
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
    """Rounds in which a rule that should commit the target's own tokens commits another one.

    Real drafts are mostly right, since both sides draw with the same numbers. The drafts here are
    forged: the target's most likely tokens, by rank, whatever the numbers.

    Args:
        text: the rounds use the logits after its last tokens.
        width: number of tokens that a round's target call reads.
    """
    text_logits = readings(target, [text], min(width, len(text)))[0]
    ranked_tokens = text_logits.argsort(-1, descending=True)[0, :-1, :NUM_RANKS]
    drafted = ranked_tokens.T.repeat(NUM_FORGED, 1)
    logits = text_logits.expand(len(drafted), -1, -1)

    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(*logits.shape[:2], len(Purpose), generator=generator).to(logits.device)
    verdict = rule.judge(Draft(drafted), logits, sampling, noise)

    # The target's own tokens with the same numbers, as far as the draft agrees, and one more.
    target_tokens = sampling.sample(logits, noise[..., Purpose.CORRECT].contiguous())
    num_agreed = (target_tokens[:, :-1] == drafted).cumprod(1).sum(1)
    next_tokens = target_tokens.gather(1, num_agreed[:, None])[:, 0]

    is_right = (verdict.num_accepted == num_agreed) & (verdict.next_tokens == next_tokens)
    return int((~is_right).sum())
