"""Recipes: the config of a training run that follows from a target, its text and a time.

A recipe is a classmethod of the training module that it configures. It returns the module's
arguments for a target of some shape; `config_for` adds what all recipes share: the target, the
data, and the Trainer's arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_specdec.config.checks import require_number
from lightning_specdec.config.memory import available_bytes
from lightning_specdec.config.settings import nearest
from lightning_specdec.data.corpus import MANIFEST, read_manifest, shipped_corpora
from lightning_specdec.models.adapters import find_adapter
from lightning_specdec.models.safetensors_file import single_file_sha256, weights_sha256
from lightning_specdec.text.tokenizer import TextTokenizer
from lightning_specdec.training.block import BlockTraining
from lightning_specdec.training.distillation import DistillationTraining
from lightning_specdec.training.distilled_model import DistilledModelTraining
from lightning_specdec.training.eagle import EagleTraining
from lightning_specdec.training.exit_head import ExitHeadTraining
from lightning_specdec.training.medusa import MedusaTraining
from lightning_specdec.training.mtp import MtpTraining
from lightning_specdec.training.optimizers import fast_bfloat16
from lightning_specdec.training.run_names import name_of_text
from lightning_specdec.training.target_shape import (
    MAX_TEXT_LENGTH,
    NUM_DECODED_TOKENS,
    TargetShape,
)

log = logging.getLogger(__name__)


class Recipe(NamedTuple):
    """A training module, and its arguments for a target's shape and a time in minutes."""

    training: type[DistillationTraining]
    arguments: Callable[[TargetShape, float | None], dict[str, Any]]


RECIPES = {
    "eagle": Recipe(EagleTraining, EagleTraining.recipe_arguments),
    "block": Recipe(BlockTraining, BlockTraining.recipe_arguments),
    "medusa": Recipe(MedusaTraining, MedusaTraining.recipe_arguments),
    "mtp": Recipe(MtpTraining, MtpTraining.recipe_arguments),
    "exit": Recipe(ExitHeadTraining, ExitHeadTraining.recipe_arguments),
    "layers": Recipe(DistilledModelTraining, DistilledModelTraining.layers_recipe),
    "pair": Recipe(DistilledModelTraining, DistilledModelTraining.pair_recipe),
}
SHIPPED = "shipped"
LARGE_HIDDEN_SIZE = 256
"""From this size on, bfloat16 and Muon pay."""


