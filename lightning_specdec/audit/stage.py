"""One round of the real loop, played with given uniform numbers, and all drafts that it can have.

Shapes: R rows of one text, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_specdec.audit.identity import readings
from lightning_specdec.decoding import Session
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Draft, Purpose, Sampling, Verdict

if TYPE_CHECKING:
    from jaxtyping import Float

Prefix = tuple[int, ...]
STEPS = 2**24
"""Uniform numbers that torch draws in float32."""
LARGEST = 1 - 1 / STEPS
NEAR = 6 / STEPS
"""How far from the ends of its interval a draft token is drawn."""
LEAST_SHARE = 2**-18
"""Drafts that are rarer are left out: rounding would make them others."""
MOST_PATHS = 4096


class Played(NamedTuple):
    """One round: its numbers, what the rule was asked (None without a draft), each row's draft and new tokens.

    The logits are the target's K + 1, as processors leave them.
    """

    noise: Float[Tensor, "R K1 3"]
    draft: Draft | None
    logits: Float[Tensor, "R K1 V"] | None
    drafted: list[list[int]]
    committed: list[list[int]]


class Stage:
    """A pair of models with a rule and a prompt, on which the same round is played with one noise after the other.

    It is the second round. In the first, whatever was drafted is rejected, and the target's likeliest token follows. So
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
        probs = sampling.probs(sampling.process(readings(target, [prompt], 1)[0], [prompt]))[
            0, 0
        ].cpu()
        self._first = int(probs.argmax())
        self._number = float((probs.cumsum(0) - probs / 2)[self._first] / probs.sum())
        self.text = [*prompt, self._first]
        """What the round continues."""

    def play(
        self,
        rows: Sequence[Sequence[float]],
        generator: torch.Generator | None = None,
        *,
        ragged: bool = False,
    ) -> Played:
        """Play one round.

        Args:
            rows: of each row the numbers that its first draft tokens are drawn with.
            generator: of all other numbers; they are 0.5 when None.
            ragged: give the rows windows of 1 to K draft tokens.
        """
        size = len(rows), self.width, len(Purpose)
        noise = (
            torch.full(size, 0.5) if generator is None else torch.rand(size, generator=generator)
        )
        for noisy, numbers in zip(noise, rows, strict=True):
            noisy[: len(numbers), self.rule.draft_purpose] = torch.tensor(numbers)
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
        added = [session.add(self.prompt, max_new_tokens=length) for length in lengths]
        table = session._batch.noise
        assert table is not None, "nothing is drawn at random"
        table[:, : self.width] = self._number
        rule.judge = self._reject  # type: ignore[assignment, method-assign]
        session.step()
        rule.judge = watched  # type: ignore[assignment, method-assign]
        position = added[0].num_new
        table[:, position : position + self.width] = noise.to(session.device)
        committed = [tokens for _, tokens in session.step()]
        if not asked:
            return Played(noise, None, None, [[] for _ in added], committed)
        draft, logits = asked[0]
        drafted = draft.tokens.tolist()
        if draft.lengths is not None:
            drafted = [
                row[:length] for row, length in zip(drafted, draft.lengths.tolist(), strict=True)
            ]
        return Played(noise[:, : logits.shape[1]], draft, logits, drafted, committed)

    def _reject(self, draft: Draft, logits: Tensor, *rest: Any) -> Verdict:
        """Nothing is kept, and the same token follows in every row."""
        kept = torch.zeros_like(draft.tokens, dtype=torch.bool)
        endings = torch.full(logits.shape[:2], self._first, device=kept.device)
        return Verdict(kept, endings, None if self.rule.lossless else kept)


class Path(NamedTuple):
    """A draft, or the beginning of one: its tokens, numbers that they are drawn with, and its probability."""

    tokens: Prefix
    numbers: list[float]
    share: float


def draft_tree(stage: Stage) -> tuple[list[Path], list[list[float]], float]:
    """The drafts of a round by what the drafter reports, one token after the other.

    Returns:
        All but the rarest; numbers just within both ends of each token's interval; the probability of the rarest.

    Raises:
        ValueError: there are too many.
    """
    paths, ends, left_out, begun = list[Path](), list[list[float]](), 0.0, [Path((), [], 1.0)]
    while begun:
        played = stage.play([path.numbers for path in begun])
        probs = None if played.draft is None else played.draft.probs
        longer: list[Path] = []
        for row, (path, drafted) in enumerate(zip(begun, played.drafted, strict=True)):
            place = len(path.tokens)
            if len(drafted) <= place:
                paths.append(path)
                continue
            parts = [(drafted[place], 0.0, 1.0)] if probs is None else _intervals(probs[row, place])
            for token, low, high in parts:
                share = path.share * (high - low)
                if share < LEAST_SHARE:
                    left_out += share
                    continue
                longer.append(Path((*path.tokens, token), [*path.numbers, (low + high) / 2], share))
                ends += [[*path.numbers, end] for end in (low + NEAR, high - NEAR)]
        begun = longer
        if len(begun) + len(paths) > MOST_PATHS:
            raise ValueError(
                f"a round has more than {MOST_PATHS} drafts: draft fewer tokens, or from fewer (top_k)"
            )
    return paths, ends, left_out


def _intervals(probs: Float[Tensor, "V"]) -> list[tuple[int, float, float]]:
    """Each token that can be drawn, with the ends of its interval of uniform numbers."""
    tokens = (probs > 0).nonzero()[:, 0]
    cumulative = probs[tokens].double().cumsum(0)
    ends = (cumulative / cumulative[-1]).tolist()
    return list(zip(tokens.tolist(), [0.0, *ends], ends, strict=False))
