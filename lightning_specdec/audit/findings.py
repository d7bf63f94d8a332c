"""What an audit has found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


class AuditCase(NamedTuple):
    """What is audited: the names of a draft, a rule and a sampling."""

    draft: str
    rule: str
    sampling: str


@dataclass(frozen=True)
class Finding:
    """What one check found of one cell.

    Args:
        check: "identity" or "round", or "lossy" for what a lossy rule changes.
        verdict: "same", "tie" or "bug"; "exact" or "biased"; "measured"; "idle" where nothing was ever drafted; "error"
            where the check broke.
        enough_power: whether the biased rule was found out; None where there was none.
        figures: plain values; the `reason` alone where the check broke.
    """

    cell: AuditCase
    check: str
    verdict: str
    enough_power: bool | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether something that should be lossless is not, or could not be checked."""
        return self.verdict in ("bug", "biased", "error")

    def to_dict(self) -> dict[str, Any]:
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

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": not self.failures,
            "enough_power": not self.weak,
            "left_out": [list(each) for each in self.left_out],
            "findings": [finding.to_dict() for finding in self.findings],
        }
