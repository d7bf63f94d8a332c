"""Prompts by domain: the prompts that ship and those of files, as a target reads them."""

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
    """The prompts that ship, not encoded.

    Args:
        domains: domains to return; `TEXTS` if None.

    Raises:
        ValueError: there is no such domain.
    """
    check_domains(domains or (), (*TEXTS, SEQUENCES), "the prompts that ship")
    home = Path(__file__).parent / "sets"
    prompts = []
    for domain in domains or TEXTS:
        prompts += read_prompts(home / f"{domain}.jsonl")
    return prompts


def by_domain(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer | None,
    domains: Sequence[str] | None = None,
) -> dict[str, list[Prompt]]:
    """Prompts by domain as a target reads them.

    Text is encoded. A target without a tokenizer reads prompts of integers.

    A set of integers alone may be the tokens of any target. Next to text, they are for a target
    without a tokenizer.

    Args:
        prompts: text or tokens.
        tokenizer: the target's tokenizer.
        domains: domains to return, in this order; all if None.

    Raises:
        ValueError: a domain has no prompts, two prompts have the same id, or the target reads none
            of them.
    """
    all_domains = list(dict.fromkeys(prompt.domain for prompt in prompts))
    check_domains(domains or (), all_domains, "the prompts")
    if domains:
        prompts = [prompt for prompt in prompts if prompt.domain in domains]
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise ValueError("two prompts have the same id: give each a different one")

    prompts_by_domain: dict[str, list[Prompt]] = {domain: [] for domain in domains or ()}
    for prompt in _readable(prompts, tokenizer):
        prompts_by_domain.setdefault(prompt.domain, []).append(prompt)

    unreadable = [domain for domain, readable in prompts_by_domain.items() if not readable]
    if not prompts_by_domain:
        unreadable = [prompts[0].domain]
    if unreadable:
        raise ValueError(
            f"this target cannot read the prompts of {unreadable[0]}: text needs a tokenizer, "
            f"{SEQUENCES} none"
        )
    return prompts_by_domain


def check_domains(domains: Sequence[str], available: Sequence[str], source: str) -> None:
    """Raise ValueError if a domain has no prompts."""
    for domain in domains:
        if domain not in available:
            raise ValueError(
                f"{domain!r} is no domain of {source}: choose from {', '.join(available)}"
            )


def _readable(prompts: Sequence[Prompt], tokenizer: Tokenizer | None) -> list[Prompt]:
    """The prompts that a target can read: encoded texts, or else prompts of integers."""
    if tokenizer is not None:
        texts = [prompt.encoded(tokenizer) for prompt in prompts if prompt.text is not None]
        if texts:
            return texts
    return [prompt for prompt in prompts if prompt.text is None]
