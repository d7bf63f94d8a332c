"""EAGLE: an autoregressive head on the target's hidden states, with its own keys and values.

Shapes: B rows, T tokens or entries, S slots, D hidden size of the target, F feature layers,
V vocabulary, W tokens of the draft. `eagle_network` defines entries.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lightning_specdec.drafters.base import DraftRequest, DraftState, TargetContext
from lightning_specdec.drafters.eagle_network import EagleNetwork, EagleSettings, attention
from lightning_specdec.drafters.layout import pad
from lightning_specdec.drafters.sampling_drafter import (
    DraftSampler,
    TrainedDrafter,
    empty_draft,
    limit_by_confidence,
    make_draft,
    runs_in_openvino,
)
from lightning_specdec.models import KVState, LanguageModel, ModelOutput, RowCopy
from lightning_specdec.models.base import select
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float


HIDDEN = -1
"""The layer of `FeatureState.feature_cache` that holds the target's hidden states."""


class FeatureState(DraftState):
    """The target's hidden states of each row's final text, and the network's keys and values.

    The hidden states are in a static buffer, indexed by position, including those of draft tokens.
    Those after a rejection are overwritten before `num_known` includes them.

    Args:
        layers: numbers of the layers whose hidden states these are.
    """

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        context: TargetContext,
        layers: Sequence[int],
    ) -> None:
        self.context = context
        self.layers = tuple(layers)
        self.feature_cache = KVState(batch_size, max_length, device=context.model.device)
        self.entry_cache: Any = self.feature_cache
        """Keys and values of the entries that the network has read. They are further layers of the
        feature cache, unless the network runs in another backend."""
        self.num_known = [0] * batch_size
        """Tokens of each row whose hidden states are known: all but the last one, once the target
        has read the text."""
        self.num_scored = 1
        """Positions that the target scored in its last call."""

    def learn(
        self,
        hidden: Float[Tensor, "B T FD"],
        num_scored: int,
        num_accepted: Sequence[int],
    ) -> None:
        """Store the target's hidden states at the tokens of its last call.

        These tokens are the unread text, which ends with its last token, and the draft tokens.
        """
        self.num_scored = num_scored
        # The target has read the whole text and the draft tokens, so its state has the text's
        # length plus theirs.
        num_draft_tokens = num_scored - 1
        starts: list[int] = []
        text_lengths: list[int] = []
        for num_known, num_read in zip(self.num_known, self.context.state.consumed, strict=True):
            text_length = num_read - num_draft_tokens
            text_lengths.append(text_length)
            starts.append(min(num_known, text_length - 1))

        # Stored as keys of one head; there are no values.
        keys = hidden[:, None]
        values = keys[..., :0]
        slots = self.feature_cache.slots(hidden.shape[1], starts)
        self.feature_cache.storage.update(HIDDEN, slots, keys, values)
        # The next text ends with one token more, which the target has not read.
        self.num_known = [
            length + count for length, count in zip(text_lengths, num_accepted, strict=True)
        ]

    def possible_windows(self, request: DraftRequest, windows: Sequence[int]) -> list[int]:
        """The windows, but 0 for rows whose text the target has not read."""
        possible_windows = []
        for window, num_known, text in zip(windows, self.num_known, request.texts, strict=True):
            num_features = len(text) - 1
            has_features = num_known >= num_features > 0
            possible_windows.append(window if has_features else 0)
        return possible_windows

    def hidden(
        self,
        starts: Sequence[int],
        num_tokens: int,
        lengths: Sequence[int],
    ) -> Float[Tensor, "B T FD"]:
        """The target's hidden states at `num_tokens` tokens of each row.

        Args:
            starts: each row's first token.
            lengths: how many of these tokens are wanted. The rest is zero, because the hidden
                states of rejected tokens may be NaN.
        """
        device = self.feature_cache.device
        slots = self.feature_cache.slots(num_tokens, starts)
        last_slot = self.feature_cache.num_slots - 1
        positions = slots.positions.clamp(max=last_slot)
        # `learn` stores them as keys of one head.
        keys, _ = self.feature_cache.storage.layers[HIDDEN]
        hidden = select(keys[:, 0], positions)

        offsets = torch.arange(num_tokens, device=device)
        row_lengths = torch.tensor(lengths, device=device)
        is_padding = offsets >= row_lengths[:, None]
        return hidden.masked_fill(is_padding[..., None], 0)

    def select(self, rows: Sequence[int]) -> None:
        self.feature_cache.select(rows)
        if self.entry_cache is not self.feature_cache:
            self.entry_cache.select(rows)
        self.num_known = [0 if row < 0 else self.num_known[row] for row in rows]

    def clear(self, rows: Sequence[int]) -> None:
        self.feature_cache.clear(rows)
        self.entry_cache.clear(rows)
        for row in rows:
            self.num_known[row] = 0

    def truncate_row(self, row: int, length: int) -> None:
        self.num_known[row] = min(self.num_known[row], length)
        # The last entry within the text combines its last two tokens.
        num_entries = max(0, length - 1)
        entry_lengths = list(self.entry_cache.consumed)
        entry_lengths[row] = min(entry_lengths[row], num_entries)
        self.entry_cache.truncate(entry_lengths)

    def take_over(self, previous: DraftState) -> bool:
        source = previous.inner
        if not isinstance(source, FeatureState) or source.layers != self.layers:
            return False
        # The network reads its entries again, which is quick.
        for row, num_known in enumerate(source.num_known):
            copy = source.save_row(row, num_known)
            if copy is not None:
                self.load_row(row, copy, num_known)
        return True

    def save_row(self, row: int, length: int) -> RowCopy | None:
        # The network reads its entries again, which is quick.
        num_known = min(length, self.num_known[row])
        if HIDDEN not in self.feature_cache.storage.layers:
            return None
        keys, _ = self.feature_cache.storage.layers[HIDDEN]
        return RowCopy(num_known, {HIDDEN: keys[row, :, :num_known].clone()})

    def load_row(self, row: int, copy: RowCopy, length: int) -> None:
        hidden = copy.tensors[HIDDEN]
        num_known = min(length, copy.length)
        self.feature_cache.write_row(
            row, {(HIDDEN, "keys"): hidden, (HIDDEN, "values"): hidden[..., :0]}, num_known
        )
        self.num_known[row] = num_known


