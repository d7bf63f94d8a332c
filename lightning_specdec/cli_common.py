"""What several verbs share: messages on stderr, and where the models go."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from argparse import Namespace

import torch

from lightning_specdec.checks import require_int, require_number
from lightning_specdec.cli_groups import MAX_THREADS
from lightning_specdec.rules import SamplingOptions
from lightning_specdec.terminal import visible

log = logging.getLogger("lightning_specdec")


def counted(number: int, noun: str, plural: str = "s") -> str:
    """So many of something."""
    return f"{number} {noun}{'' if number == 1 else plural}"


def find_device(name: str) -> torch.device:
    """The device, if this machine has it and torch can use it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that torch is giving up
            device = torch.device(name)
            torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(
            f"there is no usable device {name!r} here: try --device cpu (`lightning_specdec env`)"
        ) from error
    return device


def set_threads(options: Namespace) -> None:
    """As many CPU threads as the user asks for; the rest is `limit_threads`', once the model is known."""
    if options.threads is not None:
        torch.set_num_threads(require_int("threads", options.threads, 1, MAX_THREADS))


def draws(options: Namespace) -> SamplingOptions:
    """How tokens are drawn, as the options of `cli_options.DRAWS` say."""
    chosen = SamplingOptions(
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p
    )
    if options.repetition_penalty is not None:
        penalty = require_number("repetition_penalty", options.repetition_penalty, low=0, low_open=True)
        from transformers import RepetitionPenaltyLogitsProcessor

        chosen["processors"] = [RepetitionPenaltyLogitsProcessor(float(penalty))]
    return chosen


def progress(text: str) -> None:
    """Say what takes its time, where somebody sits and waits; elsewhere to those who debug."""
    log.log(logging.INFO if sys.stderr.isatty() else logging.DEBUG, "%s", text)


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"level": record.levelname.lower(), "name": record.name, "message": record.getMessage()})


def set_up_logs(level: str, *, json_lines: bool) -> None:
    """Show messages on stderr from this level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if json_lines else _VisibleFormatter("%(levelname)s: %(message)s"))
    log.handlers = [handler]
    log.setLevel(level.upper())
