"""Training: Lightning modules, their metrics, and what a run leaves behind."""

from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.cached_features import CachedFeatures
from lightning_specdec.training.callbacks import AcceptedPerRound, HyperparameterTable, JsonLinesWriter, RunProgressBar
from lightning_specdec.training.checkpoint_io import SafeCheckpointIO
from lightning_specdec.training.decode_callback import DecodeHeldOut
from lightning_specdec.training.distillation import DistillationTraining
from lightning_specdec.training.distilled_model import DistilledModelTraining
from lightning_specdec.training.draft_losses import (
    CrossEntropy,
    DraftLoss,
    ForwardKL,
    Mixture,
    ReverseKL,
    TotalVariation,
)
from lightning_specdec.training.draft_sizes import DraftSizesTraining
from lightning_specdec.training.eagle import EagleTraining
from lightning_specdec.training.early_exit import EarlyExitTraining
from lightning_specdec.training.exit_head import ExitHeadTraining
from lightning_specdec.training.exit_losses import EveryExit, ExitCurriculum, GradualExits, RotatingExits
from lightning_specdec.training.generate import GenerateText
from lightning_specdec.training.generation_bar import GenerationBar
from lightning_specdec.training.medusa import MedusaTraining
from lightning_specdec.training.metrics import (
    NextToken,
    NextTokenCounts,
    PairMetrics,
    Speculation,
    next_token_loss,
)
from lightning_specdec.training.multi_token import MultiTokenTraining
from lightning_specdec.training.pair import PairTraining
from lightning_specdec.training.round_metrics import Rounds, SpeculationCounts
from lightning_specdec.training.rounds import expected_rounds
from lightning_specdec.training.staged import StagedTraining
from lightning_specdec.training.target_reading import OnTheFly, TargetFeatures

__all__ = [
    "AcceptedPerRound",
    "CachedFeatures",
    "CrossEntropy",
    "DecodeHeldOut",
    "DistillationTraining",
    "DistilledModelTraining",
    "DraftLoss",
    "DraftSizesTraining",
    "EagleTraining",
    "EarlyExitTraining",
    "EveryExit",
    "ExitCurriculum",
    "ExitHeadTraining",
    "ForwardKL",
    "GenerateText",
    "GenerationBar",
    "GradualExits",
    "HyperparameterTable",
    "JsonLinesWriter",
    "MedusaTraining",
    "Mixture",
    "MultiTokenTraining",
    "NextToken",
    "NextTokenCounts",
    "PairMetrics",
    "PairTraining",
    "OnTheFly",
    "ReverseKL",
    "RotatingExits",
    "Rounds",
    "RunProgressBar",
    "SafeCheckpointIO",
    "Speculation",
    "SpeculationCounts",
    "StagedTraining",
    "TargetFeatures",
    "TotalVariation",
    "SpeculativeTraining",
    "expected_rounds",
    "next_token_loss",
]
