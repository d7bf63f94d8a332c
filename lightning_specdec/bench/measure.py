"""One run of one cell, as a row of the results."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.config_entries import ROLLED, STANDARD
from lightning_specdec.bench.failures import in_one_line
from lightning_specdec.bench.matrix import Cell
from lightning_specdec.bench.prompts import Prompt
from lightning_specdec.bench.row import ResultRow
from lightning_specdec.bench.subject import Subject
from lightning_specdec.bench.usage import MemoryTimer, PeakMemory, gpu_utilization, whole
from lightning_specdec.bench.ways import Prepared, decode, way_of
from lightning_specdec.drafters import Drafter
from lightning_specdec.inference import DecodeResult, Window
from lightning_specdec.inference.results import RowResult

DIGITS = 7
"""Of seconds behind the point: a tenth of a microsecond."""
GPU_SECONDS = 1.5
"""What a run is repeated for while a GPU is watched, which looks ten times a second."""


def warm_up(cell: Cell, subject: Subject, config: BenchConfig, prepared: Prepared) -> Prepared:
    """Run a cell as often as its config says before it is timed: what the timed runs are prepared with."""
    for i in range(config.warmup):
        if i == 0:
            prepared = _watch(cell, subject, config, prepared)
        else:
            measure(cell, subject, config, prepared, repeat=i)
    return prepared


def _watch(cell: Cell, subject: Subject, config: BenchConfig, prepared: Prepared) -> Prepared:
    """Run a cell once with an eye on its memory, and on how busy a GPU is."""
    device, prompts = subject.target.device, subject.prompts[cell.domain]
    peaks: dict[str, int] = {}
    way = way_of(cell, subject, config, prepared, seed=config.seed, timer=lambda: MemoryTimer(device, peaks))
    memory = PeakMemory(device)
    result = decode(way, prompts, cell.batch_size)
    found: dict[str, int] | int = peaks or (memory.look() if memory.known else result.peak_memory_bytes)
    with gpu_utilization(device) as shares:
        began = time.perf_counter()
        while device.type == "cuda" and time.perf_counter() - began < GPU_SECONDS:
            decode(way_of(cell, subject, config, prepared, seed=config.seed), prompts, cell.batch_size)
    busy = sum(shares) / len(shares) if shares else None
    return Prepared(prepared.window, prepared.setting, found, busy)


def measure(cell: Cell, subject: Subject, config: BenchConfig, prepared: Prepared, *, repeat: int) -> ResultRow:
    """Run a cell, and give its row, in which `same_tokens` is not known yet.

    Raises:
        ValueError, RuntimeError, MemoryError, and whatever transformers raises: it cannot decode so.
    """
    way = way_of(cell, subject, config, prepared, seed=config.seed + repeat)
    prompts = subject.prompts[cell.domain]
    result = decode(way, prompts, cell.batch_size)
    return replace(_row(cell, subject, config, prepared, repeat), **_figures(result, prompts))


def failure(
    cell: Cell, subject: Subject, config: BenchConfig, prepared: Prepared, *, repeat: int, error: BaseException
) -> ResultRow:
    """The row of a run that failed: what it failed by, and no figures."""
    return replace(_row(cell, subject, config, prepared, repeat), error=in_one_line(error)[:1000])


def _row(cell: Cell, subject: Subject, config: BenchConfig, prepared: Prepared, repeat: int) -> ResultRow:
    """What is known of a row before it has run."""
    drafter = subject.drafts.get(cell.draft or "")
    window = prepared.window
    return ResultRow(
        cell=cell.hash,
        repeat=repeat,
        pair=cell.pair,
        way=cell.way,
        draft=cell.draft,
        draft_kind=type(drafter).__name__ if isinstance(drafter, Drafter) else None,
        domain=cell.domain,
        num_draft_tokens=cell.num_draft_tokens,
        temperature=cell.temperature,
        batch_size=cell.batch_size,
        rule=None if cell.rule is None else cell.rule.label,
        lossless=None if cell.rule is None else cell.rule.make().lossless,
        seed=config.seed + repeat,
        max_new_tokens=config.max_new_tokens,
        window=window.to_dict() if isinstance(window, Window) else None,
        setting=None if prepared.setting is None else dict(prepared.setting),
        peak_memory_bytes=prepared.memory,
        gpu_utilization=prepared.utilization,
    )


def _figures(result: DecodeResult, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What a run that failed has none of."""
    counts = result.counts
    tested, accepted = by_position(result.rows)
    return {
        "seconds": result.seconds,
        "num_prompts": len(prompts),
        "num_new_tokens": result.num_new_tokens,
        "phase_seconds": whole(result.phase_seconds, result.seconds) if result.phase_seconds else None,
        "num_target_calls": result.num_target_calls,
        "num_draft_calls": result.num_draft_calls,
        **({} if counts is None else {**vars(counts), "tested_at": tested, "accepted_at": accepted}),
        "num_row_rounds": sum(row.num_rounds for row in result.rows),
        "prompt_ids": [prompt.id for prompt in prompts],
        "prompt_seconds": [_rounded(row.token_seconds[-1:])[0] for row in result.rows],
        "prompt_new_tokens": [len(row.tokens) for row in result.rows],
        "token_seconds": [_rounded(_steps(row.token_seconds)) for row in result.rows],
        "time_to_first_token": [_rounded(row.token_seconds[:1])[0] for row in result.rows],
        "tokens_sha256": tokens_sha256(result.tokens),
        "num_changed": result.num_changed,
    }


def tokens_sha256(tokens: Sequence[Sequence[int]]) -> str:
    """A hash of all new tokens."""
    return hashlib.sha256(json.dumps([list(each) for each in tokens]).encode()).hexdigest()


def by_position(rows: Sequence[RowResult]) -> tuple[list[int], list[int]]:
    """How often the first, second, ... guess of a round was tested, and how often it was kept."""
    tested: list[int] = []
    accepted: list[int] = []
    for row in rows:
        for each in row.rounds or ():
            for counts, number in (
                (tested, min(each.num_accepted + 1, len(each.drafted))),
                (accepted, each.num_accepted),
            ):
                counts += [0] * (number - len(counts))
                for i in range(number):
                    counts[i] += 1
    return tested, accepted + [0] * (len(tested) - len(accepted))


def should_be_same(cell: Cell) -> bool:
    """Whether a cell must give standard decoding's tokens: ours under a lossless rule at temperature 0, and with
    `ExactMatch` at every temperature; transformers' at temperature 0, up to rounding."""
    if cell.way in (STANDARD, ROLLED):
        return True
    rule, greedy = cell.make_rule(), cell.temperature == 0
    return greedy if rule is None else rule.keeps_tokens(greedy=greedy)


def _steps(seconds: Sequence[float]) -> list[float]:
    """What each token took since the last one."""
    return [now - before for before, now in zip((0.0, *seconds), seconds, strict=False)]


def _rounded(seconds: Sequence[float]) -> list[float]:
    return [round(each, DIGITS) for each in seconds]
