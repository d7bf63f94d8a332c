"""Laws of training heads together with their target, or on one that stays unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch
from cli_fixtures import refused, succeed
from families import tiny
from tiny_distillation import VOCAB, begun, own_texts
from training_fixtures import shrunk

from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.drafters import MedusaDrafter
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.training import MedusaTraining, next_token_loss


def training(**options: object) -> MedusaTraining:
    model = HuggingFaceLM(tiny("llama", vocab_size=VOCAB))
    module = MedusaTraining(model, num_heads=2, num_draft_tokens=2, **options)  # type: ignore[arg-type]
    begun(module)
    return module


def stored(path: Path, vocab_size: int, tokenizer: str | None = None) -> str:
    """A checkpoint with a target of that vocabulary."""
    target = HuggingFaceLM(tiny("llama", vocab_size=vocab_size))
    drafter = MedusaDrafter(2, hidden_size=32, vocab_size=vocab_size).init_from(target)
    checkpoint.save(path, target, drafter, tokenizer=tokenizer)
    return str(path)


def test_with_their_target_the_sum_of_all_cross_entropies_is_minimized() -> None:
    module = training(learn_from_prompts=True)
    batch = own_texts(3)
    loss = module.training_step(batch, 0)
    output = module.target(batch.tokens[:, :-1], features=(2,))
    labels = batch.next_tokens()
    expected_loss = next_token_loss(output.logits, labels)
    for head_index in range(2):
        logits = module.drafter.logits(head_index, output.features[2][:, : -1 - head_index])
        expected_loss = expected_loss + next_token_loss(logits, labels[:, 1 + head_index :])
    torch.testing.assert_close(loss, expected_loss)
    loss.backward()
    assert all(weight.grad is not None for weight in module.parameters()) and module.target.training


def test_on_a_frozen_target_only_the_heads_learn() -> None:
    module = training(freeze_target=True)
    module.training_step(own_texts(3), 0).backward()
    assert all(weight.grad is None for weight in module.target.parameters())
    assert all(weight.grad is not None for weight in module.drafter.parameters())
    assert not module.train().target.training


@pytest.mark.slow
def test_a_checkpoints_target_takes_new_heads_and_stays_as_it_is_in_every_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit_command = [
        "fit",
        "--config",
        str(shrunk("medusa", tmp_path)),
        "--model.target",
        "null",
    ]
    fit_command += ["--model.freeze_target", "true", "--model.target_checkpoint"]
    source = stored(tmp_path / "same.ckpt", 24)
    succeed(*fit_command, source)
    trained_pair = checkpoint.load("checkpoints/medusa")
    assert trained_pair.recipe["target_checkpoint"] == source
    weights = trained_pair.target.state_dict()
    weights_before = checkpoint.load(source).target.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_before.items())
    for vocab_size in (256, 24):
        other_target = stored(tmp_path / f"{vocab_size}.ckpt", vocab_size, "bytes")
        message = f"has {vocab_size} tokens and the tokenizer bytes, the data have 24 and none"
        refused(*fit_command, other_target, message=message)


def test_the_target_may_be_a_directory_of_transformers(tmp_path: Path) -> None:
    path = tiny_models.write(tmp_path, "gpt2")
    module = MedusaTraining(target_checkpoint=path, freeze_target=True)
    assert isinstance(module.target, HuggingFaceLM) and module.drafter.settings.hidden_size == 32
    assert MedusaTraining(target_checkpoint=path).target.training, "what learns is in training mode"
    with pytest.raises(FileNotFoundError):
        MedusaTraining(target_checkpoint=str(tmp_path / "nowhere.ckpt"))
