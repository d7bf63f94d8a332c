"""Measure which deliberate faults the law tests detect: a mutant is one named fault in the sources.

    python benchmarks/mutants.py --check
    python benchmarks/mutants.py --output mutants.json
    python benchmarks/mutants.py --compare before.json after.json

`--check` only applies every edit of mutants.yaml, which takes a second. A full run takes hours: for
each mutant it edits a copy of the repository and runs the law tests there until one fails, which
kills the mutant. A run that was stopped continues with the mutants that are missing in the output.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
MUTANTS_FILE = Path(__file__).with_suffix(".yaml")

LAWS = (
    "rules",
    "sampling",
    "states",
    "distribution",
    "session",
    "lossless",
    "whole_decodes",
    "stopping",
    "rounds",
    "ngram",
    "medusa",
    "eagle",
    "early_exit",
    "staged",
    "ngram_with_fallback",
    "cross_vocabulary",
    "conversation",
    "processors",
    "grammar",
    "windows",
    "joined_rows",
    "longrope",
    "prompt_parts",
    "huggingface",
    "layers",
    "translation",
    "vocabulary",
    "new_drafter",
    "audit",
)
"""Test files of the laws, the fastest first: `tests/test_NAME.py`."""

NOT_COPIED = (".git", ".venv", "logs", "__pycache__", "docs", "smollm2*")
"""What the copy of the repository leaves out."""

Outcome = dict[str, Any]
"""`killed` (whether a test failed), `by` (the first test that failed), and `seconds`."""


@dataclass(frozen=True)
class Mutant:
    """A fault in one file of the package.

    Args:
        name: what the fault does.
        file: path below `lightning_specdec`.
        before: text that occurs once in the file.
        after: the text that replaces it.
    """

    name: str
    file: str
    before: str
    after: str

    def apply(self, root: Path) -> None:
        """Edit the file in this copy of the repository.

        Raises:
            ValueError: the file does not exist or does not contain the text exactly once, or the
                edited file is not Python.
        """
        path = root / "lightning_specdec" / self.file
        if not path.is_file():
            raise ValueError(f"{self.name}: there is no file {self.file}")
        source = path.read_text()
        num_matches = source.count(self.before)
        if num_matches != 1:
            raise ValueError(
                f"{self.name}: {self.file} contains the text {num_matches} times, must be once: "
                f"{self.before!r}"
            )

        mutated_source = source.replace(self.before, self.after)
        try:
            ast.parse(mutated_source)
        except SyntaxError as error:
            raise ValueError(f"{self.name}: the edited {self.file} is not Python") from error
        path.write_text(mutated_source)


def read_mutants() -> list[Mutant]:
    """The mutants of mutants.yaml, in its order."""
    entries = yaml.safe_load(MUTANTS_FILE.read_text())
    return [Mutant(name=name, **fields) for name, fields in entries.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="apply each edit and run no test")
    action.add_argument("--output", type=Path, help="run the tests, and write the outcomes here")
    action.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of one mutant")
    parser.add_argument(
        "--cases",
        choices=("each", "all"),
        default="all",
        help="run the cases of `make test` (each) or of `make test-all` (all)",
    )
    options = parser.parse_args()

    if options.compare:
        compare(*options.compare)
        return

    errors = check()
    if errors:
        sys.exit("\n".join(["error: mutants.yaml does not fit the sources", *errors]))
    if options.check:
        print(f"all {len(read_mutants())} mutants apply, and all {len(LAWS)} law files exist")
    else:
        measure(options.output, options.seconds, options.cases)


def check() -> list[str]:
    """What does not fit: edits that do not apply, and law files that do not exist."""
    errors = []
    for law in LAWS:
        path = law_path(law)
        if not (ROOT / path).is_file():
            errors.append(f"there is no file {path}")

    for mutant in read_mutants():
        with tempfile.TemporaryDirectory() as directory:
            copied_root = Path(directory)
            original = ROOT / "lightning_specdec" / mutant.file
            copied_file = copied_root / "lightning_specdec" / mutant.file
            copied_file.parent.mkdir(parents=True)
            if original.is_file():
                shutil.copy(original, copied_file)
            try:
                mutant.apply(copied_root)
            except ValueError as error:
                errors.append(str(error))
    return errors


def law_path(law: str) -> str:
    return f"tests/test_{law}.py"


def measure(output: Path, seconds: float, cases: str) -> None:
    """Run every mutant that is not in the output yet."""
    outcomes: dict[str, Outcome] = {}
    if output.exists():
        outcomes = json.loads(output.read_text())

    for mutant in read_mutants():
        if mutant.name in outcomes:
            continue
        with tempfile.TemporaryDirectory() as directory:
            copied_root = Path(directory) / "tree"
            shutil.copytree(ROOT, copied_root, ignore=shutil.ignore_patterns(*NOT_COPIED))
            mutant.apply(copied_root)
            outcomes[mutant.name] = run_laws(copied_root, seconds, cases)
        output.write_text(json.dumps(outcomes, indent=1))
        print(f"{mutant.name}: {outcomes[mutant.name]}", flush=True)


def run_laws(root: Path, time_limit: float, cases: str) -> Outcome:
    """Run the law tests of a copy of the repository until one of them fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["--cases", cases]
    command += [law_path(law) for law in LAWS]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    try:
        process = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=time_limit
        )
    except subprocess.TimeoutExpired:
        return {"killed": True, "by": "time limit", "seconds": time_limit}
    seconds = round(time.perf_counter() - start, 1)

    failed_test = None
    for line in process.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            # pytest appends the error's message after the name of the test.
            failed_test = line.split(" - ")[0][:200]
            break
    return {"killed": process.returncode != 0, "by": failed_test, "seconds": seconds}


def compare(before_path: Path, after_path: Path) -> None:
    """Print which mutants two runs killed, those that only the first one did, and survivors."""
    before: dict[str, Outcome] = json.loads(before_path.read_text())
    after: dict[str, Outcome] = json.loads(after_path.read_text())
    names = [mutant.name for mutant in read_mutants()]
    missed = []
    surviving = []
    for name in names:
        was_killed = before.get(name, {}).get("killed")
        is_killed = after.get(name, {}).get("killed")
        print(f"{name}: {was_killed} -> {is_killed}")
        if was_killed and not is_killed:
            missed.append(name)
        if is_killed is False:
            surviving.append(name)
    print(
        f"{len(names)} mutants; killed before and not now: {missed or 'none'}; "
        f"surviving now: {surviving or 'none'}"
    )


if __name__ == "__main__":
    main()
