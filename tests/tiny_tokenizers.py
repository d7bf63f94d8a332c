"""Tokenizers trained on a few lines of text: every kind that models use, small enough to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

SPACE_MARK = "\u2581"
ENGLISH = [
    "the cat sat on the mat and the dog sat on the log",
    "a guess is kept when the target would have said the same",
    "naïve cafés cost 12 €, she said; élan vital 🙂",
]
PROSE = [
    "where the cat was, there was the dog too, and there it sat",
    "what the target says is what is kept, whatever was guessed",
    "les cafés naïfs coûtent 12 €",
]


def trained(
    model: Any,
    pre_tokenizer: Any,
    decoder: Any,
    trainer: Any,
    lines: Sequence[str],
) -> Tokenizer:
    """A tokenizer with these parts, trained on the lines."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def byte_level(
    lines: Sequence[str] = ENGLISH,
    *,
    vocab_size: int = 320,
    special: Sequence[str] = ("<s>", "</s>"),
    **options: Any,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE as in GPT-2. The special tokens come first."""
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = trained(models.BPE(), pre_tokenizer, decoders.ByteLevel(), trainer, lines)
    return wrap(tokenizer, **{"bos_token": special[0], "eos_token": special[1], **options})


def nested_byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE with its steps in sequences, as in Llama 3."""
    tokenizer = byte_level().backend_tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Sequence([decoders.ByteLevel()])])
    return wrap(tokenizer, bos_token="<s>", eos_token="</s>")


def sentencepiece(
    lines: Sequence[str] = PROSE,
    *,
    vocab_size: int = 340,
    prefix: bool = True,
    special: Sequence[str] = ("<unk>", "<pad>", "<s>", "</s>"),
    pad_token: str = "<pad>",
    **options: Any,
) -> PreTrainedTokenizerFast:
    """BPE over SentencePiece's spaces with byte tokens: Llama 2's, or Gemma's without `prefix`."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    normalizer: list[Any] = [normalizers.Replace(" ", SPACE_MARK)]
    decoder = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        normalizer.insert(0, normalizers.Prepend(SPACE_MARK))
        decoder.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normalizer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(decoder)

    byte_names = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*special, *byte_names],
        limit_alphabet=30,
        show_progress=False,
        max_token_length=8,
    )
    tokenizer.train_from_iterator(lines, trainer)
    # The byte tokens were special for the trainer only.
    description = {**json.loads(tokenizer.to_str()), "added_tokens": []}
    rebuilt = Tokenizer.from_str(json.dumps(description))
    return wrap(
        rebuilt,
        unk_token="<unk>",
        pad_token=pad_token,
        bos_token="<s>",
        eos_token="</s>",
        **options,
    )


def unigram() -> PreTrainedTokenizerFast:
    """Unigram over words that begin with a mark, without byte tokens, as in XGLM and T5."""
    trainer = trainers.UnigramTrainer(
        vocab_size=120,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    pre_tokenizer = pre_tokenizers.Metaspace()
    decoder = decoders.Metaspace()
    tokenizer = trained(models.Unigram(), pre_tokenizer, decoder, trainer, [*ENGLISH, *PROSE])
    wrapped = wrap(tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    wrapped.add_tokens([f"{SPACE_MARK}{SPACE_MARK}two{SPACE_MARK}words"])
    return wrapped


def wordpiece() -> PreTrainedTokenizerFast:
    """WordPiece, as in BERT and the causal models made from it."""
    trainer = trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    model = models.WordPiece(unk_token="[UNK]")
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    decoder = decoders.WordPiece()
    tokenizer = trained(model, pre_tokenizer, decoder, trainer, [*ENGLISH, *PROSE])
    return wrap(tokenizer, unk_token="[UNK]", bos_token="[CLS]", eos_token="[SEP]")


def end_of_word_bpe() -> PreTrainedTokenizerFast:
    """BPE that marks the ends of words, as in the first GPT."""
    trainer = trainers.BpeTrainer(
        vocab_size=120,
        special_tokens=["<unk>", "<s>", "</s>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    model = models.BPE(unk_token="<unk>", end_of_word_suffix="</w>")
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    decoder = decoders.BPEDecoder()
    tokenizer = trained(model, pre_tokenizer, decoder, trainer, [*ENGLISH, *PROSE])
    return wrap(tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def wrap(tokenizer: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers loads it."""
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def begin_with(text: str, token: int) -> Any:
    """A post-processor that puts a token before every prompt."""
    return processors.TemplateProcessing(single=f"{text} $A", special_tokens=[(text, token)])


KINDS = {
    "byte_level": byte_level,
    "nested_byte_level": nested_byte_level,
    "sentencepiece": sentencepiece,
}
WITHOUT_BYTES = {"unigram": unigram, "wordpiece": wordpiece, "end_of_word_bpe": end_of_word_bpe}
"""Tokenizers whose vocabularies do not have a token for every byte."""
