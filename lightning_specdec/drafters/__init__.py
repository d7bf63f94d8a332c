"""Drafters, one file each."""

from lightning_specdec.drafters.base import Drafter, DraftRequest, DraftState, TargetContext, last_two
from lightning_specdec.drafters.block import BlockDrafter
from lightning_specdec.drafters.cross_vocabulary import CrossVocabulary
from lightning_specdec.drafters.eagle import EagleDrafter
from lightning_specdec.drafters.early_exit import EarlyExitDrafter
from lightning_specdec.drafters.heads import DraftVocabulary
from lightning_specdec.drafters.model import ModelDrafter
from lightning_specdec.drafters.multi_token import MultiTokenDrafter
from lightning_specdec.drafters.ngram import NGramDrafter
from lightning_specdec.drafters.ngram_with_fallback import NGramWithFallback
from lightning_specdec.drafters.staged import StagedDrafter
from lightning_specdec.rules import Draft

__all__ = [
    "BlockDrafter",
    "CrossVocabulary",
    "Draft",
    "DraftRequest",
    "DraftState",
    "DraftVocabulary",
    "Drafter",
    "EagleDrafter",
    "EarlyExitDrafter",
    "ModelDrafter",
    "MultiTokenDrafter",
    "NGramDrafter",
    "NGramWithFallback",
    "StagedDrafter",
    "TargetContext",
    "last_two",
]
