"""Structured output: a grammar forbids the tokens with which a row's new text could not go on.

The grammar reads the draft tokens as the target does, so each position has the mask of its own
prefix. What it read of rejected draft tokens is rolled back with the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_specdec.config.terminal import one_line, short
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules.sampling import BoundProcessor, RowProcessor
from lightning_specdec.text.tokenizer import Tokenizer
from lightning_specdec.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

EXTRA = "structured output needs llguidance: install lightning_specdec[structured]"

MAX_ERROR_SIZE = 300
"""Characters of an error of the library that are shown."""
MAX_LEXER_STATES = 25_000
"""States of a grammar's lexer, of 1 to 2 kB each, which are made while a text grows."""
MAX_GRAMMAR_SYMBOLS = 200_000
"""Symbols of a compiled grammar."""
NUM_CACHED_MASKS = 64
"""Positions at the end of a text whose masks are kept: the draft and the target use each one."""
NUM_CACHED_GRAMMARS = 64
"""Compiled grammars that are kept, since many requests use the same one."""
NO_TOKEN = "no token of the model can continue the text"
EOS_BYTES = b"\xff<eos>"
"""How the library spells a special token. No text contains the byte 0xFF."""

OPTIONS = '%llguidance {"no_forcing": true}\n'
"""The library would allow one spelling of text that is certain, and models have others."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Space between the parts of JSON. Without a limit, some models write spaces forever."""

Schema = str | Mapping[str, Any] | bool


