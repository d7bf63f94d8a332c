"""The verb `audit`: check that the output is the target's, and print the findings as tables."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lightning_specdec.cli import audit_engine
from lightning_specdec.cli.audit_engine import EngineSettings
from lightning_specdec.cli.common import Loaded, counted, load, progress
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
    from lightning_specdec.drafters import Drafter

SUMMARY = "check that the output is the target's, for every draft, rule and sampling"
EXAMPLES = """\
lightning_specdec audit checkpoints/rnn.safetensors
lightning_specdec audit --target ./llama --draft ./small-llama --temperatures 0 0.8
lightning_specdec audit --target ./llama --engine http://127.0.0.1:8000 --temperature 0.8
The exit code is 1 if something that should be lossless is not, or could not be checked."""

LEGEND = {
    "identity": "identity: compares whole outputs with those of standard decoding, token for token",
    "round": (
        "round: compares the probability of each token that a round can produce with the target's; "
        "nothing is sampled"
    ),
    "lossy": (
        "lossy: measures how far a rule that trades exactness for speed changes the output; "
        "there is nothing to pass"
    ),
}

DEFAULT_SAMPLINGS = (
    SamplingSettings(),
    SamplingSettings(1.0),
    SamplingSettings(0.7, top_p=0.9),
)


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
        4,
        "how many of the models' own prompts to use if none are given; with --engine, requests of "
        f"each check; default: 4, or {audit_engine.NUM_PROMPTS} with --engine",
        minimum=1,
    )
    max_new_tokens: int = setting(
        32,
        "new tokens where outputs are compared; default: 32, or "
        f"{audit_engine.MAX_NEW_TOKENS} with --engine",
        minimum=1,
        maximum=MAX_TOKENS,
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
    parser.add_settings("A running server (--engine)", EngineSettings, skip=("output",))


def run(options: Namespace) -> int:
    """Check every draft, rule, and sampling; returns 1 if one that should be lossless is not."""
    if audit_engine.is_named(options):
        return audit_engine.run(options)
    settings = chosen(options, AuditSettings)
    samplings = _samplings(options, settings)
    for name in settings.rules:
        RULES.check(name)
    loaded = load(options, num_own=settings.num_prompts)
    auditor = _auditor(loaded, settings, samplings)

    interrupted = False
    try:
        auditor.run(tell=progress)
    except KeyboardInterrupt:
        interrupted = True

    # Imported here because torch takes a second.
    from lightning_specdec.bench.manifest import made_on

    audit = auditor.audit
    manifest = loaded.manifest(settings)
    if settings.output == "json":
        document = {**audit.to_dict(), "interrupted": interrupted, "manifest": manifest}
        say(json.dumps(document))
    else:
        say(f"{report(auditor, interrupted=interrupted)}\n{made_on(manifest)}")

    for finding in audit.failures:
        cell = ", ".join(finding.cell)
        say(f"error: {cell}: {finding.verdict}: {describe(finding)}", file=sys.stderr)
    if interrupted:
        say("interrupted: what is above was checked by then", file=sys.stderr)
        return 130
    return 1 if audit.failures else 0


def _samplings(options: Namespace, settings: AuditSettings) -> Sequence[SamplingSettings]:
    """One sampling for each temperature, with the other sampling flags; or the defaults."""
    sampling_names = [field.name for field in setting_fields(SamplingSettings)]
    has_sampling_flags = any(name in options for name in sampling_names)
    if not settings.temperatures and not has_sampling_flags:
        return DEFAULT_SAMPLINGS
    temperatures = settings.temperatures or (0.0, 1.0)
    return [
        chosen(options, SamplingSettings, temperature=temperature) for temperature in temperatures
    ]


def _auditor(
    loaded: Loaded,
    settings: AuditSettings,
    samplings: Sequence[SamplingSettings],
) -> Auditor:
    from lightning_specdec.rules import Sampling

    drafters = _drafters(loaded, settings)
    rules = {name: RULES.load(name)() for name in settings.rules or RULES}
    # Lossless rules first: their findings are what a reader looks for.
    rule_names = sorted(rules, key=lambda name: not rules[name].lossless)
    return loaded.decoder.audit(
        loaded.prompts,
        drafters=drafters,
        rules={name: rules[name] for name in rule_names},
        samplings={label(sampling): Sampling.of(sampling) for sampling in samplings},
        num_draft_tokens=settings.num_draft_tokens,
        max_new_tokens=settings.max_new_tokens,
        num_places=settings.num_places,
        seed=settings.seed,
    )


def _drafters(loaded: Loaded, settings: AuditSettings) -> dict[str, Drafter]:
    """The drafters to check, by name."""
    decoder = loaded.decoder
    is_default_draft = loaded.source.draft is None and loaded.source.drafter is None
    if decoder.drafts and is_default_draft:
        drafters = dict(decoder.drafts)
    else:
        drafters = {DRAFTERS.name_of(type(decoder.drafter)): decoder.drafter}

    for name in settings.drafts:
        if name not in drafters:
            raise ValueError(f"there is no draft {name!r}: there is {', '.join(drafters)}")
    return {name: drafters[name] for name in settings.drafts or drafters}


def label(sampling: SamplingSettings) -> str:
    """Describe a sampling in a few words, as "T=0.7, top_p=0.9"."""
    words = ["greedy" if sampling.greedy else f"T={sampling.temperature:g}"]
    for name, value in vars(sampling).items():
        if name != "temperature" and value is not None:
            words.append(f"{name}={value:g}")
    return ", ".join(words)


def report(auditor: Auditor, *, interrupted: bool) -> str:
    """Format the findings as tables, one for each draft and rule, followed by a summary."""
    audit = auditor.audit
    lines = _tables(audit.findings)
    lines += _summary(auditor, interrupted=interrupted)

    checks_done = {finding.check for finding in audit.findings}
    if checks_done:
        lines.append("")
    lines += [text for check, text in LEGEND.items() if check in checks_done]

    num_prompts = counted(len(auditor.prompts), "prompt")
    num_places = counted(auditor.num_places, "place")
    lines += [
        "",
        f"{num_prompts}, {counted(auditor.window, 'draft token')} per round, rounds at "
        f"{num_places}, seed {auditor.seed}",
    ]
    return "\n".join(lines)


def _tables(findings: Sequence[Finding]) -> list[str]:
    from lightning_specdec.bench.table import grid

    lines = []
    for (draft, rule), cell_findings in groupby(findings, key=lambda finding: finding.cell[:2]):
        rows = []
        for finding in cell_findings:
            verdict = finding.verdict.upper() if finding.failed else finding.verdict
            rows.append((finding.cell.sampling, finding.check, verdict, describe(finding)))
        table = grid(("sampling", "check", "verdict", "found"), rows, num_text=3)
        lines += [f"{draft}, {rule}", table, ""]
    return lines


def _summary(auditor: Auditor, *, interrupted: bool) -> list[str]:
    """The verdict on all checks, those without power, and the pairs that were left out."""
    audit = auditor.audit
    checks = counted(len(audit.lossless), "check")
    if audit.failures:
        lines = [f"FAILED: {len(audit.failures)} of {checks}"]
    elif audit.lossless:
        outcome = "so far" if interrupted else "passed"
        lines = [f"{outcome}: no difference from the target's output in {checks}"]
    else:
        lines = ["nothing here should be lossless: the tables show what the rules change"]

    if audit.weak:
        weak_checks = counted(len(audit.weak), "check")
        lines.append(
            f"{weak_checks} had not enough power to find a biased rule: "
            "try more --num_places or other prompts"
        )
    for draft, rule in audit.left_out:
        lines.append(f"left out: {rule} compares the draft's logits, and {draft} has none")
    return lines


def describe(finding: Finding) -> str:
    """Describe in words what a check found."""
    figures = dict(finding.figures)
    if "reason" in figures:
        return str(figures["reason"])
    if not figures:
        return "nothing was drafted"
    if finding.check == "identity":
        return _describe_identity(figures)
    if finding.check == "round":
        return _describe_round(figures)
    changed = f"{figures['num_changed']} of {counted(figures['num_new_tokens'], 'token')} changed"
    return (
        f"{changed}, perplexity {figures['perplexity']:.2f}, "
        f"the target's {figures['standard_perplexity']:.2f}"
    )


def _describe_identity(figures: dict[str, Any]) -> str:
    num_prompts: int = figures["num_prompts"]
    verb = "is" if num_prompts == 1 else "are"
    words = [f"{figures['num_equal']} of {counted(num_prompts, 'output')} {verb} the target's"]

    num_wrong_rounds: int = figures["num_wrong_rounds"]
    if num_wrong_rounds:
        words.append(f"{counted(num_wrong_rounds, 'forged draft')} judged wrong")

    # One divergence is shown: a fault if there is one, else a near-tie.
    divergences: list[dict[str, Any]] = figures["divergences"]
    divergences = sorted(divergences, key=lambda divergence: divergence["verdict"] != "bug")
    if divergences:
        divergence = divergences[0]
        prompt_number = divergence["prompt"] + 1
        token_number = divergence["position"] + 1
        words.append(f"prompt {prompt_number} differs at token {token_number}")
        if divergence["margin"] is not None:
            words.append(
                f"by {divergence['margin']:.2g}, and rounding moves {divergence['rounding']:.2g}"
            )
    return ", ".join(words)


def _describe_round(figures: dict[str, Any]) -> str:
    words = [f"error {figures['error']:.1e} (allowed: {figures['tolerance']:.1e})"]
    if figures["control_error"] is not None:
        words.append(f"a biased rule has {figures['control_error']:.1e}")
    if figures["surprises"]:
        surprises = counted(figures["surprises"], "row")
        words.append(f"{surprises} did not follow from the random numbers")
    if not figures["reads_right"]:
        words.append(f"the logits are off by {figures['logits_error']:.1e}")
    return ", ".join(words)
