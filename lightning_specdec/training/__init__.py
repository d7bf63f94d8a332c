"""Training: Lightning modules, their metrics, and what a run leaves behind."""

from lightning_specdec.training.callbacks import AcceptedPerRound, HyperparameterTable, JsonLinesWriter, RunProgressBar
from lightning_specdec.training.checkpoint_io import SafeCheckpointIO
from lightning_specdec.training.metrics import (
    NextToken,
    NextTokenCounts,
    PairMetrics,
    Speculation,
    SpeculationCounts,
    expected_rounds,
    next_token_loss,
)
from lightning_specdec.training.pair import PairTraining

__all__ = [
    "AcceptedPerRound",
    "HyperparameterTable",
    "JsonLinesWriter",
    "NextToken",
    "NextTokenCounts",
    "PairMetrics",
    "PairTraining",
    "RunProgressBar",
    "SafeCheckpointIO",
    "Speculation",
    "SpeculationCounts",
    "expected_rounds",
    "next_token_loss",
]
