"""The verb `decode`: standard and speculative decoding of the same prompts, their outputs compared, the speedup."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from math import isnan
from typing import TYPE_CHECKING, Any

from lightning_specdec.cli.common import counted, load, progress
from lightning_specdec.cli.options import (
    MeasureSettings,
    OutputSettings,
    Parser,
    PromptSettings,
    chosen,
    decoding,
)
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.settings import setting
from lightning_specdec.config.terminal import say, short, visible

if TYPE_CHECKING:
    from lightning_specdec.bench.rows import Comparison
    from lightning_specdec.decoder import SpeculativeDecoder
    from lightning_specdec.decoding import DecodeResult, RowResult
    from lightning_specdec.text.tokenizer import Tokenizer

SUMMARY = "decode with and without the draft, compare the outputs, report the speedup"
EXAMPLES = """\
lightning_specdec decode checkpoints/rnn.safetensors --prompt '1 2 3' --prompt '10 14 18'
lightning_specdec decode checkpoints/rnn.safetensors --rule RejectionSampling --temperature 1 --output json
lightning_specdec decode --pair gpt2 --prompt 'The history of the telescope begins'
lightning_specdec decode --target ./llama --draft ./small-llama --num_draft_tokens auto
lightning_specdec decode --target ./llama --drafter NGramDrafter --drafter.max_ngram 4
lightning_specdec decode --target ./llama --drafter EarlyExitDrafter --drafter.exit_layer 3"""
PATIENCE_SECONDS = 20.0
"""Time for measuring where --repeats is not given, and two repeats fit into it."""
FEW_PROMPTS = 3
"""Prompts of the pair's own whose outputs are printed without -v."""
FEW_TOKENS = 7
"""New tokens by default where the target has no tokenizer."""
STYLES = {"kept": ("32", "[{}]"), "rejected": ("31;9", ""), "own": ("0", "{}")}
"""Colour of each fate, and its marks where there are no colours; rejected tokens are left out there."""
LEGEND = {"kept": "draft token kept", "rejected": "rejected", "own": "the target's own"}
INDENT = "    "
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
MOST_SHOWN = 100
"""Characters of a prompt that are repeated above its output."""


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(OutputSettings):
    """What is run, and how it is printed."""

    mode: str = setting("both", "methods to run", choices=("both", "standard", "speculative"))
    compile: bool = setting(
        False, "on a GPU, compile transformers models: 3 to 40 seconds at each start"
    )


def add_arguments(parser: Parser) -> None:
    parser.add_models()
    parser.add_settings("Prompt", PromptSettings)
    parser.add_decoding()
    parser.add_settings("Measure", MeasureSettings)
    parser.add_settings("Output", DecodeSettings)


