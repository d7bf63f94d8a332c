"""Training an EAGLE head on its own rollouts, which EAGLE-3 calls training-time test.

Entry j of a text joins the target's features at token j with the embedding of token j + 1; the
head's output there predicts token j + 2. A round that starts at entry j reads entry j with the
target's features (step 0), then feeds its own outputs back as the features of entries j + 1, j + 2,
... (steps 1, 2, ...). Training computes the rounds that start at all entries together, with the
text's own tokens.

Shapes: B rows, T entries, D width of the target's hidden states, N positions, W tokens of the
draft, H attention heads that share G keys, E size of a head.
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
from lightning_specdec.drafters.draft_vocabulary import rows_of
from lightning_specdec.drafters.eagle import FeatureDrafter
from lightning_specdec.drafters.eagle_network import EagleNetwork, attention
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.distillation import DistillationTraining
from lightning_specdec.training.target_outputs import DraftStep, TargetOutputs
from lightning_specdec.training.target_shape import TargetShape

if TYPE_CHECKING:
    from jaxtyping import Float

HEAD_SIZE = 64
SHORT_RUN_MINUTES = 15
"""Up to this time, an EAGLE head learns two draft tokens at a higher rate: a third one seldom pays
yet.
"""


class FeatureTraining(DistillationTraining):
    """Trains a draft over the hidden states of several layers of the target.

    Args:
        make: the drafter's class, or a function that creates it with further arguments.
        num_heads: attention heads; if None, the number that makes each one 64 wide.
        num_key_heads: key and value heads that they share; `num_heads` when None.
        intermediate_size: width of the MLP; four times the hidden size when None.
        attention_window: number of latest entries that each entry attends to; all when None. With a
            window shorter than most training texts, the draft works at any length.
        feature_norms: see the drafter's settings.
        draft_vocabulary: size of the draft's vocabulary, the most frequent tokens of the training
            texts; the target's vocabulary when None.
        options: see `DistillationTraining`.
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
            hidden_size = target.hidden_size or 0
            num_query_heads = num_heads or max(1, hidden_size // HEAD_SIZE)
            # EAGLE-3 reads a low, a middle and a high layer: the third, the middle one and the
            # third last.
            num_layers = target.num_layers or 1
            low_layer = min(2, num_layers - 1)
            middle_layer = num_layers // 2
            high_layer = max(0, num_layers - 3)
            return make(
                feature_layers=sorted({low_layer, middle_layer, high_layer}),
                hidden_size=hidden_size,
                vocab_size=target.vocab_size,
                num_heads=num_query_heads,
                num_key_heads=num_key_heads or num_query_heads,
                intermediate_size=intermediate_size or 4 * hidden_size,
                attention_window=attention_window,
                feature_norms=feature_norms,
                draft_vocabulary=draft_vocabulary,
            )

        super().__init__(make_drafter, target, **options)

    @classmethod
    def layer_arguments(cls, target: TargetShape) -> dict[str, Any]:
        """Arguments that give the draft's decoder layers the shape of the target's own."""
        return {
            "num_heads": target.num_heads,
            "num_key_heads": target.num_key_heads,
            "intermediate_size": target.intermediate_size,
            "attention_window": 128,
        }

    @torch.no_grad()
    def init_from_target(self) -> None:
        """Copy the target's output head."""
        output_rows = rows_of(self.target.output_weight, self.draft_vocabulary)
        self.drafter.network.output.weight.copy_(output_rows)

    def joined_features(self, outputs: TargetOutputs) -> Float[Tensor, "B T D"]:
        """The draft's features at all tokens of a text but the last one."""
        hidden = [outputs.features[layer][:, :-1].float() for layer in self.layers()]
        return self.drafter.network.features(hidden)


class EagleTraining(FeatureTraining):
    """Trains an `EagleDrafter` by training-time test (Li et al. 2025, "EAGLE-3", section 3).

    Args:
        norm_output: see `EagleSettings`. With `feature_norms` it makes EAGLE-3.1; without both it
            is plain EAGLE-3.
        random_lengths: whether a step's rollouts have a random length, in which each draft token is
            followed by another with probability `position_decay`. The expected loss is the same, at
            half the work for a decay of 0.6.
        options: see `FeatureTraining` and `DistillationTraining`.
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

    @classmethod
    def recipe_arguments(cls, target: TargetShape, minutes: float | None) -> dict[str, Any]:
        """Arguments that train an EAGLE-3 head for a target of this shape."""
        is_short_run = minutes is not None and minutes <= SHORT_RUN_MINUTES
        return {
            **cls.layer_arguments(target),
            "position_decay": 0.6,
            "num_draft_tokens": 2 if is_short_run else 4,
            "random_lengths": True,
            "learning_rate": 0.004 if is_short_run else 0.002,
            "draft_vocabulary": target.draft_vocabulary,
        }

    @property
    def _has_random_lengths(self) -> bool:
        """Whether rollouts end at random now; in validations they have their full length."""
        return self.random_lengths and self.training

    def loss_weights(self, num_steps: int) -> list[float]:
        """See `DistillationTraining`; rollouts of random lengths apply the decay themselves."""
        if not self._has_random_lengths:
            return super().loss_weights(num_steps)
        decays = [self.position_decay**i for i in range(self.num_draft_tokens)]
        return [1 / sum(decays)] * num_steps

    def rollout_length(self, step: int) -> int:
        """Number of draft tokens in the rollouts of an optimizer step.

        It depends on the step's number only, so a resumed run has the lengths of an uninterrupted
        one.
        """
        if not self._has_random_lengths:
            return self.num_draft_tokens
        generator = torch.Generator().manual_seed(step)
        noise = torch.rand(self.num_draft_tokens - 1, generator=generator)
        continues = (noise < self.position_decay).long().cumprod(0)
        return 1 + int(continues.sum())

    def draft_steps(self, batch: Batch, outputs: TargetOutputs) -> list[DraftStep]:
        """See `DistillationTraining`: one step for each draft token of a rollout."""
        embedded = self.target.embeddings(batch.tokens[:, 1:])
        hidden_states = rollouts(
            self.drafter.network,
            embedded,
            self.joined_features(outputs),
            self.rollout_length(self.global_step),
        )
        steps = []
        for i, hidden in enumerate(hidden_states):
            # Entries before a step's number belong to no round, and the last one predicts the token
            # after the text.
            steps.append(DraftStep(hidden[:, i:-1], first_index=2 + i))
        return steps

    def step_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N W"]:
        return self.drafter.network.logits(hidden)


def rollouts(
    network: EagleNetwork,
    embedded: Float[Tensor, "B T D"],
    features: Float[Tensor, "B T D"],
    num_steps: int,
) -> list[Float[Tensor, "B T D"]]:
    """The network's output at every entry for each step of the rounds that start at every entry.

    At step i, entry j belongs to the round that started at entry j - i. It reads that round's
    output of step i - 1 at entry j - 1 instead of the target's features, and attends to that
    round's keys. Tokens are those of the text.

    Args:
        embedded: embedding of the token after each entry's token.
        features: features of each entry's token, from `EagleNetwork.features`.
        num_steps: draft tokens of a round.

    Returns:
        For step i, `[:, j]` predicts token j + 2 of a round that started at entry j - i; entries
        before i are undefined.
    """
    positions = torch.arange(embedded.shape[1], device=embedded.device)[None]
    keys_by_step: list[Tensor] = []
    values_by_step: list[Tensor] = []
    outputs: list[Tensor] = []

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys_by_step.append(keys)
        values_by_step.append(values)
        return _attend_in_rounds(queries, keys_by_step, values_by_step, network.attention_window)

    for _ in range(num_steps):
        hidden = network.layer(embedded, features, positions, attend)
        outputs.append(hidden)
        # The next step reads at entry j + 1 what this one has computed at entry j.
        next_features = network.fed_back(hidden)
        features = _shifted(next_features, 1)
    return outputs


def _attend_in_rounds(
    queries: Float[Tensor, "B H T E"],
    keys_by_step: Sequence[Float[Tensor, "B G T E"]],
    values_by_step: Sequence[Float[Tensor, "B G T E"]],
    window: int | None,
) -> Float[Tensor, "B H T E"]:
    """Attention of the latest step's entries, each to the round that it belongs to.

    A round that started at entry s consists of the entries up to s as step 0 read them, then of
    entry s + 1 as step 1 read it, of entry s + 2 as step 2 read it, and so on. So at step i, entry
    j attends to step 0 up to entry j - i, and to a single entry of each later step k: entry j - i +
    k.

    Args:
        keys_by_step: keys of all steps up to the latest; values likewise.
        window: number of latest entries that are visible; all when None.
    """
    _, _, num_entries, head_size = queries.shape
    first_keys = keys_by_step[0]
    first_values = values_by_step[0]
    step = len(keys_by_step) - 1

    # A round's entries of step 0 end `step` entries before the one that attends.
    entries = torch.arange(num_entries, device=queries.device)
    distances = entries[:, None] - entries
    visible_distance = num_entries if window is None else window
    is_visible = (distances >= step) & (distances < visible_distance)
    if step == 0:
        return attention(queries, first_keys, first_values, is_visible[None])

    first_later_step = 1 if window is None else max(1, step - window + 1)
    later_keys = _aligned(keys_by_step, first_later_step)
    later_values = _aligned(values_by_step, first_later_step)

    # Query heads that share a key head are one group: [B, G, H / G, T, E].
    num_key_heads = first_keys.shape[1]
    grouped_queries = queries.unflatten(1, (num_key_heads, -1))
    scaled_queries = grouped_queries * head_size**-0.5

    # T scores for step 0, and one for each later step: its entry at the same index.
    first_scores = grouped_product(scaled_queries, first_keys.transpose(-1, -2))
    scores = [first_scores.masked_fill(~is_visible, -torch.inf)]
    for keys in later_keys:
        products = scaled_queries * keys[:, :, None]
        scores.append(products.sum(-1, keepdim=True))
    weights = torch.cat(scores, dim=-1).softmax(-1, dtype=torch.float32)
    weights = weights.to(first_values.dtype)

    # The weighted sum of all values.
    first_weights, later_weights = weights.split((num_entries, len(later_values)), dim=-1)
    output = grouped_product(first_weights, first_values)
    for step_weights, values in zip(later_weights.split(1, dim=-1), later_values, strict=True):
        output = output + step_weights * values[:, :, None]
    return output.flatten(1, 2)


def _aligned(
    entries_by_step: Sequence[Float[Tensor, "B G T E"]], first_step: int
) -> list[Float[Tensor, "B G T E"]]:
    """The keys or values of the steps from `first_step` to the latest, step i.

    Shifted by i - k, the entry of step k that entry j attends to is at index j.
    """
    last_step = len(entries_by_step) - 1
    aligned = []
    for step in range(first_step, last_step + 1):
        aligned.append(_shifted(entries_by_step[step], last_step - step))
    return aligned


def grouped_product(
    left: Float[Tensor, "B G R T X"], right: Float[Tensor, "B G X Y"]
) -> Float[Tensor, "B G R T Y"]:
    """The matrix product of R query heads with the matrix of the key head that they share."""
    # All rows of a group's heads are multiplied with the same matrix, so they are stacked.
    num_rows = left.shape[3]
    stacked = left.flatten(2, 3)
    product = stacked @ right
    return product.unflatten(2, (-1, num_rows))


def _shifted(entries: Float[Tensor, "*B T D"], count: int) -> Float[Tensor, "*B T D"]:
    """Entry j at j + `count`, after zeros."""
    num_left = entries.shape[-2] - count
    remaining = entries[..., :num_left, :]
    return functional.pad(remaining, (0, 0, count, 0))
