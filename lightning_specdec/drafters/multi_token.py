"""Heads on the target's last hidden state as the draft: each guesses one token further ahead.

Theory: the hidden state from which the target scores the next token often tells those after it too. So once a token is
settled, the state that it was drawn from is at hand, and head i scores the token i + 1 places behind that one: all
guesses come from one pass over one state, with no memory and no reading of their own. The price is that a head does not
see what the heads before it guessed, so each is right less often than the one before.

The hidden states are those that `features` gives of the last layer: of a transformers model behind the final norm, as
its output head sees them; of other models as they give them.

Shapes: B rows, T tokens, D width of the hidden state, V vocabulary, W tokens that the heads score, H heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.checks import require_int
from lightning_specdec.drafters.base import Context, Drafter, DraftState, Host, check_states
from lightning_specdec.drafters.draft_vocabulary import DraftVocabulary, rows_of
from lightning_specdec.drafters.heads import FusedHeads, Heads
from lightning_specdec.drafters.model import Guesses, draft_lengths, refuse_sampling
from lightning_specdec.models import LanguageModel, ModelOutput
from lightning_specdec.models.graphs import Outputs
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float

_OWN = "heads."
"""What the heads' weights are called here, ahead of the names that Medusa's files give them."""
_NAMES = re.compile(r"\d+\.\d+\.(linear\.weight|linear\.bias|weight)")


class MultiTokenState(DraftState):
    """For each row the hidden state that its text's last token was drawn from.

    Theory: what is remembered is a function of the settled text without its last token, so it does not matter what was
    guessed on the way. It serves that text alone, hence the lengths: a row that has just begun or goes on after other
    tokens has none until the target has read it.

    Args:
        host: the target and its state.
        layer: the target's last layer.
    """

    def __init__(self, batch_size: int, host: Host, layer: int) -> None:
        self.host, self.layer = host, layer
        self.lengths = [0] * batch_size
        """Tokens of the texts that the hidden states are for; 0 where there is none."""
        self._hidden: Float[Tensor, "B D"] | None = None
        self.scored: Float[Tensor, "B N D"] | None = None
        """What the target made of its last call's places; None where the rows have moved since."""
        self._num_accepted: Sequence[int] = ()

    @property
    def hidden(self) -> Float[Tensor, "B D"]:
        """The hidden states; those of rows whose length is 0 mean nothing."""
        if self._hidden is None:
            assert self.scored is not None, "the target has not been called yet"
            if min(self._num_accepted) == max(self._num_accepted):
                self._hidden = self.scored[:, self._num_accepted[0]]
            else:
                places = torch.tensor(self._num_accepted, device=self.scored.device)[:, None, None]
                self._hidden = self.scored.gather(1, places.expand(-1, -1, self.scored.shape[-1])).squeeze(1)
        return self._hidden

    def learn(self, scored: Float[Tensor, "B N D"], num_accepted: Sequence[int]) -> None:
        """Keep what the next token came from, of what the target made of a text's last one and its N - 1 guesses."""
        num_guesses = scored.shape[1] - 1
        self.scored, self._num_accepted, self._hidden = scored, num_accepted, None
        # The target has read the whole text and all guesses; the kept ones and one token more are text now.
        reads = zip(self.host.state.consumed, num_accepted, strict=True)
        self.lengths = [length - num_guesses + count + 1 for length, count in reads]

    def select(self, rows: Sequence[int]) -> None:
        if self.scored is not None or self._hidden is not None:
            self._hidden = self.hidden[torch.tensor(rows, device=self.hidden.device).clamp(min=0)]
            self.scored = None
        self.lengths = [0 if row < 0 else self.lengths[row] for row in rows]

    def clear(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.lengths[row] = 0

    def go_back(self, row: int, length: int) -> None:
        if self.scored is not None:  # another row goes on there, whose last round was not this one
            self._hidden, self.scored = self.hidden, None
        if self.lengths[row] > length + 1:  # it is of a text with other tokens
            self.clear([row])


class MultiTokenDrafter(Drafter):
    """Guesses with heads that look further ahead from the target's last hidden state, all in one pass.

    Sources: Cai et al. 2024, "Medusa", section 3.1 (blocks and an output layer for each head; here a single guess for
    each place instead of a tree); Gloeckle et al. 2024, "Better & Faster Large Language Models via Multi-token
    Prediction" (heads that share the target's output layer).

    Args:
        num_heads: H, at least 1: a round has at most so many guesses.
        hidden_size: D, of the target.
        vocab_size: V, of the target.
        num_blocks: residual blocks of each head.
        shared_output: whether the heads end in the target's own output head. That saves V * D weights for each head,
            and the reading of them; the target must be one whose output head can be called by itself.
        draft_vocabulary: the tokens that the heads can say, ascending; or how many, to be chosen before they are
            trained; all of them when None.
        sampling: how guesses are drawn, if not as the session draws; any choice is lossless under a lossless rule.
    """

    gives_logits = True
    inside_target = True

    def __init__(
        self,
        num_heads: int,
        *,
        hidden_size: int,
        vocab_size: int,
        num_blocks: int = 1,
        shared_output: bool = False,
        draft_vocabulary: int | Sequence[int] | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = require_int("num_heads", num_heads, 1, 64)
        self.hidden_size = require_int("hidden_size", hidden_size, 1, 2**16)
        self.vocab_size = require_int("vocab_size", vocab_size, 2, 2**20)
        self.num_blocks = require_int("num_blocks", num_blocks, 1, 16)
        self.shared_output, self.sampling = shared_output, sampling
        if shared_output and draft_vocabulary is not None:
            raise ValueError(
                "shared_output is the target's own output head, which scores all tokens: leave draft_vocabulary out, "
                "or give the heads outputs of their own"
            )
        self.draft_vocabulary = None if draft_vocabulary is None else DraftVocabulary(draft_vocabulary, vocab_size)
        num_tokens = vocab_size if self.draft_vocabulary is None else len(self.draft_vocabulary)
        self.heads: Heads | FusedHeads = Heads(
            num_heads, hidden_size, None if shared_output else num_tokens, num_blocks
        )

    @property
    def max_draft_tokens(self) -> int:
        return self.num_heads

    def _sizes(self) -> dict[str, Any]:
        names = ("num_heads", "hidden_size", "vocab_size", "num_blocks", "shared_output")
        plain = {name: getattr(self, name) for name in names}
        own = self.draft_vocabulary
        return plain if own is None else {**plain, "draft_vocabulary": own.arguments()}

    def arguments(self) -> dict[str, Any]:
        refuse_sampling(self.sampling)
        return self._sizes()

    def fused(self) -> MultiTokenDrafter:
        if isinstance(self.heads, FusedHeads):
            return self
        with torch.device("meta"):  # its own heads are not used
            other = MultiTokenDrafter(**self._sizes(), sampling=self.sampling)
        other.heads, other.draft_vocabulary = FusedHeads(self.heads), deepcopy(self.draft_vocabulary)
        return other.eval()

    def check_target(self, target: LanguageModel) -> None:
        check_states(target, hidden_size=self.hidden_size, vocab_size=self.vocab_size)
        if self.shared_output:
            target.check_output_head()

    def init_from(self, target: LanguageModel) -> MultiTokenDrafter:
        """Make each head's own output layer a copy of the target's output head, as Medusa begins; a shared one is that.

        Raises:
            ValueError: as `check_target`.
        """
        self.check_target(target)
        assert isinstance(self.heads, Heads), "fused heads are for decoding: begin with those that they were made of"
        if not self.shared_output:
            self.heads.copy_outputs(rows_of(target.output_weight, self.draft_vocabulary))
        return self

    def needs_noise(self, sampling: Sampling) -> bool:
        return not (self.sampling or sampling).greedy

    def features(self, target: LanguageModel) -> Sequence[int]:
        assert target.num_layers is not None
        return (target.num_layers - 1,)

    def logits(
        self, hidden: Float[Tensor, "B T D"], target: LanguageModel, num_heads: int | None = None
    ) -> Float[Tensor, "H B T V"]:
        """What the first `num_heads` heads (all when None) make of the target's last hidden states.

        Head i's logits at place t are of token t + 2 + i, when the target's own are of token t + 1.
        """
        scores = self.scores(hidden, target, num_heads)
        return scores if self.draft_vocabulary is None else self.draft_vocabulary.to_target(scores)

    def scores(
        self, hidden: Float[Tensor, "B T D"], target: LanguageModel, num_heads: int | None = None
    ) -> Float[Tensor, "H B T W"]:
        """As `logits`, of the tokens that the heads can say."""
        outputs: Tensor = self.heads(hidden.to(self.heads.dtype), num_heads)
        if not self.shared_output:
            return outputs
        return target.output_logits(outputs.flatten(0, 1).to(hidden.dtype)).unflatten(0, outputs.shape[:2])

    def head_logits(self, number: int, hidden: Float[Tensor, "*N D"], target: LanguageModel) -> Float[Tensor, "*N W"]:
        """What one head makes of the target's last hidden states, of the tokens that it scores: to be trained by."""
        assert isinstance(self.heads, Heads), "fused heads are for decoding: train those that they were made of"
        output: Tensor = self.heads[number](hidden.to(self.heads.dtype))
        if not self.shared_output:
            return output
        flat = output.to(hidden.dtype).flatten(end_dim=-2)
        return target.output_logits(flat[None])[0].unflatten(0, output.shape[:-1])

    def init_state(self, batch_size: int, max_length: int, host: Host | None = None) -> MultiTokenState:
        assert host is not None, "heads guess from their target's hidden states, so a session must say which that is"
        return MultiTokenState(batch_size, host, self.features(host.model)[0])

    def propose(self, state: DraftState, context: Context, windows: Sequence[int], sampling: Sampling) -> Draft:
        assert isinstance(state, MultiTokenState)
        known = (len(text) == length for text, length in zip(context.texts, state.lengths, strict=True))
        wanted = [min(window, self.num_heads) if each else 0 for window, each in zip(windows, known, strict=True)]
        num_guesses, device = max(wanted), context.tail.device
        if not num_guesses:
            return Draft(torch.empty(len(wanted), 0, dtype=torch.long, device=device))
        own, model = self.sampling or sampling, state.host.model
        if state.scored is None or context.device is None or own.processors:
            guesses = self._guess(state.hidden, context, wanted, own, model)
        else:
            num_guesses = min(context.device.width, self.num_heads)
            blank = Context([[]] * len(wanted), context.tail, None, context.wants_logits, context.vocab_size)

            def guess(scored: Tensor, num_added: Tensor, uniform: Tensor | None) -> Outputs:
                place = (num_added - 1).clamp(max=scored.shape[1] - 1)[:, None, None]
                hidden = scored.gather(1, place.expand(-1, -1, scored.shape[-1])).squeeze(1)
                drawn = self._guess(hidden, replace(blank, uniform=uniform), [num_guesses] * len(hidden), own, model)
                return drawn.tokens, drawn.probs, drawn.logits

            key = "heads", id(self), num_guesses, own, context.wants_logits
            tokens, probs, logits = context.device.graphs.run(
                key, guess, state.scored, context.device.num_added, context.uniform
            )
            assert tokens is not None
            lengths = draft_lengths(wanted, num_guesses, context)
            return Draft(tokens, lengths, probs, logits, num_calls=1)
        lengths = draft_lengths(wanted, num_guesses, context)
        return Draft(guesses.tokens, lengths, guesses.probs, guesses.logits, num_calls=1)

    def _guess(
        self,
        hidden: Float[Tensor, "B D"],
        context: Context,
        wanted: Sequence[int],
        sampling: Sampling,
        target: LanguageModel,
    ) -> Guesses:
        """What the heads draw from the hidden states of each row's last token but one."""
        guesses = Guesses(context, wanted, sampling, self.draft_vocabulary)
        for scores in self.scores(hidden[:, None], target, max(wanted))[:, :, 0]:
            guesses.draw(scores)
        return guesses

    def observe(self, state: DraftState, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        assert isinstance(state, MultiTokenState)
        state.learn(output.scored(state.layer), num_accepted)


def to_medusa(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A drafter's `state_dict` under the names of Medusa's published `medusa_lm_head` files.

    They are `{head}.{block}.linear.weight`, `{head}.{block}.linear.bias` and `{head}.{num_blocks}.weight`; the last is
    missing where the target's output head is shared, as in Medusa's files of version 2.
    """
    return {name.removeprefix(_OWN): weight for name, weight in weights.items()}


def from_medusa(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_medusa`: what `load_state_dict` takes.

    Raises:
        ValueError: these are no weights of Medusa's heads.
    """
    foreign = next((name for name in weights if not _NAMES.fullmatch(name)), None)
    if foreign is not None or not weights:
        found = "it is empty" if foreign is None else f"it holds {foreign!r}"
        raise ValueError(f"this is no file of Medusa's heads, whose weights are named like 0.0.linear.weight: {found}")
    return {f"{_OWN}{name}": weight for name, weight in weights.items()}
