"""Training: Lightning modules, their metrics, and the files of a run."""

from lightning_specdec.training.base import SpeculativeTraining as SpeculativeTraining
from lightning_specdec.training.block import BlockTraining as BlockTraining
from lightning_specdec.training.callbacks import AcceptedPerRound as AcceptedPerRound
from lightning_specdec.training.callbacks import HyperparameterTable as HyperparameterTable
from lightning_specdec.training.callbacks import RunProgressBar as RunProgressBar
from lightning_specdec.training.callbacks import TensorBoardCurves as TensorBoardCurves
from lightning_specdec.training.decode_callback import DecodeHeldOut as DecodeHeldOut
from lightning_specdec.training.distillation import DistillationTraining as DistillationTraining
from lightning_specdec.training.distilled_model import (
    DistilledModelTraining as DistilledModelTraining,
)
from lightning_specdec.training.draft_losses import CrossEntropy as CrossEntropy
from lightning_specdec.training.draft_losses import DraftLoss as DraftLoss
from lightning_specdec.training.draft_losses import ForwardKL as ForwardKL
from lightning_specdec.training.draft_losses import TotalVariation as TotalVariation
from lightning_specdec.training.eagle import EagleTraining as EagleTraining
from lightning_specdec.training.early_exit import EarlyExitTraining as EarlyExitTraining
from lightning_specdec.training.exit_head import ExitHeadTraining as ExitHeadTraining
from lightning_specdec.training.generate import GenerateText as GenerateText
from lightning_specdec.training.medusa import MedusaTraining as MedusaTraining
from lightning_specdec.training.metrics import ExpectedRounds as ExpectedRounds
from lightning_specdec.training.metrics import RoundMetrics as RoundMetrics
from lightning_specdec.training.metrics import next_token_loss as next_token_loss
from lightning_specdec.training.mtp import MtpTraining as MtpTraining
from lightning_specdec.training.offline_features import AutoFeatures as AutoFeatures
from lightning_specdec.training.offline_features import OfflineFeatures as OfflineFeatures
from lightning_specdec.training.optimizers import TimeLimit as TimeLimit
from lightning_specdec.training.pair import PairTraining as PairTraining
from lightning_specdec.training.runs import SafeCheckpointIO as SafeCheckpointIO
from lightning_specdec.training.target_outputs import OnlineFeatures as OnlineFeatures
