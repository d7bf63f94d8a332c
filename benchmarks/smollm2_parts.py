"""What the parts of a call cost: linear layers plain and packed, joined products, ways to find the largest logit.

    make smollm2
    python benchmarks/smollm2_parts.py --output docs/results/smollm2_parts.json

Each figure is the least of several runs over all layers of the model, one after the other, so that no layer's weights
lie in the nearest cache when they are needed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_specdec.manifest import manifest
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import load_model
from lightning_specdec.models.packed import PackedLinear
from lightning_specdec.rules.sampling import largest

WIDTHS = (1, 2, 4, 8, 10, 16)
PROMPT = 700
REPEATS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for dtype in options.dtypes:
        model = load_model(options.model, dtype=dtype)
        assert isinstance(model, HuggingFaceLM)
        with torch.inference_mode():
            for row in [*linears(model), *joined(model), *largest_logits(model)]:
                rows.append({"dtype": dtype, **row})
                print(rows[-1], flush=True)
    if options.output:
        found = manifest(options={**vars(options), "output": None}, device=torch.device("cpu"))
        options.output.write_text(json.dumps({"manifest": found, "rows": rows}, indent=1) + "\n")


def least(run: Callable[[], Any]) -> float:
    """Milliseconds of the fastest of several runs."""
    seconds = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return 1e3 * min(seconds[1:])


def linears(model: HuggingFaceLM) -> list[dict[str, Any]]:
    """All linear layers of the model, by tokens of a call: as they are, and packed."""
    plain = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    packed = [PackedLinear(layer.weight, layer.bias) for layer in plain]
    rows = []
    for width in (*WIDTHS, PROMPT):
        row: dict[str, Any] = {"part": "linear layers", "num_tokens": width}
        for name, layers in (("plain", plain), ("packed", packed)):
            # Of a prompt only the last position is scored: the head, the last of the layers, is left out.
            used: list[Any] = list(layers)[:-1] if width == PROMPT else list(layers)
            calls = [(layer, _inputs(model, width, layer.in_features)) for layer in used]
            row[name] = least(partial(_call_all, calls))
        rows.append(row)
    return rows


def joined(model: HuggingFaceLM) -> list[dict[str, Any]]:
    """Queries, keys and values in three products or one, gate and up in two or one; packed, one token and nine."""
    layers = list(model.model.model.layers)
    groups = {
        "queries, keys, values": [[x.self_attn.q_proj, x.self_attn.k_proj, x.self_attn.v_proj] for x in layers],
        "gate, up": [[x.mlp.gate_proj, x.mlp.up_proj] for x in layers],
    }
    rows = []
    for name, parts in groups.items():
        apart = [[PackedLinear(each.weight, each.bias) for each in group] for group in parts]
        together = [PackedLinear(torch.cat([each.weight for each in group]), None) for group in parts]
        for width in (1, 9):
            inputs = _inputs(model, width, together[0].in_features)
            row: dict[str, Any] = {"part": name, "num_tokens": width}
            row["apart"] = least(partial(_call_all, [(each, inputs) for group in apart for each in group]))
            row["joined"] = least(partial(_call_all, [(each, inputs) for each in together]))
            rows.append(row)
    return rows


def largest_logits(model: HuggingFaceLM) -> list[dict[str, Any]]:
    """The largest of nine positions' logits, found in several ways."""
    logits = torch.randn(1, 9, model.vocab_size, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    ways: dict[str, Callable[[Tensor], Any]] = {
        "argmax": lambda values: values.argmax(-1),
        "argmax in float32": lambda values: values.float().argmax(-1),
        "max": lambda values: values.max(-1),
        "by blocks": largest,
    }
    found = {name: least(partial(way, logits)) for name, way in ways.items()}
    return [{"part": "largest logit", "num_tokens": 9, **found}]


def _call_all(calls: Sequence[tuple[nn.Module, Tensor]]) -> None:
    for layer, inputs in calls:
        layer(inputs)


def _inputs(model: HuggingFaceLM, num_tokens: int, size: int) -> Tensor:
    return torch.randn(1, num_tokens, size, generator=torch.Generator().manual_seed(0)).to(model.dtype)


if __name__ == "__main__":
    main()
