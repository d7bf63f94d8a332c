"""The verb `decode`: decode prompts with and without the draft, and compare output and speed."""

from __future__ import annotations

import json
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lightning_specdec.cli.common import Loaded, counted, load, progress
from lightning_specdec.cli.decode_text import outputs
from lightning_specdec.cli.options import (
    GrammarSettings,
    MeasureSettings,
    OutputSettings,
    Parser,
    PromptSettings,
    chosen,
    decoding,
)
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.settings import setting
from lightning_specdec.config.terminal import say, visible

if TYPE_CHECKING:
    from lightning_specdec.bench.records import Comparison
    from lightning_specdec.decoder import SpeculativeDecoder
    from lightning_specdec.decoding import DecodeResult
    from lightning_specdec.rules import Grammar

SUMMARY = "decode with and without the draft, compare the outputs, report the speedup"
EXAMPLES = """\
lightning_specdec decode checkpoints/rnn.safetensors --prompt '1 2 3' --prompt '10 14 18'
lightning_specdec decode checkpoints/rnn.safetensors --rule RejectionSampling --temperature 1
lightning_specdec decode --pair gpt2 --prompt 'The history of the telescope begins'
lightning_specdec decode --target ./llama --draft ./small-llama --num_draft_tokens auto
lightning_specdec decode --target ./llama --drafter NGramDrafter --drafter.max_ngram 4
lightning_specdec decode --target ./llama --json_schema answer.json --prompt 'Describe an oak.'
lightning_specdec decode --target ./llama --drafter EarlyExitDrafter --drafter.exit_layer 3"""
MEASURE_SECONDS = 20.0
"""Time for measuring if --repeats is not given, provided that a repeat fits into it."""
MAX_MEASURE_SECONDS = 60.0
"""If --repeats is not given and one repeat takes longer, only the first prompts are measured."""
MAX_REPEATS = 10
MIN_WARMUP_SECONDS = 1.0
"""A first run of at least this many seconds has warmed everything up."""
WARMUP_RUNS = 3
FEW_PROMPTS = 3
"""Number of the pair's own prompts whose outputs are printed without -v."""
FEW_TOKENS = 7
"""Default number of new tokens if the target has no tokenizer."""


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
    parser.add_decoding(
        help={
            "max_new_tokens": "generate at most this many tokens per prompt; default: 64, or "
            f"{FEW_TOKENS} for a target without a tokenizer"
        }
    )
    parser.add_settings("Structured output", GrammarSettings)
    parser.add_settings("Measure", MeasureSettings)
    parser.add_settings("Output", DecodeSettings)


@dataclass
class Outcome:
    """The results of each method by name, and the measurement, as far as Ctrl-C let them go."""

    results: dict[str, DecodeResult]
    comparison: Comparison | None = None
    num_measured_prompts: int = 0
    interrupted: bool = False

    @property
    def failed_prompts(self) -> list[int]:
        """Numbers of the prompts with logits that are not finite."""
        failed: set[int] = set()
        for result in self.results.values():
            failed.update(row.index for row in result.rows if row.stop_reason == "failed")
        return sorted(failed)


def run(options: Namespace) -> int:
    """Decode with each method, measure, and print the answer, the outputs, and the table."""
    settings = chosen(options, DecodeSettings)
    measure = chosen(options, MeasureSettings)
    config = decoding(options)
    grammar = chosen(options, GrammarSettings).given
    if grammar is not None:
        # Imported here because numpy and the tokenizers take a while, and checked here because
        # loading the models, which comes first, takes seconds.
        from lightning_specdec.text.grammar import check_grammar

        check_grammar(*grammar)
    loaded = load(options)
    decoder = loaded.decoder
    if grammar is not None:
        config = config.changed(processors=(_grammar(*grammar),))
    config = decoder.config(config)
    if decoder.tokenizer is None and "max_new_tokens" not in options:
        config = config.changed(max_new_tokens=FEW_TOKENS)
    if "quiet" in options and settings.output == "text":
        # Only the text is wanted, so that nothing is compared or measured.
        if "mode" not in options:
            settings = settings.changed(mode="speculative")
        measure = measure.changed(repeats=0)
    if settings.compile:
        progress("compiling ...")
        decoder.compile()

    outcome = _decode_and_measure(loaded, config, settings, measure)
    progress("comparing the outputs", often=True)
    manifest = loaded.manifest(config, measure, settings)
    if settings.output == "json":
        say(json.dumps(_document(outcome, loaded, config, manifest)))
    elif "quiet" in options:
        say(_texts(outcome))
    else:
        say(_answer(outcome, decoder, config))
        say(f"\n{_details(outcome, loaded, options, manifest)}", has_colours=True)
    return _report_failures(outcome)


