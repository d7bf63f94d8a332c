"""Measures what draft, target and loop cost on this machine, by rounds of a real session."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import torch

from lightning_specdec import __version__
from lightning_specdec.config.activity import FIRST_SECONDS, Activity
from lightning_specdec.config.decoding import MAX_TOKENS, DecodingConfig
from lightning_specdec.config.files import cache_home, replaced
from lightning_specdec.config.kinds import path_of
from lightning_specdec.decoding.requests import Request, power_of_two
from lightning_specdec.decoding.session import Session
from lightning_specdec.decoding.timing import PHASES
from lightning_specdec.decoding.windows import Calibration, Plan, Window
from lightning_specdec.drafters import (
    Draft,
    Drafter,
    DraftRequest,
    LookupDrafter,
    NGramWithFallback,
    last_two_tokens_of,
)
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import Sampling, make_rule

log = logging.getLogger(__name__)
warn_once = functools.cache(log.warning)
inform_once = functools.cache(log.info)

WINDOWS = (1, 2, 4, 8, 16)
"""Draft tokens of the rounds that are measured; between them, costs are nearly linear."""

FORMAT = 6
"""Version of the stored files: a change of what is measured raises it."""

FEWEST_PASSES = 4
MOST_PASSES = 12
"""Limits of the number of counted passes through all windows; within them the time decides."""

FEWEST_SLOW_PASSES = 2
SLOW_SECONDS = 10.0
VERY_SLOW_SECONDS = 30.0
"""Rounds of large models vary less. Where `FEWEST_PASSES` take longer than `SLOW_SECONDS`, fewer
do; and a single one after `VERY_SLOW_SECONDS`."""

LOOKUP_ROUNDS = 20
"""Rounds in which a lookup is measured."""

PERIOD = 24
"""Tokens after which the measured text repeats itself, so that a lookup finds something."""

_not_written: dict[Path, Calibration] = {}
"""What this process measured and could not write, by the file that it belongs into."""

PhaseSeconds = dict[str, float]
"""Seconds of a round by phase."""


class _MeasuredWindow(Window, Plan):
    """A window that the calibration sets, with padded drafts, so that calls have its width.

    Attributes:
        num_draft_tokens: of the next round.
    """

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.num_draft_tokens = largest
        self.shared_window: int | None = None

    def plan(self, *, jointly: bool) -> Plan:
        return self

    def windows(self, rows: Sequence[Request]) -> list[int]:
        return [self.num_draft_tokens] * len(rows)

    def adjust(self, draft: Draft, windows: Sequence[int]) -> Draft:
        num_missing = max(windows) - draft.tokens.shape[1]
        if num_missing == 0:
            return draft
        return _padded(draft, num_missing)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "measured"}


def _padded(draft: Draft, num_missing: int) -> Draft:
    """The draft with padding after its tokens, which counts for no row."""
    pad = torch.nn.functional.pad
    batch_size, num_drafted = draft.tokens.shape
    lengths = draft.lengths
    if lengths is None:
        lengths = torch.full((batch_size,), num_drafted, device=draft.tokens.device)
    probs = draft.probs
    if probs is not None:
        probs = pad(probs, (0, 0, 0, num_missing))
    logits = draft.logits
    if logits is not None:
        logits = pad(logits, (0, 0, 0, num_missing))
    tokens = pad(draft.tokens, (0, num_missing))
    return replace(draft, tokens=tokens, lengths=lengths, probs=probs, logits=logits)


def calibrate(
    target: LanguageModel,
    drafter: Drafter,
    config: DecodingConfig | None = None,
    *,
    batch_size: int = 1,
    context_length: int = 128,
    windows: Sequence[int] = WINDOWS,
    seconds: float = 2.0,
    notes: Notes | None = None,
    **changes: Any,
) -> Calibration:
    """Measure the costs of this pair with its decoding settings: medians over several passes.

    Args:
        drafter: as it will draft: fused or compiled. Of a drafter with a fallback, lookup and
            fallback are measured separately.
        config: how to decode; `changes` replace fields of it.
        context_length: tokens of text before the first call; fewer if a model's context is
            shorter.
        windows: draft tokens of the rounds; no more are measured than the drafter makes.
        seconds: how long to measure, if `FEWEST_PASSES` fit. Slow models take longer.
        notes: keep the passes so far, and continue those of an interrupted measurement.
    """
    measured_drafter = _drafter_to_measure(drafter).fresh()

    # The first rounds of a window are not counted: a call of another width than before costs more,
    # and recorded rounds are pipelined from the third on.
    is_recorded = target.init_state(1, 2).graphs is not None
    warmup_rounds = 2 if is_recorded else 1
    counted_rounds = 4 if is_recorded else 1
    rounds_per_window = warmup_rounds + counted_rounds

    most_new_tokens = _num_new_tokens(windows, rounds_per_window)
    max_length = _shortest_context(target, drafter, context_length, most_new_tokens)
    windows = _possible_windows(windows, measured_drafter, rounds_per_window, max_length)
    num_new = _num_new_tokens(windows, rounds_per_window)
    length = max(2, min(context_length, max_length - num_new))
    text = [i % PERIOD % target.vocab_size for i in range(length)]

    config = DecodingConfig.of(config, **changes).changed(eos=None, stop=(), max_new_tokens=num_new)
    measured_window = _MeasuredWindow(windows[-1])
    session = Session(
        target,
        measured_drafter,
        config,
        max_length=length + num_new,
        batch_size=batch_size,
        num_draft_tokens=measured_window,
    )

    # The first pass only warms up. Passes of an interrupted measurement count like any others.
    passes = [] if notes is None else notes.read(windows, length)
    num_missing = max(0, FEWEST_PASSES - len(passes))
    name = type(drafter).__name__
    of_rows = f" of {batch_size} rows" if batch_size > 1 else ""
    is_warm = False
    # A user who asks for "auto" does not expect to wait, so Python shows it by default.
    with Activity(
        f"measuring what rounds with {name}{of_rows} cost on this machine",
        (num_missing + 1) * (len(windows) + 1),
        unit="steps",
        level=logging.WARNING,
    ) as activity:
        while _needs_another(len(passes), session.timer.elapsed(), seconds):
            # Each pass begins with new rows, so that all passes are over the same lengths.
            rows = [session.add(text) for _ in range(batch_size)]
            one_pass = _measure(
                session, measured_window, windows, warmup_rounds, counted_rounds, activity
            )
            if is_warm:
                passes.append(one_pass)
                if notes is not None:
                    notes.write(passes, windows, length)
            is_warm = True
            for row in rows:
                session.cancel(row)
                session.release(row)

    costs = _costs(passes, windows, length, inside_target=measured_drafter.inside_target)
    if isinstance(drafter, NGramWithFallback):
        return costs.changed(lookup_seconds=_lookup_seconds(drafter.lookup, text, batch_size))
    return costs


def _needs_another(num_passes: int, elapsed: float, seconds: float) -> bool:
    """Whether to measure another pass.

    Args:
        num_passes: those that count so far.
        elapsed: seconds so far.
        seconds: how long to measure, if enough passes fit.
    """
    fewest = FEWEST_PASSES
    if elapsed >= SLOW_SECONDS:
        fewest = FEWEST_SLOW_PASSES
    if elapsed >= VERY_SLOW_SECONDS:
        fewest = 1
    return num_passes < fewest or (num_passes < MOST_PASSES and elapsed < seconds)


def _lookup_seconds(lookup: LookupDrafter, text: Sequence[int], batch_size: int) -> float:
    """Seconds of a lookup for all rows, after a text that grows by one token a round."""
    fresh_lookup = lookup.fresh()
    state = fresh_lookup.init_state(batch_size, len(text) + LOOKUP_ROUNDS)
    tail = last_two_tokens_of([text] * batch_size, torch.device("cpu"))
    windows = [max(WINDOWS)] * batch_size
    rounds = []
    for num_new in range(LOOKUP_ROUNDS):
        texts = [[*text, *text[:num_new]] for _ in range(batch_size)]
        start = time.perf_counter()
        fresh_lookup.look_up(state, DraftRequest(texts, tail, None), windows)
        rounds.append(time.perf_counter() - start)
    # The first round indexes the whole text.
    return median(rounds[1:])


def _drafter_to_measure(drafter: Drafter) -> Drafter:
    """The drafter that is called in a round that costs most."""
    if isinstance(drafter, NGramWithFallback):
        drafter = drafter.fallback
    if drafter.free == "min_confidence":
        # A draft that ends early would hide what its tokens cost.
        drafter = drafter.at(0.0)
    return drafter


def _shortest_context(
    target: LanguageModel,
    drafter: Drafter,
    context_length: int,
    most_new_tokens: int,
) -> int:
    """Most tokens of a text that both models can read, on one side of a position switch.

    Args:
        context_length: tokens that the text begins with; fewer if the new ones would not fit.
        most_new_tokens: tokens that a pass adds to the text; fewer if windows are left out.
    """
    limits = [MAX_TOKENS]
    for limit in (target.max_positions, drafter.max_positions):
        if limit is not None:
            limits.append(limit)
    longest = min(limits)

    switch = target.position_switch
    if switch is None:
        return longest
    first_length = min(context_length, longest - most_new_tokens)
    if first_length > switch:
        return longest
    # The text begins before the switch, so it has to end there too.
    return min(longest, switch)


def _possible_windows(
    windows: Sequence[int],
    drafter: Drafter,
    rounds_per_window: int,
    max_length: int,
) -> Sequence[int]:
    """The windows that the drafter can fill and that fit into the context; at least one."""
    max_draft_tokens = drafter.max_draft_tokens or max(windows)
    possible = sorted({min(window, max_draft_tokens) for window in windows})

    # Without the largest ones, a pass adds fewer tokens to its text of at least two.
    while len(possible) > 1 and _num_new_tokens(possible, rounds_per_window) + 2 > max_length:
        possible = possible[:-1]
    return possible


def _num_new_tokens(windows: Sequence[int], rounds_per_window: int) -> int:
    """Most tokens that a pass through these windows adds to a text."""
    prompt_round = windows[0] + 1
    window_rounds = sum((window + 1) * rounds_per_window for window in (*windows, 0))
    return prompt_round + window_rounds + 1


@dataclass
class _Pass:
    """Seconds of one pass through all windows.

    Args:
        prompt_round: the round that reads the prompt.
        window_rounds: a round of each window; 0 is a round without a draft.
    """

    prompt_round: PhaseSeconds
    window_rounds: dict[int, PhaseSeconds]

    def to_values(self) -> list[PhaseSeconds]:
        """The rounds as plain values, that of the prompt first."""
        return [self.prompt_round, *self.window_rounds.values()]

    @classmethod
    def from_values(cls, values: Any, windows: Sequence[int]) -> _Pass:
        """The pass that `to_values` wrote.

        Raises:
            ValueError, TypeError, KeyError: these are no such values.
        """
        rounds = []
        for value in values:
            seconds = {phase: float(value[phase]) for phase in PHASES}
            if not all(math.isfinite(number) and number >= 0 for number in seconds.values()):
                raise ValueError(f"seconds must be finite and at least 0, got {seconds}")
            rounds.append(seconds)
        prompt_round, *window_rounds = rounds
        return cls(prompt_round, dict(zip((*windows, 0), window_rounds, strict=True)))


class Notes:
    """The passes of a measurement in a file, so that an interrupted one loses nothing.

    Args:
        path: the file, which is written after each pass.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, windows: Sequence[int], length: int) -> list[_Pass]:
        """The passes of an earlier measurement; none if there was none, or a different one.

        Args:
            windows, length: as of `_costs`.
        """
        try:
            values = json.loads(self.path.read_text())
            if values["windows"] != list(windows) or values["length"] != length:
                return []
            return [_Pass.from_values(entry, windows) for entry in values["passes"]]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return []

    def write(self, passes: Sequence[_Pass], windows: Sequence[int], length: int) -> None:
        """Replace the file. If that fails, an interruption loses the passes."""
        values = {
            "windows": list(windows),
            "length": length,
            "passes": [one_pass.to_values() for one_pass in passes],
        }
        with suppress(OSError), replaced(self.path) as file:
            file.write(json.dumps(values).encode())

    def remove(self) -> None:
        """Remove the file, if there is one."""
        with suppress(OSError):
            self.path.unlink()


