"""Measure decoding on a GPU: target calls, the work outside the models, and trained pairs.

    python benchmarks/gpu.py train decode identity calls rounds --output gpu.json

`train` also compiles what the other parts need, in separate processes (`warm`), so that they find
it in the compiler's cache.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.bench.manifest import manifest
from lightning_specdec.decoding import (
    AdaptiveWindow,
    DecodeResult,
    Session,
    autoregressive_decode,
    speculative_decode,
)
from lightning_specdec.decoding.calibration import load_or_measure
from lightning_specdec.drafters import (
    Drafter,
    EagleDrafter,
    EarlyExitDrafter,
    MedusaDrafter,
    ModelDrafter,
)
from lightning_specdec.drafters.base import is_pipelined
from lightning_specdec.models.compiled import compile_layers
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.rules import Sampling

Row = dict[str, Any]
"""The figures of one setting."""

LARGE_SHAPES: dict[str, dict[str, int]] = {
    "16 layers of 2048 (as Llama 3.2 1B)": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
    },
    "4 layers of 4096 (as Llama 3 8B's)": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
    },
}
"""Models of random weights."""
VOCABULARY_SIZES = {2048: 128256, 4096: 32000}
"""Tokens of a model, by its hidden size."""
ROUNDS_VOCABULARY_SIZE = 32000
"""Tokens of the model whose rounds are measured."""

NUM_LAYERS = 30
SMALL_SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
"""The shape of SmolLM2-135M; with bytes for tokens it has 106 million parameters."""

TRAININGS: dict[str, dict[str, Any]] = {
    "early_exit": {
        "class_path": "EarlyExitTraining",
        "init_args": {
            "exit_layer": 2,
            "exit_weights": [3, 4, 3, *[0] * (NUM_LAYERS - 4), 20],
            "layer_dropout": 0.0,
        },
    },
    "medusa": {"class_path": "MedusaTraining", "init_args": {"num_heads": 4}},
}
TRAINING_TEXT = "torch/**/*.py"
"""Sources that the pairs learn from, below the directory of installed packages."""

BATCH_SIZES = (1, 4, 16, 64)
SAMPLINGS = {"greedy": Sampling(), "temperature 1": Sampling(1.0)}
NUM_NEW_TOKENS = 160
NUM_ROUNDS = 40
"""Rounds that are timed."""
NUM_PASSES = 3
"""Passes over the prompts in which both decodings are timed."""
FORMS = ("eager", "recorded", "recorded and compiled")
"""Forms of the calls."""

SMALL_WIDTHS = (1, 2, 3, 5, 7, 9, 17)
"""Tokens of each row in the calls of the trained models that `warm` compiles: calls of a draft, of
standard decoding, and of the windows of `auto`."""
LARGE_WIDTHS = (1, 2, 5)
"""The same for the models of random weights."""


def main() -> None:
    options = make_parser().parse_args()
    if options.parts == ["warm"]:
        warm(options.batch, options.shape)
        return
    if options.output is None:
        make_parser().error("--output is missing")

    directory = options.directory or Path(tempfile.mkdtemp())
    directory.mkdir(parents=True, exist_ok=True)
    settings = {"parts": options.parts, "minutes": options.minutes, "quick": options.quick}
    record: dict[str, Any] = {"manifest": manifest(options=settings, device=torch.device("cuda"))}

    def save(part: str, result: Any) -> None:
        record[part] = result
        options.output.write_text(json.dumps(record, indent=1))

    num_passes = 2 if options.quick else NUM_PASSES
    seconds = options.decode_seconds
    parts: dict[str, Callable[[], Any]] = {
        "train": lambda: train(options.minutes, directory),
        "decode": lambda: decode(directory, num_passes, seconds, partial(save, "decode")),
        "identity": lambda: identity(directory),
        "calls": lambda: calls(options.quick),
        "rounds": lambda: rounds(options.quick),
    }
    for part in options.parts:
        save(part, parts[part]())


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="+", choices=("train", "decode", "identity", "calls", "rounds", "warm")
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=4.0,
        help="training time of the two models, which train at the same time",
    )
    parser.add_argument(
        "--directory", type=Path, help="directory of the trained models (default: a temporary one)"
    )
    parser.add_argument("--output", type=Path, help="file for the results")
    parser.add_argument(
        "--quick", action="store_true", help="fewer passes, one model, and one form of calls"
    )
    parser.add_argument(
        "--decode_seconds", type=float, default=float("inf"), help="time limit of decode"
    )
    parser.add_argument("--batch", type=int, default=1, help="batch size for warm")
    parser.add_argument(
        "--shape", choices=("small", "large"), default="small", help="model for warm"
    )
    return parser


def calls(quick: bool) -> dict[str, Any]:
    """Standard decoding of random models of a billion parameters, with each form of calls."""
    read_rate = measure_read_rate()
    names = list(LARGE_SHAPES)
    forms: Sequence[str] = FORMS
    if quick:
        names = names[:1]
        forms = FORMS[2:]

    rows: list[Row] = []
    for name in names:
        for row in measure_model_calls(name, forms, read_rate):
            rows.append(row)
            show(row)
        # The next model needs the memory.
        torch.cuda.empty_cache()
    return {"read_bytes_per_second": read_rate, "rows": rows}


def measure_model_calls(name: str, forms: Sequence[str], read_rate: float) -> Iterator[Row]:
    """The time of a token in each form of calls and for each batch size."""
    shape = LARGE_SHAPES[name]
    vocab_size = VOCABULARY_SIZES[shape["hidden_size"]]
    model = make_llama(shape, vocab_size)
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    for form in forms:
        target = model
        batch_sizes: Sequence[int] = BATCH_SIZES[:1]
        num_tokens = 16
        if form != "eager":
            target = model.packed()
            batch_sizes = BATCH_SIZES
            num_tokens = 128
        compile_seconds = compile_layers(target) if "compiled" in form else 0.0

        for batch_size in batch_sizes:
            seconds = seconds_per_token(target, random_prompts(batch_size, vocab_size), num_tokens)
            yield {
                "model": name,
                "parameters": model.num_parameters,
                "form": form,
                "batch": batch_size,
                "milliseconds_a_token": 1e3 * seconds,
                "tokens_per_second": batch_size / seconds,
                "share_of_memory_limit": num_bytes / seconds / read_rate,
                "compile_seconds": compile_seconds,
            }


def seconds_per_token(target: HuggingFaceLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds of standard decoding between two tokens, after a run that is not timed."""
    for _ in range(2):
        result = autoregressive_decode(target, prompts, max_new_tokens=num_tokens)
    times = result.rows[0].token_seconds
    return (times[-1] - times[0]) / (num_tokens - 1)


