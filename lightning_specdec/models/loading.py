"""A model's name or directory -> a `HuggingFaceLM`, or one line that says why not.

No weight is read before the files are known to be whole and the memory to suffice.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_specdec.memory import QUANTIZATIONS, ModelSize, available_bytes, measure, require_memory, without_memory
from lightning_specdec.models import hub, safetensors_file
from lightning_specdec.models.config_file import FOREIGN, first_line, read_config
from lightning_specdec.models.identity import Origin
from lightning_specdec.models.quantization import INSTALL

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from lightning_specdec.models.huggingface import HuggingFaceLM
    from lightning_specdec.text.tokenizer import TextTokenizer

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""What models may compute in."""
_STORED = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_CHATTY = ("huggingface_hub", "torchao", "torch.utils._pytree", "accelerate")
"""Libraries below transformers that write to stderr while models are loaded."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examined:
    """A model that is there and can be loaded, none of its weights read.

    Args:
        source: its name, as it was given.
        found: where its files are.
        config: transformers' own.
        dtype: what it will compute in.
        quantization: how its matrices will be stored: int8, int4, or None.
        size: what decides its memory.
        trust_remote_code: whether its own Python code may run.
    """

    source: str
    found: hub.Found
    config: PreTrainedConfig
    dtype: str
    quantization: str | None
    size: ModelSize
    trust_remote_code: bool

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights once they are loaded."""
        return self.size.weight_bytes(self.dtype, self.quantization)

    @property
    def loading_bytes(self) -> int:
        """Bytes while they are loaded: what is quantized is read as it is first."""
        return self.size.weight_bytes(self.dtype)


def load_model(
    source: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    quantization: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> HuggingFaceLM:
    """A causal language model of transformers with its weights and, where it has one, its tokenizer.

    Args:
        source: a directory that `save_pretrained` wrote, or a model's name on the hub.
        dtype: what it computes in; as it is stored when None.
        device: where it goes.
        quantization: "int8" or "int4" for weights stored so, None for plain ones.
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether the model's own Python code may run; without it such a model is refused.

    Raises:
        ValueError: it is not there, is no causal language model, is damaged, or does not fit the memory.
    """
    check_quantization(quantization, device)
    examined = examine(
        source, dtype=dtype, quantization=quantization, revision=revision, trust_remote_code=trust_remote_code
    )
    available = available_bytes(str(device))
    require_memory(examined.source, weights=examined.loading_bytes, device=str(device), available=available)
    return load(examined, device=device)


def examine(
    source: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    quantization: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Examined:
    """Find a model and check all that can be checked without its weights; arguments and errors as of `load_model`."""
    name = os.fspath(source)
    wanted = None if dtype is None else str(dtype).removeprefix("torch.")
    if wanted is not None and wanted not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {wanted!r}")
    with quiet():
        from lightning_specdec.models.huggingface import HuggingFaceLM

        found = hub.find(source, revision=revision, code=trust_remote_code)
        config = read_config(name, found.path, trust_remote_code)
        stored = {} if found.hub_id else safetensors_file.read_headers(found.path)
        if found.hub_id and not any(file.endswith(".safetensors") for file, _ in found.weights):
            raise ValueError(f"{name} holds no weights in safetensors files: choose a model that has them")
        try:
            empty = without_memory(config, trust_remote_code=trust_remote_code)
        except FOREIGN as error:
            raise ValueError(f"{name} is no model that can be built: {first_line(error)}") from error
        try:
            HuggingFaceLM(empty)  # which refuses models that cannot take part
        except ValueError as error:
            raise ValueError(f"{name} cannot be decoded here: {first_line(error)}") from error
    return Examined(
        source=name,
        found=found,
        config=config,
        dtype=wanted or _stored_dtype(config, stored),
        quantization=quantization,
        size=measure(empty),
        trust_remote_code=trust_remote_code,
    )


def check_quantization(quantization: str | None, device: str | torch.device) -> None:
    """Raise ValueError for weights that this device has no kernel for, before anything is read."""
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {quantization!r}")
    if quantization is not None and find_spec("torchao") is None:
        raise ValueError(f"quantized weights need torchao: {INSTALL}")
    if quantization == "int4" and torch.device(device).type != "cuda":
        raise ValueError(f"int4 weights have a kernel on a CUDA GPU only, not on {device}: use int8")


def load(examined: Examined, *, device: str | torch.device = "cpu") -> HuggingFaceLM:
    """Read the weights of an examined model; nobody asks again whether they fit the memory."""
    name, path = examined.source, examined.found.path
    with quiet():
        from transformers import AutoModelForCausalLM

        from lightning_specdec.models.huggingface import HuggingFaceLM

        hub.download_weights(examined.found)
        safetensors_file.read_headers(path)
        tokenizer = _tokenizer(path, examined.trust_remote_code)
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
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"the weights of {name} lack {missing[0]} ({len(missing)} are missing): download it again")
    if wrong := sorted(report["mismatched_keys"]):
        key, stored, wanted = wrong[0]
        shapes = f"{tuple(stored)}, its config says {tuple(wanted)}"
        raise ValueError(
            f"the weight {key} of {name} has the shape {shapes} ({len(wrong)} do not fit): download it again"
        )
    if foreign := sorted(report["unexpected_keys"]):
        log.warning("%s holds %d weights that its config has no place for, as %s", name, len(foreign), foreign[0])
    built = HuggingFaceLM(model, tokenizer=tokenizer).to(device)
    built.origin = Origin(name, path)
    if examined.quantization is not None:
        from lightning_specdec.models.quantization import quantize

        quantize(built.model, examined.quantization)
    return built.eval()


def _tokenizer(path: Path, trust_remote_code: bool) -> TextTokenizer | None:
    """The model's tokenizer; None where it has none, and is decoded by tokens alone."""
    from lightning_specdec.text.tokenizer import TextTokenizer

    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return TextTokenizer.load(path, trust_remote_code=trust_remote_code)


def _stored_dtype(config: PreTrainedConfig, stored: dict[str, safetensors_file.StoredTensor]) -> str:
    """What the weights are stored in: as the config says, or as most of them are."""
    named = getattr(config.get_text_config(), "dtype", None)
    if named is not None and (name := str(named).removeprefix("torch.")) in DTYPES:
        return name
    counts: Counter[str] = Counter()
    for tensor in stored.values():
        if tensor.dtype in _STORED:
            counts[_STORED[tensor.dtype]] += tensor.numel
    return counts.most_common(1)[0][0] if counts else "float32"


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers and the hub from writing to stderr while it lasts, unless debugging messages are wanted."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as messages

    if logging.getLogger("lightning_specdec").isEnabledFor(logging.DEBUG):
        yield
        return
    level, bars, hub_bars = (
        messages.get_verbosity(),
        messages.is_progress_bar_enabled(),
        not are_progress_bars_disabled(),
    )
    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels = [logger.level for logger in loggers]
    messages.set_verbosity(logging.CRITICAL)
    messages.disable_progress_bar()
    disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        messages.set_verbosity(level)
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
        if bars:
            messages.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()
