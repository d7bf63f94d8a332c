"""How `decode` looks on a terminal: both outputs with the fate of each guess, and the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from lightning_specdec.cli_common import counted
from lightning_specdec.inference import DecodeResult, RowResult

_STYLES = {"kept": ("32", ""), "rejected": ("31;9", "x"), "corrected": ("33;1", "="), "bonus": ("36;1", "+")}
"""Of each fate: the colour, and the mark that stands for it where there are no colours."""


def decoded_text(
    standard: DecodeResult | None,
    speculative: DecodeResult | None,
    *,
    colour: bool,
    logprobs: bool = False,
    rounding: str | None = None,
) -> str:
    """Both ways' new tokens of each prompt.

    Args:
        standard, speculative: the outcomes; None for a way that did not run.
        colour: whether fates are shown by colours, or by marks.
        logprobs: whether to show the tokens' log probabilities.
        rounding: the type that the target computes in, where both ways would give the same tokens but for rounding.
    """
    lines: list[str] = []
    if standard is None and speculative is None:
        return ""
    for row, plain, guessed in rows_of(standard, speculative):
        lines.append(f"prompt {row.index}: {_join(row.prompt)}{stop_note(row)}")
        if plain is not None:
            lines.append(f"  standard     {_join(plain.tokens)}")
        if guessed is not None:
            lines.append(f"  speculative  {_with_fates(guessed, colour=colour)}")
        if logprobs and row.logprobs is not None:
            lines.append(f"  logprobs     {' '.join(f'{value:.3f}' for value in row.logprobs)}")
    if speculative is not None:
        lines.append(legend(colour))
    return "\n".join([*lines, *remarks(standard, speculative, rounding), ""])


def rows_of(
    standard: DecodeResult | None, speculative: DecodeResult | None
) -> Iterator[tuple[RowResult, RowResult | None, RowResult | None]]:
    """Each prompt's outcome, the speculative one where it is there; then its standard and its speculative outcome."""
    for plain, guessed in zip_longest(standard.rows if standard else [], speculative.rows if speculative else []):
        yield guessed or plain, plain, guessed


def remarks(standard: DecodeResult | None, speculative: DecodeResult | None, rounding: str | None) -> list[str]:
    """What is said below the outputs: whether they agree, and the windows that were chosen."""
    lines: list[str] = []
    if standard is not None and speculative is not None:
        lines.append(comparison(standard, speculative, rounding))
    if speculative is not None and (speculative.window or {}).get("kind") == "AdaptiveWindow":
        lines.append(_windows(speculative))
    return lines


def _windows(result: DecodeResult) -> str:
    """One line on how many guesses an adaptive window's rounds had."""
    numbers = [len(each.drafted) for row in result.rows for each in row.rounds or []]
    if not any(numbers):
        return "auto: guessed nothing, since no guess promised to save time here"
    mean = sum(numbers) / len(numbers)
    return f"auto: {min(numbers)} to {max(numbers)} guesses per round, {mean:.1f} on average"


