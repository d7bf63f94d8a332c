"""What a grammar costs and saves: time of a mask, calls, and tokens/s, with and without a draft.

    python benchmarks/grammar_masks.py --target checkpoints/smollm2 --repeats 5

The ways take turns within one run, so that other work on the machine meets all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from lightning_specdec import DecodeResult, Grammar, SpeculativeDecoder
from lightning_specdec.rules.grammar import GrammarMask

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "height_in_meters": {"type": "integer", "minimum": 1, "maximum": 120},
        "leaf_type": {"enum": ["deciduous", "evergreen", "semi-evergreen"]},
        "native_regions": {
            "type": "array",
            "items": {"type": "string", "maxLength": 20},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "height_in_meters", "leaf_type", "native_regions"],
    "additionalProperties": False,
}
QUESTIONS = [
    f"Describe the {tree} as a JSON object with name, height_in_meters, leaf_type, native_regions."
    for tree in ("oak", "birch", "Scots pine", "olive tree", "sequoia", "maple")
]


class MaskTimes:
    """Collects the seconds of each mask that is computed, and of each mask that is applied."""

    def __init__(self) -> None:
        self.computed: list[float] = []
        self.applied: list[float] = []

    def timed(self, method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
        """The method, which notes its time."""

        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = method(*arguments)
            seconds.append(time.perf_counter() - start)
            return result

        return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="checkpoints/smollm2")
    parser.add_argument("--draft", default=None, help="default: prompt lookup")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max_new_tokens", type=int, default=120)
    options = parser.parse_args()

    decoder = SpeculativeDecoder.from_pretrained(options.target, options.draft)
    prompts = [decoder.encode_chat(question) for question in QUESTIONS]
    processors = (Grammar.json_schema(SCHEMA),)
    limits: dict[str, Any] = {"max_new_tokens": options.max_new_tokens}
    ways: dict[str, Callable[[list[int]], DecodeResult]] = {
        "standard": lambda prompt: decoder.decode_standard(
            [prompt], processors=processors, **limits
        ),
        "speculative": lambda prompt: decoder.decode([prompt], processors=processors, **limits),
    }

    times = MaskTimes()
    GrammarMask._compute_mask = times.timed(GrammarMask._compute_mask, times.computed)  # type: ignore[method-assign]
    GrammarMask.process = times.timed(GrammarMask.process, times.applied)  # type: ignore[method-assign]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    results: dict[str, list[DecodeResult]] = {}
    for repeat in range(options.repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            results[name] = [way(prompt) for prompt in prompts]
            if repeat:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)

    tokens = {name: [result.tokens for result in outputs] for name, outputs in results.items()}
    num_complete = 0
    for result in results["speculative"]:
        row = result.rows[0]
        if row.stop_reason == "eos":
            json.loads(row.text or "")
            num_complete += 1
    print(f"equal outputs: {tokens['standard'] == tokens['speculative']}")
    print(f"complete and parsed: {num_complete} of {len(prompts)}")
    for name, outputs in results.items():
        num_tokens = sum(len(result.rows[0].tokens) for result in outputs)
        num_calls = sum(result.num_target_calls for result in outputs)
        speed = num_tokens / statistics.median(seconds[name])
        print(f"{name}: {speed:.1f} tokens/s, {num_tokens} tokens in {num_calls} target calls")
    for name, values in (("computed", times.computed), ("applied", times.applied)):
        ordered = sorted(values)
        median = statistics.median(ordered) * 1e6
        slow = ordered[int(0.95 * len(ordered))] * 1e6
        print(f"a mask is {name} in {median:.0f} us (95%: {slow:.0f} us), {len(ordered)} times")


if __name__ == "__main__":
    main()
