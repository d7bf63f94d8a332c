"""A whole benchmark: each pair's facts first, then its cells in turn, each finished run on the disk before the next.

Theory: a machine drifts, so the cells of a group take turns (A B A B), standard decoding among them: what they are
compared by is paired by repeat. A run that was stopped, however it was, goes on with what is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.config_entries import OURS
from lightning_specdec.bench.failures import FAILURES, OUTSIDE_FAILURES, in_one_line
from lightning_specdec.bench.isolated import alphas, best_setting, by_draft, timed_calls
from lightning_specdec.bench.matrix import Cell, cells, config_hash
from lightning_specdec.bench.measure import failure, measure, should_be_same, warm_up
from lightning_specdec.bench.results import ResultsWriter
from lightning_specdec.bench.runner import no_collection
from lightning_specdec.bench.subject import Subject
from lightning_specdec.bench.ways import Prepared, window_of

log = logging.getLogger(__name__)

_FACTS = ("target_sha256", "draft_sha256", "dtype")
_BY_PAIR = ("pairs", "prompts", "calls", "alpha", "alpha_at", "outside", "failed_pairs")
"""What the manifest says of each pair, once it is known."""


class Progress:
    """Told how a benchmark goes; this one keeps it to itself."""

    def plan(self, num_runs: int, *, pairs_left: int) -> None:
        """So many runs of the next pair are to come, and so many pairs behind it."""

    def say(self, text: str) -> None:
        """What is being done now."""

    def warn(self, text: str) -> None:
        """What the user should know, and nothing that ends the run."""
        log.warning("%s", text)

    def advance(self, num_runs: int) -> None:
        """So many runs have ended, or will not be tried."""


def open_results(directory: Path, config: BenchConfig, manifest: dict[str, Any]) -> ResultsWriter:
    """The results of a config, new or begun.

    Args:
        manifest: what `manifest.manifest` says.

    Raises:
        ValueError: the directory holds those of another config, machine or format.
    """
    whole = {"name": config.name, **manifest, "config": config.to_dict(), "config_hash": config_hash(config)}
    return ResultsWriter.open(directory, {**whole, **{name: {} for name in _BY_PAIR}})


def run(
    config: BenchConfig,
    results: ResultsWriter,
    load: Callable[[str, Mapping[str, str]], Subject],
    progress: Progress | None = None,
) -> None:
    """Run what is missing of a benchmark.

    Args:
        load: gives a pair by its name; one is held at a time. Drafts that failed before come with the reason, which
            takes their place: they are not loaded again.

    Raises:
        ValueError: the only pair cannot be loaded. One of several is left out, and the manifest keeps why.
        OSError: nothing more can be written; what was finished stays.
        KeyboardInterrupt: Ctrl-C; the same.
    """
    told = progress or Progress()
    for number, name in enumerate(config.pairs, start=1):
        told.say(f"{name}: loading")
        try:
            subject = load(name, results.failed_drafts(name))
        except FAILURES as error:
            why = in_one_line(error)
            if len(config.pairs) == 1:
                raise ValueError(why) from error
            _note(results, name, why)
            told.warn(f"failed: {name}: {why}")
            continue
        _note(results, name, None)
        if name in (known := results.results.manifest["pairs"]):
            subject.recall(known[name])
        groups = cells(config, subject)
        missing = [cell for group in groups for cell in group if _missing(cell, config, results)]
        if missing and (changed := results.resume()):
            told.warn(changed)
        _describe(subject, config, results, told, any_missing=bool(missing))
        told.plan(sum(len(_missing(cell, config, results)) for cell in missing), pairs_left=len(config.pairs) - number)
        for group in groups:
            with no_collection():
                _run_group(group, subject, config, results, told)
        del subject


def _note(results: ResultsWriter, pair: str, why: str | None) -> None:
    """Keep why a pair cannot be loaded, or that it can."""
    known = results.results.manifest.get("failed_pairs", {})
    now = {name: each for name, each in known.items() if name != pair} | ({} if why is None else {pair: why})
    if now != known:
        results.update(failed_pairs=now)


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
        before = known["pairs"][name]
        changed = [key for key in _FACTS if not _alike(before[key], subject.facts[key])]
        if changed or known["prompts"][name] != prompts:
            what = changed[0] if changed else "prompts"
            raise ValueError(
                f"{results.results.directory} was measured with another {what} of {name}: give the config another name"
            )
        if before != subject.facts:  # of a draft that could not be made ready before, and has lost its rows since
            results.update(calls={key: each for key, each in known["calls"].items() if key != name})
            _set(results, name, pairs=subject.facts)
    else:
        _set(results, name, pairs=subject.facts, prompts=prompts)
    if name in known["calls"] or not any_missing:
        return
    told.say(f"{name}: timing single calls")
    try:
        calls = timed_calls(subject, config)
    except FAILURES as error:  # a context too short for them, say: there will be no prediction, and it says why
        calls = {"draft_step_seconds": {}, "error": in_one_line(error)}
    told.say(f"{name}: decoding other prompts")
    found = alphas(subject, config)
    _set(results, name, calls=calls, alpha=by_draft(found, config), alpha_at=found)


def _alike(one: Any, other: Any) -> bool:
    """Whether two facts are the same, as far as both are known: a draft that could not be made ready has none."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    return one is None or other is None or bool(one == other)


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
        told.say(f"{place(cell)}: making {cell.label} ready")
        try:
            setting = None if cell.way in OURS else _setting(cell, subject, config, results)
            prepared[cell.hash] = prepare(cell, subject, config, setting=setting)
        except caught(cell) as error:
            results.append(failure(cell, subject, config, Prepared(), repeat=missing[0], error=error))
            told.advance(len(missing))
    for repeat in range(config.repeats):
        for cell in group:
            missing = _missing(cell, config, results)
            if repeat not in missing:
                continue
            told.say(f"{place(cell)}: {cell.label}")
            ready = prepared[cell.hash]
            try:
                row = measure(cell, subject, config, ready, repeat=repeat)
            except caught(cell) as error:
                results.append(failure(cell, subject, config, ready, repeat=repeat, error=error))
                told.advance(len(missing))
                continue
            if should_be_same(cell):
                expected = vars(row) if cell is standard else results.row(standard.hash, repeat) or {}
                known = expected.get("tokens_sha256")
                row.same_tokens = None if known is None else known == row.tokens_sha256
            results.append(row)
            told.advance(1)


