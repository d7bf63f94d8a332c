"""What to train on and what to ask, as Lightning data modules: integers, text, a target's own text; prompts."""

from lightning_specdec.data.base import IGNORED, Batch, EpochSampler, TokenData
from lightning_specdec.data.generated_text import GeneratedText
from lightning_specdec.data.own_prompts import GeneratedPrompts, OpeningTurns
from lightning_specdec.data.passages import Passages
from lightning_specdec.data.progressions import ArithmeticProgressions
from lightning_specdec.data.prompt_sources import PromptFiles, PromptMix, PromptShard, PromptSource
from lightning_specdec.data.quadratic import QuadraticProgressions
from lightning_specdec.data.sequence_file import SequenceFile
from lightning_specdec.data.sequences import SequenceData, Splits
from lightning_specdec.data.text_files import TextFiles
from lightning_specdec.data.windows import WindowSampler

__all__ = [
    "IGNORED",
    "ArithmeticProgressions",
    "Batch",
    "EpochSampler",
    "GeneratedPrompts",
    "GeneratedText",
    "OpeningTurns",
    "Passages",
    "PromptFiles",
    "PromptMix",
    "PromptShard",
    "PromptSource",
    "QuadraticProgressions",
    "SequenceData",
    "SequenceFile",
    "Splits",
    "TextFiles",
    "TokenData",
    "WindowSampler",
]
