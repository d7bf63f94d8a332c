"""The verb `decode`: both ways on the same prompts, their outputs compared, the speedup reported.

Takes its parsed options and gives an exit code.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from argparse import Namespace
from typing import Any

from lightning_specdec.checks import require_int
from lightning_specdec.cli_common import draws, log, progress, set_threads, set_up_logs
from lightning_specdec.cli_groups import MAX_TOKENS
from lightning_specdec.cli_groups import RULES as RULE_ARGUMENTS
from lightning_specdec.cli_models import load_decoder
from lightning_specdec.cli_parser import UsageError
from lightning_specdec.cli_prompts import OWN, Placed, as_texts, as_tokens, read_prompts
from lightning_specdec.cli_prose import decoded_prose
from lightning_specdec.cli_report import decoded_text, summary_table
from lightning_specdec.cli_shown import in_batches, rows_by_prompt
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.inference import DecodeInterrupted, DecodeResult, Window
from lightning_specdec.inference.rows import check_prompt
from lightning_specdec.manifest import manifest
from lightning_specdec.rules import RULES, AcceptanceRule, Sampling, SamplingOptions
from lightning_specdec.terminal import say
from lightning_specdec.threads import limit_threads

PATIENCE_SECONDS = 20.0
"""What measuring takes at most where the user has not chosen the repeats, and two of them fit into it."""


def decode(options: Namespace) -> int:
    """Decode both ways, show the outputs, measure."""
    set_up_logs(options.log_level, json_lines=options.log_json)
    drawn, rule = check_options(options), make_rule(options)
    given = read_prompts(options.prompt or [], options.prompts_file)
    decoder = load_decoder(options)
    if options.threads is None:
        limit_threads(decoder.target.num_parameters)
    texts = find_prompts(decoder, given, options)
    chosen = options.repeats is not None
    _fill_in(options, decoder)
    compile_seconds = _compile(decoder, options.num_draft_tokens, drawn) if options.compile else 0.0
    prompts = [tokens for _, tokens in texts]
    window = decoder.window(
        batch_size=min(options.batch_size, len(prompts)), rule=rule, num_draft_tokens=options.num_draft_tokens, **drawn
    )
    shared: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "eos": () if options.ignore_eos else options.eos,
        "stop": options.stop or (),
        "seed": options.seed,
        "logprobs": options.logprobs,
    }
    standard: DecodeResult | None = None
    speculative: DecodeResult | None = None
    summary: dict[str, Any] = {}
    interrupted, started = False, time.perf_counter()
    try:
        if options.mode != "speculative":
            standard = in_batches(
                lambda batch, indices: decoder.decode_standard(batch, indices=indices, **drawn, **shared),
                prompts,
                options.batch_size,
            )
        if options.mode != "standard":
            speculative = in_batches(
                lambda batch, indices: decoder.decode(
                    batch, indices=indices, num_draft_tokens=window, rule=rule, **drawn, **shared
                ),
                prompts,
                options.batch_size,
            )
    except KeyboardInterrupt as stop:
        interrupted = True
        if isinstance(stop, DecodeInterrupted):
            if stop.result.rule is None:
                standard = stop.result
            else:
                speculative = stop.result
    run_seconds = time.perf_counter() - started
    if options.output == "text":
        say(
            _outputs(decoder, standard, speculative, texts, rule, options, Sampling(**drawn)),
            flush=True,
            has_colours=True,
        )
    if options.repeats and not interrupted:
        warmup = _plan(options, run_seconds, chosen=chosen)
        try:
            bench = decoder.benchmark(
                prompts,
                num_draft_tokens=window,
                rule=rule,
                repeats=options.repeats,
                warmup=warmup,
                batch_size=options.batch_size,
                mode=options.mode,
                equal_treatment=options.ckpt is not None and isinstance(decoder.drafter, ModelDrafter),
                **drawn,
                **shared,
            )
            summary, interrupted = bench.summary(), bench.interrupted
            summary["warmup_seconds"] += compile_seconds
        except KeyboardInterrupt:
            interrupted = True
    found = manifest(options=vars(options), checkpoint=options.ckpt, device=decoder.target.device)
    if options.output == "json":
        rows = rows_by_prompt(standard, speculative, [text for text, _ in texts])
        say(json.dumps({"summary": summary, "prompts": rows, "manifest": found}))
    elif summary:
        say(summary_table(summary, num_prompts=len(prompts), manifest=found))
    if interrupted:
        say("interrupted: what is above was settled by then", file=sys.stderr)
    return 130 if interrupted else 0


def _plan(options: Namespace, run_seconds: float, *, chosen: bool) -> int:
    """Lower the repeats where they would take long, unless the user has chosen them, and say how long they will take.

    Args:
        run_seconds: what the runs took that were shown, which warm up everything too.

    Returns:
        how many repeats warm up before the clock counts.
    """
    warmup = 3 if options.ckpt else 0  # a large model is warm by what is shown
    if not chosen and (warmup + options.repeats) * run_seconds > PATIENCE_SECONDS:
        warmup, options.repeats = 0, max(2, min(options.repeats, int(PATIENCE_SECONDS / run_seconds)))
    number = f"{options.repeats} repeat{'s' if options.repeats > 1 else ''}"
    seconds = max(1, round((warmup + options.repeats) * run_seconds))
    progress(f"measuring {number}, about {seconds} s: --repeats 0 leaves it out")
    return warmup


def _outputs(
    decoder: SpeculativeDecoder,
    standard: DecodeResult | None,
    speculative: DecodeResult | None,
    texts: list[tuple[str | None, list[int]]],
    rule: AcceptanceRule,
    options: Namespace,
    sampling: Sampling,
) -> str:
    """Both ways' outputs as they are shown.

    Control characters are shown as escapes in a file too: this is a report for readers, and `cat` would bring them to a
    terminal later. `--output json` holds the exact text.
    """
    shown: dict[str, Any] = {
        "colour": sys.stdout.isatty() and not os.environ.get("NO_COLOR"),
        "logprobs": options.logprobs,
        "rounding": _rounding(decoder, rule, sampling),
    }
    if decoder.tokenizer is None:
        return decoded_text(standard, speculative, **shown)
    named = [text or decoder.tokenizer.decode(tokens) for text, tokens in texts]
    return decoded_prose(standard, speculative, decoder.tokenizer, named, **shown)


def check_options(options: Namespace) -> SamplingOptions:
    """How tokens are drawn, once everything that can be checked without a model is."""
    set_threads(options)
    for name, least, most in (
        ("num_draft_tokens", 1, MAX_TOKENS),
        ("max_new_tokens", 1, MAX_TOKENS),
        ("repeats", 0, None),
    ):
        if getattr(options, name) not in (None, "auto"):
            require_int(name, getattr(options, name), least, most)
    require_int("batch_size", options.batch_size, 1)
    if options.raw and options.chat_template:
        raise UsageError("--raw and --chat_template exclude each other: give one of them")
    if options.ignore_eos and options.eos:
        raise UsageError("--ignore_eos and --eos exclude each other: give one of them")
    drawn = draws(options)
    if Sampling(**drawn).greedy and (idle := [name for name in ("top_k", "top_p", "min_p") if drawn[name] is not None]):
        log.warning("temperature 0 takes the likeliest token: %s changes nothing", " and ".join(idle))
    return drawn


def _fill_in(options: Namespace, decoder: SpeculativeDecoder) -> None:
    """What depends on the models where the user says nothing: a user waits for large ones."""
    most, own = decoder.drafter.max_draft_tokens, options.ckpt is not None and options.drafter is None
    if most is not None and isinstance(options.num_draft_tokens, int) and options.num_draft_tokens > most:
        name = type(decoder.drafter).__name__
        log.warning("%s guesses at most %d tokens a round: a larger window changes nothing", name, most)
    if options.num_draft_tokens is None and own and (window := decoder.recipe.get("num_draft_tokens")) is not None:
        options.num_draft_tokens = require_int("num_draft_tokens of the checkpoint's recipe", window, 1, MAX_TOKENS)
    if options.num_draft_tokens is None and not isinstance(decoder.num_draft_tokens, Window):
        options.num_draft_tokens = decoder.num_draft_tokens
    owned = inspect.signature(SpeculativeDecoder.benchmark).parameters
    for name, of_text in (("max_new_tokens", 64), ("repeats", 2)):
        if getattr(options, name) is None:
            setattr(options, name, owned[name].default if decoder.tokenizer is None else of_text)


def find_prompts(
    decoder: SpeculativeDecoder, given: list[Placed] | None, options: Namespace
) -> list[tuple[str | None, list[int]]]:
    """The prompts' texts, where they are texts, and tokens: the user's, the pair's own, or ours."""
    target, tokenizer = decoder.target, decoder.tokenizer
    if tokenizer is None:
        if options.chat_template or options.stop:
            wanted = "--chat_template" if options.chat_template else "--stop"
            raise ValueError(f"{wanted} needs a tokenizer, and this target has none: drop it")
        placed = None if given is None else as_tokens(given)
        for where, prompt in placed or []:
            check_prompt(prompt, target.vocab_size, where)
        prompts = decoder.prompts if placed is None else [prompt for _, prompt in placed]
        if not prompts:
            raise ValueError("the target keeps no prompts of its own: give some with --prompt '1 2 3'")
        return [(None, prompt) for prompt in prompts]
    if given is None and decoder.prompts:
        return [(None, prompt) for prompt in decoder.prompts]
    chat = options.chat_template or (tokenizer.has_chat_template and not options.raw)
    texts = [text for _, text in as_texts(given)] if given is not None else list(OWN)
    return [(text, decoder.encode_chat(text) if chat else decoder.encode(text)) for text in texts]


