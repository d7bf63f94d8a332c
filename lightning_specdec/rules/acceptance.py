"""The verdict: how many of the draft tokens are kept, and which token follows them.

Shapes: B rows, K draft tokens, V vocabulary. Position i of the target's K + 1 scores the i-th draft token, and the
last one the bonus token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lightning_specdec.config.kinds import RULES, Choice
from lightning_specdec.config.settings import NoSettings, setting
from lightning_specdec.config.settings import Settings as BaseSettings
from lightning_specdec.models.base import ExitStates
from lightning_specdec.rules.sampling import SOFTMAX, Purpose, Sampling, column, draw

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


_NO_MASS = 1e-30
"""A residual up to this much is rounding; one so small that float32 rounds its products up could not be drawn from."""


@dataclass
class Draft:
    """Draft tokens of every row.

    Args:
        tokens: `[B, K]`, all of the vocabulary, padding too: the target reads them.
        lengths: how many of a row's K tokens are proposed; the rest is padding. All of them when None.
        probs: `[B, K, V]`, exactly the distribution that each token was drawn from; None if certain (one-hot).
        logits: `[B, K, V]`, for the rules that compare the draft's own softmax; None where there are none.
        num_calls: passes of the drafter's networks.
        exit_states: output of the target's own lower layers, computed while drafting, for tokens that it reads next.
    """

    tokens: Int[Tensor, "B K"]
    lengths: Int[Tensor, "B"] | None = None
    probs: Float[Tensor, "B K V"] | None = None
    logits: Float[Tensor, "B K V"] | None = None
    num_calls: int = 0
    exit_states: ExitStates | None = None


@dataclass
class Verdict:
    """What a rule decided at every position.

    Args:
        kept: `[B, K]`, whether a draft token may stay, if all those before it do. False behind a row's last one.
        endings: `[B, K + 1]`, the token that ends the round if it ends at that position: the correction of a rejected
            token, or the bonus behind the last one.
        changed: `[B, K]`, for lossy rules: whether the target would have drawn another token than the draft's.
    """

    kept: Bool[Tensor, "B K"]
    endings: Int[Tensor, "B K1"]
    changed: Bool[Tensor, "B K"] | None = None

    @property
    def num_accepted(self) -> Int[Tensor, "B"]:
        """How many leading tokens of each row's draft are kept."""
        return self.kept.cumprod(1).sum(1)

    @property
    def next_tokens(self) -> Int[Tensor, "B"]:
        """The token after them: the correction of the first one rejected, or the bonus."""
        return self.endings.gather(1, self.num_accepted[:, None]).squeeze(1)


class AcceptanceRule(ABC):
    """Decides which draft tokens stay. A subclass declares its `Settings`, which the constructor takes.

    Attributes:
        lossless: whether the output keeps exactly the target's distribution.
        needs_draft_logits: whether the drafter must give its logits.
        draft_purpose: the column of the noise that the drafter draws from.
        ignores_windows: whether the output is the same at every temperature however many tokens are drafted.
    """

    Settings: ClassVar[type[BaseSettings]] = NoSettings
    lossless: ClassVar[bool]
    ignores_windows: ClassVar[bool] = False
    needs_draft_logits: ClassVar[bool] = False
    draft_purpose: ClassVar[Purpose] = Purpose.DRAFT

    def __init__(self, *values: Any, **settings: Any) -> None:
        self.settings = self.Settings.arguments(*values, **settings)

    @abstractmethod
    def judge(
        self,
        draft: Draft,
        target_logits: Float[Tensor, "B K1 V"],
        sampling: Sampling,
        noise: Float[Tensor, "B K1 3"] | None,
    ) -> Verdict:
        """The verdict on one round, from the target's K + 1 logits and the uniform numbers of the K + 1 positions.

        `noise` is None where neither side draws at random.
        """

    def keeps_tokens(self, *, greedy: bool) -> bool:
        """Whether the output is standard decoding's token for token, and not in its distribution alone."""
        return self.lossless and (greedy or self.ignores_windows)


class ExactMatch(AcceptanceRule):
    """Draw the target's token at every position, keep draft tokens while they are equal.

    The output is that of standard decoding token for token, at every temperature. The drafter draws with the target's
    uniform numbers, so that similar distributions mostly pick the same token.
    """

    lossless = True
    ignores_windows = True
    draft_purpose = Purpose.CORRECT

    def judge(
        self,
        draft: Draft,
        target_logits: Float[Tensor, "B K1 V"],
        sampling: Sampling,
        noise: Float[Tensor, "B K1 3"] | None,
    ) -> Verdict:
        own = sampling.sample(target_logits, column(noise, Purpose.CORRECT))
        return Verdict(_within(draft.tokens == own[:, :-1], draft.lengths), own)


