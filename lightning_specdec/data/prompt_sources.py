"""Prompts that `generate` lets a target continue: of files, of the target itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lightning_specdec.config.checks import require_int
from lightning_specdec.data.base import PlainValues, plain_arguments, tell
from lightning_specdec.data.corpus import MANIFEST, open_corpus
from lightning_specdec.data.prompts import Prompt, read_prompts
from lightning_specdec.data.text import find_texts
from lightning_specdec.text.tokenizer import TextTokenizer, Tokenizer

_WORDS = "marigold7204"
"""Words that no chat template holds."""


class PromptShard(NamedTuple):
    """Consecutive prompts that one process continues at a time; `first` is the number of the first of them."""

    number: int
    first: int
    prompts: Sequence[Sequence[int]]


class PromptSource(LightningDataModule, ABC):
    """Prompts that a target continues.

    Attributes:
        shards: what the processes share out between them; set by `GenerateText`.
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

    def arguments(self) -> PlainValues:
        """The constructor's arguments as plain values, for the record."""
        return plain_arguments(self)

    def predict_dataloader(self) -> DataLoader[PromptShard]:
        num_idle = 0 if self.trainer is None else max(0, self.trainer.world_size - len(self.shards))
        # Lightning wants a shard for every process.
        shards: Any = [*self.shards, *[PromptShard(-1, 0, ())] * num_idle]
        return DataLoader(shards, batch_size=None, collate_fn=lambda shard: shard)  # of one shard


class PromptFiles(PromptSource):
    """Prompts of files that `read_prompts` reads, and users' turns that `generate` wrote from `OpeningTurns`.

    Empty and repeated prompts are left out, and turns that did not come to their end.

    Args:
        paths: files, directories and patterns such as `prompts/**/*.jsonl`; directories that `generate` wrote.
        num_prompts: the first so many; all when None.
        chat: whether each text becomes a user's turn by the chat template; the text as it is otherwise.
        system: content of a system turn before it; the template's own when None.
        max_prompt_tokens: longer prompts are left out.
    """

    def __init__(
        self,
        paths: str | list[str],
        *,
        num_prompts: int | None = None,
        chat: bool = True,
        system: str | None = None,
        max_prompt_tokens: int = 512,
    ) -> None:
        super().__init__()
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        self.chat, self.system = chat, system
        self.num_prompts = (
            None if num_prompts is None else require_int("num_prompts", num_prompts, 1)
        )
        self.max_prompt_tokens = require_int("max_prompt_tokens", max_prompt_tokens, 1)

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        if self.chat and not tokenizer.has_chat_template:
            raise ValueError(
                "the target has no chat template: set data.chat to false, or take a model tuned for chats"
            )
        texts = self.texts(tokenizer)
        prompts = [
            Prompt("", "", text=text).encoded(tokenizer, raw=not self.chat, system=self.system)
            for text in texts
        ]
        kept = dict.fromkeys(
            prompt.tokens for prompt in prompts if len(prompt.tokens) <= self.max_prompt_tokens
        )
        found = f"{len(kept)} of {len(texts)} are different ones of at most {self.max_prompt_tokens} tokens"
        tell(f"prompts: {found}")
        if not kept:
            raise ValueError(
                f"there is no prompt: {found}; give others, or raise max_prompt_tokens"
            )
        return [list(tokens) for tokens in kept]

    def texts(self, tokenizer: Tokenizer) -> list[str]:
        """All texts that are not empty."""
        texts: list[str] = []
        for given in self.paths:
            if (Path(given) / MANIFEST).is_file():
                texts += _written_turns(Path(given), tokenizer)
            else:
                prompts = [read_prompts(file.path) for file in find_texts([given])]
                texts += [
                    prompt.text for each in prompts for prompt in each if prompt.text is not None
                ]
        return texts[: self.num_prompts]


def _written_turns(directory: Path, tokenizer: Tokenizer) -> list[str]:
    """The finished texts of a `generate` run, with the words that `OpeningTurns` began them with."""
    manifest, shards = open_corpus(directory)
    if manifest["tokenizer"].get("fingerprint") != tokenizer.fingerprint:
        raise ValueError(f"{directory} is text of another tokenizer: generate it with this target")
    beginnings = manifest.get("data", {}).get("beginnings", [""])
    texts = []
    for shard in shards:
        for number, (length, prompt) in enumerate(
            zip(shard.prompt_lengths, shard.prompt_numbers, strict=True)
        ):
            tokens = shard.row(number).tolist()[length:]
            said = tokenizer.decode(tokens) if tokens[-1] in tokenizer.eos else ""
            texts += [(beginnings[prompt % len(beginnings)] + said).strip()] if said.strip() else []
    return texts


class OpeningTurns(PromptSource):
    """The chat template up to where the user's words begin, so that the target writes them itself.

    A model that was tuned for chats has learned what users say as well (Xu et al. 2024, "Magpie", section 2.1). All
    prompts are the same, so only a temperature above 0 makes the turns differ. `PromptFiles` reads them as prompts.

    Args:
        num_prompts: how many turns.
        beginnings: words that the turns begin with; they take turns. One ends without a space: the model writes it.
    """

    def __init__(self, num_prompts: int, *, beginnings: Sequence[str] = ("",)) -> None:
        super().__init__()
        self.num_prompts = require_int("num_prompts", num_prompts, 1)
        self.beginnings = list(beginnings)
        if not self.beginnings:
            raise ValueError("beginnings is an empty list: give one at least")

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        if not isinstance(tokenizer, TextTokenizer):
            raise ValueError("the target has no chat template: take PromptFiles")
        opening, words, _ = tokenizer.render_chat([{"role": "user", "content": _WORDS}]).partition(
            _WORDS
        )
        if not words:
            raise ValueError(
                "the target's chat template leaves out a user's turn: take PromptFiles"
            )
        openings = [
            tokenizer.encode_rendered(opening) + tokenizer.encode_plain(begun)
            for begun in self.beginnings
        ]
        return [list(openings[number % len(openings)]) for number in range(self.num_prompts)]
