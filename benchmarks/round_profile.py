"""Show where the rounds of a pair in OpenVINO spend their time, inside both models and outside.

    make qwen_coder
    python benchmarks/round_profile.py --pair qwen_coder --quantization int8

Medians over the rounds of one text that have the whole window, without the first rounds. Beside the
elapsed time stands the time of the processor in the main thread, which other work on the machine
does not lengthen; it lacks the part that OpenVINO's other threads compute.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from markdown_tables import markdown_table

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.decoding import Session
from lightning_specdec.models.openvino import OpenVINOLM

PROMPT = "Write a Python class for a binary search tree with insert, delete, and find, with tests."
NUM_SKIPPED = 3
"""Rounds at the beginning, which read the prompt and prepare the networks."""

PARTS = {
    "target, network": "the target's `infer` call",
    "target, around it": "embedding, inputs, and a copy of the logits",
    "draft, network": "the draft model's `infer` calls",
    "draft, around it": "embedding, inputs, and a copy of the logits",
    "drafter": "argmax or draws, state, and text of the drafter",
    "target's tokens": "the tokens that the target reads, before and after its call",
    "acceptance": "verdicts, and reading them",
    "rest": "windows, committed tokens, and bookkeeping",
}
"""What a round consists of."""


class Clock:
    """Adds up elapsed and processor seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.num_calls: dict[str, int] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        elapsed_start = time.perf_counter()
        processor_start = time.thread_time()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - elapsed_start
            self.add(name, elapsed, time.thread_time() - processor_start)

    def add(self, name: str, elapsed: float, processor: float) -> None:
        totals = self.seconds.setdefault(name, [0.0, 0.0])
        totals[0] += elapsed
        totals[1] += processor
        self.num_calls[name] = self.num_calls.get(name, 0) + 1

    def total(self, name: str) -> torch.Tensor:
        """Elapsed and processor seconds of a name."""
        return torch.tensor(self.seconds.get(name, [0.0, 0.0]), dtype=torch.float64)


class TimedRequest:
    """An inference request of OpenVINO that measures its calls."""

    def __init__(self, request: Any, clock: Clock, name: str) -> None:
        self._request = request
        self._clock = clock
        self._name = name

    def infer(self) -> None:
        with self._clock.measure(self._name):
            self._request.infer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class PhaseClock:
    """Stands in for the session's timer, and measures its phases."""

    def __init__(self, timer: Any, clock: Clock) -> None:
        self._timer = timer
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        self._elapsed = time.perf_counter()
        self._processor = time.thread_time()

    def lap(self, phase: str) -> None:
        elapsed = time.perf_counter()
        processor = time.thread_time()
        self._clock.add(phase, elapsed - self._elapsed, processor - self._processor)
        self._elapsed = elapsed
        self._processor = processor
        self._timer.lap(phase)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="qwen_coder")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--num_draft_tokens", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max_new_tokens", type=int, default=96)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    decoder = SpeculativeDecoder.from_pair(
        options.pair,
        backend="openvino",
        quantization=options.quantization,
        draft_quantization=options.quantization,
    )
    prompt = decoder.encode_chat(PROMPT)
    for num_draft_tokens in options.num_draft_tokens:
        rounds = profile(decoder, prompt, num_draft_tokens, options.max_new_tokens)
        print(f"{num_draft_tokens} draft tokens, {len(rounds)} rounds:\n\n{table(rounds)}\n")


def profile(
    decoder: SpeculativeDecoder,
    prompt: list[int],
    num_draft_tokens: int,
    max_new_tokens: int,
) -> list[dict[str, torch.Tensor]]:
    """Milliseconds (elapsed, processor) of each of `PARTS` in each round, and calls of the draft."""
    session = decoder.session(
        [prompt],
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=max_new_tokens,
        eos=(),
        temperature=0.0,
    )
    clock = Clock()
    phases = PhaseClock(session.timer, clock)
    rounds = []
    with instrumented(session, clock, phases):
        number = 0
        while session.live:
            clock.seconds.clear()
            clock.num_calls.clear()
            phases.restart()
            session.step()
            number += 1
            is_whole = clock.num_calls.get("draft network", 0) == num_draft_tokens
            if number > NUM_SKIPPED and is_whole:
                rounds.append(parts(clock))
    return rounds


def parts(clock: Clock) -> dict[str, torch.Tensor]:
    """The round that a clock measured, divided into `PARTS`, in milliseconds."""
    seconds = {
        "target, network": clock.total("target network"),
        "target, around it": clock.total("target call") - clock.total("target network"),
        "draft, network": clock.total("draft network"),
        "draft, around it": clock.total("draft call") - clock.total("draft network"),
        "drafter": clock.total("draft") - clock.total("draft call"),
        "target's tokens": clock.total("verify") - clock.total("target call"),
        "acceptance": clock.total("accept"),
        "rest": clock.total("rest"),
    }
    return {name: 1000 * value for name, value in seconds.items()}


@contextmanager
def instrumented(session: Session, clock: Clock, phases: PhaseClock) -> Iterator[None]:
    """Measure the calls of a session's models, and its phases."""
    models: dict[str, Any] = {"target": session.target, "draft": session.drafter.model}
    requests = []
    for role, model in models.items():
        for graph in model._graphs:
            compiled = graph.compiled
            requests.append((compiled, compiled.request))
            compiled.request = TimedRequest(compiled.request, clock, f"{role} network")

    forward: Callable[..., Any] = OpenVINOLM.forward

    def timed_forward(model: Any, *values: Any, **options: Any) -> Any:
        role = "target" if model is models["target"] else "draft"
        with clock.measure(f"{role} call"):
            return forward(model, *values, **options)

    executor: Any = session._executor
    timer = executor.timer
    executor.timer = phases
    OpenVINOLM.forward = timed_forward  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        OpenVINOLM.forward = forward  # type: ignore[method-assign]
        executor.timer = timer
        for compiled, request in requests:
            compiled.request = request


def table(rounds: Sequence[dict[str, torch.Tensor]]) -> str:
    """Medians of each part over the rounds, and their sum."""
    lines = []
    sums = [0.0, 0.0]
    for name, description in PARTS.items():
        medians = []
        for kind in (0, 1):
            medians.append(
                statistics.median(float(parts_of_round[name][kind]) for parts_of_round in rounds)
            )
            sums[kind] += medians[kind]
        lines.append((name, description, *[f"{value:.2f}" for value in medians]))
    lines.append(("all", "", *[f"{value:.2f}" for value in sums]))
    return markdown_table(("Part", "What it is", "ms", "ms of the main thread's processor"), lines)


if __name__ == "__main__":
    main()
