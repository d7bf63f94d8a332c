"""What a text and the target's logits must keep to: the models' contexts, and finite numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def check_context(
    num_prompt_tokens: int, max_new_tokens: int, target: LanguageModel, drafter: Drafter | None = None
) -> None:
    """Raise ValueError for a text that would outgrow what a model was made for."""
    limits = {"target": target.max_positions, "draft": None if drafter is None else drafter.max_positions}
    total = num_prompt_tokens + max_new_tokens
    for owner, limit in limits.items():
        if limit is not None and total > limit:
            room = limit - num_prompt_tokens
            advice = f"ask for at most {room} new ones" if room > 0 else "shorten the prompt"
            raise ValueError(
                f"a prompt of {num_prompt_tokens} tokens and {max_new_tokens} new ones make {total}, and the {owner}'s "
                f"context holds {limit}: {advice}"
            )


def flag_undrawable(tokens: Int[Tensor, "*B"], logits: Float[Tensor, "*B V"]) -> Int[Tensor, "*B"]:
    """The largest logits' tokens; the vocabulary's size, which no token is, where that logit is not a finite number.

    Theory: the largest of numbers with a NaN among them is that NaN, so looking at one logit finds it, and the host
    learns of it by the read that it makes anyway.
    """
    largest = logits.gather(-1, tokens[..., None]).squeeze(-1)
    return torch.where(largest.abs() < torch.inf, tokens, logits.shape[-1])
