"""An independent, smaller language model as the draft."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from operator import le
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lightning_specdec.drafters.base import Context, Drafter, DraftState, Host
from lightning_specdec.drafters.draft_vocabulary import DraftVocabulary
from lightning_specdec.drafters.layout import pad
from lightning_specdec.models import DecodeState, KVState, LanguageModel, ModelOutput
from lightning_specdec.models.graphs import Outputs
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass
class ModelDraftState(DraftState):
    """The state of the draft's model."""

    model_state: DecodeState
    guessed_at: list[int] | None = None
    """Lengths of the texts that were last guessed on, until it is known how many of the guesses were kept."""

    def settle(self, num_accepted: Sequence[int]) -> None:
        """Forget the guesses that were not kept: texts may go on for rounds before the draft is asked again."""
        if self.guessed_at is not None:
            right = [length + count for length, count in zip(self.guessed_at, num_accepted, strict=True)]
            self.model_state.truncate([min(pair) for pair in zip(right, self.model_state.consumed, strict=True)])
            self.guessed_at = None

    def _drop_guesses(self) -> None:
        self.settle([0] * len(self.model_state.consumed))

    def select(self, rows: Sequence[int]) -> None:
        self._drop_guesses()
        self.model_state.select(rows)

    def clear(self, rows: Sequence[int]) -> None:
        self._drop_guesses()
        self.model_state.clear(rows)

    def go_back(self, row: int, length: int) -> None:
        lengths = list(self.model_state.consumed)
        if self.model_state.committed[row] >= length:  # the drafter reads the token before it again
            self.clear([row])
        elif lengths[row] > length:
            lengths[row] = length
            self.model_state.truncate(lengths)


