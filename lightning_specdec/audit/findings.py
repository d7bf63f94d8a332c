"""What an audit has found, and the permutation test of two samples with its correction for many tests.

Shapes: S rows of both samples, C categories, N permutations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

FALSE_ALARM = 0.01
"""Odds at most that the p-values of an audit of a correct decoder make it fail."""
BROKEN = ("no function", "error")
"""Verdicts of checks that could not be made."""


class AuditCase(NamedTuple):
    """What is audited: the names of a draft, a rule and a sampling."""

    draft: str
    rule: str
    sampling: str


@dataclass(frozen=True)
class Finding:
    """What one check found of one cell.

    Args:
        check: "identity", "round" or "samples", or "lossy" for what a lossy rule changes.
        verdict: "same", "tie" or "bug"; "exact" or "biased"; "alike" or "different"; "measured"; "idle" where nothing
            was ever guessed. Of any check "no function" where a drafter or a rule goes by more than the random numbers
            that it is given, and "error" where something else has kept it from an end.
        enough_power: whether the biased rule was found out; None where there was none.
        figures: plain values; the `reason` alone where the check is broken.
    """

    cell: AuditCase
    check: str
    verdict: str
    enough_power: bool | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether something that should be lossless is not, or could not be found to be."""
        return self.broken or self.verdict in ("bug", "biased", "different")

    @property
    def broken(self) -> bool:
        """Whether the check could not be made."""
        return self.verdict in BROKEN

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        values = {name: value for name, value in asdict(self).items() if name != "cell"}
        return {**self.cell._asdict(), **values, "failed": self.failed}


@dataclass
class Audit:
    """The findings so far.

    Args:
        left_out: drafts and rules that do not go together, by name: the rule needs logits and the draft has none.
    """

    left_out: list[tuple[str, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def lossless(self) -> list[Finding]:
        """Those of what should be lossless."""
        return [finding for finding in self.findings if finding.check != "lossy"]

    @property
    def failures(self) -> list[Finding]:
        """Those that say that something is not lossless, or that nothing can be said."""
        return [finding for finding in self.findings if finding.failed]

    @property
    def weak(self) -> list[Finding]:
        """Those that had not enough power to say so."""
        return [finding for finding in self.findings if finding.enough_power is False]

    def judge_samples(self) -> None:
        """Give all comparisons of two samples their verdicts, together: by p-values corrected for their number."""
        findings = self.findings
        p_values = {i: each.figures["p_value"] for i, each in enumerate(findings) if "p_value" in each.figures}
        for i, adjusted in holm(p_values).items():
            verdict = "different" if adjusted <= FALSE_ALARM else "alike"
            figures = {**findings[i].figures, "adjusted_p_value": adjusted}
            findings[i] = replace(findings[i], verdict=verdict, figures=figures)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "passed": not self.failures,
            "enough_power": not self.weak,
            "false_alarm": FALSE_ALARM,
            "left_out": [list(each) for each in self.left_out],
            "findings": [finding.to_dict() for finding in self.findings],
        }


ENOUGH, CHUNK = 20, 256
"""Permutations as extreme as the data after which the p-value is known well enough; permutations made at a time."""
Sample = Sequence[Sequence[Sequence[int]]]
"""Of every prompt some rows of new tokens."""


def permutation_test(one: Sample, other: Sample, *, num_permutations: int, seed: int) -> float:
    """The p-value of the hypothesis that the rows of both samples come, prompt by prompt, from one distribution.

    Shuffling ends when 20 of them were as large: then p = 20 / shuffles, which is exact too (Besag & Clifford 1991).

    Args:
        one, other: as many rows of each prompt on both sides.
        num_permutations: shuffles at most, so that p is at least 1 / (1 + num_permutations).
        seed: keys the shuffles.
    """
    sizes = [len(rows) for rows in one]
    if sizes != [len(rows) for rows in other]:
        raise ValueError(f"the samples have {sizes} and {[len(rows) for rows in other]} rows: give as many of each")
    members = _members([[*a, *b] for a, b in zip(one, other, strict=True)])
    totals = members @ torch.ones(members.shape[1], 1)

    def statistic(sides: Float[Tensor, "N S"]) -> Float[Tensor, "N"]:
        return ((2 * (members @ sides.T) - totals) ** 2 / totals).sum(0)

    own = torch.cat([torch.cat((torch.ones(size), torch.zeros(size))) for size in sizes])
    observed = float(statistic(own[None])[0])
    generator, extreme, done = torch.Generator().manual_seed(seed), 0, 0
    while done < num_permutations:
        number = min(CHUNK, num_permutations - done)
        orders = [torch.rand(number, 2 * size, generator=generator).argsort(1) for size in sizes]
        shuffled = torch.cat([order < size for order, size in zip(orders, sizes, strict=True)], dim=1).float()
        for large in (statistic(shuffled) >= observed * (1 - 1e-6)).tolist():
            done, extreme = done + 1, extreme + large
            if extreme == ENOUGH:
                return extreme / done
    return (extreme + 1) / (done + 1)


def _members(rows: Sample) -> Float[Tensor, "C S"]:
    """Which rows, of all prompts in their order, begin with each sequence of tokens that at least two of a prompt begin
    with: sparse, for there are many sequences and each row begins with few."""
    begun: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    number = 0
    for prompt, several in enumerate(rows):
        for row in several:
            for n in range(1, len(row) + 1):
                begun[prompt, tuple(row[:n])].append(number)
            number += 1
    shared = [numbers for numbers in begun.values() if len(numbers) > 1]
    places = torch.tensor([(i, j) for i, numbers in enumerate(shared) for j in numbers]).reshape(-1, 2).T
    size = len(shared), number
    return torch.sparse_coo_tensor(places, torch.ones(places.shape[1]), size, check_invariants=True).coalesce()


def holm(p_values: Mapping[Any, float]) -> dict[Any, float]:
    """The p-values adjusted for their number: to reject those up to alpha errs anywhere with odds of alpha at most.

    Source: Holm 1979. It needs no independence, and rejects whatever Bonferroni's correction does.
    """
    adjusted: dict[Any, float] = {}
    largest = 0.0
    for i, name in enumerate(sorted(p_values, key=lambda each: p_values[each])):
        largest = max(largest, min(1.0, (len(p_values) - i) * p_values[name]))
        adjusted[name] = largest
    return adjusted
