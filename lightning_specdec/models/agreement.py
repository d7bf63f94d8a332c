"""Measure whether a model computes the same logits in all the kinds of call that decoding mixes.

Standard decoding reads one token a call, speculative decoding reads a few, and rows may share a
call. Speculative decoding is lossless only if these calls agree up to rounding. Kernels do not
promise that: some quantize activations only in calls on several tokens, for example. So a model
that may disagree is measured once, when it is first made ready for decoding, and the outcome is
kept in the cache directory.

Shapes: B rows, T tokens, N compared positions, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec import __version__
from lightning_specdec.config.activity import Activity
from lightning_specdec.config.files import cache_home, replaced
from lightning_specdec.models.base import LanguageModel

if TYPE_CHECKING:
    from jaxtyping import Float

FORMAT = 1
"""Version of the kept files. Raise it when what is measured changes."""
PROMPT_LENGTH = 12
"""Tokens that every way of reading consumes before the compared ones."""
NUM_COMPARED = 4
"""Tokens that are read in one call, a few at a time, and one by one."""
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}
"""Largest difference that rounding explains, as a fraction of the range of the logits
(docs/log/2026-11.md, 27 November)."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadingPlan:
    """One way to read the same text.

    Args:
        name: what the calls look like, for messages.
        batch_size: copies of the text that share each call.
        call_lengths: tokens of each row in each call, until the text ends or the plan does.
    """

    name: str
    batch_size: int
    call_lengths: tuple[int, ...]


PLANS = (
    ReadingPlan("one token", 1, (PROMPT_LENGTH, *[1] * NUM_COMPARED)),
    ReadingPlan("two tokens", 1, (PROMPT_LENGTH, 2, 2)),
    ReadingPlan("three tokens", 1, (PROMPT_LENGTH, 3)),
    ReadingPlan("one token of two rows", 2, (PROMPT_LENGTH, 1, 1)),
    ReadingPlan("three tokens of two rows", 2, (PROMPT_LENGTH, 3)),
)
"""Ways to read that decoding mixes. Each is compared with a single call on the whole text."""


@dataclass(frozen=True)
class Agreement:
    """How far the logits of different kinds of call lie apart.

    Args:
        difference: the largest difference between two logits of the same position and token,
            divided by the range of all logits.
        tolerance: the largest difference that rounding explains in the model's dtype.
        calls: the calls that differ most from a single call on the whole text.
    """

    difference: float
    tolerance: float
    calls: str

    @property
    def holds(self) -> bool:
        """Whether the calls agree up to rounding. NaN does not agree."""
        return self.difference <= self.tolerance

    @property
    def reason(self) -> str | None:
        """Why decoding with this model is not lossless; None if it is."""
        if self.holds:
            return None
        return (
            f"the target's logits differ by {self.difference:.1%} of their range between calls on "
            f"{self.calls} and longer calls, more than rounding explains ({self.tolerance:.1%})"
        )


def needs_measurement(model: LanguageModel) -> bool:
    """Whether a model's calls may disagree by more than float32 rounding: other backends, coarse or
    quantized weights.

    A plain float32 model of torch is not measured, so it costs nothing.
    """
    if model.backend != "torch":
        return True
    return compute_dtype(model) not in (torch.float32, torch.float64) or is_quantized(model)


def is_quantized(model: LanguageModel) -> bool:
    """Whether any weight is quantized: held as integers, in eight bits, or in a tensor subclass as
    torchao's."""
    if getattr(model, "quantization", None) is not None:
        return True
    return any(
        weight.dtype not in TOLERANCES or type(weight.data) is not Tensor
        for weight in model.parameters()
    )


def compute_dtype(model: LanguageModel) -> torch.dtype:
    """The dtype that a model computes in: its backend's, or else the coarsest of its weights.

    Weights in eight bits do not count: no layer of torch computes in their dtype.
    """
    dtype = getattr(model, "compute_dtype", None)
    if isinstance(dtype, torch.dtype):
        return dtype
    dtypes = {weight.dtype for weight in model.parameters() if weight.dtype in TOLERANCES}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def agreement_of(model: LanguageModel) -> Agreement | None:
    """A model's agreement on this machine: measured once, then read from the cache directory.

    Args:
        model: in the form that decodes, packed or converted.

    Returns:
        None for a model that needs no measurement, or whose context is too short for it.
    """
    text_length = PROMPT_LENGTH + NUM_COMPARED
    if not needs_measurement(model):
        return None
    # The text must not cross a position switch.
    limit = model.positions_of_one_side
    if limit is not None and limit < text_length + 1:
        return None

    digest = hashlib.sha256(repr(_fingerprint(model)).encode()).hexdigest()[:24]
    path = cache_home() / f"agreement-{digest}.json"
    try:
        return _from_values(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, LookupError):
        pass  # Not measured yet, or damaged.

    agreement = measure(model)
    if agreement.holds:
        log.debug(
            "calls of all widths agree: logits differ by at most %.1e of their range",
            agreement.difference,
        )
    else:
        log.warning("not lossless: %s", agreement.reason)
    try:
        with replaced(path) as file:
            file.write(json.dumps(asdict(agreement)).encode())
    except (OSError, ValueError) as error:
        # A read-only cache directory only means that the next process measures again.
        log.debug("the agreement is not remembered: %s", error)
    return agreement


