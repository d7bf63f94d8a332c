"""Pytest plugin that records which combinations of settings the law tests decode with.

PYTHONPATH=.:benchmarks python -m pytest -p law_cases --law-cases after.json tests/test_lossless.py ...
python benchmarks/law_cases.py before.json after.json

The comparison fails if a pair of values (of model, drafter, rule, window, temperature) occurs only in the first record.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

NAMES = ("model", "drafter", "rule", "window", "temperature")
RENAMED = {"LookupFirstDrafter": "NGramWithFallback"}
_seen: set[tuple[str, ...]] = set()


def _name(part: object) -> str:
    """Name of a class, with the family of a transformers model or the parts of a combined drafter."""
    kind = RENAMED.get(type(part).__name__, type(part).__name__).lstrip("_")
    family = getattr(getattr(getattr(part, "model", None), "config", None), "model_type", None)
    fallback = getattr(part, "fallback", None)
    return (
        kind
        + (f":{family}" if family else "")
        + (f"+{_name(fallback)}" if fallback is not None else "")
    )


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--law-cases", type=Path, required=True)


def pytest_configure(config: Any) -> None:
    for room in ("decoding", "inference"):
        try:
            session = import_module(f"lightning_specdec.{room}.session").Session
            break
        except ModuleNotFoundError:
            continue
    original = session.__init__

    def recording(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        window = (
            str(self.window.largest) if type(self.window).__name__ == "FixedWindow" else "adaptive"
        )
        parts = (
            _name(self.target),
            _name(self.drafter),
            _name(self.rule),
            window,
            f"{self.sampling.temperature:g}",
        )
        _seen.add(parts)

    session.__init__ = recording


def pytest_sessionfinish(session: Any) -> None:
    session.config.getoption("--law-cases").write_text(json.dumps(sorted(_seen)))


def _pairs(cases: list[list[str]]) -> set[tuple[str, ...]]:
    """All pairs of values that occur together, with the names of their settings."""
    places = range(len(NAMES))
    return {
        (NAMES[i], case[i], NAMES[j], case[j]) for case in cases for i, j in combinations(places, 2)
    }


def main() -> int:
    before, after = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
    missing = sorted(_pairs(before) - _pairs(after))
    print(*(" ".join(pair) for pair in missing), sep="\n")
    print(
        f"{len(before)} cases before, {len(after)} now; {len(_pairs(before))} pairs before, {len(missing)} missing now"
    )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
