"""Every worked number of docs/drafts.md, computed again from the formulas beside it."""

from __future__ import annotations

from pathlib import Path

from test_theory import WORKED, agrees
from test_theory import best_window as best

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "drafts.md").read_text(encoding="utf-8")


def table(name: str) -> list[list[str]]:
    """The cells of a worked table, row by row."""
    text = dict(WORKED.findall(GUIDE))[name]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_every_worked_table_is_tested() -> None:
    assert {name for name, _ in WORKED.findall(GUIDE)} == {"sizes", "exits"}


def test_the_best_size_is_neither_the_surest_nor_the_cheapest() -> None:
    rows = table("sizes")
    for _, alpha, cost, window, speedup in rows:
        found = best(float(alpha), float(cost))
        assert found[0] == int(window) and agrees(speedup, found[1])
    speedups = [float(row[-1]) for row in rows]
    assert 0 < speedups.index(max(speedups)) < len(rows) - 1


def test_an_exits_cost_is_its_layers_and_a_head() -> None:
    num_layers, head = 8, 0.1
    for layer, alpha, cost, window, speedup in table("exits"):
        exact = head + (1 - head) * int(layer) / num_layers
        found = best(float(alpha), exact)
        assert agrees(cost, exact) and found[0] == int(window) and agrees(speedup, found[1])
