"""Networks that score tokens, each with a state that can go back."""

from lightning_specdec.models.base import ExitStates, LanguageModel, ModelOutput
from lightning_specdec.models.registry import Registry
from lightning_specdec.models.rnn import RNN, FusedRNN
from lightning_specdec.models.state import DecodeState, KVState, RecurrentState


def _of_transformers() -> type[LanguageModel]:
    """What wraps the models of transformers, without the messages of what transformers imports."""
    from lightning_specdec.models.loading import quiet

    with quiet():
        from lightning_specdec.models.huggingface import HuggingFaceLM
    return HuggingFaceLM


MODELS = Registry({"RNN": RNN}, {"HuggingFaceLM": _of_transformers})
"""The classes that a checkpoint may name; transformers is imported when its models are asked for."""

__all__ = [
    "MODELS",
    "RNN",
    "DecodeState",
    "ExitStates",
    "FusedRNN",
    "KVState",
    "LanguageModel",
    "ModelOutput",
    "RecurrentState",
    "Registry",
]
