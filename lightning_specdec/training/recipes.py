"""Recipes: the config of a draft's training that follows from a target, its text and a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_specdec.config.checks import require_number
from lightning_specdec.config.memory import available_bytes
from lightning_specdec.config.pairs import shipped_directory
from lightning_specdec.data.corpus import MANIFEST, read_manifest
from lightning_specdec.models.loading import examine

RECIPES = {
    "eagle": "EagleTraining",
    "medusa": "MultiTokenTraining",
    "exit": "ExitHeadTraining",
    "layers": "DistilledModelTraining",
    "pair": "DistilledModelTraining",
}
"""The training module of each."""
SHIPPED = "shipped"
_LONGEST, _NEW_TOKENS = 512, 48
_LARGE = 256
"""Hidden size from which bfloat16 pays, and matrices are stepped by Muon."""


def config_for(recipe: str, target: str, text: Sequence[str], *, minutes: float | None = None) -> dict[str, Any]:
    """The YAML of `fit` as plain values.

    Args:
        recipe: one of `RECIPES`.
        target: the directory of a transformers model.
        text: directories that `generate` wrote, or text files, directories and patterns; `["shipped"]` is SmolLM2's.
        minutes: how long the run takes; three epochs when None.

    Raises:
        FileNotFoundError, ValueError: the recipe does not serve this target or this text.
    """
    if recipe not in RECIPES:
        raise ValueError(f"there is no recipe {recipe!r}: give one of {', '.join(RECIPES)}")
    if not Path(target).expanduser().is_dir():
        raise FileNotFoundError(f"{target}: no such model directory; --target takes one that `save_pretrained` wrote")
    config = examine(target).config.get_text_config()
    missing = [name for name in ("hidden_size", "num_hidden_layers", "vocab_size") if not getattr(config, name, 0)]
    if missing:
        raise ValueError(f"{target} is a {config.model_type} without {missing[0]}, which the recipe {recipe} builds by")
    vocabulary, layers, hidden = config.vocab_size, config.num_hidden_layers, config.hidden_size
    positions = getattr(config, "max_position_embeddings", None) or _LONGEST + _NEW_TOKENS
    num_new = min(_NEW_TOKENS, max(1, positions // 4))
    dtype = "bfloat16" if hidden >= _LARGE and _fast_bfloat16() else "float32"
    reduced = vocabulary // 6 // 256 * 256 or None  # a sixth has most of what is said
    given: dict[str, Any] = {"target_checkpoint": target, "target_dtype": dtype}
    given |= {"target_features": {"class_path": "FeaturesByNeed"}, "learn_from_prompts": True, "warmup_steps": 30}
    given |= {"learning_rate": 0.002, "optimizer": "muon" if hidden >= _LARGE else "adamw"}
    if recipe == "eagle":
        heads = getattr(config, "num_attention_heads", 1)
        if hidden % heads or hidden // heads % 2:
            heads = 1
        keys = getattr(config, "num_key_value_heads", None) or heads
        wide = getattr(config, "intermediate_size", None) or 4 * hidden
        given |= {"num_heads": heads, "num_key_heads": heads if heads % keys else keys, "intermediate_size": wide}
        given |= {"attention_window": 128, "random_lengths": True, "position_decay": 0.6, "num_draft_tokens": 4}
    elif recipe == "medusa":
        given |= {"freeze_target": True, "num_heads": 4, "num_draft_tokens": 4}
    elif recipe == "exit":
        if layers < 2:
            raise ValueError(f"{target} has one layer, and an exit needs a layer to skip: take the recipe eagle")
        given |= {"num_draft_tokens": 2}
    elif recipe == "layers":
        if layers < 2:
            raise ValueError(f"{target} has one layer, and a draft of its layers would be the target: take eagle")
        ends = range(max(1, layers // 10))
        kept = sorted({*ends, *(layers - 1 - each for each in ends)})
        given |= {"draft_layers": kept if len(kept) < layers else [0], "num_draft_tokens": 3, "learning_rate": 0.0005}
    else:
        size = max(32, hidden // 4 // 64 * 64)
        model = {"model_type": "llama", "hidden_size": size, "intermediate_size": 3 * size, "vocab_size": vocabulary}
        model |= {"num_hidden_layers": max(1, layers // 8), "num_attention_heads": size // 32}
        model |= {"max_position_embeddings": positions, "tie_word_embeddings": True}
        given |= {"draft": {"class_path": "HuggingFaceLM", "init_args": {"model": model}}, "num_draft_tokens": 3}
    if recipe in ("eagle", "medusa", "exit"):
        given["draft_vocabulary"] = reduced
    width = reduced or vocabulary
    row_bytes = min(_LONGEST, positions) * (
        4 * 12 * width + 64 * hidden * 4
    )  # logits of four guesses, and their layers
    free, most = available_bytes("cuda" if torch.cuda.is_available() else "cpu"), 16 if torch.cuda.is_available() else 4
    batch_size = next((size for size in (16, 8, 4, 2) if size <= most and (free or 0) // 2 >= size * row_bytes), 1)
    data = _data(target, text, vocabulary, min(_LONGEST, positions - num_new)) | {"batch_size": batch_size}
    name = f"{Path(target).expanduser().resolve().name}_{recipe}"
    return {
        "seed_everything": 0,
        "data": {"class_path": data.pop("class_path"), "init_args": data},
        "model": {"class_path": RECIPES[recipe], "init_args": given},
        "trainer": _trainer(name, minutes, num_new) | {"precision": "bf16-mixed" if dtype == "bfloat16" else "32-true"},
    }


def _trainer(name: str, minutes: float | None, num_new: int) -> dict[str, Any]:
    best = {"monitor": "val/block_efficiency", "mode": "max"}
    place = {"dirpath": f"checkpoints/{name}", "auto_insert_metric_name": False, "enable_version_counter": False}
    callbacks: list[dict[str, Any]] = [
        {"class_path": "DecodeHeldOut", "init_args": {"num_prompts": 4, "max_new_tokens": num_new}},
        {"class_path": "ModelCheckpoint", "init_args": {**place, "filename": "best", **best}},
        {"class_path": "ModelCheckpoint", "init_args": {**place, "filename": "last"}},
        *({"class_path": each} for each in ("RunProgressBar", "AcceptedPerRound", "HyperparameterTable")),
    ]
    if minutes is None:
        callbacks.append({"class_path": "EarlyStopping", "init_args": {**best, "patience": 6}})
        length: dict[str, Any] = {"max_epochs": 3}
    else:
        require_number("minutes", minutes, low=0.0, high=1e6, low_open=True)
        callbacks.append({"class_path": "TimeLimit", "init_args": {"minutes": minutes}})
        hours, rest = divmod(round(60 * max(5.0, minutes / 6)), 3600)
        length = {"max_epochs": -1, "val_check_interval": f"00:{hours:02}:{rest // 60:02}:{rest % 60:02}"}
    return {
        **length,
        "gradient_clip_val": 1.0,
        "num_sanity_val_steps": 0,
        "enable_model_summary": False,
        "logger": {"class_path": "TensorBoardCurves", "init_args": {"name": name}},
        "callbacks": callbacks,
    }


def _data(target: str, text: Sequence[str], vocabulary: int, longest: int) -> dict[str, Any]:
    """The data module's class and arguments: generated text, or files to cut into windows."""
    paths = list(text)
    if paths == [SHIPPED]:
        home = shipped_directory().parents[1] / "benchmarks" / "smollm2_text"
        paths = sorted(str(each.parent) for each in home.glob(f"*/{MANIFEST}"))
        if not paths:
            raise FileNotFoundError(f"{home}: the shipped text is part of the source tree: give your own with --text")
    generated = [path for path in paths if (Path(path).expanduser() / MANIFEST).is_file()]
    if generated and len(generated) < len(paths):
        other = next(path for path in paths if path not in generated)
        raise ValueError(f"{other} is not what `generate` wrote, and {generated[0]} is: train on one kind at a time")
    given: dict[str, Any] = {"paths": paths, "tokenizer": target, "vocab_size": vocabulary}
    if not generated:
        given |= {"class_path": "TextFiles", "length": longest, "num_val": 16, "num_test": 16}
        return given | {"prompt_length": max(1, min(64, longest // 2))}
    count = sum(int(read_manifest(Path(path).expanduser()).get("num_prompts", 0)) for path in paths)
    held = {"num_val": min(16, max(1, count // 10)), "num_test": min(16, max(1, count // 20))}
    return given | {"class_path": "GeneratedText", "max_length": longest, **held}


def _fast_bfloat16() -> bool:
    """Whether this machine computes in bfloat16 rather than imitates it."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
