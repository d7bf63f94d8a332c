"""A server that gets faster with use: record requests, train its draft on them, and swap it live.

    make smollm2
    python benchmarks/serve_learning.py --minutes 30 --output docs/results/serve_learning.json

All requests are of one kind: commit messages for diffs. The diffs are edits of the files of
Python's standard library, drawn by a seed, so a Python version decides them. The steps are:

1. `serve --record` starts with a draft. Requests that are not recorded are measured.
2. It answers and records the stream of requests.
3. `fit` trains the draft on the records, while the server runs.
4. The file of the draft is replaced. The server swaps the new draft in, and the requests of step 1
   are measured again, in turns with the first draft.

The measured diffs are of other files than the recorded ones. Requests are sent one after the other.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from markdown_tables import markdown_table
from suffix_corpus import FILE_BYTES, renamed, with_edited_lines

from lightning_specdec.bench.manifest import manifest
from lightning_specdec.bench.statistics import ratio_interval
from lightning_specdec.config.files import file_sha256, replaced

MOST_DIFF_LINES = 24
NUM_MEASURED_FILES = 12
"""Files whose diffs are measured and never recorded."""
SWAP_SECONDS = 120.0
"""Longest time that the server may take to swap a draft."""
LABEL = re.compile(r'lightning_specdec_draft_info\{draft="(\w+)"')


@dataclass
class Turn:
    """The measured requests, once.

    Args:
        draft: the first digits of the sha256 of the draft.
        seconds: of each request.
        tokens: of each answer.
        draft_tokens: of all answers, like the next two.
        accepted_tokens: accepted draft tokens.
        rounds: rounds of all answers.
    """

    draft: str
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    draft_tokens: int = 0
    accepted_tokens: int = 0
    rounds: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens for each round."""
        return sum(self.tokens) / self.rounds

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds)


class Server:
    """`lightning_specdec serve` in a separate process.

    Args:
        process: of the server, whose messages are read here.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.messages: list[str] = []
        self._address_is_known = threading.Event()
        self._address = ""
        self._http = httpx.Client(timeout=600)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            print(f"  server: {line.rstrip()}", flush=True)
            self.messages.append(line.rstrip())
            match = re.search(r"at (http\S+)/v1", line)
            if match:
                self._address = match[1]
                self._address_is_known.set()
        self._address_is_known.set()

    @property
    def address(self) -> str:
        """Where it listens; waits until it does."""
        self._address_is_known.wait()
        if not self._address:
            raise SystemExit("error: the server did not start")
        return self._address

    def metrics(self) -> str:
        return self._http.get(f"{self.address}/metrics").text

    def live_draft(self) -> str:
        """The label of the draft in use."""
        match = LABEL.search(self.metrics())
        assert match is not None
        return match[1]

    def num_rounds(self) -> int:
        """Rounds of all requests so far."""
        name = "lightning_specdec_acceptance_length_count "
        return int(float(self.metrics().split(name)[1].split("\n")[0]))

    def answer(self, text: str, options: argparse.Namespace, *, store: bool) -> dict[str, Any]:
        """The answer to a request. With `store`, it is recorded."""
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "seed": options.seed,
            "store": store,
        }
        response = self._http.post(f"{self.address}/v1/chat/completions", json=body)
        response.raise_for_status()
        content: dict[str, Any] = response.json()
        return content

    def use(self, draft: Path, path: Path) -> str:
        """Replace the server's draft file, and wait for the swap. Returns the draft's label."""
        expected = file_sha256(draft)
        with replaced(path) as file:
            file.write(draft.read_bytes())
        self.process.send_signal(signal.SIGHUP)
        end = time.monotonic() + SWAP_SECONDS
        while time.monotonic() < end:
            label = self.live_draft()
            if expected.startswith(label):
                return label
            time.sleep(0.2)
        raise SystemExit(f"error: the server did not use {draft}: {self.messages[-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="checkpoints/smollm2", help="directory of the target")
    parser.add_argument(
        "--draft", default="checkpoints/smollm2_eagle.safetensors", help="the first draft"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="of the training; 0 leaves its length to --fit_options",
    )
    parser.add_argument("--requests", type=int, default=300, help="that are recorded")
    parser.add_argument("--measured", type=int, default=24, help="requests that are measured")
    parser.add_argument("--turns", type=int, default=2, help="of each draft")
    parser.add_argument("--max_tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of the diffs and the answers")
    parser.add_argument(
        "--from_scratch", action="store_true", help="train a new head, not the first draft"
    )
    parser.add_argument("--serve_options", default="", help='as "--dtype bfloat16 --threads 2"')
    parser.add_argument("--fit_options", default="", help='as "--trainer.max_steps 20"')
    parser.add_argument("--output", type=Path, help="the record")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        record = run(options, Path(directory))
    print(table(record))
    if options.output is not None:
        with replaced(options.output) as file:
            file.write((json.dumps(record, indent=1) + "\n").encode())


def run(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All steps, with the files of a directory. Returns the record."""
    measured, recorded = requests(options.measured, options.requests, options.seed)
    first_draft = directory / "first.safetensors"
    shutil.copy(options.draft, first_draft)
    path = directory / "draft.safetensors"
    shutil.copy(first_draft, path)
    records = directory / "records"

    with serving(options, path, records) as server:
        print(f"measuring {len(measured)} requests with the first draft", flush=True)
        turns = [measure(server, measured, options)]

        print(f"recording {len(recorded)} requests", flush=True)
        stream = Turn(server.live_draft())
        rounds_before = server.num_rounds()
        for number, text in enumerate(recorded, start=1):
            ask(server, text, options, stream, store=True)
            if number % 25 == 0:
                print(f"  {number} of {len(recorded)}", flush=True)
        stream.rounds = server.num_rounds() - rounds_before

        wait_for_records(records, len(recorded))
        fit_seconds, new_draft = train(options, directory, records, first_draft)
        for number in range(options.turns):
            if number > 0:
                server.use(first_draft, path)
                turns.append(measure(server, measured, options))
            server.use(new_draft, path)
            turns.append(measure(server, measured, options))
        swaps = [line for line in server.metrics().splitlines() if "draft_swaps_total{" in line]

    settings = {**vars(options), "output": None}
    return {
        "manifest": manifest(options=settings, device=torch.device("cpu")),
        "first_draft": file_sha256(first_draft),
        "new_draft": file_sha256(new_draft),
        "fit_seconds": fit_seconds,
        "stream": asdict(stream),
        "turns": [asdict(turn) for turn in turns],
        "swaps": swaps,
        "load_average": os.getloadavg()[0],
    }


