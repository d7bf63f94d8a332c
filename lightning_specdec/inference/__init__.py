"""The loop: sessions of rows, standard decoding beside them, and what both give back."""

from lightning_specdec.inference.autoregressive import autoregressive_decode
from lightning_specdec.inference.conversation import Conversation
from lightning_specdec.inference.costs import Calibration, Costs
from lightning_specdec.inference.results import Counts, DecodeInterrupted, DecodeResult, Round, RowResult, merge_results
from lightning_specdec.inference.rows import Row
from lightning_specdec.inference.session import Session
from lightning_specdec.inference.speculative import open_session, run, speculative_decode, stream
from lightning_specdec.inference.stopping import StopStrings
from lightning_specdec.inference.timing import PHASES, PhaseTimer
from lightning_specdec.inference.windows import AdaptiveWindow, FixedWindow, Window, window_from_dict

__all__ = [
    "PHASES",
    "AdaptiveWindow",
    "Calibration",
    "Costs",
    "Conversation",
    "Counts",
    "DecodeInterrupted",
    "DecodeResult",
    "FixedWindow",
    "PhaseTimer",
    "Round",
    "Row",
    "RowResult",
    "Session",
    "StopStrings",
    "Window",
    "autoregressive_decode",
    "merge_results",
    "open_session",
    "run",
    "speculative_decode",
    "stream",
    "window_from_dict",
]
