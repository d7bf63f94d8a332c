"""The verb `sweep`: every draft with every window, beside standard decoding; a table, the best, and how to decode so.

Takes its parsed options and gives an exit code: 0, 1 where a row failed or gave other tokens, 130 by Ctrl-C.
"""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from lightning_specdec.bench.sweep import SweepRow, best, windows_of
from lightning_specdec.checks import require_int
from lightning_specdec.cli_common import counted, log, progress, set_up_logs
from lightning_specdec.cli_decode import check_options, find_prompts, make_rule
from lightning_specdec.cli_groups import MAX_TOKENS
from lightning_specdec.cli_models import load_decoder
from lightning_specdec.cli_options import VERBS
from lightning_specdec.cli_parser import UsageError
from lightning_specdec.cli_prompts import read_prompts
from lightning_specdec.cli_report import FEWEST_SPREAD
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.drafters import EarlyExitDrafter
from lightning_specdec.manifest import made_on, manifest
from lightning_specdec.measuring import Candidate
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule
from lightning_specdec.terminal import say
from lightning_specdec.threads import limit_threads

NOT_REPEATED = (
    "num_draft_tokens",
    "num_prompts",
    "exit_layers",
    "drafts",
    "repeats",
    "fuse",
    "output",
    "debug",
    "log_level",
    "log_json",
)
"""Options of `sweep` that the command which decodes like a row has not got, or has another value of."""


def sweep(options: Namespace) -> int:
    """Measure every draft with every window."""
    set_up_logs(options.log_level, json_lines=options.log_json)
    single = Namespace(**{**vars(options), "num_draft_tokens": None, "exit_layer": None})
    drawn, rule = check_options(single), make_rule(options)
    for window in options.num_draft_tokens:
        require_int("num_draft_tokens", window, 1, MAX_TOKENS)
    for layer in options.exit_layers or ():
        require_int("exit_layers", layer, 1)
    require_int("repeats", options.repeats, 1)
    require_int("num_prompts", options.num_prompts, 1)
    given = read_prompts(options.prompt or [], options.prompts_file)
    decoder, candidates = load_candidates(single)
    if options.threads is None:
        limit_threads(decoder.target.num_parameters)
    found = [tokens for _, tokens in find_prompts(decoder, given, options)]
    prompts = found[: options.num_prompts] if given is None else found
    cells = decoder.sweep(
        prompts,
        drafts={name: candidate.drafter for name, candidate in candidates.items()},
        windows=options.num_draft_tokens,
        max_new_tokens=options.max_new_tokens,
        rule=rule,
        eos=() if options.ignore_eos else options.eos,
        stop=options.stop or (),
        seed=options.seed,
        repeats=options.repeats,
        batch_size=options.batch_size,
        fuse=options.fuse == "both",
        **drawn,
    )
    rows: list[SweepRow] = []
    total, interrupted = sum(len(_windows(name, each, options)) for name, each in candidates.items()), False
    try:
        progress(f"measuring {total} {'rows' if total > 1 else 'row'} ...")
        for row in cells:
            rows.append(row)
            progress(f"{len(rows)} of {total}: {_line(row).strip()}")
            interrupted = row.benchmark is not None and row.benchmark.interrupted
    except KeyboardInterrupt:
        interrupted = True
    interrupted = interrupted or len(rows) < total
    top = best(rows)
    command = None if top is None else decode_command(options, candidates[top.draft], top.num_draft_tokens)
    made_by = manifest(options=vars(options), checkpoint=options.ckpt, device=decoder.target.device)
    if options.output == "json":
        place = next((i for i, row in enumerate(rows) if row is top), None)
        table = {"rows": [row.to_dict() for row in rows], "best": place, "command": command}
        say(json.dumps({**table, "interrupted": interrupted, "manifest": made_by}))
    else:
        say(_report(rows, top, command, prompts=_chosen(len(prompts), len(found)), manifest=made_by))
    different = [row for row in rows if row.same_tokens is False]
    for row in different:
        say(f"error: {_difference(row, decoder.target, rule)}", file=sys.stderr)
    if interrupted:
        say("interrupted: what is above was settled by then", file=sys.stderr)
        return 130
    return 1 if different or any(row.error for row in rows) else 0


def _windows(name: str, candidate: Candidate, options: Namespace) -> list[int]:
    """The windows that a draft is measured with; says so where it guesses fewer tokens than were asked for."""
    most = candidate.drafter.max_draft_tokens
    if most is not None and max(options.num_draft_tokens) > most:
        log.warning("%s guesses at most %d tokens a round: larger windows are left out", name, most)
    return windows_of(candidate.drafter, options.num_draft_tokens)


