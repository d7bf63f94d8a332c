"""Medusa heads for tests: fitted to a tiny target's output, so often right; and perfect ones."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from families import placed, tiny
from torch import Tensor, nn

from lightning_specdec.decoding import autoregressive_decode
from lightning_specdec.drafters import MedusaDrafter
from lightning_specdec.models import DecodeState, KVState, LanguageModel, ModelOutput
from lightning_specdec.models.base import select
from lightning_specdec.models.huggingface import HuggingFaceLM

OPEN = ["llama", "gpt2", "gpt_neox"]
"""Families whose output head can be called separately."""
VOCAB = 11
PROMPTS = [[3], [1, 2, 3, 4, 5], [7, 7], [10, 9, 8, 7, 6, 5, 4]]
"""The prompts of the law tests, which import this file."""


_fitting = True


@contextmanager
def unfitted() -> Iterator[None]:
    """Skip fitting, which takes most of the time, where only a drafter's properties matter."""
    global _fitting
    was_fitting = _fitting
    _fitting = False
    try:
        yield
    finally:
        _fitting = was_fitting


def steps_of_fit(num_steps: int) -> int:
    """How many steps to fit a drafter for."""
    return num_steps if _fitting else 0


def family(name: str) -> HuggingFaceLM:
    return HuggingFaceLM(tiny(name, vocab_size=VOCAB))


def small(**arguments: Any) -> MedusaDrafter:
    return placed(MedusaDrafter(**{"num_heads": 2, "hidden_size": 4, "vocab_size": 7, **arguments}))


@functools.cache
def examples(target: LanguageModel) -> tuple[Tensor, Tensor]:
    """Texts `[N, T]` that the target generated, padded with -1, and its last hidden states."""
    generator = random.Random(2)
    prompts = [[generator.randrange(target.vocab_size) for _ in range(3)] for _ in range(16)]
    prompts += [[token % target.vocab_size for token in prompt] for prompt in PROMPTS]
    written = autoregressive_decode(target, prompts, max_new_tokens=12).tokens
    texts = nn.utils.rnn.pad_sequence(
        [torch.tensor([*prompt, *new]) for prompt, new in zip(prompts, written, strict=True)],
        batch_first=True,
        padding_value=-1,
    )
    assert target.num_layers is not None
    layer = target.num_layers - 1
    with torch.no_grad():
        return texts, target(texts.clamp(min=0), features=(layer,)).features[layer]


def some_tokens(vocab_size: int) -> list[int]:
    """A reduced vocabulary of most tokens."""
    return [token for token in range(vocab_size) if token % 5 != 4]


def heads(
    target: LanguageModel,
    *,
    num_heads: int = 3,
    reduced: bool = False,
    num_steps: int = 8,
) -> MedusaDrafter:
    """Heads fitted by a few steps where they take the target; read them, do not write to them.

    The global seed stays as it was.

    Args:
        reduced: whether they have a reduced vocabulary.
    """
    return _heads(target, num_heads, reduced, steps_of_fit(num_steps))


@functools.cache
def _heads(target: LanguageModel, num_heads: int, reduced: bool, num_steps: int) -> MedusaDrafter:
    assert target.hidden_size is not None
    with torch.random.fork_rng():
        torch.manual_seed(3)
        drafter = MedusaDrafter(
            num_heads,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocabulary=some_tokens(target.vocab_size) if reduced else None,
        ).to(target.device)
    try:
        drafter.check_target(target)
    except ValueError:
        return drafter
    if not num_steps:
        return drafter.eval()
    texts, hidden = examples(target)
    labels = (
        texts if drafter.draft_vocabulary is None else drafter.draft_vocabulary.to_draft(texts, -1)
    )
    weights = list(drafter.parameters())
    optimizer = torch.optim.Adam(weights, lr=0.1)
    for _ in range(num_steps):
        losses = []
        for i in range(num_heads):
            logits = drafter.logits(i, hidden[:, : -2 - i]).flatten(0, 1)
            head_labels = labels[:, 2 + i :].flatten()
            losses.append(nn.functional.cross_entropy(logits, head_labels, ignore_index=-1))
        # The target's weights may require gradients, too, and must get none.
        gradients = torch.autograd.grad(torch.stack(losses).sum(), weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
    return drafter.eval()


class Chain(LanguageModel):
    """The next token is a function of the last one, which the hidden state encodes."""

    CERTAIN = 60.0

    def __init__(self, vocab_size: int = VOCAB) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = vocab_size
        self.num_layers = 1
        self.output = nn.Linear(vocab_size, vocab_size, bias=False)
        self.output.weight.data = self.CERTAIN * self.steps(1)

    def steps(self, count: int) -> Tensor:
        """`[V, V]`: maps a token's unit vector to that of the token `count` steps later."""
        step = torch.zeros(self.vocab_size, self.vocab_size)
        tokens = torch.arange(self.vocab_size)
        step[(3 * tokens + 1) % self.vocab_size, tokens] = 1.0
        return torch.linalg.matrix_power(step, count)

    def arguments(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size}

    def init_state(self, batch_size: int, max_length: int) -> KVState:
        return KVState(batch_size, max_length, device=self.device)

    def forward(
        self,
        tokens: Tensor,
        state: DecodeState | None = None,
        *,
        valid_lengths: Sequence[int] | Tensor | None = None,
        logits_for: Tensor | slice | None = None,
        features: Sequence[int] = (),
    ) -> ModelOutput:
        if state is not None:
            state.advance(tokens.shape[1], valid_lengths)
        hidden = nn.functional.one_hot(tokens, self.vocab_size).float()
        return ModelOutput(
            self.output(select(hidden, logits_for)), dict.fromkeys(features, hidden), logits_for
        )


def perfect(target: Chain, num_heads: int) -> MedusaDrafter:
    """Heads that always predict that target's tokens."""
    size = target.vocab_size
    drafter = MedusaDrafter(num_heads, hidden_size=size, vocab_size=size)
    with torch.no_grad():
        for i, head in enumerate(drafter.heads):
            head[-1].weight.copy_(Chain.CERTAIN * target.steps(i + 2))  # type: ignore[index]
    return drafter
