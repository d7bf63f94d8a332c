"""What a prediction starts from: calls timed by themselves, and how often drafts are right on prompts that are not
measured. And the best setting of transformers' ways, found on those too.

Knows nothing of cells' runs, nor of files.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from lightning_specdec.bench.calibration import calibrate
from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.matrix import Cell, Subject
from lightning_specdec.bench.prompts import Prompt
from lightning_specdec.bench.sweep import FAILURES, windows_of
from lightning_specdec.bench.ways import Prepared, decode, way_of
from lightning_specdec.drafters import Drafter, NGramDrafter
from lightning_specdec.inference import Costs, autoregressive_decode
from lightning_specdec.models.config_file import FOREIGN

SECONDS = 1.0
"""About as long as the calls of one draft are timed."""
ALPHA_WINDOW = 4
"""Guesses of the rounds that alpha is taken from: any number gives the same where acceptance does not depend on the
position."""


def timed_calls(subject: Subject, config: BenchConfig) -> dict[str, Any]:
    """The seconds of single calls, one prompt at a time: those of the manifest's `calls`.

    Besides what the target's call takes on one token and on several and a draft's step: `draft_fixed_seconds` of any
    draft, `round_overhead_seconds` and `step_overhead_seconds` of what a round and a token of standard decoding take
    besides, and `prompt_token_seconds` of reading a prompt; these by what `predicted_speedup` calls them.
    """
    windows = [window for window in config.num_draft_tokens if isinstance(window, int)] or [ALPHA_WINDOW]
    lengths = [len(prompt.tokens) for prompt in _all(subject.prompts.values())]
    context = max(2, round(median(lengths)) + config.max_new_tokens // 2)
    shared: dict[str, Any] = {"context_length": context, "widths": [1, *(window + 1 for window in windows)]}
    found = calibrate(subject.target, NGramDrafter(), seconds=SECONDS, **shared).costs[0]
    one = found.target_seconds[0]
    drafts = {}
    for name, drafter in subject.drafts.items():
        if isinstance(drafter, Drafter):
            most = [window + 1 for window in windows_of(drafter, windows)]
            try:
                drafts[name] = calibrate(
                    subject.target, drafter, seconds=SECONDS, **{**shared, "widths": [1, *most]}
                ).costs[0]
            except FAILURES:  # its cells fail too, and say why
                continue
    return {
        "context_length": context,
        "one_token_seconds": one,
        "wide_seconds": {
            str(width): each for width, each in zip(found.widths, found.target_seconds, strict=True) if width > 1
        },
        "draft_step_seconds": {name: costs.draft_step_seconds for name, costs in drafts.items()},
        "draft_fixed_seconds": {name: costs.draft_seconds for name, costs in drafts.items()},
        "round_overhead_seconds": {name: _overhead(costs) for name, costs in drafts.items()},
        "step_overhead_seconds": max(0.0, _standard_seconds(subject, config, context) - one),
        "prompt_token_seconds": found.target_token_seconds,
    }


def _overhead(costs: Costs) -> dict[str, float]:
    return {str(width): each for width, each in zip(costs.widths, costs.loop_seconds, strict=True)}


def _standard_seconds(subject: Subject, config: BenchConfig, context: int) -> float:
    """A token of standard decoding, behind about as much text as the calls had."""
    prompt = list(next(iter(_all(subject.prompts.values()))).tokens)
    limit = subject.target.max_positions
    number = max(2, min(config.max_new_tokens, (limit or context + 32) - len(prompt)))
    steps: list[float] = []
    for _ in range(4):
        seconds = autoregressive_decode(subject.target, prompt, max_new_tokens=number).rows[0].token_seconds
        steps += [now - before for before, now in zip(seconds, seconds[1:], strict=False)]
    return median(steps)


def alphas(subject: Subject, config: BenchConfig) -> list[dict[str, Any]]:
    """How often each draft was right on the other prompts of each domain, with each rule at each temperature."""
    found: list[dict[str, Any]] = []
    for name, drafter in subject.drafts.items():
        if not isinstance(drafter, Drafter):
            continue
        window = min(ALPHA_WINDOW, drafter.max_draft_tokens or ALPHA_WINDOW)
        for domain, prompts in subject.others.items():
            for temperature in config.temperatures:
                for rule in config.rules:
                    cell = Cell(subject.name, "speculative", domain, temperature, 1, name, window, rule)
                    try:
                        way = way_of(cell, subject, config, Prepared(window), seed=config.seed)
                        counts = decode(way, prompts, 1).counts
                    except FAILURES:  # its cells fail too, and say why
                        continue
                    assert counts is not None
                    found.append(
                        {"draft": name, "domain": domain, "temperature": temperature, "rule": rule.label}
                        | {"num_tested": counts.num_tested, "num_accepted": counts.num_accepted}
                    )
    return found


def by_draft(found: Iterable[dict[str, Any]], config: BenchConfig) -> dict[str, dict[str, float]]:
    """The acceptance rates of `alphas` at the first temperature, with the first rule: by draft and domain."""
    rates: dict[str, dict[str, float]] = {}
    for each in found:
        first = each["temperature"] == config.temperatures[0] and each["rule"] == config.rules[0].label
        if first and each["num_tested"]:
            rates.setdefault(each["draft"], {})[each["domain"]] = each["num_accepted"] / each["num_tested"]
    return rates


def best_setting(cell: Cell, subject: Subject, config: BenchConfig) -> dict[str, Any]:
    """What a way of transformers is fastest with, on the other prompts of the domain; and what each setting took there.

    Raises:
        ValueError and whatever transformers raises: it cannot decode so.
    """
    assert subject.outside is not None
    prompts = subject.others.get(cell.domain) or subject.prompts[cell.domain]
    settings = subject.outside.settings(cell.way)
    tried: list[float] = []
    for setting in settings:
        way = way_of(cell, subject, config, Prepared(setting=setting), seed=config.seed)
        if not tried:
            decode(way, prompts[:1], cell.batch_size)  # warms up
        tried.append(decode(way, prompts, cell.batch_size).seconds)
    chosen = settings[tried.index(min(tried))]
    return {
        "way": cell.way,
        "draft": cell.draft,
        "domain": cell.domain,
        "temperature": cell.temperature,
        "batch_size": cell.batch_size,
        "setting": chosen,
        "tried": [{**setting, "seconds": seconds} for setting, seconds in zip(settings, tried, strict=True)],
    }


OUTSIDE_FAILURES = tuple(each for each in FOREIGN if each is not OSError)
"""What transformers' ways can fail by; a disk is not among it."""


def _all(prompts: Iterable[Iterable[Prompt]]) -> list[Prompt]:
    return [prompt for each in prompts for prompt in each]