def _measure(
    session: Session,
    measured_window: _MeasuredWindow,
    windows: Sequence[int],
    warmup_rounds: int,
    counted_rounds: int,
    activity: Activity,
) -> _Pass:
    """One pass: a round that reads the prompt, then rounds of each window.

    A draft may read the prompt in the second round. The rounds without a draft come last: a round
    after them would read more.
    """
    measured_window.num_draft_tokens = windows[0]
    prompt_round = _average_round(session, measured_window, 1)
    window_rounds = {}
    for window in (*windows, 0):
        measured_window.num_draft_tokens = window
        measured_window.shared_window = window
        for _ in range(warmup_rounds):
            session.step()
        window_rounds[window] = _average_round(session, measured_window, counted_rounds)
        activity.advance()
    return _Pass(prompt_round, window_rounds)


def _average_round(
    session: Session,
    measured_window: _MeasuredWindow,
    num_rounds: int,
) -> PhaseSeconds:
    """Run some rounds. Returns their average."""
    start = session.timer.seconds()
    for i in range(num_rounds):
        if i == num_rounds - 1:
            # Another window follows, so this round must not launch the next one.
            measured_window.shared_window = None
        session.step()
    end = session.timer.seconds()
    return {phase: (end[phase] - start[phase]) / num_rounds for phase in PHASES}


