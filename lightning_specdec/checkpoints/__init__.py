"""Load targets and drafters from files or by name, and save them."""

from lightning_specdec.checkpoints.checkpoint import LoadedPair, is_exported, load, save
from lightning_specdec.checkpoints.loading import load_pair
from lightning_specdec.checkpoints.target_reference import TargetReference

__all__ = ["LoadedPair", "TargetReference", "is_exported", "load", "load_pair", "save"]
