"""A target with its draft against the same target alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lightning_specdec.bench.rolled import CHUNK, rolled_decode
from lightning_specdec.bench.runner import Benchmark, Way, interleave
from lightning_specdec.drafters import Drafter, ModelDrafter
from lightning_specdec.drafters.compiled import CompiledDrafter
from lightning_specdec.inference import StopStrings, Window, autoregressive_decode, speculative_decode
from lightning_specdec.inference.rows import Prompts, check_batch
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Sampling

MODES = ("both", "standard", "speculative")


def compare(
    target: LanguageModel,
    drafter: Drafter,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    num_draft_tokens: int | Window,
    rule: AcceptanceRule | None,
    sampling: Sampling,
    eos: int | Sequence[int] | None = None,
    seed: int = 0,
    logprobs: bool = False,
    stop: StopStrings | None = None,
    repeats: int = 10,
    warmup: int = 3,
    batch_size: int = 1,
    mode: str = "both",
    equal_treatment: bool = False,
) -> Benchmark:
    """Decode the prompts both ways, interleaved.

    Args:
        drafter: as it shall guess: fused or compiled.
        mode: one of `MODES`.
        equal_treatment: whether to run both ways once more with the target as fused as the draft: rolled out as a draft
            is on the standard side (compiled if the drafter is), verifying in its fused form on the other.

    The rest are those of `SpeculativeDecoder.benchmark`.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be both, standard or speculative, got {mode!r}")
    batch = check_batch(prompts, target.vocab_size, max_new_tokens=max_new_tokens, indices=None)
    started = time.perf_counter()
    shared: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "eos": eos, "seed": seed}
    guessing = {**shared, "stop": stop, "num_draft_tokens": num_draft_tokens, "rule": rule, "logprobs": logprobs}
    ways: dict[str, Way] = {}
    if mode != "speculative":
        ways["standard"] = lambda texts, indices: autoregressive_decode(
            target, texts, indices=indices, logprobs=logprobs, stop=stop, **shared
        )
    if mode != "standard":
        ways["speculative"] = lambda texts, indices: speculative_decode(
            target, drafter, texts, indices=indices, **guessing
        )
    if mode == "both" and equal_treatment:
        fused, rollout = target.fused(), ModelDrafter(target).fused()
        if isinstance(drafter, CompiledDrafter):
            rollout = CompiledDrafter(rollout, num_draft_tokens=min(CHUNK, max_new_tokens), sampling=sampling)
        ways["rolled_standard"] = lambda texts, indices: rolled_decode(rollout, texts, indices=indices, **shared)
        ways["rolled_speculative"] = lambda texts, indices: speculative_decode(
            fused, drafter, texts, indices=indices, **guessing
        )
    prepared = time.perf_counter() - started
    texts = [text for _, text in batch]
    runs, warmed, interrupted = interleave(ways, texts, repeats=repeats, warmup=warmup, batch_size=batch_size)
    return Benchmark(
        standard=runs.get("standard"),
        speculative=runs.get("speculative"),
        rolled_standard=runs.get("rolled_standard"),
        rolled_speculative=runs.get("rolled_speculative"),
        warmup_seconds=prepared + warmed,
        num_draft_tokens=num_draft_tokens if isinstance(num_draft_tokens, int) else None,
        interrupted=interrupted,
    )
