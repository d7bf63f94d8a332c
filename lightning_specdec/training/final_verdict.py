"""The end of a training run: whether the draft pays as it would decode, and the next command."""

from __future__ import annotations

import shlex
import time

from lightning.pytorch import Callback

from lightning_specdec.bench.measure import compare_once
from lightning_specdec.bench.verdict import draft_verdict
from lightning_specdec.data import TokenData
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.decode_callback import DecodeHeldOut
from lightning_specdec.training.optimizers import TimeLimit

NUM_PROMPTS = 4
NUM_NEW_TOKENS = 32
USELESS_RATE = 0.05
"""Acceptance rate below which a draft has learned nothing of its target."""


def final_verdict(
    module: SpeculativeTraining,
    data: TokenData,
    callbacks: list[Callback] | None = None,
) -> str:
    """Whether the trained draft pays on held-out prompts, in a sentence.

    Target and draft are packed and fused, as `decode` uses them.

    Args:
        module: the trained networks.
        data: has the held-out prompts.
        callbacks: of the run; a `DecodeHeldOut` decides how many prompts and tokens are decoded,
            and a `TimeLimit` how long. At least a few tokens are decoded, and no more than follow
            the prompts in the data: the networks have learned texts of this length.

    Raises:
        ValueError: the pair cannot decode these prompts.
    """
    num_prompts = NUM_PROMPTS
    num_new_tokens = NUM_NEW_TOKENS
    start = time.monotonic()
    max_seconds = None
    has_time_limit = False
    for callback in callbacks or ():
        if isinstance(callback, TimeLimit):
            has_time_limit = True
            max_seconds = callback.seconds_left()
    for callback in callbacks or ():
        if isinstance(callback, DecodeHeldOut):
            num_prompts = callback.num_prompts
            num_new_tokens = callback.num_affordable_tokens(max_seconds)

    rows = data.first_rows("val", num_prompts)
    prompts = rows.prompts()
    num_known_tokens = int((rows.lengths - rows.prompt_lengths).max())
    num_new_tokens = min(num_new_tokens, max(1, num_known_tokens))
    decoder = SpeculativeDecoder(module.target, module.drafter)
    config = decoder.config(num_draft_tokens=module.num_draft_tokens, max_new_tokens=num_new_tokens)
    target, drafter = decoder.ready()
    if max_seconds is not None:
        # Packing the weights takes a part of this time.
        max_seconds = max(0.0, max_seconds - (time.monotonic() - start))
    comparison = compare_once(target, drafter, prompts, config, max_seconds=max_seconds).comparison
    verdict = draft_verdict(comparison)
    acceptance_rate = comparison.acceptance_rate
    if acceptance_rate is not None and acceptance_rate < USELESS_RATE:
        verdict += (
            f"; {acceptance_rate:.1%} of its tokens are accepted: was the training text written by "
            "this target? `lightning_specdec generate` lets it write some"
        )
    if has_time_limit and comparison.verdict.kind != "faster":
        verdict += "; to train it further, repeat with --ckpt_path last and more --minutes"
    return verdict


def next_command(module: SpeculativeTraining, run_directory: str) -> str:
    """The command that finds the fastest way to use a run's draft."""
    origin = module.target.origin
    words = ["lightning_specdec", "sweep"]
    if origin is None:
        words += ["--ckpt", run_directory]
    else:
        words += ["--target", str(origin.source)]
        if origin.adapter is not None:
            words += ["--adapter", origin.adapter.source]
        words += ["--draft", run_directory]
    return shlex.join(words)
