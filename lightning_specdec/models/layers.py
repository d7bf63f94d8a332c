"""A transformers model taken apart: embedding, layers, final norm and output head, called one by one.

Knows nothing of states beyond the cache that it hands to the layers.

Theory: early exits read the lower layers alone and hand what they made to the upper ones; heads and their training want
the hidden states between layers. Both need the pass in pieces, over the same weights. The pieces of Llama-like models,
of GPT-2 and of GPT-NeoX lie open, and the loop over them is short. Whether it is really this model's loop is not taken
on trust: its logits are compared with those of the model's own forward pass.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_PARTS = {
    "llama": ("embed_tokens", "layers", "norm"),
    "gpt2": ("wte", "h", "ln_f"),
    "gpt_neox": ("embed_in", "layers", "final_layer_norm"),
}
"""What families call their embedding, their list of layers and their final norm; llama's names serve most others."""
_PROBE = (3, 1, 2, 0)
"""Tokens of the comparison: as few as show a wrong position or mask."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Of the largest logit, by type. The same operations in the same order differ by nothing."""
_COARSE = 0.05
"""The same for coarser types."""


@dataclass(frozen=True)
class Call:
    """What all layers of one call share.

    Args:
        options: arguments of every layer: positions, their rotation, the mask, the cache.
    """

    options: dict[str, Any]


class LayerStack:
    """The parts of a causal language model of transformers, over its own weights.

    Args:
        model: the model; later changes to its modules are seen.

    Raises:
        ValueError: the model's parts do not lie open, or its own forward pass does more than call them in turn.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.inner: Any = model.base_model
        parts = next((names for names in _PARTS.values() if all(hasattr(self.inner, name) for name in names)), None)
        if parts is None or model.get_output_embeddings() is None:
            raise ValueError(
                f"{self.name} cannot be taken apart: its layers are not laid out as in Llama, GPT-2, GPT-NeoX"
            )
        self._embedding, self._layers, self._norm = parts
        parameters = inspect.signature(self.layers[0].forward).parameters
        self._cache_name = "layer_past" if "layer_past" in parameters else "past_key_values"
        self._rotates = hasattr(self.inner, "rotary_emb")

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def layers(self) -> nn.ModuleList:
        found: nn.ModuleList = getattr(self.inner, self._layers)
        return found

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def embed(self, tokens: Int[Tensor, "B T"], positions: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """What the first layer reads."""
        hidden: Tensor = getattr(self.inner, self._embedding)(tokens)
        if hasattr(self.inner, "wpe"):
            hidden = hidden + self.inner.wpe(positions)
        dropout = getattr(self.inner, "drop", None) or getattr(self.inner, "emb_dropout", None)
        return hidden if dropout is None else dropout(hidden)

    def begin(
        self, hidden: Float[Tensor, "B T D"], positions: Int[Tensor, "B T"], mask: Tensor | None, cache: Cache | None
    ) -> Call:
        """What the layers of a call share; `hidden` gives the type and the place."""
        options: dict[str, Any] = {"attention_mask": mask, "position_ids": positions, "use_cache": cache is not None}
        options[self._cache_name] = cache
        if self._rotates:
            options["position_embeddings"] = self.inner.rotary_emb(hidden, position_ids=positions)
        return Call(options)

    def run(self, hidden: Float[Tensor, "B T D"], call: Call, first: int, last: int) -> Float[Tensor, "B T D"]:
        """The output of layer `last - 1` for what layer `first` reads."""
        for layer in self.layers[first:last]:
            hidden = layer(hidden, **call.options)
        return hidden

    def norm(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """The final norm."""
        normed: Tensor = getattr(self.inner, self._norm)(hidden)
        return normed

    def head(self, normed: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """The output head, for what the final norm gave."""
        logits: Tensor = self.model.get_output_embeddings()(normed)
        return logits

    @torch.no_grad()
    def check(self) -> None:
        """Compare with the model's own forward pass.

        Raises:
            ValueError: they differ.
        """
        device = self.model.device
        tokens = torch.tensor([_PROBE], device=device) % int(self.inner.config.vocab_size)
        positions = torch.arange(len(_PROBE), device=device)[None]
        was_training = self.model.training
        self.model.eval()
        try:
            wanted = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
            hidden = self.embed(tokens, positions)
            hidden = self.run(hidden, self.begin(hidden, positions, None, None), 0, self.num_layers)
            got = self.head(self.norm(hidden))
        except (TypeError, AttributeError, RuntimeError, KeyError) as error:
            raise ValueError(f"{self.name} cannot be taken apart: {error}") from error
        finally:
            self.model.train(was_training)
        off = float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
        if not off <= _TOLERANCE.get(wanted.dtype, _COARSE):
            raise ValueError(f"{self.name} cannot be taken apart: between its layers it does more than pass them on")


def take_apart(model: PreTrainedModel) -> LayerStack:
    """The checked parts of a model.

    Raises:
        ValueError: see `LayerStack`.
    """
    stack = LayerStack(model)
    stack.check()
    return stack
