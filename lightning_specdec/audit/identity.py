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
    from jaxtyping import Float, Int

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
    results = []
    for width in widths:
        if width is None:
            logits = target(tokens, logits_for=slice(-num_positions, None)).logits
        else:
            logits = _read_in_pieces(target, tokens, num_positions, width)
        results.append(logits.float())
    return results


def _read_in_pieces(
    target: LanguageModel,
    tokens: Int[Tensor, "N T"],
    num_positions: int,
    width: int,
) -> Float[Tensor, "N P V"]:
    """The logits of the last positions: `width` tokens at a time, after a call on those before."""
    num_texts, num_tokens = tokens.shape
    num_earlier = num_tokens - num_positions
    state = target.init_state(num_texts, num_tokens)
    state.expect_prompts([num_tokens] * num_texts)
    if num_earlier:
        target(tokens[:, :num_earlier], state, logits_for=slice(-1, None))

    logits = []
    for piece in tokens[:, num_earlier:].split(width, dim=1):
        logits.append(target(piece, state).logits)
    return torch.cat(logits, dim=1)


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
    relative_spacing = max(spacings, default=torch.finfo(torch.float32).eps)

    largest_logit = 0.0
    for reading in logits:
        finite_logits = reading[reading.isfinite()]
        largest_logit = max(largest_logit, float(finite_logits.abs().max()))
    spacing = largest_logit * relative_spacing

    first_reading, *other_readings = logits
    differences = [difference(reading, first_reading) for reading in other_readings]
    return max([spacing, *differences])


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
    prompt_index: int,
    sampling: Sampling,
    seed: int,
    width: int,
) -> Divergence | None:
    """Where two outputs for a prompt diverge; None if they are equal.

    Args:
        prompt_index: keys the prompt's noise together with `seed`.
        width: number of tokens that a round's target call reads.
    """
    if list(standard) == list(other):
        return None
    position = num_shared(standard, other)
    if position in (len(standard), len(other)):
        # One output is the beginning of the other. No rounding of logits ends a text.
        return Divergence(prompt_index, position)

    standard_token = standard[position]
    other_token = other[position]
    text = [*prompt, *standard[:position]]
    logits = _next_token_logits(target, text, sampling, width)
    gaps = []
    for reading in logits:
        gap = reading[standard_token] - reading[other_token]
        gaps.append(abs(float(gap)))

    tokens = (standard_token, other_token)
    if sampling.greedy:
        margin = min(gaps)
        # Both logits of the gap may move.
        movement = 2 * rounding(target, logits)
    else:
        noise = noise_table(seed, prompt_index, position + 1)
        uniform = float(noise[position, Purpose.CORRECT])
        margin, movement = _draw_margin(sampling, logits, tokens, uniform)
    verdict = "tie" if margin <= movement else "bug"
    return Divergence(prompt_index, position, tokens, gaps[0], margin, movement, verdict)


def _next_token_logits(
    target: LanguageModel,
    text: Sequence[int],
    sampling: Sampling,
    width: int,
) -> list[Float[Tensor, "V"]]:
    """The logits after a text, read alone and in a batch, in calls of several widths."""
    # Two rounds and the token before them are read in small calls.
    num_positions = min(len(text), 2 * width + 1)
    batches = readings(target, [text], num_positions, (None, 1, width))
    batches += readings(target, [text] * COPIES, num_positions, (None, width))

    next_token_logits = []
    for batch in batches:
        last_logits = batch[:1, -1:]  # all rows of a batch are the same text
        processed = sampling.process(last_logits, [text])
        next_token_logits.append(processed[0, 0])
    return next_token_logits


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
    all_probs = [sampling.probs(reading) for reading in logits]

    # Token t is drawn by the numbers between ends t - 1 and t.
    interval_ends = []
    for probs in all_probs:
        double_probs = probs.double()
        interval_ends.append(double_probs.cumsum(-1) / double_probs.sum(-1))

    movements = [difference(*pair) for pair in combinations(interval_ends, 2)]
    rounding_of_probs = 4 * torch.finfo(torch.float32).eps
    movement = max(movements) + rounding_of_probs

    margin = 1.0
    for probs, highs in zip(all_probs, interval_ends, strict=True):
        number = torch.tensor(uniform, dtype=torch.float64, device=probs.device)
        drawn_token = int(draw(probs, number))
        lows = torch.nn.functional.pad(highs, (1, 0))

        # How far the number is from the intervals of the tokens that this reading does not draw.
        distances = []
        for token in tokens:
            if token != drawn_token:
                distance_below = float(lows[token]) - uniform
                distance_above = uniform - float(highs[token])
                distances.append(max(distance_below, distance_above, 0.0))
        margin = min(margin, max(distances, default=0.0))
    return margin, movement


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
    num_positions = min(width, len(text))
    (text_logits,) = readings(target, [text], num_positions)

    # One draft for each rank, of the target's tokens with that rank; all drafts many times.
    ranked_tokens = text_logits[0, :-1].argsort(-1, descending=True)
    forged_drafts = ranked_tokens[:, :NUM_RANKS].T
    drafted = forged_drafts.repeat(NUM_FORGED, 1)
    num_rounds = len(drafted)
    logits = text_logits.expand(num_rounds, -1, -1)

    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(num_rounds, num_positions, len(Purpose), generator=generator)
    noise = noise.to(logits.device)
    verdict = rule.judge(Draft(drafted), logits, sampling, noise)

    # The target's own tokens with the same numbers, as far as the draft agrees, and one more.
    target_noise = noise[..., Purpose.CORRECT].contiguous()
    target_tokens = sampling.sample(logits, target_noise)
    agrees = target_tokens[:, :-1] == drafted
    num_agreed = agrees.cumprod(1).sum(1)
    next_tokens = target_tokens.gather(1, num_agreed[:, None])[:, 0]

    has_right_count = verdict.num_accepted == num_agreed
    has_right_token = verdict.next_tokens == next_tokens
    is_wrong = ~(has_right_count & has_right_token)
    return int(is_wrong.sum())
