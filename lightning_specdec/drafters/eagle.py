"""An autoregressive head on the target's hidden states as the draft, with its own keys and values.

Shapes: B rows, T tokens, S slots, D width of the target's hidden states, V vocabulary.
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
from lightning_specdec.drafters.model import (
    Drawn,
    TrainedDrafter,
    make_draft,
    nothing,
    runs_in_openvino,
    shortened,
)
from lightning_specdec.models import KVState, LanguageModel, ModelOutput
from lightning_specdec.models.base import select
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float


HIDDEN = -1
"""Where the target's hidden states lie, beside the keys and values of the network's layers."""


class FeatureState(DraftState):
    """The target's features of each row's settled text, and the keys and values of the entries that were read.

    An entry has a token's features; that of an autoregressive head joins them with the token after it. Features lie in
    a static buffer by their positions, those of draft tokens too: the ones behind a rejection are written over before
    they are known.
    """

    def __init__(self, batch_size: int, max_length: int, context: TargetContext) -> None:
        self.context, self.kept = (
            context,
            KVState(batch_size, max_length, device=context.model.device),
        )
        self.read: Any = self.kept
        """The entries' keys and values: beside the features, or of a network that runs elsewhere."""
        self.known = [0] * batch_size
        """Tokens of each row whose features are known: once the target has read the text, all of it but the last."""
        self.num_scored = 1
        """Places that the target scored in its last call."""

    def learn(
        self, hidden: Float[Tensor, "B T FD"], num_scored: int, num_accepted: Sequence[int]
    ) -> None:
        """Keep the target's states at the tokens of its last call: unread text, its last token, then draft tokens."""
        self.num_scored = num_scored
        # The target has read all of the text and the draft tokens, so its lengths tell how long the text was.
        texts = [length - num_scored + 1 for length in self.context.state.consumed]
        starts = [min(known, length - 1) for known, length in zip(self.known, texts, strict=True)]
        slots = self.kept.slots(hidden.shape[1], starts)
        self.kept.storage.update(HIDDEN, slots, hidden[:, None], hidden[:, None, :, :0])
        self.known = [length + count for length, count in zip(texts, num_accepted, strict=True)]

    def wanted(self, request: DraftRequest, windows: Sequence[int]) -> list[int]:
        """The windows; 0 for rows whose text the target has not read."""
        rows = zip(windows, self.known, request.texts, strict=True)
        return [window if known >= len(text) - 1 > 0 else 0 for window, known, text in rows]

    def hidden(
        self, starts: Sequence[int], num_tokens: int, lengths: Sequence[int]
    ) -> Float[Tensor, "B T FD"]:
        """The target's states at so many tokens of each row, `lengths` of which are wanted, zeros behind those: the
        states of rejected tokens may be NaN."""
        places = self.kept.slots(num_tokens, starts).positions.clamp(max=self.kept.num_slots - 1)
        found, device = select(self.kept.storage.layers[HIDDEN][0][:, 0], places), self.kept.device
        padding = (
            torch.arange(num_tokens, device=device) >= torch.tensor(lengths, device=device)[:, None]
        )
        return found.masked_fill(padding[..., None], 0)

    def select(self, rows: Sequence[int]) -> None:
        for state in {id(each): each for each in (self.kept, self.read)}.values():
            state.select(rows)
        self.known = [0 if row < 0 else self.known[row] for row in rows]

    def clear(self, rows: Sequence[int]) -> None:
        self.kept.clear(rows)
        self.read.clear(rows)
        for row in rows:
            self.known[row] = 0

    def go_back(self, row: int, length: int) -> None:
        self.known[row] = min(self.known[row], length)
        lengths = list(self.read.consumed)
        lengths[row] = min(
            lengths[row], max(0, length - 1)
        )  # the last entry joins the token behind that length
        self.read.truncate(lengths)


