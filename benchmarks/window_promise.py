"""The adaptive window's promise: a useless draft costs next to nothing, a good one saves what the best window would.

    OMP_NUM_THREADS=2 python benchmarks/window_promise.py --output docs/results/window_promise.json
    python benchmarks/window_promise.py --target checkpoints/smollm2 --dtype bfloat16

Without a target, random transformers are made: the target's upper layers add little, so that its own first layers are a
good draft at a quarter of its step, and another random network of that size is a useless one. With a target, the
useless draft is random, of the size that is given. Every ratio is the median over pairs of runs, one of each way in
turn, each pair on a prompt of its own; the prompt's reading by target and draft is included, the calibration is not.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from lightning_specdec.bench.calibration import calibrate
from lightning_specdec.drafters import Drafter, ModelDrafter, NGramDrafter
from lightning_specdec.inference import AdaptiveWindow, DecodeResult, Window, autoregressive_decode
from lightning_specdec.inference import speculative_decode as decode
from lightning_specdec.manifest import manifest
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import load_model

Way = Callable[[list[int]], DecodeResult]
MOST_LOST, MOST_MISSED = 1.05, 1.05
"""Seconds over standard decoding's with a useless draft; over the best fixed window's with a good one."""


def main() -> None:
    """Measure and print; with --output, write the figures and their manifest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="a model's directory or id; random when not given")
    parser.add_argument(
        "--draft", help="a good draft: a directory or id, or ngram; the target's first layers if random"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=16, help="of the random target")
    parser.add_argument("--hidden", type=int, default=512, help="width of the random models")
    parser.add_argument("--draft_layers", type=int, default=3, help="of the random drafts")
    parser.add_argument("--upper", type=float, default=0.05, help="what the random target's upper layers add, of 1")
    parser.add_argument("--prompt_length", type=int, default=64)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    target, good, useless = models(options)
    generator = torch.Generator().manual_seed(1)
    size = (options.repeats, options.prompt_length)
    prompts = torch.randint(target.vocab_size, size, generator=generator).tolist()
    rows = [promise(target, useless, "useless", prompts, options)]
    if good is not None:
        rows.append(promise(target, good, "good", prompts, options))
    if options.output:
        found = manifest(options={**vars(options), "output": None}, device=target.device)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"manifest": found, "rows": rows}, indent=1) + "\n")


def models(options: argparse.Namespace) -> tuple[LanguageModel, Drafter | None, Drafter]:
    """Target, good draft, useless draft."""
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    if options.target is not None:
        target = load_model(options.target, dtype=options.dtype, device=options.device)
        good: Drafter | None = None
        if options.draft == "ngram":
            good = NGramDrafter()
        elif options.draft is not None:
            good = ModelDrafter(load_model(options.draft, dtype=options.dtype, device=options.device).fused())
    else:
        target = HuggingFaceLM(config(options, options.layers)).eval()
        draft = HuggingFaceLM(config(options, options.draft_layers)).eval()
        with torch.no_grad():
            for layer in list(target.model.model.layers)[options.draft_layers :]:
                layer.self_attn.o_proj.weight.mul_(options.upper)
                layer.mlp.down_proj.weight.mul_(options.upper)
        weights = target.model.state_dict()
        draft.model.load_state_dict({name: weights[name] for name in draft.model.state_dict()})
        good = ModelDrafter(deepcopy(draft).to(options.device, dtype).fused())
        target = target.to(options.device, dtype)
    useless = HuggingFaceLM(config(options, options.draft_layers, target.vocab_size)).eval().to(options.device, dtype)
    return target.fused(), good, ModelDrafter(useless.fused())


def config(options: argparse.Namespace, num_layers: int, vocab_size: int = 4096) -> LlamaConfig:
    """A small Llama, with weights large enough that its output wanders."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 64,
        max_position_embeddings=8192,
        initializer_range=0.06,
        tie_word_embeddings=False,
    )


def promise(
    target: LanguageModel, drafter: Drafter, name: str, prompts: list[list[int]], options: argparse.Namespace
) -> dict[str, Any]:
    """One draft: the adaptive window's seconds over those of standard decoding and of each fixed window."""
    started = time.perf_counter()
    calibration = calibrate(target, drafter, context_length=options.prompt_length)
    calibration_seconds = time.perf_counter() - started
    costs = calibration.at(1)
    ratio = costs.round_seconds(0)
    print(
        f"{name}: calibrated in {calibration_seconds:.1f} s; plain round {ratio * 1e3:.2f} ms, draft step "
        f"{costs.draft_step_seconds / ratio:.3f} of it, 9 tokens {costs.round_seconds(8) / ratio:.2f} times as long",
        flush=True,
    )
    num_new = options.max_new_tokens
    ways: dict[str, Way] = {"standard": lambda prompt: autoregressive_decode(target, prompt, max_new_tokens=num_new)}
    ways["adaptive"] = speculation(target, drafter, AdaptiveWindow(calibration), num_new)
    if name == "good":
        ways |= {str(window): speculation(target, drafter, window, num_new) for window in options.windows}
    seconds, results = interleaved(ways, prompts)
    best = min((way for way in ways if way != "adaptive"), key=lambda way: sum(seconds[way]))
    tokens = {way: result.tokens for way, result in results.items()}
    row: dict[str, Any] = {
        "draft": name,
        "calibration_seconds": calibration_seconds,
        "calibration": calibration.to_dict(),
        "standard_seconds": statistics.median(seconds["standard"]),
        "seconds": seconds,
        "acceptance_rate": results["adaptive"].acceptance_rate,
        "over_standard": paired(seconds["adaptive"], seconds["standard"]),
        "best": best,
        "over_best": paired(seconds["adaptive"], seconds[best]),
        "fixed_over_standard": {way: paired(seconds[way], seconds["standard"]) for way in ways},
        "num_draft_calls": results["adaptive"].num_draft_calls,
        "same_tokens": [way for way in ways if tokens[way] == tokens["standard"]],
    }
    kept = row["over_standard"] <= MOST_LOST if name == "useless" else row["over_best"] <= MOST_MISSED
    print(
        f"  alpha {row['acceptance_rate']:.2f}; adaptive over standard {row['over_standard']:.3f}, over the best "
        f"({best}) {row['over_best']:.3f}: {'kept' if kept else 'NOT KEPT'}",
        flush=True,
    )
    print("  " + ", ".join(f"{way} {value:.3f}" for way, value in row["fixed_over_standard"].items()), flush=True)
    return row


def speculation(target: LanguageModel, drafter: Drafter, window: int | Window, num_new: int) -> Way:
    """Speculative decoding with that window."""
    return lambda prompt: decode(target, drafter, prompt, max_new_tokens=num_new, num_draft_tokens=window)


def interleaved(
    ways: dict[str, Way], prompts: list[list[int]]
) -> tuple[dict[str, list[float]], dict[str, DecodeResult]]:
    """Seconds of every way on each prompt, all ways in turn, after one prompt that is not timed; its results."""
    results = {name: way(prompts[0]) for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    for i, prompt in enumerate(prompts):
        for name in ways if i % 2 else reversed(ways):  # so that neither neighbour is always the same
            begin = time.perf_counter()
            ways[name](prompt)
            seconds[name].append(time.perf_counter() - begin)
    gc.enable()
    return seconds, results


def paired(first: list[float], second: list[float]) -> float:
    """The median ratio of runs that stood side by side."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


if __name__ == "__main__":
    main()
