"""Structured output: a grammar forbids the tokens with which a row's new text could not go on.

The grammar reads the draft tokens as the target does, so each position has the mask of its own
prefix. What it read of rejected draft tokens is rolled back with the text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_specdec.config.terminal import one_line
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules.sampling import BoundProcessor, RowProcessor
from lightning_specdec.text.grammar import NO_TOKEN, CompiledGrammar, GrammarTokens, error_of
from lightning_specdec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

NUM_CACHED_MASKS = 64
"""Positions at the end of a text whose masks are kept: the draft and the target use each one."""
TOO_SLOW = "the grammar takes too long to continue the text"
NUM_CACHED_GRAMMARS = 64
"""Compiled grammars that are kept, since many requests use the same one."""
Schema = str | Mapping[str, Any] | bool


@dataclass(frozen=True)
class Grammar(RowProcessor):
    """What the new text of a row must be, as one of `DecodingConfig.processors`.

    The row may end only where the text is complete, so an answer that ends with EOS always fits.
    One that is cut by `max_new_tokens` or a stop string is the beginning of one that fits.

    Args:
        kind: "json_schema", "regex", or "lark".
        source: the schema as JSON, the regular expression, or the grammar.
        max_seconds: most processor time that one position may take. A row that takes longer fails.
            No limit when None.
    """

    kind: str
    source: str
    max_seconds: float | None = None

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
        # A grammar's text has no control characters, and JSON may have this one as it is.
        quoted_texts = [text.replace("\x7f", "\\u007f") for text in quoted_texts]
        return cls.lark(f"start: {' | '.join(quoted_texts)}")

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
        return GrammarMask(
            self._compiled(target, eos), prompt_length, eos, target.vocab_size, self.max_seconds
        )

    def _compiled(self, target: LanguageModel, eos: frozenset[int]) -> CompiledGrammar:
        if target.vocabulary is None:
            raise ValueError(
                "a grammar needs the text of the target's tokens: load it with its tokenizer"
            )
        if not eos:
            raise ValueError("a grammar needs a token that ends a row: give eos")
        return _compile(self.kind, self.source, _ById(target.vocabulary), _ById(target.tokenizer))


class _ById:
    """A key of a cache that stands for one object, whatever equals it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@lru_cache(maxsize=4)
def _speller_of(tokenizer: _ById) -> Tokenizer | None:
    """A copy of a tokenizer, since those of transformers may not be used by two threads at once."""
    copied: Tokenizer | None = deepcopy(tokenizer.value)
    return copied


@lru_cache(maxsize=4)
def _tokens_of(vocabulary: _ById) -> GrammarTokens:
    return GrammarTokens(vocabulary.value)


@lru_cache(maxsize=NUM_CACHED_GRAMMARS)
def _compile(kind: str, source: str, vocabulary: _ById, tokenizer: _ById) -> CompiledGrammar:
    tokens = _tokens_of(vocabulary)
    return CompiledGrammar(kind, source, tokens, _speller_of(tokenizer))


