"""The figures that the project shows are those of a record with its manifest."""

from __future__ import annotations

import importlib.util
import json
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


RECORDS = sorted(path.stem for path in (ROOT / "docs" / "results").glob("*.json"))


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return _benchmark("tables")


def test_every_table_that_is_shown_is_made_from_its_record(tables: ModuleType) -> None:
    shown = {path: path.read_text() for path in tables.pages()}
    assert {name: tables.renewed(text) for name, text in shown.items()} == shown
    assert {name for text in shown.values() for name in tables.names(text)} == set(tables.TABLES), "each is shown"


def test_a_table_that_was_changed_by_hand_is_made_anew(tables: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    assert tables.renewed(readme.replace("| 1.05 |", "| 2.05 |")) == readme != readme.replace("| 1.05 |", "| 2.05 |")


def test_figures_of_other_settings_never_stand_side_by_side(tables: ModuleType) -> None:
    spec_bench = _benchmark("spec_bench")
    made = [{"options": {"threads": 2, "windows": [2]}}]
    spec_bench.check_same({"threads": 2, "windows": [4]}, made, ["threads"])
    with pytest.raises(SystemExit, match="the output has figures for threads=2, this run has 1: give the same"):
        spec_bench.check_same({"threads": 1, "windows": [2]}, made, ["threads"])


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_says_how_it_was_made(name: str) -> None:
    manifest = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())["manifest"]
    for key in ("torch", "processor", "threads", "commit", "options"):
        assert manifest[key] not in (None, ""), key