def _grammar(kind: str, text: str) -> Grammar:
    """The grammar of this kind and text."""
    # Imported here because torch takes a second.
    from lightning_specdec.rules import Grammar

    if kind == "json_schema":
        return Grammar.json_schema(text)
    return Grammar.regex(text) if kind == "regex" else Grammar.lark(text)


def _texts(outcome: Outcome) -> str:
    """The output for each prompt, as text or as tokens."""
    result = outcome.results.get("speculative") or outcome.results["standard"]
    texts = []
    for row in result.rows:
        tokens = " ".join(str(token) for token in row.tokens)
        texts.append(tokens if row.text is None else row.text)
    return "\n".join(texts)


def _decode_and_measure(
    loaded: Loaded,
    config: DecodingConfig,
    settings: DecodeSettings,
    measure: MeasureSettings,
) -> Outcome:
    """Decode once with each method for the outputs, then measure unless that is not wanted."""
    decoder = loaded.decoder
    prompts = loaded.prompts
    methods = {"standard": decoder.decode_standard, "speculative": decoder.decode}
    outcome = Outcome({})
    start_seconds = time.perf_counter()
    progress(f"decoding {counted(len(prompts), 'prompt')} ...")
    for name, method in methods.items():
        if settings.mode in ("both", name) and not outcome.interrupted:
            result, outcome.interrupted = _decode_batches(
                method, prompts, config, measure.batch_size
            )
            outcome.results[name] = result

    if measure.repeats == 0 or outcome.interrupted or outcome.failed_prompts:
        return outcome
    plan = _measurement(time.perf_counter() - start_seconds, len(prompts), measure)
    outcome.num_measured_prompts = plan.num_prompts
    progress(_announcement(plan, len(prompts)))
    try:
        outcome.comparison = decoder.benchmark(
            prompts[: plan.num_prompts],
            config,
            mode=settings.mode,
            repeats=plan.repeats,
            warmup=plan.warmup,
            batch_size=measure.batch_size,
        )
        outcome.interrupted = outcome.comparison.interrupted
    except KeyboardInterrupt:
        outcome.interrupted = True
    return outcome


@dataclass(frozen=True)
class _Measurement:
    """What is measured, and about how long that takes."""

    num_prompts: int
    repeats: int
    warmup: int
    expected_seconds: float


def _measurement(seconds: float, num_prompts: int, measure: MeasureSettings) -> _Measurement:
    """Choose prompts and repeats if the user did not.

    Args:
        seconds: time of decoding all prompts once with each method.
        num_prompts: number of all prompts.
        measure: the user's settings.
    """
    warmup = WARMUP_RUNS if seconds < MIN_WARMUP_SECONDS else 0
    if measure.repeats is not None:
        expected_seconds = (warmup + measure.repeats) * seconds
        return _Measurement(num_prompts, measure.repeats, warmup, expected_seconds)

    if seconds <= MAX_MEASURE_SECONDS:
        repeats = min(MAX_REPEATS, max(1, int(MEASURE_SECONDS / seconds)))
        return _Measurement(num_prompts, repeats, warmup, (warmup + repeats) * seconds)

    # Whole batches, as many as fit into the time, but at least one.
    num_batches = math.ceil(num_prompts / measure.batch_size)
    batches_in_time = max(1, int(MAX_MEASURE_SECONDS / seconds * num_batches))
    num_measured = min(num_prompts, batches_in_time * measure.batch_size)
    return _Measurement(num_measured, 1, warmup, seconds * num_measured / num_prompts)


def _announcement(plan: _Measurement, num_prompts: int) -> str:
    """What is measured, how long it takes, and how to change that."""
    time_and_advice = f"about {plan.expected_seconds:.0f} s: use --repeats 0 to skip this"
    if plan.num_prompts == num_prompts:
        return f"measuring, {time_and_advice}"
    return (
        f"measuring the first {plan.num_prompts} of {num_prompts} prompts, {time_and_advice}, "
        "or --repeats 1 to measure all prompts"
    )


def _decode_batches(
    method: Callable[..., DecodeResult],
    prompts: Sequence[list[int]],
    config: DecodingConfig,
    batch_size: int,
) -> tuple[DecodeResult, bool]:
    """Decode batch by batch; returns the merged result, and whether Ctrl-C ended it early."""
    # Imported here because torch takes a second.
    from lightning_specdec.decoding import DecodeInterrupted, merge_results

    results = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        indices = range(start, start + len(batch))
        try:
            results.append(method(batch, config, indices=indices))
        except DecodeInterrupted as interruption:
            return merge_results([*results, interruption.result]), True
    return merge_results(results), False


