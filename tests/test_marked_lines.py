"""Laws of marked text: marks are right on each line, and no color outlives its line."""

from __future__ import annotations

import os
import re

import pytest

from lightning_specdec.cli import decode
from lightning_specdec.decoding.results import DecodeResult, Round, RowResult
from lightning_specdec.text.tokenizer import ByteTokenizer

CODE = re.compile(r"\x1b\[([\d;]*)m")
NEWLINE = "\u23ce"


def marked_lines(rounds: list[Round], *, color: bool) -> list[str]:
    """The lines of the marked output of a row of bytes."""
    tokens: list[int] = []
    for round_ in rounds:
        tokens += round_.drafted[: round_.num_accepted]
        if round_.next_token is not None:
            tokens.append(round_.next_token)
    tokenizer = ByteTokenizer()
    row = RowResult(
        0,
        [1],
        tokens,
        "length",
        len(rounds),
        [0.1] * len(tokens),
        rounds=rounds,
        text=tokenizer.decode(tokens),
    )
    result = DecodeResult([row], 1.0, {}, len(rounds), len(rounds), rule="ExactMatch")
    text = decode.outputs(tokenizer, None, result, [None], color=color)
    _, marked = text.split("  marked\n")
    # The last line explains the marks.
    return marked.splitlines()[:-1]


def accepted(text: str, next_text: str) -> Round:
    """A round that accepts a draft."""
    drafted = list(text.encode())
    return Round(drafted, len(drafted), ord(next_text))


def rejected(text: str, next_text: str) -> Round:
    """A round that rejects the first draft token."""
    return Round(list(text.encode()), 0, ord(next_text))


TWO_LINES = [accepted("ab\ncd", "e"), rejected("\nx", "f"), accepted("\n\n", "g")]


def test_without_colors_brackets_do_not_span_lines() -> None:
    assert marked_lines(TWO_LINES, color=False) == [
        f"    [ab{NEWLINE}]",
        f"    [cd]ef[{NEWLINE}]",
        f"    [{NEWLINE}]",
        "    g",
    ]


def test_a_color_ends_with_its_line_and_begins_after_the_indent_of_the_next() -> None:
    lines = marked_lines(TWO_LINES, color=True)
    assert lines[0] == f"    \x1b[32mab{NEWLINE}\x1b[0m"
    assert lines[1].startswith("    \x1b[32mcd\x1b[0m\x1b[0me\x1b[0m")
    for line in lines:
        assert line.startswith("    ")
        assert [code for code in CODE.findall(line)][-1] == "0"


def test_an_answer_that_begins_with_an_accepted_newline_shows_it() -> None:
    assert marked_lines([accepted("\na", "b")], color=False) == [f"    [{NEWLINE}]", "    [a]b"]


@pytest.mark.parametrize("drafted", ["some words that are longer than a line, all", "   "])
def test_a_color_that_is_wrapped_at_the_width_of_the_terminal_begins_again(
    drafted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((20, 24)))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    lines = marked_lines([accepted(drafted, "!"), rejected(" word", "?")], color=True)
    for line in lines:
        color = "0"
        for text, code in re.findall(r"([^\x1b]*)(?:\x1b\[([\d;]*)m|$)", line):
            if color == "0":
                # What is not drafted: indents, and the target's own tokens.
                assert not text.strip() or text.strip() in "!?", line
            color = code or color
        assert color == "0", line
    if drafted.strip():
        assert len(lines) > 2
