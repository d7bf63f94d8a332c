"""The loop: sessions of rows, standard decoding beside them, and what both give back."""

from lightning_specdec.inference.autoregressive import autoregressive_decode
from lightning_specdec.inference.results import Counts, DecodeInterrupted, DecodeResult, Round, RowResult, merge_results
from lightning_specdec.inference.rows import Row
from lightning_specdec.inference.session import Session
from lightning_specdec.inference.speculative import open_session, run, speculative_decode, stream
from lightning_specdec.inference.timing import PHASES, PhaseTimer

__all__ = [
    "PHASES",
    "Counts",
    "DecodeInterrupted",
    "DecodeResult",
    "PhaseTimer",
    "Round",
    "Row",
    "RowResult",
    "Session",
    "autoregressive_decode",
    "merge_results",
    "open_session",
    "run",
    "speculative_decode",
    "stream",
]
