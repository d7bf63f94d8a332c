"""Measures what draft, target and loop cost on this machine: rounds of a real session, a few for each width."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from itertools import accumulate
from statistics import linear_regression, median
from typing import Any

import torch

from lightning_specdec import __version__
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.files import cache_home, replaced
from lightning_specdec.decoding.rows import Row
from lightning_specdec.decoding.session import Session
from lightning_specdec.decoding.timing import PHASES
from lightning_specdec.decoding.windows import Calibration, Plan, Window
from lightning_specdec.drafters import Draft, Drafter, NGramWithFallback
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import make_rule

log = logging.getLogger(__name__)
warn_once = functools.cache(log.warning)
WINDOWS = (1, 2, 4, 8, 16)
"""Draft tokens of the rounds that are measured; between them, costs are nearly linear."""
FORMAT = 3
"""Of the kept files: a change of what is measured raises it."""
FEWEST_PASSES, MOST_PASSES = 4, 12
"""Rounds of each window: as many as the time allows, between these."""
PERIOD = 24
"""Tokens after which the text that is measured on repeats itself, so that a lookup finds something."""


class _Measured(Window, Plan):
    def __init__(self, largest: int) -> None:
        self.largest = self.now = largest
        self.ahead: int | None = None

    def plan(self, *, jointly: bool) -> Plan:
        return self

    def windows(self, rows: Sequence[Row]) -> list[int]:
        return [self.now] * len(rows)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "measured"}


class _FullSession(Session):
    """Fills every draft up to its window, so that the target sees that width whatever was drafted."""

    def _propose(self, *arguments: Any) -> Draft:
        draft, windows = super()._propose(*arguments), arguments[1]
        width, lengths = draft.tokens.shape[1], draft.lengths
        missing = max(windows) - width
        if not missing:
            return draft
        if lengths is None:
            lengths = torch.full((len(windows),), width, device=draft.tokens.device)
        pad = torch.nn.functional.pad
        probs, logits = (
            None if each is None else pad(each, (0, 0, 0, missing))
            for each in (draft.probs, draft.logits)
        )
        return replace(
            draft,
            tokens=pad(draft.tokens, (0, missing)),
            lengths=lengths,
            probs=probs,
            logits=logits,
        )


def calibrate(
    target: LanguageModel,
    drafter: Drafter,
    config: DecodingConfig | None = None,
    *,
    batch_size: int = 1,
    context_length: int = 128,
    windows: Sequence[int] = WINDOWS,
    seconds: float = 2.0,
    **changes: Any,
) -> Calibration:
    """Measure the costs of this pair with settings like those that it will decode with: medians over several passes.

    Args:
        drafter: as it will draft: fused or compiled. Of one with a fallback, that is measured: it costs more.
        config: how to decode; `changes` replace fields of it.
        context_length: tokens of text before the first call; fewer where a model holds fewer.
        windows: draft tokens of the rounds; no more are measured than the drafter makes.
        seconds: how long to measure, if `FEWEST_PASSES` fit.
    """
    measured = drafter.fallback if isinstance(drafter, NGramWithFallback) else drafter
    if measured.free == "min_confidence":  # a window that ends early hides what its tokens cost
        measured = measured.at(0.0)
    most = measured.max_draft_tokens or max(windows)
    windows = sorted({min(window, most) for window in windows})
    limits = [limit for limit in (target.max_positions, drafter.max_positions) if limit is not None]
    # Uncounted and counted rounds of a width: a call of another width than before costs more, and recorded rounds run
    # ahead from the third on.
    turns = (1, 1) if getattr(target.init_state(1, 2), "graphs", None) is None else (2, 4)
    while True:
        # The first round reads the prompt, a draft may do so in the next one. Those without a draft come last: the
        # round behind them would read more.
        script = [(windows[0], 1), *((window, turn) for window in (*windows, 0) for turn in turns)]
        num_new = sum((window + 1) * turn for window, turn in script) + 1
        if len(windows) == 1 or num_new + 2 <= min(limits, default=num_new + 2):
            break
        windows = windows[:-1]
    length = max(2, min([context_length, *(limit - num_new for limit in limits)]))
    text = [i % PERIOD % target.vocab_size for i in range(length)]
    config = DecodingConfig.of(config, **changes).changed(eos=None, stop=(), max_new_tokens=num_new)
    window = _Measured(windows[-1])
    session = _FullSession(
        target,
        measured,
        config,
        max_length=length + num_new,
        batch_size=batch_size,
        num_draft_tokens=window,
    )
    passes: list[list[dict[str, float]]] = []
    while len(passes) <= FEWEST_PASSES or (
        len(passes) <= MOST_PASSES and session.timer.elapsed() < seconds
    ):
        rows = [session.add(text) for _ in range(batch_size)]
        rounds, before = [], session.timer.seconds()
        for window.now, turn in script:
            for i in range(turn):
                window.ahead = None if i + 1 == turn != turns[0] else window.now
                session.step()
            after = session.timer.seconds()
            rounds.append({phase: (after[phase] - before[phase]) / turn for phase in PHASES})
            before = after
        passes.append(rounds)
        for row in rows:
            session.cancel(row)
            session.release(row)

    def medians(*phases: str) -> tuple[float, list[float]]:
        """Of the round that reads the prompt, and by width; the first pass only warms up."""
        alike = zip(*passes[1:], strict=True)
        times = [median(sum(each[name] for name in phases) for each in rounds) for rounds in alike]
        *drafted, plain = times[2::2]
        return times[0], [plain, *drafted]

    reading, drafts = (
        ("verify", "draft") if measured.inside_target else ("verify",),
        medians("draft")[1],
    )
    prompt, read = medians(*reading)
    xs, ys = (windows, drafts[1:]) if len(windows) > 1 else ([0, *windows], [0.0, *drafts[1:]])
    step, fixed = linear_regression(xs, ys)
    return Calibration(
        widths=tuple(window + 1 for window in (0, *windows)),
        target_seconds=tuple(accumulate(medians("verify")[1], max)),  # a wider call is not cheaper
        loop_seconds=tuple(medians("accept", "rest")[1]),
        draft_seconds=max(0.0, fixed),
        draft_step_seconds=max(0.0, step),
        target_token_seconds=max(0.0, prompt - read[1]) / (length - 1),
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
    config, device = DecodingConfig.of(config, **changes), target.device
    settings = batch_size, type(make_rule(config.rule)), config.sampling
    is_gpu = device.type == "cuda"
    processor = (
        torch.cuda.get_device_name(device) if is_gpu else torch.backends.cpu.get_cpu_capability()
    )
    openvino = metadata.version("openvino") if target.backend == "openvino" else None
    machine = (
        FORMAT,
        __version__,
        torch.__version__,
        torch.get_num_threads(),
        str(device),
        processor,
    )
    key = repr((settings, machine, openvino, fingerprint(target), fingerprint(drafter)))
    kept = cache_home() / f"calibration-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    try:
        return Calibration.from_dict(json.loads(kept.read_text()))
    except (OSError, ValueError, TypeError):
        name = type(drafter).__name__
        log.info(
            "measuring what %s and its target cost, once for this machine: seconds, minutes if large",
            name,
        )
    found = calibrate(target, drafter, config, batch_size=batch_size)
    try:
        with replaced(kept) as file:
            file.write(json.dumps(found.to_dict()).encode())
    except OSError as error:
        warn_once(
            f"{kept.parent} cannot be written ({error.strerror}): what calls cost is not remembered"
        )
    return found


def fingerprint(module: torch.nn.Module) -> str:
    """Changes with whatever a network's speed depends on: its parts, their settings, shapes and dtypes of weights."""
    parts = [
        # Compiling leaves a forward pass in the instance; packed weights may be no parameters.
        (
            type(part),
            "forward" in vars(part),
            getattr(part, "settings", None),
            getattr(part, "num_parameters", 0),
        )
        for part in module.modules()
    ]
    weights = [
        (tuple(each.shape), each.dtype, type(each).__name__, type(each.data).__name__)
        for each in (*module.parameters(), *module.buffers())
    ]
    return hashlib.sha256(repr((parts, weights)).encode()).hexdigest()