# --- the requests ---


def requests(num_measured: int, num_recorded: int, seed: int) -> tuple[list[str], list[str]]:
    """Different requests for commit messages: those to measure, and those to record."""
    paths = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if FILE_BYTES[0] < path.stat().st_size < 4 * FILE_BYTES[1]:
            paths.append(path)
    random.Random(seed).shuffle(paths)
    measured_paths = paths[:NUM_MEASURED_FILES]
    recorded_paths = paths[NUM_MEASURED_FILES:]
    return (
        texts_of(measured_paths, num_measured, seed),
        texts_of(recorded_paths, num_recorded, seed),
    )


def texts_of(paths: Sequence[Path], count: int, seed: int) -> list[str]:
    """Requests about the files in turn."""
    texts: dict[str, None] = {}
    number = 0
    while len(texts) < count:
        path = paths[number % len(paths)]
        diff = diff_of(path, random.Random(f"{seed}-{path.name}-{number}"))
        number += 1
        if diff:
            text = f"Write a commit message for this diff.\n\n```diff\n{diff}```"
            texts[text] = None
    return list(texts)


def diff_of(path: Path, generator: random.Random) -> str:
    """The first lines of a diff of a file to an edited one."""
    source = path.read_text(encoding="utf-8")
    edit = generator.choice([renamed, with_edited_lines])
    try:
        _, edited = edit(source, generator)
    except IndexError:
        # No name occurs often enough to be renamed.
        _, edited = with_edited_lines(source, generator)
    lines = difflib.unified_diff(
        source.splitlines(keepends=True),
        edited.splitlines(keepends=True),
        fromfile=f"a/{path.name}",
        tofile=f"b/{path.name}",
        n=2,
    )
    header_and_hunks = list(lines)
    # Another hunk is taken, so that requests about one file differ.
    starts = [i for i, line in enumerate(header_and_hunks) if line.startswith("@@")]
    if not starts:
        return ""
    start = generator.choice(starts)
    return "".join([*header_and_hunks[:2], *header_and_hunks[start : start + MOST_DIFF_LINES]])


