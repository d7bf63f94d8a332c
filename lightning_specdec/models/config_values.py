"""Plain values -> transformers' configuration of a new causal language model, and back.

The values may be a stranger's: nothing they say is run or fetched, and no size is absurd.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_specdec.checks import require_int
from lightning_specdec.models.config_file import FOREIGN, first_line

_LARGEST = 2**24
"""Of any integer: more than a model's widths, tokens and positions, and less than what overflows."""
_MOST_PARTS = 1024
"""Of layers, experts and heads, each of which takes time to build."""
_PARTS, _SIZES = ("layer", "expert", "head", "block"), ("dim", "size", "channels")
_MOST_VALUES = 20_000
_LONGEST = 1000
"""Of a text, in letters."""
_DEEPEST = 6
_LEGACY = {"rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_emb_base", "rotary_pct"}
"""Older names of rotary settings, which transformers still reads."""
_REFUSED = ("auto_map", "quantization_config", "use_pretrained_backbone", "backbone")
"""Settings that run or fetch something; a model within a model could have some of its own."""
_RECORDS = {"transformers_version", "architectures", "dtype", "id2label", "label2id", "problem_type", "return_dict"}
"""What transformers writes beside a model's sizes, and what does not shape it."""
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")
"""Tokens whose defaults are those of a family's first model; an embedding's padding is never trained."""
_DTYPES = (None, "float32", "bfloat16", "float16", "float64")


def to_config(values: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration that the values describe; `model_type` says of which family.

    Raises:
        ValueError: there is no such family, it has no such setting, or a value is out of all range.
    """
    given = dict(values)
    kind = given.pop("model_type", None)
    if not isinstance(kind, str):
        raise ValueError("a model's config needs a model_type, as llama or gpt2")
    if kind not in CONFIG_MAPPING_NAMES or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = difflib.get_close_matches(kind, [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES], n=1)
        meant = f": did you mean {near[0]}?" if near else ", as llama or gpt2"
        raise ValueError(f"{kind[:80]!r} is no model_type of a causal language model of transformers{meant}")
    _check(given, f"the config of a {kind} model")
    if given.get("dtype") not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES[1:]))}, got {given['dtype']!r}")
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[kind](**_known(kind, given))
    except (*FOREIGN, AssertionError, StrictDataclassError) as error:
        raise ValueError(f"this is no config of a {kind!r} model: {first_line(error)}") from error
    return config


def to_values(config: PreTrainedConfig) -> dict[str, Any]:
    """What `to_config` makes an equal configuration of: plain values alone."""
    values = config.to_diff_dict()
    names = _settings(type(config))
    kept = {key: value for key, value in values.items() if key in names and key not in _RECORDS}
    return {"model_type": config.model_type, **_plain(kept)}


def _settings(kind: type[PreTrainedConfig]) -> set[str]:
    """The settings that a family has."""
    own = {field.name for field in fields(kind)} | inspect.signature(kind).parameters.keys()
    return {name for name in own | set(kind.attribute_map) if not name.startswith("_")} | _LEGACY


def _known(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """The values, if the family has all of these settings; no token is special that they do not name."""
    family = CONFIG_MAPPING[kind]
    names = _settings(family)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, sorted(names), n=1)
            meant = f"did you mean {near[0]}?" if near else "see its configuration in transformers"
            raise ValueError(f"a {kind} model has no {name[:80]!r}: {meant}")
    none = {field.name: None for field in fields(family) if field.name in _SPECIAL and "None" in str(field.type)}
    return {**none, **given}


def _check(value: object, where: str, *, name: str = "", depth: int = 0) -> int:
    """Raise ValueError unless these are plain values in range; gives their number."""
    if isinstance(value, Mapping | list | tuple):
        if depth == _DEEPEST:
            raise ValueError(f"{where} is nested too deeply")
        total = 1
        parts = value.items() if isinstance(value, Mapping) else ((name, each) for each in value)
        for key, each in parts:
            if not isinstance(key, str | int) or len(str(key)) > _LONGEST:
                raise ValueError(f"{where} has a name that is none: {str(key)[:80]!r}")
            text = str(key)
            inner = depth > 0 and text == "model_type"
            if inner or text.startswith("_") or text.endswith("implementation") or text in _REFUSED:
                raise ValueError(f"{where} says {text[:80]!r}, which a new model does not take: drop it")
            total += _check(each, where, name=text, depth=depth + 1)
            if total > _MOST_VALUES:
                raise ValueError(f"{where} has more than {_MOST_VALUES} values")
        return total
    if isinstance(value, bool) or value is None:
        return 1
    if isinstance(value, int):
        counts_parts = any(part in name for part in _PARTS) and not any(size in name for size in _SIZES)
        most = _MOST_PARTS if counts_parts else _LARGEST
        require_int(name or where, value, -most, most)
    elif isinstance(value, str):
        if len(value) > _LONGEST:
            raise ValueError(f"{where} has a text of {len(value)} letters for {name}")
    elif not isinstance(value, float):
        raise ValueError(f"{where} has a {type(value).__name__} for {name}, which is no plain value")
    return 1


def _plain(value: Any) -> Any:
    """Tuples as lists; keys as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
