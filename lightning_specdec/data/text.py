"""Windows of the text of files.

Whole texts are held out, and tokens are kept in memory-mapped files.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_specdec.config.checks import require_int, require_number
from lightning_specdec.config.files import cache_home, replaced
from lightning_specdec.data.base import SPLITS, EpochSampler, NumberedRows, PlainValues, TokenData
from lightning_specdec.text.datasets import dataset_source, read_dataset
from lightning_specdec.text.rows import (
    CONVERSATION_FIELDS,
    Chat,
    Row,
    decode_utf8,
    missing_field,
    read_conversation,
    read_json_rows,
)
from lightning_specdec.text.tokenizer import (
    TextTokenizer,
    Tokenizer,
    named_tokenizer,
    valid_text,
)

SKIPPED_DIRECTORIES = frozenset({"__pycache__"})
SKIPPED_LIBRARY_DIRECTORIES = SKIPPED_DIRECTORIES | {
    "dist-packages",
    "encodings",
    "idle_test",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
"""Directories of an installed Python with its tests, generated tables, or other packages."""

TEXT_FIELDS = ("text", "content")
"""Fields of a JSON row that data sets for pretraining keep their text in."""


class NamedFile(NamedTuple):
    """A file, and its name below the directory or pattern that it was found by."""

    name: str
    path: Path


NUM_PARTS = 40
"""Parts of a single file, so that some can be held out."""


class TrainingText(NamedTuple):
    """One text to train on: a file, a part of a single file, or a row of a JSON file.

    Args:
        key: pseudo-random, from the text's name; decides its split.
        path: the file.
        num_bytes: size of the text.
        digest: SHA-256 of the text.
        content: text of a part, or text or conversation of a row; None for a whole file.
    """

    key: str
    path: Path
    num_bytes: int
    digest: str
    content: str | Chat | None = None

    def encode(
        self,
        tokenizer: Tokenizer,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The text's tokens. A conversation is written by the tokenizer's chat template.

        Args:
            chat_template_kwargs: variables of the chat template.

        Raises:
            ValueError: the tokenizer has no chat template, or it does not accept the conversation.
        """
        content = self.content
        if content is None:
            content = decode_utf8(self.path.read_bytes(), self.path)
        if isinstance(content, str):
            return tokenizer.encode_plain(content)

        if not isinstance(tokenizer, TextTokenizer) or not tokenizer.has_chat_template:
            raise ValueError(
                f"{self.path} has conversations, which need a chat template: train for a target "
                'that was tuned for chats, or give rows with a "text"'
            )
        variables = {"add_generation_prompt": False, **(chat_template_kwargs or {})}
        if content.tools:
            variables["tools"] = content.tools
        rendered = tokenizer.render_chat(content.messages, chat_template_kwargs=variables)
        return tokenizer.encode_rendered(rendered)


def find_files(paths: Sequence[str] | None) -> list[NamedFile]:
    """The files of a source, each once.

    Args:
        paths: files, directories (all files below them except hidden ones) and patterns such as
            `src/**/*.py`; the running Python's standard library without its tests if None.

    Raises:
        FileNotFoundError: a path does not exist, or a pattern matches no file.
    """
    if paths is None:
        patterns: Sequence[str] = [f"{sysconfig.get_path('stdlib')}/**/*.py"]
        skipped = SKIPPED_LIBRARY_DIRECTORIES
    else:
        patterns = paths
        skipped = SKIPPED_DIRECTORIES

    # A file may be listed twice, by its path and by its directory.
    files: dict[Path, NamedFile] = {}
    for pattern in patterns:
        for file in _match_files(pattern, skipped):
            files[file.path.resolve()] = file
    return sorted(files.values())


