"""Hugging Face's baselines: `generate`, with an assistant model, and with prompt lookup.

They decode in the same process with the same weights, dtype, threads and packed layers as our
methods, and with constant numbers of draft tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_specdec.bench.records import ASSISTED, PROMPT_LOOKUP
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding import DecodeResult, RowResult
from lightning_specdec.decoding.timing import peak_memory_bytes

PADDING_TOKEN = 0


@dataclass
class HuggingFace:
    """Models of transformers.

    Args:
        target: the target model.
        assistants: models with the target's vocabulary, by the names of the drafts that they are.
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
        """Decode a batch of prompts; tokens are timed as `generate` streams them.

        Args:
            config: its seed is set in torch's global generator, whose state is restored afterwards.
            draft: name of the assistant.

        Raises:
            ValueError and whatever transformers raises: it cannot decode with these settings.
        """
        model = self.target
        eos = list(config.eos or ())
        options = {**_sampling_options(config), **self._drafting_options(method, config, draft)}
        input_ids, attention_mask = _left_padded(prompts, model.device)
        cuda_devices = [model.device] if model.device.type == "cuda" else []
        with (
            _prepared(model, options.get("assistant_model"), config),
            torch.random.fork_rng(devices=cuda_devices),
            torch.inference_mode(),
        ):
            torch.manual_seed(config.seed)
            streamer = _TimingStreamer()
            output = model.generate(
                input_ids,
                attention_mask=attention_mask,
                max_new_tokens=config.max_new_tokens,
                eos_token_id=eos or None,
                pad_token_id=PADDING_TOKEN,
                streamer=streamer,
                use_cache=True,
                **options,
            )
            # Copying the tokens to the host waits for the device.
            output_rows = output.tolist()
            seconds = streamer.elapsed()

        prompt_width = input_ids.shape[1]
        rows = []
        for index, prompt, output_row in zip(indices, prompts, output_rows, strict=True):
            new_tokens = output_row[prompt_width:]
            rows.append(_row_result(index, prompt, new_tokens, eos, streamer.token_seconds))
        return DecodeResult(
            rows,
            seconds,
            phase_seconds={},
            num_target_calls=streamer.num_calls,
            peak_memory_bytes=peak_memory_bytes(model.device),
        )

    def _drafting_options(
        self,
        method: str,
        config: DecodingConfig,
        draft: str | None,
    ) -> dict[str, Any]:
        """Options that choose the method."""
        if method == ASSISTED:
            return {"assistant_model": self.assistants[str(draft)]}
        if method == PROMPT_LOOKUP:
            return {"prompt_lookup_num_tokens": config.num_draft_tokens}
        return {}


def _sampling_options(config: DecodingConfig) -> dict[str, Any]:
    """Explicit options: transformers samples from 50 tokens by default, and models bring their own
    defaults."""
    if config.greedy:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": config.temperature, "top_k": 0, "top_p": 1.0}


def _left_padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompts and their attention mask, both `[B, T]`."""
    width = max(len(prompt) for prompt in prompts)
    token_rows = []
    mask_rows = []
    for prompt in prompts:
        num_padding = width - len(prompt)
        token_rows.append([PADDING_TOKEN] * num_padding + list(prompt))
        mask_rows.append([0] * num_padding + [1] * len(prompt))
    return torch.tensor(token_rows, device=device), torch.tensor(mask_rows, device=device)


class _TimingStreamer:
    """Records when `generate` streams its tokens, and in how many calls of the target."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        # The first call streams the prompt.
        self.num_calls = -1
        self.token_seconds: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        """Receive one token of each row `[B]`, or several tokens of a single row `[1, T]`."""
        self.num_calls += 1
        if self.num_calls == 0:
            return
        num_tokens = tokens.shape[-1] if tokens.dim() > 1 else 1
        self.token_seconds += [self.elapsed()] * num_tokens

    def end(self) -> None:
        """Nothing to do after the last token; `generate` requires the method."""

    def elapsed(self) -> float:
        return time.perf_counter() - self.started


def _row_result(
    index: int,
    prompt: Sequence[int],
    tokens: Sequence[int],
    eos: Sequence[int],
    token_seconds: Sequence[float],
) -> RowResult:
    """The result of a row, without the padding after its EOS."""
    new_tokens: list[int] = []
    stop_reason = "length"
    for token in tokens:
        new_tokens.append(token)
        if token in eos:
            stop_reason = "eos"
            break

    row_seconds = list(token_seconds[: len(new_tokens)])
    # Tokens of one call were streamed at the same time.
    num_rounds = len(set(row_seconds))
    return RowResult(index, list(prompt), new_tokens, stop_reason, num_rounds, row_seconds)


@contextmanager
def _prepared(target: Any, assistant: Any | None, config: DecodingConfig) -> Iterator[None]:
    """Use plain generation configs and transformers' own attention, and restore both afterwards."""
    from transformers import GenerationConfig

    generation_configs = [(target, GenerationConfig())]
    if assistant is not None:
        constant_schedule = GenerationConfig(
            num_assistant_tokens=config.num_draft_tokens,
            num_assistant_tokens_schedule="constant",
        )
        generation_configs.append((assistant, constant_schedule))

    originals = []
    for model, _ in generation_configs:
        originals.append((model, model.generation_config, model.config._attn_implementation))
    try:
        for model, generation_config in generation_configs:
            is_eager = model.config._attn_implementation == "eager"
            _configure(model, generation_config, "eager" if is_eager else "sdpa")
        yield
    finally:
        for model, generation_config, attention in originals:
            _configure(model, generation_config, attention)


def _configure(model: Any, generation_config: Any, attention: str) -> None:
    model.generation_config = generation_config
    if model.config._attn_implementation != attention:
        model.set_attn_implementation(attention)
