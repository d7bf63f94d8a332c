"""Data to train on and prompts to continue, as Lightning data modules.

A name is imported when it is first asked for: the prompts are read without Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_specdec.data.base import IGNORED as IGNORED
    from lightning_specdec.data.base import Batch as Batch
    from lightning_specdec.data.base import EpochSampler as EpochSampler
    from lightning_specdec.data.base import TokenData as TokenData
    from lightning_specdec.data.generated_text import GeneratedText as GeneratedText
    from lightning_specdec.data.prompt_sources import OpeningTurns as OpeningTurns
    from lightning_specdec.data.prompt_sources import PromptFiles as PromptFiles
    from lightning_specdec.data.prompt_sources import PromptSource as PromptSource
    from lightning_specdec.data.sequences import ArithmeticProgressions as ArithmeticProgressions
    from lightning_specdec.data.sequences import QuadraticProgressions as QuadraticProgressions
    from lightning_specdec.data.sequences import SequenceData as SequenceData
    from lightning_specdec.data.sequences import SequenceFile as SequenceFile
    from lightning_specdec.data.text import TextFiles as TextFiles

_FILES = {
    "base": ("IGNORED", "Batch", "EpochSampler", "TokenData"),
    "generated_text": ("GeneratedText",),
    "prompt_sources": ("OpeningTurns", "PromptFiles", "PromptSource"),
    "sequences": (
        "ArithmeticProgressions",
        "QuadraticProgressions",
        "SequenceData",
        "SequenceFile",
    ),
    "text": ("TextFiles",),
}
_HOMES = {name: file for file, names in _FILES.items() for name in names}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
