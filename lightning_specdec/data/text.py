"""Windows of the text of files: whole files are held out, and tokens are kept in memory-mapped files.

Shapes: V vocabulary.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_specdec.config.checks import require_int, require_number
from lightning_specdec.config.files import cache_home, replaced
from lightning_specdec.data.base import SPLITS, Batch, EpochSampler, Row, Rows, TokenData, tell
from lightning_specdec.text.tokenizer import Tokenizer, named_tokenizer

NO_SOURCES = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
)
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


def find_texts(paths: Sequence[str] | None, *, max_bytes: int | None = None) -> list[TextFile]:
    """The distinct text files of a source, by path.

    Args:
        paths: files, directories (all files below them but hidden ones) and patterns such as `src/**/*.py`; the
            running Python's own standard library without its tests when None.
        max_bytes: files are taken, in the order of their keys, while they fit in so many bytes.

    Raises:
        FileNotFoundError: a path does not exist, or a pattern matches no file.
        ValueError: a file is not UTF-8, or nothing is left.
    """
    # A file may be named twice, by itself and by its directory.
    named = {path.resolve(): (name, path) for name, path in _listed(paths)}.values()
    keys = sorted((hashlib.sha256(os.fsencode(name)).hexdigest(), name, path) for name, path in named)
    files, num_bytes = list[tuple[str, TextFile]](), 0
    for key, name, path in keys:
        size = path.stat().st_size
        if size and (max_bytes is None or num_bytes + size <= max_bytes):
            num_bytes += size
            try:
                content = path.read_bytes()
                content.decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not text (byte {error.start} is not UTF-8): save it as UTF-8, or leave it out "
                    "(data.paths takes patterns such as 'corpus/**/*.txt')"
                ) from None
            files.append((name, TextFile(key, path, size, hashlib.sha256(content).hexdigest())))
    distinct: dict[str, TextFile] = {}
    for _, file in sorted(files):
        distinct.setdefault(file.digest, file)
    if not distinct:
        source = "the standard library" if paths is None else ", ".join(paths)
        raise ValueError(f"{source}: all files are empty or larger than max_bytes ({max_bytes}): give others")
    return list(distinct.values())


def _listed(paths: Sequence[str] | None) -> Iterator[tuple[str, Path]]:
    """Names and paths of all files that `paths` mean, without hidden ones in directories."""
    for given in paths or [sysconfig.get_path("stdlib")]:
        path = Path(given).expanduser()
        root, found = path.parent, [path] if path.is_file() else []
        skipped = frozenset({"__pycache__"}) if paths else NO_SOURCES
        if path.is_dir():
            root = path
            for folder, folders, names in os.walk(path):
                folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
                found += [Path(folder, name) for name in names if not name.startswith(".")]
            if not paths:  # the build's own settings differ between machines
                found = [each for each in found if each.suffix == ".py" and not each.name.startswith("_sysconfigdata")]
        elif not found and glob.has_magic(given):
            root = Path(*path.parts[: next(i for i, part in enumerate(path.parts) if glob.has_magic(part))])
            found = list(map(Path, glob.glob(str(path), recursive=True)))
        if not (files := [each for each in found if each.is_file()]):
            raise FileNotFoundError(f"{given} does not exist or has no files: check the path that data.paths gives")
        yield from ((each.relative_to(root).as_posix(), each) for each in files)


def hold_out(files: Sequence[TextFile], share: float) -> tuple[list[TextFile], list[TextFile], list[TextFile]]:
    """Files for training, validation and test; a file is in one split only.

    Args:
        share: of the bytes, for validation and for test each; one file at least.

    Raises:
        ValueError: there are fewer than three files.
    """
    if len(files) < 3:
        raise ValueError(
            f"{files[0].path} is one of only {len(files)} distinct files, and training, validation and test each need "
            "one: give three or more (`split -n l/20 corpus.txt part-` cuts one into 20), or raise max_bytes"
        )
    room = share * sum(file.num_bytes for file in files)
    train: list[TextFile] = []
    held: tuple[list[TextFile], list[TextFile]] = [], []
    sizes = [0, 0]
    for file in sorted(files, key=lambda file: (file.key, file.digest)):
        smaller = sizes.index(min(sizes))
        fits = sizes[smaller] + file.num_bytes <= room
        (held[smaller] if fits else train).append(file)
        sizes[smaller] += file.num_bytes * fits
    for split in held:
        if not split:
            split.append(train.pop(min(range(len(train)), key=lambda i: train[i].num_bytes)))
    return train, *held


class TokenStore:
    """The text of some files, as tokens in a memory-mapped file that is made once.

    Args:
        files: in the order in which they are read.
        tokenizer: what makes tokens of them.
        home: the directory that keeps the tokens.

    Attributes:
        num_bytes: of the files.
        continues: `[V]`, whether a token begins within a character.
        ends_line: `[V]`, whether a token holds a line's end.
    """

    def __init__(self, files: Sequence[TextFile], tokenizer: Tokenizer, home: Path) -> None:
        spelt = [piece or b"" for piece in tokenizer.vocabulary.token_bytes]
        self.continues = np.array([0x80 <= piece[0] < 0xC0 if piece else False for piece in spelt])
        self.ends_line = np.array([b"\n" in piece for piece in spelt])
        self.num_bytes = sum(file.num_bytes for file in files)
        self.files, self.tokenizer, self.dtype = files, tokenizer, np.min_scalar_type(len(spelt) - 1)
        key = repr((tokenizer.fingerprint, self.dtype.name, [file.digest for file in files]))
        self.path = home / f"tokens-{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy"

    @cached_property
    def tokens(self) -> np.ndarray:
        """All tokens; a file that is missing or damaged is made.

        Raises:
            ValueError: no file can be put there, or a text changed while it was read.
        """
        try:
            if (found := self._opened()) is None:
                with replaced(self.path) as file:
                    np.save(file, np.concatenate([self._encoded(each) for each in self.files]))
                found = self._opened()
        except OSError as error:
            reason = f"{self.path} cannot be used ({error.strerror or error})"
            raise ValueError(f"{reason}: give another data.cache_dir") from error
        assert found is not None, "a file that was just written is whole"
        return found

    def _opened(self) -> np.ndarray | None:
        try:
            tokens = np.lib.format.open_memmap(self.path, mode="r")
        except FileNotFoundError:
            return None
        except (ValueError, tokenize.TokenError):  # truncated, or not NumPy's format
            return None
        whole = tokens.ndim == 1 and tokens.dtype == self.dtype
        return tokens if whole and tokens.offset + tokens.nbytes == self.path.stat().st_size else None

    def _encoded(self, file: TextFile) -> np.ndarray:
        content = file.path.read_bytes()
        if hashlib.sha256(content).hexdigest() != file.digest:
            raise ValueError(f"{file.path} changed while it was read: start again when nothing writes to it")
        return np.array(self.tokenizer.encode_plain(content.decode()), self.dtype)

    def starts(self, num_windows: int, length: int) -> list[int]:
        """The first tokens of windows spread over the text, each at the beginning of a line where there is one."""
        found = []
        for number in range(num_windows):
            low, high = (n * len(self.tokens) // num_windows for n in (number, number + 1))
            ends = self.ends_line[self.tokens[max(0, low - 1) : min(low + length, high - length)]]
            found.append(low + int(ends.argmax()) if low and ends.any() else low)
        return found


class WindowSampler(EpochSampler):
    """The first tokens of each epoch's windows: a grid over the text with a random offset, in random order.

    No token is read twice in an epoch, and the windows of two epochs differ.

    Args:
        num_tokens: of the text.
        length: tokens of a window.
        num_windows: of an epoch, at most `grid_size`; that many when None.
        seed: of the offsets and orders.
    """

    def __init__(self, num_tokens: int, length: int, num_windows: int | None, seed: int) -> None:
        self.num_tokens, self.length, self.size = num_tokens, length, grid_size(num_tokens, length)
        super().__init__(min(num_windows or self.size, self.size), seed)

    def __iter__(self) -> Iterator[int]:
        generator = self.generator()
        room = min(self.length, self.num_tokens - self.size * self.length + 1)
        offset = int(torch.randint(room, (), generator=generator))
        places = torch.randperm(self.size, generator=generator)[: self.num_sequences]
        yield from (offset + places * self.length).tolist()


def grid_size(num_tokens: int, length: int) -> int:
    """Windows side by side that a text has room for wherever the first one begins, within its own length."""
    windows = num_tokens // length
    return windows if windows < 2 else windows - 1


class _Windows:
    """Windows of a text, each a view of the memory map."""

    def __init__(self, tokens: np.ndarray, length: int, starts: Sequence[int]) -> None:
        self.tokens, self.length, self.starts = tokens, length, starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> Row:
        start = self.starts[number]
        return number, self.tokens[start : start + self.length]


class TextFiles(TokenData):
    """Windows of the text of files; by default of the sources of Python's standard library, which every machine has.

    Training windows begin anywhere; validation and test read the same windows each time, from files that training
    never sees, each from the beginning of a line.

    Args:
        paths: files, directories (all files below them but hidden ones) and patterns such as `src/**/*.py`; the
            running Python's own standard library when None, without its tests and its tables of characters.
        tokenizer: "bytes" (each byte a token), or the directory or hub id of a tokenizer of transformers.
        vocab_size: tokens of the models; at least the tokenizer's.
        length: tokens of a window.
        prompt_length: how many tokens of a test window are its prompt; fewer where that would cut a character.
        held_out: share of the bytes that is held out for validation, and the same again for test; whole files.
        max_bytes: the most text that is read; larger sources are cut down to a choice of their files.
        cache_dir: where the tokens are kept once they are made, `~/.cache/lightning_specdec` when None. What lies there
            can be deleted at any time.
        options: those of `TokenData`, counted in windows; fewer where the text has no more.
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
        prompt_length: int = 64,
        held_out: float = 0.05,
        max_bytes: int | None = 16_000_000,
        cache_dir: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(vocab_size, prompt_length=prompt_length, **options)
        self.paths = [paths] if isinstance(paths, str) else paths
        if self.paths is not None and not self.paths:
            raise ValueError("paths is an empty list: name a file, a directory or a pattern, or leave it out")
        self.tokenizer = tokenizer
        self.length = require_int("length", length, 2)
        self.held_out = require_number("held_out", held_out, low=0.0, high=0.4, low_open=True)
        self.max_bytes = None if max_bytes is None else require_int("max_bytes", max_bytes, 1)
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
        files = find_texts(self.paths, max_bytes=self.max_bytes)
        tell(f"text: {len(files)} files, {sum(file.num_bytes for file in files):,} bytes")
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

    def rows(self, split: str) -> Rows:
        text = self.texts[split]
        num_tokens = len(text.tokens)
        if split == "train":  # numbered by their first tokens, since each epoch has windows of its own
            return _Windows(text.tokens, self.length, range(num_tokens - self.length + 1))
        num_windows = min(getattr(self, f"num_{split}"), num_tokens // self.length)
        return _Windows(text.tokens, self.length, text.starts(num_windows, self.length))

    def train_sampler(self) -> EpochSampler:
        return WindowSampler(len(self.texts["train"].tokens), self.length, self.num_train, self.seed)

    def collate(self, rows: Sequence[Row]) -> Batch:
        """One batch of numbered windows."""
        tokens = torch.from_numpy(np.stack([window for _, window in rows]).astype(np.int64))
        indices = torch.tensor([index for index, _ in rows])
        prompt_lengths = torch.tensor([self._prompt_length(window) for _, window in rows])
        return Batch(tokens, torch.full_like(indices, self.length), prompt_lengths, indices)

    def _prompt_length(self, window: np.ndarray) -> int:
        """As many tokens as a prompt has, fewer where that would cut a character."""
        length = min(self.prompt_length, self.length - 1)
        continues = self.texts["test"].continues
        while length > 1 and continues[window[length]]:
            length -= 1
        return length

    def bytes_per_token(self, *splits: str) -> float:
        texts = [self.texts[split] for split in splits]
        return sum(text.num_bytes for text in texts) / sum(len(text.tokens) for text in texts)
