"""Load a model of transformers by its directory or its name on the hub.

No weight is read before the files are known to be whole and the memory to suffice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_specdec import __version__
from lightning_specdec.config import hub
from lightning_specdec.config.files import cache_home, replaced
from lightning_specdec.config.memory import ModelSize, require_memory
from lightning_specdec.config.models import DTYPES, MOST_SMALL
from lightning_specdec.models.base import OPENVINO_DTYPES, weights_digest
from lightning_specdec.models.model_config import FOREIGN, first_line, quiet, read_config
from lightning_specdec.models.packed import check_quantization, is_linear, quantize
from lightning_specdec.models.safetensors_file import Origin, read_header, weight_files
from lightning_specdec.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from lightning_specdec.models.huggingface import HuggingFaceLM

_ON_HUB = 20_000, 2**53
"""Most tensors of a model whose weights are not here yet, and most numbers in them."""
OPENVINO = "2026.4"
"""The release whose operations are called."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examined:
    """A model that can be loaded, before any of its weights is read; the fields are those of `examine`."""

    source: str
    path: Path
    config: PreTrainedConfig
    dtype: str
    device: str
    quantization: str | None
    backend: str
    size: ModelSize
    trust_remote_code: bool


def load_model(source: str | os.PathLike[str], **options: Any) -> HuggingFaceLM:
    """Load a causal language model of transformers, with its tokenizer if it has one.

    Args:
        source: a directory that `save_pretrained` wrote, or a model's name on the hub.
        options: `dtype` ("bfloat16"; default: as its config says, float32 where that says nothing), `device` (default:
            "cpu"), `quantization` ("int8" or "int4"), `backend` ("openvino" or "auto", see `in_backend`; default:
            "torch"), `revision` (branch, tag or commit on the hub), `trust_remote_code` (run Python code of the model,
            which is refused otherwise).

    Raises:
        ValueError: it is not found, is not a causal language model, is damaged, or does not fit in memory.
    """
    examined = examine(source, **options)
    needed = examined.size.weight_bytes(examined.dtype)  # what is quantized is read as it is first
    require_memory(examined.source, needed, examined.device)
    return in_backend(load(examined), examined.backend, examined.quantization)


