"""Is the output the target's? Two checks of every draft, rule and sampling of a pair.

Identity (`identity`): whole texts equal standard decoding's token for token, where they must, stops
included. Round (`exact_round`): one round has the target's distribution, over every draft and
outcome, but for the most likely tokens only. No random error can make either fail.

Each check also runs with a biased rule on the same pair. If it does not find the bias, it has not
enough power, and the finding reports this. A check that raises an error is a finding too.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_specdec.audit.exact_round import RoundLaw, measure_round
from lightning_specdec.audit.identity import Divergence, find_divergence, num_wrong_rounds
from lightning_specdec.config.checks import require_int
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding import DecodeResult, autoregressive_decode, speculative_decode
from lightning_specdec.decoding.requests import check_batch, check_eos
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import (
    AcceptanceRule,
    Draft,
    ExactMatch,
    Purpose,
    RejectionSampling,
    Sampling,
    Verdict,
    column,
)
from lightning_specdec.rules.acceptance import within

CHECKS = ("identity", "round")
CONTEXT = 16
"""Tokens before a round: the end of a text."""
ROUND_WINDOW = 2
"""Draft tokens in the check of one round, which goes through all drafts."""
NUM_TRIED = 4
"""For each place to check: contexts at which the biased round is measured."""
NUM_CANDIDATES = 24
"""For each place to check: contexts among which those are searched."""
CLEAR_ERROR = 0.02
"""A biased round with this error shows a bias clearly. Else the contexts with the largest errors
are chosen."""
log = logging.getLogger(__name__)


class AuditCase(NamedTuple):
    """What is audited: the names of a draft, a rule and a sampling."""

    draft: str
    rule: str
    sampling: str


@dataclass(frozen=True)
class Finding:
    """The result of one check of one case.

    Args:
        check: "identity" or "round", or "lossy" for what a lossy rule changes.
        verdict: of identity: "same", "tie" or "bug". Of a round: "exact" or "biased", or "idle" if
            nothing was ever drafted. Of a lossy rule: "measured". Of any: "error" if it broke, and
            "not lossless" if the target's own calls disagree, so that nothing can be exact.
        enough_power: whether the check found the bias of a biased rule; None if it did not try one.
        figures: plain values; only the `reason` if the check broke.
    """

    cell: AuditCase
    check: str
    verdict: str
    enough_power: bool | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether something that should be lossless is not, or could not be checked."""
        return self.verdict in ("bug", "biased", "error", "not lossless")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = asdict(self)
        del values["cell"]
        return {**self.cell._asdict(), **values, "failed": self.failed}


@dataclass
class Audit:
    """The findings so far.

    Args:
        left_out: drafts and rules that cannot be combined, by name: the rule needs logits, and the
            draft has none.
    """

    left_out: list[tuple[str, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def lossless(self) -> list[Finding]:
        """The findings about rules that should be lossless."""
        return [finding for finding in self.findings if finding.check != "lossy"]

    @property
    def failures(self) -> list[Finding]:
        """The findings that something is not lossless, or could not be checked."""
        return [finding for finding in self.findings if finding.failed]

    @property
    def weak(self) -> list[Finding]:
        """The findings of checks without enough power."""
        return [finding for finding in self.findings if finding.enough_power is False]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "passed": not self.failures,
            "enough_power": not self.weak,
            "left_out": [list(names) for names in self.left_out],
            "findings": [finding.to_dict() for finding in self.findings],
        }


class KeepsEverything(ExactMatch):
    """Biased: no draft token is ever rejected."""

    def judge(self, draft: Draft, *arguments: Any) -> Verdict:
        verdict = super().judge(draft, *arguments)
        everything = torch.ones_like(verdict.accepted)
        return Verdict(within(everything, draft.lengths), verdict.endings)


class CorrectsFromTarget(RejectionSampling):
    """Biased, but less: corrections are drawn from the target itself, so that tokens that the draft
    prefers are committed too often."""

    def judge(
        self,
        draft: Draft,
        target_logits: Tensor,
        sampling: Sampling,
        noise: Tensor | None,
    ) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)
        target_tokens = sampling.sample(target_logits, column(noise, Purpose.CORRECT))
        return Verdict(verdict.accepted, target_tokens)


# One object each, since results are cached by rule.
KEEPS_EVERYTHING = KeepsEverything()
CORRECTS_FROM_TARGET = CorrectsFromTarget()


