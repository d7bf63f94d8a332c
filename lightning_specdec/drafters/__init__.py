"""Drafters, one file each."""

from lightning_specdec.drafters.base import Drafter as Drafter
from lightning_specdec.drafters.base import DraftRequest as DraftRequest
from lightning_specdec.drafters.base import DraftState as DraftState
from lightning_specdec.drafters.base import TargetContext as TargetContext
from lightning_specdec.drafters.base import last_two_tokens_of as last_two_tokens_of
from lightning_specdec.drafters.block import BlockDrafter as BlockDrafter
from lightning_specdec.drafters.cross_vocabulary import CrossVocabulary as CrossVocabulary
from lightning_specdec.drafters.draft_vocabulary import DraftVocabulary as DraftVocabulary
from lightning_specdec.drafters.eagle import EagleDrafter as EagleDrafter
from lightning_specdec.drafters.early_exit import EarlyExitDrafter as EarlyExitDrafter
from lightning_specdec.drafters.medusa import MedusaDrafter as MedusaDrafter
from lightning_specdec.drafters.medusa import MultiTokenDrafter as MultiTokenDrafter
from lightning_specdec.drafters.model import ModelDrafter as ModelDrafter
from lightning_specdec.drafters.mtp import MtpDrafter as MtpDrafter
from lightning_specdec.drafters.ngram import LookupDrafter as LookupDrafter
from lightning_specdec.drafters.ngram import NGramDrafter as NGramDrafter
from lightning_specdec.drafters.ngram_with_fallback import NGramWithFallback as NGramWithFallback
from lightning_specdec.drafters.ngram_with_fallback import (
    SuffixCorpusWithFallback as SuffixCorpusWithFallback,
)
from lightning_specdec.drafters.staged import StagedDrafter as StagedDrafter
from lightning_specdec.drafters.suffix_corpus import SuffixCorpusDrafter as SuffixCorpusDrafter
from lightning_specdec.rules import Draft as Draft
