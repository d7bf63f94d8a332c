"""Compare the speed of two source trees, measured alternately on one machine in separate processes.

git worktree add ../before b9e94ee
python benchmarks/before_after.py ../before . --target checkpoints/smollm2 --output rows.json

Each figure is a median over the turns: seconds of a round outside the model calls (accept and rest), of a whole decode,
of the command `decode` from start to end, and of `--help`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAM = """
import json, sys, torch
from lightning_specdec import SpeculativeDecoder
torch.set_num_threads(1)
source, repeats = sys.argv[1], int(sys.argv[2])
if source.endswith((".ckpt", ".safetensors")):
    decoder, length = SpeculativeDecoder.from_checkpoint(source), 40
    prompts = [list(prompt[:3]) for prompt in decoder.prompts[:1]]
else:
    decoder, length = SpeculativeDecoder.from_pretrained(source, dtype="bfloat16"), 64
    prompts = [decoder.encode_chat("Repeat after me three times: the quick brown fox jumps over the lazy dog.")]
found = []
for i in range(repeats + 2):
    result = decoder.decode(prompts, max_new_tokens=length, num_draft_tokens=3, eos=())
    phases = result.phase_seconds
    if i > 1:
        outside = (phases["accept"] + phases["rest"]) / result.num_target_calls
        found.append({"round_outside_models": outside, "decode": result.seconds})
print(json.dumps(found))
"""


def run(tree: Path, command: list[str]) -> tuple[float, str]:
    """Seconds and output of a command that imports the package from this tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-P", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return time.perf_counter() - started, done.stdout


def turn(tree: Path, sources: list[str]) -> dict[str, float]:
    """One turn of a tree: the median of each figure."""
    figures: dict[str, float] = {}
    for source in sources:
        _, output = run(tree, ["-c", PROGRAM, source, "4" if Path(source).is_dir() else "150"])
        rows: list[dict[str, float]] = json.loads(output.splitlines()[-1])
        for name in rows[0]:
            figures[f"{Path(source).stem}, {name}"] = statistics.median(row[name] for row in rows)
    start = ["-m", "lightning_specdec", "decode", "--ckpt", sources[0], "--repeats", "0"]
    figures["decode, start to end"], _ = run(tree, start)
    figures["decode --help"], _ = run(tree, ["-m", "lightning_specdec", "decode", "--help"])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--target", help="a transformers model, measured with prompt lookup")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    pair = next(path for path in sorted((trees["before"] / "checkpoints").glob("rnn.*")))
    sources = [str(pair), *([options.target] if options.target else [])]
    rows: list[dict[str, Any]] = []
    for number in range(options.turns):
        for name, tree in trees.items():
            rows.append({"turn": number, "tree": name, **turn(tree, sources)})
    for figure in [key for key in rows[0] if key not in ("turn", "tree")]:
        before, after = ([row[figure] for row in rows if row["tree"] == name] for name in trees)
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        middle = statistics.median(before), statistics.median(after)
        print(
            f"{figure}: {middle[0]:.6f} s -> {middle[1]:.6f} s, median ratio {statistics.median(ratios):.3f}"
        )
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
