"""A vocabulary has the bytes that its tokenizer decodes, and is equal to one of the same tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import text_cases
import tiny_tokenizers
import torch
from tokenizers import decoders
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.drafters import DraftVocabulary
from lightning_specdec.text.tokenizer import TextTokenizer
from lightning_specdec.text.vocabulary import Vocabulary

SMOLLM2 = Path(__file__).parent.parent / "checkpoints" / "smollm2"


ALL_TOKENIZERS = {
    **text_cases.TOKENIZERS,
    **tiny_tokenizers.KINDS,
    **tiny_tokenizers.WITHOUT_BYTES,
}


def tokenizer(kind: str) -> Any:
    if kind != "smollm2":
        return ALL_TOKENIZERS[kind]()
    if not (SMOLLM2 / "tokenizer.json").exists():
        pytest.skip("checkpoints/smollm2 is absent: `make smollm2` writes it")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SMOLLM2)


KINDS = [*{**text_cases.TOKENIZERS, **tiny_tokenizers.KINDS}, "smollm2"]


@pytest.mark.parametrize("kind", KINDS)
def test_joined_bytes_are_what_the_tokenizer_decodes(kind: str) -> None:
    """For random tokens.

    Invalid bytes are compared for ByteLevel only, which marks them as Python.
    """
    generator = random.Random(0)
    num_compared = 0
    text_tokenizer = TextTokenizer(tokenizer(kind))
    vocabulary = text_tokenizer.vocabulary
    is_byte_level = "byte_level" in kind or kind == "smollm2"
    for _ in range(300):
        num_tokens = generator.randint(1, 12)
        tokens = [generator.randrange(len(vocabulary)) for _ in range(num_tokens)]
        expected = text_tokenizer.decode(tokens)
        if is_byte_level or "\ufffd" not in expected:
            joined = vocabulary.join(tokens).decode(errors="replace")
            assert joined in (expected, f" {expected}")
            num_compared += 1
    assert num_compared >= 30


@pytest.mark.parametrize("kind", [*KINDS, *tiny_tokenizers.WITHOUT_BYTES])
def test_special_tokens_have_no_bytes_and_are_known_by_role_and_by_text(kind: str) -> None:
    original = tokenizer(kind)
    vocabulary = Vocabulary.of(original)
    for role in ("bos", "eos", "pad", "unk"):
        assert vocabulary.special.get(role) == getattr(original, f"{role}_token_id")
    special_tokens = zip(original.all_special_ids, original.all_special_tokens, strict=True)
    for token, text in special_tokens:
        assert vocabulary.token_bytes[token] is None and vocabulary.special[text] == token
    assert len(vocabulary) == len(original)
    assert sum(piece is None for piece in vocabulary.token_bytes) == len(vocabulary.special_texts)


def test_equality_is_by_content_and_the_difference_names_the_first_token_that_differs() -> None:
    vocabulary = Vocabulary.of(tokenizer("byte_level"))
    equal = Vocabulary.of(tokenizer("byte_level"))
    assert vocabulary is not equal
    assert vocabulary == equal and hash(vocabulary) == hash(equal)
    assert vocabulary.difference(equal) is None

    letters = Vocabulary((b"a", b"b", None), {"eos": 2, "</s>": 2})
    other_bytes = Vocabulary((b"a", b"x", None), {"eos": 2, "</s>": 2})
    assert letters.difference(other_bytes) == "token 1 is b'b' in the first and b'x' in the second"
    other_eos = Vocabulary((b"a", b"b", None), {"eos": 2, "<end>": 2})
    assert (
        letters.difference(other_eos) == "token 2 is '</s>' in the first and '<end>' in the second"
    )
    one_more = Vocabulary((b"a", b"b", None, b"c"), {"eos": 2, "</s>": 2})
    assert letters.difference(one_more) == "token 3 is missing in the first and b'c' in the second"
    assert letters not in (other_bytes, other_eos, one_more)


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (decoders.CTC(), "CTC"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), "ByteLevel"),
        (None, "no decoder"),
    ],
)
def test_an_unknown_way_to_decode_is_refused_by_name(decoder: Any, name: str) -> None:
    unknown = tiny_tokenizers.byte_level()
    unknown.backend_tokenizer.decoder = decoder
    with pytest.raises(ValueError, match=f"decodes by {name}.*use a fast tokenizer of bytes"):
        Vocabulary.of(unknown)


@pytest.mark.parametrize("kind", tiny_tokenizers.WITHOUT_BYTES)
def test_a_stream_shows_what_a_tokenizer_without_byte_tokens_decodes(kind: str) -> None:
    """Its first and last tokens are decoded differently from those between them."""
    generator = random.Random(0)
    text_tokenizer = TextTokenizer(tokenizer(kind))
    for _ in range(2000):
        num_tokens = generator.randint(0, 6)
        tokens = [generator.randrange(len(text_tokenizer.vocabulary)) for _ in range(num_tokens)]
        stream = text_tokenizer.stream()
        pieces = [stream.push([token]) for token in tokens]
        assert "".join(pieces) + stream.finish() == text_tokenizer.decode(tokens)
    text = "the cat sat on the mat"
    assert text_tokenizer.decode(text_tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", tiny_tokenizers.WITHOUT_BYTES)
def test_a_model_with_a_tokenizer_without_byte_tokens_decodes_tokens_and_text(kind: str) -> None:
    original = tokenizer(kind)
    config = LlamaConfig(
        vocab_size=len(original),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    decoder = SpeculativeDecoder(model, "NGramDrafter", tokenizer=original)
    prompt = original.encode("the cat sat")
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    row = decoder.decode([prompt], max_new_tokens=12).rows[0]
    assert row.tokens == expected[0, len(prompt) :].tolist()
    assert row.text == original.decode(row.tokens, skip_special_tokens=True)
    assert decoder.decode("the cat sat", max_new_tokens=12).rows[0].tokens == row.tokens


def test_logits_go_to_the_target_and_back() -> None:
    vocabulary = DraftVocabulary([1, 4, 6], 8)
    spread = vocabulary.spread(torch.tensor([[0.5, -1.0, 2.0]]), -torch.inf)
    absent = -torch.inf
    assert spread.tolist() == [[absent, 0.5, absent, absent, -1.0, absent, 2.0, absent]]
    assert spread.softmax(-1).sum() == 1
    assert vocabulary.to_draft(torch.tensor([6, 0, 1, -100]), -7).tolist() == [2, -7, 0, -7]


def test_the_most_frequent_tokens_are_chosen_and_those_that_end_a_text_always() -> None:
    vocabulary = DraftVocabulary(3, 8)
    vocabulary.choose(torch.tensor([0, 5, 0, 9, 5, 5, 0, 0]), required=[7])
    # Tokens 1, 4 and 5 are equally frequent, so the first of them is chosen.
    assert vocabulary.arguments() == [1, 3, 7]
    assert vocabulary.to_draft(torch.tensor([7, 4]), -1).tolist() == [2, -1]
    vocabulary.check_has([3, 7], "the end")
    with pytest.raises(ValueError, match=r"leaves out the end \(0, 4\)"):
        vocabulary.check_has([4, 0, 3], "the end")


def test_a_vocabulary_too_small_for_what_must_be_there_is_refused() -> None:
    with pytest.raises(ValueError, match="a draft vocabulary of 2 has no room for 3 tokens"):
        DraftVocabulary(2, 8).choose(torch.zeros(8), required=[1, 2, 3])


def test_it_is_built_without_memory_and_keeps_its_numbers() -> None:
    with torch.device("meta"):
        vocabulary = DraftVocabulary([2, 3], 5)
    assert vocabulary.arguments() == [2, 3]
    assert not vocabulary.state_dict()
