"""The runs that `decode` shows, one each way, before anything is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_specdec.inference import DecodeInterrupted, DecodeResult, merge_results

Batch = Callable[[list[list[int]], list[int]], DecodeResult]
"""Decodes prompts together, given with their numbers."""


def in_batches(decode: Batch, prompts: Sequence[list[int]], size: int) -> DecodeResult:
    """All prompts, `size` of them together, each under its own number.

    Raises:
        DecodeInterrupted: by Ctrl-C, with what was settled in this and all earlier batches.
    """
    results: list[DecodeResult] = []
    try:
        for first in range(0, len(prompts), size):
            batch = list(prompts[first : first + size])
            results.append(decode(batch, list(range(first, first + len(batch)))))
    except KeyboardInterrupt as stop:
        settled = [*results, stop.result] if isinstance(stop, DecodeInterrupted) else results
        if not settled:
            raise
        raise DecodeInterrupted(merge_results(settled)) from None
    return merge_results(results)


def rows_by_prompt(
    standard: DecodeResult | None, speculative: DecodeResult | None, texts: Sequence[str | None]
) -> list[dict[str, Any]]:
    """For each prompt both ways' new tokens, text and counts, as plain values."""
    merged: dict[int, dict[str, Any]] = {}
    for name, result in (("standard", standard), ("speculative", speculative)):
        for row in result.to_dict()["rows"] if result else []:
            index, prompt = row.pop("index"), row.pop("prompt")
            known = {"index": index, "prompt": prompt, "prompt_text": texts[index]}
            merged.setdefault(index, known)[name] = row
    return list(merged.values())
