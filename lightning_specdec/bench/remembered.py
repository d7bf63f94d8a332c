"""Calibrations that this machine remembers, so that a pair is measured once."""

from __future__ import annotations

import functools
import hashlib
import logging
import os

import torch

from lightning_specdec import __version__
from lightning_specdec.bench.calibration import calibrate
from lightning_specdec.drafters import Drafter
from lightning_specdec.files import cache_home
from lightning_specdec.inference import Calibration
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, ExactMatch, Sampling

log = logging.getLogger(__name__)


def load_or_measure(
    target: LanguageModel,
    drafter: Drafter,
    *,
    path: str | os.PathLike[str] | None = None,
    batch_size: int = 1,
    rule: AcceptanceRule | None = None,
    sampling: Sampling | None = None,
) -> Calibration:
    """The calibration of a file; or of this machine, measured once for each pair and its settings, then remembered.

    Where nothing can be kept (a cache that may only be read), it is measured each time, and one line says so.

    Args:
        path: a file that `Calibration.save` wrote; None looks among those remembered, in
            `~/.cache/lightning_specdec`, or `$XDG_CACHE_HOME/lightning_specdec`.

    Raises:
        FileNotFoundError, ValueError: see `Calibration.load`, for the file that was named.
    """
    if path is not None:
        return Calibration.load(path)
    rule, sampling = rule or ExactMatch(), sampling or Sampling()
    settings = (batch_size, type(rule).__name__, sampling.greedy, sampling.top_k, sampling.top_p, sampling.min_p)
    machine = (__version__, torch.__version__, torch.get_num_threads(), str(target.device), _processor(target))
    key = repr((settings, machine, fingerprint(target), fingerprint(drafter)))
    remembered = cache_home() / f"calibration-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    try:
        return Calibration.load(remembered)
    except (OSError, ValueError):  # none yet, one that another version wrote, or one that may not be read
        log.info("measuring what draft and target cost, once for this machine: some seconds")
    found = calibrate(target, drafter, batch_sizes=(batch_size,), rule=rule, sampling=sampling)
    try:
        found.save(remembered)
    except OSError as error:
        _say_once(f"{remembered.parent} cannot be written ({error.strerror}): what calls cost is not remembered")
    return found


@functools.cache
def _say_once(text: str) -> None:
    log.warning(text)


def fingerprint(module: torch.nn.Module) -> str:
    """Changes with whatever a network's speed depends on: its parts, and the shapes and kinds of its weights."""
    # A forward pass of its own is what compiling a module leaves behind.
    parts = [(type(part).__qualname__, "forward" in vars(part)) for part in module.modules()]
    weights = [
        (tuple(each.shape), str(each.dtype), type(each).__name__, type(each.data).__name__)
        for each in (*module.parameters(), *module.buffers())
    ]
    settings = _settings(module)
    for part in module.modules():
        if isinstance(part, Drafter) and part is not module:  # one that guesses for another
            settings += [(name, value) for name, value in _settings(part) if name != "training"]
    # Weights that were laid out anew for a processor may be no parameters any more.
    models = [each for each in module.modules() if isinstance(each, LanguageModel)]
    sizes = [(each.vocab_size, each.num_parameters, each.memory_bytes) for each in models]
    return hashlib.sha256(repr((parts, weights, settings, sizes)).encode()).hexdigest()


def _settings(module: torch.nn.Module) -> list[tuple[str, int | str]]:
    return [(name, value) for name, value in sorted(vars(module).items()) if isinstance(value, int | str)]


def _processor(target: LanguageModel) -> str:
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    return torch.backends.cpu.get_cpu_capability()
