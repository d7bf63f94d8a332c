"""Results as a benchmark writes them, of a machine whose costs are known and of drafts whose acceptance is known."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightning_specdec.bench.results import Results
from lightning_specdec.bench.rows import Comparison, ResultRow, comparisons
from lightning_specdec.report.report import Report

Row = dict[str, Any]
Rounds = list[tuple[int, int]]
"""Of each round how many draft tokens were proposed and how many accepted."""
NUM_NEW_TOKENS = 48


@dataclass(frozen=True)
class Machine:
    """Seconds of the parts of decoding."""

    one: float = 0.020
    more: float = 0.0005
    guess: float = 0.001
    overhead: float = 0.0004
    reading: float = 0.010

    def wide(self, width: int) -> float:
        return self.one + self.more * (width - 1)


MACHINE = Machine()


def drawn(alpha: float, window: int, seed: int) -> Rounds:
    """The rounds of a text whose guesses are kept independently of each other."""
    generator = random.Random(seed)
    return rounds_of(window, lambda place: generator.random() < alpha)


def rounds_of(window: int, keep: Callable[[int], bool]) -> Rounds:
    rounds: Rounds = []
    left = NUM_NEW_TOKENS
    while left:
        size, kept = min(window, left - 1), 0
        while kept < size and keep(kept):
            kept += 1
        rounds.append((size, kept))
        left -= kept + 1
    return rounds


def row(**values: Any) -> Row:
    """A row without its figures, as a line of a file."""
    settings: Row = {"pair": "pair", "method": "speculative", "draft": "draft", "draft_kind": "ModelDrafter"}
    settings |= {"domain": "code", "num_draft_tokens": 4, "temperature": 0.0, "batch_size": 1, "rule": "ExactMatch"}
    settings |= {"lossless": True, "repeat": 0, "seed": 0, "max_new_tokens": NUM_NEW_TOKENS, "error": None, "cell": ""}
    whole = settings | values
    if whole["method"] != "speculative":
        whole |= {"num_draft_tokens": None, "rule": None, "lossless": None}
    if whole["method"] == "standard":
        whole |= {"draft": None, "draft_kind": None}
    return {"format": 2, **dict.fromkeys(each.name for each in fields(ResultRow)), **whole}


def standard(machine: Machine = MACHINE, *, prompts: int = 6, drift: float = 1.0, **values: Any) -> Row:
    """A run of standard decoding."""
    step = drift * (machine.one + machine.overhead)
    times = [[step + drift * machine.reading] + [step] * (NUM_NEW_TOKENS - 1) for _ in range(prompts)]
    number = prompts * NUM_NEW_TOKENS
    phases = {"draft": 0.0, "verify": number * drift * machine.one + prompts * drift * machine.reading, "accept": 0.0}
    figures = {"num_target_calls": number, "num_row_rounds": number, "same_tokens": True}
    phases["rest"] = number * drift * machine.overhead
    return row(method="standard", **{**values, **_timed(times, phases), **figures})


def speculative(
    rounds: Sequence[Rounds], machine: Machine = MACHINE, *, drift: float = 1.0, window: int = 4, **values: Any
) -> Row:
    """A run of speculation, one list of rounds for each prompt."""
    times, phases = [], dict.fromkeys(("draft", "verify", "accept", "rest"), 0.0)
    for each in rounds:
        steps: list[float] = []
        for size, kept in each:
            parts = {
                "draft": size * machine.guess,
                "verify": machine.wide(window + 1) + (0 if steps else machine.reading),
                "accept": machine.overhead / 2,
                "rest": machine.overhead / 2,
            }
            for phase, seconds in parts.items():
                phases[phase] += drift * seconds
            steps += [drift * sum(parts.values())] + [0.0] * kept
        times.append(steps)
    every = [each for several in rounds for each in several]
    histogram = [sum(kept == i for _, kept in every) for i in range(max(kept for _, kept in every) + 1)]
    tested_at = [sum(min(kept + 1, size) > i for size, kept in every) for i in range(window)]
    accepted_at = [sum(kept > i for _, kept in every) for i in range(window)]
    figures = {
        "num_target_calls": len(every),
        "num_draft_calls": sum(size for size, _ in every),
        "num_proposed": sum(size for size, _ in every),
        "num_tested": sum(tested_at),
        "num_accepted": sum(accepted_at),
        "histogram": histogram,
        "tested_at": tested_at,
        "accepted_at": accepted_at,
        "num_row_rounds": len(every),
        "same_tokens": True,
    }
    return row(**{"num_draft_tokens": window, **_timed(times, phases), **figures, **values})


def _timed(times: list[list[float]], phases: Mapping[str, float]) -> Row:
    return {
        "seconds": sum(map(sum, times)),
        "num_prompts": len(times),
        "num_new_tokens": sum(map(len, times)),
        "phase_seconds": dict(phases),
        "prompt_ids": [f"prompt-{i}" for i in range(len(times))],
        "prompt_seconds": [sum(each) for each in times],
        "prompt_new_tokens": [len(each) for each in times],
        "token_seconds": times,
        "time_to_first_token": [each[0] for each in times],
        "peak_memory_bytes": 2_000_000,
        "tokens_sha256": "0" * 64,
    }


def manifest_of(
    alphas: Mapping[tuple[str, str], float], machine: Machine = MACHINE, *, pair: str = "pair", **values: Any
) -> dict[str, Any]:
    """What a benchmark says of one pair; alphas by draft and domain."""
    drafts, domains = ({key[i]: None for key in alphas} for i in (0, 1))
    widths = (1, 2, 3, 5, 9)
    found = [
        {"draft": draft, "domain": domain, "temperature": 0.0, "rule": "ExactMatch", "num_tested": 10_000}
        | {"num_accepted": round(10_000 * alpha)}
        for (draft, domain), alpha in alphas.items()
    ]
    calls = {
        "one_token_seconds": machine.one,
        "wide_seconds": {str(width): machine.wide(width) for width in widths[1:]},
        "draft_step_seconds": dict.fromkeys(drafts, machine.guess),
        "draft_fixed_seconds": dict.fromkeys(drafts, 0.0),
        "round_overhead_seconds": {draft: {str(width): machine.overhead for width in widths} for draft in drafts},
        "step_overhead_seconds": machine.overhead,
        "prompt_token_seconds": machine.reading / 10,
    }
    prompts = {domain: {f"prompt-{i}": [1] * 10 for i in range(6)} for domain in domains}
    facts = {"draft_parameters": dict.fromkeys(drafts, 12_352), "target": "Target", "target_parameters": 10**6}
    made = {
        "format": 2,
        "name": "made",
        "device": "cpu",
        "processor": "none",
        "threads": 1,
        "torch": "2",
        "commit": "0",
    }
    made |= {"date": "2020-01-01", "pairs": {pair: facts}, "calls": {pair: calls}, "alpha_at": {pair: found}}
    return {**made, "prompts": {pair: prompts}, "config": {}, **values}


def cells_of(rows: Sequence[Row]) -> list[Comparison]:
    """The cells of rows."""
    return comparisons(map(ResultRow.from_dict, rows))


def report_of(rows: Sequence[Row], **manifest: Any) -> Report:
    """The report of rows."""
    return Report.of(Results(Path("made"), {"name": "made", **manifest}, list(map(ResultRow.from_dict, rows))))


def write_results(directory: Path, manifest: Mapping[str, Any], rows: Sequence[Row]) -> Path:
    """A results directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    (directory / "rows.jsonl").write_text(
        "".join(f"{json.dumps(each | {'cell': str(i)})}\n" for i, each in enumerate(rows))
    )
    return directory
