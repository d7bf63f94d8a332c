"""A model's config.json -> transformers' configuration, if it is one of a causal language model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FOREIGN = (
    ArithmeticError,
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
"""What transformers raises over files of somebody else's making."""


def read_config(name: str, path: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration of the model in a directory.

    Raises:
        ValueError: it is missing, broken, of another kind of model, or asks for code that is not trusted.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    values = _read_json(name, path)
    kind = values.get("model_type")
    own_code = isinstance(values.get("auto_map"), dict) and kind not in CONFIG_MAPPING_NAMES
    if own_code and not trust_remote_code:
        raise ValueError(
            f"{name} comes with Python code of its own, which is not run unless you trust it: read it, then say "
            "--trust_remote_code (trust_remote_code=True)"
        )
    if not own_code:
        if not isinstance(kind, str):
            raise ValueError(f"{path / 'config.json'} names no model_type: it is no config of a transformers model")
        if kind not in CONFIG_MAPPING_NAMES:
            raise ValueError(f"{name} is a {kind!r} model, which transformers {__version__} does not know: update it")
        classes = values.get("architectures") or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)]
        if not set(classes) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
            raise ValueError(
                f"{name} is a {classes[0] or kind}, which is no causal language model: take one that generates text"
            )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (*FOREIGN, StrictDataclassError) as error:
        raise ValueError(f"{path / 'config.json'} describes no model: {first_line(error)}") from error
    return config


def _read_json(name: str, path: Path) -> dict[str, Any]:
    """What config.json says, as plain values."""
    file = path / "config.json"
    if not file.is_file():
        if (path / "adapter_config.json").is_file():
            raise ValueError(f"{name} holds an adapter, not a whole model: merge it into its base model first")
        there = sorted(entry.name for entry in path.iterdir())
        listed = ", ".join(there[:5]) + (", ..." if len(there) > 5 else "") if there else "nothing"
        raise ValueError(f"{name} is no model's directory: it has no config.json (it holds {listed})")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        place = f"line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else "not text"
        raise ValueError(f"{file} is no JSON ({place}): copy or download it again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} is no config of a model: expected a JSON object, got {type(values).__name__}")
    return values


def first_line(error: BaseException) -> str:
    """An error of somebody else's as one line of bounded length."""
    text = " ".join(str(error).split())
    return (text if len(text) <= 200 else f"{text[:200]}...") or type(error).__name__
