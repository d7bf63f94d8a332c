"""Is the output the target's? Every draft, rule and sampling of a pair, by two checks, each beside a biased rule.

Identity (`identity`) holds token for token where it must, over whole texts, stops and all. One round (`exact_round`)
holds for every draft and outcome, but for the likeliest tokens alone. No random error can make either fail.

A check in which a biased rule on the same pair is not found has not enough power, and the finding says so. A check that
breaks is a finding too.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_specdec.audit.exact_round import RoundLaw, measure_round
from lightning_specdec.audit.identity import Divergence, find_divergence, num_wrong_rounds
from lightning_specdec.config.checks import require_int
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding import DecodeResult, autoregressive_decode, speculative_decode
from lightning_specdec.decoding.rows import check_batch, check_eos
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
"""Tokens of a text's end that rounds continue."""
ROUND_WINDOW = 2
"""Draft tokens in the check of one round, whose drafts are all gone through."""
NUM_TRIED, NUM_PASSED = 4, 24
"""For each place of that check: at how many the biased round is tried, and how many are passed to find those."""
PLAIN = 0.02
"""Error of a biased round with which a place is good enough; else those with the largest are taken."""
log = logging.getLogger(__name__)


class AuditCase(NamedTuple):
    """What is audited: the names of a draft, a rule and a sampling."""

    draft: str
    rule: str
    sampling: str


