"""An autoregressive head on the target's hidden states as the draft, with a memory of its own.

Theory: heads that all look at one hidden state do not see what the others guessed. Here one small decoder layer guesses
token by token, and reads beside each token what the target made of the one before it: so it knows what was drawn, and
it need not understand the text, which the target has done already (Li et al. 2024, "EAGLE"). Beyond the settled text it
goes on from its own output, and it is trained to.

Shapes: B rows, T tokens, D width of the target's hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.checks import require_int
from lightning_specdec.drafters.base import Context, Drafter, DraftState, Host, check_states
from lightning_specdec.drafters.draft_vocabulary import DraftVocabulary
from lightning_specdec.drafters.eagle_network import EagleNetwork, attention
from lightning_specdec.drafters.eagle_state import EagleState
from lightning_specdec.drafters.layout import pad
from lightning_specdec.drafters.model import Guesses, refuse_sampling
from lightning_specdec.models import KVState, LanguageModel, ModelOutput
from lightning_specdec.models.packed import PackedLinear
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float


class EagleDrafter(Drafter):
    """Guesses with one decoder layer over the target's hidden states and the tokens drawn from them.

    Sources: Li et al. 2024, "EAGLE"; Li et al. 2025, "EAGLE-3" (features of low, middle and high layers, the network's
    own output as the next feature, a reduced vocabulary); here a single path of guesses instead of a tree.

    A row's first round has no guesses: the target has not read anything yet.

    Args:
        feature_layers: the target's layers whose hidden states are read, by number from 0.
        hidden_size: D, of the target.
        vocab_size: V, of the target.
        num_heads, num_key_heads, intermediate_size, attention_window: of the decoder layer, see `EagleNetwork`.
        draft_vocabulary: the tokens that it can say, ascending; or how many, to be chosen before it is trained; all of
            them when None.
        sampling: how guesses are drawn, if not as the session draws; any choice is lossless under a lossless rule.
    """

    gives_logits = True
    inside_target = True

    def __init__(
        self,
        feature_layers: Sequence[int],
        *,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        num_key_heads: int,
        intermediate_size: int,
        attention_window: int | None = None,
        draft_vocabulary: int | Sequence[int] | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__()
        self.feature_layers = [require_int("a layer of feature_layers", layer, 0, 1000) for layer in feature_layers]
        if not self.feature_layers or len(set(self.feature_layers)) < len(self.feature_layers):
            raise ValueError(f"feature_layers must be one layer or several different ones, got {list(feature_layers)}")
        self.hidden_size = require_int("hidden_size", hidden_size, 2, 2**16)
        self.vocab_size = require_int("vocab_size", vocab_size, 2, 2**20)
        self.num_heads, self.num_key_heads = num_heads, num_key_heads
        self.intermediate_size, self.attention_window, self.sampling = intermediate_size, attention_window, sampling
        self.draft_vocabulary = None if draft_vocabulary is None else DraftVocabulary(draft_vocabulary, vocab_size)
        self.network = EagleNetwork(
            hidden_size,
            num_features=len(self.feature_layers),
            num_tokens=vocab_size if self.draft_vocabulary is None else len(self.draft_vocabulary),
            num_heads=num_heads,
            num_key_heads=num_key_heads,
            intermediate_size=intermediate_size,
            attention_window=attention_window,
        )

    def arguments(self) -> dict[str, Any]:
        refuse_sampling(self.sampling)
        names = ("feature_layers", "hidden_size", "vocab_size", "num_heads", "num_key_heads", "intermediate_size")
        plain = {name: getattr(self, name) for name in (*names, "attention_window")}
        own = self.draft_vocabulary
        return plain if own is None else {**plain, "draft_vocabulary": own.arguments()}

    def fused(self) -> EagleDrafter:
        if any(isinstance(layer, PackedLinear) for layer in self.network.modules()):
            return self
        other = deepcopy(self)
        other.network.packed()
        return other.eval()

    def check_target(self, target: LanguageModel) -> None:
        check_states(target, hidden_size=self.hidden_size, vocab_size=self.vocab_size)
        assert target.num_layers is not None
        if max(self.feature_layers) >= target.num_layers:
            raise ValueError(
                f"the draft reads layer {max(self.feature_layers)}, the target has the layers 0 to "
                f"{target.num_layers - 1}: use the target that it was trained with"
            )
        target.embeddings(torch.zeros(1, 1, dtype=torch.long, device=target.device))

    def needs_noise(self, sampling: Sampling) -> bool:
        return not (self.sampling or sampling).greedy

    def features(self, target: LanguageModel) -> Sequence[int]:
        return self.feature_layers

    def init_state(self, batch_size: int, max_length: int, host: Host | None = None) -> EagleState:
        assert host is not None, "this draft reads its target's hidden states, so a session must say which that is"
        return EagleState(batch_size, max_length, host)

    def observe(self, state: DraftState, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        assert isinstance(state, EagleState)
        features = self.network.features([output.features[layer] for layer in self.feature_layers])
        state.learn(features, output.logits.shape[1], num_accepted)

    def propose(self, state: DraftState, context: Context, windows: Sequence[int], sampling: Sampling) -> Draft:
        assert isinstance(state, EagleState)
        known = [known >= len(text) - 1 > 0 for known, text in zip(state.known, context.texts, strict=True)]
        wanted = [window if each else 0 for window, each in zip(windows, known, strict=True)]
        num_guesses, device = max(wanted), context.tail.device
        if not num_guesses:
            return Draft(torch.empty(len(wanted), 0, dtype=torch.long, device=device))
        hidden, entries = self._read(state, context, known)
        guesses = Guesses(context, wanted, self.sampling or sampling, self.draft_vocabulary)
        for i in range(num_guesses):
            token = guesses.draw(self.network.logits(hidden[:, -1]))
            if i + 1 < num_guesses:
                embedded = state.host.model.embeddings(token[:, None])
                hidden = self._advance(state.read, embedded, hidden[:, -1:], None)
        state.read.truncate(entries)
        lengths = None if min(wanted) == num_guesses else torch.tensor(wanted, device=device)
        return Draft(guesses.tokens, lengths, guesses.probs, guesses.logits, num_calls=num_guesses)

    def logits(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """What the network's output says of the target's tokens: -inf of those that it cannot say."""
        scores = self.network.logits(hidden)
        return scores if self.draft_vocabulary is None else self.draft_vocabulary.to_target(scores)

    def _read(
        self, state: EagleState, context: Context, known: Sequence[bool]
    ) -> tuple[Float[Tensor, "B 1 D"], list[int]]:
        """Read the entries of the settled text that have not been read: the last one's output, and how many they are.

        The last one is read in any case. Rows whose features are not known read nothing.
        """
        read, texts = state.read.consumed, context.texts
        ends = [len(text) - 1 if each else length for text, each, length in zip(texts, known, read, strict=True)]
        starts = [min(end - 1, length) if each else end for end, each, length in zip(ends, known, read, strict=True)]
        state.read.truncate(starts)
        unread = [text[start + 1 : end + 1] for text, start, end in zip(context.texts, starts, ends, strict=True)]
        tokens, lengths = pad(unread, context.tail.device)
        missing = state.num_scored - tokens.shape[1]
        if missing > 0:  # as many as any verdict settles, so that shapes do not depend on verdicts
            lengths = lengths or [tokens.shape[1]] * len(tokens)
            tokens = torch.nn.functional.pad(tokens, (0, missing))
        embedded = state.host.model.embeddings(tokens)
        hidden = self._advance(state.read, embedded, state.features(starts, tokens.shape[1], lengths), lengths)
        if lengths is None:
            return hidden[:, -1:], ends
        if min(lengths) == max(lengths):
            return hidden[:, lengths[0] - 1 : lengths[0]], ends
        last = torch.tensor([max(length - 1, 0) for length in lengths], device=hidden.device)
        return hidden.gather(1, last[:, None, None].expand(-1, -1, hidden.shape[-1])), ends

    def _advance(
        self,
        read: KVState,
        embedded: Float[Tensor, "B T D"],
        features: Float[Tensor, "B T D"],
        lengths: Sequence[int] | None,
    ) -> Float[Tensor, "B T D"]:
        """The network's output for the next T entries of every row, `lengths` of which are real; they are read then."""
        slots = read.slots(embedded.shape[1])

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            seen = read.mask(slots, window=self.network.attention_window)
            return attention(queries, *read.update(0, slots, keys, values), seen)

        hidden = self.network.layer(embedded, features, slots.positions, attend)
        read.advance(embedded.shape[1], lengths)
        return hidden
