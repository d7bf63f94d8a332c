"""What decoding asks of a tokenizer: text to tokens, tokens to text, what ends an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from lightning_specdec.text.stream import TextStream
from lightning_specdec.text.vocabulary import Vocabulary

Message = Mapping[str, str]
"""One turn of a chat: its "role" ("system", "user" or "assistant") and its "content"."""


class Tokenizer(ABC):
    """Text for one model.

    Theory: a tokenizer is a fixed rule between text and tokens, and decoding is about tokens alone. So EOS is a set of
    tokens that end an answer when the model writes them, and means nothing in a prompt; and the pad token is a
    token like another, since nothing here pads.

    Attributes:
        eos: tokens that end an answer.
        name: what `text.named.named_tokenizer` finds it by again; None where it has no name.
    """

    eos: frozenset[int] = frozenset()
    name: str | None = None

    @property
    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """The bytes of every token.

        Raises:
            ValueError: this kind of tokenizer has none that are known.
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
        raise ValueError("the tokenizer has no chat template: take a model that was tuned for chats")

    @abstractmethod
    def decode(self, tokens: Iterable[int], *, show_special: bool = False) -> str:
        """The text of tokens, exactly: nothing is tidied up, and bytes that are no character become U+FFFD."""

    @abstractmethod
    def stream(self, *, show_special: bool = False) -> TextStream:
        """An empty text whose pieces add up to what `decode` gives."""
