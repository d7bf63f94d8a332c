"""Tiny tokenizers of every kind with a chat template, for the tests of text."""

from __future__ import annotations

import functools
from collections.abc import Callable

import tiny_tokenizers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "The lightning speaks to the oak: wait, it isn't your turn.",
    "Ein Blitz schlägt ein; der Baum fällt. Où est l'été ?",
    "日本語のテキスト 🌩️⚡ and naïve café, 100 %",
    "  two spaces, and a tab\there\nand a new line\n\n",
    "the the the lightning lightning oak oak thunder then there those",
]
SAMPLES = [*TEXT, "", " ", "   ", "unseen: ŵŷ 👩‍👩‍👧 ∮", "a", " a", "\n", "x\ufffdy"]
CHATML = (
    "{% for message in messages %}"
    "<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE as in GPT-2, Llama 3, Qwen and SmolLM2.

    As in many models, the pad token is EOS.
    """
    tokenizer = tiny_tokenizers.byte_level(
        TEXT,
        vocab_size=400,
        special=[*SPECIAL, "<｜über｜>"],
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template=CHATML,
    )
    tokenizer.add_tokens(["ein Wort mit Leerzeichen", "⚡⚡"])
    return tokenizer


def sentencepiece(*, prefix: bool = True) -> PreTrainedTokenizerFast:
    """SentencePiece as in Llama 2, Mistral, Phi-3 and TinyLlama, or Gemma without a prefix."""
    tokenizer = tiny_tokenizers.sentencepiece(
        TEXT, prefix=prefix, special=SPECIAL, pad_token="</s>", chat_template=CHATML
    )
    tokenizer.backend_tokenizer.post_processor = tiny_tokenizers.begin_with("<s>", 1)
    return tokenizer


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "gemma": lambda: sentencepiece(prefix=False),
}


@functools.cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """The tokenizer of that kind. Tests share it, so they must not change it."""
    return TOKENIZERS[kind]()
