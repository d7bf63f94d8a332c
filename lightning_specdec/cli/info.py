"""The verb `info`: a checkpoint, a draft file, a model or a pair; without one, the environment and the pairs."""

from __future__ import annotations

import json
import os
import platform
from argparse import Namespace
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_specdec import __version__
from lightning_specdec.cli.common import progress
from lightning_specdec.cli.options import (
    OutputSettings,
    Parser,
    UsageError,
    add_class,
    chosen,
    class_named,
    model_flag,
)
from lightning_specdec.config.kinds import DRAFTERS
from lightning_specdec.config.memory import available_bytes, gigabytes
from lightning_specdec.config.models import TargetSource, check_directory
from lightning_specdec.config.pairs import Pair, get_pair, list_pairs
from lightning_specdec.config.terminal import say, short

SUMMARY = (
    "describe a checkpoint, draft file, model or pair; by default the environment and all pairs"
)
EXAMPLES = """\
lightning_specdec info
lightning_specdec info checkpoints/rnn.safetensors
lightning_specdec info checkpoints/smollm2 --dtype bfloat16
lightning_specdec info --pair gpt2    (exit code 1 when it does not fit this machine)"""
PACKAGES = ("torch", "lightning", "transformers", "jsonargparse", "torchmetrics", "numpy")

RECIPE = ("training", "data", "epochs", "steps", "tokens_seen", "training_seconds", "losses")
"""What is shown of how a draft was trained."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "MODEL",
        nargs="?",
        help="a checkpoint, a draft file, a model's directory or name, or a pair",
    )
    parser.add_settings("Model", TargetSource, skip=("target",))
    parser.add_settings("Output", OutputSettings)
    add_class(parser)


def run(options: Namespace) -> int:
    """Describe MODEL; 1 for a pair that does not fit this machine."""
    if "MODEL" in options:
        setattr(options, model_flag(options.MODEL), options.MODEL)
    elif "ckpt" not in options and "pair" not in options:
        return _show(_environment(), options)
    source, drafter = chosen(options, TargetSource), class_named(options)
    if source.ckpt is not None:
        return _show(_file(Path(source.ckpt).expanduser(), drafter), options)
    if drafter is not None:
        raise UsageError(
            "--drafter names the drafter class of a file: give a checkpoint or a draft file too"
        )
    if source.pair is not None:
        return _show(_pair(get_pair(source.pair), source.device), options)
    check_directory(source.target)
    return _show(_model(source), options)


def _show(values: dict[str, Any], options: Namespace) -> int:
    if chosen(options, OutputSettings).output == "json":
        say(json.dumps(values))
    else:
        recipe = values.get("recipe") or {}
        if "verbose" not in options:
            values = {**values, "recipe": {name: recipe[name] for name in RECIPE if name in recipe}}
            if lengths := sorted({len(prompt) for prompt in values.get("prompts") or ()}):
                span = " to ".join(map(str, dict.fromkeys((lengths[0], lengths[-1]))))
                values["prompts"] = f"{len(values['prompts'])} with {span} tokens (-v shows them)"
        lines = list(_lines(values))
        width = min(32, max(len(name) for name, _ in lines))
        say(
            "\n".join(
                f"{name:<{width}}  {value if name == 'prompts' else short(value, 200)}"
                for name, value in lines
            )
        )
        if len(recipe) > len(values.get("recipe") or {}):
            say("(-v shows the rest of the recipe)")
    return 1 if values.get("fits") is False else 0


def _lines(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A name and a text for each value, also of nested mappings."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}{name} ")
        elif value is not None:
            is_ours = not prefix and name.endswith(
                "_bytes"
            )  # what a file says of its recipe may be anything
            yield (
                (name.removesuffix("_bytes"), gigabytes(value))
                if is_ours
                else (prefix + name, str(value))
            )


def _environment() -> dict[str, Any]:
    import torch

    return {
        "lightning_specdec": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{package: version(package) for package in PACKAGES},
        "cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or None,
        "pair": {pair.name: _fit(pair) for pair in list_pairs()},
    }


def _fit(pair: Pair) -> str:
    found = _pair(pair, "cpu")
    fits = "does not fit" if found["fits"] is False else "fits"
    return f"{gigabytes(found['needed_bytes'])}, {fits}: {pair.description}"


def _pair(pair: Pair, device: str) -> dict[str, Any]:
    """A pair, the memory that it needs, and whether the device has it (None: unknown)."""
    from lightning_specdec.checkpoints.loading import find_device

    on_cpu = device == "cpu"
    available = available_bytes(device if on_cpu else str(find_device(device)))
    needed = pair.needed_bytes(packed=on_cpu)
    models = {
        role: f"{model.place}, {model.size.parameters:,} parameters, {model.quantization or model.dtype}"
        for role, model in zip(("target", "draft"), pair.models, strict=False)
    }
    return {
        "name": pair.name,
        "description": pair.description,
        **models,
        "drafter": pair.drafter.label,
        "num_draft_tokens": pair.num_draft_tokens,
        "needed_bytes": needed,
        "available_bytes": available,
        "fits": not (on_cpu and pair.needs_gpu)
        and (None if available is None else needed <= available),
    }


def _model(source: TargetSource) -> dict[str, Any]:
    from lightning_specdec.checkpoints.loading import find_device
    from lightning_specdec.models.loading import load_model

    progress(f"loading {source.target} ...")
    keywords = {
        name: getattr(source, name)
        for name in ("dtype", "quantization", "revision", "trust_remote_code")
    }
    model = load_model(source.target, device=find_device(source.device), **keywords).pack()
    return {
        "model": source.target,
        "architecture": type(model.model).__name__,
        "parameters": model.num_parameters,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": source.quantization,
        "device": str(model.device),
        "context": model.max_positions,
        "vocabulary": model.vocab_size,
        "chat_template": model.tokenizer is not None and model.tokenizer.has_chat_template,
    }


def _file(path: Path, drafter: str | None) -> dict[str, Any]:
    """A checkpoint or a draft file, whose target may be elsewhere."""
    from lightning_specdec.checkpoints import checkpoint, runs

    path = runs.find(path)
    loaded = checkpoint.load(path, drafter=drafter)
    return {
        "file": str(path),
        "size_bytes": path.stat().st_size,
        "target": _described(loaded.target)
        if loaded.reference is None
        else f"{loaded.reference}, not in this file",
        "draft": {name: _described(drafter) for name, drafter in loaded.drafts.items()},
        "tokenizer": loaded.tokenizer,
        "prompts": loaded.prompts,
        "recipe": loaded.recipe,
    }


def _described(module: Any) -> str:
    """A model or a drafter as the call that builds it."""
    arguments = [
        f"{name}={_described(value) if hasattr(value, 'arguments') else value}"
        for name, value in module.arguments().items()
    ]
    number = sum(parameter.numel() for parameter in module.parameters())
    name = DRAFTERS.name_of(type(module)) if hasattr(module, "propose") else type(module).__name__
    return f"{name}({', '.join(arguments)}) of {number:,} parameters"
