"""What trained drafts are made of: a draft vocabulary, residual blocks, and output heads with their fused form.

Shapes: H heads, B rows, T tokens, D width of the hidden state, V tokens of the target, W tokens of the draft; E is W,
or D where no head has an output layer of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_specdec.config.checks import require_int
from lightning_specdec.models.packed import PackedLinear, can_pack

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MOST_STACKED = 4096
"""Tokens up to which output layers are stacked; larger ones are packed one by one, where that works."""


class DraftVocabulary(nn.Module):
    """W tokens of the target's V, in the target's order: the only ones that a draft proposes.

    It makes the output head cheap (Zhao et al. 2025, "FR-Spec"). All other tokens have draft probability 0.

    Args:
        tokens: the target's numbers of the draft's tokens, ascending; or how many there will be, chosen later by
            `choose` and until then the first ones.
        vocab_size: V.

    Raises:
        ValueError: they are no ascending numbers of tokens.
    """

    tokens: Tensor
    places: Tensor

    def __init__(self, tokens: int | Sequence[int], vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = require_int("vocab_size", vocab_size, 2, 2**20)
        if isinstance(tokens, int):
            tokens = range(require_int("draft_vocabulary", tokens, 2, vocab_size))
        numbers = torch.tensor(self._checked(tokens), device="cpu")
        # Not stored with the weights: a setting has them.
        self.register_buffer("tokens", numbers, persistent=False)
        self.register_buffer("places", self._places(numbers), persistent=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def choose(self, counts: Int[Tensor, "V"], required: Iterable[int] = ()) -> None:
        """Make it the most frequent tokens.

        Args:
            counts: how often each token occurs; of equally frequent ones the first goes first.
            required: tokens that are taken whatever their counts, as those that end a text.

        Raises:
            ValueError: it has no room for these.
        """
        must = sorted(set(required))
        if len(must) > len(self):
            raise ValueError(f"a draft vocabulary of {len(self)} has no room for {len(must)} tokens that it must have")
        ranked = counts.clone().double()
        ranked[torch.tensor(must, dtype=torch.long)] = torch.inf
        self._take(ranked.sort(descending=True, stable=True).indices[: len(self)].sort().values)

    def become(self, tokens: Sequence[int]) -> None:
        """Make it these tokens, as many as it has; ValueError if they are not."""
        if len(tokens) != len(self):
            raise ValueError(f"a draft vocabulary of {len(self)} tokens cannot become one of {len(tokens)}")
        self._take(torch.tensor(self._checked(tokens)))

    def _take(self, tokens: Int[Tensor, "W"]) -> None:
        self.tokens.copy_(tokens)
        self.places.copy_(self._places(tokens))

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        numbers = [require_int("a token of draft_vocabulary", token, 0, self.vocab_size - 1) for token in tokens]
        if len(numbers) < 2 or numbers != sorted(set(numbers)):
            raise ValueError(f"draft_vocabulary must ascend and have two tokens at least, got {numbers[:8]}")
        return numbers

    def _places(self, tokens: Int[Tensor, "W"]) -> Int[Tensor, "V"]:
        """The draft's number of each token of the target, -1 where it has none."""
        places = torch.full((self.vocab_size,), -1, device=tokens.device)
        places[tokens] = torch.arange(len(tokens), device=tokens.device)
        return places

    def arguments(self) -> list[int]:
        """The target's numbers, as the constructor takes them."""
        numbers: list[int] = self.tokens.tolist()
        return numbers

    def to_target(self, logits: Float[Tensor, "*B W"]) -> Float[Tensor, "*B V"]:
        """Logits over the target's tokens: -inf for those that the draft does not have."""
        room = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return room.index_copy_(-1, self.tokens, logits)

    def spread(self, probs: Float[Tensor, "*B W"]) -> Float[Tensor, "*B V"]:
        """Probabilities over the target's tokens: 0 for those that the draft does not have."""
        return probs.new_zeros(*probs.shape[:-1], self.vocab_size).index_copy_(-1, self.tokens, probs)

    def restrict(self, values: Float[Tensor, "*B V"]) -> Float[Tensor, "*B W"]:
        """The draft's tokens' part of values over the target's."""
        return values.index_select(-1, self.tokens)

    def to_draft(self, tokens: Int[Tensor, "*B"], missing: int) -> Int[Tensor, "*B"]:
        """The draft's numbers of the target's tokens; `missing` for those it does not have, and for negative ones."""
        found = self.places[tokens.clamp(min=0)]
        return found.masked_fill((found < 0) | (tokens < 0), missing)

    def check_has(self, tokens: Iterable[int], called: str) -> None:
        """Raise ValueError, which calls the tokens that name, unless the draft has these."""
        missing = sorted(token for token in tokens if int(self.places[token]) < 0)
        if missing:
            raise ValueError(f"the draft's vocabulary of {len(self)} tokens leaves out {called} ({str(missing)[1:-1]})")


