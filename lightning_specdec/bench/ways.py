"""The ways to decode that a cell can name, as functions of a batch of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.config_entries import ROLLED, SPECULATIVE, STANDARD
from lightning_specdec.bench.matrix import Cell
from lightning_specdec.bench.outside import GenerateSetting
from lightning_specdec.bench.prompts import Prompt
from lightning_specdec.bench.remembered import load_or_measure
from lightning_specdec.bench.rolled import rolled_decode
from lightning_specdec.bench.runner import Way, in_batches
from lightning_specdec.bench.subject import Subject
from lightning_specdec.drafters import Drafter
from lightning_specdec.inference import (
    AdaptiveWindow,
    DecodeResult,
    Window,
    autoregressive_decode,
    merge_results,
    open_session,
    run,
)
from lightning_specdec.inference.timing import PhaseTimer
from lightning_specdec.rules import Sampling


@dataclass(frozen=True)
class Prepared:
    """What a cell needs beyond its own settings.

    Args:
        window: of speculation; what `auto` has come to.
        setting: of transformers' ways: see `Outside.settings`.
        memory, utilization: what a run before the timed ones has shown.
    """

    window: int | Window | None = None
    setting: GenerateSetting | None = None
    memory: dict[str, int] | int | None = None
    utilization: float | None = None


def window_of(cell: Cell, subject: Subject) -> int | Window | None:
    """The window that a cell decodes with; `auto` measures what calls cost, once for this machine.

    Raises:
        ValueError: its draft cannot guess.
    """
    if cell.way != SPECULATIVE or cell.num_draft_tokens != "auto":
        return cell.num_draft_tokens if isinstance(cell.num_draft_tokens, int) else None
    rule, sampling = cell.make_rule(), Sampling(cell.temperature)
    drafter = drafter_of(cell, subject)
    return AdaptiveWindow(
        load_or_measure(subject.target, drafter, batch_size=cell.batch_size, rule=rule, sampling=sampling)
    )


def drafter_of(cell: Cell, subject: Subject) -> Drafter:
    """What guesses.

    Raises:
        ValueError: it could not be made for this target.
    """
    assert cell.draft is not None
    drafter = subject.drafts[cell.draft]
    if isinstance(drafter, str):
        raise ValueError(drafter)
    return drafter


def way_of(
    cell: Cell,
    subject: Subject,
    config: BenchConfig,
    prepared: Prepared,
    *,
    seed: int,
    timer: Callable[[], PhaseTimer] | None = None,
) -> Way:
    """A function that decodes a batch of prompts as the cell says.

    Args:
        timer: makes what takes the place of a session's own timer.
    """
    sampling = Sampling(cell.temperature)
    shared: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "sampling": sampling, "seed": seed}
    stops = () if config.ignore_eos else subject.stops
    if cell.way == STANDARD:
        return lambda texts, indices: autoregressive_decode(subject.target, texts, indices=indices, eos=stops, **shared)
    if cell.way == ROLLED:
        rollout = subject.rolled
        assert rollout is not None
        return lambda texts, indices: rolled_decode(rollout, texts, indices=indices, eos=stops, **shared)
    if cell.way != SPECULATIVE:
        outside, setting = subject.outside, prepared.setting
        assert outside is not None and setting is not None
        return lambda texts, indices: outside.decode(
            cell.way, texts, indices, setting=setting, draft=cell.draft, eos=stops, **shared
        )
    drafter, window, rule = drafter_of(cell, subject), prepared.window, cell.make_rule()
    assert window is not None

    def speculative(texts: list[list[int]], indices: list[int]) -> DecodeResult:
        session = open_session(
            subject.target, drafter, texts, num_draft_tokens=window, rule=rule, eos=stops, indices=indices, **shared
        )
        if timer is not None:
            session.timer = timer()
        return run(session)

    return speculative


def decode(way: Way, prompts: Sequence[Prompt], batch_size: int) -> DecodeResult:
    """All prompts in batches. Its seconds are those of the decodes' own clocks, which begin when a batch is ready to be
    read and end with its last token: what we do before and after is in no way's."""
    return merge_results(in_batches(way, [prompt.tokens for prompt in prompts], batch_size))
