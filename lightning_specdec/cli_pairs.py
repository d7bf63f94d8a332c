"""The verb `pairs`: the registry, what fits this machine, and what a local Ollama server has.

Takes its parsed options and gives an exit code. Loads no torch but for a GPU's memory.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from lightning_specdec import ollama
from lightning_specdec.checks import require_int
from lightning_specdec.cli_groups import MAX_TOKENS
from lightning_specdec.cli_parser import UsageError
from lightning_specdec.memory import available_bytes, gigabytes
from lightning_specdec.pairs import Pair, PairModel, get_pair, list_pairs
from lightning_specdec.terminal import say

PROMPT = "The quick brown fox"
NUM_TOKENS = 10


def pairs(options: Namespace) -> int:
    """List the pairs, or what Ollama has; 1 if a pair that was asked for by name does not fit."""
    require_int("context", options.context, 1, MAX_TOKENS)
    require_int("batch_size", options.batch_size, 1, MAX_TOKENS)
    if options.ollama:
        if options.check is not None:
            raise UsageError("--check and --ollama exclude each other: give one of them")
        return _ollama(options)
    if options.model is not None:
        raise UsageError("--model is for --ollama: add it")
    chosen = [get_pair(options.check)] if options.check else list_pairs()
    available = _available(options.device)
    rows = [_row(pair, available, options) for pair in chosen]
    if options.output == "json":
        found = {"available_bytes": available, "device": options.device}
        say(json.dumps({"pairs": rows, **found, "context": options.context, "batch_size": options.batch_size}))
    else:
        _print_check(rows, available, options) if options.check is not None else _print_list(rows, options)
    return 1 if options.check and rows[0]["fits"] is False else 0


def _available(device: str) -> int | None:
    """Free memory of a device by its name."""
    if device == "cpu":
        return available_bytes()
    from lightning_specdec.cli_common import find_device

    return available_bytes(str(find_device(device)))


def _row(pair: Pair, available: int | None, options: Namespace) -> dict[str, Any]:
    """A pair as plain values."""
    on_gpu = not options.device.startswith("cpu")
    weights, loading = pair.weight_bytes(packed=not on_gpu)
    caches = pair.cache_bytes(batch_size=options.batch_size, length=options.context)
    needed = max(loading, weights + caches)
    runs = on_gpu or not pair.needs_gpu
    return {
        "name": pair.name,
        "description": pair.description,
        "drafter": pair.drafter,
        "drafter_arguments": dict(pair.drafter_arguments),
        "num_draft_tokens": pair.num_draft_tokens,
        "target": _model(pair.target, options),
        "draft": None if pair.draft is None else _model(pair.draft, options),
        "weight_bytes": weights,
        "cache_bytes": caches,
        "needed_bytes": needed,
        "needs_gpu": pair.needs_gpu,
        "fits": False if not runs else None if available is None else needed <= available,
        "file": str(pair.path),
    }


def _model(model: PairModel, options: Namespace) -> dict[str, Any]:
    packed = options.device.startswith("cpu")
    caches = model.size.cache_bytes(model.dtype, batch_size=options.batch_size, length=options.context)
    return {
        "source": model.place,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "gated": model.gated,
        "parameters": model.size.parameters,
        "context": model.size.context,
        "weight_bytes": model.size.weight_bytes(model.dtype, model.quantization, packed=packed),
        "cache_bytes": caches,
    }


def _print_list(rows: Sequence[dict[str, Any]], options: Namespace) -> None:
    table = [["name", "target", "draft", "dtype", "window", "memory", "here"]]
    for row in rows:
        target, draft = row["target"], row["draft"]
        quantized = draft and draft["quantization"]
        table.append(
            [
                row["name"],
                target["source"],
                f"{draft['source']}{f' ({quantized})' if quantized else ''}" if draft else row["drafter"],
                target["dtype"]
                if not draft or draft["dtype"] == target["dtype"]
                else f"{target['dtype']}, {draft['dtype']}",
                str(row["num_draft_tokens"]),
                gigabytes(row["needed_bytes"]),
                _fits(row, options),
            ]
        )
    texts = "" if options.batch_size == 1 else f" in each of {options.batch_size} texts"
    say(f"memory: weights and caches of {options.context:,} tokens{texts}; or loading, where that takes more\n")
    say(_aligned(table))
    if any(row[role]["gated"] for row in rows for role in ("target", "draft") if row[role]):
        say("\nmeta-llama's models are gated: accept their terms on the hub and set HF_TOKEN")
    say("\nlightning_specdec decode --pair NAME")


def _print_check(rows: Sequence[dict[str, Any]], available: int | None, options: Namespace) -> None:
    free = "unknown" if available is None else gigabytes(available)
    texts = "a text" if options.batch_size == 1 else f"{options.batch_size} texts"
    length = f"{options.context:,} tokens, or of a model's context"
    say(f"free on {options.device}: {free}; caches for {texts} of {length}\n")
    table = [["name", "model", "parameters", "dtype", "weights", "caches", "here"]]
    for row in rows:
        for role in ("target", "draft"):
            if (model := row[role]) is not None:
                kind = model["dtype"] if model["quantization"] is None else model["quantization"]
                sizes = [gigabytes(model["weight_bytes"]), gigabytes(model["cache_bytes"])]
                first = row["name"] if role == "target" else ""
                table.append([first, model["source"], f"{model['parameters']:,}", kind, *sizes, ""])
        sums = [gigabytes(row["weight_bytes"]), gigabytes(row["cache_bytes"])]
        table.append(["", "together", "", "", *sums, _fits(row, options)])
        if row["needed_bytes"] > row["weight_bytes"] + row["cache_bytes"]:
            table.append(["", "while loading", "", "", gigabytes(row["needed_bytes"]), "", ""])
    say(_aligned(table))


def _fits(row: dict[str, Any], options: Namespace) -> str:
    if row["needs_gpu"] and options.device.startswith("cpu"):
        return "needs a GPU"
    return {True: "fits", False: "does not fit", None: "unknown"}[row["fits"]]


def _aligned(table: Sequence[Sequence[str]]) -> str:
    """Columns of one width each."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def _ollama(options: Namespace) -> int:
    """List the server's models and have one of them write a few tokens."""
    models = ollama.list_models()
    names = [model.name for model in models]
    if options.model is not None and options.model not in names:
        raise ValueError(f"Ollama has no model {options.model!r}: it has {', '.join(names) or 'none'}")
    chosen = options.model or (names[0] if names else None)
    tried = None if chosen is None else ollama.generate(chosen, PROMPT, max_new_tokens=NUM_TOKENS)
    if options.output == "json":
        listed = [vars(model) for model in models]
        generation = None if tried is None else {**vars(tried), "tokens_per_second": tried.tokens_per_second}
        say(json.dumps({"host": ollama.host(), "models": listed, "generation": generation}))
        return 0
    if tried is None:
        say(f"Ollama at {ollama.host()} has no models: get one (`ollama pull llama3`)")
        return 0
    table = [["name", "parameters", "quantization", "size"]]
    table += [[model.name, model.parameters, model.quantization, gigabytes(model.size_bytes)] for model in models]
    say(_aligned(table))
    rate = "" if tried.tokens_per_second is None else f", {tried.tokens_per_second:.1f} tokens/s"
    say(f"\n{tried.model}: {PROMPT!r} goes on with {tried.text!r} ({tried.num_tokens} tokens{rate})")
    return 0
