"""Measures what draft, target and loop cost on this machine: a few rounds of a real session for each width."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import linear_regression, median
from typing import Any

import torch

from lightning_specdec import __version__
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.files import cache_home
from lightning_specdec.config.settings import Settings
from lightning_specdec.decoding.rows import Row
from lightning_specdec.decoding.session import Session
from lightning_specdec.decoding.timing import PHASES
from lightning_specdec.decoding.windows import Calibration, Costs, Plan, Window
from lightning_specdec.drafters import Draft, Drafter, NGramWithFallback
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import make_rule

log = logging.getLogger(__name__)
WIDTHS = (1, 2, 3, 5, 9, 17)
"""Numbers of tokens that the target's call is measured with; between them, costs are nearly linear."""
FEWEST_REPEATS, MOST_REPEATS = 4, 12
"""Rounds of each width: as many as the time allows, between these."""
PERIOD = 24
"""Tokens after which the text that is measured on repeats itself, so that a lookup finds something."""


class _Script(Window, Plan):
    """The windows that are measured, one after the other."""

    def __init__(self, windows: Sequence[int]) -> None:
        self.script, self.largest = list(windows), max(windows)

    def plan(self, *, jointly: bool) -> Plan:
        return self

    def windows(self, rows: Sequence[Row]) -> list[int]:
        return [self.script.pop(0)] * len(rows)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "measured"}


class _FullSession(Session):
    """Fills every draft up to its window, so that the target sees that width whatever was drafted."""

    def _propose(self, *arguments: Any) -> Draft:
        draft, windows = super()._propose(*arguments), arguments[1]
        missing = max(windows) - draft.tokens.shape[1]
        if missing <= 0:
            return draft
        pad = torch.nn.functional.pad
        probs, logits = (
            None if each is None else pad(each, (0, 0, 0, missing)) for each in (draft.probs, draft.logits)
        )
        return replace(draft, tokens=pad(draft.tokens, (0, missing)), probs=probs, logits=logits)


