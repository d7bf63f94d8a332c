"""Laws of optimizer steps over several batches: they equal one large batch, and resume."""

from __future__ import annotations

import math
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_distillation import target
from torch import Tensor

from lightning_specdec.data import Batch
from lightning_specdec.data.sequences import SequenceData
from lightning_specdec.models import RNN
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.training import (
    EagleTraining,
    EarlyExitTraining,
    MedusaTraining,
    PairTraining,
    SpeculativeTraining,
)
from lightning_specdec.training.callbacks import SaveNewest

VOCAB_SIZE = 11
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class RaggedData(SequenceData):
    """Random sequences of very different lengths."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            VOCAB_SIZE, num_train=16, num_val=4, num_test=2, prompt_length=2, **options
        )
        generator = torch.Generator().manual_seed(0)
        lengths = [4 + 5 * (row % 4) for row in range(22)]
        self._sequences = [
            torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths
        ]

    def sequences(self) -> Sequence[Sequence[int]]:
        return self._sequences


def pair() -> PairTraining:
    return PairTraining(RNN(VOCAB_SIZE, hidden_size=16), RNN(VOCAB_SIZE, hidden_size=8))


def eagle() -> EagleTraining:
    return EagleTraining(
        target(), num_heads=2, intermediate_size=16, learn_from_prompts=True, warmup_steps=0
    )


def trained_target() -> MedusaTraining:
    module = MedusaTraining(RNN(VOCAB_SIZE, hidden_size=16), num_heads=3, warmup_steps=0)
    assert not module.freeze_target
    return module


def early_exit() -> EarlyExitTraining:
    model = HuggingFaceLM(tiny("llama", vocab_size=VOCAB_SIZE, num_hidden_layers=4))
    # Skipped layers are drawn for each batch, so a batch of another size would skip others.
    return EarlyExitTraining(model, 2, layer_dropout=0.0)


RECIPES: list[Callable[[], SpeculativeTraining]] = [pair, eagle, trained_target, early_exit]


def use_sgd(module: SpeculativeTraining) -> None:
    """Let gradients show in the weights in proportion: Adam hides a wrong scale."""
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    module.configure_optimizers = lambda: torch.optim.SGD(trained, lr=0.1)  # type: ignore[method-assign]
    module.learning_rate = 0.1


def trained_weights(
    recipe: Callable[[], SpeculativeTraining],
    batch_size: int,
    **options: Any,
) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after one epoch, and the loss of every optimizer step."""
    torch.manual_seed(0)
    module = recipe()
    use_sgd(module)
    losses: list[float] = []
    log = module.log

    def watch(name: str, value: Any, **arguments: Any) -> None:
        if name == "train/loss":
            losses.append(float(value))
        log(name, value, **arguments)

    module.log = watch  # type: ignore[method-assign, assignment]
    trainer = Trainer(
        max_epochs=1, limit_val_batches=0, enable_checkpointing=False, **QUIET, **options
    )
    trainer.fit(module, datamodule=RaggedData(batch_size=batch_size))
    return dict(module.state_dict()), losses


