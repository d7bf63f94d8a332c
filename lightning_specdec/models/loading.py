"""Load a model of transformers from a directory or by its name on the Hub.

No weight is read before the files are checked to be complete and the memory to suffice.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_specdec.config import hub
from lightning_specdec.config.activity import Activity
from lightning_specdec.config.memory import ModelSize, require_memory
from lightning_specdec.config.models import DTYPES, MOST_SMALL, check_directory
from lightning_specdec.models.adapters import Adapter, find_adapter, merge_adapter
from lightning_specdec.models.backend_timing import faster_backend
from lightning_specdec.models.base import OPENVINO_DTYPES
from lightning_specdec.models.model_config import (
    FOREIGN,
    auto_class,
    first_line,
    quiet,
    read_config,
)
from lightning_specdec.models.mtp_layout import is_of_prediction_layer
from lightning_specdec.models.packed import check_quantization, is_linear, quantize
from lightning_specdec.models.safetensors_file import Origin, read_header, weight_files
from lightning_specdec.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from lightning_specdec.models.huggingface import HuggingFaceLM

_HUB_LIMITS = (20_000, 2**53)
"""Largest number of tensors of a model whose weights are not here yet, and of numbers in them."""
_NO_LIMITS = (2**63, 2**63)
_TEXT_PART = re.compile(r"language_model|text_model|lm_head|embed_tokens|^(model\.)?layers\.")
"""Names of the weights for texts of a model that also reads images."""
_UNPACKED_ON_CPU = ("fp8",)
"""Methods whose weights transformers unpacks where their kernels are missing."""
OPENVINO = "2026.4"
"""The release of OpenVINO whose operations are called."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examined:
    """A model that can be loaded, before any of its weights is read.

    The fields are those of `examine`.
    """

    source: str
    path: Path
    config: PreTrainedConfig
    dtype: str
    device: str
    quantization: str | None
    backend: str
    size: ModelSize
    trust_remote_code: bool
    adapter: Adapter | None


def load_model(source: str | os.PathLike[str], **options: Any) -> HuggingFaceLM:
    """Load a causal language model of transformers, with its tokenizer if it has one.

    Args:
        source: a directory that `save_pretrained` wrote, a GGUF file, or a model's name on the Hub.
        options: `dtype` ("bfloat16"; default: from its config, or else float32), `device`
            (default: "cpu"), `quantization` ("int8" or "int4"), `backend` ("openvino" or "auto",
            see `in_backend`; default: "torch", which can be trained, while `SpeculativeDecoder`
            and the command line default to "auto"), `revision` (branch, tag or commit on the Hub),
            `trust_remote_code` (run Python code of the model, which is refused otherwise),
            `adapter` (directory or Hub name of an adapter of PEFT, merged into the weights).

    Raises:
        ValueError: it is not found, is not a causal language model, is damaged, or does not fit in
            memory.
    """
    examined = examine(source, **options)
    # Weights are read in this type before they are quantized.
    num_bytes = examined.size.weight_bytes(examined.dtype)
    require_memory(examined.source, num_bytes, examined.device)
    return in_backend(load(examined), examined.backend, examined.quantization, is_unchanged=True)


def examine(
    source: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    quantization: str | None = None,
    backend: str = "torch",
    revision: str | None = None,
    trust_remote_code: bool = False,
    adapter: str | os.PathLike[str] | None = None,
) -> Examined:
    """Find a model and check all that can be checked without its weights.

    Arguments as of `load_model`.

    Raises:
        ValueError: it is not found, is not a causal language model, or is damaged.
    """
    if backend == "openvino":
        check_openvino(device)
    else:
        check_quantization(quantization, device)

    name = os.fspath(source)
    # A path that does not exist is no name on the Hub.
    check_directory(name)
    found_adapter = None if adapter is None else find_adapter(adapter)
    with quiet():
        path = hub.find(source, revision=revision, code=trust_remote_code)
        config = read_config(name, path, trust_remote_code)
        method = quantization_method(config)
        if method is not None:
            if not _is_known(quantization_settings(config)):
                raise ValueError(
                    f"{name} is quantized by {method}, which this version of transformers does not "
                    "know"
                )
            _check_quantized(name, method, quantization, backend, found_adapter)
        limits = _HUB_LIMITS
        if Path(source).expanduser().exists():
            limits = _size_limits(path)
        empty_model = _checked_empty_model(name, config, limits, trust_remote_code)

    dtype_name = _dtype_name(config, dtype)
    if backend == "openvino":
        check_openvino(device, getattr(torch, dtype_name))
    return Examined(
        source=name,
        path=path,
        config=config,
        dtype=dtype_name,
        device=str(device),
        quantization=quantization,
        backend=backend,
        size=_stored_size(path, method, dtype_name, str(device)) or measure(empty_model),
        trust_remote_code=trust_remote_code,
        adapter=found_adapter,
    )


