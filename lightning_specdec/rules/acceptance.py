"""Acceptance rules: which draft tokens are accepted, and which token follows them.

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
    """The draft tokens of a round, right-padded.

    Args:
        tokens: draft tokens. Padding must be valid tokens too, since the target reads it.
        lengths: number of draft tokens in each row, before its padding; all K when None.
        probs: exactly the distribution that each token was drawn from; None if the tokens are certain (one-hot).
        logits: the draft's logits, for rules with `needs_draft_logits`; None if there are none.
        num_calls: forward passes of the drafter's networks in this round.
        exit_states: output of the target's lower layers for these tokens, if an early exit has computed it.
    """

    tokens: Int[Tensor, "B K"]
    lengths: Int[Tensor, "B"] | None = None
    probs: Float[Tensor, "B K V"] | None = None
    logits: Float[Tensor, "B K V"] | None = None
    num_calls: int = 0
    exit_states: ExitStates | None = None


@dataclass
class Verdict:
    """What a rule decides at every position of a round.

    Args:
        kept: whether a draft token is accepted, provided that all before it are. False after a row's last one.
        endings: the token that follows if i draft tokens are accepted: the correction of the rejected token, or the
            bonus token after the last one. K1 = K + 1.
        changed: for lossy rules, whether the target drew another token than the draft's; None for lossless rules.
    """

    kept: Bool[Tensor, "B K"]
    endings: Int[Tensor, "B K1"]
    changed: Bool[Tensor, "B K"] | None = None

    @property
    def num_accepted(self) -> Int[Tensor, "B"]:
        """Number of accepted draft tokens in each row: those before the first rejection."""
        return self.kept.cumprod(1).sum(1)

    @property
    def next_tokens(self) -> Int[Tensor, "B"]:
        """The token after the accepted ones: the correction, or the bonus token."""
        return self.endings.gather(1, self.num_accepted[:, None]).squeeze(1)


class AcceptanceRule(ABC):
    """Decides which draft tokens are accepted. A subclass sets `lossless` and implements `judge`.

    Attributes:
        Settings: settings class; the constructor takes its fields, by position or name, and keeps them in `settings`.
        lossless: whether the output has exactly the target's distribution.
        needs_draft_logits: whether the draft must have `logits`; a drafter without them is refused.
        draft_purpose: the column of `noise` that the drafter draws its tokens with.
        ignores_windows: whether the output is the same for every number of draft tokens, at every temperature.
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
        """Decide on one round.

        Args:
            target_logits: logits of the K1 = K + 1 positions: before each draft token and after the last one.
            sampling: how tokens are drawn from the target's logits.
            noise: uniform numbers in [0, 1) by position and `Purpose`; None if nothing is drawn at random.
        """

    def keeps_tokens(self, *, greedy: bool) -> bool:
        """Whether the output equals standard decoding's token for token, and not only in distribution."""
        return self.lossless and (greedy or self.ignores_windows)


class ExactMatch(AcceptanceRule):
    """Draw the target's token at every position, accept draft tokens while they are equal. Lossless.

    The output equals that of standard decoding token for token, at every temperature. The drafter draws with the
    target's random numbers, so that similar distributions mostly give the same token.
    """

    lossless = True
    ignores_windows = True
    draft_purpose = Purpose.CORRECT

    def judge(
        self, draft: Draft, target_logits: Tensor, sampling: Sampling, noise: Tensor | None
    ) -> Verdict:
        own = sampling.sample(target_logits, column(noise, Purpose.CORRECT))
        return Verdict(within(draft.tokens == own[:, :-1], draft.lengths), own)


