"""The verb `decode`: standard and speculative decoding of the same prompts, their outputs compared, the speedup."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_specdec.cli.common import counted, load, progress, set_up_logs
from lightning_specdec.cli.options import MeasureSettings, OutputSettings, Parser, PromptSettings, chosen, decoding
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.settings import setting
from lightning_specdec.config.terminal import say, visible

if TYPE_CHECKING:
    from lightning_specdec.decoding import DecodeResult

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


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(OutputSettings):
    """What is run, and how it is printed."""

    mode: str = setting("both", "methods to run", choices=("both", "standard", "speculative"))
    compile: bool = setting(False, "on a GPU, compile transformers models: 3 to 40 seconds at each start")


def add_arguments(parser: Parser) -> None:
    parser.add_models()
    parser.add_settings("Prompt", PromptSettings)
    parser.add_decoding()
    parser.add_settings("Measure", MeasureSettings)
    parser.add_settings("Output", DecodeSettings)


def run(options: Namespace) -> int:
    """Decode with each method, measure, and print the answer, the outputs and the table."""
    set_up_logs(options)
    settings, measure, config = chosen(options, DecodeSettings), chosen(options, MeasureSettings), decoding(options)
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
    from lightning_specdec.cli.shown import agreement, outputs, saved

    results: dict[str, DecodeResult] = {}
    measured, interrupted, started = None, False, time.perf_counter()
    progress(f"decoding {counted(len(prompts), 'prompt')} ...")
    for name, method in (("standard", decoder.decode_standard), ("speculative", decoder.decode)):
        if settings.mode in ("both", name) and not interrupted:
            results[name], interrupted = _decoded(method, prompts, config, measure.batch_size)
    failed = sorted({row.index for each in results.values() for row in each.rows if row.stop_reason == "failed"})
    if measure.repeats != 0 and not interrupted and not failed:
        seconds = time.perf_counter() - started
        repeats = measure.repeats or max(2, min(10, int(PATIENCE_SECONDS / seconds)))
        warmup = 3 if seconds < 1 else 0  # a longer run has warmed everything up
        progress(f"measuring, about {(warmup + repeats) * seconds:.0f} s: --repeats 0 leaves it out")
        timed: dict[str, Any] = {"repeats": repeats, "warmup": warmup, "batch_size": measure.batch_size}
        try:
            measured = decoder.benchmark(prompts, config, mode=settings.mode, **timed)
        except KeyboardInterrupt:
            interrupted = True
    made = loaded.manifest(config, measure, settings)
    summary = {} if measured is None else measured.summary()
    if settings.output == "json":
        say(json.dumps({"summary": summary, "prompts": _by_prompt(results, texts), "manifest": made}))
    else:
        answer = [] if measured is None else [saved(measured)]
        if len(results) == 2 and (measured or not interrupted):
            answer.append(agreement(decoder, results["standard"], results["speculative"], config))
        say(f"{', '.join(answer) or 'decoded'}")
        own = "prompt" not in options and "prompts_file" not in options
        most = FEW_PROMPTS if own and "verbose" not in options else None
        parts = [outputs(decoder.tokenizer, results.get("standard"), results.get("speculative"), texts, most=most)]
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
        say(f"failed: the target's logits for prompt {numbers} are not finite: try --dtype float32", file=sys.stderr)
    return 1 if failed else 0


def _decoded(
    method: Callable[..., DecodeResult], prompts: list[list[int]], config: DecodingConfig, batch_size: int
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
            merged.setdefault(index, {"index": index, "prompt": prompt, "prompt_text": texts[index]})[name] = row
    return list(merged.values())
