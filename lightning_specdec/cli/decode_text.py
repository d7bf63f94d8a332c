"""Decoded rows as text for the terminal: clean output, and the same with draft tokens marked."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING

from lightning_specdec.cli.common import counted
from lightning_specdec.config.terminal import display_width, short, visible

if TYPE_CHECKING:
    from lightning_specdec.decoding import DecodeResult, RowResult
    from lightning_specdec.text.tokenizer import Tokenizer

STYLES = {"kept": ("32", "[{}]"), "rejected": ("31;9", ""), "own": ("0", "{}")}
"""For each fate of a token: its color code, and its marks without colors. Without colors, rejected
tokens are left out."""
LEGEND = {"kept": "draft token kept", "rejected": "rejected", "own": "the target's own"}
INDENT = "    "
MAX_PROMPT_LENGTH = 100
"""Characters of a prompt that are repeated above its output."""
_COLOR_CODES = re.compile(r"\x1b\[[\d;]*m")
RESET = "\x1b[0m"
"""The code that ends a color."""
NEWLINE_SYMBOL = "\u23ce"


def outputs(
    tokenizer: Tokenizer | None,
    standard: DecodeResult | None,
    speculative: DecodeResult | None,
    texts: Sequence[str | None],
    *,
    max_prompts: int | None = None,
    color: bool | None = None,
) -> str:
    """Format each prompt's output, followed by the same tokens with the fate of each draft token.

    The output of standard decoding is added where it differs.

    Args:
        texts: the prompts as they were typed.
        max_prompts: show this many prompts; None for all.
        color: whether to mark fates by color; None for whether stdout is a terminal.
    """
    if color is None:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    standard_rows = standard.rows if standard else []
    speculative_rows = speculative.rows if speculative else []
    pairs = list(zip_longest(standard_rows, speculative_rows))

    lines = []
    for plain, drafted in pairs[:max_prompts]:
        lines += _prompt_lines(plain, drafted, texts, tokenizer, color)
    if speculative is not None:
        legend = [_styled(text, fate, color) for fate, text in LEGEND.items()]
        lines.append("  marks: " + ", ".join(text for text in legend if text))
    if max_prompts is not None and len(pairs) > max_prompts:
        lines.append(f"{counted(len(pairs) - max_prompts, 'more prompt')}: -v shows them")
    return "\n".join(lines)


def _prompt_lines(
    plain: RowResult | None,
    drafted: RowResult | None,
    texts: Sequence[str | None],
    tokenizer: Tokenizer | None,
    color: bool,
) -> list[str]:
    """One prompt, its output, and what else is known of it.

    Args:
        plain: the result of standard decoding; None if it did not run.
        drafted: the result of speculative decoding; None if it did not run.
    """
    row = drafted or plain
    assert row is not None
    prompt = texts[row.index] or _decode(row.prompt, tokenizer)
    lines = [_prompt_line(row.index, prompt), _output_block(row)]
    if drafted is not None and drafted.rounds:
        lines += ["  marked", _block(_marked(drafted, tokenizer, color))]
    if drafted is not None and plain is not None and plain.tokens != drafted.tokens:
        lines += ["  standard", _output_block(plain)]
    if row.logprobs is not None:
        logprobs = " ".join(f"{logprob:.3f}" for logprob in row.logprobs)
        lines += ["  logprobs", _block(logprobs)]
    return lines + _stop_line(plain, drafted)


def _decode(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(str(token) for token in tokens)
    return tokenizer.decode(tokens)


def _prompt_line(index: int, prompt: str) -> str:
    on_one_line = " ".join(prompt.split())
    return f"prompt {index}: {short(visible(on_one_line), MAX_PROMPT_LENGTH)}"


def _stop_line(plain: RowResult | None, drafted: RowResult | None) -> list[str]:
    """Why decoding stopped; nothing if both sides reached their length."""
    reasons = []
    for row in (drafted, plain):
        if row is not None and row.stop_reason not in reasons:
            reasons.append(row.stop_reason)
    if reasons == ["length"]:
        return []
    return [f"  (stopped: {', standard: '.join(reasons)})"]


def _output_block(row: RowResult) -> str:
    if row.text is None:
        return _block(" ".join(str(token) for token in row.tokens))
    return _block(visible(row.text))


def _block(text: str) -> str:
    """Indent lines, and break them between words at the terminal's width."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lines = []
    for line in text.strip("\n").split("\n"):
        lines.append(INDENT)
        for word in re.findall(r"\s*\S+|\s+$", line):
            if width is not None and _overflows(lines[-1], word, width):
                lines.append(INDENT)
                word = word.lstrip()
            lines[-1] += word
    return "\n".join(_with_closed_colors(lines))


