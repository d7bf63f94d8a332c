"""Every worked number of docs/drafts.md, computed again from the formulas beside it."""

from __future__ import annotations

from pathlib import Path

from test_theory import WORKED, agrees
from test_theory import best_window as best

from lightning_specdec.bench.theory import expected_tokens, speedup_with_cost_ratio

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "drafts.md").read_text(encoding="utf-8")


def table(name: str) -> list[list[str]]:
    """The cells of a worked table, row by row."""
    text = dict(WORKED.findall(GUIDE))[name]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_every_worked_table_is_tested() -> None:
    assert {name for name, _ in WORKED.findall(GUIDE)} == {"sizes", "exits", "heads", "stages"}


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


def test_heads_cost_a_round_and_a_models_guesses_cost_each() -> None:
    kept = tokens = 1.0
    for window, rate, shown, heads, *models in table("heads"):
        kept *= float(rate)
        tokens += kept
        assert agrees(shown, tokens) and agrees(heads, tokens / 1.1)
        for speedup, cost in zip(models, (0.1, 0.2), strict=True):
            assert agrees(speedup, speedup_with_cost_ratio(0.8, int(window), cost_ratio=cost))


def test_a_staged_drafts_guess_costs_its_share_of_a_call() -> None:
    assert best(0.85, 0.3)[0] == 4 and agrees("1.69", best(0.85, 0.3)[1])
    for alpha, width, cost, window, speedup in table("stages"):
        exact = (0.3 + int(width) * 0.03) / expected_tokens(float(alpha), int(width))
        found = best(0.85, exact)
        assert agrees(cost, exact) and found[0] == int(window) and agrees(speedup, found[1])
        assert exact < 0.3 and expected_tokens(float(alpha), int(width)) > 1 + int(width) * 0.03 / 0.3
