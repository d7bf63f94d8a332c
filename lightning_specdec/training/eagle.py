"""Training an EAGLE head on its own rollouts.

Shapes: B rows, T entries, D width of the target's hidden states, N positions, W tokens of the draft, H attention heads
that share G keys, E size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_specdec.data import Batch
from lightning_specdec.drafters import EagleDrafter
from lightning_specdec.drafters.eagle import FeatureDrafter
from lightning_specdec.drafters.eagle_network import EagleNetwork, attention
from lightning_specdec.drafters.heads import rows_of
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.distillation import DistillationTraining
from lightning_specdec.training.target_outputs import DraftStep, TargetOutputs

if TYPE_CHECKING:
    from jaxtyping import Float

HEAD_SIZE = 64


class FeatureTraining(DistillationTraining):
    """Trains a draft over the target's hidden states.

    Args:
        make: the drafter's class, or a function with further arguments of it.
        num_heads: attention heads; as many as make each 64 wide when None.
        num_key_heads: key heads that they share; as many when None.
        intermediate_size: width of the inner network; four times the hidden size when None.
        attention_window: newest entries that the attention sees; all when None. With a window shorter than most
            training texts, the draft works at any length.
        feature_norms: as of the drafter's settings.
        draft_vocabulary: size of the draft's vocabulary, the most frequent tokens of the training texts; the target's
            vocabulary when None.
        options: those of `DistillationTraining`.
    """

    first_round = False
    drafter: FeatureDrafter

    def __init__(
        self,
        make: Callable[..., FeatureDrafter],
        target: LanguageModel | None = None,
        *,
        num_heads: int | None = None,
        num_key_heads: int | None = None,
        intermediate_size: int | None = None,
        attention_window: int | None = None,
        feature_norms: bool = True,
        draft_vocabulary: int | None = None,
        **options: Any,
    ) -> None:
        def make_drafter(target: LanguageModel) -> FeatureDrafter:
            size, num_layers = target.hidden_size or 0, target.num_layers or 1
            heads = num_heads or max(1, size // HEAD_SIZE)
            # EAGLE-3 reads the third layer, the middle one and the third last.
            layers = {min(2, num_layers - 1), num_layers // 2, max(0, num_layers - 3)}
            return make(
                feature_layers=sorted(layers),
                hidden_size=size,
                vocab_size=target.vocab_size,
                num_heads=heads,
                num_key_heads=num_key_heads or heads,
                intermediate_size=intermediate_size or 4 * size,
                attention_window=attention_window,
                feature_norms=feature_norms,
                draft_vocabulary=draft_vocabulary,
            )

        super().__init__(make_drafter, target, **options)

    @torch.no_grad()
    def init_from_target(self) -> None:
        """Copy the target's output head."""
        self.drafter.network.output.weight.copy_(
            rows_of(self.target.output_weight, self.draft_vocabulary)
        )


class EagleTraining(FeatureTraining):
    """Trains an `EagleDrafter` by training-time test (Li et al. 2025, "EAGLE-3", section 3).

    Args:
        norm_output: as of `EagleSettings`. With `feature_norms` it makes EAGLE-3.1; without both it is plain EAGLE-3.
        random_lengths: whether a step's rollouts end early at random, each draft token being followed by another with
            probability `position_decay`. The expected loss is the same, at half the work for a decay of 0.6.
        options: those of `FeatureTraining` and `DistillationTraining`.
    """

    drafter: EagleDrafter

    def __init__(
        self,
        target: LanguageModel | None = None,
        *,
        norm_output: bool = False,
        random_lengths: bool = False,
        **options: Any,
    ) -> None:
        self.random_lengths = random_lengths
        super().__init__(partial(EagleDrafter, norm_output=norm_output), target, **options)

    def loss_weights(self, num_steps: int) -> list[float]:
        if not (self.random_lengths and self.training):
            return super().loss_weights(num_steps)
        return [1 / sum(self.position_decay**i for i in range(self.num_draft_tokens))] * num_steps

    def rollout_length(self, step: int) -> int:
        """Draft tokens of the rollouts of an optimizer step: depends on its number alone, so that runs can resume."""
        if not (self.random_lengths and self.training):
            return self.num_draft_tokens
        noise = torch.rand(self.num_draft_tokens - 1, generator=torch.Generator().manual_seed(step))
        return 1 + int((noise < self.position_decay).long().cumprod(0).sum())

    def draft_steps(self, batch: Batch, outputs: TargetOutputs) -> list[DraftStep]:
        network = self.drafter.network
        features = network.features(
            [outputs.features[layer][:, :-1].float() for layer in self.layers()]
        )
        embedded = self.target.embeddings(batch.tokens[:, 1:])
        steps = rollouts(network, embedded, features, self.rollout_length(self.global_step))
        # The last entry predicts the token behind the text; entries before a step's number belong to no round.
        return [DraftStep(hidden[:, i:-1], 2 + i) for i, hidden in enumerate(steps)]

    def step_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N W"]:
        return self.drafter.network.logits(hidden)


