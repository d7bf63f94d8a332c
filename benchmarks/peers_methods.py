"""The decoding methods that `peers.py` compares: every engine, weight type and kind of decoding."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

CONTEXT = 4000
"""Tokens of the long text of the part `context`."""

Load = dict[str, Any]
"""Arguments for loading an engine."""
Setting = dict[str, Any]
"""Settings of a request."""

PRECISIONS = {"bfloat16": ("bfloat16", "BF16"), "int8": ("int8", "Q8_0")}
"""Our name of each compute or weight type, and the names that engines have for it."""


@dataclass(frozen=True)
class Method:
    """One row of the tables: a decoding method of an engine, with its candidate settings.

    Args:
        engine: program, and for this package the backend.
        precision: compute type or weight type, by the engine's own name.
        decoding: standard decoding or a kind of draft.
        loads: candidate arguments for loading the engine.
        settings: candidate settings of a request.
        compared_with: our weight type whose answers and speed it is compared with; None for the
            same kind of weights.
        is_slow: whether it answers only a few of the prompts.
    """

    engine: str
    precision: str
    decoding: str
    loads: tuple[Load, ...]
    settings: tuple[Setting, ...]
    compared_with: str | None = None
    is_slow: bool = False

    @property
    def name(self) -> str:
        return f"{self.engine}/{self.precision}/{self.decoding}"

    @property
    def labels(self) -> tuple[str, str, str]:
        """The first three columns of a table."""
        return self.engine.replace("_", " "), self.precision, self.decoding

    @property
    def is_ours(self) -> bool:
        return self.engine.startswith("ours")

    @property
    def our_standard(self) -> str:
        """Name of our standard decoding in OpenVINO with the same kind of weights."""
        return f"ours openvino/{self.our_precision}/standard"

    @property
    def our_precision(self) -> str:
        """Our name for the method's compute or weight type, or what it is compared with instead."""
        if self.compared_with is not None:
            return self.compared_with
        for our_name, engine_names in PRECISIONS.items():
            if self.precision in engine_names:
                return our_name
        raise ValueError(f"{self.precision} is not among PRECISIONS")

    def candidates(self) -> list[tuple[Load, Setting]]:
        """All ways to load the engine, each with all settings."""
        return list(itertools.product(self.loads, self.settings))


def worker_name(engine: str, load: Load) -> str:
    """Name of the process that an engine with these arguments runs in."""
    return f"{engine} {json.dumps(load, sort_keys=True)}"


