"""A tiny frozen target, its own texts, and laws for every kind of draft that learns from it."""

from __future__ import annotations

import functools
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_fixtures import succeed
from families import tiny
from torch import Tensor
from training_fixtures import CONFIGS

from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.data import ArithmeticProgressions, Batch
from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import load_model
from lightning_specdec.training import DistillationTraining

VOCAB = 11


@functools.cache
def target() -> HuggingFaceLM:
    """A random model. Do not write to it."""
    return HuggingFaceLM(tiny("llama", vocab_size=VOCAB, sharpness=14.0))


@functools.cache
def texts(num_rows: int, prompt_length: int) -> list[list[int]]:
    """Random prompts, each with the target's own continuation."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(VOCAB, (num_rows, prompt_length), generator=generator).tolist()
    tokens = autoregressive_decode(target(), prompts, max_new_tokens=19).tokens
    return [prompt + new for prompt, new in zip(prompts, tokens, strict=True)]


def batch_of(rows: list[list[int]], prompt_length: int = 3) -> Batch:
    return ArithmeticProgressions(prompt_length=prompt_length).collate(list(enumerate(rows)))


def own_texts(num_rows: int = 24, prompt_length: int = 3) -> Batch:
    """The texts as a batch."""
    return batch_of(texts(num_rows, prompt_length), prompt_length)


def begun(module: DistillationTraining) -> DistillationTraining:
    """The module in its state before the first step, without a Trainer."""
    data = ArithmeticProgressions(
        vocab_size=VOCAB, modulo=True, num_train=40, num_val=8, num_test=3
    )
    module.check_data(data)
    module.trainer = type(
        "NoTrainer", (), {"world_size": 1, "global_step": 0, "accumulate_grad_batches": 1}
    )()
    module.log_losses = lambda *args, **options: None  # type: ignore[method-assign]
    return module


@torch.no_grad()
def measured(module: DistillationTraining, batch: Batch) -> dict[str, Tensor]:
    """The metrics of a batch."""
    module.metrics.reset()
    means = module.eval().measure(batch, "val")
    module.train()
    metrics = {name: value for name, (value, _) in means.items()}
    metrics.update(module.metrics.compute())
    return metrics


def check_that_it_learns(module: DistillationTraining, num_steps: int) -> None:
    """A few steps lower the loss, raise acceptance, and leave the target unchanged."""
    batch = own_texts()
    target_weights = deepcopy(module.target.state_dict())
    metrics_before = measured(begun(module), batch)
    optimizer = module.configure_optimizers()
    for step in range(num_steps):
        optimizer.zero_grad()
        module.training_step(batch, step).backward()
        optimizer.step()
    metrics_after = measured(module, batch)
    assert metrics_after["loss"] < 0.9 * metrics_before["loss"]
    assert metrics_after["acceptance_rate"] > metrics_before["acceptance_rate"] + 0.03
    assert metrics_after["block_efficiency"] > metrics_before["block_efficiency"]
    for name, weight in module.target.state_dict().items():
        assert torch.equal(weight, target_weights[name])
    assert not module.target.training
    assert module.drafter.training


def check_that_counts_are_decodings(module: DistillationTraining, prompt_length: int) -> None:
    """Rounds counted on the target's own greedy texts are those of decoding."""
    rows = texts(6, prompt_length)
    prompts = [row[:prompt_length] for row in rows]
    module = module.eval()
    result = speculative_decode(
        target(), module.drafter, prompts, max_new_tokens=19, num_draft_tokens=3
    )
    measured(module, own_texts(6, prompt_length))
    assert result.tokens == [row[prompt_length:] for row in rows]

    counts = result.counts
    metrics = module.metrics.of().compute()
    assert counts is not None
    histogram = counts.histogram + [0] * (4 - len(counts.histogram))
    assert metrics["accepted_per_round"].tolist() == histogram
    assert metrics["num_tested"] == counts.num_tested
    # The law is empty for a draft that is always right, or never.
    assert 5 < counts.num_accepted < counts.num_tested


def fit_shipped(
    name: str,
    corpus: Path,
    target_directory: str,
    tmp_path: Path,
    patch: pytest.MonkeyPatch,
    **arguments: Any,
) -> checkpoint.LoadedPair:
    """Train an epoch of a shipped config on a tiny target and its text; return the checkpoint.

    Args:
        name: the name of the config.
        corpus: the text.
        target_directory: the target.
        tmp_path: the directory in which it runs.
        patch: changes the current directory.
        arguments: arguments of the training that differ for so small a target.
    """
    patch.chdir(tmp_path)
    patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = load_model(target_directory)
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    config["data"]["init_args"].update(
        {
            "paths": str(corpus),
            "vocab_size": model.vocab_size,
            "batch_size": 4,
            "num_val": 2,
            "num_test": 1,
        }
    )
    config["model"]["init_args"].update({"target_checkpoint": target_directory, **arguments})
    config["model"]["init_args"]["target_features"]["init_args"]["also_layers"] = [0, 1]
    config["trainer"].update(
        {"max_epochs": 1, "val_check_interval": 1.0, "accelerator": "cpu", "logger": False}
    )
    for callback in config["trainer"]["callbacks"]:
        if callback["class_path"] == "DecodeHeldOut":
            callback["init_args"] = {"num_prompts": 1, "max_new_tokens": 4}
    Path("small.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    outcome = succeed("fit", "--config", "small.yaml")
    assert "val/block_efficiency" in outcome.out
    assert "Warning" not in outcome.err
    resumed = succeed(
        "fit", "--config", "small.yaml", "--ckpt_path", "last", "--trainer.max_epochs", "2"
    )
    assert "val/block_efficiency" in resumed.out
    path = f"checkpoints/{name}/version_0/best.ckpt"
    pair = checkpoint.load(path)
    assert not any(key.startswith("target.") for key in checkpoint.read(path)["state_dict"])
    vocabulary: Any = getattr(pair.drafter, "draft_vocabulary", None)
    if vocabulary is not None:
        assert model.tokenizer is not None
        vocabulary.check_has(model.tokenizer.eos, "the tokens that end a text")
    succeed("decode", "--ckpt", path, "--repeats", "0", "--max_new_tokens", "6")
    return pair