class RejectionSampling(AcceptanceRule):
    """Keep a draft token with probability min(1, target_prob / draft_prob), else draw from the residual.

    The residual is max(0, target - draft), normalized (Leviathan et al. 2023, algorithm 1; Chen et al. 2023,
    theorem 1).
    """

    lossless = True

    def judge(
        self,
        draft: Draft,
        target_logits: Float[Tensor, "B K1 V"],
        sampling: Sampling,
        noise: Float[Tensor, "B K1 3"] | None,
    ) -> Verdict:
        target_probs = sampling.probs(target_logits)
        draft_probs = draft.probs
        if draft_probs is None:
            draft_probs = torch.zeros_like(target_probs[:, :-1]).scatter_(-1, draft.tokens[..., None], 1.0)
        if noise is None:  # both sides are certain, and any number decides alike
            noise = target_probs.new_zeros(*target_probs.shape[:2], len(Purpose))
        kept = noise[:, :-1, Purpose.ACCEPT].double() * _prob_of(draft.tokens, draft_probs) < _prob_of(
            draft.tokens, target_probs[:, :-1]
        )
        if draft.lengths is not None:
            drafted = _within(torch.ones_like(kept), draft.lengths)
            kept, draft_probs = kept & drafted, draft_probs * drafted[..., None]
        # Behind the last draft token the draft left nothing out: the bonus comes from the target itself.
        residual = (target_probs - torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))).clamp_(min=0)
        # Equal distributions leave no mass, and rounding alone can reject there: then the target itself is drawn.
        residual = torch.where(residual.sum(-1, keepdim=True) > _NO_MASS, residual, target_probs)
        return Verdict(kept, draw(residual, noise[..., Purpose.CORRECT]))


class _LossyRule(AcceptanceRule):
    """A rule with a lossy criterion; it also counts the kept tokens that the target would not have drawn."""

    lossless = False

    @abstractmethod
    def agrees(self, draft: Draft, target_logits: Float[Tensor, "B K V"], sampling: Sampling) -> Bool[Tensor, "B K"]:
        """Whether the target finds each draft token good enough."""

    def judge(
        self,
        draft: Draft,
        target_logits: Float[Tensor, "B K1 V"],
        sampling: Sampling,
        noise: Float[Tensor, "B K1 3"] | None,
    ) -> Verdict:
        own = sampling.sample(target_logits, column(noise, Purpose.CORRECT))
        kept = _within(self.agrees(draft, target_logits[:, :-1], sampling), draft.lengths)
        return Verdict(kept, own, changed=draft.tokens != own[:, :-1])


@dataclass(frozen=True)
class EpsilonSettings(BaseSettings):
    """Settings of `EpsilonThreshold`."""

    epsilon: float = setting(0.1, "largest difference of probability that counts as agreement", above=0, maximum=1)


class EpsilonThreshold(_LossyRule):
    """Keep a draft token while |draft_prob - target_prob| < epsilon, both at temperature 1 whatever the sampling.

    Lossy both ways: a token that both find unlikely stays, one that the target is surer of than the draft goes.
    """

    Settings = EpsilonSettings
    settings: EpsilonSettings
    needs_draft_logits = True

    def agrees(self, draft: Draft, target_logits: Float[Tensor, "B K V"], sampling: Sampling) -> Bool[Tensor, "B K"]:
        assert draft.logits is not None, "the session refuses drafters without logits"
        target_prob = _prob_of(draft.tokens, SOFTMAX.probs(target_logits))
        draft_prob = _prob_of(draft.tokens, SOFTMAX.probs(draft.logits))
        return (draft_prob - target_prob).abs() < self.settings.epsilon


@dataclass(frozen=True)
class TypicalSettings(BaseSettings):
    """Settings of `TypicalAcceptance`."""

    epsilon: float = setting(0.09, "probability that is always enough", above=0, maximum=1)
    delta: float = setting(0.3, "scale of the threshold that depends on the entropy", above=0, maximum=1)


class TypicalAcceptance(_LossyRule):
    """Keep a draft token while target_prob > min(epsilon, delta * exp(-entropy)); lossy.

    The probabilities are those of the sampling, or of temperature 1 when the temperature is 0 (Cai et al. 2024,
    "Medusa", section 2.3.2).
    """

    Settings = TypicalSettings
    settings: TypicalSettings

    def agrees(self, draft: Draft, target_logits: Float[Tensor, "B K V"], sampling: Sampling) -> Bool[Tensor, "B K"]:
        target_probs = (SOFTMAX if sampling.greedy else sampling).probs(target_logits)
        entropy = torch.special.entr(target_probs).sum(-1)
        threshold = (self.settings.delta * (-entropy).exp()).clamp(max=self.settings.epsilon)
        return _prob_of(draft.tokens, target_probs) > threshold


def make_rule(rule: str | Choice | AcceptanceRule | None) -> AcceptanceRule:
    """The rule of that name or choice; `ExactMatch` for None.

    Raises:
        ValueError: there is no such rule, or its settings are wrong.
    """
    if isinstance(rule, AcceptanceRule):
        return rule
    choice = Choice("ExactMatch") if rule is None else Choice.read(rule, "rule")
    made: AcceptanceRule = RULES.load(choice.name)(**choice.settings)
    return made


def _within(kept: Bool[Tensor, "B K"], lengths: Int[Tensor, "B"] | None) -> Bool[Tensor, "B K"]:
    """`kept`, false behind each row's draft tokens."""
    return kept if lengths is None else kept & (torch.arange(kept.shape[1], device=kept.device) < lengths[:, None])


def _prob_of(tokens: Int[Tensor, "B K"], probs: Float[Tensor, "B K V"]) -> Float[Tensor, "B K"]:
    """Each token's probability."""
    return probs.gather(-1, tokens[..., None]).squeeze(-1)