class RejectionSampling(AcceptanceRule):
    """Accept a draft token with probability min(1, target_prob / draft_prob), else draw from the residual. Lossless.

    The residual is max(0, target_probs - draft_probs), normalized (Leviathan et al. 2023, algorithm 1; Chen et al.
    2023, theorem 1). The output has the target's distribution, and at temperature 0 its tokens.
    """

    lossless = True

    def judge(
        self, draft: Draft, target_logits: Tensor, sampling: Sampling, noise: Tensor | None
    ) -> Verdict:
        target_probs = sampling.probs(target_logits)
        draft_probs = draft.probs
        if draft_probs is None:
            draft_probs = torch.zeros_like(target_probs[:, :-1]).scatter_(
                -1, draft.tokens[..., None], 1.0
            )
        if noise is None:  # both sides are certain, and any number decides alike
            noise = target_probs.new_zeros(*target_probs.shape[:2], len(Purpose))
        kept = noise[:, :-1, Purpose.ACCEPT].double() * _prob_of(
            draft.tokens, draft_probs
        ) < _prob_of(draft.tokens, target_probs[:, :-1])
        if draft.lengths is not None:
            drafted = within(torch.ones_like(kept), draft.lengths)
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
    def agrees(
        self, draft: Draft, target_logits: Float[Tensor, "B K V"], sampling: Sampling
    ) -> Bool[Tensor, "B K"]:
        """Whether the target finds each draft token good enough."""

    def judge(
        self, draft: Draft, target_logits: Tensor, sampling: Sampling, noise: Tensor | None
    ) -> Verdict:
        own = sampling.sample(target_logits, column(noise, Purpose.CORRECT))
        kept = within(self.agrees(draft, target_logits[:, :-1], sampling), draft.lengths)
        return Verdict(kept, own, changed=draft.tokens != own[:, :-1])


@dataclass(frozen=True)
class EpsilonSettings(BaseSettings):
    epsilon: float = setting(
        0.1, "largest difference of probability that counts as agreement", above=0, maximum=1
    )


class EpsilonThreshold(_LossyRule):
    """Accept a draft token if |draft_prob - target_prob| < epsilon, both at temperature 1 whatever the sampling. Lossy.

    It accepts tokens that both models find unlikely, and rejects tokens that the target finds much likelier than the
    draft does. The drafter must give logits.
    """

    Settings = EpsilonSettings
    settings: EpsilonSettings
    needs_draft_logits = True

    def agrees(
        self, draft: Draft, target_logits: Float[Tensor, "B K V"], sampling: Sampling
    ) -> Bool[Tensor, "B K"]:
        assert draft.logits is not None, "the session refuses drafters without logits"
        target_prob = _prob_of(draft.tokens, SOFTMAX.probs(target_logits))
        draft_prob = _prob_of(draft.tokens, SOFTMAX.probs(draft.logits))
        return (draft_prob - target_prob).abs() < self.settings.epsilon


@dataclass(frozen=True)
class TypicalSettings(BaseSettings):
    epsilon: float = setting(0.09, "probability that is always enough", above=0, maximum=1)
    delta: float = setting(
        0.3, "scale of the threshold that depends on the entropy", above=0, maximum=1
    )


class TypicalAcceptance(_LossyRule):
    """Accept a draft token if target_prob > min(epsilon, delta * exp(-entropy)). Lossy.

    The entropy is that of the target's distribution, in nats, under the session's sampling, or at temperature 1 if the
    temperature is 0 (Cai et al. 2024, "Medusa", section 2.3.2).
    """

    Settings = TypicalSettings
    settings: TypicalSettings

    def agrees(
        self, draft: Draft, target_logits: Float[Tensor, "B K V"], sampling: Sampling
    ) -> Bool[Tensor, "B K"]:
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
    return RULES.load(choice.name)(**choice.settings)


def within(kept: Bool[Tensor, "B K"], lengths: Int[Tensor, "B"] | None) -> Bool[Tensor, "B K"]:
    """`kept`, false behind each row's draft tokens."""
    return (
        kept
        if lengths is None
        else kept & (torch.arange(kept.shape[1], device=kept.device) < lengths[:, None])
    )


def _prob_of(tokens: Int[Tensor, "B K"], probs: Float[Tensor, "B K V"]) -> Float[Tensor, "B K"]:
    return probs.gather(-1, tokens[..., None]).squeeze(-1)
