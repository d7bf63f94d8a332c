"""Laws on a real model, SmolLM2-135M-Instruct: `make smollm2` writes it, `make test-real` runs these."""

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
NUMBER = 32


def load(dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=dtype).eval()


@functools.cache
def target() -> HuggingFaceLM:
    return HuggingFaceLM(load(), tokenizer=TextTokenizer.load(SMOLLM2)).pack()


@functools.cache
def prompts() -> list[list[int]]:
    tokenizer = target().tokenizer
    assert tokenizer is not None
    return [
        tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS
    ]


@functools.cache
def generated() -> list[list[int]]:
    """What transformers makes of the prompts, one by one."""
    model, outputs = load(), []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUMBER, do_sample=False
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


@functools.cache
def int8_self() -> Drafter:
    model = HuggingFaceLM(load())
    quantize(model.model, "int8")
    return ModelDrafter(model.pack())


@functools.cache
def shipped_head() -> Drafter:
    return (
        checkpoints.load(SMOLLM2.parent / "smollm2_eagle.safetensors", target=target())
        .drafter.to(dtype_of(target()))
        .fused()
    )


def eos() -> list[int]:
    tokenizer = target().tokenizer
    assert tokenizer is not None
    return sorted(tokenizer.eos)


def test_standard_decoding_equals_generate_alone_and_in_a_ragged_batch() -> None:
    alone = [
        autoregressive_decode(target(), p, max_new_tokens=NUMBER, eos=eos()).tokens[0]
        for p in prompts()
    ]
    assert alone == generated()
    assert (
        autoregressive_decode(target(), prompts(), max_new_tokens=NUMBER, eos=eos()).tokens
        == generated()
    )


@pytest.mark.parametrize("window", [3, 8])
@pytest.mark.parametrize(
    "make", [NGramDrafter, int8_self, shipped_head], ids=["lookup", "int8 self", "head"]
)
def test_speculative_decoding_equals_generate(make: Any, window: int) -> None:
    drafter = make()
    for batch, expected in ((prompts(), generated()), (prompts()[:1], generated()[:1])):
        result = speculative_decode(
            target(), drafter, batch, max_new_tokens=NUMBER, num_draft_tokens=window, eos=eos()
        )
        assert result.tokens == expected
        assert result.block_efficiency is not None and result.block_efficiency > 1


def test_sampled_exact_match_is_standard_decoding() -> None:
    sampling = Sampling(0.9, top_p=0.95)
    options: dict[str, Any] = {"max_new_tokens": 24, "sampling": sampling, "seed": 3}
    expected = autoregressive_decode(target(), prompts(), **options).tokens
    for drafter in (NGramDrafter(), int8_self(), shipped_head()):
        assert (
            speculative_decode(target(), drafter, prompts(), rule=ExactMatch(), **options).tokens
            == expected
        )


def test_the_caches_are_all_that_decoding_adds_to_the_weights() -> None:
    """Of a row of 512 tokens: 30 layers, keys and values, 3 heads of 64 numbers of 4 bytes."""
    state = target().init_state(1, 511)
    target()(torch.tensor(prompts()[:1]), state)
    held = sum(buffer.nbytes for pair in state.storage.layers.values() for buffer in pair)
    assert held == 30 * 2 * 3 * 64 * 512 * 4
