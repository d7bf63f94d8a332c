"""The one way to measure decoding: cases are warmed up, take turns, and give rows."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from lightning_specdec.bench.rows import (
    DRAFTING,
    HUGGING_FACE,
    OURS,
    SPECULATIVE,
    STANDARD,
    Comparison,
    ResultRow,
    comparisons,
)
from lightning_specdec.config.checks import require_int
from lightning_specdec.config.decoding import MAX_TOKENS, DecodingConfig
from lightning_specdec.config.kinds import DRAFTERS, RULES, Choice
from lightning_specdec.config.terminal import one_line
from lightning_specdec.data.corpus import tokens_sha256
from lightning_specdec.data.prompts import Prompt
from lightning_specdec.decoding import (
    AdaptiveWindow,
    DecodeResult,
    RowResult,
    Window,
    autoregressive_decode,
    merge_results,
    speculative_decode,
)
from lightning_specdec.decoding.calibration import load_or_measure
from lightning_specdec.decoding.rows import check_batch, check_eos, num_shared
from lightning_specdec.decoding.windows import DEFAULT_WINDOW
from lightning_specdec.drafters import Drafter, NGramWithFallback
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.model_config import FOREIGN
from lightning_specdec.rules import AcceptanceRule, Sampling, make_rule

if TYPE_CHECKING:
    from lightning_specdec.bench.huggingface import HuggingFace

FAILURES = (ValueError, RuntimeError, MemoryError)
"""What a case of ours may fail with; anything else is a fault of the program and is raised."""
_FOREIGN = tuple(each for each in FOREIGN if each is not OSError)
_COPIED = ("seconds", "num_new_tokens", "num_target_calls", "num_draft_calls", "peak_memory_bytes")
_DIGITS = 7
"""Of stored seconds behind the point: a tenth of a microsecond."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to decode some prompts.

    Args:
        method: one of `rows.OURS` and `rows.HUGGING_FACE`.
        target: packed, as every method decodes with it.
        prompts: all of one domain.
        drafter: as it drafts (fused), or why it cannot; None if no drafter of this package runs.
        draft: label of the drafter.
        batch_size: prompts that are decoded together.
        baseline: transformers' models, for Hugging Face's methods.
    """

    method: str
    target: LanguageModel = field(repr=False)
    config: DecodingConfig
    prompts: Sequence[Prompt] = field(repr=False)
    drafter: Drafter | str | None = field(default=None, repr=False)
    pair: str = ""
    draft: str | None = None
    domain: str = ""
    batch_size: int = 1
    baseline: HuggingFace | None = field(default=None, repr=False)

    @property
    def cell(self) -> tuple[Any, ...]:
        """What identifies its rows among those of a benchmark."""
        return self.row(0).cell

    @property
    def rule(self) -> AcceptanceRule | None:
        """What accepts draft tokens; None for methods other than speculative decoding."""
        return make_rule(self.config.rule) if self.method == SPECULATIVE else None

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """What it may fail with while the others go on."""
        return _FOREIGN if self.method in HUGGING_FACE else FAILURES

    @property
    def keeps_tokens(self) -> bool:
        """Whether it must give standard decoding's tokens (Hugging Face's methods: up to rounding)."""
        if self.rule is not None:
            return self.rule.keeps_tokens(greedy=self.config.greedy)
        return self.method == STANDARD or self.config.greedy

    def prepared(self) -> Case:
        """Ready to decode: an `auto` window goes by what calls cost, measured once for this machine.

        Raises:
            ValueError: it has no drafter.
        """
        if isinstance(self.drafter, str):
            raise ValueError(self.drafter)
        if self.method != SPECULATIVE or self.config.num_draft_tokens != "auto":
            return self
        assert self.drafter is not None
        costs = load_or_measure(
            self.target,
            self.drafter,
            batch_size=self.batch_size,
            rule=self.rule,
            sampling=Sampling.of(self.config),
        )
        return replace(self, config=self.config.changed(num_draft_tokens=AdaptiveWindow(costs)))

    def decode(self, *, seed: int) -> DecodeResult:
        """Decode the prompts, batch by batch, without garbage collection."""
        results, collecting = [], gc.isenabled()
        gc.disable()  # a collection would fall on whichever case happens to run
        try:
            for first in range(0, len(self.prompts), self.batch_size):
                texts = [
                    list(prompt.tokens) for prompt in self.prompts[first : first + self.batch_size]
                ]
                results.append(self._decode(texts, list(range(first, first + len(texts))), seed))
        finally:
            if collecting:
                gc.enable()
        return merge_results(results)

    def _decode(self, texts: list[list[int]], indices: list[int], seed: int) -> DecodeResult:
        config = self.config.changed(seed=seed)
        if self.method in HUGGING_FACE:
            assert self.baseline is not None
            return self.baseline.decode(self.method, texts, indices, config, draft=self.draft)
        if self.method == STANDARD:
            return autoregressive_decode(self.target, texts, config, indices=indices)
        assert isinstance(self.drafter, Drafter)
        return speculative_decode(self.target, self.drafter, texts, config, indices=indices)

    def run(self, repeat: int) -> tuple[ResultRow, DecodeResult]:
        """Decode once, with the seed of that repeat."""
        result = self.decode(seed=self.config.seed + repeat)
        return self.row(repeat, **_figures(self, result)), result

    def row(self, repeat: int, **figures: Any) -> ResultRow:
        rule, window = self.rule, self.config.num_draft_tokens if self.method in DRAFTING else None
        if isinstance(window, Window):
            figures["window"] = window.to_dict()
        return ResultRow(
            repeat=repeat,
            pair=self.pair,
            method=self.method,
            draft=self.draft,
            domain=self.domain,
            num_draft_tokens="auto"
            if isinstance(window, AdaptiveWindow)
            else getattr(window, "largest", window),
            temperature=self.config.temperature,
            batch_size=self.batch_size,
            rule=None if rule is None else rule_label(self.config.rule),
            lossless=None if rule is None else rule.lossless and self.target.lossy_reason is None,
            seed=self.config.seed + repeat,
            max_new_tokens=self.config.max_new_tokens,
            **figures,
        )

    def failed(self, repeat: int, error: BaseException) -> ResultRow:
        return self.row(repeat, error=one_line(error)[:1000])


def measure(
    cases: Sequence[Case],
    *,
    repeats: int = 5,
    warmup: int = 1,
    known: Mapping[tuple[Any, ...], ResultRow] | None = None,
) -> Iterator[ResultRow]:
    """Rows of cases that are compared with each other, each as it is measured.

    All cases are warmed up, then take turns (A B A B), so that a machine that drifts is fair to all. Repeat i has the
    seed of the config plus i. A case that fails gives one row with its error and is left out from then on. Ctrl-C
    raises KeyboardInterrupt; the rows that were given are whole.

    Args:
        cases: standard decoding first, which tokens are compared with.
        repeats: timed runs of each case.
        warmup: runs before them.
        known: rows of earlier runs by cell and repeat, which are not measured again.
    """
    require_int("repeats", repeats, 1)
    require_int("warmup", warmup, 0)
    known = known or {}
    ready: dict[int, Case] = {}
    for number, case in enumerate(cases):
        missing = missing_repeats(case, repeats, known)
        if not missing:
            continue
        try:
            ready[number] = case.prepared()
            for i in range(warmup):
                ready[number].decode(seed=case.config.seed + i)
        except case.failures as error:
            ready.pop(number, None)
            yield case.failed(missing[0], error)
    for repeat in range(repeats):
        expected: DecodeResult | ResultRow | None = known.get((cases[0].cell, repeat))
        for number, case in list(ready.items()):
            if (case.cell, repeat) in known:
                continue
            try:
                row, result = case.run(repeat)
            except case.failures as error:
                del ready[number]
                yield case.failed(repeat, error)
                continue
            if case.method == STANDARD:
                expected = result
            yield replace(row, **(_beside(result, expected) if case.keeps_tokens else {}))


def missing_repeats(
    case: Case, repeats: int, known: Mapping[tuple[Any, ...], ResultRow]
) -> list[int]:
    """The repeats of a case that are still to be run; none of one that has failed."""
    found = [known.get((case.cell, repeat)) for repeat in range(repeats)]
    if any(row is not None and row.error is not None for row in found):
        return []
    return [repeat for repeat, row in enumerate(found) if row is None]


def benchmark(
    target: LanguageModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    *,
    repeats: int = 10,
    warmup: int = 3,
    batch_size: int = 1,
    mode: str = "both",
) -> Comparison:
    """Speculative decoding beside standard decoding.

    Args:
        target, drafter: as they decode: packed and fused.
        batch_size: prompts that are decoded together.
        mode: "both", or the only method to measure.

    Raises:
        ValueError: the pair cannot decode these prompts so.
        KeyboardInterrupt: Ctrl-C before one repeat of both was over; later it gives the repeats that were.
    """
    if mode not in ("both", *OURS):
        raise ValueError(f"mode must be both, standard or speculative, got {mode!r}")
    standard = _standard(target, prompts, config, batch_size)
    comparison = _compared(
        standard, drafter, DRAFTERS.name_of(type(drafter)), repeats, warmup, mode
    )
    if comparison.error is not None and not comparison.rows:
        raise ValueError(comparison.error)
    return comparison


def sweep(
    target: LanguageModel,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    *,
    windows: Sequence[int] = (2, 4, 6, 8),
    repeats: int = 5,
    warmup: int = 1,
    batch_size: int = 1,
) -> Iterator[Comparison]:
    """Every drafter with every window that it can fill, each beside standard decoding, as it is measured.

    One that fails is given with its error. On Ctrl-C what both methods have finished is given, then KeyboardInterrupt
    is raised.

    Raises:
        ValueError: before anything is measured, for what no case could do.
    """
    for name, given in (("drafter", drafters), ("window", windows)):
        if not given:
            raise ValueError(f"there is no {name} to measure: give at least one")
    for window in windows:
        require_int("num_draft_tokens", window, 1, MAX_TOKENS)
    require_int("repeats", repeats, 1)
    standard = _standard(target, prompts, config, batch_size)
    for drafter in drafters.values():
        drafter.check_target(target)

    def compared() -> Iterator[Comparison]:
        for name, drafter in drafters.items():
            for window in windows_of(drafter.max_draft_tokens, windows):
                case = replace(standard, config=config.changed(num_draft_tokens=window))
                comparison = _compared(case, drafter, name, repeats, warmup)
                yield comparison
                if comparison.interrupted:
                    raise KeyboardInterrupt

    return compared()


def best(found: Sequence[Comparison]) -> Comparison | None:
    """The one whose speedup is the surest, of those with the tokens they should."""
    right = (
        each
        for each in ranked(found)
        if each.walltime_speedup is not None and each.same_tokens is not False
    )
    return next(right, None)


def ranked(found: Sequence[Comparison]) -> list[Comparison]:
    """By the lower end of the speedup's interval, the highest first.

    Those without an interval only come first where none has one; then by the speedup alone.
    """

    def key(each: Comparison) -> tuple[float, float]:
        if each.walltime_speedup is None:
            return -1.0, 0.0
        low = each.walltime_speedup.low
        return low if math.isfinite(low) else 0.0, each.walltime_speedup.value

    return sorted(found, key=key, reverse=True)


def windows_of(most: int | None, windows: Sequence[int]) -> list[int]:
    """The windows that differ for a drafter that proposes at most so many tokens (None: any number) in a round."""
    return list(
        dict.fromkeys(windows if most is None else [min(window, most) for window in windows])
    )


def rule_label(rule: Any) -> str:
    """Its name, with the settings that were given."""
    if isinstance(rule, AcceptanceRule):
        return RULES.name_of(type(rule))
    return Choice.read(rule or "ExactMatch", "rule").label


def _standard(
    target: LanguageModel, prompts: Sequence[Sequence[int]], config: DecodingConfig, batch_size: int
) -> Case:
    """Standard decoding of prompts that were checked."""
    require_int("batch_size", batch_size, 1)
    batch = check_batch(prompts, target, config)
    check_eos(config.eos, target.vocab_size)
    several = [Prompt(str(number), "", tuple(text)) for number, text in batch]
    return Case(
        method=STANDARD, target=target, config=config, prompts=several, batch_size=batch_size
    )


def _compared(
    standard: Case, drafter: Drafter, name: str, repeats: int, warmup: int, mode: str = "both"
) -> Comparison:
    """One comparison; on Ctrl-C of the repeats that are over."""
    config = standard.config.changed(
        num_draft_tokens=standard.config.num_draft_tokens or DEFAULT_WINDOW
    )
    both = (
        standard,
        replace(standard, method=SPECULATIVE, drafter=drafter, draft=name, config=config),
    )
    cases = [case for case in both if mode in ("both", case.method)]
    rows: list[ResultRow] = []
    interrupted = False
    try:
        for row in measure(cases, repeats=repeats, warmup=warmup):
            rows.append(row)
    except KeyboardInterrupt:
        interrupted = True
        rows = [
            row for row in rows if sum(each.repeat == row.repeat for each in rows) == len(cases)
        ]
        if not rows:
            raise
    failed = next((row for row in rows if row.method == STANDARD and row.error is not None), None)
    if failed is not None:
        raise ValueError(failed.error)
    return replace(comparisons(rows)[-1], interrupted=interrupted)


def _beside(result: DecodeResult, expected: DecodeResult | ResultRow | None) -> dict[str, Any]:
    """Whether the tokens are standard decoding's, of this run or of one that is known by its hash."""
    if expected is None or (isinstance(expected, ResultRow) and expected.tokens_sha256 is None):
        return {}
    if isinstance(expected, ResultRow):
        return {"same_tokens": expected.tokens_sha256 == tokens_sha256(result.tokens)}
    for prompt, (one, other) in enumerate(zip(expected.tokens, result.tokens, strict=True)):
        if one != other:
            return {"same_tokens": False, "differs_at": [prompt, num_shared(one, other)]}
    return {"same_tokens": True}