def _with_closed_colors(lines: Sequence[str]) -> list[str]:
    """End a color at the end of each line, and begin it again after the indent of the next one.

    So it colors no indent, nor anything else if lines are cut, as by a pager.
    """
    closed_lines = []
    open_color = ""
    for line in lines:
        text = line.removeprefix(INDENT)
        closed_line = INDENT + open_color + text
        codes = _COLOR_CODES.findall(text)
        if codes:
            open_color = "" if codes[-1] == RESET else codes[-1]
        if open_color:
            closed_line += RESET
        closed_lines.append(closed_line)
    return closed_lines


def _overflows(line: str, word: str, width: int) -> bool:
    """Whether the word exceeds the width of a line that has words already."""
    is_empty = not line.strip()
    shown = _COLOR_CODES.sub("", line + word)
    return not is_empty and display_width(shown) > width


def _styled(text: str, fate: str, color: bool) -> str:
    code, marks = STYLES[fate]
    if color:
        return f"\x1b[{code}m{text}{RESET}"
    return marks.format(text)


def _styled_lines(text: str, fate: str, color: bool) -> str:
    """Mark each line of a text, so that no mark spans lines.

    The line breaks of draft tokens are shown, because a token may be nothing else.
    """
    if fate != "own":
        text = text.replace("\n", f"{NEWLINE_SYMBOL}\n")
    lines = [_styled(line, fate, color) if line else "" for line in text.split("\n")]
    return "\n".join(lines)


def _marked(row: RowResult, tokenizer: Tokenizer | None, color: bool) -> str:
    """A row's output in which neighboring tokens of the same fate share their marks."""
    separator = " " if tokenizer is None else ""
    shown_pieces = []
    for fate, text in pieces(row, tokenizer):
        _, marks = STYLES[fate]
        if color or marks:
            shown_pieces.append((fate, text))

    marked = []
    for fate, group in groupby(shown_pieces, key=lambda piece: piece[0]):
        text = separator.join(piece_text for _, piece_text in group)
        marked.append(_styled_lines(text, fate, color))
    return separator.join(marked)


def pieces(row: RowResult, tokenizer: Tokenizer | None) -> Iterator[tuple[str, str]]:
    """Yield a row's tokens as fate and text, special tokens and a stop string included.

    A rejected token comes before the token that replaced it.
    """
    if tokenizer is None:
        for fate, token in _fates(row):
            yield fate, str(token)
        return

    stream = tokenizer.stream()
    special_texts = tokenizer.vocabulary.special_texts
    for fate, token in _fates(row):
        if fate == "rejected":
            # Not part of the text, so it must not enter the stream.
            text = special_texts.get(token) or tokenizer.decode([token])
            yield fate, visible(text.replace("\n", NEWLINE_SYMBOL))
            continue
        text = stream.push([token]) + special_texts.get(token, "")
        # Empty while a character's bytes are incomplete.
        if text:
            yield fate, visible(text)

    remainder = stream.finish()
    if remainder:
        yield "own", visible(remainder)


def _fates(row: RowResult) -> Iterator[tuple[str, int]]:
    """Yield each token with what became of it: kept, rejected, or the target's own."""
    for round_ in row.rounds or []:
        for token in round_.drafted[: round_.num_accepted]:
            yield "kept", token
        # Without a next token, the row stopped at an accepted one.
        if round_.next_token is None:
            continue
        if round_.num_accepted < len(round_.drafted):
            yield "rejected", round_.drafted[round_.num_accepted]
        yield "own", round_.next_token
