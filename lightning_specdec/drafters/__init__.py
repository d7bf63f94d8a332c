"""Ways to guess the next tokens, one file each."""

from lightning_specdec.drafters.base import Context, Drafter, DraftState, Host, last_two
from lightning_specdec.drafters.cross_vocabulary import CrossVocabulary, make_drafter
from lightning_specdec.drafters.draft_vocabulary import DraftVocabulary
from lightning_specdec.drafters.eagle import EagleDrafter
from lightning_specdec.drafters.early_exit import EarlyExitDrafter
from lightning_specdec.drafters.lookup_first import LookupFirstDrafter
from lightning_specdec.drafters.model import ModelDrafter
from lightning_specdec.drafters.multi_token import MultiTokenDrafter
from lightning_specdec.drafters.ngram import NGramDrafter
from lightning_specdec.drafters.staged import StagedDrafter
from lightning_specdec.rules import Draft

DRAFTERS: dict[str, type[Drafter]] = {
    "EagleDrafter": EagleDrafter,
    "EarlyExitDrafter": EarlyExitDrafter,
    "LookupFirstDrafter": LookupFirstDrafter,
    "ModelDrafter": ModelDrafter,
    "MultiTokenDrafter": MultiTokenDrafter,
    "NGramDrafter": NGramDrafter,
    "StagedDrafter": StagedDrafter,
}
"""The classes that a checkpoint may name, and that the law tests go through."""

__all__ = [
    "DRAFTERS",
    "Context",
    "CrossVocabulary",
    "Draft",
    "DraftState",
    "DraftVocabulary",
    "Drafter",
    "EagleDrafter",
    "EarlyExitDrafter",
    "Host",
    "LookupFirstDrafter",
    "ModelDrafter",
    "MultiTokenDrafter",
    "NGramDrafter",
    "StagedDrafter",
    "last_two",
    "make_drafter",
]
