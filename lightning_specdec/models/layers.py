"""A transformers model taken apart: embedding, layers, final norm and output head, called one by one.

Early exits and heads need the forward pass in pieces, over the same weights. That the pieces really make up the model
is checked by comparing them with its own forward pass.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from lightning_specdec.models.model_config import FOREIGN, first_line

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Call = dict[str, Any]
"""Arguments that all layers of one call share: positions, their rotation, the mask, the cache."""
_PARTS = (
    ("embed_tokens", "layers", "norm"),  # Llama and most others
    ("wte", "h", "ln_f"),  # GPT-2
    ("embed_in", "layers", "final_layer_norm"),  # GPT-NeoX
)
_PROBE = (3, 1, 2, 0)
"""Tokens of the comparison: as few as show a wrong position or mask."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative to the largest number that reaches the head; 0.05 for coarser types."""
_LARGE = 100.0
"""Beyond what models cap their logits at."""


class LayerStack:
    """The parts of a causal language model of transformers, over its own weights.

    Args:
        model: the model; later changes to its modules are seen.
        window: how far back the layers look; to the start when None.

    Raises:
        ValueError: the model's parts are not laid out as in Llama, GPT-2 or GPT-NeoX.
    """

    def __init__(self, model: PreTrainedModel, window: int | None = None) -> None:
        self.model, self.window = model, window
        self.inner: Any = model.base_model
        parts = next((names for names in _PARTS if all(hasattr(self.inner, name) for name in names)), None)
        if parts is None or model.get_output_embeddings() is None:
            raise self._error("its layers are not laid out as in Llama, GPT-2, GPT-NeoX")
        self._embedding, self._layers, self._norm = parts
        parameters = inspect.signature(self.layers[0].forward).parameters
        self._cache_name = "layer_past" if "layer_past" in parameters else "past_key_values"

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"{type(self.model).__name__} cannot be taken apart: {reason}")

    @property
    def layers(self) -> nn.ModuleList:
        found: nn.ModuleList = getattr(self.inner, self._layers)
        return found

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def embed(self, tokens: Int[Tensor, "B T"], positions: Int[Tensor, "#B T"]) -> Float[Tensor, "B T D"]:
        """The first layer's input."""
        hidden: Tensor = getattr(self.inner, self._embedding)(tokens)
        if hasattr(self.inner, "wpe"):
            hidden = hidden + self.inner.wpe(positions)
        dropout = getattr(self.inner, "drop", None) or getattr(self.inner, "emb_dropout", None)
        return hidden if dropout is None else dropout(hidden)

    def begin(
        self, hidden: Float[Tensor, "B T D"], positions: Int[Tensor, "#B T"], mask: Tensor | None, cache: Cache | None
    ) -> Call:
        """The arguments of a call's layers; `hidden` gives the dtype and the device."""
        call: Call = {"attention_mask": mask, "position_ids": positions, "use_cache": cache is not None}
        call[self._cache_name] = cache
        if hasattr(self.inner, "rotary_emb"):
            call["position_embeddings"] = self.inner.rotary_emb(hidden, position_ids=positions)
        return call

    def run(self, hidden: Float[Tensor, "B T D"], call: Call, first: int, last: int) -> Float[Tensor, "B T D"]:
        """The output of layer `last - 1` for the input of layer `first`."""
        for layer in self.layers[first:last]:
            hidden = layer(hidden, **call)
        return hidden

    def norm(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """The final norm."""
        normed: Tensor = getattr(self.inner, self._norm)(hidden)
        return normed

    def head(self, normed: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """The output head, for the final norm's output."""
        logits: Tensor = self.model.get_output_embeddings()(normed)
        return logits

    @torch.no_grad()
    def check(self) -> None:
        """Compare with the model's own forward pass: what reaches the output head, and what becomes of its logits.

        The parts read the tokens in two pieces, as they do when decoding: a layer that takes its cache by another name
        would do without it.

        Raises:
            ValueError: they differ.
        """
        tokens = torch.tensor([_PROBE], device=self.model.device) % int(self.inner.config.vocab_size)
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            wanted, untouched = self._reach_head(tokens)
            got = self._in_pieces(tokens)
            off = float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
        except FOREIGN as error:
            raise self._error(first_line(error)) from error
        finally:
            for module in training:
                module.training = True
        if not untouched:
            raise self._error("behind its output head it changes the logits")
        if not off <= _TOLERANCE.get(wanted.dtype, 0.05):
            raise self._error("between its layers it does more than pass them on")

    def _reach_head(self, tokens: Int[Tensor, "1 T"]) -> tuple[Float[Tensor, "1 T D"], bool]:
        """What the model's own forward pass gives its output head, and whether the head's output comes out unchanged.

        The head's output is replaced by numbers as large as logits become: a cap is not seen in the small ones of an
        untrained model.
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

    def _in_pieces(self, tokens: Int[Tensor, "1 T"]) -> Float[Tensor, "1 T D"]:
        """The same by parts: all tokens but the last, then that one."""
        positions, cache, pieces = torch.arange(tokens.shape[1], device=tokens.device)[None], DynamicCache(), []
        for first, last in ((0, len(_PROBE) - 1), (len(_PROBE) - 1, len(_PROBE))):
            apart = positions[0, first:last, None] - positions[0, :last]
            seen = (apart >= 0) & (apart < (self.window or len(_PROBE)))
            hidden = self.embed(tokens[:, first:last], positions[:, first:last])
            call = self.begin(hidden, positions[:, first:last], additive(seen[None], hidden.dtype), cache)
            pieces.append(self.run(hidden, call, 0, self.num_layers))
        return self.norm(torch.cat(pieces, dim=1))


def additive(seen: Tensor, dtype: torch.dtype) -> Float[Tensor, "B 1 T S"]:
    """A mask for attention from where each query may look: 0 there, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None]
