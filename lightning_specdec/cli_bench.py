"""The verb `bench`: a matrix measured and kept, a row of it measured again, two drafts against each other.

Takes its parsed options and gives an exit code: 0, 1 where a cell failed or gave other tokens, 130 by Ctrl-C.
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_specdec.bench.compare import Comparison, compare
from lightning_specdec.bench.config import BenchConfig, read_config
from lightning_specdec.bench.config_entries import OURS
from lightning_specdec.bench.failures import FAILURES, in_one_line
from lightning_specdec.bench.report.analysis import rounds
from lightning_specdec.bench.results import ROWS, Results, StoredRow
from lightning_specdec.bench.run import open_results, run
from lightning_specdec.bench.subject import Subject
from lightning_specdec.cli_bench_pairs import check_pairs, load_subject
from lightning_specdec.cli_bench_repeat import repeat
from lightning_specdec.cli_bench_shown import Bar, show, show_comparisons
from lightning_specdec.cli_common import counted, find_device, progress, set_up_logs
from lightning_specdec.cli_parser import UsageError
from lightning_specdec.manifest import manifest
from lightning_specdec.terminal import say

log = logging.getLogger("lightning_specdec")


def bench(options: Namespace) -> int:
    """Measure what the options say."""
    set_up_logs(options.log_level, json_lines=options.log_json)
    if options.repeat is not None:
        if options.config or options.compare:
            raise UsageError("--repeat takes all from the results: drop --config and --compare")
        return repeat(options.repeat, options.format)
    if not options.config:
        raise UsageError("say what is to be measured: --config FILE, as configs/bench/rnn.yaml; or --repeat ROW")
    configs = [read_config(path) for path in options.config]
    if options.name is not None:
        if len(configs) > 1:
            raise UsageError(f"--name is of one config, got {len(configs)}: run them one by one")
        configs = [BenchConfig.from_dict({**configs[0].to_dict(), "name": options.name})]
    names = [config.name for config in configs]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"two configs are called {twice[0]}: give each a name of its own, by `name:` in its YAML")
    for config in configs:
        check_pairs(config)
    if options.compare is not None:
        return _compare(configs, options.compare, options.format)
    return _run(configs, options)


def _run(configs: Sequence[BenchConfig], options: Namespace) -> int:
    several: list[Results] = []
    bar, interrupted, own_threads = Bar(), False, torch.get_num_threads()
    refused: list[str] = []
    try:
        for config in configs:
            torch.set_num_threads(config.threads or own_threads)
            found = manifest(options=vars(options), device=find_device(config.device))
            directory = Path(options.output).expanduser() / config.name
            try:
                with open_results(directory, config, found) as results:
                    several.append(results.results)
                    run(config, results, partial(_load, config), bar)
            except ValueError as error:
                if len(configs) == 1:
                    raise
                refused.append(f"{config.name}: {in_one_line(error)}")
                bar.warn(refused[-1])
            except OSError as error:
                if not _is_of(error, directory):
                    raise
                raise ValueError(
                    f"{error.filename} cannot be written ({error.strerror or error}): what is finished "
                    "stays, make room there or give another --output, and the same command goes on"
                ) from error
    except KeyboardInterrupt:
        interrupted = True
    finally:
        bar.close()
    say(show(several, options.format), flush=True)
    if interrupted:
        say("interrupted: what is finished stays, and the same command goes on from there", file=sys.stderr)
        return 130
    for each in several:
        if failed := len({row["cell"] for row in each.rows if row["error"] is not None}):
            log.warning(
                f"{counted(failed, 'cell')} of {each.directory} failed, and what failed is not tried again: to try it, "
                f"remove the lines that have an error from {each.directory / ROWS}, or give another --name"
            )
        progress(f"kept in {each.directory}: `lightning_specdec report {each.directory}` says what it comes to")
    wrong = [(each, row) for each in several for row in each.rows if _is_wrong(row, each.manifest)]
    if refused:
        return 2
    return 1 if wrong or any(each.manifest.get("failed_pairs") for each in several) else 0


def _load(config: BenchConfig, name: str, failed: Mapping[str, str]) -> Subject:
    return load_subject(name, config, failed=failed)


def _is_wrong(row: StoredRow, made: dict[str, Any]) -> bool:
    """Whether a row failed, or gave tokens that only a mistake of ours could give."""
    if row["error"] is not None:
        return True
    exact = row["way"] in OURS and not rounds(made["pairs"][row["pair"]]["dtype"])
    return exact and row["same_tokens"] is False


def _is_of(error: OSError, directory: Path) -> bool:
    """Whether an error is over a directory of results: over what lies in it, or over what it lies in."""
    path = Path(str(error.filename))
    return path.is_relative_to(directory) or path in directory.parents


def _compare(configs: Sequence[BenchConfig], names: Sequence[str], form: str) -> int:
    """Set two ways against each other in every group of every pair."""
    if len(names) != 2:
        raise UsageError(f"--compare takes two names, as --compare model:4 ngram:4, got {len(names)}")
    bar, interrupted, own_threads = Bar(), False, torch.get_num_threads()
    found: list[Comparison] = []
    failed: list[str] = []
    unloaded: list[str] = []
    try:
        for config in configs:
            torch.set_num_threads(config.threads or own_threads)
            for name in config.pairs:
                bar.say(f"{name}: loading")
                try:
                    subject = load_subject(name, replace(config, outside=_needed(config, names)))
                    for each in compare(config, subject, *names):
                        if isinstance(each, Comparison):
                            found.append(each)
                        else:
                            failed.append(str(each))
                        bar.say(f"{name}: {len(found)} compared")
                except FAILURES as error:
                    unloaded.append(f"{name}: {in_one_line(error)}")
    except KeyboardInterrupt:
        interrupted = True
    finally:
        bar.close()
    if unloaded and not (found or failed or interrupted):
        raise ValueError("; ".join(unloaded))
    if found or form == "json":
        say(show_comparisons(found, form), flush=True)
    for line in (*failed, *unloaded):
        log.warning(line)
    if interrupted:
        what = "what both have finished is compared" if found else "nothing was compared"
        say(f"interrupted: {what}", file=sys.stderr)
        return 130
    return 1 if failed or unloaded else 0


def _needed(config: BenchConfig, names: Sequence[str]) -> tuple[str, ...]:
    """Transformers' ways that are compared."""
    return tuple(way for way in config.outside if way in names)
