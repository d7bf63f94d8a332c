"""The target's outputs for training texts, and the positions that a draft learns from.

Shapes: B rows, T tokens, M positions, N positions of a piece, D width of a hidden state, V
vocabulary of the target, W tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor

from lightning_specdec.checkpoints import checkpoint as checkpoint_file
from lightning_specdec.checkpoints.target_reference import TargetReference
from lightning_specdec.config.hub import is_gguf
from lightning_specdec.data import Batch, TokenData
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules.sampling import largest
from lightning_specdec.text.tokenizer import named_tokenizer

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

LOGIT_BYTES = 2**28
"""Maximum bytes of float32 logits in memory at once."""
CACHED_LOGITS = 2**20
"""Maximum float32 logits that a CPU works on at once, so that they stay in its cache."""
COUNTED_AT_ONCE = 2**20
"""Tokens that are counted together."""


# --- the target's outputs ---


@dataclass(frozen=True)
class TargetOutputs:
    """The target's outputs for a batch; `[:, t]` belongs to token t and predicts token t + 1.

    Args:
        features: hidden states by layer, in the target's dtype.
        log_probs: log probabilities of the draft's tokens at temperature 1, normalized over the
            target's whole vocabulary.
        choices: the target's most likely token.
    """

    features: dict[int, Float[Tensor, "B T D"]]
    log_probs: Float[Tensor, "B T W"]
    choices: Int[Tensor, "B T"]


class OnlineFeatures:
    """Runs the target on each training batch."""

    def prepare(
        self,
        target: LanguageModel,
        data: TokenData,
        layers: Sequence[int],
        splits: Sequence[str],
    ) -> None:
        """Called in every process when a run starts, with the splits that it will read.

        Raises:
            ValueError: the outputs for this data cannot be computed.
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
        """The target's outputs for a batch of a split.

        Args:
            split: name of the split; only cached outputs need it.
            layers: layers whose hidden states are returned.
            tokens: the draft's vocabulary; the target's whole vocabulary when None.
        """
        features: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        log_probs: list[Tensor] = []
        choices: list[Tensor] = []

        # Few rows at a time, because float32 logits of a whole batch take gigabytes.
        num_rows = rows_at_once(batch.tokens.shape[1], target.vocab_size)
        with _precision_of(target, batch.tokens.device):
            for rows in batch.tokens.split(num_rows):
                output = target(rows, features=tuple(layers))
                for logits in in_float32(output.logits):
                    log_normalizer = logits.logsumexp(-1, keepdim=True)
                    log_probs.append(pick(logits, tokens) - log_normalizer)
                    choices.append(largest(logits))
                for layer in layers:
                    features[layer].append(output.features[layer])

        shape = batch.tokens.shape
        return TargetOutputs(
            features={layer: torch.cat(parts) for layer, parts in features.items()},
            log_probs=torch.cat(log_probs).unflatten(0, shape),
            choices=torch.cat(choices).unflatten(0, shape),
        )


