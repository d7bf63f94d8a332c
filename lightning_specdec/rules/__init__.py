"""Sampling, and the rules that decide which draft tokens are accepted."""

from lightning_specdec.config.kinds import RULES as _KINDS
from lightning_specdec.rules.acceptance import (
    AcceptanceRule,
    Draft,
    EpsilonThreshold,
    ExactMatch,
    RejectionSampling,
    TypicalAcceptance,
    Verdict,
    make_rule,
)
from lightning_specdec.rules.sampling import (
    SOFTMAX,
    LogitsProcessor,
    Purpose,
    Sampling,
    column,
    draw,
    noise_table,
)

RULES: dict[str, type[AcceptanceRule]] = {name: _KINDS.load(name) for name in _KINDS}
"""`config.kinds.RULES`, with the classes."""

__all__ = [
    "RULES",
    "SOFTMAX",
    "AcceptanceRule",
    "Draft",
    "EpsilonThreshold",
    "ExactMatch",
    "LogitsProcessor",
    "Purpose",
    "RejectionSampling",
    "Sampling",
    "TypicalAcceptance",
    "Verdict",
    "column",
    "draw",
    "make_rule",
    "noise_table",
]
