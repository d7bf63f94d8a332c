"""Laws of training heads together with their target, or on one that stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch
from cli_fixtures import call
from families import tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_distillation import begun, own_texts
from training_fixtures import shrunk

from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.training import MultiTokenTraining, next_token_loss

VOCAB = 11
LOGGED = ["--trainer.logger", "TensorBoardLogger", "--trainer.logger.save_dir", "logs"]


def training(**options: object) -> MultiTokenTraining:
    model = HuggingFaceLM(tiny("llama", vocab_size=VOCAB))
    module = MultiTokenTraining(model, num_heads=2, num_draft_tokens=2, **options)  # type: ignore[arg-type]
    begun(module)
    return module


def test_with_their_target_the_sum_of_all_cross_entropies_is_minimized() -> None:
    module, batch = training(learn_from_prompts=True), own_texts(3)
    loss = module.training_step(batch, 0)
    output = module.target(batch.tokens[:, :-1], features=(2,))
    wanted = next_token_loss(output.logits, labels := batch.next_tokens())
    for i in range(2):
        logits = module.drafter.head_logits(i, output.features[2][:, : -1 - i], module.target)
        wanted = wanted + next_token_loss(logits, labels[:, 1 + i :])
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    assert all(weight.grad is not None for weight in module.parameters())
    assert module.target.training


@pytest.mark.parametrize("shared_output", [False, True])
def test_on_a_frozen_target_only_the_heads_learn(shared_output: bool) -> None:
    module = training(freeze_target=True, shared_output=shared_output)
    module.training_step(own_texts(3), 0).backward()
    assert all(weight.grad is None for weight in module.target.parameters())
    assert all(weight.grad is not None for weight in module.drafter.parameters())
    assert not module.train().target.training


def test_what_learns_is_measured_too() -> None:
    means = training().eval().measure(own_texts(3), "val")
    losses = {name: float(value) for name, (value, _) in means.items()}
    assert {"loss", "target_loss", "target_accuracy", "position_1/acceptance_rate"} <= losses.keys()
    assert losses["loss"] > losses["target_loss"]


def test_two_steps_of_the_shipped_config_write_a_checkpoint_that_decodes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ["--config", str(shrunk("multi_token", tmp_path)), "--data.batch_size", "16"]
    outcome = call("fit", *config, *LOGGED)
    assert outcome.code == 0 and "Warning" not in outcome.err, outcome.err
    path = tmp_path / "checkpoints" / "multi_token" / "version_0" / "last.ckpt"
    made = checkpoint.load(path)
    shown = call("decode", "--ckpt", str(path), "--repeats", "0")
    assert shown.code == 0 and "output identical" in shown.out
    accumulator = EventAccumulator(str(next(tmp_path.rglob("events.out*")).parent))
    accumulator.Reload()
    tags = set(accumulator.Tags()["scalars"])
    assert {f"val/position_{i}/acceptance_rate" for i in range(1, 5)} <= tags
    # The same file is a target for new heads, and stays as it is in every bit.
    (tmp_path / "again").mkdir()
    monkeypatch.chdir(tmp_path / "again")
    given = ["--model.target", "null", "--model.target_checkpoint", str(path), "--model.freeze_target", "true"]
    outcome = call("fit", *config, *given)
    assert outcome.code == 0 and "Warning" not in outcome.err, outcome.err
    frozen = checkpoint.load("checkpoints/multi_token")
    assert frozen.recipe["target_checkpoint"] == str(path)
    for name, weight in frozen.target.state_dict().items():
        assert torch.equal(weight, made.target.state_dict()[name]), name


def test_the_target_may_be_a_directory_of_transformers(tmp_path: Path) -> None:
    path = tiny_models.write(tmp_path, "gpt2")
    module = MultiTokenTraining(target_checkpoint=path, freeze_target=True)
    assert isinstance(module.target, HuggingFaceLM) and module.drafter.settings.hidden_size == 32
    assert MultiTokenTraining(target_checkpoint=path).target.training, "what learns is in training mode"
    with pytest.raises(FileNotFoundError):
        MultiTokenTraining(target_checkpoint=str(tmp_path / "nowhere.ckpt"))
