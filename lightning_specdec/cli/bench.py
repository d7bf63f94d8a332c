"""The verb `bench`: measure a matrix of settings and keep the results."""

from __future__ import annotations

import errno
import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_specdec.cli.common import counted, log
from lightning_specdec.cli.options import Parser, UsageError, chosen
from lightning_specdec.config.activity import show_activity
from lightning_specdec.config.files import check_parent
from lightning_specdec.config.models import DEFAULT_DEVICE
from lightning_specdec.config.pairs import nearest_config, shipped_config
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.config.terminal import say

if TYPE_CHECKING:
    from lightning_specdec.bench.config import BenchConfig
    from lightning_specdec.bench.records import Comparison
    from lightning_specdec.bench.results import Results

SUMMARY = "measure a matrix of drafts, prompts, and settings, and keep the results"
EXAMPLES = """\
lightning_specdec bench --config configs/bench/rnn.yaml
lightning_specdec bench --config configs/bench/rnn.yaml --format markdown
The same command resumes a run that was stopped."""

INEXACT_DTYPES = ("bfloat16", "float16")
"""Dtypes whose rounding can resolve near-ties differently, so that other tokens are no failure."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Settings):
    """What is measured and where the results are kept."""

    config: tuple[str, ...] = setting((), "YAML configs to measure, in turn", metavar="FILE ...")
    output: str = setting("results", "parent directory of the results", metavar="DIR")
    name: str | None = setting(None, "name of the results, instead of the config's")
    format: str = setting(
        "text", "format of the printed table", choices=("text", "markdown", "csv", "json")
    )


def add_arguments(parser: Parser) -> None:
    parser.add_settings("benchmark", BenchSettings)


def run(options: Namespace) -> int:
    """Measure the configs; returns 1 if a case failed or produced other tokens."""
    settings = chosen(options, BenchSettings)
    if not settings.config:
        raise UsageError(
            "--config is missing: give a YAML file, for example configs/bench/rnn.yaml"
        )
    check_parent(Path(settings.output).expanduser())
    configs = _read_configs(settings)

    all_results: list[Results] = []
    try:
        for config in configs:
            _measure(config, settings, all_results)
    except KeyboardInterrupt:
        _show(all_results, settings.format)
        say("interrupted: what is finished stays, and the same command resumes", file=sys.stderr)
        return 130
    _show(all_results, settings.format)

    # A list, so that every directory's message is shown.
    failures = [_has_failures(results) for results in all_results]
    return 1 if any(failures) else 0


def _read_configs(settings: BenchSettings) -> list[BenchConfig]:
    """Read and check all configs before the first one is measured."""
    from lightning_specdec.bench.config import read_config
    from lightning_specdec.bench.run import check_pairs, with_engine_of_pairs

    changes = {} if settings.name is None else {"name": settings.name}
    configs: dict[str, BenchConfig] = {}
    for path in settings.config:
        config_path = shipped_config(path)
        if not Path(config_path).expanduser().exists():
            reason = f"{os.strerror(errno.ENOENT)}{nearest_config(path)}"
            raise FileNotFoundError(errno.ENOENT, reason, path)
        config = read_config(config_path, **changes)
        if config.name in configs:
            raise ValueError(
                f"two configs are called {config.name}: give each its own name, "
                "by `name:` in its YAML or --name"
            )
        configs[config.name] = config

    completed = []
    for path, config in zip(settings.config, configs.values(), strict=True):
        try:
            completed_config = with_engine_of_pairs(config)
            check_pairs(completed_config)
        except (ValueError, FileNotFoundError) as error:
            if isinstance(error, OSError) and error.strerror:
                raise  # It names its file.
            raise ValueError(f"{path}: {error}") from error
        completed.append(completed_config)
    return completed


def _measure(config: BenchConfig, settings: BenchSettings, all_results: list[Results]) -> None:
    """Run the missing cases of a config, and append its results to `all_results`."""
    import torch

    from lightning_specdec.bench.manifest import manifest
    from lightning_specdec.bench.run import load_bench_pair, open_results, run
    from lightning_specdec.checkpoints.loading import find_device

    directory = Path(settings.output).expanduser() / config.name
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(config.threads or previous_threads)
    try:
        device = find_device(config.device or DEFAULT_DEVICE)
        run_manifest = manifest(options=settings.to_dict(), device=device)
        with open_results(directory, config, run_manifest) as results:
            # Appended before it is measured: an interrupted run shows what is finished.
            all_results.append(results)
            load_pair = partial(load_bench_pair, config=config)
            run(config, results, load_pair, _show_step)
    except OSError as error:
        raise ValueError(
            f"{error.filename or directory} cannot be written ({error.strerror or error}): "
            "what is finished stays; make room or give another --output, and the same command "
            "resumes"
        ) from error
    finally:
        torch.set_num_threads(previous_threads)


def _show_step(text: str) -> None:
    """Show what a benchmark does; it is never silent for longer than the library reports."""
    from lightning_specdec.bench.run_progress import REPORT_SECONDS

    log.debug("%s", text)
    show_activity(text, report_seconds=REPORT_SECONDS)


def _show(all_results: Sequence[Results], table_format: str) -> None:
    """Print the results as tables, or as one document."""
    from lightning_specdec.bench.manifest import made_on
    from lightning_specdec.bench.records import comparisons
    from lightning_specdec.bench.table import comparison_table

    if table_format == "json":
        documents = []
        for results in all_results:
            document = {
                "results": str(results.directory),
                "manifest": results.manifest,
                "cells": [cell.summary() for cell in comparisons(results.rows)],
            }
            documents.append(document)
        say(json.dumps(documents))
    elif table_format == "csv":
        cells = []
        for results in all_results:
            cells += comparisons(results.rows)
        say(comparison_table(cells, "csv"))
    else:
        for results in all_results:
            cells = comparisons(results.rows)
            table = comparison_table(cells, table_format, remark=_verdict_words)
            say(table if cells else "nothing was measured")
            say(f"\n{results.manifest['name']}: {made_on(results.manifest)}")


def _verdict_words(cell: Comparison) -> str:
    """The verdict on a case; its interval stands in the table."""
    from lightning_specdec.bench.records import STANDARD

    if cell.case.method == STANDARD or cell.error is not None:
        return ""
    return cell.verdict.word


def _has_failures(results: Results) -> bool:
    """Whether a pair or a case failed, or produced tokens that rounding does not explain.

    Reports failed cases and where the results are.
    """
    from lightning_specdec.bench.records import OURS, comparisons

    directory = results.directory
    cells = comparisons(results.rows)
    num_failed = sum(cell.error is not None for cell in cells)
    if num_failed:
        log.warning(
            "%s of %s failed and will not be tried again: to try it, remove the lines with an "
            "error from rows.jsonl",
            counted(num_failed, "case"),
            directory,
        )
    log.info(
        "kept in %s: `lightning_specdec report %s` summarizes the results", directory, directory
    )
    if num_failed or results.manifest["failed_pairs"]:
        return True

    for cell in cells:
        dtype = results.manifest["pairs"][cell.case.pair]["dtype"]
        is_exact = dtype not in INEXACT_DTYPES
        if is_exact and cell.case.method in OURS and cell.same_tokens is False:
            return True
    return False
