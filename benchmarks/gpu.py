"""Measure decoding on a GPU: target calls against the memory limit, rounds outside the models, a trained pair.

python benchmarks/gpu.py calls rounds train decode --output gpu.json
"""

from __future__ import annotations

import argparse
import collections
import json
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
from lightning_specdec.decoding import DecodeResult, Session, autoregressive_decode, speculative_decode
from lightning_specdec.drafters import Drafter, EagleDrafter, EarlyExitDrafter, ModelDrafter, MultiTokenDrafter
from lightning_specdec.models.compiled import compile_layers
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.rules import Sampling

SHAPES: dict[str, dict[str, int]] = {
    "16 layers of 2048 (as Llama 3.2 1B)": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "4 layers of 4096 (as Llama 3 8B's)": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4},
}
VOCABULARY = {2048: 128256, 4096: 32000}
BATCHES = (1, 4, 16, 64)
NEW_TOKENS = 160
NUM_ROUNDS = 40
FORMS = ("eager", "recorded", "recorded and compiled")
SAMPLINGS = {"greedy": Sampling(), "temperature 1": Sampling(1.0)}
TEXT = "torch/**/*.py"
TRAINED: dict[str, dict[str, Any]] = {
    "early_exit": {
        "class_path": "EarlyExitTraining",
        "init_args": {"exit_layer": 2, "exit_weights": [2, 3, 2, 2, *[1] * 11, 24], "layer_dropout": 0.0},
    },
    "multi_token": {"class_path": "MultiTokenTraining", "init_args": {"num_heads": 4}},
}


def llama(hidden_size: int, intermediate_size: int, num_hidden_layers: int, vocab_size: int) -> HuggingFaceLM:
    """A random model in bfloat16."""
    torch.manual_seed(0)
    config = {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": hidden_size // 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
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


def calls() -> dict[str, Any]:
    """Standard decoding of random models of a billion parameters: unchanged, recorded, and recorded and compiled."""
    rate = read_rate()
    rows: list[dict[str, Any]] = []
    for name, sizes in SHAPES.items():
        vocab_size = VOCABULARY[sizes["hidden_size"]]
        model = llama(**sizes, vocab_size=vocab_size)
        for form in FORMS:
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
                    "share_of_memory_limit": sum(weight.nbytes for weight in model.parameters()) / seconds / rate,
                    "compile_seconds": compile_seconds,
                }
                rows.append(row)
                _show(row)
        del model, target
        torch.cuda.empty_cache()
    return {"read_bytes_per_second": rate, "rows": rows}


def rounds() -> list[dict[str, Any]]:
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
        "heads": MultiTokenDrafter(4, draft_vocabulary=list(range(8000)), **more),
        "model": ModelDrafter(llama(2048, 8192, 2, 32000).packed()),
        "autoregressive head": EagleDrafter([2, 8, 14], **more, **eagle),
    }
    rows: list[dict[str, Any]] = []
    for name, drafter in drafters.items():
        drafter = drafter.to("cuda", torch.bfloat16).eval()
        for batch in BATCHES:
            session = Session(target, drafter, max_length=400, num_draft_tokens=4, batch_size=batch)
            for text in prompts(batch, 32000):
                session.add(text, max_new_tokens=300)
            for _ in range(8):
                session.step()
            before = session.timer.seconds()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(NUM_ROUNDS):
                session.step()
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - began) / NUM_ROUNDS
            phases = {key: (value - before[key]) / NUM_ROUNDS for key, value in session.timer.seconds().items()}
            row = {
                "drafter": name,
                "batch": batch,
                "milliseconds_a_round": 1e3 * seconds,
                "draft_milliseconds": 1e3 * phases["draft"],
                "verify_milliseconds": 1e3 * phases["verify"],
                "outside_milliseconds": 1e3 * (seconds - phases["draft"] - phases["verify"]),
                **_meetings(session),
            }
            rows.append(row)
            _show(row)
    return rows


