"""Sets of prompts by domain, as what is measured is given them, and as files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_specdec.bench.prompts.lines import json_lines
from lightning_specdec.bench.prompts.prompt import Prompt, Wording
from lightning_specdec.files import replaced
from lightning_specdec.text.base import Tokenizer

SEQUENCES = "sequences"
DOMAINS = ("code", "conversation", "summarization", SEQUENCES)
"""What a prompt may be about; a file may bring others."""
FORMAT = 1
_FORMAT_KEY = "prompt_set"
"""What the first line of a prompt set says its format under, and is known by."""
_LONGEST_FIRST_LINE = 2**20


@dataclass(frozen=True)
class PromptDataset:
    """Prompts of one or more domains, under one name: their sha256.

    Args:
        prompts: in the order in which they are measured.
        tokenizer: whose tokens they are, as `text.named.named_tokenizer` finds it; None if none of them is text.
        fingerprint: of that tokenizer.
        raw: text is given to models as it is, without the chat template that goes round it otherwise.
        recipe: how the prompts were chosen, as plain values.

    Raises:
        ValueError: there is no prompt, an empty one, one id twice, or text and integers in one domain.
    """

    prompts: tuple[Prompt, ...]
    tokenizer: str | None = None
    fingerprint: str | None = None
    raw: bool = False
    recipe: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids: set[str] = set()
        firsts: dict[str, Prompt] = {}
        for prompt in self.prompts:
            if prompt.id in ids:
                raise ValueError(f"two prompts are called {prompt.id!r}: give each an id of its own")
            if not prompt.tokens:
                raise ValueError(f"prompt {prompt.id!r} is empty: give it a token at least, or leave it out")
            first = firsts.setdefault(prompt.domain, prompt)
            if (first.text is None) != (prompt.text is None):
                text, integers = (first, prompt) if prompt.text is None else (prompt, first)
                raise ValueError(
                    f"domain {prompt.domain} holds text ({text.id!r}) and integers ({integers.id!r}): give each a "
                    "domain of its own"
                )
            ids.add(prompt.id)
        if not self.prompts:
            raise ValueError("there is no prompt: a prompt set holds one at least")

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains that have prompts, in the order of their first ones."""
        return tuple(dict.fromkeys(prompt.domain for prompt in self.prompts))

    def by_domain(self, domain: str) -> list[Prompt]:
        """The prompts of a domain.

        Raises:
            ValueError: it has none.
        """
        found = [prompt for prompt in self.prompts if prompt.domain == domain]
        if not found:
            raise ValueError(missing(domain, self.domains, "the prompt set"))
        return found

    @property
    def sha256(self) -> str:
        """Of the prompts as they are written, a line each: `tail -n +2 FILE | sha256sum` gives it too."""
        return hashlib.sha256(self._lines()).hexdigest()

    def _lines(self) -> bytes:
        return b"".join(_line(prompt.to_dict()) for prompt in self.prompts)

    @classmethod
    def encode(
        cls,
        wordings: Sequence[Wording | Prompt],
        tokenizer: Tokenizer | None,
        *,
        raw: bool = False,
        recipe: dict[str, Any] | None = None,
    ) -> PromptDataset:
        """The tokens of texts; what has tokens already stays as it is.

        Args:
            wordings: the prompts.
            tokenizer: for texts.
            raw: leave the chat template out; it goes round each text where the tokenizer has one otherwise.
            recipe: how the prompts were chosen.

        Raises:
            ValueError: there is text and no tokenizer, or the prompts are no prompt set.
        """
        texts = [each for each in wordings if isinstance(each, Wording)]
        if texts and tokenizer is None:
            raise ValueError(
                f"prompts of {texts[0].domain} are text: name the tokenizer that they are for, as --tokenizer gpt2 "
                "(a directory, a name on the hub, or bytes)"
            )
        prompts = []
        for each in wordings:
            if isinstance(each, Wording):
                assert tokenizer is not None
                each = each.encoded(tokenizer, raw=raw)
            prompts.append(each)
        used = tokenizer if texts else None
        name, fingerprint = (None, None) if used is None else (used.name, used.fingerprint)
        return cls(tuple(prompts), name, fingerprint, raw, recipe or {})

    def of(self, domains: Sequence[str]) -> PromptDataset:
        """The prompts of these domains, in their order.

        Raises:
            ValueError: one of them has none.
        """
        return replace(self, prompts=tuple(prompt for domain in domains for prompt in self.by_domain(domain)))

    def for_tokenizer(self, tokenizer: Tokenizer | None) -> PromptDataset:
        """What a target with that tokenizer can read, or one without: the texts as its tokens, or the integers.

        The set itself where it is that already. Integers alone may be the tokens of any target; beside texts they are
        for another one.

        Raises:
            ValueError: there is text alone, and no tokenizer.
        """
        texts, integers = ([each for each in self.prompts if (each.text is None) is none] for none in (False, True))
        if not texts:
            return self
        if tokenizer is None:
            if not integers:
                raise ValueError(
                    f"the prompts are all text, and this target has no tokenizer: choose prompts of {SEQUENCES}"
                )
            return replace(self, prompts=tuple(integers), tokenizer=None, fingerprint=None)
        if tokenizer.fingerprint != self.fingerprint:
            wordings = [prompt.wording for prompt in texts]
            return self.encode(wordings, tokenizer, raw=self.raw, recipe=self.recipe)
        return replace(self, prompts=tuple(texts)) if integers else self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the prompt set, whole or not at all, over nothing but another prompt set.

        Raises:
            ValueError: something else is there.
        """
        path = Path(path).expanduser()
        check_output(path)
        first = {
            _FORMAT_KEY: FORMAT,
            "sha256": self.sha256,
            "num_prompts": len(self),
            "tokenizer": self.tokenizer,
            "fingerprint": self.fingerprint,
            "raw": self.raw,
            "recipe": self.recipe,
        }
        with replaced(path) as file:
            file.write(_line(first) + self._lines())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PromptDataset:
        """A prompt set that `save` wrote.

        Raises:
            ValueError: there is none, or it is not as it was written.
        """
        path = Path(path).expanduser()
        rows = json_lines(path, "`lightning_specdec prompts build` writes one")
        _, first = next(rows, (0, {}))
        if _FORMAT_KEY not in first:
            for _ in rows:  # a line that is no JSON is named first
                pass
        if first.get(_FORMAT_KEY) != FORMAT:
            version = "of another version" if _FORMAT_KEY in first else "none"
            raise ValueError(
                f"{path} should be a prompt set and is {version}: `lightning_specdec prompts build --source {path} "
                "--output NEW` makes one of a file of prompts"
            )
        prompts = tuple(Prompt.from_dict(f"{path}, line {number}", values) for number, values in rows)
        named = {key: first.get(key) for key in ("tokenizer", "fingerprint")}
        try:
            found = cls(prompts, **named, raw=bool(first.get("raw")), recipe=first.get("recipe") or {})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if found.sha256 != first.get("sha256"):
            raise ValueError(f"the prompts of {path} are not those that its first line names: build it again")
        return found


def is_set(first: object) -> bool:
    """Whether a file whose first line says this is a prompt set, of whatever version."""
    return isinstance(first, dict) and _FORMAT_KEY in first


def check_output(path: Path) -> None:
    """Raise ValueError where a prompt set must not be written."""
    if not path.exists():
        return
    first: Any = None
    if path.is_file():  # a device has no end
        try:
            with path.open("rb") as file:
                first = json.loads(file.readline(_LONGEST_FIRST_LINE))
        except (OSError, ValueError, RecursionError):
            pass
    if not is_set(first):
        raise ValueError(f"{path} is kept as it is, for it is no prompt set: choose another --output")


def missing(domain: str, there: Sequence[str], where: str) -> str:
    """Why there are no prompts of a domain: it is empty, or unknown."""
    listed = ", ".join(there)
    if domain in DOMAINS:
        return f"{where} has no prompt of {domain}: choose from {listed}"
    return f"{domain!r} is no domain of {where}: choose from {listed}"


def _line(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, ensure_ascii=False) + "\n").encode("utf-8")
