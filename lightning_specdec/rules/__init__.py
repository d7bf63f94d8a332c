"""How logits become tokens, and which drafted tokens are kept."""

from lightning_specdec.rules.acceptance import (
    AcceptanceRule,
    Draft,
    EpsilonThreshold,
    ExactMatch,
    RejectionSampling,
    TypicalAcceptance,
    Verdict,
)
from lightning_specdec.rules.processors import LogitsProcessor
from lightning_specdec.rules.sampling import SOFTMAX, Purpose, Sampling, SamplingOptions, column, draw, noise_table

RULES: dict[str, type[AcceptanceRule]] = {
    rule.__name__: rule for rule in (ExactMatch, RejectionSampling, EpsilonThreshold, TypicalAcceptance)
}
"""The rules that the command line offers, and that the law tests go through."""

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
    "SamplingOptions",
    "TypicalAcceptance",
    "Verdict",
    "column",
    "draw",
    "noise_table",
]
