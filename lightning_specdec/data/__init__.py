"""Data to train on and prompts to continue, as Lightning data modules."""

from lightning_specdec.data.base import IGNORED, Batch, EpochSampler, TokenData
from lightning_specdec.data.generated_text import GeneratedText
from lightning_specdec.data.prompt_sources import OpeningTurns, PromptFiles, PromptSource
from lightning_specdec.data.sequences import ArithmeticProgressions, QuadraticProgressions, SequenceData, SequenceFile
from lightning_specdec.data.text import TextFiles

__all__ = [
    "IGNORED",
    "ArithmeticProgressions",
    "Batch",
    "EpochSampler",
    "GeneratedText",
    "OpeningTurns",
    "PromptFiles",
    "PromptSource",
    "QuadraticProgressions",
    "SequenceData",
    "SequenceFile",
    "TextFiles",
    "TokenData",
]
