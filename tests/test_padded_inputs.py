"""Laws of padding: outputs padded to a round number of rows, and prompts that are not padded."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_tokenizers
from families import greedy_tokens, tiny
from transformers import GenerationConfig

import lightning_specdec
from lightning_specdec import SpeculativeDecoder

PROMPTS = [[3, 5, 7, 3, 5], [11, 2, 11, 2, 11, 2, 9], [300, 340, 3]]
NUM_NEW = 14


def model_of(vocab_size: int, seed: int = 1) -> Any:
    model: Any = tiny("qwen2", seed, vocab_size=vocab_size)
    model.generation_config = GenerationConfig(do_sample=False)
    return model


def reference(model: Any, **options: Any) -> list[list[int]]:
    """Greedy tokens of transformers' own `generate`, each row alone."""
    return [greedy_tokens(model, prompt, NUM_NEW, **options) for prompt in PROMPTS]


@pytest.mark.quick_cases("352-384")
@pytest.mark.parametrize("with_tokenizer", [False, True])
@pytest.mark.parametrize(("target_size", "draft_size"), [(384, 352), (352, 384)])
def test_loaded_models_of_one_tokenizer_may_be_padded_to_different_sizes(
    target_size: int,
    draft_size: int,
    with_tokenizer: bool,
) -> None:
    target, draft = model_of(target_size), model_of(draft_size, seed=2)
    tokenizer = tiny_tokenizers.byte_level() if with_tokenizer else None
    expected = reference(target)
    assert max(map(max, expected)) >= 320, "the target generates rows that pad its output, too"
    for decoder in (
        SpeculativeDecoder(target, draft, tokenizer=tokenizer),
        SpeculativeDecoder.from_pretrained(target, draft),
    ):
        options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "eos": ()}
        assert decoder.decode(PROMPTS, **options).tokens == expected
        assert decoder.decode_standard(PROMPTS, **options).tokens == expected
        for rule in ("ExactMatch", "RejectionSampling"):
            assert decoder.decode(PROMPTS, rule=rule, **options).tokens == expected
    options = {"custom_generate": lightning_specdec.generate, "draft": draft}
    assert reference(target, **options) == expected


def test_sizes_that_no_padding_explains_are_refused() -> None:
    target = model_of(384)
    with pytest.raises(ValueError, match="a vocabulary of 1024 tokens, the target one of 384"):
        SpeculativeDecoder(target, model_of(1024))
    # The tokenizer of 320 tokens does not fit an output of 300.
    tokenizer = tiny_tokenizers.byte_level()
    assert len(tokenizer) == 320
    with pytest.raises(ValueError, match="a vocabulary of 300 tokens, the target one of 384"):
        SpeculativeDecoder(target, model_of(300), tokenizer=tokenizer)


def test_rows_of_different_lengths_are_not_padded() -> None:
    """In GPT-2 style tokenizers, one token is BOS, EOS and pad."""
    special = ("<|endoftext|>", "<|unused|>")
    tokenizer = tiny_tokenizers.byte_level(
        special=special, bos_token=special[0], eos_token=special[0], pad_token=special[0]
    )
    end_of_text = tokenizer.eos_token_id
    model = model_of(len(tokenizer))
    decoder = SpeculativeDecoder(model, tokenizer=tokenizer)
    prompts = [[end_of_text, 5, 7, 9], [11, 2, 11], [end_of_text, 8]]
    options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "eos": ()}
    tokens = decoder.decode(prompts, **options).tokens
    assert tokens == [decoder.decode([prompt], **options).tokens[0] for prompt in prompts]

    # Rows of one length may be padded, and their attention mask tells.
    with pytest.raises(ValueError, match="prompt 0 seems padded"):
        decoder.decode([[end_of_text, 5, 7], [11, 2, 11]], **options)
