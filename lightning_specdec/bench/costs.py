"""What predictions start from: calls timed apart from the benchmark, and acceptance on prompts that it does not
measure."""

from __future__ import annotations

from itertools import chain, product
from statistics import median
from typing import Any

from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.measure import FAILURES, Case
from lightning_specdec.bench.pairs import BenchPair
from lightning_specdec.bench.rows import SPECULATIVE
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding import Calibration, autoregressive_decode
from lightning_specdec.decoding.calibration import calibrate
from lightning_specdec.drafters import Drafter, NGramDrafter

SECONDS = 1.0
"""About as long as the calls of one draft are timed."""
WINDOW = 4
"""Draft tokens of the rounds that acceptance is taken from."""


def timed_calls(pair: BenchPair, config: BenchConfig) -> dict[str, Any]:
    """Seconds of single calls of one row, behind as much text as the median prompt has amid its output.

    Names are those of `theory.predicted_speedup`, by draft and by width where they depend on these.
    """
    windows = [window for window in config.num_draft_tokens if isinstance(window, int)] or [WINDOW]
    lengths = [len(prompt.tokens) for prompt in chain(*pair.prompts.values())]
    context = max(2, round(median(lengths)) + config.max_new_tokens // 2)

    def costs_of(drafter: Drafter) -> Calibration:
        return calibrate(pair.target, drafter, seconds=SECONDS, context_length=context, windows=windows)

    plain = costs_of(NGramDrafter())
    one = plain.target_seconds[0]
    drafts = {}
    for name, drafter in pair.drafts.items():
        if isinstance(drafter, Drafter):
            try:
                drafts[name] = costs_of(drafter)
            except FAILURES:  # its cases fail too, and say why
                continue
    return {
        "context_length": context,
        "one_token_seconds": one,
        "wide_seconds": {
            str(width): each for width, each in zip(plain.widths, plain.target_seconds, strict=True) if width > 1
        },
        "draft_step_seconds": {name: costs.draft_step_seconds for name, costs in drafts.items()},
        "draft_fixed_seconds": {name: costs.draft_seconds for name, costs in drafts.items()},
        "round_overhead_seconds": {
            name: {str(width): each for width, each in zip(costs.widths, costs.loop_seconds, strict=True)}
            for name, costs in drafts.items()
        },
        "step_overhead_seconds": max(0.0, _standard_seconds(pair, config, context) - one),
        "prompt_token_seconds": plain.target_token_seconds,
    }


def _standard_seconds(pair: BenchPair, config: BenchConfig, context: int) -> float:
    """A token of standard decoding, behind one of the other prompts; behind any tokens where there is none."""
    others = list(chain(*pair.others.values()))
    prompt = list(others[0].tokens) if others else [0] * (context // 2)
    limit = pair.target.max_positions or context + 32
    number = max(2, min(config.max_new_tokens, limit - len(prompt)))
    steps: list[float] = []
    for _ in range(4):
        seconds = autoregressive_decode(pair.target, prompt, max_new_tokens=number).rows[0].token_seconds
        steps += [now - before for before, now in zip(seconds, seconds[1:], strict=False)]
    return median(steps)


def alphas(pair: BenchPair, config: BenchConfig) -> list[dict[str, Any]]:
    """How many draft tokens were tested and accepted on the other prompts, for each setting."""
    found: list[dict[str, Any]] = []
    settings = product(pair.drafts.items(), pair.others.items(), config.temperatures, config.rules)
    for (name, drafter), (domain, prompts), temperature, rule in settings:
        if not isinstance(drafter, Drafter):
            continue
        decoding = DecodingConfig(
            temperature=temperature,
            rule=rule,
            num_draft_tokens=min(WINDOW, drafter.max_draft_tokens or WINDOW),
            max_new_tokens=config.max_new_tokens,
            eos=() if config.ignore_eos else pair.eos,
            seed=config.seed,
        )
        case = Case(method=SPECULATIVE, target=pair.target, config=decoding, prompts=prompts, drafter=drafter)
        try:
            counts = case.decode(seed=config.seed).counts
        except FAILURES:  # its cases fail too, and say why
            continue
        assert counts is not None
        found.append(
            {"draft": name, "domain": domain, "temperature": temperature, "rule": rule.label}
            | {"num_tested": counts.num_tested, "num_accepted": counts.num_accepted}
        )
    return found
