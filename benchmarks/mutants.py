"""Measure which deliberate faults the law tests detect. Each mutant is one named fault in a copy of a tree.

python benchmarks/mutants.py --tree ../before --output before.json
python benchmarks/mutants.py --tree . --output after.json
python benchmarks/mutants.py --compare before.json after.json

A run that was stopped continues with the missing mutants. A failing test kills a mutant.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

LAWS = [
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
    "lookup_first",
    "cross_vocabulary",
    "conversation",
    "processors",
    "windows",
    "huggingface",
    "layers",
    "translation",
    "vocabulary",
    "new_drafter",
    "audit",
]
"""Test files of the laws, the fastest first; a tree runs those that it has."""

MUTANTS: dict[str, list[dict[str, str]]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text()
)


def apply(tree: Path, edits: list[dict[str, str]]) -> bool:
    """Apply an edit at the one place where it matches; False if there is none or several."""
    files = {path: path.read_text() for path in (tree / "lightning_specdec").rglob("*.py")}
    for edit in edits:
        places = [path for path, text in files.items() if text.count(edit["before"]) == 1]
        if len(places) == 1:
            places[0].write_text(files[places[0]].replace(edit["before"], edit["after"]))
            return True
    return False


def run(tree: Path, seconds: float) -> dict[str, object]:
    """Run the law files until a test fails. Returns the test that killed the mutant, or that it survived."""
    files = [f"tests/test_{name}.py" for name in LAWS if (tree / f"tests/test_{name}.py").exists()]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"killed": True, "by": "time limit", "seconds": seconds}
    failed = [
        line.split(" - ")[0]
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED", "ERROR"))
    ]
    spent = round(time.perf_counter() - started, 1)
    return {
        "killed": done.returncode != 0,
        "by": failed[0][:200] if failed else None,
        "seconds": spent,
    }


def measure(tree: Path, output: Path, seconds: float) -> None:
    """Run every mutant that is not in the output yet."""
    found = json.loads(output.read_text()) if output.exists() else {}
    for intent, edits in MUTANTS.items():
        if intent in found:
            continue
        with tempfile.TemporaryDirectory() as directory:
            copy = Path(directory) / "tree"
            ignored = shutil.ignore_patterns(
                ".git", ".venv", "logs", "__pycache__", "docs", "smollm2*"
            )
            shutil.copytree(tree, copy, ignore=ignored)
            found[intent] = (
                run(copy, seconds)
                if apply(copy, edits)
                else {"killed": None, "by": "does not apply"}
            )
        output.write_text(json.dumps(found, indent=1))
        print(f"{intent}: {found[intent]}", flush=True)


def compare(before: Path, after: Path) -> None:
    """Print the mutants that each suite kills and those that the second one misses."""
    one, two = json.loads(before.read_text()), json.loads(after.read_text())
    for intent in MUTANTS:
        print(
            f"{intent}: {one.get(intent, {}).get('killed')} -> {two.get(intent, {}).get('killed')}"
        )
    missed = [
        name
        for name in MUTANTS
        if one.get(name, {}).get("killed") and not two.get(name, {}).get("killed")
    ]
    alive = [intent for intent in MUTANTS if two.get(intent, {}).get("killed") is False]
    print(
        f"{len(MUTANTS)} mutants; killed before and not now: {missed or 'none'}; surviving now: {alive or 'none'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of one mutant")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        compare(*options.compare)
    else:
        measure(options.tree.resolve(), options.output, options.seconds)


if __name__ == "__main__":
    main()
