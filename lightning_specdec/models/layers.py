"""A transformers model taken apart: embedding, layers, final norm and output head, called one by one.

Theory: early exits read the lower layers alone and hand what they made to the upper ones; heads and their training want
the hidden states between layers. Both need the pass in pieces, over the same weights. The pieces of Llama-like models,
of GPT-2 and of GPT-NeoX lie open, and the loop over them is short. Whether it is really this model's loop is not taken
on trust: its outcome is compared with that of the model's own forward pass.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from lightning_specdec.models.config_file import first_line

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
"""Of the largest number that reaches the head, by type. The same operations on the same tokens differ by rounding."""
_COARSE = 0.05
"""The same for coarser types."""
_LARGE = 100.0
"""Beyond what models cap their logits at."""


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

    def embed(self, tokens: Int[Tensor, "B T"], positions: Int[Tensor, "#B T"]) -> Float[Tensor, "B T D"]:
        """What the first layer reads."""
        hidden: Tensor = getattr(self.inner, self._embedding)(tokens)
        if hasattr(self.inner, "wpe"):
            hidden = hidden + self.inner.wpe(positions)
        dropout = getattr(self.inner, "drop", None) or getattr(self.inner, "emb_dropout", None)
        return hidden if dropout is None else dropout(hidden)

    def begin(
        self, hidden: Float[Tensor, "B T D"], positions: Int[Tensor, "#B T"], mask: Tensor | None, cache: Cache | None
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
    def check(self, window: int | None) -> None:
        """Compare with the model's own forward pass: what reaches the output head, and what becomes of its logits.

        The parts read the tokens in two pieces, as they do when decoding: a layer that takes its cache by another name
        would do without it.

        Args:
            window: how far back the layers look; to the start when None.

        Raises:
            ValueError: they differ.
        """
        tokens = torch.tensor([_PROBE], device=self.model.device) % int(self.inner.config.vocab_size)
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            wanted, untouched = self._reach_head(tokens)
            got = self._in_pieces(tokens, window)
            off = float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
        except (TypeError, AttributeError, RuntimeError, LookupError, ValueError) as error:
            raise ValueError(f"{self.name} cannot be taken apart: {first_line(error)}") from error
        finally:
            for module in training:
                module.training = True
        if not untouched:
            raise ValueError(f"{self.name} cannot be taken apart: behind its output head it changes the logits")
        if not off <= _TOLERANCE.get(wanted.dtype, _COARSE):
            raise ValueError(f"{self.name} cannot be taken apart: between its layers it does more than pass them on")

    def _reach_head(self, tokens: Int[Tensor, "1 T"]) -> tuple[Float[Tensor, "1 T D"], bool]:
        """What the model's own forward pass gives its output head, and whether what the head gives is what comes out.

        The head's place is taken by numbers as large as logits become: a cap is not seen in the small ones of a model
        that has learnt nothing yet.
        """
        seen: list[Tensor] = []

        def replaced(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            seen[:] = inputs[0], torch.linspace(-_LARGE, _LARGE, output.shape[-1]).to(output).expand_as(output)
            return seen[1]

        handle = self.model.get_output_embeddings().register_forward_hook(replaced)
        try:
            logits = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
        finally:
            handle.remove()
        wanted, given = seen
        return wanted, torch.equal(logits.float(), given.float())

    def _in_pieces(self, tokens: Int[Tensor, "1 T"], window: int | None) -> Float[Tensor, "1 T D"]:
        """The same by parts: all tokens but the last, then that one."""
        positions, cache, pieces = torch.arange(tokens.shape[1], device=tokens.device)[None], DynamicCache(), []
        for first, last in ((0, len(_PROBE) - 1), (len(_PROBE) - 1, len(_PROBE))):
            apart = positions[0, first:last, None] - positions[0, :last]
            seen = (apart >= 0) & (apart < (window or len(_PROBE)))
            hidden = self.embed(tokens[:, first:last], positions[:, first:last])
            mask = torch.zeros_like(apart, dtype=hidden.dtype).masked_fill_(~seen, -torch.inf)[None, None]
            call = self.begin(hidden, positions[:, first:last], mask, cache)
            pieces.append(self.run(hidden, call, 0, self.num_layers))
        return self.norm(torch.cat(pieces, dim=1))


def take_apart(model: PreTrainedModel, window: int | None = None) -> LayerStack:
    """The checked parts of a model.

    Args:
        window: how far back its layers look; to the start when None.

    Raises:
        ValueError: see `LayerStack`.
    """
    stack = LayerStack(model)
    stack.check(window)
    return stack