def rows_of(weight: Float[Tensor, "V D"], vocabulary: DraftVocabulary | None) -> Float[Tensor, "W D"]:
    """The rows of an output head for a draft's tokens: all where it has no vocabulary of its own."""
    return weight if vocabulary is None else weight[vocabulary.tokens]


class Block(nn.Module):
    """Medusa's residual block: the hidden state, and a linear layer's activation on top; zero to begin with."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """The next block's input."""
        return hidden + nn.functional.silu(self.linear(hidden))


class Heads(nn.ModuleList):
    """Heads that all look at the same hidden state: blocks, then an output layer each.

    Args:
        num_heads: H.
        hidden_size: D.
        num_tokens: W; None for heads without an output layer.
        num_blocks: of each head.
    """

    def __init__(self, num_heads: int, hidden_size: int, num_tokens: int | None, num_blocks: int) -> None:
        super().__init__()
        self.num_blocks = num_blocks
        for _ in range(num_heads):
            head: list[nn.Module] = [Block(hidden_size) for _ in range(num_blocks)]
            if num_tokens is not None:
                head.append(nn.Linear(hidden_size, num_tokens, bias=False))
            self.append(nn.Sequential(*head))

    @property
    def dtype(self) -> torch.dtype:
        """What they compute in."""
        return next(self.parameters()).dtype

    def forward(self, hidden: Float[Tensor, "B T D"], num_heads: int | None = None) -> Float[Tensor, "H B T E"]:
        """The outputs of the first heads, or of all."""
        return torch.stack([head(hidden) for head in list(self)[:num_heads]])


class FusedHeads(nn.Module):
    """`Heads` folded for decoding: the same function, all heads in one launch for each layer.

    All heads' weights of a layer are one stack of matrices, transposed, which a product with a single row reads faster
    on a CPU. Output layers over large vocabularies are packed for the processor instead.

    Args:
        heads: what to fold, where it is and as it is: later changes or moves do not reach this copy.
    """

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.dtype = heads.dtype
        each: list[Any] = list(heads)
        places = list(zip(*each, strict=True))
        # Plain attributes: a registered buffer is found through nn.Module.__getattr__, which costs as much as a launch.
        self._blocks = [
            (_stack(block.linear.weight.T for block in place), _stack(block.linear.bias[None] for block in place))
            for place in places[: heads.num_blocks]
        ]
        self._stacked: Tensor | None = None
        self._outputs: list[nn.Module] = []
        for layers in places[heads.num_blocks :]:  # one, or none
            if layers[0].out_features <= MOST_STACKED:
                self._stacked = _stack(layer.weight.T for layer in layers)
            else:
                self._outputs = [
                    PackedLinear(layer.weight, layer.bias) if can_pack(layer) else layer for layer in layers
                ]

    def forward(self, hidden: Float[Tensor, "B T D"], num_heads: int | None = None) -> Float[Tensor, "H B T E"]:
        """See `Heads.forward`."""
        count = len(self._blocks[0][0]) if num_heads is None else num_heads
        states = hidden.flatten(0, 1).expand(count, -1, -1)
        for weight, bias in self._blocks:
            states = states + nn.functional.silu(torch.baddbmm(bias[:count], states, weight[:count]))
        if self._stacked is not None:
            states = torch.bmm(states, self._stacked[:count])
        elif self._outputs:
            states = torch.stack([layer(state) for layer, state in zip(self._outputs, states, strict=False)])
        return states.unflatten(1, hidden.shape[:2])


def _stack(weights: Iterable[Tensor]) -> Tensor:
    return torch.stack([weight.detach() for weight in weights])
