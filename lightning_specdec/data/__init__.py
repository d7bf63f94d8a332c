"""Sequences to train on, as Lightning data modules."""

from lightning_specdec.data.progressions import ArithmeticProgressions
from lightning_specdec.data.sequence_file import SequenceFile
from lightning_specdec.data.sequences import IGNORED, Batch, EpochSampler, SequenceData, Splits

__all__ = ["IGNORED", "ArithmeticProgressions", "Batch", "EpochSampler", "SequenceData", "SequenceFile", "Splits"]