def grid(**values: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """All combinations of these values."""
    combinations = itertools.product(*values.values())
    return tuple(dict(zip(values, combination, strict=True)) for combination in combinations)


def _all_methods() -> Iterator[Method]:
    for precision in PRECISIONS:
        for backend in ("openvino", "torch"):
            yield from _our_methods(backend, precision)
        yield from _openvino_genai_methods(precision)
        yield from _llama_cpp_methods(precision)
    yield from _transformers_methods()
    yield from _vllm_methods()


def _our_methods(backend: str, precision: str) -> Iterator[Method]:
    engine = f"ours {backend}"
    quantization = None if precision == "bfloat16" else precision
    loads: tuple[Load, ...] = ({"backend": backend, "quantization": quantization},)
    yield Method(engine, precision, "standard", loads, ({"drafter": None},))

    lookup_settings = (
        *grid(drafter=["NGramDrafter"], num_draft_tokens=[5, "auto"], min_ngram=[2]),
        *grid(
            drafter=["NGramDrafter"],
            num_draft_tokens=[5],
            min_ngram=[1],
            max_ngram=[3],
            tokens_per_match=[1, 5],
        ),
    )
    yield Method(engine, precision, "lookup", loads, lookup_settings)

    head_settings = (
        *grid(
            drafter=["NGramWithFallback"],
            min_ngram=[2],
            num_draft_tokens=[3, 5],
            tokens_per_match=[2],
            min_confidence=[None, 0.05, 0.15],
        ),
        *grid(
            drafter=["NGramWithFallback"],
            min_ngram=[2],
            num_draft_tokens=[5],
            tokens_per_match=[5],
            min_confidence=[None, 0.05],
        ),
        *grid(drafter=["NGramWithFallback"], min_ngram=[2], num_draft_tokens=["auto"]),
    )
    yield Method(engine, precision, "lookup, head", loads, head_settings)


def _openvino_genai_methods(precision: str) -> Iterator[Method]:
    # The paged scheduler, as it is and reading a whole prompt in one call.
    scheduler: Load = {"cache_size": 1, "enable_prefix_caching": False}
    whole_prompt = {
        **scheduler,
        "max_num_batched_tokens": CONTEXT + 200,
        "dynamic_split_fuse": False,
    }
    paged: Load = {"precision": precision, "scheduler": scheduler}
    paged_whole_prompt: Load = {"precision": precision, "scheduler": whole_prompt}
    loads = (
        {"precision": precision, "ATTENTION_BACKEND": "SDPA"},
        paged,
        paged_whole_prompt,
        {**paged, "KV_CACHE_PRECISION": "bf16"},
        {**paged, "KV_CACHE_PRECISION": "u8"},
        {**paged, "ENABLE_CPU_PINNING": False},
    )
    yield Method("openvino_genai", precision, "standard", loads, ({},))

    lookup_loads = ({**paged_whole_prompt, "prompt_lookup": True},)
    lookup_settings = grid(num_assistant_tokens=[3, 5, 8], max_ngram_size=[2, 3, 4])
    yield Method("openvino_genai", precision, "lookup", lookup_loads, lookup_settings)


def _llama_cpp_methods(precision: str) -> Iterator[Method]:
    _, weight_type = PRECISIONS[precision]
    loads = grid(precision=[weight_type], flash_attn=[False, True])
    yield Method("llama_cpp", weight_type, "standard", loads, ({},))

    # Verification needs the logits of all tokens.
    lookup_loads = grid(precision=[weight_type], flash_attn=[False, True], logits_all=[True])
    lookup_settings = grid(num_pred_tokens=[3, 5, 8], max_ngram_size=[2, 3])
    yield Method("llama_cpp", weight_type, "lookup", lookup_loads, lookup_settings)


def _transformers_methods() -> Iterator[Method]:
    loads = grid(attn_implementation=["sdpa", "eager"])
    yield Method("transformers", "bfloat16", "standard", loads, ({},))

    lookup_loads = grid(attn_implementation=["sdpa"])
    lookup_settings = grid(prompt_lookup_num_tokens=[3, 5, 10], max_matching_ngram_size=[2, 3])
    yield Method("transformers", "bfloat16", "lookup", lookup_loads, lookup_settings)


def _vllm_methods() -> Iterator[Method]:
    loads: tuple[Load, ...] = ({}, {"enforce_eager": True})
    yield Method("vllm", "bfloat16", "standard", loads, ({},))

    lookup_configs = grid(
        method=["ngram"],
        prompt_lookup_min=[2],
        num_speculative_tokens=[3, 5, 8],
        prompt_lookup_max=[3],
    )
    lookup_loads = grid(speculative_config=lookup_configs)
    yield Method("vllm", "bfloat16", "lookup", lookup_loads, ({},))
    yield Method("vllm", "bfloat16", "head", grid(head=[2, 3, 4]), ({},))


def _pair_methods() -> Iterator[Method]:
    """Methods for a target and a draft model. Each has one candidate, so nothing is tuned."""
    yield from _our_pair_methods()
    yield from _openvino_genai_pair_methods()
    yield from _llama_server_methods()
    yield from _transformers_pair_methods()


def _our_pair_methods() -> Iterator[Method]:
    engine = "ours openvino"
    # Methods without the draft model run in a separate process, whose memory is reported.
    target_only: Load = {"backend": "openvino", "quantization": "int8"}
    with_draft: Load = {**target_only, "draft": True}
    yield Method(engine, "int8", "standard", (target_only,), ({"drafter": None},))

    lookup = {"drafter": "NGramDrafter", "min_ngram": 2, "num_draft_tokens": 5}
    yield Method(engine, "int8", "lookup, 5 tokens", (target_only,), (lookup,))
    # As OpenVINO GenAI's: five tokens after a match of any length.
    eager_lookup = {**lookup, "min_ngram": 1, "max_ngram": 3, "tokens_per_match": 5}
    yield Method(engine, "int8", "lookup, always 5 tokens", (target_only,), (eager_lookup,))

    for window in (3, 5, "auto"):
        label = window if window == "auto" else f"{window} tokens"
        draft = {"drafter": "ModelDrafter", "num_draft_tokens": window}
        yield Method(engine, "int8", f"draft model, {label}", (with_draft,), (draft,))

    for window in (3, "auto"):
        label = window if window == "auto" else f"{window} tokens"
        both = {"drafter": "NGramWithFallback", "min_ngram": 2, "num_draft_tokens": window}
        yield Method(engine, "int8", f"lookup, draft model, {label}", (with_draft,), (both,))


def _openvino_genai_pair_methods() -> Iterator[Method]:
    # The fastest loads of the tuning on SmolLM2 in int8, with OpenVINO's choice of compute type.
    load: Load = {
        "precision": "int8",
        "INFERENCE_PRECISION_HINT": None,
        "ENABLE_CPU_PINNING": False,
        "scheduler": {
            "cache_size": 1,
            "enable_prefix_caching": False,
            "max_num_batched_tokens": CONTEXT + 200,
            "dynamic_split_fuse": False,
        },
    }
    yield Method("openvino_genai", "int8", "standard", (load,), ({},))

    lookup_load = {**load, "prompt_lookup": True}
    lookup = {"num_assistant_tokens": 5, "max_ngram_size": 3}
    yield Method("openvino_genai", "int8", "lookup, 5 tokens", (lookup_load,), (lookup,))

    for window in (3, 5):
        yield Method(
            "openvino_genai",
            "int8",
            f"draft model, {window} tokens",
            ({**load, "draft": True},),
            ({"num_assistant_tokens": window},),
        )


def _llama_server_methods() -> Iterator[Method]:
    yield Method("llama_server", "Q8_0", "standard", ({"num_draft_tokens": 0},), ({},))
    for window in (3, 5):
        load: Load = {"num_draft_tokens": window}
        yield Method("llama_server", "Q8_0", f"draft model, {window} tokens", (load,), ({},))


def _transformers_pair_methods() -> Iterator[Method]:
    precision = "float32"
    load: Load = {"dtype": precision, "attn_implementation": "sdpa", "draft": True}
    decodings: dict[str, Setting] = {
        "standard": {},
        "draft model, 3 tokens": {"num_assistant_tokens": 3},
    }
    for decoding, setting in decodings.items():
        yield Method(
            "transformers",
            precision,
            decoding,
            (load,),
            (setting,),
            compared_with="int8",
            is_slow=True,
        )


METHODS = {method.name: method for method in _all_methods()}
"""Methods for a single model."""
PAIR_METHODS = {method.name: method for method in _pair_methods()}
"""Methods for a target and a draft model."""
