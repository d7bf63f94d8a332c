"""The verb `sweep`: measure every draft with every window, and show how to use the fastest."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_specdec.cli.common import Loaded, counted, load, progress
from lightning_specdec.cli.options import (
    MeasureSettings,
    OutputSettings,
    Parser,
    PromptSettings,
    chosen,
    decoding,
)
from lightning_specdec.config.decoding import MAX_TOKENS, DecodingConfig
from lightning_specdec.config.kinds import DRAFTERS, Choice
from lightning_specdec.config.settings import setting, setting_fields
from lightning_specdec.config.terminal import say

if TYPE_CHECKING:
    from lightning_specdec.bench.candidates import Candidate
    from lightning_specdec.bench.records import Comparison

SUMMARY = "measure every draft with every window and mark the fastest"
EXAMPLES = """\
lightning_specdec sweep checkpoints/rnn.safetensors --max_new_tokens 7
lightning_specdec sweep --target ./llama --draft ./small-llama --batch_size 4
lightning_specdec sweep checkpoints/rnn.safetensors --temperature 1 --rule RejectionSampling"""


@dataclass(frozen=True, kw_only=True)
class SweepSettings(OutputSettings):
    """What is measured."""

    num_draft_tokens: tuple[int, ...] = setting(
        (2, 4, 6, 8), "draft tokens per round", metavar="INT ...", minimum=1, maximum=MAX_TOKENS
    )
    drafts: tuple[str, ...] = setting(
        (), "drafts of the checkpoint, by name; default: all", metavar="NAME ..."
    )
    num_prompts: int = setting(
        4, "how many of the models' own prompts to use if none are given", minimum=1
    )


def add_arguments(parser: Parser) -> None:
    parser.add_models()
    parser.add_settings("Prompt", PromptSettings)
    parser.add_decoding(skip=("num_draft_tokens", "logprobs"), max_new_tokens=128)
    parser.add_settings("Measure", MeasureSettings, repeats=5)
    parser.add_settings("Output", SweepSettings)


def run(options: Namespace) -> int:
    """Measure every draft with every window; returns 1 if one failed or produced other tokens."""
    settings = chosen(options, SweepSettings)
    measure = chosen(options, MeasureSettings)
    config = decoding(options, num_draft_tokens=None)
    loaded = load(options, num_own=settings.num_prompts)
    # Imported here because torch takes a second.
    from lightning_specdec.bench.manifest import made_on
    from lightning_specdec.bench.table import comparison_table
    from lightning_specdec.bench.verdict import choose, ranked

    candidates = _candidates(loaded, settings)
    comparisons, interrupted = _measure(loaded, config, settings, measure, candidates)
    choice = choose(comparisons)
    command = None
    if choice.best is not None:
        best_case = choice.best.case
        candidate = candidates[str(best_case.draft)]
        command = decode_command(options, candidate, best_case.num_draft_tokens)

    manifest = loaded.manifest(config, measure, settings)
    if settings.output == "json":
        best_index = None if choice.best is None else comparisons.index(choice.best)
        document = {
            "rows": [comparison.summary() for comparison in comparisons],
            "best": best_index,
            "command": command,
            "interrupted": interrupted,
            "manifest": manifest,
        }
        say(json.dumps(document))
    else:
        say(comparison_table(ranked(comparisons), remark=choice.remark))
        if command is not None:
            say(f"\n{command if choice.is_proven else choice.text}\n")
        num_prompts = counted(len(loaded.prompts), "prompt")
        say(f"{num_prompts}, batch size {measure.batch_size}, {made_on(manifest)}")

    if interrupted:
        if comparisons:
            say("interrupted: what is above was measured by then", file=sys.stderr)
        else:
            say("interrupted before anything was measured", file=sys.stderr)
        return 130
    has_failures = any(
        comparison.error or comparison.same_tokens is False for comparison in comparisons
    )
    return 1 if has_failures else 0


def _candidates(loaded: Loaded, settings: SweepSettings) -> dict[str, Candidate]:
    """The drafters to measure, by name: the one that the flags name, or all of the checkpoint."""
    from lightning_specdec.bench.candidates import Candidate, candidates

    source = loaded.source
    drafter = loaded.decoder.drafter
    if source.draft is not None:
        return {str(source.draft): Candidate(drafter)}
    if source.drafter is not None:
        return {DRAFTERS.name_of(type(drafter)): Candidate(drafter)}
    return candidates(loaded.decoder, settings.drafts or None)


def _measure(
    loaded: Loaded,
    config: DecodingConfig,
    settings: SweepSettings,
    measure: MeasureSettings,
    candidates: dict[str, Candidate],
) -> tuple[list[Comparison], bool]:
    """Measure all candidates; returns the comparisons, and whether Ctrl-C ended it early."""
    comparisons: list[Comparison] = []
    try:
        for comparison in loaded.decoder.sweep(
            loaded.prompts,
            config,
            drafters={name: candidate.drafter for name, candidate in candidates.items()},
            windows=settings.num_draft_tokens,
            repeats=measure.repeats or 0,
            batch_size=measure.batch_size,
        ):
            comparisons.append(comparison)
            finding = comparison.error or comparison.verdict.text
            progress(f"{comparison.case.label}: {finding}")
    except KeyboardInterrupt:
        return comparisons, True
    return comparisons, False


def decode_command(
    options: Namespace, candidate: Candidate, num_draft_tokens: int | str | None
) -> str:
    """The command that decodes like a measured row: the sweep's own flags, its draft and window."""
    sweep_only = {field.name for field in setting_fields(SweepSettings)} | {"MODEL", "repeats"}
    flags: dict[str, Any] = {
        name: value for name, value in vars(options).items() if name not in sweep_only
    }
    if candidate.draft is not None:
        flags["draft"] = candidate.draft
    if candidate.exit_layer is not None:
        flags["drafter"] = Choice("EarlyExitDrafter", {"exit_layer": candidate.exit_layer})
    flags["num_draft_tokens"] = num_draft_tokens

    words = ["lightning_specdec", "decode"]
    for name, value in flags.items():
        words += _flag_words(name, value)
    return shlex.join(words)


def _flag_words(name: str, value: Any) -> list[str]:
    """The words of a flag on the command line."""
    if value is True:
        return [f"--{name}"]
    if isinstance(value, list):
        words = []
        for item in value:
            words += _flag_words(name, item)
        return words
    if isinstance(value, Choice):
        words = [f"--{name}", value.name]
        for field_name, field_value in value.settings.items():
            words += [f"--{name}.{field_name}", str(field_value)]
        return words
    return [f"--{name}", str(value)]