def quantization_method(config: PreTrainedConfig) -> str | None:
    """The method that quantized a model's stored weights, as "awq"; None if they are plain."""
    settings = quantization_settings(config)
    if settings is None:
        return None
    values = settings if isinstance(settings, dict) else vars(settings)
    method = values.get("quant_method", "an unknown method")
    return str(getattr(method, "value", method))


def quantization_settings(config: PreTrainedConfig) -> Any:
    """What transformers reads about the quantization of a model; None if there is nothing."""
    for part in (config, config.get_text_config()):
        settings = getattr(part, "quantization_config", None)
        if settings is not None:
            return settings
    return None


def _is_known(settings: Any) -> bool:
    """Whether transformers can load weights that were quantized in this way.

    It ignores a method that it does not know, and would load the numbers without their scales.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    if not isinstance(settings, dict):
        return True
    try:
        return bool(AutoHfQuantizer.supports_quant_method(settings))
    except ValueError:
        return False


def _check_quantized(
    name: str,
    method: str,
    quantization: str | None,
    backend: str,
    adapter: Adapter | None,
) -> None:
    """Raise ValueError for what quantized weights cannot be combined with."""
    if quantization is not None:
        raise ValueError(f"{name} is quantized already (by {method}): drop --quantization")
    if backend == "openvino":
        raise ValueError(f"OpenVINO does not run weights of {method}: use --backend torch")
    if adapter is not None:
        raise ValueError(
            f"{name} is quantized (by {method}): merge the adapter into the weights before they "
            "are quantized"
        )


def _stored_size(path: Path, method: str | None, dtype: str, device: str) -> ModelSize | None:
    """The size of quantized weights, from that of their files; None if they are unpacked."""
    is_unpacked = method in _UNPACKED_ON_CPU and device == "cpu"
    if method is None or is_unpacked or not any(path.glob("*.safetensors")):
        return None
    num_bytes = sum(file.stat().st_size for file in weight_files(path))
    num_numbers = max(1, num_bytes // getattr(torch, dtype).itemsize)
    return ModelSize(parameters=num_numbers, kept_parameters=num_numbers, matrix_parameters=1)


def _dtype_name(config: PreTrainedConfig, dtype: str | torch.dtype | None) -> str:
    config_dtype = getattr(config.get_text_config(), "dtype", None)
    name = str(dtype or config_dtype or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return name


def _size_limits(path: Path) -> tuple[int, int]:
    """Largest plausible number of tensors, and of numbers in them, for a model's weight files.

    The model may have more of both than its files: tied weights are built twice, fused ones may be
    stored separately, and two 4-bit numbers may be stored as a byte.
    """
    if hub.is_gguf(path):
        max_tensors, _ = _HUB_LIMITS
        return max_tensors, 8 * path.stat().st_size
    shapes = _read_shapes(path)
    num_stored = sum(math.prod(shape) for shape in shapes)
    return 4 * len(shapes) + 100, 8 * num_stored + 2**20


def _read_shapes(path: Path) -> list[list[int]]:
    shapes: list[list[int]] = []
    for file in weight_files(path):
        shapes.extend(read_header(file)[1].values())
    return shapes


def _checked_empty_model(
    name: str,
    config: PreTrainedConfig,
    limits: tuple[int, int],
    trust_remote_code: bool,
) -> PreTrainedModel:
    """The model without memory; ValueError if it cannot be decoded."""
    from lightning_specdec.models.huggingface import HuggingFaceLM

    try:
        empty_model = without_memory(config, limits, trust_remote_code=trust_remote_code)
        HuggingFaceLM(empty_model)
    except FOREIGN as error:
        raise ValueError(f"{name} cannot be decoded here: {first_line(error)}") from error
    return empty_model


def without_memory(
    config: PreTrainedConfig,
    limits: tuple[int, int] = _NO_LIMITS,
    *,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model that a configuration describes, on the meta device: shapes without numbers.

    Args:
        limits: largest number of tensors, and of numbers in them, to build.

    Raises:
        ValueError: as transformers, if it is not a causal language model; or it is far larger than
            its weights.
    """
    max_tensors, max_numbers = limits
    num_tensors = 0
    num_numbers = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal num_tensors, num_numbers
        if parameter is None:
            return
        num_tensors += 1
        num_numbers += parameter.numel()
        if num_tensors > max_tensors or num_numbers > max_numbers:
            raise ValueError("its config.json describes a model far larger than its weight files")

    counting = nn.modules.module.register_module_parameter_registration_hook(count)
    with counting, torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=trust_remote_code)


