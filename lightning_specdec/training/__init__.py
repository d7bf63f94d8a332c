"""Training: Lightning modules, their metrics, and what a run leaves behind."""

from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.block import BlockTraining
from lightning_specdec.training.callbacks import (
    AcceptedPerRound,
    HyperparameterTable,
    RunProgressBar,
    TensorBoardCurves,
)
from lightning_specdec.training.decode_callback import DecodeHeldOut
from lightning_specdec.training.distillation import DistillationTraining
from lightning_specdec.training.draft_losses import CrossEntropy, DraftLoss, ForwardKL, TotalVariation
from lightning_specdec.training.draft_recipes import DistilledModelTraining, ExitHeadTraining, MultiTokenTraining
from lightning_specdec.training.eagle import EagleTraining
from lightning_specdec.training.early_exit import EarlyExitTraining
from lightning_specdec.training.generate import GenerateText
from lightning_specdec.training.metrics import ExpectedRounds, RoundMetrics, next_token_loss
from lightning_specdec.training.offline_features import FeaturesByNeed, OfflineFeatures
from lightning_specdec.training.optimizers import TimeLimit
from lightning_specdec.training.pair import PairTraining
from lightning_specdec.training.runs import SafeCheckpointIO
from lightning_specdec.training.target_outputs import OnlineFeatures

__all__ = [
    "AcceptedPerRound",
    "BlockTraining",
    "CrossEntropy",
    "DecodeHeldOut",
    "DistillationTraining",
    "DistilledModelTraining",
    "DraftLoss",
    "EagleTraining",
    "EarlyExitTraining",
    "ExitHeadTraining",
    "ExpectedRounds",
    "FeaturesByNeed",
    "ForwardKL",
    "GenerateText",
    "HyperparameterTable",
    "MultiTokenTraining",
    "PairTraining",
    "OfflineFeatures",
    "OnlineFeatures",
    "RoundMetrics",
    "RunProgressBar",
    "SafeCheckpointIO",
    "TensorBoardCurves",
    "TimeLimit",
    "TotalVariation",
    "SpeculativeTraining",
    "next_token_loss",
]
