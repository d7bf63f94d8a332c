"""How a target scores the same text when it reads it in one call, or token by token: what rounding does to its logits.

Shapes: N texts of one length, P places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec.models import LanguageModel

if TYPE_CHECKING:
    from jaxtyping import Float


@torch.inference_mode()
def scores(
    target: LanguageModel, texts: Sequence[Sequence[int]], num_places: int, *, width: int | None = None
) -> Float[Tensor, "N P V"]:
    """The target's logits behind the last `num_places` tokens of each text.

    Args:
        texts: of one length.
        width: how many of those tokens it reads in a call, behind one that reads what comes before; the text in one
            call, without a state, when None. Standard decoding reads it with a width of 1.
    """
    tokens = torch.tensor(texts, device=target.device)
    if width is None:
        return target(tokens, logits_for=slice(-num_places, None)).logits
    state = target.init_state(*tokens.shape)
    first = tokens.shape[1] - num_places
    if first:
        target(tokens[:, :first], state, logits_for=slice(-1, None))
    pieces = tokens[:, first:].split(width, dim=1)
    return torch.cat([target(piece, state).logits for piece in pieces], dim=1)


@torch.inference_mode()
def several_scores(
    target: LanguageModel, texts: Sequence[Sequence[int]], num_places: int, *, widths: Sequence[int | None]
) -> list[Float[Tensor, "N P V"]]:
    """`scores` for each width, in float32."""
    return [scores(target, texts, num_places, width=width).float() for width in widths]


def rounding(target: LanguageModel, ways: Sequence[Float[Tensor, "*P V"]]) -> float:
    """By how much rounding moves a logit of the target: the largest difference of other ways to read a text from the
    first.

    At least the distance of neighbouring numbers of the target's type, as large as its largest logit.
    """
    largest = max(float(way[way.isfinite()].abs().max()) for way in ways)
    return max([largest * spacing(target), *(difference(way, ways[0]) for way in ways[1:])])


def spacing(target: LanguageModel) -> float:
    """The relative distance of neighbouring numbers of the type that the target computes in."""
    kinds = [weight.dtype for weight in target.parameters() if weight.dtype.is_floating_point]
    return max((torch.finfo(kind).eps for kind in kinds), default=torch.finfo(torch.float32).eps)


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference between two tensors; infinite where they are not finite alike."""
    apart = torch.where(one == other, 0.0, (one.float() - other.float()).abs())
    return float(apart.nan_to_num(nan=torch.inf).max()) if apart.numel() else 0.0
