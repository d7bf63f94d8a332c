"""The verbs that need no Trainer: decode, info, export, env.

Each takes its parsed options and gives an exit code.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lightning_specdec import __version__, checkpoint
from lightning_specdec.checks import require_int
from lightning_specdec.cli_options import RULES as RULE_ARGUMENTS
from lightning_specdec.cli_prompts import read_prompts
from lightning_specdec.cli_report import decoded_text, summary_table
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.drafters import Drafter
from lightning_specdec.inference import DecodeInterrupted, DecodeResult
from lightning_specdec.inference.rows import check_prompt
from lightning_specdec.manifest import manifest
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import RULES, AcceptanceRule, Sampling, SamplingOptions
from lightning_specdec.threads import limit_threads

log = logging.getLogger("lightning_specdec")
MAX_THREADS = 1024
MAX_TOKENS = 2**20
"""More than any model here can hold in memory, and less than what overflows a size."""


def decode(options: Namespace) -> int:
    """Decode both ways, show the outputs, measure."""
    _set_up_logs(options.log_level, json_lines=options.log_json)
    if options.threads is not None:
        torch.set_num_threads(require_int("threads", options.threads, 1, MAX_THREADS))
    require_int("num_draft_tokens", options.num_draft_tokens, 1, MAX_TOKENS)
    require_int("max_new_tokens", options.max_new_tokens, 1, MAX_TOKENS)
    require_int("repeats", options.repeats, 1)
    require_int("batch_size", options.batch_size, 1)
    draws = SamplingOptions(
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p
    )
    if Sampling(**draws).greedy and (idle := [name for name in ("top_k", "top_p", "min_p") if draws[name] is not None]):
        log.warning("temperature 0 takes the likeliest token: %s changes nothing", " and ".join(idle))
    rule = make_rule(options)
    given = read_prompts(options.prompt or [], options.prompts_file)
    decoder = SpeculativeDecoder.from_checkpoint(
        options.ckpt, device=find_device(options.device), dtype=options.dtype and getattr(torch, options.dtype)
    )
    if options.threads is None:
        limit_threads(decoder.target.num_parameters)
    for where, prompt in given or []:
        check_prompt(prompt, decoder.target.vocab_size, where)
    prompts = decoder.prompts if given is None else [prompt for _, prompt in given]
    if not prompts:
        raise ValueError(f"{options.ckpt} keeps no prompts of its own: give some with --prompt")
    compile_seconds = _compile(decoder, options.num_draft_tokens, draws) if options.compile else 0.0
    shared: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "eos": options.eos,
        "seed": options.seed,
        "logprobs": options.logprobs,
    }
    standard: DecodeResult | None = None
    speculative: DecodeResult | None = None
    try:
        if options.mode != "speculative":
            standard = decoder.decode_standard(prompts, **draws, **shared)
        if options.mode != "standard":
            speculative = decoder.decode(
                prompts, num_draft_tokens=options.num_draft_tokens, rule=rule, **draws, **shared
            )
        bench = decoder.benchmark(
            prompts,
            num_draft_tokens=options.num_draft_tokens,
            rule=rule,
            repeats=options.repeats,
            batch_size=options.batch_size,
            mode=options.mode,
            equal_treatment=True,
            **draws,
            **shared,
        )
        summary, interrupted = bench.summary(), bench.interrupted
        summary["warmup_seconds"] += compile_seconds
    except KeyboardInterrupt as stop:
        if isinstance(stop, DecodeInterrupted):
            if stop.result.rule is None:
                standard = stop.result
            else:
                speculative = stop.result
        summary, interrupted = {}, True
    found = manifest(options=vars(options), checkpoint=options.ckpt, device=decoder.target.device)
    if options.output == "json":
        print(json.dumps({"summary": summary, "prompts": _rows(standard, speculative), "manifest": found}))
    else:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(decoded_text(standard, speculative, colour=colour, logprobs=options.logprobs))
        if summary:
            print(summary_table(summary, num_prompts=len(prompts), manifest=found))
    if interrupted:
        print("interrupted: what is above was settled by then", file=sys.stderr)
    return 130 if interrupted else 0


def make_rule(options: Namespace) -> AcceptanceRule:
    """The rule that the options name, with its arguments."""
    values = vars(options)
    given = {name: values[f"rule.{name}"] for name in ("epsilon", "delta") if values[f"rule.{name}"] is not None}
    if foreign := given.keys() - RULE_ARGUMENTS[options.rule].keys():
        raise ValueError(
            f"{options.rule} takes no {' and no '.join(sorted(foreign))}: drop it or choose another --rule"
        )
    return RULES[options.rule](**given)


def find_device(name: str) -> torch.device:
    """The device, if this machine has it and torch can use it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that torch is giving up
            device = torch.device(name)
            torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(
            f"there is no usable device {name!r} here: try --device cpu (`lightning_specdec env`)"
        ) from error
    return device


