"""Rotary positions that depend on the length of a text (Ding et al. 2024, "LongRoPE").

Such a model has two sets of frequencies, one for texts of at most the original length and one for
longer texts: the two sides of its switch. transformers chooses a set for a whole call, by the
largest position in it. Here each row of a call has the set of its text, whatever else the call
contains.

Shapes: B rows, T tokens, D numbers that are rotated.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_specdec.models.weights import ROPE_TYPE, overwritten_buffers

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    IsLong = bool | Bool[Tensor, "B"] | None
    """Whether texts are on the long side: all rows, or each of them. None leaves the choice to
    transformers."""
    Rotation = tuple[Float[Tensor, "#B T D"], Float[Tensor, "#B T D"]]
    """Cosines and sines."""


def rotation(
    rotary: nn.Module,
    hidden: Float[Tensor, "B T _"],
    positions: Int[Tensor, "#B T"],
    is_long: IsLong,
) -> Rotation:
    """The cosines and sines of a rotary module of transformers, for rows on the given sides.

    The sides differ in their frequencies, and in some models (PhiMoE) in the scale of the result.
    """
    if is_long is None:
        with _own_frequencies(rotary) as private_rotary:
            return private_rotary(hidden, position_ids=positions)
    if isinstance(is_long, bool):
        return _of_side(rotary, hidden, positions, is_long=is_long)

    short_rotation = _of_side(rotary, hidden, positions, is_long=False)
    long_rotation = _of_side(rotary, hidden, positions, is_long=True)
    is_long_row = is_long[:, None, None]
    short_cosines, short_sines = short_rotation
    long_cosines, long_sines = long_rotation
    cosines = torch.where(is_long_row, long_cosines, short_cosines)
    sines = torch.where(is_long_row, long_sines, short_sines)
    return cosines, sines


def _of_side(
    rotary: Any,
    hidden: Float[Tensor, "B T _"],
    positions: Int[Tensor, "#B T"],
    *,
    is_long: bool,
) -> Rotation:
    """The rotation for one side. The module chooses it by the largest of its positions."""
    switch = rotary.config.rope_parameters["original_max_position_embeddings"]
    if not is_long:
        # What lies beyond the switch is padding, or a draft token that is never accepted.
        short_positions = positions.clamp(max=switch - 1)
        with _own_frequencies(rotary) as private_rotary:
            return private_rotary.forward(hidden, position_ids=short_positions)

    # One column more, at the first position of the long side.
    first_long_position = positions.new_full((len(positions), 1), switch)
    long_positions = torch.cat((positions, first_long_position), dim=1)
    with _own_frequencies(rotary) as private_rotary:
        cosines, sines = private_rotary.forward(hidden, position_ids=long_positions)
    return cosines[:, :-1], sines[:, :-1]


@contextmanager
def _own_frequencies(rotary: Any) -> Iterator[Any]:
    """The rotary module for one call, which leaves its chosen frequencies as they are.

    transformers writes the chosen frequencies into a buffer and then reads them from there. Another
    thread on the other side may overwrite them in between, so each call has a buffer of its own.
    """
    overwritten_names = overwritten_buffers(rotary)
    if not overwritten_names:
        yield rotary
        return

    private_rotary = copy(rotary)
    private_rotary._buffers = dict(rotary._buffers)
    for name in overwritten_names:
        private_rotary._buffers[name] = rotary._buffers[name].clone()
    yield private_rotary

    # transformers computes the long side's frequencies once for each device. A recorded call has to
    # find them, since it cannot compute them.
    long_frequencies = getattr(private_rotary, "long_inv_freq", None)
    if getattr(rotary, "long_inv_freq", None) is not long_frequencies:
        rotary.long_inv_freq = long_frequencies


@contextmanager
def on_sides(model: nn.Module, is_long: IsLong) -> Iterator[None]:
    """The model's own forward pass computes its rows on the given sides inside the block.

    A user's hooks on the rotary module see the rotation of these sides.
    """
    if is_long is None:
        yield
        return
    caller = threading.get_ident()

    def rotate(
        module: nn.Module,
        inputs: tuple[Any, ...],
        options: dict[str, Any],
        output: Any,
    ) -> Any:
        # Another thread may run the user's model at the same time.
        if threading.get_ident() != caller:
            return output
        hidden = inputs[0]
        positions = inputs[1] if len(inputs) > 1 else options["position_ids"]
        return rotation(module, hidden, positions, is_long)

    with ExitStack() as handles:
        for module in model.modules():
            if getattr(module, "rope_type", None) == ROPE_TYPE:
                handle = module.register_forward_hook(rotate, prepend=True, with_kwargs=True)
                handles.callback(handle.remove)
        yield