def measure_read_rate() -> float:
    """Bytes per second of a sum over 2 GiB: the memory limit of all figures below."""
    values = torch.ones(2**28, dtype=torch.long, device="cuda")
    return values.nbytes / median_seconds(lambda: values.amax())


def median_seconds(call: Callable[[], Any], num_repeats: int = 20) -> float:
    for _ in range(3):
        call()
    seconds = []
    for _ in range(num_repeats):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return statistics.median(seconds)


def rounds(quick: bool) -> list[Row]:
    """Time of a round outside draft and target, and its transfers between host and device."""
    shape = LARGE_SHAPES["16 layers of 2048 (as Llama 3.2 1B)"]
    target = make_llama(shape, ROUNDS_VOCABULARY_SIZE).packed()
    compile_layers(target)

    rows: list[Row] = []
    for name, drafter in random_drafters(shape, quick).items():
        drafter = drafter.to("cuda", torch.bfloat16).eval()
        for batch_size in BATCH_SIZES:
            row = {"drafter": name, "batch": batch_size}
            row.update(measure_rounds(target, drafter, batch_size))
            rows.append(row)
            show(row)
    return rows


def random_drafters(shape: Mapping[str, int], quick: bool) -> dict[str, Drafter]:
    """Drafters with random weights for a target of this shape, by their names in the record."""
    sizes: dict[str, Any] = {"hidden_size": 2048, "vocab_size": ROUNDS_VOCABULARY_SIZE}
    draft_vocabulary = list(range(8000))
    drafters: dict[str, Drafter] = {
        "early exit": EarlyExitDrafter(2),
        "heads": MedusaDrafter(4, draft_vocabulary=draft_vocabulary, **sizes),
    }
    if not quick:
        draft_shape = {**shape, "num_hidden_layers": 2}
        draft_model = make_llama(draft_shape, ROUNDS_VOCABULARY_SIZE)
        drafters["model"] = ModelDrafter(draft_model.packed())
        drafters["autoregressive head"] = EagleDrafter(
            [2, 8, 14],
            num_heads=32,
            num_key_heads=8,
            intermediate_size=8192,
            draft_vocabulary=draft_vocabulary,
            **sizes,
        )
    return drafters


