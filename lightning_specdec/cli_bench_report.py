"""The verb `report`: what a benchmark's results come to, as a page, as files, and in a line for each pair.

Takes its parsed options and gives an exit code: 0.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from lightning_specdec.bench.report.report import Report, write
from lightning_specdec.bench.results import read
from lightning_specdec.cli_common import progress, set_up_logs
from lightning_specdec.terminal import say

FOLDER = "report"
"""Where a report goes when nothing else is said: beside the rows."""


def report(options: Namespace) -> int:
    """Write the report, and say the answer."""
    set_up_logs(options.log_level, json_lines=options.log_json)
    results = read(options.RESULTS)
    made = Report.of(results)
    directory = results.directory / FOLDER if options.output is None else Path(options.output).expanduser()
    progress(f"drawing {sum(len(picture.panels) for picture in made.pictures)} panels ...")
    page = write(made, directory)
    for pair, told in made.answers:
        for setting, sentence in told:
            say(f"{pair}{f' ({setting})' if setting else ''}: {sentence}")
    for warning in made.warnings:
        say(f"warning: {warning}", file=sys.stderr)
    if not made.cells:
        say("nothing has been measured yet")
    say(f"report: {page}")
    return 0
