"""Compare this package with transformers, OpenVINO GenAI, llama.cpp and vLLM on a CPU, in one run.

    make smollm2
    make peers PROMPTS=question.jsonl

Each engine runs in a separate process (`peers_worker.py`, with the Python of that engine's environment); all processes
but the active one are stopped. Every method answers the same chat prompts of Spec-Bench, given as tokens: greedily, one
at a time, with the same threads, end tokens and number of new tokens. Part `tune` tries every candidate of `METHODS` on
separate prompts; the other parts measure the fastest of each, interleaved by prompt in a random order, with a short
request that is not measured wherever another process answered before. Rows are appended to a file as they are measured,
and existing rows are not measured again. Answers that differ from our standard decoding are recorded with the gap
between the float32 logits there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from spec_bench import TASKS

from lightning_specdec.bench.manifest import manifest
from lightning_specdec.config.files import replaced
from lightning_specdec.models.loading import load_model
from lightning_specdec.text.tokenizer import TextTokenizer

Row = dict[str, Any]
Load = dict[str, Any]
PARTS = ("tune", "prompts", "temperature", "batch", "context")
NUM_EACH, NUM_TUNING, LONGEST, CONTEXT = 4, 1, 1024, 4000
STANDARD = {"drafter": None}
PIECE, REST = 150, 120
SECONDS = {"load": 600, "answer": 300}
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
ENVIRONMENT = {
    "vllm": {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
}
PRECISIONS = {"bfloat16": ("bfloat16", "BF16"), "int8": ("int8", "Q8_0")}
"""Compute type or weight type of the rows of one table, by the engines' own names."""


@dataclass(frozen=True)
class Method:
    """One row of the tables: a decoding method of an engine, with its candidate settings.

    Args:
        loads: candidate arguments for loading the engine.
        settings: candidate settings of a request.
    """

    engine: str
    precision: str
    decoding: str
    loads: tuple[Load, ...]
    settings: tuple[Row, ...]

    @property
    def name(self) -> str:
        return f"{self.engine}/{self.precision}/{self.decoding}"

    def candidates(self) -> list[tuple[Load, Row]]:
        return list(itertools.product(self.loads, self.settings))


def grid(**values: Sequence[Any]) -> tuple[Row, ...]:
    """All combinations of these values."""
    return tuple(
        dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())
    )


