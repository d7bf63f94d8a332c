"""Configurations of transformers models: read from config.json, or made of plain values of unknown origin.

Nothing that a file says is run or fetched, and every size is bounded before it is built.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_specdec.config.checks import require_int
from lightning_specdec.config.models import DTYPES, check_directory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FOREIGN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What transformers raises over broken files."""
_LARGEST, _MOST_PARTS = 2**24, 1024
"""Of any integer; of the number of layers, experts and heads, each of which takes time to build."""
_PARTS, _SIZES = ("layer", "expert", "head", "block"), ("dim", "size", "channels")
_MOST_VALUES, _LONGEST, _DEEPEST = 20_000, 1000, 6
_LEGACY = {"rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_emb_base", "rotary_pct"}
"""Older names of rotary settings, which transformers still reads."""
_REFUSED = ("auto_map", "quantization_config", "use_pretrained_backbone", "backbone")
"""Settings that run or fetch something."""
_RECORDS = {"transformers_version", "architectures", "dtype", "id2label", "label2id", "problem_type", "return_dict"}
"""What transformers writes beside a model's sizes, and what does not shape it."""
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")
"""Tokens whose defaults are those of a family's first model; an embedding's padding is never trained."""


_CHATTY = ("huggingface_hub", "torchao", "torch.utils._pytree", "accelerate")
"""Libraries below transformers that write to stderr while models are loaded."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers and the hub from writing to stderr while it lasts, unless debugging messages are wanted."""
    from transformers.utils import logging as messages

    if logging.getLogger(__name__).isEnabledFor(logging.DEBUG):
        yield
        return
    bars, verbosity = messages.is_progress_bar_enabled(), messages.get_verbosity()
    levels = {logger: logger.level for logger in map(logging.getLogger, _CHATTY)}
    messages.set_verbosity(logging.CRITICAL)
    messages.disable_progress_bar()  # the hub's too
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        messages.set_verbosity(verbosity)
        for logger, level in levels.items():
            logger.setLevel(level)
        if bars:
            messages.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """A foreign error as one line of bounded length."""
    text = " ".join(str(error).split())
    return (text if len(text) <= 200 else f"{text[:200]}...") or type(error).__name__


def read_config(name: str, path: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration of the model in a directory.

    Raises:
        ValueError: it is missing, broken, of another kind of model, or asks for code that is not trusted.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    file = path / "config.json"
    if not file.is_file():
        check_directory(str(path))
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (*FOREIGN, StrictDataclassError) as error:
        if "trust_remote_code=True" in str(error):
            raise ValueError(
                f"{name} comes with its own Python code, which only runs if you trust it: read it, then pass "
                "--trust_remote_code (trust_remote_code=True)"
            ) from error
        raise ValueError(f"{file} describes no model: {first_line(error)}") from error
    return config


def to_config(values: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration that plain values describe; `model_type` names the family.

    Raises:
        ValueError: there is no such family, it has no such setting, or a value is out of range.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    given = dict(values)
    kind = given.pop("model_type", None)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING_NAMES or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        meant = _nearest(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "name one, as llama or gpt2")
        raise ValueError(f"{str(kind)[:80]!r} is not a model_type of a causal language model of transformers: {meant}")
    _check(given, f"the config of a {kind} model")
    if given.get("dtype") not in (None, *DTYPES):
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {given['dtype']!r}")
    family = CONFIG_MAPPING[kind]
    names = _settings(family)
    for name in given:
        if name not in names:
            meant = _nearest(name, names, "see its configuration in transformers")
            raise ValueError(f"a {kind} model has no {name[:80]!r}: {meant}")
    # No token is special that the values do not name.
    none = {field.name: None for field in fields(family) if field.name in _SPECIAL and "None" in str(field.type)}
    try:
        config: PreTrainedConfig = family(**{**none, **given})
    except (*FOREIGN, StrictDataclassError) as error:
        raise ValueError(f"this is not the config of a {kind!r} model: {first_line(error)}") from error
    return config


def _nearest(name: object, names: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(str(name), sorted(names), n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def to_values(config: PreTrainedConfig) -> dict[str, Any]:
    """Plain values that `to_config` makes an equal configuration of."""
    names = _settings(type(config)) - _RECORDS
    kept = {key: value for key, value in config.to_diff_dict().items() if key in names}
    return {"model_type": config.model_type, **_plain(kept)}


def _settings(kind: type[PreTrainedConfig]) -> set[str]:
    """The settings that a family has."""
    own = {field.name for field in fields(kind)} | inspect.signature(kind).parameters.keys()
    return {name for name in own | set(kind.attribute_map) if not name.startswith("_")} | _LEGACY


def _check(value: object, where: str, *, name: str = "", depth: int = 0) -> int:
    """Raise ValueError unless these are plain values in range; gives their number."""
    if isinstance(value, Mapping | list | tuple):
        if depth == _DEEPEST:
            raise ValueError(f"{where} is nested too deeply")
        total = 1
        for key, each in value.items() if isinstance(value, Mapping) else ((name, each) for each in value):
            text = str(key)
            if not isinstance(key, str | int) or len(text) > _LONGEST:
                raise ValueError(f"{where} has a key that is not a name: {text[:80]!r}")
            inner = depth > 0 and text == "model_type"  # a model within a model may have refused settings
            if inner or text.startswith("_") or text.endswith("implementation") or text in _REFUSED:
                raise ValueError(f"{where} says {text[:80]!r}, which a new model does not take: drop it")
            total += _check(each, where, name=text, depth=depth + 1)
            if total > _MOST_VALUES:
                raise ValueError(f"{where} has more than {_MOST_VALUES} values")
        return total
    if isinstance(value, int) and not isinstance(value, bool):
        counts_parts = any(part in name for part in _PARTS) and not any(size in name for size in _SIZES)
        most = _MOST_PARTS if counts_parts else _LARGEST
        require_int(name or where, value, -most, most)
    elif not isinstance(value, str | float | bool | None) or len(value if isinstance(value, str) else "") > _LONGEST:
        raise ValueError(f"{where} has a {type(value).__name__} for {name} that is too long, or not a plain value")
    return 1


def _plain(value: Any) -> Any:
    """Tuples as lists; keys as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
