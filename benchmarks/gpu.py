"""Measure decoding on a GPU: target calls against the memory limit, rounds outside the models, trained pairs.

python benchmarks/gpu.py train decode identity calls rounds --output gpu.json

`train` also compiles what the other parts need, in processes beside it (`warm`), so that they find it in the compiler's
cache.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.bench.manifest import manifest
from lightning_specdec.decoding import (
    AdaptiveWindow,
    DecodeResult,
    Session,
    autoregressive_decode,
    speculative_decode,
)
from lightning_specdec.decoding.calibration import load_or_measure
from lightning_specdec.drafters import (
    Drafter,
    EagleDrafter,
    EarlyExitDrafter,
    MedusaDrafter,
    ModelDrafter,
)
from lightning_specdec.drafters.base import is_pipelined
from lightning_specdec.models.compiled import compile_layers
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.rules import Sampling

SHAPES: dict[str, dict[str, int]] = {
    "16 layers of 2048 (as Llama 3.2 1B)": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
    },
    "4 layers of 4096 (as Llama 3 8B's)": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
    },
}
VOCABULARY = {2048: 128256, 4096: 32000}
BATCHES = (1, 4, 16, 64)
NEW_TOKENS = 160
NUM_ROUNDS = 40
FORMS = ("eager", "recorded", "recorded and compiled")
SAMPLINGS = {"greedy": Sampling(), "temperature 1": Sampling(1.0)}
PASSES = 3
TEXT = "torch/**/*.py"
LAYERS = 30
SMALL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
"""The shape of SmolLM2-135M; with bytes for tokens it has 106 million parameters."""
TRAINED: dict[str, dict[str, Any]] = {
    "early_exit": {
        "class_path": "EarlyExitTraining",
        "init_args": {
            "exit_layer": 2,
            "exit_weights": [3, 4, 3, *[0] * (LAYERS - 4), 20],
            "layer_dropout": 0.0,
        },
    },
    "medusa": {"class_path": "MedusaTraining", "init_args": {"num_heads": 4}},
}
WIDTHS = (1, 2, 3, 5, 7, 9, 17)
"""Tokens of each row in the calls that are compiled beforehand: of draft, standard decoding, and windows of `auto`."""


def llama(vocab_size: int, **sizes: int) -> HuggingFaceLM:
    """A random model in bfloat16."""
    torch.manual_seed(0)
    config = {
        "model_type": "llama",
        "num_attention_heads": sizes["hidden_size"] // 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 1024 if sizes == SMALL else 4096,
        "vocab_size": vocab_size,
        "tie_word_embeddings": sizes != SMALL,
        **sizes,
    }
    with torch.device("cuda"):
        return HuggingFaceLM(config).to(torch.bfloat16).eval()


def read_rate() -> float:
    """Bytes per second of a sum over 2 GiB: the memory limit of all figures below."""
    values = torch.ones(2**28, dtype=torch.long, device="cuda")
    return values.nbytes / _median_seconds(lambda: values.amax())


def _median_seconds(call: Callable[[], Any], repeats: int = 20) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / 1000)
    return statistics.median(times)


def prompts(batch: int, vocab_size: int, length: int = 64) -> list[list[int]]:
    """Random prompts."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(vocab_size, (batch, length), generator=generator).tolist()


def calls(quick: bool) -> dict[str, Any]:
    """Standard decoding of random models of a billion parameters: unchanged, recorded, and recorded and compiled."""
    rate = read_rate()
    rows: list[dict[str, Any]] = []
    for name, sizes in list(SHAPES.items())[: 1 if quick else None]:
        vocab_size = VOCABULARY[sizes["hidden_size"]]
        model = llama(**sizes, vocab_size=vocab_size)
        for form in FORMS[2:] if quick else FORMS:
            target = model if form == "eager" else model.packed()
            compile_seconds = compile_layers(target) if "compiled" in form else 0.0
            for batch in BATCHES[:1] if form == "eager" else BATCHES:
                texts, tokens = prompts(batch, vocab_size), 16 if form == "eager" else 128
                for _ in range(2):
                    result = autoregressive_decode(target, texts, max_new_tokens=tokens)
                times = result.rows[0].token_seconds
                seconds = (times[-1] - times[0]) / (tokens - 1)
                row = {
                    "model": name,
                    "parameters": model.num_parameters,
                    "form": form,
                    "batch": batch,
                    "milliseconds_a_token": 1e3 * seconds,
                    "tokens_per_second": batch / seconds,
                    "share_of_memory_limit": sum(weight.nbytes for weight in model.parameters())
                    / seconds
                    / rate,
                    "compile_seconds": compile_seconds,
                }
                rows.append(row)
                _show(row)
        del model, target
        torch.cuda.empty_cache()
    return {"read_bytes_per_second": rate, "rows": rows}


