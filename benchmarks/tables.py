"""Generate the tables of README.md and docs/ from the records in docs/results: `make tables`.

A table is the text between `<!-- table: NAME -->` and `<!-- /table -->`; do not edit it by hand.
`python benchmarks/tables.py --check` writes nothing and fails if a table differs from its record.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import audits
import draft_comparison
import kills
import peers
import rnn_speed
import smollm2_calls
import smollm2_draft_kinds
import smollm2_drafts
import smollm2_speed
import transformer_speed

from lightning_specdec.bench.results import read
from lightning_specdec.bench.rows import HUGGING_FACE, Comparison
from lightning_specdec.config.files import replaced
from lightning_specdec.report.report import Report, Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
BENCHES = sorted(
    (path.parent.name for path in (RESULTS / "bench").glob("*/manifest.json")),
    key=lambda name: str(read(RESULTS / "bench" / name).manifest["date"]),
)
"""Names of the full `bench` runs in docs/results/bench, in order of their start."""
_MARKED = re.compile(r"(<!-- table: ([^ ]+) -->\n).*?<!-- /table -->", re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="report files that are out of date, and write nothing"
    )
    options = parser.parse_args()
    stale = []
    for path in pages():
        before = path.read_text(encoding="utf-8")
        after = renewed(before)
        if after == before:
            continue
        stale.append(path.relative_to(ROOT).as_posix())
        if not options.check:
            with replaced(path) as file:
                file.write(after.encode())
    print(
        "\n".join(f"{'out of date' if options.check else 'written'}: {name}" for name in stale)
        or "all as recorded"
    )
    return int(options.check and bool(stale))


def pages() -> list[Path]:
    """Files that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def names(text: str) -> list[str]:
    """Names of the tables in a file."""
    return [found[1] for found in _MARKED.findall(text)]


RENAMED = {
    "multi\\_token": "medusa",
    "multi_token": "medusa",
    "MultiTokenDrafter": "MedusaDrafter",
    "smollm2_heads": "smollm2_medusa",
    "look-up": "lookup",
}
"""Names in records that were measured before they were renamed, and their names today."""


def with_new_names(text: str) -> str:
    """Text of a record or a table with its names as they are today."""
    for old_name, new_name in RENAMED.items():
        text = text.replace(old_name, new_name)
    return text


def renewed(text: str) -> str:
    """Text of a file with its tables generated again."""

    def renew(match: re.Match[str]) -> str:
        opening, name = match.groups()
        table = with_new_names(TABLES[name]())
        return f"{opening}{table}\n<!-- /table -->"

    return _MARKED.sub(renew, text)


def _record(name: str) -> Any:
    return json.loads(with_new_names((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def bench_table() -> str:
    """Speedups of every pair and domain that `bench` measured in full."""
    heads = (
        "Benchmark",
        "Pair",
        "Prompts",
        "Temperature",
        "Batch",
        "Advice",
        "walltime_speedup",
        "Acceptance rate",
    )
    rows: list[tuple[str, ...]] = []
    for name in BENCHES:
        report = Report.of(read(RESULTS / "bench" / name))
        for each in report.advice:
            pair, domain, temperature, batch_size, _ = each.place
            place = (name, pair, domain, f"{temperature:g}", str(batch_size), each.choice)
            if (best := each.best) is None or best.walltime_speedup is None:
                rows.append((*place, "-", "-", "-", "-"))
                continue
            value, low, high = best.walltime_speedup
            rates = [
                f"{rate:.2f}"
                for rate in (best.acceptance_rate, best.block_efficiency)
                if rate is not None
            ]
            theirs = fastest_outside(
                [cell for cell in report.cells if cell.case.place == each.place]
            )
            rows.append((*place, f"{value:.2f} ({low:.2f} to {high:.2f})", *rates, theirs))
    return Table((*heads, "Block efficiency", "transformers' best"), rows).markdown().rstrip("\n")


def fastest_outside(cells: Sequence[Comparison]) -> str:
    """The fastest Hugging Face method among cells of one setting, with its walltime_speedup."""
    theirs = [each for each in cells if each.case.method in HUGGING_FACE]
    speeds = {
        each.case.method: each.walltime_speedup.value for each in theirs if each.walltime_speedup
    }
    best = max(speeds, key=lambda method: speeds[method], default=None)
    return "-" if best is None else f"{best} {speeds[best]:.2f}"


def first_table() -> str:
    """First table of the README: bfloat16, with 95% intervals over the prompts."""
    rows = _record("peers")["rows"]
    engines = {
        "transformers": ("transformers", {"standard": "`generate`", "lookup": "its prompt lookup"}),
        "ours torch": (
            "this package",
            {"standard": "standard decoding", "lookup, head": "prompt lookup, then a draft head"},
        ),
    }
    engines["ours openvino"] = ("this package, OpenVINO", engines["ours torch"][1])
    theirs, lines = peers.cells(rows, "prompts", "transformers/bfloat16/standard"), []
    for engine, (name, decodings) in engines.items():
        standard = peers.cells(rows, "prompts", f"{engine}/bfloat16/standard")
        for decoding, words in decodings.items():
            mine = peers.cells(rows, "prompts", f"{engine}/bfloat16/{decoding}")
            over = [
                "-"
                if mine == other
                else "{:.2f} ({:.2f} to {:.2f})".format(*peers.ratio(mine, other))
                for other in (standard, theirs)
            ]
            lines.append((f"{name}, {words}", f"{peers.speed(mine.values()):.1f}", *over))
    return _table(
        ("Method", "Tokens/s", "Speedup from drafting", "Speedup over transformers' `generate`"),
        lines,
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown table whose cells are Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


TABLES: dict[str, Callable[[], str]] = {
    "first": first_table,
    "audits": lambda: audits.table(_record("audits")["rows"]),
    "draft_comparison": lambda: draft_comparison.table(_record("draft_comparison")["drafts"]),
    "kills": lambda: kills.table(_record("kills")["rows"]),
    "rnn_speed": lambda: rnn_speed.table(_record("rnn_speed")["rows"]),
    "smollm2_calls": lambda: smollm2_calls.table(_record("smollm2_calls_openvino")["rows"]),
    "smollm2_draft_kinds": lambda: smollm2_draft_kinds.table(
        _record("smollm2_draft_kinds")["drafts"]
    ),
    "smollm2_drafts": lambda: smollm2_drafts.table(_record("smollm2_drafts")["drafts"]),
    "smollm2_speed": lambda: smollm2_speed.table(_record("smollm2_speed")["rows"]),
    "transformer_speed": lambda: transformer_speed.table(_record("transformers")["rows"]),
    "transformer_grid": lambda: transformer_speed.grid_table(_record("transformers")["rows"]),
    "transformer_quality": lambda: transformer_speed.quality_table(
        _record("transformers")["quality"]
    ),
} | ({"bench": bench_table} if BENCHES else {})
if (RESULTS / "peers.json").exists():
    _parts = {row["part"] for row in _record("peers")["rows"]}
    TABLES |= {
        "peers": lambda: peers.table(_record("peers")["rows"]),
        "peers_ratios": lambda: peers.beside_genai(_record("peers")["rows"]),
    }
    _more: dict[str, tuple[str, Callable[[], str]]] = {
        "context": ("peers_context", lambda: peers.table(_record("peers")["rows"], "context")),
        "batch": ("peers_batches", lambda: peers.batches(_record("peers")["rows"])),
        "temperature": ("peers_ours", lambda: peers.own_table(_record("peers")["rows"])),
    }
    TABLES |= dict(named for part, named in _more.items() if part in _parts)

if __name__ == "__main__":
    sys.exit(main())
