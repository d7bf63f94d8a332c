"""What `lightning_specdec generate` wrote, as rows to learn from: prompts and the target's answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_specdec.config.checks import require_int
from lightning_specdec.data.base import (
    SPLITS,
    Batch,
    EpochSampler,
    NumberedRows,
    PlainValues,
    Row,
    TokenData,
)
from lightning_specdec.data.corpus import Shard, open_corpus
from lightning_specdec.text.tokenizer import named_tokenizer

IN_A_POOL = 32
"""Batches whose rows are sorted among each other: enough to be alike, few enough to keep the order random."""

Place = tuple[Shard, int]
"""A row's shard and its number there."""


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
        pools = [
            pool[self.lengths[pool].argsort(stable=True)]
            for pool in order.split(IN_A_POOL * self.batch_size)
        ]
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
        max_length: tokens of a row at most: the rest is cut off. Rows whose prompt fills that are left out.
        tokenizer: where the directories' tokenizer is now; as their manifests say when None.
        options: those of `TokenData`.
    """

    def __init__(
        self,
        paths: str | list[str],
        vocab_size: int,
        *,
        max_length: int = 512,
        tokenizer: str | None = None,
        **options: Any,
    ) -> None:
        self.longest = require_int("max_length", max_length, 2)
        super().__init__(
            vocab_size, prompt_length=max_length - 1, **options
        )  # as many as the row's own prompt has
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        self.tokenizer = tokenizer
        self._places: dict[str, list[Place]] = {}

    @property
    def max_length(self) -> int:
        return max(self._length(place) for places in self._split().values() for place in places)

    def rows(self, split: str) -> NumberedRows:
        return NumberedRows(
            self._split()[split],
            lambda place: (
                place[0].row(place[1])[: self.longest],
                int(place[0].prompt_lengths[place[1]]),
            ),
        )

    def train_sampler(self) -> EpochSampler:
        num_rows = self.batch_size * (
            self.trainer.world_size if self.trainer else 1
        )  # of all processes in a step
        return LikeLengths(
            [self._length(place) for place in self._split()["train"]], num_rows, self.seed
        )

    def _length(self, place: Place) -> int:
        shard, number = place
        return min(self.longest, int(shard.starts[number + 1] - shard.starts[number]))

    def _split(self) -> dict[str, list[Place]]:
        """The rows of each split, read on the first call.

        Raises:
            ValueError: a directory is of another tokenizer or vocabulary, or there are too few prompts.
        """
        if self._places:
            return self._places
        prompts: dict[bytes, list[Place]] = {}
        given = self.tokenizer
        fingerprints = set() if given is None else {named_tokenizer(given).fingerprint}
        for path in self.paths:
            manifest, shards = open_corpus(Path(path).expanduser())
            name = str(manifest["tokenizer"].get("name"))
            self.tokenizer = given or name
            fingerprints.add(manifest["tokenizer"].get("fingerprint"))
            if len(fingerprints) > 1 or manifest["vocab_size"] != self.vocab_size:
                raise ValueError(
                    f"{path} is text of the tokenizer {name} with {manifest['vocab_size']} tokens: give directories of "
                    f"{given or 'one tokenizer'}, and its data.vocab_size (it is {self.vocab_size})"
                )
            for shard in shards:
                for number, length in enumerate(shard.prompt_lengths.tolist()):
                    if length < self.longest:
                        prompts.setdefault(shard.row(number)[:length].tobytes(), []).append(
                            (shard, number)
                        )
        rows_of = list(prompts.values())
        split = self.split(len(rows_of), f"{', '.join(self.paths)}, prompts")
        for name, numbers in zip(SPLITS, split, strict=True):
            places = [place for number in numbers.tolist() for place in rows_of[number]]
            # Stable, so that rows of one temperature stay in the order of their prompts.
            places.sort(key=lambda place: float(place[0].temperatures[place[1]]))
            self._places[name] = places
        return self._places

    def collate(self, rows: Sequence[Row]) -> Batch:
        batch = super().collate([(index, tokens) for index, (tokens, _) in rows])
        return batch._replace(prompt_lengths=torch.tensor([length for _, (_, length) in rows]))

    def prompts(self) -> list[list[int]]:
        """The distinct prompts of the test rows."""
        return [
            list(prompt) for prompt in dict.fromkeys(tuple(prompt) for prompt in super().prompts())
        ]

    def arguments(self) -> PlainValues:
        given = {
            name: value for name, value in super().arguments().items() if name != "prompt_length"
        }
        return {**given, "max_length": self.longest}
