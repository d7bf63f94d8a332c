"""The figures that the project shows are those of a record with its manifest."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def _benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES = re.findall(r"<!-- table: benchmarks/(\w+)\.py -->", (ROOT / "README.md").read_text())
RECORD_OF = {"transformer_speed": "transformers"}
"""Of benchmarks whose record has another name than they."""
RECORDS = sorted(path.stem for path in (ROOT / "docs" / "results").glob("*.json"))


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_the_readme_are_made_from_the_records(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    record = json.loads((ROOT / "docs" / "results" / f"{RECORD_OF.get(name, name)}.json").read_text())
    readme = (ROOT / "README.md").read_text()
    shown = readme.split(f"<!-- table: benchmarks/{name}.py -->\n")[1].split("\n<!-- /table -->")[0]
    assert shown == _benchmark(name).table(record["rows"])


@pytest.mark.parametrize(("name", "part"), [("grid", "rows"), ("quality", "quality")])
def test_the_tables_of_the_guide_to_drafts_are_made_from_the_record(
    name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    record = json.loads((ROOT / "docs" / "results" / "transformers.json").read_text())
    guide = (ROOT / "docs" / "drafts.md").read_text()
    shown = guide.split(f"<!-- table: {name} -->\n")[1].split("\n<!-- /table -->")[0]
    assert shown == getattr(_benchmark("transformer_speed"), f"{name}_table")(record[part])


def test_the_readme_shows_what_was_measured() -> None:
    assert {"rnn_speed", "smollm2_speed", "transformer_speed"} <= set(TABLES)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_says_how_it_was_made(name: str) -> None:
    manifest = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())["manifest"]
    for key in ("torch", "processor", "threads", "commit", "options"):
        assert manifest[key] not in (None, ""), key
