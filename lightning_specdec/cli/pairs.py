"""The verb `pairs`: the registry, and what fits this machine. Loads no torch, except for a GPU's memory."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_specdec.cli.options import OutputSettings, Parser, chosen
from lightning_specdec.config.decoding import MAX_TOKENS
from lightning_specdec.config.memory import available_bytes, gigabytes
from lightning_specdec.config.pairs import Pair, get_pair, list_pairs
from lightning_specdec.config.settings import setting
from lightning_specdec.config.terminal import say

SUMMARY = "list the pairs of models, and which of them fit this machine"
EXAMPLES = """\
lightning_specdec pairs
lightning_specdec pairs gpt2 --context 1024    (exit code 1 when it does not fit)"""


@dataclass(frozen=True, kw_only=True)
class FitSettings(OutputSettings):
    """What the models have to fit."""

    context: int = setting(2048, "tokens of text that the caches are counted for", minimum=1, maximum=MAX_TOKENS)
    batch_size: int = setting(1, "texts decoded together", minimum=1, maximum=MAX_TOKENS)
    device: str = setting("cpu", "where the models would go, as cpu or cuda:0")


def add_arguments(parser: Parser) -> None:
    """The flags of the verb."""
    parser.add_argument("NAME", nargs="?", help="one pair, its models one by one")
    parser.add_settings("memory", FitSettings)


def run(options: Namespace) -> int:
    """List the pairs, or show one; 1 if that one does not fit."""
    settings, name = chosen(options, FitSettings), getattr(options, "NAME", None)
    return show([get_pair(name)] if name else list_pairs(), settings, one=name is not None)


def show(pairs: Sequence[Pair], settings: FitSettings, *, one: bool) -> int:
    """Print the pairs; 1 if the only one does not fit."""
    available = _available(settings.device)
    rows = [_row(pair, available, settings) for pair in pairs]
    if settings.output == "json":
        beside = {"available_bytes": available, **settings.to_dict()}
        say(json.dumps({"pairs": rows, **beside}))
    else:
        free = "unknown" if available is None else gigabytes(available)
        texts = f"{settings.context:,} tokens" + (f" x {settings.batch_size}" if settings.batch_size > 1 else "")
        say(f"free on {settings.device}: {free}")
        say(f"memory: weights and caches of {texts}, or loading if that takes more\n")
        say(_models(rows[0]) if one else _list(rows))
    return 1 if one and rows[0]["fits"] is False else 0


def _available(device: str) -> int | None:
    if device == "cpu":
        return available_bytes()
    from lightning_specdec.cli.common import find_device

    return available_bytes(str(find_device(device)))


def _row(pair: Pair, available: int | None, settings: FitSettings) -> dict[str, Any]:
    """A pair as plain values."""
    packed = settings.device.startswith("cpu")
    weights, loading = pair.weight_bytes(packed=packed)
    caches = pair.cache_bytes(batch_size=settings.batch_size, length=settings.context)
    needed = max(loading, weights + caches)
    runs = not packed or not pair.needs_gpu
    models = [
        {
            "role": role,
            "source": model.place,
            "dtype": model.dtype,
            "quantization": model.quantization,
            "gated": model.gated,
            "parameters": model.size.parameters,
            "weight_bytes": model.size.weight_bytes(model.dtype, model.quantization, packed=packed),
            "cache_bytes": model.size.cache_bytes(model.dtype, batch_size=settings.batch_size, length=settings.context),
        }
        for role, model in zip(("target", "draft"), pair.models, strict=False)
    ]
    return {
        "name": pair.name,
        "description": pair.description,
        "drafter": pair.drafter.label,
        "num_draft_tokens": pair.num_draft_tokens,
        "models": models,
        "weight_bytes": weights,
        "cache_bytes": caches,
        "needed_bytes": needed,
        "needs_gpu": pair.needs_gpu,
        "fits": False if not runs else None if available is None else needed <= available,
        "file": str(pair.path),
    }


def _list(rows: Sequence[dict[str, Any]]) -> str:
    table = [["name", "target", "draft", "dtype", "window", "memory", "here"]]
    for row in rows:
        target, *draft = row["models"]
        drafting = f"{draft[0]['source']} {draft[0]['quantization'] or ''}".strip() if draft else row["drafter"]
        figures = [str(row["num_draft_tokens"]), gigabytes(row["needed_bytes"]), _fits(row)]
        table.append([row["name"], target["source"], drafting, target["dtype"], *figures])
    gated = any(model["gated"] for row in rows for model in row["models"])
    notes = ["meta-llama's models are gated: accept their terms on the hub and set HF_TOKEN"] if gated else []
    return "\n".join([_aligned(table), "", *notes, "lightning_specdec decode --pair NAME"])


def _models(row: dict[str, Any]) -> str:
    table = [["", "model", "parameters", "dtype", "weights", "caches"]]
    for model in row["models"]:
        sizes = [gigabytes(model["weight_bytes"]), gigabytes(model["cache_bytes"])]
        kind = model["quantization"] or model["dtype"]
        table.append([model["role"], model["source"], f"{model['parameters']:,}", kind, *sizes])
    table.append(["together", "", "", "", gigabytes(row["weight_bytes"]), gigabytes(row["cache_bytes"])])
    head = f"{row['name']}: {row['description']}\ndrafter {row['drafter']}, window {row['num_draft_tokens']}\n"
    return f"{head}\n{_aligned(table)}\n\nneeds {gigabytes(row['needed_bytes'])}: {_fits(row)}"


def _fits(row: dict[str, Any]) -> str:
    if row["fits"] is False and row["needs_gpu"]:
        return "needs a GPU"
    return {True: "fits", False: "does not fit", None: "unknown"}[row["fits"]]


def _aligned(table: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
