"""Data to train on and prompts to continue, as Lightning data modules.

A name is imported when it is first used, so that prompts can be read without importing Lightning.
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

MODULE_OF_NAME = {
    "IGNORED": "base",
    "Batch": "base",
    "EpochSampler": "base",
    "TokenData": "base",
    "GeneratedText": "generated_text",
    "OpeningTurns": "prompt_sources",
    "PromptFiles": "prompt_sources",
    "PromptSource": "prompt_sources",
    "ArithmeticProgressions": "sequences",
    "QuadraticProgressions": "sequences",
    "SequenceData": "sequences",
    "SequenceFile": "sequences",
    "TextFiles": "text",
}
__all__ = [*MODULE_OF_NAME]


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{MODULE_OF_NAME[name]}")
    return getattr(module, name)
