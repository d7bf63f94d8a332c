"""Grammars over every kind of tokenizer: what is allowed is what the shown text may become."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest
import tiny_tokenizers
import torch

from lightning_specdec.rules import Grammar
from lightning_specdec.rules.grammar import GrammarMask
from lightning_specdec.text.grammar import CompiledGrammar, GrammarTokens, library_grammar
from lightning_specdec.text.tokenizer import ByteTokenizer, TextTokenizer, Tokenizer

TEXTS = ["the cat sat", "the dog sat on 12 €", "12", "naïve 🙂", " the log", "a", "a guess"]
KINDS = ["bytes", *tiny_tokenizers.KINDS, "gemma", "unigram"]


def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "gemma":
        return TextTokenizer(tiny_tokenizers.sentencepiece(prefix=False))
    makers = {**tiny_tokenizers.KINDS, **tiny_tokenizers.WITHOUT_BYTES}
    return TextTokenizer(makers[kind]())


class Walk:
    """A text that grows by random tokens which the grammar allows.

    Args:
        tokenizer: of the text.
        grammar: of the text.
        seed: of the choices.
    """

    def __init__(self, tokenizer: Tokenizer, grammar: Grammar, seed: int = 0) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = tokenizer.vocabulary
        # Rows beyond the vocabulary pad the output of a model.
        self.vocab_size = len(self.vocabulary) + 3
        self.eos = self.vocabulary.special.get("eos", 0)
        tokens = GrammarTokens(self.vocabulary)
        compiled = CompiledGrammar(grammar.kind, grammar.source, tokens, tokenizer)
        self.mask = GrammarMask(compiled, 0, frozenset({self.eos}), self.vocab_size)
        self.tokens: list[int] = []
        self.generator = random.Random(seed)

    def allowed(self) -> list[int]:
        scores = torch.zeros(1, self.vocab_size)
        processed = self.mask.process(self.tokens, len(self.tokens), scores)
        return [token for token in range(self.vocab_size) if processed[0, token] == 0]

    def shown(self, *more: int) -> bytes:
        """The bytes that these tokens show. They may end within a character."""
        shown_bytes = b""
        for token in (*self.tokens, *more):
            piece = self.vocabulary.token_bytes[token] or b""
            if not shown_bytes:
                piece = self.vocabulary.first_token_bytes.get(token, piece)
                if self.vocabulary.num_stripped:
                    piece = piece.removeprefix(b" ")
            shown_bytes += piece
        return shown_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_allowed_exactly_if_the_shown_text_can_go_on(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    texts = [text.encode() for text in TEXTS]
    num_complete = 0
    for seed in range(12):
        walk = Walk(tokenizer, Grammar.choice(TEXTS), seed)
        while True:
            expected = []
            for token in range(len(walk.vocabulary)):
                if token == walk.eos:
                    is_allowed = walk.shown() in texts
                else:
                    shown = walk.shown(token)
                    grows = len(shown) > len(walk.shown())
                    is_allowed = grows and any(text.startswith(shown) for text in texts)
                if is_allowed:
                    expected.append(token)
            assert walk.allowed() == expected
            if not expected:
                # Such a vocabulary cannot spell every text.
                assert kind == "unigram"
                break
            token = walk.generator.choice(expected)
            if token == walk.eos:
                assert tokenizer.decode(walk.tokens).encode() in texts
                num_complete += 1
                break
            walk.tokens.append(token)
    assert num_complete >= 3


@pytest.mark.parametrize("kind", [*tiny_tokenizers.KINDS, "gemma", "bytes"])
def test_json_always_parses(kind: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "count": {"type": "integer", "minimum": -5, "maximum": 1000},
            "tags": {"type": "array", "items": {"enum": ["the cat", "é"]}, "maxItems": 2},
        },
        "required": ["name", "count", "tags"],
        "additionalProperties": False,
    }
    tokenizer = tokenizer_of(kind)
    num_complete = 0
    for seed in range(8):
        walk = Walk(tokenizer, Grammar.json_schema(schema), seed)
        for _ in range(400):
            allowed = walk.allowed()
            assert allowed
            token = walk.generator.choice(allowed)
            if walk.eos in allowed:
                token = walk.eos
            if token == walk.eos:
                text = tokenizer.decode(walk.tokens)
                jsonschema.validate(json.loads(text), schema)
                num_complete += 1
                break
            walk.tokens.append(token)
    assert num_complete >= 4


@pytest.mark.parametrize("kind", ["bytes", "byte_level", "sentencepiece"])
def test_certain_text_is_spelled_as_the_tokenizer_does(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    walk = Walk(tokenizer, Grammar.regex("x the cat sat on the mat"))
    first_token = walk.allowed()[0]
    walk.tokens.append(first_token)
    forced = walk.mask.forced_tokens(walk.tokens, 100)
    assert forced[-1] == walk.eos
    text = tokenizer.decode([first_token, *forced[:-1]])
    assert re.fullmatch("x the cat sat on the mat", text)
    assert walk.mask.forced_tokens(walk.tokens, 3) == forced[:3]


def test_endless_certain_text_is_read_as_far_as_it_is_drafted() -> None:
    """A billion letters, of which the library would make as many states."""
    walk = Walk(ByteTokenizer(), Grammar.regex("((a{1000}){1000}){1000}"))
    for _ in range(5):
        assert walk.mask.forced_tokens(walk.tokens, 3) == [ord("a")] * 3
        assert walk.mask.error == ""
        walk.tokens.append(ord("a"))


def test_a_grammar_of_empty_lines_is_searched_for_options_at_once() -> None:
    lark = "\n" * 65_000 + 'start: "a"'
    assert library_grammar("lark", lark)
    with pytest.raises(ValueError, match="options by %llguidance are not supported"):
        library_grammar("lark", lark + "\n  %llguidance {}")
