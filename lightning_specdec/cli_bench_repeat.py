"""`bench --repeat`: a row of results run again, as its own record says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.config_entries import OURS
from lightning_specdec.bench.failures import in_one_line
from lightning_specdec.bench.matrix import Cell, cells
from lightning_specdec.bench.measure import measure
from lightning_specdec.bench.prompts import Prompt
from lightning_specdec.bench.results import MANIFEST, ROWS, Results, StoredRow, read
from lightning_specdec.bench.run import caught, prepare, recorded_setting
from lightning_specdec.bench.subject import DRAFT_FACTS, Subject
from lightning_specdec.bench.ways import Prepared
from lightning_specdec.cli_bench_pairs import check_pairs, load_subject
from lightning_specdec.cli_parser import UsageError
from lightning_specdec.inference import Window
from lightning_specdec.inference.windows import window_from_dict
from lightning_specdec.terminal import say


@dataclass(frozen=True)
class _Record:
    """What results keep of a row besides its figures.

    Args:
        facts: what its pair was.
        settings: of transformers' ways, as they were found for the pair.
    """

    row: StoredRow
    facts: dict[str, Any]
    prompts: list[Prompt]
    window: Window | None
    settings: list[dict[str, Any]]

    @classmethod
    def of(cls, results: Results, row: StoredRow) -> _Record:
        """Raises KeyError, TypeError, AttributeError or ValueError where it is damaged."""
        made, pair, domain = results.manifest, row["pair"], row["domain"]
        facts = {"target_sha256": made["pairs"][pair]["target_sha256"]}
        facts |= {name: dict(made["pairs"][pair][name]) for name in DRAFT_FACTS}
        prompts = [Prompt(name, domain, tuple(tokens)) for name, tokens in made["prompts"][pair][domain].items()]
        window = None if row["window"] is None else window_from_dict(row["window"])
        if row["error"] is None and not isinstance(row["seconds"], float):
            raise ValueError("it did not fail and has no seconds")
        if pair not in made["config"]["pairs"]:
            raise ValueError(f"the config has no pair {pair}")
        return cls(row, facts, prompts, window, [dict(each) for each in made["outside"].get(pair, [])])

    def cell(self, config: BenchConfig, subject: Subject) -> Cell | None:
        """The cell that it is a row of; None where the pair is not what it was."""
        subject.recall(self.facts)
        if self.row["draft"] is not None and self.row["draft_kind"] is None:  # it could not be made ready
            for name in DRAFT_FACTS:
                subject.facts[name][self.row["draft"]] = self.facts[name].get(self.row["draft"])
        found = (each for group in cells(config, subject) for each in group if each.hash == self.row["cell"])
        return next(found, None)

    def prepared(self, cell: Cell, subject: Subject, config: BenchConfig) -> Prepared:
        """As it was prepared; anew where it had failed before it was.

        Raises:
            ValueError, RuntimeError, MemoryError, and whatever transformers raises: it cannot decode so.
        """
        setting = self.row["setting"]
        if cell.way not in OURS and setting is None:
            return prepare(cell, subject, config, setting=recorded_setting(cell, self.settings))
        if cell.num_draft_tokens == "auto" and self.window is None:
            return prepare(cell, subject, config)
        number = cell.num_draft_tokens if isinstance(cell.num_draft_tokens, int) else None
        return Prepared(self.window or number, setting)


def repeat(place: str, form: str) -> int:
    """Run a row of results again, and tell whether it comes to the same.

    Args:
        place: DIRECTORY:NUMBER, or DIRECTORY:CELL for the first row of a cell.

    Raises:
        ValueError: there is no such row, its record is damaged, or what it names is not what it was.
    """
    results, number = _find_row(place)
    row = results.rows[number - 1]
    try:
        record = _Record.of(results, row)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        told = f"no {error}" if isinstance(error, KeyError) else in_one_line(error)
        raise ValueError(f"{place} is damaged, or its {MANIFEST} is ({told}): measure again") from error
    config = BenchConfig.from_dict(results.manifest["config"])
    torch.set_num_threads(config.threads or torch.get_num_threads())
    check_pairs(config)
    subject = load_subject(row["pair"], config, prompts={row["domain"]: record.prompts})
    if (cell := record.cell(config, subject)) is None:
        changed = [name for name in ("target_sha256", "draft_sha256") if record.facts[name] != subject.facts[name]]
        raise ValueError(f"{place} cannot be repeated: {' and '.join(changed) or 'what it names'} is not what it was")
    failed, found = None, None
    try:
        found = measure(cell, subject, config, record.prepared(cell, subject, config), repeat=row["repeat"])
    except caught(cell) as raised:
        failed = in_one_line(raised)
    same = found is not None and row["error"] is None and found.tokens_sha256 == row["tokens_sha256"]
    document = {
        "row": number,
        "results": str(results.directory),
        "cell": cell.hash,
        "label": f"{cell.pair}, {cell.domain}, temperature {cell.temperature:g}, batch {cell.batch_size}: {cell.label}",
        "repeat": row["repeat"],
        "same_tokens": same,
        "seconds": [row["seconds"], None if found is None else found.seconds],
        "errors": [row["error"], failed],
    }
    say(json.dumps(document) if form == "json" else _told(document))
    return 0 if same or (row["error"] is not None and failed is not None) else 1


def _told(document: dict[str, Any]) -> str:
    lines = [f"row {document['row']} of {document['results']}: {document['label']}, repeat {document['repeat']}"]
    for when, seconds, error in zip(("then", "now"), document["seconds"], document["errors"], strict=True):
        lines.append(f"  {when:<5} {f'{seconds:.4f} s' if error is None else f'failed: {error}'}")
    before, now = (error is not None for error in document["errors"])
    outcomes = {(True, True): "it fails as it did", (True, False): "it fails no more", (False, True): "IT FAILS NOW"}
    tokens = "the same tokens" if document["same_tokens"] else "OTHER TOKENS"
    return "\n".join([*lines, outcomes.get((before, now), tokens)])


def _find_row(place: str) -> tuple[Results, int]:
    """The results that a row is of, and its number, from 1."""
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
