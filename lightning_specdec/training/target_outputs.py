"""What a frozen target computes for training texts, and which of its predictions a draft learns from.

Shapes: B rows, T tokens, M positions, D width of a hidden state, V vocabulary of the target, W of the draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor

from lightning_specdec.checkpoints import checkpoint as checkpoint_file
from lightning_specdec.checkpoints.target_reference import TargetReference
from lightning_specdec.data import Batch, TokenData
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules.sampling import largest
from lightning_specdec.text.tokenizer import named_tokenizer

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

LOGIT_BYTES = 2**28
"""Most bytes of float32 logits that are held at once."""
CACHED_LOGITS = 2**20
"""Most float32 logits that a CPU works on at once: they stay in its cache."""


@dataclass(frozen=True)
class TargetOutputs:
    """The target's outputs for a batch; `[:, t]` belongs to token t and predicts token t + 1.

    Args:
        features: hidden states by layer, in the target's dtype.
        log_probs: log probabilities of the draft's tokens within the target's whole distribution, at temperature 1.
        choices: the target's most likely token.
    """

    features: dict[int, Float[Tensor, "B T D"]]
    log_probs: Float[Tensor, "B T W"]
    choices: Int[Tensor, "B T"]


class OnlineFeatures:
    """Runs the target on each training batch."""

    def prepare(
        self, target: LanguageModel, data: TokenData, layers: Sequence[int], splits: Sequence[str]
    ) -> None:
        """Called in every process when a run begins, with the splits that will be read.

        Raises:
            ValueError: outputs for these data cannot be provided.
        """

    def read(
        self,
        target: LanguageModel,
        batch: Batch,
        split: str,
        *,
        layers: Sequence[int],
        tokens: Int[Tensor, "W"] | None,
    ) -> TargetOutputs:
        """The outputs for a batch of that split.

        Args:
            layers: layers whose hidden states are wanted.
            tokens: the draft's vocabulary; the target's whole vocabulary when None.
        """
        features: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        log_probs, choices = [], []
        # A frozen target computes as in decoding.
        with (
            nullcontext()
            if is_trained(target)
            else torch.autocast(batch.tokens.device.type, enabled=False)
        ):
            for rows in batch.tokens.split(rows_at_once(batch.tokens.shape[1], target.vocab_size)):
                output = target(rows, features=tuple(layers))
                for piece in in_float32(output.logits):
                    log_probs.append(pick(piece, tokens) - piece.logsumexp(-1, keepdim=True))
                    choices.append(largest(piece))
                for layer in layers:
                    features[layer].append(output.features[layer])
        states = {layer: torch.cat(parts) for layer, parts in features.items()}
        shape = batch.tokens.shape
        return TargetOutputs(
            states, torch.cat(log_probs).unflatten(0, shape), torch.cat(choices).unflatten(0, shape)
        )


class ShardedTarget(ModelParallelStrategy):
    """FSDP2 of a frozen target alone: each process has the drafts whole, saved and restored as in other runs."""

    lightning_restore_optimizer = True
    load_checkpoint, load_model_state_dict = (
        ParallelStrategy.load_checkpoint,
        ParallelStrategy.load_model_state_dict,
    )
    load_optimizer_state_dict = ParallelStrategy.load_optimizer_state_dict
    optimizer_state = ParallelStrategy.optimizer_state


def is_sharded(trainer: Trainer) -> bool:
    """Whether the target's layers are spread over the processes, which then must call it together."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def is_trained(target: LanguageModel) -> bool:
    """Whether any weight of the target learns."""
    return any(weight.requires_grad for weight in target.parameters())


