"""Drafts in stages: a smaller drafter guesses for a larger one, and what the larger one makes of it goes to the target.

Theory: a good draft is itself a model that generates too slowly, so it is helped as the target is. It reads a smaller
draft's guesses in one call and keeps those that it would have drawn itself, plus one token of its own, until the window
is full. The rule is that of `ExactMatch`: for place j of the window its token is drawn with the window's own uniform
number j, as in drafting alone, and the smaller draft draws with the same numbers, so that they often agree. Hence the
guesses, and the distributions that they were drawn from, are those that the larger draft would have made alone (up to
the rounding by which a call on several tokens differs from calls on one). What goes to the target needs no noise of its
own, and every rule that is lossless with the larger draft alone stays lossless, whatever the smaller one does. It pays
where the larger draft's calls on several tokens cost little more than on one.

Whether a guess is kept decides what is read next, so the host reads the device twice for each call of the larger stage:
the guesses, and what was drawn in their place. With a plain drafter it reads nothing before the verdict.

Sources: Spector & Re 2023, "Accelerating LLM inference with staged speculative decoding"; Chen et al. 2023, "Cascade
speculative drafting".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from lightning_specdec.checks import require_int
from lightning_specdec.drafters.base import Context, Drafter, DraftState, Host, last_two
from lightning_specdec.drafters.cross_vocabulary import CrossVocabulary
from lightning_specdec.drafters.early_exit import EarlyExitDrafter, ExitState
from lightning_specdec.drafters.exit_model import ExitModel, LowerState
from lightning_specdec.drafters.layout import pad, with_guesses
from lightning_specdec.drafters.model import ModelDrafter
from lightning_specdec.drafters.staged_state import StagedState, Window
from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput
from lightning_specdec.rules import Draft, Sampling

Scorer = ModelDrafter | EarlyExitDrafter
"""What can stand behind the first stage: it scores any number of tokens of its target's vocabulary in one call."""


