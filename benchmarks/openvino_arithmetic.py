"""Compare ways to compute with quantized weights in OpenVINO: exactness across widths, and cost.

    python benchmarks/openvino_arithmetic.py --prompts question.jsonl \
        --output docs/results/openvino_arithmetic.json

OpenVINO quantizes activations at run time, but not in calls on a single token. The drafted and the
standard output of a model may therefore differ, unless every call uses the same arithmetic. The
variants alternate, call by call and prompt by prompt, because the speed of a shared machine drifts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from spec_bench import load, mixed
from torch import Tensor

from lightning_specdec.bench.manifest import manifest
from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.models import loading
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.openvino import OpenVINOLM, converted

WIDTHS = (1, 2, 4, 8)
"""Tokens of the timed calls."""
NUM_UNTIMED = 2
"""Calls of each width that prepare the network for it."""
NUM_COMPARED = 32
"""Tokens whose logits are compared."""
CONTEXT_LENGTH = 200
"""Tokens before the timed calls."""


@dataclass(frozen=True)
class Variant:
    """One arithmetic.

    Args:
        name: label in the table.
        dynamic_group: number of activations that share a scale; 0 does not quantize activations.
        fewest_tokens: a call computes at least this many tokens of each row.
        is_quantized: whether the weights are stored quantized. Otherwise they are rounded in the
            same way and stored as floats.
    """

    name: str
    dynamic_group: int
    fewest_tokens: int
    is_quantized: bool = True


VARIANTS = (
    Variant("groups of 32, one token alone", 32, 1),
    Variant("groups of 32, at least two tokens", 32, 2),
    Variant("groups of 64, at least two tokens", 64, 2),
    Variant("groups of 128, at least two tokens", 128, 2),
    Variant("a scale for each token, at least two tokens", 4096, 2),
    Variant("activations not quantized", 0, 1),
    Variant("activations not quantized, at least two tokens", 0, 2),
    Variant("int8 weights decompressed beforehand", 0, 1, is_quantized=False),
)


def _no_texts() -> dict[str, int]:
    return {"greedy": 0, "sampled": 0}


@dataclass
class Outcome:
    """The measurements of a variant.

    Args:
        largest_difference: largest difference of two logits of the same token, between calls of
            widths 1 to 16 and calls on two rows, as a fraction of the logits' range.
        call_milliseconds: median by width.
        num_texts: number of decoded texts, greedy and sampled.
        num_equal: number of texts whose drafted output equals the standard output.
        num_tokens: new tokens of the greedy texts.
        standard_seconds, drafted_seconds: time of the greedy texts.
    """

    largest_difference: float
    call_milliseconds: dict[int, float]
    num_texts: dict[str, int] = field(default_factory=_no_texts)
    num_equal: dict[str, int] = field(default_factory=_no_texts)
    num_tokens: int = 0
    standard_seconds: float = 0.0
    drafted_seconds: float = 0.0


def main() -> None:
    options = make_parser().parse_args()
    torch.set_num_threads(options.threads)
    model = loading.load_model(options.model, dtype=options.dtype)
    prompts = mixed(load(options.prompts, model.tokenizer), options.num_prompts)

    models = {}
    for variant in select_variants(options.variants):
        models[variant.name] = build(model, variant, options)
    text_models = models
    if options.text_variants is not None:
        text_variants = select_variants(options.text_variants)
        text_models = {variant.name: models[variant.name] for variant in text_variants}

    text = joined_text(prompts, CONTEXT_LENGTH + NUM_COMPARED)
    differences = {name: largest_difference(target, text) for name, target in models.items()}
    milliseconds = call_milliseconds(models, text[:, :CONTEXT_LENGTH], options.repeats)
    outcomes = {name: Outcome(differences[name], milliseconds[name]) for name in models}
    print_calls(outcomes)
    write(outcomes, options)

    for prompt in prompts:
        decode_text(text_models, prompt, outcomes, options)
        print_texts({name: outcomes[name] for name in text_models})
        write(outcomes, options)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--prompts", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--quantization", default="int8", choices=("int8", "int4"))
    parser.add_argument("--variants", type=int, nargs="*", help="numbers of the variants, from 0")
    parser.add_argument(
        "--text_variants", type=int, nargs="*", help="numbers of those that also decode texts"
    )
    parser.add_argument("--num_prompts", type=int, default=20)
    parser.add_argument("--max_new_tokens", type=int, default=100)
    parser.add_argument("--max_sampled_tokens", type=int, default=100)
    parser.add_argument("--num_draft_tokens", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    return parser


def select_variants(numbers: Sequence[int] | None) -> Sequence[Variant]:
    """The variants with these numbers; all of them for None."""
    if numbers is None:
        return VARIANTS
    return [VARIANTS[number] for number in numbers]


def joined_text(prompts: Sequence[list[int]], length: int) -> Tensor:
    """A row `[1, T]` of the prompts one after the other, up to a length."""
    tokens: list[int] = []
    for prompt in prompts:
        tokens += prompt
    return torch.tensor([tokens[:length]])


def build(model: HuggingFaceLM, variant: Variant, options: argparse.Namespace) -> OpenVINOLM:
    """The model with a variant's arithmetic."""
    quantization = options.quantization if variant.is_quantized else None
    if not variant.is_quantized:
        model = loading.load_model(options.model, dtype=options.dtype)
        round_weights(model)
    directory = converted(model, quantization)
    target = OpenVINOLM(model, directory, quantization, dynamic_group=variant.dynamic_group)
    target._fewest_tokens = variant.fewest_tokens
    return target


