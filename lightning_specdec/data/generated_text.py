"""What `lightning_specdec generate` wrote, as rows to learn from: prompts and the target's answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_specdec.config.checks import require_int
from lightning_specdec.data.base import SPLITS, Batch, EpochSampler, PlainValues, Row, Rows, TokenData, pad_rows, tell
from lightning_specdec.data.corpus import Shard, open_corpus
from lightning_specdec.text.tokenizer import named_tokenizer

IN_A_POOL = 32
"""Batches whose rows are sorted among each other: enough to be alike, few enough to keep the order random."""


class LikeLengths(EpochSampler):
    """An `EpochSampler` whose batches hold rows of similar lengths, so that little is padded.

    Args:
        lengths: of the rows.
        batch_size: rows of a batch.
        seed: of the order, together with the epoch's number.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        super().__init__(len(lengths), seed)
        self.lengths, self.batch_size = torch.tensor(lengths), batch_size

    def __iter__(self) -> Iterator[int]:
        generator = self.generator()
        order = torch.randperm(self.num_sequences, generator=generator)
        pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in order.split(IN_A_POOL * self.batch_size)]
        batches = torch.cat(pools).split(self.batch_size)
        last = len(batches) - 1
        # The last batch may be smaller, and stays the last.
        for number in [*torch.randperm(last, generator=generator).tolist(), last]:
            yield from batches[number].tolist()


class GeneratedText(TokenData):
    """Rows of one or several directories of generated text, split by their prompts.

    All rows of a prompt (at several temperatures, of several runs) are in one split. Numbers are numbers of prompts.
    Within a split the rows of one temperature follow each other, so the first rows are of different prompts.

    Args:
        paths: directories that `lightning_specdec generate` wrote, all of one tokenizer.
        vocab_size: tokens of the models; what the directories' target has.
        tokenizer: the tokenizer's directory or hub id; where the directories' own target had it when None.
        max_length: tokens of a row at most: the rest is cut off. Rows whose prompt fills that are left out.
        options: those of `TokenData`.
    """

    def __init__(
        self,
        paths: str | list[str],
        vocab_size: int,
        *,
        tokenizer: str | None = None,
        max_length: int = 512,
        **options: Any,
    ) -> None:
        self.longest = require_int("max_length", max_length, 2)
        super().__init__(vocab_size, prompt_length=max_length - 1, **options)  # as many as the row's own prompt has
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        if not self.paths:
            raise ValueError("paths is an empty list: name a directory that `lightning_specdec generate` wrote")
        self._given_tokenizer = tokenizer
        self._shards: list[Shard] = []
        self._rows: dict[str, _Rows] = {}

    @property
    def max_length(self) -> int:
        longest = max(int(np.diff(shard.starts).max(initial=0)) for shard in self._opened())
        return min(self.longest, longest)

    def rows(self, split: str) -> Rows:
        return self._split_rows()[split]

    def train_sampler(self) -> EpochSampler:
        return LikeLengths(self._split_rows()["train"].lengths(), self.batch_size, self.seed)

    def _split_rows(self) -> dict[str, _Rows]:
        """The rows of each split, read on the first call."""
        if self._rows:
            return self._rows
        prompts: dict[bytes, list[tuple[int, int]]] = {}
        num_left_out = 0
        shards = self._opened()
        for place, shard in enumerate(shards):
            for number, length in enumerate(shard.prompt_lengths.tolist()):
                if length < self.longest:
                    prompts.setdefault(shard.row(number, length).tobytes(), []).append((place, number))
                num_left_out += length >= self.longest
        named = ", ".join(self.paths)
        if num_left_out:
            tell(f"{num_left_out} rows of {named} are left out: their prompts fill max_length {self.longest}")
        rows_of = list(prompts.values())
        split = self.split(len(rows_of), f"{named} has, as prompts,", "generate rows of more prompts")
        for name, numbers in zip(SPLITS, split, strict=True):
            places = [place for number in numbers.tolist() for place in rows_of[number]]
            # Stable, so that rows of one temperature stay in the order of their prompts.
            places.sort(key=lambda place: shards[place[0]].temperatures[place[1]])
            self._rows[name] = _Rows(shards, places, self.longest)
        return self._rows

    def _opened(self) -> list[Shard]:
        """All shards of all directories, which are of one tokenizer; opened on the first call."""
        if self._shards:
            return self._shards
        fingerprint = None
        for path in self.paths:
            manifest, shards = open_corpus(Path(path).expanduser())
            found, name = manifest["tokenizer"].get("fingerprint"), str(manifest["tokenizer"].get("name"))
            if fingerprint is None:
                self.tokenizer, fingerprint = self._given_tokenizer or name, found
                if self._given_tokenizer is not None:
                    fingerprint = named_tokenizer(self._given_tokenizer).fingerprint
            if found != fingerprint:
                raise ValueError(
                    f"{path} is text of the tokenizer {name}, not of {self.tokenizer}: give directories and a "
                    "tokenizer that belong together"
                )
            if manifest["vocab_size"] != self.vocab_size:
                raise ValueError(
                    f"{path} was generated with a vocabulary of {manifest['vocab_size']} tokens, vocab_size is "
                    f"{self.vocab_size}: give data.vocab_size {manifest['vocab_size']}"
                )
            self._shards += shards
        return self._shards

    def collate(self, rows: Sequence[Row]) -> Batch:
        """One batch of numbered rows, right-padded with zeros."""
        texts = [tokens.astype(np.int64) for _, (tokens, _) in rows]
        return pad_rows(texts, [length for _, (_, length) in rows], [index for index, _ in rows])

    def prompts(self) -> list[list[int]]:
        """The distinct prompts of the test rows."""
        return [list(prompt) for prompt in dict.fromkeys(tuple(prompt) for prompt in super().prompts())]

    @lru_cache(maxsize=8)  # noqa: B019  # one data module lives as long as its run
    def bytes_per_token(self, *splits: str) -> float | None:
        split_rows = self._split_rows()
        assert self.tokenizer is not None, "read with the first directory"
        spelt = named_tokenizer(self.tokenizer).vocabulary.token_bytes
        sizes = np.array([len(piece or b"") for piece in spelt] + [0] * (self.vocab_size - len(spelt)))
        texts = [split_rows[split][number][1][0] for split in splits for number in range(len(split_rows[split]))]
        return sum(int(sizes[tokens].sum()) for tokens in texts) / sum(map(len, texts))

    def arguments(self) -> PlainValues:
        given = {name: value for name, value in super().arguments().items() if name != "prompt_length"}
        return {**given, "tokenizer": self._given_tokenizer, "max_length": self.longest}


class _Rows:
    """Some rows of some shards, each read when it is asked for: its tokens, and how many of them are its prompt.

    Args:
        shards: all of them.
        places: of each row, its shard and its number there.
        longest: tokens of a row at most.
    """

    def __init__(self, shards: Sequence[Shard], places: Sequence[tuple[int, int]], longest: int) -> None:
        self.shards, self.places, self.longest = shards, places, longest

    def __len__(self) -> int:
        return len(self.places)

    def lengths(self) -> list[int]:
        """Tokens of each row."""
        sizes = [np.diff(shard.starts) for shard in self.shards]
        return [min(self.longest, int(sizes[shard][row])) for shard, row in self.places]

    def __getitem__(self, number: int) -> Row:
        shard, row = self.places[number]
        return number, (self.shards[shard].row(row, self.longest), int(self.shards[shard].prompt_lengths[row]))
