"""A whole benchmark: the facts of each pair first, then its cases in turn; each finished row is on the disk before the
next run. A run that was stopped, however it was, resumes with what is missing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.costs import alphas, timed_calls
from lightning_specdec.bench.huggingface import best_setting, where
from lightning_specdec.bench.measure import FAILURES, Case, in_one_line, measure
from lightning_specdec.bench.pairs import BenchPair
from lightning_specdec.bench.results import Results, ResultsWriter
from lightning_specdec.bench.rows import HUGGING_FACE, SPECULATIVE, Comparison, ResultRow
from lightning_specdec.decoding.windows import window_from_dict

log = logging.getLogger(__name__)
_FACTS = ("target_sha256", "draft_sha256", "dtype")
_BY_PAIR = ("pairs", "prompts", "calls", "alpha_at", "huggingface", "failed_pairs")
"""What the manifest says of each pair, once it is known."""
Load = Callable[[str], BenchPair]


def open_results(directory: Path, config: BenchConfig, manifest: Mapping[str, Any]) -> ResultsWriter:
    """The results of a config, new or begun.

    Args:
        manifest: what `manifest.manifest` says.

    Raises:
        ValueError: the directory holds those of another config, machine or format.
    """
    whole = {"name": config.name, **manifest, "config": config.to_dict(), **{name: {} for name in _BY_PAIR}}
    return ResultsWriter.open(directory, whole)


def run(config: BenchConfig, results: ResultsWriter, load: Load, say: Callable[[str], None] = log.debug) -> None:
    """Run what is missing of a benchmark.

    Args:
        load: gives a pair by its name; one is held at a time.
        say: told what is being done.

    Raises:
        ValueError: the only pair cannot be loaded. One of several is left out, and the manifest keeps why.
        OSError: nothing more can be written; what was finished stays.
        KeyboardInterrupt: Ctrl-C; the same.
    """
    for name in config.pairs:
        say(f"{name}: loading")
        failed = dict(results.manifest["failed_pairs"])
        failed.pop(name, None)
        try:
            pair = load(name)
        except FAILURES as error:
            if len(config.pairs) == 1:
                raise
            failed[name] = in_one_line(error)
            log.warning("failed: %s: %s", name, failed[name])
        if failed != results.manifest["failed_pairs"]:
            results.update(failed_pairs=failed)
        if name in failed:
            continue
        groups = pair.cases(config)
        num_missing = sum(len(_missing(case, config, results)) for group in groups for case in group)
        if num_missing and (changed := results.resume()):
            log.warning("%s", changed)
        _describe(pair, config, results, say, measuring=num_missing > 0)
        done, began = 0, time.monotonic()

        def prepare(case: Case, pair: BenchPair = pair) -> Case:
            say(f"making {place(case)} ready")
            return _with_setting(case, pair, results)

        for group in groups:
            missing = [case for case in group if _missing(case, config, results)]
            options: dict[str, Any] = {"repeats": config.repeats, "warmup": config.warmup, "prepare": prepare}
            for row in measure(group, known=results.known, **options) if missing else ():
                results.append(row)
                done += 1
                left = (time.monotonic() - began) / done * (num_missing - done)
                say(f"{name}: {done} of {num_missing} runs, {left:.0f} s left")
        del pair


def place(case: Case) -> str:
    """What a case is and what it is compared within, in a few words."""
    return f"{case.pair}, {case.domain}, {case.config.temperature:g}, batch {case.batch_size}: {case.row(0).label}"


def _missing(case: Case, config: BenchConfig, results: ResultsWriter) -> list[int]:
    """The repeats of a case that are still to be run; none of one that has failed."""
    if case.cell in results.failed:
        return []
    return [repeat for repeat in range(config.repeats) if (case.cell, repeat) not in results.known]


def _describe(
    pair: BenchPair, config: BenchConfig, results: ResultsWriter, say: Callable[[str], None], *, measuring: bool
) -> None:
    """Say in the manifest what the pair is, what its calls take, and how often its drafts are accepted."""
    known, name = results.manifest, pair.name
    prompts = {domain: {each.id: list(each.tokens) for each in several} for domain, several in pair.prompts.items()}
    if name in known["pairs"]:
        changed = [fact for fact in _FACTS if not _alike(known["pairs"][name][fact], pair.facts[fact])]
        if changed or known["prompts"][name] != prompts:
            what = changed[0] if changed else "prompts"
            raise ValueError(
                f"{results.directory} was measured with another {what} of {name}: give the config another name"
            )
    else:
        _set(results, name, pairs=pair.facts, prompts=prompts)
    if name in known["calls"] or not measuring:
        return
    say(f"{name}: timing single calls")
    try:
        calls = timed_calls(pair, config)
    except FAILURES as error:  # a context too short for them, say: there will be no prediction, and it says why
        calls = {"draft_step_seconds": {}, "error": in_one_line(error)}
    say(f"{name}: decoding other prompts")
    _set(results, name, calls=calls, alpha_at=alphas(pair, config))


def _alike(one: Any, other: Any) -> bool:
    """Whether two facts are the same, as far as both are known: a draft that could not be loaded has none."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    return one is None or other is None or bool(one == other)


