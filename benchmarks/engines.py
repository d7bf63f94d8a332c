"""Compare engines that run exported drafts with this package: tokens and acceptance lengths.

    make smollm2
    make test-engines ENGINE=/path/to/vllm/bin/python PROMPTS=question.jsonl

`PLAIN=CHECKPOINT`, a head trained without feature norms and attention window, also builds and runs
llama.cpp's server (`--kinds plain`).

vLLM serves the target in float32 on a CPU, with the shipped head, with heads that are copies of its
output layer, and with a draft model (the target without four of its layers). Greedy answers to
Spec-Bench prompts must equal those of this package. On both sides, the acceptance length is
1 + accepted / drafts over the rounds that have a draft. Answers are greedy because vLLM 0.32 does
not verify sampled draft tokens correctly on a CPU (docs/serve.md).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peers import first_difference
from spec_bench import load, mixed

from lightning_specdec import checkpoints
from lightning_specdec.bench.manifest import manifest
from lightning_specdec.checkpoints import engines
from lightning_specdec.config.files import replaced
from lightning_specdec.data.corpus import open_corpus
from lightning_specdec.decoding import DecodeResult, speculative_decode
from lightning_specdec.drafters import Drafter, MedusaDrafter, ModelDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import load_model

Row = dict[str, Any]
"""The figures of one kind of draft."""

PORT = 8123
NUM_DRAFT_TOKENS = 3
START_SECONDS = 1200
"""How long a server may take to load its models."""
OMITTED_LAYERS = (10, 14, 18, 22)
"""Layers of the target that the draft model does not have."""
LARGEST_DEVIATION = 0.03
"""Largest relative difference of two acceptance lengths."""

VLLM_METHODS = {"head": "eagle3", "medusa": "medusa", "model": "draft_model"}
"""vLLM's name for each kind of draft."""
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
VERSIONED_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "openai")

LIST_VERSIONS = """
import importlib.metadata, json
print(json.dumps({package.name: package.version for package in importlib.metadata.distributions()}))
"""
STREAM_ANSWER = """
import sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
chunks = client.chat.completions.create(
    model=sys.argv[2],
    messages=[{"role": "user", "content": "Name three colours."}],
    stream=True,
    max_tokens=16,
    temperature=0,
)
texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
print(len([text for text in texts if text]), repr("".join(texts)))
"""


def main() -> None:
    options = make_parser().parse_args()
    target = load_model(options.model, dtype="float32")
    prompts = mixed(load(options.prompts, target.tokenizer), options.num_prompts)

    rows: list[Row] = []
    if options.output and options.output.exists():
        record = json.loads(options.output.read_text(encoding="utf-8"))
        rows = [row for row in record["rows"] if row["kind"] not in options.kinds]

    header = {
        "manifest": manifest(options=recorded_options(options), device=torch.device("cpu")),
        "engine": versions(options.engine),
    }
    for kind in options.kinds:
        rows.append(measure_kind(kind, target, prompts, options))
        print(json.dumps(rows[-1]), flush=True)
        if options.output:
            record = {**header, "rows": rows}
            with replaced(options.output) as file:
                file.write((json.dumps(record, indent=1) + "\n").encode())

    different_kinds = [row["kind"] for row in rows if is_different(row)]
    if different_kinds:
        sys.exit(f"error: an engine differs with {', '.join(different_kinds)}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", required=True, help="Python of vLLM's environment")
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--draft", default="checkpoints/smollm2_eagle.safetensors")
    parser.add_argument("--prompts", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--num_prompts", type=int, default=12)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--kinds", nargs="+", default=["head", "medusa", "model"])
    parser.add_argument("--plain", help="checkpoint of a head for llama.cpp, for the kind `plain`")
    parser.add_argument("--llama_server", help="llama.cpp's server")
    parser.add_argument("--llama_converter", help="command of its convert_hf_to_gguf.py")
    parser.add_argument("--output", type=Path)
    return parser


def recorded_options(options: argparse.Namespace) -> dict[str, Any]:
    """Options for the manifest, without paths of this machine."""
    recorded = dict(vars(options))
    for name in ("engine", "output", "plain", "llama_server", "llama_converter"):
        recorded[name] = None
    recorded["prompts"] = Path(options.prompts).name
    recorded["window"] = NUM_DRAFT_TOKENS
    return recorded


def is_different(row: Row) -> bool:
    """Whether an engine's tokens, acceptance length or generated rows are not ours."""
    if row["same_tokens"] < row["num_prompts"] or abs(row["off"]) > LARGEST_DEVIATION:
        return True
    generated_counts = set(row.get("generated", {}).values())
    return len(generated_counts) > 1


