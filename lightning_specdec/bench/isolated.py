"""What a prediction starts from: calls timed by themselves, and how often drafts are right on prompts that are not
measured. And the best setting of transformers' ways, found on those too where a domain has any.

Of the prompts that are measured the calls know the lengths, and no token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from lightning_specdec.bench.calibration import calibrate
from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.config_entries import SPECULATIVE
from lightning_specdec.bench.failures import FAILURES
from lightning_specdec.bench.matrix import Cell
from lightning_specdec.bench.outside import CARRIED, GenerateSetting
from lightning_specdec.bench.prompts import Prompt
from lightning_specdec.bench.subject import Subject
from lightning_specdec.bench.sweep import windows_of
from lightning_specdec.bench.ways import Prepared, decode, way_of
from lightning_specdec.drafters import Drafter, NGramDrafter
from lightning_specdec.inference import Costs, autoregressive_decode

SECONDS = 1.0
"""About as long as the calls of one draft are timed."""
ALPHA_WINDOW = 4
"""Guesses of the rounds that alpha is taken from: any number gives the same where acceptance does not depend on the
position."""
NUM_TRIES = 3
"""Of each setting of transformers' ways; the median counts."""
HOPELESS = 1.5
"""Times the seconds of the fastest, behind which a setting is not tried again."""


def timed_calls(subject: Subject, config: BenchConfig) -> dict[str, Any]:
    """The seconds of single calls, one prompt at a time, behind as much text as the median measured prompt has amid its
    output: those of the manifest's `calls`.

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
    """A token of standard decoding, behind one of the other prompts; behind any tokens where there is none."""
    others = _all(subject.others.values())
    prompt = list(others[0].tokens) if others else [0] * (context // 2)
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
                    cell = Cell(subject.name, SPECULATIVE, domain, temperature, 1, name, window, rule)
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
    """What a way of transformers is fastest with, on the other prompts of the domain (where it has none, on those that
    are measured); and what each setting took there.

    Each setting is warmed up, then all take turns; their medians decide. Of a setting that goes on from call to call
    (`Outside.continued`), `began_with` says what each try began with, `ended_with` what the last one came to.

    Raises:
        ValueError and whatever transformers raises: it cannot decode so.
    """
    assert subject.outside is not None
    prompts = subject.others.get(cell.domain) or subject.prompts[cell.domain]
    offered = subject.outside.settings(cell.way)
    settings: list[GenerateSetting] = list(offered)
    tries: list[list[float]] = [[] for _ in settings]
    began: list[list[int | None]] = [[] for _ in settings]
    for i, setting in enumerate(settings):
        settings[i], _ = _try(cell, subject, config, setting, prompts[: cell.batch_size])  # warms up
    hopeful = list(range(len(settings)))
    for _ in range(NUM_TRIES):
        for i in hopeful:
            began[i].append(settings[i].get(CARRIED))
            settings[i], seconds = _try(cell, subject, config, settings[i], prompts)
            tries[i].append(seconds)
        medians = [median(each) for each in tries]
        hopeful = [i for i in hopeful if medians[i] <= HOPELESS * min(medians)]
    return {
        "way": cell.way,
        "draft": cell.draft,
        "domain": cell.domain,
        "temperature": cell.temperature,
        "batch_size": cell.batch_size,
        "setting": dict(settings[medians.index(min(medians))]),
        "tried": [
            {**setting, "seconds": middle, "tries": each}
            | ({} if setting == last else {"began_with": first, "ended_with": last[CARRIED]})
            for setting, middle, each, first, last in zip(offered, medians, tries, began, settings, strict=True)
        ],
    }


def _try(
    cell: Cell, subject: Subject, config: BenchConfig, setting: GenerateSetting, prompts: Sequence[Prompt]
) -> tuple[GenerateSetting, float]:
    """Decode with a setting, batch by batch: what has become of it, and the seconds."""
    assert subject.outside is not None
    seconds = 0.0
    for first in range(0, len(prompts), cell.batch_size):
        way = way_of(cell, subject, config, Prepared(setting=setting), seed=config.seed)
        seconds += decode(way, prompts[first : first + cell.batch_size], cell.batch_size).seconds
        setting = subject.outside.continued(setting)
    return setting, seconds


def _all(prompts: Iterable[Iterable[Prompt]]) -> list[Prompt]:
    return [prompt for each in prompts for prompt in each]