def _rounding(decoder: SpeculativeDecoder, rule: AcceptanceRule, sampling: Sampling) -> str | None:
    """The type that the target computes in, where nothing but its rounding lets the two outputs differ."""
    if not rule.keeps_tokens(greedy=sampling.greedy):
        return None
    return str(next(decoder.target.parameters()).dtype).removeprefix("torch.")


def make_rule(options: Namespace) -> AcceptanceRule:
    """The rule that the options name, with its arguments."""
    values = vars(options)
    given = {name: values[f"rule.{name}"] for name in ("epsilon", "delta") if values[f"rule.{name}"] is not None}
    if foreign := given.keys() - RULE_ARGUMENTS[options.rule].keys():
        raise ValueError(
            f"{options.rule} takes no {' and no '.join(sorted(foreign))}: drop it or choose another --rule"
        )
    return RULES[options.rule](**given)


def _compile(decoder: SpeculativeDecoder, num_draft_tokens: int | str | None, drawn: SamplingOptions) -> float:
    """Compile the models if this machine can; say so if it cannot."""
    from lightning_specdec.compiler import CompilerMissing, require_compiler

    try:
        require_compiler()
        log.info("compiling, 3 to 40 seconds at each start, the most for the first time on a machine")
        window = num_draft_tokens if isinstance(num_draft_tokens, int) else None
        return decoder.compile(num_draft_tokens=window, **drawn)
    except (CompilerMissing, ValueError) as error:
        log.warning("%s", error)
        return 0.0