def _figures(case: Case, result: DecodeResult) -> dict[str, Any]:
    phases = dict(result.phase_seconds)
    if phases:  # what no phase has seen belongs to the rest
        phases["rest"] += result.seconds - sum(phases.values())
    firsts = [row.token_seconds[0] for row in result.rows if row.token_seconds]
    figures: dict[str, Any] = {
        **{name: getattr(result, name) for name in _COPIED},
        "phase_seconds": phases or None,
        "num_row_rounds": sum(row.num_rounds for row in result.rows),
        "prompt_seconds": [round(sum(row.token_seconds[-1:]), _DIGITS) for row in result.rows],
        "prompt_new_tokens": [len(row.tokens) for row in result.rows],
        "time_to_first_token": statistics.fmean(firsts) if firsts else None,
        "tokens_sha256": tokens_sha256(result.tokens),
    }
    if result.counts is not None:
        figures |= {**vars(result.counts), "num_changed": result.num_changed}
        if not isinstance(
            case.drafter, NGramWithFallback
        ):  # a mean with copied tokens is no draft's cost
            figures["num_draft_steps"] = num_draft_steps(result.rows, case.batch_size)
    return figures


def num_draft_steps(rows: Sequence[RowResult], batch_size: int) -> int:
    """Draft tokens one after the other: of every round of a batch, those of its longest draft."""
    drafted = [[len(each.drafted) for each in row.rounds or []] for row in rows]
    batches = [drafted[first : first + batch_size] for first in range(0, len(drafted), batch_size)]
    return sum(max(step) for batch in batches for step in zip_longest(*batch, fillvalue=0))
