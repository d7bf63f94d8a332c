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
            recurrent_state.append(_join_layers(outputs), valid_lengths)

        scored_hidden = select(outputs[-1], logits_for)
        logits = self.output_logits(scored_hidden)
        requested_features = {layer: outputs[layer] for layer in features}
        return ModelOutput(logits, requested_features, logits_for)

    def run_layers(
        self,
        tokens: Int[Tensor, "B T"],
        hidden: Sequence[Tensor | None],
    ) -> list[Float[Tensor, "B T H"]]:
        """Each layer's hidden states after each token.

        Args:
            hidden: each layer's `[B, H]` before the first token; None for zeros.
        """
        outputs = []
        inputs = self.embedding(tokens)
        for layer, layer_hidden in zip(self.layers, hidden, strict=True):
            initial = None
            if layer_hidden is not None:
                # nn.RNN expects `[num_layers, B, H]`, and each of these modules has one layer.
                initial = layer_hidden[None].contiguous()
            layer_outputs, _ = layer(inputs, initial)
            outputs.append(layer_outputs)
            inputs = layer_outputs
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


def _join_layers(hidden: Sequence[Float[Tensor, "*B H"]]) -> Float[Tensor, "*B D"]:
    """The hidden states of all layers side by side, as `RecurrentState` stores them."""
    if len(hidden) == 1:
        return hidden[0]
    return torch.cat(tuple(hidden), dim=-1)


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

        # The first layer: a table of what it adds up for each token, and the weight of its state.
        input_weight, hidden_weight, input_bias, hidden_bias = layers[0].parameters()
        projected_embeddings = self.embedding.weight @ input_weight.T
        self._table = projected_embeddings + input_bias + hidden_bias
        self._weight = hidden_weight.T.contiguous()

        # Each upper layer: one weight for its input and its state side by side.
        self._upper_layers: list[tuple[Tensor, Tensor]] = []
        for layer in layers[1:]:
            input_weight, hidden_weight, input_bias, hidden_bias = layer.parameters()
            joined_weight = torch.cat((input_weight, hidden_weight), dim=1)
            joined_bias = input_bias + hidden_bias
            self._upper_layers.append((joined_weight.T.contiguous(), joined_bias))

        self._head_weight = self.output.weight.T.contiguous()
        self._head_bias = self.output.bias.clone()

    def fused(self) -> FusedRNN:
        return self

    def _step(self, inputs: Tensor, hidden: Sequence[Tensor]) -> list[Tensor]:
        """Every layer's hidden state after a token.

        Args:
            inputs: the token's rows of `_table`, `[B, H]`.
            hidden: every layer's hidden state before the token, `[B, H]` each.
        """
        output = torch.addmm(inputs, hidden[0], self._weight).tanh_()
        next_hidden = [output]
        for (weight, bias), layer_hidden in zip(self._upper_layers, hidden[1:], strict=True):
            joined = torch.cat((output, layer_hidden), dim=1)
            output = torch.addmm(bias, joined, weight).tanh_()
            next_hidden.append(output)
        return next_hidden

    def run_layers(self, tokens: Tensor, hidden: Sequence[Tensor | None]) -> list[Tensor]:
        inputs = self._table[tokens]
        zeros = inputs.new_zeros(tokens.shape[0], self.hidden_size)
        next_hidden = [zeros if layer_hidden is None else layer_hidden for layer_hidden in hidden]

        hidden_by_step = []
        for step_inputs in inputs.unbind(1):
            next_hidden = self._step(step_inputs, next_hidden)
            hidden_by_step.append(next_hidden)

        hidden_by_layer = zip(*hidden_by_step, strict=True)
        return [torch.stack(layer_steps, dim=1) for layer_steps in hidden_by_layer]

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
        hidden: Sequence[Tensor] = recurrent_state.hidden().split(self.hidden_size, dim=-1)
        hidden_after_tokens: list[Tensor] = []
        for next_tokens in tokens.unbind(1):
            hidden = self._read(next_tokens, hidden)
            hidden_after_tokens.append(_join_layers(hidden))

        for i in range(num_tokens):
            logits = torch.addmm(self._head_bias, hidden[-1], self._head_weight)
            next_tokens = choose(logits, i)
            # The state consumes all new tokens but the last one.
            if i < num_tokens - 1:
                hidden = self._read(next_tokens, hidden)
                hidden_after_tokens.append(_join_layers(hidden))
        recurrent_state.append(torch.stack(hidden_after_tokens, dim=1))

    def _read(self, tokens: Int[Tensor, "B"], hidden: Sequence[Tensor]) -> list[Tensor]:
        """Every layer's hidden state after one more token of each row."""
        inputs = self._table.index_select(0, tokens)
        return self._step(inputs, hidden)
