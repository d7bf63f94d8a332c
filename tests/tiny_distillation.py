"""A tiny frozen target, its own texts, and what every kind of draft that learns from it must show."""

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
    """A random model; read it, do not write to it."""
    return HuggingFaceLM(tiny("llama", vocab_size=VOCAB, sharpness=14.0))


@functools.cache
def texts(num_rows: int, prompt_length: int) -> list[list[int]]:
    """What the target writes behind random prompts."""
    prompts = torch.randint(
        VOCAB, (num_rows, prompt_length), generator=torch.Generator().manual_seed(0)
    ).tolist()
    tokens = autoregressive_decode(target(), prompts, max_new_tokens=19).tokens
    return [prompt + new for prompt, new in zip(prompts, tokens, strict=True)]


def batch_of(rows: list[list[int]], prompt_length: int = 3) -> Batch:
    return ArithmeticProgressions(prompt_length=prompt_length).collate(list(enumerate(rows)))


def own_texts(num_rows: int = 24, prompt_length: int = 3) -> Batch:
    """The same as a batch."""
    return batch_of(texts(num_rows, prompt_length), prompt_length)


def begun(module: DistillationTraining) -> DistillationTraining:
    """The module as it is when its first step begins."""
    module.check_data(
        ArithmeticProgressions(vocab_size=VOCAB, modulo=True, num_train=40, num_val=8, num_test=3)
    )
    module.trainer = type("NoTrainer", (), {"world_size": 1, "global_step": 0})()
    module.log_losses = lambda *args, **options: None  # type: ignore[method-assign]
    return module


@torch.no_grad()
def measured(module: DistillationTraining, batch: Batch) -> dict[str, Tensor]:
    """The metrics of a batch."""
    module.metrics.reset()
    means = module.eval().measure(batch, "val")
    module.train()
    return {**{name: value for name, (value, _) in means.items()}, **module.metrics.compute()}


def check_that_it_learns(module: DistillationTraining, num_steps: int) -> None:
    """A few steps lower the loss, let more draft tokens be kept, and leave the target as it is, to the last bit."""
    batch, before = own_texts(), deepcopy(module.target.state_dict())
    first = measured(begun(module), batch)
    optimizer = module.configure_optimizers()
    for step in range(num_steps):
        optimizer.zero_grad()
        module.training_step(batch, step).backward()
        optimizer.step()
    last = measured(module, batch)
    assert last["loss"] < 0.9 * first["loss"]
    assert last["acceptance_rate"] > first["acceptance_rate"] + 0.03
    assert last["block_efficiency"] > first["block_efficiency"]
    assert all(
        torch.equal(weight, before[name]) for name, weight in module.target.state_dict().items()
    )
    assert not module.target.training and module.drafter.training


def check_that_counts_are_decodings(module: DistillationTraining, prompt_length: int) -> None:
    """Rounds counted on the target's own greedy texts are those of decoding."""
    rows = texts(6, prompt_length)
    prompts, module = [row[:prompt_length] for row in rows], module.eval()
    result = speculative_decode(
        target(), module.drafter, prompts, max_new_tokens=19, num_draft_tokens=3
    )
    measured(module, own_texts(6, prompt_length))
    counts, counted = result.counts, module.metrics.of().compute()
    assert counts is not None and result.tokens == [row[prompt_length:] for row in rows]
    assert counted["accepted_per_round"].tolist() == counts.histogram + [0] * (
        4 - len(counts.histogram)
    )
    assert counted["num_tested"] == counts.num_tested
    assert 5 < counts.num_accepted < counts.num_tested, (
        "the law says little of a draft that is never right, or always"
    )


def fit_shipped(
    name: str,
    corpus: Path,
    target_directory: str,
    tmp_path: Path,
    patch: pytest.MonkeyPatch,
    **arguments: Any,
) -> checkpoint.LoadedPair:
    """An epoch of a shipped config on a tiny target and its text: the checkpoint, which decodes.

    Args:
        arguments: of the training, where they must be others for so small a target.
    """
    patch.chdir(tmp_path)
    patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = load_model(target_directory)
    values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    values["data"]["init_args"] |= {
        "paths": str(corpus),
        "vocab_size": model.vocab_size,
        "batch_size": 4,
    }
    values["data"]["init_args"] |= {"num_val": 2, "num_test": 1}
    values["model"]["init_args"] |= {"target_checkpoint": target_directory, **arguments}
    values["model"]["init_args"]["target_features"]["init_args"]["also_layers"] = [0, 1]
    values["trainer"] |= {
        "max_epochs": 1,
        "val_check_interval": 1.0,
        "accelerator": "cpu",
        "logger": False,
    }
    for callback in values["trainer"]["callbacks"]:
        if callback["class_path"] == "DecodeHeldOut":
            callback["init_args"] = {"num_prompts": 1, "max_new_tokens": 4}
    Path("small.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    outcome = succeed("fit", "--config", "small.yaml")
    assert "val/block_efficiency" in outcome.out and "Warning" not in outcome.err
    resumed = succeed(
        "fit", "--config", "small.yaml", "--ckpt_path", "last", "--trainer.max_epochs", "2"
    )
    assert "val/block_efficiency" in resumed.out
    path = f"checkpoints/{name}/version_0/best.ckpt"
    made = checkpoint.load(path)
    assert not any(key.startswith("target.") for key in checkpoint.read(path)["state_dict"])
    vocabulary: Any = getattr(made.drafter, "draft_vocabulary", None)
    if vocabulary is not None:
        assert model.tokenizer is not None
        vocabulary.check_has(model.tokenizer.eos, "the tokens that end a text")
    succeed("decode", "--ckpt", path, "--repeats", "0", "--max_new_tokens", "6")
    return made
