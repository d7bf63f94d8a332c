"""A recurrent network (Elman) as a language model, and its fused form for decoding.

Shapes: B rows, T tokens, V vocabulary, H hidden units of a layer, L layers, D = L * H.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.models.base import LanguageModel, ModelOutput, select
from lightning_specdec.models.state import DecodeState, Lengths, RecurrentState

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class RNNSettings(Settings):
    vocab_size: int = setting(help="number of tokens", minimum=2, maximum=2**20)
    embedding_size: int = setting(32, "width of the token embeddings", minimum=1, maximum=2**14)
    hidden_size: int = setting(64, "hidden units of a layer", minimum=1, maximum=2**14)
    num_layers: int = setting(2, "layers", minimum=1, maximum=64)


class RNN(LanguageModel):
    """Elman network: h_t = tanh(W x_t + U h_(t-1) + b), layer over layer, and a linear head.

    The smallest model that shows all of speculative decoding (Elman 1990, "Finding structure in time"). Each layer is a
    module, because the state needs every layer at every step and `nn.RNN` returns only the top one.

    Args:
        vocab_size: number of tokens.
        settings: `embedding_size`, `hidden_size` and `num_layers`.

    Raises:
        ValueError: a setting is unknown or out of range.
    """

    Settings = RNNSettings
    hidden_size: int
    num_layers: int

    def __init__(self, vocab_size: int, **settings: Any) -> None:
        super().__init__()
        own = self.settings = RNNSettings(vocab_size, **settings)
        self.vocab_size, self.hidden_size, self.num_layers = (
            vocab_size,
            own.hidden_size,
            own.num_layers,
        )
        inputs = [own.embedding_size] + [own.hidden_size] * (own.num_layers - 1)
        self.embedding = nn.Embedding(vocab_size, own.embedding_size)
        self.layers = nn.ModuleList(
            nn.RNN(width, own.hidden_size, batch_first=True) for width in inputs
        )
        self.output = nn.Linear(own.hidden_size, vocab_size)

    def arguments(self) -> dict[str, Any]:
        return self.settings.to_dict()

    def init_state(self, batch_size: int, max_length: int) -> RecurrentState:
        weight = self.output_weight
        return RecurrentState(
            batch_size, self.num_layers * self.hidden_size, device=weight.device, dtype=weight.dtype
        )

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        state: DecodeState | None = None,
        *,
        valid_lengths: Lengths | None = None,
        logits_for: Int[Tensor, "B N"] | slice | None = None,
        features: Sequence[int] = (),
    ) -> ModelOutput:
        if state is None:
            layers = self.run_layers(tokens, [None] * self.num_layers)
        else:
            assert isinstance(state, RecurrentState), (
                f"{type(self).__name__} needs a RecurrentState, got {state}"
            )
            layers = self.run_layers(tokens, list(state.hidden().split(self.hidden_size, dim=-1)))
            state.append(torch.cat(layers, dim=-1) if len(layers) > 1 else layers[0], valid_lengths)
        top = select(layers[-1], logits_for)
        return ModelOutput(
            self.output_logits(top), {layer: layers[layer] for layer in features}, logits_for
        )

    def run_layers(
        self, tokens: Int[Tensor, "B T"], hidden: Sequence[Tensor | None]
    ) -> list[Float[Tensor, "B T H"]]:
        """Each layer's hidden states after each token. `hidden` is each layer's `[B, H]` before, or None for zeros."""
        outputs, below = [], self.embedding(tokens)
        for layer, before in zip(self.layers, hidden, strict=True):
            below, _ = layer(below, None if before is None else before[None].contiguous())
            outputs.append(below)
        return outputs

    def check_output_head(self) -> None:
        pass

    def output_logits(self, hidden: Float[Tensor, "*N H"]) -> Float[Tensor, "*N V"]:
        return self.output(hidden)

    @property
    def output_weight(self) -> Float[Tensor, "V D"]:
        return self.output.weight

    def fused(self) -> FusedRNN:
        return FusedRNN(self)


class FusedRNN(RNN):
    """An `RNN` folded for decoding: the same function in about a third of the launches.

    A network this small spends its time on launches, not on arithmetic. The embedding, the first layer's input
    projection and both its biases depend on the token alone, so they fold into one table of V rows; each upper layer's
    two products fold into one over the joined input and hidden state. A roll-out reads and writes the state once.

    Args:
        model: the network to fold. Its modules are shared, but later changes or moves do not reach the folded weights.
    """

    def __init__(self, model: RNN) -> None:
        nn.Module.__init__(self)
        self.settings, self.vocab_size, self.vocabulary = (
            model.settings,
            model.vocab_size,
            model.vocabulary,
        )
        self.hidden_size, self.num_layers = model.hidden_size, model.num_layers
        self.embedding, self.layers, self.output = model.embedding, model.layers, model.output
        # Plain attributes: a registered buffer is found through nn.Module.__getattr__, which costs as much as a launch.
        with torch.no_grad():
            (from_input, from_hidden, *biases), *upper = [
                list(layer.parameters()) for layer in model.layers
            ]
            self._table = model.embedding.weight @ from_input.T + biases[0] + biases[1]
            self._weight = from_hidden.T.contiguous()
            self._head_weight, self._head_bias = (
                model.output.weight.T.contiguous(),
                model.output.bias.clone(),
            )
            self._upper = [(torch.cat((w, u), dim=1).T.contiguous(), b + c) for w, u, b, c in upper]

    def fused(self) -> FusedRNN:
        return self

    def _step(self, inputs: Tensor, hidden: Sequence[Tensor]) -> list[Tensor]:
        """Every layer's next hidden state, from the token's row of the table and the hidden states before."""
        after = [torch.addmm(inputs, hidden[0], self._weight).tanh_()]
        for (weight, bias), before in zip(self._upper, hidden[1:], strict=True):
            after.append(torch.addmm(bias, torch.cat((after[-1], before), dim=1), weight).tanh_())
        return after

    def run_layers(self, tokens: Tensor, hidden: Sequence[Tensor | None]) -> list[Tensor]:
        inputs = self._table[tokens]
        zeros = inputs.new_zeros(tokens.shape[0], self.hidden_size)
        before = [zeros if layer is None else layer for layer in hidden]
        steps = []
        for step_inputs in inputs.unbind(1):
            before = self._step(step_inputs, before)
            steps.append(before)
        return [torch.stack(layer, dim=1) for layer in zip(*steps, strict=True)]

    def output_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._head_weight + self._head_bias

    def rollout(
        self,
        tokens: Tensor,
        state: DecodeState,
        num_tokens: int,
        choose: Callable[[Tensor, int], Tensor],
        *,
        valid_lengths: Lengths | None = None,
    ) -> None:
        if valid_lengths is not None:
            super().rollout(tokens, state, num_tokens, choose, valid_lengths=valid_lengths)
            return
        assert isinstance(state, RecurrentState), (
            f"{type(self).__name__} needs a RecurrentState, got {state}"
        )
        layers: Sequence[Tensor] = state.hidden().split(self.hidden_size, dim=-1)
        steps: list[Tensor] = []

        def read(token: Tensor) -> None:
            nonlocal layers
            layers = self._step(self._table.index_select(0, token), layers)
            steps.append(torch.cat(layers, dim=1) if self.num_layers > 1 else layers[0])

        for token in tokens.unbind(1):
            read(token)
        for i in range(num_tokens):
            token = choose(torch.addmm(self._head_bias, layers[-1], self._head_weight), i)
            if i < num_tokens - 1:
                read(token)
        state.append(torch.stack(steps, dim=1))
