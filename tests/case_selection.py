"""Choose the cases of a parametrized test: all of them, or enough to cover each value.

A test over models, drafters and rules has a case for each combination. `make test` runs those that
together contain every value of every parameter ("each choice coverage", Grindal et al. 2005). It
runs no test marked `slow`, and of a test marked `quick_cases("name", ...)` only the cases with one
of these values, or of several joined by "-". `make test-all` runs everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def covering_cases(cases: Sequence[tuple[Case, frozenset[Hashable]]]) -> list[Case]:
    """The first cases that together contain every value.

    Repeatedly takes the case with the most values that are still missing, the first one of equals.

    Args:
        cases: each case with its values, in order.
    """
    missing: set[Hashable] = set()
    for _, values in cases:
        missing |= values

    chosen: list[Case] = []
    remaining = list(cases)
    while missing:
        best = max(remaining, key=lambda case: len(case[1] & missing))
        chosen.append(best[0])
        missing -= best[1]
        remaining.remove(best)
    return chosen


def select_cases(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split collected tests into those that `make test` runs and the others."""
    cases_of_test: dict[str, list[tuple[str, frozenset[Hashable]]]] = defaultdict(list)
    all_items = list(items)
    for item in all_items:
        if _is_quick(item):
            test_name = item.nodeid.partition("[")[0]
            cases_of_test[test_name].append((item.nodeid, _values(item)))

    chosen_ids: set[str] = set()
    for cases in cases_of_test.values():
        if len(cases) == 1:
            chosen_ids.add(cases[0][0])
        else:
            chosen_ids.update(covering_cases(cases))

    selected = []
    deselected = []
    for item in all_items:
        if item.nodeid in chosen_ids:
            selected.append(item)
        else:
            deselected.append(item)
    return selected, deselected


def _is_quick(item: pytest.Item) -> bool:
    """Whether no mark leaves the case to `make test-all`."""
    if item.get_closest_marker("slow") is not None:
        return False
    mark = item.get_closest_marker("quick_cases")
    if mark is None:
        return True
    # pytest joins the names of a case's values by "-".
    case_name = item.nodeid.partition("[")[2].removesuffix("]")
    return any(f"-{text}-" in f"-{case_name}-" for text in mark.args)


def _values(item: pytest.Item) -> frozenset[Hashable]:
    """Each parameter of a case with a text that identifies its value."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return frozenset()
    return frozenset((name, repr(value)) for name, value in callspec.params.items())
