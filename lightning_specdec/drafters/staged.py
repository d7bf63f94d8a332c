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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.drafters.base import (
    Drafter,
    DraftRequest,
    DraftState,
    JointState,
    TargetContext,
    last_two,
)
from lightning_specdec.drafters.early_exit import EarlyExitDrafter, ExitState, LowerState
from lightning_specdec.drafters.layout import pad, with_draft_tokens
from lightning_specdec.drafters.model import ModelDrafter, ModelDraftState, fit, nothing
from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float


class StagedState(JointState):
    """The states of the larger stage and of the smaller drafter.

    Within a round the smaller drafter sees texts that end in the larger one's tokens; once the target has judged them,
    both go back to what it kept.
    """

    def __init__(self, larger: DraftState, smaller: DraftState) -> None:
        super().__init__(larger, smaller)
        self.larger, self.smaller = larger, smaller

    def begin(self, request: DraftRequest) -> DecodeState:
        """The larger stage's state, gone back to the texts: the last token at least is not read yet."""
        self.settle()
        self.drafted_at = [len(text) for text in request.texts]
        if isinstance(self.larger, ExitState):
            return LowerState(self.larger.whole)
        assert isinstance(self.larger, ModelDraftState)
        self.larger.begin(request, 1)
        return self.larger.model_state

    def select(self, rows: Sequence[int]) -> None:
        self.settle()
        super().select(rows)


class _Window:
    """The larger stage's draft of one round: texts grow until every row has as many tokens as it wants."""

    def __init__(self, request: DraftRequest, windows: Sequence[int], sampling: Sampling) -> None:
        self.request, self.windows, self.sampling = request, windows, sampling
        self.texts = [list(text) for text in request.texts]
        self.probs: list[list[Tensor]] = [[] for _ in windows]
        self.logits: list[list[Tensor]] = [[] for _ in windows]

    @property
    def tokens(self) -> list[list[int]]:
        """The draft tokens of each row so far."""
        return [
            text[len(known) :] for text, known in zip(self.texts, self.request.texts, strict=True)
        ]

    @property
    def left(self) -> list[int]:
        """How many tokens each row still wants."""
        return [window - len(row) for window, row in zip(self.windows, self.tokens, strict=True)]

    def uniform(self, num_places: int) -> Float[Tensor, "B N"] | None:
        """The uniform numbers of each row's next tokens; any behind the window's end."""
        numbers = self.request.uniform
        if numbers is None:
            return None
        done = torch.tensor([[len(row)] for row in self.tokens], device=numbers.device)
        places = done + torch.arange(num_places, device=numbers.device)
        return numbers.gather(1, places.clamp(max=numbers.shape[1] - 1))

    def extend(self, logits: Float[Tensor, "B N W"], drafted: Sequence[Sequence[int]]) -> list[int]:
        """Draw the larger stage's own tokens from its logits behind each of the smaller's, and append them to each row
        that wants more, up to and with the first that differs; returns how many agree."""
        left = self.left
        logits = fit(logits, self.request.vocab_size)
        if self.sampling.processors:
            texts = [
                text if wanted else None for text, wanted in zip(self.texts, left, strict=True)
            ]
            logits = self.sampling.process(logits, texts, drafted, stop_at_impossible=True)
        tokens, probs = self.sampling.sample_with_probs(logits, self.uniform(logits.shape[1]))
        drawn = tokens.clamp(
            max=logits.shape[-1] - 1
        ).tolist()  # a row of NaN draws no token, and something is read
        num_agreed = []
        for row, (own, smaller) in enumerate(zip(drawn, drafted, strict=True)):
            agreed = next((i for i, token in enumerate(smaller) if token != own[i]), len(smaller))
            num_agreed.append(agreed)
            if left[row]:
                self.texts[row] += own[: agreed + 1]
                if probs is not None:
                    self.probs[row].append(probs[row, : agreed + 1])
                if self.request.wants_logits:
                    self.logits[row].append(logits[row, : agreed + 1])
        return num_agreed

    def draft(self, num_calls: int) -> Draft:
        """All rows' tokens, and what they were drawn from."""
        tokens, lengths = pad(self.tokens, self.request.tail.device)
        counts = None if lengths is None else torch.tensor(lengths, device=tokens.device)
        return Draft(tokens, counts, _joined(self.probs), _joined(self.logits), num_calls)


def _joined(pieces: list[list[Tensor]]) -> Float[Tensor, "B K V"] | None:
    """Each row's pieces one behind the other, with zeros behind the shorter rows; None where there are none."""
    some = next((row[0] for row in pieces if row), None)
    if some is None:
        return None
    return pad_sequence([torch.cat([some[:0], *row]) for row in pieces], batch_first=True)


@dataclass(frozen=True)
class StagedSettings(Settings):
    stage_windows: int = setting(4, "draft tokens that a stage proposes to the next one", minimum=1)


