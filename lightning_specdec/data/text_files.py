"""Real text to learn from: files on this machine, as windows of tokens.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only

from lightning_specdec.checks import require_int, require_number
from lightning_specdec.data.base import SPLITS, Batch, EpochSampler, PlainValues, Row, Rows, TokenData
from lightning_specdec.data.text_sources import Found, TextFile, find_texts, hold_out
from lightning_specdec.data.token_file import smallest_dtype, token_file
from lightning_specdec.data.windows import Windows, WindowSampler, grid_size
from lightning_specdec.files import cache_home
from lightning_specdec.terminal import say
from lightning_specdec.text.bytes import ByteTokenizer
from lightning_specdec.text.named import named_tokenizer

if TYPE_CHECKING:
    from lightning_specdec.text.base import Tokenizer


class TextFiles(TokenData):
    """Windows of the text of files; by default of the sources of Python's standard library, which every machine has.

    Theory: a language model learns to continue text from anywhere, so training reads windows that begin anywhere: each
    epoch lays a grid of windows over the text, shifted by an offset of its own, and reads them in an order of its own.
    No token is then read twice in an epoch, and the windows of two epochs differ. Validation and test read the same
    windows each time, from files that training never sees, each from the beginning of a line. The files of a split
    follow each other with nothing in between, as the pages of a book do.

    Args:
        paths: files, directories (all files below them but hidden ones) and patterns such as `src/**/*.py`; the
            running Python's own standard library when None, without its tests and its tables of characters.
        tokenizer: "bytes" (each byte a token), or the directory or hub id of a tokenizer of transformers.
        vocab_size: tokens of the models; at least the tokenizer's.
        length: tokens of a window.
        num_train: windows of an epoch at most; as many as the text has side by side when None.
        num_val: windows that choose the best checkpoint, at most.
        num_test: windows kept for the end, at most; their first tokens are the prompts.
        batch_size: windows for each step of the optimizer.
        seed: of the windows of each epoch. Which files are held out depends on their names alone.
        prompt_length: how many tokens of a test window are its prompt; fewer where that would cut a character.
        held_out: share of the bytes that is held out for validation, and the same again for test; whole files.
        max_bytes: the most text that is read; larger sources are cut down to a choice of their files.
        cache_dir: where the tokens are kept once they are made, `~/.cache/lightning_specdec` when None. What lies there
            can be deleted at any time.
    """

    tokenizer: str
    fixed_rows = False  # training windows begin anywhere

    def __init__(
        self,
        paths: str | list[str] | None = None,
        *,
        tokenizer: str = "bytes",
        vocab_size: int = 256,
        length: int = 256,
        num_train: int | None = None,
        num_val: int = 64,
        num_test: int = 16,
        batch_size: int = 16,
        seed: int = 0,
        prompt_length: int = 64,
        held_out: float = 0.05,
        max_bytes: int | None = 16_000_000,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(
            vocab_size,
            num_train=num_train,
            num_val=num_val,
            num_test=num_test,
            batch_size=batch_size,
            seed=seed,
            prompt_length=prompt_length,
        )
        self.paths = [paths] if isinstance(paths, str) else paths
        if self.paths is not None and not self.paths:
            raise ValueError("paths is an empty list: name a file, a directory or a pattern, or leave it out")
        self.tokenizer = tokenizer
        self.length = require_int("length", length, 2)
        self.held_out = require_number("held_out", held_out, low=0.0, high=0.4, low_open=True)
        self.max_bytes = None if max_bytes is None else require_int("max_bytes", max_bytes, 1)
        self.cache_dir = cache_dir
        self._texts: dict[str, _Text] = {}
        self._rows: dict[str, Windows] = {}

    @property
    def max_length(self) -> int:
        return self.length

    def texts(self) -> dict[str, _Text]:
        """Each split's tokens, read or made on the first call."""
        if not self._texts:
            tokenizer = named_tokenizer(self.tokenizer)
            num_tokens = len(tokenizer.vocabulary)
            if num_tokens > self.vocab_size:
                raise ValueError(
                    f"the tokenizer {self.tokenizer} has {num_tokens} tokens, more than vocab_size {self.vocab_size}: "
                    f"set vocab_size to {num_tokens} or more"
                )
            found = find_texts(self.paths, max_bytes=self.max_bytes)
            splits = dict(zip(SPLITS, hold_out(found, self.held_out), strict=True))
            _tell(self._summary(found))
            home = cache_home() if self.cache_dir is None else Path(self.cache_dir).expanduser()
            texts = {split: _Text(files, tokenizer, home) for split, files in splits.items()}
            self._check_room(texts)
            self._texts = texts
        return self._texts

    def rows(self, split: str) -> Rows:
        if split not in self._rows:
            text = self.texts()[split]
            if split == "train":  # numbered by their first tokens, since each epoch has windows of its own
                starts: Sequence[int] = range(len(text.tokens) - self.length + 1)
            else:
                starts = text.fixed_starts(self._num_windows(split), self.length)
            self._rows[split] = Windows(text.tokens, self.length, starts)
        return self._rows[split]

    def train_sampler(self) -> EpochSampler:
        num_tokens = len(self.texts()["train"].tokens)
        return WindowSampler(num_tokens, self.length, self._num_windows("train"), self.seed)

    def _num_windows(self, split: str) -> int:
        """Windows of a split, of which no two overlap: those that are wanted, or as many as there are."""
        most, wanted = self._room(self._texts[split], split), getattr(self, f"num_{split}")
        return most if wanted is None else min(wanted, most)

    def _room(self, text: _Text, split: str) -> int:
        """Windows side by side that the text of a split has room for."""
        num_tokens = len(text.tokens)
        return grid_size(num_tokens, self.length) if split == "train" else num_tokens // self.length

    def _check_room(self, texts: dict[str, _Text]) -> None:
        """Say where there are fewer windows than wanted.

        Raises:
            ValueError: a split has not a single one.
        """
        rooms = {split: self._room(text, split) for split, text in texts.items()}
        if not all(rooms.values()):
            sizes = ", ".join(f"{split} has {len(text.tokens):,}" for split, text in texts.items())
            raise ValueError(
                f"train, val and test need a window of {self.length} tokens each, and {sizes}: give more text (some "
                f"{math.ceil(self.length / self.held_out):,} tokens at least, in files of {self.length} or more), "
                "lower length, or raise held_out"
            )
        wanted = {split: getattr(self, f"num_{split}") for split in texts}
        short = {split: number for split, number in wanted.items() if number is not None and rooms[split] < number}
        if short:
            told = ", ".join(f"num_{split} {rooms[split]} instead of {number}" for split, number in short.items())
            _tell(f"note: the text has fewer windows of {self.length} tokens than wanted: {told}")

    def collate(self, rows: Sequence[Row]) -> Batch:
        """One batch of numbered windows."""
        tokens = np.stack([window for _, window in rows])
        indices = torch.tensor([index for index, _ in rows])
        return Batch(
            tokens=torch.from_numpy(tokens.astype(np.int64)),
            lengths=torch.full_like(indices, self.length),
            prompt_lengths=torch.tensor([self._prompt_length(window) for _, window in rows]),
            indices=indices,
        )

    def _prompt_length(self, window: np.ndarray) -> int:
        """As many tokens as a prompt has, short of the one that a character would be cut by."""
        length = min(self.prompt_length, self.length - 1)
        continues = self.texts()["test"].continues
        while length > 1 and continues[window[length]]:
            length -= 1
        return length

    def bytes_per_token(self, *splits: str) -> float:
        texts = [self.texts()[split] for split in splits]
        return sum(text.num_bytes for text in texts) / sum(len(text.tokens) for text in texts)

    def arguments(self) -> PlainValues:
        names = ("paths", "tokenizer", "length", "held_out", "max_bytes", "cache_dir")
        return {**super().arguments(), **{name: getattr(self, name) for name in names}}

    def _summary(self, found: Found) -> str:
        left_out = {
            "empty": found.num_empty,
            "repeated": found.num_repeated,
            "beyond max_bytes": found.num_over,
        }
        told = ", ".join(f"{number} {why}" for why, number in left_out.items() if number)
        source = " of the standard library" if self.paths is None else ""
        size = f"{len(found.files)} files{source}, {found.num_bytes:,} bytes"
        return f"text: {size}{f' (left out: {told})' if told else ''}"