def run(options: Namespace) -> int:
    """Decode with each method, measure, and print the answer, the outputs and the table."""
    settings, measure, config = (
        chosen(options, DecodeSettings),
        chosen(options, MeasureSettings),
        decoding(options),
    )
    loaded = load(options)
    _, decoder, texts, prompts = loaded
    config = decoder.config(config)
    if decoder.tokenizer is None and "max_new_tokens" not in options:
        config = config.changed(max_new_tokens=FEW_TOKENS)
    if settings.compile:
        progress("compiling ...")
        decoder.compile()
    from lightning_specdec.bench.manifest import made_on
    from lightning_specdec.bench.table import details, listing

    results: dict[str, DecodeResult] = {}
    measured, interrupted, started = None, False, time.perf_counter()
    progress(f"decoding {counted(len(prompts), 'prompt')} ...")
    for name, method in (("standard", decoder.decode_standard), ("speculative", decoder.decode)):
        if settings.mode in ("both", name) and not interrupted:
            results[name], interrupted = _decoded(method, prompts, config, measure.batch_size)
    failed = sorted(
        {row.index for each in results.values() for row in each.rows if row.stop_reason == "failed"}
    )
    if measure.repeats != 0 and not interrupted and not failed:
        seconds = time.perf_counter() - started
        repeats = measure.repeats or max(2, min(10, int(PATIENCE_SECONDS / seconds)))
        warmup = 3 if seconds < 1 else 0  # a longer run has warmed everything up
        progress(
            f"measuring, about {(warmup + repeats) * seconds:.0f} s: --repeats 0 leaves it out"
        )
        timed: dict[str, Any] = {
            "repeats": repeats,
            "warmup": warmup,
            "batch_size": measure.batch_size,
        }
        try:
            measured = decoder.benchmark(prompts, config, mode=settings.mode, **timed)
        except KeyboardInterrupt:
            interrupted = True
    made = loaded.manifest(config, measure, settings)
    summary = {} if measured is None else measured.summary()
    if settings.output == "json":
        say(
            json.dumps(
                {"summary": summary, "prompts": _by_prompt(results, texts), "manifest": made}
            )
        )
    else:
        answer = [] if measured is None else [saved(measured)]
        if len(results) == 2 and (measured or not interrupted):
            answer.append(agreement(decoder, results["standard"], results["speculative"], config))
        say(f"{', '.join(answer) or 'decoded'}")
        own = "prompt" not in options and "prompts_file" not in options
        most = FEW_PROMPTS if own and "verbose" not in options else None
        parts = [
            outputs(
                decoder.tokenizer,
                results.get("standard"),
                results.get("speculative"),
                texts,
                most=most,
            )
        ]
        if measured is not None:
            parts += [visible(listing(measured)), details(measured) if "verbose" in options else ""]
            numbers = f"{counted(len(prompts), 'prompt')}, batch size {measure.batch_size}"
            if (dtype := getattr(decoder.target, "dtype", None)) is not None:
                numbers += f", {str(dtype).removeprefix('torch.')} in {decoder.target.backend}"
            parts.append(visible(f"{numbers}, {made_on(made)}"))
        if "quiet" not in options:
            say("\n" + "\n\n".join(filter(None, parts)), has_colours=True)
    if interrupted or (measured is not None and measured.interrupted):
        say("interrupted: what is above was decoded by then", file=sys.stderr)
        return 130
    if failed:
        numbers = ", ".join(map(str, failed))
        say(
            f"failed: the target's logits for prompt {numbers} are not finite: try --dtype float32",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _decoded(
    method: Callable[..., DecodeResult],
    prompts: list[list[int]],
    config: DecodingConfig,
    batch_size: int,
) -> tuple[DecodeResult, bool]:
    """The outcome of a method, batch by batch, and whether Ctrl-C ended it early."""
    from lightning_specdec.decoding import DecodeInterrupted, merge_results

    results = []
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        try:
            results.append(method(batch, config, indices=range(first, first + len(batch))))
        except DecodeInterrupted as stop:
            return merge_results([*results, stop.result]), True
    return merge_results(results), False


def _by_prompt(results: dict[str, DecodeResult], texts: list[str | None]) -> list[dict[str, Any]]:
    """For each prompt the methods' new tokens, text and counts, as plain values."""
    merged: dict[int, dict[str, Any]] = {}
    for name, result in results.items():
        for row in result.to_dict()["rows"]:
            index, prompt = row.pop("index"), row.pop("prompt")
            merged.setdefault(
                index, {"index": index, "prompt": prompt, "prompt_text": texts[index]}
            )[name] = row
    return list(merged.values())


def saved(measured: Comparison) -> str:
    """What speculation saved: faster or slower only where the interval says so."""
    from lightning_specdec.bench.rows import speed

    speeds = [
        each for rows in (measured.standard, measured.rows) if (each := speed(rows)) is not None
    ]
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
    decoder: SpeculativeDecoder,
    standard: DecodeResult,
    speculative: DecodeResult,
    config: DecodingConfig,
) -> str:
    """Whether the outputs are the same, and whether they should be."""
    pairs = [(one, other) for one, other in zip(standard.rows, speculative.rows, strict=True)]
    if speculative.lossy_reason is not None:
        num_equal = sum(one.tokens == other.tokens for one, other in pairs)
        equal = f"{num_equal} of {counted(len(pairs), 'output')} equal"
        return f"NOT LOSSLESS: {speculative.lossy_reason}; {equal}"
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
    place = (
        f"{several}, first at {where} of prompt {different[0][0].index}"
        if several
        else f" at {where}"
    )
    return f"output differs{place} ({cause})"


def _divergence(
    decoder: SpeculativeDecoder, one: RowResult, other: RowResult, config: DecodingConfig
) -> tuple[str, str]:
    """Where and why two outputs differ that should be the same: a near-tie that rounding decides, or a fault."""
    from lightning_specdec.audit.identity import find_divergence
    from lightning_specdec.rules import Sampling

    target, _ = decoder.ready()
    width = 1 + max((len(each.drafted) for each in other.rounds or []), default=0)
    keys: dict[str, Any] = {
        "number": one.index,
        "sampling": Sampling.of(config),
        "seed": config.seed,
        "width": width,
    }
    found = find_divergence(target, one.prompt, one.tokens, other.tokens, **keys)
    assert found is not None
    cause = f"near-tie in {str(next(target.parameters()).dtype).removeprefix('torch.')}"
    cause = (
        cause
        if found.verdict == "tie"
        else f"NOT a {cause}: `lightning_specdec audit` looks closer"
    )
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
    every = list(
        zip_longest(standard.rows if standard else [], speculative.rows if speculative else [])
    )
    for plain, drafted in every[:most]:
        row = drafted or plain
        prompt = texts[row.index] or (
            tokenizer.decode(row.prompt) if tokenizer else " ".join(map(str, row.prompt))
        )
        lines += [
            f"prompt {row.index}: {short(visible(' '.join(prompt.split())), MOST_SHOWN)}",
            _shown(row),
        ]
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
    return _block(" ".join(map(str, row.tokens)) if row.text is None else visible(row.text))


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
    return joint.join(
        _styled(joint.join(text for _, text in several), fate, colour) for fate, several in groups
    )


def pieces(row: RowResult, tokenizer: Tokenizer | None) -> Iterator[tuple[str, str]]:
    """A row's tokens as fate and text, special ones and a stop string included; a rejected one before its successor."""
    stream, special = (
        (None, {})
        if tokenizer is None
        else (tokenizer.stream(), tokenizer.vocabulary.special_texts)
    )
    for fate, token in _fates(row):
        if tokenizer is None or stream is None:
            yield fate, str(token)
        elif fate == "rejected":
            yield (
                fate,
                visible(special.get(token) or tokenizer.decode([token]).replace("\n", "\u23ce")),
            )
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
