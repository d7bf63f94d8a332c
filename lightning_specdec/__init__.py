"""Speculative decoding: train a draft with PyTorch Lightning, decode with the same output.

Importing this package loads neither torch nor Lightning. A public name is imported at its first
use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_specdec.config.decoding import DecodingConfig as DecodingConfig
    from lightning_specdec.config.pairs import Pair as Pair
    from lightning_specdec.config.pairs import get_pair as get_pair
    from lightning_specdec.config.pairs import list_pairs as list_pairs
    from lightning_specdec.decoder import SpeculativeDecoder as SpeculativeDecoder
    from lightning_specdec.decoding import AdaptiveWindow as AdaptiveWindow
    from lightning_specdec.decoding import DecodeResult as DecodeResult
    from lightning_specdec.decoding import Session as Session
    from lightning_specdec.decoding import autoregressive_decode as autoregressive_decode
    from lightning_specdec.drafters import CrossVocabulary as CrossVocabulary
    from lightning_specdec.drafters import Draft as Draft
    from lightning_specdec.drafters import Drafter as Drafter
    from lightning_specdec.drafters import ModelDrafter as ModelDrafter
    from lightning_specdec.drafters import NGramDrafter as NGramDrafter
    from lightning_specdec.hf_generate import generate as generate
    from lightning_specdec.models import RNN as RNN
    from lightning_specdec.models import DecodeState as DecodeState
    from lightning_specdec.models import LanguageModel as LanguageModel
    from lightning_specdec.models.huggingface import HuggingFaceLM as HuggingFaceLM
    from lightning_specdec.models.loading import load_model as load_model
    from lightning_specdec.rules import AcceptanceRule as AcceptanceRule
    from lightning_specdec.rules import EpsilonThreshold as EpsilonThreshold
    from lightning_specdec.rules import ExactMatch as ExactMatch
    from lightning_specdec.rules import Grammar as Grammar
    from lightning_specdec.rules import RejectionSampling as RejectionSampling
    from lightning_specdec.rules import Sampling as Sampling
    from lightning_specdec.rules import TypicalAcceptance as TypicalAcceptance

__version__ = "0.1.0"

_ROOMS = {
    "config.decoding": ("DecodingConfig",),
    "config.pairs": ("Pair", "get_pair", "list_pairs"),
    "decoder": ("SpeculativeDecoder",),
    "decoding": ("AdaptiveWindow", "DecodeResult", "Session", "autoregressive_decode"),
    "drafters": ("CrossVocabulary", "Draft", "Drafter", "ModelDrafter", "NGramDrafter"),
    "hf_generate": ("generate",),
    "models": ("RNN", "DecodeState", "LanguageModel"),
    "models.huggingface": ("HuggingFaceLM",),
    "models.loading": ("load_model",),
    "rules": (
        "AcceptanceRule",
        "EpsilonThreshold",
        "ExactMatch",
        "Grammar",
        "RejectionSampling",
        "Sampling",
        "TypicalAcceptance",
    ),
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
