"""Acceptance rules: which draft tokens are accepted, and which token follows them.

Shapes: B rows, K draft tokens, K1 = K + 1 scored positions, V vocabulary. Position i of the
target's logits scores draft token i, and the last position scores the bonus token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lightning_specdec.config.decoding import SamplingSettings
from lightning_specdec.config.kinds import RULES, Choice
from lightning_specdec.config.settings import (
    NoSettings,
    setting,
    setting_fields,
    show_settings,
)
from lightning_specdec.config.settings import Settings as BaseSettings
from lightning_specdec.models.base import ExitStates
from lightning_specdec.rules.sampling import SOFTMAX, Purpose, Sampling, column, draw

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


MIN_RESIDUAL_MASS = 1e-30
"""A residual with less mass is a rounding error, and too small to draw from in float32."""


@dataclass
class Draft:
    """The draft tokens of a round, right-padded.

    Args:
        tokens: draft tokens. Padding must consist of valid tokens, because the target reads it.
        lengths: number of draft tokens in each row, without padding; None if every row has K.
        probs: the exact distribution that each token was drawn from; None if the tokens are
            deterministic, i.e. the distribution is one-hot.
        logits: the draft's logits, for rules with `needs_draft_logits`; None if there are none.
        num_calls: forward passes of the drafter's networks in this round.
        exit_states: outputs of the target's lower layers for these tokens, if an early exit
            computed them.
        copied: for each row, whether the lookup of a drafter with a fallback made its tokens; None
            for other drafters.
        forced: for each row, whether its tokens follow from a grammar, without a drafter; None if
            none do.
    """

    tokens: Int[Tensor, "B K"]
    lengths: Int[Tensor, "B"] | None = None
    probs: Float[Tensor, "B K V"] | None = None
    logits: Float[Tensor, "B K V"] | None = None
    num_calls: int = 0
    exit_states: ExitStates | None = None
    copied: Sequence[bool] | None = None
    forced: Sequence[bool] | None = None


@dataclass
class Verdict:
    """A rule's decision at every position of a round.

    Args:
        accepted: whether a draft token is accepted, if all tokens before it are.
            False for padding.
        endings: the token that follows if exactly i draft tokens are accepted: the correction of
            the rejected token, or the bonus token after the last draft token.
        changed: for lossy rules, whether the target drew a token other than the draft's; None for
            lossless rules.
    """

    accepted: Bool[Tensor, "B K"]
    endings: Int[Tensor, "B K1"]
    changed: Bool[Tensor, "B K"] | None = None

    @property
    def num_accepted(self) -> Int[Tensor, "B"]:
        """Number of accepted draft tokens in each row: those before the first rejection."""
        return self.accepted.cumprod(1).sum(1)

    @property
    def next_tokens(self) -> Int[Tensor, "B"]:
        """The token after the accepted ones: the correction, or the bonus token."""
        num_accepted = self.num_accepted
        return self.endings.gather(1, num_accepted[:, None]).squeeze(1)


class AcceptanceRule(ABC):
    """Decides which draft tokens are accepted. Subclasses set `lossless` and implement `judge`.

    Attributes:
        Settings: settings class. The constructor accepts its fields by position or by name and
            stores them in `settings`.
        lossless: whether the output has exactly the target's distribution.
        needs_draft_logits: whether the draft must have `logits`. Drafters without them are refused.
        draft_purpose: the column of `noise` that the drafter draws its tokens with.
        ignores_windows: whether the output is the same for every number of draft tokens, at every
            temperature.
    """

    Settings: ClassVar[type[BaseSettings]] = NoSettings
    lossless: ClassVar[bool]
    ignores_windows: ClassVar[bool] = False
    needs_draft_logits: ClassVar[bool] = False
    draft_purpose: ClassVar[Purpose] = Purpose.DRAFT

    def __init__(self, *values: Any, **settings: Any) -> None:
        name = type(self).__name__
        unknown_names = settings.keys() - {field.name for field in setting_fields(self.Settings)}
        sampling_names = {field.name for field in setting_fields(SamplingSettings)}
        for setting_name in sorted(unknown_names & sampling_names):
            raise ValueError(
                f"{name} has no setting {setting_name}: it is an argument of decoding, as "
                f"decode(..., rule={name}(), {setting_name}={settings[setting_name]!r})"
            )
        self.settings = self.Settings.arguments(values, settings, owner=name)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        show_settings(cls)

    @abstractmethod
    def judge(
        self,
        draft: Draft,
        target_logits: Float[Tensor, "B K1 V"],
        sampling: Sampling,
        noise: Float[Tensor, "B K1 3"] | None,
    ) -> Verdict:
        """Decide which draft tokens of one round are accepted.

        Args:
            target_logits: logits of the K1 = K + 1 positions: before each draft token and after
                the last one.
            sampling: how tokens are drawn from the target's logits.
            noise: uniform numbers in [0, 1), indexed by position and `Purpose`; None if nothing is
                drawn at random.
        """

    def keeps_tokens(self, *, greedy: bool) -> bool:
        """Whether the output equals standard decoding's token for token."""
        return self.lossless and (greedy or self.ignores_windows)


