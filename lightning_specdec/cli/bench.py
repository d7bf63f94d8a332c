"""The verb `bench`: a matrix measured and kept, a row of it measured again, two methods against each other."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_specdec.cli.common import counted, find_device, log, progress, set_up_logs
from lightning_specdec.cli.options import Parser, UsageError, chosen
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.config.terminal import say, visible

if TYPE_CHECKING:
    from lightning_specdec.bench.config import BenchConfig
    from lightning_specdec.bench.results import Results

SUMMARY = "measure a matrix of drafts, windows, prompts and settings, and keep the results"
EXAMPLES = """\
lightning_specdec bench --config configs/bench/rnn.yaml
lightning_specdec bench --config configs/bench/rnn.yaml --format markdown
lightning_specdec bench --config configs/bench/rnn.yaml --compare rnn:4 ngram:4
lightning_specdec bench --repeat results/rnn:12
The same command resumes a run that was stopped."""
QUIET_SECONDS = 30.0
"""Between two lines of progress where stderr is no terminal."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Settings):
    """What is measured and where it is kept."""

    config: tuple[str, ...] = setting((), "YAML of what is measured; several in turn", metavar="FILE ...")
    output: str = setting("results", "directory of the directories of results", metavar="DIR")
    name: str | None = setting(None, "name of the results, instead of the config's")
    repeat: str | None = setting(
        None, "measure one row again, as DIR:NUMBER or DIR:CELL, and compare its tokens", metavar="ROW"
    )
    compare: tuple[str, ...] = setting(
        (), "two drafts or methods of the config on the same prompts, as model:4 ngram:8", metavar="NAME ..."
    )
    format: str = setting("text", "how the table is printed", choices=("text", "markdown", "csv", "json"))


def add_arguments(parser: Parser) -> None:
    """The flags of the verb."""
    parser.add_settings("benchmark", BenchSettings)


def run(options: Namespace) -> int:
    """Measure what the flags say; 1 where a case failed or gave other tokens."""
    set_up_logs(options)
    settings = chosen(options, BenchSettings)
    if settings.repeat is not None:
        if settings.config or settings.compare:
            raise UsageError("--repeat takes everything from the results: drop --config and --compare")
        return _repeat(settings.repeat, settings.format)
    if not settings.config:
        raise UsageError("say what to measure: --config FILE, as configs/bench/rnn.yaml; or --repeat ROW")
    if settings.name is not None and len(settings.config) > 1:
        raise UsageError(f"--name is for one config, got {len(settings.config)}: run them one by one")
    if settings.compare and len(settings.compare) != 2:
        raise UsageError(f"--compare takes two names, as model:4 ngram:4, got {len(settings.compare)}")
    from lightning_specdec.bench.config import read_config
    from lightning_specdec.bench.pairs import check_pairs

    changes = {} if settings.name is None else {"name": settings.name}
    configs = [read_config(path, **changes) for path in settings.config]
    names = [config.name for config in configs]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"two configs are called {twice[0]}: give each its own name, by `name:` in its YAML")
    for config in configs:
        check_pairs(config)
    return _compare(configs, settings) if settings.compare else _measure(configs, settings)


def _measure(configs: Sequence[BenchConfig], settings: BenchSettings) -> int:
    """Run what is missing of each config, and show the tables."""
    from lightning_specdec.bench.manifest import made_on, manifest
    from lightning_specdec.bench.pairs import load_bench_pair
    from lightning_specdec.bench.results import ROWS
    from lightning_specdec.bench.rows import OURS, comparisons
    from lightning_specdec.bench.run import open_results, run
    from lightning_specdec.bench.table import comparison_table

    several: list[Results] = []
    refused, interrupted = 0, False
    try:
        for config in configs:
            with _threads(config.threads), _progress() as show:
                made = manifest(options=settings.to_dict(), device=find_device(config.device))
                directory = Path(settings.output).expanduser() / config.name
                try:
                    with open_results(directory, config, made) as results:
                        several.append(results)
                        run(config, results, partial(load_bench_pair, config=config), show)
                except ValueError as error:
                    if len(configs) == 1:
                        raise
                    refused += 1
                    log.warning("%s: %s", config.name, " ".join(str(error).split()))
                except OSError as error:
                    raise ValueError(
                        f"{error.filename or directory} cannot be written ({error.strerror or error}): what is "
                        "finished stays; make room or give another --output, and the same command resumes"
                    ) from error
    except KeyboardInterrupt:
        interrupted = True
    found = [(each, comparisons(each.rows)) for each in several]
    if settings.format == "json":
        cells = [(each, [one.summary() for one in many]) for each, many in found]
        tables = [
            json.dumps(
                [{"results": str(each.directory), "manifest": each.manifest, "cells": many} for each, many in cells]
            )
        ]
    elif settings.format == "csv":
        tables = [comparison_table([one for _, many in found for one in many], "csv")]
    else:
        tables = [
            f"{comparison_table(many, settings.format) if many else 'nothing was measured'}\n\n"
            f"{each.manifest['name']}: {made_on(each.manifest)}"
            for each, many in found
        ]
    say("\n\n".join(tables), flush=True)
    if interrupted:
        say("interrupted: what is finished stays, and the same command resumes", file=sys.stderr)
        return 130
    wrong = False
    for each, many in found:
        if failed := sum(one.error is not None for one in many):
            log.warning(
                "%s of %s failed and will not be tried again: to try it, remove the lines with an error from %s",
                counted(failed, "case"),
                each.directory,
                each.directory / ROWS,
            )
        progress(f"kept in {each.directory}: `lightning_specdec report {each.directory}` says what it comes to")
        for one in many:
            dtype = each.manifest["pairs"][one.case.pair]["dtype"]
            exact = one.case.method in OURS and dtype not in ("bfloat16", "float16")
            wrong = wrong or one.error is not None or (exact and one.same_tokens is False)
        wrong = wrong or bool(each.manifest["failed_pairs"])
    return 2 if refused else int(wrong)


