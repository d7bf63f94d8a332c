"""Drafts in stages: a smaller drafter drafts for a larger one, and the result goes to the target.

The larger stage reads the smaller one's draft tokens in one call and keeps those that it would have drawn itself, plus
one of its own, until the window is full (`ExactMatch`, with the window's own uniform numbers). So the draft and its
distributions are those of the larger stage alone, and every lossless rule stays lossless. (Spector & Re 2023, "Staged
speculative decoding"; Chen et al. 2023, "Cascade speculative drafting".)

Shapes: B rows, K window, N places that one call scores, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.drafters.base import Drafter, DraftRequest, DraftState, TargetContext, last_two
from lightning_specdec.drafters.early_exit import EarlyExitDrafter, ExitModel, ExitState, LowerState
from lightning_specdec.drafters.layout import pad, with_guesses
from lightning_specdec.drafters.model import ModelDrafter, ModelDraftState, commit, fit
from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Scorer = ModelDrafter | EarlyExitDrafter
"""What can stand behind the first stage: it scores any number of its target's tokens in one call."""


class StagedState(DraftState):
    """The states of the larger stage and of the smaller drafter.

    Within a round the smaller drafter sees texts that end in the larger one's tokens; once the target has judged them,
    both go back to what it kept.
    """

    def __init__(self, model: LanguageModel, larger: ModelDraftState | ExitState, smaller: DraftState) -> None:
        self.model, self.larger, self.smaller = model, larger, smaller
        self.drafted_at: list[int] | None = None
        """Lengths of the texts that were last drafted on, until it is known how many draft tokens were kept."""

    def begin(self, request: DraftRequest) -> DecodeState:
        """The larger stage's state, gone back to the texts: the last token at least is not read yet."""
        self.settle()
        self.drafted_at = [len(text) for text in request.texts]
        if isinstance(self.larger, ExitState):
            return LowerState(self.larger.whole)
        self.larger.drafted_at, state = self.drafted_at, self.larger.model_state
        starts = [min(read, length - 1) for read, length in zip(state.consumed, self.drafted_at, strict=True)]
        state.truncate(starts)
        commit(state, starts, request)
        return state

    def settle(self, num_accepted: Sequence[int] | None = None) -> None:
        """Forget the draft tokens that were not kept, all when None."""
        if self.drafted_at is not None:
            if isinstance(self.larger, ModelDraftState):
                self.larger.settle(num_accepted)
            counts = num_accepted or [0] * len(self.drafted_at)
            for row, (length, count) in enumerate(zip(self.drafted_at, counts, strict=True)):
                self.smaller.go_back(row, length + count)
            self.drafted_at = None

    def select(self, rows: Sequence[int]) -> None:
        self.settle()
        self.larger.select(rows)
        self.smaller.select(rows)

    def clear(self, rows: Sequence[int]) -> None:
        self.settle()
        self.larger.clear(rows)
        self.smaller.clear(rows)

    def go_back(self, row: int, length: int) -> None:
        self.larger.go_back(row, length)
        if isinstance(self.larger, ModelDraftState) and not self.larger.model_state.consumed[row]:
            self.smaller.clear([row])  # the larger one reads the text anew: there is nothing to go on from
        else:
            self.smaller.resume(row, length)


