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

import adaptive_window
import draft_comparison
import engine_audit_power
import engine_audits
import kills
import markdown_tables
import peers_tables
import record_tables
import serve_learning
import serve_load
import suffix_corpus
from peers_methods import PAIR_METHODS

from lightning_specdec.bench.records import HUGGING_FACE, Comparison
from lightning_specdec.bench.results import read
from lightning_specdec.config.files import replaced
from lightning_specdec.report.answer import Advice
from lightning_specdec.report.report import Report, Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
BENCH_RESULTS = RESULTS / "bench"
"""Results of full runs of `bench`, a directory for each config."""

MARKED_TABLE = re.compile(r"(<!-- table: ([^ ]+) -->\n).*?<!-- /table -->", re.DOTALL)

RENAMED = {
    "multi\\_token": "medusa",
    "multi_token": "medusa",
    "MultiTokenDrafter": "MedusaDrafter",
    "smollm2_heads": "smollm2_medusa",
    "look-up": "lookup",
}
"""Names in records that were measured before they were renamed, and their names today."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="report files that are out of date, and write nothing"
    )
    options = parser.parse_args()

    num_outdated = 0
    for path in pages():
        text = path.read_text(encoding="utf-8")
        new_text = renewed(text)
        if new_text == text:
            continue
        num_outdated += 1
        if options.check:
            print(f"out of date: {path.relative_to(ROOT)}")
        else:
            with replaced(path) as file:
                file.write(new_text.encode())
            print(f"written: {path.relative_to(ROOT)}")

    if num_outdated == 0:
        print("all as recorded")
    return 1 if options.check and num_outdated else 0


def pages() -> list[Path]:
    """Files that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def names(text: str) -> list[str]:
    """Names of the tables in a file."""
    return [name for _, name in MARKED_TABLE.findall(text)]


def renewed(text: str) -> str:
    """Text of a file with its tables generated again."""

    def renew(match: re.Match[str]) -> str:
        opening, name = match.groups()
        table = with_new_names(TABLES[name]())
        return f"{opening}{table}\n<!-- /table -->"

    return MARKED_TABLE.sub(renew, text)


def with_new_names(text: str) -> str:
    """Text of a record or a table with its names as they are today."""
    for old_name, new_name in RENAMED.items():
        text = text.replace(old_name, new_name)
    return text


def read_record(name: str) -> Any:
    """The record docs/results/NAME.json."""
    path = RESULTS / f"{name}.json"
    return json.loads(with_new_names(path.read_text(encoding="utf-8")))


def bench_names() -> list[str]:
    """Names of the full `bench` runs in docs/results/bench, in order of their start."""
    directories = [path.parent for path in BENCH_RESULTS.glob("*/manifest.json")]
    directories.sort(key=lambda directory: str(read(directory).manifest["date"]))
    return [directory.name for directory in directories]


def bench_table() -> str:
    """Speedups of every pair and domain that `bench` measured in full."""
    headings = (
        "Benchmark",
        "Pair",
        "Prompts",
        "Temperature",
        "Batch",
        "Advice",
        "walltime_speedup",
        "Acceptance rate",
        "Block efficiency",
        "transformers' best",
    )
    rows = []
    for name in bench_names():
        report = Report.of(read(BENCH_RESULTS / name))
        for advice in report.advice:
            cells = [cell for cell in report.cells if cell.case.workload == advice.workload]
            rows.append((name, *_bench_row(advice, cells)))
    return Table(headings, rows).markdown().rstrip("\n")


def _bench_row(advice: Advice, cells: Sequence[Comparison]) -> tuple[str, ...]:
    """The advice for one setting, and the figures of its best cell.

    Args:
        cells: all cells that were measured in this setting.
    """
    pair, domain, temperature, batch_size, _ = advice.workload
    labels = (pair, domain, f"{temperature:g}", str(batch_size), advice.choice)
    best = advice.best
    if best is None or best.walltime_speedup is None:
        return (*labels, "-", "-", "-", "-")

    value, low, high = best.walltime_speedup
    return (
        *labels,
        f"{value:.2f} ({low:.2f} to {high:.2f})",
        markdown_tables.format_number(best.acceptance_rate),
        markdown_tables.format_number(best.block_efficiency),
        fastest_outside(cells),
    )


def fastest_outside(cells: Sequence[Comparison]) -> str:
    """The fastest Hugging Face method among cells of one setting, with its walltime_speedup."""
    speedups: dict[str, float] = {}
    for cell in cells:
        if cell.case.method in HUGGING_FACE and cell.walltime_speedup:
            speedups[cell.case.method] = cell.walltime_speedup.value
    if not speedups:
        return "-"
    fastest = max(speedups, key=lambda method: speedups[method])
    return f"{fastest} {speedups[fastest]:.2f}"


