"""Former location of `draft_vocabulary` and of Medusa's residual block."""

from lightning_specdec.drafters.draft_vocabulary import DraftVocabulary as DraftVocabulary
from lightning_specdec.drafters.draft_vocabulary import rows_of as rows_of
