"""Print `NAME==FLOOR`, the oldest version that pyproject.toml admits: `python benchmarks/oldest.py torch`."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads(
    (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
)


def floors() -> dict[str, str]:
    """The oldest version of each dependency."""
    named = (
        re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", each)
        for each in PROJECT["project"]["dependencies"]
    )
    return {found[1]: found[2] for found in named if found}


if __name__ == "__main__":
    print(*(f"{name}=={floors()[name]}" for name in sys.argv[1:] or floors()))