FIRST_TABLE_METHODS = (
    ("transformers", "standard", "transformers, `generate`"),
    ("transformers", "lookup", "transformers, its prompt lookup"),
    ("ours torch", "standard", "this package, standard decoding"),
    ("ours torch", "lookup, head", "this package, prompt lookup and a draft head"),
    ("ours openvino", "standard", "this package, OpenVINO, standard decoding"),
    ("ours openvino", "lookup, head", "this package, OpenVINO, prompt lookup and a draft head"),
)
"""Rows of the README's first table: engine and decoding in peers.json, and the label."""


def first_table() -> str:
    """First table of the README: bfloat16, with 95% intervals over the prompts."""
    measurements = read_record("peers")["rows"]
    generate = peers_tables.cells(measurements, "prompts", "transformers/bfloat16/standard")
    rows = []
    for engine, decoding, label in FIRST_TABLE_METHODS:
        standard = peers_tables.cells(measurements, "prompts", f"{engine}/bfloat16/standard")
        cells = peers_tables.cells(measurements, "prompts", f"{engine}/bfloat16/{decoding}")
        speed = f"{peers_tables.speed(cells.values()):.1f}"
        rows.append((label, speed, _ratio_text(cells, standard), _ratio_text(cells, generate)))
    headings = (
        "Method",
        "Tokens/s",
        "Speedup from drafting",
        "Speedup over transformers' `generate`",
    )
    return markdown_tables.markdown_table(headings, rows)


def _ratio_text(cells: peers_tables.Cells, baseline: peers_tables.Cells) -> str:
    """Ratio of speeds with its interval; "-" for the baseline itself."""
    if cells == baseline:
        return "-"
    return peers_tables.ratio_text(cells, baseline)


def table_of(
    make_table: Callable[[Any], str],
    record: str,
    part: str = "rows",
) -> Callable[[], str]:
    """A function that makes this table from a part of a record."""
    return lambda: make_table(read_record(record)[part])


def pair_table(part: str) -> str:
    rows = read_record("peers_pair")["rows"]
    return peers_tables.table(rows, part, PAIR_METHODS)


def peers_context_table() -> str:
    return peers_tables.table(read_record("peers")["rows"], "context")


TABLES: dict[str, Callable[[], str]] = {
    "first": first_table,
    "bench": bench_table,
    "pair_humaneval": lambda: pair_table("humaneval"),
    "pair_spec_bench": lambda: pair_table("prompts"),
    "pair_ratios": table_of(peers_tables.pair_ratios, "peers_pair"),
    "pair_rounds": table_of(peers_tables.rounds_table, "peers_pair"),
    "peers": table_of(peers_tables.table, "peers"),
    "peers_ratios": table_of(peers_tables.compared_with_genai, "peers"),
    "peers_context": peers_context_table,
    "peers_batches": table_of(peers_tables.batches, "peers"),
    "peers_ours": table_of(peers_tables.own_table, "peers"),
    "adaptive_window": table_of(adaptive_window.table, "adaptive_window"),
    "audits": table_of(record_tables.audits_table, "audits"),
    "draft_comparison": table_of(draft_comparison.table, "draft_comparison", "drafts"),
    "engine_audits": table_of(engine_audits.table, "engine_audits"),
    "engine_audit_power": table_of(engine_audit_power.table, "engine_audit_power"),
    "engines": table_of(record_tables.engines_table, "engines"),
    "families": table_of(record_tables.families_table, "families"),
    "family_counts": table_of(record_tables.family_counts_table, "families"),
    "kills": table_of(kills.table, "kills"),
    "serve_load": table_of(serve_load.table, "serve_load"),
    "serve_learning": lambda: serve_learning.table(read_record("serve_learning")),
    "suffix_corpus": table_of(suffix_corpus.table, "suffix_corpus"),
    "rnn_speed": table_of(record_tables.rnn_speed_table, "rnn_speed"),
    "smollm2_calls": table_of(record_tables.smollm2_calls_table, "smollm2_calls_openvino"),
    "smollm2_draft_kinds": table_of(
        record_tables.smollm2_draft_kinds_table, "smollm2_draft_kinds", "drafts"
    ),
    "smollm2_drafts": table_of(record_tables.smollm2_drafts_table, "smollm2_drafts", "drafts"),
    "smollm2_speed": table_of(record_tables.smollm2_speed_table, "smollm2_speed"),
    "transformer_speed": table_of(record_tables.transformer_speed_table, "transformers"),
    "transformer_grid": table_of(record_tables.transformer_grid_table, "transformers"),
    "transformer_quality": table_of(
        record_tables.transformer_quality_table, "transformers", "quality"
    ),
}
"""The tables by name. Each function reads its record when it is called."""

if __name__ == "__main__":
    sys.exit(main())
