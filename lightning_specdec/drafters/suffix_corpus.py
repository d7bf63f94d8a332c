"""Suffix corpus: propose what most often followed the text's last tokens, here and in other texts.

After Oliaro et al. 2024, "SuffixDecoding". The texts are the row's own, those of earlier requests,
and a corpus on disk. Two indexes find where a suffix of the text occurred before:

- A text that grows needs an index that takes single tokens. It is a dictionary from n-grams of a
  few lengths to their last occurrences: a token costs a few dictionary entries, a suffix a few
  lookups, and the oldest text can be removed. A suffix tree does the same with many nodes for each
  token, which are slow and large in Python.
- A corpus does not change, and may have millions of tokens. Its positions are sorted by the tokens
  before them, like a suffix array of the reversed text: 8 bytes for each token, and all suffixes
  of the text are found in one binary search that narrows token by token.

Both report occurrences. These vote for the next token, with more weight the longer they match.
"""

from __future__ import annotations

import math
import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_specdec.config.activity import Activity
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.drafters.base import DraftRequest, DraftState, TargetContext
from lightning_specdec.drafters.ngram import LookupDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.text.shards import MANIFEST, Shard, read_manifest
from lightning_specdec.text.tokenizer import Tokenizer

INDEXED_LENGTHS = (8, 4, 2, 1)
"""Lengths of the indexed n-grams of texts that grow, longest first."""

SORTED_LENGTH = 8
"""Tokens before a position that the positions of a corpus are sorted by; a power of two."""

MOST_OCCURRENCES = 16
"""Occurrences in each kind of text that vote, the longest matches first, then the latest."""

LONGEST_MATCH = 16
"""Tokens up to which the length of a match counts."""

NUM_NEARBY = 48
"""Tokens before an occurrence that are compared with the last ones of the text."""

MATCH_VOTES = (0.06, *(0.3 * length**1.7 for length in range(1, LONGEST_MATCH + 1)))
"""Votes of an occurrence by the number of tokens that match: longer matches are right more often.
"""

UNSEEN_WEIGHT = 1.0
"""Votes for tokens that followed none of the occurrences."""

PIECE_LENGTH = 4096
"""Tokens that are forgotten at once, at most."""

BYTES_PER_TOKEN = 16
"""More bytes of a file than this for each token that is still wanted are not read."""


@dataclass(frozen=True)
class SuffixCorpusSettings(Settings):
    corpus: str | None = setting(
        None,
        "directory or file of texts to copy from too, such as earlier answers or code",
        metavar="DIR",
    )
    max_corpus_tokens: int = setting(
        8_000_000,
        "tokens of the corpus to read; of more, the files that changed last",
        minimum=1,
        maximum=2**30,
    )
    memory_tokens: int = setting(
        100_000,
        "tokens of earlier requests to remember; the oldest texts go first, 0 remembers none",
        minimum=0,
        maximum=2**27,
    )
    min_acceptance: float = setting(
        0.1,
        "end the draft where the estimated probability that it is accepted falls below this",
        minimum=0,
        maximum=1,
    )


@dataclass(slots=True)
class Occurrence:
    """A position whose last tokens are also the last ones of the text.

    Args:
        source: the text with the occurrence.
        position: of the token that follows the match.
        num_matched: tokens that match, up to `LONGEST_MATCH`.
        boost: factor of its votes.
    """

    source: Sequence[int]
    position: int
    num_matched: int
    boost: float


class Suffix:
    """The end of a text, with which occurrences are compared."""

    def __init__(self, text: Sequence[int]) -> None:
        self.last_tokens = list(text[-LONGEST_MATCH:])
        self.nearby = set(text[-NUM_NEARBY:])

    def occurrence(self, source: Sequence[int], position: int) -> Occurrence:
        """Compare the suffix with the tokens before a position of another text or of its own."""
        num_matched = 0
        first_position = max(0, position - LONGEST_MATCH)
        source_tokens = source[first_position:position]
        pairs = zip(reversed(source_tokens), reversed(self.last_tokens), strict=False)
        for source_token, token in pairs:
            if source_token != token:
                break
            num_matched += 1

        # A short match says little. It is more likely to be the right one if the text before it
        # is similar: a copy with a change continues after the change in the place it came from.
        nearby_tokens = source[max(0, position - NUM_NEARBY) : position]
        num_shared = len(self.nearby.intersection(nearby_tokens))
        nearness = num_shared / len(self.nearby)
        boost = 0.1 + 4 * nearness**2
        return Occurrence(source, position, num_matched, boost)