def config_for(
    recipe: str,
    target: str,
    text: Sequence[str],
    *,
    minutes: float | None = None,
    adapter: str | None = None,
) -> dict[str, Any]:
    """The config of `fit` as plain values, as its YAML has them.

    Args:
        recipe: one of `RECIPES`.
        target: the directory of a transformers model.
        text: directories that `generate` wrote; or text files, directories and patterns;
            `["shipped"]` is SmolLM2's text.
        minutes: duration of the run; three epochs when None.
        adapter: an adapter of PEFT to merge into the target.

    Raises:
        FileNotFoundError, ValueError: the recipe does not support this target or this text.
    """
    if recipe not in RECIPES:
        advice = nearest(recipe, RECIPES) or f": give one of {', '.join(RECIPES)}"
        raise ValueError(f"there is no recipe {recipe!r}{advice}")
    training_class, recipe_arguments = RECIPES[recipe]
    shape = TargetShape.of(target)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    is_large = shape.hidden_size >= LARGE_HIDDEN_SIZE
    uses_bfloat16 = is_large and fast_bfloat16(device)

    # The recipe's own arguments come after the shared ones and override them.
    model_arguments = {
        "target_checkpoint": target,
        "target_dtype": "bfloat16" if uses_bfloat16 else "float32",
        "target_features": {"class_path": "AutoFeatures"},
        "learn_from_prompts": True,
        "warmup_steps": 30,
        "learning_rate": 0.002,
        "optimizer": "muon" if is_large else "adamw",
        **recipe_arguments(shape, minutes),
    }

    # Held-out prompts must leave room for the tokens that validations generate.
    num_decoded_tokens = min(NUM_DECODED_TOKENS, max(1, shape.max_positions // 4))
    max_length = min(MAX_TEXT_LENGTH, shape.max_positions - num_decoded_tokens)
    data = _data_section(shape, text, max_length)
    data["init_args"]["batch_size"] = _batch_size(shape, device)
    if adapter is not None:
        model_arguments["target_adapter"] = adapter
        if TextTokenizer.is_in(find_adapter(adapter).path):
            data["init_args"]["tokenizer"] = adapter

    run_name = f"{Path(target).expanduser().absolute().name}_{recipe}"
    if list(text) != [SHIPPED]:
        run_name = f"{run_name}_{name_of_text(text)}"
    trainer_arguments = _trainer_arguments(run_name, minutes, num_decoded_tokens)
    trainer_arguments["precision"] = "bf16-mixed" if uses_bfloat16 else "32-true"
    return {
        "seed_everything": 0,
        "data": data,
        "model": {"class_path": training_class.__name__, "init_args": model_arguments},
        "trainer": trainer_arguments,
    }


def _batch_size(target: TargetShape, device: str) -> int:
    """The largest power of two that fits half the free memory, up to 16 on a GPU and 4 on a CPU."""
    # A rough estimate: logits and hidden states of four draft tokens, 4 bytes each.
    draft_vocab_size = target.draft_vocabulary or target.vocab_size
    bytes_per_token = 4 * (12 * draft_vocab_size + 64 * target.hidden_size)
    bytes_per_row = min(MAX_TEXT_LENGTH, target.max_positions) * bytes_per_token

    num_free_bytes = available_bytes(device) or 0
    batch_size = 16 if device == "cuda" else 4
    while batch_size > 1 and batch_size * bytes_per_row > num_free_bytes // 2:
        batch_size //= 2
    return batch_size


# --- the trainer section ---


def _trainer_arguments(
    run_name: str,
    minutes: float | None,
    num_decoded_tokens: int,
) -> dict[str, Any]:
    """Arguments of the Trainer: callbacks, logger, and the length of the run."""
    best_draft = {"monitor": "val/block_efficiency", "mode": "max"}
    checkpoint_files = {
        "dirpath": f"checkpoints/{run_name}",
        "auto_insert_metric_name": False,
        "enable_version_counter": False,
    }
    callbacks = [
        _section("DecodeHeldOut", num_prompts=4, max_new_tokens=num_decoded_tokens),
        _section("ModelCheckpoint", **checkpoint_files, filename="best", **best_draft),
        _section("ModelCheckpoint", **checkpoint_files, filename="last"),
        {"class_path": "RunProgressBar"},
        {"class_path": "AcceptedPerRound"},
        {"class_path": "HyperparameterTable"},
    ]
    if minutes is None:
        callbacks.append(_section("EarlyStopping", **best_draft, patience=6))
        duration: dict[str, Any] = {"max_epochs": 3}
    else:
        require_number("minutes", minutes, low=0.0, high=1e6, low_open=True)
        callbacks.append(_section("TimeLimit", minutes=minutes))
        # Six validations in a long run, and none within a short one.
        seconds_between_validations = round(60 * max(5.0, minutes / 6))
        duration = {"max_epochs": -1, "val_check_interval": _time(seconds_between_validations)}
    return {
        **duration,
        "gradient_clip_val": 1.0,
        # A run of a given time measures a batch, to leave time for the last validation.
        "num_sanity_val_steps": 0 if minutes is None else 1,
        "enable_model_summary": False,
        "logger": _section("TensorBoardCurves", name=run_name),
        "callbacks": callbacks,
    }


def _section(class_path: str, **arguments: Any) -> dict[str, Any]:
    """An object in a config: its class and its arguments."""
    return {"class_path": class_path, "init_args": arguments}


def _time(num_seconds: int) -> str:
    """A time as the Trainer reads it: days, hours, minutes and seconds."""
    num_minutes, seconds = divmod(num_seconds, 60)
    hours, minutes = divmod(num_minutes, 60)
    return f"00:{hours:02}:{minutes:02}:{seconds:02}"


# --- the data section ---


def _data_section(target: TargetShape, text: Sequence[str], max_length: int) -> dict[str, Any]:
    """The data module for some text: `GeneratedText`, or `TextFiles` for other files.

    Raises:
        ValueError: the text is of both kinds.
    """
    paths = list(text)
    if paths == [SHIPPED]:
        paths = shipped_corpora()
    generated_paths = [path for path in paths if (Path(path).expanduser() / MANIFEST).is_file()]
    if generated_paths and len(generated_paths) < len(paths):
        other_path = next(path for path in paths if path not in generated_paths)
        raise ValueError(
            f"{other_path} is not what `generate` wrote, and {generated_paths[0]} is: train on one "
            "kind at a time"
        )

    if not generated_paths:
        return _section(
            "TextFiles",
            paths=paths,
            tokenizer=target.directory,
            vocab_size=target.vocab_size,
            length=max_length,
            num_val=16,
            num_test=16,
            prompt_length=max(1, min(64, max_length // 2)),
        )

    num_prompts = 0
    manifests = []
    for path in paths:
        manifest = read_manifest(Path(path).expanduser())
        num_prompts += int(manifest.get("num_prompts", 0))
        manifests.append(manifest)
    _warn_of_other_writers(target, manifests)
    return _section(
        "GeneratedText",
        paths=paths,
        tokenizer=target.directory,
        vocab_size=target.vocab_size,
        max_length=max_length,
        num_val=min(16, max(1, num_prompts // 10)),
        num_test=min(16, max(1, num_prompts // 20)),
    )


def _warn_of_other_writers(target: TargetShape, manifests: Sequence[Mapping[str, Any]]) -> None:
    """Warn if another model wrote the text: a draft learns to predict that model instead."""
    writers = {str(manifest["target"].get("sha256")) for manifest in manifests}
    directory = Path(target.directory).expanduser()
    try:
        own_hashes = {weights_sha256(directory), single_file_sha256(directory)}
    except ValueError:
        # Weights that are missing or damaged are refused when the run loads them.
        return
    if writers - own_hashes:
        source = manifests[0]["target"].get("source")
        log.warning(
            "the text was written by another model (%s), so the draft learns less about %s: let "
            "it write its own text with `lightning_specdec generate`",
            source,
            target.directory,
        )
