"""Grammars in the library that computes which tokens may follow a text, `llguidance`."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from lightning_specdec.config.terminal import one_line, short
from lightning_specdec.text.tokenizer import Tokenizer
from lightning_specdec.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from jaxtyping import Int

EXTRA = "structured output needs llguidance: pip install '.[structured]'"

MAX_ERROR_SIZE = 300
"""Characters of an error of the library that are shown."""
MAX_LEXER_STATES = 25_000
"""States of a grammar's lexer, of 1 to 2 kB each, which are made while a text grows."""
MAX_GRAMMAR_SYMBOLS = 200_000
"""Symbols of a compiled grammar."""
NO_TOKEN = "no token of the model can continue the text"
EOS_BYTES = b"\xff<eos>"
"""How the library spells a special token. No text contains the byte 0xFF."""

OPTIONS = '%llguidance {"no_forcing": true}\n'
"""The library would allow one spelling of text that is certain, and models have others."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Space between the parts of JSON. Without a limit, some models write spaces forever."""

_speller_lock = threading.Lock()
"""Held while a copy of a tokenizer spells certain text."""


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
            with _speller_lock:
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


def _is_text(text: bytes | None) -> TypeGuard[bytes]:
    # The library takes the byte 0xFF, which no text has, for the beginning of a special token.
    return text is not None and text != b"" and not text.startswith(b"\xff")


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
        kind: "json_schema", "regex", or "lark".
        source: the schema as JSON, the regular expression, or the grammar.
        tokens: of the target.
        tokenizer: spells text that is certain; None if there is none.

    Raises:
        ValueError: the library refuses the grammar.
    """

    def __init__(
        self,
        kind: str,
        source: str,
        tokens: GrammarTokens,
        tokenizer: Tokenizer | None,
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
            tokens.library_tokenizer, library_grammar(kind, source), log_level=0, limits=limits
        )
        # The first mask shows what compiling does not, such as limits on a regular expression.
        probe = self._matcher if self._matcher.is_error() else self.new_matcher()
        if not probe.is_error() and not probe.is_stopped():
            probe.compute_bitmask()
        if probe.is_error():
            raise ValueError(f"the {title_of(kind)} is refused: {error_of(probe)}")

    def new_matcher(self) -> Any:
        """A matcher at the start of a text."""
        return self._matcher.deep_copy()


def title_of(kind: str) -> str:
    """What a message calls a grammar of this kind."""
    titles = {"json_schema": "JSON schema", "regex": "regular expression"}
    return titles.get(kind, "grammar")


def error_of(matcher: Any) -> str:
    """The library's error in one line."""
    if "NoExtensionBias" in matcher.get_error():
        return NO_TOKEN
    return shown_error(matcher.get_error())


def shown_error(error: object) -> str:
    """An error of the library in one line, without the grammar that it repeats."""
    text = str(error).replace("<non-verbose/>", "")
    return short(" ".join(text.split()), MAX_ERROR_SIZE)


def library_grammar(kind: str, source: str) -> str:
    """The grammar as the library takes it.

    Raises:
        ValueError: it has options of the library, or `llguidance` is not installed.
    """
    matcher = _library().LLMatcher
    if kind == "json_schema":
        lark = f"start: {json_rule(json.loads(source))}"
    elif kind == "regex":
        converted = json.loads(matcher.grammar_from_regex(source))
        lark = converted["grammars"][0]["lark_grammar"]
    else:
        lark = source
        # A regular expression over all lines would take quadratic time on empty ones.
        if any(line.lstrip().startswith("%llguidance") for line in lark.splitlines()):
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


def check_grammar(kind: str, source: str) -> None:
    """Check a grammar without the tokens of a target, as far as that is possible.

    Args:
        kind, source: as of a `CompiledGrammar`.

    Raises:
        ValueError: `llguidance` is not installed, or refuses the grammar.
    """
    library = _library()
    if kind == "json_schema":
        try:
            schema = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the JSON schema is no JSON: {one_line(error)}") from None
        if not isinstance(schema, dict | bool):
            raise ValueError("a JSON schema must be an object, true, or false")
    problem = library.LLMatcher.validate_grammar(library_grammar(kind, source))
    if problem:
        raise ValueError(f"the {title_of(kind)} is refused: {shown_error(problem)}")


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ValueError(EXTRA) from None
    return llguidance
