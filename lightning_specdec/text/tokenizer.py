"""Tokenizers: text and chats to tokens, and tokens to text, all at once or as a stream."""

from __future__ import annotations

import codecs
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_specdec.config.hub import find, is_gguf
from lightning_specdec.config.terminal import one_line
from lightning_specdec.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import GenerationConfig

Message = Mapping[str, str]
"""One turn of a chat: its "role" ("system", "user" or "assistant") and its "content"."""

NO_CHAT_TEMPLATE = "the tokenizer has no chat template: use a model that was tuned for chats"

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""A directory with a tokenizer contains at least one of these files."""

REPLACEMENT_BYTES = "\ufffd".encode()
"""What is shown for a byte that is part of no character."""


class TextStream:
    """One text that grows by tokens.

    Bytes are held back until they can no longer change. All pieces joined are exactly the text of
    all tokens decoded at once, and a piece costs time in proportion to its own tokens.

    Args:
        vocabulary: bytes of the tokens, and how they are joined.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_empty = True
        self._num_to_strip = vocabulary.num_stripped
        # Byte tokens since the last other token. They become U+FFFD together if they are not valid
        # UTF-8.
        self._byte_run = bytearray()
        # Bytes before `_byte_run` that are not shown yet.
        self._pending = bytearray()

    def push(self, tokens: Sequence[int], *, hold: int = 0) -> str:
        """Add tokens and return the text that can be shown.

        Args:
            tokens: the tokens that follow those pushed before. Ids outside the vocabulary show
                nothing.
            hold: number of bytes at the end to hold back, since they may be the beginning of a stop
                string.
        """
        for token in tokens:
            piece = self._piece(token)
            if token in self._vocabulary.byte_tokens:
                self._byte_run += piece
            elif piece:
                self._end_byte_run()
                self._pending += piece

        # The last spaces may be removed by `finish`.
        num_held = max(hold, self._vocabulary.num_stripped_at_end)
        return self._show(len(self._pending) - max(num_held - len(self._byte_run), 0))

    def finish(self, *, drop: int = 0) -> str:
        """Return the rest of the text without its last `drop` bytes.

        Nothing may be pushed afterwards.
        """
        self._end_byte_run()
        num_shown = len(self._pending) - drop
        if drop == 0:
            for _ in range(self._vocabulary.num_stripped_at_end):
                if self._pending.endswith(b" ", 0, num_shown):
                    num_shown -= 1
        return self._show(num_shown, final=True)

    def _piece(self, token: int) -> bytes:
        """The bytes that a token adds."""
        piece = self._vocabulary.join([token])
        if self._is_empty and piece:
            piece = self._vocabulary.first_token_bytes.get(token, piece)
            self._is_empty = False
        return piece

    def _end_byte_run(self) -> None:
        """Decide what the byte tokens stand for, now that no other one follows."""
        if not self._byte_run:
            return
        try:
            self._byte_run.decode()
            self._pending += self._byte_run
        except UnicodeDecodeError:
            self._pending += REPLACEMENT_BYTES * len(self._byte_run)
        self._byte_run.clear()

    def _show(self, num_bytes: int, *, final: bool = False) -> str:
        """Take bytes from the start of the pending ones, and return the complete characters."""
        num_bytes = max(num_bytes, 0)
        text = self._decoder.decode(bytes(self._pending[:num_bytes]), final)
        del self._pending[:num_bytes]

        while self._num_to_strip > 0 and text.startswith(" "):
            text = text[1:]
            self._num_to_strip -= 1
        if text:
            self._num_to_strip = 0
        return text


class Tokenizer(ABC):
    """Text for one model.

    Attributes:
        eos: tokens that end an answer when the model generates them. In a prompt they have no
            effect.
        name: the name by which `named_tokenizer` finds this tokenizer again; None if it has no
            name.
    """

    eos: frozenset[int] = frozenset()
    name: str | None = None

    @property
    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """The bytes of every token.

        Raises:
            ValueError: they are unknown for this kind of tokenizer.
        """

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A string that changes whenever the tokens of some text may change."""

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be encoded."""
        return False

    @property
    def template_for_tools(self) -> str | None:
        """Source of the chat template for chats with tools; None if it has no place for them."""
        return None

    @property
    def chat_fingerprint(self) -> str:
        """A string that changes whenever the text of some chat may change."""
        return ""

    @property
    def start(self) -> int | None:
        """The BOS token if every prompt begins with it, else None."""
        return None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with the special tokens that the tokenizer adds, such as BOS."""

    @abstractmethod
    def encode_plain(self, text: str) -> list[int]:
        """The tokens of plain text: special tokens are neither added nor recognized in the text."""

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a chat up to where the model's answer begins.

        Args:
            messages: turns of the chat.
            chat_template_kwargs: variables of the chat template, such as `{"enable_thinking":
                False}`.

        Raises:
            ValueError: there is no chat template, or it does not accept these messages.
        """
        raise ValueError(NO_CHAT_TEMPLATE)

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """The exact text of tokens. Bytes that are part of no character become U+FFFD."""

    def stream(self) -> TextStream:
        """An empty text. Its pieces joined are what `decode` returns."""
        return TextStream(self.vocabulary)


class ByteTokenizer(Tokenizer):
    """Each byte of a text's UTF-8 is a token.

    Needs no file and no training, and has no special tokens.
    """

    name = "bytes"
    vocabulary = Vocabulary(tuple(bytes([byte]) for byte in range(256)))
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        """The bytes of a text. A lone surrogate, which has no bytes, is replaced by "?"."""
        return list(valid_text(text).encode())

    encode_plain = encode

    def decode(self, tokens: Iterable[int]) -> str:
        return self.vocabulary.join(tokens).decode("utf-8", "replace")