def rounds(quick: bool) -> list[dict[str, Any]]:
    """Time of a round outside draft and target, and its transfers between host and device."""
    sizes = SHAPES["16 layers of 2048 (as Llama 3.2 1B)"]
    target = llama(**sizes, vocab_size=32000).packed()
    compile_layers(target)
    more: dict[str, Any] = {"hidden_size": 2048, "vocab_size": 32000}
    eagle: dict[str, Any] = {
        "num_heads": 32,
        "num_key_heads": 8,
        "intermediate_size": 8192,
        "draft_vocabulary": list(range(8000)),
    }
    drafters: dict[str, Drafter] = {
        "early exit": EarlyExitDrafter(2),
        "heads": MedusaDrafter(4, draft_vocabulary=list(range(8000)), **more),
    }
    if not quick:
        drafters["model"] = ModelDrafter(
            llama(**{**sizes, "num_hidden_layers": 2}, vocab_size=32000).packed()
        )
        drafters["autoregressive head"] = EagleDrafter([2, 8, 14], **more, **eagle)
    rows: list[dict[str, Any]] = []
    for name, drafter in drafters.items():
        drafter = drafter.to("cuda", torch.bfloat16).eval()
        for batch in BATCHES:
            # 100 rounds and what the profiler sees, of 5 tokens at most.
            session = Session(target, drafter, max_length=700, num_draft_tokens=4, batch_size=batch)
            for text in prompts(batch, 32000):
                session.add(text, max_new_tokens=600)
            seconds, phases = _round_seconds(session)
            row = {
                "drafter": name,
                "batch": batch,
                "milliseconds_a_round": 1e3 * seconds,
                "draft_milliseconds": 1e3 * phases["draft"],
                "verify_milliseconds": 1e3 * phases["verify"],
                "outside_milliseconds": 1e3 * (seconds - phases["draft"] - phases["verify"]),
                **_meetings(session),
            }
            if is_pipelined(drafter):
                with session._executor.not_pipelined():
                    row["milliseconds_a_round_not_ahead"] = 1e3 * _round_seconds(session)[0]
            rows.append(row)
            _show(row)
    return rows


def _round_seconds(session: Session) -> tuple[float, dict[str, float]]:
    """Seconds of a round, all and by phase, after some that are not counted."""
    for _ in range(8):
        session.step()
    before = session.timer.seconds()
    began = time.perf_counter()
    for _ in range(NUM_ROUNDS):
        session.step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / NUM_ROUNDS
    return seconds, {
        key: (value - before[key]) / NUM_ROUNDS for key, value in session.timer.seconds().items()
    }


def _meetings(session: Session, num_rounds: int = 4) -> dict[str, float]:
    """Copies and synchronizations per round, counted by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(num_rounds):
            session.step()
    counts: collections.Counter[str] = collections.Counter()
    for event in seen.events() or ():
        for part in ("HtoD", "DtoH", "StreamSynchronize", "EventSynchronize", "GraphLaunch"):
            if part in event.name:
                counts[part] += 1
    return {
        "uploads": counts["HtoD"] / num_rounds,
        "reads": counts["DtoH"] / num_rounds,
        "synchronizations": (counts["StreamSynchronize"] + counts["EventSynchronize"]) / num_rounds,
        "graph_launches": counts["GraphLaunch"] / num_rounds,
    }


def warm(batch: int, shape: str) -> None:
    """Compile the calls of one batch size into the compiler's cache."""
    small = shape == "small"
    model = llama(256, **SMALL) if small else llama(32000, **next(iter(SHAPES.values())))
    target = model.packed()
    compile_layers(target)
    with torch.inference_mode():
        state = target.init_state(batch, 400)
        target(
            torch.zeros(batch, 64, dtype=torch.long, device="cuda"),
            state,
            logits_for=slice(-1, None),
        )
        for width in WIDTHS if small else (1, 2, 5):
            target(
                torch.zeros(batch, width, dtype=torch.long, device="cuda"),
                state,
                logits_for=slice(-1, None),
            )


