"""Which backend decodes a model faster on this machine, measured once and kept in the cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec import __version__
from lightning_specdec.config.activity import Activity
from lightning_specdec.config.files import cache_home, replaced
from lightning_specdec.models.model_config import FOREIGN, first_line
from lightning_specdec.models.state import DecodeState
from lightning_specdec.models.weights import weights_digest

if TYPE_CHECKING:
    from lightning_specdec.models.huggingface import HuggingFaceLM

_NUM_WARMUP_CALLS = 2
_PROMPT_LENGTH = 128

log = logging.getLogger(__name__)


def faster_backend(model: HuggingFaceLM, *, is_unchanged: bool = False) -> str:
    """The backend whose calls on one and on eight tokens take less time together.

    Args:
        model: a model of a dtype that OpenVINO runs as well.
        is_unchanged: see `weights_digest`.
    """
    path = _cache_path(model, is_unchanged)
    seconds = _read(path)
    if seconds is None:
        # This runs the model, which reads all of its weights.
        if not model.takes_apart:
            return "torch"
        from lightning_specdec.models.openvino import OpenVINOLM

        log.info(
            "comparing OpenVINO with torch, once for this model, type and machine: about a minute"
        )
        try:
            models: dict[str, HuggingFaceLM] = {
                "torch": model.packed(),
                "openvino": OpenVINOLM.of(model, is_unchanged=is_unchanged),
            }
            seconds = call_seconds(models)
        except (OSError, *FOREIGN) as error:
            log.warning("%s: using torch", first_line(error))
            return "torch"

        # Without a cache directory, the next start measures again.
        with suppress(OSError), replaced(path) as file:
            file.write(json.dumps(seconds).encode())

    is_openvino_faster = seconds["openvino"] < seconds["torch"]
    return "openvino" if is_openvino_faster else "torch"


def _cache_path(model: HuggingFaceLM, is_unchanged: bool) -> Path:
    """The file for this model, with these versions, on this machine."""
    versions = (torch.__version__, metadata.version("openvino"), __version__)
    machine = (
        torch.backends.cpu.get_cpu_capability(),
        os.cpu_count(),
        torch.get_num_threads(),
    )
    digest = weights_digest(model, is_unchanged=is_unchanged)
    key = repr((digest, model.dtype, versions, machine))
    key_hash = hashlib.sha256(key.encode()).hexdigest()
    return cache_home() / f"backend-{key_hash[:24]}.json"


def _read(path: Path) -> dict[str, float] | None:
    """Seconds of both backends; None if they have not been measured, or the file is damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {name: float(values[name]) for name in ("torch", "openvino")}
    except (OSError, ValueError, TypeError, LookupError):
        return None


@torch.no_grad()
def call_seconds(models: dict[str, HuggingFaceLM], *, repeats: int = 7) -> dict[str, float]:
    """Median seconds of a call on one token and one on eight together, after 128 tokens.

    The models take turns, so that a slow moment of the machine affects all of them.
    """
    vocab_size = min(model.vocab_size for model in models.values())
    prompt = torch.arange(_PROMPT_LENGTH)[None] % vocab_size
    states: dict[str, DecodeState] = {}
    for name, model in models.items():
        states[name] = model.init_state(1, 2 * _PROMPT_LENGTH)
        model(prompt, states[name], logits_for=slice(-1, None))

    seconds: dict[str, list[float]] = {name: [] for name in models}
    num_rounds = _NUM_WARMUP_CALLS + repeats
    with Activity("comparing OpenVINO with torch", num_rounds, unit="rounds") as progress:
        for _ in range(num_rounds):
            _time_calls(models, states, prompt, seconds)
            progress.advance()

    medians: dict[str, float] = {}
    for name, model_seconds in seconds.items():
        medians[name] = statistics.median(model_seconds[_NUM_WARMUP_CALLS:])
    return medians


def _time_calls(
    models: dict[str, HuggingFaceLM],
    states: dict[str, DecodeState],
    prompt: Tensor,
    seconds: dict[str, list[float]],
) -> None:
    """Append the seconds of each model's calls, made once."""
    for name, model in models.items():
        started = time.perf_counter()
        for num_tokens in (1, 8):
            next_tokens = prompt[:, :num_tokens]
            model(next_tokens, states[name])
            states[name].truncate([_PROMPT_LENGTH])
        seconds[name].append(time.perf_counter() - started)