class TextTokenizer(Tokenizer):
    """A tokenizer of transformers.

    Args:
        tokenizer: a loaded transformers tokenizer.
        generation_config: generation config of the model. Its EOS tokens are used too: many chat
            models end their turns with another token than the tokenizer's EOS.
    """

    def __init__(self, tokenizer: Any, *, generation_config: Any = None) -> None:
        self.tokenizer = tokenizer
        model_eos = getattr(generation_config, "eos_token_id", None)
        self.eos = _token_set(tokenizer.eos_token_id) | _token_set(model_eos)

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str],
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> TextTokenizer:
        """Load the tokenizer of a directory that `save_pretrained` wrote, or of a model on the Hub.

        Args:
            source: a directory, a GGUF file, or a Hub id.
            revision: branch, tag or commit on the Hub.
            trust_remote_code: whether the model's own Python code may run.

        Raises:
            ValueError: there is no tokenizer, or it cannot be read.
        """
        name = os.fspath(source)
        path = find(source, revision=revision, code=trust_remote_code)
        if not cls.is_in(path):
            raise ValueError(
                f"{name} has no tokenizer: write one there with `tokenizer.save_pretrained`"
            )

        # Importing transformers takes seconds, so it waits until there is something to read.
        from transformers import AutoTokenizer

        directory = path
        options: dict[str, Any] = {}
        if is_gguf(path):
            directory = path.parent
            options["gguf_file"] = path.name
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=trust_remote_code, **options
            )
            generation_config = _load_generation_config(path, trust_remote_code)
        except (
            Exception
        ) as error:  # transformers and tokenizers raise many kinds, also `Exception` itself
            raise ValueError(
                f"the tokenizer of {name} cannot be read: {_first_sentence(error)}"
            ) from error
        loaded = cls(tokenizer, generation_config=generation_config)
        loaded.name = name
        return loaded

    @staticmethod
    def is_in(path: Path) -> bool:
        """Whether a directory contains a tokenizer, as every GGUF file does."""
        return is_gguf(path) or any((path / file).is_file() for file in TOKENIZER_FILES)

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

    @property
    def template_for_tools(self) -> str | None:
        if not self.has_chat_template:
            return None
        template = str(self.tokenizer.get_chat_template(tools=[{}]))
        return template if "tools" in template else None

    @property
    def chat_fingerprint(self) -> str:
        return repr((self.tokenizer.chat_template, self.tokenizer.special_tokens_map))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(valid_text(text), verbose=False)["input_ids"])

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        text = self.render_chat(messages, chat_template_kwargs=chat_template_kwargs)
        return self.encode_rendered(text)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat up to where the model's answer begins; special tokens are spelled out.

        Args:
            messages: turns of the chat.
            chat_template_kwargs: variables of the chat template, such as `{"enable_thinking":
                False}`.

        Raises:
            ValueError: as for `encode_chat`; or the template exceeds a limit on time or memory.
        """
        if not self.has_chat_template:
            raise ValueError(NO_CHAT_TEMPLATE)
        if "messages" in (chat_template_kwargs or {}):
            raise ValueError(
                "chat_template_kwargs has 'messages', which would replace the chat: give other "
                "variables of the chat template, such as enable_thinking"
            )
        from lightning_specdec.text.chat_template import render_chat_template

        variables = {**self.tokenizer.special_tokens_map, **(chat_template_kwargs or {})}
        try:
            # A tokenizer may have several templates by name, such as "default" and "tool_use".
            template = self.tokenizer.get_chat_template(tools=variables.get("tools"))
            if variables.get("tools") and "tools" not in template:
                raise ValueError("it has no place for tools")
            return render_chat_template(template, messages, variables)
        except Exception as error:  # a template is a program, which may raise anything
            raise ValueError(
                f"the model's chat template does not accept this chat: {_first_sentence(error)}"
            ) from error

    def encode_rendered(self, text: str) -> list[int]:
        """The tokens of text that spells out its special tokens. None are added."""
        options = {"add_special_tokens": False, "verbose": False}
        return list(self.tokenizer(valid_text(text), **options)["input_ids"])

    def encode_plain(self, text: str) -> list[int]:
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return list(self.tokenizer(valid_text(text), **options)["input_ids"])

    @property
    def start(self) -> int | None:
        first_tokens = self.encode("")[:1]
        if first_tokens == [self.tokenizer.bos_token_id]:
            return first_tokens[0]
        return None

    def decode(self, tokens: Iterable[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(tokens), **options))


def named_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer by name: "bytes", or the directory or Hub id of a transformers tokenizer.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    return TextTokenizer.load(name)


def valid_text(text: str) -> str:
    """The text with each lone surrogate, which JSON can spell and UTF-8 cannot, replaced by "?"."""
    return text.encode("utf-8", "replace").decode()


def _load_generation_config(path: Path, trust_remote_code: bool) -> GenerationConfig | None:
    """The generation config that transformers would give to the model of a directory.

    Without a generation_config.json, transformers makes one from config.json, which may have EOS
    tokens too.
    """
    from transformers import AutoConfig, GenerationConfig

    if is_gguf(path):
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        return GenerationConfig.from_model_config(config)
    if (path / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(path, local_files_only=True)
    if not (path / "config.json").is_file():
        return None
    try:
        config = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except ValueError:
        # transformers does not know this type of model, so only its tokenizer is of use.
        return None
    return GenerationConfig.from_model_config(config)


def _first_sentence(error: Exception) -> str:
    return one_line(error).split(". ")[0][:200]


def _token_set(tokens: int | Sequence[int] | None) -> frozenset[int]:
    """One token, several or none as a set."""
    if tokens is None:
        return frozenset()
    if isinstance(tokens, int):
        return frozenset({tokens})
    return frozenset(tokens)
