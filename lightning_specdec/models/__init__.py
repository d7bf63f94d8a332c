"""Networks that score tokens, each with a state that can go back."""

from lightning_specdec.models.base import ExitStates as ExitStates
from lightning_specdec.models.base import LanguageModel as LanguageModel
from lightning_specdec.models.base import ModelOutput as ModelOutput
from lightning_specdec.models.rnn import RNN as RNN
from lightning_specdec.models.rnn import FusedRNN as FusedRNN
from lightning_specdec.models.state import DecodeState as DecodeState
from lightning_specdec.models.state import KVState as KVState
from lightning_specdec.models.state import RecurrentState as RecurrentState
from lightning_specdec.models.state import RowCopy as RowCopy
