"""A transformers model taken apart: embedding, layers, final norm and output head, called one by one.

Early exits and heads need the forward pass in pieces, over the same weights.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Call = dict[str, Any]
"""Arguments that all layers of one call share: positions, their rotation, the mask, the cache."""
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
def cache_name(forward: Callable[..., Any]) -> str | None:
    """What this forward pass calls the key-value cache; None: it takes none that is known."""
    names = inspect.signature(forward).parameters
    return next((name for name in (*CACHE_NAMES, "layer_past") if name in names), None)


class LayerStack:
    """The parts of a causal language model of transformers, over its own weights.

    Args:
        model: the model; later changes to its modules are seen.

    Raises:
        ValueError: the model's parts are not laid out as in Llama, GPT-2 or GPT-NeoX.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.inner: Any = model.base_model
        parts = next(
            (names for names in _PARTS if all(hasattr(self.inner, name) for name in names)), None
        )
        if parts is None:
            raise ValueError(
                f"the layers of {type(model).__name__} are not laid out as in Llama, GPT-2 or GPT-NeoX"
            )
        self._embedding, self._layers, self._norm = parts
        name = cache_name(type(self.layers[0]).forward)
        if name is None:
            raise ValueError(f"the layers of {type(model).__name__} take no cache that is known")
        self._cache_name = name

    @property
    def layers(self) -> nn.ModuleList:
        return getattr(self.inner, self._layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def embed(
        self, tokens: Int[Tensor, "B T"], positions: Int[Tensor, "#B T"]
    ) -> Float[Tensor, "B T D"]:
        """The first layer's input."""
        hidden: Tensor = getattr(self.inner, self._embedding)(tokens)
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
    ) -> Call:
        """The arguments of a call's layers; `hidden` gives the dtype and the device."""
        call: Call = {"attention_mask": mask, "position_ids": positions, self._cache_name: cache}
        call["use_cache"] = cache is not None
        if hasattr(self.inner, "rotary_emb"):
            call["position_embeddings"] = self.inner.rotary_emb(hidden, position_ids=positions)
        return call

    def run(
        self, hidden: Float[Tensor, "B T D"], call: Call, first: int, last: int
    ) -> Float[Tensor, "B T D"]:
        """The output of layer `last - 1` for the input of layer `first`."""
        for layer in self.layers[first:last]:
            hidden = layer(hidden, **call)
        return hidden

    def norm(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return getattr(self.inner, self._norm)(hidden)

    def head(self, normed: Float[Tensor, "*T D"]) -> Float[Tensor, "*T V"]:
        """The output head, for the final norm's output."""
        return self.model.get_output_embeddings()(normed)


def additive(seen: Tensor, dtype: torch.dtype) -> Float[Tensor, "B 1 T S"]:
    """A mask for attention from where each query may look: 0 there, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[
        :, None
    ]
