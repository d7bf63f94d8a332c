"""Results as a benchmark writes them, with known seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_specdec.bench.results import Results
from lightning_specdec.bench.rows import FORMAT, Comparison, ResultRow, comparisons
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
"""As little as a manifest can say."""


def row(method: str = "speculative", **values: Any) -> ResultRow:
    """A row without its figures."""
    whole: dict[str, Any] = {
        "pair": "pair",
        "method": method,
        "domain": "code",
        "temperature": 0.0,
        "batch_size": 1,
    }
    whole |= {"repeat": 0, "seed": 0, "max_new_tokens": NUM_NEW_TOKENS}
    if method == "speculative":
        whole |= {"draft": "ngram", "num_draft_tokens": 4, "rule": "ExactMatch", "lossless": True}
    return ResultRow(**whole | values)


def timed(seconds: Sequence[float], method: str = "speculative", **values: Any) -> ResultRow:
    """A row of prompts that took so long; a round of speculation accepts 3 of 4 draft tokens."""
    tokens = values.pop("tokens", [NUM_NEW_TOKENS] * len(seconds))
    whole, number = sum(seconds), sum(tokens)
    figures: dict[str, Any] = {
        "seconds": whole,
        "num_new_tokens": number,
        "prompt_seconds": list(seconds),
    }
    figures |= {
        "prompt_new_tokens": list(tokens),
        "num_target_calls": number,
        "num_row_rounds": number,
    }
    figures |= {
        "phase_seconds": {"draft": 0.0, "verify": whole, "accept": 0.0, "rest": 0.0},
        "same_tokens": True,
    }
    if method == "speculative":
        rounds = number // 4
        figures |= {
            "num_target_calls": rounds,
            "num_row_rounds": rounds,
            "num_draft_steps": 4 * rounds,
        }
        figures |= {"num_proposed": 4 * rounds, "num_tested": round(3.42 * rounds)}
        figures["num_accepted"] = 3 * rounds
        figures["phase_seconds"] = {
            "draft": whole / 4,
            "verify": whole * 3 / 4,
            "accept": 0.0,
            "rest": 0.0,
        }
    return row(method, **figures | values)


def faster(speedups: Sequence[float], method: str = "speculative", **values: Any) -> ResultRow:
    """A row of prompts that are so many times as fast as `standard`'s, which take a second each."""
    return timed([1 / each for each in speedups], method, **values)


def standard(prompts: int = 8, **values: Any) -> ResultRow:
    """A row of standard decoding."""
    return timed([1.0] * prompts, "standard", **values)


def cells_of(rows: Sequence[ResultRow]) -> list[Comparison]:
    """The cells of rows, as they come back from a file."""
    return comparisons(ResultRow.from_dict(json.loads(json.dumps(each.to_dict()))) for each in rows)


def report_of(rows: Sequence[ResultRow], **manifest: Any) -> Report:
    """The report of rows."""
    return Report.of(Results(Path("made"), {**MANIFEST, **manifest}, list(rows)))


def write_results(
    directory: Path, rows: Sequence[ResultRow], manifest: Mapping[str, Any] = MANIFEST
) -> Path:
    """A results directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    (directory / "rows.jsonl").write_text(
        "".join(f"{json.dumps(each.to_dict())}\n" for each in rows)
    )
    return directory
