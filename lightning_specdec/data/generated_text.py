"""Text that `lightning_specdec generate` wrote: prompts and the target's answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from lightning_specdec.data.corpus import Shard, open_corpus, read_manifest
from lightning_specdec.text.tokenizer import named_tokenizer

BATCHES_PER_POOL = 32
"""Batches whose rows are sorted together. More give less padding, fewer a more random order."""


class RowLocation(NamedTuple):
    """A row's shard and its number there."""

    shard: Shard
    number: int


class LikeLengths(EpochSampler):
    """An `EpochSampler` whose batches have rows of similar lengths, to need little padding.

    Args:
        lengths: number of tokens of each row.
        batch_size: rows of a batch.
        seed: seed of the order, together with the epoch's number.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        super().__init__(len(lengths), seed)
        self.lengths = torch.tensor(lengths)
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[int]:
        # Rows in a random order, sorted by their lengths within each pool of many batches.
        generator = self.generator()
        order = torch.randperm(self.num_sequences, generator=generator)
        sorted_pools = []
        for pool in order.split(BATCHES_PER_POOL * self.batch_size):
            by_length = self.lengths[pool].argsort(stable=True)
            sorted_pools.append(pool[by_length])

        # Batches in a random order. The last one may be smaller, so it stays the last.
        *batches, last_batch = torch.cat(sorted_pools).split(self.batch_size)
        batch_order = torch.randperm(len(batches), generator=generator)
        for index in batch_order.tolist():
            yield from batches[index].tolist()
        yield from last_batch.tolist()


class GeneratedText(TokenData):
    """Rows of one or several directories of generated text, split by their prompts.

    All rows of a prompt (at several temperatures, of several runs) are in one split. Sizes of
    splits are numbers of prompts. In a split the rows of one temperature follow each other, so the
    first rows have different prompts.

    Args:
        paths: directories that `lightning_specdec generate` wrote, all of one tokenizer.
        vocab_size: number of tokens of the models, equal to that of the directories' target.
        max_length: longer rows are cut to this number of tokens. Rows with such a long prompt are
            left out.
        tokenizer: directory or Hub id of the tokenizer; the one of the manifests if None.
        options: arguments of `TokenData`.
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
        self.max_row_length = require_int("max_length", max_length, 2)
        # Every row has its own prompt length, which no limit cuts.
        super().__init__(vocab_size, prompt_length=max_length - 1, **options)
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        self.tokenizer = tokenizer
        self._locations: dict[str, list[RowLocation]] = {}

    @property
    def max_length(self) -> int:
        longest = 0
        for locations in self._split().values():
            for location in locations:
                longest = max(longest, self._length(location))
        return longest

    def rows(self, split: str) -> NumberedRows:
        return NumberedRows(self._split()[split], self._read)

    def train_sampler(self) -> EpochSampler:
        num_processes = self.trainer.world_size if self.trainer else 1
        rows_per_step = self.batch_size * num_processes
        lengths = [self._length(location) for location in self._split()["train"]]
        return LikeLengths(lengths, rows_per_step, self.seed)

    def _read(self, location: RowLocation) -> tuple[Any, int]:
        """The tokens of a row, and the length of its prompt."""
        tokens = location.shard.row(location.number)
        prompt_length = int(location.shard.prompt_lengths[location.number])
        return tokens[: self.max_row_length], prompt_length

    def _length(self, location: RowLocation) -> int:
        starts = location.shard.starts
        length = int(starts[location.number + 1] - starts[location.number])
        return min(self.max_row_length, length)

    def _split(self) -> dict[str, list[RowLocation]]:
        """The rows of each split, read at the first call.

        Raises:
            ValueError: a directory has another tokenizer or vocabulary, or there are too few
                prompts.
        """
        if self._locations:
            return self._locations

        rows_by_prompt: dict[bytes, list[RowLocation]] = defaultdict(list)
        for shard in self._open_shards():
            for number, prompt_length in enumerate(shard.prompt_lengths.tolist()):
                if prompt_length < self.max_row_length:
                    prompt = shard.row(number)[:prompt_length]
                    rows_by_prompt[prompt.tobytes()].append(RowLocation(shard, number))

        # Prompts are split, and all rows of a prompt go with it.
        rows_of_prompts = list(rows_by_prompt.values())
        source = f"{', '.join(self.paths)}, prompts"
        prompt_indices = self.split(len(rows_of_prompts), source)
        for split, indices in zip(SPLITS, prompt_indices, strict=True):
            locations: list[RowLocation] = []
            for index in indices.tolist():
                locations += rows_of_prompts[index]
            # The sort is stable, so rows of one temperature stay in the order of their prompts.
            locations.sort(key=_temperature)
            self._locations[split] = locations
        return self._locations

    def _open_shards(self) -> list[Shard]:
        """The shards of all directories, checked to be of one tokenizer.

        Sets `tokenizer` if it is unknown.
        """
        given_tokenizer = self.tokenizer
        fingerprints = set()
        if given_tokenizer is not None:
            fingerprints.add(named_tokenizer(given_tokenizer).fingerprint)

        all_shards: list[Shard] = []
        for path in self.paths:
            manifest, shards = open_corpus(Path(path).expanduser())
            name = str(manifest["tokenizer"].get("name"))
            self.tokenizer = given_tokenizer or name
            fingerprints.add(manifest["tokenizer"].get("fingerprint"))
            if len(fingerprints) > 1 or manifest["vocab_size"] != self.vocab_size:
                raise ValueError(
                    f"{path} is text of the tokenizer {name} with {manifest['vocab_size']} tokens: "
                    f"give directories of {given_tokenizer or 'one tokenizer'}, and its "
                    f"data.vocab_size (it is {self.vocab_size})"
                )
            all_shards += shards
        return all_shards

    def collate(self, rows: Sequence[Row]) -> Batch:
        batch = super().collate([(index, tokens) for index, (tokens, _) in rows])
        prompt_lengths = [prompt_length for _, (_, prompt_length) in rows]
        return batch._replace(prompt_lengths=torch.tensor(prompt_lengths))

    def prompts(self) -> list[list[int]]:
        """The distinct prompts of the test rows."""
        distinct_prompts = dict.fromkeys(tuple(prompt) for prompt in super().prompts())
        return [list(prompt) for prompt in distinct_prompts]

    def arguments(self) -> PlainValues:
        values = super().arguments()
        values.pop("prompt_length", None)
        values["max_length"] = self.max_row_length
        # The variables of the chat template that wrote the prompts, of each directory.
        variables = []
        for path in self.paths:
            prompt_arguments = read_manifest(Path(path).expanduser()).get("data", {})
            variables.append(prompt_arguments.get("chat_template_kwargs") or {})
        if any(variables):
            is_same = all(entry == variables[0] for entry in variables)
            values["chat_template_kwargs"] = variables[0] if is_same else variables
        return values


def _temperature(location: RowLocation) -> float:
    return float(location.shard.temperatures[location.number])