def _from_values(values: dict[str, Any]) -> Agreement:
    return Agreement(float(values["difference"]), float(values["tolerance"]), str(values["calls"]))


@torch.inference_mode()
def measure(model: LanguageModel, plans: Sequence[ReadingPlan] = PLANS) -> Agreement:
    """Compare the logits of one text between several ways to read it.

    With the default plans, these are 15 calls on a few tokens each.

    Args:
        model: in the form that decodes.
        plans: ways to read the text.
    """
    # The multiplier scatters the tokens over the vocabulary, so that the logits vary as in a real
    # text.
    text_length = PROMPT_LENGTH + NUM_COMPARED
    text = torch.arange(text_length, device=model.device)[None] * 7919 % model.vocab_size

    tolerance = TOLERANCES[compute_dtype(model)]
    whole_text = ReadingPlan("the whole text", 1, (text_length,))
    reference = _read(model, text, whole_text)
    finite_logits = reference[reference.isfinite()]
    if finite_logits.numel() == 0:
        # NaN is within no tolerance, so such a model never agrees.
        return Agreement(math.nan, tolerance, whole_text.name)
    logits_range = float(finite_logits.max() - finite_logits.min())

    largest_difference = 0.0
    worst_plan = plans[0]
    progress = Activity("measuring whether calls of all widths agree", len(plans), unit="kinds")
    with progress:
        logits_by_plan = []
        for plan in plans:
            logits_by_plan.append(_read(model, text, plan))
            progress.advance()

    for plan, logits in zip(plans, logits_by_plan, strict=True):
        # A plan may end before the text does.
        expected = reference[:, : logits.shape[1]]
        # Equal infinities, as of tokens that a model never writes, do not differ.
        distances = torch.where(logits == expected, 0.0, (logits - expected).abs())
        difference = float(distances.max()) / max(logits_range, 1e-30)
        # `not <=` also catches NaN.
        if not difference <= largest_difference:
            largest_difference = difference
            worst_plan = plan

    return Agreement(largest_difference, tolerance, worst_plan.name)


def _read(model: LanguageModel, text: Tensor, plan: ReadingPlan) -> Float[Tensor, "B N V"]:
    """Logits of the last prompt token and of the compared tokens, as far as the plan reads, in
    float32."""
    state = model.init_state(plan.batch_size, text.shape[1] + 1)
    first_compared = PROMPT_LENGTH - 1
    logits_of_calls = []
    start = 0
    for call_length in plan.call_lengths:
        tokens = text[:, start : start + call_length].expand(plan.batch_size, -1)
        num_skipped = max(0, first_compared - start)
        if num_skipped < call_length:
            output = model(tokens, state, logits_for=slice(num_skipped, None))
            # A copy: a recorded call's logits are overwritten by the next call.
            logits_of_calls.append(output.logits.float().clone())
        else:
            model(tokens, state, logits_for=slice(-1, None))
        start += call_length
    return torch.cat(logits_of_calls, dim=1)


def _fingerprint(model: LanguageModel) -> tuple[Any, ...]:
    """Everything that decides which kernels run: the network's shapes, dtypes and layers, libraries
    and machine."""
    layers = [type(module).__name__ for module in model.modules()]
    weights = [(tuple(weight.shape), str(weight.dtype)) for weight in model.parameters()]
    backend = (
        model.backend,
        getattr(model, "quantization", None),
        getattr(model, "dynamic_group", None),
        metadata.version("openvino") if find_spec("openvino") else None,
    )
    processor = torch.backends.cpu.get_cpu_capability()
    if model.device.type == "cuda":
        processor = torch.cuda.get_device_name(model.device)
    machine = (
        processor,
        torch.cpu._is_amx_tile_supported(),
        os.cpu_count(),
        torch.get_num_threads(),
    )
    versions = (FORMAT, __version__, torch.__version__)
    return layers, weights, model.num_parameters, backend, machine, versions
