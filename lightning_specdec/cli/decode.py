"""The verb `decode`: standard and speculative decoding of the same prompts, their outputs compared, the speedup."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_specdec.cli.common import counted, find_prompts, load_decoder, log, progress, read_prompts, set_up_logs
from lightning_specdec.cli.options import (
    MeasureSettings,
    OutputSettings,
    Parser,
    PromptSettings,
    add_decoding,
    add_models,
    chosen,
    decoding,
    pair_source,
    typed,
)
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.settings import setting
from lightning_specdec.config.terminal import say

if TYPE_CHECKING:
    from lightning_specdec.decoder import SpeculativeDecoder
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
"""What measuring takes at most where --repeats is not given, and two repeats fit into it."""
FEW_TOKENS = 7
"""New tokens by default where tokens are no text."""


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(OutputSettings):
    """What is run, and how it is printed."""

    mode: str = setting("both", "methods to run", choices=("both", "standard", "speculative"))
    compile: bool = setting(False, "compile transformers models: 3 to 40 seconds at each start")


def add_arguments(parser: Parser) -> None:
    """The flags of the verb."""
    add_models(parser)
    parser.add_settings("prompts", PromptSettings)
    add_decoding(parser)
    parser.add_settings("measuring", MeasureSettings)
    parser.add_settings("output", DecodeSettings)


def run(options: Namespace) -> int:
    """Decode with each method, measure, and print the answer, the outputs and the table."""
    set_up_logs(options)
    settings, measure, config = chosen(options, DecodeSettings), chosen(options, MeasureSettings), decoding(options)
    source, given = pair_source(options), read_prompts(chosen(options, PromptSettings))
    if config.greedy and (idle := [name for name in ("top_k", "top_p", "min_p") if getattr(config, name) is not None]):
        log.warning("temperature 0 takes the most likely token: %s changes nothing", " and ".join(idle))
    config = replace(config, rule=typed(config.rule, "rule"))
    decoder = load_decoder(options, source)
    prompts = find_prompts(decoder, given, raw="raw" in options)
    config = _completed(config, options, decoder)
    decoder_run = _Run(decoder, config, measure, settings, [tokens for _, tokens in prompts])
    decoder_run.decode()
    decoder_run.measure()
    from lightning_specdec.bench.manifest import made_on, manifest
    from lightning_specdec.cli.shown import answer, outputs, table

    used = {**source.to_dict(), **config.to_dict(), **measure.to_dict(), **settings.to_dict()}
    made = manifest(options=used, checkpoint=source.ckpt, device=decoder.target.device)
    standard, speculative = decoder_run.results.values()
    texts, summary = [text for text, _ in prompts], decoder_run.summary
    if settings.output == "json":
        say(json.dumps({"summary": summary, "prompts": _by_prompt(decoder_run.results, texts), "manifest": made}))
    elif standard is not None or speculative is not None:
        say(answer(decoder, standard, speculative, summary, config) + "\n")
        say(outputs(decoder.tokenizer, standard, speculative, texts), has_colours=True)
        if summary:
            say("\n" + table(summary, phases="verbose" in options))
            say(f"\n{counted(len(prompts), 'prompt')}, batch size {measure.batch_size}, {made_on(made)}")
    if decoder_run.interrupted:
        say("interrupted: what is above was decoded by then", file=sys.stderr)
        return 130
    if failed := decoder_run.failed:
        numbers = ", ".join(map(str, failed))
        say(f"failed: the target's logits for prompt {numbers} are not finite: try --dtype float32", file=sys.stderr)
    return 1 if failed else 0


def _completed(config: DecodingConfig, options: Namespace, decoder: SpeculativeDecoder) -> DecodingConfig:
    """With the defaults that depend on the models."""
    most, window = decoder.drafter.max_draft_tokens, config.num_draft_tokens
    if most is not None and isinstance(window, int) and window > most:
        name = type(decoder.drafter).__name__
        log.warning("%s drafts at most %d tokens per round: a larger window changes nothing", name, most)
    if window is None and isinstance(decoder.num_draft_tokens, int | str):
        config = replace(config, num_draft_tokens=decoder.num_draft_tokens)
    if decoder.tokenizer is None:
        if config.stop:
            raise ValueError("--stop needs a tokenizer, and this target has none: drop it")
        if "max_new_tokens" not in options:
            config = replace(config, max_new_tokens=FEW_TOKENS)
    return config


class _Run:
    """The methods at work on the same prompts; Ctrl-C keeps what has been decoded."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        config: DecodingConfig,
        measure: MeasureSettings,
        settings: DecodeSettings,
        prompts: list[list[int]],
    ) -> None:
        self.decoder, self.settings, self.prompts = decoder, settings, prompts
        self.repeats, self.batch_size = measure.repeats, measure.batch_size
        self.results: dict[str, DecodeResult | None] = {"standard": None, "speculative": None}
        self.summary: dict[str, Any] = {}
        self.interrupted, self.seconds = False, 0.0
        self.compile_seconds = _compile(decoder) if settings.compile else 0.0
        window = decoder.window(config, batch_size=min(self.batch_size, len(prompts)))
        self.config = replace(config, num_draft_tokens=window)

    def decode(self) -> None:
        """Each method once: its output, and how long it takes."""
        progress(f"decoding {counted(len(self.prompts), 'prompt')} ...")
        started = time.perf_counter()
        methods = {"standard": self.decoder.decode_standard, "speculative": self.decoder.decode}
        for name, method in methods.items():
            if self.settings.mode in ("both", name) and not self.interrupted:
                self._in_batches(name, method)
        self.seconds = time.perf_counter() - started

    def _in_batches(self, name: str, method: Callable[..., DecodeResult]) -> None:
        from lightning_specdec.decoding import DecodeInterrupted, merge_results

        results: list[DecodeResult] = []
        try:
            for first in range(0, len(self.prompts), self.batch_size):
                batch = self.prompts[first : first + self.batch_size]
                indices = list(range(first, first + len(batch)))
                results.append(method(batch, self.config, indices=indices))
        except KeyboardInterrupt as stop:
            self.interrupted = True
            results += [stop.result] if isinstance(stop, DecodeInterrupted) else []
        self.results[name] = merge_results(results) if results else None

    @property
    def failed(self) -> list[int]:
        """The prompts that a method could not finish."""
        results = [result for result in self.results.values() if result is not None]
        return sorted({row.index for result in results for row in result.rows if row.stop_reason == "failed"})

    def measure(self) -> None:
        """Both methods in turn, again and again; as often as patience allows where nothing was said."""
        if self.repeats == 0 or self.interrupted or self.failed:
            return
        repeats, warmup = plan(self.repeats, self.seconds)
        try:
            bench = self.decoder.benchmark(
                self.prompts,
                self.config,
                repeats=repeats,
                warmup=warmup,
                batch_size=self.batch_size,
                mode=self.settings.mode,
            )
        except KeyboardInterrupt:
            self.interrupted = True
            return
        self.summary, self.interrupted = bench.summary(), bench.interrupted
        self.summary["compile_seconds"] = self.compile_seconds


