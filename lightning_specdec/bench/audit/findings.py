"""What an audit has found: verdicts with their figures, and what they come to together."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from lightning_specdec.bench.audit.two_sample import holm

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
