"""What `decode` prints: the answer, each prompt's output with the fate of the draft tokens, the table."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, Any

from lightning_specdec.cli.common import counted
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.terminal import visible

if TYPE_CHECKING:
    from lightning_specdec.decoder import SpeculativeDecoder
    from lightning_specdec.decoding import DecodeResult, RowResult
    from lightning_specdec.text.tokenizer import Tokenizer

STYLES = {"kept": ("32", "[{}]"), "rejected": ("31;9", "-{}-"), "own": ("", "{}")}
"""Of each fate: the colour, and the marks that stand for it where there are no colours."""
MOST_SHOWN = 100
"""Characters of a prompt that are repeated above its output."""


def colours() -> bool:
    """Whether stdout is a terminal that may be given colours."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def styled(text: str, fate: str, colour: bool) -> str:
    """Text in its fate's colour, or between its marks."""
    code, marks = STYLES[fate]
    return marks.format(text) if not colour else f"\x1b[{code}m{text}\x1b[0m" if code else text


def answer(
    decoder: SpeculativeDecoder,
    standard: DecodeResult | None,
    speculative: DecodeResult | None,
    summary: Mapping[str, Any],
    config: DecodingConfig,
) -> str:
    """One line: what speculation saved, and whether the output is that of standard decoding."""
    parts: list[str] = []
    speeds = [side["tokens_per_second"] for name in ("standard", "speculative") if (side := summary.get(name))]
    if (speedup := summary.get("walltime_speedup")) is not None:
        figure = f"{speedup:.2f}x faster" if speedup >= 1.005 else f"not faster: {speedup:.2f}x"
        parts.append(f"{figure} ({speeds[0]:,.1f} -> {speeds[1]:,.1f} tokens/s)")
    elif speeds:
        parts.append(f"{speeds[0]:,.1f} tokens/s")
    if standard is not None and speculative is not None:
        parts.append(agreement(decoder, standard, speculative, config))
    if speculative is not None and speculative.counts is not None:
        drafted = [len(each.drafted) for row in speculative.rows for each in row.rounds or []]
        if not any(drafted):
            parts.append("nothing was drafted")
        elif (speculative.window or {}).get("kind") == "AdaptiveWindow":
            parts.append(f"{sum(drafted) / len(drafted):.1f} draft tokens per round on average")
    return ", ".join(parts) or "decoded"


def agreement(
    decoder: SpeculativeDecoder, standard: DecodeResult, speculative: DecodeResult, config: DecodingConfig
) -> str:
    """Whether the outputs are the same, and whether they should be."""
    differing, total, places = 0, 0, []
    for number, (one, other) in enumerate(zip(standard.rows, speculative.rows, strict=False)):
        settled = [len(row.tokens) for row in (one, other) if row.stop_reason == "interrupted"]
        expected, got = (row.tokens[: min(settled)] if settled else row.tokens for row in (one, other))
        different = [i for i, (a, b) in enumerate(zip_longest(expected, got), start=1) if a != b]
        places += [(different[0], number)] if different else []
        differing, total = differing + len(different), total + len(expected)
    if not speculative.lossless:
        changed = counted(speculative.num_changed or 0, "draft token")
        return (
            f"LOSSY: {differing} of {total} new tokens differ from the standard output, and {speculative.rule} kept "
            f"{changed} that the target would not have drawn"
        )
    if not places:
        return "output identical"
    token, number = min(places)
    where = f"at token {token}"
    if (num := len(standard.rows)) > 1:
        where = f"in {len(places)} of {num} prompts, first {where}"
    if config.temperature and speculative.rule != "ExactMatch":
        return f"output differs {where}, as two draws of the same distribution do"
    return f"output differs {where} ({_cause(decoder, standard.rows[number], speculative.rows[number], config)})"


def _cause(decoder: SpeculativeDecoder, one: RowResult, other: RowResult, config: DecodingConfig) -> str:
    """Why two outputs part that should be the same: a near-tie that rounding decides, or a fault."""
    from lightning_specdec.audit.identity import find_divergence
    from lightning_specdec.rules import Sampling

    target, _ = decoder.ready()
    kind = str(next(target.parameters()).dtype).removeprefix("torch.")
    width = 1 + max((len(each.drafted) for each in other.rounds or []), default=0)
    sampling = Sampling.of(config)
    found = find_divergence(
        target, one.prompt, one.tokens, other.tokens, number=one.index, sampling=sampling, seed=config.seed, width=width
    )
    if found is None or found.verdict == "tie":
        return f"near-tie in {kind}"
    return f"NOT a near-tie in {kind}: `lightning_specdec audit` looks closer"


