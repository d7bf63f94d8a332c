"""Prompts by domain: those that ship, and those of files, as a target reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_specdec.text.prompts import Prompt as Prompt
from lightning_specdec.text.prompts import read_prompts as read_prompts
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
    return [
        prompt for domain in domains or TEXTS for prompt in read_prompts(home / f"{domain}.jsonl")
    ]


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
        ValueError: a domain has no prompts, an id is there twice, or the target reads none.
    """
    check_domains(
        domains or (), list(dict.fromkeys(prompt.domain for prompt in prompts)), "the prompts"
    )
    wanted = [prompt for prompt in prompts if not domains or prompt.domain in domains]
    if len({prompt.id for prompt in wanted}) < len(wanted):
        raise ValueError("two prompts have the same id: give each a different one")
    texts = (
        []
        if tokenizer is None
        else [each.encoded(tokenizer) for each in wanted if each.text is not None]
    )
    read = texts or [prompt for prompt in wanted if prompt.text is None]
    found = {
        name: [each for each in read if each.domain == name]
        for name in domains or [each.domain for each in read]
    }
    if not found or not all(found.values()):
        domain = next((name for name, several in found.items() if not several), wanted[0].domain)
        raise ValueError(
            f"this target cannot read the prompts of {domain}: text needs a tokenizer, {SEQUENCES} none"
        )
    return found


def check_domains(wanted: Sequence[str], there: Sequence[str], where: str) -> None:
    """Raise ValueError for a domain without prompts."""
    for domain in wanted:
        if domain not in there:
            raise ValueError(f"{domain!r} is no domain of {where}: choose from {', '.join(there)}")
