"""The verb `sweep`: every draft with every window beside standard decoding, the best, and how to decode so."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_specdec.cli.common import counted, find_prompts, load_decoder, log, progress, read_prompts, set_up_logs
from lightning_specdec.cli.options import (
    MeasureSettings,
    OutputSettings,
    Parser,
    PromptSettings,
    UsageError,
    add_decoding,
    add_models,
    chosen,
    decoding,
    pair_source,
    typed,
)
from lightning_specdec.config.decoding import MAX_TOKENS
from lightning_specdec.config.kinds import Choice
from lightning_specdec.config.models import PairSource
from lightning_specdec.config.settings import setting, setting_fields
from lightning_specdec.config.terminal import say

if TYPE_CHECKING:
    from lightning_specdec.bench.candidates import Candidate
    from lightning_specdec.bench.rows import Comparison

SUMMARY = "measure every draft with every window, say which decodes fastest"
EXAMPLES = """\
lightning_specdec sweep checkpoints/rnn.safetensors --max_new_tokens 7
lightning_specdec sweep --target ./llama --drafter EarlyExitDrafter --exit_layers 4 8 --batch_size 4
lightning_specdec sweep checkpoints/rnn.safetensors --temperature 1 --rule RejectionSampling --output json"""


@dataclass(frozen=True, kw_only=True)
class SweepSettings(OutputSettings):
    """What is measured."""

    num_draft_tokens: tuple[int, ...] = setting(
        (2, 4, 6, 8), "draft tokens per round", metavar="INT ...", minimum=1, maximum=MAX_TOKENS
    )
    exit_layers: tuple[int, ...] = setting(
        (), "exits of an early exit; default: every one", metavar="INT ...", minimum=1
    )
    drafts: tuple[str, ...] = setting((), "drafts of the checkpoint, by name; default: all", metavar="NAME ...")
    num_prompts: int = setting(4, "prompts of the models' own, where none are given", minimum=1)


def add_arguments(parser: Parser) -> None:
    """The flags of the verb."""
    add_models(parser)
    parser.add_settings("prompts", PromptSettings)
    add_decoding(parser, skip=("num_draft_tokens", "logprobs"), max_new_tokens=128)
    parser.add_settings("sweep", SweepSettings)
    parser.add_settings("measuring", MeasureSettings, repeats=5)


def run(options: Namespace) -> int:
    """Measure every draft with every window; 1 where one failed or gave other tokens."""
    set_up_logs(options)
    settings, measure = chosen(options, SweepSettings), chosen(options, MeasureSettings)
    config = decoding(options, num_draft_tokens=None)
    if not measure.repeats:
        raise ValueError("repeats must be at least 1, got 0")
    if settings.exit_layers and (choice := getattr(options, "drafter", None)) is not None:
        options.drafter = Choice(choice.name, {**choice.settings, "exit_layer": str(settings.exit_layers[0])})
    source, given = pair_source(options), read_prompts(chosen(options, PromptSettings))
    if source.draft is not None and settings.drafts:
        raise UsageError("--draft and --drafts exclude each other: give one of them")
    decoder = load_decoder(options, source)
    config = replace(config, rule=typed(config.rule, "rule"))
    if settings.drafts and not decoder.drafts:
        raise UsageError("--drafts are a checkpoint's, by their names: give --ckpt")
    from lightning_specdec.bench.candidates import candidates
    from lightning_specdec.bench.manifest import made_on, manifest
    from lightning_specdec.bench.measure import best, windows_of
    from lightning_specdec.bench.table import comparison_table

    named = [source.draft] if source.draft is not None and decoder.drafts else list(settings.drafts) or None
    drafters = candidates(decoder, named, settings.exit_layers or None)
    found = [tokens for _, tokens in find_prompts(decoder, given, raw="raw" in options)]
    prompts = found[: settings.num_prompts] if given is None else found
    total = 0
    for name, each in drafters.items():
        most = each.drafter.max_draft_tokens
        if most is not None and max(settings.num_draft_tokens) > most:
            log.warning("%s drafts at most %d tokens per round: larger windows are left out", name, most)
        total += len(windows_of(most, settings.num_draft_tokens))
    measured: list[Comparison] = []
    interrupted = False
    try:
        progress(f"measuring {counted(total, 'row')} ...")
        for row in decoder.sweep(
            prompts,
            config,
            drafters={name: candidate.drafter for name, candidate in drafters.items()},
            windows=settings.num_draft_tokens,
            repeats=measure.repeats,
            batch_size=measure.batch_size,
        ):
            measured.append(row)
            progress(f"{len(measured)} of {total}: {row}")
    except KeyboardInterrupt:
        interrupted = True
    top, command = best(measured), None
    if top is not None:
        command = decode_command(options, source, drafters[str(top.case.draft)], top.case.num_draft_tokens)
    used = {**source.to_dict(), **config.to_dict(), **measure.to_dict(), **settings.to_dict()}
    made_by = manifest(options=used, checkpoint=source.ckpt, device=decoder.target.device)
    if settings.output == "json":
        place = next((i for i, row in enumerate(measured) if row is top), None)
        table = {"rows": [row.summary() for row in measured], "best": place, "command": command}
        say(json.dumps({**table, "interrupted": interrupted, "manifest": made_by}))
    else:
        mark = comparison_table(measured, remark=lambda row: "<- best" if row is top else "")
        say(mark if measured else "nothing was measured")
        if top is not None and top.walltime_speedup is not None:
            speedup = top.walltime_speedup.value
            wins = f"is {speedup:.2f} times as fast as standard decoding"
            if speedup <= 1:
                wins = f"is the fastest of these, and slower than standard decoding ({speedup:.2f} times as fast)"
            say(f"\n{top.case.draft} with {top.case.num_draft_tokens} draft tokens {wins}:\n  {command}")
        several = f"the first {len(prompts)} of {counted(len(found), 'prompt')}"
        several = several if len(prompts) < len(found) else counted(len(prompts), "prompt")
        new = f"{config.max_new_tokens} new tokens, batch {measure.batch_size}, {counted(measure.repeats, 'repeat')}"
        say(f"\n{several}, {new},\n{made_on(made_by)}")
    different = [row for row in measured if row.same_tokens is False]
    dtype = str(next(decoder.target.parameters()).dtype).removeprefix("torch.")
    for row in different:
        prompt, token = next(each.differs_at for each in row.rows if each.differs_at)
        where = f"from token {token + 1} of prompt {prompt} on, in {dtype}"
        say(f"error: {row.case.label} gave other tokens than standard decoding, {where}", file=sys.stderr)
    if interrupted:
        say("interrupted: what is above was measured by then", file=sys.stderr)
        return 130
    return 1 if different or any(row.error for row in measured) else 0


def decode_command(
    options: Namespace, source: PairSource, candidate: Candidate, num_draft_tokens: int | str | None
) -> str:
    """The command that decodes as a row was measured: the sweep's own flags, the draft, the window."""
    words = ["lightning_specdec", "decode"]
    left_out = {each.name for each in setting_fields(SweepSettings)} | {"repeats", "MODEL", "debug", "quiet", "verbose"}
    values = {**source.to_dict(), **{key: value for key, value in vars(options).items() if key not in left_out}}
    choices: dict[str, Choice] = {name: value for name, value in values.items() if isinstance(value, Choice)}
    if candidate.exit_layer is not None:
        choices["drafter"] = Choice("EarlyExitDrafter", {"exit_layer": candidate.exit_layer})
    for name, value in values.items():
        if value in (None, False, ()) or name in ("drafter", *choices) or (name, value) == ("device", "cpu"):
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [f"--{name}"] if each is True else [f"--{name}", str(each)]
    if candidate.draft is not None and source.draft is None:
        words += ["--draft", candidate.draft]
    for name, choice in choices.items():
        words += [f"--{name}", choice.name]
        words += [word for key, each in choice.settings.items() for word in (f"--{name}.{key}", str(each))]
    return shlex.join([*words, "--num_draft_tokens", str(num_draft_tokens)])
