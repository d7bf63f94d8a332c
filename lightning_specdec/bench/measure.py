"""The one way to measure decoding: cases are warmed up, take turns, and yield rows."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_specdec.bench.pieces import (
    PIECE_TOKENS,
    Stream,
    Tape,
    WholeStream,
    pairs_by_turn,
    take_turns,
)
from lightning_specdec.bench.records import (
    DRAFTING,
    HUGGING_FACE,
    OURS,
    SPECULATIVE,
    STANDARD,
    Comparison,
    Record,
    comparisons,
)
from lightning_specdec.bench.run_progress import RunProgress
from lightning_specdec.bench.verdict import best as best
from lightning_specdec.bench.verdict import ranked as ranked
from lightning_specdec.config.checks import require_int
from lightning_specdec.config.decoding import MAX_TOKENS, DecodingConfig
from lightning_specdec.config.kinds import DRAFTERS, RULES, Choice
from lightning_specdec.config.memory import available_bytes
from lightning_specdec.config.terminal import one_line
from lightning_specdec.data.corpus import tokens_sha256
from lightning_specdec.data.prompts import Prompt
from lightning_specdec.decoding import (
    AdaptiveWindow,
    DecodeResult,
    RowResult,
    Window,
    merge_results,
    open_session,
)
from lightning_specdec.decoding.autoregressive import open_standard
from lightning_specdec.decoding.calibration import load_or_measure, stored
from lightning_specdec.decoding.requests import check_batch, check_eos, num_shared
from lightning_specdec.decoding.windows import DEFAULT_WINDOW
from lightning_specdec.drafters import Drafter, NGramWithFallback
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.model_config import FOREIGN
from lightning_specdec.rules import AcceptanceRule, Sampling, make_rule

if TYPE_CHECKING:
    from lightning_specdec.bench.huggingface import HuggingFace

FAILURES = (ValueError, RuntimeError, MemoryError)
"""Errors that a case of ours may fail with. Any other is a fault of the program and is raised."""
_FOREIGN_FAILURES = tuple(error_type for error_type in FOREIGN if error_type is not OSError)
COMPARING = "decoding with and without the draft"
"""What a comparison shows while it lasts."""
_NUM_DECIMALS = 7
"""Decimals of stored seconds: a tenth of a microsecond."""
_MAX_ERROR_LENGTH = 1000


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to decode some prompts.

    Args:
        method: one of `rows.OURS` and `rows.HUGGING_FACE`.
        target: packed, as every method decodes with it.
        prompts: all of one domain.
        drafter: in the form that drafts (fused), or the reason why it cannot; None if no drafter of
            this package runs.
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
        """The acceptance rule; None for methods other than speculative decoding."""
        if self.method != SPECULATIVE:
            return None
        return make_rule(self.config.rule)

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """Errors that it may fail with while other cases go on."""
        return _FOREIGN_FAILURES if self.method in HUGGING_FACE else FAILURES

    @property
    def keeps_tokens(self) -> bool:
        """Whether it must generate standard decoding's tokens (Hugging Face's: up to rounding)."""
        if self.rule is not None:
            return self.rule.keeps_tokens(greedy=self.config.greedy)
        return self.method == STANDARD or self.config.greedy

    def prepared(self) -> Case:
        """The case ready to decode.

        An `auto` window depends on the costs of calls, which are measured once for this machine.

        Raises:
            ValueError: it has no drafter.
        """
        if isinstance(self.drafter, str):
            raise ValueError(self.drafter)
        if self.method != SPECULATIVE or self.config.num_draft_tokens != "auto":
            return self

        assert self.drafter is not None
        costs = load_or_measure(self.target, self.drafter, **self._measured_settings)
        return replace(self, config=self.config.changed(num_draft_tokens=AdaptiveWindow(costs)))

    def has_costs(self) -> bool:
        """Whether it has been measured on this machine what the calls of an `auto` window cost."""
        assert isinstance(self.drafter, Drafter)
        return stored(self.target, self.drafter, **self._measured_settings) is not None

    @property
    def _measured_settings(self) -> dict[str, Any]:
        """The settings that the costs of calls depend on."""
        return {
            "batch_size": self.batch_size,
            "rule": self.rule,
            "sampling": Sampling.of(self.config),
        }

    def measured(self, repeat: int, result: DecodeResult, **figures: Any) -> Record:
        """The row of a repeat with the figures of its result, and others."""
        return self.row(repeat, **_figures(self, result), **figures)

    @property
    def num_batches(self) -> int:
        """Batches that the prompts are decoded in."""
        return -(-len(self.prompts) // self.batch_size)

    def tape(self, repeat: int = 0, *, is_endless: bool = False) -> Tape:
        """The case as a tape, whose answers are the batches of prompts in their order.

        Args:
            repeat: the repeat whose seed is used.
            is_endless: whether the prompts are decoded again and again, with the seeds of further
                repeats.
        """
        return Tape(
            lambda number: self._open(number, repeat),
            num_answers=None if is_endless else self.num_batches,
            whole_answers=self.target.device.type == "cuda",
        )

    def _open(self, number: int, repeat: int) -> Stream:
        """Open the stream of a batch by its number; further rounds through the prompts follow."""
        further_repeats, batch_number = divmod(number, self.num_batches)
        start = batch_number * self.batch_size
        batch = self.prompts[start : start + self.batch_size]
        texts = [list(prompt.tokens) for prompt in batch]
        indices = list(range(start, start + len(batch)))
        config = self.config.changed(seed=self.config.seed + repeat + further_repeats)
        if self.method in HUGGING_FACE:
            assert self.baseline is not None
            decode = self.baseline.decode
            return WholeStream(
                lambda: decode(self.method, texts, indices, config, draft=self.draft)
            )
        if self.method == STANDARD:
            return Stream(open_standard(self.target, texts, config, indices=indices))
        assert isinstance(self.drafter, Drafter)
        # The answers of other runs must not help it.
        drafter = self.drafter.fresh()
        return Stream(open_session(self.target, drafter, texts, config, indices=indices))

    def row(self, repeat: int, **figures: Any) -> Record:
        """A row with the settings of the case and these figures."""
        window = self.config.num_draft_tokens if self.method in DRAFTING else None
        num_draft_tokens: Any = window
        if isinstance(window, Window):
            figures["window"] = window.to_dict()
            num_draft_tokens = getattr(window, "largest", window)
        if isinstance(window, AdaptiveWindow):
            num_draft_tokens = "auto"

        rule = self.rule
        return Record(
            repeat=repeat,
            pair=self.pair,
            method=self.method,
            draft=self.draft,
            domain=self.domain,
            num_draft_tokens=num_draft_tokens,
            temperature=self.config.temperature,
            batch_size=self.batch_size,
            rule=None if rule is None else rule_label(self.config.rule),
            lossless=None if rule is None else rule.lossless and self.target.lossy_reason is None,
            seed=self.config.seed + repeat,
            max_new_tokens=self.config.max_new_tokens,
            **figures,
        )

    def failed(self, repeat: int, error: BaseException) -> Record:
        """The row of a repeat that failed."""
        return self.row(repeat, error=one_line(error)[:_MAX_ERROR_LENGTH])


def measure(
    cases: Sequence[Case],
    *,
    repeats: int = 5,
    warmup: int = 1,
    known: Mapping[tuple[Any, ...], Record] | None = None,
    progress: RunProgress | None = None,
) -> Iterator[Record]:
    """Measure cases that are compared with each other; yields each row after its measurement.

    All cases take turns after every few rounds of a text, in the warm-up and in each repeat, so
    that a machine that drifts or is busy for a while is fair to all. Transformers' methods and
    methods on a GPU take turns after each batch of prompts, and so do all methods if their states
    do not fit the memory together.

    Repeat i has the seed of the config plus i. A case that fails yields one row with its error and
    is left out from then on. Ctrl-C raises KeyboardInterrupt; rows yielded before are complete.

    Args:
        cases: standard decoding first, whose tokens the others are compared with.
        repeats: timed runs of each case.
        warmup: untimed runs before them.
        known: rows of earlier runs by cell and repeat, which are not measured again. If a case
            lacks a repeat, standard decoding runs beside it again.
        progress: of a measurement that these cases are a part of.
    """
    require_int("repeats", repeats, 1)
    require_int("warmup", warmup, 0)
    known = known or {}
    if progress is not None:
        yield from _measure(cases, repeats, warmup, known, progress)
        return
    num_runs = planned_runs(cases, repeats=repeats, warmup=warmup, known=known)
    with RunProgress("measuring", num_runs) as own_progress:
        yield from _measure(cases, repeats, warmup, known, own_progress)


def planned_runs(
    cases: Sequence[Case],
    *,
    repeats: int,
    warmup: int,
    known: Mapping[tuple[Any, ...], Record],
) -> dict[Hashable, int]:
    """How often `measure` runs each case, warm-up included, by its cell."""
    num_runs: dict[Hashable, int] = {}
    for case in cases:
        num_missing = len(missing_repeats(case, repeats, known))
        num_runs[case.cell] = num_missing + warmup if num_missing else 0
    return num_runs


def _measure(
    cases: Sequence[Case],
    repeats: int,
    warmup: int,
    known: Mapping[tuple[Any, ...], Record],
    progress: RunProgress,
) -> Iterator[Record]:
    """`measure`, after its checks."""
    missing = [missing_repeats(case, repeats, known) for case in cases]
    if not any(missing):
        return
    if not _has_failed(cases[0], repeats, known):
        # Standard decoding runs beside every missing repeat of another case.
        missing[0] = sorted(set().union(*missing))

    ready_cases: dict[int, Case] = {}
    for case_index, case in enumerate(cases):
        if not missing[case_index]:
            continue
        try:
            ready_cases[case_index] = case.prepared()
        except case.failures as error:
            progress.drop(case.cell)
            yield case.failed(missing[case_index][0], error)

    progress.resume()
    for case_index, failure in _warm_up(ready_cases, warmup, progress):
        yield cases[case_index].failed(missing[case_index][0], failure)

    for repeat in range(repeats):
        running_cases = {}
        for case_index, case in ready_cases.items():
            if repeat in missing[case_index]:
                running_cases[case_index] = case
        for case_index, (row, _) in zip(
            running_cases, _run_repeat(running_cases, repeat, progress), strict=True
        ):
            if row.error is not None:
                del ready_cases[case_index]
            if (row.cell, repeat) not in known:
                yield row
    progress.pause()


def _warm_up(
    ready_cases: dict[int, Case],
    warmup: int,
    progress: RunProgress,
) -> Iterator[tuple[int, Exception]]:
    """Run cases in turn without keeping their rows; removes and yields those that fail."""
    for repeat in range(warmup):
        for case_index, outcome in _run_in_turns(ready_cases, repeat, progress).items():
            if isinstance(outcome, Exception):
                del ready_cases[case_index]
                yield case_index, outcome


def _has_failed(case: Case, repeats: int, known: Mapping[tuple[Any, ...], Record]) -> bool:
    """Whether a case has failed in an earlier run."""
    rows = [known.get((case.cell, repeat)) for repeat in range(repeats)]
    return any(row is not None and row.error is not None for row in rows)


class _Run(NamedTuple):
    """One repeat of a case; a case that failed has no result."""

    row: Record
    result: DecodeResult | None


def _run_repeat(
    running_cases: Mapping[int, Case],
    repeat: int,
    progress: RunProgress,
    deadline: float = math.inf,
) -> list[_Run]:
    """Run one repeat of cases that take turns.

    Args:
        running_cases: by their index; standard decoding has index 0.
        deadline: no answer begins after this time, on the clock of `time.monotonic`, but the first.
    """
    outcomes = _run_in_turns(running_cases, repeat, progress, deadline)
    standard_tape = outcomes.get(0)
    if isinstance(standard_tape, Exception):
        standard_tape = None
    expected = None if standard_tape is None else merge_results(standard_tape.results())

    runs = []
    for case_index, outcome in outcomes.items():
        case = running_cases[case_index]
        if isinstance(outcome, Exception):
            runs.append(_Run(case.failed(repeat, outcome), None))
            continue
        result = merge_results(outcome.results())
        figures: dict[str, Any] = {}
        if case_index == 0:
            # Marks a row of standard decoding beside which others took turns.
            figures["pieces"] = []
        elif standard_tape is not None:
            figures["pieces"] = list(pairs_by_turn(standard_tape, outcome).values()) or None
        row = case.measured(repeat, result, **figures)
        if case.keeps_tokens:
            row = replace(row, **_beside(result, expected))
        runs.append(_Run(row, result))
    return runs


def _run_in_turns(
    running_cases: Mapping[int, Case],
    repeat: int,
    progress: RunProgress,
    deadline: float = math.inf,
) -> dict[int, Tape | Exception]:
    """Run one repeat of cases that take turns; returns each case's tape, or its error.

    Args:
        deadline: as for `_run_repeat`.
    """
    cases = list(running_cases.values())
    tapes = [case.tape(repeat) for case in cases]
    errors: dict[int, Exception] = {}
    num_pieces = 0
    start = time.monotonic()

    def run_piece(index: int, goal: int) -> None:
        nonlocal num_pieces
        case = cases[index]
        tape = tapes[index]
        if tape.is_over:
            return
        try:
            tape.run_piece(goal)
        except case.failures as error:
            errors[index] = error
            tape.abandon()
            progress.drop(case.cell)
            return
        if num_pieces == 0 and not _fit_together(tape, len(tapes)):
            for other_tape in tapes:
                other_tape.whole_answers = True
        num_pieces += 1
        num_rows = min(case.batch_size, len(case.prompts))
        progress.after_piece(case.cell, tape, case.config.max_new_tokens * num_rows)
        if tape.is_over:
            progress.finish_run(case.cell)

    batch_size = max((case.batch_size for case in cases), default=1)
    for _ in take_turns(tapes, piece_tokens=PIECE_TOKENS * batch_size, run_piece=run_piece):
        seconds = time.monotonic() - start
        if not _has_time_for_more(tapes[0], cases[0], seconds, deadline - start):
            # All cases end with the same answer, so that their texts stay comparable.
            num_answers = max(tape.num_begun for tape in tapes)
            for tape in tapes:
                tape.end_after(num_answers)

    outcomes: dict[int, Tape | Exception] = {}
    for index, case_index in enumerate(running_cases):
        outcomes[case_index] = errors.get(index, tapes[index])
    return outcomes


def _has_time_for_more(tape: Tape, case: Case, seconds: float, max_seconds: float) -> bool:
    """Whether another answer would end in time; true while none could begin in the next turn.

    Args:
        tape: of a case that takes turns with others.
        case: its case.
        seconds: time of all turns so far.
        max_seconds: time that there is for all turns.
    """
    if seconds >= max_seconds:
        return False
    most_tokens = case.config.max_new_tokens * case.batch_size
    num_left = most_tokens * tape.num_begun - tape.num_tokens
    if num_left > PIECE_TOKENS * case.batch_size:
        return True
    # Reading the prompts is a part of this, so a later guess is better than an early one.
    answer_seconds = seconds * most_tokens / max(1, tape.num_tokens)
    return (tape.num_begun + 1) * answer_seconds <= max_seconds


class MeasuredPair(NamedTuple):
    """One repeat of standard decoding and of another case that took turns with it."""

    standard_row: Record
    row: Record
    standard_result: DecodeResult
    result: DecodeResult

    @property
    def comparison(self) -> Comparison:
        """The figures of the other case beside those of standard decoding."""
        return comparisons([self.standard_row, self.row])[-1]


def compare_once(
    target: LanguageModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    *,
    max_seconds: float | None = None,
    has_warm_up: bool = True,
) -> MeasuredPair:
    """Decode prompts once with and without a drafter, in turns.

    Args:
        target, drafter: in the form that is to be measured.
        max_seconds: time after which no further prompt is begun; at least one is decoded.
        has_warm_up: whether a few tokens are decoded before the measurement.

    Raises:
        ValueError: the pair cannot decode these prompts with these settings.
    """
    deadline = math.inf if max_seconds is None else time.monotonic() + max_seconds
    standard = _standard_case(target, prompts, config, batch_size=1)
    name = DRAFTERS.name_of(type(drafter))
    speculative = replace(standard, method=SPECULATIVE, drafter=drafter, draft=name)
    both = {0: standard, 1: speculative}
    progress = RunProgress(COMPARING, {case.cell: 1 for case in both.values()})
    progress.deadline = deadline
    with progress:
        if has_warm_up:
            for case in both.values():
                case.tape().run_piece(PIECE_TOKENS)
        standard_run, run = _run_repeat(both, 0, progress, deadline)
    for row, _ in (standard_run, run):
        if row.error is not None:
            raise ValueError(row.error)
    assert standard_run.result is not None
    assert run.result is not None
    return MeasuredPair(standard_run.row, run.row, standard_run.result, run.result)


def _fit_together(tape: Tape, num_tapes: int) -> bool:
    """Whether the states of so many answers fit half of the free memory at the same time.

    Args:
        tape: has begun an answer, which is as large as those of the others.
    """
    num_free = available_bytes("cpu")
    # A draft has states too; they are smaller than those of its target.
    num_needed = (num_tapes - 1) * 2 * tape.num_bytes
    return num_free is None or num_needed <= num_free // 2


def missing_repeats(case: Case, repeats: int, known: Mapping[tuple[Any, ...], Record]) -> list[int]:
    """The repeats of a case that are still to be run; none of a case that has failed."""
    missing = []
    for repeat in range(repeats):
        row = known.get((case.cell, repeat))
        if row is None:
            missing.append(repeat)
        elif row.error is not None:
            return []
    return missing


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
    """Speculative decoding compared with standard decoding.

    Args:
        target, drafter: in the form that decodes: packed and fused.
        batch_size: prompts that are decoded together.
        mode: "both", or the only method to measure.

    Raises:
        ValueError: the pair cannot decode these prompts with these settings.
        KeyboardInterrupt: Ctrl-C before both finished one repeat; later, Ctrl-C returns the
            finished repeats.
    """
    if mode not in ("both", *OURS):
        raise ValueError(f"mode must be both, standard or speculative, got {mode!r}")
    standard = _standard_case(target, prompts, config, batch_size)
    comparison = _compare(
        standard,
        drafter,
        DRAFTERS.name_of(type(drafter)),
        repeats=repeats,
        warmup=warmup,
        mode=mode,
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
    """Every drafter with every window that it can fill, and standard decoding; yields each
    comparison after its measurement.

    A case that fails is yielded with its error. On Ctrl-C, what both methods have finished is
    yielded, then KeyboardInterrupt is raised.

    Raises:
        ValueError: before anything is measured, for settings that fail in every case.
    """
    if not drafters:
        raise ValueError("there is no drafter to measure: give at least one")
    if not windows:
        raise ValueError("there is no window to measure: give at least one")
    for window in windows:
        require_int("num_draft_tokens", window, 1, MAX_TOKENS)
    require_int("repeats", repeats, 1)
    standard = _standard_case(target, prompts, config, batch_size)
    for drafter in drafters.values():
        drafter.check_target(target)
    # A separate generator, so that the checks above run now and not at the first comparison.
    return _sweep(standard, drafters, windows, repeats=repeats, warmup=warmup)


def _sweep(
    standard: Case,
    drafters: Mapping[str, Drafter],
    windows: Sequence[int],
    *,
    repeats: int,
    warmup: int,
) -> Iterator[Comparison]:
    for name, drafter in drafters.items():
        for window in windows_of(drafter.max_draft_tokens, windows):
            config = standard.config.changed(num_draft_tokens=window)
            case = replace(standard, config=config)
            comparison = _compare(case, drafter, name, repeats=repeats, warmup=warmup)
            yield comparison
            if comparison.interrupted:
                raise KeyboardInterrupt


def windows_of(max_draft_tokens: int | None, windows: Sequence[int]) -> list[int]:
    """The different windows for a drafter that proposes up to `max_draft_tokens` tokens in a round
    (None: any number)."""
    if max_draft_tokens is not None:
        windows = [min(window, max_draft_tokens) for window in windows]
    return list(dict.fromkeys(windows))


def rule_label(rule: Any) -> str:
    """The name of a rule, with the settings that were given."""
    if isinstance(rule, AcceptanceRule):
        return RULES.name_of(type(rule))
    return Choice.read(rule or "ExactMatch", "rule").label


def _standard_case(
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    batch_size: int,
) -> Case:
    """Standard decoding of prompts, after checking them."""
    require_int("batch_size", batch_size, 1)
    batch = check_batch(prompts, target, config)
    check_eos(config.eos, target.vocab_size)
    return Case(
        method=STANDARD,
        target=target,
        config=config,
        prompts=[Prompt(str(index), "", tuple(tokens)) for index, tokens in batch],
        batch_size=batch_size,
    )


def _compare(
    standard: Case,
    drafter: Drafter,
    name: str,
    *,
    repeats: int,
    warmup: int,
    mode: str = "both",
) -> Comparison:
    """One comparison; on Ctrl-C, of the repeats that all methods have finished."""
    num_draft_tokens = standard.config.num_draft_tokens or DEFAULT_WINDOW
    speculative = replace(
        standard,
        method=SPECULATIVE,
        drafter=drafter,
        draft=name,
        config=standard.config.changed(num_draft_tokens=num_draft_tokens),
    )
    cases = [case for case in (standard, speculative) if mode in ("both", case.method)]

    rows: list[Record] = []
    interrupted = False
    try:
        # One by one, so that the rows before Ctrl-C stay.
        for row in measure(cases, repeats=repeats, warmup=warmup):
            rows.append(row)
    except KeyboardInterrupt:
        interrupted = True
        rows = _complete_repeats(rows, len(cases))
        if not rows:
            raise

    for row in rows:
        if row.method == STANDARD and row.error is not None:
            raise ValueError(row.error)
    return replace(comparisons(rows)[-1], interrupted=interrupted)


def _complete_repeats(rows: Sequence[Record], num_cases: int) -> list[Record]:
    """The rows of those repeats that every case has finished."""
    repeats = [row.repeat for row in rows]
    return [row for row in rows if repeats.count(row.repeat) == num_cases]


def _beside(result: DecodeResult, expected: DecodeResult | Record | None) -> dict[str, Any]:
    """Whether the tokens are standard decoding's, as fields of a row.

    Args:
        expected: standard decoding of this run, or the row of an earlier one, which has only the
            hash of its tokens; None if it failed.
    """
    if expected is None:
        return {}
    if isinstance(expected, Record):
        if expected.tokens_sha256 is None:
            return {}
        return {"same_tokens": expected.tokens_sha256 == tokens_sha256(result.tokens)}

    pairs = zip(expected.tokens, result.tokens, strict=True)
    for prompt_index, (expected_tokens, tokens) in enumerate(pairs):
        if expected_tokens != tokens:
            token_index = num_shared(expected_tokens, tokens)
            return {"same_tokens": False, "differs_at": [prompt_index, token_index]}
    return {"same_tokens": True}


def _figures(case: Case, result: DecodeResult) -> dict[str, Any]:
    """The figures of a run, as fields of a row."""
    phase_seconds = dict(result.phase_seconds)
    if phase_seconds:
        # Time between the phases belongs to the rest.
        phase_seconds["rest"] += result.seconds - sum(phase_seconds.values())

    prompt_seconds = []
    first_token_seconds = []
    for row in result.rows:
        last_seconds = row.token_seconds[-1] if row.token_seconds else 0
        prompt_seconds.append(round(last_seconds, _NUM_DECIMALS))
        if row.token_seconds:
            first_token_seconds.append(row.token_seconds[0])

    figures: dict[str, Any] = {
        "seconds": result.seconds,
        "num_new_tokens": result.num_new_tokens,
        "num_target_calls": result.num_target_calls,
        "num_draft_calls": result.num_draft_calls,
        "peak_memory_bytes": result.peak_memory_bytes,
        "phase_seconds": phase_seconds or None,
        "num_row_rounds": sum(row.num_rounds for row in result.rows),
        "prompt_seconds": prompt_seconds,
        "prompt_new_tokens": [len(row.tokens) for row in result.rows],
        "time_to_first_token": None,
        "tokens_sha256": tokens_sha256(result.tokens),
    }
    if first_token_seconds:
        figures["time_to_first_token"] = statistics.fmean(first_token_seconds)
    if result.counts is not None:
        figures.update(vars(result.counts))
        figures["num_changed"] = result.num_changed
        # A mean over copied and drafted tokens is the cost of neither.
        if not isinstance(case.drafter, NGramWithFallback):
            figures["num_draft_steps"] = num_draft_steps(result.rows, case.batch_size)
    return figures


def num_draft_steps(rows: Sequence[RowResult], batch_size: int) -> int:
    """Sequential draft tokens: in each round of a batch, those of the longest draft."""
    draft_lengths = []
    for row in rows:
        rounds = row.rounds or []
        draft_lengths.append([len(decoding_round.drafted) for decoding_round in rounds])

    num_steps = 0
    for start in range(0, len(rows), batch_size):
        batch_lengths = draft_lengths[start : start + batch_size]
        # Rows with fewer rounds draft nothing in the later ones.
        for round_lengths in zip_longest(*batch_lengths, fillvalue=0):
            num_steps += max(round_lengths)
    return num_steps