class ExactMatch(AcceptanceRule):
    """Accept draft tokens while they equal the tokens drawn from the target. Lossless.

    The output equals that of standard decoding token for token, at every temperature. The drafter
    draws with the target's random numbers, so similar distributions usually yield the same token.
    """

    lossless = True
    ignores_windows = True
    draft_purpose = Purpose.CORRECT

    def judge(
        self,
        draft: Draft,
        target_logits: Tensor,
        sampling: Sampling,
        noise: Tensor | None,
    ) -> Verdict:
        target_tokens = sampling.sample(target_logits, column(noise, Purpose.CORRECT))
        matches = draft.tokens == target_tokens[:, :-1]
        return Verdict(within(matches, draft.lengths), target_tokens)


class RejectionSampling(AcceptanceRule):
    """Accept with probability min(1, target_prob / draft_prob). Lossless.

    After a rejection, the next token is drawn from the residual max(0, target_probs - draft_probs),
    normalized (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Theorem 1). The output has the
    target's distribution, and at temperature 0 its tokens.
    """

    lossless = True

    def judge(
        self,
        draft: Draft,
        target_logits: Tensor,
        sampling: Sampling,
        noise: Tensor | None,
    ) -> Verdict:
        target_probs = sampling.probs(target_logits)
        verified_probs = target_probs[:, :-1]  # at the positions of draft tokens
        draft_probs = draft.probs
        if draft_probs is None:
            # Deterministic draft tokens: the draft's distribution is one-hot.
            draft_probs = torch.zeros_like(verified_probs)
            draft_probs.scatter_(-1, draft.tokens[..., None], 1.0)

        if noise is None:
            # Both distributions are one-hot, so every uniform number leads to the same decision.
            batch_size, num_positions, _ = target_probs.shape
            noise = target_probs.new_zeros(batch_size, num_positions, len(Purpose))

        # Accept x if u < target_prob(x) / draft_prob(x) (Leviathan et al. 2023, Algorithm 1).
        # Multiplied out, this needs no division by a draft probability that may be 0.
        accept_noise = noise[:, :-1, Purpose.ACCEPT].double()
        draft_token_probs = _token_probs(draft_probs, draft.tokens)
        target_token_probs = _token_probs(verified_probs, draft.tokens)
        accepted = accept_noise * draft_token_probs < target_token_probs

        if draft.lengths is not None:
            # After a row's last draft token, the next token comes from the target itself.
            is_drafted = within(torch.ones_like(accepted), draft.lengths)
            accepted = accepted & is_drafted
            draft_probs = draft_probs * is_drafted[..., None]

        endings = self._draw_endings(target_probs, draft_probs, noise[..., Purpose.CORRECT])
        return Verdict(accepted, endings)

    @staticmethod
    def _draw_endings(
        target_probs: Float[Tensor, "B K1 V"],
        draft_probs: Float[Tensor, "B K V"],
        noise: Float[Tensor, "B K1"],
    ) -> Int[Tensor, "B K1"]:
        """The correction at each draft token, and the bonus token."""
        # There is no draft token at the bonus position, so its residual is the target itself.
        padded_draft_probs = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))

        # norm(max(0, target_probs - draft_probs)); `draw` needs no normalization.
        residual = (target_probs - padded_draft_probs).clamp_(min=0)

        # Equal distributions leave no residual. A rejection there is a rounding error, and the
        # correction is drawn from the target, as it is where padding of `draft_probs` is NaN.
        mass = residual.sum(-1, keepdim=True)
        weights = torch.where(mass > MIN_RESIDUAL_MASS, residual, target_probs)
        return draw(weights, noise)


