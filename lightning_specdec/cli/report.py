"""The verb `report`: what a benchmark's results say, as a page and in a line for each pair."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from lightning_specdec.cli.options import Parser
from lightning_specdec.config.terminal import say

SUMMARY = "write the results of a benchmark as one page: the answer, tables and figures"
EXAMPLES = "lightning_specdec report results/rnn\nlightning_specdec report results/rnn --output docs/results/rnn"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("RESULTS", help="directory that `bench` wrote")
    parser.add_argument(
        "--output",
        default=None,
        metavar="DIR",
        help="directory of the page; default: RESULTS/report",
    )


def run(options: Namespace) -> int:
    """Write the report, and say the answer."""
    from lightning_specdec.bench.results import read
    from lightning_specdec.report.report import Report, write

    results = read(options.RESULTS)
    made = Report.of(results)
    directory = (
        results.directory / "report"
        if options.output is None
        else Path(options.output).expanduser()
    )
    page = write(made, directory)
    for line in made.lines:
        say(line)
    for warning in made.warnings:
        say(f"warning: {warning}", file=sys.stderr)
    say(f"report: {page}")
    return 0