def train(minutes: float, directory: Path) -> dict[str, Any]:
    """Train a model of 106M parameters with early exits, and one with heads, on Python sources, side by side.

    The configuration is a scaled configs/text.yaml."""
    site = Path(torch.__file__).parent.parent
    began, running = time.perf_counter(), {}
    for name, model in TRAINED.items():
        config = yaml.safe_load(Path("configs/text.yaml").read_text())
        config["data"]["init_args"] |= {
            "paths": str(site / TEXT),
            "length": 513,
            "batch_size": 32,
            "num_train": 65536,
            "num_val": 64,
        }
        target = config["model"]["init_args"]["target"]
        target["init_args"]["model"] |= SMALL
        options = {"target": target, "num_draft_tokens": 4, "learning_rate": 0.001}
        config["model"] = {**model, "init_args": {**options, **model["init_args"]}}
        trainer = config["trainer"]
        trainer |= {
            "max_epochs": 1000,
            "accelerator": "cuda",
            "devices": 1,
            "precision": "bf16-mixed",
        }
        keep = {
            "dirpath": str(directory / name),
            "filename": "last",
            "enable_version_counter": False,
        }
        trainer["callbacks"] = [
            {
                "class_path": "ModelCheckpoint",
                "init_args": {**keep, "save_on_train_epoch_end": True},
            },
            # The learning rate falls with the time.
            {
                "class_path": "lightning_specdec.training.optimizers.TimeLimit",
                "init_args": {"minutes": minutes},
            },
        ]
        trainer["logger"]["init_args"]["save_dir"] = str(directory / "logs")
        path = directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "lightning_specdec", "fit", "--config", str(path)]
        log = (directory / f"{name}.log").open("w")
        running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    places = [("small", 2**i) for i in range(7)] + [("large", batch) for batch in BATCHES]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    for shape, batch in places:
        command = [sys.executable, __file__, "warm", "--shape", shape, "--batch", str(batch)]
        with (directory / f"warm_{shape}_{batch}.log").open("w") as log:
            running[f"warm {shape} {batch}"] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
    seconds: dict[str, Any] = {}
    for name, process in running.items():
        code = process.wait()
        seconds[name] = time.perf_counter() - began
        if name in TRAINED or code:
            log_path = directory / f"{name.replace(' ', '_')}.log"
            _show(
                {
                    "ended": name,
                    "code": code,
                    "seconds": seconds[name],
                    "output": log_path.read_text()[-700:],
                }
            )
    return seconds


def _trained(
    name: str, directory: Path, dtype: torch.dtype
) -> tuple[SpeculativeDecoder, HuggingFaceLM, Drafter]:
    (path,) = (directory / name).rglob("last.ckpt")  # in the directory of its run
    decoder = SpeculativeDecoder.from_checkpoint(path, device="cuda", dtype=dtype)
    target, drafter = decoder.ready()
    assert isinstance(target, HuggingFaceLM)
    return decoder, target, drafter


def identity(directory: Path) -> list[dict[str, Any]]:
    """Compare the outputs of both decodings in float32, recorded and not compiled."""
    rows: list[dict[str, Any]] = []
    for name in TRAINED:
        decoder, target, drafter = _trained(name, directory, torch.float32)
        for sampled, sampling in SAMPLINGS.items():
            row = _compare(target, drafter, [decoder.prompts[:8]], sampling, 4, passes=1)
            kept = {key: row[key] for key in ("same_output", "num_prompts", "block_efficiency")}
            rows.append({"draft": name, "batch": 8, "sampling": sampled, **kept})
            _show(rows[-1])
    return rows