def calibrate(
    target: LanguageModel,
    drafter: Drafter,
    config: DecodingConfig | None = None,
    *,
    batch_sizes: Sequence[int] = (1,),
    context_length: int = 128,
    widths: Sequence[int] = WIDTHS,
    seconds: float = 2.0,
    **changes: Any,
) -> Calibration:
    """Measure the costs of this pair, at sizes and settings like those that it will decode with.

    Args:
        drafter: as it will draft: fused or compiled. Of one with a fallback, that is measured: it costs more.
        config: how to decode; `changes` replace fields of it.
        context_length: tokens of text before the first call; fewer where a model holds fewer.
        widths: numbers of tokens in the target's call, 1 and at least one more.
        seconds: about as long as the timing of each batch size may take, if four rounds of each width fit.
    """
    widths = sorted({1, *widths})
    if len(widths) < 2:
        raise ValueError("widths must have one above 1: there is nothing to choose from otherwise")
    config = DecodingConfig.of(config, **changes).changed(eos=None, stop=())
    # The round after one without a draft reads more than usual: it is not counted.
    windows = [width - 1 for width in widths]
    first = windows[1]
    one_pass = [0, 0, first, *windows[1:]]
    pass_tokens = sum(one_pass) + len(one_pass)
    limits = [limit for limit in (target.max_positions, drafter.max_positions) if limit is not None]
    needed = pass_tokens * (FEWEST_REPEATS + 1) + first + 2
    length = min([context_length, *(limit - needed for limit in limits)])
    if length < 2:
        raise ValueError(f"measuring takes {needed} tokens and the models hold {min(limits)}: measure fewer widths")
    measured = drafter.fallback if isinstance(drafter, NGramWithFallback) else drafter
    costs = []
    for size in sorted(set(batch_sizes)):
        run = functools.partial(_run, target, measured, config, size, length)
        # The first session warms up allocators, caches and compilers, so that the second one's prompt is timed fairly.
        warm = run([first, *one_pass, *one_pass])
        repeats = int(seconds / sum(sum(each.values()) for each in warm[-len(one_pass) :]))
        repeats = min(MOST_REPEATS, max(FEWEST_REPEATS, repeats))
        repeats = min([repeats, *((limit - length - first - 2) // pass_tokens - 1 for limit in limits)])
        rounds = run([first, *one_pass * (repeats + 1)])
        timed: dict[int, list[dict[str, float]]] = {window: [] for window in windows}
        for i, (window, phases) in enumerate(zip(one_pass * repeats, rounds[1 + len(one_pass) :], strict=True)):
            if i % len(one_pass) != 2:
                timed[window].append(phases)
        costs.append(_costs(size, length, first, rounds[0], timed, inside_target=measured.inside_target))
    weights = (each.dtype for each in target.parameters() if each.is_floating_point())
    return Calibration(
        tuple(costs),
        length,
        target=type(target).__name__,
        drafter=type(drafter).__name__,
        device=_device(target),
        dtype=str(getattr(target, "dtype", None) or next(weights, torch.float32)).removeprefix("torch."),
        threads=torch.get_num_threads(),
    )


def _run(
    target: LanguageModel, drafter: Drafter, config: DecodingConfig, num_rows: int, length: int, script: list[int]
) -> list[dict[str, float]]:
    """The seconds of each round of the script, by phase, on meaningless texts that repeat themselves."""
    generator = torch.Generator().manual_seed(0)
    period = torch.randint(target.vocab_size, (num_rows, PERIOD), generator=generator)
    num_new = sum(script) + len(script) + 1
    options: dict[str, Any] = {"num_draft_tokens": _Script(script), "max_new_tokens": num_new}
    session = _FullSession(target, drafter, config, max_length=length + num_new, batch_size=num_rows, **options)
    for text in period.repeat(1, length // PERIOD + 1)[:, :length].tolist():
        session.add(text)
    session.timer.lap("rest")
    rounds, before = [], session.timer.seconds()
    for _ in range(len(script)):
        session.step()
        after = session.timer.seconds()
        rounds.append({phase: after[phase] - before[phase] for phase in PHASES})
        before = after
    return rounds


def _costs(
    batch_size: int,
    length: int,
    first_window: int,
    prompt: dict[str, float],
    timed: dict[int, list[dict[str, float]]],
    *,
    inside_target: bool,
) -> Costs:
    """Medians of the rounds by window; `prompt` are the seconds of the round that read the prompt."""

    def medians(*phases: str) -> dict[int, float]:
        return {window: median(sum(each[name] for name in phases) for each in all_) for window, all_ in timed.items()}

    draft, call, loop = medians("draft"), medians("verify"), medians("accept", "rest")
    # A wider call is not cheaper, and a loop that takes more than half the round was interrupted.
    rounds = list(accumulate((call[window] + loop[window] for window in call), max))
    loops = [min(loop[window], whole / 2) for window, whole in zip(call, rounds, strict=True)]
    points = {window: max(0.0, seconds - draft[0]) for window, seconds in draft.items() if window}
    step, fixed = 0.0, -1.0
    if len(points) > 1:
        step, fixed = linear_regression(list(points), list(points.values()))
    if fixed < 0 or step < 0:
        step, fixed = linear_regression([*points, 0], [*points.values(), 0.0], proportional=True)
    drafted, verified = (
        max(0.0, prompt[phase] - later) / length
        for phase, later in (("draft", draft[first_window]), ("verify", call[first_window]))
    )
    return Costs(
        batch_size=batch_size,
        widths=tuple(window + 1 for window in timed),
        target_seconds=tuple(whole - loop for whole, loop in zip(rounds, loops, strict=True)),
        loop_seconds=tuple(loops),
        draft_seconds=fixed,
        draft_step_seconds=step,
        # What a draft inside the target reads of a prompt is the target's own reading, and no further cost.
        draft_token_seconds=0.0 if inside_target else drafted,
        target_token_seconds=verified + drafted if inside_target else verified,
    )


def load_or_measure(
    target: LanguageModel,
    drafter: Drafter,
    config: DecodingConfig | None = None,
    *,
    batch_size: int = 1,
    **changes: Any,
) -> Calibration:
    """This machine's calibration, measured once for each pair and its settings and kept in the cache directory."""
    config = DecodingConfig.of(config, **changes)
    filters = config.greedy, config.top_k, config.top_p, config.min_p
    settings = (batch_size, type(make_rule(config.rule)).__name__, *filters)
    processor = torch.backends.cpu.get_cpu_capability() if target.device.type == "cpu" else _device(target)
    machine = (__version__, torch.__version__, torch.get_num_threads(), str(target.device), processor)
    key = repr((settings, machine, fingerprint(target), fingerprint(drafter)))
    kept = cache_home() / f"calibration-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    try:
        return Calibration.load(kept)
    except (OSError, ValueError):
        log.info("measuring what draft and target cost, once for this machine: some seconds")
    found = calibrate(target, drafter, config, batch_sizes=(batch_size,))
    try:
        found.save(kept)
    except OSError as error:
        _warn_once(f"{kept.parent} cannot be written ({error.strerror}): what calls cost is not remembered")
    return found


@functools.cache
def _warn_once(text: str) -> None:
    log.warning(text)


def fingerprint(module: torch.nn.Module) -> str:
    """Changes with whatever a network's speed depends on: its parts, their settings, shapes and dtypes of weights."""
    # A forward pass in the instance is what compiling a module leaves behind.
    parts: list[Any] = [(type(part).__qualname__, "forward" in vars(part)) for part in module.modules()]
    for part in module.modules():
        if part is module or isinstance(part, Drafter):
            plain = ((name, value) for name, value in vars(part).items() if isinstance(value, int | str | Settings))
            parts.append(sorted(each for each in plain if each[0] != "training"))
        if isinstance(part, LanguageModel):  # packed weights may be no parameters any more
            parts.append((part.vocab_size, part.num_parameters, part.memory_bytes))
    for each in (*module.parameters(), *module.buffers()):
        parts.append((tuple(each.shape), str(each.dtype), type(each).__name__, type(each.data).__name__))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _device(target: LanguageModel) -> str:
    device = target.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
