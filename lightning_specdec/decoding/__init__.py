"""Speculative decoding in sessions of rows, standard decoding, and their results."""

from lightning_specdec.decoding.autoregressive import autoregressive_decode as autoregressive_decode
from lightning_specdec.decoding.batch import SavedText as SavedText
from lightning_specdec.decoding.requests import Request as Request
from lightning_specdec.decoding.results import Counts as Counts
from lightning_specdec.decoding.results import DecodeInterrupted as DecodeInterrupted
from lightning_specdec.decoding.results import DecodeResult as DecodeResult
from lightning_specdec.decoding.results import Round as Round
from lightning_specdec.decoding.results import RowResult as RowResult
from lightning_specdec.decoding.results import merge_results as merge_results
from lightning_specdec.decoding.session import Session as Session
from lightning_specdec.decoding.session import TextPieces as TextPieces
from lightning_specdec.decoding.session import open_session as open_session
from lightning_specdec.decoding.session import run as run
from lightning_specdec.decoding.session import speculative_decode as speculative_decode
from lightning_specdec.decoding.session import stream as stream
from lightning_specdec.decoding.timing import PHASES as PHASES
from lightning_specdec.decoding.windows import AdaptiveWindow as AdaptiveWindow
from lightning_specdec.decoding.windows import Calibration as Calibration
from lightning_specdec.decoding.windows import FixedWindow as FixedWindow
from lightning_specdec.decoding.windows import Window as Window
from lightning_specdec.decoding.windows import window_from_dict as window_from_dict
