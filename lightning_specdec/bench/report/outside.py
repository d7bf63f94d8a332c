"""Which of transformers' own ways is faster than what is advised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_specdec.bench.report.analysis import MeasuredCell, pooled_speedup
from lightning_specdec.bench.report.judged import pays
from lightning_specdec.bench.speed import Timings
from lightning_specdec.bench.statistics import Interval


@dataclass(frozen=True)
class Outside:
    """One of transformers' own ways that is faster than what is advised.

    Args:
        speedup: its `walltime_speedup` over its domains, each as large as its standard decoding's seconds.
        advised: that of the advice over the same, where standard decoding goes on wherever speculation is off; None
            where it is off everywhere.
        domains: those that it was measured in; none where it is all.
    """

    cell: MeasuredCell
    speedup: Interval
    advised: Interval | None
    domains: tuple[str, ...] = ()


def faster_outside(
    cells: Sequence[MeasuredCell], advised: Mapping[str, MeasuredCell], *, num_domains: int
) -> Outside | None:
    """The fastest of transformers' ways that beats what is advised, on all prompts that it was measured on."""
    groups: dict[tuple[str, str | None], list[MeasuredCell]] = {}
    for cell in cells:
        groups.setdefault((cell.way, cell.draft), []).append(cell)
    found = []
    for group in groups.values():
        theirs = pooled_speedup([cell.timings for cell in group])
        ours = pooled_speedup([_policy(cell, advised.get(cell.domain)) for cell in group])
        if theirs is None or ours is None or not pays(theirs, len(groups)):
            continue
        if theirs.interval.low > ours.interval.high:
            domains = tuple(cell.domain for cell in group)
            on = () if len(domains) == num_domains else domains
            found.append(Outside(group[0], theirs.interval, ours.interval if advised else None, on))
    return max(found, key=lambda each: each.speedup.value, default=None)


def _policy(cell: MeasuredCell, advised: MeasuredCell | None) -> Timings | None:
    """What is advised in a cell's domain, or standard decoding against itself."""
    if advised is not None or cell.timings is None:
        return None if advised is None else advised.timings
    return cell.timings._replace(scaled=cell.timings.standard)