def _compile(decoder: SpeculativeDecoder, num_draft_tokens: int, draws: SamplingOptions) -> float:
    """Compile the draft if this machine can; say so if it cannot."""
    from lightning_specdec.drafters.compiled import CompilerMissing

    try:
        return decoder.compile_draft(num_draft_tokens=num_draft_tokens, **draws)
    except (CompilerMissing, ValueError) as error:
        log.warning("%s", error)
        return 0.0


def _rows(standard: DecodeResult | None, speculative: DecodeResult | None) -> list[dict[str, Any]]:
    """For each prompt both ways' new tokens and counts."""
    merged: dict[int, dict[str, Any]] = {}
    for name, result in (("standard", standard), ("speculative", speculative)):
        for row in result.to_dict()["rows"] if result else []:
            index, prompt = row.pop("index"), row.pop("prompt")
            merged.setdefault(index, {"index": index, "prompt": prompt})[name] = row
    return list(merged.values())


def info(options: Namespace) -> int:
    """Say what a checkpoint holds."""
    loaded = checkpoint.load(options.ckpt)
    print(f"checkpoint  {options.ckpt} ({Path(options.ckpt).stat().st_size:,} bytes)")
    parts: list[tuple[str, LanguageModel | Drafter]] = [("target", loaded.target), ("drafter", loaded.drafter)]
    for name, module in parts:
        shown: dict[str, Any] = module.arguments()
        models = {key: value for key, value in shown.items() if isinstance(value, LanguageModel)}
        plain = {key: value for key, value in shown.items() if key not in models}
        print(f"{name:<11} {_described(type(module).__name__, plain)}, {_parameters(module)}")
        for key, model in models.items():
            print(f"  {key:<9} {_described(type(model).__name__, model.arguments())}, {_parameters(model)}")
    print(f"prompts     {json.dumps(loaded.prompts)}")
    for name, values in (("recipe", loaded.recipe), ("training", loaded.training)):
        for key, value in values.items():
            print(f"{name:<11} {json.dumps(key)[1:-1]}: {json.dumps(value)}")
    return 0


def _described(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in arguments.items())})"


def _parameters(module: torch.nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in module.parameters()):,} parameters"


def export(options: Namespace) -> int:
    """Strip a training checkpoint to what decoding needs."""
    loaded = checkpoint.load(options.ckpt)
    checkpoint.save(options.output, loaded.target, loaded.drafter, prompts=loaded.prompts, recipe=loaded.recipe)
    print(f"{options.output}: {Path(options.output).stat().st_size:,} bytes")
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
        print(f"{name:<{width}}  {value}")
    return 0


def _computes(device: torch.device, dtype: str) -> bool:
    """Whether a matrix product works in this type here."""
    try:
        ones = torch.ones(2, 2, device=device, dtype=getattr(torch, dtype))
        return bool((ones @ ones).sum().item() == 8)
    except (RuntimeError, NotImplementedError):
        return False


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"level": record.levelname.lower(), "name": record.name, "message": record.getMessage()})


def _set_up_logs(level: str, *, json_lines: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if json_lines else logging.Formatter("%(levelname)s: %(message)s"))
    log.handlers = [handler]
    log.setLevel(level.upper())


VERBS: dict[str, Callable[[Namespace], int]] = {"decode": decode, "info": info, "export": export, "env": env}
