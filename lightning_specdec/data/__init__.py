"""What to train on, as Lightning data modules: progressions, files of integers, files of text."""

from lightning_specdec.data.base import IGNORED, Batch, EpochSampler, TokenData
from lightning_specdec.data.progressions import ArithmeticProgressions
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
    "QuadraticProgressions",
    "SequenceData",
    "SequenceFile",
    "Splits",
    "TextFiles",
    "TokenData",
    "WindowSampler",
]
