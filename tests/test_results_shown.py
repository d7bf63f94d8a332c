"""The figures that the project shows are those of a record with its manifest."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent


def _benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_the_readme_is_made_from_the_record() -> None:
    record = json.loads((ROOT / "docs" / "results" / "rnn_speed.json").read_text())
    readme = (ROOT / "README.md").read_text()
    shown = readme.split("<!-- table: benchmarks/rnn_speed.py -->\n")[1].split("\n<!-- /table -->")[0]
    assert shown == _benchmark("rnn_speed").table(record["rows"])


def test_the_record_says_how_it_was_made() -> None:
    manifest = json.loads((ROOT / "docs" / "results" / "rnn_speed.json").read_text())["manifest"]
    for name in ("torch", "processor", "threads", "commit", "checkpoint_sha256", "options"):
        assert manifest[name] not in (None, ""), name
