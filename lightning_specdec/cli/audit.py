"""The verb `audit`: is the output the target's own? Findings as tables, and what they come to."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lightning_specdec.cli.common import counted, find_prompts, load_decoder, progress, read_prompts, set_up_logs
from lightning_specdec.cli.options import (
    MeasureSettings,
    OutputSettings,
    Parser,
    PromptSettings,
    add_models,
    chosen,
    pair_source,
)
from lightning_specdec.config.decoding import MAX_TOKENS, SamplingSettings
from lightning_specdec.config.kinds import RULES
from lightning_specdec.config.settings import setting, setting_fields
from lightning_specdec.config.terminal import say

if TYPE_CHECKING:
    from lightning_specdec.audit.auditor import Auditor
    from lightning_specdec.audit.findings import Audit, Finding
    from lightning_specdec.decoder import SpeculativeDecoder
    from lightning_specdec.drafters import Drafter

SUMMARY = "check that the output is the target's: every draft, rule and sampling, beside biased rules"
EXAMPLES = """\
lightning_specdec audit checkpoints/rnn.safetensors
lightning_specdec audit --target ./llama --draft ./small-llama --rules ExactMatch --temperatures 0 0.8
Exit code 1 when something that should be lossless is not, or could not be checked."""
USUAL = (SamplingSettings(), SamplingSettings(1.0), SamplingSettings(0.7, top_p=0.9))
"""What is audited where nothing is said about sampling."""


@dataclass(frozen=True, kw_only=True)
class AuditSettings(OutputSettings):
    """What is checked, and how closely."""

    drafts: tuple[str, ...] = setting((), "drafts of the checkpoint, by name; default: all", metavar="NAME ...")
    rules: tuple[str, ...] = setting((), "rules, by name; default: all", metavar="NAME ...")
    temperatures: tuple[float, ...] = setting(
        (), "temperatures, 0 is greedy; default: 0, 1, and 0.7 with top_p 0.9", metavar="NUMBER ...", minimum=0
    )
    num_draft_tokens: int = setting(3, "draft tokens per round", minimum=1, maximum=MAX_TOKENS)
    num_prompts: int = setting(4, "prompts of the models' own, where none are given", minimum=1)
    max_new_tokens: int = setting(32, "new tokens where outputs are compared", minimum=1, maximum=MAX_TOKENS)
    num_places: int = setting(3, "places where one round is enumerated", minimum=1, maximum=MAX_TOKENS)
    seed: int = setting(0, "seed of all draws", minimum=0, maximum=2**63 - 1)


def add_arguments(parser: Parser) -> None:
    """The flags of the verb."""
    add_models(parser)
    parser.add_settings("prompts", PromptSettings)
    parser.add_settings("audit", AuditSettings)
    parser.add_settings("with each temperature", SamplingSettings, skip=("temperature",))
    parser.add_settings("machine", MeasureSettings, only=("threads",))


def run(options: Namespace) -> int:
    """Check every draft, rule and sampling; 1 where something that should be lossless is not."""
    set_up_logs(options)
    settings, source = chosen(options, AuditSettings), pair_source(options)
    given, plain = read_prompts(chosen(options, PromptSettings)), _samplings(options, settings)
    for name in settings.rules:
        RULES.check(name)
    decoder = load_decoder(options, source)
    from lightning_specdec.bench.manifest import made_on, manifest
    from lightning_specdec.rules import Sampling

    rules = {name: RULES.load(name) for name in settings.rules or RULES}
    samplings = {label(each): Sampling.of(each) for each in plain}
    found = [tokens for _, tokens in find_prompts(decoder, given, raw="raw" in options)]
    auditor = decoder.audit(
        found[: settings.num_prompts] if given is None else found,
        drafts=_drafts(decoder, settings, own=source.draft is None and source.drafter is None),
        rules={name: rules[name]() for name in sorted(rules, key=lambda name: not rules[name].lossless)},
        samplings=samplings,
        num_draft_tokens=settings.num_draft_tokens,
        max_new_tokens=settings.max_new_tokens,
        num_places=settings.num_places,
        seed=settings.seed,
    )
    interrupted = False
    try:
        auditor.run(tell=progress)
    except KeyboardInterrupt:
        interrupted = True
    outcome = auditor.audit
    made = manifest(
        options={**source.to_dict(), **settings.to_dict()}, checkpoint=source.ckpt, device=decoder.target.device
    )
    if settings.output == "json":
        values = outcome.to_dict()
        values["passed"] &= not interrupted
        say(json.dumps({**values, "interrupted": interrupted, "manifest": made}))
    else:
        say(report(auditor, made_on(made), interrupted=interrupted))
    for finding in outcome.failures:
        say(f"error: {', '.join(finding.cell)}: {finding.verdict}: {told(finding)}", file=sys.stderr)
    if interrupted:
        say("interrupted: what is above was checked by then", file=sys.stderr)
    return 130 if interrupted else 1 if outcome.failures else 0


def _drafts(decoder: SpeculativeDecoder, settings: AuditSettings, *, own: bool) -> Mapping[str, Drafter]:
    """The drafters by the names of the tables."""
    if foreign := [name for name in settings.drafts if name not in decoder.drafts]:
        known = ", ".join(decoder.drafts) or f"one {type(decoder.drafter).__name__} without a name"
        raise ValueError(f"there is no draft {foreign[0]!r}: there is {known}")
    if own and decoder.drafts:
        return {name: decoder.drafts[name] for name in settings.drafts or decoder.drafts}
    return {type(decoder.drafter).__name__: decoder.drafter}


def _samplings(options: Namespace, settings: AuditSettings) -> list[SamplingSettings]:
    """How tokens are drawn: as the flags say, or as is usual."""
    given = any(each.name in options for each in setting_fields(SamplingSettings))
    if not given and not settings.temperatures:
        return list(USUAL)
    return [chosen(options, SamplingSettings, temperature=each) for each in settings.temperatures or (0.0, 1.0)]


def label(sampling: SamplingSettings) -> str:
    """A sampling in a few words."""
    parts = ["greedy" if sampling.greedy else f"T={sampling.temperature:g}"]
    for name in ("repetition_penalty",) if sampling.greedy else ("top_k", "top_p", "min_p", "repetition_penalty"):
        if (value := getattr(sampling, name)) is not None:
            parts.append(f"{name}={value:g}")
    return ", ".join(parts)


def report(auditor: Auditor, made_on: str, *, interrupted: bool) -> str:
    """The findings as tables, one of each draft and rule, and what they come to."""
    from lightning_specdec.bench.table import grid

    lines: list[str] = []
    for (draft, rule), findings in groupby(auditor.audit.findings, key=lambda each: each.cell[:2]):
        rows = [(each.cell.sampling, each.check, _verdict(each), told(each)) for each in findings]
        lines += [grid((f"{draft}, {rule}", "check", "verdict", "found"), rows, num_text=3), ""]
    settings = (
        f"{counted(len(auditor.prompts), 'prompt')}, window {auditor.window}, {auditor.max_new_tokens} new tokens, "
        f"rounds at {counted(auditor.num_places, 'place')}, seed {auditor.seed}"
    )
    return "\n".join([*lines, *_summary(auditor.audit, interrupted), "", settings, made_on])


def _verdict(finding: Finding) -> str:
    weak = ", no power" if finding.enough_power is False else ""
    return (finding.verdict.upper() if finding.failed else finding.verdict) + weak


def _summary(audit: Audit, interrupted: bool) -> list[str]:
    checks = counted(len(audit.lossless), "check")
    if audit.failures:
        broken = sum(finding.verdict == "error" for finding in audit.failures)
        lines = [f"FAILED: {len(audit.failures) - broken} of {checks} found another output, {broken} could not be made"]
    elif not audit.findings:
        lines = ["nothing was checked"]
    elif not audit.lossless:
        lines = ["nothing here should be lossless: what the rules change is measured, and cannot fail"]
    else:
        lines = [f"{'so far' if interrupted else 'passed'}: no difference from the target's output in {checks}"]
        lines.append("(in brackets what a biased rule comes to)")
    if audit.weak:
        weak = counted(len(audit.weak), "check")
        lines.append(f"{weak} had not enough power to find a biased rule: try more --num_places or other prompts")
    return lines + [
        f"left out: {rule} compares the draft's logits, and {draft} has none" for draft, rule in audit.left_out
    ]


def told(finding: Finding) -> str:
    """What a check found, in a line."""
    values = finding.figures
    if finding.verdict == "error":
        return str(values["reason"])
    if finding.check == "identity":
        return f"{values['num_equal']} of {values['num_prompts']} outputs equal standard decoding's" + _parting(values)
    if finding.check == "round":
        return _round(values)
    changed = f"{values['num_changed']} of {values['num_new_tokens']} tokens changed"
    likely = f"perplexity {values['perplexity']:.3f} (target's own {values['standard_perplexity']:.3f})"
    return f"{changed}, {likely}"


def _parting(values: dict[str, Any]) -> str:
    """The first divergence, bugs before ties."""
    first = min(values["divergences"], key=lambda each: each["verdict"] != "bug", default=None)
    if first is None:
        wrong = values["num_wrong_rounds"]
        return f"; {wrong} rounds with forged drafts commit other tokens than the target's" if wrong else ""
    where = f"; token {first['position'] + 1} of prompt {first['prompt'] + 1}"
    if first["tokens"] is None:
        return f"{where}: one output ends there"
    standard, other = first["tokens"]
    return f"{where} is {other}, not {standard}: {first['margin']:.2g} apart, rounding moves {first['rounding']:.2g}"


def _round(values: dict[str, Any]) -> str:
    if not values:
        return "nothing was drafted"
    control = values["control_error"]
    parts = [f"error {values['error']:.1g} of {values['tolerance']:.1g}"]
    if values["surprises"]:
        parts.append(f"{values['surprises']} rounds do not follow from their random numbers")
    if not values["reads_right"]:
        parts.append(
            f"the round's logits are off by {values['logits_error']:.2g}, rounding by {values['logits_rounding']:.2g}"
        )
    biased = "biased rule not found" if control is None else f"biased rule {control:.1g}"
    return f"{', '.join(parts)} ({biased})"
