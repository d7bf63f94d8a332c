"""The verb `info`: describe a checkpoint, draft file, model, or pair, or the environment."""

from __future__ import annotations

import json
import os
import platform
from argparse import Namespace
from collections.abc import Iterator, Mapping
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
    use_shipped_files,
)
from lightning_specdec.config.kinds import DRAFTERS
from lightning_specdec.config.memory import available_bytes, gigabytes
from lightning_specdec.config.models import DEFAULT_DEVICE, TargetSource, check_directory
from lightning_specdec.config.pairs import Pair, get_pair, list_pairs
from lightning_specdec.config.terminal import display_width, padded, say, short

SUMMARY = (
    "describe a checkpoint, draft file, model or pair; by default the environment and all pairs"
)
EXAMPLES = """\
lightning_specdec info
lightning_specdec info checkpoints/rnn.safetensors
lightning_specdec info checkpoints/smollm2 --dtype bfloat16
lightning_specdec info --pair gpt2    (exit code 1 if it does not fit this machine)"""
PACKAGES = ("torch", "lightning", "transformers", "jsonargparse", "torchmetrics", "numpy")

RECIPE = ("training", "data", "epochs", "steps", "tokens_seen", "training_seconds", "losses")
"""Entries of a draft's recipe that are shown without -v."""

MAX_NAME_WIDTH = 32
MAX_VALUE_LENGTH = 200


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
    """Describe MODEL; returns 1 for a pair that does not fit this machine."""
    description = _describe(options)
    if chosen(options, OutputSettings).output == "json":
        say(json.dumps(description))
    else:
        _print(description, verbose="verbose" in options)
    return 1 if description.get("fits") is False else 0


def _describe(options: Namespace) -> dict[str, Any]:
    """Describe what the flags name, in values that JSON can store."""
    drafter_path = class_named(options)
    if "MODEL" in options:
        # MODEL is short for --ckpt (also for a draft file), --pair, or a target.
        flag = model_flag(options.MODEL)
        other_flags = [name for name in ("ckpt", "pair") if name in options]
        if other_flags:
            raise UsageError(
                f"name one model, got --{other_flags[0]} and {options.MODEL!r}: drop one of them"
            )
        setattr(options, flag, options.MODEL)
        use_shipped_files(options)
    elif "ckpt" not in options and "pair" not in options and drafter_path is None:
        return _describe_environment()

    if drafter_path is not None and "ckpt" not in options:
        raise UsageError(
            "--drafter names the drafter class of a file: give a checkpoint or a draft file too"
        )
    source = chosen(options, TargetSource)
    if source.ckpt is not None:
        return _describe_file(Path(source.ckpt).expanduser(), drafter_path)
    if source.pair is not None:
        return _describe_pair(get_pair(source.pair), source.device)
    check_directory(source.target)
    return _describe_model(source)


def _print(description: dict[str, Any], *, verbose: bool) -> None:
    """Print one line for each value; without `verbose`, shorten prompts and the recipe."""
    full_recipe = description.get("recipe") or {}
    values = dict(description)
    if not verbose:
        values["recipe"] = {name: full_recipe[name] for name in RECIPE if name in full_recipe}
        if values.get("prompts"):
            values["prompts"] = _summarize_prompts(values["prompts"])

    lines = list(_lines(values))
    width = min(MAX_NAME_WIDTH, max(display_width(name) for name, _ in lines))
    for name, value in lines:
        # Prompts are as long as `verbose` wants them.
        text = value if name == "prompts" else short(value, MAX_VALUE_LENGTH)
        say(f"{padded(name, width)}  {text}")

    printed_recipe = values.get("recipe") or {}
    if len(printed_recipe) < len(full_recipe):
        say("(-v shows the rest of the recipe)")


def _summarize_prompts(prompts: list[list[int]]) -> str:
    lengths = [len(prompt) for prompt in prompts]
    span = f"{min(lengths)}"
    if max(lengths) > min(lengths):
        span = f"{min(lengths)} to {max(lengths)}"
    return f"{len(prompts)} with {span} tokens (-v shows them)"


def _lines(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield a name and a text for each value, nested mappings included."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}{name} ")
        elif value is None:
            continue
        elif name.endswith("_bytes") and not prefix:
            # Only our own entries: a file may put anything into its recipe.
            yield name.removesuffix("_bytes"), gigabytes(value)
        elif isinstance(value, bool):
            yield prefix + name, "yes" if value else "no"
        elif isinstance(value, int):
            yield prefix + name, f"{value:,}"
        else:
            yield prefix + name, str(value)


