"""Speculative decoding in sessions of rows, standard decoding, and their results."""

from lightning_specdec.decoding.autoregressive import autoregressive_decode
from lightning_specdec.decoding.results import Counts, DecodeInterrupted, DecodeResult, Round, RowResult, merge_results
from lightning_specdec.decoding.rows import Row
from lightning_specdec.decoding.session import Session, TextPieces, open_session, run, speculative_decode, stream
from lightning_specdec.decoding.timing import PHASES
from lightning_specdec.decoding.windows import (
    AdaptiveWindow,
    Calibration,
    FixedWindow,
    Window,
    window_from_dict,
)

__all__ = [
    "PHASES",
    "AdaptiveWindow",
    "Calibration",
    "Counts",
    "DecodeInterrupted",
    "DecodeResult",
    "FixedWindow",
    "Round",
    "Row",
    "RowResult",
    "Session",
    "TextPieces",
    "Window",
    "autoregressive_decode",
    "merge_results",
    "open_session",
    "run",
    "speculative_decode",
    "stream",
    "window_from_dict",
]