class GrammarMask(BoundProcessor):
    """The grammar of one row, at any prefix of its text.

    It is a pure function of the prefix. It remembers the last one, from which it goes on or back.

    Args:
        compiled: the grammar.
        prompt_length: tokens at the start of the prefix that the grammar does not read.
        eos: tokens that end the row: allowed exactly where the text may end.
        vocab_size: the target's.
        max_seconds: most processor time for one position; no limit when None.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        prompt_length: int,
        eos: frozenset[int],
        vocab_size: int,
        max_seconds: float | None = None,
    ) -> None:
        self.prompt_length = prompt_length
        self.error = ""
        self._tokens = compiled.tokens
        self._tokenizer = compiled.tokenizer
        self._eos = eos
        self._eos_index = sorted(eos)
        self._vocab_size = vocab_size
        self._max_seconds = max_seconds
        self._new_matcher = compiled.new_matcher
        self._matcher = compiled.new_matcher()
        # Whether the library refuses to go on, and whether tokens were ever rolled back.
        self._is_library_error = False
        self._has_gone_back = False
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
            mask = self._mask_after(new_tokens)
            if self._is_library_error and self._has_gone_back:
                # The matcher keeps what it computed for rejected draft tokens. This may be what
                # exceeds a limit of the library, and it is none of the text.
                self._start_again()
                mask = self._mask_after(new_tokens)
            if self.error:
                return torch.full_like(scores, -torch.inf)
            if mask is None:
                # After EOS or a draft token that cannot be accepted, nobody reads the scores.
                return scores
        mask = mask.to(scores.device)
        return scores.masked_fill(mask, -torch.inf)

    def _mask_after(self, new_tokens: Sequence[int]) -> Bool[Tensor, "V"] | None:
        """The tokens that may not follow these; None if these do not fit the grammar."""
        return self._mask() if self._go_to(new_tokens) else None

    def forced_tokens(self, text: Sequence[int], count: int) -> list[int]:
        """Tokens of the text that must follow: up to `count`, with EOS where nothing else can.

        The text is certain, its tokens need not be. They are only proposed.
        """
        new_tokens = list(text[self.prompt_length :])
        if not new_tokens and self._tokens.has_first_forms:
            return []
        forced_text = self._forced_text(new_tokens, count)
        tokens = self._tokens.spell(forced_text, self._tokenizer)[:count]

        # The text must be allowed token by token, too.
        self._go_to([*new_tokens, *tokens])
        if self.error:
            return []
        forced = self._read[len(new_tokens) :]
        ends_here = self._matcher.is_stopped() and not self._matcher.is_error()
        if len(forced) == len(tokens) < count and ends_here and len(self._eos) == 1:
            forced += self._eos_index
        return forced

    def _forced_text(self, new_tokens: Sequence[int], count: int) -> bytes:
        """The text that must follow, in up to `count` of the longest tokens.

        The masks that show it are those that the target needs.
        """
        tokens = list(new_tokens)
        forced_text = b""
        for _ in range(count):
            if not self._go_to(tokens):
                break
            piece = self._only_piece(self._mask())
            if piece is None:
                break
            token, piece_bytes = piece
            tokens.append(token)
            forced_text += piece_bytes
        return forced_text

    def _only_piece(self, mask: Bool[Tensor, "V"]) -> tuple[int, bytes] | None:
        """The longest allowed token, if the texts of all others are beginnings of its text."""
        allowed = np.flatnonzero(~mask.numpy())
        token_bytes = self._tokens.vocabulary.token_bytes
        if not 0 < len(allowed) <= self._tokens.longest_text or not self._eos.isdisjoint(allowed):
            return None
        pieces = [token_bytes[token] or b"" for token in allowed]
        longest = max(pieces, key=len)
        if not all(longest.startswith(piece) for piece in pieces):
            return None
        return int(allowed[pieces.index(longest)]), longest

    def _go_to(self, new_tokens: Sequence[int]) -> bool:
        """Have the matcher read exactly these tokens. False if they do not fit the grammar."""
        if self.error == TOO_SLOW:
            # Reading the text again would take as long once more.
            return False
        if self.error:
            # That may have been a draft token's fault.
            self._start_again()
        num_equal = _num_equal(self._read, new_tokens)
        num_wrong = len(self._read) - num_equal
        if num_wrong:
            self._matcher.rollback(num_wrong)
            self._has_gone_back = True
            del self._read[num_equal:]
        return all(self._read_token(token) for token in new_tokens[num_equal:])

    def _start_again(self) -> None:
        """Take a new matcher, since one with an error does not recover."""
        self.error = ""
        self._matcher = self._new_matcher()
        self._is_library_error = False
        self._has_gone_back = False
        self._read = []

    def _read_token(self, token: int) -> bool:
        """Have the matcher read one more token, if it may follow and does not end the row."""
        tokens = self._tokens
        if token in self._eos or token >= min(len(tokens.later_ids), self._vocab_size):
            return False
        ids = tokens.later_ids if self._read else tokens.first_ids
        library_id = int(ids[token])
        if library_id == tokens.num_texts or self._matcher.is_stopped():
            return False
        started = time.thread_time()
        is_read = self._matcher.try_consume_tokens([library_id]) == 1
        self._note_error()
        self._check_seconds(started)
        if not is_read or self.error:
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
            started = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._note_error()
            self._check_seconds(started)
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
        if self._matcher.is_error():
            self.error = error_of(self._matcher)
            self._is_library_error = True

    def _check_seconds(self, started: float) -> None:
        """End the text if its grammar has taken too long since then."""
        if self._max_seconds is not None and time.thread_time() - started > self._max_seconds:
            self.error = TOO_SLOW


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
