"""The verb `sweep`: find the fastest way to decode a model on this machine."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_specdec.cli.common import Loaded, counted, load, log
from lightning_specdec.cli.options import (
    MeasureSettings,
    OutputSettings,
    Parser,
    PromptSettings,
    chosen,
    decoding,
    typed,
)
from lightning_specdec.config.activity import show_activity
from lightning_specdec.config.decoding import MAX_TOKENS, DecodingConfig
from lightning_specdec.config.models import PairSource
from lightning_specdec.config.pairs import get_pair, pair_path, write_pair
from lightning_specdec.config.settings import setting, setting_fields
from lightning_specdec.config.terminal import one_line, say, visible

if TYPE_CHECKING:
    from lightning_specdec.bench.records import Comparison
    from lightning_specdec.bench.sweep import Progress, Standing, Sweep

SUMMARY = "find the fastest way to decode a model on this machine, in three minutes"
EXAMPLES = """\
lightning_specdec sweep --target checkpoints/smollm2
lightning_specdec sweep --target ./llama --draft ./small-llama --draft head.safetensors --save mine
lightning_specdec sweep checkpoints/rnn.safetensors --max_new_tokens 7 --minutes 0.5
lightning_specdec sweep checkpoints/rnn.safetensors --temperature 1 --rule RejectionSampling"""
FIRST_TABLE_SECONDS = 20.0
"""Seconds after which a first table is shown."""
FIGURES = ("acceptance_rate", "block_efficiency", "walltime_speedup")
"""Columns of the table. Seconds and speeds depend on the turns that a way got, so that those of two
ways do not compare. Their speedups do."""
SLOW_LOADING_SHARE = 0.4
"""Share of the time above which loading leaves too little of it."""
MAX_NAMED = 6
"""Ways that are named in a line; JSON has all of them."""
ANY = "any"
"""Value of --quantization that also tries int8 weights."""

DRAFT_FIELDS = ("draft_dtype", "draft_quantization", "draft_revision", "draft_adapter")
"""Flags that apply to the draft models."""


@dataclass(frozen=True, kw_only=True)
class SweepSettings(OutputSettings):
    """What is tried, and for how long."""

    draft: tuple[str, ...] = setting(
        (),
        "draft to try: a draft file, a run's directory, a head, a model, or the name of one of a "
        "checkpoint's drafts; repeatable; default: all that belong to the target",
        metavar="MODEL|FILE|NAME",
    )
    drafts: tuple[str, ...] = setting(
        (), "drafts of the checkpoint, by name; default: all", metavar="NAME ..."
    )
    num_draft_tokens: tuple[int | str, ...] = setting(
        (2, 4, 8, "auto"),
        "draft tokens per round to try, or auto",
        metavar="INT|auto ...",
        minimum=1,
        maximum=MAX_TOKENS,
        choices=("auto",),
    )
    num_prompts: int = setting(
        4, "the models' own prompts to use at most, if none are given", minimum=1
    )
    minutes: float = setting(
        3.0, "time until the answer, loading included; Ctrl-C shows what is known", above=0
    )
    save: str | None = setting(
        None, "save the fastest as a pair of this name, for --pair NAME", metavar="NAME"
    )


def add_arguments(parser: Parser) -> None:
    parser.add_models(skip=("draft",))
    parser.add_settings("Prompt", PromptSettings)
    parser.add_decoding(skip=("num_draft_tokens", "logprobs"), max_new_tokens=128)
    parser.add_settings("Measure", MeasureSettings, skip=("repeats",))
    parser.add_settings("Sweep", SweepSettings)


def run(options: Namespace) -> int:
    """Find the fastest way and print it; returns 1 if a way failed or produced other tokens."""
    start = time.monotonic()
    settings = chosen(options, SweepSettings)
    config = decoding(options, num_draft_tokens=None)
    if settings.save is not None:
        pair_path(settings.save)  # a wrong name is refused at once
    model_options = _model_options(options)
    deadline = start + 60 * settings.minutes
    reporter = _Reporter(deadline, is_shown=log.isEnabledFor(logging.INFO))
    interrupted = False
    loaded = load(model_options, num_own=settings.num_prompts)
    _warn_of_slow_loading(time.monotonic() - start, settings.minutes)
    source = _backend_of(options, loaded.source)
    sweep = _make_sweep(options, loaded, source, config, settings, deadline, reporter)
    reporter.sweep = sweep
    try:
        sweep.run()
    except KeyboardInterrupt:
        interrupted = True
    show_activity("")

    standing = sweep.standing()
    answer = _answer(options, sweep, source, standing, _example(loaded))
    problem = ""
    if settings.save is not None:
        answer["saved"], problem = _save(options, source, standing, settings.save)
    manifest = loaded.manifest(config, chosen(options, MeasureSettings), settings)
    if settings.output == "json":
        say(json.dumps(_document(sweep, standing, answer, manifest, interrupted=interrupted)))
    else:
        _print(loaded, sweep, standing, answer, manifest)
    if problem:
        say(f"nothing is saved: {problem}", file=sys.stderr)
    exit_code = _exit_code(sweep, standing, interrupted=interrupted)
    return exit_code or (1 if problem else 0)


def _warn_of_slow_loading(seconds: float, minutes: float) -> None:
    """Warn if loading has taken so long that little can be compared in the rest of the time."""
    if seconds > SLOW_LOADING_SHARE * 60 * minutes:
        enough_minutes = math.ceil(seconds / SLOW_LOADING_SHARE / 60)
        log.warning(
            "loading took %.0f s of --minutes %g, so few ways are compared: give --minutes %d",
            seconds,
            minutes,
            max(enough_minutes, math.floor(minutes) + 1),
        )


def _model_options(options: Namespace) -> Namespace:
    """The flags that load the target with torch and its usual draft."""
    values = dict(vars(options))
    for name in ("draft", "drafts", "num_draft_tokens", "save", "minutes", "output"):
        values.pop(name, None)
    if "draft" in options:
        # They apply to the drafts, which are loaded later.
        for name in DRAFT_FIELDS:
            values.pop(name, None)
    if values.get("quantization") == ANY:
        del values["quantization"]
    if values.get("backend", "auto") == "auto":
        # The sweep itself compares backends.
        values["backend"] = "torch"
    return Namespace(**values)


def _backend_of(options: Namespace, source: PairSource) -> PairSource:
    """What was loaded, with the models of a pair, and the backend and settings of drafts that the
    user chose."""
    backend = getattr(options, "backend", "auto")
    if source.pair is not None:
        source = get_pair(source.pair).complete(source)
        if "drafter" not in options:
            # The pair's drafter is one of those that are tried.
            source = source.changed(drafter=None)
    if source.drafter is not None:
        source = source.changed(drafter=typed(source.drafter, "drafter"))
    draft_settings = {name: getattr(options, name) for name in DRAFT_FIELDS if name in options}
    return source.changed(backend=backend, **draft_settings)


def _make_sweep(
    options: Namespace,
    loaded: Loaded,
    source: PairSource,
    config: DecodingConfig,
    settings: SweepSettings,
    deadline: float,
    reporter: _Reporter,
) -> Sweep:
    # Imported here because torch takes a second.
    from lightning_specdec.bench.scouts import scouts
    from lightning_specdec.bench.sweep import Sweep
    from lightning_specdec.bench.ways import draftings, engines, reason_against_openvino

    measure = chosen(options, MeasureSettings)
    engines_to_try = engines(
        loaded.decoder.target,
        source,
        num_threads=measure.threads,
        any_quantization=getattr(options, "quantization", None) == ANY,
    )
    chosen_drafts = (*settings.draft, *settings.drafts)
    kinds = draftings(loaded.decoder, source, chosen_drafts)
    doubtful_kinds = scouts(loaded.decoder, source, kinds, has_choice=bool(chosen_drafts))
    sweep = Sweep(
        loaded.decoder,
        source.changed(backend=engines_to_try[0].backend),
        loaded.prompts,
        loaded.decoder.config(config, num_draft_tokens=1).changed(num_draft_tokens=None),
        engines=engines_to_try,
        kinds=kinds,
        scouts=doubtful_kinds,
        windows=settings.num_draft_tokens,
        seconds=max(0.0, deadline - time.monotonic()),
        batch_size=measure.batch_size,
        watch=reporter.watch,
    )
    reason = reason_against_openvino(loaded.decoder.target, source)
    if reason is not None:
        sweep.unavailable["OpenVINO"] = reason
    for text in sweep.found:
        log.info("found %s", text)
    log.info("trying %s", "; ".join(kind.name for kind in kinds))
    if doubtful_kinds:
        names = "; ".join(scout.drafting.name for scout in doubtful_kinds)
        log.info("trying, and dropping early unless it helps: %s", names)
    log.info("computing in %s", "; ".join(engine.name for engine in engines_to_try))
    return sweep


class _Reporter:
    """Passes progress to the command line's reporter, and shows a first table on stderr.

    Args:
        deadline: when the answer is due, on the clock of `time.monotonic`.
        is_shown: whether progress is wanted.
    """

    def __init__(self, deadline: float, *, is_shown: bool) -> None:
        self.sweep: Sweep | None = None
        self._deadline = deadline
        self._table_due = time.monotonic() + FIRST_TABLE_SECONDS if is_shown else math.inf

    def watch(self, progress: Progress) -> None:
        """Take what the sweep is doing."""
        seconds_left = max(0, round(self._deadline - time.monotonic()))
        minutes, seconds = divmod(seconds_left, 60)
        parts = [f"{minutes}:{seconds:02d} left"]
        if progress.leader:
            parts.append(f"{counted(progress.num_left, 'way')} in the race")
            parts.append(progress.leader)
        # The reporter appends the seconds of this step.
        parts.append(progress.step)
        show_activity(visible(" | ".join(parts)))
        if progress.leader and time.monotonic() > self._table_due:
            self._table_due = math.inf
            self._show_first_table()

    def _show_first_table(self) -> None:
        from lightning_specdec.bench.table import comparison_table
        from lightning_specdec.bench.verdict import ranked

        assert self.sweep is not None
        comparisons = self.sweep.standing().comparisons
        table = comparison_table(ranked(comparisons), figures=FIGURES, remark=_verdict_word)
        say(f"so far:\n{table}\n", file=sys.stderr, flush=True)


def _verdict_word(comparison: Comparison) -> str:
    return comparison.verdict.word


def _threads(options: Namespace, standing: Standing) -> int | None:
    """The number of CPU threads that the winner needs to be told; None for the default."""
    import torch

    assert standing.winner is not None
    num_threads = standing.winner.engine.num_threads
    was_chosen = "threads" in options
    if num_threads == torch.get_num_threads() and not was_chosen:
        return None
    return num_threads


def _answer(
    options: Namespace,
    sweep: Sweep,
    source: PairSource,
    standing: Standing,
    prompt: str | list[int],
) -> dict[str, Any]:
    """The answer: a sentence, and what to copy if it is proven.

    Args:
        prompt: what the lines of Python continue, if they decode.
    """
    from lightning_specdec.bench.recommendation import command, python_lines, sentence

    has_engines = len(sweep.engines) > 1
    answer: dict[str, Any] = {
        "answer": sentence(standing, has_engines=has_engines),
        "command": None,
        "python": None,
        "saved": None,
    }
    if standing.winner is None or not standing.is_proven:
        return answer
    winner = standing.winner
    winner_source = _named_source(winner.source(source), has_engines, source)
    threads = _threads(options, standing)
    not_decode = {field.name for field in setting_fields(SweepSettings)}
    not_decode |= {field.name for field in setting_fields(PairSource)}
    not_decode |= {"MODEL", "threads"}
    flags = {name: value for name, value in vars(options).items() if name not in not_decode}
    answer["command"] = command(winner, winner_source, flags, threads=threads)
    answer["python"] = python_lines(winner, winner_source, threads=threads, prompt=prompt)
    return answer


def _example(loaded: Loaded) -> str | list[int]:
    """The first prompt, to be shown in a line of Python: as text if it was given as text."""
    text = loaded.texts[0]
    return loaded.prompts[0] if text is None else text


def _named_source(winner: PairSource, has_engines: bool, source: PairSource) -> PairSource:
    """What loads the winner. The backend is named if there was a choice."""
    if has_engines or source.backend != "auto":
        return winner
    return winner.changed(backend="auto")


def _save(
    options: Namespace,
    source: PairSource,
    standing: Standing,
    name: str,
) -> tuple[str | None, str]:
    """Save the winner as a pair. Returns its file, and why nothing was saved, if so.

    The results of minutes are shown in any case, so nothing is raised.
    """
    from lightning_specdec.bench.recommendation import pair_values

    if standing.winner is None or not standing.is_proven:
        return None, "nothing is proven faster than standard decoding"
    try:
        values = pair_values(
            standing.winner,
            standing.winner.source(source),
            description=f"{standing.winner.draft_name}, found by sweep",
            threads=_threads(options, standing),
        )
        return str(write_pair(name, values)), ""
    except (ValueError, OSError) as error:
        return None, one_line(error)


def _document(
    sweep: Sweep,
    standing: Standing,
    answer: dict[str, Any],
    manifest: dict[str, Any],
    *,
    interrupted: bool,
) -> dict[str, Any]:
    from lightning_specdec.bench.verdict import ranked

    rows = []
    best = None
    for index, comparison in enumerate(ranked(standing.comparisons)):
        remark = standing.remark(comparison)
        rows.append({**comparison.summary(), "remark": remark})
        if remark == "<- best":
            best = index
    return {
        "rows": rows,
        "best": best,
        "level": sweep.level,
        "verdict": {"kind": standing.verdict.kind, "text": standing.verdict.text},
        **answer,
        "failed": dict(standing.failed),
        "not_measured": sweep.not_measured,
        "found": sweep.found,
        "interrupted": interrupted,
        "manifest": manifest,
    }


def _print(
    loaded: Loaded,
    sweep: Sweep,
    standing: Standing,
    answer: dict[str, Any],
    manifest: dict[str, Any],
) -> None:
    """Print the table, the answer, and what it was measured on."""
    from lightning_specdec.bench.manifest import made_on
    from lightning_specdec.bench.statistics import LEVEL
    from lightning_specdec.bench.table import comparison_table
    from lightning_specdec.bench.verdict import ranked

    if standing.comparisons:
        rows = ranked(standing.comparisons)
        say(comparison_table(rows, figures=FIGURES, remark=standing.remark))
    for name, reason in standing.failed.items():
        say(f"not measured: {name}: {reason}")
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in sweep.not_measured.items():
        names_by_reason.setdefault(reason, []).append(name)
    for reason, names in names_by_reason.items():
        num_unnamed = len(names) - MAX_NAMED
        if num_unnamed > 1:
            names = [*names[:MAX_NAMED], f"{num_unnamed} more"]
        say(f"not measured: {'; '.join(names)}: {reason}")
    for text in sweep.found:
        say(f"found {text}")
    say(f"\n{answer['answer']}")
    if answer["command"] is not None:
        say(f"\n{answer['command']}\n\n{answer['python']}")
    if answer["saved"] is not None:
        pair_name = _pair_name(answer["saved"])
        say(f"\nsaved in {answer['saved']}: --pair {pair_name} (in this directory)")
    num_prompts = counted(len(loaded.prompts), "prompt")
    batch_size = manifest["options"]["batch_size"]
    standard = sweep.engines[0].name
    say(
        f"\nspeedups are over standard decoding in {standard}; {num_prompts}, "
        f"batch size {batch_size}, {made_on(manifest)}"
    )
    notes = []
    if sweep.standard_tokens_per_second is not None:
        notes.append(f"standard decoding has {sweep.standard_tokens_per_second:,.1f} tokens/s")
    if sweep.level != LEVEL:
        notes.append(
            f"the intervals are of {100 * sweep.level:.3g}%, since the best of several ways is "
            "chosen"
        )
    if notes:
        say("; ".join(notes))


def _pair_name(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".yaml")


def _exit_code(sweep: Sweep, standing: Standing, *, interrupted: bool) -> int:
    if interrupted:
        if standing.comparisons:
            say("interrupted: what is above was measured by then", file=sys.stderr)
        else:
            say("interrupted before anything was measured", file=sys.stderr)
        return 130
    has_wrong_tokens = not sweep.allows_rounding and any(
        comparison.same_tokens is False for comparison in standing.comparisons
    )
    return 1 if standing.failed or has_wrong_tokens else 0