def _join(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def styled(text: str, fate: str, colour: bool) -> str:
    """Text as it is shown for that fate of a guess: in its colour, or behind its mark."""
    code, mark = _STYLES[fate]
    return f"\x1b[{code}m{text}\x1b[0m" if colour else f"{mark}{text}"


def _with_fates(row: RowResult, *, colour: bool) -> str:
    """A row's new tokens round by round, each rejected guess before its correction."""
    words: list[str] = []
    for each in row.rounds or []:
        words += [styled(str(token), "kept", colour) for token in each.drafted[: each.num_accepted]]
        rejected = each.drafted[each.num_accepted : each.num_accepted + 1]
        words += [styled(str(token), "rejected", colour) for token in rejected]
        if each.next_token is not None:
            words.append(styled(str(each.next_token), "corrected" if rejected else "bonus", colour))
    return " ".join(words)


def legend(colour: bool) -> str:
    """One line that says what the colours or marks mean."""
    fates = (styled(f"{fate} guess" if fate in ("kept", "rejected") else fate, fate, colour) for fate in _STYLES)
    return f"  ({', '.join(fates)})"


def stop_note(row: RowResult) -> str:
    """Why a row ended before its length."""
    return f"  (stopped: {row.stop_reason})" if row.stop_reason != "length" else ""


def comparison(standard: DecodeResult, speculative: DecodeResult, rounding: str | None) -> str:
    """One line on whether the outputs agree, and whether they should."""
    differing = total = 0
    partings: list[int] = []
    for one, other in zip(standard.rows, speculative.rows, strict=False):
        settled = [len(row.tokens) for row in (one, other) if row.stop_reason == "interrupted"]
        expected, got = (row.tokens[: min(settled)] if settled else row.tokens for row in (one, other))
        places = [i for i, (a, b) in enumerate(zip_longest(expected, got), start=1) if a != b]
        partings += places[:1]
        differing += len(places)
        total += len(expected)
    rule = speculative.rule
    if not speculative.lossless:
        changed = speculative.num_changed or 0
        kept = (
            f"{counted(changed, 'kept guess', 'es')} {'is' if changed == 1 else 'are'} not what the target would have"
        )
        return f"{rule} is LOSSY: {differing} of {total} new tokens differ from the standard output; {kept} drawn there"
    if not partings:
        return f"{rule} is lossless: all {total} new tokens equal the standard output"
    part = f"the outputs part in {len(partings)} of {counted(min(len(standard.rows), len(speculative.rows)), 'prompt')}"
    part += f" ({'at' if len(partings) == 1 else 'first at'} token {min(partings)})"
    if rounding is None:
        return f"{rule} is lossless in distribution: {part}, as two draws may"
    finer = f": --dtype {_FINER[rounding]} shows the same tokens" if rounding in _FINER else ""
    return f"{rule} is lossless: {part}, as rounding in {rounding} lets them{finer}"


_FINER = {"bfloat16": "float32", "float16": "float32", "float32": "float64"}
"""Of each type: one that rounds less."""
FEWEST_SPREAD = 3
"""Repeats that have quartiles: those of fewer would be the repeats themselves."""
_ROWS = (
    ("seconds", "seconds", "median repeat, all prompts"),
    ("first quartile", "first_quartile", ""),
    ("third quartile", "third_quartile", ""),
    ("tokens_per_second", "tokens_per_second", "new tokens / seconds"),
    ("time_to_first_token", "time_to_first_token", "mean over prompts"),
    ("block_efficiency", "block_efficiency", "new tokens / rounds"),
    ("target_calls", "num_target_calls", ""),
    ("draft_calls", "num_draft_calls", ""),
    ("draft", "draft_seconds", "guessing"),
    ("verify", "verify_seconds", "the target's calls"),
    ("accept", "accept_seconds", "the verdict, read"),
    ("rest", "rest_seconds", "the loop itself"),
)
_FIGURES = (
    ("walltime_speedup", "seconds standard / speculative, as many tokens"),
    ("latency_reduction", "1 - 1 / walltime_speedup"),
    ("predicted_speedup", "theory, from acceptance and costs"),
    ("equal_treatment_speedup", "the standard target fused too"),
    ("equal_treatment_ceiling", "there, with nothing ever rejected"),
    ("acceptance_rate", "guesses kept / tested"),
    ("draft_utilization", "guesses kept / proposed"),
    ("warmup_seconds", "warm-up and compilation, apart"),
)


def summary_table(summary: Mapping[str, Any], *, num_prompts: int, manifest: Mapping[str, Any]) -> str:
    """The figures of a benchmark, both ways side by side."""
    sides = [name for name in ("standard", "speculative") if summary[name] is not None]
    num_repeats = len(summary[sides[0]]["runs"]["seconds"])
    lines = [f"{'':<24}" + "".join(f"{name:>14}" for name in sides)]
    for label, key, note in _ROWS:
        if key.endswith("_quartile") and num_repeats < FEWEST_SPREAD:
            continue
        cells = [_cell(key, _value(summary[name], key)) for name in sides]
        if any(cell != "-" for cell in cells):
            lines.append(f"{label:<24}" + "".join(f"{cell:>14}" for cell in cells) + (f"  {note}" if note else ""))
    lines.append("")
    for key, note in _FIGURES:
        nothing_warmed = key == "warmup_seconds" and summary[key] < 0.005
        if summary.get(key) is not None and not nothing_warmed:
            lines.append(f"{key:<24}{_cell(key, summary[key]):>14}  {note}")
    lines.append("")
    lines.append(
        f"{counted(num_prompts, 'prompt')}, {counted(num_repeats, 'repeat')}, "
        f"{manifest['device']} ({manifest['processor']}), {counted(manifest['threads'], 'thread')},\n"
        f"torch {manifest['torch']}, commit {manifest['commit']}"
    )
    return "\n".join(lines)


def _value(side: Mapping[str, Any], key: str) -> float | None:
    """A figure of one way; standard decoding has no draft."""
    if key in ("first_quartile", "third_quartile"):
        return side["seconds_quartiles"][key == "third_quartile"]
    return None if key == "draft_seconds" and side["num_draft_calls"] is None else side[key]


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key == "warmup_seconds":
        return f"{value:.2f} s"
    if key.endswith(("seconds", "_quartile", "_first_token")):
        return f"{value * 1000:.3f} ms"
    if key == "tokens_per_second":
        return f"{value:,.0f}"
    if key.startswith("num_"):
        return str(value)
    return f"{value:.2f}"
