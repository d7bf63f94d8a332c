"""Hugging Face's baselines: `generate`, alone, with an assistant model, with prompt lookup.

They decode in the same process with the same weights, dtype, threads and packed layers as ours, and with constant
numbers of draft tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_specdec.bench.rows import ASSISTED, PROMPT_LOOKUP
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding import DecodeResult, RowResult
from lightning_specdec.decoding.timing import peak_memory_bytes


@dataclass
class HuggingFace:
    """Models of transformers.

    Args:
        target: the model whose output is wanted.
        assistants: models of the target's vocabulary, by the names of the drafts that they are.
    """

    target: Any
    assistants: Mapping[str, Any] = field(default_factory=dict)

    def decode(
        self,
        method: str,
        prompts: Sequence[Sequence[int]],
        indices: Sequence[int],
        config: DecodingConfig,
        *,
        draft: str | None,
    ) -> DecodeResult:
        """Decode a batch of prompts; tokens are timed as `generate` hands them out.

        Args:
            config: its seed is set in torch's global generator, whose state is restored afterwards.
            draft: whose model assists.

        Raises:
            ValueError and whatever transformers raises: it cannot decode so.
        """
        from transformers import GenerationConfig

        model, eos, number = self.target, list(config.eos or ()), config.num_draft_tokens
        configs, options = [(model, GenerationConfig())], dict[str, Any]()
        if method == ASSISTED:
            options["assistant_model"] = assistant = self.assistants[str(draft)]
            schedule = GenerationConfig(
                num_assistant_tokens=number, num_assistant_tokens_schedule="constant"
            )
            configs.append((assistant, schedule))
        if method == PROMPT_LOOKUP:
            options["prompt_lookup_num_tokens"] = number
        # Explicit values: transformers samples from 50 tokens by default, and models bring their own defaults.
        if config.greedy:
            options["do_sample"] = False
        else:
            options |= {
                "do_sample": True,
                "temperature": config.temperature,
                "top_k": 0,
                "top_p": 1.0,
            }
        width = max(map(len, prompts))
        padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        seen = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        texts, mask = (torch.tensor(each, device=model.device) for each in (padded, seen))
        gpus = [model.device] if model.device.type == "cuda" else []
        with _prepared(configs), torch.random.fork_rng(devices=gpus), torch.inference_mode():
            torch.manual_seed(config.seed)
            watch = _Watch()
            output = model.generate(
                texts,
                attention_mask=mask,
                max_new_tokens=config.max_new_tokens,
                eos_token_id=eos or None,
                pad_token_id=0,
                streamer=watch,
                use_cache=True,
                **options,
            ).tolist()
            seconds = watch.elapsed()
        rows = [
            _row(index, prompt, each[width:], eos, watch.seconds)
            for index, prompt, each in zip(indices, prompts, output, strict=True)
        ]
        return DecodeResult(rows, seconds, {}, watch.num_calls, peak_memory_bytes(model.device))


class _Watch:
    """The streamer that `generate` hands its tokens to: when they came, and in how many calls of the target."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.num_calls = -1  # the first call is of the prompt
        self.seconds: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        """Tokens of all rows, one each; or several of a single row."""
        self.num_calls += 1
        if self.num_calls:
            self.seconds += [self.elapsed()] * (tokens.shape[-1] if tokens.dim() > 1 else 1)

    def end(self) -> None:
        """There are no more."""

    def elapsed(self) -> float:
        return time.perf_counter() - self.started


def _row(
    index: int,
    prompt: Sequence[int],
    tokens: Sequence[int],
    eos: Sequence[int],
    seconds: Sequence[float],
) -> RowResult:
    """A row's new tokens, without the padding behind the one that ended it."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
    reason = "eos" if end and tokens[end - 1] in eos else "length"
    return RowResult(
        index,
        list(prompt),
        list(tokens[:end]),
        reason,
        len(set(seconds[:end])),
        list(seconds[:end]),
    )


@contextmanager
def _prepared(configs: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Use these generation configs and transformers' own attention meanwhile."""
    before = [
        (model, model.generation_config, model.config._attn_implementation) for model, _ in configs
    ]
    try:
        for model, config in configs:
            _set(model, config, "sdpa" if model.config._attn_implementation != "eager" else "eager")
        yield
    finally:
        for each in before:
            _set(*each)


def _set(model: Any, config: Any, implementation: str) -> None:
    model.generation_config = config
    if model.config._attn_implementation != implementation:
        model.set_attn_implementation(implementation)