def measure_kind(
    kind: str,
    target: HuggingFaceLM,
    prompts: list[list[int]],
    options: argparse.Namespace,
) -> Row:
    """Export a draft of this kind, and measure it here and in an engine."""
    drafter = make_drafter(kind, target, options)
    results = decode_here(target.packed(), drafter, prompts, options.max_new_tokens)
    print(f"{kind}: decoded here, {acceptance_length(results):.3f}", flush=True)

    engine = "llama.cpp" if kind == "plain" else "vllm"
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        exported = engines.export(
            directory / "draft", drafter, target, engine, num_draft_tokens=NUM_DRAFT_TOKENS
        )
        row = {"kind": kind, "num_prompts": len(prompts), "logits_off": exported.difference}
        if kind == "plain":
            return row | measure_llama_cpp(target, prompts, results, directory, options)
        return row | measure_vllm(kind, prompts, results, exported.directory, options)


def make_drafter(kind: str, target: HuggingFaceLM, options: argparse.Namespace) -> Drafter:
    """A drafter of the given kind."""
    if kind == "plain":
        return checkpoints.load(options.plain).drafter
    if kind == "head":
        return checkpoints.load(options.draft).drafter
    if kind == "medusa":
        sizes: Any = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        return MedusaDrafter(NUM_DRAFT_TOKENS, **sizes).init_from(target).eval()

    assert target.num_layers is not None
    layers = [layer for layer in range(target.num_layers) if layer not in OMITTED_LAYERS]
    return ModelDrafter(target.with_layers(layers))


def decode_here(
    target: LanguageModel,
    drafter: Drafter,
    prompts: list[list[int]],
    max_new_tokens: int,
) -> list[DecodeResult]:
    """Greedy answers of this package, one prompt at a time."""
    results = []
    for prompt in prompts:
        result = speculative_decode(
            target,
            drafter,
            prompt,
            num_draft_tokens=NUM_DRAFT_TOKENS,
            eos=(),
            max_new_tokens=max_new_tokens,
        )
        results.append(result)
    return results


def acceptance_length(results: list[DecodeResult]) -> float:
    """1 + accepted / rounds, over rounds that have a draft."""
    num_rounds = 0
    num_accepted = 0
    for result in results:
        for row in result.rows:
            for round_ in row.rounds or []:
                if round_.drafted:
                    num_rounds += 1
                    num_accepted += round_.num_accepted
    return 1 + num_accepted / num_rounds


def compare_lengths(results: list[DecodeResult], engine_length: float) -> dict[str, float]:
    """Acceptance lengths of both sides, and their relative difference."""
    our_length = acceptance_length(results)
    return {"ours": our_length, "theirs": engine_length, "off": engine_length / our_length - 1}


def measure_vllm(
    kind: str,
    prompts: list[list[int]],
    results: list[DecodeResult],
    draft_directory: Path,
    options: argparse.Namespace,
) -> Row:
    """Measure vLLM with an exported draft.

    Args:
        results: our answers to the same prompts.
    """
    speculative_config = {
        "method": VLLM_METHODS[kind],
        "model": str(draft_directory),
        "num_speculative_tokens": NUM_DRAFT_TOKENS,
    }
    row: Row = {}
    with serve(vllm_command(options, speculative_config), vllm_environment(options.engine)) as url:
        counts_before = read_draft_counts(url)
        answers = [complete(url, prompt, options) for prompt in prompts]
        engine_length = read_draft_counts(url).acceptance_length_since(counts_before)

        our_tokens = [result.tokens[0] for result in results]
        row["same_tokens"] = num_equal(answers, our_tokens)
        row.update(compare_lengths(results, engine_length))
        if kind == "head":
            row["streamed"] = stream_answer(url, options)
            row["generated"] = compare_generate(url, options)
    return row