def place(cell: Cell) -> str:
    """What a cell is compared within, in a few words."""
    return f"{cell.pair}, {cell.domain}, {cell.temperature:g}, batch {cell.batch_size}"


def caught(cell: Cell) -> tuple[type[BaseException], ...]:
    """What a way may fail by, and the benchmark goes on."""
    return FAILURES if cell.way in OURS else OUTSIDE_FAILURES


def prepare(cell: Cell, subject: Subject, config: BenchConfig, *, setting: Mapping[str, Any] | None = None) -> Prepared:
    """A cell that is ready to be timed: warm, with its window or its setting.

    Args:
        setting: of one of transformers' ways; the best is found where it is None.

    Raises:
        ValueError, RuntimeError, MemoryError, and whatever transformers raises: it cannot decode so.
    """
    if setting is None and cell.way not in OURS:
        setting = best_setting(cell, subject, config)["setting"]
    return warm_up(cell, subject, config, Prepared(window_of(cell, subject), setting))


def _setting(cell: Cell, subject: Subject, config: BenchConfig, results: ResultsWriter) -> dict[str, Any]:
    """The best setting of one of transformers' ways, as it was found when it was first wanted."""
    known = results.results.manifest["outside"].get(cell.pair, [])
    if (setting := recorded_setting(cell, known)) is not None:
        return setting
    found = best_setting(cell, subject, config)
    _set(results, cell.pair, outside=[*known, found])
    return dict(found["setting"])


def recorded_setting(cell: Cell, known: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What was found for a cell, among what the manifest says of its pair; None where nothing was."""
    names = ("way", "draft", "domain", "temperature", "batch_size")
    found = (each["setting"] for each in known if all(each[name] == getattr(cell, name) for name in names))
    return next(map(dict, found), None)
