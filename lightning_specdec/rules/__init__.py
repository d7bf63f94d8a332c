"""Sampling, and the rules that decide which draft tokens are accepted."""

from lightning_specdec.config.kinds import RULES as _KINDS
from lightning_specdec.rules.acceptance import AcceptanceRule as AcceptanceRule
from lightning_specdec.rules.acceptance import Draft as Draft
from lightning_specdec.rules.acceptance import EpsilonThreshold as EpsilonThreshold
from lightning_specdec.rules.acceptance import ExactMatch as ExactMatch
from lightning_specdec.rules.acceptance import RejectionSampling as RejectionSampling
from lightning_specdec.rules.acceptance import TypicalAcceptance as TypicalAcceptance
from lightning_specdec.rules.acceptance import Verdict as Verdict
from lightning_specdec.rules.acceptance import make_rule as make_rule
from lightning_specdec.rules.grammar import Grammar as Grammar
from lightning_specdec.rules.sampling import GREEDY as GREEDY
from lightning_specdec.rules.sampling import SOFTMAX as SOFTMAX
from lightning_specdec.rules.sampling import BoundProcessor as BoundProcessor
from lightning_specdec.rules.sampling import LogitBias as LogitBias
from lightning_specdec.rules.sampling import LogitsProcessor as LogitsProcessor
from lightning_specdec.rules.sampling import PresencePenalty as PresencePenalty
from lightning_specdec.rules.sampling import Purpose as Purpose
from lightning_specdec.rules.sampling import RowProcessor as RowProcessor
from lightning_specdec.rules.sampling import RowSampling as RowSampling
from lightning_specdec.rules.sampling import Sampling as Sampling
from lightning_specdec.rules.sampling import column as column
from lightning_specdec.rules.sampling import draw as draw
from lightning_specdec.rules.sampling import noise_table as noise_table

RULES: dict[str, type[AcceptanceRule]] = {name: _KINDS.load(name) for name in _KINDS}
"""The acceptance rules by name: `config.kinds.RULES` with the classes loaded."""