class NGramTable:
    """The last occurrences of the n-grams of texts that grow.

    A position is one integer: the number of its text in the upper bits, and the index of the token
    that follows the n-gram in the lower ones.
    """

    def __init__(self) -> None:
        # An n-gram that occurred once has an integer, not a list: most of the longer ones do.
        self.tables: dict[int, dict[int, int | list[int]]] = {
            length: {} for length in INDEXED_LENGTHS
        }

    def add(self, number: int, text: Sequence[int], start: int, end: int) -> None:
        """Index the n-grams before each of the tokens `start` to `end - 1` of a text."""
        for index in range(start, end):
            position = (number << 32) | index
            for length, table in self.tables.items():
                if length > index:
                    continue
                # Different n-grams may have one key: matches are compared token by token.
                key = hash(tuple(text[index - length : index]))
                entry = table.get(key)
                if entry is None:
                    table[key] = position
                elif isinstance(entry, int):
                    table[key] = [entry, position]
                else:
                    entry.append(position)
                    if len(entry) >= 2 * MOST_OCCURRENCES:
                        del entry[:MOST_OCCURRENCES]

    def remove(self, number: int, text: Sequence[int]) -> None:
        """Remove all positions of a text."""
        for length, table in self.tables.items():
            for index in range(length, len(text)):
                key = hash(tuple(text[index - length : index]))
                entry = table.get(key)
                if entry is None:
                    continue
                positions = [entry] if isinstance(entry, int) else entry
                remaining = [position for position in positions if position >> 32 != number]
                if remaining:
                    table[key] = remaining
                else:
                    del table[key]

    def find(self, last_tokens: Sequence[int], skipped: Collection[int] = ()) -> list[int]:
        """Positions after the longest n-grams that the text ends with, the latest ones first.

        Args:
            last_tokens: the end of the text.
            skipped: numbers of texts whose positions are left out.
        """
        matches: dict[int, None] = {}
        for length, table in self.tables.items():
            if length > len(last_tokens):
                continue
            entry = table.get(hash(tuple(last_tokens[-length:])))
            if entry is None:
                continue
            positions = [entry] if isinstance(entry, int) else entry
            for position in reversed(positions):
                if position >> 32 in skipped:
                    continue
                matches[position] = None
                if len(matches) == MOST_OCCURRENCES:
                    return list(matches)
        return list(matches)


class Memory:
    """Texts of earlier requests. All sessions of a drafter share it, also between threads.

    Texts are kept in pieces, of which the oldest are removed. A copy of a memory is empty.

    Args:
        max_tokens: most tokens of all texts.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.piece_length = min(PIECE_LENGTH, max(1, max_tokens // 4))
        self.num_tokens = 0
        self.pieces: dict[int, array[int]] = {}
        self.table = NGramTable()
        self.next_number = 0
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Memory], tuple[int]]:
        return Memory, (self.max_tokens,)

    def append(self, tokens: Sequence[int], numbers: list[int]) -> None:
        """Add tokens to a text.

        Args:
            numbers: the numbers of the text's pieces, which this method extends.
        """
        with self.lock:
            start = 0
            while start < len(tokens):
                piece = self.pieces.get(numbers[-1]) if numbers else None
                if piece is None or len(piece) >= self.piece_length:
                    piece = array("q")
                    numbers.append(self.next_number)
                    self.pieces[self.next_number] = piece
                    self.next_number += 1

                first_new = len(piece)
                num_added = min(len(tokens) - start, self.piece_length - first_new)
                piece.extend(tokens[start : start + num_added])
                self.table.add(numbers[-1], piece, first_new, len(piece))
                self.num_tokens += num_added
                start += num_added
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        while self.num_tokens > self.max_tokens:
            number = next(iter(self.pieces))
            piece = self.pieces.pop(number)
            self.table.remove(number, piece)
            self.num_tokens -= len(piece)

    def occurrences(self, suffix: Suffix, skipped: Collection[int]) -> list[Occurrence]:
        """Occurrences of a text's suffix, without those in the pieces of these numbers."""
        with self.lock:
            occurrences = []
            for position in self.table.find(suffix.last_tokens, skipped):
                piece = self.pieces[position >> 32]
                occurrences.append(suffix.occurrence(piece, position & 0xFFFFFFFF))
            return occurrences


