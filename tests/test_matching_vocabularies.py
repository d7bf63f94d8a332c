"""Which drafts fit which targets: the meaning of the tokens decides, not their number."""

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
    vocab_size: int,
    names: Vocabulary | None = None,
    *,
    kind: str = "rnn",
    seed: int = 1,
) -> LanguageModel:
    built = cases.MODELS[kind](seed, vocab_size=vocab_size)
    built.vocabulary = names
    return built


TOKENS = letters(9)
PROMPTS = [[3], [1, 2, 3, 4, 5], [8, 8]]
SIZES = [(9, 12), (12, 9), (11, 13), (13, 11)]
"""Output rows of draft and target for nine tokens: either is padded, or both."""


SAMPLINGS = [Sampling(), Sampling(0.9, top_p=0.8)]


def combinations() -> list[tuple[int, int, str, str, Sampling]]:
    """All sizes with all rules. Kinds of models and samplings alternate, so that each of them
    meets every other setting."""
    kinds = ["rnn", "transformer"]
    combinations = []
    for i, (draft_size, target_size) in enumerate(SIZES):
        for j, rule in enumerate(RULES):
            kind = kinds[(i + j) % 2]
            sampling = SAMPLINGS[(i // 2 + j) % 2]
            combinations.append((draft_size, target_size, kind, rule, sampling))
    return combinations


@pytest.mark.parametrize(
    ("draft_size", "target_size", "kind", "rule", "sampling"), combinations(), ids=str
)
def test_models_of_one_vocabulary_and_padded_outputs_fit(
    draft_size: int,
    target_size: int,
    kind: str,
    rule: str,
    sampling: Sampling,
) -> None:
    """The random target generates its padding rows too, which a smaller draft cannot embed."""
    target = model(target_size, TOKENS, kind=kind)
    draft = model(draft_size, letters(9), kind=kind, seed=2)
    options: dict[str, Any] = {"max_new_tokens": 14, "sampling": sampling}
    result = speculative_decode(target, ModelDrafter(draft), PROMPTS, rule=RULES[rule](), **options)
    standard = autoregressive_decode(target, PROMPTS, **options)
    if target_size >= 11 and not sampling.greedy:
        assert max(max(row) for row in standard.tokens) >= 9
    if rule == "ExactMatch" or (RULES[rule].lossless and sampling.greedy):
        assert result.tokens == standard.tokens
    assert all(len(row) == 14 for row in result.tokens)


def test_other_tokens_or_as_many_of_unknown_meaning_are_refused() -> None:
    same_pieces = [piece for piece in TOKENS.token_bytes[3:] if piece]
    different = vocabulary(b"a", b"b", b"x", *same_pieces)
    message = "token 2 is b'x' in the first and b'c' in the second.*CrossVocabulary"
    with pytest.raises(ValueError, match=message):
        ModelDrafter(model(9, different)).check_target(model(9, TOKENS))
    for draft_names, target_names in ((None, None), (TOKENS, None), (None, TOKENS)):
        ModelDrafter(model(9, draft_names)).check_target(model(9, target_names))
        with pytest.raises(ValueError, match="a vocabulary of 10 tokens, the target one of 9"):
            ModelDrafter(model(10, draft_names)).check_target(model(9, target_names))


class Reader:
    """A tokenizer for a model that reads letters."""

    def __init__(self, names: Vocabulary) -> None:
        self.names = names
        self.start = None

    def encode_plain(self, text: str) -> list[int]:
        return [self.names.token_bytes.index(letter.encode()) for letter in text]


def test_the_drafter_for_a_model_is_chosen_by_what_its_tokens_mean() -> None:
    target = model(12, TOKENS)
    assert type(CrossVocabulary.for_target(target, model(9, letters(9)))) is ModelDrafter
    assert type(CrossVocabulary.for_target(target, model(12))) is ModelDrafter
    reversed_pieces = [piece for piece in reversed(letters(9).token_bytes) if piece]
    names = vocabulary(*reversed_pieces)
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
    byte_level = TextTokenizer(tiny_tokenizers.byte_level())
    sentencepiece = TextTokenizer(tiny_tokenizers.sentencepiece())
    sizes: dict[str, Any] = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        llama_config = LlamaConfig(vocab_size=352, intermediate_size=32, **sizes)
        llama = HuggingFaceLM(llama_config, tokenizer=sentencepiece).eval()
        num_tokens = len(byte_level.vocabulary)
        gpt2_config = GPT2Config(vocab_size=num_tokens, n_positions=48, **sizes)
        gpt2 = HuggingFaceLM(gpt2_config, tokenizer=byte_level).eval()
    target, draft = (llama, gpt2) if target_first else (gpt2, llama)
    drafter = CrossVocabulary.for_target(target, draft)
    assert isinstance(drafter, CrossVocabulary)
    assert target.tokenizer is not None
    texts = ("where the cat sat, 12 \u20ac", "a guess")
    prompts = [target.tokenizer.encode(text) for text in texts]
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
    with_bos = tiny_tokenizers.byte_level()
    with_bos.backend_tokenizer.post_processor = tiny_tokenizers.begin_with("<s>", 0)
    assert TextTokenizer(with_bos).start == 0
    assert TextTokenizer(with_bos).encode_plain("a") == tokenizer.encode_plain("a")


def test_a_vocabulary_that_shares_too_little_or_another_targets_is_refused() -> None:
    draft = model(4, vocabulary(b"a", b"x", b"y", b"z"))
    message = r"1 tokens in common, 25.0% of the smaller vocabulary \(min_share is 50.0%\)"
    with pytest.raises(ValueError, match=message):
        CrossVocabulary(draft, letters(11), min_share=0.5)
    assert CrossVocabulary(draft, letters(11), min_share=0.2).translation.pairs == {0: 0}
    with pytest.raises(ValueError, match=r"min_share must be in \[0, 1\]"):
        CrossVocabulary(draft, letters(11), min_share=2)
    drafter = cross(model(11))
    with pytest.raises(ValueError, match="made for a target of 11 tokens, this one has 12"):
        drafter.check_target(model(12))
    shifted = vocabulary(*(bytes([ord("b") + index]) for index in range(11)))
    message = "another target's vocabulary .token 0 is b'a' in the first and b'b'"
    with pytest.raises(ValueError, match=message):
        drafter.check_target(model(11, shifted))
    drafter.check_target(model(11, letters(11)))
    with pytest.raises(ValueError, match="keeps no tokenizer"):
        drafter.arguments()
