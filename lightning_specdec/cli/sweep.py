"""The verb `sweep`: every draft with every window beside standard decoding, the best, and how to decode so."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_specdec.cli.common import counted, load, progress
from lightning_specdec.cli.options import (
    MeasureSettings,
    OutputSettings,
    Parser,
    PromptSettings,
    chosen,
    decoding,
)
from lightning_specdec.config.decoding import MAX_TOKENS
from lightning_specdec.config.kinds import DRAFTERS, Choice
from lightning_specdec.config.settings import setting, setting_fields
from lightning_specdec.config.terminal import say

if TYPE_CHECKING:
    from lightning_specdec.bench.candidates import Candidate
    from lightning_specdec.bench.rows import Comparison

SUMMARY = "measure every draft with every window and mark the fastest"
EXAMPLES = """\
lightning_specdec sweep checkpoints/rnn.safetensors --max_new_tokens 7
lightning_specdec sweep --target ./llama --draft ./small-llama --batch_size 4
lightning_specdec sweep checkpoints/rnn.safetensors --temperature 1 --rule RejectionSampling --output json"""


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
    """Measure every draft with every window; 1 where one failed or gave other tokens."""
    settings, measure = chosen(options, SweepSettings), chosen(options, MeasureSettings)
    config = decoding(options, num_draft_tokens=None)
    loaded = load(options, num_own=settings.num_prompts)
    source, decoder, _, prompts = loaded
    from lightning_specdec.bench.candidates import Candidate, candidates
    from lightning_specdec.bench.manifest import made_on
    from lightning_specdec.bench.measure import best, ranked
    from lightning_specdec.bench.table import comparison_table, interval

    if source.drafter is not None or source.draft is not None:
        drafters = {
            str(source.draft or DRAFTERS.name_of(type(decoder.drafter))): Candidate(decoder.drafter)
        }
    else:
        drafters = candidates(decoder, settings.drafts or None)
    measured: list[Comparison] = []
    interrupted = False
    try:
        for row in decoder.sweep(
            prompts,
            config,
            drafters={name: candidate.drafter for name, candidate in drafters.items()},
            windows=settings.num_draft_tokens,
            repeats=measure.repeats or 0,
            batch_size=measure.batch_size,
        ):
            measured.append(row)
            told = row.error or (
                row.walltime_speedup and f"{interval(row.walltime_speedup)} times as fast"
            )
            progress(f"{row.case.label}: {told or 'no speedup'}")
    except KeyboardInterrupt:
        interrupted = True
    top, command = best(measured), None
    if top is not None:
        command = decode_command(options, drafters[str(top.case.draft)], top.case.num_draft_tokens)
    made = loaded.manifest(config, measure, settings)
    if settings.output == "json":
        place = None if top is None else measured.index(top)
        table = {"rows": [row.summary() for row in measured], "best": place, "command": command}
        say(json.dumps({**table, "interrupted": interrupted, "manifest": made}))
    else:
        speedup = None if top is None else top.walltime_speedup
        faster = speedup is not None and speedup.value > 1
        others = [
            each.walltime_speedup
            for each in measured
            if each is not top and each.same_tokens is not False
        ]
        close = any(each and speedup and not each.high < speedup.low for each in others)
        mark = "<- best" + ", others may be as fast" * close
        say(
            comparison_table(
                ranked(measured), remark=lambda row: mark if row is top and faster else ""
            )
        )
        say(
            f"\n{command if faster else 'nothing here is faster than standard decoding'}\n"
            if command
            else ""
        )
        say(f"{counted(len(prompts), 'prompt')}, batch size {measure.batch_size}, {made_on(made)}")
    if interrupted:
        how_far = (
            ": what is above was measured by then" if measured else " before anything was measured"
        )
        say(f"interrupted{how_far}", file=sys.stderr)
        return 130
    return int(any(row.error or row.same_tokens is False for row in measured))


def decode_command(
    options: Namespace, candidate: Candidate, num_draft_tokens: int | str | None
) -> str:
    """The command that decodes as a row was measured: the sweep's own flags, the draft, the window."""
    left_out = {each.name for each in setting_fields(SweepSettings)}
    given = {
        name: value
        for name, value in vars(options).items()
        if name not in left_out | {"MODEL", "repeats"}
    }
    if candidate.draft is not None:
        given["draft"] = candidate.draft
    if candidate.exit_layer is not None:
        given["drafter"] = Choice("EarlyExitDrafter", {"exit_layer": candidate.exit_layer})
    words = ["lightning_specdec", "decode"]
    for name, value in {**given, "num_draft_tokens": num_draft_tokens}.items():
        for each in value if isinstance(value, list) else [value]:
            words += (
                [f"--{name}"] if each is True else [f"--{name}", getattr(each, "name", str(each))]
            )
        if isinstance(value, Choice):
            words += [
                word
                for key, each in value.settings.items()
                for word in (f"--{name}.{key}", str(each))
            ]
    return shlex.join(words)