@dataclass(frozen=True)
class Finding:
    """What one check found of one cell.

    Args:
        check: "identity" or "round", or "lossy" for what a lossy rule changes.
        verdict: "same", "tie" or "bug"; "exact" or "biased"; "measured"; "idle" where nothing was ever drafted; "error"
            where the check broke.
        enough_power: whether the biased rule was found out; None where there was none.
        figures: plain values; the `reason` alone where the check broke.
    """

    cell: AuditCase
    check: str
    verdict: str
    enough_power: bool | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether something that should be lossless is not, or could not be checked."""
        return self.verdict in ("bug", "biased", "error")

    def to_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in asdict(self).items() if name != "cell"}
        return {**self.cell._asdict(), **values, "failed": self.failed}


@dataclass
class Audit:
    """The findings so far.

    Args:
        left_out: drafts and rules that do not go together, by name: the rule needs logits and the draft has none.
    """

    left_out: list[tuple[str, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def lossless(self) -> list[Finding]:
        """Those of what should be lossless."""
        return [finding for finding in self.findings if finding.check != "lossy"]

    @property
    def failures(self) -> list[Finding]:
        """Those that say that something is not lossless, or that nothing can be said."""
        return [finding for finding in self.findings if finding.failed]

    @property
    def weak(self) -> list[Finding]:
        """Those that had not enough power to say so."""
        return [finding for finding in self.findings if finding.enough_power is False]

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": not self.failures,
            "enough_power": not self.weak,
            "left_out": [list(each) for each in self.left_out],
            "findings": [finding.to_dict() for finding in self.findings],
        }


class KeepsEverything(ExactMatch):
    """Biased: no draft token is ever rejected."""

    def judge(self, draft: Draft, *rest: Any) -> Verdict:
        verdict = super().judge(draft, *rest)
        return Verdict(within(torch.ones_like(verdict.kept), draft.lengths), verdict.endings)


class CorrectsFromTarget(RejectionSampling):
    """Biased, but less: a correction is drawn from the target itself, so that what the draft likes comes twice."""

    def judge(
        self, draft: Draft, target_logits: Tensor, sampling: Sampling, noise: Tensor | None
    ) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)
        return Verdict(verdict.kept, sampling.sample(target_logits, column(noise, Purpose.CORRECT)))


KEEPS, CORRECTS = KeepsEverything(), CorrectsFromTarget()


class Auditor:
    """Checks every combination (cell) of draft, rule and sampling of a pair. `SpeculativeDecoder.audit` makes it.

    Args:
        target: the target, in the form that decodes.
        drafts: drafters by name, in the form that decodes.
        prompts: tokens.
        config: window, new tokens and EOS of whole outputs, and the seed. `changes` are fields of it and win over it.
        rules: acceptance rules by name.
        samplings: samplings by name.
        num_places: places in the texts for the check of one round.

    Raises:
        ValueError: the target cannot take these prompts, settings or drafts.
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
        for name, given in (("draft", drafts), ("rule", rules), ("sampling", samplings)):
            if not given:
                raise ValueError(f"there is no {name} to audit: give at least one")
        defaults = {"num_draft_tokens": 3, "max_new_tokens": 32} if config is None else {}
        config = DecodingConfig.of(config, **{**defaults, **changes})
        self.target, self.drafts, self.rules, self.samplings = target, drafts, rules, samplings
        self.num_places = require_int("num_places", num_places, 1)
        self.window = require_int("num_draft_tokens", config.num_draft_tokens, 1)
        self.max_new_tokens, self.seed = config.max_new_tokens, config.seed
        self.eos = tuple(sorted(check_eos(config.eos, target.vocab_size)))
        self.prompts = [text for _, text in check_batch(prompts, target, config)]
        for drafter in drafts.values():
            drafter.check_target(target)
            check_batch(self.prompts, target, config, drafter=drafter)
        left_out = [
            (draft, name)
            for (draft, drafter), (name, rule) in product(drafts.items(), rules.items())
            if rule.needs_draft_logits and not drafter.gives_logits
        ]
        if len(left_out) == len(drafts) * len(rules):
            draft, name = left_out[0]
            raise ValueError(
                f"{name} compares the draft's logits, and {draft} has none: audit another rule"
            )
        self.audit = Audit(left_out)
        for name in ("decode", "uncertain_contexts", "_divergences", "_telling_places"):
            setattr(
                self, name, cache(getattr(self, name))
            )  # many cells ask for each; of methods they would outlive it

    def cells(self) -> Iterator[AuditCase]:
        """The cells; rules that need logits are left out for drafts without them."""
        for draft, rule in product(self.drafts, self.rules):
            if (draft, rule) not in self.audit.left_out:
                yield from (AuditCase(draft, rule, sampling) for sampling in self.samplings)

    def run(
        self, checks: Sequence[str] = CHECKS, *, tell: Callable[[str], None] = lambda text: None
    ) -> Audit:
        """Run the checks that apply to each cell. Returns the findings, which `audit` holds as they are made.

        Args:
            checks: "identity" (equal tokens), "round" (distribution of one round) or both.
            tell: called with a line of text before each cell.
        """
        cells = list(self.cells())
        for number, cell in enumerate(cells, 1):
            tell(f"{number} of {len(cells)}: {', '.join(cell)}")
            rule = self.rules[cell.rule]
            applies = (
                "identity"
                if rule.keeps_tokens(greedy=self.samplings[cell.sampling].greedy)
                else "round"
            )
            if not rule.lossless:
                self.audit.findings.append(self._found("lossy", cell))
            elif applies in checks:
                self.audit.findings.append(self._found(applies, cell))
        return self.audit

    def _found(self, check: str, cell: AuditCase) -> Finding:
        """What a check finds, if only that it breaks."""
        if check != "lossy" and self.target.lossy_reason is not None:
            # Reading in other widths would pass off the target's own disagreement as rounding.
            verdict = "bug" if check == "identity" else "biased"
            return Finding(cell, check, verdict, figures={"reason": self.target.lossy_reason})
        run = {"identity": self._identity, "round": self._round, "lossy": self._lossy}
        try:
            return run[check](cell)
        except (
            Exception
        ) as error:  # drafters, rules and targets are anybody's, and raise what they like
            log.debug("%s, %s", ", ".join(cell), check, exc_info=error)
            reason = f"{type(error).__name__}: {error}"
            return Finding(cell, check, "error", figures={"reason": " ".join(reason.split())})

    def _identity(self, cell: AuditCase) -> Finding:
        """Whether the outputs equal standard decoding's, token for token, and forged drafts are judged as they must."""
        rule, settings = self.rules[cell.rule], {"width": self.window + 1, "seed": self.seed}
        found = self._divergences(cell.draft, rule, cell.sampling)
        num_wrong = num_wrong_rounds(
            self.target,
            self.prompts[0],
            rule=rule,
            sampling=self.samplings[cell.sampling],
            **settings,
        )
        bug = num_wrong or any(each.verdict == "bug" for each in found)
        verdict = "bug" if bug else "tie" if found else "same"
        figures: dict[str, Any] = {
            "num_prompts": len(self.prompts),
            "num_equal": len(self.prompts) - len({each.prompt for each in found}),
            "divergences": [vars(each) for each in found],
            "num_wrong_rounds": num_wrong,
        }
        control = self._divergences(cell.draft, KEEPS, cell.sampling)
        return Finding(
            cell, "identity", verdict, any(each.verdict == "bug" for each in control), figures
        )

    def _divergences(self, draft: str, rule: AcceptanceRule, name: str) -> list[Divergence]:
        """Where outputs part: whole ones, and those that end at a token which stands inside them."""
        sampling, found = self.samplings[name], []
        for eos in dict.fromkeys((self.eos, self.stops(sampling))):
            standard, other = (
                self.decode(None, None, sampling, eos),
                self.decode(draft, rule, sampling, eos),
            )
            for number, both in enumerate(
                zip(self.prompts, standard.tokens, other.tokens, strict=True)
            ):
                settings: dict[str, Any] = {
                    "sampling": sampling,
                    "seed": self.seed,
                    "width": self.window + 1,
                }
                if (
                    parting := find_divergence(self.target, *both, number=number, **settings)
                ) is not None:
                    found.append(parting)
        return found

    def stops(self, sampling: Sampling) -> tuple[int, ...]:
        """The EOS, and the token that most often stands inside standard decoding's outputs: few outputs end otherwise,
        and what ends a text has to be tried."""
        rows = self.decode(None, None, sampling, self.eos).tokens
        inside = Counter(token for row in rows for token in set(row[1:-1]))
        return (*self.eos, *(token for token, _ in inside.most_common(1)))

    def decode(
        self,
        draft: str | None,
        rule: AcceptanceRule | None,
        sampling: Sampling,
        eos: tuple[int, ...],
    ) -> DecodeResult:
        """How the prompts continue: by the target alone without a draft.

        Raises:
            ValueError: a row does not end where it must.
        """
        settings: dict[str, Any] = {
            "sampling": sampling,
            "seed": self.seed,
            "max_new_tokens": self.max_new_tokens,
        }
        settings |= {"eos": eos, "logprobs": rule is None or not rule.lossless}
        if draft is None:
            result = autoregressive_decode(self.target, self.prompts, **settings)
        else:
            settings |= {"num_draft_tokens": self.window, "rule": rule}
            result = speculative_decode(self.target, self.drafts[draft], self.prompts, **settings)
        for row in result.tokens:
            ends = [i + 1 for i, token in enumerate(row) if token in eos]
            if len(row) != min([self.max_new_tokens, *ends]):
                raise ValueError(
                    f"a row has {len(row)} new tokens, and its EOS and max_new_tokens allow others"
                )
        return result

    def _round(self, cell: AuditCase) -> Finding:
        """Whether whole rows end where they must, and rounds at single places have the target's distribution."""
        rule, sampling = self.rules[cell.rule], self.samplings[cell.sampling]
        self.decode(cell.draft, rule, sampling, self.stops(sampling))
        places, control_error = self._telling_places(cell.draft, cell.sampling)
        if not places:
            return Finding(cell, "round", "idle", False)
        laws = [self._law(cell.draft, rule, cell.sampling, place) for place in places]
        worst = max(laws, key=lambda law: law.error / law.tolerance)
        figures = {
            **vars(worst),
            "surprises": sum(law.surprises for law in laws),
            "reads_right": all(law.reads_right for law in laws),
            "num_places": len(laws),
            "control_error": control_error,
        }
        verdict = "exact" if all(law.is_the_targets for law in laws) else "biased"
        return Finding(cell, "round", verdict, control_error is not None, figures)

    def _telling_places(self, draft: str, sampling: str) -> tuple[list[list[int]], float | None]:
        """Places where a biased round is found out, and by which error at least; without one, where something is
        drafted, and None."""
        laws: list[tuple[float, list[int]]] = []
        for place in self.uncertain_contexts(self.samplings[sampling])[
            : NUM_PASSED * self.num_places
        ]:
            law = self._law(draft, CORRECTS, sampling, place)
            if law.num_drafts:
                laws.append((law.error if law.error > 2 * law.tolerance else 0.0, place))
            plain = sum(error > PLAIN for error, _ in laws)
            if plain == self.num_places or len(laws) == NUM_TRIED * self.num_places:
                break
        laws = sorted(laws, key=lambda each: -each[0])[: self.num_places]
        return [place for _, place in laws], min(
            (error for error, _ in laws if error), default=None
        )

    def _law(
        self, draft: str, rule: AcceptanceRule, sampling: str, place: Sequence[int]
    ) -> RoundLaw:
        return measure_round(
            self.target,
            self.drafts[draft],
            place,
            rule=rule,
            sampling=self.samplings[sampling],
            num_draft_tokens=min(self.window, ROUND_WINDOW),
            seed=self.seed,
        )

    def uncertain_contexts(self, sampling: Sampling) -> list[list[int]]:
        """The prompts' ends, and then places in standard decoding's texts, before the least likely tokens first: where
        the target is sure, and most drafts with it, few mistakes of a rule show."""
        places = []
        for row in self.decode(None, None, sampling, self.eos).rows:
            scored = zip(row.logprobs or (), range(len(row.tokens)), strict=True)
            places += [
                (score, [*row.prompt, *row.tokens[:i]][-CONTEXT:]) for score, i in scored if i
            ]
        return [text[-CONTEXT:] for text in self.prompts] + [text for _, text in sorted(places)]

    def _lossy(self, cell: AuditCase) -> Finding:
        sampling = self.samplings[cell.sampling]
        result = self.decode(cell.draft, self.rules[cell.rule], sampling, self.eos)
        figures = {
            "num_new_tokens": result.num_new_tokens,
            "num_changed": result.num_changed,
            "perplexity": perplexity(result),
            "standard_perplexity": perplexity(self.decode(None, None, sampling, self.eos)),
        }
        return Finding(cell, "lossy", "measured", None, figures)


def perplexity(result: DecodeResult) -> float:
    """exp(-mean log probability of the new tokens under the target)."""
    scores = [score for row in result.rows for score in row.logprobs or ()]
    return math.exp(-math.fsum(scores) / len(scores))
