"""Data to train on and prompts to continue, as Lightning data modules."""

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