class StagedDrafter(Drafter):
    """Guesses with a model that is itself helped by a smaller drafter; its guesses are those that it would make alone.

    `Draft.num_calls` counts the last stage's passes, which are what staging saves; the state's `num_calls` has those of
    every stage.

    Args:
        stages: two drafters or more, smallest first. The first may be of any kind; one that works inside its target
            (early exit, heads) works inside the second stage's model. The others score what comes before them:
            `ModelDrafter`, or `EarlyExitDrafter`, whose layers are those of the model behind it.
        stage_windows: guesses that a stage makes for the next one at a time: one number for all, or one for each but
            the last.

    Raises:
        ValueError: for stages that cannot stand where they do, are not in the order of their sizes (as far as
            these are known without the target), or have different vocabularies.
    """

    gives_logits = True

    def __init__(self, stages: Sequence[Drafter], *, stage_windows: Sequence[int] | int = 4) -> None:
        super().__init__()
        check_stages(stages)
        number = len(stages)
        if isinstance(stage_windows, int):
            stage_windows = [stage_windows] * (number - 1)
        if not isinstance(stage_windows, Sequence) or len(stage_windows) != number - 1:
            raise ValueError(
                f"stage_windows must be one number, or one for each stage but the last ({number - 1}), "
                f"got {stage_windows!r}"
            )
        first, last = stages[:-1], stages[-1]
        assert isinstance(last, Scorer)
        self.smaller: Drafter = first[0] if number == 2 else StagedDrafter(first, stage_windows=stage_windows[:-1])
        self.larger = last
        self.window = require_int("stage_windows", stage_windows[-1], 1)
        _check_order(self.stages)
        before = self.stages[-2]
        if isinstance(before, ModelDrafter) and isinstance(last, ModelDrafter):
            self._check_smaller(before, last.model)

    @property
    def stages(self) -> list[Drafter]:
        """All of them, smallest first."""
        before = self.smaller.stages if isinstance(self.smaller, StagedDrafter) else [self.smaller]
        return [*before, self.larger]

    @property
    def stage_windows(self) -> list[int]:
        """The number of guesses of every stage but the last."""
        before = self.smaller.stage_windows if isinstance(self.smaller, StagedDrafter) else []
        return [*before, self.window]

    @property
    def inside_target(self) -> bool:  # type: ignore[override]
        """Whether the last stage works on the target's own state."""
        return self.larger.inside_target

    @property
    def max_positions(self) -> int | None:
        limits = [stage.max_positions for stage in self.stages]
        return min((limit for limit in limits if limit is not None), default=None)

    def _check_smaller(self, smaller: Drafter, model: LanguageModel) -> None:
        """Raise ValueError if the smaller drafter cannot guess for that model."""
        number = len(self.stages)
        if isinstance(model, ExitModel) and smaller.inside_target:
            raise ValueError(
                f"stage {number - 1} is a {type(self.stages[-2]).__name__}, which works inside the model of stage "
                f"{number}, and that is a part of the target itself: put a ModelDrafter or an NGramDrafter before it"
            )
        try:
            smaller.check_target(model)
        except ValueError as error:
            raise ValueError(f"stage {number - 1} cannot guess for stage {number}: {error}") from error

    def _model(self, target: LanguageModel) -> LanguageModel:
        """What the last stage scores with."""
        if isinstance(self.larger, ModelDrafter):
            return self.larger.model
        return self.larger.exit_model(target)

    def check_target(self, target: LanguageModel) -> None:
        self.larger.check_target(target)
        self._check_smaller(self.smaller, self._model(target))

    def needs_noise(self, sampling: Sampling) -> bool:
        return self.larger.needs_noise(sampling) or self.smaller.needs_noise(self.larger.sampling or sampling)

    def fused(self) -> StagedDrafter:
        return StagedDrafter([stage.fused() for stage in self.stages], stage_windows=self.stage_windows)

    def arguments(self) -> dict[str, Any]:
        for stage in self.stages:
            stage.arguments()  # one that a checkpoint cannot keep says so
        return {"stages": self.stages, "stage_windows": self.stage_windows}

    def init_state(self, batch_size: int, max_length: int, host: Host | None = None) -> StagedState:
        # Guesses are read in whole windows, also where a row wants fewer.
        larger = self.larger.init_state(batch_size, max_length + self.window, host)
        if isinstance(larger, ExitState):
            own = Host(larger.model, larger.begin())
        else:
            assert isinstance(self.larger, ModelDrafter)
            own = Host(self.larger.model, larger.model_state)
        return StagedState(own.model, larger, self.smaller.init_state(batch_size, max_length + self.window, own))

    def propose(self, state: DraftState, context: Context, windows: Sequence[int], sampling: Sampling) -> Draft:
        assert isinstance(state, StagedState)
        reading, made = state.begin(context), Window(context, windows, self.larger.sampling or sampling)
        num_calls = state.num_own_calls
        while max(made.left) > 0:
            self._advance(state, reading, made)
        draft = made.draft(state.num_own_calls - num_calls)
        if isinstance(reading, LowerState):
            assert isinstance(self.larger, EarlyExitDrafter)
            draft.exit_states = reading.exit_states(self.larger.exit_layer)
        return draft

    def observe(self, state: DraftState, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        assert isinstance(state, StagedState)
        state.settle(num_accepted)

    def _advance(self, state: StagedState, reading: DecodeState, made: Window) -> None:
        """One round between the two: guess, score, keep what agrees and one token more."""
        windows = [min(self.window, max(left - 1, 0)) for left in made.left]
        draft = self._guess(state, made, windows)
        output = self._score(state, reading, made, draft)
        guesses = _on_host(draft, windows)
        accepted = made.extend(made.draw(output.logits, guesses).tolist(), guesses)
        self.smaller.observe(state.smaller, output, accepted)
        reading.truncate([min(read, len(text) - 1) for read, text in zip(reading.consumed, made.texts, strict=True)])

    def _guess(self, state: StagedState, made: Window, windows: list[int]) -> Draft:
        """The smaller drafter's guesses, drawn with the numbers of the places that they are for."""
        if not max(windows):
            return Draft(torch.empty(len(windows), 0, dtype=torch.long, device=made.device))
        known = made.context
        context = Context(
            texts=made.texts,
            tail=last_two(made.texts, made.device),
            uniform=made.uniform(made.places(max(windows))),
            vocab_size=state.model.vocab_size if known.vocab_size is None else known.vocab_size,
            windows=windows,
            settled=made.starts if known.settled is None else known.settled,
        )
        draft = self.smaller.propose(state.smaller, context, windows, made.sampling)
        state.num_smaller_calls += draft.num_calls
        return draft

    def _score(self, state: StagedState, reading: DecodeState, made: Window, draft: Draft) -> ModelOutput:
        """The larger stage reads what it has not read of each text, and the guesses.

        Rows with full windows read their last token again, so what the smaller drafter observes is true of them too.
        """
        state.num_own_calls += 1
        unread = [text[read:] for text, read in zip(made.texts, reading.consumed, strict=True)]
        tokens, valid_lengths, places = with_guesses(*pad(unread, made.device), draft.tokens)
        # The target may have tokens that only pad its output: no words, but something has to be read.
        tokens = tokens.clamp(max=state.model.vocab_size - 1)
        score = state.model if draft.exit_states is None else partial(state.model.finish, draft.exit_states)
        features = tuple(self.smaller.features(state.model))
        return score(tokens, reading, valid_lengths=valid_lengths, logits_for=places, features=features)


def _on_host(draft: Draft, windows: Sequence[int]) -> list[list[int]]:
    """Each row's guesses, as many as were asked for."""
    if not draft.tokens.shape[1]:
        return [[] for _ in windows]
    if draft.lengths is None:
        return [row[:window] for row, window in zip(draft.tokens.tolist(), windows, strict=True)]
    packed = torch.cat((draft.tokens, draft.lengths[:, None]), dim=1).tolist()
    return [row[: min(window, length)] for (*row, length), window in zip(packed, windows, strict=True)]


def check_stages(stages: object) -> None:
    """Raise ValueError unless these are two drafters or more that can stand where they do."""
    if not isinstance(stages, Sequence) or len(stages) < 2:
        got = len(stages) if isinstance(stages, Sequence) else f"a {type(stages).__name__}"
        raise ValueError(f"stages must be a list of two drafters or more, smallest first, got {got}")
    for number, stage in enumerate(stages, 1):
        _check_stage(number, stage)


def _check_stage(number: int, stage: object) -> None:
    """Raise ValueError if the stage, counted from 1, cannot stand there."""
    name = type(stage).__name__
    if isinstance(stage, LanguageModel):
        raise ValueError(f"stage {number} is a {name}, which is a model: make it a ModelDrafter")
    if not isinstance(stage, Drafter):
        raise ValueError(f"stage {number} is {stage!r}, which is no drafter: give drafters, smallest first")
    if number == 1 or isinstance(stage, Scorer):
        return
    if isinstance(stage, StagedDrafter):
        raise ValueError(f"stage {number} is a {name}: give its stages one by one")
    reason = "scores tokens of a vocabulary of its own" if isinstance(stage, CrossVocabulary) else "scores no tokens"
    raise ValueError(
        f"stage {number} is a {name}, which {reason}, so it cannot judge the guesses of the stage before: "
        "put it first, and a ModelDrafter or an EarlyExitDrafter behind it"
    )


def _check_order(stages: Sequence[Drafter]) -> None:
    """Raise ValueError if the last stage has a smaller model than one before it."""
    number, last = len(stages), stages[-1]
    for i, stage in enumerate(stages[:-1], 1):
        if isinstance(stage, ModelDrafter | CrossVocabulary) and isinstance(last, ModelDrafter):
            before, own = stage.model.num_parameters, last.model.num_parameters
            if before > own:
                names = [type(each.model).__name__ for each in (stage, last)]
                raise ValueError(
                    f"stage {i} ({names[0]}, {before:,} parameters) is larger than stage {number} ({names[1]}, {own:,} "
                    "parameters): give the stages smallest first"
                )
