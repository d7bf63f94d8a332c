"""The textbook recurrent network as a language model, and its fused form for decoding.

Shapes: B rows, T tokens, V vocabulary, H hidden units of a layer, L layers, D = L * H.
"""

from __future__ import annotations

from abc import abstractmethod
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


class _RecurrentLM(LanguageModel):
    """What both forms share: sizes, the state, and the order of a forward pass."""

    hidden_size: int
    num_layers: int

    def __init__(self, settings: RNNSettings) -> None:
        super().__init__()
        self.settings = settings
        self.vocab_size, self.hidden_size = settings.vocab_size, settings.hidden_size
        self.num_layers = settings.num_layers

    def arguments(self) -> dict[str, Any]:
        return self.settings.to_dict()

    def init_state(self, batch_size: int, max_length: int) -> RecurrentState:
        size, weight = self.num_layers * self.hidden_size, self.output_weight
        return RecurrentState(batch_size, size, device=weight.device, dtype=weight.dtype)

    @property
    def device(self) -> torch.device:
        return self.output_weight.device

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
            assert isinstance(state, RecurrentState), f"{type(self).__name__} needs a RecurrentState, got {state}"
            layers = self.run_layers(tokens, list(state.hidden().split(self.hidden_size, dim=-1)))
            state.append(torch.cat(layers, dim=-1) if len(layers) > 1 else layers[0], valid_lengths)
        top = select(layers[-1], logits_for)
        return ModelOutput(self.output_logits(top), {layer: layers[layer] for layer in features}, logits_for)

    @abstractmethod
    def run_layers(self, tokens: Int[Tensor, "B T"], hidden: Sequence[Tensor | None]) -> list[Float[Tensor, "B T H"]]:
        """Each layer's hidden states after each token, from each layer's `[B, H]` before (zeros for None)."""

    def check_output_head(self) -> None:
        pass


class RNN(_RecurrentLM):
    """Elman network: h_t = tanh(W x_t + U h_(t-1) + b), layer over layer, and a linear head.

    The smallest model on which speculative decoding can be shown whole. Layers are separate single-layer modules
    because the state needs every layer at every step, and `nn.RNN` gives only the top one.

    Args:
        vocab_size: number of tokens.
        settings: the other fields of `RNNSettings`.

    Source: Elman 1990, "Finding structure in time".
    """

    Settings = RNNSettings

    def __init__(self, vocab_size: int, **settings: Any) -> None:
        super().__init__(RNNSettings(vocab_size, **settings))
        size, hidden_size = self.settings.embedding_size, self.hidden_size
        self.embedding = nn.Embedding(vocab_size, size)
        inputs = [size] + [hidden_size] * (self.num_layers - 1)
        self.layers = nn.ModuleList(nn.RNN(width, hidden_size, batch_first=True) for width in inputs)
        self.output = nn.Linear(hidden_size, vocab_size)

    def run_layers(self, tokens: Int[Tensor, "B T"], hidden: Sequence[Tensor | None]) -> list[Float[Tensor, "B T H"]]:
        outputs, below = [], self.embedding(tokens)
        for layer, before in zip(self.layers, hidden, strict=True):
            below, _ = layer(below, None if before is None else before[None].contiguous())
            outputs.append(below)
        return outputs

    def output_logits(self, hidden: Float[Tensor, "*N H"]) -> Float[Tensor, "*N V"]:
        return self.output(hidden)

    @property
    def output_weight(self) -> Float[Tensor, "V D"]:
        return self.output.weight

    def fused(self) -> FusedRNN:
        return FusedRNN(self)