class FeatureDrafter(TrainedDrafter, ABC):
    """A network with keys and values over the target's hidden states.

    A row's first round has no draft: the target has not read anything yet.
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
        last, num_layers = max(self.settings.feature_layers), target.num_layers
        assert num_layers is not None
        if last >= num_layers:
            raise ValueError(
                f"the draft reads layer {last}, the target has the layers 0 to {num_layers - 1}"
            )
        target.embeddings(torch.zeros(1, 1, dtype=torch.long, device=target.device))

    def features(self, target: LanguageModel) -> Sequence[int]:
        return self.settings.feature_layers

    def init_state(
        self, batch_size: int, max_length: int, context: TargetContext | None = None
    ) -> FeatureState:
        assert context is not None, (
            "this draft reads its target's hidden states, so a session must say which that is"
        )
        return FeatureState(batch_size, max_length, context)

    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        hidden = [output.features[layer] for layer in self.settings.feature_layers]
        state.learn(torch.cat(hidden, dim=-1), output.logits.shape[1], num_accepted)


class EagleDrafter(FeatureDrafter):
    """Drafts with one trained decoder layer over the target's hidden states and the tokens drawn from them.

    Li et al. 2024, "EAGLE"; Li et al. 2025, "EAGLE-3": features of several layers, its own output as the next feature,
    a reduced vocabulary; here one path of tokens instead of a tree.
    """

    Settings, Network = EagleSettings, EagleNetwork
    settings: EagleSettings
    network: EagleNetwork

    def fused(self, target: LanguageModel | None = None) -> EagleDrafter:
        if not runs_in_openvino(target, self.network.dtype):
            return super().fused(target)
        from lightning_specdec.drafters.eagle_openvino import EagleInOpenVINO

        assert target is not None
        other, own = copy(self), self.draft_vocabulary
        tokens = None if own is None else own.tokens
        other.in_openvino = EagleInOpenVINO(self.network, tokens, target.embedding_table)
        return other

    def init_state(
        self, batch_size: int, max_length: int, context: TargetContext | None = None
    ) -> FeatureState:
        state = super().init_state(batch_size, max_length, context)
        if self.in_openvino is not None:
            state.read = self.in_openvino.init_state(batch_size, max_length)
        return state

    def propose(
        self, state: Any, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        wanted = state.wanted(request, windows)
        num_draft_tokens = max(wanted)
        if not num_draft_tokens:
            return nothing(request)
        least, own = self.settings.min_confidence, self.sampling or sampling
        embedded, hidden, lengths, entries = self._unread(state, request)
        if (
            self.in_openvino is not None
            and own.greedy
            and not own.processors
            and not request.wants_logits
        ):
            rolled = self.in_openvino.roll(state.read, embedded, hidden, lengths, num_draft_tokens)
            if rolled is not None:
                draft = make_draft((rolled[0], None, None), wanted, request)
                state.read.truncate(entries)
                return shortened(draft, (rolled[1].cumprod(1) >= least).sum(1)) if least else draft
        feature, logits = self._advance(state.read, embedded, hidden, lengths)

        def call(
            drawn: Drawn, feature: Float[Tensor, "B 1 D"], logits: Float[Tensor, "B W"]
        ) -> Tensor | None:
            chances: list[Tensor] = []
            for i in range(num_draft_tokens):
                if least:  # what a window ends by is the text, not the token drawn at its end
                    before = (
                        chances[-1] if chances else torch.tensor(wanted, device=logits.device) > 0
                    )
                    chances.append(logits.float().softmax(-1).amax(-1) * before)
                token = drawn.draw(logits)
                if i + 1 == num_draft_tokens or (
                    least and token.device.type == "cpu" and chances[-1].max() < least
                ):
                    break
                embedded = state.context.model.embeddings(token[:, None])
                feature, logits = self._advance(state.read, embedded, feature, None)
            return torch.stack(chances, dim=1) if chances else None

        outputs = self.run(
            request, wanted, sampling, call, feature, logits, vocabulary=self.draft_vocabulary
        )
        state.read.truncate(entries)
        draft = make_draft(outputs, wanted, request)
        return draft if outputs[3] is None else shortened(draft, (outputs[3] >= least).sum(1))

    def _unread(
        self, state: FeatureState, request: DraftRequest
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T FD"], list[int], list[int]]:
        """The entries of the settled text that have not been read, the last one in any case, as `_advance` takes them;
        and how many entries each row has."""
        texts = request.texts
        ends = [min(len(text) - 1, known) for text, known in zip(texts, state.known, strict=True)]
        starts = [
            min(max(end - 1, 0), length)
            for end, length in zip(ends, state.read.consumed, strict=True)
        ]
        state.read.truncate(starts)
        unread = [
            text[start + 1 : end + 1] for text, start, end in zip(texts, starts, ends, strict=True)
        ]
        lengths = [len(each) for each in unread]
        # As many as any round settles, so that shapes do not depend on acceptance.
        tokens, _ = pad(unread, request.tail.device, state.num_scored)
        embedded = state.context.model.embeddings(tokens)
        return embedded, state.hidden(starts, tokens.shape[1], lengths), lengths, ends

    def _advance(
        self,
        read: Any,
        embedded: Float[Tensor, "B T D"],
        features: Float[Tensor, "B T _"],
        lengths: Sequence[int] | None,
    ) -> tuple[Float[Tensor, "B 1 D"], Float[Tensor, "B W"]]:
        """Read the next T entries of every row: the next feature and the logits behind them.

        Args:
            features: the target's hidden states `[B, T, F * D]`, or the network's own features `[B, T, D]`.
            lengths: how many entries of each row are real; None where the features are the network's own.
        """
        if self.in_openvino is not None:
            return self.in_openvino.advance(read, embedded, features, lengths)
        if lengths is not None:
            features = self.network.joined(features)
        slots = read.slots(embedded.shape[1])

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            seen = read.storage.mask(slots, self.network.attention_window)
            keys, values = read.storage.update(0, slots, keys, values)
            return attention(queries, keys, values, seen)

        hidden = self.network.layer(embedded, features, slots.positions, attend)
        read.advance(embedded.shape[1], lengths)
        if lengths is None:
            last = hidden[:, -1:]
        else:
            last = select(
                hidden,
                torch.tensor([[max(length - 1, 0)] for length in lengths], device=hidden.device),
            )
        return self.network.fed_back(last), self.network.logits(last[:, 0])
