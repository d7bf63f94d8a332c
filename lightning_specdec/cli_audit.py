"""The verb `audit`: is the output the target's? A table of findings, and what they come to.

Takes its parsed options and gives an exit code: 0, 1 where something lossless is not, 130 by Ctrl-C.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from argparse import Namespace
from itertools import groupby
from typing import Any

from lightning_specdec.bench.audit.auditor import Auditor
from lightning_specdec.bench.audit.findings import FALSE_ALARM, Audit, Finding
from lightning_specdec.checks import require_int
from lightning_specdec.cli_common import counted, draws, progress, set_threads, set_up_logs
from lightning_specdec.cli_decode import find_prompts
from lightning_specdec.cli_groups import MAX_TOKENS
from lightning_specdec.cli_parser import UsageError
from lightning_specdec.cli_prompts import read_prompts
from lightning_specdec.cli_sweep import load_candidates
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.drafters import EarlyExitDrafter
from lightning_specdec.manifest import made_on, manifest
from lightning_specdec.measuring import Candidate
from lightning_specdec.rules import RULES, Sampling
from lightning_specdec.terminal import say
from lightning_specdec.threads import limit_threads

SETTINGS = (Sampling(), Sampling(1.0), Sampling(0.7, top_p=0.9))
"""What is audited where nothing is said of how tokens are drawn."""
TEMPERATURES = (0.0, 1.0)
"""The same where filters are given, and no temperatures."""
NARROWEST = 24
"""Characters that a cell's text needs to be broken into lines."""


def audit(options: Namespace) -> int:
    """Check every draft, rule and sampling."""
    set_up_logs(options.log_level, json_lines=options.log_json)
    set_threads(options)
    for name in ("num_draft_tokens", "max_new_tokens", "num_prompts", "num_decodes", "num_places"):
        if getattr(options, name) is not None:
            require_int(name, getattr(options, name), 1, MAX_TOKENS)
    for layer in options.exit_layers or ():
        require_int("exit_layers", layer, 1)
    if options.raw and options.chat_template:
        raise UsageError("--raw and --chat_template exclude each other: give one of them")
    samplings = {label(each): each for each in _samplings(options)}
    given = read_prompts(options.prompt or [], options.prompts_file)
    loading = Namespace(**{**vars(options), "num_draft_tokens": None, "exit_layer": None, "stop": None})
    decoder, candidates = load_candidates(loading)
    if options.threads is None:
        limit_threads(decoder.target.num_parameters)
    if options.exit_layers is None:
        candidates = {name: each for name, each in candidates.items() if _decodes(decoder, each)}
    found = [tokens for _, tokens in find_prompts(decoder, given, loading)]
    auditor = decoder.auditor(
        found[: options.num_prompts] if given is None else found,
        drafts={name: candidate.drafter for name, candidate in candidates.items()},
        rules={name: RULES[name]() for name in options.rules or RULES},
        samplings=samplings,
        num_draft_tokens=options.num_draft_tokens,
        max_new_tokens=options.max_new_tokens,
        num_decodes=options.num_decodes,
        num_places=options.num_places,
        seed=options.seed,
    )
    interrupted = _run(auditor)
    outcome = auditor.audit
    made_by = manifest(options=vars(options), checkpoint=options.ckpt, device=decoder.target.device)
    if options.output == "json":
        settings = {"num_decodes": auditor.pair.num_decodes, "num_places": auditor.num_places}
        settled = outcome.to_dict()
        settled["passed"] &= not interrupted
        say(json.dumps({**settled, **settings, "interrupted": interrupted, "manifest": made_by}))
    else:
        width = shutil.get_terminal_size((120, 24)).columns
        say(report(auditor, made_by, width=width, interrupted=interrupted))
    for finding in outcome.failures:
        say(f"error: {', '.join(finding.cell)}: {finding.verdict}: {told(finding)}", file=sys.stderr)
    if interrupted:
        say("interrupted: what is above was settled by then", file=sys.stderr)
        return 130
    return 1 if outcome.failures else 0


def _decodes(decoder: SpeculativeDecoder, candidate: Candidate) -> bool:
    """Whether a draft guesses with the exit that `decode` uses, or with none."""
    own = decoder.drafter if candidate.draft is None else decoder.drafts[candidate.draft]
    return not isinstance(own, EarlyExitDrafter) or candidate.exit_layer == own.exit_layer


def _run(auditor: Auditor) -> bool:
    """Go through the checks; whether Ctrl-C ended them."""
    try:
        auditor.run(tell=progress)
    except KeyboardInterrupt:
        return True
    return False


