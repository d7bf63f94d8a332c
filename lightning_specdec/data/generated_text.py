"""What `lightning_specdec generate` wrote, as rows to learn from: prompts and what the target made of them.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from lightning_specdec.checks import require_int
from lightning_specdec.data.base import SPLITS, Batch, EpochSampler, PlainValues, Row, Rows, TokenData
from lightning_specdec.data.corpus import Shard, open_corpus, tell
from lightning_specdec.data.like_lengths import LikeLengths
from lightning_specdec.text.named import named_tokenizer


class GeneratedText(TokenData):
    """Rows of one or several directories of generated text, dealt to the splits by their prompts.

    Theory: rows of one prompt, at several temperatures or of several runs, resemble each other, so a prompt's rows all
    go to one split: held-out prompts then tell how a draft does on questions that it has not seen. The numbers below
    are therefore numbers of prompts. Within a split the rows of one temperature follow each other, so the first rows
    are of different prompts.

    Args:
        paths: directories that `lightning_specdec generate` wrote, all of one tokenizer.
        vocab_size: tokens of the models; what the directories' target has.
        tokenizer: the tokenizer's directory or hub id; where the directories' own target had it when None.
        max_length: tokens of a row at most: the rest is cut off. Rows whose prompt fills that are left out.
        num_train: prompts to train on; all that validation and test leave when None.
        num_val: prompts whose rows choose the best checkpoint.
        num_test: prompts kept for the end.
        batch_size: rows for each step of the optimizer.
        seed: of the split and of the order of the batches.
    """

    def __init__(
        self,
        paths: str | list[str],
        vocab_size: int,
        *,
        tokenizer: str | None = None,
        max_length: int = 512,
        num_train: int | None = None,
        num_val: int = 64,
        num_test: int = 16,
        batch_size: int = 16,
        seed: int = 0,
    ) -> None:
        super().__init__(
            vocab_size,
            num_train=num_train,
            num_val=num_val,
            num_test=num_test,
            batch_size=batch_size,
            seed=seed,
            prompt_length=require_int("max_length", max_length, 2) - 1,  # as many as the row's own prompt has
        )
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        if not self.paths:
            raise ValueError("paths is an empty list: name a directory that `lightning_specdec generate` wrote")
        self._given_tokenizer, self.longest = tokenizer, max_length
        self._shards: list[Shard] = []
        self._rows: dict[str, _Rows] = {}

    @property
    def max_length(self) -> int:
        longest = max(int(np.diff(shard.starts).max(initial=0)) for shard in self._opened())
        return min(self.longest, longest)

    def rows(self, split: str) -> Rows:
        return self._dealt()[split]

    def train_sampler(self) -> EpochSampler:
        return LikeLengths(self._dealt()["train"].lengths(), self.batch_size, self.seed)

    def _dealt(self) -> dict[str, _Rows]:
        """The rows of each split, read on the first call."""
        if not self._rows:
            prompts, num_left_out = self._by_prompt()
            named = ", ".join(self.paths)
            if num_left_out:
                tell(f"{num_left_out} rows of {named} are left out: their prompts fill max_length {self.longest}")
            dealt = self.deal(len(prompts), f"{named} has, as prompts,", "generate rows of more prompts")
            for split, numbers in zip(SPLITS, dealt, strict=True):
                places = [place for number in numbers.tolist() for place in prompts[number]]
                # Stable, so that rows of one temperature stay in the order of their prompts.
                places.sort(key=lambda place: self._shards[place[0]].temperatures[place[1]])
                self._rows[split] = _Rows(self._shards, places, self.longest)
        return self._rows

    def _opened(self) -> list[Shard]:
        """All shards of all directories, which are of one tokenizer; opened on the first call."""
        if self._shards:
            return self._shards
        first = ""
        shards: list[Shard] = []
        for path in self.paths:
            manifest, found = open_corpus(Path(path).expanduser())
            fingerprint, name = manifest["tokenizer"].get("fingerprint"), str(manifest["tokenizer"].get("name"))
            if not shards:
                self.tokenizer, first = self._given_tokenizer or name, fingerprint
                if self._given_tokenizer is not None and named_tokenizer(self.tokenizer).fingerprint != fingerprint:
                    raise ValueError(f"{path} is text of the tokenizer {name}, not of {self.tokenizer}: give its own")
            if fingerprint != first:
                raise ValueError(
                    f"{path} is text of the tokenizer {name}, {self.paths[0]} of another: give one of them"
                )
            if manifest["vocab_size"] != self.vocab_size:
                had = f"{path} was generated with a vocabulary of {manifest['vocab_size']} tokens"
                raise ValueError(
                    f"{had}, vocab_size is {self.vocab_size}: give data.vocab_size {manifest['vocab_size']}"
                )
            shards += found
        self._shards = shards
        return shards

    def _by_prompt(self) -> tuple[list[list[tuple[int, int]]], int]:
        """For each distinct prompt its rows, as shard and number; and how many rows have no room for a new token."""
        groups: dict[bytes, list[tuple[int, int]]] = {}
        num_left_out = 0
        for place, shard in enumerate(self._opened()):
            for number, length in enumerate(shard.prompt_lengths.tolist()):
                if length < self.longest:
                    groups.setdefault(shard.row(number, length).tobytes(), []).append((place, number))
                num_left_out += length >= self.longest
        return list(groups.values()), num_left_out

    def collate(self, rows: Sequence[Row]) -> Batch:
        """One batch of numbered rows, right-padded with zeros."""
        texts, lengths = [tokens for _, (tokens, _) in rows], [len(tokens) for _, (tokens, _) in rows]
        padded = np.zeros((len(rows), max(lengths)), np.int64)
        for line, tokens in zip(padded, texts, strict=True):
            line[: len(tokens)] = tokens
        return Batch(
            tokens=torch.from_numpy(padded),
            lengths=torch.tensor(lengths),
            prompt_lengths=torch.tensor([prompt_length for _, (_, prompt_length) in rows]),
            indices=torch.tensor([index for index, _ in rows]),
        )

    def prompts(self) -> list[list[int]]:
        """The distinct prompts of the test rows."""
        distinct = dict.fromkeys(tuple(prompt) for prompt in super().prompts())
        return [list(prompt) for prompt in distinct]

    @lru_cache(maxsize=8)  # noqa: B019  # one data module lives as long as its run
    def bytes_per_token(self, *splits: str) -> float | None:
        dealt = self._dealt()
        assert self.tokenizer is not None, "read with the first directory"
        spelt = named_tokenizer(self.tokenizer).vocabulary.token_bytes
        sizes = np.array([len(piece or b"") for piece in spelt] + [0] * (self.vocab_size - len(spelt)))
        texts = [dealt[split][number][1][0] for split in splits for number in range(len(dealt[split]))]
        return sum(int(sizes[tokens].sum()) for tokens in texts) / sum(map(len, texts))

    def arguments(self) -> PlainValues:
        given = {name: value for name, value in super().arguments().items() if name != "prompt_length"}
        return {**given, "paths": self.paths, "tokenizer": self._given_tokenizer, "max_length": self.longest}


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