def _methods() -> Iterator[Method]:
    for precision, quantization in (("bfloat16", None), ("int8", "int8")):
        for backend in ("openvino", "torch"):
            load = {"backend": backend, "quantization": quantization}
            ours = f"ours {backend}", precision
            yield Method(*ours, "standard", (load,), (STANDARD,))
            lookups = grid(drafter=["NGramDrafter"], num_draft_tokens=[5, "auto"], min_ngram=[2])
            short = {"min_ngram": [1], "max_ngram": [3], "tokens_per_match": [1, 5]}
            lookups += grid(drafter=["NGramDrafter"], num_draft_tokens=[5], **short)
            yield Method(*ours, "lookup", (load,), lookups)
            after: Row = {"drafter": ["NGramWithFallback"], "min_ngram": [2]}
            heads = grid(
                **after,
                num_draft_tokens=[3, 5],
                tokens_per_match=[2],
                min_confidence=[None, 0.05, 0.15],
            )
            heads += grid(
                **after, num_draft_tokens=[5], tokens_per_match=[5], min_confidence=[None, 0.05]
            )
            heads += grid(**after, num_draft_tokens=["auto"])
            yield Method(*ours, "lookup, head", (load,), heads)
        scheduler: Load = {"cache_size": 1, "enable_prefix_caching": False}
        whole = {**scheduler, "max_num_batched_tokens": CONTEXT + 200, "dynamic_split_fuse": False}
        paged: list[Load] = [
            {"precision": precision, "scheduler": each} for each in (scheduler, whole)
        ]
        loads: list[Load] = [{"precision": precision, "ATTENTION_BACKEND": "SDPA"}, *paged]
        for changed in (
            {"KV_CACHE_PRECISION": "bf16"},
            {"KV_CACHE_PRECISION": "u8"},
            {"ENABLE_CPU_PINNING": False},
        ):
            loads.append({**paged[0], **changed})
        genai = "openvino_genai", precision
        yield Method(*genai, "standard", tuple(loads), ({},))
        lookup: Load = {**paged[1], "prompt_lookup": True}
        yield Method(
            *genai,
            "lookup",
            (lookup,),
            grid(num_assistant_tokens=[3, 5, 8], max_ngram_size=[2, 3, 4]),
        )
        kind = PRECISIONS[precision][1]
        llama = "llama_cpp", kind
        flash = grid(precision=[kind], flash_attn=[False, True])
        yield Method(*llama, "standard", flash, ({},))
        tried = grid(precision=[kind], flash_attn=[False, True], logits_all=[True])
        yield Method(
            *llama, "lookup", tried, grid(num_pred_tokens=[3, 5, 8], max_ngram_size=[2, 3])
        )
    attention = grid(attn_implementation=["sdpa", "eager"])
    yield Method("transformers", "bfloat16", "standard", attention, ({},))
    lookups = grid(prompt_lookup_num_tokens=[3, 5, 10], max_matching_ngram_size=[2, 3])
    yield Method("transformers", "bfloat16", "lookup", attention[:1], lookups)
    yield Method("vllm", "bfloat16", "standard", ({}, {"enforce_eager": True}), ({},))
    ngrams = [{"num_speculative_tokens": number, "prompt_lookup_max": 3} for number in (3, 5, 8)]
    tried = tuple(
        {"speculative_config": {"method": "ngram", "prompt_lookup_min": 2, **each}}
        for each in ngrams
    )
    yield Method("vllm", "bfloat16", "lookup", tried, ({},))
    yield Method("vllm", "bfloat16", "head", tuple({"head": number} for number in (2, 3, 4)), ({},))


METHODS = {method.name: method for method in _methods()}


@dataclass(frozen=True)
class Prompt:
    id: int
    task: str
    tokens: list[int]


def choose(
    rows: Iterable[Row], tokenizer: Any, *, tuning: int = NUM_TUNING
) -> tuple[list[Prompt], list[Prompt]]:
    """Reported prompts and tuning prompts: `NUM_EACH` and `tuning` of each task.

    A task's questions of at most `LONGEST` tokens are divided in order into `2 * NUM_EACH` equal parts. The first
    question of every even part is reported; those of the first odd parts are used for tuning.
    """
    tasks: dict[str, list[Prompt]] = {task: [] for task in (*TASKS, "conversation")}
    for row in rows:
        tokens = tokenizer.encode_chat([{"role": "user", "content": row["turns"][0]}])
        if len(tokens) <= LONGEST:
            task = row["category"] if row["category"] in TASKS else "conversation"
            tasks[task].append(Prompt(row["question_id"], task, tokens))
    parts = 2 * NUM_EACH
    spread = [[each[i * len(each) // parts] for i in range(parts)] for each in tasks.values()]
    reported, tuned = (zip(*(each[i::2] for each in spread), strict=True) for i in (0, 1))
    return [prompt for turn in reported for prompt in turn], [
        prompt for turn in list(tuned)[:tuning] for prompt in turn
    ]


@dataclass
class Engine:
    """A worker process, stopped except while it loads or answers."""

    method: Method
    load: Load
    options: argparse.Namespace
    versions: dict[str, str] = field(default_factory=dict)
    error: str | None = None

    def __post_init__(self) -> None:
        kind = self.method.engine.split()[0]
        told = {
            "engine": kind,
            "load": self.load,
            "threads": self.options.threads,
            "files": self.options.files,
        }
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(self.options.threads),
            "HF_HUB_OFFLINE": "1",
        }
        environment |= LARGE_PAGES | ENVIRONMENT.get(kind, {})
        python = self.options.engines.get(kind, sys.executable)
        if kind not in ("ours", "transformers"):
            environment.pop("PYTHONPATH", None)
        if kind == "vllm":
            environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(
                map(str, sorted(os.sched_getaffinity(0))[: self.options.threads])
            )
            libraries = [Path(python).parent.parent / "lib" / "libiomp5.so", *_TCMALLOC]
            environment["LD_PRELOAD"] = ":".join(str(path) for path in libraries if path.exists())
        words = [python, "-P", str(Path(__file__).with_name("peers_worker.py")), json.dumps(told)]
        self.log = (self.options.rows.parent / f"{self.options.rows.stem}.log").open("a")
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        self.process = subprocess.Popen(words, env=environment, start_new_session=True, **pipes)
        found = self._answer(SECONDS["load"])
        self.versions, self.error = found.get("versions", {}), found.get("error")

    def ask(self, **request: Any) -> Row:
        if self.error is not None:
            return {"error": self.error}
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        self.process.stdin.write((json.dumps(request) + "\n").encode())
        self.process.stdin.flush()
        return self._answer(SECONDS["answer"])

    def _answer(self, seconds: float) -> Row:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else b""
        if line:
            self.stop()
            found: Row = json.loads(line)
            return found
        self.error = f"no answer within {seconds} s" if not ready else "the process ended"
        self.close()
        return {"error": self.error}

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def peak_memory(self) -> int:
        """Bytes: the largest resident set of each of its processes, added up."""
        total = 0
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ProcessLookupError):
                if os.getpgid(int(path.name)) == self.process.pid:
                    lines = (path / "status").read_text().splitlines()
                    total += sum(
                        1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")
                    )
        return total

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.log.close()


_TCMALLOC = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))