@pytest.mark.parametrize("clipping", [{}, {"gradient_clip_val": 0.05}])
@pytest.mark.parametrize("recipe", RECIPES)
def test_accumulated_batches_of_different_lengths_train_as_one_large_batch(
    recipe: Callable[[], SpeculativeTraining], clipping: dict[str, float]
) -> None:
    """Of 16 rows the last optimizer step has four: two of three batches."""
    weights, losses = trained_weights(recipe, 6, **clipping)
    accumulated, step_losses = trained_weights(recipe, 2, accumulate_grad_batches=3, **clipping)
    assert len(losses) == 3
    assert step_losses == pytest.approx(losses, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(accumulated[name], weight, rtol=1e-5, atol=1e-6)


def train_in_two_processes(
    recipe: Callable[[], SpeculativeTraining],
    batch_size: int,
    home: Path,
    **options: Any,
) -> tuple[dict[str, Tensor], list[float]]:
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = str(free_socket.getsockname()[1])
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            os.environ.update(
                {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            )
            # End a process that waits for a collective operation of the other one.
            signal.alarm(100)
            code = 1
            try:
                result = trained_weights(recipe, batch_size, devices=2, strategy="ddp", **options)
                torch.save(result, home / f"result-{rank}.pt")
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0, 0]
    weights, losses = torch.load(home / "result-0.pt")
    _, other_losses = torch.load(home / "result-1.pt")
    # TensorBoard shows the mean over the processes.
    return weights, [sum(pair) / 2 for pair in zip(losses, other_losses, strict=True)]


@pytest.mark.parametrize("num_accumulated", [1, 2])
@pytest.mark.parametrize("recipe", [pair, trained_target])
def test_two_processes_with_rows_of_different_lengths_train_as_one(
    recipe: Callable[[], SpeculativeTraining],
    num_accumulated: int,
    tmp_path: Path,
) -> None:
    weights, losses = trained_weights(recipe, 4 * num_accumulated)
    distributed_weights, step_losses = train_in_two_processes(
        recipe, 2, tmp_path, accumulate_grad_batches=num_accumulated
    )
    assert step_losses == pytest.approx(losses, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(distributed_weights[name], weight, rtol=1e-5, atol=1e-6)


class InterruptedRunError(Exception):
    pass


class InterruptedTraining(PairTraining):
    """A recurrent pair whose training stops at a batch, counted from 1 over all epochs.

    Args:
        moment: "within a batch", "after a batch", or "in a validation".
        batch_to_stop: the number of the batch, of the validations' own in a validation; 0 for a run
            that does not stop.

    Attributes:
        validated: epoch, optimizer step and loss of each validation.
    """

    def __init__(self, moment: str, batch_to_stop: int) -> None:
        torch.manual_seed(0)
        super().__init__(RNN(VOCAB_SIZE, hidden_size=16), RNN(VOCAB_SIZE, hidden_size=8))
        self.moment = moment
        self.batch_to_stop = batch_to_stop
        self.num_batches = 0
        self.num_validation_batches = 0
        self.validated: list[tuple[int, int, float]] = []

    def _stop_if(self, moment: str) -> None:
        if moment == self.moment and self.num_batches == self.batch_to_stop:
            raise InterruptedRunError

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.num_batches += 1
        self._stop_if("within a batch")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self._stop_if("after a batch")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.num_validation_batches += 1
        if self.moment == "in a validation" and self.num_validation_batches == self.batch_to_stop:
            raise InterruptedRunError

    def on_validation_end(self) -> None:
        super().on_validation_end()
        loss = float(self.trainer.callback_metrics["val/loss"])
        self.validated.append((self.current_epoch, self.global_step, loss))


def train(module: InterruptedTraining, directory: Path, **options: Any) -> None:
    """Two epochs of eight batches: steps of three, three and two. It validates after four."""
    saves_on_exception = module.moment != "after a batch"
    newest = ModelCheckpoint(
        directory,
        filename="last",
        save_on_exception=saves_on_exception,
        enable_version_counter=False,
    )
    seconds_between_saves = math.inf if saves_on_exception else 0
    callbacks: list[Callback] = [newest, SaveNewest([newest], seconds_between_saves)]
    trainer = Trainer(
        max_epochs=2,
        val_check_interval=4,
        num_sanity_val_steps=0,
        accumulate_grad_batches=3,
        callbacks=callbacks,
        **QUIET,
    )
    trainer.fit(module, datamodule=RaggedData(batch_size=2), **options)
    assert trainer.global_step == 6


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> InterruptedTraining:
    """A run of two epochs that does not stop."""
    module = InterruptedTraining("never", 0)
    train(module, tmp_path_factory.mktemp("uninterrupted"))
    return module


@pytest.mark.parametrize(
    ("moment", "batch_to_stop"),
    [
        *(("within a batch", batch) for batch in (4, 5, 7, 8, 9, 10, 12, 15)),
        *(("after a batch", batch) for batch in (1, 2, 3, 4, 5, 7, 9, 10, 12, 15)),
        *(("in a validation", batch) for batch in range(1, 9)),
    ],
)
def test_a_run_that_stops_between_the_batches_of_a_step_resumes_at_the_first_of_them(
    moment: str,
    batch_to_stop: int,
    uninterrupted: InterruptedTraining,
    tmp_path: Path,
) -> None:
    with pytest.raises(InterruptedRunError):
        train(InterruptedTraining(moment, batch_to_stop), tmp_path)
    resumed = InterruptedTraining(moment, 0)
    train(resumed, tmp_path, ckpt_path=str(tmp_path / "last.ckpt"), weights_only=True)

    # The same validations, and none twice.
    num_validations = len(resumed.validated)
    assert resumed.validated == uninterrupted.validated[-num_validations:]
    for name, weight in uninterrupted.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name