def _precision_of(target: LanguageModel, device: torch.device) -> AbstractContextManager[object]:
    """Turn off mixed precision for a frozen target, which computes as in decoding."""
    if is_trained(target):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def rows_at_once(num_tokens: int, vocab_size: int) -> int:
    """Number of rows of that many tokens whose logits may be in memory at once."""
    bytes_per_row = 4 * num_tokens * vocab_size
    return max(1, LOGIT_BYTES // bytes_per_row)


def in_float32(logits: Float[Tensor, "B T V"]) -> Iterator[Float[Tensor, "N V"]]:
    """The logits of all positions in float32; on a CPU in pieces that fit its cache."""
    flat_logits = logits.flatten(0, 1)
    num_positions = len(flat_logits)
    if flat_logits.is_cpu:
        num_positions = max(1, CACHED_LOGITS // flat_logits.shape[1])
    for piece in flat_logits.split(num_positions):
        yield piece.float()


def pick(values: Float[Tensor, "*B V"], tokens: Int[Tensor, "W"] | None) -> Float[Tensor, "*B W"]:
    """The entries of some tokens, of all when None."""
    if tokens is None:
        return values
    return values.index_select(-1, tokens)


# --- which positions a draft learns from ---


class DraftStep(NamedTuple):
    """One draft token of every round that training texts contain: the i-th token for the i-th step.

    Args:
        hidden: inputs of the output head; `[:, m]` predicts token `first_index + stride * m`.
        first_index: index of the first predicted token.
        stride: distance between predicted tokens.
    """

    hidden: Float[Tensor, "B M D"]
    first_index: int
    stride: int = 1

    @property
    def predicted(self) -> slice:
        """The predicted tokens."""
        num_positions = self.hidden.shape[1]
        return slice(self.first_index, self.first_index + self.stride * num_positions, self.stride)

    @property
    def before(self) -> slice:
        """The tokens before the predicted ones, whose target outputs predict the same."""
        return slice(self.predicted.start - 1, self.predicted.stop - 1, self.stride)

    def learned(self, batch: Batch, *, prompts: bool) -> Bool[Tensor, "B M"]:
        """A mask of the positions that the draft learns from.

        Args:
            prompts: whether tokens of prompts count, except for the very first token.
        """
        positions = torch.arange(self.hidden.shape[1], device=batch.tokens.device)
        token_indices = self.first_index + self.stride * positions
        if prompts:
            first_learned = torch.ones_like(batch.lengths)
        else:
            first_learned = batch.prompt_lengths

        is_text = token_indices < batch.lengths[:, None]
        return is_text & (token_indices >= first_learned[:, None])


# --- training data ---


def batches(data: TokenData, split: str) -> Iterator[Batch]:
    """All rows of a split in order."""
    rows = data.rows(split)
    for start in range(0, len(rows), data.batch_size):
        end = min(start + data.batch_size, len(rows))
        batch_rows = [rows[index] for index in range(start, end)]
        yield data.collate(batch_rows)


def token_counts(data: TokenData, vocab_size: int) -> Int[Tensor, "V"]:
    """How often each token occurs in the training split, prompts excluded."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    generated_tokens: list[Tensor] = []
    num_waiting = 0
    for batch in batches(data, "train"):
        positions = torch.arange(batch.tokens.shape[1])
        is_text = positions < batch.lengths[:, None]
        is_after_prompt = positions >= batch.prompt_lengths[:, None]
        generated_tokens.append(batch.tokens[is_text & is_after_prompt])
        num_waiting += len(generated_tokens[-1])

        # Adding counts touches the whole vocabulary, so the tokens of many batches are counted
        # together.
        if num_waiting >= COUNTED_AT_ONCE:
            counts += torch.bincount(torch.cat(generated_tokens), minlength=vocab_size)
            generated_tokens = []
            num_waiting = 0
    if generated_tokens:
        counts += torch.bincount(torch.cat(generated_tokens), minlength=vocab_size)
    return counts


# --- the target of a training run ---


class ShardedTarget(ModelParallelStrategy):
    """FSDP2 for a frozen target only.

    Each process has the whole draft, which is saved and restored as in other runs.
    """

    lightning_restore_optimizer = True
    load_checkpoint = ParallelStrategy.load_checkpoint
    load_model_state_dict = ParallelStrategy.load_model_state_dict
    load_optimizer_state_dict = ParallelStrategy.load_optimizer_state_dict
    optimizer_state = ParallelStrategy.optimizer_state


def is_sharded(trainer: Trainer) -> bool:
    """Whether the processes share the target's layers, so that they must call it together."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def is_trained(target: LanguageModel) -> bool:
    """Whether any weight of the target is trained."""
    return any(weight.requires_grad for weight in target.parameters())


def given_target(
    target: LanguageModel | None,
    path: str | None,
    freeze: bool,
    *,
    dtype: str | None = None,
    adapter: str | None = None,
) -> tuple[LanguageModel, str | None]:
    """The target of a training run, and the tokenizer that its checkpoint names.

    Args:
        path: a checkpoint, or the directory of a transformers model or its GGUF file; instead of
            `target`.
        freeze: whether the target stays unchanged; a trained target is loaded in float32.
        dtype: dtype of a frozen target from a directory; the stored dtype when None.
        adapter: an adapter to merge into a target from a directory.

    Raises:
        ValueError: not exactly one of `target` and `path` is given, or the file contains no usable
            model.
        FileNotFoundError: there is no such file.
    """
    if (target is None) == (path is None):
        num_given = "neither" if path is None else "both"
        raise ValueError(
            f"a draft needs one target, got {num_given}: give either `target` or "
            "`target_checkpoint`"
        )
    is_pretrained = path is not None and (Path(path).is_dir() or is_gguf(Path(path)))
    if adapter is not None and not is_pretrained:
        raise ValueError(
            "target_adapter is merged into the model of a directory: give that as target_checkpoint"
        )
    if target is not None:
        return target, None

    assert path is not None
    tokenizer = None
    if is_pretrained:
        # Imports transformers, which other targets do without.
        from lightning_specdec.models.loading import load_model

        loaded_target: LanguageModel = load_model(
            path, dtype=dtype if freeze else "float32", adapter=adapter
        )
    else:
        pair = checkpoint_file.load(path)
        loaded_target = pair.target
        tokenizer = pair.tokenizer
        if pair.reference is not None and not freeze:
            loaded_target = loaded_target.float()

    if not freeze:
        # Its weights will differ from those of the files.
        loaded_target.origin = None
    return loaded_target, tokenizer


def stored_elsewhere(target: LanguageModel) -> TargetReference | None:
    """The reference to a frozen target in its own files, which a checkpoint omits; else None."""
    if target.origin is None or is_trained(target):
        return None
    return TargetReference.of(target)


def check_same_tokens(source: str, vocab_size: int, tokenizer: str | None, data: TokenData) -> None:
    """Raise ValueError unless a target's vocabulary and tokenizer are those of the data."""
    fingerprints = {
        None if name is None else named_tokenizer(name).fingerprint
        for name in {tokenizer, data.tokenizer}
    }
    if vocab_size != data.vocab_size or len(fingerprints) > 1:
        raise ValueError(
            f"{source} has {vocab_size} tokens and the tokenizer {tokenizer or 'none'}, the data "
            f"have {data.vocab_size} and {data.tokenizer or 'none'}: give the data that its target "
            "was trained on"
        )
