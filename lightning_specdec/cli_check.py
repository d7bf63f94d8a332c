"""The verb `check`: load one model, say what it takes, and generate a few tokens.

Takes its parsed options and gives an exit code.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from typing import Any

from lightning_specdec.checks import require_int
from lightning_specdec.cli_common import find_device, progress, set_threads, set_up_logs
from lightning_specdec.cli_groups import MAX_TOKENS
from lightning_specdec.decoding import Decoding
from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.memory import gigabytes
from lightning_specdec.models.loading import load_model
from lightning_specdec.terminal import say
from lightning_specdec.threads import limit_threads


def check(options: Namespace) -> int:
    """Load a model, print its parameters and memory, and generate with it."""
    set_up_logs(options.log_level, json_lines=options.log_json)
    set_threads(options)
    require_int("max_new_tokens", options.max_new_tokens, 1, MAX_TOKENS)
    started = time.perf_counter()
    progress(f"loading {options.MODEL} ...")
    model = load_model(
        options.MODEL,
        dtype=options.dtype,
        device=find_device(options.device),
        quantization=options.quantization,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    ).pack()  # as pairs are decoded
    load_seconds = time.perf_counter() - started
    if options.threads is None:
        limit_threads(model.num_parameters)
    decoder = Decoding(model, NGramDrafter())
    prompt = [min(1, model.vocab_size - 1)] if decoder.tokenizer is None else decoder.encode(options.prompt)
    decoder.decode_standard([prompt], max_new_tokens=1)  # the first call of all allocates and warms up
    result = decoder.decode_standard([prompt], max_new_tokens=options.max_new_tokens, eos=())
    (row,) = result.rows
    values: dict[str, Any] = {
        "model": options.MODEL,
        "architecture": type(model.model).__name__,
        "parameters": model.num_parameters,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": options.quantization,
        "device": str(model.device),
        "memory_bytes": model.memory_bytes,
        "context": model.max_positions,
        "vocabulary": model.vocab_size,
        "load_seconds": load_seconds,
        "prompt": prompt if decoder.tokenizer is None else options.prompt,
        "tokens": row.tokens,
        "text": row.text,
        "tokens_per_second": result.tokens_per_second,
    }
    say(json.dumps(values) if options.output == "json" else _report(values))
    return 0


def _report(values: dict[str, Any]) -> str:
    kind = values["dtype"] + (f", weights in {values['quantization']}" if values["quantization"] else "")
    text = values["text"] if values["text"] is not None else " ".join(map(str, values["tokens"]))
    rows = [
        ("model", f"{values['model']} ({values['architecture']})"),
        ("parameters", f"{values['parameters']:,}"),
        ("computes in", f"{kind}, on {values['device']}"),
        ("memory", f"{gigabytes(values['memory_bytes'])} of weights"),
        ("context", "unlimited" if values["context"] is None else f"{values['context']:,} tokens"),
        ("vocabulary", f"{values['vocabulary']:,} tokens"),
        ("loaded in", f"{values['load_seconds']:.1f} s"),
        ("prompt", repr(values["prompt"])),
        ("goes on", repr(text) if values["text"] is not None else text),
        ("speed", f"{values['tokens_per_second']:.1f} tokens/s ({len(values['tokens'])} tokens, standard decoding)"),
    ]
    return "\n".join(f"{name:<13}{value}" for name, value in rows)