def _compare(configs: Sequence[BenchConfig], settings: BenchSettings) -> int:
    """Set two cases against each other in every group of every pair; nothing is kept."""
    from lightning_specdec.bench.measure import FAILURES
    from lightning_specdec.bench.pairs import load_bench_pair
    from lightning_specdec.bench.run import compare, ratio
    from lightning_specdec.bench.table import comparison_table

    found, failed, interrupted = [], [], False
    try:
        for config in configs:
            with _threads(config.threads):
                for name in config.pairs:
                    try:
                        for (first, second), rows in compare(config, load_bench_pair(name, config), settings.compare):
                            found.append(ratio(first, second, rows))
                    except FAILURES as error:
                        if len(configs) == len(config.pairs) == 1:
                            raise
                        failed.append(f"{name}: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        interrupted = True
    found = [each for each in found if each.rows or each.error]
    if found or settings.format == "json":
        table = comparison_table(found, settings.format)
        if settings.format == "text":
            table = table.replace("walltime_speedup", "times as fast", 1)
            table += f"\n\n{settings.compare[0]} beside {settings.compare[1]}"
        say(table)
    for line in failed:
        log.warning(line)
    if interrupted:
        say("interrupted: what both have finished is compared", file=sys.stderr)
        return 130
    return int(bool(failed) or any(each.error for each in found))


def _repeat(place: str, form: str) -> int:
    """Measure a stored row again, and say whether it gives the same tokens."""
    from lightning_specdec.bench.config import BenchConfig
    from lightning_specdec.bench.pairs import load_bench_pair
    from lightning_specdec.bench.results import ROWS, read
    from lightning_specdec.bench.run import again
    from lightning_specdec.data.prompts import Prompt

    name, _, which = place.rpartition(":")
    if not name:
        raise UsageError(f"--repeat takes DIRECTORY:NUMBER, as results/rnn:12, or DIRECTORY:CELL, got {place!r}")
    results = read(Path(name).parent if Path(name).name == ROWS else name)
    found = next((row for row in results.rows if row.cell == which), None)
    if found is None and which.isdecimal() and 1 <= int(which) <= len(results.rows):
        found = results.rows[int(which) - 1]
    if found is None:
        raise ValueError(f"{results.directory} has no row {which}: it has {len(results.rows)}, counted from 1")
    if results.manifest["format"] == 1:
        raise ValueError(f"{results.directory} was measured by an earlier version: measure again to repeat its rows")
    try:
        config = BenchConfig.from_dict(results.manifest["config"])
        stored = results.manifest["prompts"][found.pair][found.domain]
        prompts = [Prompt(key, found.domain, tuple(tokens)) for key, tokens in stored.items()]
        config.pairs[found.pair]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the manifest of {results.directory} is damaged (no {error}): measure again") from error
    with _threads(config.threads):
        pair = load_bench_pair(found.pair, config, prompts={found.domain: prompts})
        now = again(results, found, config, pair)
    same = found.error is None and now.error is None and found.tokens_sha256 == now.tokens_sha256
    outcome = "the same tokens" if same else "OTHER TOKENS"
    if found.error or now.error:
        outcome = "it fails as it did" if found.error and now.error else "IT FAILS NOW" if now.error else "it succeeds"
    document: dict[str, Any] = {"cell": found.cell, "label": found.label, "repeat": found.repeat, "same_tokens": same}
    document |= {"seconds": [found.seconds, now.seconds], "errors": [found.error, now.error], "outcome": outcome}
    if form == "json":
        say(json.dumps(document))
    else:
        lines = [f"{found.pair}, {found.domain}: {found.label}, repeat {found.repeat}"]
        for when, row in (("then", found), ("now", now)):
            lines.append(f"  {when:<5} {f'{row.seconds:.4f} s' if row.error is None else f'failed: {row.error}'}")
        say("\n".join([*lines, outcome]))
    return 0 if same or (found.error and now.error) else 1


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Meanwhile, so many CPU threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What shows text on one line of stderr, drawn anew each time; where that is no terminal, now and then a line."""
    live, drawn = sys.stderr.isatty(), time.monotonic()

    def show(text: str) -> None:
        nonlocal drawn
        if live:
            sys.stderr.write(f"\r{visible(text[:150])}\x1b[K")
            sys.stderr.flush()
        elif time.monotonic() - drawn >= QUIET_SECONDS:
            drawn = time.monotonic()
            say(text, file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("") if live else None