def _document(
    outcome: Outcome,
    loaded: Loaded,
    config: DecodingConfig,
    manifest: dict[str, Any],
) -> dict[str, Any]:
    """Everything as plain values: verdicts, figures, and each prompt's tokens, text, and counts."""
    rows_by_prompt: dict[int, dict[str, Any]] = {}
    for name, result in outcome.results.items():
        for row in result.to_dict()["rows"]:
            index = row.pop("index")
            prompt = row.pop("prompt")
            if index not in rows_by_prompt:
                rows_by_prompt[index] = {
                    "index": index,
                    "prompt": prompt,
                    "prompt_text": loaded.texts[index],
                }
            rows_by_prompt[index][name] = row

    summary = {} if outcome.comparison is None else outcome.comparison.summary()
    return {
        "summary": summary,
        "num_measured_prompts": outcome.num_measured_prompts,
        "verdict": None if outcome.comparison is None else asdict(outcome.comparison.verdict),
        "outputs": _agreement(outcome, loaded.decoder, config),
        "prompts": list(rows_by_prompt.values()),
        "manifest": manifest,
    }


def _agreement(
    outcome: Outcome,
    decoder: SpeculativeDecoder,
    config: DecodingConfig,
) -> dict[str, str] | None:
    """Whether both outputs agree, as plain values; None unless both are complete."""
    # Imported here because torch takes a second.
    from lightning_specdec.audit.agreement import compare_outputs

    has_both = len(outcome.results) == 2
    is_complete = outcome.comparison is not None or not outcome.interrupted
    if not has_both or not is_complete:
        return None
    standard = outcome.results["standard"]
    speculative = outcome.results["speculative"]
    return asdict(compare_outputs(decoder, standard, speculative, config))


def _answer(outcome: Outcome, decoder: SpeculativeDecoder, config: DecodingConfig) -> str:
    """The first line: what speculation saves, and whether the outputs agree."""
    parts = []
    if outcome.comparison is not None:
        parts.append(describe_speed(outcome.comparison))
    agreement = _agreement(outcome, decoder, config)
    if agreement is not None:
        parts.append(agreement["text"])
    return ", ".join(parts) or "decoded"


def describe_speed(comparison: Comparison) -> str:
    """The verdict on the speedup, followed by the speed of each method."""
    tokens_per_second = f"{comparison.tokens_per_second or 0.0:,.1f} tokens/s"
    if comparison.walltime_speedup is None:
        return tokens_per_second
    standard_tokens_per_second = f"{comparison.standard_tokens_per_second or 0.0:,.1f}"
    return f"{comparison.verdict.text} ({standard_tokens_per_second} -> {tokens_per_second})"


def _details(outcome: Outcome, loaded: Loaded, options: Namespace, manifest: dict[str, Any]) -> str:
    """The outputs, the table of figures, and what they were measured on."""
    from lightning_specdec.bench.manifest import made_on
    from lightning_specdec.bench.table import details, listing

    verbose = "verbose" in options
    target = loaded.decoder.target
    has_own_prompts = "prompt" not in options and "prompts_file" not in options
    parts = [
        outputs(
            loaded.decoder.tokenizer,
            outcome.results.get("standard"),
            outcome.results.get("speculative"),
            loaded.texts,
            max_prompts=FEW_PROMPTS if has_own_prompts and not verbose else None,
        )
    ]
    if outcome.comparison is not None:
        parts.append(visible(listing(outcome.comparison)))
        if verbose:
            parts.append(details(outcome.comparison))
        batch_size = manifest["options"]["batch_size"]
        num_prompts = counted(len(loaded.prompts), "prompt")
        if outcome.num_measured_prompts < len(loaded.prompts):
            num_prompts = f"the first {outcome.num_measured_prompts} of {num_prompts}"
        condition = f"{num_prompts}, batch size {batch_size}"
        if loaded.decoder.tokenizer is None and "max_new_tokens" not in options:
            condition += (
                f", {FEW_TOKENS} new tokens each (the default without a tokenizer: "
                "--max_new_tokens changes it)"
            )
        dtype = getattr(target, "dtype", None)
        if dtype is not None:
            condition += f", {str(dtype).removeprefix('torch.')} in {target.backend}"
        parts.append(visible(f"{condition}, {made_on(manifest)}"))
    return "\n\n".join(part for part in parts if part)


def _report_failures(outcome: Outcome) -> int:
    """Report an interruption or a failed prompt on stderr; returns the exit code."""
    if outcome.interrupted:
        say("interrupted: what is above was decoded by then", file=sys.stderr)
        return 130
    failed = outcome.failed_prompts
    if not failed:
        return 0
    numbers = ", ".join(str(number) for number in failed)
    say(
        f"failed: the target's logits for prompt {numbers} are not finite: try --dtype float32",
        file=sys.stderr,
    )
    return 1