def find_texts(paths: Sequence[str] | None) -> list[TrainingText]:
    """The distinct texts of a source: files, and the rows of JSON files and datasets.

    Args:
        paths: as for `find_files`; or datasets, see `dataset_source`.

    Raises:
        FileNotFoundError: a path does not exist, or a pattern matches no file.
        ValueError: a file is not in UTF-8, or a row of a JSON file has no text.
    """
    distinct_texts: dict[str, TrainingText] = {}
    file_paths = []
    for path in paths or []:
        dataset = dataset_source(path)
        if dataset is None:
            file_paths.append(path)
            continue
        location = NamedFile(Path(dataset.name).name, Path(dataset.name))
        for row in read_dataset(dataset):
            _add(_text_of_row(row, location), distinct_texts)

    if paths is None or file_paths:
        named_paths = {Path(path).expanduser().resolve() for path in file_paths}
        for file in find_files(file_paths or None):
            is_named = file.path.resolve() in named_paths
            for training_text in _texts_of_file(file, is_named=is_named):
                _add(training_text, distinct_texts)
    texts = list(distinct_texts.values())
    if len(texts) == 1 and texts[0].content is None:
        return _parts_of_file(texts[0])
    return texts


def _parts_of_file(text: TrainingText) -> list[TrainingText]:
    """The text of a single file in up to `NUM_PARTS` parts, so that some can be held out.

    Parts end where lines end.
    """
    lines = decode_utf8(text.path.read_bytes(), text.path).splitlines(keepends=True)
    part_bytes = text.num_bytes / NUM_PARTS
    parts: list[str] = []
    num_bytes = 0
    for line in lines:
        # The part that the line begins in.
        part_index = int(num_bytes / part_bytes)
        if part_index >= len(parts):
            parts.append("")
        parts[-1] += line
        num_bytes += len(line.encode())

    file = NamedFile(text.path.name, text.path)
    distinct_parts: dict[str, TrainingText] = {}
    for number, part in enumerate(parts, start=1):
        _add(_text_of_row(Row(part, number, f"{text.path}, part {number}"), file), distinct_parts)
    return list(distinct_parts.values())


def _texts_of_file(file: NamedFile, *, is_named: bool) -> list[TrainingText]:
    """The texts of one file.

    Args:
        is_named: whether the user named this file, and not a directory that contains it.
    """
    text = decode_utf8(file.path.read_bytes(), file.path)
    rows = read_json_rows(text, file.path)
    if rows is None:
        return [_whole_file(file, text)]
    # A .json file in a directory of sources may hold any data: it is text as it stands.
    is_json = file.path.suffix.lower() == ".json"
    if is_json and not is_named and not any(_has_text(row) for row in rows):
        return [_whole_file(file, text)]
    return [_text_of_row(row, file) for row in rows]


def _add(text: TrainingText, distinct_texts: dict[str, TrainingText]) -> None:
    """Add a text that is not empty and not there already."""
    if text.num_bytes > 0:
        distinct_texts.setdefault(text.digest, text)


def _match_files(pattern: str, skipped: frozenset[str]) -> list[NamedFile]:
    """The files of one path or pattern, without hidden ones and those in skipped directories."""
    parts = Path(pattern).expanduser().parts
    num_plain = 0
    while num_plain < len(parts) and not glob.has_magic(parts[num_plain]):
        num_plain += 1
    root = Path(*parts[:num_plain])
    if root.is_file():
        return [NamedFile(root.name, root)]

    files = []
    for path in root.glob("/".join(parts[num_plain:]) or "**/*"):
        name = path.relative_to(root)
        if path.is_file() and not any(_is_skipped(part, skipped) for part in name.parts):
            files.append(NamedFile(name.as_posix(), path))
    if not files:
        raise FileNotFoundError(f"{pattern} does not exist or has no files: check this path")
    return files


def _is_skipped(part: str, skipped: frozenset[str]) -> bool:
    """Whether a part of a path is hidden, or leads to files that are no text to learn from."""
    # _sysconfigdata has the settings of Python's build, which differ between machines.
    return part in skipped or part.startswith((".", "_sysconfigdata"))


def _whole_file(file: NamedFile, text: str) -> TrainingText:
    encoded = text.encode()
    key = hashlib.sha256(os.fsencode(file.name)).hexdigest()
    digest = hashlib.sha256(encoded).hexdigest()
    return TrainingText(key, file.path, len(encoded), digest)


