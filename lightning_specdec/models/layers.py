"""A transformers model taken apart: embedding, layers, final norm and output head.

Early exits and draft heads need the forward pass in pieces, over the same weights.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from lightning_specdec.models.longrope import rotation

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from lightning_specdec.models.longrope import IsLong

Call = dict[str, Any]
"""Arguments that all layers of one call share: positions, their rotation, mask and cache."""
Entered = tuple[Tensor, Call]
"""A layer's input `[B, T, D]`, and the arguments of its call."""
CACHE_NAMES = ("cache", "past_key_values")
"""Names of the key-value cache in transformers: since 5.24, and before."""
_PARTS = (
    ("embed_tokens", "layers", "norm"),  # Llama and most others
    ("wte", "h", "ln_f"),  # GPT-2
    ("embed_in", "layers", "final_layer_norm"),  # GPT-NeoX
)


@functools.cache
def parameter_names(forward: Callable[..., Any]) -> frozenset[str]:
    """Names of the parameters of a forward pass. Reading a signature takes tens of microseconds."""
    return frozenset(inspect.signature(forward).parameters)


@functools.cache
def cache_name(forward: Callable[..., Any]) -> str | None:
    """Name of the argument for the key-value cache of a forward pass; None if it accepts none."""
    for name in (*CACHE_NAMES, "layer_past"):
        if name in parameter_names(forward):
            return name
    return None


@functools.cache
def accepts(forward: Callable[..., Any], name: str) -> bool:
    """Whether a forward pass accepts an argument of this name."""
    parameters = inspect.signature(forward).parameters
    if name in parameters:
        return True
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


@contextmanager
def scoring_only(
    model: PreTrainedModel, select: Callable[[Tensor], Tensor]
) -> Iterator[list[Tensor]]:
    """The model's output head reads only selected positions inside the block.

    Args:
        select: the positions to score of the head's input `[B, T, D]`.

    Yields:
        A list that gets the head's input before the selection. It stays empty if a replaced forward
        function computes logits without the head.
    """
    head_inputs: list[Tensor] = []
    caller = threading.get_ident()

    def narrow(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        # Another thread may run the user's model at the same time.
        if threading.get_ident() != caller:
            return None
        head_inputs.append(inputs[0])
        return (select(inputs[0]), *inputs[1:])

    head: Any = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(narrow)
    try:
        yield head_inputs
    finally:
        handle.remove()


class LayerStack:
    """The parts of a causal language model of transformers, over its own weights.

    Args:
        model: the model; later changes to its modules are seen.

    Raises:
        ValueError: the model's parts are not laid out as in Llama, GPT-2 or GPT-NeoX.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        # The part for texts, of a model that also reads images.
        self.inner: Any = model.get_decoder()
        part_names = self._find_parts()
        if part_names is None:
            raise ValueError(
                f"the layers of {type(model).__name__} are not laid out as in Llama, GPT-2 or "
                "GPT-NeoX"
            )
        self._embedding_name, self._layers_name, self._norm_name = part_names

        layer_cache_name = cache_name(type(self.layers[0]).forward)
        if layer_cache_name is None:
            raise ValueError(
                f"the layers of {type(model).__name__} accept no cache of a known name"
            )
        self._cache_name = layer_cache_name

    def _find_parts(self) -> tuple[str, str, str] | None:
        for part_names in _PARTS:
            if all(hasattr(self.inner, name) for name in part_names):
                return part_names
        return None

    @property
    def layers(self) -> nn.ModuleList:
        return getattr(self.inner, self._layers_name)

    @property
    def norm_module(self) -> nn.Module:
        return getattr(self.inner, self._norm_name)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def embed(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "#B T"],
    ) -> Float[Tensor, "B T D"]:
        """The first layer's input."""
        hidden: Tensor = getattr(self.inner, self._embedding_name)(tokens)
        if hasattr(self.inner, "wpe"):
            hidden = hidden + self.inner.wpe(positions)
        dropout = getattr(self.inner, "drop", None) or getattr(self.inner, "emb_dropout", None)
        return hidden if dropout is None else dropout(hidden)

    def begin(
        self,
        hidden: Float[Tensor, "B T D"],
        positions: Int[Tensor, "#B T"],
        mask: Tensor | None,
        cache: Cache | None,
        is_long: IsLong = None,
    ) -> Call:
        """The arguments of a call's layers; dtype and device are those of `hidden`.

        Args:
            is_long: the side of each row's text, of a model with a position switch.
        """
        call: Call = {
            "attention_mask": mask,
            "position_ids": positions,
            self._cache_name: cache,
            "use_cache": cache is not None,
        }
        if hasattr(self.inner, "rotary_emb"):
            call["position_embeddings"] = rotation(
                self.inner.rotary_emb, hidden, positions, is_long
            )
        return call

    def run(
        self,
        hidden: Float[Tensor, "B T D"],
        call: Call,
        start: int,
        end: int,
    ) -> Float[Tensor, "B T D"]:
        """The output of layer `end - 1` for the input of layer `start`."""
        for layer in self.layers[start:end]:
            hidden = layer(hidden, **call)
        return hidden

    def norm(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.norm_module(hidden)

    def head(self, normed: Float[Tensor, "*T D"]) -> Float[Tensor, "*T V"]:
        """The output head, for the final norm's output."""
        return self.model.get_output_embeddings()(normed)


def additive(is_visible: Tensor, dtype: torch.dtype) -> Float[Tensor, "B 1 T S"]:
    """An attention mask to add to scores: 0 where a query may look, -inf elsewhere."""
    mask = torch.zeros(is_visible.shape, dtype=dtype, device=is_visible.device)
    return mask.masked_fill_(~is_visible, -torch.inf)[:, None]
