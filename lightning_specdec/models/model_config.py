"""Configurations of transformers models: read from config.json, or made of plain values of unknown origin.

Nothing that a file says is run or fetched, and every size is bounded before it is built.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError

from lightning_specdec.config.checks import BUILTIN_ERRORS, require_int
from lightning_specdec.config.models import DTYPES, check_directory
from lightning_specdec.config.settings import nearest
from lightning_specdec.config.terminal import one_line, short

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FOREIGN = (*BUILTIN_ERRORS, StrictDataclassError)
"""What transformers raises over broken files."""
_LARGEST, _MOST_PARTS = 2**24, 1024
"""Of any integer; of the number of layers, experts and heads, each of which takes time to build."""
_PARTS, _SIZES = ("layer", "expert", "head", "block"), ("dim", "size", "channels")
_MOST_VALUES, _LONGEST, _DEEPEST = 20_000, 1000, 6
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
"""What transformers writes beside a model's sizes, and what does not shape it."""
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")
"""Tokens whose defaults are those of a family's first model; an embedding's padding is never trained."""


_CHATTY = ("transformers", "huggingface_hub", "torchao", "torch.utils._pytree", "accelerate")
"""Loggers that write to stderr while models are loaded."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers and the hub from writing to stderr while it lasts."""
    from transformers.utils import logging as messages

    bars = messages.is_progress_bar_enabled()
    levels = {logger: logger.level for logger in map(logging.getLogger, _CHATTY)}
    messages.disable_progress_bar()  # the hub's too
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        if bars:
            messages.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """A foreign error as one line of bounded length."""
    return short(one_line(error), 200)


def read_config(name: str, path: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration of the model in a directory.

    Raises:
        ValueError: it is missing, broken, of another kind of model, or asks for code that is not trusted.
    """
    from transformers import AutoConfig

    check_directory(str(path))
    try:
        return AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except FOREIGN as error:
        if "trust_remote_code=True" in str(error):
            raise ValueError(
                f"{name} comes with its own Python code, which only runs if you trust it: read it, then pass "
                "--trust_remote_code (trust_remote_code=True)"
            ) from error
        raise ValueError(f"{path}/config.json describes no model: {first_line(error)}") from error


def to_config(values: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration that plain values describe; `model_type` names the family.

    Raises:
        ValueError: there is no such family, it has no such setting, or a value is out of range.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    given = dict(values)
    kind = given.pop("model_type", None)
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        meant = nearest(kind, sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
        raise ValueError(
            f"{str(kind)[:80]!r} is not a model_type of a causal language model of transformers{meant}"
        )
    _check(given, f"the config of a {kind} model")
    if given.get("dtype") not in (None, *DTYPES):
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {given['dtype']!r}")
    family = CONFIG_MAPPING[kind]
    names = _settings(family)
    for name in given:
        if name not in names:
            raise ValueError(f"a {kind} model has no {name[:80]!r}{nearest(name, sorted(names))}")
    # No token is special that the values do not name.
    none = {
        field.name: None
        for field in fields(family)
        if field.name in _SPECIAL and "None" in str(field.type)
    }
    try:
        return family(**{**none, **given})
    except FOREIGN as error:
        raise ValueError(
            f"this is not the config of a {kind!r} model: {first_line(error)}"
        ) from error


def to_values(config: PreTrainedConfig) -> dict[str, Any]:
    """Plain values that `to_config` makes an equal configuration of."""
    names = _settings(type(config)) - _RECORDS
    kept = {key: value for key, value in config.to_diff_dict().items() if key in names}
    return {"model_type": config.model_type, **json.loads(json.dumps(kept))}


def _settings(kind: type[PreTrainedConfig]) -> set[str]:
    """The settings that a family has."""
    names = {field.name for field in fields(kind)} | set(kind.attribute_map)
    return {name for name in names if not name.startswith("_")} | _LEGACY


def _check(given: Mapping[str, Any], where: str) -> None:
    """Raise ValueError unless these are plain values, in range and not too many, that run and fetch nothing."""
    for number, (depth, name, value) in enumerate(_walk(given)):
        inner = (
            depth > 1 and name == "model_type"
        )  # a model within a model may have refused settings
        if inner or name.startswith("_") or name.endswith("implementation") or name in _REFUSED:
            raise ValueError(
                f"{where} says {name[:80]!r}, which a new model does not take: drop it"
            )
        plain = isinstance(value, Mapping | list | tuple | str | int | float | None)
        if not plain or number > _MOST_VALUES or depth > _DEEPEST or len(name) > _LONGEST:
            raise ValueError(
                f"{where} has too many values, or {name[:80]!r} is nested too deeply or no plain value"
            )
        if isinstance(value, str) and len(value) > _LONGEST:
            raise ValueError(f"{where} has a {name!r} that is too long")
        if isinstance(value, int) and not isinstance(value, bool):
            counts_parts = any(part in name for part in _PARTS) and not any(
                size in name for size in _SIZES
            )
            most = _MOST_PARTS if counts_parts else _LARGEST
            require_int(name, value, -most, most)


def _walk(value: object, name: str = "", depth: int = 0) -> Iterator[tuple[int, str, object]]:
    """Every value with its depth and its name; those of a list have the list's."""
    yield depth, name, value
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _walk(each, str(key), depth + 1)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _walk(each, name, depth + 1)
