"""Decoding by transformers' own `generate`: plain, with an assistant model, with prompt look-up. The baselines.

Theory: a baseline gets what ours gets: the same process, threads, weights and type, linear layers laid out for this
processor or not, whichever is faster, and the number of guesses that is fastest (on other prompts than those that
are measured, where there are any).
Every call begins as the first one did: what transformers remembers between calls is part of a setting.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_specdec.bench.config_entries import ASSISTED, PROMPT_LOOKUP
from lightning_specdec.inference import DecodeResult
from lightning_specdec.inference.results import RowResult
from lightning_specdec.inference.timing import peak_memory_bytes
from lightning_specdec.rules import Sampling

LAYERS = ("plain", "packed")
"""The linear layers: as transformers has them, or as this processor wants them."""
NUM_GUESSES = (3, 5, 10)
"""Of an assistant or a look-up, to choose from."""
DEFAULT_GUESSES = 20
"""Of an assistant, where transformers is told nothing; by a constant schedule."""
CARRIED = "num_assistant_tokens"
"""What a schedule carries from one call to the next."""
GenerateSetting = Mapping[str, Any]
"""What a call of `generate` is told besides: see `Outside.settings`."""


@dataclass
class Forms:
    """One model of transformers, its layers as they came and packed; both the same where nothing can be packed."""

    plain: Any
    packed: Any

    def of(self, layers: str) -> Any:
        """The model with such layers."""
        return self.packed if layers == "packed" else self.plain

    @property
    def differ(self) -> bool:
        """Whether there are two."""
        return self.packed is not self.plain


@dataclass
class Outside:
    """A target of transformers with what can assist it.

    Args:
        target: the model whose output is wanted.
        assistants: of the same vocabulary, by the names of the drafts that they are.
        num_guesses: what the schedule of the last assisted call has left for the next one.
    """

    target: Forms
    assistants: Mapping[str, Forms] = field(default_factory=dict)
    num_guesses: int | None = None

    def settings(self, way: str) -> list[dict[str, Any]]:
        """What a way can be tried with."""
        layers: list[dict[str, Any]] = [{"layers": each} for each in (LAYERS if self.target.differ else LAYERS[:1])]
        if way == PROMPT_LOOKUP:
            return [{**each, "prompt_lookup_num_tokens": number} for each in layers for number in NUM_GUESSES]
        if way == ASSISTED:
            schedules: list[dict[str, Any]] = [{"num_assistant_tokens_schedule": "heuristic"}]
            schedules += [
                {"num_assistant_tokens_schedule": "constant", "num_assistant_tokens": number}
                for number in (*NUM_GUESSES, DEFAULT_GUESSES)
            ]
            return [{**each, **schedule} for each in layers for schedule in schedules]
        return layers

    def continued(self, setting: GenerateSetting) -> GenerateSetting:
        """A setting as the call after the last one would have it: the heuristic schedule goes on from call to call."""
        if setting.get("num_assistant_tokens_schedule") != "heuristic":
            return setting
        return {**setting, CARRIED: self.num_guesses}

    def decode(
        self,
        way: str,
        prompts: Sequence[Sequence[int]],
        indices: Sequence[int],
        *,
        setting: GenerateSetting,
        draft: str | None,
        sampling: Sampling,
        max_new_tokens: int,
        eos: Sequence[int],
        seed: int,
    ) -> DecodeResult:
        """Decode a batch of prompts; tokens are timed as `generate` hands them out.

        Args:
            way: `generate`, `assisted` or `prompt_lookup`.
            setting: one of `settings`, or what has become of it: see `continued`.
            draft: whose model assists.
            seed: of torch's global generator, whose state comes back afterwards.

        Raises:
            ValueError and whatever transformers raises: it cannot decode so.
        """
        from transformers import GenerationConfig

        options = dict(setting)
        model = self.target.of(layers := options.pop("layers"))
        models, guesses = [model], {}
        if way == ASSISTED:
            assert draft is not None
            guesses["assistant_model"] = assistant = self.assistants[draft].of(layers)
            models.append(assistant)
        elif way == PROMPT_LOOKUP:
            guesses = options
        # Said outright, since transformers draws from 50 tokens where nothing is said, and models bring habits along.
        drawing: dict[str, Any] = {"do_sample": False}
        if not sampling.greedy:
            drawing = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        width = max(map(len, prompts))
        padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        seen = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        clean = [GenerationConfig() for _ in models]
        if way == ASSISTED:
            for name, value in options.items():
                setattr(clean[1], name, value)
        texts, mask = (torch.tensor(each, device=model.device) for each in (padded, seen))
        with _prepared(models, clean), torch.random.fork_rng(devices=_gpus(model)), torch.inference_mode():
            torch.manual_seed(seed)
            watch = _Watch()
            output = model.generate(
                texts,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                eos_token_id=list(eos) or None,
                pad_token_id=0,
                streamer=watch,
                use_cache=True,
                **drawing,
                **guesses,
            ).tolist()
            seconds = watch.elapsed()
        if way == ASSISTED:
            self.num_guesses = clean[1].num_assistant_tokens
        rows = [
            _row(index, prompt, each[width:], eos, watch.seconds)
            for index, prompt, each in zip(indices, prompts, output, strict=True)
        ]
        return DecodeResult(
            rows=rows,
            seconds=seconds,
            phase_seconds={},
            num_target_calls=watch.num_calls,
            peak_memory_bytes=peak_memory_bytes(model.device),
        )


class _Watch:
    """What `generate` hands its tokens to (a streamer): when they came, and in how many calls of the target."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.num_calls = -1  # it begins with the prompt
        self.seconds: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        """Tokens of all rows, one each; or several of a single row."""
        self.num_calls += 1
        if self.num_calls:
            self.seconds += [self.elapsed()] * (tokens.shape[-1] if tokens.dim() > 1 else 1)

    def end(self) -> None:
        """There are no more."""

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started


def _row(
    index: int, prompt: Sequence[int], tokens: Sequence[int], eos: Sequence[int], seconds: Sequence[float]
) -> RowResult:
    """A row's new tokens, without the padding behind the one that ended it."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
    return RowResult(
        index=index,
        prompt=list(prompt),
        tokens=list(tokens[:end]),
        stop_reason="eos" if end and tokens[end - 1] in eos else "length",
        num_rounds=len(set(seconds[:end])),
        token_seconds=list(seconds[:end]),
    )


@contextmanager
def _prepared(models: Sequence[Any], configs: Sequence[Any]) -> Iterator[None]:
    """While it lasts, models with transformers' own attention, and with settings that are all ours."""
    before = [(model.generation_config, model.config._attn_implementation) for model in models]
    try:
        for model, config in zip(models, configs, strict=True):
            model.generation_config = config
            _attend(model, "sdpa" if model.config._attn_implementation != "eager" else "eager")
        yield
    finally:
        for model, (config, implementation) in zip(models, before, strict=True):
            model.generation_config = config
            _attend(model, implementation)


def _attend(model: Any, implementation: str) -> None:
    if model.config._attn_implementation != implementation:
        model.set_attn_implementation(implementation)


def _gpus(model: Any) -> list[torch.device]:
    return [model.device] if model.device.type == "cuda" else []