def measure(model: PreTrainedModel) -> ModelSize:
    """The size of a model of transformers, with or without memory."""
    linears: list[Any] = [module for module in model.modules() if is_linear(module)]
    embedding_ids: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            embedding_ids.add(id(module.weight))

    # An output head that is tied to the embedding keeps the embedding's weight when quantized.
    separate_sizes: dict[int, int] = {}
    for linear in linears:
        if id(linear.weight) not in embedding_ids:
            separate_sizes[id(linear.weight)] = linear.weight.numel()

    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelSize(
        parameters=num_parameters,
        kept_parameters=num_parameters - sum(separate_sizes.values()),
        matrix_parameters=sum(linear.weight.numel() for linear in linears),
    )


def load(examined: Examined) -> HuggingFaceLM:
    """Read the weights of an examined model, without checking the memory again."""
    name = examined.source
    with quiet():
        hub.download_weights(name, examined.path)
        if not hub.is_gguf(examined.path):
            _read_shapes(examined.path)  # checks the headers of what was downloaded
        with Activity(f"reading the weights of {name}"):
            model, report = _read_weights(examined)
    _check_report(name, report, examined.config)
    if examined.adapter is not None:
        model = merge_adapter(model, examined.adapter)

    language_model = _with_tokenizer(model, examined).to(examined.device)
    if examined.quantization is not None and examined.backend != "openvino":
        quantize(language_model.model, examined.quantization)
    return language_model.eval()


