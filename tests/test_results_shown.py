"""The figures that the project shows are those of a record with its manifest."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
RECORDS = sorted(path.stem for path in (ROOT / "docs" / "results").glob("*.json"))


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("tables")


def test_every_table_that_is_shown_is_made_from_its_record(tables: ModuleType) -> None:
    shown = {path: path.read_text() for path in tables.pages()}
    assert {name: tables.renewed(text) for name, text in shown.items()} == shown
    assert {name for text in shown.values() for name in tables.names(text)} == set(tables.TABLES), "each is shown"


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_says_how_it_was_made(name: str) -> None:
    manifest = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())["manifest"]
    for key in ("torch", "processor", "threads", "commit", "options"):
        assert manifest[key] not in (None, ""), key
