"""Tiny tokenizers of every kind, trained on a few lines, for the laws of text."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "The lightning speaks to the oak: wait, it isn't your turn.",
    "Ein Blitz schlägt ein; der Baum fällt. Où est l'été ?",
    "日本語のテキスト 🌩️⚡ and naïve café, 100 %",
    "  two spaces, and a tab\there\nand a new line\n\n",
    "the the the lightning lightning oak oak thunder then there those",
]
SAMPLES = [*TEXT, "", " ", "   ", "unseen: ŵŷ 👩‍👩‍👧 ∮", "a", " a", "\n", "x\ufffdy"]
SPECIAL = ["<unk>", "<s>", "</s>"]
CHATML = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def _wrapped(tokenizer: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    # The pad token is the end of an answer, as many models have it.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template=CHATML,
        **options,
    )


def _trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3, Qwen and SmolLM2: pieces of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL, "<｜über｜>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = _trained(tokenizer, trainer)
    tokenizer.add_tokens(["ein Wort mit Leerzeichen", "⚡⚡"])
    return _wrapped(tokenizer)


def _with_byte_tokens(decoder: Any, *, normalizer: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizer
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=[*SPECIAL, *bytes_], limit_alphabet=30)
    spec = json.loads(_trained(tokenizer, trainer).to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in bytes_]
    spec["model"] |= {"byte_fallback": True, "fuse_unk": True}
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoder
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _wrapped(tokenizer)


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2, Mistral, Phi-3 and TinyLlama: a mark for spaces, one before the text, bytes for what is missing."""
    return _with_byte_tokens(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    )


def gemma() -> PreTrainedTokenizerFast:
    """As Gemma: the mark for spaces, none before the text."""
    return _with_byte_tokens(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        normalizer=normalizers.Replace(" ", "▁"),
    )


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "gemma": gemma,
}


@functools.cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """The tokenizer of that kind; read it, do not write to it."""
    return TOKENIZERS[kind]()