class FusedRNN(_RecurrentLM):
    """An `RNN` folded for decoding: the same function in about a third of the launches.

    A network this small spends its time on launches, not on arithmetic. The embedding, the first layer's input
    projection and both its biases depend on the token alone, so they fold into one table of V rows; each upper layer's
    two products fold into one over the joined input and hidden state. A roll-out reads and writes the state once.

    Args:
        model: the network to fold, where it is and as it is: later changes or moves do not reach this copy.
    """

    def __init__(self, model: RNN) -> None:
        super().__init__(model.settings)
        self.vocabulary, self._num_parameters = model.vocabulary, model.num_parameters
        with torch.no_grad():
            (from_input, from_hidden, *biases), *upper = [list(layer.parameters()) for layer in model.layers]
            table = model.embedding.weight @ from_input.T + biases[0] + biases[1]
            weight = from_hidden.T.contiguous()
            head_weight, head_bias = model.output.weight.T.contiguous(), model.output.bias.clone()
            upper_weights = [torch.cat((layer[0], layer[1]), dim=1).T.contiguous() for layer in upper]
            upper_biases = [layer[2] + layer[3] for layer in upper]
        # Plain attributes: a registered buffer is found through nn.Module.__getattr__, which costs as much as a launch.
        self._table, self._weight, self._head_weight, self._head_bias = table, weight, head_weight, head_bias
        self._upper = list(zip(upper_weights, upper_biases, strict=True))

    @property
    def num_parameters(self) -> int:
        return self._num_parameters

    @property
    def memory_bytes(self) -> int:
        upper = [tensor for pair in self._upper for tensor in pair]
        return sum(each.nbytes for each in (self._table, self._weight, self._head_weight, self._head_bias, *upper))

    @property
    def device(self) -> torch.device:
        return self._table.device

    def _step(self, inputs: Float[Tensor, "B H"], hidden: Sequence[Tensor]) -> list[Float[Tensor, "B H"]]:
        """Every layer's next hidden state, from the token's row of the table and the hidden states before."""
        after = [torch.addmm(inputs, hidden[0], self._weight).tanh_()]
        for (weight, bias), before in zip(self._upper, hidden[1:], strict=True):
            after.append(torch.addmm(bias, torch.cat((after[-1], before), dim=1), weight).tanh_())
        return after

    def run_layers(self, tokens: Int[Tensor, "B T"], hidden: Sequence[Tensor | None]) -> list[Float[Tensor, "B T H"]]:
        inputs = self._table[tokens]
        zeros = inputs.new_zeros(tokens.shape[0], self.hidden_size)
        before = [zeros if layer is None else layer for layer in hidden]
        steps = []
        for step_inputs in inputs.unbind(1):
            before = self._step(step_inputs, before)
            steps.append(before)
        return [torch.stack(layer, dim=1) for layer in zip(*steps, strict=True)]

    def output_logits(self, hidden: Float[Tensor, "*N H"]) -> Float[Tensor, "*N V"]:
        return hidden @ self._head_weight + self._head_bias

    @property
    def output_weight(self) -> Float[Tensor, "V D"]:
        return self._head_weight.T

    def rollout(
        self,
        tokens: Int[Tensor, "B T"],
        state: DecodeState,
        num_tokens: int,
        choose: Callable[[Float[Tensor, "B V"], int], Int[Tensor, "B"]],
        *,
        valid_lengths: Lengths | None = None,
    ) -> Int[Tensor, "B num_tokens"]:
        if valid_lengths is not None:
            return super().rollout(tokens, state, num_tokens, choose, valid_lengths=valid_lengths)
        assert isinstance(state, RecurrentState), f"{type(self).__name__} needs a RecurrentState, got {state}"
        layers: Sequence[Tensor] = state.hidden().split(self.hidden_size, dim=-1)
        steps: list[Tensor] = []
        chosen: list[Tensor] = []
        known = tokens.unbind(1)
        for place in range(len(known) + num_tokens - 1):
            token = known[place] if place < len(known) else chosen[-1]
            layers = self._step(self._table.index_select(0, token), layers)
            steps.append(torch.cat(layers, dim=1) if self.num_layers > 1 else layers[0])
            if place >= len(known) - 1:
                logits = torch.addmm(self._head_bias, layers[-1], self._head_weight)
                chosen.append(choose(logits, len(chosen)))
        state.append(torch.stack(steps, dim=1))
        return torch.stack(chosen, dim=1)