class Run:
    """Rows of a file, and the measurement of missing rows."""

    def __init__(self, options: argparse.Namespace, tokenizer: TextTokenizer) -> None:
        self.options, self.end = options, sorted(tokenizer.eos)
        self.rows = read_rows(options.rows)
        lines = Path(options.prompts).read_text(encoding="utf-8").splitlines()
        self.prompts, self.tuning = choose(map(json.loads, lines), tokenizer)
        self.methods = [
            method
            for name, method in METHODS.items()
            if any(word in name for word in options.only)
            and (
                method.engine.startswith(("ours", "transformers"))
                or method.engine in options.engines
            )
        ]
        self.began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.done = {_key(row) for row in self.rows}
        self.last: Engine | None = None
        self.hush: subprocess.Popen[bytes] | None = None
        self.loud = self.rested = 0.0

    def measure(
        self, part: str, engines: dict[str, Engine], jobs: Sequence[tuple[Method, Load, Row]]
    ) -> None:
        """What is missing, prompt by prompt."""
        rows = [row for job in jobs for row in self.missing(part, job)]
        texts = self.texts(part)
        for turn, (repeat, (label, prompts)) in enumerate(
            itertools.product(range(self.options.repeats), texts)
        ):
            here = [row for row in rows if row["prompt"] == label and row["repeat"] == repeat]
            if here:
                self.quiet()
            random.Random(turn).shuffle(here)
            for row in here:
                self._one(
                    row,
                    prompts,
                    engines[_place(METHODS[row["method"]], row["load"])],
                    engines.values(),
                )

    def quiet(self) -> None:
        """With `--quiet`, measure only while its command runs: for `PIECE` seconds, then not for `REST`."""
        if not self.options.quiet or self.hush and time.monotonic() < self.loud:
            return
        self.end_quiet()
        time.sleep(max(0.0, self.rested - time.monotonic()))
        self.hush = subprocess.Popen(
            shlex.split(self.options.quiet), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.hush.stdout is not None
        self.hush.stdout.readline()
        self.loud = time.monotonic() + PIECE

    def end_quiet(self) -> None:
        if self.hush:
            self.hush.communicate()
            share = 1 + (time.monotonic() - self.loud) / PIECE
            self.hush, self.rested = None, time.monotonic() + share * REST

    def _one(
        self, row: Row, prompts: list[list[int]], engine: Engine, engines: Iterable[Engine]
    ) -> None:
        for each in engines:
            each.stop()
        if engine is not self.last:  # the caches are another process's
            self.warm_up(engine, row["setting"])
            self.last = engine
        request = {
            "prompts": prompts,
            "setting": row["setting"],
            "num_tokens": self.options.max_new_tokens,
        }
        found = engine.ask(**request, end=self.end)
        self.add({**row, "num_prompt_tokens": sum(map(len, prompts)), **found})

    def warm_up(self, engine: Engine, setting: Row) -> None:
        """A short request that is not measured."""
        engine.ask(
            prompts=[self.tuning[0].tokens[-32:]], setting=setting, num_tokens=24, end=self.end
        )

    def add(self, row: Row) -> None:
        row["run"] = self.began
        self.rows.append(row)
        self.done.add(_key(row))
        with self.options.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        speed = (
            f"{row['num_tokens'] / row['seconds']:.1f} tokens/s"
            if "seconds" in row
            else row.get("error")
        )
        setting = json.dumps({**row["load"], **row["setting"]}) if row["part"] == "tune" else ""
        print(
            f"{row['part']} {row['repeat']} {row['prompt']} {row['method']} {setting}: {speed}",
            flush=True,
        )

    def texts(self, part: str) -> list[tuple[Any, list[list[int]]]]:
        if part == "tune":
            return [(prompt.id, [prompt.tokens]) for prompt in self.tuning]
        if part == "batch":
            return [
                (f"first {size}", [each.tokens for each in self.prompts[:size]])
                for size in (1, 4, 16)
            ]
        if part == "context":
            text = [token for prompt in reversed(self.prompts) for token in prompt.tokens]
            return [(f"last {CONTEXT} tokens of all", [text[-CONTEXT:]])]
        return [(prompt.id, [prompt.tokens]) for prompt in self.prompts]

    def jobs(self, part: str) -> list[tuple[Method, Load, Row]]:
        """What a part measures: all candidates, or the fastest of each method."""
        if part == "tune":
            several = [method for method in self.methods if len(method.candidates()) > 1]
            return [(method, *each) for method in several for each in method.candidates()]
        chosen = [(method, *best(self.rows, method)) for method in self.methods]
        if part == "temperature":
            ours = [each for each in chosen if each[0].engine.startswith("ours")]
            chosen = [
                (method, load, {**setting, "temperature": 1.0}) for method, load, setting in ours
            ]
        if part == "batch":
            chosen = [
                each for each in chosen if each[0].engine != "llama_cpp"
            ]  # this method takes one prompt
        return chosen

    def go(self, part: str) -> None:
        """Measure a part, all its engines loaded at once; while tuning, those of one method."""
        jobs = [job for job in self.jobs(part) if self.missing(part, job)]
        names = list(dict.fromkeys(method.name for method, _, _ in jobs))
        for chosen in [[name] for name in names] if part == "tune" else [names]:
            mine = [job for job in jobs if job[0].name in chosen]
            engines: dict[str, Engine] = {}
            try:
                for method, load, setting in mine:
                    place = _place(method, load)
                    if place not in engines:
                        print(f"loading {method.engine} {load}", flush=True)
                        engines[place] = Engine(method, dict(load), self.options)
                        self.add_versions(method, engines[place])
                    self.warm_up(engines[place], setting)
                self.measure(part, engines, mine)
            finally:
                self.end_quiet()
                for place, engine in engines.items():
                    if part != "tune" and engine.error is None:
                        row = {
                            "part": "memory",
                            "method": place,
                            "load": {},
                            "setting": {},
                            "prompt": part,
                        }
                        self.add({**row, "repeat": 0, "peak_bytes": engine.peak_memory()})
                    engine.close()

    def missing(self, part: str, job: tuple[Method, Load, Row]) -> list[Row]:
        """What a part has to measure yet of a job: rows without figures."""
        method, load, setting = job
        known = {"part": part, "method": method.name, "load": load, "setting": setting}
        repeats = range(1 if part == "tune" else self.options.repeats)
        rows = [
            {**known, "prompt": label, "repeat": i}
            for i in repeats
            for label, _ in self.texts(part)
        ]
        return [row for row in rows if _key(row) not in self.done]

    def add_versions(self, method: Method, engine: Engine) -> None:
        row = {
            "part": "versions",
            "method": method.engine,
            "load": {},
            "setting": {},
            "prompt": 0,
            "repeat": 0,
        }
        if _key(row) not in self.done:
            self.add({**row, "versions": engine.versions})


def _key(row: Row) -> tuple[Any, ...]:
    plain = [json.dumps(row[name], sort_keys=True) for name in ("load", "setting")]
    return row["part"], row["method"], *plain, row.get("prompt"), row.get("repeat")


def _place(method: Method, load: Load) -> str:
    """Worker of a method."""
    return f"{method.engine} {json.dumps(load, sort_keys=True)}"


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def best(rows: Sequence[Row], method: Method) -> tuple[Load, Row]:
    """Candidate with the most tokens per second in tuning; the only one, or the first, without tuning."""
    speeds = []
    for load, setting in method.candidates():
        key = _key({"part": "tune", "method": method.name, "load": load, "setting": setting})[:4]
        mine = [row for row in rows if _key(row)[:4] == key]
        if mine and all("seconds" in row for row in mine):
            seconds = sum(row["seconds"] for row in mine)
            speeds.append((sum(row["num_tokens"] for row in mine) / seconds, load, setting))
    return max(speeds, key=lambda each: each[0])[1:] if speeds else method.candidates()[0]


Cells = dict[Any, dict[str, float]]
Line = tuple[str, ...]
"""Medians over repeats by prompt: `seconds`, `first`, `num_tokens`, `calls`."""


def cells(rows: Iterable[Row], part: str, method: str) -> Cells:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        if row["part"] == part and row["method"] == method and "seconds" in row:
            found.setdefault(row["prompt"], []).append(row)
    return {
        prompt: {
            name: _median([row[name] or 0.0 for row in each])
            for name in ("seconds", "first", "num_tokens", "calls")
        }
        for prompt, each in found.items()
    }


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def speed(cells: Iterable[dict[str, float]]) -> float:
    """Tokens per second, including the time to read the prompt."""
    listed = list(cells)
    return sum(cell["num_tokens"] for cell in listed) / sum(cell["seconds"] for cell in listed)


def ratio(top: Cells, bottom: Cells, *, draws: int = 2000) -> tuple[float, float, float]:
    """Ratio of two methods' speeds over the prompts that both answered, with its 95% bootstrap interval."""
    common, generator = [prompt for prompt in top if prompt in bottom], random.Random(0)

    def of(prompts: Sequence[Any]) -> float:
        return speed(top[prompt] for prompt in prompts) / speed(
            bottom[prompt] for prompt in prompts
        )

    drawn = sorted(of(generator.choices(common, k=len(common))) for _ in range(draws))
    return of(common), drawn[int(0.025 * draws)], drawn[int(0.975 * draws) - 1]


def with_differences(rows: Sequence[Row], gap: Callable[..., float]) -> list[Row]:
    """Rows without tokens; rows that differ from our standard decoding are marked.

    `differs` is the first position at which an answer differs from ours of the same part, prompt and precision (None if
    there is none); `gap` is `gap(prompt, answer so far, our token, its token)`; -1 is the end of an answer.
    """
    ours = {
        (row["part"], row["prompt"], METHODS[row["method"]].precision): row["tokens"][0]
        for row in rows
        if row["method"] in METHODS
        and row["method"] == _standard(METHODS[row["method"]])
        and "tokens" in row
    }
    written = []
    for row in rows:
        plain = {name: value for name, value in row.items() if name != "tokens"}
        if row["part"] in ("prompts", "context") and "tokens" in row:
            wanted = ours.get((row["part"], row["prompt"], _ours(METHODS[row["method"]].precision)))
            if wanted is not None:
                place = plain["differs"] = first_difference(wanted, row["tokens"][0])
                if place is not None:
                    pair = [
                        each[place] if place < len(each) else -1
                        for each in (wanted, row["tokens"][0])
                    ]
                    plain["gap"] = gap(row["prompt"], wanted[:place], *pair)
        written.append(plain)
    return written


def gaps(run: Run) -> Callable[..., float]:
    """Absolute gap between two tokens' float32 logits after a prompt and the answer so far."""
    model, end = load_model(run.options.model, dtype="float32"), run.end[0]
    prompts = {label: each[0] for part in ("prompts", "context") for label, each in run.texts(part)}
    known: dict[Any, torch.Tensor] = {}

    @torch.inference_mode()
    def gap(label: Any, answer: list[int], *pair: int) -> float:
        tokens = prompts[label] + answer
        key = label, len(answer), *answer[-8:]
        if key not in known:
            logits = model(torch.tensor([tokens]), logits_for=slice(-1, None)).logits
            known[key] = logits.flatten()
        one, other = (known[key][end if token < 0 else token].item() for token in pair)
        return round(abs(one - other), 4)

    return gap


def first_difference(wanted: Sequence[int], got: Sequence[int]) -> int | None:
    """First position at which two answers differ; None if they are equal."""
    places = (i for i, (a, b) in enumerate(itertools.zip_longest(wanted, got)) if a != b)
    return next(places, None)


def _ours(precision: str) -> str:
    return next(name for name, each in PRECISIONS.items() if precision in each)


def _standard(method: Method) -> str:
    return f"ours openvino/{_ours(method.precision)}/standard"


def table(rows: Sequence[Row], part: str = "prompts") -> str:
    """Speed of each method, fastest first, as a Markdown table; ratios are to our standard decoding in OpenVINO."""
    heads: Line = (
        "Engine",
        "Type",
        "Method",
        "tokens/s",
        "after the first",
        "tokens a call",
        "first token, ms",
    )
    heads += (
        "beside our standard (95% interval)",
        "answers that differ (widest gap)",
        "memory, MB",
    )
    lines: list[tuple[float, Line]] = []
    for method in METHODS.values():
        mine, standard = cells(rows, part, method.name), cells(rows, part, _standard(method))
        name = method.engine.replace("_", " "), method.precision, method.decoding
        if not mine:
            failed = [
                row["error"] for row in rows if row["method"] == method.name and "error" in row
            ]
            if failed and part == "prompts":
                lines.append((0.0, (*name, f"fails: {failed[-1]}", *["-"] * (len(heads) - 4))))
            continue
        number, calls = (
            sum(cell[name] for cell in mine.values()) for name in ("num_tokens", "calls")
        )
        later = sum(cell["seconds"] - cell["first"] for cell in mine.values())
        shown = "-"
        if standard and set(standard) & set(mine):
            value, low, high = ratio(mine, standard)
            shown = f"{value:.2f}" + (f" ({low:.2f} to {high:.2f})" if len(mine) > 1 else "")
        first = f"{1000 * _median([cell['first'] for cell in mine.values()]):.0f}"
        figures: Line = (
            f"{speed(mine.values()):.1f}",
            f"{(number - len(mine)) / later:.1f}",
            f"{number / calls:.2f}",
            first,
        )
        figures += (shown, _differing(rows, part, method.name), _memory(rows, part, method))
        lines.append((speed(mine.values()), (*name, *figures)))
    lines.sort(key=lambda line: -line[0])
    return markdown(heads, [line for _, line in lines])


def _differing(rows: Sequence[Row], part: str, method: str) -> str:
    """Number of answers that differ, number of prompts, and the widest logit gap."""
    mine = [
        row for row in rows if row["part"] == part and row["method"] == method and "differs" in row
    ]
    other = {row["prompt"] for row in mine if row["differs"] is not None}
    widest = f" ({max(row.get('gap', 0.0) for row in mine):.2f})" if other else ""
    return f"{len(other)} of {len({row['prompt'] for row in mine})}{widest}" if mine else "-"


def _memory(rows: Sequence[Row], part: str, method: Method) -> str:
    """Peak memory of a method's process; one of our processes serves all methods of its backend and type."""
    loads = [row["load"] for row in rows if row["part"] == part and row["method"] == method.name]
    places = {_place(method, load) for load in loads}
    found = [
        row["peak_bytes"]
        for row in rows
        if (row["part"], row["prompt"]) == ("memory", part) and row["method"] in places
    ]
    return f"{max(found) / 1e6:.0f}" if found else "-"


def fastest(rows: Sequence[Row]) -> str:
    """Tokens per second of each engine's standard decoding and fastest drafting."""
    kinds: dict[tuple[str, str], dict[str, tuple[float, int]]] = {}
    for method in METHODS.values():
        if mine := cells(rows, "prompts", method.name):
            engine = kinds.setdefault((method.engine.replace("_", " "), method.precision), {})
            engine[method.decoding] = speed(mine.values()), len(mine)
    lines: list[tuple[float, Line]] = []
    for name, found in kinds.items():
        drafting = max(
            (kind for kind in found if kind != "standard"),
            key=lambda kind: found[kind],
            default=None,
        )
        plain = f"{found['standard'][0]:.1f}" if "standard" in found else "-"
        best = f"{found[drafting][0]:.1f} ({drafting})" if drafting else "-"
        numbers = {number for _, number in found.values()}
        lines.append((max(found.values())[0], (*name, plain, best, str(min(numbers)))))
    lines.sort(key=lambda line: -line[0])
    heads = ("Engine", "Type", "standard, tokens/s", "with its best drafting", "prompts")
    return markdown(heads, [line for _, line in lines])


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(each)} |" for each in (heads, ["---"] * len(heads), *lines))