class SortedCorpus:
    """Texts that do not change, with their positions sorted by the tokens before them.

    Args:
        texts: tokens of each text.
    """

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        parts = []
        for text in texts:
            # No token has the number -1, so no match goes from one text into another.
            parts.append(np.array([*text, -1], dtype=np.int64))
        tokens = np.concatenate([np.array([-1]), *parts])
        self.num_tokens = len(tokens) - len(parts) - 1

        # Prefix doubling: the ranks of two halves give those of the whole.
        ranks = tokens + 1
        length = 1
        while length < SORTED_LENGTH:
            earlier = np.zeros_like(ranks)
            earlier[length:] = ranks[:-length]
            pairs = ranks * (earlier.max() + 1) + earlier
            _, ranks = np.unique(pairs, return_inverse=True)
            length *= 2
        order = np.argsort(ranks, kind="stable")

        # Single elements of a memoryview are read several times faster than those of an array.
        last_tokens = tokens[order]
        starts = np.searchsorted(last_tokens, np.arange(tokens.max() + 2))
        self.starts = memoryview(starts.astype(np.int64).data)
        self.tokens = memoryview(tokens.astype(np.int32).data)
        self.order = memoryview(order.astype(np.int32).data)

    def _intervals(self, last_tokens: Sequence[int]) -> list[tuple[int, int]]:
        """The intervals of `order` after one matching token, after two, and so on."""
        last_token = last_tokens[-1]
        if last_token + 1 >= len(self.starts):
            return []
        low = self.starts[last_token]
        high = self.starts[last_token + 1]

        intervals = []
        num_matched = 1
        longest = min(SORTED_LENGTH, len(last_tokens))
        while low < high:
            intervals.append((low, high))
            if num_matched == longest or high - low == 1:
                break
            token = last_tokens[-1 - num_matched]
            token_before = self._token_before(num_matched)
            low = bisect_left(self.order, token, low, high, key=token_before)
            high = bisect_right(self.order, token, low, high, key=token_before)
            num_matched += 1
        return intervals

    def _token_before(self, distance: int) -> Callable[[int], int]:
        tokens = self.tokens

        def token_before(index: int) -> int:
            # No token equals the separator, here that before the first text.
            return tokens[index - distance] if index > distance else -1

        return token_before

    def occurrences(self, suffix: Suffix) -> list[Occurrence]:
        """Occurrences of a text's suffix, from the longest matches on."""
        matches: dict[int, None] = {}
        for low, high in reversed(self._intervals(suffix.last_tokens)):
            # Of more occurrences than may vote, those at equal distances.
            num_missing = MOST_OCCURRENCES - len(matches)
            step = math.ceil((high - low) / num_missing)
            for index in self.order[low + step // 2 : high : step]:
                matches[index + 1] = None
            if len(matches) == MOST_OCCURRENCES:
                break
        return [suffix.occurrence(self.tokens, position) for position in matches]


class CorpusFiles:
    """The corpus of a drafter, read once for each tokenizer.

    Args:
        path: directory or file; None for no corpus.
        max_tokens: tokens to read.
    """

    def __init__(self, path: str | None, max_tokens: int) -> None:
        self.path = path
        self.max_tokens = max_tokens
        self.fixed: SortedCorpus | None = None
        self.by_tokenizer: dict[str, SortedCorpus] = {}
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # Locks cannot be copied; what was read does not change.
        values = {"fixed": self.fixed, "by_tokenizer": self.by_tokenizer}
        return CorpusFiles, (self.path, self.max_tokens), values

    def __deepcopy__(self, copied: dict[int, Any]) -> CorpusFiles:
        return copy(self)

    def of(self, target: LanguageModel) -> SortedCorpus | None:
        """The corpus in the target's tokens.

        Raises:
            ValueError: the target has no tokenizer, or no text can be read.
        """
        if self.path is None:
            return self.fixed
        tokenizer = target.tokenizer
        if tokenizer is None:
            raise ValueError(
                f"corpus {self.path} is text, and the target has no tokenizer: load the target "
                "with its tokenizer"
            )
        with self.lock:
            key = tokenizer.fingerprint
            if key not in self.by_tokenizer:
                texts = list(_read_texts(Path(self.path).expanduser(), tokenizer, self.max_tokens))
                if not texts:
                    raise ValueError(f"corpus {self.path} has no text: give a directory of texts")
                self.by_tokenizer[key] = SortedCorpus(texts)
            return self.by_tokenizer[key]


def _read_texts(path: Path, tokenizer: Tokenizer, max_tokens: int) -> Iterator[list[int]]:
    """The tokens of the files below a path, up to a number of tokens; the latest files first."""
    files = _text_files(path)
    num_missing = max_tokens
    with Activity(f"reading the corpus {path}", len(files), unit="files") as activity:
        for file in files:
            if file.suffix == ".safetensors":
                texts = _shard_texts(file, tokenizer)
            else:
                text = _text_of(file, num_missing * BYTES_PER_TOKEN)
                texts = [tokenizer.encode_plain(text)] if text else []
            for tokens in texts:
                if tokens and num_missing:
                    yield tokens[:num_missing]
                    num_missing -= min(len(tokens), num_missing)
            activity.advance()
            if num_missing == 0:
                return


def _shard_texts(file: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """The rows of a file of tokens that `generate` or `serve --record` wrote; none of others.

    Raises:
        ValueError: they are tokens of another tokenizer, or a file is damaged.
    """
    has_manifest = file.with_name(MANIFEST).is_file()
    if not has_manifest or not file.name.startswith("shard-"):
        return []
    manifest = read_manifest(file.parent)
    if manifest["tokenizer"].get("fingerprint") != tokenizer.fingerprint:
        raise ValueError(f"corpus: {file} has the tokens of another model")
    shard = Shard(file, manifest["vocab_size"])
    return [shard.row(number).tolist() for number in range(len(shard))]


def _text_files(path: Path) -> list[Path]:
    """The file, or the files of a directory, without hidden ones; those that changed last first."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"corpus {path} is no file or directory: check the path")
    files = []
    for directory, directory_names, names in os.walk(path):
        # Hidden directories have no texts, such as `.git`.
        directory_names[:] = [name for name in directory_names if not name.startswith(".")]
        for name in names:
            file = Path(directory, name)
            if not name.startswith(".") and file.is_file():
                files.append(file)
    return sorted(files, key=lambda file: (-file.stat().st_mtime, str(file)))


def _text_of(file: Path, max_bytes: int) -> str:
    """The text of a file, up to a number of bytes; none if it is not text."""
    try:
        with file.open("rb") as stream:
            content = stream.read(max_bytes)
    except OSError as error:
        raise ValueError(f"corpus: cannot read {file} ({error.strerror})") from error
    if b"\0" in content:
        return ""
    return content.decode("utf-8", errors="ignore")


class SuffixRow:
    """What is known of one row's text.

    Attributes:
        table: its n-grams.
        num_indexed: tokens of the text that are in `table`.
        num_remembered: tokens of the text that are in the memory.
        pieces: the numbers of the memory's pieces that have them.
    """

    def __init__(self) -> None:
        self.table = NGramTable()
        self.num_indexed = 0
        self.num_remembered = 0
        self.pieces: list[int] = []

    def extend(self, text: Sequence[int], num_final: int, memory: Memory | None) -> None:
        """Index the final tokens of the text that are new."""
        assert self.num_indexed <= len(text), "the text became shorter: its row was not cleared"
        if num_final > self.num_indexed:
            self.table.add(0, text, self.num_indexed, num_final)
            self.num_indexed = num_final
        if memory is not None and num_final > self.num_remembered:
            memory.append(text[self.num_remembered : num_final], self.pieces)
            self.num_remembered = num_final

    def truncated(self, length: int) -> SuffixRow:
        """The row if its text ends after `length` tokens and continues differently."""
        if self.num_indexed <= length:
            return self
        row = SuffixRow()
        # The memory keeps both continuations.
        row.num_remembered = min(self.num_remembered, length)
        return row

    def occurrences(self, text: Sequence[int], suffix: Suffix) -> list[Occurrence]:
        """Earlier occurrences of the text's suffix in the text itself."""
        occurrences = []
        for position in self.table.find(suffix.last_tokens):
            occurrences.append(suffix.occurrence(text, position))
        if any(occurrence.num_matched > 1 for occurrence in occurrences) or len(text) < 2:
            return occurrences

        # The last token may be a change in a copy, inserted or instead of another one. The copy
        # then continues with the token after the match before it, or with the one after that.
        last_position = len(text) - 1
        for position in self.table.find(suffix.last_tokens[:-1]):
            is_copied = text[position - 2 : position] == text[last_position - 2 : last_position]
            if position == last_position or not is_copied:
                continue
            occurrences.append(suffix.occurrence(text, position + 1))
            occurrences.append(suffix.occurrence(text, position))
        return occurrences


class SuffixState(DraftState):
    """The row's texts, and the corpus in the target's tokens."""

    def __init__(self, batch_size: int, corpus: SortedCorpus | None) -> None:
        super().__init__(batch_size, SuffixRow)
        self.corpus = corpus

    def truncate_row(self, row: int, length: int) -> None:
        self.rows[row] = self.rows[row].truncated(length)


class SuffixCorpusDrafter(LookupDrafter):
    """Copies what most often followed the text's last tokens, in this text and in others.

    Oliaro et al. 2024, "SuffixDecoding". Needs no model. It searches the row's prompt and output,
    the texts of earlier requests in this process, and a corpus. The draft ends where it is
    probably wrong. Texts of other requests are used only where the output does not depend on the
    draft: under `ExactMatch`, and at temperature 0 under every lossless rule.

    Raises:
        ValueError: a setting is wrong.
    """

    Settings = SuffixCorpusSettings
    settings: SuffixCorpusSettings

    def __init__(self, *values: Any, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self.memory = self._empty_memory()
        self.corpus = CorpusFiles(self.settings.corpus, self.settings.max_corpus_tokens)

    def _empty_memory(self) -> Memory | None:
        if self.settings.memory_tokens == 0:
            return None
        return Memory(self.settings.memory_tokens)

    def fresh(self) -> SuffixCorpusDrafter:
        drafter = copy(self)
        drafter.memory = self._empty_memory()
        return drafter

    def with_texts(self, texts: Iterable[Sequence[int]]) -> SuffixCorpusDrafter:
        """The same drafter with these tokens as its corpus; its memory is empty."""
        drafter = self.fresh()
        drafter.corpus = CorpusFiles(None, self.settings.max_corpus_tokens)
        drafter.corpus.fixed = SortedCorpus(texts)
        return drafter

    def remember(self, tokens: Sequence[int]) -> None:
        """Add a text to those of earlier requests."""
        if self.memory is not None:
            self.memory.append(tokens, [])

    def arguments(self) -> dict[str, Any]:
        if self.settings.corpus is not None or self.corpus.fixed is not None:
            raise ValueError(
                "a checkpoint does not store the texts of a corpus: save a SuffixCorpusDrafter "
                "without corpus, and give the corpus when you decode"
            )
        arguments = super().arguments()
        # A file must not name a directory that is then read.
        del arguments["corpus"]
        return arguments

    def check_target(self, target: LanguageModel) -> None:
        # The corpus is read now, so that no request waits for it.
        self.corpus.of(target)

    def init_state(
        self,
        batch_size: int,
        max_length: int,
        context: TargetContext | None = None,
    ) -> SuffixState:
        corpus = self.corpus.fixed
        if context is not None:
            corpus = self.corpus.of(context.model)
        return SuffixState(batch_size, corpus)

    def look_up_row(
        self,
        state: Any,
        request: DraftRequest,
        row: int,
        num_final: int,
        window: int,
    ) -> Sequence[int]:
        text = request.texts[row]
        suffix_row: SuffixRow = state.rows[row]
        suffix_row.extend(text, num_final, self.memory)

        suffix = Suffix(text)
        occurrences = suffix_row.occurrences(text, suffix)
        if self.memory is not None and request.may_use_other_texts:
            occurrences += self.memory.occurrences(suffix, suffix_row.pieces)
        if state.corpus is not None:
            occurrences += state.corpus.occurrences(suffix)
        return likeliest_continuation(text, occurrences, window, self.settings.min_acceptance)


def likeliest_continuation(
    text: Sequence[int],
    occurrences: Sequence[Occurrence],
    window: int,
    min_acceptance: float,
) -> list[int]:
    """Up to `window` tokens, each with most votes of the occurrences that agree so far.

    The share of a token in all votes, including those for unseen tokens, estimates the probability
    that it is right. The draft ends where the product of these falls below `min_acceptance`.
    """
    draft: list[int] = []
    acceptance = 1.0
    voters = list(occurrences)
    while len(draft) < window:
        votes: dict[int, float] = {}
        choices: list[tuple[Occurrence, int]] = []
        for voter in voters:
            token = _token_after(voter, len(draft), text, draft)
            if token < 0:
                continue
            num_matched = min(voter.num_matched + len(draft), LONGEST_MATCH)
            weight = MATCH_VOTES[num_matched] * voter.boost
            votes[token] = votes.get(token, 0.0) + weight
            choices.append((voter, token))
        if not votes:
            break

        best = max(votes, key=votes.__getitem__)
        acceptance *= votes[best] / (sum(votes.values()) + UNSEEN_WEIGHT)
        if acceptance < min_acceptance:
            break
        draft.append(best)
        voters = [voter for voter, token in choices if token == best]
    return draft


def _token_after(
    voter: Occurrence,
    num_drafted: int,
    text: Sequence[int],
    draft: Sequence[int],
) -> int:
    """The token that an occurrence votes for after the draft so far; -1 at the end of its text."""
    index = voter.position + num_drafted
    if index < len(voter.source):
        return voter.source[index]
    if voter.source is text and index - len(text) < len(draft):
        # The match overlaps the suffix: the text repeats itself, and so does the draft.
        return draft[index - len(text)]
    return -1