def decode(
    directory: Path, passes: int, seconds: float, keep: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Compare the trained pairs with standard decoding on held-out text, both recorded and compiled.

    No comparison begins after so many seconds."""
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    pairs = {name: _trained(name, directory, torch.bfloat16) for name in TRAINED}
    for _, target, _ in pairs.values():
        compile_layers(target)
    settings: list[tuple[str, int, str, int, int | str]] = []
    for sampled in SAMPLINGS:
        for window in (4, "auto"):
            settings += [(name, batch, sampled, 2, window) for batch in BATCHES for name in TRAINED]
    settings += [
        ("early_exit", 1, "greedy", layer, window) for layer, window in ((1, 4), (3, 4), (2, 6))
    ]
    for name, batch, sampled, layer, window in settings:
        if time.perf_counter() - started > seconds:
            _show({"left_out": (name, batch, sampled, layer, window)})
            continue
        decoder, target, drafter = pairs[name]
        drafter = drafter.at(layer) if name == "early_exit" else drafter
        label = f"exit after layer {layer} of {LAYERS}" if name == "early_exit" else "4 heads"
        chosen = [decoder.prompts[i % len(decoder.prompts)] for i in range(max(batch, 8))]
        groups, began = (
            [chosen[i : i + batch] for i in range(0, len(chosen), batch)],
            time.perf_counter(),
        )
        sampling, costs = SAMPLINGS[sampled], None
        if window == "auto":
            costs = load_or_measure(target, drafter, batch_size=batch, sampling=sampling)
        chosen_window = window if costs is None else AdaptiveWindow(costs)
        row = _compare(target, drafter, groups, sampling, chosen_window, passes=passes)
        setting = {"draft": label, "batch": batch, "sampling": sampled, "window": window}
        if costs is not None:
            setting["calibration"] = costs.to_dict()
        rows.append({**setting, **row, "measured_in_seconds": time.perf_counter() - began})
        _show({key: value for key, value in rows[-1].items() if key != "calibration"})
        keep(rows)
    return rows


def _compare(
    target: HuggingFaceLM,
    drafter: Drafter,
    groups: Sequence[list[list[int]]],
    sampling: Sampling,
    window: Any,
    passes: int,
) -> dict[str, Any]:
    """Alternate standard and speculative decoding over the same prompts, after one uncounted pass of each, in which
    everything is recorded and compiled."""
    standard: list[DecodeResult] = []
    speculative: list[DecodeResult] = []
    for number in range(passes + 1):
        for group in groups:
            one = autoregressive_decode(target, group, max_new_tokens=NEW_TOKENS, sampling=sampling)
            other = speculative_decode(
                target,
                drafter,
                group,
                max_new_tokens=NEW_TOKENS,
                sampling=sampling,
                num_draft_tokens=window,
            )
            if number:
                standard.append(one)
                speculative.append(other)
    ratios = [one.seconds / other.seconds for one, other in zip(standard, speculative, strict=True)]
    tokens = sum(result.num_new_tokens for result in speculative)
    rounds = sum(row.num_rounds for result in speculative for row in result.rows)
    pairs = [
        (a.tokens, b.tokens)
        for one, other in zip(standard, speculative, strict=True)
        for a, b in zip(one.rows, other.rows, strict=True)
    ]
    return {
        "walltime_speedup": sum(r.seconds for r in standard) / sum(r.seconds for r in speculative),
        "speedup_behind_the_first_token": _seconds_behind_first(standard)
        / _seconds_behind_first(speculative),
        "smallest": min(ratios),
        "median": statistics.median(ratios),
        "largest": max(ratios),
        "block_efficiency": tokens / rounds,
        "standard_tokens_per_second": sum(r.num_new_tokens for r in standard)
        / sum(r.seconds for r in standard),
        "speculative_tokens_per_second": tokens / sum(r.seconds for r in speculative),
        "phase_milliseconds_a_round": _phases(speculative),
        "phase_milliseconds_a_token": _phases(standard),
        "same_output": sum(one == other for one, other in pairs) // passes,
        "num_prompts": len(pairs) // passes,
    }


def _seconds_behind_first(results: Sequence[DecodeResult]) -> float:
    """Seconds of what follows the reading of the prompts, which neither decoding records."""
    ends = [
        (min(r.token_seconds[0] for r in each.rows), max(r.token_seconds[-1] for r in each.rows))
        for each in results
    ]
    return sum(last - first for first, last in ends)


def _phases(results: Sequence[DecodeResult]) -> dict[str, float]:
    """Milliseconds of each phase by target call."""
    calls = sum(result.num_target_calls for result in results)
    names = results[0].phase_seconds
    return {
        name: round(1e3 * sum(r.phase_seconds[name] for r in results) / calls, 4) for name in names
    }


def _show(row: dict[str, Any]) -> None:
    print(
        *(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="+", choices=("train", "decode", "identity", "calls", "rounds", "warm")
    )
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="training time of the two models, side by side"
    )
    parser.add_argument(
        "--directory", type=Path, help="directory of the trained models (default: a temporary one)"
    )
    parser.add_argument("--output", type=Path, help="file for what is measured")
    parser.add_argument(
        "--quick", action="store_true", help="fewer passes, one model and one form of calls"
    )
    parser.add_argument(
        "--decode_seconds", type=float, default=float("inf"), help="time after which decode ends"
    )
    parser.add_argument("--batch", type=int, default=1, help="of warm")
    parser.add_argument("--shape", choices=("small", "large"), default="small", help="of warm")
    options = parser.parse_args()
    if options.parts == ["warm"]:
        return warm(options.batch, options.shape)
    if options.output is None:
        parser.error("--output is missing")
    directory = options.directory or Path(tempfile.mkdtemp())
    directory.mkdir(parents=True, exist_ok=True)
    chosen = {"parts": options.parts, "minutes": options.minutes, "quick": options.quick}
    made: dict[str, Any] = {"manifest": manifest(options=chosen, device=torch.device("cuda"))}

    def keep(part: str, rows: Any) -> None:
        made[part] = rows
        options.output.write_text(json.dumps(made, indent=1))

    parts: dict[str, Callable[[], Any]] = {
        "train": lambda: train(options.minutes, directory),
        "decode": lambda: decode(
            directory,
            2 if options.quick else PASSES,
            options.decode_seconds,
            lambda rows: keep("decode", rows),
        ),
        "identity": lambda: identity(directory),
        "calls": lambda: calls(options.quick),
        "rounds": lambda: rounds(options.quick),
    }
    for part in options.parts:
        keep(part, parts[part]())


if __name__ == "__main__":
    main()