def _text_of_row(row: Row, file: NamedFile) -> TrainingText:
    """The text or the conversation of a JSON row."""
    content = _content_of_row(row)
    if isinstance(content, str):
        num_bytes = len(content.encode())
        digest = hashlib.sha256(content.encode()).hexdigest()
    else:
        # What the chat template adds is not counted.
        num_bytes = sum(len((message["content"] or "").encode()) for message in content.messages)
        values: Any = content if content.tools else content.messages
        digest = hashlib.sha256(repr(values).encode()).hexdigest()
    key = hashlib.sha256(os.fsencode(f"{file.name}#{row.number}")).hexdigest()
    return TrainingText(key, file.path, num_bytes, digest, content)


def _has_text(row: Row) -> bool:
    """Whether a row has a field that could be trained on."""
    fields = (*TEXT_FIELDS, *CONVERSATION_FIELDS)
    return isinstance(row.value, dict) and any(field in row.value for field in fields)


def _content_of_row(row: Row) -> str | Chat:
    if isinstance(row.value, str):
        return valid_text(row.value)
    if not isinstance(row.value, dict):
        raise ValueError(f"{row.where}: this is not a JSON object: write one on each line")

    texts = [row.value[field] for field in TEXT_FIELDS if isinstance(row.value.get(field), str)]
    for text in texts:
        if text:
            return valid_text(text)
    chat = read_conversation(row.value, row.where)
    if chat is not None:
        return chat
    if texts:
        return ""
    known_fields = "text, content, messages or conversations to be trained on"
    raise missing_field(row.value, known_fields, row.where)


def hold_out(
    texts: Sequence[TrainingText], share: float
) -> tuple[list[TrainingText], list[TrainingText], list[TrainingText]]:
    """Texts for training, validation and test. A text is in one split only.

    Args:
        texts: all texts.
        share: upper limit of the share of bytes for validation, and of that for test.

    Raises:
        ValueError: a split has no text.
    """
    max_bytes = share * sum(text.num_bytes for text in texts)
    train: list[TrainingText] = []
    held_out: tuple[list[TrainingText], list[TrainingText]] = ([], [])
    held_out_bytes = [0, 0]
    for text in sorted(texts, key=lambda text: (text.key, text.digest)):
        smaller = held_out_bytes.index(min(held_out_bytes))
        if held_out_bytes[smaller] + text.num_bytes <= max_bytes:
            held_out[smaller].append(text)
            held_out_bytes[smaller] += text.num_bytes
        else:
            train.append(text)

    val, test = held_out
    if not train or not val or not test:
        raise ValueError(
            f"no whole file of the {len(texts)} fits each of training, validation and test: give "
            "more and smaller ones (`split -n l/20 FILE` cuts one into 20), or raise held_out"
        )
    return train, val, test


