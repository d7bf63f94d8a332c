"""Tokenizers: text and chats to tokens, tokens to text also while they arrive, what ends an answer."""

from __future__ import annotations

import codecs
import hashlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_specdec.config.hub import find
from lightning_specdec.config.terminal import one_line
from lightning_specdec.text.vocabulary import Vocabulary

Message = Mapping[str, str]
"""One turn of a chat: its "role" ("system", "user" or "assistant") and its "content"."""
MOST_TEMPLATE_LINES = 1_000_000
"""Lines of a chat template's code that run before it is taken for one that never ends."""
_NO_TEMPLATE = "the tokenizer has no chat template: take a model that was tuned for chats"
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""What a directory with a tokenizer holds at least one of."""
_NOT_A_CHARACTER = "\ufffd".encode()


class TextStream:
    """One text that grows by tokens.

    Bytes are held back until they can no longer change. All pieces together are exactly what decoding all tokens at
    once gives, and each piece costs as much as its own tokens.

    Args:
        vocabulary: the tokens' bytes, and how they are joined.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()  # the byte tokens since the last other token
        self._ready = bytearray()  # what came before them and is not shown yet
        self._num_to_strip = vocabulary.num_stripped

    def push(self, tokens: Sequence[int], *, hold: int = 0) -> str:
        """The text that these tokens settle.

        Args:
            tokens: what follows those pushed before; numbers without a token show nothing.
            hold: so many bytes at the end are not shown yet, as they may be the beginning of a stop string.
        """
        for token in tokens:
            piece = self._vocabulary.join([token])
            if token in self._vocabulary.byte_tokens:
                self._run += piece
            elif piece:
                self._end_run()
                self._ready += piece
        return self._show(len(self._ready) - max(hold - len(self._run), 0))

    def finish(self, *, drop: int = 0) -> str:
        """The rest of the text, without its last `drop` bytes; nothing is pushed after it."""
        self._end_run()
        return self._show(len(self._ready) - drop, final=True)

    def _end_run(self) -> None:
        """Settle what the byte tokens stand for."""
        if self._run:
            try:
                self._run.decode()
                self._ready += self._run
            except UnicodeDecodeError:
                self._ready += _NOT_A_CHARACTER * len(self._run)
            self._run.clear()

    def _show(self, num_bytes: int, *, final: bool = False) -> str:
        num_bytes = max(num_bytes, 0)
        text = self._decoder.decode(bytes(self._ready[:num_bytes]), final)
        del self._ready[:num_bytes]
        while self._num_to_strip and text.startswith(" "):
            self._num_to_strip, text = self._num_to_strip - 1, text[1:]
        if text:
            self._num_to_strip = 0
        return text


class Tokenizer(ABC):
    """Text for one model.

    Attributes:
        eos: tokens that end an answer when the model writes them; in a prompt they mean nothing.
        name: what `named_tokenizer` finds it by again; None where it has no name.
    """

    eos: frozenset[int] = frozenset()
    name: str | None = None

    @property
    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """The bytes of every token.

        Raises:
            ValueError: they are not known for this kind of tokenizer.
        """

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Changes whenever the tokens of some text may."""

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be encoded."""
        return False

    @property
    def start(self) -> int | None:
        """BOS, where every prompt begins with it."""
        return None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with the special ones that the model expects: BOS where the tokenizer adds it."""

    @abstractmethod
    def encode_plain(self, text: str) -> list[int]:
        """The tokens of text in which nothing is special, whatever it spells; none are added."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a chat up to where the model's answer begins.

        Raises:
            ValueError: there is no chat template, or it does not take these messages.
        """
        raise ValueError(_NO_TEMPLATE)

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, exactly: nothing is tidied up, and bytes that are no character become U+FFFD."""

    def stream(self) -> TextStream:
        """An empty text whose pieces add up to what `decode` gives."""
        return TextStream(self.vocabulary)


class ByteTokenizer(Tokenizer):
    """Each byte of a text's UTF-8 is a token: no file, no training, nothing special, and small models."""

    name = "bytes"
    vocabulary = Vocabulary(tuple(bytes([byte]) for byte in range(256)))
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        """The bytes of a text; a lone surrogate, which has none, is written as "?"."""
        return list(text.encode("utf-8", "replace"))

    encode_plain = encode

    def decode(self, tokens: Iterable[int]) -> str:
        return self.vocabulary.join(tokens).decode("utf-8", "replace")


