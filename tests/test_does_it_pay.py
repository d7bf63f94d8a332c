"""The guide "Does it pay?": its figures are those of the records, and its commands are understood."""

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
RECORD = json.loads((ROOT / "docs" / "results" / "transformers.json").read_text())["rows"]
COMMANDS = re.findall(
    r"^lightning_specdec (.+)$|`((?:sweep|bench|report|audit|pairs) .+?)`",
    GUIDE,
    flags=re.MULTILINE,
)


def table(name: str) -> list[list[str]]:
    """The rows of a recorded table, its heading first."""
    lines = RESULTS.split(f"<!-- recorded: {name} -->\n")[1].split("\n\n")[0].splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])
    ]


def recorded(checkpoint: str, draft: str, *, batch_size: int = 1) -> dict[str, Any]:
    """Greedy decoding with a window of 4."""
    wanted = {
        "checkpoint": checkpoint,
        "draft": draft,
        "batch_size": batch_size,
        "num_draft_tokens": 4,
    }
    (row,) = (row for row in RECORD if row["temperature"] == 0 and wanted.items() <= row.items())
    return row


def test_what_a_larger_draft_brings_is_what_was_recorded() -> None:
    for layers, *shown in table("size")[1:]:
        row = recorded("text", f"exit {layers}")
        assert shown == [
            f"{row[name]:.2f}" for name in ("acceptance_rate", "cost_ratio", "walltime_speedup")
        ]


def test_what_batches_take_away_is_what_was_recorded() -> None:
    for checkpoint, draft, *shown in table("batches")[1:]:
        rows = [recorded(checkpoint, draft, batch_size=size) for size in (1, 4, 16)]
        assert shown == [f"{row['walltime_speedup']:.2f}" for row in rows]


@pytest.mark.parametrize("row", table("lengths")[1:], ids=lambda row: row[0])
def test_short_outputs_yield_as_few_tokens_a_round_as_shown(row: list[str]) -> None:
    decoder = SpeculativeDecoder.from_checkpoint(ROOT / "checkpoints" / row[0].split(",")[0])
    for length, shown in list(zip(table("lengths")[0], row, strict=True))[1:5]:
        run = decoder.decode(decoder.prompts, max_new_tokens=int(length), num_draft_tokens=4)
        assert run.block_efficiency == pytest.approx(
            float(shown), abs=0.05
        )  # another processor may round otherwise


def test_every_command_of_the_guide_has_its_verb_and_options() -> None:
    calls = [shlex.split(told or named, comments=True) for told, named in COMMANDS]
    assert len(calls) > 5
    for verb, *words in calls:
        make_parser(verb).read(words)