# --- the steps ---


@contextmanager
def serving(options: argparse.Namespace, path: Path, records: Path) -> Iterator[Server]:
    """The server, which is stopped at the end."""
    command = [sys.executable, "-m", "lightning_specdec", "serve", options.target]
    command += ["--draft", str(path), "--record", str(records), "--port", "0"]
    command += shlex.split(options.serve_options)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield Server(process)
    finally:
        process.terminate()
        process.wait(120)


def measure(server: Server, texts: Sequence[str], options: argparse.Namespace) -> Turn:
    """Send the requests that are measured, after one that warms up."""
    server.answer("Hello", options, store=False)
    turn = Turn(server.live_draft())
    rounds_before = server.num_rounds()
    for text in texts:
        ask(server, text, options, turn, store=False)
    turn.rounds = server.num_rounds() - rounds_before
    if server.live_draft() != turn.draft:
        raise SystemExit(f"error: the server swapped {turn.draft} back: {server.messages[-1]}")
    print(
        f"  {turn.draft}: acceptance length {turn.acceptance_length:.2f}, "
        f"{turn.tokens_per_second:.1f} tokens/s",
        flush=True,
    )
    return turn


def ask(
    server: Server,
    text: str,
    options: argparse.Namespace,
    turn: Turn,
    *,
    store: bool,
) -> None:
    """Send one request, and count it."""
    start = time.perf_counter()
    answer = server.answer(text, options, store=store)
    turn.seconds.append(time.perf_counter() - start)
    turn.tokens.append(answer["usage"]["completion_tokens"])
    turn.draft_tokens += answer["speculative"]["draft_tokens"]
    turn.accepted_tokens += answer["speculative"]["accepted_tokens"]


def wait_for_records(records: Path, count: int) -> None:
    """Wait until the server has written all answers to a file."""
    path = records / "manifest.json"
    while not path.exists() or json.loads(path.read_text())["num_prompts"] < count:
        time.sleep(1.0)


def train(
    options: argparse.Namespace,
    directory: Path,
    records: Path,
    first_draft: Path,
) -> tuple[float, Path]:
    """Train on the records. Returns the seconds that it took, and the file of the new draft."""
    print("training on the records", flush=True)
    command = ["fit", "--recipe", "eagle", "--target", str(Path(options.target).absolute())]
    command += ["--text", str(records), "--name", "learned"]
    if options.minutes:
        command += ["--minutes", str(options.minutes)]
    if not options.from_scratch:
        command += ["--model.draft", str(first_draft)]
    start = time.perf_counter()
    call([*command, *shlex.split(options.fit_options)], directory)
    seconds = time.perf_counter() - start
    new_draft = directory / "new.safetensors"
    call(["export", "--ckpt", "checkpoints/learned", "--output", str(new_draft)], directory)
    return seconds, new_draft


def call(arguments: Sequence[str], directory: Path) -> None:
    """Run a verb of the command line in a directory."""
    command = [sys.executable, "-m", "lightning_specdec", *arguments]
    if subprocess.run(command, cwd=directory, check=False).returncode:
        raise SystemExit(f"error: {shlex.join(arguments)} failed")


def table(record: dict[str, Any]) -> str:
    """What was measured, for a reader."""
    drafts = {"first": record["first_draft"], "trained on the records": record["new_draft"]}
    lines = []
    seconds: dict[str, list[list[float]]] = {}
    for name, sha256 in drafts.items():
        turns = [Turn(**turn) for turn in record["turns"] if sha256.startswith(turn["draft"])]
        seconds[name] = [turn.seconds for turn in turns]
        num_tokens = sum(sum(turn.tokens) for turn in turns)
        acceptance_length = num_tokens / sum(turn.rounds for turn in turns)
        speed = num_tokens / sum(sum(turn.seconds) for turn in turns)
        lines.append([name, str(num_tokens), f"{acceptance_length:.2f}", f"{speed:.1f}"])
    heads = ["Draft", "tokens", "acceptance length", "tokens/s"]

    speedup = ratio_interval(*seconds.values())
    text = f"the new draft is {speedup.value:.2f}x as fast as the first one"
    if speedup.ends is not None:
        low, high = speedup.ends
        text += f" [{low:.2f}, {high:.2f}]"
    return f"{markdown_table(heads, lines)}\n\nBy seconds of requests, {text}."


if __name__ == "__main__":
    main()
