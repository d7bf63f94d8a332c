"""A network <-> its description in plain values: a class of our registries and its arguments.

What a description names is looked up, never imported, and nothing in it runs.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from lightning_specdec.drafters import DRAFTERS, Drafter
from lightning_specdec.models import MODELS, LanguageModel

_SPEC = {"class", "arguments"}
_DEEPEST, _MOST_STAGES = 8, 16


def spec(module: LanguageModel | Drafter) -> dict[str, Any]:
    """The description of a model or a drafter.

    Raises:
        ValueError: its class is in no registry.
    """
    name = type(module).__name__
    if _registered().get(name) is not type(module):
        raise ValueError(f"a checkpoint cannot hold a {name}: it could not be built again (see MODELS and DRAFTERS)")
    return {"class": name, "arguments": {key: _plain_argument(value) for key, value in module.arguments().items()}}


def _plain_argument(value: Any) -> Any:
    if isinstance(value, LanguageModel | Drafter):
        return spec(value)
    if isinstance(value, list | tuple):
        return [_plain_argument(each) for each in value]
    return value


def _registered() -> Mapping[str, Any]:
    """Every class that a description may name, as an argument of another."""
    return ChainMap(MODELS, DRAFTERS)  # type: ignore[arg-type]


def build(described: object, registry: Mapping[str, Any], depth: int = 0) -> Any:
    """An object of a registered class from its description.

    Raises:
        ValueError, TypeError: it describes none; what the constructors raise besides is in `checkpoint_weights.BROKEN`.
    """
    if not isinstance(described, dict) or not isinstance(described.get("arguments"), dict):
        raise ValueError(f"expected a class and its arguments, got {short(repr(described), 80)}")
    name = described.get("class")
    if not isinstance(name, str) or name not in registry:
        raise ValueError(f"{short(repr(name), 80)} is none of the classes that may stand there: {', '.join(registry)}")
    arguments = {key: _built_argument(value, depth) for key, value in described["arguments"].items()}
    built = registry[name](**arguments)
    if foreign := arguments.keys() - built.arguments().keys():
        raise ValueError(f"a checkpoint's {name} has no argument {short(min(foreign), 80)!r}")
    return built


def _built_argument(value: Any, depth: int) -> Any:
    nested = isinstance(value, list) and any(isinstance(each, list | dict) for each in value)
    if nested and (depth >= _DEEPEST or len(value) > _MOST_STAGES):
        raise ValueError("its parts are nested too deeply, or too many")
    if nested:
        return [_built_argument(each, depth + 1) for each in value]
    if isinstance(value, dict) and value.keys() == _SPEC:
        return build(value, _registered(), depth + 1)
    return value


def plain(recipe: object) -> dict[str, Any]:
    """The recipe, if it is a dictionary of plain values and nothing else.

    Raises:
        ValueError: it is not.
    """
    try:
        copied = json.loads(json.dumps(recipe))
    except (TypeError, ValueError, RecursionError):
        copied = None
    if not isinstance(copied, dict):
        raise ValueError("its recipe is no dictionary of plain values")
    return copied


def short(text: str, length: int) -> str:
    """The text, cut where it is longer."""
    return text if len(text) <= length else f"{text[:length]}..."
