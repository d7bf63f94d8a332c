"""Prompts that `generate` lets a target continue: of files, of templates, of the target itself."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lightning_specdec.config.checks import require_int
from lightning_specdec.data.base import PlainValues, plain_arguments, tell
from lightning_specdec.data.corpus import open_corpus
from lightning_specdec.data.prompts import Prompt, read_prompts
from lightning_specdec.data.text import find_texts
from lightning_specdec.text.tokenizer import Message, TextTokenizer, Tokenizer

TEMPLATES = (
    "Explain what this code does:\n\n{passage}",
    "Summarize the following text:\n\n{passage}",
    "Find a mistake in the following, or say why there is none:\n\n{passage}",
    "Write tests for this code:\n\n{passage}",
    "Rewrite the following so that it is easier to read:\n\n{passage}",
    "Write three questions that somebody may ask about the following, and answer them:\n\n{passage}",
)
"""What is asked about a passage when nothing else is said: the default passages are Python's own sources."""
_PASSAGE = "{passage}"
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
        trainer = self.trainer
        num_idle = 0 if trainer is None else max(0, trainer.world_size - len(self.shards))
        # Lightning wants a shard for every process.
        shards: Any = [*self.shards, *[PromptShard(-1, 0, ())] * num_idle]
        return DataLoader(shards, batch_size=None, collate_fn=_as_it_is)  # type: ignore[arg-type]  # of one shard


def _as_it_is(shard: PromptShard) -> PromptShard:
    return shard