class TextTokenizer(Tokenizer):
    """A tokenizer of transformers.

    Args:
        tokenizer: a loaded tokenizer of transformers.
        generation_config: the model's, whose EOS tokens count too: chat models often end their turns with another
            token than the tokenizer's EOS.
    """

    def __init__(self, tokenizer: Any, *, generation_config: Any = None) -> None:
        self.tokenizer = tokenizer
        self.eos = _numbers(tokenizer.eos_token_id) | _numbers(
            getattr(generation_config, "eos_token_id", None)
        )

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str],
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> TextTokenizer:
        """The tokenizer of a directory that `save_pretrained` wrote, or of a model on the hub.

        Args:
            revision: branch, tag or commit on the hub.
            trust_remote_code: whether the model's own Python code may run.

        Raises:
            ValueError: there is no tokenizer, or it cannot be read.
        """
        name, path = os.fspath(source), find(source, revision=revision, code=trust_remote_code)
        if not cls.is_in(path):
            raise ValueError(
                f"{name} holds no tokenizer: `tokenizer.save_pretrained` writes one there"
            )
        from transformers import (
            AutoTokenizer,
            GenerationConfig,
        )  # seconds, so only where there is something to read

        generation_config = None
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=trust_remote_code
            )
            if (path / "generation_config.json").is_file():
                generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
        except (
            Exception
        ) as error:  # transformers and tokenizers raise many kinds, `Exception` itself among them
            raise ValueError(
                f"the tokenizer of {name} cannot be read: {_sentence(error)}"
            ) from error
        loaded = cls(tokenizer, generation_config=generation_config)
        loaded.name = name
        return loaded

    @staticmethod
    def is_in(path: Path) -> bool:
        """Whether a directory holds a tokenizer."""
        return any((path / file).is_file() for file in _FILES)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        rules = self.tokenizer.backend_tokenizer.to_str()
        return hashlib.sha256(f"{type(self.tokenizer).__name__} {rules}".encode()).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, verbose=False)["input_ids"])

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode_rendered(self.render_chat(messages))

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The text of a chat up to where the model's answer begins; special tokens are spelt out in it.

        Raises:
            ValueError: as for `encode_chat`; or the template does not end.
        """
        if not self.has_chat_template:
            raise ValueError(_NO_TEMPLATE)
        from jinja2 import Environment, TemplateError

        try:
            words = Environment().lex(str(self.tokenizer.chat_template))
            if any(kind == "operator" and word == "**" for _, kind, word in words):
                raise TemplateError("it computes powers, which may never end")
            with _bounded_work(TemplateError("it does not end")):
                options = {"add_generation_prompt": True, "tokenize": False}
                return str(
                    self.tokenizer.apply_chat_template([dict(each) for each in messages], **options)
                )
        except (
            TemplateError,
            ArithmeticError,
            LookupError,
            MemoryError,
            RecursionError,
            TypeError,
        ) as error:
            raise ValueError(
                f"the model's chat template does not take this chat: {_sentence(error)}"
            ) from error

    def encode_rendered(self, text: str) -> list[int]:
        """The tokens of text that spells its special tokens out itself; none are added."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def encode_plain(self, text: str) -> list[int]:
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return list(self.tokenizer(text, **options)["input_ids"])

    @property
    def start(self) -> int | None:
        tokens = self.encode("")
        return tokens[0] if tokens and tokens[0] == self.tokenizer.bos_token_id else None

    def decode(self, tokens: Iterable[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(tokens), **options))


def named_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of this name: "bytes", or the directory or hub id of one of transformers.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    return ByteTokenizer() if name == ByteTokenizer.name else TextTokenizer.load(name)


@contextmanager
def _bounded_work(error: Exception) -> Iterator[None]:
    """Raise an error once a jinja template has run more than `MOST_TEMPLATE_LINES` lines of code."""
    left = MOST_TEMPLATE_LINES

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != "<template>":
            return None
        left -= 1
        if left < 0:
            raise error
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


def _sentence(error: Exception) -> str:
    """An error's first sentence."""
    return one_line(error).split(". ")[0][:200]


def _numbers(tokens: int | Sequence[int] | None) -> frozenset[int]:
    """One token, several or none as a set."""
    return frozenset(() if tokens is None else (tokens,) if isinstance(tokens, int) else tokens)