class Auditor:
    """Checks every combination (case) of draft, rule and sampling of a pair.

    `SpeculativeDecoder.audit` creates it.

    Args:
        target: the target, in the form that decodes.
        drafts: drafters by name, in the form that decodes.
        prompts: tokens.
        config: window, new tokens and EOS of whole outputs, and the seed. `changes` are fields of
            it and override it.
        rules: acceptance rules by name.
        samplings: samplings by name.
        num_places: places in the texts for the check of one round.

    Raises:
        ValueError: the target does not accept these prompts, settings or drafts.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafts: Mapping[str, Drafter],
        prompts: Sequence[Sequence[int]],
        config: DecodingConfig | None = None,
        *,
        rules: Mapping[str, AcceptanceRule],
        samplings: Mapping[str, Sampling],
        num_places: int = 3,
        **changes: Any,
    ) -> None:
        for name, choices in (("draft", drafts), ("rule", rules), ("sampling", samplings)):
            if not choices:
                raise ValueError(f"there is no {name} to audit: give at least one")
        if config is None:
            changes = {"num_draft_tokens": 3, "max_new_tokens": 32, **changes}
        config = DecodingConfig.of(config, **changes)

        self.target = target
        self.drafts = drafts
        self.rules = rules
        self.samplings = samplings
        self.num_places = require_int("num_places", num_places, 1)
        self.window = require_int("num_draft_tokens", config.num_draft_tokens, 1)
        self.max_new_tokens = config.max_new_tokens
        self.seed = config.seed
        self.eos = tuple(sorted(check_eos(config.eos, target.vocab_size)))
        self.prompts = [text for _, text in check_batch(prompts, target, config)]
        for drafter in drafts.values():
            drafter.check_target(target)
            check_batch(self.prompts, target, config, drafter=drafter)
        self.audit = Audit(_incompatible(drafts, rules))

        # Many cases ask for the same results. A cache on the class would keep the models alive.
        self.decode = cache(self.decode)  # type: ignore[method-assign]
        self.uncertain_contexts = cache(self.uncertain_contexts)  # type: ignore[method-assign]
        self._divergences = cache(self._divergences)  # type: ignore[method-assign]
        self._contexts_that_show_bias = cache(self._contexts_that_show_bias)  # type: ignore[method-assign]

    def cells(self) -> Iterator[AuditCase]:
        """The cases, without rules that need logits for drafts that have none."""
        for draft in self.drafts:
            for rule in self.rules:
                if (draft, rule) in self.audit.left_out:
                    continue
                for sampling in self.samplings:
                    yield AuditCase(draft, rule, sampling)

    def run(
        self,
        checks: Sequence[str] = CHECKS,
        *,
        tell: Callable[[str], None] = lambda text: None,
    ) -> Audit:
        """Run the checks that apply to each case; returns the findings, which `audit` collects.

        Args:
            checks: "identity" (equal tokens), "round" (distribution of one round) or both.
            tell: called with a line of text before each case.
        """
        cells = list(self.cells())
        for number, cell in enumerate(cells, 1):
            tell(f"{number} of {len(cells)}: {', '.join(cell)}")
            check = self._check_for(cell)
            if check == "lossy" or check in checks:
                self.audit.findings.append(self._find(check, cell))
        return self.audit

    def _check_for(self, cell: AuditCase) -> str:
        """The check that applies to a case."""
        rule = self.rules[cell.rule]
        sampling = self.samplings[cell.sampling]
        if not rule.lossless:
            return "lossy"
        return "identity" if rule.keeps_tokens(greedy=sampling.greedy) else "round"

    def _find(self, check: str, cell: AuditCase) -> Finding:
        """Run a check; one that breaks is a finding too."""
        if check != "lossy" and self.target.lossy_reason is not None:
            # Comparing calls of other widths would take the target's own disagreement for rounding.
            figures = {"reason": self.target.lossy_reason}
            return Finding(cell, check, "not lossless", figures=figures)
        run = {"identity": self._identity, "round": self._round, "lossy": self._lossy}[check]
        try:
            return run(cell)
        except Exception as error:
            # Drafters, rules and targets are the user's code, and may raise anything.
            log.debug("%s, %s", ", ".join(cell), check, exc_info=error)
            reason = f"{type(error).__name__}: {error}"
            return Finding(cell, check, "error", figures={"reason": " ".join(reason.split())})

    def _identity(self, cell: AuditCase) -> Finding:
        """Check that the outputs equal standard decoding's, token for token, and that forged drafts
        are judged correctly."""
        rule = self.rules[cell.rule]
        divergences = self._divergences(cell.draft, rule, cell.sampling)
        num_wrong = num_wrong_rounds(
            self.target,
            self.prompts[0],
            rule=rule,
            sampling=self.samplings[cell.sampling],
            width=self.window + 1,
            seed=self.seed,
        )
        if num_wrong or _has_bug(divergences):
            verdict = "bug"
        elif divergences:
            verdict = "tie"
        else:
            verdict = "same"

        control = self._divergences(cell.draft, KEEPS_EVERYTHING, cell.sampling)
        different_prompts = {divergence.prompt for divergence in divergences}
        figures: dict[str, Any] = {
            "num_prompts": len(self.prompts),
            "num_equal": len(self.prompts) - len(different_prompts),
            "divergences": [vars(divergence) for divergence in divergences],
            "num_wrong_rounds": num_wrong,
        }
        return Finding(cell, "identity", verdict, _has_bug(control), figures)

    def _divergences(
        self,
        draft: str,
        rule: AcceptanceRule,
        sampling_name: str,
    ) -> list[Divergence]:
        """Where outputs diverge from standard decoding's, with the EOS and with one more stop."""
        sampling = self.samplings[sampling_name]
        divergences = []
        for eos in dict.fromkeys((self.eos, self.stops(sampling))):
            standard = self.decode(None, None, sampling, eos)
            speculative = self.decode(draft, rule, sampling, eos)
            texts = zip(self.prompts, standard.tokens, speculative.tokens, strict=True)
            for prompt_index, (prompt, standard_tokens, tokens) in enumerate(texts):
                divergence = find_divergence(
                    self.target,
                    prompt,
                    standard_tokens,
                    tokens,
                    prompt_index=prompt_index,
                    sampling=sampling,
                    seed=self.seed,
                    width=self.window + 1,
                )
                if divergence is not None:
                    divergences.append(divergence)
        return divergences

    def stops(self, sampling: Sampling) -> tuple[int, ...]:
        """The EOS, and the token that most outputs of standard decoding contain inside.

        Few outputs reach EOS, and the check must include texts that end.
        """
        counts: Counter[int] = Counter()
        for tokens in self.decode(None, None, sampling, self.eos).tokens:
            counts.update(set(tokens[1:-1]))
        most_common = [token for token, _ in counts.most_common(1)]
        return (*self.eos, *most_common)

    def decode(
        self,
        draft: str | None,
        rule: AcceptanceRule | None,
        sampling: Sampling,
        eos: tuple[int, ...],
    ) -> DecodeResult:
        """Continue the prompts; without a draft, by the target alone.

        Raises:
            ValueError: a row does not end where it must.
        """
        settings: dict[str, Any] = {
            "sampling": sampling,
            "seed": self.seed,
            "max_new_tokens": self.max_new_tokens,
            "eos": eos,
            "logprobs": rule is None or not rule.lossless,
        }
        if draft is None:
            result = autoregressive_decode(self.target, self.prompts, **settings)
        else:
            result = speculative_decode(
                self.target,
                self.drafts[draft],
                self.prompts,
                num_draft_tokens=self.window,
                rule=rule,
                **settings,
            )
        for tokens in result.tokens:
            if len(tokens) != self._expected_length(tokens, eos):
                raise ValueError(
                    f"a row has {len(tokens)} new tokens, and its EOS and max_new_tokens allow "
                    "others"
                )
        return result

    def _expected_length(self, tokens: Sequence[int], eos: tuple[int, ...]) -> int:
        """The number of new tokens up to the first EOS, which is kept, or the maximum."""
        for i, token in enumerate(tokens):
            if token in eos:
                return min(i + 1, self.max_new_tokens)
        return self.max_new_tokens

    def _round(self, cell: AuditCase) -> Finding:
        """Check that whole rows end where they must, and that rounds at single places have the
        target's distribution."""
        rule = self.rules[cell.rule]
        sampling = self.samplings[cell.sampling]
        # Raises an error for rows that end elsewhere.
        self.decode(cell.draft, rule, sampling, self.stops(sampling))

        contexts, control_error = self._contexts_that_show_bias(cell.draft, cell.sampling)
        if not contexts:
            return Finding(cell, "round", "idle", enough_power=False)
        laws = [self._law(cell.draft, rule, cell.sampling, context) for context in contexts]
        worst_law = max(laws, key=lambda law: law.error / law.tolerance)
        verdict = "exact" if all(law.is_the_targets for law in laws) else "biased"
        figures = {
            **vars(worst_law),
            "surprises": sum(law.surprises for law in laws),
            "reads_right": all(law.reads_right for law in laws),
            "num_places": len(laws),
            "control_error": control_error,
        }
        return Finding(cell, "round", verdict, control_error is not None, figures)

    def _contexts_that_show_bias(
        self,
        draft: str,
        sampling_name: str,
    ) -> tuple[list[list[int]], float | None]:
        """Contexts at which a biased round has the largest errors.

        Returns:
            The contexts. If the bias shows at none of them, those at which something is drafted.
            The smallest error by which the bias shows; None if it does not.
        """
        contexts = self.uncertain_contexts(self.samplings[sampling_name])
        measured: list[tuple[float, list[int]]] = []
        num_clear = 0
        for context in contexts[: NUM_CANDIDATES * self.num_places]:
            law = self._law(draft, CORRECTS_FROM_TARGET, sampling_name, context)
            if law.num_drafts:
                is_visible = law.error > 2 * law.tolerance
                error = law.error if is_visible else 0.0
                measured.append((error, context))
                if error > CLEAR_ERROR:
                    num_clear += 1
            if num_clear == self.num_places or len(measured) == NUM_TRIED * self.num_places:
                break

        by_error = sorted(measured, key=lambda pair: pair[0], reverse=True)
        chosen = by_error[: self.num_places]
        visible_errors = [error for error, _ in chosen if error]
        return [context for _, context in chosen], min(visible_errors, default=None)

    def _law(
        self,
        draft: str,
        rule: AcceptanceRule,
        sampling_name: str,
        context: Sequence[int],
    ) -> RoundLaw:
        return measure_round(
            self.target,
            self.drafts[draft],
            context,
            rule=rule,
            sampling=self.samplings[sampling_name],
            num_draft_tokens=min(self.window, ROUND_WINDOW),
            seed=self.seed,
        )

    def uncertain_contexts(self, sampling: Sampling) -> list[list[int]]:
        """The ends of the prompts, then the contexts of standard decoding's least likely tokens.

        Where the target is sure, most drafts are right, and few mistakes of a rule show.
        """
        scored_contexts = []
        for row in self.decode(None, None, sampling, self.eos).rows:
            for i, logprob in enumerate(row.logprobs or ()):
                # The first token follows the prompt, which is in the list anyway.
                if i > 0:
                    text = [*row.prompt, *row.tokens[:i]]
                    scored_contexts.append((logprob, text[-CONTEXT:]))

        prompt_ends = [prompt[-CONTEXT:] for prompt in self.prompts]
        return prompt_ends + [context for _, context in sorted(scored_contexts)]

    def _lossy(self, cell: AuditCase) -> Finding:
        """Measure what a lossy rule changes."""
        sampling = self.samplings[cell.sampling]
        result = self.decode(cell.draft, self.rules[cell.rule], sampling, self.eos)
        standard = self.decode(None, None, sampling, self.eos)
        figures = {
            "num_new_tokens": result.num_new_tokens,
            "num_changed": result.num_changed,
            "perplexity": perplexity(result),
            "standard_perplexity": perplexity(standard),
        }
        return Finding(cell, "lossy", "measured", None, figures)


def _incompatible(
    drafts: Mapping[str, Drafter], rules: Mapping[str, AcceptanceRule]
) -> list[tuple[str, str]]:
    """Drafts and rules that cannot be combined, by name.

    Raises:
        ValueError: none can.
    """
    pairs = []
    for draft_name, drafter in drafts.items():
        for rule_name, rule in rules.items():
            if rule.needs_draft_logits and not drafter.gives_logits:
                pairs.append((draft_name, rule_name))
    if len(pairs) == len(drafts) * len(rules):
        draft_name, rule_name = pairs[0]
        raise ValueError(
            f"{rule_name} compares the draft's logits, and {draft_name} has none: audit another "
            "rule"
        )
    return pairs


def _has_bug(divergences: Sequence[Divergence]) -> bool:
    return any(divergence.verdict == "bug" for divergence in divergences)


def perplexity(result: DecodeResult) -> float:
    """exp(-mean log probability of the new tokens under the target)."""
    logprobs: list[float] = []
    for row in result.rows:
        logprobs += row.logprobs or ()
    return math.exp(-math.fsum(logprobs) / len(logprobs))