def _meetings(session: Session, num_rounds: int = 4) -> dict[str, float]:
    """Copies and synchronizations per round, counted by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(num_rounds):
            session.step()
    counts: collections.Counter[str] = collections.Counter()
    for event in seen.events() or ():
        for part in ("HtoD", "DtoH", "StreamSynchronize", "GraphLaunch"):
            if part in event.name:
                counts[part] += 1
    return {
        "uploads": counts["HtoD"] / num_rounds,
        "reads": counts["DtoH"] / num_rounds,
        "synchronizations": counts["StreamSynchronize"] / num_rounds,
        "graph_launches": counts["GraphLaunch"] / num_rounds,
    }


def train(minutes: float, directory: Path) -> dict[str, Any]:
    """Train a model of 113M parameters with early exits, and one with heads, on Python sources.

    The configuration is a scaled configs/text.yaml."""
    site = Path(torch.__file__).parent.parent
    seconds: dict[str, Any] = {}
    for name, model in TRAINED.items():
        config = yaml.safe_load(Path("configs/text.yaml").read_text())
        config["data"]["init_args"] |= {
            "paths": str(site / TEXT),
            "length": 513,
            "batch_size": 32,
            "num_train": 65536,
            "num_val": 64,
        }
        sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 12}
        target = config["model"]["init_args"]["target"]
        target["init_args"]["model"] |= sizes
        options = {"target": target, "num_draft_tokens": 4, "learning_rate": 0.0006}
        config["model"] = {**model, "init_args": {**options, **model["init_args"]}}
        trainer = config["trainer"]
        trainer |= {"max_epochs": 1000, "max_time": {"seconds": int(60 * minutes)}, "accelerator": "cuda", "devices": 1}
        trainer |= {"precision": "bf16-mixed", "check_val_every_n_epoch": 2}
        keep = {"dirpath": str(directory / name), "filename": "last", "enable_version_counter": False}
        last = {"class_path": "ModelCheckpoint", "init_args": {**keep, "save_on_train_epoch_end": True}}
        trainer["callbacks"] = [last]
        trainer["logger"]["init_args"]["save_dir"] = str(directory / "logs")
        path = directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        began = time.perf_counter()
        command = [sys.executable, "-m", "lightning_specdec", "fit", "--config", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        seconds[name] = time.perf_counter() - began
        _show({"trained": name, "seconds": seconds[name], "output": (done.stdout + done.stderr)[-1500:]})
    return seconds


def decode(directory: Path) -> list[dict[str, Any]]:
    """Compare the trained pairs with standard decoding on held-out text, both recorded and compiled."""
    rows: list[dict[str, Any]] = []
    for name in TRAINED:
        decoder = SpeculativeDecoder.from_checkpoint(
            directory / name / "last.ckpt", device="cuda", dtype=torch.bfloat16
        )
        target = decoder.ready()[0]
        assert isinstance(target, HuggingFaceLM)
        compile_layers(target)
        texts = decoder.prompts
        drafter = decoder.ready()[1]
        label = "exit after layer 2 of 16" if name == "early_exit" else "4 heads"
        for batch in BATCHES:
            chosen = [texts[i % len(texts)] for i in range(max(batch, 8))]
            groups = [chosen[i : i + batch] for i in range(0, len(chosen), batch)]
            for sampled, sampling in SAMPLINGS.items():
                for window in (4, 6) if batch == 1 and name == "early_exit" else (4,):
                    row = _compare(target, drafter, groups, sampling, window)
                    rows.append({"draft": label, "batch": batch, "sampling": sampled, "window": window, **row})
                    _show(rows[-1])
    return rows


def _compare(
    target: HuggingFaceLM, drafter: Drafter, groups: Sequence[list[list[int]]], sampling: Sampling, window: int
) -> dict[str, Any]:
    """Alternate standard and speculative decoding over the same prompts, after one uncounted run of each."""
    standard: list[DecodeResult] = []
    speculative: list[DecodeResult] = []
    for counted in (False, True):
        for group in groups if counted else groups[:1]:
            one = autoregressive_decode(target, group, max_new_tokens=NEW_TOKENS, sampling=sampling)
            other = speculative_decode(
                target, drafter, group, max_new_tokens=NEW_TOKENS, sampling=sampling, num_draft_tokens=window
            )
            if counted:
                standard.append(one)
                speculative.append(other)
    ratios = [one.seconds / other.seconds for one, other in zip(standard, speculative, strict=True)]
    tokens = sum(result.num_new_tokens for result in speculative)
    rounds = sum(row.num_rounds for result in speculative for row in result.rows)
    same = sum(a.tokens == b.tokens for one, two in zip(standard, speculative, strict=True)
               for a, b in zip(one.rows, two.rows, strict=True))  # fmt: skip
    return {
        "walltime_speedup": sum(r.seconds for r in standard) / sum(r.seconds for r in speculative),
        "smallest": min(ratios),
        "largest": max(ratios),
        "block_efficiency": tokens / rounds,
        "standard_tokens_per_second": sum(r.num_new_tokens for r in standard) / sum(r.seconds for r in standard),
        "speculative_tokens_per_second": tokens / sum(r.seconds for r in speculative),
        "same_output": same,
        "num_prompts": sum(map(len, groups)),
    }


def _show(row: dict[str, Any]) -> None:
    print(*(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("calls", "rounds", "train", "decode"))
    parser.add_argument("--minutes", type=float, default=4.0, help="training time of each of the two models")
    parser.add_argument("--directory", type=Path, help="directory of the trained models (default: a temporary one)")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp())
    directory.mkdir(parents=True, exist_ok=True)
    made: dict[str, Any] = {
        "manifest": manifest(options={"parts": options.parts, "minutes": options.minutes}, device=torch.device("cuda"))
    }
    parts: dict[str, Callable[[], Any]] = {
        "calls": calls,
        "rounds": rounds,
        "train": lambda: train(options.minutes, directory),
        "decode": lambda: decode(directory),
    }
    for part in options.parts:
        made[part] = parts[part]()
        options.output.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