def plan(repeats: int | None, run_seconds: float) -> tuple[int, int]:
    """Repeats, as many as patience allows where none are given, and how many more run before them; says how long."""
    if repeats is None:
        repeats = max(2, min(10, int(PATIENCE_SECONDS / max(run_seconds, 1e-9))))
    warmup = 3 if run_seconds < 1 else 0  # a longer run has warmed everything up
    seconds = max(1, round((warmup + repeats) * run_seconds))
    progress(f"measuring {counted(repeats, 'repeat')}, about {seconds} s: --repeats 0 leaves it out")
    return repeats, warmup


def _by_prompt(results: dict[str, DecodeResult | None], texts: list[str | None]) -> list[dict[str, Any]]:
    """For each prompt the methods' new tokens, text and counts, as plain values."""
    merged: dict[int, dict[str, Any]] = {}
    for name, result in results.items():
        for row in result.to_dict()["rows"] if result else []:
            index, prompt = row.pop("index"), row.pop("prompt")
            merged.setdefault(index, {"index": index, "prompt": prompt, "prompt_text": texts[index]})[name] = row
    return list(merged.values())


def _compile(decoder: SpeculativeDecoder) -> float:
    """Compile the models if this machine can, and say so if it cannot; the seconds that it took."""
    from lightning_specdec.models.compiled import CompilerMissing

    try:
        progress("compiling, 3 to 40 seconds")
        return decoder.compile()
    except (CompilerMissing, ValueError) as error:
        log.warning("%s", error)
        return 0.0
