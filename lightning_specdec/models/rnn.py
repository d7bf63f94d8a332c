"""The textbook recurrent network as a language model, and its fused form for decoding.

Shapes: B rows, T tokens, V vocabulary, H hidden units of a layer, L layers, D = L * H.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_specdec.checks import require_int
from lightning_specdec.models.base import LanguageModel, ModelOutput, Plain, select
from lightning_specdec.models.state import DecodeState, Lengths, RecurrentState

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class _RecurrentLM(LanguageModel):
    """What both forms share: sizes, the state, and the order of a forward pass."""

    vocab_size: int
    hidden_size: int
    num_layers: int

    def _init_state_like(self, weight: Tensor, batch_size: int) -> RecurrentState:
        size = self.num_layers * self.hidden_size
        return RecurrentState(batch_size, size, device=weight.device, dtype=weight.dtype)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        state: DecodeState | None = None,
        *,
        valid_lengths: Lengths | None = None,
        logits_for: Int[Tensor, "B N"] | slice | None = None,
        features: Sequence[int] = (),
        parents: Int[Tensor, "B T"] | None = None,
    ) -> ModelOutput:
        if parents is not None:
            raise ValueError(f"{type(self).__name__} reads one path of tokens: draft without a tree")
        if state is None:
            layers = self.run_layers(tokens, [None] * self.num_layers)
        else:
            assert isinstance(state, RecurrentState), f"{type(self).__name__} needs a RecurrentState, got {state}"
            layers = self.run_layers(tokens, list(state.hidden().split(self.hidden_size, dim=-1)))
            state.append(torch.cat(layers, dim=-1) if len(layers) > 1 else layers[0], valid_lengths)
        top = select(layers[-1], logits_for)
        return ModelOutput(self.head(top), {layer: layers[layer] for layer in features}, logits_for)

    def run_layers(self, tokens: Int[Tensor, "B T"], hidden: Sequence[Tensor | None]) -> list[Float[Tensor, "B T H"]]:
        """Each layer's hidden states after each token, from each layer's `[B, H]` before (zeros for None)."""
        raise NotImplementedError

    def head(self, top: Float[Tensor, "*N H"]) -> Float[Tensor, "*N V"]:
        """Logits from the top layer."""
        raise NotImplementedError

    def check_output_head(self) -> None:
        pass

    def output_logits(self, hidden: Float[Tensor, "B N D"]) -> Float[Tensor, "B N V"]:
        return self.head(hidden)


class RNN(_RecurrentLM):
    """Elman network: h_t = tanh(W x_t + U h_(t-1) + b), layer over layer, and a linear head.

    Theory: the smallest model on which speculative decoding can be shown whole. Its state is a vector, so it goes back
    by keeping one for each position. It reads one token after the other, so verifying four tokens costs four
    steps: what speculation saves here is launches and calls, not arithmetic. Layers are separate single-layer modules
    because the state needs every layer at every step, and `nn.RNN` gives only the top one.

    Args:
        vocab_size: V.
        embedding_size: width of the token embeddings.
        hidden_size: H.
        num_layers: L.

    Source: Elman 1990, "Finding structure in time".
    """

    def __init__(
        self, vocab_size: int, *, embedding_size: int = 32, hidden_size: int = 64, num_layers: int = 2
    ) -> None:
        super().__init__()
        self.vocab_size = require_int("vocab_size", vocab_size, 2, 2**20)
        self.embedding_size = require_int("embedding_size", embedding_size, 1, 2**14)
        self.hidden_size = require_int("hidden_size", hidden_size, 1, 2**14)
        self.num_layers = require_int("num_layers", num_layers, 1, 64)
        self.embedding = nn.Embedding(vocab_size, embedding_size)
        inputs = [embedding_size] + [hidden_size] * (num_layers - 1)
        self.layers = nn.ModuleList(nn.RNN(size, hidden_size, batch_first=True) for size in inputs)
        self.output = nn.Linear(hidden_size, vocab_size)

    def init_state(self, batch_size: int, max_length: int) -> RecurrentState:
        return self._init_state_like(self.output.weight, batch_size)

    @property
    def device(self) -> torch.device:
        return self.output.weight.device

    def arguments(self) -> dict[str, Plain]:
        return {name: getattr(self, name) for name in ("vocab_size", "embedding_size", "hidden_size", "num_layers")}

    def run_layers(self, tokens: Int[Tensor, "B T"], hidden: Sequence[Tensor | None]) -> list[Float[Tensor, "B T H"]]:
        outputs, below = [], self.embedding(tokens)
        for layer, before in zip(self.layers, hidden, strict=True):
            below, _ = layer(below, None if before is None else before[None].contiguous())
            outputs.append(below)
        return outputs

    def head(self, top: Float[Tensor, "*N H"]) -> Float[Tensor, "*N V"]:
        return self.output(top)

    @property
    def output_weight(self) -> Float[Tensor, "V D"]:
        return self.output.weight

    def fused(self) -> FusedRNN:
        return FusedRNN(self)


class FusedRNN(_RecurrentLM):
    """An `RNN` folded for decoding: the same function in about a third of the launches.

    Theory: a network this small spends its time on launching operations, not on arithmetic. The embedding, the first
    layer's input projection and both its biases depend on the token alone, so they fold into one table of V rows;
    each upper layer's two products fold into one over the joined input and hidden state. A step is then a look-up and,
    for each layer, one product with its sum and one tanh. A roll-out reads the state once and writes it once.

    Args:
        model: the network to fold, where it is and as it is: later changes or moves do not reach this copy.
    """

    def __init__(self, model: RNN) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size, self.num_layers = model.vocab_size, model.hidden_size, model.num_layers
        self.vocabulary = model.vocabulary
        self._arguments, self._num_parameters = model.arguments(), model.num_parameters
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

    def weights(self) -> list[Tensor]:
        """All tensors that the function depends on, in the order that `with_weights` takes."""
        upper = [tensor for pair in self._upper for tensor in pair]
        return [self._table, self._weight, self._head_weight, self._head_bias, *upper]

    def with_weights(self, weights: Sequence[Tensor]) -> FusedRNN:
        """The same network over other weights, which a compiler can then treat as arguments."""
        other = copy(self)
        other._table, other._weight, other._head_weight, other._head_bias, *upper = weights
        other._upper = list(zip(upper[::2], upper[1::2], strict=True))
        return other

    def init_state(self, batch_size: int, max_length: int) -> RecurrentState:
        return self._init_state_like(self._table, batch_size)

    def arguments(self) -> dict[str, Plain]:
        return self._arguments

    @property
    def num_parameters(self) -> int:
        return self._num_parameters

    @property
    def memory_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights())

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

    def head(self, top: Float[Tensor, "*N H"]) -> Float[Tensor, "*N V"]:
        return top @ self._head_weight + self._head_bias

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
        chosen, hidden = self.unroll(tokens, state.hidden(), num_tokens, choose)
        state.append(hidden)
        return chosen

    def unroll(
        self,
        tokens: Int[Tensor, "B T"],
        hidden: Float[Tensor, "B D"],
        num_tokens: int,
        choose: Callable[[Float[Tensor, "B V"], int], Int[Tensor, "B"]],
    ) -> tuple[Int[Tensor, "B num_tokens"], Float[Tensor, "B S D"]]:
        """The roll-out as a function of tensors, for a compiler: the chosen tokens, and the hidden states after each
        of the S = T + num_tokens - 1 tokens read."""
        layers: Sequence[Tensor] = hidden.split(self.hidden_size, dim=-1)
        steps: list[Tensor] = []
        for token in tokens.unbind(1):
            layers = self._step(self._table.index_select(0, token), layers)
            steps.append(torch.cat(layers, dim=1) if self.num_layers > 1 else layers[0])
        chosen = [choose(torch.addmm(self._head_bias, layers[-1], self._head_weight), 0)]
        for i in range(1, num_tokens):
            layers = self._step(self._table.index_select(0, chosen[-1]), layers)
            steps.append(torch.cat(layers, dim=1) if self.num_layers > 1 else layers[0])
            chosen.append(choose(torch.addmm(self._head_bias, layers[-1], self._head_weight), i))
        return torch.stack(chosen, dim=1), torch.stack(steps, dim=1)
