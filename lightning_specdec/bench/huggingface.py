"""Hugging Face's baselines: `generate`, alone, with an assistant model, with prompt lookup.

They decode in the same process with the same weights, dtype, threads and packed layers as ours, and with the number of
draft tokens that is fastest on prompts that are not measured, where there are any.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from lightning_specdec.bench.rows import ASSISTED, PROMPT_LOOKUP
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.data.prompts import Prompt
from lightning_specdec.decoding import DecodeResult, RowResult
from lightning_specdec.decoding.timing import peak_memory_bytes

if TYPE_CHECKING:
    from lightning_specdec.bench.measure import Case

NUM_DRAFT_TOKENS = (3, 5, 10, 20)
"""Of an assistant or a lookup, to choose from; 20 is transformers' default for an assistant."""
NUM_TRIES = 3
"""Of each setting; the median counts."""
HOPELESS = 1.5
"""A setting that takes this many times as long as the fastest is not tried again."""


@dataclass
class HuggingFace:
    """Models of transformers.

    Args:
        target: the model whose output is wanted.
        assistants: models of the target's vocabulary, by the names of the drafts that they are.
    """

    target: Any
    assistants: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def settings(method: str) -> list[dict[str, Any]]:
        """What a method can be tried with."""
        if method == PROMPT_LOOKUP:
            return [{"prompt_lookup_num_tokens": number} for number in NUM_DRAFT_TOKENS[:3]]
        if method == ASSISTED:
            constant = {"num_assistant_tokens_schedule": "constant"}
            return [{**constant, "num_assistant_tokens": number} for number in NUM_DRAFT_TOKENS]
        return [{}]

    def decode(
        self,
        method: str,
        prompts: Sequence[Sequence[int]],
        indices: Sequence[int],
        config: DecodingConfig,
        *,
        setting: Mapping[str, Any],
        draft: str | None,
    ) -> DecodeResult:
        """Decode a batch of prompts; tokens are timed as `generate` hands them out.

        Args:
            config: its seed is set in torch's global generator, whose state is restored afterwards.
            setting: one of `settings`.
            draft: whose model assists.

        Raises:
            ValueError and whatever transformers raises: it cannot decode so.
        """
        from transformers import GenerationConfig

        model, eos = self.target, list(config.eos or ())
        models, options = [model], dict(setting)
        clean = [GenerationConfig()]
        if method == ASSISTED:
            assert draft is not None
            models.append(self.assistants[draft])
            clean.append(GenerationConfig())
            for name, value in options.items():
                setattr(clean[1], name, value)
            options = {"assistant_model": self.assistants[draft]}
        # Said outright: transformers samples from 50 tokens by default, and models bring defaults along.
        if config.greedy:
            options["do_sample"] = False
        else:
            options |= {"do_sample": True, "temperature": config.temperature, "top_k": 0, "top_p": 1.0}
        width = max(map(len, prompts))
        padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        seen = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        texts, mask = (torch.tensor(each, device=model.device) for each in (padded, seen))
        gpus = [model.device] if model.device.type == "cuda" else []
        with _prepared(models, clean), torch.random.fork_rng(devices=gpus), torch.inference_mode():
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
        return time.perf_counter() - self.started


def _row(
    index: int, prompt: Sequence[int], tokens: Sequence[int], eos: Sequence[int], seconds: Sequence[float]
) -> RowResult:
    """A row's new tokens, without the padding behind the one that ended it."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
    reason = "eos" if end and tokens[end - 1] in eos else "length"
    return RowResult(index, list(prompt), list(tokens[:end]), reason, len(set(seconds[:end])), list(seconds[:end]))


@contextmanager
def _prepared(models: Sequence[Any], configs: Sequence[Any]) -> Iterator[None]:
    """Meanwhile, models with transformers' own attention, and with these generation configs."""
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


def best_setting(case: Case, others: Sequence[Prompt]) -> dict[str, Any]:
    """The fastest setting of a method, and what each took.

    Each is warmed up, then they take turns; medians decide.

    Args:
        others: prompts that are not measured; those that are, where there are none.

    Raises:
        ValueError and whatever transformers raises: it cannot decode so.
    """
    prompts = others or case.prompts
    settings = HuggingFace.settings(case.method)
    cases = [replace(case, setting=setting) for setting in settings]
    tries: list[list[float]] = [[] for _ in settings]
    if len(cases) > 1:
        for each in cases:
            each.decode(seed=case.config.seed, prompts=prompts[: case.batch_size])
        hopeful = list(range(len(cases)))
        for _ in range(NUM_TRIES):
            for i in hopeful:
                tries[i].append(cases[i].decode(seed=case.config.seed, prompts=prompts).seconds)
            fastest = min(map(median, tries))
            hopeful = [i for i in hopeful if median(tries[i]) <= HOPELESS * fastest]
    best = min(range(len(cases)), key=lambda i: median(tries[i])) if len(cases) > 1 else 0
    tried = [{**setting, "tries": each} for setting, each in zip(settings, tries, strict=True)]
    return {**where(case), "setting": settings[best], "tried": tried}


def where(case: Case) -> dict[str, Any]:
    """What a setting is found for."""
    found = {name: getattr(case, name) for name in ("method", "draft", "domain", "batch_size")}
    return {**found, "temperature": case.config.temperature}