def _read_weights(examined: Examined) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, and transformers' report on how its weights fit."""
    from transformers import GgufConfig

    path = examined.path
    options: dict[str, Any] = {"use_safetensors": True}
    is_gguf = hub.is_gguf(path)
    if is_gguf:
        options = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        path = path.parent
    elif quantization_method(examined.config) is not None and examined.device != "cpu":
        # Some kernels lay out their weights while they are loaded, on the device.
        options["device_map"] = {"": examined.device}
    try:
        loaded: Any = auto_class(examined.config).from_pretrained(
            path,
            config=examined.config,
            dtype=getattr(torch, examined.dtype),
            local_files_only=True,
            trust_remote_code=examined.trust_remote_code,
            # `_check_report` refuses these by name.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    except FOREIGN as error:
        raise ValueError(f"{examined.source} cannot be loaded: {first_line(error)}") from error
    model, report = loaded
    if is_gguf:
        # The weights are unpacked, so that this is a plain model.
        vars(model.config).pop("quantization_config", None)
    return model, report


_NUM_PREDICTION_LAYERS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Settings that list prediction layers, also in families for which transformers has none."""


def _check_report(name: str, report: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raise ValueError if weights are missing or have the wrong shape; log those left over.

    Prediction layers that the config lists are not left over: a drafter loads them. Nor are the
    parts for images and sound of a model that is loaded for texts only.
    """
    problems = {
        "missing_keys": "lack",
        "mismatched_keys": "have another shape than its config for",
    }
    for kind, problem in problems.items():
        keys = sorted(report[kind], key=str)
        if keys:
            raise ValueError(
                f"the weights of {name} {problem} {keys[0]} ({len(keys)} in all): download it again"
            )
    unexpected_keys = sorted(report["unexpected_keys"])
    text_config = config.get_text_config()
    if text_config is not config:
        unexpected_keys = [key for key in unexpected_keys if _TEXT_PART.search(key)]
    if any(getattr(text_config, name, None) for name in _NUM_PREDICTION_LAYERS):
        num_layers = getattr(text_config, "num_hidden_layers", None)
        unexpected_keys = [
            key for key in unexpected_keys if not is_of_prediction_layer(key, num_layers)
        ]
    if unexpected_keys:
        log.warning(
            "%s contains %d weights that its config has no place for, as %s",
            name,
            len(unexpected_keys),
            unexpected_keys[0],
        )


def without_weights(examined: Examined) -> HuggingFaceLM:
    """An examined model on the meta device, for another program to compute with.

    It has the sizes and the tokenizer.
    """
    with quiet():
        empty_model = without_memory(examined.config, trust_remote_code=examined.trust_remote_code)
    return _with_tokenizer(empty_model.to(getattr(torch, examined.dtype)), examined)


def _with_tokenizer(model: PreTrainedModel, examined: Examined) -> HuggingFaceLM:
    from lightning_specdec.models.huggingface import HuggingFaceLM

    tokenizer = None
    with quiet():
        if TextTokenizer.is_in(examined.path):
            tokenizer = TextTokenizer.load(
                examined.path, trust_remote_code=examined.trust_remote_code
            )
        if examined.adapter is not None and TextTokenizer.is_in(examined.adapter.path):
            # The adapter was trained with this one, whose chat template may be another.
            tokenizer_of_model = tokenizer
            tokenizer = TextTokenizer.load(examined.adapter.path)
            if tokenizer_of_model is not None:
                tokenizer.eos |= tokenizer_of_model.eos
    language_model = HuggingFaceLM(model, tokenizer=tokenizer)
    language_model.origin = Origin(examined.source, examined.path, examined.adapter)
    return language_model


def check_openvino(device: str | torch.device, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError unless OpenVINO's release is right and runs this type on this device."""
    version = metadata.version("openvino") if find_spec("openvino") else None
    if version is None or not version.startswith(OPENVINO):
        problem = "is not installed" if version is None else f"is of release {version}"
        command = f"{sys.executable} -m pip install 'openvino~={OPENVINO}.0' nncf"
        raise ValueError(
            f"--backend openvino needs OpenVINO {OPENVINO}, which {problem}: {command}"
        )
    if torch.device(device).type != "cpu":
        raise ValueError(
            f"--backend openvino runs on a CPU, not on {device}: drop --device, or use "
            "--backend torch"
        )
    if dtype is not None and dtype not in OPENVINO_DTYPES:
        supported = [str(kind).removeprefix("torch.") for kind in OPENVINO_DTYPES]
        dtype_name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"OpenVINO computes in {' or '.join(supported)}, got {dtype_name}: set --dtype"
        )

    # With AMX, OpenVINO's gated MLP divides by threads // 2.
    num_threads = min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
    if dtype == torch.bfloat16 and num_threads == 1 and torch.cpu._is_amx_tile_supported():
        raise ValueError(
            "OpenVINO crashes in bfloat16 on one thread of this processor: set --threads 2 or "
            "--backend torch"
        )


def in_backend(
    model: HuggingFaceLM,
    backend: str,
    quantization: str | None = None,
    *,
    is_unchanged: bool = False,
) -> HuggingFaceLM:
    """The model itself, or the same in OpenVINO, for decoding only.

    Args:
        backend: "torch", "openvino", or "auto": on a CPU with OpenVINO, the faster of the two. It
            is measured once for each model and machine, and kept in the cache directory.
        quantization: of the weights in OpenVINO; torch's are quantized while they are loaded.
        is_unchanged: whether the model has just been loaded by name, and nobody else has it yet. If
            its conversion is in the cache, its layers' weights are then not read.

    Raises:
        ValueError: OpenVINO was requested and cannot run the model.
    """
    if backend == "auto":
        can_choose = quantization is None and _can_run_in_openvino(model)
        backend = "torch"
        if can_choose:
            backend = faster_backend(model, is_unchanged=is_unchanged)
    if backend == "torch":
        return model
    from lightning_specdec.models.openvino import OpenVINOLM

    return OpenVINOLM.of(model, quantization, is_unchanged=is_unchanged)


def _can_run_in_openvino(model: HuggingFaceLM) -> bool:
    """Whether OpenVINO may be the faster backend, as far as the weights need not be read for it."""
    try:
        check_openvino(model.device, model.dtype)
    except ValueError:
        return False
    is_plain = quantization_method(model.model.config) is None
    return is_plain and model.num_parameters > MOST_SMALL