class TurnSource(PromptSource):
    """Texts that become prompts one by one, each a user's turn.

    Args:
        chat: whether each text becomes a user's turn by the chat template; the text as it is otherwise.
        system: content of a system turn before it; the template's own when None.
        max_prompt_tokens: longer prompts are left out.
    """

    def __init__(self, *, chat: bool = True, system: str | None = None, max_prompt_tokens: int = 512) -> None:
        super().__init__()
        self.chat, self.system = chat, system
        self.max_prompt_tokens = require_int("max_prompt_tokens", max_prompt_tokens, 1)

    @abstractmethod
    def texts(self, tokenizer: Tokenizer) -> tuple[list[str], str]:
        """All texts, and what they are from."""

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The prompts of the texts, without empty and repeated ones and those that are too long."""
        texts, source = self.texts(tokenizer)
        if self.chat and not tokenizer.has_chat_template:
            raise ValueError("the target has no chat template: set data.chat to false, or take a model tuned for chats")
        kept: dict[tuple[int, ...], None] = {}
        left_out = {"empty or unfinished": 0, "repeated": 0, "over max_prompt_tokens": 0}
        for text in texts:
            prompt = Prompt("", "", text=text).encoded(tokenizer, raw=not self.chat, system=self.system).tokens
            if not text.strip():
                left_out["empty or unfinished"] += 1
            elif len(prompt) > self.max_prompt_tokens:
                left_out["over max_prompt_tokens"] += 1
            else:
                left_out["repeated"] += prompt in kept
                kept[prompt] = None
        reasons = ", ".join(f"{number} {why}" for why, number in left_out.items() if number)
        tell(f"prompts: {len(kept)} of {source}{f' (left out: {reasons})' if reasons else ''}")
        if not kept:
            raise ValueError(f"{source} gives no prompt ({reasons or 'it is empty'}): give others, or raise the limits")
        return [list(prompt) for prompt in kept]


class PromptFiles(TurnSource):
    """Prompts of files that `read_prompts` reads: lines of text, or of JSON.

    Args:
        paths: files, directories and patterns such as `prompts/**/*.jsonl`.
        field: of a JSON object, what the prompt is called.
        num_prompts: the first so many lines; all when None.
        options: those of `TurnSource`.
    """

    def __init__(
        self, paths: str | list[str], *, field: str = "prompt", num_prompts: int | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        self.field = field
        self.num_prompts = None if num_prompts is None else require_int("num_prompts", num_prompts, 1)

    def texts(self, tokenizer: Tokenizer) -> tuple[list[str], str]:
        files = find_texts(self.paths)
        prompts = [prompt for file in files for prompt in read_prompts(file.path, field=self.field)]
        return [prompt.text or "" for prompt in prompts[: self.num_prompts]], ", ".join(self.paths)


class Passages(TurnSource):
    """Passages of text files, each put into a template that asks something about it.

    Args:
        paths: files, directories and patterns; the running Python's own standard library when None.
        templates: what is asked, each with {passage} in it; they take turns.
        num_prompts: how many passages.
        length: characters of a passage at most; it begins and ends with a line.
        seed: of which passages are taken.
        options: those of `TurnSource`.
    """

    def __init__(
        self,
        paths: str | list[str] | None = None,
        *,
        templates: Sequence[str] = TEMPLATES,
        num_prompts: int = 1000,
        length: int = 600,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.paths = [paths] if isinstance(paths, str) else paths
        self.templates = list(templates)
        if not self.templates or not all(_PASSAGE in template for template in self.templates):
            raise ValueError(f"templates must each have {_PASSAGE} in them, got {self.templates}")
        self.num_prompts = require_int("num_prompts", num_prompts, 1)
        self.length = require_int("length", length, 1)
        self.seed = require_int("seed", seed, 0, 2**32 - 1)

    def texts(self, tokenizer: Tokenizer) -> tuple[list[str], str]:
        files = find_texts(self.paths)
        passages = [passage for file in files for passage in _passages(file.path.read_text("utf-8"), self.length)]
        source = "the standard library" if self.paths is None else ", ".join(self.paths)
        if len(passages) < self.num_prompts:
            raise ValueError(
                f"{source} has {len(passages)} passages of up to {self.length} characters, and num_prompts is "
                f"{self.num_prompts}: lower one of the two, or give more text"
            )
        taken = random.Random(self.seed).sample(passages, self.num_prompts)
        number = len(self.templates)
        return [self.templates[i % number].replace(_PASSAGE, passage) for i, passage in enumerate(taken)], source


def _passages(text: str, length: int) -> Iterator[str]:
    """A text cut between lines into pieces of at most `length` characters, without those under half of that."""
    piece = ""
    for line in [*text.splitlines(keepends=True), None]:
        if line is not None and len(piece) + len(line) <= length:
            piece += line
            continue
        if len(piece.strip()) * 2 >= length:
            yield piece.strip("\n")
        piece = line if line is not None and len(line) <= length else ""


class OpeningTurns(PromptSource):
    """The chat template up to where the user's words begin, so that the target writes them itself.

    A model that was tuned for chats has learned what users say as well (Xu et al. 2024, "Magpie", section 2.1). All
    prompts are the same, so only a temperature above 0 makes the turns differ. `GeneratedPrompts` asks them.

    Args:
        num_prompts: how many turns.
        system: content of a system turn before; the template's own when None.
        beginnings: words that the turns begin with; they take turns. One ends without a space: the model writes it.
    """

    def __init__(self, num_prompts: int, *, system: str | None = None, beginnings: Sequence[str] = ("",)) -> None:
        super().__init__()
        self.num_prompts, self.system = require_int("num_prompts", num_prompts, 1), system
        self.beginnings = list(beginnings)
        if not self.beginnings or any(words != words.rstrip(" ") for words in self.beginnings):
            raise ValueError(f"beginnings is {self.beginnings}: give one at least, and none that ends with a space")

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        opening: list[int] = []
        if isinstance(tokenizer, TextTokenizer) and tokenizer.has_chat_template:
            messages: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
            chat = tokenizer.render_chat([*messages, {"role": "user", "content": _WORDS}])
            if _WORDS in chat:
                opening = tokenizer.encode_rendered(chat.partition(_WORDS)[0])
        if not opening:
            raise ValueError("the target has no chat template that opens a user's turn: take PromptFiles")
        openings = [[*opening, *tokenizer.encode_plain(words)] for words in self.beginnings]
        return [list(openings[number % len(openings)]) for number in range(self.num_prompts)]


class GeneratedPrompts(TurnSource):
    """The new text of another `generate` run as users' turns, with the words that `OpeningTurns` began them with.

    Turns that did not come to their end are left out, like empty and repeated ones and those that are too long.

    Args:
        path: that run's directory.
        options: those of `TurnSource`.
    """

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(**options)
        self.path = path

    def texts(self, tokenizer: Tokenizer) -> tuple[list[str], str]:
        manifest, shards = open_corpus(Path(self.path).expanduser())
        if manifest["tokenizer"].get("fingerprint") != tokenizer.fingerprint:
            name = manifest["tokenizer"].get("name")
            raise ValueError(f"{self.path} is text of another tokenizer ({name}): generate it with this target")
        texts, beginnings = [], self._beginnings(manifest.get("data", {}))
        for shard in shards:
            rows = zip(shard.prompt_lengths.tolist(), shard.prompt_numbers.tolist(), strict=True)
            for number, (prompt_length, prompt_number) in enumerate(rows):
                tokens = shard.row(number).tolist()[prompt_length:]
                said = tokenizer.decode(tokens) if tokens[-1] in tokenizer.eos else ""
                texts.append((beginnings[prompt_number % len(beginnings)] + said).strip() if said.strip() else "")
        return texts, self.path

    def _beginnings(self, data: Mapping[str, Any]) -> Sequence[str]:
        """What the turns of that run begin with, by the number of its prompts."""
        if any(source.get("beginnings", [""]) != [""] for source in data.get("sources", ())):
            raise ValueError(f"{self.path} mixes turns with beginnings and others: generate them in separate runs")
        begun: Sequence[str] = data.get("beginnings", [""])
        return begun


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

    def arguments(self) -> PlainValues:
        return {"sources": [{"class": type(source).__name__, **source.arguments()} for source in self.sources]}
