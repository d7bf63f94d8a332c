"""Networks that score tokens, each with a state that can go back."""

from lightning_specdec.models.base import ExitStates, LanguageModel, ModelOutput
from lightning_specdec.models.rnn import RNN, FusedRNN
from lightning_specdec.models.state import DecodeState, KVState, RecurrentState

__all__ = [
    "RNN",
    "DecodeState",
    "ExitStates",
    "FusedRNN",
    "KVState",
    "LanguageModel",
    "ModelOutput",
    "RecurrentState",
]