def load_candidates(options: Namespace) -> tuple[SpeculativeDecoder, dict[str, Candidate]]:
    """The target, and what is to be measured, by the names of the table's rows."""
    if options.draft is not None and options.drafts is not None:
        raise UsageError("--draft and --drafts exclude each other: give one of them")
    if options.drafts is not None and options.ckpt is None:
        raise UsageError("--drafts are a checkpoint's, by their names: give --ckpt, or name a model by --draft")
    if options.drafts is not None and len(options.drafts) == 1 and options.drafter is None:
        options.draft, options.drafts = options.drafts[0], None  # a checkpoint's only draft has a name for its loader
    if options.drafter == EarlyExitDrafter.__name__:
        options.exit_layer = (options.exit_layers or [1])[0]  # to be loaded with; the exits are made from it
    decoder = load_decoder(options)
    named = options.draft is not None and decoder.drafts  # else the only one of the checkpoint, or a model
    return decoder, decoder.candidates([options.draft] if named else options.drafts, options.exit_layers)


def decode_command(options: Namespace, candidate: Candidate, num_draft_tokens: int) -> str:
    """The command that decodes as a row was measured: the sweep's own options, the draft, the window."""
    words = ["lightning_specdec", "decode"]
    defaults = {option.name: option.default for option in VERBS["decode"].options}
    for name, value in vars(options).items():
        if name in NOT_REPEATED or value is None or value is False or value == defaults.get(name):
            continue
        for each in value if isinstance(value, list) else [value]:
            words += [f"--{name}"] if each is True else [f"--{name}", str(each)]
    if candidate.draft is not None and options.draft is None:
        words += ["--draft", candidate.draft]
    if candidate.exit_layer is not None:
        words += ["--exit_layer", str(candidate.exit_layer)]
    return shlex.join([*words, "--num_draft_tokens", str(num_draft_tokens)])


_COLUMNS = ("acceptance_rate", "block_efficiency", "cost_ratio", "walltime_speedup")


def _report(
    rows: Sequence[SweepRow], top: SweepRow | None, command: str | None, *, prompts: str, manifest: dict[str, Any]
) -> str:
    """The table, the best row, the command that decodes like it, and what the figures hold for."""
    lines = [f"{'draft':<18}{'window':>6}" + "".join(f"{name:>18}" for name in _COLUMNS)]
    if any(map(_spread, rows)):
        lines[0] += "  (quartiles)"
    lines += [_line(row) + ("  <- best" if row is top else "") for row in rows]
    if not rows:
        lines.append("nothing was measured")
    if top is not None and command is not None:
        speedup = top.walltime_speedup or 0.0
        wins = f"is {speedup:.2f} times as fast as standard decoding"
        if speedup <= 1:
            wins = f"is the fastest of these, and slower than standard decoding (walltime_speedup {speedup:.2f})"
        lines += ["", f"{top.draft} with a window of {top.num_draft_tokens} {wins}:", f"  {command}"]
    settings = manifest["options"]
    lines += [
        "",
        f"{prompts}, {settings['max_new_tokens']} new tokens, batch {settings['batch_size']}, "
        f"{counted(settings['repeats'], 'repeat')}, networks of both sides {_TREATMENT[settings['fuse']]},",
        made_on(manifest),
    ]
    return "\n".join(lines)


_TREATMENT = {"both": "fused", "none": "as they are"}


def _chosen(number: int, of: int) -> str:
    """How many prompts were measured, and of how many."""
    return counted(number, "prompt") if number == of else f"the first {number} of {counted(of, 'prompt')}"


def _line(row: SweepRow) -> str:
    """A row of the table."""
    start = f"{row.draft:<18}{row.num_draft_tokens:>6}"
    if row.error is not None:
        return f"{start}  failed: {row.error}"
    values = row.to_dict()
    cells = ["-" if values[name] is None else f"{values[name]:.2f}" for name in _COLUMNS]
    different = "  OTHER TOKENS than standard decoding" if row.same_tokens is False else ""
    return start + "".join(f"{cell:>18}" for cell in cells) + _spread(row) + different


def _spread(row: SweepRow) -> str:
    """The quartiles of the speedup; of so few repeats that they would be the repeats themselves nothing."""
    found = row.benchmark
    if found is None or found.standard is None or len(found.standard.seconds) < FEWEST_SPREAD:
        return ""
    quartiles = found.speedup_quartiles
    return "" if quartiles is None else f"  ({quartiles[0]:.2f} to {quartiles[1]:.2f})"


def _difference(row: SweepRow, target: LanguageModel, rule: AcceptanceRule) -> str:
    """That a row's tokens are not standard decoding's, and from where on."""
    assert row.parting is not None
    prompt, token = row.parting
    kind = str(next(target.parameters()).dtype).removeprefix("torch.")
    return (
        f"{row.draft}, window {row.num_draft_tokens}: {type(rule).__name__} gave other tokens than standard decoding, "
        f"from token {token + 1} of prompt {prompt} on, in {kind}"
    )
