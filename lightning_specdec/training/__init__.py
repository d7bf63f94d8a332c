"""Training: Lightning modules, their metrics, and what a run leaves behind."""

from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.callbacks import AcceptedPerRound, HyperparameterTable, JsonLinesWriter, RunProgressBar
from lightning_specdec.training.decode_callback import DecodeHeldOut
from lightning_specdec.training.distillation import DistillationTraining
from lightning_specdec.training.draft_losses import (
    CrossEntropy,
    DraftLoss,
    ForwardKL,
    Mixture,
    ReverseKL,
    TotalVariation,
)
from lightning_specdec.training.draft_recipes import DistilledModelTraining, ExitHeadTraining, MedusaTraining
from lightning_specdec.training.eagle import EagleTraining
from lightning_specdec.training.early_exit import (
    EarlyExitTraining,
    EveryExit,
    ExitCurriculum,
    GradualExits,
    RotatingExits,
)
from lightning_specdec.training.generate import GenerateText
from lightning_specdec.training.metrics import NextToken, PairMetrics, Rounds, Speculation, next_token_loss
from lightning_specdec.training.multi_token import MultiTokenTraining
from lightning_specdec.training.offline_features import CachedFeatures, OfflineFeatures
from lightning_specdec.training.pair import DraftSizesTraining, PairTraining, StagedTraining
from lightning_specdec.training.runs import RunLogger, SafeCheckpointIO
from lightning_specdec.training.target_outputs import OnlineFeatures, OnTheFly

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
    "GradualExits",
    "HyperparameterTable",
    "JsonLinesWriter",
    "MedusaTraining",
    "Mixture",
    "MultiTokenTraining",
    "NextToken",
    "PairMetrics",
    "PairTraining",
    "OfflineFeatures",
    "OnTheFly",
    "OnlineFeatures",
    "ReverseKL",
    "RotatingExits",
    "Rounds",
    "RunLogger",
    "RunProgressBar",
    "SafeCheckpointIO",
    "Speculation",
    "StagedTraining",
    "TotalVariation",
    "SpeculativeTraining",
    "next_token_loss",
]