class Guesses:
    """Draws guesses one after the other, and keeps what a draft must report of them.

    Args:
        windows: guesses wanted of each row, which is all that logits processors are asked about.
        sampling: how they are drawn.
        vocabulary: what the logits are over, where the draft can say some tokens alone; the target's tokens when None.
    """

    def __init__(
        self,
        context: Context,
        windows: Sequence[int],
        sampling: Sampling,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self.windows, self.sampling, self.wants_logits = windows, sampling, context.wants_logits
        self.vocabulary = vocabulary
        self._uniform = None if context.uniform is None else context.uniform.unbind(1)
        self._texts = [list(text) for text in context.texts] if sampling.processors else []
        self._tokens: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._logits: list[Tensor] = []

    def draw(self, logits: Float[Tensor, "B W"]) -> Int[Tensor, "B"]:
        """The next guess of every row, by the target's number, from logits over the draft's tokens."""
        i, own = len(self._tokens), self.vocabulary
        if own is not None and (self.sampling.processors or self.wants_logits):  # which are about the target's tokens
            logits, own = own.to_target(logits), None
        if self.sampling.processors:
            wanted = [text if i < window else None for text, window in zip(self._texts, self.windows, strict=True)]
            logits = self.sampling.process(logits[:, None], wanted)[:, 0]
        token, probs = self.sampling.sample_with_probs(logits, None if self._uniform is None else self._uniform[i])
        if self.sampling.processors:  # its own guesses are a part of what the next one is judged by
            for text, guess in zip(self._texts, token.tolist(), strict=True):
                text.append(guess)
        if probs is not None:
            token = token.clamp(max=probs.shape[-1] - 1)  # none, where the logits are no numbers: it has to be read
            self._probs.append(probs if own is None else own.spread(probs))
        if own is not None:  # the tokens ascend, so the same number draws the same one of fewer
            token = own.tokens[token]
        if self.wants_logits:
            self._logits.append(logits)
        self._tokens.append(token)
        return token

    @property
    def tokens(self) -> Int[Tensor, "B K"]:
        """The guesses."""
        return torch.stack(self._tokens, dim=1)

    @property
    def probs(self) -> Float[Tensor, "B K V"] | None:
        """The distributions that they were drawn from; None where they were certain."""
        return torch.stack(self._probs, dim=1) if self._probs else None

    @property
    def logits(self) -> Float[Tensor, "B K V"] | None:
        """The logits, if they are wanted."""
        return torch.stack(self._logits, dim=1) if self._logits else None


class RollingDrafter(Drafter):
    """Guesses with a language model, one token after the other; which one is open, and what it shares with the target.

    Theory: a guess is drawn from a distribution over the target's tokens, and the verdict is right only if exactly that
    distribution is reported. So the model's logits become logits over the target's tokens first, with -inf for
    what the model cannot say, and only then a distribution.

    Args:
        sampling: how it draws its guesses, if not as the session draws; any choice is lossless under a lossless rule.

    Attributes:
        renames: whether its model has other numbers for what it guesses.
    """

    gives_logits = True
    renames: ClassVar[bool] = False

    def __init__(self, *, sampling: Sampling | None = None) -> None:
        super().__init__()
        self.sampling = sampling

    def needs_noise(self, sampling: Sampling) -> bool:
        return not (self.sampling or sampling).greedy

    def to_target(self, logits: Float[Tensor, "B W"], context: Context) -> Float[Tensor, "B V"]:
        """Logits of the draft's W tokens as logits of the target's V."""
        return fit(logits, context.vocab_size)

    def to_draft(self, tokens: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
        """What the model reads for guesses that were drawn from those."""
        return tokens

    def roll(
        self,
        model: LanguageModel,
        state: DecodeState,
        tokens: Int[Tensor, "B T"],
        valid_lengths: Sequence[int] | None,
        num_guesses: int,
        context: Context,
        sampling: Sampling,
    ) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B K V"] | None, Float[Tensor, "B K V"] | None]:
        """Have a model read tokens and guess: the guesses, the distributions over the target's tokens that they were
        drawn from, and the logits if wanted."""
        windows = context.windows or [num_guesses] * len(context.texts)
        drawn = Guesses(context, windows, self.sampling or sampling)
        # A logits processor may choose what only pads the target's output: no word, but something has to be read.
        padded = not self.renames and (context.vocab_size or 0) > model.vocab_size

        def choose(logits: Float[Tensor, "B V"], i: int) -> Int[Tensor, "B"]:
            read = self.to_draft(drawn.draw(self.to_target(logits, context)))
            return read.clamp(max=model.vocab_size - 1) if padded else read

        read = model.rollout(tokens, state, num_guesses, choose, valid_lengths=valid_lengths)
        return drawn.tokens if padded or self.renames else read, drawn.probs, drawn.logits

    def records(
        self,
        model: LanguageModel,
        state: DecodeState,
        tokens: Int[Tensor, "B T"],
        num_read: int,
        context: Context,
        sampling: Sampling,
    ) -> bool:
        """Whether a round's guesses are made in one recorded call: where each row reads its text's last `num_read`
        tokens, which is all that the device knows the places of."""
        if context.device is None or tokens.shape[1] != num_read or (self.sampling or sampling).processors:
            return False
        return not self.renames and model.records(state, num_read)

    def recorded_roll(
        self,
        score: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]],
        tokens: Int[Tensor, "B T"],
        starts: Int[Tensor, "B"],
        num_guesses: int,
        context: Context,
        sampling: Sampling,
        key: Hashable,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """As `roll`, in one recorded call, with what `score` made on the way as the fourth.

        Args:
            score: logits of the last of these tokens, the first of which stands at these positions; and its states.
            key: tells models, states and spans apart.
        """
        assert context.device is not None
        own, width = self.sampling or sampling, context.vocab_size
        blank = Context([[]] * len(tokens), context.tail, None, context.wants_logits, width)

        def roll(tokens: Tensor, starts: Tensor, uniform: Tensor | None) -> Outputs:
            drawn, made = Guesses(replace(blank, uniform=uniform), [num_guesses] * len(tokens), own), list[Tensor]()
            for _ in range(num_guesses):
                logits, hidden = score(tokens, starts)
                starts = starts + tokens.shape[1]
                tokens = drawn.draw(self.to_target(logits, blank))[:, None].clamp(max=logits.shape[-1] - 1)
                made += [] if hidden is None else [hidden]
            return drawn.tokens, drawn.probs, drawn.logits, torch.cat(made, dim=1) if made else None

        full = "roll", id(self), num_guesses, own, context.wants_logits, width, key
        tokens_, probs, logits, made = context.device.graphs.run(full, roll, tokens, starts, context.uniform)
        assert tokens_ is not None
        return tokens_, probs, logits, made


class ModelDrafter(RollingDrafter):
    """Guesses with a smaller language model of the same vocabulary, one token after the other.

    Theory: the classic draft of Leviathan et al. 2023 and Chen et al. 2023. After a verdict the model has not seen the
    last one or two tokens of the text (the correction or bonus, and the last guess, which nobody fed). It always reads
    the last two again: that costs no launch more than reading two ragged ones, and keeps every shape fixed.

    Args:
        model: the draft.
        sampling: how it draws its guesses, if not as the session draws; any choice is lossless under a lossless rule.
    """

    def __init__(self, model: LanguageModel, *, sampling: Sampling | None = None) -> None:
        super().__init__(sampling=sampling)
        self.model = model

    def check_target(self, target: LanguageModel) -> None:
        own, others = self.model.vocabulary, target.vocabulary
        if own is not None and others is not None:
            if difference := own.difference(others):
                raise ValueError(
                    f"the draft's vocabulary is not the target's ({difference}): draft with CrossVocabulary, "
                    "which guesses what both have"
                )
        elif self.model.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft has a vocabulary of {self.model.vocab_size} tokens, the target one of {target.vocab_size}: "
                "train both with one vocabulary"
            )

    def arguments(self) -> dict[str, Any]:
        refuse_sampling(self.sampling)
        return {"model": self.model}

    def fused(self) -> ModelDrafter:
        return ModelDrafter(self.model.fused(), sampling=self.sampling)

    def init_state(self, batch_size: int, max_length: int, host: Host | None = None) -> ModelDraftState:
        return ModelDraftState(self.model.init_state(batch_size, max_length))

    def propose(self, state: DraftState, context: Context, windows: Sequence[int], sampling: Sampling) -> Draft:
        assert isinstance(state, ModelDraftState)
        tokens, valid_lengths = self._unread(state.model_state, context)
        if context.vocab_size is not None and context.vocab_size > self.model.vocab_size:
            # The target may say what only pads its output: no word, but the draft has to read something.
            tokens = tokens.clamp(max=self.model.vocab_size - 1)
        num_guesses = max(windows)
        state.guessed_at = [len(text) for text in context.texts]
        own = state.model_state
        if valid_lengths is None and self.records(self.model, own, tokens, 2, context, sampling):
            assert isinstance(own, KVState) and context.device is not None
            num_guesses = context.device.width
            model, storage, span = self.model, own.storage, own.recorded_span(num_guesses + 2)

            def score(tokens: Tensor, starts: Tensor) -> tuple[Tensor, None]:
                hidden = model.read_at(storage, span, tokens, starts, None)
                return model.exit_logits(hidden[:, -1:])[:, -1], None

            starts, key = context.device.starts - 1, (id(storage), span)
            guesses, probs, logits, _ = self.recorded_roll(score, tokens, starts, num_guesses, context, sampling, key)
            own.advance(tokens.shape[1] + num_guesses - 1)
        else:
            guesses, probs, logits = self.roll(self.model, own, tokens, valid_lengths, num_guesses, context, sampling)
        lengths = draft_lengths(windows, num_guesses, context)
        return Draft(guesses, lengths, probs, logits, num_calls=num_guesses)

    def observe(self, state: DraftState, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        assert isinstance(state, ModelDraftState)
        state.settle(num_accepted)

    def _unread(self, state: DecodeState, context: Context) -> tuple[Int[Tensor, "B T"], list[int] | None]:
        """The tokens to read before guessing, right-padded, and how many of each row's are real (None: all)."""
        tails = [len(text) - 2 for text in context.texts]
        if min(tails) >= 0 and all(map(le, tails, state.consumed)):
            state.truncate(tails)
            commit(state, tails, context)
            return context.tail, None
        starts = [min(length, max(tail, 0)) for length, tail in zip(state.consumed, tails, strict=True)]
        if starts != state.consumed:
            state.truncate(starts)
        commit(state, starts, context)
        unread = [text[start:] for start, text in zip(starts, context.texts, strict=True)]
        return pad(unread, context.tail.device)


def draft_lengths(wanted: Sequence[int], num_guesses: int, context: Context) -> Int[Tensor, "B"] | None:
    """A draft's lengths: the guesses that are wanted of each row, None where all of them are."""
    if min(wanted) == num_guesses:
        return None
    if context.device is not None and list(wanted) == list(context.device.wanted):
        return context.device.windows
    return torch.tensor(wanted, device=context.tail.device)


def commit(state: DecodeState, lengths: Sequence[int], context: Context) -> None:
    """Forget the way back below these lengths, but not below a settled text's last two tokens."""
    if context.settled is not None:
        lengths = [min(length, max(0, settled - 2)) for length, settled in zip(lengths, context.settled, strict=True)]
    state.commit(lengths)


def refuse_sampling(sampling: Sampling | None) -> None:
    """Raise ValueError for a draft with a sampling of its own, which is about to be saved."""
    if sampling is not None:
        raise ValueError("a checkpoint keeps no sampling of the draft's own: save without it, give it when decoding")


def fit(logits: Float[Tensor, "*B W"], vocab_size: int | None) -> Float[Tensor, "*B V"]:
    """Logits over `vocab_size` tokens: the last ones cut off, or -inf put behind them. As they are when None.

    Models of one vocabulary differ in the rows that pad their output to a round number, and no text has those tokens.
    """
    missing = 0 if vocab_size is None else vocab_size - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
