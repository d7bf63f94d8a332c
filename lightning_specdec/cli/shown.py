"""What `decode` prints: the answer, and each prompt's output with the fate of the draft tokens."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from math import isnan
from typing import TYPE_CHECKING, Any

from lightning_specdec.cli.common import counted
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.terminal import short, visible

if TYPE_CHECKING:
    from lightning_specdec.bench.rows import Comparison
    from lightning_specdec.decoder import SpeculativeDecoder
    from lightning_specdec.decoding import DecodeResult, RowResult
    from lightning_specdec.text.tokenizer import Tokenizer

STYLES = {"kept": ("32", "[{}]"), "rejected": ("31;9", ""), "own": ("0", "{}")}
"""Colour of each fate, and its marks where there are no colours; rejected tokens are left out there."""
LEGEND = {"kept": "draft token kept", "rejected": "rejected", "own": "the target's own"}
INDENT = "    "
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
MOST_SHOWN = 100
"""Characters of a prompt that are repeated above its output."""


def saved(measured: Comparison) -> str:
    """What speculation saved: faster or slower only where the interval says so."""
    from lightning_specdec.bench.rows import speed

    speeds = [each for rows in (measured.standard, measured.rows) if (each := speed(rows)) is not None]
    told = " -> ".join(f"{each:,.1f}" for each in speeds) + " tokens/s"
    if (speedup := measured.walltime_speedup) is None:
        return told
    if speedup.ends is None:
        why = "too few repeats" if isnan(speedup.high) else "the times vary too much"
        return f"{why} to tell: {speedup.value:.2f}x ({told})"
    low, high = speedup.ends
    answer = "{}x faster" if low > 1 else "slower: {}x" if high < 1 else "no gain proven: {}x"
    return f"{answer.format(f'{speedup.value:.2f}')} ({told}, 95% interval {low:.2f} to {high:.2f})"


def agreement(
    decoder: SpeculativeDecoder, standard: DecodeResult, speculative: DecodeResult, config: DecodingConfig
) -> str:
    """Whether the outputs are the same, and whether they should be."""
    pairs = [(one, other) for one, other in zip(standard.rows, speculative.rows, strict=True)]
    if not speculative.lossless:
        tokens = [each for one, other in pairs for each in zip_longest(one.tokens, other.tokens)]
        changed = counted(speculative.num_changed or 0, "draft token")
        return (
            f"LOSSY: {sum(a != b for a, b in tokens)} of {len(tokens)} new tokens differ from the standard output, and "
            f"{speculative.rule} kept {changed} that the target would not have drawn"
        )
    different = [(one, other) for one, other in pairs if one.tokens != other.tokens]
    if not different:
        return "output identical"
    several = f" in {len(different)} of {counted(len(pairs), 'prompt')}" if len(pairs) > 1 else ""
    if config.temperature and speculative.rule != "ExactMatch":
        return f"output differs{several}, as two draws of the same distribution do"
    where, cause = _divergence(decoder, *different[0], config)
    place = f"{several}, first at {where} of prompt {different[0][0].index}" if several else f" at {where}"
    return f"output differs{place} ({cause})"


def _divergence(
    decoder: SpeculativeDecoder, one: RowResult, other: RowResult, config: DecodingConfig
) -> tuple[str, str]:
    """Where and why two outputs differ that should be the same: a near-tie that rounding decides, or a fault."""
    from lightning_specdec.audit.identity import find_divergence
    from lightning_specdec.rules import Sampling

    target, _ = decoder.ready()
    width = 1 + max((len(each.drafted) for each in other.rounds or []), default=0)
    keys: dict[str, Any] = {"number": one.index, "sampling": Sampling.of(config), "seed": config.seed, "width": width}
    found = find_divergence(target, one.prompt, one.tokens, other.tokens, **keys)
    assert found is not None
    dtype = str(next(target.parameters()).dtype).removeprefix("torch.")
    cause = f"near-tie in {dtype}"
    cause = cause if found.verdict == "tie" else f"NOT a {cause}: `lightning_specdec audit` looks closer"
    return f"token {found.position + 1}", cause


def outputs(
    tokenizer: Tokenizer | None,
    standard: DecodeResult | None,
    speculative: DecodeResult | None,
    texts: Sequence[str | None],
    *,
    most: int | None = None,
    colour: bool | None = None,
) -> str:
    """Each prompt's output, then the same with the fate of each draft token; standard decoding's where it differs.

    Args:
        texts: the prompts as they were typed.
        most: show so many prompts; all when None.
        colour: whether to mark fates by colour; by whether stdout is a terminal when None.
    """
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") if colour is None else colour
    lines = []
    every = list(zip_longest(standard.rows if standard else [], speculative.rows if speculative else []))
    for plain, drafted in every[:most]:
        row = drafted or plain
        prompt = texts[row.index] or (tokenizer.decode(row.prompt) if tokenizer else _joined(row.prompt))
        lines += [f"prompt {row.index}: {short(visible(' '.join(prompt.split())), MOST_SHOWN)}", _shown(row)]
        if drafted is not None and drafted.rounds:
            lines += ["  marked", _block(_marked(drafted, tokenizer, colour))]
        if drafted is not None and plain is not None and plain.tokens != drafted.tokens:
            lines += ["  standard", _shown(plain)]
        if row.logprobs is not None:
            lines += ["  logprobs", _block(" ".join(f"{value:.3f}" for value in row.logprobs))]
        reasons = dict.fromkeys(each.stop_reason for each in (drafted, plain) if each is not None)
        if [*reasons] != ["length"]:
            lines.append(f"  (stopped: {', standard: '.join(reasons)})")
    if speculative is not None:
        legend = [_styled(text, fate, colour) for fate, text in LEGEND.items()]
        lines.append("  marks: " + ", ".join(filter(None, legend)))
    if len(every) > (most or len(every)):
        lines.append(f"{counted(len(every) - (most or 0), 'more prompt')}: -v shows them")
    return "\n".join(lines)


def _shown(row: RowResult) -> str:
    return _block(_joined(row.tokens) if row.text is None else visible(row.text))


def _joined(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def _block(text: str) -> str:
    """Indented lines, broken between words where the terminal ends."""
    width, lines = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0, []
    for line in text.strip("\n").split("\n"):
        lines.append(INDENT)
        for word in re.findall(r"\s*\S+|\s+$", line):
            if width and lines[-1].strip() and len(_COLOURS.sub("", lines[-1] + word)) > width:
                lines.append(INDENT)
                word = word.lstrip()
            lines[-1] += word
    return "\n".join(lines)


def _styled(text: str, fate: str, colour: bool) -> str:
    code, marks = STYLES[fate]
    return f"\x1b[{code}m{text}\x1b[0m" if colour else marks.format(text)


def _marked(row: RowResult, tokenizer: Tokenizer | None, colour: bool) -> str:
    """A row's output, neighbours of one fate together."""
    joint = " " if tokenizer is None else ""
    shown = (each for each in pieces(row, tokenizer) if colour or STYLES[each[0]][1])
    groups = groupby(shown, lambda each: each[0])
    return joint.join(_styled(joint.join(text for _, text in several), fate, colour) for fate, several in groups)


def pieces(row: RowResult, tokenizer: Tokenizer | None) -> Iterator[tuple[str, str]]:
    """A row's tokens as fate and text, special ones and a stop string included; a rejected one before its successor."""
    stream, special = (None, {}) if tokenizer is None else (tokenizer.stream(), tokenizer.vocabulary.special_texts)
    for fate, token in _fates(row):
        if tokenizer is None or stream is None:
            yield fate, str(token)
        elif fate == "rejected":
            yield fate, visible(special.get(token) or tokenizer.decode([token]).replace("\n", "\u23ce"))
        elif piece := stream.push([token]) + special.get(token, ""):
            yield fate, visible(piece)
    if stream is not None and (rest := stream.finish()):
        yield "own", visible(rest)


def _fates(row: RowResult) -> Iterator[tuple[str, int]]:
    for each in row.rounds or []:
        yield from (("kept", token) for token in each.drafted[: each.num_accepted])
        if each.next_token is not None:
            yield from (("rejected", token) for token in each.drafted[each.num_accepted :][:1])
            yield "own", each.next_token
