"""The verb `bench`: a matrix measured and kept, a row of it measured again, two drafts against each other.

Takes its parsed options and gives an exit code: 0, 1 where a cell failed or gave other tokens, 130 by Ctrl-C.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_specdec.bench.compare import compare
from lightning_specdec.bench.config import BenchConfig, read_config
from lightning_specdec.bench.config_entries import OURS
from lightning_specdec.bench.matrix import cells
from lightning_specdec.bench.measure import measure
from lightning_specdec.bench.prompts import Prompt
from lightning_specdec.bench.results import ROWS, Results, Row, read
from lightning_specdec.bench.run import open_results, run
from lightning_specdec.bench.sweep import FAILURES
from lightning_specdec.bench.ways import Prepared
from lightning_specdec.cli_bench_pairs import check_pairs, load_subject
from lightning_specdec.cli_bench_shown import Bar, rounds, show, show_comparisons
from lightning_specdec.cli_common import find_device, set_up_logs
from lightning_specdec.cli_parser import UsageError
from lightning_specdec.inference.windows import window_from_dict
from lightning_specdec.manifest import manifest


def bench(options: Namespace) -> int:
    """Measure what the options say."""
    set_up_logs(options.log_level, json_lines=options.log_json)
    if options.repeat is not None:
        if options.config or options.compare:
            raise UsageError("--repeat takes all from the results: drop --config and --compare")
        return _repeat(options.repeat, options.format)
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
    bar, interrupted = Bar(), False
    try:
        for config in configs:
            _set_threads(config)
            found = manifest(options=vars(options), device=find_device(config.device))
            with open_results(Path(options.output).expanduser() / config.name, config, found) as results:
                several.append(results.results)
                run(config, results, lambda name, config=config: load_subject(name, config), bar)  # type: ignore[misc]
    except KeyboardInterrupt:
        interrupted = True
    except OSError as error:
        if not str(error.filename).startswith(str(Path(options.output).expanduser())):
            raise
        raise ValueError(
            f"{error.filename} cannot be written ({error.strerror or error}): what is finished "
            "stays, make room and give the same command again"
        ) from error
    finally:
        bar.close()
    print(show(several, options.format), flush=True)
    if interrupted:
        print("interrupted: what is finished stays, and the same command goes on from there", file=sys.stderr)
        return 130
    wrong = [(each, row) for each in several for row in each.rows if _is_wrong(row, each.manifest)]
    return 1 if wrong else 0


def _is_wrong(row: Row, made: dict[str, Any]) -> bool:
    """Whether a row failed, or gave tokens that only a mistake of ours could give."""
    if row["error"] is not None:
        return True
    exact = row["way"] in OURS and not rounds(made["pairs"][row["pair"]]["dtype"])
    return exact and row["same_tokens"] is False


def _set_threads(config: BenchConfig) -> None:
    if config.threads is not None:
        torch.set_num_threads(config.threads)


def _compare(configs: Sequence[BenchConfig], names: Sequence[str], form: str) -> int:
    """Set two ways against each other in every group of every pair."""
    if len(names) != 2:
        raise UsageError(f"--compare takes two names, as --compare model:4 ngram:4, got {len(names)}")
    bar, found = Bar(), []
    try:
        for config in configs:
            _set_threads(config)
            for name in config.pairs:
                bar.say(f"{name}: loading")
                subject = load_subject(name, replace(config, outside=_needed(config, names)))
                for comparison in compare(config, subject, *names):
                    found.append(comparison)
                    bar.say(f"{name}: {len(found)} compared")
    finally:
        bar.close()
    print(show_comparisons(found, form))
    return 0


def _needed(config: BenchConfig, names: Sequence[str]) -> tuple[str, ...]:
    """Transformers' ways that are compared."""
    return tuple(way for way in config.outside if way in names)


def _repeat(place: str, form: str) -> int:
    """Run a row of results again as its own record says, and tell whether the tokens are the same."""
    results, number = _find_row(place)
    row = results.rows[number - 1]
    config = BenchConfig.from_dict(results.manifest["config"])
    _set_threads(config)
    check_pairs(config)
    pair, domain = row["pair"], row["domain"]
    kept = results.manifest["prompts"][pair][domain]
    prompts = {domain: [Prompt(name, domain, tuple(tokens)) for name, tokens in kept.items()]}
    subject = load_subject(pair, config, prompts=prompts)
    cell = next((each for group in cells(config, subject) for each in group if each.hash == row["cell"]), None)
    if cell is None:
        before = results.manifest["pairs"][pair]
        changed = [name for name in ("target_sha256", "draft_sha256") if before[name] != subject.facts[name]]
        raise ValueError(f"{place} cannot be repeated: {' and '.join(changed) or 'what it names'} is not what it was")
    window = cell.num_draft_tokens if row["window"] is None else window_from_dict(row["window"])
    assert not isinstance(window, str) or row["error"] is not None
    error, found = None, None
    try:
        prepared = Prepared(None if isinstance(window, str) else window, row["setting"])
        found = measure(cell, subject, config, prepared, repeat=row["repeat"])
    except FAILURES as raised:
        error = " ".join(str(raised).split())
    same = found is not None and row["error"] is None and found["tokens_sha256"] == row["tokens_sha256"]
    as_before = same if row["error"] is None else error is not None
    document = {
        "row": number,
        "results": str(results.directory),
        "cell": cell.hash,
        "label": f"{pair}, {domain}, temperature {cell.temperature:g}, batch {cell.batch_size}: {cell.label}",
        "repeat": row["repeat"],
        "same_tokens": same,
        "seconds": [row["seconds"], None if found is None else found["seconds"]],
        "errors": [row["error"], error],
    }
    print(json.dumps(document) if form == "json" else _told(document, as_before=as_before))
    return 0 if as_before else 1


def _told(document: dict[str, Any], *, as_before: bool) -> str:
    before, now = document["seconds"]
    lines = [f"row {document['row']} of {document['results']}: {document['label']}, repeat {document['repeat']}"]
    for when, seconds, error in (("then", before, document["errors"][0]), ("now", now, document["errors"][1])):
        lines.append(f"  {when:<5} {f'{seconds:.4f} s' if error is None else f'failed: {error}'}")
    lines.append("the same outcome" if document["errors"][0] else "the same tokens" if as_before else "OTHER TOKENS")
    return "\n".join(lines)


def _find_row(place: str) -> tuple[Results, int]:
    """The results that a row is of, and its number, from 1: DIRECTORY:NUMBER, or DIRECTORY:CELL for a cell's first."""
    name, _, which = place.rpartition(":")
    directory = Path(name).parent if Path(name).name == ROWS else Path(name)
    if not name:
        raise UsageError(f"--repeat takes DIRECTORY:NUMBER, as results/rnn:12, or DIRECTORY:CELL, got {place!r}")
    results = read(directory)
    number = next((i for i, row in enumerate(results.rows, start=1) if row["cell"] == which), None)
    if number is None and which.isdecimal() and 1 <= int(which) <= len(results.rows):
        number = int(which)
    if number is None:
        raise ValueError(f"{directory} has no row {which}: it has {len(results.rows)}, counted from 1")
    return results, number