def batches(rows: Sequence[Row]) -> str:
    """Tokens per second of a whole batch, by batch size."""
    sizes = list(dict.fromkeys(row["prompt"] for row in rows if row["part"] == "batch"))
    lines = []
    for method in METHODS.values():
        if mine := cells(rows, "batch", method.name):
            speeds = [f"{speed([mine[size]]):.1f}" if size in mine else "-" for size in sizes]
            lines.append(
                (method.engine.replace("_", " "), method.precision, method.decoding, *speeds)
            )
    return markdown(("Engine", "Type", "Method", *(f"{size}, tokens/s" for size in sizes)), lines)


def own_table(rows: Sequence[Row]) -> str:
    """Our methods by backend: speed at temperature 1 over standard decoding, time outside the models, rounds."""
    heads: Line = (
        "Backend",
        "Type",
        "Method",
        "temperature 1, tokens/s",
        "beside standard there (95% interval)",
    )
    heads += ("outside the models, ms a round",)
    lines = []
    for method in METHODS.values():
        if not method.engine.startswith("ours") or not cells(rows, "prompts", method.name):
            continue
        drawn = cells(rows, "temperature", method.name)
        standard = cells(rows, "temperature", f"{method.engine}/{method.precision}/standard")
        shown = (
            "{:.2f} ({:.2f} to {:.2f})".format(*ratio(drawn, standard))
            if drawn and standard
            else "-"
        )
        figures = (
            f"{speed(drawn.values()):.1f}" if drawn else "-",
            shown,
            f"{milliseconds_outside(rows, method.name):.2f}",
        )
        lines.append(
            (method.engine.removeprefix("ours "), method.precision, method.decoding, *figures)
        )
    return markdown(heads, lines)


