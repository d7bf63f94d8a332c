"""Prompts by domain: those that ship, and those of files, as a target reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from lightning_specdec.data.prompts.prompt import Prompt, read_prompts
from lightning_specdec.text.tokenizer import Tokenizer

SEQUENCES = "sequences"
TEXTS = ("code", "conversation", "summarization")
"""The domains of text that ship."""


def shipped_prompts(domains: Sequence[str] | None = None) -> list[Prompt]:
    """The prompts that ship, not encoded: of these domains, or of `TEXTS`.

    Raises:
        ValueError: there is no such domain.
    """
    check_domains(domains or (), (*TEXTS, SEQUENCES), "the prompts that ship")
    home = Path(__file__).parent / "sets"
    return [prompt for domain in domains or TEXTS for prompt in read_prompts(home / f"{domain}.jsonl")]


def some(prompts: Sequence[Prompt], number: int) -> list[Prompt]:
    """So many prompts of each domain at most, in their order; their ids decide which."""
    by_hash = sorted(prompts, key=lambda prompt: hashlib.sha256(f"0 {prompt.id}".encode()).hexdigest())
    kept = {
        prompt.id
        for domain in {prompt.domain for prompt in prompts}
        for prompt in [each for each in by_hash if each.domain == domain][:number]
    }
    return [prompt for prompt in prompts if prompt.id in kept]


def by_domain(
    prompts: Sequence[Prompt], tokenizer: Tokenizer | None, domains: Sequence[str] | None = None
) -> dict[str, list[Prompt]]:
    """Prompts by domain as a target reads them: texts as its tokens, or, where it has no tokenizer, the integers.

    Integers alone may be the tokens of any target; beside texts they are for one without a tokenizer.

    Args:
        prompts: text or tokens.
        tokenizer: of the target.
        domains: those wanted, in their order; all when None.

    Raises:
        ValueError: a domain has no prompts or mixes text and integers, an id is there twice, or the target reads none.
    """
    check_domains(domains or (), list(dict.fromkeys(prompt.domain for prompt in prompts)), "the prompts")
    wanted = [prompt for prompt in prompts if not domains or prompt.domain in domains]
    if len({prompt.id for prompt in wanted}) < len(wanted):
        raise ValueError("two prompts have the same id: give each an id of its own")
    texts = [prompt for prompt in wanted if prompt.text is not None]
    integers = [prompt for prompt in wanted if prompt.text is None]
    if mixed := {prompt.domain for prompt in texts} & {prompt.domain for prompt in integers}:
        raise ValueError(f"domain {min(mixed)} holds text and integers: give each a domain of its own")
    if tokenizer is None and not integers:
        raise ValueError(f"the prompts are all text, and this target has no tokenizer: choose prompts of {SEQUENCES}")
    read = integers if tokenizer is None or not texts else [prompt.encoded(tokenizer) for prompt in texts]
    names = domains or dict.fromkeys(prompt.domain for prompt in read)
    found = {domain: [prompt for prompt in read if prompt.domain == domain] for domain in names}
    if empty := [domain for domain, several in found.items() if not several]:
        raise ValueError(f"this target cannot read the prompts of {empty[0]}: leave that domain out")
    return found


def check_domains(wanted: Sequence[str], there: Sequence[str], where: str) -> None:
    """Raise ValueError for a domain without prompts."""
    for domain in wanted:
        if domain not in there:
            raise ValueError(f"{domain!r} is no domain of {where}: choose from {', '.join(there)}")
