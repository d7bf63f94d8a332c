"""Audit every shipped checkpoint, and record the result and the seconds.

    python benchmarks/audits.py --output docs/results/audits.json

Each audit is the verb as a user calls it: one thread, a separate process, loading included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_specdec.bench.manifest import manifest

CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoints", nargs="+", type=Path, default=sorted(CHECKPOINTS.glob("[!s]*.safetensors"))
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for path in options.checkpoints:
        rows.append(audited(path))
        print(
            f"{path.name}: {'passed' if rows[-1]['passed'] else 'FAILED'}, {rows[-1]['wall_seconds']:.0f} s",
            flush=True,
        )
    print(f"\n{table(rows)}")
    if options.output:
        told = {"checkpoints": [path.name for path in options.checkpoints], "threads": 1}
        record = {"manifest": manifest(options=told, device=torch.device("cpu")), "rows": rows}
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(row["passed"] for row in rows))


def audited(path: Path) -> dict[str, Any]:
    """Result of `audit` on a checkpoint, and its seconds."""
    command = [
        sys.executable,
        "-m",
        "lightning_specdec",
        "audit",
        "--ckpt",
        str(path),
        "--threads",
        "1",
    ]
    began = time.perf_counter()
    done = subprocess.run([*command, "--output", "json"], stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - began
    if done.returncode not in (0, 1):
        raise SystemExit(f"audit of {path} ended with exit code {done.returncode}")
    told = json.loads(done.stdout)
    kept = {name: told[name] for name in ("passed", "enough_power")}
    sha256 = told["manifest"]["checkpoint_sha256"]
    return {
        "checkpoint": path.name,
        "checkpoint_sha256": sha256,
        "wall_seconds": seconds,
        **kept,
        "findings": told["findings"],
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per checkpoint, as a Markdown table."""
    lines = [
        "| Checkpoint | Drafts | Rules | Checks of what is lossless, by verdict | Seconds |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        strict = [each for each in row["findings"] if each["check"] != "lossy"]
        verdicts = Counter(each["verdict"] for each in strict)
        cells = [
            f"`{row['checkpoint']}`",
            str(len({each["draft"] for each in strict})),
            str(len({each["rule"] for each in strict})),
            ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items()),
            f"{row['wall_seconds']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
