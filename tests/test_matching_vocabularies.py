"""Which drafts suit which targets: by what their tokens mean, not by how many there are."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import tiny_tokenizers
import torch
from tiny_vocabularies import cross, letters
from transformers import GPT2Config, LlamaConfig

from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.drafters.cross_vocabulary import CrossVocabulary
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.rules import RULES, Sampling
from lightning_specdec.text.tokenizer import TextTokenizer
from lightning_specdec.text.vocabulary import Vocabulary


def vocabulary(*pieces: bytes) -> Vocabulary:
    return Vocabulary(pieces)


def model(
    vocab_size: int, names: Vocabulary | None = None, *, kind: str = "rnn", seed: int = 1
) -> LanguageModel:
    built = cases.MODELS[kind](seed, vocab_size=vocab_size)
    built.vocabulary = names
    return built


TOKENS = letters(9)
PROMPTS = [[3], [1, 2, 3, 4, 5], [8, 8]]
SIZES = [(9, 12), (12, 9), (11, 13), (13, 11)]
"""Rows of draft and target over nine tokens: either is padded, or both."""


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.9, top_p=0.8)], ids=["greedy", "top_p"]
)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["rnn", "transformer"])
@pytest.mark.parametrize(("draft_size", "target_size"), SIZES)
def test_models_of_one_vocabulary_and_padded_outputs_fit(
    draft_size: int, target_size: int, kind: str, rule: str, sampling: Sampling
) -> None:
    """The random target says its padding rows too, which a smaller draft has no embedding for."""
    target, draft = (
        model(target_size, TOKENS, kind=kind),
        model(draft_size, letters(9), kind=kind, seed=2),
    )
    options: dict[str, Any] = {"max_new_tokens": 14, "sampling": sampling}
    result = speculative_decode(target, ModelDrafter(draft), PROMPTS, rule=RULES[rule](), **options)
    standard = autoregressive_decode(target, PROMPTS, **options)
    assert (
        target_size < 11
        or sampling.greedy
        or max(token for row in standard.tokens for token in row) >= 9
    )
    if rule == "ExactMatch" or (RULES[rule].lossless and sampling.greedy):
        assert result.tokens == standard.tokens
    assert all(len(row) == 14 for row in result.tokens)


def test_other_tokens_or_as_many_of_unknown_meaning_are_refused() -> None:
    names = vocabulary(b"a", b"b", b"x", *(piece for piece in TOKENS.token_bytes[3:] if piece))
    with pytest.raises(
        ValueError, match="token 2 is b'x' in the first and b'c' in the second.*CrossVocabulary"
    ):
        ModelDrafter(model(9, names)).check_target(model(9, TOKENS))
    for own, others in ((None, None), (TOKENS, None), (None, TOKENS)):
        ModelDrafter(model(9, own)).check_target(model(9, others))
        with pytest.raises(ValueError, match="a vocabulary of 10 tokens, the target one of 9"):
            ModelDrafter(model(10, own)).check_target(model(9, others))


class Reader:
    """As a tokenizer of text, for a model that reads letters."""

    def __init__(self, names: Vocabulary) -> None:
        self.names, self.start = names, None

    def encode_plain(self, text: str) -> list[int]:
        return [self.names.token_bytes.index(letter.encode()) for letter in text]


def test_the_drafter_for_a_model_is_chosen_by_what_its_tokens_mean() -> None:
    target = model(12, TOKENS)
    assert type(CrossVocabulary.for_target(target, model(9, letters(9)))) is ModelDrafter
    assert type(CrossVocabulary.for_target(target, model(12))) is ModelDrafter
    names = vocabulary(*(piece for piece in letters(9).token_bytes[::-1] if piece))
    draft = model(9, names)
    with pytest.raises(ValueError, match="load the draft with its tokenizer"):
        CrossVocabulary.for_target(target, draft)
    draft.tokenizer = Reader(names)  # type: ignore[assignment]
    drafter = CrossVocabulary.for_target(target, draft, sampling=Sampling(0.5))
    assert isinstance(drafter, CrossVocabulary) and drafter.sampling == Sampling(0.5)
    result = speculative_decode(target, drafter, PROMPTS, max_new_tokens=10)
    assert result.tokens == autoregressive_decode(target, PROMPTS, max_new_tokens=10).tokens
    with pytest.raises(ValueError, match="the target one of 12"):
        CrossVocabulary.for_target(target, model(10))


@pytest.mark.parametrize("target_first", [True, False])
def test_transformers_models_with_tokenizers_of_their_own_are_paired(target_first: bool) -> None:
    words, pieces = (
        TextTokenizer(tiny_tokenizers.byte_level()),
        TextTokenizer(tiny_tokenizers.sentencepiece()),
    )
    sizes: dict[str, Any] = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        llama = HuggingFaceLM(
            LlamaConfig(vocab_size=352, intermediate_size=32, **sizes), tokenizer=pieces
        )
        gpt2 = HuggingFaceLM(
            GPT2Config(vocab_size=len(words.vocabulary), n_positions=48, **sizes), tokenizer=words
        )
    target, draft = (llama.eval(), gpt2.eval()) if target_first else (gpt2.eval(), llama.eval())
    drafter = CrossVocabulary.for_target(target, draft)
    assert isinstance(drafter, CrossVocabulary)
    assert target.tokenizer is not None
    prompts = [
        target.tokenizer.encode(text) for text in ("where the cat sat, 12 \u20ac", "a guess")
    ]
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {
            "max_new_tokens": 16,
            "sampling": Sampling(temperature),
            "seed": 1,
        }
        expected = autoregressive_decode(target, prompts, **options).tokens
        assert speculative_decode(target, drafter, prompts, **options).tokens == expected


def test_plain_text_that_spells_a_special_token_is_no_special_token() -> None:
    tokenizer = TextTokenizer(tiny_tokenizers.byte_level())
    assert tokenizer.vocabulary.join(tokenizer.encode_plain("a</s>b")) == b"a</s>b"
    assert tokenizer.encode_rendered("a</s>b")[1] == 1
    assert tokenizer.start is None
    own = tiny_tokenizers.byte_level()
    own.backend_tokenizer.post_processor = tiny_tokenizers.begin_with("<s>", 0)
    assert TextTokenizer(own).start == 0 and TextTokenizer(own).encode_plain(
        "a"
    ) == tokenizer.encode_plain("a")


def test_a_vocabulary_that_shares_too_little_or_another_targets_is_refused() -> None:
    draft = model(4, vocabulary(b"a", b"x", b"y", b"z"))
    with pytest.raises(
        ValueError,
        match=r"1 tokens in common, 25.0% of the smaller vocabulary \(min_share is 50.0%\)",
    ):
        CrossVocabulary(draft, letters(11), min_share=0.5)
    assert CrossVocabulary(draft, letters(11), min_share=0.2).translation.pairs == {0: 0}
    with pytest.raises(ValueError, match=r"min_share must be in \[0, 1\]"):
        CrossVocabulary(draft, letters(11), min_share=2)
    drafter = cross(model(11))
    with pytest.raises(ValueError, match="made for a target of 11 tokens, this one has 12"):
        drafter.check_target(model(12))
    with pytest.raises(
        ValueError, match="another target's vocabulary .token 0 is b'a' in the first and b'b'"
    ):
        drafter.check_target(model(11, vocabulary(*(bytes([ord("b") + i]) for i in range(11)))))
    drafter.check_target(model(11, letters(11)))
    with pytest.raises(ValueError, match="keeps no tokenizer"):
        drafter.arguments()
