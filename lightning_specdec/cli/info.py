"""The verb `info`: what a checkpoint, a draft file, a model or a pair is; without an argument, the environment."""

from __future__ import annotations

import json
import os
import platform
import time
from argparse import Namespace
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_specdec import __version__
from lightning_specdec.cli.common import find_device, progress, set_threads, set_up_logs
from lightning_specdec.cli.options import MeasureSettings, OutputSettings, Parser, chosen, is_checkpoint
from lightning_specdec.cli.pairs import FitSettings, show
from lightning_specdec.config.decoding import MAX_TOKENS
from lightning_specdec.config.memory import gigabytes
from lightning_specdec.config.models import TargetSource, check_directory
from lightning_specdec.config.pairs import list_pairs
from lightning_specdec.config.settings import setting
from lightning_specdec.config.terminal import say

if TYPE_CHECKING:
    from lightning_specdec.checkpoints.target_reference import TargetReference
    from lightning_specdec.drafters import Drafter
    from lightning_specdec.models import LanguageModel

SUMMARY = "say what a checkpoint, draft file, model or pair is; without one, what a bug report needs"
EXAMPLES = """\
lightning_specdec info
lightning_specdec info checkpoints/rnn.safetensors
lightning_specdec info draft.safetensors
lightning_specdec info checkpoints/smollm2 --dtype bfloat16    (loads it, and generates ten tokens)"""
PACKAGES = ("torch", "lightning", "jsonargparse", "torchmetrics", "tensorboard", "transformers", "numpy", "torchao")


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(OutputSettings):
    """What a model generates."""

    prompt: str = setting("The quick brown fox", "text that a model continues")
    max_new_tokens: int = setting(10, "tokens that a model generates", minimum=1, maximum=MAX_TOKENS)


def add_arguments(parser: Parser) -> None:
    """The flags of the verb."""
    parser.add_argument("MODEL", nargs="?", help="a checkpoint, a draft file, a model's directory or name, or a pair")
    parser.add_argument("--ckpt", dest="MODEL", help="the same", metavar="FILE")
    parser.add_settings("of a model", TargetSource, skip=("ckpt", "pair", "target"))
    parser.add_settings("generation", GenerateSettings)
    parser.add_settings("machine", MeasureSettings, only=("threads",))


def run(options: Namespace) -> int:
    """Say what MODEL is."""
    set_up_logs(options)
    settings, name = chosen(options, GenerateSettings), getattr(options, "MODEL", None)
    if name is None:
        return _environment()
    path = Path(name).expanduser()
    if not path.is_dir():
        if pairs := [pair for pair in list_pairs() if pair.name == name and not path.exists()]:
            return show(pairs, FitSettings(output=settings.output), one=True)
    if is_checkpoint(path):
        return _file(path)
    check_directory(name)
    return _model(name, chosen(options, TargetSource, target=name), settings, options)


def _environment() -> int:
    import torch

    rows = [("lightning_specdec", __version__), ("python", platform.python_version())]
    rows.append(("platform", platform.platform()))
    for package in PACKAGES:
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            rows.append((package, "not installed"))
    capability = torch.backends.cpu.get_cpu_capability()
    rows.append(("cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {capability}"))
    for i in range(torch.cuda.device_count()):
        rows.append((f"cuda:{i}", torch.cuda.get_device_name(i)))
    if not torch.cuda.device_count():
        rows.append(("cuda", "no device"))
    _aligned(rows)
    return 0


