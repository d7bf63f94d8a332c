"""Prompts that a target writes itself: users' turns that it opens, and those of an earlier run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_specdec.checks import require_int
from lightning_specdec.data.corpus import open_corpus
from lightning_specdec.data.prompt_sources import PromptSource, TurnSource
from lightning_specdec.text.base import Message, Tokenizer
from lightning_specdec.text.tokenizer import TextTokenizer

_WORDS = "marigold7204"
"""Words that no chat template holds."""


class OpeningTurns(PromptSource):
    """The chat template up to where the user's words begin, so that the target writes them itself.

    Theory: a model that was tuned for chats has learned what users say as well. Given the template's opening alone it
    goes on with a user's turn, like those that it was tuned on (Xu et al. 2024, "Magpie", section 2.1). All prompts are
    the same, so only a temperature above 0 makes the turns differ. `GeneratedPrompts` asks them. Left to itself a model
    writes short chats; a turn that is begun for it (`Summarize this article:`) becomes one of the kind that is wanted.

    Args:
        num_prompts: how many turns.
        system: what the model is told before; what the template says by itself when None.
        beginnings: words that the turns begin with; they take turns. One ends without a space: the model writes it.
    """

    def __init__(self, num_prompts: int, *, system: str | None = None, beginnings: Sequence[str] = ("",)) -> None:
        super().__init__()
        self.num_prompts, self.system = require_int("num_prompts", num_prompts, 1), system
        self.beginnings = list(beginnings)
        if not self.beginnings or any(words != words.rstrip(" ") for words in self.beginnings):
            raise ValueError(f"beginnings is {self.beginnings}: give one at least, and none that ends with a space")

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        if not isinstance(tokenizer, TextTokenizer) or not tokenizer.has_chat_template:
            raise ValueError("the target has no chat template, so no user's turn can be opened: take PromptFiles")
        messages: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        before, found, _ = tokenizer.render_chat([*messages, {"role": "user", "content": _WORDS}]).partition(_WORDS)
        opening = tokenizer.encode_rendered(before)
        if not found or not opening:
            raise ValueError("the target's chat template has nothing before a user's words: take PromptFiles")
        openings = [[*opening, *tokenizer.encode_plain(words)] for words in self.beginnings]
        return [list(openings[number % len(openings)]) for number in range(self.num_prompts)]

    def arguments(self) -> dict[str, Any]:
        return {"num_prompts": self.num_prompts, "system": self.system, "beginnings": self.beginnings}


class GeneratedPrompts(TurnSource):
    """The new text of another `generate` run as users' turns, with the words that `OpeningTurns` began them with.

    Turns that did not come to their end are left out, like empty and repeated ones and those that are too long.

    Args:
        path: that run's directory.
        chat: whether each turn goes into the target's chat template; the text as it is otherwise.
        system: what the model is told before the turn; what the template says by itself when None.
        max_prompt_tokens: longer prompts are left out.
    """

    def __init__(
        self, path: str, *, chat: bool = True, system: str | None = None, max_prompt_tokens: int = 512
    ) -> None:
        super().__init__(chat=chat, system=system, max_prompt_tokens=max_prompt_tokens)
        self.path = path

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        manifest, shards = open_corpus(Path(self.path).expanduser())
        if manifest["tokenizer"].get("fingerprint") != tokenizer.fingerprint:
            name = manifest["tokenizer"].get("name")
            raise ValueError(f"{self.path} is text of another tokenizer ({name}): generate it with this target")
        texts, beginnings = [], _beginnings(manifest.get("data", {}), self.path)
        for shard in shards:
            rows = zip(shard.prompt_lengths.tolist(), shard.prompt_numbers.tolist(), strict=True)
            for number, (prompt_length, prompt_number) in enumerate(rows):
                tokens = shard.row(number).tolist()[prompt_length:]
                said = tokenizer.decode(tokens) if tokens[-1] in tokenizer.eos else ""
                texts.append((beginnings[prompt_number % len(beginnings)] + said).strip() if said.strip() else "")
        return self.encode_all(tokenizer, texts, self.path)

    def arguments(self) -> dict[str, Any]:
        return {"path": self.path, **super().arguments()}


def _beginnings(data: Mapping[str, Any], path: str) -> Sequence[str]:
    """What the turns of a run begin with, by the number of its prompts."""
    if any(source.get("beginnings", [""]) != [""] for source in data.get("sources", ())):
        raise ValueError(f"{path} mixes turns that were begun with others: generate them in a run of their own")
    begun: Sequence[str] = data.get("beginnings", [""])
    return begun
