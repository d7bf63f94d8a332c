"""The verb `prompts`: build the set of prompts that is measured, and say how long they are.

Takes its parsed options and gives an exit code.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from lightning_specdec.bench.prompts import sources as prompt_sources
from lightning_specdec.bench.prompts.dataset import PromptDataset, check_output
from lightning_specdec.cli_common import counted, set_up_logs
from lightning_specdec.terminal import say
from lightning_specdec.text.named import named_tokenizer

SIZES = {"full": 50, "tiny": 5}
"""Prompts of each domain."""


def prompts(options: Namespace) -> int:
    """Build a prompt set; the parser lets no other action through."""
    set_up_logs(options.log_level, json_lines=options.log_json)
    output = Path(options.output).expanduser()
    check_output(output)
    built = prompt_sources.build(
        None if options.tokenizer is None else named_tokenizer(options.tokenizer),
        sources=options.source or (),
        domains=options.domains,
        num_prompts=SIZES[options.size] if options.num_prompts is None else options.num_prompts,
        seed=options.seed,
        raw=options.raw,
    )
    built.save(output)
    say(f"{output}: {counted(len(built), 'prompt')}, sha256 {built.sha256}")
    say(_table(built, built.recipe["sources"]))
    return 0


def _table(built: PromptDataset, origins: dict[str, str]) -> str:
    """How many prompts there are of each domain, and how many tokens they have."""
    rows = [("domain", "n", "min", "mean", "max", "tokens, from")]
    for domain in built.domains:
        counts = [prompt.num_tokens for prompt in built.by_domain(domain)]
        rows.append((domain, *_summary(counts), origins[domain]))
    if len(built.domains) > 1:
        rows.append(("all", *_summary([prompt.num_tokens for prompt in built]), ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers, origin in rows:
        shown = "  ".join(f"{number:>{width}}" for number, width in zip(numbers, widths[1:-1], strict=True))
        lines.append(f"{name:<{widths[0]}}  {shown}  {origin}".rstrip())
    return "\n".join(lines)


def _summary(counts: Sequence[int]) -> tuple[str, str, str, str]:
    return str(len(counts)), str(min(counts)), f"{sum(counts) / len(counts):.1f}", str(max(counts))
