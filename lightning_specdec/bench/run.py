"""A whole benchmark: the cases of each pair in turn; each finished row is on the disk before the next run. A run that
was stopped resumes with what is missing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.measure import FAILURES, measure, missing_repeats
from lightning_specdec.bench.pairs import BenchPair
from lightning_specdec.bench.results import ResultsWriter
from lightning_specdec.config.terminal import one_line

log = logging.getLogger(__name__)
BY_PAIR = ("pairs", "prompts", "failed_pairs")
"""What the manifest says of each pair, once it is known."""


def open_results(directory: Path, config: BenchConfig, manifest: Mapping[str, Any]) -> ResultsWriter:
    """The results of a config, new or begun.

    Args:
        manifest: what `manifest.manifest` says.

    Raises:
        ValueError: the directory holds those of another config, machine or format.
    """
    values = {"name": config.name, **manifest, "config": config.to_dict(), **{name: {} for name in BY_PAIR}}
    return ResultsWriter.open(directory, values)


def run(
    config: BenchConfig,
    results: ResultsWriter,
    load: Callable[[str], BenchPair],
    say: Callable[[str], None] = log.debug,
) -> None:
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
        try:
            pair = load(name)
        except FAILURES as error:
            if len(config.pairs) == 1:
                raise
            results.update(failed_pairs={**results.manifest["failed_pairs"], name: one_line(error)})
            log.warning("failed: %s: %s", name, one_line(error))
            continue
        _describe(pair, results)
        groups = pair.cases(config)
        missing = [sum(len(missing_repeats(case, config.repeats, results.known)) for case in group) for group in groups]
        done, began = 0, time.monotonic()
        for group, wanted in zip(groups, missing, strict=True):
            options: dict[str, Any] = {"repeats": config.repeats, "warmup": config.warmup, "known": results.known}
            for row in measure(group, **options) if wanted else ():
                results.append(row)
                done += 1
                left = (time.monotonic() - began) / done * (sum(missing) - done)
                say(f"{name}: {done} of {sum(missing)} runs, {left:.0f} s left")
        del pair


def _describe(pair: BenchPair, results: ResultsWriter) -> None:
    """Say in the manifest what the pair is, or refuse one that is not what it was."""
    name = pair.name
    prompts = {domain: {each.id: list(each.tokens) for each in s} for domain, s in pair.prompts.items()}
    manifest = {part: dict(results.manifest[part]) for part in BY_PAIR}
    if name in manifest["pairs"]:
        known = manifest["pairs"][name]
        drafts = known["draft_sha256"]  # a draft that could not be loaded has none
        changed = [fact for fact in ("dtype", "target_sha256") if known[fact] != pair.facts[fact]]
        changed += [draft for draft, found in pair.facts["draft_sha256"].items() if drafts.get(draft, found) != found]
        if changed or manifest["prompts"][name] != prompts:
            what = [*changed, "prompts"][0]
            raise ValueError(
                f"{results.directory} was measured with another {what} of {name}: give the config another name"
            )
    manifest["pairs"].setdefault(name, pair.facts)
    manifest["prompts"].setdefault(name, prompts)
    manifest["failed_pairs"].pop(name, None)
    results.update(**manifest)