class FeatureDrafter(TrainedDrafter, ABC):
    """A network with keys and values over the target's hidden states.

    It drafts nothing in a row's first round, because the target has not read anything yet.
    """

    Network: ClassVar[type[Any]]
    settings: Any
    free = "min_confidence"

    def __init__(self, *values: Any, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self.network: Any = self.Network(self.settings, self.num_tokens)

    def fused(self, target: LanguageModel | None = None) -> Any:
        return self.packed("network")

    def check_target(self, target: LanguageModel) -> None:
        super().check_target(target)
        assert target.num_layers is not None
        highest_layer = max(self.settings.feature_layers)
        if highest_layer >= target.num_layers:
            raise ValueError(
                f"the draft reads layer {highest_layer}, the target has the layers 0 to "
                f"{target.num_layers - 1}"
            )
        # Raises ValueError if the target has no embeddings that can be read.
        target.embeddings(torch.zeros(1, 1, dtype=torch.long, device=target.device))

    def features(self, target: LanguageModel) -> Sequence[int]:
        return self.settings.feature_layers

    def init_state(
        self,
        batch_size: int,
        max_length: int,
        context: TargetContext | None = None,
    ) -> FeatureState:
        assert context is not None, (
            "this draft reads the target's hidden states, so the session must pass the target"
        )
        return FeatureState(batch_size, max_length, context, self.settings.feature_layers)

    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        hidden_by_layer = [output.features[layer] for layer in self.settings.feature_layers]
        hidden = torch.cat(hidden_by_layer, dim=-1)
        num_scored = output.logits.shape[1]
        state.learn(hidden, num_scored, num_accepted)


class EagleDrafter(FeatureDrafter):
    """Drafts with one decoder layer over the target's hidden states and the tokens drawn from them.

    Li et al. 2024, "EAGLE"; Li et al. 2025, "EAGLE-3": features of several layers, the network's
    own output as the next feature, a reduced vocabulary. Drafts one path of tokens, not a tree.
    """

    Settings, Network = EagleSettings, EagleNetwork
    settings: EagleSettings
    network: EagleNetwork

    def fused(self, target: LanguageModel | None = None) -> EagleDrafter:
        if not runs_in_openvino(target, self.network.dtype):
            return super().fused(target)
        from lightning_specdec.drafters.eagle_openvino import EagleInOpenVINO

        assert target is not None
        vocabulary = self.draft_vocabulary
        draft_tokens = None if vocabulary is None else vocabulary.tokens
        drafter = copy(self)
        drafter.in_openvino = EagleInOpenVINO(self.network, draft_tokens, target.embedding_table)
        return drafter

    def init_state(
        self,
        batch_size: int,
        max_length: int,
        context: TargetContext | None = None,
    ) -> FeatureState:
        state = super().init_state(batch_size, max_length, context)
        if self.in_openvino is not None:
            state.entry_cache = self.in_openvino.init_state(batch_size, max_length)
        return state

    def propose(
        self,
        state: Any,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        windows = state.possible_windows(request, windows)
        num_draft_tokens = max(windows)
        if num_draft_tokens == 0:
            return empty_draft(request)

        embedded, hidden, lengths, num_entries = self._unread(state, request)
        draft_sampling = self.sampling or sampling
        is_plain_greedy = (
            draft_sampling.greedy and not draft_sampling.runs_on_host and not request.wants_logits
        )
        if self.in_openvino is not None and is_plain_greedy:
            # One call that drafts all tokens, if OpenVINO has one for this number of tokens.
            rolled = self.in_openvino.roll(
                state.entry_cache, embedded, hidden, lengths, num_draft_tokens
            )
            if rolled is not None:
                tokens, token_probs = rolled
                state.entry_cache.truncate(num_entries)
                draft = make_draft((tokens, None, None), windows, request)
                if not self.settings.min_confidence:
                    return draft
                return limit_by_confidence(
                    draft, token_probs.cumprod(1), self.settings.min_confidence
                )

        feature, logits = self._advance(state.entry_cache, embedded, hidden, lengths)

        def draw_tokens(
            sampler: DraftSampler,
            feature: Float[Tensor, "B 1 D"],
            logits: Float[Tensor, "B W"],
        ) -> Tensor | None:
            return self._draw_tokens(sampler, state, windows, feature, logits)

        outputs = self.run(
            request,
            windows,
            sampling,
            draw_tokens,
            feature,
            logits,
            vocabulary=self.draft_vocabulary,
        )
        # Entries of draft tokens are read again once the target's hidden states are known.
        state.entry_cache.truncate(num_entries)

        draft = make_draft(outputs, windows, request)
        *_, confidences = outputs
        if confidences is None:
            return draft
        return limit_by_confidence(draft, confidences, self.settings.min_confidence)

    def _draw_tokens(
        self,
        sampler: DraftSampler,
        state: FeatureState,
        windows: Sequence[int],
        feature: Float[Tensor, "B 1 D"],
        logits: Float[Tensor, "B W"],
    ) -> Float[Tensor, "B K"] | None:
        """Draw up to `max(windows)` tokens, one after the other.

        Args:
            feature: the network's output at the last entry of the text.
            logits: the logits of the first draft token.

        Returns:
            For each token, the estimated probability that it and all tokens before it are accepted;
            None without `min_confidence`.
        """
        min_confidence = self.settings.min_confidence
        num_draft_tokens = max(windows)
        confidences: list[Tensor] = []
        for i in range(num_draft_tokens):
            if min_confidence:
                # The largest probability depends on the text and earlier tokens only. The token
                # drawn from these logits must not decide whether it is proposed.
                if confidences:
                    previous_confidence = confidences[-1]
                else:
                    # Rows that want no draft tokens must not keep the others from ending early.
                    previous_confidence = torch.tensor(windows, device=logits.device) > 0
                largest_prob = logits.float().softmax(-1).amax(-1)
                confidences.append(largest_prob * previous_confidence)

            tokens = sampler.draw(logits)
            if i + 1 == num_draft_tokens:
                break
            # On other devices, reading the confidences would take longer than further passes.
            can_end_early = min_confidence > 0 and tokens.device.type == "cpu"
            if can_end_early and confidences[-1].max() < min_confidence:
                break

            embedded = state.context.model.embeddings(tokens[:, None])
            feature, logits = self._advance(state.entry_cache, embedded, feature, None)

        if not confidences:
            return None
        return torch.stack(confidences, dim=1)

    def _unread(
        self,
        state: FeatureState,
        request: DraftRequest,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T FD"], list[int], list[int]]:
        """The entries of the text that the network has not read, as `_advance` takes them.

        The last entry is read in any case, because its output is needed.

        Returns:
            The embeddings and the hidden states of these entries, each row's number of them, and
            each row's number of entries in total.
        """
        starts: list[int] = []
        ends: list[int] = []
        unread: list[Sequence[int]] = []
        for text, num_known, num_read in zip(
            request.texts, state.num_known, state.entry_cache.consumed, strict=True
        ):
            end = min(len(text) - 1, num_known)
            last_entry = max(end - 1, 0)
            start = min(last_entry, num_read)
            starts.append(start)
            ends.append(end)
            # Entry j has the embedding of token j + 1.
            unread.append(text[start + 1 : end + 1])
        state.entry_cache.truncate(starts)

        lengths = [len(tokens) for tokens in unread]
        # As wide as the most tokens that a round adds, so shapes do not depend on acceptance.
        tokens, _ = pad(unread, request.last_two_tokens.device, state.num_scored)
        embedded = state.context.model.embeddings(tokens)
        hidden = state.hidden(starts, tokens.shape[1], lengths)
        return embedded, hidden, lengths, ends

    def _advance(
        self,
        entry_cache: Any,
        embedded: Float[Tensor, "B T D"],
        features: Float[Tensor, "B T _"],
        lengths: Sequence[int] | None,
    ) -> tuple[Float[Tensor, "B 1 D"], Float[Tensor, "B W"]]:
        """Read the next T entries of every row.

        Args:
            features: the target's hidden states `[B, T, F * D]`, or the network's own features
                `[B, T, D]`.
            lengths: how many entries of each row are real; None if the features are the network's
                own.

        Returns:
            The next feature, and the logits of the token after the last entry.
        """
        if self.in_openvino is not None:
            return self.in_openvino.advance(entry_cache, embedded, features, lengths)

        if lengths is not None:
            # Hidden states of the target.
            features = self.network.joined(features)
        num_entries = embedded.shape[1]
        slots = entry_cache.slots(num_entries)
        mask = entry_cache.storage.mask(slots, self.network.attention_window)

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            all_keys, all_values = entry_cache.storage.update(0, slots, keys, values)
            return attention(queries, all_keys, all_values, mask)

        hidden = self.network.layer(embedded, features, slots.positions, attend)
        entry_cache.advance(num_entries, lengths)

        # The output at each row's last entry.
        if lengths is None:
            last_hidden = hidden[:, -1:]
        else:
            last_indices = [[max(length - 1, 0)] for length in lengths]
            last_hidden = select(hidden, torch.tensor(last_indices, device=hidden.device))

        next_feature = self.network.fed_back(last_hidden)
        logits = self.network.logits(last_hidden[:, 0])
        return next_feature, logits
