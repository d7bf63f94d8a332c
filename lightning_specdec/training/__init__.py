"""Training: Lightning modules, their metrics, and what a run leaves behind."""

from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.callbacks import AcceptedPerRound, HyperparameterTable, JsonLinesWriter, RunProgressBar
from lightning_specdec.training.checkpoint_io import SafeCheckpointIO
from lightning_specdec.training.decode_callback import DecodeHeldOut
from lightning_specdec.training.draft_sizes import DraftSizesTraining
from lightning_specdec.training.early_exit import EarlyExitTraining
from lightning_specdec.training.exit_losses import EveryExit, ExitCurriculum, GradualExits, RotatingExits
from lightning_specdec.training.metrics import (
    NextToken,
    NextTokenCounts,
    PairMetrics,
    Speculation,
    SpeculationCounts,
    next_token_loss,
)
from lightning_specdec.training.multi_token import MultiTokenTraining
from lightning_specdec.training.pair import PairTraining
from lightning_specdec.training.rounds import expected_rounds
from lightning_specdec.training.staged import StagedTraining

__all__ = [
    "AcceptedPerRound",
    "DecodeHeldOut",
    "DraftSizesTraining",
    "EarlyExitTraining",
    "EveryExit",
    "ExitCurriculum",
    "GradualExits",
    "HyperparameterTable",
    "JsonLinesWriter",
    "MultiTokenTraining",
    "NextToken",
    "NextTokenCounts",
    "PairMetrics",
    "PairTraining",
    "RotatingExits",
    "RunProgressBar",
    "SafeCheckpointIO",
    "Speculation",
    "SpeculationCounts",
    "StagedTraining",
    "SpeculativeTraining",
    "expected_rounds",
    "next_token_loss",
]
