"""What the target says about the tokens of an engine's answer: one call reads the whole answer.

Every token is judged given the tokens before it, so a first difference does not end the check.

Shapes: T tokens of an answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec.audit.identity import readings
from lightning_specdec.audit.token_law import TokenScores
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import Sampling

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

GAP_SHARES = {"bfloat16": 2.0**-5, "float16": 2.0**-8, "float32": 2.0**-17}
"""How far an engine's rounding moves the gap of two logits, as a share of the largest logit.

In the 16-bit types, four spacings of the numbers at the largest logit. In 570 tokens of SmolLM2,
bfloat16 moved the gap of the two likeliest tokens by up to 2.4 spacings, and half of the gaps by
less than 0.4. Float32 has 64 spacings, since kernels differ by more of these small ones."""


@dataclass(frozen=True)
class JudgedAnswer:
    """A greedy answer, judged token by token.

    Args:
        gaps: largest logit - the token's logit.
        bounds: gaps that the engine's rounding explains.
        best_tokens: the target's most likely tokens.
    """

    gaps: list[float]
    bounds: list[float]
    best_tokens: list[int]

    @property
    def num_equal(self) -> int:
        """Tokens that are the target's most likely ones."""
        return sum(gap == 0 for gap in self.gaps)

    @property
    def wrong_positions(self) -> list[int]:
        """Positions of tokens whose gap rounding does not explain."""
        pairs = enumerate(zip(self.gaps, self.bounds, strict=True))
        # A comparison with NaN is false, so it is written the other way round.
        return [position for position, (gap, bound) in pairs if not gap <= bound]


@dataclass(frozen=True)
class ScoredAnswer:
    """A sampled answer, scored token by token.

    Args:
        scores: of the tokens that the target's sampling can draw.
        border_positions: tokens that top_k or top_p exclude, but not if the logits move by as much
            as the engine's rounding explains. They are not among the scores.
        outside_positions: tokens that they exclude in any case.
    """

    scores: TokenScores
    border_positions: list[int]
    outside_positions: list[int]


class Reference:
    """Judges answers by a target.

    Args:
        target: in float32.
        engine_dtype: what the engine computes in, one of `GAP_SHARES`.
    """

    def __init__(self, target: LanguageModel, engine_dtype: str) -> None:
        self.target = target
        self.gap_share = GAP_SHARES[engine_dtype]

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> Float[Tensor, "T V"]:
        """The logits before each token of an answer, in float32.

        Raises:
            ValueError: they are not finite.
        """
        text = [*prompt, *tokens[:-1]]
        (logits,) = readings(self.target, [text], len(tokens))
        if logits.isnan().any() or not (logits.amax(-1) < torch.inf).all():
            raise ValueError("the target's own logits are not finite: it cannot be the reference")
        return logits[0]

    def judge(self, prompt: Sequence[int], tokens: Sequence[int]) -> JudgedAnswer:
        """Judge a greedy answer."""
        logits = self.logits(prompt, tokens)
        token_logits = logits.gather(-1, _column(tokens, logits))[:, 0]
        gaps = logits.amax(-1) - token_logits
        return JudgedAnswer(
            gaps=gaps.tolist(),
            bounds=self._gap_bounds(logits).tolist(),
            best_tokens=logits.argmax(-1).tolist(),
        )

    def score(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        sampling: Sampling,
    ) -> ScoredAnswer:
        """Score a sampled answer."""
        logits = self.logits(prompt, tokens)
        probs = sampling.probs(logits)
        column = _column(tokens, logits)
        is_inside = probs.gather(-1, column)[:, 0] > 0
        may_be_inside = self._may_be_inside(logits, column, sampling)

        scores = TokenScores.of(probs[is_inside], column[is_inside, 0])
        is_border = ~is_inside & may_be_inside
        is_outside = ~is_inside & ~may_be_inside
        return ScoredAnswer(scores, _positions(is_border), _positions(is_outside))

    def likeliest(self, prompt: Sequence[int], tokens: Sequence[int]) -> int:
        """The most likely one of these tokens after a prompt."""
        (last_logits,) = self.logits(prompt, [tokens[0]])
        index = int(last_logits[list(tokens)].argmax())
        return tokens[index]

    def _gap_bounds(self, logits: Float[Tensor, "T V"]) -> Float[Tensor, "T"]:
        """How far rounding moves a gap at each position."""
        finite_logits = torch.where(logits.isfinite(), logits, 0.0)
        return self.gap_share * finite_logits.abs().amax(-1)

    def _may_be_inside(
        self,
        logits: Float[Tensor, "T V"],
        tokens: Int[Tensor, "T 1"],
        sampling: Sampling,
    ) -> Bool[Tensor, "T"]:
        """Whether an engine with rounding may draw a token at all."""
        bounds = self._gap_bounds(logits)
        token_logits = logits.gather(-1, tokens)
        # Only these are more likely than the token whatever the rounding does.
        is_surely_likelier = logits > token_logits + bounds[:, None]
        may_be_inside = token_logits[:, 0] > -torch.inf
        if sampling.top_k is not None:
            may_be_inside &= is_surely_likelier.sum(-1) < sampling.top_k
        if sampling.top_p is not None and sampling.top_p < 1:
            # The engine's odds of these tokens are lower by no more than the factor e^bound.
            probs = replace(sampling, top_p=None).probs(logits).double()
            mass = (probs * is_surely_likelier).sum(-1)
            factor = (bounds.double() / sampling.temperature).exp()
            smallest_mass = mass / (mass + (1 - mass) * factor)
            may_be_inside &= smallest_mass < sampling.top_p
        return may_be_inside


def _column(tokens: Sequence[int], logits: Tensor) -> Int[Tensor, "T 1"]:
    return torch.tensor(tokens, device=logits.device)[:, None]


def _positions(mask: Bool[Tensor, "T"]) -> list[int]:
    return [int(position) for position in mask.nonzero()[:, 0]]
