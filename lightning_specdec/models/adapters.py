"""Adapters of PEFT: found and checked before a model is loaded, then merged into its weights."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_specdec.config import hub
from lightning_specdec.models.model_config import FOREIGN, first_line, quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PROMPT_KINDS = (
    "ADAPTION_PROMPT",
    "CPT",
    "MULTITASK_PROMPT_TUNING",
    "P_TUNING",
    "PREFIX_TUNING",
    "PROMPT_TUNING",
)
"""Kinds that add to the model's inputs, so that no weight can take them up."""
_NUM_COMPARED_TOKENS = 4
_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
_ROUGH_TOLERANCE = 0.1
"""Largest difference of logits, relative to the largest, between a merged and a live adapter; that
of types with fewer digits."""


@dataclass(frozen=True)
class Adapter:
    """An adapter on this machine.

    Args:
        source: the directory or Hub name that the user passed.
        path: the directory with its files.
    """

    source: str
    path: Path

    @cached_property
    def sha256(self) -> str:
        """A hash of its settings and weights."""
        digest = hashlib.sha256()
        for name in (CONFIG, WEIGHTS):
            digest.update((self.path / name).read_bytes())
        return digest.hexdigest()


def find_adapter(source: str | os.PathLike[str], *, offline: bool = False) -> Adapter:
    """The adapter of a directory that PEFT's `save_pretrained` wrote, or of a Hub repository.

    Args:
        offline: whether to leave the Hub alone, so that only an earlier download is found.

    Raises:
        ValueError: there is none, it cannot be merged, or PEFT is not installed.
    """
    name = os.fspath(source)
    path = hub.find_adapter(source, (CONFIG, WEIGHTS), offline=offline)
    if not (path / CONFIG).is_file():
        hint = ""
        if (path / "config.json").is_file():
            hint = "; this is a whole model: give it as --target"
        raise ValueError(f"{name} is no adapter: it has no {CONFIG}, which PEFT writes{hint}")
    try:
        settings = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        kind = settings["peft_type"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{path / CONFIG} is damaged: copy or download it again") from error

    if kind in _PROMPT_KINDS:
        raise ValueError(
            f"{name} is an adapter of kind {kind}, which changes the model's inputs: only adapters "
            "inside the model are supported, such as LoRA"
        )
    if not (path / WEIGHTS).is_file():
        raise ValueError(f"{name} has no {WEIGHTS}: save it again with a current version of PEFT")
    if find_spec("peft") is None:
        raise ValueError(f"an adapter needs PEFT: {sys.executable} -m pip install peft")
    return Adapter(name, path)


def merge_adapter(model: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """The model with an adapter merged into its weights, which are changed in place.

    Raises:
        ValueError: the adapter does not fit the model, or merging changes the output.
    """
    with quiet(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import peft

        try:
            wrapped: Any = peft.PeftModel.from_pretrained(
                model, str(adapter.path), local_files_only=True
            )
            unused_keys = _unused_keys(wrapped, adapter)
            live_logits = _logits(wrapped)
            merged: PreTrainedModel = wrapped.merge_and_unload(safe_merge=True)
        except FOREIGN as error:
            reason = first_line(error)
            raise ValueError(f"the adapter {adapter.source} does not fit: {reason}") from error

    for warning in caught:
        # PEFT only warns, and would merge random or empty weights.
        if "missing adapter keys" in str(warning.message):
            raise ValueError(
                f"the adapter {adapter.source} does not fit: {first_line(warning.message)}"  # type: ignore[arg-type]
            )
    if unused_keys:
        raise ValueError(
            f"the adapter {adapter.source} does not fit: the model has no place for "
            f"{unused_keys[0]} ({len(unused_keys)} in all): it was trained for another model"
        )
    _check_merged(_logits(merged), live_logits, adapter)
    return merged


def _unused_keys(wrapped: Any, adapter: Adapter) -> list[str]:
    """Names of the adapter's weights that no layer of the model uses, which PEFT does not report.

    They are those of other layers, for example, if the adapter is of a deeper model.
    """
    import peft

    weights = peft.load_peft_weights(str(adapter.path), device="cpu")
    result: Any = peft.set_peft_model_state_dict(wrapped, weights)
    return sorted(result.unexpected_keys)


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    """The model's logits for a few tokens."""
    vocab_size = model.config.get_text_config().vocab_size
    tokens = torch.arange(_NUM_COMPARED_TOKENS, device=model.device)[None] % vocab_size
    logits: torch.Tensor = model.eval()(input_ids=tokens, use_cache=False).logits
    return logits


def _check_merged(merged: torch.Tensor, live: torch.Tensor, adapter: Adapter) -> None:
    """Raise ValueError if a model computes something else once its adapter is merged.

    A merge into a head changes the embedding as well, for example, if both share their weights.
    """
    tolerance = _TOLERANCES.get(live.dtype, _ROUGH_TOLERANCE)
    difference = (merged - live).abs().max()
    # Written so that NaN is a difference.
    if not difference <= tolerance * live.abs().max():
        raise ValueError(
            f"the adapter {adapter.source} cannot be merged: the output would change by "
            f"{float(difference / live.abs().max()):.0%} of the largest logit, as for a head that "
            "shares its weights with the embedding"
        )
