"""A tokenizer of transformers as decoding wants it: text and chats to tokens, tokens to text, what ends an answer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from lightning_specdec.text.base import Message, Tokenizer
from lightning_specdec.text.joining import joining_of
from lightning_specdec.text.stream import TextStream
from lightning_specdec.text.vocabulary import Vocabulary

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")
"""What a directory with a tokenizer holds at least one of."""


class TextTokenizer(Tokenizer):
    """A tokenizer of transformers.

    Args:
        tokenizer: a loaded tokenizer of transformers.
        generation_config: the model's, whose EOS tokens count too: chat models often end their turns with another
            token than the tokenizer's EOS.
    """

    def __init__(self, tokenizer: Any, *, generation_config: Any = None) -> None:
        self.tokenizer = tokenizer
        self.eos = _numbers(tokenizer.eos_token_id) | _numbers(getattr(generation_config, "eos_token_id", None))

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str],
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        generation_config: Any = None,
    ) -> TextTokenizer:
        """The tokenizer of a directory or of a model on the hub.

        Args:
            source: a directory that `save_pretrained` wrote, or a hub id.
            revision: branch, tag or commit on the hub.
            trust_remote_code: whether the model's own Python code may run.
            generation_config: the model's, where it is loaded already; read from the source when None.

        Raises:
            ValueError: there is no tokenizer, or it cannot be read.
        """
        from lightning_specdec.models.hub import find

        path = find(source, revision=revision, code=trust_remote_code).path
        if not any((path / file).is_file() for file in _FILES):
            raise ValueError(f"{os.fspath(source)} holds no tokenizer: `tokenizer.save_pretrained` writes one there")
        from transformers import AutoTokenizer, GenerationConfig  # seconds, so only where there is something to read

        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **options)
        except Exception as error:  # transformers and tokenizers raise many kinds, `Exception` itself among them
            raise ValueError(f"the tokenizer of {os.fspath(source)} cannot be read: {_one_line(error)}") from error
        if generation_config is None and (path / "generation_config.json").is_file():
            try:
                generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
            except (OSError, ValueError, TypeError) as error:
                raise ValueError(f"{path / 'generation_config.json'} cannot be read: {_one_line(error)}") from error
        loaded = cls(tokenizer, generation_config=generation_config)
        loaded.name = os.fspath(source)
        return loaded

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of every token.

        Raises:
            ValueError: this kind of tokenizer has none that are known.
        """
        return Vocabulary.of(self.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = repr(sorted(self.tokenizer.get_vocab().items())) if backend is None else backend.to_str()
        return hashlib.sha256(f"{type(self.tokenizer).__name__} {rules}".encode()).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be encoded."""
        return bool(self.tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with the special ones that the model expects: BOS where the tokenizer adds it."""
        return list(self.tokenizer(text, verbose=False)["input_ids"])

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a chat up to where the model's answer begins.

        Raises:
            ValueError: there is no chat template, or it does not take these messages.
        """
        return self.encode_rendered(self.render_chat(messages))

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The text of a chat up to where the model's answer begins; special tokens are spelt out in it.

        Raises:
            ValueError: as for `encode_chat`.
        """
        if not self.has_chat_template:
            raise ValueError("the tokenizer has no chat template: take a model that was tuned for chats")
        from jinja2 import TemplateError

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
                )
            )
        except TemplateError as error:
            raise ValueError(f"the model's chat template does not take this chat: {_one_line(error)}") from error

    def encode_rendered(self, text: str) -> list[int]:
        """The tokens of text that spells its special tokens out itself; none are added."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def encode_plain(self, text: str) -> list[int]:
        """The tokens of text in which nothing is special, whatever it spells; none are added."""
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return list(self.tokenizer(text, **options)["input_ids"])

    @property
    def start(self) -> int | None:
        """BOS, where every prompt begins with it."""
        tokens = self.encode("")
        return tokens[0] if tokens and tokens[0] == self.tokenizer.bos_token_id else None

    def decode(self, tokens: Iterable[int], *, show_special: bool = False) -> str:
        """The text of tokens, exactly: nothing is tidied up, and bytes that are no character become U+FFFD."""
        return str(
            self.tokenizer.decode(
                list(tokens), skip_special_tokens=not show_special, clean_up_tokenization_spaces=False
            )
        )

    def stream(self, *, show_special: bool = False) -> TextStream:
        """An empty text whose pieces add up to what `decode` gives."""
        return TextStream(self.vocabulary, self._joinings[show_special])

    @cached_property
    def _joinings(self) -> tuple[Any, Any]:
        skipping, showing = (joining_of(self.tokenizer, self.vocabulary, show_special=shown) for shown in (False, True))
        return skipping, showing


def _numbers(tokens: int | Sequence[int] | None) -> frozenset[int]:
    """One token, several or none as a set."""
    return frozenset(() if tokens is None else (tokens,) if isinstance(tokens, int) else tokens)


def _one_line(error: Exception) -> str:
    """An error's first sentence."""
    text = " ".join(str(error).split())
    return text.split(". ")[0][:200] or type(error).__name__
