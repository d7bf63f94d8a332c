"""Laws of choosing cases: each value of each parameter occurs, and few cases suffice."""

from __future__ import annotations

from itertools import product

from case_selection import covering_cases


def combinations(*parameters: range) -> list[tuple[tuple[int, ...], frozenset[tuple[int, int]]]]:
    """Every combination of the values, each with its (parameter, value) pairs."""
    return [(values, frozenset(enumerate(values))) for values in product(*parameters)]


def test_every_value_of_every_parameter_is_chosen() -> None:
    parameters = (range(5), range(3), range(4))
    chosen = covering_cases(combinations(*parameters))
    for index, values in enumerate(parameters):
        assert {case[index] for case in chosen} == set(values)


def test_no_more_cases_are_chosen_than_the_longest_parameter_has_values() -> None:
    chosen = covering_cases(combinations(range(5), range(3), range(4)))
    assert len(chosen) == 5


def test_a_single_parameter_keeps_all_cases_in_order() -> None:
    assert covering_cases(combinations(range(7))) == [(value,) for value in range(7)]


def test_a_value_that_occurs_once_is_kept() -> None:
    cases = combinations(range(4), range(4))
    cases.append(((0, 9), frozenset({(0, 0), (1, 9)})))
    assert (0, 9) in covering_cases(cases)
