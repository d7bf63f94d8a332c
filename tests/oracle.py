"""Slow, obvious decoding: one text at a time, read again from its first token for every new one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import Purpose, Sampling, noise_table


@torch.no_grad()
def decode(
    target: LanguageModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    eos: Collection[int] = (),
    seed: int = 0,
    index: int = 0,
) -> list[int]:
    """The new tokens of the prompt with number `index`, without a cache, a batch or a graph."""
    text = list(prompt)
    noise = noise_table(seed, index, max_new_tokens).to(target.device)
    for position in range(max_new_tokens):
        logits = target(torch.tensor([text], device=target.device)).logits[:, -1:]
        logits = sampling.process(logits, [text])[:, 0]
        token = int(sampling.sample(logits, noise[position : position + 1, Purpose.CORRECT]))
        text.append(token)
        if token in eos:
            break
    return text[len(prompt) :]
