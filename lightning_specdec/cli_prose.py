"""How `decode` looks where the tokens are text: each prompt's answer, what was guessed in colour."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from lightning_specdec.cli_report import legend, remarks, rows_of, stop_note, styled
from lightning_specdec.inference import DecodeResult, RowResult
from lightning_specdec.terminal import visible

if TYPE_CHECKING:
    from lightning_specdec.text.base import Tokenizer

MOST_SHOWN = 100
"""Characters of a prompt that are repeated above its answer."""


def decoded_prose(
    standard: DecodeResult | None,
    speculative: DecodeResult | None,
    tokenizer: Tokenizer,
    prompts: list[str],
    *,
    colour: bool,
    logprobs: bool = False,
    rounding: str | None = None,
) -> str:
    """Both ways' new text of each prompt; arguments as of `cli_report.decoded_text`.

    Args:
        tokenizer: the target's.
        prompts: as the user gave them.
    """
    lines: list[str] = []
    if standard is None and speculative is None:
        return ""
    for row, plain, guessed in rows_of(standard, speculative):
        lines.append(f"prompt {row.index}: {_clip(prompts[row.index])}{stop_note(row)}")
        if guessed is not None:
            lines += ["  speculative", _block(_with_fates(row, tokenizer) if colour else visible(row.text or ""))]
        if plain is not None:
            same = guessed is not None and plain.tokens == guessed.tokens
            lines += ["  standard, the same"] if same else [f"  standard{stop_note(plain)}", _block(plain.text or "")]
        if logprobs and row.logprobs is not None:
            lines.append(f"  logprobs     {' '.join(f'{value:.3f}' for value in row.logprobs)}")
    if speculative is not None and colour:
        lines.append(legend(colour))
    return "\n".join([*lines, *remarks(standard, speculative, rounding), ""])


def _clip(prompt: str) -> str:
    text = visible(" ".join(prompt.split()))
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _block(text: str) -> str:
    return textwrap.indent(text.strip("\n"), "    ")


def _with_fates(row: RowResult, tokenizer: Tokenizer) -> str:
    """A row's new text in the colours of its tokens' fates, each rejected guess before its correction.

    Special tokens are no part of the text, and are shown all the same: they were guessed like others.
    """
    stream, shown, num_left = tokenizer.stream(), [], len(row.text or "")
    special = tokenizer.vocabulary.special_texts

    def settle(token: int, fate: str) -> None:
        show(stream.push([token]), fate)
        if token in special and (num_left or row.stop_reason != "stop"):
            shown.append(styled(visible(special[token]), fate, True))

    def show(piece: str, fate: str) -> None:
        nonlocal num_left
        piece = piece[:num_left]  # a stop string is not shown
        num_left -= len(piece)
        if piece:
            shown.append(styled(visible(piece), fate, True))

    for each in row.rounds or []:
        for token in each.drafted[: each.num_accepted]:
            settle(token, "kept")
        rejected = each.drafted[each.num_accepted : each.num_accepted + 1]
        if rejected and each.next_token is not None:
            text = special.get(rejected[0]) or tokenizer.decode(rejected).replace("\n", "\u23ce")
            shown.append(styled(visible(text), "rejected", True))
        if each.next_token is not None:
            settle(each.next_token, "corrected" if rejected else "bonus")
    show(stream.finish(), "kept")
    return "".join(shown)
