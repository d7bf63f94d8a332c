"""Tiny tokenizers of every kind with a chat template, for the laws of text."""

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
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3, Qwen and SmolLM2: pieces of bytes. The pad token ends an answer, as in many models."""
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    special = [*SPECIAL, "<｜über｜>"]
    own = tiny_tokenizers.byte_level(
        TEXT, vocab_size=400, special=special, **names, chat_template=CHATML
    )
    own.add_tokens(["ein Wort mit Leerzeichen", "⚡⚡"])
    return own


def sentencepiece(*, prefix: bool = True) -> PreTrainedTokenizerFast:
    """As Llama 2, Mistral, Phi-3 and TinyLlama; without a prefix as Gemma."""
    own = tiny_tokenizers.sentencepiece(
        TEXT, prefix=prefix, special=SPECIAL, pad_token="</s>", chat_template=CHATML
    )
    own.backend_tokenizer.post_processor = tiny_tokenizers.begin_with("<s>", 1)
    return own


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "gemma": lambda: sentencepiece(prefix=False),
}


@functools.cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """The tokenizer of that kind; read it, do not write to it."""
    return TOKENIZERS[kind]()