def rollouts(
    network: EagleNetwork,
    embedded: Float[Tensor, "B T D"],
    features: Float[Tensor, "B T D"],
    num_steps: int,
) -> list[Float[Tensor, "B T D"]]:
    """The network's output at every entry for each step of the rounds that start at every entry, computed together.

    At step i, entry j belongs to the round that starts at entry j - i. It reads the output of step i - 1 at entry j - 1
    instead of the target's features, and attends to that round's memory. Tokens are those of the text.

    Args:
        embedded: embedding of the token after each entry's token.
        features: features of each entry's token, from `EagleNetwork.features`.
        num_steps: draft tokens of a round.

    Returns:
        For step i, `[:, j]` predicts token j + 2 of a round that starts at entry j - i; entries before i are undefined.
    """
    positions = torch.arange(embedded.shape[1], device=embedded.device)[None]
    all_keys, all_values, outputs = list[Tensor](), list[Tensor](), list[Tensor]()

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        all_keys.append(keys)
        all_values.append(values)
        return _attend_in_rounds(queries, all_keys, all_values, network.attention_window)

    for _ in range(num_steps):
        outputs.append(network.layer(embedded, features, positions, attend))
        features = _shifted(network.fed_back(outputs[-1]), 1)
    return outputs


def _attend_in_rounds(
    queries: Float[Tensor, "B H T E"],
    all_keys: Sequence[Float[Tensor, "B G T E"]],
    all_values: Sequence[Float[Tensor, "B G T E"]],
    window: int | None,
) -> Float[Tensor, "B H T E"]:
    """Attention of a step's entries to their own rounds, given the keys and values of all steps up to it.

    A round remembers its entries up to the first one as step 0 read them, then one entry of each later step; entries
    see the last `window` of these.
    """
    num_entries, step = queries.shape[2], len(all_keys) - 1
    entries = torch.arange(num_entries, device=queries.device)
    distances = entries[:, None] - entries
    seen = (distances >= step) & (distances < (num_entries if window is None else window))
    if step == 0:
        return attention(queries, all_keys[0], all_values[0], seen[None])
    later = range(1 if window is None else max(1, step - window + 1), step + 1)
    keys = [all_keys[0], *(_shifted(all_keys[i], step - i) for i in later)]
    values = [all_values[0], *(_shifted(all_values[i], step - i) for i in later)]
    # Attention to the first keys where `seen` says so, and to one entry of each later step at the same place.
    queries = queries.unflatten(1, (keys[0].shape[1], -1)) * queries.shape[3] ** -0.5
    square = (queries.flatten(2, 3) @ keys[0].transpose(-1, -2)).unflatten(2, (-1, num_entries))
    single = [(queries * each[:, :, None]).sum(-1, keepdim=True) for each in keys[1:]]
    scores = torch.cat([square.masked_fill(~seen, -torch.inf), *single], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(values[0].dtype)
    output = (weights[..., :num_entries].flatten(2, 3) @ values[0]).unflatten(2, (-1, num_entries))
    for number, each in enumerate(values[1:], start=num_entries):
        output = output + weights[..., number : number + 1] * each[:, :, None]
    return output.flatten(1, 2)


def _shifted(entries: Float[Tensor, "*B T D"], count: int) -> Float[Tensor, "*B T D"]:
    """Entry j at j + `count`, after zeros."""
    return functional.pad(entries[..., : entries.shape[-2] - count, :], (0, 0, count, 0))
