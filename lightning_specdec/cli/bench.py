"""The verb `bench`: a matrix measured and kept."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_specdec.cli.common import counted, log, progress
from lightning_specdec.cli.options import Parser, UsageError, chosen
from lightning_specdec.config.pairs import shipped_config
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.config.terminal import say

if TYPE_CHECKING:
    from lightning_specdec.bench.config import BenchConfig
    from lightning_specdec.bench.results import Results

SUMMARY = "measure a matrix of drafts, windows, prompts and settings, and keep the results"
EXAMPLES = """\
lightning_specdec bench --config configs/bench/rnn.yaml
lightning_specdec bench --config configs/bench/rnn.yaml --format markdown
The same command resumes a run that was stopped."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Settings):
    """What is measured and where it is kept."""

    config: tuple[str, ...] = setting((), "YAML configs to measure, in turn", metavar="FILE ...")
    output: str = setting("results", "parent directory of the results", metavar="DIR")
    name: str | None = setting(None, "name of the results, instead of the config's")
    format: str = setting(
        "text", "format of the printed table", choices=("text", "markdown", "csv", "json")
    )


def add_arguments(parser: Parser) -> None:
    parser.add_settings("benchmark", BenchSettings)


def run(options: Namespace) -> int:
    """Measure what the flags say; 1 where a case failed or gave other tokens."""
    settings = chosen(options, BenchSettings)
    if not settings.config:
        raise UsageError(
            "--config is missing: give a YAML file, for example configs/bench/rnn.yaml"
        )
    from lightning_specdec.bench.config import read_config
    from lightning_specdec.bench.run import check_pairs

    changes = {} if settings.name is None else {"name": settings.name}
    configs = [read_config(shipped_config(path), **changes) for path in settings.config]
    names = [config.name for config in configs]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(
            f"two configs are called {twice[0]}: give each its own name, by `name:` in its YAML or --name"
        )
    for config in configs:
        check_pairs(config)
    several: list[Results] = []
    try:
        for config in configs:
            _measure(config, settings, several)
    except KeyboardInterrupt:
        _show(several, settings.format)
        say("interrupted: what is finished stays, and the same command resumes", file=sys.stderr)
        return 130
    _show(several, settings.format)
    return int(any([_wrong(each) for each in several]))


def _measure(config: BenchConfig, settings: BenchSettings, several: list[Results]) -> None:
    """Run what is missing of a config, and add its results to the others'."""
    import torch

    from lightning_specdec.bench.manifest import manifest
    from lightning_specdec.bench.run import load_bench_pair, open_results, run
    from lightning_specdec.checkpoints.loading import find_device

    directory, before = Path(settings.output).expanduser() / config.name, torch.get_num_threads()
    torch.set_num_threads(config.threads or before)
    try:
        made = manifest(options=settings.to_dict(), device=find_device(config.device))
        with open_results(directory, config, made) as results:
            several.append(results)
            run(
                config,
                results,
                partial(load_bench_pair, config=config),
                partial(progress, often=True),
            )
    except OSError as error:
        raise ValueError(
            f"{error.filename or directory} cannot be written ({error.strerror or error}): what is finished stays; "
            "make room or give another --output, and the same command resumes"
        ) from error
    finally:
        torch.set_num_threads(before)


def _show(several: Sequence[Results], form: str) -> None:
    from lightning_specdec.bench.manifest import made_on
    from lightning_specdec.bench.rows import comparisons
    from lightning_specdec.bench.table import comparison_table

    found = [(each, comparisons(each.rows)) for each in several]
    if form == "json":
        documents = [
            {
                "results": str(each.directory),
                "manifest": each.manifest,
                "cells": [one.summary() for one in cells],
            }
            for each, cells in found
        ]
        say(json.dumps(documents))
    elif form == "csv":
        say(comparison_table([one for _, cells in found for one in cells], "csv"))
    else:
        for each, cells in found:
            say(comparison_table(cells, form) if cells else "nothing was measured")
            say(f"\n{each.manifest['name']}: {made_on(each.manifest)}")


def _wrong(results: Results) -> bool:
    """Whether a pair or a case failed, or a case gave other tokens where rounding does not explain it; says where."""
    from lightning_specdec.bench.rows import OURS, comparisons

    cells, directory = comparisons(results.rows), results.directory
    failed = sum(each.error is not None for each in cells)
    if failed:
        told = "%s of %s failed and will not be tried again: to try it, remove the lines with an error from rows.jsonl"
        log.warning(told, counted(failed, "case"), directory)
    progress(f"kept in {directory}: `lightning_specdec report {directory}` says what it comes to")
    exact = {
        name
        for name, pair in results.manifest["pairs"].items()
        if pair["dtype"] not in ("bfloat16", "float16")
    }
    other = (each for each in cells if each.case.pair in exact and each.case.method in OURS)
    return bool(failed or results.manifest["failed_pairs"]) or any(
        each.same_tokens is False for each in other
    )