def rows_at_once(num_tokens: int, vocab_size: int) -> int:
    """How many rows of that many tokens may have their logits in memory at once."""
    return max(1, LOGIT_BYTES // (4 * num_tokens * vocab_size))


def in_float32(logits: Float[Tensor, "B T V"]) -> Iterator[Float[Tensor, "N V"]]:
    """The logits of one position after another in float32, on a CPU of as many positions as stay in its cache."""
    flat = logits.flatten(0, 1)
    return (
        piece.float()
        for piece in flat.split(
            max(1, CACHED_LOGITS // flat.shape[1]) if flat.is_cpu else len(flat)
        )
    )


def pick(values: Float[Tensor, "*B V"], tokens: Int[Tensor, "W"] | None) -> Float[Tensor, "*B W"]:
    """The entries of some tokens, of all when None."""
    return values if tokens is None else values.index_select(-1, tokens)


class DraftStep(NamedTuple):
    """The i-th draft token of every round that training texts contain.

    Args:
        hidden: inputs of the draft's output head; `[:, x]` predicts token `first + stride * x`.
        first: the first token that is predicted.
        stride: from one predicted token to the next.
    """

    hidden: Float[Tensor, "B M D"]
    first: int
    stride: int = 1

    @property
    def predicted(self) -> slice:
        return slice(self.first, self.first + self.stride * self.hidden.shape[1], self.stride)

    @property
    def before(self) -> slice:
        """The tokens before those, whose target outputs predict the same."""
        return slice(self.predicted.start - 1, self.predicted.stop - 1, self.stride)

    def learned(self, batch: Batch, *, prompts: bool) -> Bool[Tensor, "B M"]:
        """The positions that are learned from; those of prompts only when asked for."""
        tokens = self.first + self.stride * torch.arange(
            self.hidden.shape[1], device=batch.tokens.device
        )
        starts = torch.ones_like(batch.lengths) if prompts else batch.prompt_lengths
        return (tokens < batch.lengths[:, None]) & (tokens >= starts[:, None])


def batches(data: TokenData, split: str) -> Iterator[Batch]:
    """All rows of a split in order."""
    rows = data.rows(split)
    for first in range(0, len(rows), data.batch_size):
        yield data.collate([rows[i] for i in range(first, min(first + data.batch_size, len(rows)))])


def token_counts(data: TokenData, vocab_size: int) -> Int[Tensor, "V"]:
    """How often each token occurs in the training split, prompts excluded."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for batch in batches(data, "train"):
        positions = torch.arange(batch.tokens.shape[1])
        new = (positions < batch.lengths[:, None]) & (positions >= batch.prompt_lengths[:, None])
        counts += torch.bincount(batch.tokens[new], minlength=vocab_size)
    return counts


def given_target(
    target: LanguageModel | None, path: str | None, freeze: bool, *, dtype: str | None = None
) -> tuple[LanguageModel, str | None]:
    """The target of a training run, and the tokenizer that its checkpoint names.

    Args:
        path: a checkpoint, or the directory of a transformers model; given instead of `target`.
        freeze: whether the target stays as it is; a target that is trained is loaded in float32.
        dtype: dtype of a frozen target from a directory; as stored when None.

    Raises:
        ValueError: neither or both are given, or the file holds no usable model.
        FileNotFoundError: there is no such file.
    """
    if (target is None) == (path is None):
        given = "neither" if path is None else "both"
        raise ValueError(
            f"a draft needs one target, got {given}: give either `target` or `target_checkpoint`"
        )
    if target is not None:
        return target, None
    assert path is not None
    tokenizer = None
    if Path(path).is_dir():
        from lightning_specdec.models.loading import load_model

        found: LanguageModel = load_model(path, dtype=dtype if freeze else "float32")
    else:
        loaded = checkpoint_file.load(path)
        found, tokenizer = loaded.target, loaded.tokenizer
        if loaded.reference is not None and not freeze:
            found = found.float()
    if not freeze:
        found.origin = None
    return found, tokenizer


def stored_elsewhere(target: LanguageModel) -> TargetReference | None:
    """The reference to a frozen target with weight files of its own, which a checkpoint need not contain; else None."""
    return None if target.origin is None or is_trained(target) else TargetReference.of(target)


def check_same_tokens(source: str, vocab_size: int, tokenizer: str | None, data: TokenData) -> None:
    """Raise ValueError unless a target's vocabulary and tokenizer are those of the data."""
    names = {tokenizer, data.tokenizer}
    if (
        vocab_size != data.vocab_size
        or len({name and named_tokenizer(name).fingerprint for name in names}) > 1
    ):
        raise ValueError(
            f"{source} has {vocab_size} tokens and the tokenizer {tokenizer or 'none'}, the data have "
            f"{data.vocab_size} and {data.tokenizer or 'none'}: give the data that its target was trained on"
        )
