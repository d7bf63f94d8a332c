"""Between text and decoding: prompts become tokens, results get their text, stop strings their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_specdec.inference import DecodeResult, StopStrings
from lightning_specdec.inference.rows import Prompts
from lightning_specdec.models import LanguageModel

if TYPE_CHECKING:
    from lightning_specdec.text.base import Message, Tokenizer

TextPrompts = Prompts | str | Sequence[str]
"""Prompts as tokens or as text."""


class Texts:
    """What a target's tokenizer is needed for.

    Args:
        target: the model whose output is wanted; without a tokenizer it is decoded by tokens alone.
    """

    def __init__(self, target: LanguageModel) -> None:
        self.tokenizer = target.tokenizer
        self.vocabulary = target.vocabulary
        stops = self.tokenizer.eos if self.tokenizer is not None else ()
        self.eos = tuple(sorted(token for token in stops if token < target.vocab_size))

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt as it is, with the special tokens that the model expects."""
        return self._needed().encode(text)

    def encode_chat(self, messages: str | Sequence[Message]) -> list[int]:
        """The tokens of a chat up to where the answer begins; a string is its only message."""
        turns: Sequence[Any] = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return self._needed().encode_chat(turns)

    def tokens(self, prompts: TextPrompts) -> Prompts:
        """The prompts as tokens, text encoded."""
        listed: Any = [prompts] if isinstance(prompts, str) else prompts
        if isinstance(listed, list | tuple) and listed and all(isinstance(prompt, str) for prompt in listed):
            return [self.encode(prompt) for prompt in listed]
        tokens: Prompts = listed
        return tokens

    def stop_tokens(self, eos: int | Sequence[int] | None) -> int | Sequence[int]:
        """The tokens that stop a row: those that were asked for, the target's own when None."""
        return self.eos if eos is None else eos

    def stop_strings(self, stop: str | Sequence[str]) -> StopStrings | None:
        """What looks for these strings; None where there are none.

        Raises:
            ValueError: what the target's tokens mean is not known.
        """
        if not stop:
            return None
        if self.vocabulary is None:
            raise ValueError("stop strings need to know the text of the target's tokens: load it with its tokenizer")
        return StopStrings([stop] if isinstance(stop, str) else stop, self.vocabulary.token_bytes)

    def fill(self, result: DecodeResult, stops: StopStrings | None) -> DecodeResult:
        """The result with every row's new text, which ends before a stop string."""
        if self.tokenizer is not None:
            for row in result.rows:
                num_cut = stops.num_cut(row.tokens) if stops is not None and row.stop_reason == "stop" else 0
                row.text = self.decode(row.tokens, num_cut=num_cut)
        return result

    def decode(self, tokens: Sequence[int], *, num_cut: int = 0) -> str:
        """The text of tokens, without its last `num_cut` bytes."""
        if not num_cut:
            return self._needed().decode(tokens)
        stream = self._needed().stream()
        return stream.push(tokens, hold=num_cut) + stream.finish(drop=num_cut)

    def _needed(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("the target has no tokenizer: give prompts as tokens, or load it with its tokenizer")
        return self.tokenizer