def measure_rounds(target: HuggingFaceLM, drafter: Drafter, batch_size: int) -> Row:
    """The time and the transfers of a round with this drafter."""
    # The session has room for 100 rounds of 5 tokens and for those that the profiler sees.
    session = Session(target, drafter, max_length=700, num_draft_tokens=4, batch_size=batch_size)
    for prompt in random_prompts(batch_size, ROUNDS_VOCABULARY_SIZE):
        session.add(prompt, max_new_tokens=600)

    seconds, phases = round_seconds(session)
    row = {
        "milliseconds_a_round": 1e3 * seconds,
        "draft_milliseconds": 1e3 * phases["draft"],
        "verify_milliseconds": 1e3 * phases["verify"],
        "outside_milliseconds": 1e3 * (seconds - phases["draft"] - phases["verify"]),
        **transfers_per_round(session),
    }
    if is_pipelined(drafter):
        with session._executor.not_pipelined():
            row["milliseconds_a_round_not_ahead"] = 1e3 * round_seconds(session)[0]
    return row


def round_seconds(session: Session) -> tuple[float, dict[str, float]]:
    """Seconds of a round, in total and by phase, after some rounds that are not timed."""
    for _ in range(8):
        session.step()

    phases_before = session.timer.seconds()
    start = time.perf_counter()
    for _ in range(NUM_ROUNDS):
        session.step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / NUM_ROUNDS

    phases = {}
    for phase, phase_seconds in session.timer.seconds().items():
        phases[phase] = (phase_seconds - phases_before[phase]) / NUM_ROUNDS
    return seconds, phases


def transfers_per_round(session: Session, num_rounds: int = 4) -> dict[str, float]:
    """Copies, synchronizations, and launched graphs of a round, counted by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_rounds):
            session.step()
    counts: collections.Counter[str] = collections.Counter()
    for event in profiler.events() or ():
        for name in ("HtoD", "DtoH", "StreamSynchronize", "EventSynchronize", "GraphLaunch"):
            if name in event.name:
                counts[name] += 1
    num_synchronizations = counts["StreamSynchronize"] + counts["EventSynchronize"]
    return {
        "uploads": counts["HtoD"] / num_rounds,
        "reads": counts["DtoH"] / num_rounds,
        "synchronizations": num_synchronizations / num_rounds,
        "graph_launches": counts["GraphLaunch"] / num_rounds,
    }


def warm(batch_size: int, shape: str) -> None:
    """Compile the calls of one batch size into the compiler's cache."""
    if shape == "small":
        model = make_llama(SMALL_SHAPE, 256)
        widths: Sequence[int] = SMALL_WIDTHS
    else:
        model = make_llama(next(iter(LARGE_SHAPES.values())), ROUNDS_VOCABULARY_SIZE)
        widths = LARGE_WIDTHS

    target = model.packed()
    compile_layers(target)
    with torch.inference_mode():
        state = target.init_state(batch_size, 400)
        # A prompt, and then the calls of rounds.
        for width in (64, *widths):
            tokens = torch.zeros(batch_size, width, dtype=torch.long, device="cuda")
            target(tokens, state, logits_for=slice(-1, None))


