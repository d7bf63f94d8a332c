"""Compare our decoding of SmolLM2 with transformers' own on this machine, in one run.

    make smollm2
    python benchmarks/smollm2_speed.py --prompts question.jsonl --output docs/results/smollm2_speed.json

Every method decodes the same prompts to the same number of new tokens (none stops early), prefill included, one prompt
at a time, all methods in turn on each prompt. A ratio is the median over the prompts of one method's seconds over
another's. Of transformers, the fastest settings over all prompts count: lookup with 3, 5 and 10 tokens, assisted
decoding with its defaults and with constant windows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from spec_bench import load, mixed
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from lightning_specdec.bench.manifest import manifest
from lightning_specdec.decoding import DecodeResult, autoregressive_decode, speculative_decode
from lightning_specdec.decoding.calibration import calibrate
from lightning_specdec.decoding.windows import AdaptiveWindow
from lightning_specdec.drafters import Drafter, ModelDrafter, NGramDrafter
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.text.tokenizer import TextTokenizer

Way = Callable[[list[int]], Any]
LOOKUPS, CONSTANTS, WINDOWS = (3, 5, 10), (5, 10), (4, 8)
MODEL_WINDOWS = {"right": (5, 10), "wrong": (1, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--prompts", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--num_prompts", type=int, default=10, help="prompts of each part")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--parts", nargs="+", default=["standard", "lookup", "right", "wrong"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    tokenizer = TextTokenizer.load(options.model)
    texts = load(options.prompts, tokenizer)
    long = mixed({task: texts[task] for task in ("summarization", "rag")}, options.num_prompts)
    parts = {"standard": mixed(texts, options.num_prompts), "lookup": long}
    parts |= {"right": parts["standard"], "wrong": parts["standard"]}
    rows: list[dict[str, Any]] = []
    for name in options.dtypes:
        machine = _Machine(options, getattr(torch, name))
        for part in options.parts:
            seconds = _interleave(machine.ways(part), parts[part], machine)
            rows += machine.rows(part, seconds)
    found = manifest(
        options={**vars(options), "output": None, "prompts": "spec_bench"},
        device=torch.device("cpu"),
    )
    if options.output:
        options.output.write_text(json.dumps({"manifest": found, "rows": rows}, indent=1) + "\n")


TOLD = {
    "standard over generate": "our standard decoding over transformers without a draft",
    "standard over generate, long prompts": "our standard decoding over transformers without a draft, long prompts",
    "lookup over generate's": "our lookup over transformers'",
    "lookup over standard": "our lookup over our standard decoding",
    "adaptive lookup over standard": "our adaptive lookup over our standard decoding",
    "adaptive lookup over generate's": "our adaptive lookup over transformers'",
    "right draft over generate's": "right draft, ours over transformers'",
    "right draft over standard": "right draft, ours over our standard decoding",
    "wrong draft over generate's": "wrong draft, ours over transformers'",
    "wrong draft over standard": "wrong draft, ours over our standard decoding",
}
"""Labels of a record's ratios in the table."""


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Ratios of both precisions, as a Markdown table."""
    names = dict.fromkeys(row["ratio"] for row in rows if "ratio" in row)
    found = {(row["ratio"], row["dtype"]): row for row in rows if "ratio" in row}
    lines = ["| Ratio of seconds | bfloat16 | float32 |", "|---|---|---|"]
    for name in names:
        cells = [found.get((name, dtype)) for dtype in ("bfloat16", "float32")]
        shown = ["-" if cell is None else f"{cell['value']:.2f}" for cell in cells]
        lines.append(f"| {TOLD[name]} | {' | '.join(shown)} |")
    return "\n".join(lines)


class _Machine:
    """Models of both libraries in one precision, and their decoding methods."""

    def __init__(self, options: argparse.Namespace, dtype: torch.dtype) -> None:
        self.dtype, self.number = str(dtype).removeprefix("torch."), options.max_new_tokens
        self.theirs: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
        self.theirs.generation_config.eos_token_id = None
        self.target = HuggingFaceLM(
            AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
        ).pack()
        config = AutoConfig.from_pretrained(options.model)
        config.update({"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128})
        config.update({"num_attention_heads": 1, "num_key_value_heads": 1})
        torch.manual_seed(0)
        self.random: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self.random.generation_config.eos_token_id = None
        self.results: dict[str, list[DecodeResult]] = {}

    def ways(self, part: str) -> dict[str, Way]:
        """Methods to compare."""
        if part == "standard":
            return {"generate": self._generate(), "standard": self._standard()}
        if part == "lookup":
            theirs = {
                f"generate lookup {n}": self._generate(prompt_lookup_num_tokens=n) for n in LOOKUPS
            }
            ours = {f"lookup {k}": self._ours(f"lookup {k}", NGramDrafter(), k) for k in WINDOWS}
            adaptive = AdaptiveWindow(calibrate(self.target, NGramDrafter(), context_length=500))
            ours["lookup auto"] = self._ours("lookup auto", NGramDrafter(), adaptive)
            return {"generate": self._generate(), "standard": self._standard(), **theirs, **ours}
        assistant = self.theirs if part == "right" else self.random
        own = ModelDrafter(self.target if part == "right" else HuggingFaceLM(self.random).fused())
        schedules: dict[str, dict[str, Any]] = {
            "defaults": {"num_assistant_tokens_schedule": "heuristic"}
        }
        schedules |= {
            f"constant {n}": {
                "num_assistant_tokens_schedule": "constant",
                "num_assistant_tokens": n,
            }
            for n in CONSTANTS
        }
        theirs = {
            f"generate assisted {name}": self._assisted(assistant, **schedule)
            for name, schedule in schedules.items()
        }
        ours = {f"{part} {k}": self._ours(f"{part} {k}", own, k) for k in MODEL_WINDOWS[part]}
        return {"standard": self._standard(), **theirs, **ours}

    def rows(self, part: str, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
        """Figures of each method, and their ratios."""
        rows: list[dict[str, Any]] = []
        for way, each in seconds.items():
            row: dict[str, Any] = {"dtype": self.dtype, "part": part, "way": way, "seconds": each}
            row["milliseconds_per_token"] = 1000 * statistics.mean(each) / self.number
            if results := self.results.get(way):
                calls = sum(result.num_target_calls for result in results)
                outside = sum(r.phase_seconds["accept"] + r.phase_seconds["rest"] for r in results)
                row["milliseconds_outside_per_round"] = 1000 * outside / calls
                row["block_efficiency"] = sum(r.num_new_tokens for r in results) / calls
            rows.append(row)
            shown = {key: round(value, 3) for key, value in row.items() if isinstance(value, float)}
            print(f"{self.dtype:<9} {part:<9} {way:<28} {shown}", flush=True)
        for name, ratio in self._ratios(part, seconds).items():
            rows.append({"dtype": self.dtype, "part": part, "ratio": name, "value": ratio})
            print(f"{self.dtype:<9} {part:<9} {name:<34} {ratio:.2f}", flush=True)
        return rows

    def _ratios(self, part: str, seconds: dict[str, list[float]]) -> dict[str, float]:
        def best(words: Sequence[str]) -> list[float]:
            found = [each for way, each in seconds.items() if way.startswith(tuple(words))]
            return min(found, key=sum)

        def ratio(slow: list[float], fast: list[float]) -> float:
            return statistics.median(a / b for a, b in zip(slow, fast, strict=True))

        standard = seconds["standard"]
        if part == "standard":
            return {"standard over generate": ratio(seconds["generate"], standard)}
        if part == "lookup":
            ours = best(["lookup"])
            return {
                "standard over generate, long prompts": ratio(seconds["generate"], standard),
                "lookup over generate's": ratio(best(["generate lookup"]), ours),
                "lookup over standard": ratio(standard, ours),
                "adaptive lookup over standard": ratio(standard, seconds["lookup auto"]),
                "adaptive lookup over generate's": ratio(
                    best(["generate lookup"]), seconds["lookup auto"]
                ),
            }
        ours = best([f"{part} "])
        return {
            f"{part} draft over generate's": ratio(best(["generate assisted"]), ours),
            f"{part} draft over standard": ratio(standard, ours),
        }

    def _generate(self, **options: Any) -> Way:
        def way(prompt: list[int]) -> None:
            ids = torch.tensor([prompt])
            output = self.theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.number,
                do_sample=False,
                pad_token_id=0,
                **options,
            )
            assert output.shape[1] == len(prompt) + self.number

        return way

    def _assisted(self, assistant: Any, **schedule: Any) -> Way:
        plain = self._generate(assistant_model=assistant)

        def way(prompt: list[int]) -> None:
            for name, value in schedule.items():
                setattr(assistant.generation_config, name, value)
            plain(prompt)

        return way

    def _standard(self) -> Way:
        return lambda prompt: autoregressive_decode(self.target, prompt, max_new_tokens=self.number)

    def _ours(self, name: str, drafter: Drafter, window: Any) -> Way:
        def way(prompt: list[int]) -> None:
            result = speculative_decode(
                self.target, drafter, prompt, max_new_tokens=self.number, num_draft_tokens=window
            )
            self.results.setdefault(name, []).append(result)

        return way


def _interleave(
    ways: dict[str, Way], prompts: list[list[int]], machine: _Machine
) -> dict[str, list[float]]:
    """Seconds of each method on each prompt, after one warm-up on the first."""
    for way in ways.values():
        way(prompts[0])
    machine.results.clear()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i, prompt in enumerate(prompts):
        order = list(ways) if i % 2 == 0 else list(reversed(ways))
        for name in order:
            started = time.perf_counter()
            ways[name](prompt)
            seconds[name].append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    main()
