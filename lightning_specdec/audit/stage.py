"""One round of the real loop, played with given uniform numbers, and all drafts that it can have.

Shapes: R rows of one text, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_specdec.audit.identity import readings
from lightning_specdec.audit.intervals import STEPS, NoFunction, Steps, find_steps
from lightning_specdec.decoding import Session
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Draft, Purpose, Sampling, Verdict

if TYPE_CHECKING:
    from jaxtyping import Float

Prefix = tuple[int, ...]
LEAST_SHARE = 2**-18
"""Drafts that are rarer are left out: rounding would make them others."""
NEAR, RESOLUTION = 6, 12
"""Of the 2^24 uniform numbers: how far around the end of a reported interval its true end is looked for first, and by
how many it may be off."""
MOST_PATHS = 4096
NUM_AGAIN = 16
"""Rows of random numbers that a drafter is first asked about, twice."""


class Played(NamedTuple):
    """One round: what the rule was asked (None where nothing was drafted), each row's draft and new tokens.

    The logits are the target's K + 1, as processors leave them.
    """

    draft: Draft | None
    logits: Float[Tensor, "R K1 V"] | None
    drafted: list[list[int]]
    committed: list[list[int]]


class Stage:
    """A pair of models with a rule and a prompt, on which the same round is played with one noise after the other.

    It is the second one. In the first, whatever was drafted is rejected, and the target's likeliest token follows. So
    the states have gone back once, drafters have read the target, and the text is the same however rounding falls.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        prompt: Sequence[int],
        *,
        rule: AcceptanceRule,
        sampling: Sampling,
        num_draft_tokens: int,
    ) -> None:
        self.target, self.drafter, self.prompt = target, drafter, list(prompt)
        self.rule, self.sampling, self.width = rule, sampling, num_draft_tokens + 1
        probs = sampling.probs(sampling.process(readings(target, [prompt], 1)[0], [prompt]))[0, 0].cpu()
        self._first = int(probs.argmax())
        self._number = float((probs.cumsum(0) - probs / 2)[self._first] / probs.sum())
        self.text = [*prompt, self._first]
        """What the round goes on from."""

    def play(self, noise: Float[Tensor, "R K1 3"], *, ragged: bool = False) -> Played:
        """One round for R rows, each with its numbers; `ragged` gives them windows of 1 to K draft tokens."""
        rule, most, asked = copy(self.rule), 2 * self.width, []

        def watched(draft: Draft, logits: Tensor, *rest: Any) -> Verdict:
            asked.append((draft, logits))
            return self.rule.judge(draft, logits, *rest)

        session = Session(
            self.target,
            self.drafter,
            max_length=len(self.prompt) + most,
            rule=rule,
            sampling=self.sampling,
            num_draft_tokens=self.width - 1,
            batch_size=len(noise),
        )
        lengths = [3 + i % (self.width - 1) if ragged else most for i in range(len(noise))]
        rows = [session.add(self.prompt, max_new_tokens=length) for length in lengths]
        table = session._batch.noise
        assert table is not None, "nothing is drawn at random"
        table[:, : self.width] = self._number
        rule.judge = self._reject  # type: ignore[assignment, method-assign]
        session.step()
        rule.judge = watched  # type: ignore[assignment, method-assign]
        position = rows[0].num_new
        table[:, position : position + self.width] = noise.to(session.device)
        committed = [tokens for _, tokens in session.step()]
        if not asked:
            return Played(None, None, [[] for _ in rows], committed)
        draft, logits = asked[0]
        drafted = draft.tokens.tolist()
        if draft.lengths is not None:
            drafted = [row[:length] for row, length in zip(drafted, draft.lengths.tolist(), strict=True)]
        return Played(draft, logits, drafted, committed)

    def _reject(self, draft: Draft, logits: Tensor, *rest: Any) -> Verdict:
        """Nothing is kept, and the same token follows in every row."""
        kept = torch.zeros_like(draft.tokens, dtype=torch.bool)
        endings = torch.full(logits.shape[:2], self._first, device=kept.device)
        return Verdict(kept, endings, None if self.rule.lossless else kept)