def _set(results: ResultsWriter, pair: str, **entries: Any) -> None:
    results.update(**{name: {**results.manifest[name], pair: value} for name, value in entries.items()})


def _with_setting(case: Case, pair: BenchPair, results: ResultsWriter | None = None) -> Case:
    """A case that is ready; a method of Hugging Face with the setting that was found for it first."""
    if case.method not in HUGGING_FACE:
        return case.prepared()
    known = [] if results is None else results.manifest["huggingface"].get(case.pair, [])
    place = where(case)
    for each in known:
        if all(each[name] == value for name, value in place.items()):
            return replace(case, setting=each["setting"])
    found = best_setting(case, pair.others.get(case.domain, ()))
    if results is not None:
        _set(results, case.pair, huggingface=[*known, found])
    return replace(case, setting=found["setting"])


def compare(config: BenchConfig, pair: BenchPair, names: Sequence[str]) -> Iterator[tuple[list[Case], list[ResultRow]]]:
    """Two cases against each other in every group of the matrix, without keeping results: their rows, which are fewer
    where one fails or Ctrl-C comes.

    Args:
        names: of the two: a method, a draft, or DRAFT:WINDOW; the first window and rule of the config otherwise.

    Raises:
        ValueError: nothing has that name.
        KeyboardInterrupt: Ctrl-C, behind the rows of what was finished.
    """
    chosen = [[_find(name, group, config, pair) for name in names] for group in pair.cases(config)]
    for both in chosen:
        if both[0] == both[1]:
            raise ValueError(f"{names[0]!r} and {names[1]!r} are the same: compare two that differ")
    for both in chosen:
        rows: list[ResultRow] = []
        try:
            for row in measure(
                both, repeats=config.repeats, warmup=config.warmup, prepare=lambda case: _with_setting(case, pair)
            ):
                rows.append(row)
        except KeyboardInterrupt:
            yield both, rows
            raise
        yield both, rows


def ratio(first: Case, second: Case, rows: Sequence[ResultRow]) -> Comparison:
    """How many times as fast the first case is: its comparison with the second in standard decoding's place."""
    done = [[row for row in rows if row.cell == case.cell and row.error is None] for case in (first, second)]
    both = {row.repeat: row.tokens_sha256 for row in done[1]}
    one = [replace(row, same_tokens=row.tokens_sha256 == both[row.repeat]) for row in done[0] if row.repeat in both]
    failed = next((f"{row.label}: {row.error}" for row in rows if row.error is not None), None)
    case = replace(first.row(0), method=SPECULATIVE, draft=first.draft or first.method)
    return Comparison(case, tuple(one), tuple(done[1]), failed)


def _find(name: str, group: Sequence[Case], config: BenchConfig, pair: BenchPair) -> Case:
    wanted, _, window = name.partition(":")
    number: int | str = int(window) if window.isdecimal() else window or config.num_draft_tokens[0]
    for case in group:
        settings = (case.draft, case.config.num_draft_tokens, case.config.rule)
        if case.method == SPECULATIVE and settings == (wanted, number, config.rules[0]):
            return case
        if case.method == wanted != SPECULATIVE and not window:
            return case
    methods = dict.fromkeys(case.method for case in group if case.method != SPECULATIVE)
    raise ValueError(
        f"{name!r} is nothing that this config measures: give one of {', '.join(pair.drafts)}, with a window of "
        f"{', '.join(map(str, config.num_draft_tokens))} as NAME:WINDOW, or one of {', '.join(methods)}"
    )


def again(results: Results, row: ResultRow, config: BenchConfig, pair: BenchPair) -> ResultRow:
    """A stored row measured again, with the window and the setting that it was measured with.

    Raises:
        ValueError: the models, the prompts or the config are not what they were.
    """
    case = next((each for group in pair.cases(config) for each in group if each.cell == row.cell), None)
    if case is None:
        facts = results.manifest["pairs"].get(row.pair, {})
        changed = [fact for fact in _FACTS if facts.get(fact) != pair.facts[fact]]
        what = " and ".join(changed) or "what it names"
        raise ValueError(f"the row cannot be repeated: {what} is not what it was")
    try:
        if row.setting is not None:
            case = replace(case, setting=row.setting)
        elif row.window is not None:
            case = replace(case, config=case.config.changed(num_draft_tokens=window_from_dict(row.window)))
        else:
            case = _with_setting(case, pair)
        return case.run(row.repeat)[0]
    except case.failures as error:
        return case.failed(row.repeat, error)
