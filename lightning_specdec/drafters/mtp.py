"""The multi-token prediction layers of the target's own checkpoint as a draft.

Shapes: B rows, T entries, C columns of tokens, L prediction layers, K draft tokens, D hidden size
of the target, V vocabulary. `models/mtp.py` defines entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.drafters.base import Drafter, DraftRequest, TargetContext
from lightning_specdec.drafters.eagle import FeatureState
from lightning_specdec.drafters.layout import pad
from lightning_specdec.drafters.sampling_drafter import (
    DraftSampler,
    SamplingDrafter,
    empty_draft,
    fit_vocabulary,
    limit_by_confidence,
    make_draft,
)
from lightning_specdec.models import LanguageModel, ModelOutput
from lightning_specdec.models.base import select
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class MtpSettings(Settings):
    num_layers: int | None = setting(
        None, "how many of the prediction layers draft; default: all", minimum=1, maximum=64
    )
    min_confidence: float = setting(
        0.0, "end the window where its chance to be kept is lower", minimum=0, maximum=1
    )
    # Of the layers' config in transformers, which a draft file records. It has no flag.
    model: Mapping[str, Any] | None = setting(None)


class MtpState(FeatureState):
    """The target's hidden states of each row's final text, and the layers' keys and values.

    An entry of layer i has read token j + 1 + i, so the last L - 1 entries of a text also depend on
    draft tokens. They are read again in the next round.

    Args:
        num_layers: L.
    """

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        context: TargetContext,
        num_layers: int,
    ) -> None:
        assert context.model.num_layers is not None
        last_layer = context.model.num_layers - 1
        super().__init__(batch_size, max_length, context, [last_layer])
        self.num_layers = num_layers

    def truncate_row(self, row: int, length: int) -> None:
        super().truncate_row(row, length)
        entry_lengths = list(self.entry_cache.consumed)
        entry_lengths[row] = min(entry_lengths[row], max(0, length - self.num_layers))
        self.entry_cache.truncate(entry_lengths)


@dataclass(frozen=True)
class _Entries:
    """The entries of every row's text that the layers read in a round.

    Args:
        tokens: for column c, token j + 1 of the row's entry number c. Draft tokens follow the last
            one, in L - 1 further columns.
        hidden: the target's hidden states at the tokens j.
        lengths: number of entries of each row.
        num_final: entries of each row, in total, that depend on no draft token.
    """

    tokens: Int[Tensor, "B C"]
    hidden: Float[Tensor, "B T D"]
    lengths: list[int]
    num_final: list[int]


class MtpDrafter(SamplingDrafter):
    """Drafts with the multi-token prediction layers that the target's checkpoint holds.

    Gloeckle et al. 2024; DeepSeek-AI 2024, "DeepSeek-V3", section 2.2. Layer i drafts token i of a
    round. For further tokens the last layer reads its own output, as an EAGLE head does.

    Args:
        network: the layers, a `models.mtp.MtpNetwork`; `for_target` loads them.
    """

    Settings = MtpSettings
    settings: MtpSettings
    inside_target = True
    free = "min_confidence"

    def __init__(
        self,
        *values: Any,
        network: Any = None,
        sampling: Sampling | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*values, sampling=sampling, **settings)
        if network is None and self.settings.model is not None:
            from lightning_specdec.models.mtp_building import from_values

            network = from_values(self.settings.model, self.settings.num_layers or 1)
        self.network = network

    @classmethod
    def for_target(cls, target: LanguageModel, draft: Any = None, **settings: Any) -> Drafter:
        """Load the layers from the checkpoint of the target. Arguments as of `Drafter`."""
        if draft is not None:
            raise ValueError(
                f"{cls.__name__} takes no draft model: its layers are in the target's checkpoint"
            )
        from lightning_specdec.models.mtp_files import load_mtp

        drafter = cls(**settings)
        drafter.network = load_mtp(target, drafter.settings.num_layers)
        drafter.check_target(target)
        return drafter

    def arguments(self) -> dict[str, Any]:
        self._require_layers()
        from lightning_specdec.models.mtp_building import described

        return {
            **super().arguments(),
            "num_layers": self.network.num_layers,
            "model": described(self.network),
        }

    def _require_layers(self) -> None:
        if self.network is None:
            raise ValueError(
                "MtpDrafter has no layers: name it as the drafter (drafter='MtpDrafter'), so that "
                "they are loaded from the target's checkpoint"
            )

    def check_target(self, target: LanguageModel) -> None:
        self._require_layers()
        self.network.check_target(target)

    def features(self, target: LanguageModel) -> Sequence[int]:
        assert target.num_layers is not None
        last_layer = target.num_layers - 1
        return (last_layer,)

    def fused(self, target: LanguageModel | None = None) -> MtpDrafter:
        if self.network is None:
            return self
        fused: MtpDrafter = self.packed("network")
        return fused

    def init_state(
        self,
        batch_size: int,
        max_length: int,
        context: TargetContext | None = None,
    ) -> MtpState:
        assert context is not None, (
            "prediction layers read the target's hidden states, so the session must pass the target"
        )
        return MtpState(batch_size, max_length, context, self.network.num_layers)

    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        (last_layer,) = self.features(state.context.model)
        num_scored = output.logits.shape[1]
        state.learn(output.features[last_layer], num_scored, num_accepted)

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

        entries = self._unread(state, request)

        def draw_tokens(sampler: DraftSampler) -> Tensor | None:
            return self._draw_tokens(sampler, state, entries, num_draft_tokens, request.vocab_size)

        outputs = self.run(request, windows, sampling, draw_tokens)
        # Entries that depend on draft tokens are read again.
        state.entry_cache.truncate(entries.num_final)

        draft = make_draft(outputs, windows, request)
        *_, confidences = outputs
        if confidences is None:
            return draft
        return limit_by_confidence(draft, confidences, self.settings.min_confidence)

    def _unread(self, state: MtpState, request: DraftRequest) -> _Entries:
        """The entries that some layer has not read, or has read with draft tokens.

        The last entry is read in any case, because its output is needed.
        """
        starts: list[int] = []
        lengths: list[int] = []
        num_final: list[int] = []
        unread: list[Sequence[int]] = []
        num_again = state.num_layers - 1
        for text, num_known, num_read in zip(
            request.texts, state.num_known, state.entry_cache.consumed, strict=True
        ):
            end = min(len(text) - 1, num_known)
            start = min(num_read, max(end - 1, 0))
            starts.append(start)
            lengths.append(end - start)
            num_final.append(max(0, end - num_again))
            unread.append(text[start + 1 : end + 1])
        state.entry_cache.truncate(starts)

        # As wide as the most tokens that a round adds, so shapes do not depend on acceptance.
        num_columns = state.num_scored + num_again
        tokens, _ = pad(unread, request.last_two_tokens.device, num_columns)
        hidden = state.hidden(starts, tokens.shape[1], lengths)
        tokens = torch.nn.functional.pad(tokens, (0, num_again))
        return _Entries(tokens, hidden, lengths, num_final)

    def _draw_tokens(
        self,
        sampler: DraftSampler,
        state: MtpState,
        entries: _Entries,
        num_draft_tokens: int,
        vocab_size: int | None,
    ) -> Float[Tensor, "B K"] | None:
        """Draw the tokens of a round, one after the other.

        Args:
            vocab_size: V.

        Returns:
            For each token, the estimated probability that it and all tokens before it are accepted;
            None without `min_confidence`.
        """
        target = state.context.model
        cache = state.entry_cache
        num_layers = state.num_layers
        largest_probs: list[Tensor] = []

        def draw(last_hidden: Float[Tensor, "B 1 D"]) -> Int[Tensor, "B"]:
            logits = self.network.logits(target, last_hidden)[:, 0]
            logits = fit_vocabulary(logits, vocab_size)
            if self.settings.min_confidence:
                # It depends on the text and earlier tokens only. The token that is drawn must not
                # decide whether it is proposed.
                largest_probs.append(logits.float().softmax(-1).amax(-1))
            return sampler.draw(logits)

        # Every layer reads the entries of the text, also if fewer tokens are requested.
        num_entries = entries.hidden.shape[1]
        slots = self.network.slots(cache, num_entries)
        lengths = torch.tensor(entries.lengths, device=entries.hidden.device)
        last_indices = (lengths - 1).clamp(min=0)[:, None]
        tokens = entries.tokens
        hidden = entries.hidden
        for index in range(num_layers):
            layer_tokens = tokens[:, index : index + num_entries]
            hidden = self.network.read(target, index, layer_tokens, hidden, slots, cache.storage)
            if index >= num_draft_tokens:
                continue
            last_hidden = select(hidden, last_indices)
            drawn_tokens = draw(last_hidden)
            if index + 1 < num_layers:
                # The next layer reads the token that this one has drafted after the text.
                columns = last_indices + 1 + index
                tokens = tokens.scatter(1, columns, drawn_tokens[:, None])
        cache.advance(num_entries, entries.lengths)

        for _ in range(num_layers, num_draft_tokens):
            # The last layer's own output takes the place of the output of the layer before.
            slots = self.network.slots(cache, 1)
            last_hidden = self.network.read(
                target, num_layers - 1, drawn_tokens[:, None], last_hidden, slots, cache.storage
            )
            cache.advance(1)
            drawn_tokens = draw(last_hidden)

        if not largest_probs:
            return None
        return torch.stack(largest_probs, dim=1).cumprod(1)
