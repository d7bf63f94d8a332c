"""A whole benchmark: each pair's facts first, then its cells in turn, each finished run on the disk before the next.

Knows nothing of where pairs come from, nor of how figures are shown.

Theory: a machine drifts, so the cells of a group take turns (A B A B), standard decoding among them: what they are
compared by is paired by repeat. A run that was stopped, however it was, goes on with what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.config_entries import OURS
from lightning_specdec.bench.isolated import OUTSIDE_FAILURES, alphas, best_setting, by_draft, timed_calls
from lightning_specdec.bench.matrix import Cell, Subject, cells, config_hash
from lightning_specdec.bench.measure import failure, measure, should_be_same, watch
from lightning_specdec.bench.results import ResultsWriter
from lightning_specdec.bench.runner import no_collection
from lightning_specdec.bench.sweep import FAILURES
from lightning_specdec.bench.ways import Prepared, window_of

_FACTS = ("target_sha256", "draft_sha256", "dtype")
_BY_PAIR = ("pairs", "prompts", "calls", "alpha", "alpha_at", "outside")
"""What the manifest says of each pair, once it is known."""


class Progress:
    """Told how a benchmark goes; this one keeps it to itself."""

    def plan(self, num_runs: int) -> None:
        """So many runs of the next pair are to come."""

    def say(self, text: str) -> None:
        """What is being done now."""

    def advance(self, num_runs: int) -> None:
        """So many runs have ended, or will not be tried."""


def open_results(directory: Path, config: BenchConfig, manifest: dict[str, Any]) -> ResultsWriter:
    """The results of a config, new or begun.

    Args:
        manifest: what `manifest.manifest` says.

    Raises:
        ValueError: the directory holds those of another config, machine or version.
    """
    whole = {"name": config.name, **manifest, "config": config.to_dict(), "config_hash": config_hash(config)}
    return ResultsWriter.open(directory, {**whole, **{name: {} for name in _BY_PAIR}})


def run(
    config: BenchConfig,
    results: ResultsWriter,
    load: Callable[[str], Subject],
    progress: Progress | None = None,
) -> None:
    """Run what is missing of a benchmark.

    Args:
        load: gives a pair by its name; one is held at a time.

    Raises:
        OSError: nothing more can be written; what was finished stays.
        KeyboardInterrupt: Ctrl-C; the same.
    """
    told = progress or Progress()
    for name in config.pairs:
        told.say(f"{name}: loading")
        subject = load(name)
        groups = cells(config, subject)
        missing = [cell for group in groups for cell in group if _missing(cell, config, results)]
        _describe(subject, config, results, told, any_missing=bool(missing))
        told.plan(sum(len(_missing(cell, config, results)) for cell in missing))
        for group in groups:
            with no_collection():
                _run_group(group, subject, config, results, told)
        del subject


def _missing(cell: Cell, config: BenchConfig, results: ResultsWriter) -> list[int]:
    """The repeats of a cell that are still to be run; none of one that has failed."""
    if results.failed(cell.hash):
        return []
    return [repeat for repeat in range(config.repeats) if results.row(cell.hash, repeat) is None]


def _describe(
    subject: Subject, config: BenchConfig, results: ResultsWriter, told: Progress, *, any_missing: bool
) -> None:
    """Say in the manifest what the pair is, what its calls take, and how often its drafts are right."""
    known, name = results.results.manifest, subject.name
    prompts = {
        domain: {prompt.id: list(prompt.tokens) for prompt in several} for domain, several in subject.prompts.items()
    }
    if name in known["pairs"]:
        changed = [key for key in _FACTS if known["pairs"][name][key] != subject.facts[key]]
        if changed or known["prompts"][name] != prompts:
            what = changed[0] if changed else "prompts"
            raise ValueError(
                f"{results.results.directory} was measured with another {what} of {name}: give the config another name"
            )
    else:
        _set(results, name, pairs=subject.facts, prompts=prompts)
    if name in known["calls"] or not any_missing:
        return
    told.say(f"{name}: timing single calls")
    try:
        calls = timed_calls(subject, config)
    except FAILURES as error:  # a context too short for them, say: there will be no prediction, and it says why
        calls = {"draft_step_seconds": {}, "error": " ".join(str(error).split())}
    told.say(f"{name}: decoding other prompts")
    found = alphas(subject, config)
    _set(results, name, calls=calls, alpha=by_draft(found, config), alpha_at=found)


def _set(results: ResultsWriter, pair: str, **entries: Any) -> None:
    known = results.results.manifest
    results.update(**{name: {**known[name], pair: value} for name, value in entries.items()})


def _run_group(
    group: Sequence[Cell], subject: Subject, config: BenchConfig, results: ResultsWriter, told: Progress
) -> None:
    """The missing runs of cells that are compared: all made ready, then each in its turn."""
    standard = group[0]
    prepared: dict[str, Prepared] = {}
    for cell in group:
        if not (missing := _missing(cell, config, results)):
            continue
        told.say(f"{_place(cell)}: making {cell.label} ready")
        try:
            prepared[cell.hash] = _prepare(cell, subject, config, results)
        except _failures(cell) as error:
            results.append(failure(cell, subject, config, Prepared(), repeat=missing[0], error=error))
            told.advance(len(missing))
    for repeat in range(config.repeats):
        for cell in group:
            missing = _missing(cell, config, results)
            if repeat not in missing:
                continue
            told.say(f"{_place(cell)}: {cell.label}")
            ready = prepared[cell.hash]
            try:
                row = measure(cell, subject, config, ready, repeat=repeat)
            except _failures(cell) as error:
                results.append(failure(cell, subject, config, ready, repeat=repeat, error=error))
                told.advance(len(missing))
                continue
            if should_be_same(cell):
                expected = row if cell is standard else results.row(standard.hash, repeat) or {}
                known = expected.get("tokens_sha256")
                row["same_tokens"] = None if known is None else known == row["tokens_sha256"]
            results.append(row)
            told.advance(1)


def _place(cell: Cell) -> str:
    return f"{cell.pair}, {cell.domain}, {cell.temperature:g}, batch {cell.batch_size}"


def _failures(cell: Cell) -> tuple[type[BaseException], ...]:
    """What a way may fail by, and the benchmark goes on."""
    return FAILURES if cell.way in OURS else OUTSIDE_FAILURES


def _prepare(cell: Cell, subject: Subject, config: BenchConfig, results: ResultsWriter) -> Prepared:
    """A cell that is ready to be timed: warm, with its window or its best setting.

    Raises:
        ValueError, RuntimeError, MemoryError, and whatever transformers raises: it cannot decode so.
    """
    ready = Prepared(window_of(cell, subject), None if cell.way in OURS else _setting(cell, subject, config, results))
    for i in range(config.warmup):
        if i == 0:
            ready = watch(cell, subject, config, ready)
        else:
            measure(cell, subject, config, ready, repeat=i)
    return ready


def _setting(cell: Cell, subject: Subject, config: BenchConfig, results: ResultsWriter) -> dict[str, Any]:
    """The best setting of one of transformers' ways, as it was found when it was first wanted."""
    known = results.results.manifest["outside"].get(cell.pair, [])
    for each in known:
        if all(each[name] == getattr(cell, name) for name in ("way", "draft", "domain", "temperature", "batch_size")):
            return dict(each["setting"])
    found = best_setting(cell, subject, config)
    _set(results, cell.pair, outside=[*known, found])
    return dict(found["setting"])