class _Window:
    """The larger stage's draft of one round: texts grow until every row has as many tokens as it wants."""

    def __init__(self, request: DraftRequest, windows: Sequence[int], sampling: Sampling) -> None:
        self.request, self.windows, self.sampling = request, windows, sampling
        self.texts = [list(text) for text in request.texts]
        self.starts = [len(text) for text in request.texts]
        self.device = request.tail.device
        self.probs: Tensor | None = None
        self.logits: Tensor | None = None

    @property
    def tokens(self) -> list[list[int]]:
        """The draft tokens of each row so far."""
        return [text[start:] for start, text in zip(self.starts, self.texts, strict=True)]

    @property
    def left(self) -> list[int]:
        """How many tokens each row still wants."""
        return [window - len(row) for window, row in zip(self.windows, self.tokens, strict=True)]

    def places(self, num_places: int) -> Int[Tensor, "B N"]:
        """The places of the window that each row's next tokens come to; K, which is none, behind its end."""
        done = torch.tensor([[len(row)] for row in self.tokens], device=self.device)
        return (done + torch.arange(num_places, device=self.device)).clamp(max=max(self.windows))

    def uniform(self, places: Int[Tensor, "B N"]) -> Float[Tensor, "B N"] | None:
        """The uniform numbers of these places."""
        numbers = self.request.uniform
        return None if numbers is None else numbers.gather(1, places.clamp(max=numbers.shape[1] - 1))

    def draw(self, logits: Float[Tensor, "B N W"], drafted: Sequence[Sequence[int]]) -> Int[Tensor, "B N"]:
        """The larger stage's own tokens at each row's next places, from its logits behind each of the smaller's."""
        logits = fit(logits, self.request.vocab_size)
        if self.sampling.processors:
            texts = [text if left else None for text, left in zip(self.texts, self.left, strict=True)]
            logits = self.sampling.process(logits, texts, drafted, stop_at_impossible=True)
        places = self.places(logits.shape[1])
        tokens, probs = self.sampling.sample_with_probs(logits, self.uniform(places))
        if probs is not None:
            self.probs = self._put(self.probs, places, probs)
        if self.request.wants_logits:
            self.logits = self._put(self.logits, places, logits)
        return tokens.clamp(max=logits.shape[-1] - 1)  # a row of NaN draws no token, and something has to be read

    def extend(self, drawn: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]]) -> list[int]:
        """Append the larger stage's tokens to each row that wants more, up to and with the first that differs from the
        smaller's; returns how many agree."""
        num_agreed = []
        for text, left, own, smaller in zip(self.texts, self.left, drawn, drafted, strict=True):
            differ = (i for i, (token, other) in enumerate(zip(own, smaller, strict=False)) if token != other)
            num_agreed.append(next(differ, len(smaller)))
            if left:
                text += own[: num_agreed[-1] + 1]
        return num_agreed

    def _put(self, kept: Tensor | None, places: Tensor, values: Float[Tensor, "B N V"]) -> Float[Tensor, "B K1 V"]:
        """`kept` with these values at their places; those behind a token that differs are written over in time."""
        if kept is None:
            kept = values.new_zeros(len(values), max(self.windows) + 1, values.shape[-1])
        kept[torch.arange(len(values), device=self.device)[:, None], places] = values
        return kept


@dataclass(frozen=True)
class StagedSettings(Settings):
    """Settings of `StagedDrafter`."""

    stage_windows: int | tuple[int, ...] = setting(
        4, "draft tokens that a stage makes for the next one: for all, or for each but the last", minimum=1
    )