def _samplings(options: Namespace) -> list[Sampling]:
    """How tokens are drawn: what the options say, or what is usual."""
    filters = [getattr(options, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")]
    if options.temperatures is None and filters == [None] * len(filters):
        return list(SETTINGS)
    temperatures = options.temperatures or TEMPERATURES
    return [Sampling(**draws(Namespace(**{**vars(options), "temperature": each}))) for each in temperatures]


def label(sampling: Sampling) -> str:
    """A sampling's settings in a few words."""
    parts = ["greedy" if sampling.greedy else f"T={sampling.temperature:g}"]
    if not sampling.greedy:
        given = [(name, getattr(sampling, name)) for name in ("top_k", "top_p", "min_p")]
        parts += [f"{name}={value:g}" for name, value in given if value is not None]
    return ", ".join([*parts, *(type(each).__name__.removesuffix("LogitsProcessor") for each in sampling.processors)])


def report(auditor: Auditor, made_by: dict[str, Any], *, width: int, interrupted: bool) -> str:
    """The findings as tables, one of each draft and rule, and what they come to; in lines of `width` where they fit."""
    audit = auditor.audit
    rows = [(each.cell.sampling, each.check, _verdict(each)) for each in audit.findings]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for (draft, rule), group in groupby(zip(audit.findings, rows, strict=True), key=lambda both: both[0].cell[:2]):
        lines.append(f"{draft}, {rule}")
        for finding, row in group:
            cells = "  ".join(["", *(cell.ljust(size) for cell, size in zip(row, widths, strict=True)), ""])
            lines += _wrapped(told(finding), width, cells)
        lines.append("")
    for text in (*_summary(audit, interrupted), "", *_beside(auditor, made_by)):
        lines += _wrapped(text, width, "")
    return "\n".join(lines)


def _wrapped(text: str, width: int, cells: str) -> list[str]:
    """Lines of a text behind cells; one where these leave it no room."""
    room = width - len(cells)
    lines = [text] if room < NARROWEST else textwrap.wrap(text, room, break_on_hyphens=False) or [""]
    return [f"{cells if i == 0 else ' ' * len(cells)}{line}" for i, line in enumerate(lines)]


def _verdict(finding: Finding) -> str:
    weak = ", no power" if finding.enough_power is False else ""
    return (finding.verdict.upper() if finding.failed else finding.verdict) + weak


def _summary(audit: Audit, interrupted: bool) -> list[str]:
    number, weak = len(audit.lossless), len(audit.weak)
    broken = sum(finding.broken for finding in audit.failures)
    lines = []
    if unlike := len(audit.failures) - broken:
        lines.append(f"FAILED: {unlike} of {counted(number, 'check')} say that the output is not the target's")
    if broken:
        lines.append(f"FAILED: {broken} of {counted(len(audit.findings), 'check')} could not be made")
    if not lines and number:
        settled = "so far" if interrupted else "passed"
        lines.append(f"{settled}: nothing in {counted(number, 'check')} tells the output from the target's")
        odds = f"odds of {FALSE_ALARM:.0%} at most"
        lines.append(f"(p-values give a false alarm with {odds}; in brackets: what a biased rule comes to)")
    elif not audit.findings:
        lines = ["nothing was checked"]
    elif not lines:
        lines = ["nothing here should be lossless: what the rules change is measured, and cannot fail"]
    if weak:
        lines.append(
            f"{counted(weak, 'check')} had not enough power: a biased rule was not found out there; "
            "more --num_decodes or --num_places, other prompts or a higher temperature may help"
        )
    lines += [f"left out: {rule} compares the draft's logits, and {draft} has none" for draft, rule in audit.left_out]
    return lines


def _beside(auditor: Auditor, made_by: dict[str, Any]) -> list[str]:
    pair = auditor.pair
    settings = [
        counted(len(pair.prompts), "prompt"),
        f"window {pair.window}",
        counted(pair.max_new_tokens, "new token"),
        f"samples of {counted(pair.num_decodes, 'decode')}",
        f"rounds at {counted(auditor.num_places, 'place')}",
        f"seed {pair.seed}",
    ]
    return [
        ", ".join(settings),
        made_on(made_by),
    ]


def told(finding: Finding) -> str:
    """What a check found, in a line."""
    values = finding.figures
    if finding.broken:
        return str(values["reason"])
    if finding.check == "identity":
        return f"{values['num_equal']} of {values['num_prompts']} outputs equal standard decoding's" + _parting(values)
    if finding.check == "round":
        return _round(values)
    if finding.check == "samples":
        control = f"(biased rule {values['control_p_value']:.1g})"
        return f"p {values['p_value']:.2g}, corrected {values['adjusted_p_value']:.2g} {control}"
    changed = f"{values['num_changed']} of {values['num_new_tokens']} tokens changed"
    likely = f"perplexity {values['perplexity']:.3f} (target's own {values['standard_perplexity']:.3f})"
    distance = values["total_variation"]
    return f"{changed}, {likely}" + ("" if distance is None else f", total variation {distance:.3f} a token")


def _parting(values: dict[str, Any]) -> str:
    """The first divergence: of those that are bugs, if there are any."""
    listed = sorted(values["divergences"], key=lambda each: each["verdict"] != "bug")
    if not listed:
        return ""
    first = listed[0]
    where = f"; token {first['position'] + 1} of prompt {first['prompt'] + 1}"
    if first["tokens"] is None:
        return f"{where}: one output ends there"
    standard, other = first["tokens"]
    return f"{where} is {other}, not {standard}: {first['margin']:.2g} apart, rounding moves {first['rounding']:.2g}"


def _round(values: dict[str, Any]) -> str:
    if not values:
        return "nothing was ever guessed"
    control = values["control_error"]
    parts = [f"error {values['error']:.1g} of {values['tolerance']:.1g}"]
    if values["surprises"]:
        parts.append(f"{values['surprises']} random rounds came out otherwise than foretold")
    if not values["reads_right"]:
        parts.append(
            f"the round's logits are off by {values['logits_error']:.2g}, rounding by {values['logits_rounding']:.2g}"
        )
    biased = "biased rule not found out" if control is None else f"biased rule {control:.1g}"
    return f"{', '.join(parts)} ({biased})"
