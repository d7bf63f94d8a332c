"""Configurations of transformers models, from config.json or from plain values of unknown origin.

Nothing that a file names is run or fetched, and every size is bounded before it is built.
"""

from __future__ import annotations

import json
import logging
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError

from lightning_specdec.config.checks import BUILTIN_ERRORS, require_int
from lightning_specdec.config.hub import is_gguf
from lightning_specdec.config.models import DTYPES, check_directory
from lightning_specdec.config.settings import nearest
from lightning_specdec.config.terminal import one_line, short

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FOREIGN = (*BUILTIN_ERRORS, StrictDataclassError)
"""What transformers raises for broken files."""
_MAX_INTEGER = 2**24
"""Limit of any integer."""
_MAX_PARTS = 1024
"""Limit of the number of layers, experts and heads, each of which takes time to build."""
_PARTS = ("layer", "expert", "head", "block")
"""Words in the names of settings that count parts..."""
_SIZES = ("dim", "size", "channels")
"""... unless one of these words follows, as in head_dim."""
_MAX_VALUES = 20_000
_MAX_LENGTH = 1000
"""Limit of the length of a name or of a text."""
_MAX_DEPTH = 6
_LEGACY = {"rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_emb_base", "rotary_pct"}
"""Older names of rotary settings, which transformers still reads."""
_REFUSED = ("auto_map", "quantization_config", "use_pretrained_backbone", "backbone")
"""Settings that run or fetch something."""
_RECORDS = {
    "transformers_version",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "problem_type",
    "return_dict",
}
"""What transformers writes in addition to a model's sizes, and what does not shape it."""
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")
"""Special tokens: their defaults are those of a family's first model, and an embedding never
trains the row of its padding token."""
_LOGGERS = ("transformers", "huggingface_hub", "torchao", "torch.utils._pytree", "accelerate")
"""Loggers that write to stderr while models are loaded."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers and the Hub from writing to stderr inside the block."""
    from transformers.utils import logging as transformers_logging

    shows_progress = transformers_logging.is_progress_bar_enabled()
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    transformers_logging.disable_progress_bar()  # of the Hub, too
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if shows_progress:
            transformers_logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """An error of another library as one line of bounded length."""
    return short(one_line(error), 200)


def read_config(name: str, path: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration of the model in a directory or a GGUF file.

    Raises:
        ValueError: it is missing, broken, of another kind of model, or needs code that is not
            trusted.
    """
    from transformers import AutoConfig

    if is_gguf(path):
        return _read_gguf_config(path)
    check_directory(str(path))
    try:
        return AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except FOREIGN as error:
        if "trust_remote_code=True" in str(error):
            raise ValueError(
                f"{name} comes with its own Python code, which only runs if you trust it: read it, "
                "then pass --trust_remote_code (trust_remote_code=True)"
            ) from error
        raise ValueError(f"{path}/config.json describes no model: {first_line(error)}") from error


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that builds and loads the model of a configuration.

    Families that also read images may have no class for texts only. Their whole model is loaded
    then, and decodes texts.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    own_code = getattr(config, "auto_map", None) or {}
    is_known_for_texts = config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if is_known_for_texts or "AutoModelForCausalLM" in own_code:
        return AutoModelForCausalLM
    names = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if config.model_type in names or "AutoModelForImageTextToText" in own_code:
        return AutoModelForImageTextToText
    # Its error says which families it has.
    return AutoModelForCausalLM


def _read_gguf_config(path: Path) -> PreTrainedConfig:
    from transformers import AutoConfig

    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{path} needs {' and '.join(missing)}: {sys.executable} -m pip install "
            f"{' '.join(missing)}"
        )
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except (*FOREIGN, struct.error) as error:
        raise ValueError(f"{path} describes no model: {first_line(error)}") from error
    return config


def to_config(values: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration that plain values describe; `model_type` names the family.

    Raises:
        ValueError: the family or a setting does not exist, or a value is out of range.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    settings = dict(values)
    family_name = settings.pop("model_type", None)
    is_known = isinstance(family_name, str) and family_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not is_known:
        suggestion = nearest(family_name, sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
        raise ValueError(
            f"{str(family_name)[:80]!r} is not a model_type of a causal language model of "
            f"transformers{suggestion}"
        )
    _check(settings, f"the config of a {family_name} model")
    if settings.get("dtype") not in (None, *DTYPES):
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {settings['dtype']!r}")

    family = CONFIG_MAPPING[family_name]
    names = _settings(family)
    for name in settings:
        if name not in names:
            suggestion = nearest(name, sorted(names))
            raise ValueError(f"a {family_name} model has no {name[:80]!r}{suggestion}")

    # Only tokens that the values name are special.
    special_tokens: dict[str, None] = {}
    for field in fields(family):
        if field.name in _SPECIAL and "None" in str(field.type):
            special_tokens[field.name] = None
    try:
        return family(**{**special_tokens, **settings})
    except FOREIGN as error:
        raise ValueError(
            f"this is not the config of a {family_name!r} model: {first_line(error)}"
        ) from error


def to_values(config: PreTrainedConfig) -> dict[str, Any]:
    """Plain values from which `to_config` makes an equal configuration."""
    names = _settings(type(config)) - _RECORDS
    values: dict[str, Any] = {}
    for name, value in config.to_diff_dict().items():
        if name in names:
            values[name] = value
    return {"model_type": config.model_type, **json.loads(json.dumps(values))}


def _settings(family: type[PreTrainedConfig]) -> set[str]:
    """The names of a family's settings."""
    names = {field.name for field in fields(family)}
    # Some settings have two names, of which only one may be that of a field.
    names |= set(family.attribute_map) | set(family.attribute_map.values())
    return {name for name in names if not name.startswith("_")} | _LEGACY


def _check(values: Mapping[str, Any], where: str) -> None:
    """Raise ValueError unless these are plain values, in range, that run and fetch nothing."""
    for num_before, (depth, name, value) in enumerate(_walk(values)):
        # A model inside the model might have settings that are refused here.
        is_inner_model = depth > 1 and name == "model_type"
        is_private = name.startswith("_") or name.endswith("implementation")
        if is_inner_model or is_private or name in _REFUSED:
            raise ValueError(
                f"{where} contains {name[:80]!r}, which a new model does not accept: drop it"
            )

        # `bool` is an `int`.
        is_plain = isinstance(value, Mapping | list | tuple | str | int | float | None)
        is_too_large = num_before > _MAX_VALUES or depth > _MAX_DEPTH or len(name) > _MAX_LENGTH
        if not is_plain or is_too_large:
            raise ValueError(
                f"{where} has too many values, or {name[:80]!r} is nested too deeply or no plain "
                "value"
            )
        if isinstance(value, str) and len(value) > _MAX_LENGTH:
            raise ValueError(f"{where} has a {name!r} that is too long")

        # A large number of layers would take long to build, a large size of them does not.
        if isinstance(value, int) and not isinstance(value, bool):
            limit = _MAX_PARTS if _counts_parts(name) else _MAX_INTEGER
            require_int(name, value, -limit, limit)


def _counts_parts(name: str) -> bool:
    """Whether a setting is a number of parts, as num_hidden_layers, and not a size of them."""
    names_part = any(part in name for part in _PARTS)
    names_size = any(size in name for size in _SIZES)
    return names_part and not names_size


def _walk(value: object, name: str = "", depth: int = 0) -> Iterator[tuple[int, str, object]]:
    """Every value with its depth and its name. Items of a list have the name of the list."""
    yield depth, name, value
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, str(key), depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _walk(item, name, depth + 1)