class StagedDrafter(Drafter):
    """Drafts with a model that is itself helped by a smaller drafter, with the tokens that it would draft alone.

    `Draft.num_calls` counts the last stage's passes.

    Args:
        stages: two drafters or more, smallest first. The first may be of any kind; one that works inside its target
            works inside the second stage's model. The others are `ModelDrafter` or `EarlyExitDrafter`.
        stage_windows: see `StagedSettings`.

    Raises:
        ValueError: stages cannot stand where they do, or have different vocabularies.
    """

    Settings = StagedSettings
    gives_logits = True

    def __init__(self, stages: Sequence[Drafter], *, stage_windows: Sequence[int] | int = 4) -> None:
        super().__init__(stage_windows=stage_windows)
        windows = self.settings.stage_windows
        windows = [windows] * (len(stages) - 1) if isinstance(windows, int) else list(windows)
        if len(stages) < 2 or len(windows) != len(stages) - 1:
            raise ValueError(
                f"stages must be two drafters or more and stage_windows one number, or one for each stage but the "
                f"last, got {len(stages)} stages and {windows}"
            )
        for number, stage in enumerate(stages, 1):
            if not isinstance(stage, Drafter if number == 1 else Scorer):
                raise ValueError(
                    f"stage {number} is a {type(stage).__name__}, which cannot stand there: stages behind the first "
                    "are a ModelDrafter or an EarlyExitDrafter each"
                )
        sizes = [stage.model.num_parameters for stage in stages if isinstance(stage, ModelDrafter)]
        if sizes != sorted(sizes):
            raise ValueError(f"give the stages smallest first, got models of {sizes} parameters")
        *first, last = stages
        self.stages, self.stage_windows, self.window = [*stages], windows, windows[-1]
        self.smaller = first[0] if len(first) == 1 else StagedDrafter(first, stage_windows=windows[:-1])
        self.larger: Any = last
        if isinstance(last, ModelDrafter) and isinstance(first[-1], ModelDrafter):
            self._check_smaller(last.model)

    @classmethod
    def for_target(cls, target: LanguageModel, draft: Any = None, **settings: Any) -> Drafter:
        raise ValueError(f"a {cls.__name__} is made of drafters: give its checkpoint, or build it in Python")

    @property
    def inside_target(self) -> bool:  # type: ignore[override]
        """Whether the last stage works on the target's own state."""
        return bool(self.larger.inside_target)

    @property
    def max_positions(self) -> int | None:
        limits = [stage.max_positions for stage in self.stages]
        return min((limit for limit in limits if limit is not None), default=None)

    def _check_smaller(self, model: LanguageModel) -> None:
        """Raise ValueError if the smaller drafter cannot draft for that model."""
        number = len(self.stages)
        if isinstance(model, ExitModel) and self.smaller.inside_target:
            raise ValueError(f"stage {number - 1} works inside stage {number}, which is a part of the target itself")
        try:
            self.smaller.check_target(model)
        except ValueError as error:
            raise ValueError(f"stage {number - 1} cannot draft for stage {number}: {error}") from error

    def check_target(self, target: LanguageModel) -> None:
        self.larger.check_target(target)
        exits = isinstance(self.larger, EarlyExitDrafter)
        self._check_smaller(self.larger.exit_model(target) if exits else self.larger.model)

    def needs_noise(self, sampling: Sampling) -> bool:
        return self.larger.needs_noise(sampling) or self.smaller.needs_noise(self.larger.sampling or sampling)

    def fused(self) -> StagedDrafter:
        return StagedDrafter([stage.fused() for stage in self.stages], stage_windows=self.stage_windows)

    def arguments(self) -> dict[str, Any]:
        for stage in self.stages:
            stage.arguments()  # one that a checkpoint cannot keep says so
        return {"stages": self.stages, "stage_windows": self.stage_windows}

    def init_state(self, batch_size: int, max_length: int, context: TargetContext | None = None) -> StagedState:
        max_length += self.window  # whole windows are read, also where a row wants fewer
        larger = self.larger.init_state(batch_size, max_length, context)
        if isinstance(larger, ExitState):
            own = TargetContext(larger.model, LowerState(larger.whole))
        else:
            own = TargetContext(self.larger.model, larger.model_state)
        return StagedState(own.model, larger, self.smaller.init_state(batch_size, max_length, own))

    def propose(self, state: Any, request: DraftRequest, windows: Sequence[int], sampling: Sampling) -> Draft:
        reading, made = state.begin(request), _Window(request, windows, self.larger.sampling or sampling)
        num_calls = 0
        while max(made.left) > 0:
            self._advance(state, reading, made)
            num_calls += 1
        tokens, lengths = pad(made.tokens, made.device)
        return Draft(
            tokens,
            None if lengths is None else torch.tensor(lengths, device=made.device),
            None if made.probs is None else made.probs[:, :-1],
            None if made.logits is None else made.logits[:, :-1],
            num_calls=num_calls,
            exit_states=reading.exit_states(self.larger.exit_layer) if isinstance(reading, LowerState) else None,
        )

    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        state.settle(num_accepted)

    def _advance(self, state: StagedState, reading: DecodeState, made: _Window) -> None:
        """One round between the two: draft, score, keep what agrees and one token more."""
        windows = [min(self.window, max(left - 1, 0)) for left in made.left]
        draft = self._draft(state, made, windows)
        output = self._score(state, reading, made, draft)
        lengths = torch.tensor(windows, device=made.device) if draft.lengths is None else draft.lengths
        read = torch.cat((lengths[:, None], draft.tokens), dim=1).tolist()  # the host reads once
        drafted = [row[: min(window, length)] for (length, *row), window in zip(read, windows, strict=True)]
        num_agreed = made.extend(made.draw(output.logits, drafted).tolist(), drafted)
        self.smaller.observe(state.smaller, output, num_agreed)
        reading.truncate([min(read, len(text) - 1) for read, text in zip(reading.consumed, made.texts, strict=True)])

    def _draft(self, state: StagedState, made: _Window, windows: list[int]) -> Draft:
        """The smaller drafter's tokens, drawn with the numbers of the places that they are for."""
        if not max(windows):
            return Draft(torch.empty(len(windows), 0, dtype=torch.long, device=made.device))
        known = made.request
        request = DraftRequest(
            texts=made.texts,
            tail=last_two(made.texts, made.device),
            uniform=made.uniform(made.places(max(windows))),
            vocab_size=state.model.vocab_size if known.vocab_size is None else known.vocab_size,
            windows=windows,
            settled=made.starts if known.settled is None else known.settled,
        )
        return self.smaller.propose(state.smaller, request, windows, made.sampling)

    def _score(self, state: StagedState, reading: DecodeState, made: _Window, draft: Draft) -> ModelOutput:
        """The larger stage reads what it has not read of each text, and the draft tokens.

        Rows with full windows read their last token again, so what the smaller drafter observes is true of them too.
        """
        unread = [text[read:] for text, read in zip(made.texts, reading.consumed, strict=True)]
        tokens, valid_lengths, places = with_guesses(*pad(unread, made.device), draft.tokens)
        tokens = tokens.clamp(max=state.model.vocab_size - 1)  # the target may have tokens that only pad its output
        score = state.model if draft.exit_states is None else partial(state.model, exit_states=draft.exit_states)
        features = tuple(self.smaller.features(state.model))
        return score(tokens, reading, valid_lengths=valid_lengths, logits_for=places, features=features)