def train(minutes: float, directory: Path) -> dict[str, Any]:
    """Train a model of 106M parameters with early exits, and one with heads, on Python sources.

    Both train at the same time, and the calls of the other parts are compiled meanwhile.

    Returns:
        Seconds after which each process ended.
    """
    start = time.perf_counter()
    processes: dict[str, subprocess.Popen[bytes]] = {}
    for name in TRAININGS:
        config_path = directory / f"{name}.yaml"
        config_path.write_text(yaml.safe_dump(training_config(name, minutes, directory)))
        command = [sys.executable, "-m", "lightning_specdec", "fit", "--config", str(config_path)]
        processes[name] = start_process(command, log_path(directory, name))

    warmed = [("small", 2**power) for power in range(7)]
    warmed += [("large", batch_size) for batch_size in BATCH_SIZES]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    for shape, batch_size in warmed:
        name = f"warm {shape} {batch_size}"
        command = [sys.executable, __file__, "warm", "--shape", shape, "--batch", str(batch_size)]
        processes[name] = start_process(command, log_path(directory, name), environment)

    seconds: dict[str, Any] = {}
    for name, process in processes.items():
        code = process.wait()
        seconds[name] = time.perf_counter() - start
        if name in TRAININGS or code:
            output = log_path(directory, name).read_text()[-700:]
            show({"ended": name, "code": code, "seconds": seconds[name], "output": output})
    return seconds


def training_config(name: str, minutes: float, directory: Path) -> dict[str, Any]:
    """A scaled configs/text.yaml for one of `TRAININGS`."""
    config: dict[str, Any] = yaml.safe_load(Path("configs/text.yaml").read_text())
    site_packages = Path(torch.__file__).parent.parent
    config["data"]["init_args"].update(
        paths=str(site_packages / TRAINING_TEXT),
        length=513,
        batch_size=32,
        num_train=65536,
        num_val=64,
    )

    target = config["model"]["init_args"]["target"]
    target["init_args"]["model"].update(SMALL_SHAPE)
    training = TRAININGS[name]
    arguments = {"target": target, "num_draft_tokens": 4, "learning_rate": 0.001}
    config["model"] = {**training, "init_args": {**arguments, **training["init_args"]}}

    checkpoint_callback = {
        "class_path": "ModelCheckpoint",
        "init_args": {
            "dirpath": str(directory / name),
            "filename": "last",
            "enable_version_counter": False,
            "save_on_train_epoch_end": True,
        },
    }
    # The learning rate falls with the time.
    time_limit = {
        "class_path": "lightning_specdec.training.optimizers.TimeLimit",
        "init_args": {"minutes": minutes},
    }
    trainer = config["trainer"]
    trainer.update(max_epochs=1000, accelerator="cuda", devices=1, precision="bf16-mixed")
    trainer["callbacks"] = [checkpoint_callback, time_limit]
    trainer["logger"]["init_args"]["save_dir"] = str(directory / "logs")
    return config


def log_path(directory: Path, name: str) -> Path:
    """The file with what a process prints."""
    return directory / f"{name.replace(' ', '_')}.log"