class StagedDrafter(Drafter):
    """Drafts with a model that is itself helped by a smaller drafter, with the tokens that it would draft alone.

    `Draft.num_calls` counts the last stage's passes.

    Args:
        stages: two drafters or more, smallest first. The first may be of any kind that does not work inside its target,
            those between are `ModelDrafter`, and the last is a `ModelDrafter` or an `EarlyExitDrafter`.
        stage_windows: see `StagedSettings`.

    Raises:
        ValueError: stages cannot stand where they do.
    """

    Settings = StagedSettings
    gives_logits = True
    from_file = True

    def __init__(self, stages: Sequence[Drafter], *, stage_windows: int = 4) -> None:
        super().__init__(stage_windows=stage_windows)
        given: list[Any] = [*stages] or [None]
        *first, last = given
        behind = isinstance(last, ModelDrafter | EarlyExitDrafter) and all(
            isinstance(stage, ModelDrafter) for stage in first[1:]
        )
        if not first or not behind or not isinstance(first[0], Drafter) or first[0].inside_target:
            names = ", ".join(type(stage).__name__ for stage in stages)
            raise ValueError(
                "stages must be two drafters or more: one that works outside its target, then ModelDrafters, of which "
                f"the last may be an EarlyExitDrafter instead, got {names or 'none'}"
            )
        sizes = [stage.model.num_parameters for stage in stages if isinstance(stage, ModelDrafter)]
        if sizes != sorted(sizes):
            raise ValueError(f"give the stages smallest first, got models of {sizes} parameters")
        self.stages, self.window = [*stages], stage_windows
        self.smaller = (
            first[0] if len(first) == 1 else StagedDrafter(first, stage_windows=stage_windows)
        )
        self.larger: Any = last
        self.inside_target = last.inside_target

    @property
    def max_positions(self) -> int | None:
        return min(
            (limit for stage in self.stages if (limit := stage.max_positions) is not None),
            default=None,
        )

    def check_target(self, target: LanguageModel) -> None:
        for stage in self.stages:
            stage.check_target(target)

    def needs_noise(self, sampling: Sampling) -> bool:
        return self.larger.needs_noise(sampling) or self.smaller.needs_noise(
            self.larger.sampling or sampling
        )

    def fused(self, target: LanguageModel | None = None) -> StagedDrafter:
        return StagedDrafter(
            [stage.fused(target) for stage in self.stages], stage_windows=self.window
        )

    def arguments(self) -> dict[str, Any]:
        for stage in self.stages:
            stage.arguments()  # one that a checkpoint cannot keep says so
        return {"stages": self.stages, "stage_windows": self.window}

    def init_state(
        self, batch_size: int, max_length: int, context: TargetContext | None = None
    ) -> StagedState:
        max_length += self.window  # whole windows are read, also where a row wants fewer
        larger, smaller = (
            each.init_state(batch_size, max_length, context) for each in (self.larger, self.smaller)
        )
        return StagedState(larger, smaller)

    def propose(
        self, state: Any, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        reading, made = (
            state.begin(request),
            _Window(request, windows, self.larger.sampling or sampling),
        )
        model = state.larger.model if isinstance(reading, LowerState) else self.larger.model
        num_calls = 0
        while max(made.left) > 0:
            self._advance(state, model, reading, made)
            num_calls += 1
        draft = made.draft(num_calls)
        if isinstance(reading, LowerState):
            draft.exit_states = reading.exit_states(self.larger.exit_layer)
        return draft

    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        state.settle(num_accepted)

    def _advance(
        self, state: StagedState, model: LanguageModel, reading: DecodeState, made: _Window
    ) -> None:
        """One round between the two: draft, score, keep what agrees and one token more.

        Rows with full windows read their last token again, so what the smaller drafter observes is true of them too.
        """
        request, device = made.request, made.request.tail.device
        windows = [min(self.window, max(left - 1, 0)) for left in made.left]
        draft = nothing(request)
        if max(windows):
            inner = DraftRequest(
                made.texts,
                last_two(made.texts, device),
                made.uniform(max(windows)),
                vocab_size=request.vocab_size or model.vocab_size,
                settled=request.settled or [len(text) for text in request.texts],
            )
            draft = self.smaller.propose(state.smaller, inner, windows, made.sampling)
        unread = [text[read:] for text, read in zip(made.texts, reading.consumed, strict=True)]
        tokens, valid_lengths, places = with_draft_tokens(*pad(unread, device), draft.tokens)
        tokens = tokens.clamp(
            max=model.vocab_size - 1
        )  # the target may have tokens that only pad its output
        output = model(tokens, reading, valid_lengths=valid_lengths, logits_for=places)
        lengths = torch.tensor(windows, device=device) if draft.lengths is None else draft.lengths
        read = torch.cat((lengths[:, None], draft.tokens), dim=1).tolist()
        drafted = [
            row[: min(window, length)] for (length, *row), window in zip(read, windows, strict=True)
        ]
        num_agreed = made.extend(output.logits, drafted)
        self.smaller.observe(state.smaller, output, num_agreed)
        reading.truncate(
            [
                min(read, len(text) - 1)
                for read, text in zip(reading.consumed, made.texts, strict=True)
            ]
        )
