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

    The smallest model that shows all of speculative decoding (Elman 1990, "Finding structure in
    time"). Each layer is a module, because the state needs every layer at every step and `nn.RNN`
    returns only the top one.

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
        self.settings = RNNSettings(vocab_size, **settings)
        self.vocab_size = vocab_size
        self.hidden_size = self.settings.hidden_size
        self.num_layers = self.settings.num_layers

        embedding_size = self.settings.embedding_size
        self.embedding = nn.Embedding(vocab_size, embedding_size)
        self.layers = nn.ModuleList()
        for layer in range(self.num_layers):
            input_size = embedding_size if layer == 0 else self.hidden_size
            self.layers.append(nn.RNN(input_size, self.hidden_size, batch_first=True))
        self.output = nn.Linear(self.hidden_size, vocab_size)

    def arguments(self) -> dict[str, Any]:
        return self.settings.to_dict()

    def init_state(self, batch_size: int, max_length: int) -> RecurrentState:
        weight = self.output_weight
        state_size = self.num_layers * self.hidden_size
        return RecurrentState(batch_size, state_size, device=weight.device, dtype=weight.dtype)

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
            outputs = self.run_layers(tokens, [None] * self.num_layers)
        else:
            recurrent_state = _recurrent(state, self)
            hidden = recurrent_state.hidden().split(self.hidden_size, dim=-1)
            outputs = self.run_layers(tokens, hidden)
            joined = torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]
            recurrent_state.append(joined, valid_lengths)
        logits = self.output_logits(select(outputs[-1], logits_for))
        return ModelOutput(logits, {layer: outputs[layer] for layer in features}, logits_for)

    def run_layers(
        self, tokens: Int[Tensor, "B T"], hidden: Sequence[Tensor | None]
    ) -> list[Float[Tensor, "B T H"]]:
        """Each layer's hidden states after each token.

        Args:
            hidden: each layer's `[B, H]` before the first token; None for zeros.
        """
        outputs = []
        inputs = self.embedding(tokens)
        for layer, layer_hidden in zip(self.layers, hidden, strict=True):
            initial = None if layer_hidden is None else layer_hidden[None].contiguous()
            inputs, _ = layer(inputs, initial)
            outputs.append(inputs)
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


def _recurrent(state: DecodeState, model: RNN) -> RecurrentState:
    assert isinstance(state, RecurrentState), (
        f"{type(model).__name__} needs a RecurrentState, got {state}"
    )
    return state


class FusedRNN(RNN):
    """An `RNN` folded for decoding: the same function in about a third of the launches.

    A network this small spends its time on launches, not on arithmetic. The embedding, the first
    layer's input projection and both its biases depend only on the token, so they fold into one
    table of V rows. Each upper layer's two products fold into one over the joined input and hidden
    state. A rollout reads and writes the state once.

    Args:
        model: the network to fold. Its modules are shared, but later changes or moves do not reach
            the folded weights.
    """

    def __init__(self, model: RNN) -> None:
        nn.Module.__init__(self)
        self.settings = model.settings
        self.vocab_size = model.vocab_size
        self.vocabulary = model.vocabulary
        self.hidden_size = model.hidden_size
        self.num_layers = model.num_layers
        self.embedding = model.embedding
        self.layers = model.layers
        self.output = model.output
        with torch.no_grad():
            self._fold()

    def _fold(self) -> None:
        # Plain attributes: a registered buffer is found through nn.Module.__getattr__, which costs
        # as much as a launch.
        layers: list[Any] = list(self.layers)
        input_weight, hidden_weight, input_bias, hidden_bias = layers[0].parameters()
        projected_embeddings = self.embedding.weight @ input_weight.T
        self._table = projected_embeddings + input_bias + hidden_bias
        self._weight = hidden_weight.T.contiguous()

        self._upper_layers: list[tuple[Tensor, Tensor]] = []
        for layer in layers[1:]:
            input_weight, hidden_weight, input_bias, hidden_bias = layer.parameters()
            joined_weight = torch.cat((input_weight, hidden_weight), dim=1).T.contiguous()
            self._upper_layers.append((joined_weight, input_bias + hidden_bias))

        self._head_weight = self.output.weight.T.contiguous()
        self._head_bias = self.output.bias.clone()

    def fused(self) -> FusedRNN:
        return self

    def _step(self, inputs: Tensor, hidden: Sequence[Tensor]) -> list[Tensor]:
        """Every layer's next hidden state, from the token's row of the table and the last ones."""
        next_hidden = [torch.addmm(inputs, hidden[0], self._weight).tanh_()]
        for (weight, bias), layer_hidden in zip(self._upper_layers, hidden[1:], strict=True):
            joined = torch.cat((next_hidden[-1], layer_hidden), dim=1)
            next_hidden.append(torch.addmm(bias, joined, weight).tanh_())
        return next_hidden

    def run_layers(self, tokens: Tensor, hidden: Sequence[Tensor | None]) -> list[Tensor]:
        inputs = self._table[tokens]
        zeros = inputs.new_zeros(tokens.shape[0], self.hidden_size)
        layer_hidden = [zeros if layer is None else layer for layer in hidden]
        steps = []
        for step_inputs in inputs.unbind(1):
            layer_hidden = self._step(step_inputs, layer_hidden)
            steps.append(layer_hidden)
        return [torch.stack(layer_steps, dim=1) for layer_steps in zip(*steps, strict=True)]

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

        recurrent_state = _recurrent(state, self)
        hidden = list(recurrent_state.hidden().split(self.hidden_size, dim=-1))
        steps: list[Tensor] = []
        for token in tokens.unbind(1):
            hidden = self._step(self._table.index_select(0, token), hidden)
            steps.append(self._joined(hidden))

        for i in range(num_tokens):
            logits = torch.addmm(self._head_bias, hidden[-1], self._head_weight)
            token = choose(logits, i)
            is_last = i == num_tokens - 1
            if not is_last:  # the state consumes all new tokens but the last one
                hidden = self._step(self._table.index_select(0, token), hidden)
                steps.append(self._joined(hidden))
        recurrent_state.append(torch.stack(steps, dim=1))

    def _joined(self, hidden: list[Tensor]) -> Tensor:
        """The hidden states of all layers side by side."""
        return torch.cat(hidden, dim=1) if self.num_layers > 1 else hidden[0]