def _costs(
    passes: Sequence[_Pass],
    windows: Sequence[int],
    length: int,
    *,
    inside_target: bool,
) -> Calibration:
    """The costs by medians over the passes.

    Args:
        windows: draft tokens of the measured rounds, ascending.
        length: tokens of the prompt.
        inside_target: whether the drafter reads the prompt in the target's call, and not in its
            own.
    """

    def median_seconds(window: int, *phases: str) -> float:
        rounds = [one_pass.window_rounds[window] for one_pass in passes]
        return _median_seconds(rounds, phases)

    # The seconds of a draft are a line over its tokens. If one window was measured, the line begins
    # at no tokens in no time.
    draft_seconds = [median_seconds(window, "draft") for window in windows]
    if len(windows) > 1:
        step_seconds, fixed_seconds = linear_regression(windows, draft_seconds)
    else:
        step_seconds, fixed_seconds = linear_regression([0, *windows], [0.0, *draft_seconds])

    # Two rounds of the same window, with and without the prompt, differ by the time to read it.
    reading_phases = ("verify", "draft") if inside_target else ("verify",)
    prompt_rounds = [one_pass.prompt_round for one_pass in passes]
    with_prompt = _median_seconds(prompt_rounds, reading_phases)
    without_prompt = median_seconds(windows[0], *reading_phases)
    prompt_seconds = max(0.0, with_prompt - without_prompt)

    measured_windows = (0, *windows)
    target_seconds = [median_seconds(window, "verify") for window in measured_windows]
    loop_seconds = [median_seconds(window, "accept", "rest") for window in measured_windows]
    return Calibration(
        widths=tuple(window + 1 for window in measured_windows),
        # A wider call is not cheaper.
        target_seconds=tuple(accumulate(target_seconds, max)),
        loop_seconds=tuple(loop_seconds),
        draft_seconds=max(0.0, fixed_seconds),
        draft_step_seconds=max(0.0, step_seconds),
        target_token_seconds=prompt_seconds / (length - 1),
    )


