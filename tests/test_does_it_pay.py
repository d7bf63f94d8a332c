"""The guide "Does it pay?": its figures are those of the records, and its commands are valid."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.cli.main import make_parser

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "does_it_pay.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
RECORD_TEXT = (ROOT / "docs" / "results" / "transformers.json").read_text()
# The record was measured before its names changed.
RECORD_TEXT = RECORD_TEXT.replace("multi_token", "medusa")
RECORD_TEXT = RECORD_TEXT.replace("MultiTokenDrafter", "MedusaDrafter")
RECORD = json.loads(RECORD_TEXT)["rows"]
BLOCK_COMMANDS = re.findall(r"^lightning_specdec (.+)$", GUIDE, flags=re.MULTILINE)
INLINE_COMMANDS = re.findall(r"`((?:sweep|bench|report|audit|pairs) .+?)`", GUIDE)


def table(name: str) -> list[list[str]]:
    """The rows of a recorded table, its heading first."""
    _, text = RESULTS.split(f"<!-- recorded: {name} -->\n")
    heading_line, _, *lines = text.split("\n\n")[0].splitlines()
    rows = []
    for line in (heading_line, *lines):
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def recorded(checkpoint: str, draft: str, *, batch_size: int = 1) -> dict[str, Any]:
    """The record of greedy decoding with a window of 4."""
    settings = {
        "checkpoint": checkpoint,
        "draft": draft,
        "batch_size": batch_size,
        "num_draft_tokens": 4,
        "temperature": 0,
    }
    (record,) = [record for record in RECORD if settings.items() <= record.items()]
    return record


def test_what_a_larger_draft_brings_is_what_was_recorded() -> None:
    for num_layers, *cells in table("size")[1:]:
        record = recorded("text", f"exit {num_layers}")
        figures = ("acceptance_rate", "cost_ratio", "walltime_speedup")
        assert cells == [f"{record[figure]:.2f}" for figure in figures]


def test_what_batches_take_away_is_what_was_recorded() -> None:
    for checkpoint, draft, *cells in table("batches")[1:]:
        records = [recorded(checkpoint, draft, batch_size=size) for size in (1, 4, 16)]
        assert cells == [f"{record['walltime_speedup']:.2f}" for record in records]


@pytest.mark.parametrize("row", table("lengths")[1:], ids=lambda row: row[0])
def test_short_outputs_yield_as_few_tokens_a_round_as_shown(row: list[str]) -> None:
    checkpoint = row[0].split(",")[0]
    decoder = SpeculativeDecoder.from_checkpoint(ROOT / "checkpoints" / checkpoint)
    headings = table("lengths")[0]
    for length, block_efficiency in zip(headings[1:5], row[1:5], strict=True):
        result = decoder.decode(decoder.prompts, max_new_tokens=int(length), num_draft_tokens=4)
        # Another processor may round differently.
        assert result.block_efficiency == pytest.approx(float(block_efficiency), abs=0.05)


def test_every_command_of_the_guide_has_its_verb_and_options() -> None:
    commands = BLOCK_COMMANDS + INLINE_COMMANDS
    assert len(commands) > 5
    for command in commands:
        verb, *words = shlex.split(command, comments=True)
        make_parser(verb).read(words)