@dataclass(frozen=True)
class Grammar(RowProcessor):
    """What the new text of a row must be, as one of `DecodingConfig.processors`.

    The row may end only where the text is complete, so an answer that ends with EOS always fits.
    One that is cut by `max_new_tokens` or a stop string is the beginning of one that fits.

    Args:
        kind: "json_schema", "regex", or "lark".
        source: the schema as JSON, the regular expression, or the grammar.
    """

    kind: str
    source: str

    @classmethod
    def json_schema(cls, schema: Schema) -> Grammar:
        """JSON that is valid under this schema (JSON Schema, draft 2020-12).

        Keywords that cannot be enforced are refused. Nothing outside the schema is read.

        Raises:
            ValueError: the schema is no JSON.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the JSON schema is no JSON: {one_line(error)}") from None
        if not isinstance(schema, Mapping | bool):
            raise ValueError("a JSON schema must be an object, true, or false")
        return cls("json_schema", json.dumps(schema))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that this regular expression matches as a whole. It has no look-around."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Text of a context-free grammar in Lark's syntax, which begins with the rule `start`."""
        return cls("lark", grammar)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts.

        Raises:
            ValueError: there is none.
        """
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError("a choice needs at least one text")
        quoted_texts = [json.dumps(text, ensure_ascii=False) for text in texts]
        return cls.lark(f"start: {' | '.join(quoted_texts)}")

    @property
    def title(self) -> str:
        """What a message calls it."""
        titles = {"json_schema": "JSON schema", "regex": "regular expression"}
        return titles.get(self.kind, "grammar")

    def to_dict(self) -> dict[str, str]:
        """Plain values, for a record."""
        return {"kind": self.kind, "source": self.source}

    def check(self, target: LanguageModel, eos: frozenset[int]) -> None:
        self._compiled(target, eos)

    def for_row(
        self,
        prompt_length: int,
        target: LanguageModel,
        eos: frozenset[int],
    ) -> GrammarMask:
        return GrammarMask(self._compiled(target, eos), prompt_length, eos, target.vocab_size)

    def _compiled(self, target: LanguageModel, eos: frozenset[int]) -> CompiledGrammar:
        if target.vocabulary is None:
            raise ValueError(
                "a grammar needs the text of the target's tokens: load it with its tokenizer"
            )
        if not eos:
            raise ValueError("a grammar needs a token that ends a row: give eos")
        return _compile(self, _ById(target.vocabulary), _ById(target.tokenizer))


class _ById:
    """A key of a cache that stands for one object, whatever equals it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class GrammarTokens:
    """A vocabulary as the library takes it: each text of a token once.

    Args:
        vocabulary: of the target.

    Attributes:
        library_tokenizer: of `llguidance`.
        later_ids: the library's number of each token's text; the last number is that of no text.
        first_ids: the same at the start of a text, where some tokens are shown without a space.

    Raises:
        ValueError: `llguidance` is not installed, or the text of a token depends on what follows.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        library = _library()
        if vocabulary.num_stripped_at_end:
            raise ValueError(
                "grammars do not support this tokenizer, which removes spaces at the end of a text"
            )
        self.vocabulary = vocabulary
        later_texts = vocabulary.token_bytes
        first_texts = [
            _first_bytes(vocabulary, token, text) for token, text in enumerate(later_texts)
        ]

        self._ids_by_text: dict[bytes, int] = {}
        for text in (*later_texts, *first_texts):
            if _is_text(text):
                self._ids_by_text.setdefault(text, len(self._ids_by_text))
        self.num_texts = len(self._ids_by_text)
        self.later_ids = self._ids(later_texts)
        self.first_ids = self._ids(first_texts)
        self.has_first_forms = not np.array_equal(self.later_ids, self.first_ids)
        self.longest_text = max(map(len, self._ids_by_text), default=1)
        self._tokens_by_text: dict[bytes, int] = {}
        for token, text in enumerate(later_texts):
            if _is_text(text):
                self._tokens_by_text.setdefault(text, token)

        wrapper = library.TokenizerWrapper(_LibraryVocabulary([*self._ids_by_text, EOS_BYTES]))
        self.library_tokenizer = library.LLTokenizer(wrapper, n_vocab=self.num_texts + 1)

    def _ids(self, texts: Sequence[bytes | None]) -> Int[np.ndarray, "V"]:
        ids = [self._ids_by_text.get(text or b"", self.num_texts) for text in texts]
        return np.array(ids, dtype=np.int64)

    def spell(self, text: bytes, tokenizer: Tokenizer | None) -> list[int]:
        """Tokens of a text: those of the tokenizer, or the longest ones from left to right."""
        if tokenizer is not None:
            tokens = tokenizer.encode_plain(text.decode("utf-8", "ignore"))
            if self.vocabulary.join(tokens) == text:
                return tokens

        tokens = []
        start = 0
        while start < len(text):
            for end in range(min(start + self.longest_text, len(text)), start, -1):
                token = self._tokens_by_text.get(text[start:end])
                if token is not None:
                    break
            else:
                break
            tokens.append(token)
            start = end
        return tokens


def _is_text(text: bytes | None) -> bool:
    # The library takes the byte 0xFF, which no text has, for the beginning of a special token.
    return bool(text) and not text.startswith(b"\xff")


def _first_bytes(vocabulary: Vocabulary, token: int, text: bytes | None) -> bytes | None:
    """What a token adds to the start of a text."""
    if text is None:
        return None
    first_text = vocabulary.first_token_bytes.get(token, text)
    for _ in range(vocabulary.num_stripped):
        first_text = first_text.removeprefix(b" ")
    return first_text


class _LibraryVocabulary:
    """The texts that the library's tokens stand for; the last one is EOS."""

    bos_token_id = None

    def __init__(self, texts: list[bytes]) -> None:
        self.tokens = texts
        self.eos_token_id = len(texts) - 1
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        """The library calls this for tokens that it adds itself, which is never asked for."""
        return []


class CompiledGrammar:
    """A grammar for the tokens of a target, shared by all rows that use it.

    Args:
        grammar: what a text must be.
        tokens: of the target.
        tokenizer: spells text that is certain; None if there is none.

    Raises:
        ValueError: the library refuses the grammar.
    """

    def __init__(
        self, grammar: Grammar, tokens: GrammarTokens, tokenizer: Tokenizer | None
    ) -> None:
        library = _library()
        self.tokens = tokens
        self.tokenizer = tokenizer
        limits = library.LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SYMBOLS,
            verbose_errors=False,
        )
        self._matcher = library.LLMatcher(
            tokens.library_tokenizer, library_grammar(grammar), log_level=0, limits=limits
        )
        # The first mask shows what compiling does not, such as limits on a regular expression.
        probe = self._matcher if self._matcher.is_error() else self.new_matcher()
        if not probe.is_error() and not probe.is_stopped():
            probe.compute_bitmask()
        if probe.is_error():
            raise ValueError(f"the {grammar.title} is refused: {error_of(probe)}")

    def new_matcher(self) -> Any:
        """A matcher at the start of a text."""
        return self._matcher.deep_copy()


