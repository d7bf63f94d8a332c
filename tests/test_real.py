"""Laws on SmolLM2-135M-Instruct: `make smollm2` downloads it, `make test-real` runs these tests."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_specdec import checkpoints
from lightning_specdec.checkpoints.target_reference import dtype_of
from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.drafters import Drafter, ModelDrafter, NGramDrafter
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.packed import quantize
from lightning_specdec.rules import ExactMatch, Sampling
from lightning_specdec.text.tokenizer import TextTokenizer

pytestmark = pytest.mark.real
SMOLLM2 = Path(__file__).parent.parent / "checkpoints" / "smollm2"
QUESTIONS = (
    "Repeat this word for word: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Why is the sky blue? Answer in two sentences.",
    "List the days of the week, then list them again in reverse order.",
)
NUM_NEW = 32


def load(dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=dtype).eval()


@functools.cache
def target() -> HuggingFaceLM:
    return HuggingFaceLM(load(), tokenizer=TextTokenizer.load(SMOLLM2)).pack()


@functools.cache
def prompts() -> list[list[int]]:
    tokenizer = target().tokenizer
    assert tokenizer is not None
    return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]


@functools.cache
def generated() -> list[list[int]]:
    """The output of transformers' greedy `generate` for each prompt alone."""
    model = load()
    outputs = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        text = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW, do_sample=False)
        outputs.append(text[0, len(prompt) :].tolist())
    return outputs


@functools.cache
def int8_self() -> Drafter:
    model = HuggingFaceLM(load())
    quantize(model.model, "int8")
    return ModelDrafter(model.pack())


@functools.cache
def shipped_head() -> Drafter:
    path = SMOLLM2.parent / "smollm2_eagle.safetensors"
    drafter = checkpoints.load(path, target=target()).drafter
    return drafter.to(dtype_of(target())).fused()


def eos() -> list[int]:
    tokenizer = target().tokenizer
    assert tokenizer is not None
    return sorted(tokenizer.eos)


def test_standard_decoding_equals_generate_alone_and_in_a_ragged_batch() -> None:
    options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "eos": eos()}
    for prompt, expected in zip(prompts(), generated(), strict=True):
        assert autoregressive_decode(target(), prompt, **options).tokens == [expected]
    assert autoregressive_decode(target(), prompts(), **options).tokens == generated()


@pytest.mark.parametrize("window", [3, 8])
@pytest.mark.parametrize(
    "make", [NGramDrafter, int8_self, shipped_head], ids=["lookup", "int8 self", "head"]
)
def test_speculative_decoding_equals_generate(make: Any, window: int) -> None:
    drafter = make()
    for batch_size in (len(QUESTIONS), 1):
        result = speculative_decode(
            target(),
            drafter,
            prompts()[:batch_size],
            max_new_tokens=NUM_NEW,
            num_draft_tokens=window,
            eos=eos(),
        )
        assert result.tokens == generated()[:batch_size]
        assert result.block_efficiency is not None
        assert result.block_efficiency > 1


def test_sampled_exact_match_is_standard_decoding() -> None:
    sampling = Sampling(0.9, top_p=0.95)
    options: dict[str, Any] = {"max_new_tokens": 24, "sampling": sampling, "seed": 3}
    expected = autoregressive_decode(target(), prompts(), **options).tokens
    for drafter in (NGramDrafter(), int8_self(), shipped_head()):
        result = speculative_decode(target(), drafter, prompts(), rule=ExactMatch(), **options)
        assert result.tokens == expected


def test_the_caches_are_all_that_decoding_adds_to_the_weights() -> None:
    """A row of 512 tokens: keys and values of 30 layers, with 3 heads of 64 floats each."""
    state: Any = target().init_state(1, 511)
    target()(torch.tensor(prompts()[:1]), state)
    num_bytes = 0
    for keys, values in state.storage.layers.values():
        num_bytes += keys.nbytes + values.nbytes
    num_floats = 30 * 2 * 3 * 64 * 512
    assert num_bytes == 4 * num_floats
