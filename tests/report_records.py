"""Results as a benchmark writes them, with known seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_specdec.bench.records import FORMAT, Comparison, Record, comparisons
from lightning_specdec.bench.results import Results
from lightning_specdec.report.report import Report

NUM_NEW_TOKENS = 48
MANIFEST = {
    "format": FORMAT,
    "name": "made",
    "config": {},
    "pairs": {},
    "prompts": {},
    "date": "2020-01-01",
}
"""The smallest manifest."""


def row(method: str = "speculative", **values: Any) -> Record:
    """A row without figures."""
    settings: dict[str, Any] = {
        "pair": "pair",
        "method": method,
        "domain": "code",
        "temperature": 0.0,
        "batch_size": 1,
        "repeat": 0,
        "seed": 0,
        "max_new_tokens": NUM_NEW_TOKENS,
    }
    if method == "speculative":
        settings["draft"] = "ngram"
        settings["num_draft_tokens"] = 4
        settings["rule"] = "ExactMatch"
        settings["lossless"] = True
    return Record(**{**settings, **values})


def timed(
    prompt_seconds: Sequence[float],
    method: str = "speculative",
    *,
    tokens: Sequence[int] | None = None,
    **values: Any,
) -> Record:
    """A row of prompts with these seconds; a round of speculation accepts 3 of 4 draft tokens.

    Args:
        tokens: number of new tokens of each prompt.
    """
    if tokens is None:
        tokens = [NUM_NEW_TOKENS] * len(prompt_seconds)
    total_seconds = sum(prompt_seconds)
    num_new_tokens = sum(tokens)
    figures: dict[str, Any] = {
        "seconds": total_seconds,
        "num_new_tokens": num_new_tokens,
        "prompt_seconds": list(prompt_seconds),
        "prompt_new_tokens": list(tokens),
        "same_tokens": True,
    }
    if method == "speculative":
        num_rounds = num_new_tokens // 4
        figures["num_target_calls"] = num_rounds
        figures["num_row_rounds"] = num_rounds
        figures["num_draft_steps"] = 4 * num_rounds
        figures["num_proposed"] = 4 * num_rounds
        figures["num_tested"] = round(3.42 * num_rounds)
        figures["num_accepted"] = 3 * num_rounds
        draft_seconds = total_seconds / 4
        verify_seconds = total_seconds * 3 / 4
    else:
        figures["num_target_calls"] = num_new_tokens
        figures["num_row_rounds"] = num_new_tokens
        draft_seconds = 0.0
        verify_seconds = total_seconds
    figures["phase_seconds"] = {
        "draft": draft_seconds,
        "verify": verify_seconds,
        "accept": 0.0,
        "rest": 0.0,
    }
    return row(method, **{**figures, **values})


def faster(speedups: Sequence[float], method: str = "speculative", **values: Any) -> Record:
    """A row of prompts with these speedups over `standard`'s, which take a second each."""
    return timed([1 / speedup for speedup in speedups], method, **values)


def standard(num_prompts: int = 8, **values: Any) -> Record:
    """A row of standard decoding."""
    return timed([1.0] * num_prompts, "standard", **values)


def cells_of(rows: Sequence[Record]) -> list[Comparison]:
    """The cells of rows that were written to a file and read again."""
    read_rows = []
    for row in rows:
        values = json.loads(json.dumps(row.to_dict()))
        read_rows.append(Record.from_dict(values))
    return comparisons(read_rows)


def report_of(rows: Sequence[Record], **manifest: Any) -> Report:
    """The report of rows."""
    return Report.of(Results(Path("made"), {**MANIFEST, **manifest}, list(rows)))


def write_results(
    directory: Path,
    rows: Sequence[Record],
    manifest: Mapping[str, Any] = MANIFEST,
) -> Path:
    """A results directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    lines = [json.dumps(row.to_dict()) + "\n" for row in rows]
    (directory / "rows.jsonl").write_text("".join(lines))
    return directory