def milliseconds_outside(rows: Iterable[Row], method: str) -> float:
    """Milliseconds of acceptance and bookkeeping in our greedy rounds at batch 1."""
    mine = [
        row
        for row in rows
        if row["part"] == "prompts" and row["method"] == method and "phases" in row
    ]
    outside = sum(row["phases"]["accept"] + row["phases"]["rest"] for row in mine)
    return 1000 * outside / sum(row["calls"] for row in mine) if mine else float("nan")


def beside_genai(rows: Sequence[Row]) -> str:
    """Ratios of our speed and of our time to the first token over OpenVINO GenAI's."""
    lines = []
    for precision in PRECISIONS:
        found = {
            kind: {
                name: cells(rows, "prompts", name)
                for name in METHODS
                if name.startswith(f"{kind}/{precision}/")
            }
            for kind in ("ours openvino", "openvino_genai")
        }
        ours, theirs = (
            {name.split("/")[-1]: mine for name, mine in each.items() if mine}
            for each in found.values()
        )
        drafting = [name for name in ours if name != "standard"]
        if "standard" not in ours or "standard" not in theirs:
            continue
        lines.append(
            (precision, "standard over standard", ratio(ours["standard"], theirs["standard"]))
        )
        if drafting and "lookup" in theirs:
            best = max(drafting, key=lambda name: speed(ours[name].values()))
            lines.append((precision, f"{best} over lookup", ratio(ours[best], theirs["lookup"])))
        first = [
            {
                prompt: {"num_tokens": 1.0, "seconds": cell["first"]}
                for prompt, cell in mine["standard"].items()
            }
            for mine in (theirs, ours)
        ]
        lines.append((precision, "seconds to the first token, standard", ratio(*first)))
    heads = ("Type", "Ours over OpenVINO GenAI's", "Ratio", "95% interval")
    return markdown(
        heads,
        [
            (kind, what, f"{value:.2f}", f"{low:.2f} to {high:.2f}")
            for kind, what, (value, low, high) in lines
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument(
        "--engine", action="append", default=[], metavar="NAME=PYTHON", help="an engine's Python"
    )
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--head", default="checkpoints/smollm2_eagle.safetensors")
    parser.add_argument(
        "--converted", type=Path, default=Path(".peers"), help="directory of converted models"
    )
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="only methods whose name contains one of these words",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--rows", type=Path, default=Path(".peers/rows.jsonl"))
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--quiet",
        help="on a shared machine: a command that prints a line once others are stopped, and ends with its input; "
        f"it runs while something is measured, at most {PIECE} seconds at once",
    )
    options = parser.parse_args()
    options.engines = dict(each.split("=", 1) for each in options.engine)
    options.files = {
        "model": options.model,
        "head": options.head,
        "eagle3": str(options.converted / "eagle3"),
    }
    options.files |= {
        f"genai_{name}": str(options.converted / f"genai_{name}") for name in ("bfloat16", "int8")
    }
    options.files |= {
        f"gguf_{name}": str(options.converted / f"smollm2-{name}.gguf") for name in ("BF16", "Q8_0")
    }
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(1)
    )  # ends the workers too, which may be stopped
    run = Run(options, TextTokenizer.load(options.model))
    for part in options.parts:
        run.go(part)
    print(
        *(each(run.rows) for each in (table, fastest, beside_genai, batches, own_table)), sep="\n\n"
    )
    if options.output:
        write(options, run)


def write(options: argparse.Namespace, run: Run) -> None:
    """Write the record, without tokens and paths."""
    told = {
        "model": Path(options.model).name,
        "head": Path(options.head).name,
        "prompts": Path(options.prompts).name,
    }
    told |= {
        "repeats": options.repeats,
        "threads": options.threads,
        "max_new_tokens": options.max_new_tokens,
    }
    words = ["--only", *options.only, "--parts", *options.parts, "--repeats", str(options.repeats)]
    told["command"] = f"python benchmarks/peers.py {shlex.join(words)} --prompts question.jsonl"
    ids = {
        "prompt_ids": [each.id for each in run.prompts],
        "tuning_ids": [each.id for each in run.tuning],
    }
    chosen = {method.name: best(run.rows, method) for method in METHODS.values()}
    record = {
        "manifest": manifest(options=told, device=torch.device("cpu")),
        **ids,
        "end": run.end,
        "chosen": chosen,
    }
    lines = ",\n".join(json.dumps(row) for row in with_differences(run.rows, gaps(run)))
    with replaced(options.output) as file:
        file.write((json.dumps(record)[:-1] + f', "rows": [\n{lines}\n]}}\n').encode())


if __name__ == "__main__":
    main()
