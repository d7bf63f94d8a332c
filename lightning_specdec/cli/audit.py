"""The verb `audit`: is the output the target's own? Findings as tables, and what they come to."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from lightning_specdec.cli.common import counted, load, progress
from lightning_specdec.cli.options import (
    MeasureSettings,
    OutputSettings,
    Parser,
    PromptSettings,
    chosen,
)
from lightning_specdec.config.decoding import MAX_TOKENS, SamplingSettings
from lightning_specdec.config.kinds import DRAFTERS, RULES
from lightning_specdec.config.settings import setting, setting_fields
from lightning_specdec.config.terminal import say

if TYPE_CHECKING:
    from lightning_specdec.audit.auditor import Auditor, Finding

SUMMARY = "check that the output is the target's, for every draft, rule and sampling"
EXAMPLES = """\
lightning_specdec audit checkpoints/rnn.safetensors
lightning_specdec audit --target ./llama --draft ./small-llama --rules ExactMatch --temperatures 0 0.8
Exit code 1 when something that should be lossless is not, or could not be checked."""

LEGEND = {
    "identity": "identity: whole outputs beside standard decoding's, token for token",
    "round": "round: the probability of each token that a round can give, beside the target's own; nothing is sampled",
    "lossy": "lossy: how far a rule that trades exactness for speed moves the output; nothing to pass",
}


@dataclass(frozen=True, kw_only=True)
class AuditSettings(OutputSettings):
    """What is checked, and how closely."""

    drafts: tuple[str, ...] = setting(
        (), "drafts of the checkpoint, by name; default: all", metavar="NAME ..."
    )
    rules: tuple[str, ...] = setting((), "rules, by name; default: all", metavar="NAME ...")
    temperatures: tuple[float, ...] = setting(
        (),
        "temperatures, 0 is greedy; default: 0, 1, and 0.7 with top_p 0.9",
        metavar="NUMBER ...",
        minimum=0,
    )
    num_draft_tokens: int = setting(3, "draft tokens per round", minimum=1, maximum=MAX_TOKENS)
    num_prompts: int = setting(
        4, "how many of the models' own prompts to use if none are given", minimum=1
    )
    max_new_tokens: int = setting(
        32, "new tokens where outputs are compared", minimum=1, maximum=MAX_TOKENS
    )
    num_places: int = setting(
        3, "positions where one round is enumerated", minimum=1, maximum=MAX_TOKENS
    )
    seed: int = setting(0, "seed of all draws", minimum=0, maximum=2**63 - 1)


def add_arguments(parser: Parser) -> None:
    parser.add_models()
    parser.add_settings("Prompt", PromptSettings)
    parser.add_settings("Sampling (with each temperature)", SamplingSettings, skip=("temperature",))
    parser.add_settings("Measure", MeasureSettings, skip=("repeats", "batch_size", "ignore_eos"))
    parser.add_settings("Output", AuditSettings)


def run(options: Namespace) -> int:
    """Check every draft, rule and sampling; 1 where something that should be lossless is not."""
    settings = chosen(options, AuditSettings)
    plain = [SamplingSettings(), SamplingSettings(1.0), SamplingSettings(0.7, top_p=0.9)]
    if settings.temperatures or any(
        each.name in options for each in setting_fields(SamplingSettings)
    ):
        plain = [
            chosen(options, SamplingSettings, temperature=each)
            for each in settings.temperatures or (0.0, 1.0)
        ]
    for name in settings.rules:
        RULES.check(name)
    loaded = load(options, num_own=settings.num_prompts)
    source, decoder, _, prompts = loaded
    from lightning_specdec.bench.manifest import made_on
    from lightning_specdec.rules import Sampling

    drafts = {DRAFTERS.name_of(type(decoder.drafter)): decoder.drafter}
    if decoder.drafts and source.draft is None and source.drafter is None:
        drafts = dict(decoder.drafts)
    if absent := [name for name in settings.drafts if name not in drafts]:
        raise ValueError(f"there is no draft {absent[0]!r}: there is {', '.join(drafts)}")
    rules = {name: RULES.load(name) for name in settings.rules or RULES}
    auditor = decoder.audit(
        prompts,
        drafters={name: drafts[name] for name in settings.drafts or drafts},
        rules={
            name: rules[name]() for name in sorted(rules, key=lambda name: not rules[name].lossless)
        },
        samplings={label(each): Sampling.of(each) for each in plain},
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
    outcome, made = auditor.audit, loaded.manifest(settings)
    if settings.output == "json":
        say(json.dumps({**outcome.to_dict(), "interrupted": interrupted, "manifest": made}))
    else:
        say(f"{report(auditor, interrupted=interrupted)}\n{made_on(made)}")
    for finding in outcome.failures:
        say(
            f"error: {', '.join(finding.cell)}: {finding.verdict}: {told(finding)}", file=sys.stderr
        )
    if interrupted:
        say("interrupted: what is above was checked by then", file=sys.stderr)
    return 130 if interrupted else 1 if outcome.failures else 0


def label(sampling: SamplingSettings) -> str:
    """A sampling in a few words."""
    given = {
        name: value
        for name, value in vars(sampling).items()
        if name != "temperature" and value is not None
    }
    parts = ["greedy" if sampling.greedy else f"T={sampling.temperature:g}"]
    return ", ".join(parts + [f"{name}={value:g}" for name, value in given.items()])


def report(auditor: Auditor, *, interrupted: bool) -> str:
    """The findings as tables, one of each draft and rule, and what they come to."""
    from lightning_specdec.bench.table import grid

    outcome, lines = auditor.audit, []
    for (draft, rule), findings in groupby(outcome.findings, key=lambda each: each.cell[:2]):
        rows = [
            (
                each.cell.sampling,
                each.check,
                each.verdict.upper() if each.failed else each.verdict,
                told(each),
            )
            for each in findings
        ]
        lines += [
            f"{draft}, {rule}",
            grid(("sampling", "check", "verdict", "found"), rows, num_text=3),
            "",
        ]
    checks = counted(len(outcome.lossless), "check")
    if outcome.failures:
        lines.append(f"FAILED: {len(outcome.failures)} of {checks}")
    elif outcome.lossless:
        lines.append(
            f"{'so far' if interrupted else 'passed'}: no difference from the target's output in {checks}"
        )
    else:
        lines.append("nothing here should be lossless: the tables show what the rules change")
    if outcome.weak:
        weak = counted(len(outcome.weak), "check")
        lines.append(
            f"{weak} had not enough power to find a biased rule: try more --num_places or other prompts"
        )
    lines += [
        f"left out: {rule} compares the draft's logits, and {draft} has none"
        for draft, rule in outcome.left_out
    ]
    prompts, places = counted(len(auditor.prompts), "prompt"), counted(auditor.num_places, "place")
    done = {each.check for each in outcome.findings}
    lines += [""] * bool(done) + [text for name, text in LEGEND.items() if name in done]
    return "\n".join(
        [*lines, "", f"{prompts}, window {auditor.window}, rounds at {places}, seed {auditor.seed}"]
    )


def told(finding: Finding) -> str:
    """What a check found, in words."""
    figures = dict(finding.figures)
    if not figures or "reason" in figures:
        return figures.get("reason", "nothing was drafted")
    if finding.check == "identity":
        number, divergences = figures["num_prompts"], figures["divergences"]
        words = [
            f"{figures['num_equal']} of {counted(number, 'output')} {'is' if number == 1 else 'are'} the target's"
        ]
        if wrong := figures["num_wrong_rounds"]:
            words.append(f"{counted(wrong, 'forged draft')} judged wrong")
        for each in sorted(divergences, key=lambda each: each["verdict"] != "bug")[:1]:
            words.append(f"prompt {each['prompt'] + 1} differs at token {each['position'] + 1}")
            if each["margin"] is not None:
                words.append(f"by {each['margin']:.2g}, and rounding moves {each['rounding']:.2g}")
    elif finding.check == "round":
        words = [f"error {figures['error']:.1e} of at most {figures['tolerance']:.1e}"]
        if (control := figures["control_error"]) is not None:
            words.append(f"a biased rule has {control:.1e}")
        if surprises := figures["surprises"]:
            words.append(f"{counted(surprises, 'row')} did not follow from the random numbers")
        if not figures["reads_right"]:
            words.append(f"the logits are off by {figures['logits_error']:.1e}")
    else:
        words = [
            f"{figures['num_changed']} of {counted(figures['num_new_tokens'], 'token')} changed"
        ]
        words.append(
            f"perplexity {figures['perplexity']:.2f}, the target's {figures['standard_perplexity']:.2f}"
        )
    return ", ".join(words)