def outputs(
    tokenizer: Tokenizer | None,
    standard: DecodeResult | None,
    speculative: DecodeResult | None,
    texts: Sequence[str | None],
    *,
    colour: bool | None = None,
) -> str:
    """Each prompt's output, then the same with the fate of each draft token; standard decoding's where it differs."""
    colour, lines = colours() if colour is None else colour, []
    for plain, drafted in zip_longest(standard.rows if standard else [], speculative.rows if speculative else []):
        row = drafted or plain
        prompt = texts[row.index] or (tokenizer.decode(row.prompt) if tokenizer else _joined(row.prompt))
        prompt = visible(" ".join(prompt.split()))
        prompt = prompt if len(prompt) <= MOST_SHOWN else f"{prompt[:MOST_SHOWN]}..."
        lines += [f"prompt {row.index}: {prompt}{_ending(row)}", _block(_clean(row))]
        if drafted is not None and drafted.rounds:
            lines += ["  by round", _block(_marked(drafted, tokenizer, colour))]
        if drafted is not None and plain is not None and plain.tokens != drafted.tokens:
            lines += [f"  standard{_ending(plain)}", _block(_clean(plain))]
        if row.logprobs is not None:
            lines += ["  logprobs", _block(" ".join(f"{value:.3f}" for value in row.logprobs))]
    if speculative is not None:
        legend = {"kept": "draft token kept", "rejected": "rejected", "own": "the target's own"}
        lines.append("  " + ", ".join(styled(text, fate, colour) for fate, text in legend.items()))
    return "\n".join(lines)


def _ending(row: RowResult) -> str:
    return f"  (stopped: {row.stop_reason})" if row.stop_reason != "length" else ""


def _clean(row: RowResult) -> str:
    return _joined(row.tokens) if row.text is None else visible(row.text)


def _joined(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def _block(text: str) -> str:
    return textwrap.indent(text.strip("\n"), "    ")


def _marked(row: RowResult, tokenizer: Tokenizer | None, colour: bool) -> str:
    """A row's output, neighbours of one fate together."""
    joint = " " if tokenizer is None else ""
    pieces = _tokens(row) if tokenizer is None else _texts(row, tokenizer)
    groups = groupby(pieces, lambda each: each[0])
    return joint.join(styled(joint.join(text for _, text in several), fate, colour) for fate, several in groups)


def _fates(row: RowResult) -> Iterator[tuple[str, int]]:
    """A row's tokens by fate, a rejected draft token before what stands in its place."""
    for each in row.rounds or []:
        yield from (("kept", token) for token in each.drafted[: each.num_accepted])
        if each.next_token is not None:
            yield from (("rejected", token) for token in each.drafted[each.num_accepted :][:1])
            yield "own", each.next_token


def _tokens(row: RowResult) -> Iterator[tuple[str, str]]:
    return ((fate, str(token)) for fate, token in _fates(row))


def _texts(row: RowResult, tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """The same as text. Special tokens are shown too, though they are no part of the output."""
    stream, special, num_left = tokenizer.stream(), tokenizer.vocabulary.special_texts, len(row.text or "")
    for fate, token in _fates(row):
        if fate == "rejected":
            yield fate, visible(special.get(token) or tokenizer.decode([token]).replace("\n", "\u23ce"))
            continue
        piece = stream.push([token])[:num_left]  # a stop string is not shown
        num_left -= len(piece)
        if token in special and (num_left or row.stop_reason != "stop"):
            piece += special[token]
        if piece:
            yield fate, visible(piece)
    if rest := stream.finish()[:num_left]:
        yield "own", visible(rest)


_ROWS = (
    ("seconds", "seconds", "{:,.3g}"),
    ("tokens/s", "tokens_per_second", "{:,.1f}"),
    ("first token, seconds", "time_to_first_token", "{:,.3g}"),
    ("target calls", "num_target_calls", "{:,}"),
    ("draft calls", "num_draft_calls", "{:,}"),
    ("block efficiency", "block_efficiency", "{:.2f}"),
)
_PHASES = tuple((f"{name}, seconds", f"{name}_seconds", "{:,.3g}") for name in ("draft", "verify", "accept", "rest"))
_FIGURES = ("walltime_speedup", "acceptance_rate", "draft_utilization", "predicted_speedup")


def table(summary: Mapping[str, Any], *, phases: bool = False) -> str:
    """The figures of a benchmark, the methods side by side."""
    sides = [name for name in ("standard", "speculative") if summary[name] is not None]
    lines = [f"{'':<22}" + "".join(f"{name:>13}" for name in sides)]
    for label, key, form in (*_ROWS, *(_PHASES if phases else ())):
        cells = ["-" if summary[name][key] is None else form.format(summary[name][key]) for name in sides]
        if set(cells) != {"-"}:
            lines.append(f"{label:<22}" + "".join(f"{cell:>13}" for cell in cells))
    found = [f"{name} {summary[name]:.2f}" for name in _FIGURES if summary.get(name) is not None]
    return "\n".join([*lines, *([", ".join(found)] if found else [])])