def _aligned(rows: list[tuple[str, Any]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        say(f"{name:<{width}}  {value}")


def _model(name: str, source: TargetSource, settings: GenerateSettings, options: Namespace) -> int:
    """Load a model, and generate with it."""
    device, started = find_device(source.device), time.perf_counter()
    progress(f"loading {name} ...")
    from lightning_specdec.decoder import SpeculativeDecoder
    from lightning_specdec.drafters import NGramDrafter
    from lightning_specdec.models.loading import load_model

    keywords: dict[str, Any] = {key: getattr(source, key) for key in ("dtype", "quantization", "revision")}
    model = load_model(name, device=device, trust_remote_code=source.trust_remote_code, **keywords).pack()
    seconds = time.perf_counter() - started
    set_threads(options, model.num_parameters)
    decoder = SpeculativeDecoder(model, NGramDrafter())
    prompt = [min(1, model.vocab_size - 1)] if decoder.tokenizer is None else decoder.encode(settings.prompt)
    decoder.decode_standard([prompt], max_new_tokens=1)  # the first call of all allocates and warms up
    result = decoder.decode_standard([prompt], max_new_tokens=settings.max_new_tokens, eos=())
    (row,) = result.rows
    values: dict[str, Any] = {
        "model": name,
        "architecture": type(model.model).__name__,
        "parameters": model.num_parameters,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": source.quantization,
        "device": str(model.device),
        "memory_bytes": model.memory_bytes,
        "context": model.max_positions,
        "vocabulary": model.vocab_size,
        "load_seconds": round(seconds, 3),
        "prompt": prompt if decoder.tokenizer is None else settings.prompt,
        "tokens": row.tokens,
        "text": row.text,
        "tokens_per_second": round(result.tokens_per_second, 1),
    }
    if settings.output == "json":
        say(json.dumps(values))
    else:
        shown = values | {"parameters": f"{model.num_parameters:,}", "memory_bytes": gigabytes(model.memory_bytes)}
        _aligned([(key.replace("_", " "), value) for key, value in shown.items() if value is not None])
    return 0


def _file(path: Path) -> int:
    """Say what a checkpoint or a draft file holds; a target that lies elsewhere need not be there."""
    from lightning_specdec.checkpoints import checkpoint, runs

    path = runs.find(path)
    loaded = checkpoint.load(path)
    say(f"file        {path} ({path.stat().st_size:,} bytes)")
    if loaded.reference is None:
        _show_part("target", loaded.target)
    else:
        _show_reference(loaded.reference)
    for name, each in (loaded.drafts if len(loaded.drafts) > 1 else {"": loaded.drafter}).items():
        _show_part(f"draft {name}" if name else "drafter", each)
    prompts: list[Any] = loaded.prompts
    if loaded.tokenizer is not None:
        say(f"tokenizer   {_plain(loaded.tokenizer)}")
        if loaded.tokenizer == "bytes":
            prompts = [bytes(prompt).decode(errors="replace") for prompt in prompts]
    for prompt in prompts:
        say(f"prompt      {_plain(prompt)}")
    _show_values("recipe", loaded.recipe)
    _show_values("training", loaded.training)
    return 0


def _plain(value: object) -> str:
    """A value in one line of at most 120 characters."""
    text = f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def _show_reference(target: TargetReference) -> None:
    sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size, "num_layers": target.num_layers}
    shown = ", ".join(f"{name}={size}" for name, size in sizes.items() if size is not None)
    say(f"target      {target}: {target.kind}, {shown}, not in this file")


def _show_values(name: str, values: dict[str, Any]) -> None:
    """A line for each value of a recipe and the like."""
    for key, value in values.items():
        inner = value if isinstance(value, dict) else {"": value}
        for part, each in inner.items():
            say(f"{name:<11} {key}{f' {part}' if part else ''}: {_plain(each)}")


def _show_part(label: str, module: LanguageModel | Drafter, indent: str = "") -> None:
    """A line for a model or a drafter, and indented lines for those that it is made of."""
    import torch

    parts: list[tuple[str, Any]] = []
    plain: dict[str, str] = {}
    for key, value in module.arguments().items():
        listed = value if isinstance(value, list | tuple) else [value]
        inner = [each for each in listed if isinstance(each, torch.nn.Module)]
        parts += [(key, each) for each in inner]
        if not inner:
            plain[key] = f"[{len(value)} values]" if isinstance(value, list) and len(value) > 16 else str(value)
    arguments = ", ".join(f"{key}={value}" for key, value in plain.items())
    number = sum(parameter.numel() for parameter in module.parameters())
    say(f"{indent + label:<11} {type(module).__name__}({arguments}), {number:,} parameters")
    for key, part in parts:
        _show_part(key, part, indent + "  ")
