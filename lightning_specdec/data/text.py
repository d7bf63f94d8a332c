"""Windows of the text of files: whole files are held out, and tokens are kept in memory-mapped files."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_specdec.config.checks import require_int, require_number
from lightning_specdec.config.files import cache_home, replaced
from lightning_specdec.data.base import SPLITS, EpochSampler, NumberedRows, TokenData
from lightning_specdec.text.tokenizer import Tokenizer, named_tokenizer

SKIPPED = frozenset({"__pycache__"})
NO_SOURCES = SKIPPED | {
    "dist-packages",
    "encodings",
    "idle_test",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
"""Directories of an installed Python that hold its tests, generated tables, or other packages."""


class TextFile(NamedTuple):
    """One file of valid text.

    Args:
        key: pseudo-random, of its path below the directory that was asked for; decides its split.
        path: where it is.
        num_bytes: its size.
        digest: SHA-256 of its bytes.
    """

    key: str
    path: Path
    num_bytes: int
    digest: str


def find_texts(paths: Sequence[str] | None) -> list[TextFile]:
    """The distinct text files of a source, by path.

    Args:
        paths: files, directories (all files below them but hidden ones) and patterns such as `src/**/*.py`; the
            running Python's own standard library without its tests when None.

    Raises:
        FileNotFoundError: a path does not exist, or a pattern matches no file.
        ValueError: a file is not UTF-8.
    """
    # A file may be named twice, by itself and by its directory, and a content may have several names.
    named = {path.resolve(): (name, path) for name, path in _listed(paths)}.values()
    distinct: dict[str, TextFile] = {}
    for name, path in sorted(named):
        content = path.read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError:
            raise ValueError(
                f"{path} is not text in UTF-8: save it as UTF-8, or leave it out"
            ) from None
        key, digest = (
            hashlib.sha256(os.fsencode(name)).hexdigest(),
            hashlib.sha256(content).hexdigest(),
        )
        if content:
            distinct.setdefault(digest, TextFile(key, path, len(content), digest))
    return list(distinct.values())


def _listed(paths: Sequence[str] | None) -> Iterator[tuple[str, Path]]:
    """Names and paths of all files that `paths` mean, without hidden ones in directories."""
    skipped = NO_SOURCES if paths is None else SKIPPED
    for given in [f"{sysconfig.get_path('stdlib')}/**/*.py"] if paths is None else paths:
        parts = Path(given).expanduser().parts
        plain = list(takewhile(lambda part: not glob.has_magic(part), parts))
        root, pattern = Path(*plain), "/".join(parts[len(plain) :])
        if root.is_file():
            found = [(root.name, root)]
        else:
            below = [
                (path.relative_to(root), path)
                for path in root.glob(pattern or "**/*")
                if path.is_file()
            ]
            found = [
                (name.as_posix(), path)
                for name, path in below
                if not any(
                    part in skipped or part.startswith((".", "_sysconfigdata"))
                    for part in name.parts
                )
            ]  # the build's own settings differ between machines
        if not found:
            raise FileNotFoundError(f"{given} does not exist or has no files: check this path")
        yield from found


def hold_out(
    files: Sequence[TextFile], share: float
) -> tuple[list[TextFile], list[TextFile], list[TextFile]]:
    """Files for training, validation and test; a file is in one split only.

    Args:
        share: of the bytes, for validation and for test each, at most.

    Raises:
        ValueError: a split has no file.
    """
    room = share * sum(file.num_bytes for file in files)
    train: list[TextFile] = []
    held: tuple[list[TextFile], list[TextFile]] = [], []
    sizes = [0, 0]
    for file in sorted(files, key=lambda file: (file.key, file.digest)):
        smaller = sizes.index(min(sizes))
        fits = sizes[smaller] + file.num_bytes <= room
        (held[smaller] if fits else train).append(file)
        sizes[smaller] += file.num_bytes * fits
    if not (train and all(held)):
        raise ValueError(
            f"no whole file of the {len(files)} fits each of training, validation and test: give more and smaller "
            "ones (`split -n l/20 FILE` cuts one into 20), or raise held_out"
        )
    return train, *held


class TokenStore:
    """The text of some files, as tokens in a memory-mapped file that is made once.

    Args:
        files: in the order in which they are read.
        tokenizer: what makes tokens of them.
        home: the directory that keeps the tokens.

    Attributes:
        tokens: all of them, memory-mapped.
        num_bytes: of the files.
    """

    def __init__(self, files: Sequence[TextFile], tokenizer: Tokenizer, home: Path) -> None:
        self.num_bytes = sum(file.num_bytes for file in files)
        dtype = np.min_scalar_type(len(tokenizer.vocabulary) - 1)
        key = repr((tokenizer.fingerprint, dtype.name, [file.digest for file in files]))
        path = home / f"tokens-{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy"
        try:
            self.tokens: np.ndarray = np.load(path, mmap_mode="r")
        except (FileNotFoundError, ValueError, EOFError):  # not made yet, or damaged
            texts = (tokenizer.encode_plain(file.path.read_bytes().decode()) for file in files)
            with replaced(path) as opened:
                np.save(opened, np.concatenate([np.array(text, dtype) for text in texts]))
            self.tokens = np.load(path, mmap_mode="r")


class TextFiles(TokenData):
    """Windows of the text of files; by default of the sources of Python's standard library, which every machine has.

    Windows lie side by side. Each epoch draws `num_train` of those for training; validation and test have the same
    windows each time, from files that training never sees.

    Args:
        paths: files, directories (all files below them but hidden ones) and patterns such as `src/**/*.py`; the
            running Python's own standard library when None, without its tests and its tables of characters.
        tokenizer: "bytes" (each byte a token), or the directory or hub id of a tokenizer of transformers.
        vocab_size: tokens of the models; at least the tokenizer's.
        length: tokens of a window.
        prompt_length: how many tokens of a test window are its prompt.
        held_out: share of the bytes that is held out for validation, and the same again for test; whole files.
        cache_dir: where the tokens are kept once they are made, `~/.cache/lightning_specdec` when None. What lies there
            can be deleted at any time.
        options: those of `TokenData`, counted in windows; fewer where the text has no more.
    """

    tokenizer: str

    def __init__(
        self,
        paths: str | list[str] | None = None,
        *,
        tokenizer: str = "bytes",
        vocab_size: int = 256,
        length: int = 256,
        prompt_length: int = 64,
        held_out: float = 0.05,
        cache_dir: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(vocab_size, prompt_length=prompt_length, **options)
        self.paths = [paths] if isinstance(paths, str) else paths
        self.tokenizer = tokenizer
        self.length = require_int("length", length, 2)
        self.held_out = require_number("held_out", held_out, low=0.0, high=0.4, low_open=True)
        self.cache_dir = cache_dir

    @property
    def max_length(self) -> int:
        return self.length

    @cached_property
    def texts(self) -> dict[str, TokenStore]:
        """Each split's tokens, read or made on the first access."""
        tokenizer = named_tokenizer(self.tokenizer)
        num_tokens = len(tokenizer.vocabulary)
        if num_tokens > self.vocab_size:
            raise ValueError(
                f"the tokenizer {self.tokenizer} has {num_tokens} tokens, more than vocab_size {self.vocab_size}: "
                f"set vocab_size to {num_tokens} or more"
            )
        files = find_texts(self.paths)
        home = cache_home() if self.cache_dir is None else Path(self.cache_dir).expanduser()
        splits = zip(SPLITS, hold_out(files, self.held_out), strict=True)
        texts = {split: TokenStore(each, tokenizer, home) for split, each in splits}
        sizes = {split: len(text.tokens) for split, text in texts.items()}
        if min(sizes.values()) < self.length:
            raise ValueError(
                f"train, val and test need a window of {self.length} tokens each, and they have {sizes}: give more "
                "text, lower length, or raise held_out"
            )
        return texts

    def rows(self, split: str) -> NumberedRows:
        text, length = self.texts[split].tokens, self.length
        num_windows = len(text) // length
        if split == "train":
            starts = range(0, num_windows * length, length)
        else:
            num_windows = min(getattr(self, f"num_{split}"), num_windows)
            starts = range(0, num_windows * (len(text) // num_windows), len(text) // num_windows)
        return NumberedRows(starts, lambda start: text[start : start + length])

    def train_sampler(self) -> EpochSampler:
        return EpochSampler(len(self.rows("train")), self.seed, self.num_train)

    def bytes_per_token(self, *splits: str) -> float:
        texts = [self.texts[split] for split in splits]
        return sum(text.num_bytes for text in texts) / sum(len(text.tokens) for text in texts)
