"""The verbs about checkpoints and the machine: info, export, env.

Each takes its parsed options and gives an exit code.
"""

from __future__ import annotations

import json
import os
import platform
from argparse import Namespace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lightning_specdec import __version__, checkpoint, draft_file
from lightning_specdec.cli_parser import UsageError
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.safetensors_file import read_header
from lightning_specdec.target_reference import TargetReference
from lightning_specdec.terminal import say
from lightning_specdec.text.bytes import NAME, ByteTokenizer

MOST_SHOWN = 80
"""Characters of a prompt that are shown."""
MOST_LISTED = 16
"""Values of an argument that are shown."""


def info(options: Namespace) -> int:
    """Say what a checkpoint or a draft file holds."""
    given = [path for path in (options.FILE, options.ckpt) if path is not None]
    if len(given) != 1:
        raise UsageError(f"name one checkpoint or draft file, got {len(given)} (see `lightning_specdec info --help`)")
    path = Path(given[0])
    if path.suffix == draft_file.SUFFIX:
        return _info_draft(path)
    loaded = checkpoint.load(path)
    say(f"checkpoint  {path} ({path.stat().st_size:,} bytes)")
    if loaded.reference is None:
        _show_part("target     ", loaded.target)
    else:
        _show_reference(loaded.reference)
    drafts = loaded.drafters if loaded.others else {}
    for label, drafter in {f"draft {name}": each for name, each in drafts.items()}.items() or [
        ("drafter", loaded.drafter)
    ]:
        _show_part(f"{label:<11}", drafter)
    if loaded.tokenizer is not None:
        say(f"tokenizer   {json.dumps(loaded.tokenizer)[1:-1]}")
    if loaded.tokenizer == NAME:
        for prompt in loaded.prompts:
            say(f"prompt      {_cut(ByteTokenizer().decode(prompt))}")
    else:
        say(f"prompts     {json.dumps(loaded.prompts)}")
    for name, values in (("recipe", loaded.recipe), ("training", loaded.training)):
        _show_values(name, values)
    return 0


def _info_draft(path: Path) -> int:
    """Say what a draft file holds; its target need not be there."""
    drafter, found = draft_file.build_draft(path), draft_file.read(path)
    kinds = sorted({tensor.dtype for tensor in read_header(path).values()})
    say(f"draft file  {path} ({path.stat().st_size:,} bytes{''.join(f', {kind}' for kind in kinds)})")
    _show_reference(found.target)
    _show_part("drafter    ", drafter)
    _show_values("recipe", found.recipe)
    _show_values("versions", found.versions)
    return 0


def _show_reference(target: TargetReference) -> None:
    """A line for a target that lies elsewhere."""
    sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size, "num_layers": target.num_layers}
    shown = ", ".join(f"{name}={size}" for name, size in sizes.items() if size is not None)
    say(f"target      {json.dumps(str(target))[1:-1]}: {json.dumps(target.kind)[1:-1]}, {shown}, not in this file")


def _show_values(name: str, values: dict[str, Any]) -> None:
    """A line for each value of a recipe and the like."""
    for key, value in values.items():
        label = f"{name:<11} {json.dumps(key)[1:-1]}"
        if key != "losses" or not isinstance(value, dict):
            say(f"{label}: {json.dumps(value)}")
            continue
        for loss, number in value.items():
            say(f"{label} {json.dumps(loss)[1:-1]}: {_short(number)}")


def _short(value: object) -> str:
    """A value of a recipe, and of a number its first digits."""
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


def _cut(text: str) -> str:
    """A text with nothing in it that a terminal obeys, or its beginning where it is long."""
    return json.dumps(text[:MOST_SHOWN]) + ("..." if len(text) > MOST_SHOWN else "")


def _show_part(label: str, module: LanguageModel | Drafter, indent: str = "  ") -> None:
    """A line for a model or a drafter, and lines for the models and drafters that it is made of."""
    parts: list[tuple[str, LanguageModel | Drafter]] = []
    plain: dict[str, Any] = {}
    for key, value in module.arguments().items():
        listed = value if isinstance(value, list | tuple) else [value]
        inner = [each for each in listed if isinstance(each, LanguageModel | Drafter)]
        parts += [(key, each) for each in inner]
        if not inner:
            plain[key] = value
    say(f"{label} {_described(type(module).__name__, plain)}, {_parameters(module)}")
    for key, part in parts:
        _show_part(f"{indent}{key:<{max(1, 11 - len(indent))}}", part, indent + "  ")


def _described(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={_argument(value)}' for key, value in arguments.items())})"


def _argument(value: object) -> str:
    """A value; of a long list how long it is."""
    return f"[{len(value)} values]" if isinstance(value, list) and len(value) > MOST_LISTED else str(value)


def _parameters(module: torch.nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in module.parameters()):,} parameters"


def export(options: Namespace) -> int:
    """Strip a training checkpoint to what decoding needs, or to its draft."""
    loaded = checkpoint.load(options.ckpt)
    output = Path(options.output)
    alone = output.suffix == draft_file.SUFFIX
    is_ours, kind = (
        (draft_file.is_draft_file, "draft file") if alone else (checkpoint.is_exported, "exported checkpoint")
    )
    if output.exists() and not output.is_dir() and not is_ours(output):
        what = "the input, and training goes on from it" if output.samefile(options.ckpt) else f"no {kind}"
        raise ValueError(f"{output} is kept as it is, for it is {what}: choose another --output")
    if alone:
        if loaded.reference is None:
            raise ValueError(
                f"{options.ckpt} holds its target itself, which a draft file cannot name: export it as a .ckpt, or "
                "train the draft on a directory of transformers that stays as it is"
            )
        draft_file.save_draft(output, loaded.drafter, loaded.reference, recipe=loaded.recipe, dtype=options.dtype)
    else:
        checkpoint.save(
            output,
            loaded.reference or loaded.target,
            loaded.drafter,
            prompts=loaded.prompts,
            recipe=loaded.recipe,
            others=loaded.others,
            name=loaded.name,
            tokenizer=loaded.tokenizer,
            dtype=options.dtype,
        )
    say(f"{output}: {output.stat().st_size:,} bytes")
    return 0


def env(options: Namespace) -> int:
    """Print what a bug report should say of this machine."""
    rows: list[tuple[str, object]] = [
        ("lightning_specdec", __version__),
        ("python", platform.python_version()),
        ("platform", platform.platform()),
    ]
    for package in ("torch", "lightning", "jsonargparse", "torchmetrics", "tensorboard", "transformers", "numpy"):
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            rows.append((package, "not installed"))
    rows.append(("cpu", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"))
    rows.append(("cpu capability", torch.backends.cpu.get_cpu_capability()))
    devices = [torch.device("cpu")]
    for i in range(torch.cuda.device_count()):
        devices.append(torch.device("cuda", i))
        rows.append((f"cuda:{i}", torch.cuda.get_device_name(i)))
    if torch.cuda.device_count() == 0:
        rows.append(("cuda", "no device"))
    for device in devices:
        kinds = [name for name in ("float32", "bfloat16", "float16", "float64") if _computes(device, name)]
        rows.append((f"dtypes on {device}", ", ".join(kinds)))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        say(f"{name:<{width}}  {value}")
    return 0


def _computes(device: torch.device, dtype: str) -> bool:
    """Whether a matrix product works in this type here."""
    try:
        ones = torch.ones(2, 2, device=device, dtype=getattr(torch, dtype))
        return bool((ones @ ones).sum().item() == 8)
    except (RuntimeError, NotImplementedError):
        return False