def vllm_command(options: argparse.Namespace, speculative_config: dict[str, Any]) -> list[str]:
    """Command of vLLM's server."""
    command = [options.engine, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", options.model, "--dtype", "float32", "--port", str(PORT)]
    command += ["--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager"]
    command += ["--speculative-config", json.dumps(speculative_config)]
    return command


def vllm_environment(python: str) -> dict[str, str]:
    """Environment variables that vLLM needs on a CPU."""
    environment = {**os.environ, **VLLM_ENVIRONMENT}
    openmp_library = Path(python).parent.parent / "lib" / "libiomp5.so"
    if openmp_library.exists():
        environment["LD_PRELOAD"] = str(openmp_library)
    cores = sorted(os.sched_getaffinity(0))
    environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
    # Ours would override the packages and the threads of the engine's environment.
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    return environment


def versions(python: str) -> dict[str, str]:
    """Installed versions in the engine's environment."""
    process = subprocess.run(
        [python, "-c", LIST_VERSIONS], capture_output=True, check=True, text=True
    )
    installed = json.loads(process.stdout)
    return {name: installed[name] for name in VERSIONED_PACKAGES if name in installed}


@dataclass(frozen=True)
class DraftCounts:
    """What vLLM has counted since it started."""

    num_drafts: float
    num_accepted: float

    def acceptance_length_since(self, before: DraftCounts) -> float:
        """1 + accepted / drafts, of what was counted since then."""
        num_accepted = self.num_accepted - before.num_accepted
        return 1 + num_accepted / (self.num_drafts - before.num_drafts)


def read_draft_counts(url: str) -> DraftCounts:
    """Read vLLM's counters from its metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=600) as response:
        lines = response.read().decode().splitlines()
    values = {}
    for line in lines:
        if line.startswith("vllm:spec_decode_num_"):
            name, _, _ = line.partition("{")
            values[name] = float(line.split()[-1])
    return DraftCounts(
        values["vllm:spec_decode_num_drafts_total"],
        values["vllm:spec_decode_num_accepted_tokens_total"],
    )


def complete(url: str, prompt: list[int], options: argparse.Namespace) -> list[int]:
    """The tokens of vLLM's greedy answer."""
    body = {
        "model": options.model,
        "prompt": prompt,
        "max_tokens": options.max_new_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return list(post(f"{url}/v1/completions", body)["choices"][0]["token_ids"])


def stream_answer(url: str, options: argparse.Namespace) -> str:
    """Number of chunks and text of an answer that OpenAI's client streams from the server."""
    process = subprocess.run(
        [options.engine, "-c", STREAM_ANSWER, url, options.model],
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stdout.strip()


def compare_generate(url: str, options: argparse.Namespace) -> dict[str, int]:
    """Rows that `generate` writes greedily, and how many of them an engine writes equally.

    `address` is the running server, and `python` a server that `generate` starts itself.
    """
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        prompt_file = directory / "prompts.txt"
        prompt_file.write_text("\n".join(prompt_texts(options)), encoding="utf-8")
        our_rows = generate(directory / "here", prompt_file, options)
        address_rows = generate(directory / "address", prompt_file, options, engine=url)
        python_rows = generate(directory / "python", prompt_file, options, engine=options.engine)
    return {
        "num_rows": len(our_rows),
        "address": num_equal(our_rows, address_rows),
        "python": num_equal(our_rows, python_rows),
    }


def prompt_texts(options: argparse.Namespace) -> list[str]:
    """First turns of the prompts, each on one line."""
    lines = Path(options.prompts).read_text(encoding="utf-8").splitlines()
    texts = []
    for line in lines[: options.num_prompts]:
        first_turn = json.loads(line)["turns"][0]
        texts.append(" ".join(first_turn.split()))
    return texts


def generate(
    output: Path,
    prompt_file: Path,
    options: argparse.Namespace,
    engine: str | None = None,
) -> list[list[int]]:
    """Run the verb `generate`, and return the rows that it writes.

    Args:
        engine: address of a server, or the Python of an engine; without it, this package decodes.
    """
    arguments = {
        "model": "GenerateText",
        "data": "PromptFiles",
        "trainer.logger": "false",
        "trainer.accelerator": "cpu",
        "model.target": options.model,
        "model.dtype": "float32",
        "model.max_new_tokens": str(options.max_new_tokens),
        "model.output": str(output),
        "data.paths": str(prompt_file),
    }
    if engine is not None:
        arguments["engine"] = engine
    command = [sys.executable, "-m", "lightning_specdec", "generate"]
    for name, value in arguments.items():
        command += [f"--{name}", value]

    starts_engine = engine == options.engine
    environment = vllm_environment(options.engine) if starts_engine else None
    subprocess.run(command, check=True, env=environment)

    _, shards = open_corpus(output)
    rows = []
    for shard in shards:
        for index in range(len(shard.prompt_lengths)):
            rows.append(shard.row(index).tolist())
    return rows


def measure_llama_cpp(
    target: HuggingFaceLM,
    prompts: list[list[int]],
    results: list[DecodeResult],
    directory: Path,
    options: argparse.Namespace,
) -> Row:
    """Measure llama.cpp with a head in `directory`, converted by llama.cpp's own script.

    llama.cpp's answers must equal its answers without the head, which need not equal ours.

    Args:
        results: our answers to the same prompts.
    """
    target_file = directory / "target.gguf"
    draft_file = directory / "draft.gguf"
    convert(options.model, target_file, options)
    convert(str(directory / "draft"), draft_file, options, "--target-model-dir", options.model)

    server = [options.llama_server, "-m", str(target_file), "--port", str(PORT)]
    server += ["-c", "2048", "-np", "1", "-ctk", "f32", "-ctv", "f32", "-fa", "off"]
    draft_options = ["-md", str(draft_file), "--spec-type", "draft-eagle3"]
    draft_options += ["--spec-draft-n-max", str(NUM_DRAFT_TOKENS)]
    standard_answers = llama_cpp_answers(server, prompts, options)
    draft_answers = llama_cpp_answers([*server, *draft_options], prompts, options)

    row: Row = {"same_tokens": 0, "alone_as_here": 0, "gaps": []}
    num_drafted = 0
    num_accepted = 0
    answers = zip(prompts, results, standard_answers, draft_answers, strict=True)
    for prompt, result, standard_answer, draft_answer in answers:
        num_drafted += draft_answer["timings"]["draft_n"]
        num_accepted += draft_answer["timings"]["draft_n_accepted"]
        row["same_tokens"] += draft_answer["tokens"] == standard_answer["tokens"]
        row["alone_as_here"] += standard_answer["tokens"] == result.tokens[0]
        gap = logit_gap(target, prompt, result.tokens[0], standard_answer["tokens"])
        if gap is not None:
            row["gaps"].append(gap)

    # Every draft has the same number of tokens, so this is 1 + accepted / drafts.
    engine_length = 1 + NUM_DRAFT_TOKENS * num_accepted / num_drafted
    row["version"] = llama_cpp_version(options.llama_server)
    row.update(compare_lengths(results, engine_length))
    return row


def convert(source: str, output: Path, options: argparse.Namespace, *arguments: str) -> None:
    """Convert a model's directory to a GGUF file in float32."""
    command = [*shlex.split(options.llama_converter), source, "--outtype", "f32"]
    command += [*arguments, "--outfile", str(output)]
    subprocess.run(command, check=True, capture_output=True)


def llama_cpp_answers(
    server: list[str],
    prompts: list[list[int]],
    options: argparse.Namespace,
) -> list[Any]:
    """Greedy answers of a llama.cpp server, with their tokens and timings."""
    settings = {
        "n_predict": options.max_new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": False,
    }
    with serve(server) as url:
        return [post(f"{url}/completion", {"prompt": prompt, **settings}) for prompt in prompts]


def llama_cpp_version(server: str) -> str:
    process = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    return (process.stdout + process.stderr).splitlines()[0]


@torch.inference_mode()
def logit_gap(
    target: HuggingFaceLM,
    prompt: list[int],
    ours: list[int],
    theirs: list[int],
) -> float | None:
    """Logit gap between our token and theirs at the first difference; None if there is none."""
    position = first_difference(ours, theirs)
    if position is None:
        return None
    tokens = torch.tensor([prompt + ours[:position]])
    logits = target(tokens, logits_for=slice(-1, None)).logits.flatten()
    return float(logits[ours[position]] - logits[theirs[position]])


def num_equal(rows: list[list[int]], other_rows: list[list[int]]) -> int:
    """Number of equal rows of tokens."""
    return sum(row == other_row for row, other_row in zip(rows, other_rows, strict=True))


@contextmanager
def serve(
    command: list[str],
    environment: dict[str, str] | None = None,
    *,
    port: int = PORT,
) -> Iterator[str]:
    """Start a server that listens on this port, and yield its address."""
    with serve_process(command, environment, port=port) as (url, _):
        yield url


@contextmanager
def serve_process(
    command: list[str],
    environment: dict[str, str] | None = None,
    *,
    port: int = PORT,
) -> Iterator[tuple[str, int]]:
    """Start a server that listens on this port, and yield its address and the number of its
    process.
    """
    url = f"http://127.0.0.1:{port}"
    with TemporaryDirectory() as folder, Path(folder, "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not is_healthy(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    errors = [line for line in log.read().splitlines() if "rror" in line]
                    raise SystemExit("error: the engine does not serve:\n" + "\n".join(errors[:8]))
                time.sleep(1)
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(600)


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def post(url: str, body: dict[str, Any]) -> Any:
    """The JSON answer to a request."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=3600) as response:
        return json.load(response)


if __name__ == "__main__":
    main()