def start_process(
    command: list[str],
    log: Path,
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that prints to a file."""
    with log.open("w") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def load_trained(
    name: str,
    directory: Path,
    dtype: torch.dtype,
) -> tuple[SpeculativeDecoder, HuggingFaceLM, Drafter]:
    """A trained pair: its decoder, and its target and drafter in the forms that decode."""
    # The checkpoint is in the directory of its run.
    (path,) = (directory / name).rglob("last.ckpt")
    decoder = SpeculativeDecoder.from_checkpoint(path, device="cuda", dtype=dtype)
    target, drafter = decoder.ready()
    assert isinstance(target, HuggingFaceLM)
    return decoder, target, drafter


def identity(directory: Path) -> list[Row]:
    """Compare the outputs of both decodings in float32, recorded and not compiled."""
    rows: list[Row] = []
    for name in TRAININGS:
        decoder, target, drafter = load_trained(name, directory, torch.float32)
        for sampling_name, sampling in SAMPLINGS.items():
            figures = compare(target, drafter, [decoder.prompts[:8]], sampling, 4, num_passes=1)
            row: Row = {"draft": name, "batch": 8, "sampling": sampling_name}
            for figure in ("same_output", "num_prompts", "block_efficiency"):
                row[figure] = figures[figure]
            rows.append(row)
            show(row)
    return rows


@dataclass(frozen=True)
class DecodeSetting:
    """What one comparison of `decode` measures.

    Args:
        draft: one of `TRAININGS`.
        exit_layer: layers that draft, for the pair with early exits.
        window: number of draft tokens, or `auto`.
    """

    draft: str
    batch_size: int
    sampling: str
    exit_layer: int
    window: int | str

    @property
    def label(self) -> str:
        """The draft's name in the record."""
        if self.draft == "early_exit":
            return f"exit after layer {self.exit_layer} of {NUM_LAYERS}"
        return "4 heads"


def decode_settings() -> list[DecodeSetting]:
    """The comparisons of `decode`, the most important ones first."""
    settings = []
    for sampling in SAMPLINGS:
        for window in (4, "auto"):
            for batch_size in BATCH_SIZES:
                for draft in TRAININGS:
                    settings.append(DecodeSetting(draft, batch_size, sampling, 2, window))
    # Other exits, and a longer window.
    for exit_layer, num_draft_tokens in ((1, 4), (3, 4), (2, 6)):
        settings.append(DecodeSetting("early_exit", 1, "greedy", exit_layer, num_draft_tokens))
    return settings


def decode(
    directory: Path,
    num_passes: int,
    seconds: float,
    save: Callable[[list[Row]], None],
) -> list[Row]:
    """Compare the trained pairs with standard decoding on held-out text.

    The calls of both are recorded and compiled.

    Args:
        seconds: time after which no further comparison begins.
        save: called with the rows after each comparison.
    """
    start = time.perf_counter()
    rows: list[Row] = []
    pairs = {name: load_trained(name, directory, torch.bfloat16) for name in TRAININGS}
    for _, target, _ in pairs.values():
        compile_layers(target)

    for setting in decode_settings():
        if time.perf_counter() - start > seconds:
            show({"left_out": astuple(setting)})
            continue
        decoder, target, drafter = pairs[setting.draft]
        if setting.draft == "early_exit":
            drafter = drafter.at(setting.exit_layer)
        row = measure_decode(setting, decoder, target, drafter, num_passes)
        rows.append(row)
        show({name: value for name, value in row.items() if name != "calibration"})
        save(rows)
    return rows


def measure_decode(
    setting: DecodeSetting,
    decoder: SpeculativeDecoder,
    target: HuggingFaceLM,
    drafter: Drafter,
    num_passes: int,
) -> Row:
    """One comparison of `decode`."""
    batch_size = setting.batch_size
    prompts = []
    for number in range(max(batch_size, 8)):
        prompts.append(decoder.prompts[number % len(decoder.prompts)])
    batches = []
    for first in range(0, len(prompts), batch_size):
        batches.append(prompts[first : first + batch_size])

    start = time.perf_counter()
    sampling = SAMPLINGS[setting.sampling]
    row: Row = {
        "draft": setting.label,
        "batch": batch_size,
        "sampling": setting.sampling,
        "window": setting.window,
    }
    window: Any = setting.window
    if window == "auto":
        costs = load_or_measure(target, drafter, batch_size=batch_size, sampling=sampling)
        window = AdaptiveWindow(costs)
        row["calibration"] = costs.to_dict()
    row.update(compare(target, drafter, batches, sampling, window, num_passes=num_passes))
    row["measured_in_seconds"] = time.perf_counter() - start
    return row


def compare(
    target: HuggingFaceLM,
    drafter: Drafter,
    batches: Sequence[list[list[int]]],
    sampling: Sampling,
    window: Any,
    num_passes: int,
) -> Row:
    """Alternate standard and speculative decoding over the same prompts.

    The first pass is not counted: it records and compiles everything.
    """
    standard: list[DecodeResult] = []
    speculative: list[DecodeResult] = []
    for pass_number in range(num_passes + 1):
        for prompts in batches:
            standard_result = autoregressive_decode(
                target, prompts, max_new_tokens=NUM_NEW_TOKENS, sampling=sampling
            )
            speculative_result = speculative_decode(
                target,
                drafter,
                prompts,
                max_new_tokens=NUM_NEW_TOKENS,
                sampling=sampling,
                num_draft_tokens=window,
            )
            if pass_number > 0:
                standard.append(standard_result)
                speculative.append(speculative_result)
    return comparison_figures(standard, speculative, num_passes)


def comparison_figures(
    standard: Sequence[DecodeResult],
    speculative: Sequence[DecodeResult],
    num_passes: int,
) -> Row:
    """Speeds, their ratios, and the number of equal outputs."""
    ratios = []
    num_rounds = 0
    num_outputs = 0
    num_equal = 0
    for standard_result, speculative_result in zip(standard, speculative, strict=True):
        ratios.append(standard_result.seconds / speculative_result.seconds)
        rows = zip(standard_result.rows, speculative_result.rows, strict=True)
        for standard_row, speculative_row in rows:
            num_rounds += speculative_row.num_rounds
            num_outputs += 1
            num_equal += standard_row.tokens == speculative_row.tokens

    num_tokens = total_tokens(speculative)
    standard_seconds = total_seconds(standard)
    speculative_seconds = total_seconds(speculative)
    later_speedup = seconds_after_first(standard) / seconds_after_first(speculative)
    return {
        "walltime_speedup": standard_seconds / speculative_seconds,
        "speedup_behind_the_first_token": later_speedup,
        "smallest": min(ratios),
        "median": statistics.median(ratios),
        "largest": max(ratios),
        "block_efficiency": num_tokens / num_rounds,
        "standard_tokens_per_second": total_tokens(standard) / standard_seconds,
        "speculative_tokens_per_second": num_tokens / speculative_seconds,
        "phase_milliseconds_a_round": phase_milliseconds(speculative),
        "phase_milliseconds_a_token": phase_milliseconds(standard),
        "same_output": num_equal // num_passes,
        "num_prompts": num_outputs // num_passes,
    }


def total_tokens(results: Iterable[DecodeResult]) -> int:
    return sum(result.num_new_tokens for result in results)


def total_seconds(results: Iterable[DecodeResult]) -> float:
    return sum(result.seconds for result in results)


def seconds_after_first(results: Iterable[DecodeResult]) -> float:
    """Seconds after the prompts were read, which neither decoding records."""
    seconds = 0.0
    for result in results:
        first = min(row.token_seconds[0] for row in result.rows)
        last = max(row.token_seconds[-1] for row in result.rows)
        seconds += last - first
    return seconds


def phase_milliseconds(results: Sequence[DecodeResult]) -> dict[str, float]:
    """Milliseconds of each phase per target call."""
    num_calls = sum(result.num_target_calls for result in results)
    milliseconds = {}
    for phase in results[0].phase_seconds:
        seconds = sum(result.phase_seconds[phase] for result in results)
        milliseconds[phase] = round(1e3 * seconds / num_calls, 4)
    return milliseconds


def make_llama(shape: Mapping[str, int], vocab_size: int) -> HuggingFaceLM:
    """A random model in bfloat16."""
    torch.manual_seed(0)
    is_small = shape == SMALL_SHAPE
    config = {
        "model_type": "llama",
        "num_attention_heads": shape["hidden_size"] // 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 1024 if is_small else 4096,
        "vocab_size": vocab_size,
        "tie_word_embeddings": not is_small,
        **shape,
    }
    with torch.device("cuda"):
        return HuggingFaceLM(config).to(torch.bfloat16).eval()


def random_prompts(batch_size: int, vocab_size: int, length: int = 64) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch_size)
    return torch.randint(vocab_size, (batch_size, length), generator=generator).tolist()


def show(row: Row) -> None:
    texts = []
    for name, value in row.items():
        text = f"{value:.3f}" if isinstance(value, float) else str(value)
        texts.append(f"{name}={text}")
    print(*texts, flush=True)


if __name__ == "__main__":
    main()
