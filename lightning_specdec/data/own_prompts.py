"""Prompts that a target writes itself: users' turns that it opens, and those of an earlier run.

Knows nothing of models or of how prompts are continued.
"""

from __future__ import annotations

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
    the same, so only a temperature above 0 makes the turns differ. `GeneratedPrompts` asks them.

    Args:
        num_prompts: how many turns.
        system: what the model is told before; what the template says by itself when None.
    """

    def __init__(self, num_prompts: int, *, system: str | None = None) -> None:
        super().__init__()
        self.num_prompts, self.system = require_int("num_prompts", num_prompts, 1), system

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        if not isinstance(tokenizer, TextTokenizer) or not tokenizer.has_chat_template:
            raise ValueError("the target has no chat template, so no user's turn can be opened: take PromptFiles")
        messages: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        before, found, _ = tokenizer.render_chat([*messages, {"role": "user", "content": _WORDS}]).partition(_WORDS)
        opening = tokenizer.encode_rendered(before)
        if not found or not opening:
            raise ValueError("the target's chat template has nothing before a user's words: take PromptFiles")
        return [list(opening) for _ in range(self.num_prompts)]

    def arguments(self) -> dict[str, Any]:
        return {"num_prompts": self.num_prompts, "system": self.system}


class GeneratedPrompts(TurnSource):
    """The new text of another `generate` run as users' turns.

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
        texts = []
        for shard in shards:
            for number, prompt_length in enumerate(shard.prompt_lengths.tolist()):
                tokens = shard.row(number).tolist()[prompt_length:]
                texts.append(tokenizer.decode(tokens).strip() if tokens[-1] in tokenizer.eos else "")
        return self.encode_all(tokenizer, texts, self.path)

    def arguments(self) -> dict[str, Any]:
        return {"path": self.path, **super().arguments()}
