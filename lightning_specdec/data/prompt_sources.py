"""Prompts for a target to continue: of files, of templates, of the target itself."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lightning_specdec.checks import require_int
from lightning_specdec.data.corpus import tell
from lightning_specdec.data.text_sources import TextFile, find_texts
from lightning_specdec.text.base import Message, Tokenizer

_FIELD = "prompt"
"""What a prompt is called where nobody says otherwise."""


class PromptShard(NamedTuple):
    """A fixed run of consecutive prompts: what one process continues at a time.

    Args:
        number: of the shard.
        first: the number of its first prompt.
        prompts: their tokens.
    """

    number: int
    first: int
    prompts: Sequence[Sequence[int]]


class PromptSource(LightningDataModule, ABC):
    """Prompts that a target continues.

    Theory: what a target says to the prompts that it will be asked is what a draft has to guess, so the prompts matter
    more than their number. A row depends on its shard alone, and shards are dealt to processes whole.

    Attributes:
        shards: what the processes share out between them; put here by whoever generates.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shards: Sequence[PromptShard] = ()

    @abstractmethod
    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The tokens of all prompts, the same at every call.

        Raises:
            FileNotFoundError, ValueError: they cannot be had, in one line.
        """

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments as plain values, for the record."""

    def predict_dataloader(self) -> DataLoader[PromptShard]:
        trainer = self.trainer
        num_idle = 0 if trainer is None else max(0, trainer.world_size - len(self.shards))
        # Lightning wants a shard for every process.
        dealt: Any = [*self.shards, *[PromptShard(-1, 0, ())] * num_idle]
        return DataLoader(dealt, batch_size=None, collate_fn=_as_it_is)  # type: ignore[arg-type]  # of one shard


def _as_it_is(shard: PromptShard) -> PromptShard:
    return shard


def _encoded(tokenizer: Tokenizer, text: str, *, chat: bool, system: str | None) -> list[int]:
    """The tokens of a text as a user's turn, up to where the answer begins; without `chat` of the text as it is."""
    if not chat:
        return tokenizer.encode(text)
    if not tokenizer.has_chat_template:
        raise ValueError("the target has no chat template: set data.chat to false, or take a model tuned for chats")
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return tokenizer.encode_chat([*messages, {"role": "user", "content": text}])


class TurnSource(PromptSource):
    """Texts that become prompts one by one, each a user's turn.

    Args:
        chat: whether the chat template goes round each text; the text as it is otherwise.
        system: what the model is told before it; what the template says by itself when None.
        max_prompt_tokens: longer prompts are left out.
    """

    def __init__(self, *, chat: bool, system: str | None, max_prompt_tokens: int) -> None:
        super().__init__()
        self.chat, self.system = chat, system
        self.max_prompt_tokens = require_int("max_prompt_tokens", max_prompt_tokens, 1)

    def encode_all(self, tokenizer: Tokenizer, texts: Sequence[str], what: str) -> list[list[int]]:
        """The prompts of texts, without empty and repeated ones and those that are too long, which it tells."""
        kept: dict[tuple[int, ...], None] = {}
        num_long = num_repeated = num_empty = 0
        for text in texts:
            prompt = tuple(_encoded(tokenizer, text, chat=self.chat, system=self.system)) if text.strip() else ()
            num_empty += not prompt
            num_long += len(prompt) > self.max_prompt_tokens
            num_repeated += prompt in kept
            if 0 < len(prompt) <= self.max_prompt_tokens:
                kept[prompt] = None
        left_out = {"empty or unfinished": num_empty, "repeated": num_repeated, "over max_prompt_tokens": num_long}
        told = ", ".join(f"{number} {why}" for why, number in left_out.items() if number)
        tell(f"prompts: {len(kept)} of {what}{f' (left out: {told})' if told else ''}")
        if not kept:
            raise ValueError(f"{what} gives no prompt ({told or 'nothing in it'}): give others, or raise the limits")
        return [list(prompt) for prompt in kept]

    def arguments(self) -> dict[str, Any]:
        return {"chat": self.chat, "system": self.system, "max_prompt_tokens": self.max_prompt_tokens}


class PromptFiles(TurnSource):
    """Prompts of files, one a line.

    - `.jsonl`: on each line a JSON object with the prompt, or with `turns` as Spec-Bench has them (the first one is
      taken); or a JSON string.
    - all others: text.

    Args:
        paths: files, directories and patterns such as `prompts/**/*.jsonl`.
        field: of a JSON object, what the prompt is called.
        num_prompts: the first so many lines; all when None.
        chat: whether each prompt is a user's turn, by the target's chat template; the text as it is otherwise.
        system: what the model is told before the turn; what the template says by itself when None.
        max_prompt_tokens: longer prompts are left out.
    """

    def __init__(
        self,
        paths: str | list[str],
        *,
        field: str = _FIELD,
        num_prompts: int | None = None,
        chat: bool = True,
        system: str | None = None,
        max_prompt_tokens: int = 512,
    ) -> None:
        super().__init__(chat=chat, system=system, max_prompt_tokens=max_prompt_tokens)
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        self.field = field
        self.num_prompts = None if num_prompts is None else require_int("num_prompts", num_prompts, 1)

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        texts = [text for file in find_texts(self.paths, max_bytes=None).files for text in self._lines(file)]
        return self.encode_all(tokenizer, texts[: self.num_prompts], ", ".join(self.paths))

    def _lines(self, file: TextFile) -> Iterator[str]:
        of_json = file.path.suffix.lower() == ".jsonl"
        for number, line in enumerate(file.read().decode("utf-8-sig").splitlines(), 1):
            if line.strip():
                yield self._of_json(line, f"{file.path}, line {number}") if of_json else line

    def _of_json(self, line: str, where: str) -> str:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(
                f"{where}: this is no JSON: write an object with {self.field!r}, or name it .txt"
            ) from None
        if isinstance(value, dict):
            turns = value.get("turns") if self.field == _FIELD else None
            value = value.get(self.field, turns[0] if isinstance(turns, list) and turns else None)
        if not isinstance(value, str):
            raise ValueError(f"{where}: there is no text called {self.field!r}: say by data.field what it is called")
        return value

    def arguments(self) -> dict[str, Any]:
        return {"paths": self.paths, "field": self.field, "num_prompts": self.num_prompts, **super().arguments()}


class PromptMix(PromptSource):
    """The prompts of several sources, one behind the other.

    Args:
        sources: at least one.
    """

    def __init__(self, sources: list[PromptSource]) -> None:
        super().__init__()
        if not sources:
            raise ValueError("sources is an empty list: give one source of prompts at least")
        self.sources = sources

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        return [prompt for source in self.sources for prompt in source.prompts(tokenizer)]

    def arguments(self) -> dict[str, Any]:
        return {"sources": [{"class": type(source).__name__, **source.arguments()} for source in self.sources]}