class _Text:
    """The text of some files, as tokens on the disk.

    Args:
        files: in the order in which they are read.
        tokenizer: what makes tokens of them.
        home: the directory that keeps the tokens.

    Attributes:
        tokens: memory-mapped.
        num_bytes: of the files.
        continues: `[V]`, whether a token begins within a character.
        ends_line: `[V]`, whether a token holds a line's end.
    """

    def __init__(self, files: Sequence[TextFile], tokenizer: Tokenizer, home: Path) -> None:
        vocabulary = tokenizer.vocabulary
        spelt = [piece or b"" for piece in vocabulary.token_bytes]
        self.continues = np.array([0x80 <= piece[0] < 0xC0 if piece else False for piece in spelt])
        self.ends_line = np.array([b"\n" in piece for piece in spelt])
        self.num_bytes = sum(file.num_bytes for file in files)
        dtype = smallest_dtype(len(vocabulary))
        key = repr((tokenizer.fingerprint, dtype.name, [file.digest for file in files]))
        path = home / f"tokens-{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy"
        self.tokens = token_file(path, dtype, lambda: self._made(files, tokenizer, dtype))

    def _made(self, files: Sequence[TextFile], tokenizer: Tokenizer, dtype: np.dtype) -> np.ndarray:
        if isinstance(tokenizer, ByteTokenizer):  # the text's bytes are its tokens
            return np.frombuffer(b"".join(file.read() for file in files), dtype)
        _tell(f"making tokens of {self.num_bytes:,} bytes, once")
        tokens = np.concatenate([np.array(tokenizer.encode_plain(file.read().decode()), dtype) for file in files])
        if not len(tokens):
            raise ValueError(f"the tokenizer {tokenizer.name} makes no tokens of {files[0].path}: give other files")
        return tokens

    def fixed_starts(self, num_windows: int, length: int) -> list[int]:
        """The first tokens of windows that are spread over the text: each begins a line where one begins in time."""
        borders = [number * len(self.tokens) // num_windows for number in range(num_windows + 1)]
        spans = zip(borders, borders[1:], strict=False)
        return [self._start(low, min(low + length, high - length)) for low, high in spans]

    def _start(self, low: int, high: int) -> int:
        """A line's first token from `low` to `high`; failing that, a character's; failing that, `low`."""
        if low == 0:
            return 0
        for begins in (self.ends_line[self.tokens[low - 1 : high]], ~self.continues[self.tokens[low : high + 1]]):
            if begins.any():
                return low + int(begins.argmax())
        return low


@rank_zero_only
def _tell(line: str) -> None:
    say(line, file=sys.stderr)
