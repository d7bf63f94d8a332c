"""Ways to guess the next tokens, one file each."""

from lightning_specdec.drafters.base import Context, Drafter, DraftState, last_two
from lightning_specdec.drafters.model import ModelDrafter
from lightning_specdec.rules import Draft

DRAFTERS: dict[str, type[Drafter]] = {"ModelDrafter": ModelDrafter}
"""The classes that a checkpoint may name, and that the law tests go through."""

__all__ = ["DRAFTERS", "Context", "Draft", "DraftState", "Drafter", "ModelDrafter", "last_two"]