class Path(NamedTuple):
    """A draft, or the beginning of one: its tokens, numbers with which they are drawn, and its chance."""

    tokens: Prefix
    numbers: list[float]
    share: float


@dataclass
class Tree:
    """The drafts of a round.

    Args:
        paths: the whole drafts, but for the rarest.
        steps: which token each number draws, behind every beginning of one.
        left_out: the chance of those that are not among them.
    """

    paths: list[Path] = field(default_factory=list)
    steps: dict[Prefix, Steps] = field(default_factory=dict)
    left_out: float = 0.0


def draft_tree(stage: Stage, seed: int) -> Tree:
    """The drafts of a round, found by drawing with one number after the other.

    Args:
        seed: keys the numbers that the drafter is first asked about, twice.

    Raises:
        NoFunction: the draft depends on more than these numbers.
        ValueError: there are too many drafts.
    """
    name = type(stage.drafter).__name__
    noise = torch.rand(NUM_AGAIN, stage.width, len(Purpose), generator=torch.Generator().manual_seed(seed))
    if stage.play(noise).drafted != stage.play(noise).drafted:
        raise NoFunction(name)
    tree, begun = Tree(), [Path((), [], 1.0)]
    reported: dict[Prefix, Tensor] = {}
    _draw(stage, [[]], reported)
    while begun:
        lengths = [0] * len(begun)
        hints = [_ends(reported.get(path.tokens)) for path in begun]
        ask = partial(_next_tokens, stage, begun, lengths, reported)
        found = find_steps(ask, len(begun), name=name, hints=hints, resolution=RESOLUTION, pieces=4)
        longer: list[Path] = []
        for path, length, steps in zip(begun, lengths, found, strict=True):
            tree.steps[path.tokens] = steps
            for token, size, middle in steps.parts:
                each = Path((*path.tokens, token), [*path.numbers, middle], path.share * size)
                if each.share < LEAST_SHARE:
                    tree.left_out += each.share
                else:
                    (tree.paths if len(each.tokens) >= length else longer).append(each)
        begun = longer
        if len(begun) + len(tree.paths) > MOST_PATHS:
            raise ValueError(f"a round has more than {MOST_PATHS} drafts: draft fewer tokens, or from fewer (top_k)")
    return tree


def _next_tokens(
    stage: Stage,
    begun: list[Path],
    lengths: list[int],
    reported: dict[Prefix, Tensor],
    which: Tensor,
    uniform: Tensor,
) -> Tensor:
    """The token that follows each of these beginnings with this number, -1 for none; into `lengths` the drafts'."""
    functions, level = which.tolist(), len(begun[0].tokens)
    rows = [[*begun[i].numbers, number] for i, number in zip(functions, uniform.tolist(), strict=True)]
    tokens = []
    for i, drafted in zip(functions, _draw(stage, rows, reported), strict=True):
        lengths[i] = len(drafted)
        tokens.append(drafted[level] if level < len(drafted) else -1)
    return torch.tensor(tokens)


def _draw(stage: Stage, rows: list[list[float]], reported: dict[Prefix, Tensor]) -> list[list[int]]:
    """What is drafted with these numbers, and into `reported` the distributions that the drafter says it drew from."""
    noise = torch.full((len(rows), stage.width, len(Purpose)), 0.5)
    for noisy, numbers in zip(noise, rows, strict=True):
        noisy[: len(numbers), stage.rule.draft_purpose] = torch.tensor(numbers)
    played = stage.play(noise)
    if played.draft is not None and played.draft.probs is not None:
        for row, tokens in enumerate(played.drafted):
            for i in range(len(tokens)):
                reported.setdefault(tuple(tokens[:i]), played.draft.probs[row, i])
    return played.drafted


def _ends(probs: Tensor | None) -> list[int]:
    """Numbers around the ends of the intervals that a distribution has, of the 2^24."""
    if probs is None:
        return []
    cumulative = probs.double().cumsum(0)
    ends = (cumulative[probs > 0][:-1] / cumulative[-1] * STEPS).round().long().tolist()
    return [min(max(end + shift, 0), STEPS - 1) for end in ends for shift in (-NEAR, NEAR)]