class TokenStore:
    """The tokens of some texts, in a memory-mapped file that is written once.

    Args:
        texts: in the order in which they are read.
        tokenizer: what encodes them.
        home: the directory that keeps the tokens.
        chat_template_kwargs: variables of the chat template that writes conversations.

    Attributes:
        tokens: all tokens, memory-mapped.
        num_bytes: size of the texts.
    """

    def __init__(
        self,
        texts: Sequence[TrainingText],
        tokenizer: Tokenizer,
        home: Path,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.num_bytes = sum(text.num_bytes for text in texts)
        dtype = np.min_scalar_type(len(tokenizer.vocabulary) - 1)
        variables = dict(chat_template_kwargs or {})
        path = home / f"tokens-{self._key(texts, tokenizer, dtype, variables)}.npy"
        try:
            self.tokens: np.ndarray = np.load(path, mmap_mode="r")
        except (FileNotFoundError, ValueError, EOFError):
            # The file has not been written yet, or is damaged.
            arrays = [np.array(text.encode(tokenizer, variables), dtype) for text in texts]
            with replaced(path) as file:
                np.save(file, np.concatenate(arrays))
            self.tokens = np.load(path, mmap_mode="r")

    @staticmethod
    def _key(
        texts: Sequence[TrainingText],
        tokenizer: Tokenizer,
        dtype: np.dtype,
        variables: Mapping[str, Any],
    ) -> str:
        """A hash of all that the tokens depend on."""
        digests = [text.digest for text in texts]
        values: tuple[Any, ...] = (tokenizer.fingerprint, dtype.name, digests)
        if any(isinstance(text.content, Chat) for text in texts):
            values = (*values, tokenizer.chat_fingerprint)
            if variables:
                values = (*values, variables)
        return hashlib.sha256(repr(values).encode()).hexdigest()[:24]


class TextFiles(TokenData):
    """Windows of the text of files, by default of Python's own standard library.

    Windows lie side by side. Each epoch draws `num_train` of the training windows. Validation and
    test have the same windows each time, from texts that training never sees.

    Rows of .jsonl files, and of .json files that are lists of objects, are separate texts: "text"
    or "content", or "messages" or "conversations", which the tokenizer's chat template writes
    together with the row's "system" and "tools". So are the rows of datasets: a directory that
    `save_to_disk` of Hugging Face's `datasets` wrote, a .parquet file, or `HUB_NAME#COLUMN`.

    Args:
        paths: files, directories (all files below them except hidden ones) and patterns such as
            `src/**/*.py`; the running Python's standard library if None, without its tests and its
            tables of characters.
        tokenizer: "bytes" (each byte is a token), or the directory or Hub id of a transformers
            tokenizer.
        vocab_size: number of tokens of the models, at least the tokenizer's.
        length: tokens of a window.
        prompt_length: number of tokens of a test window that are its prompt.
        held_out: share of the bytes to hold out for validation, and again for test, in whole texts.
        cache_dir: the directory that keeps the tokens; `~/.cache/lightning_specdec` if None. Its
            files can be deleted at any time.
        chat_template_kwargs: variables of the chat template that writes conversations, such as
            `{"enable_thinking": False}`.
        options: arguments of `TokenData`, with numbers of windows. Splits have fewer if the text
            has no more.
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
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(vocab_size, prompt_length=prompt_length, **options)
        self.paths = [paths] if isinstance(paths, str) else paths
        self.tokenizer = tokenizer
        self.length = require_int("length", length, 2)
        self.held_out = require_number("held_out", held_out, low=0.0, high=0.4, low_open=True)
        self.cache_dir = cache_dir
        self.template_variables: Mapping[str, Any] = chat_template_kwargs or {}

    def arguments(self) -> PlainValues:
        values = super().arguments()
        if self.template_variables:
            values["chat_template_kwargs"] = dict(self.template_variables)
        return values

    @property
    def max_length(self) -> int:
        return self.length

    @cached_property
    def texts(self) -> dict[str, TokenStore]:
        """The tokens of each split, read or written at the first access."""
        tokenizer = named_tokenizer(self.tokenizer)
        num_tokens = len(tokenizer.vocabulary)
        if num_tokens > self.vocab_size:
            raise ValueError(
                f"the tokenizer {self.tokenizer} has {num_tokens} tokens, more than vocab_size "
                f"{self.vocab_size}: set vocab_size to {num_tokens} or more"
            )
        home = cache_home()
        if self.cache_dir is not None:
            home = Path(self.cache_dir).expanduser()

        stores = {}
        split_texts = hold_out(find_texts(self.paths), self.held_out)
        for split, texts in zip(SPLITS, split_texts, strict=True):
            stores[split] = TokenStore(texts, tokenizer, home, self.template_variables)

        sizes = {split: len(store.tokens) for split, store in stores.items()}
        if min(sizes.values()) < self.length:
            raise ValueError(
                f"train, val and test need a window of {self.length} tokens each, and they have "
                f"{sizes}: give more text, lower length, or raise held_out"
            )
        return stores

    def rows(self, split: str) -> NumberedRows:
        tokens = self.texts[split].tokens
        num_windows = len(tokens) // self.length
        distance = self.length
        if split != "train":
            # Fewer windows are spread over the whole text.
            max_windows = self.num_val if split == "val" else self.num_test
            num_windows = min(max_windows, num_windows)
            distance = len(tokens) // num_windows
        starts = range(0, num_windows * distance, distance)
        return NumberedRows(starts, lambda start: tokens[start : start + self.length])

    def train_sampler(self) -> EpochSampler:
        return EpochSampler(len(self.rows("train")), self.seed, self.num_train)

    def bytes_per_token(self, *splits: str) -> float:
        num_bytes = sum(self.texts[split].num_bytes for split in splits)
        num_tokens = sum(len(self.texts[split].tokens) for split in splits)
        return num_bytes / num_tokens