def _describe_environment() -> dict[str, Any]:
    # Imported here because it takes a sixth of the time of --help.
    from importlib.metadata import version

    import torch

    cpu_capability = torch.backends.cpu.get_cpu_capability()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    description: dict[str, Any] = {
        "lightning_specdec": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for package in PACKAGES:
        description[package] = version(package)
    description["cpu"] = (
        f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {cpu_capability}"
    )
    description["cuda"] = gpus or None
    description["pair"] = {pair.name: _summarize_pair(pair) for pair in list_pairs()}
    return description


def _summarize_pair(pair: Pair) -> str:
    description = _describe_pair(pair, "cpu")
    fits = "does not fit" if description["fits"] is False else "fits"
    return f"{gigabytes(description['needed_bytes'])}, {fits}: {pair.description}"


def _describe_pair(pair: Pair, chosen_device: str | None) -> dict[str, Any]:
    """Describe a pair, the memory it needs, and whether the device has it (None: unknown)."""
    from lightning_specdec.checkpoints.loading import find_device

    device = chosen_device or pair.device or DEFAULT_DEVICE
    is_cpu = device == "cpu"
    available = available_bytes(device if is_cpu else str(find_device(device)))
    needed = pair.needed_bytes(packed=is_cpu)
    if is_cpu and pair.needs_gpu:
        fits: bool | None = False
    elif available is None:
        fits = None
    else:
        fits = needed <= available

    description: dict[str, Any] = {"name": pair.name, "description": pair.description}
    if pair.ckpt is not None:
        description["ckpt"] = pair.ckpt
    for role, model in zip(("target", "draft"), pair.models, strict=False):
        weights = model.quantization or model.dtype
        description[role] = f"{model.location}, {model.size.parameters:,} parameters, {weights}"
    description.update(
        drafter=None if pair.own_drafter is None else pair.own_drafter.label,
        draft_file=pair.draft_file if pair.has_trained_draft else None,
        num_draft_tokens=pair.num_draft_tokens,
        needed_bytes=needed,
        available_bytes=available,
        fits=fits,
    )
    return description


def _describe_model(source: TargetSource) -> dict[str, Any]:
    from lightning_specdec.checkpoints.loading import find_device
    from lightning_specdec.models.loading import load_model

    progress(f"loading {source.target} ...")
    model = load_model(
        source.target,
        device=find_device(source.device or DEFAULT_DEVICE),
        dtype=source.dtype,
        quantization=source.quantization,
        revision=source.revision,
        adapter=source.adapter,
        trust_remote_code=source.trust_remote_code,
    ).pack()
    return {
        "model": source.target,
        "adapter": source.adapter,
        "architecture": type(model.model).__name__,
        "parameters": model.num_parameters,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": source.quantization,
        "device": str(model.device),
        "context": model.max_positions,
        "position_switch": model.position_switch,
        "vocabulary": model.vocab_size,
        "snapshot_bytes": model.snapshot_bytes() or None,
        "chat_template": model.tokenizer is not None and model.tokenizer.has_chat_template,
    }


def _describe_file(path: Path, drafter: str | None) -> dict[str, Any]:
    """Describe a checkpoint, or a draft file, whose target may be stored elsewhere."""
    from lightning_specdec.checkpoints import checkpoint, runs

    path = runs.find(path)
    loaded = checkpoint.load(path, drafter=drafter)
    if loaded.reference is None:
        target = _describe_module(loaded.target)
    else:
        target = f"{loaded.reference}, not in this file"
    return {
        "file": str(path),
        "size_bytes": path.stat().st_size,
        "target": target,
        "draft": {name: _describe_module(draft) for name, draft in loaded.drafts.items()},
        "tokenizer": loaded.tokenizer,
        "prompts": loaded.prompts,
        "recipe": loaded.recipe,
    }


def _describe_module(module: Any) -> str:
    """Describe a model or a drafter as the constructor call that builds it."""
    arguments = []
    for name, value in module.arguments().items():
        text = _describe_module(value) if hasattr(value, "arguments") else value
        arguments.append(f"{name}={text}")

    is_drafter = hasattr(module, "propose")
    class_name = DRAFTERS.name_of(type(module)) if is_drafter else type(module).__name__
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    return f"{class_name}({', '.join(arguments)}) of {num_parameters:,} parameters"