def _median_seconds(rounds: Sequence[PhaseSeconds], phases: Sequence[str]) -> float:
    """The median of the time that rounds spend in these phases."""
    round_seconds = []
    for seconds in rounds:
        round_seconds.append(sum(seconds[phase] for phase in phases))
    return median(round_seconds)


def load_or_measure(
    target: LanguageModel,
    drafter: Drafter,
    config: DecodingConfig | None = None,
    *,
    batch_size: int = 1,
    **changes: Any,
) -> Calibration:
    """This machine's calibration for a pair and its settings, measured once and cached."""
    config = DecodingConfig.of(config, **changes)
    path = _cache_path(target, drafter, config, batch_size)
    calibration = _known(path)
    if calibration is not None:
        return calibration

    name = type(drafter).__name__
    inform_once(
        "num_draft_tokens auto: measuring what rounds cost, once for each pair and setting on this "
        "machine (seconds; minutes for large models)"
    )
    start = time.monotonic()
    notes = Notes(path.with_suffix(".partial"))
    try:
        calibration = calibrate(target, drafter, config, batch_size=batch_size, notes=notes)
    except KeyboardInterrupt:
        if notes.path.exists():
            log.info("what was measured is kept, and the next call continues from there")
        raise
    _store(calibration, path, notes)

    seconds = time.monotonic() - start
    # A measurement that took long has been reported as a warning, and so is its end.
    level = logging.WARNING if seconds >= FIRST_SECONDS else logging.INFO
    log.log(level, "measured what rounds with %s cost, in %.1f s", name, seconds)
    return calibration


