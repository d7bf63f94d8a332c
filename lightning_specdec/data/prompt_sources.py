"""Prompts that `generate` lets a target continue: from files, or written by the target itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lightning_specdec.config.checks import require_int
from lightning_specdec.data.base import PlainValues, plain_arguments, tell
from lightning_specdec.data.corpus import MANIFEST, open_corpus
from lightning_specdec.data.prompts import Prompt, read_prompts
from lightning_specdec.data.text import find_files
from lightning_specdec.text.datasets import dataset_source
from lightning_specdec.text.tokenizer import TextTokenizer, Tokenizer

MARKER = "marigold7204"
"""Text that no chat template contains, to find where a user's turn begins."""


class PromptShard(NamedTuple):
    """Consecutive prompts that one process continues together.

    Args:
        number: the shard's number; -1 for a shard without work.
        first: number of its first prompt.
        prompts: tokens of each prompt.
    """

    number: int
    first: int
    prompts: Sequence[Sequence[int]]


class PromptSource(LightningDataModule, ABC):
    """Prompts that a target continues.

    Attributes:
        shards: the work that the processes share; set by `GenerateText`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shards: Sequence[PromptShard] = ()

    @abstractmethod
    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The tokens of all prompts, the same at every call.

        Raises:
            FileNotFoundError, ValueError: there are no prompts, in one line.
        """

    def arguments(self) -> PlainValues:
        """The constructor's arguments as plain values, for the record of a run."""
        return plain_arguments(self)

    def predict_dataloader(self) -> DataLoader[PromptShard]:
        num_processes = 1 if self.trainer is None else self.trainer.world_size
        # Lightning requires a shard for every process.
        num_idle = max(0, num_processes - len(self.shards))
        idle_shards = [PromptShard(-1, 0, ())] * num_idle
        shards: Any = [*self.shards, *idle_shards]
        return DataLoader(shards, batch_size=None, collate_fn=lambda shard: shard)


class PromptFiles(PromptSource):
    """Prompts from files, and user turns that `generate` wrote from `OpeningTurns`.

    Files are read by `read_prompts`.

    Empty and repeated prompts are left out, and so are written turns that were cut off.

    Args:
        paths: files, directories and patterns such as `prompts/**/*.jsonl`; directories that
            `generate` wrote; datasets, see `TextFiles`.
        num_prompts: number of prompts from the start to use; all if None.
        chat: whether each text becomes a user turn by the chat template. Otherwise the text is used
            unchanged.
        system: content of a system turn at the start; the template's default if None.
        max_prompt_tokens: longer prompts are left out.
        chat_template_kwargs: variables of the chat template, such as `{"enable_thinking": False}`.
    """

    def __init__(
        self,
        paths: str | list[str],
        *,
        num_prompts: int | None = None,
        chat: bool = True,
        system: str | None = None,
        max_prompt_tokens: int = 512,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        self.num_prompts = num_prompts
        if num_prompts is not None:
            require_int("num_prompts", num_prompts, 1)
        self.chat = chat
        self.system = system
        self.max_prompt_tokens = require_int("max_prompt_tokens", max_prompt_tokens, 1)
        self.template_variables: Mapping[str, Any] = chat_template_kwargs or {}
        if not chat and (system is not None or self.template_variables):
            raise ValueError(
                "system and chat_template_kwargs are for a chat template, and data.chat is false: "
                "drop them"
            )

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        if self.chat and not tokenizer.has_chat_template:
            raise ValueError(
                "the target has no chat template: set data.chat to false, or use a model tuned for "
                "chats"
            )
        texts = self._read(tokenizer)

        # A dict keeps the order and drops repetitions.
        distinct_prompts: dict[tuple[int, ...], None] = {}
        for text in texts:
            prompt = text.encoded(
                tokenizer,
                raw=not self.chat,
                system=self.system,
                chat_template_kwargs=self.template_variables,
            )
            if len(prompt.tokens) <= self.max_prompt_tokens:
                distinct_prompts[prompt.tokens] = None

        summary = (
            f"{len(distinct_prompts)} of {len(texts)} are different ones of at most "
            f"{self.max_prompt_tokens} tokens"
        )
        tell(f"prompts: {summary}")
        if not distinct_prompts:
            raise ValueError(
                f"there is no prompt: {summary}; give others, or raise max_prompt_tokens"
            )
        return [list(tokens) for tokens in distinct_prompts]

    def arguments(self) -> PlainValues:
        values = super().arguments()
        if self.template_variables:
            values["chat_template_kwargs"] = dict(self.template_variables)
        return values

    def _read(self, tokenizer: Tokenizer) -> list[Prompt]:
        """All prompts of text, before they are encoded."""
        prompts: list[Prompt] = []
        for path in self.paths:
            if (Path(path) / MANIFEST).is_file():
                turns = _written_turns(Path(path), tokenizer)
                prompts += [Prompt("", "", text=turn) for turn in turns]
                continue
            if dataset_source(path) is not None:
                files = [Path(path)]
            else:
                files = [file.path for file in find_files([path]) if file.path.stat().st_size > 0]
            for file in files:
                prompts += [prompt for prompt in read_prompts(file) if prompt.text is not None]
        return prompts[: self.num_prompts]


def _written_turns(directory: Path, tokenizer: Tokenizer) -> list[str]:
    """The finished texts of a `generate` run, with the beginnings that `OpeningTurns` gave them."""
    manifest, shards = open_corpus(directory)
    if manifest["tokenizer"].get("fingerprint") != tokenizer.fingerprint:
        raise ValueError(f"{directory} is text of another tokenizer: generate it with this target")

    beginnings = manifest.get("data", {}).get("beginnings", [""])
    turns = []
    for shard in shards:
        for row_number in range(len(shard)):
            prompt_length = int(shard.prompt_lengths[row_number])
            new_tokens = shard.row(row_number).tolist()[prompt_length:]
            if new_tokens[-1] not in tokenizer.eos:
                continue
            text = tokenizer.decode(new_tokens)
            if text.strip():
                beginning = beginnings[shard.prompt_numbers[row_number] % len(beginnings)]
                turns.append((beginning + text).strip())
    return turns


class OpeningTurns(PromptSource):
    """The chat template up to where a user turn begins, so that the target writes the turn itself.

    A model that was tuned for chats has also learned what users write (Xu et al. 2024, "Magpie",
    section 2.1). All prompts are the same, so only a temperature above 0 makes the turns differ.
    `PromptFiles` reads them as prompts.

    Args:
        num_prompts: number of turns.
        beginnings: texts that the turns begin with, used in rotation. They should not end with a
            space, which the model writes itself.
    """

    def __init__(self, num_prompts: int, *, beginnings: Sequence[str] = ("",)) -> None:
        super().__init__()
        self.num_prompts = require_int("num_prompts", num_prompts, 1)
        self.beginnings = list(beginnings)
        if not self.beginnings:
            raise ValueError("beginnings is an empty list: give at least one")

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        if not isinstance(tokenizer, TextTokenizer):
            raise ValueError("the target has no chat template: use PromptFiles")
        rendered = tokenizer.render_chat([{"role": "user", "content": MARKER}])
        if MARKER not in rendered:
            raise ValueError("the target's chat template leaves out user turns: use PromptFiles")

        opening = tokenizer.encode_rendered(rendered[: rendered.index(MARKER)])
        openings = [opening + tokenizer.encode_plain(text) for text in self.beginnings]
        return [list(openings[number % len(openings)]) for number in range(self.num_prompts)]
