"""Prompts made of passages of text files and of templates that ask something about them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_specdec.checks import require_int
from lightning_specdec.data.prompt_sources import TurnSource
from lightning_specdec.data.text_sources import find_texts
from lightning_specdec.text.base import Tokenizer

TEMPLATES = (
    "Explain what this code does:\n\n{passage}",
    "Summarize the following text:\n\n{passage}",
    "Find a mistake in the following, or say why there is none:\n\n{passage}",
    "Write tests for this code:\n\n{passage}",
    "Rewrite the following so that it is easier to read:\n\n{passage}",
    "Write three questions that somebody may ask about the following, and answer them:\n\n{passage}",
)
"""What is asked about a passage when nothing else is said: the default passages are Python's own sources."""
_PLACE = "{passage}"
"""Where a template takes its passage."""


class Passages(TurnSource):
    """Passages of text files, each put into a template that asks something about it.

    Theory: what a target writes is nearest to what its user will see where the prompts look like his. Where there are
    none yet, passages of text with usual instructions give prompts without a hub.

    Args:
        paths: files, directories and patterns; the running Python's own standard library when None.
        templates: what is asked, each with {passage} in it; they take turns.
        num_prompts: how many passages.
        length: characters of a passage at most; it begins and ends with a line.
        seed: of which passages are taken.
        chat: whether each prompt is a user's turn, by the target's chat template; the text as it is otherwise.
        system: what the model is told before the turn; what the template says by itself when None.
        max_prompt_tokens: longer prompts are left out.
    """

    def __init__(
        self,
        paths: str | list[str] | None = None,
        *,
        templates: Sequence[str] = TEMPLATES,
        num_prompts: int = 1000,
        length: int = 600,
        seed: int = 0,
        chat: bool = True,
        system: str | None = None,
        max_prompt_tokens: int = 512,
    ) -> None:
        super().__init__(chat=chat, system=system, max_prompt_tokens=max_prompt_tokens)
        self.paths = [paths] if isinstance(paths, str) else paths
        self.templates = list(templates)
        for template in self.templates:
            if _PLACE not in template:
                raise ValueError(f"the template {template!r} has no {_PLACE} in it: say where the passage goes")
        if not self.templates:
            raise ValueError(f"templates is an empty list: give one with {_PLACE} in it, or leave it out")
        self.num_prompts = require_int("num_prompts", num_prompts, 1)
        self.length = require_int("length", length, 1)
        self.seed = require_int("seed", seed, 0, 2**32 - 1)

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        files = find_texts(self.paths, max_bytes=None).files
        passages = [passage for file in files for passage in _passages(file.read().decode(), self.length)]
        what = "the standard library" if self.paths is None else ", ".join(self.paths)
        if len(passages) < self.num_prompts:
            raise ValueError(
                f"{what} has {len(passages)} passages of up to {self.length} characters, and num_prompts is "
                f"{self.num_prompts}: lower one of the two, or give more text"
            )
        taken = random.Random(self.seed).sample(passages, self.num_prompts)
        asked = [self.templates[i % len(self.templates)].replace(_PLACE, passage) for i, passage in enumerate(taken)]
        return self.encode_all(tokenizer, asked, what)

    def arguments(self) -> dict[str, Any]:
        names = ("paths", "templates", "num_prompts", "length", "seed")
        return {**{name: getattr(self, name) for name in names}, **super().arguments()}


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