def _store(calibration: Calibration, path: Path, notes: Notes) -> None:
    try:
        with replaced(path) as file:
            file.write(json.dumps(calibration.to_dict()).encode())
    except OSError as error:
        _not_written[path] = calibration
        warn_once(
            f"{path.parent} cannot be written ({error.strerror}): what calls cost is measured "
            "again by each process"
        )
    notes.remove()


def batch_sizes_up_to(max_batch_size: int) -> list[int]:
    """The batch sizes whose costs are measured where the number of rows changes.

    Powers of four, and the size of the largest batch, whose rows are a power of two.
    """
    largest = power_of_two(max_batch_size)
    sizes = {largest}
    size = 1
    while size < largest:
        sizes.add(size)
        size *= 4
    return sorted(sizes)


def stored(
    target: LanguageModel,
    drafter: Drafter,
    config: DecodingConfig | None = None,
    *,
    batch_size: int = 1,
    **changes: Any,
) -> Calibration | None:
    """This machine's calibration for a pair and its settings; None if it was not measured yet."""
    config = DecodingConfig.of(config, **changes)
    return _known(_cache_path(target, drafter, config, batch_size))


def _known(path: Path) -> Calibration | None:
    """What was measured for this file; None if nothing was."""
    return _read(path) or _not_written.get(path)


def _read(path: Path) -> Calibration | None:
    try:
        return Calibration.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _cache_path(
    target: LanguageModel,
    drafter: Drafter,
    config: DecodingConfig,
    batch_size: int,
) -> Path:
    """The file of a calibration, named by everything that its costs depend on."""
    device = target.device
    processor = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    openvino = None
    if target.backend == "openvino":
        openvino = metadata.version("openvino")

    settings = (batch_size, type(make_rule(config.rule)), _steps_of(Sampling.of(config)))
    machine = (
        FORMAT,
        __version__,
        torch.__version__,
        torch.get_num_threads(),
        str(device),
        processor,
    )
    # A short context is measured with fewer windows.
    contexts = (target.max_positions, drafter.max_positions)
    networks = (fingerprint(target), fingerprint(drafter))
    key = repr((settings, machine, openvino, contexts, networks))
    digest = hashlib.sha256(key.encode()).hexdigest()
    return cache_home() / f"calibration-{digest[:24]}.json"


def _steps_of(sampling: Sampling) -> tuple[Any, ...]:
    """The steps of sampling, which take as long with other numbers."""
    limits = (sampling.top_k, sampling.top_p, sampling.min_p)
    processors = [path_of(type(processor)) for processor in sampling.processors]
    return (sampling.greedy, *(limit is not None for limit in limits), *processors)


def fingerprint(module: torch.nn.Module) -> str:
    """A hash of all that a network's speed depends on: parts, settings, shapes and dtypes."""
    parts = []
    for part in module.modules():
        # Compiling leaves a forward pass in the instance; packed weights may be no parameters.
        is_compiled = "forward" in vars(part)
        settings = getattr(part, "settings", None)
        num_parameters = getattr(part, "num_parameters", 0)
        parts.append((type(part), is_compiled, settings, num_parameters))

    weights = []
    for tensor in (*module.parameters(), *module.buffers()):
        class_name = type(tensor).__name__
        data_class_name = type(tensor.data).__name__
        weights.append((tuple(tensor.shape), tensor.dtype, class_name, data_class_name))
    return hashlib.sha256(repr((parts, weights)).encode()).hexdigest()