@torch.no_grad()
def round_weights(model: HuggingFaceLM) -> None:
    """Round the weights of linear layers to int8 with a scale for each output; keep the dtype."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            scale = module.weight.abs().amax(dim=1, keepdim=True) / 127
            module.weight.data = (module.weight / scale).round() * scale


def read(model: OpenVINOLM, text: Tensor, width: int, batch_size: int = 1) -> Tensor:
    """Logits of the text's last tokens, which are read `width` tokens at a time."""
    state = model.init_state(batch_size, text.shape[1])
    rows = text.expand(batch_size, -1)
    model(rows[:, :-NUM_COMPARED], state, logits_for=slice(-1, None))
    logits = []
    for tokens in rows[:, -NUM_COMPARED:].split(width, dim=1):
        logits.append(model(tokens, state).logits.float())
    return torch.cat(logits, dim=1)


@torch.inference_mode()
def largest_difference(model: OpenVINOLM, text: Tensor) -> float:
    """`Outcome.largest_difference` of a model."""
    reference = read(model, text, NUM_COMPARED)
    logits_range = reference.max() - reference.min()
    shapes = [(width, 1) for width in range(1, 17)]
    shapes += [(1, 2), (3, 2)]
    differences = []
    for width, batch_size in shapes:
        logits = read(model, text, width, batch_size)
        differences.append(float((logits - reference).abs().max() / logits_range))
    return max(differences)


@torch.inference_mode()
def call_milliseconds(
    models: dict[str, OpenVINOLM],
    context: Tensor,
    repeats: int,
) -> dict[str, dict[int, float]]:
    """Median milliseconds of a call by width, for each variant."""
    states = {}
    for name, model in models.items():
        states[name] = model.init_state(1, context.shape[1] + 32)
        model(context, states[name], logits_for=slice(-1, None))

    medians: dict[str, dict[int, float]] = {name: {} for name in models}
    for width in WIDTHS:
        tokens = context[:, :width]
        milliseconds: dict[str, list[float]] = {name: [] for name in models}
        for repeat in range(NUM_UNTIMED + repeats):
            for name, model in models.items():
                start = time.perf_counter()
                model(tokens, states[name])
                if repeat >= NUM_UNTIMED:
                    milliseconds[name].append(1000 * (time.perf_counter() - start))
                states[name].truncate([context.shape[1]])
        for name, values in milliseconds.items():
            medians[name][width] = statistics.median(values)
    return medians


def decode_text(
    models: dict[str, OpenVINOLM],
    prompt: list[int],
    outcomes: dict[str, Outcome],
    options: argparse.Namespace,
) -> None:
    """Decode a prompt with and without drafts, greedy and at temperature 1; update the outcomes."""
    lengths_and_temperatures = {
        "greedy": (options.max_new_tokens, 0.0),
        "sampled": (options.max_sampled_tokens, 1.0),
    }
    for kind, (max_new_tokens, temperature) in lengths_and_temperatures.items():
        settings: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "rule": "ExactMatch",
        }
        for name, model in models.items():
            standard = autoregressive_decode(model, [prompt], **settings)
            drafted = speculative_decode(
                model,
                NGramDrafter(),
                [prompt],
                num_draft_tokens=options.num_draft_tokens,
                **settings,
            )
            outcome = outcomes[name]
            outcome.num_texts[kind] += 1
            outcome.num_equal[kind] += standard.tokens == drafted.tokens
            if kind == "greedy":
                outcome.num_tokens += standard.num_new_tokens
                outcome.standard_seconds += standard.seconds
                outcome.drafted_seconds += drafted.seconds


def write(outcomes: dict[str, Outcome], options: argparse.Namespace) -> None:
    """Write the measurements so far."""
    if options.output is None:
        return
    settings = {name: str(value) for name, value in vars(options).items()}
    header = manifest(options=settings, device=torch.device("cpu"))
    record = {
        "manifest": {**header, "openvino": version("openvino")},
        "variants": {name: asdict(outcome) for name, outcome in outcomes.items()},
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n")


def print_calls(outcomes: dict[str, Outcome]) -> None:
    columns = [f"{width:>5} tok" for width in WIDTHS]
    print(f"{'variant':<50} difference", *columns)
    for name, outcome in outcomes.items():
        columns = [f"{outcome.call_milliseconds[width]:>6.1f} ms" for width in WIDTHS]
        print(f"{name:<50} {outcome.largest_difference:>10.1e}", *columns, flush=True)


def print_texts(outcomes: dict[str, Outcome]) -> None:
    print(f"\n{'variant':<50} equal texts, greedy and sampled; tokens/s standard and drafted")
    for name, outcome in outcomes.items():
        counts = []
        for kind, num_texts in outcome.num_texts.items():
            counts.append(f"{outcome.num_equal[kind]} of {num_texts}")
        standard = outcome.num_tokens / outcome.standard_seconds
        drafted = outcome.num_tokens / outcome.drafted_seconds
        print(f"{name:<50} {', '.join(counts)}; {standard:.1f}, {drafted:.1f}", flush=True)


if __name__ == "__main__":
    main()