def error_of(matcher: Any) -> str:
    """The library's error in one line."""
    if "NoExtensionBias" in matcher.get_error():
        return NO_TOKEN
    return shown_error(matcher.get_error())


def shown_error(error: object) -> str:
    """An error of the library in one line, without the grammar that it repeats."""
    text = str(error).replace("<non-verbose/>", "")
    return short(" ".join(text.split()), MAX_ERROR_SIZE)


def library_grammar(grammar: Grammar) -> str:
    """The grammar as the library takes it.

    Raises:
        ValueError: it has options of the library, or `llguidance` is not installed.
    """
    matcher = _library().LLMatcher
    if grammar.kind == "json_schema":
        lark = f"start: {json_rule(json.loads(grammar.source))}"
    elif grammar.kind == "regex":
        converted = json.loads(matcher.grammar_from_regex(grammar.source))
        lark = converted["grammars"][0]["lark_grammar"]
    else:
        lark = grammar.source
        if re.search(r"^\s*%llguidance", lark, re.MULTILINE):
            raise ValueError("the grammar is refused: options by %llguidance are not supported")
    return str(matcher.grammar_from_lark(OPTIONS + lark))


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """The right side of a rule of a Lark grammar that stands for JSON under a schema."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    options = {"whitespace_pattern": WHITESPACE}
    own_options = schema.get("x-guidance")
    if isinstance(own_options, Mapping):
        options.update(own_options)
    # A schema cannot choose to leave out what the library does not support.
    library_schema = {**schema, "x-guidance": {**options, "lenient": False}}
    return f"%json {json.dumps(library_schema)}"


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ValueError(EXTRA) from None
    return llguidance


@lru_cache(maxsize=4)
def _tokens_of(vocabulary: _ById) -> GrammarTokens:
    return GrammarTokens(vocabulary.value)


@lru_cache(maxsize=NUM_CACHED_GRAMMARS)
def _compile(grammar: Grammar, vocabulary: _ById, tokenizer: _ById) -> CompiledGrammar:
    return CompiledGrammar(grammar, _tokens_of(vocabulary), tokenizer.value)


class GrammarMask(BoundProcessor):
    """The grammar of one row, at any prefix of its text.

    It is a pure function of the prefix. It remembers the last one, from which it goes on or back.

    Args:
        compiled: the grammar.
        prompt_length: tokens at the start of the prefix that the grammar does not read.
        eos: tokens that end the row: allowed exactly where the text may end.
        vocab_size: the target's.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        prompt_length: int,
        eos: frozenset[int],
        vocab_size: int,
    ) -> None:
        self.prompt_length = prompt_length
        self.error = ""
        self._tokens = compiled.tokens
        self._tokenizer = compiled.tokenizer
        self._eos = eos
        self._eos_index = sorted(eos)
        self._vocab_size = vocab_size
        self._new_matcher = compiled.new_matcher
        self._matcher = compiled.new_matcher()
        # The new tokens that the matcher has read.
        self._read: list[int] = []
        # The last text that it has read, from which it may have gone back; and for each length of
        # it, the tokens that may not follow.
        self._path: list[int] = []
        self._masks: dict[int, Bool[Tensor, "V"]] = {}
        # One bit for each text of the library.
        self._bits = np.zeros(-(-(self._tokens.num_texts + 1) // 32), dtype=np.int32)

    def process(
        self,
        text: Sequence[int],
        length: int,
        scores: Float[Tensor, "1 V"],
    ) -> Float[Tensor, "1 V"]:
        new_tokens = list(text[self.prompt_length : length])
        mask = self._masks.get(len(new_tokens))
        if mask is None or self._path[: len(new_tokens)] != new_tokens:
            if not self._go_to(new_tokens) and not self.error:
                # After EOS or a draft token that cannot be accepted, nobody reads the scores.
                return scores
            mask = self._mask()
        mask = mask.to(scores.device)
        return scores.masked_fill(mask, -torch.inf)

    def forced_tokens(self, text: Sequence[int], count: int) -> list[int]:
        """Tokens of the text that must follow: up to `count`, with EOS where nothing else can.

        The text is certain, its tokens need not be. They are only proposed.
        """
        new_tokens = text[self.prompt_length :]
        is_first = not new_tokens and self._tokens.has_first_forms
        if is_first or not self._go_to(new_tokens):
            return []
        forced_text = self._matcher.compute_ff_bytes()
        tokens = self._tokens.spell(forced_text, self._tokenizer)[:count]

        # The text must be allowed token by token, too.
        self._go_to([*new_tokens, *tokens])
        forced = self._read[len(new_tokens) :]
        ends_here = self._matcher.is_stopped() and not self._matcher.is_error()
        if len(forced) == len(tokens) < count and ends_here and len(self._eos) == 1:
            forced += self._eos_index
        return forced

    def _go_to(self, new_tokens: Sequence[int]) -> bool:
        """Have the matcher read exactly these tokens. False if they do not fit the grammar."""
        if self.error:
            # That may have been a draft token's fault, and a matcher does not recover.
            self.error = ""
            self._matcher = self._new_matcher()
            self._read = []
        num_equal = _num_equal(self._read, new_tokens)
        num_wrong = len(self._read) - num_equal
        if num_wrong:
            self._matcher.rollback(num_wrong)
            del self._read[num_equal:]
        return all(self._read_token(token) for token in new_tokens[num_equal:])

    def _read_token(self, token: int) -> bool:
        """Have the matcher read one more token, if it may follow and does not end the row."""
        tokens = self._tokens
        if token in self._eos or token >= min(len(tokens.later_ids), self._vocab_size):
            return False
        ids = tokens.later_ids if self._read else tokens.first_ids
        library_id = int(ids[token])
        if library_id == tokens.num_texts or self._matcher.is_stopped():
            return False
        if self._matcher.try_consume_tokens([library_id]) == 0:
            self._note_error()
            return False
        self._read.append(token)
        self._extend_path(token)
        return True

    def _extend_path(self, token: int) -> None:
        """Remember the token that was read. The masks of another text after it are forgotten."""
        length = len(self._read)
        if self._path[length - 1 : length] == [token]:
            return
        self._path[length - 1 :] = [token]
        for other_length in [key for key in self._masks if key >= length]:
            del self._masks[other_length]

    def _mask(self) -> Bool[Tensor, "V"]:
        """The tokens that may not follow what the matcher has read."""
        length = len(self._read)
        mask = self._masks.get(length)
        if mask is None:
            mask = self._compute_mask()
            if self.error:
                return mask
            self._masks[length] = mask
            self._masks.pop(length - NUM_CACHED_MASKS, None)
        return mask

    def _compute_mask(self) -> Bool[Tensor, "V"]:
        is_allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        is_complete = not self.error and self._matcher.is_accepting()
        if not self.error and not self._matcher.is_stopped():
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._note_error()
        if not self.error:
            bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little").view(np.bool_)
            bits[self._tokens.num_texts :] = False
            ids = self._tokens.later_ids if self._read else self._tokens.first_ids
            num_tokens = min(len(ids), self._vocab_size)
            if not self._matcher.is_stopped():
                is_allowed[:num_tokens] = bits[ids[:num_tokens]]
            is_allowed[self._eos_index] = is_complete
            if not is_allowed.any():
                self.error = NO_TOKEN
        return torch.from_numpy(~is_allowed)

    def _note_error(self) -> None:
        """Remember an error of the library: a limit, for example. The text cannot go on."""
        if not self._matcher.is_error():
            return
        self.error = error_of(self._matcher)


def _num_equal(tokens: Sequence[int], other_tokens: Sequence[int]) -> int:
    """Length of the common prefix."""
    length = min(len(tokens), len(other_tokens))
    # Mostly one continues the other.
    if tokens[:length] == other_tokens[:length]:
        return length
    for i in range(length):
        if tokens[i] != other_tokens[i]:
            return i
    return length