def examine(
    source: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    quantization: str | None = None,
    backend: str = "torch",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Examined:
    """Find a model and check all that can be checked without its weights; arguments as of `load_model`.

    Raises:
        ValueError: it is not there, is no causal language model, or is damaged.
    """
    if backend == "openvino":
        check_openvino(device)
    else:
        check_quantization(quantization, device)
    name, limits = os.fspath(source), _ON_HUB
    with quiet():
        from lightning_specdec.models.huggingface import HuggingFaceLM

        path = hub.find(source, revision=revision, code=trust_remote_code)
        config = read_config(name, path, trust_remote_code)
        if Path(source).expanduser().is_dir():
            # Tied weights are built twice, fused ones may be stored apart, and four bits may be stored as bytes.
            shapes = _read_shapes(path)
            limits = 4 * len(shapes) + 100, 8 * sum(map(math.prod, shapes)) + 2**20
        try:
            empty = without_memory(config, limits, trust_remote_code=trust_remote_code)
            HuggingFaceLM(empty)  # refuses models that cannot take part
        except FOREIGN as error:
            raise ValueError(f"{name} cannot be decoded here: {first_line(error)}") from error
    stored = getattr(config.get_text_config(), "dtype", None)
    wanted = str(dtype or stored or "float32").removeprefix("torch.")
    if wanted not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {wanted!r}")
    if backend == "openvino":
        check_openvino(device, getattr(torch, wanted))
    return Examined(
        name,
        path,
        config,
        wanted,
        str(device),
        quantization,
        backend,
        measure(empty),
        trust_remote_code,
    )


def _read_shapes(path: Path) -> list[list[int]]:
    return [shape for file in weight_files(path) for shape in read_header(file)[1].values()]


def without_memory(
    config: PreTrainedConfig,
    limits: tuple[int, int] = (2**63, 2**63),
    *,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model that a configuration describes, on the meta device: all its shapes and no numbers.

    Args:
        limits: most tensors, and most numbers in them, to build.

    Raises:
        ValueError: as transformers does, for no causal language model; or it is far larger than its weights.
    """
    from transformers import AutoModelForCausalLM

    built = [0, 0]

    def count(module: torch.nn.Module, parameter: str, value: torch.nn.Parameter | None) -> None:
        if value is not None:
            built[:] = built[0] + 1, built[1] + value.numel()
            if built[0] > limits[0] or built[1] > limits[1]:
                raise ValueError(
                    "its config.json describes a model far larger than its weight files"
                )

    with (
        torch.nn.modules.module.register_module_parameter_registration_hook(count),
        torch.device("meta"),
    ):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def measure(model: PreTrainedModel) -> ModelSize:
    """The size of a model of transformers, with or without memory."""
    maps: list[Any] = [module for module in model.modules() if is_linear(module)]
    # An output head that shares the table's weight does not take it along when it is quantized.
    shared = {
        id(table.weight) for table in model.modules() if isinstance(table, torch.nn.Embedding)
    }
    alone = {
        id(module.weight): module.weight.numel()
        for module in maps
        if id(module.weight) not in shared
    }
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelSize(
        parameters=parameters,
        kept_parameters=parameters - sum(alone.values()),
        matrix_parameters=sum(module.weight.numel() for module in maps),
    )


def load(examined: Examined) -> HuggingFaceLM:
    """Read the weights of an examined model, without another look at the memory."""
    name, path = examined.source, examined.path
    with quiet():
        from transformers import AutoModelForCausalLM

        hub.download_weights(name, path)
        _read_shapes(path)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=examined.config,
                dtype=getattr(torch, examined.dtype),
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=examined.trust_remote_code,
                ignore_mismatched_sizes=True,  # they are refused below, with their names
                output_loading_info=True,
            )
        except FOREIGN as error:
            raise ValueError(f"{name} cannot be loaded: {first_line(error)}") from error
    model, report = loaded
    for kind, what in (
        ("missing_keys", "lack"),
        ("mismatched_keys", "have another shape than its config for"),
    ):
        if keys := sorted(report[kind], key=str):
            raise ValueError(
                f"the weights of {name} {what} {keys[0]} ({len(keys)} in all): download it again"
            )
    if foreign := sorted(report["unexpected_keys"]):
        log.warning(
            "%s holds %d weights that its config has no place for, as %s",
            name,
            len(foreign),
            foreign[0],
        )
    built = _with_tokenizer(model, examined).to(examined.device)
    if examined.quantization is not None and examined.backend != "openvino":
        quantize(built.model, examined.quantization)
    return built.eval()


def without_weights(examined: Examined) -> HuggingFaceLM:
    """An examined model on the meta device: its sizes and its tokenizer, for another program to compute with."""
    with quiet():
        empty = without_memory(examined.config, trust_remote_code=examined.trust_remote_code)
    return _with_tokenizer(empty.to(getattr(torch, examined.dtype)), examined)


def _with_tokenizer(model: PreTrainedModel, examined: Examined) -> HuggingFaceLM:
    from lightning_specdec.models.huggingface import HuggingFaceLM

    with quiet():
        is_in = TextTokenizer.is_in(examined.path)
        tokenizer = (
            TextTokenizer.load(examined.path, trust_remote_code=examined.trust_remote_code)
            if is_in
            else None
        )
    built = HuggingFaceLM(model, tokenizer=tokenizer)
    built.origin = Origin(examined.source, examined.path)
    return built


def check_openvino(device: str | torch.device, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError unless the right release of OpenVINO is installed, and runs that type on that device."""
    found = metadata.version("openvino") if find_spec("openvino") else None
    if found is None or not found.startswith(OPENVINO):
        got = "is not installed" if found is None else f"is of release {found}"
        command = f"{sys.executable} -m pip install 'openvino~={OPENVINO}.0' nncf"
        raise ValueError(f"--backend openvino needs OpenVINO {OPENVINO}, which {got}: {command}")
    if torch.device(device).type != "cpu":
        raise ValueError(
            f"--backend openvino runs on a CPU, not on {device}: drop --device, or take --backend torch"
        )
    if dtype is not None and dtype not in OPENVINO_DTYPES:
        kinds = " or ".join(str(each).removeprefix("torch.") for each in OPENVINO_DTYPES)
        raise ValueError(
            f"OpenVINO computes in {kinds}, got {str(dtype).removeprefix('torch.')}: give --dtype"
        )
    amx = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    if (
        amx and min(torch.get_num_threads(), len(os.sched_getaffinity(0))) == 1
    ):  # its gated MLP divides by threads // 2
        raise ValueError(
            "OpenVINO crashes in bfloat16 on one thread of this processor: --threads 2 or --backend torch"
        )


def in_backend(
    model: HuggingFaceLM, backend: str, quantization: str | None = None
) -> HuggingFaceLM:
    """The model itself, or the same in OpenVINO, for decoding only.

    Args:
        backend: "torch", "openvino", or "auto": on a CPU with OpenVINO, the faster one of the two, measured once for
            each model and machine and kept in the cache directory.
        quantization: of the weights in OpenVINO; torch's are quantized as they are loaded.

    Raises:
        ValueError: it cannot run in OpenVINO, where that was asked for.
    """
    if backend == "auto":
        backend = _faster(model) if quantization is None else "torch"
    if backend == "torch":
        return model
    from lightning_specdec.models.openvino import OpenVINOLM

    return OpenVINOLM.of(model, quantization)


def _faster(model: HuggingFaceLM) -> str:
    """The backend whose calls on one and on eight tokens take less time together."""
    try:
        check_openvino(model.device, model.dtype)
    except ValueError:
        return "torch"
    if model.num_parameters <= MOST_SMALL or not model.takes_apart:
        return "torch"
    versions = torch.__version__, metadata.version("openvino"), __version__
    machine = torch.backends.cpu.get_cpu_capability(), os.cpu_count(), torch.get_num_threads()
    key = repr((weights_digest(model), model.dtype, versions, machine))
    kept = cache_home() / f"backend-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
        seconds = {name: float(found[name]) for name in ("torch", "openvino")}
    except (OSError, ValueError, TypeError, LookupError):  # not measured yet, or damaged
        from lightning_specdec.models.openvino import OpenVINOLM

        log.info(
            "comparing OpenVINO with torch, once for this model, type and machine: about a minute"
        )
        try:
            seconds = _call_seconds({"torch": model.packed(), "openvino": OpenVINOLM.of(model)})
        except (OSError, *FOREIGN) as error:
            log.warning("%s: taking torch", first_line(error))
            return "torch"
        with suppress(OSError), replaced(kept) as file:  # measured again next time
            file.write(json.dumps(seconds).encode())
    return min(seconds, key=seconds.__getitem__)


@torch.no_grad()
def _call_seconds(models: dict[str, HuggingFaceLM], *, repeats: int = 7) -> dict[str, float]:
    """The median seconds of a call on one token and one on eight, behind 128 tokens, in turn."""
    found: dict[str, list[float]] = {name: [] for name in models}
    states = {name: model.init_state(1, 256) for name, model in models.items()}
    tokens = torch.arange(128)[None] % min(model.vocab_size for model in models.values())
    for name, model in models.items():
        model(tokens, states[name], logits_for=slice(-1, None))
    for _ in range(repeats + 2):
        for name, model in models.items():
            started = time.perf_counter()
            for num_tokens in (1, 8):
                model(tokens[:, :num_tokens], states[name])
                states[name].truncate([128])
            found[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds[2:]) for name, seconds in found.items()}
