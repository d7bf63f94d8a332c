"""How `decode` looks on a terminal: both outputs with the fate of each guess, and the table.

Knows nothing of how the figures came about.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    first = speculative or standard
    if first is None:
        return ""
    for i, row in enumerate(first.rows):
        lines.append(f"prompt {row.index}: {_join(row.prompt)}{stop_note(row)}")
        if standard is not None and i < len(standard.rows):
            lines.append(f"  standard     {_join(standard.rows[i].tokens)}")
        if speculative is not None:
            lines.append(f"  speculative  {_with_fates(row, colour=colour)}")
        if logprobs and row.logprobs is not None:
            lines.append(f"  logprobs     {' '.join(f'{value:.3f}' for value in row.logprobs)}")
    if speculative is not None:
        lines.append(legend(colour))
    if standard is not None and speculative is not None:
        lines.append(comparison(standard, speculative, rounding))
    return "\n".join([*lines, ""])


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
    for one, other in zip(standard.rows, speculative.rows, strict=False):
        settled = [len(row.tokens) for row in (one, other) if row.stop_reason == "interrupted"]
        expected, got = (row.tokens[: min(settled)] if settled else row.tokens for row in (one, other))
        differing += sum(a != b for a, b in zip(expected, got, strict=False)) + abs(len(expected) - len(got))
        total += len(expected)
    same = f"{differing} of {total} new tokens differ from the standard output"
    if not speculative.lossless:
        kept = f"{speculative.num_changed} kept guesses are not what the target would have drawn there"
        return f"{speculative.rule} is LOSSY: {same}; {kept}"
    if differing == 0:
        return f"{speculative.rule} is lossless: all {total} new tokens equal the standard output"
    if rounding is not None:
        why = f"in {rounding} a call with several tokens rounds otherwise than calls with one"
        return f"{speculative.rule} is lossless: {same}, as near-ties may, since {why}"
    return f"{speculative.rule} is lossless in distribution: {same}, as two draws may"


_ROWS = (
    ("seconds", "seconds", "median, all prompts"),
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
    ("walltime_speedup", "seconds standard / speculative"),
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
    lines = [f"{'':<24}" + "".join(f"{name:>14}" for name in sides)]
    for label, key, note in _ROWS:
        cells = [_cell(key, _value(summary[name], key)) for name in sides]
        if any(cell != "-" for cell in cells):
            lines.append(f"{label:<24}" + "".join(f"{cell:>14}" for cell in cells) + (f"  {note}" if note else ""))
    lines.append("")
    for key, note in _FIGURES:
        if summary.get(key) is not None:
            lines.append(f"{key:<24}{_cell(key, summary[key]):>14}  {note}")
    lines.append("")
    lines.append(
        f"{_count(num_prompts, 'prompt')}, {_count(len(summary[sides[0]]['runs']['seconds']), 'repeat')}, "
        f"{manifest['device']} ({manifest['processor']}), {_count(manifest['threads'], 'thread')},\n"
        f"torch {manifest['torch']}, commit {manifest['commit']}"
    )
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


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