class _LossyRule(AcceptanceRule):
    """A lossy criterion. Also reports where the target drew a token other than the draft's."""

    lossless = False

    @abstractmethod
    def accepts(
        self,
        draft: Draft,
        target_logits: Float[Tensor, "B K V"],
        sampling: Sampling,
    ) -> Bool[Tensor, "B K"]:
        """Whether each draft token meets the criterion."""

    def judge(
        self,
        draft: Draft,
        target_logits: Tensor,
        sampling: Sampling,
        noise: Tensor | None,
    ) -> Verdict:
        target_tokens = sampling.sample(target_logits, column(noise, Purpose.CORRECT))
        accepted = self.accepts(draft, target_logits[:, :-1], sampling)
        changed = draft.tokens != target_tokens[:, :-1]
        return Verdict(within(accepted, draft.lengths), target_tokens, changed)


@dataclass(frozen=True)
class EpsilonSettings(BaseSettings):
    epsilon: float = setting(
        0.1, "largest difference of probability that counts as agreement", above=0, maximum=1
    )


class EpsilonThreshold(_LossyRule):
    """Accept a draft token if |draft_prob - target_prob| < epsilon. Lossy.

    Both probabilities are softmax at temperature 1, regardless of the sampling. This accepts tokens
    that both models consider unlikely, and rejects tokens that the target considers much likelier
    than the draft does. The drafter must return logits.
    """

    Settings = EpsilonSettings
    settings: EpsilonSettings
    needs_draft_logits = True

    def accepts(
        self,
        draft: Draft,
        target_logits: Float[Tensor, "B K V"],
        sampling: Sampling,
    ) -> Bool[Tensor, "B K"]:
        assert draft.logits is not None, "the session refuses drafters without logits"
        target_probs = SOFTMAX.probs(target_logits)
        draft_probs = SOFTMAX.probs(draft.logits)
        target_token_probs = _token_probs(target_probs, draft.tokens)
        draft_token_probs = _token_probs(draft_probs, draft.tokens)
        difference = (draft_token_probs - target_token_probs).abs()
        return difference < self.settings.epsilon


@dataclass(frozen=True)
class TypicalSettings(BaseSettings):
    epsilon: float = setting(0.09, "probability that is always enough", above=0, maximum=1)
    delta: float = setting(
        0.3, "scale of the threshold that depends on the entropy", above=0, maximum=1
    )


class TypicalAcceptance(_LossyRule):
    """Accept a draft token if target_prob > min(epsilon, delta * exp(-entropy)). Lossy.

    The entropy, in nats, is that of the target's distribution under the session's sampling, or at
    temperature 1 if the temperature is 0 (Cai et al. 2024, "Medusa", section 2.3.2).
    """

    Settings = TypicalSettings
    settings: TypicalSettings

    def accepts(
        self,
        draft: Draft,
        target_logits: Float[Tensor, "B K V"],
        sampling: Sampling,
    ) -> Bool[Tensor, "B K"]:
        # A one-hot distribution has entropy 0, so the criterion would be an exact match.
        target_probs = sampling.without_greedy.probs(target_logits)

        # Medusa, section 2.3.2: p(x) > min(epsilon, delta * exp(-H(p))).
        entropy = torch.special.entr(target_probs).sum(-1)
        entropy_threshold = self.settings.delta * (-entropy).exp()
        threshold = entropy_threshold.clamp(max=self.settings.epsilon)
        return _token_probs(target_probs, draft.tokens) > threshold


def make_rule(rule: str | Choice | AcceptanceRule | None) -> AcceptanceRule:
    """Return the rule with this name or choice; `ExactMatch` for None.

    Raises:
        ValueError: there is no such rule, or its settings are wrong.
    """
    if isinstance(rule, AcceptanceRule):
        return rule
    if rule is None:
        return ExactMatch()
    choice = Choice.read(rule, "rule")
    return RULES.load(choice.name)(**choice.settings)


def within(accepted: Bool[Tensor, "B K"], lengths: Int[Tensor, "B"] | None) -> Bool[Tensor, "B K"]:
    """`accepted`, but False for padding after each row's draft tokens."""
    if lengths is None:
        return accepted
    positions = torch.arange(accepted.shape[1], device=accepted.device)
    is_drafted = positions < lengths[:, None]
    return accepted & is_drafted


def _token_probs(probs: Float[Tensor, "B K V"], tokens: Int[Tensor, "B K"]) -> Float[Tensor, "B K"]:
    """The probability of each token."""
    token_probs = probs.gather(-1, tokens[..., None])
    return token_probs.squeeze(-1)
