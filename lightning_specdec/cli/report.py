"""The verb `report`: write a benchmark's results as a page, and print the answer for each pair."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from lightning_specdec.cli.options import Parser
from lightning_specdec.config.files import check_parent
from lightning_specdec.config.terminal import say

SUMMARY = "write the results of a benchmark as one page: the answer, tables and figures"
EXAMPLES = """\
lightning_specdec report results/rnn
lightning_specdec report results/rnn --output docs/results/rnn"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("RESULTS", help="directory that `bench` wrote")
    parser.add_argument(
        "--output",
        default=None,
        metavar="DIR",
        help="directory of the page; default: RESULTS/report",
    )


def run(options: Namespace) -> int:
    """Write the report, and print the answer."""
    if options.output is not None:
        check_parent(Path(options.output).expanduser())
    # Imported here because matplotlib and torch take seconds.
    from lightning_specdec.bench.results import read
    from lightning_specdec.report.report import Report, write

    results = read(options.RESULTS)
    if not results.rows:
        raise ValueError(
            f"nothing has been measured yet in {options.RESULTS}: `lightning_specdec bench` with "
            "the same config goes on"
        )
    report = Report.of(results)
    if options.output is None:
        directory = results.directory / "report"
    else:
        directory = Path(options.output).expanduser()
    page = write(report, directory)

    for line in report.lines:
        say(line)
    for warning in report.warnings:
        say(f"warning: {warning}", file=sys.stderr)
    say(f"report: {page}")
    return 0
