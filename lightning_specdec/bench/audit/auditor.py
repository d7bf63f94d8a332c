"""Is the output the target's? Every draft, rule and sampling of a pair, by three checks, each beside a biased rule.

Theory: the checks complement one another. Identity (`divergence`) holds token for token where it must, over whole
texts, stops and all. One round (`exact_round`) holds for every draft and outcome, but for the likeliest tokens alone.
Two samples (`two_sample`) hold for whole decodes with all tokens, as far as their number lets them tell.

The p-values of the third are corrected for their number (Holm), so that those of a correct decoder make its audit fail
with odds of `FALSE_ALARM` at most. The other two have no odds: they compare numbers with each other, and what rounding
may make of these is measured, in a few ways to read each text. Rounding that does more than in any of these ways would
be taken for a bias.

A check in which a biased rule on the same pair is not found out has not enough power, and the finding says so. A check
that breaks is a finding too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from lightning_specdec.bench.audit.controls import KeepsEverything, KeepsEverythingCoupled, control_of
from lightning_specdec.bench.audit.divergence import Divergence, find_divergence
from lightning_specdec.bench.audit.exact_round import RoundLaw, Trees, measure_round
from lightning_specdec.bench.audit.findings import FALSE_ALARM, Audit, AuditCase, Finding
from lightning_specdec.bench.audit.intervals import NoFunction
from lightning_specdec.bench.audit.pair import AuditedPair, perplexity
from lightning_specdec.bench.audit.two_sample import permutation_test
from lightning_specdec.checks import require_int
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Sampling

CHECKS = ("identity", "round", "samples")
ROUND_WINDOW = 2
"""Guesses in the check of one round, whose drafts are all gone through."""
NUM_TRIED, NUM_PASSED = 4, 24
"""For each place that is looked at: at how many it is tried whether a biased round would be found out, and how many are
passed to find those, since at some nothing is guessed."""
PLAIN = 0.02
"""Error of a biased round with which a place is good enough; else those with the largest are taken."""
SHUFFLES = 20
"""Shuffles of a test, for each of the smallest p-value that has to be told."""
LARGE = 20_000_000
"""Parameters from which on a target takes so long that fewer decodes and places must do."""
log = logging.getLogger(__name__)


class Auditor:
    """Goes through the cells of a pair.

    Args:
        target, drafts, prompts: as they decode, and tokens: see `AuditedPair`, as for the other numbers.
        rules, samplings: by name.
        num_decodes: 512 when None, 64 where the target is `LARGE`.
        num_places: in the check of one round: 3 when None, 1 where the target is `LARGE`.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafts: Mapping[str, Drafter],
        prompts: Sequence[Sequence[int]],
        *,
        rules: Mapping[str, AcceptanceRule],
        samplings: Mapping[str, Sampling],
        num_draft_tokens: int = 3,
        max_new_tokens: int = 32,
        num_decodes: int | None = None,
        num_places: int | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        for name, given in (("draft", drafts), ("rule", rules), ("sampling", samplings)):
            if not given:
                raise ValueError(f"there is no {name} to audit: give at least one")
        large = target.num_parameters >= LARGE
        num_decodes = (64 if large else 512) if num_decodes is None else num_decodes
        num_places = (1 if large else 3) if num_places is None else num_places
        self.pair = AuditedPair(
            target,
            drafts,
            prompts,
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=max_new_tokens,
            num_decodes=num_decodes,
            eos=eos,
            seed=seed,
        )
        self.rules, self.samplings = rules, samplings
        self.num_places = require_int("num_places", num_places, 1)
        left_out = [
            (draft, name)
            for draft, drafter in drafts.items()
            for name, rule in rules.items()
            if rule.needs_draft_logits and not drafter.gives_logits
        ]
        if len(left_out) == len(drafts) * len(rules):
            draft, rule = left_out[0]
            raise ValueError(f"{rule} compares the draft's logits, and {draft} has none: audit another rule")
        self.audit = Audit(left_out)
        self._places: dict[tuple[str, str, type], tuple[list[list[int]], float | None]] = {}
        self._trees: Trees = {}
        self._biased_parts: dict[tuple[str, str], bool] = {}
        self._biased_p_values: dict[tuple[str, str], float] = {}

    def cells(self) -> Iterator[AuditCase]:
        """All that there are: not every draft can serve every rule."""
        for draft, rule in product(self.pair.drafts, self.rules):
            if (draft, rule) not in self.audit.left_out:
                yield from (AuditCase(draft, rule, sampling) for sampling in self.samplings)

    def run(self, checks: Sequence[str] = CHECKS, *, tell: Callable[[str], None] = lambda text: None) -> Audit:
        """Go through all checks that apply; each finding is in `audit` from when it is made.

        Args:
            tell: called with a line before each cell.
        """
        cells = list(self.cells())
        drawn = [cell for cell in cells if not self.samplings[cell.sampling].greedy]
        num_tests = sum(self.rules[cell.rule].lossless for cell in drawn)
        try:
            for number, cell in enumerate(cells, 1):
                tell(f"{number} of {len(cells)}: {', '.join(cell)}")
                for check, applies in self._checks(cell).items():
                    if check in ("lossy", *checks) and applies:
                        self.audit.findings.append(self._found(check, cell, num_tests))
        finally:  # those that are there, when it was interrupted
            self.audit.judge_samples()
        return self.audit

    def _checks(self, cell: AuditCase) -> dict[str, bool]:
        """Which checks apply."""
        rule, greedy = self.rules[cell.rule], self.samplings[cell.sampling].greedy
        if not rule.lossless:
            return {"lossy": True}
        return {"identity": greedy or rule.ignores_windows, "round": not greedy, "samples": not greedy}

    def _found(self, check: str, cell: AuditCase, num_tests: int) -> Finding:
        """What a check finds, if only that it breaks."""
        try:
            return self._check(check, cell, num_tests)
        except NoFunction as error:
            return Finding(cell, check, "no function", figures={"reason": str(error)})
        except Exception as error:  # drafters, rules and targets are anybody's, and raise what they like
            log.debug("%s, %s", ", ".join(cell), check, exc_info=error)
            reason = f"{type(error).__name__}: {error}"
            return Finding(cell, check, "error", figures={"reason": " ".join(reason.split())})

    def _check(self, check: str, cell: AuditCase, num_tests: int) -> Finding:
        if check == "samples":
            return self._two_samples(cell, num_tests)
        return {"lossy": self._lossy, "identity": self._identity, "round": self._round}[check](cell)

    def _identity(self, cell: AuditCase) -> Finding:
        """Whether the outputs equal standard decoding's, token for token."""
        found = list(self._divergences(cell, self.rules[cell.rule]))
        verdict = "bug" if any(each.verdict == "bug" for each in found) else "tie" if found else "same"
        key = cell.draft, cell.sampling
        if key not in self._biased_parts:
            biased = self._divergences(cell, KeepsEverythingCoupled())
            self._biased_parts[key] = any(each.verdict == "bug" for each in biased)
        num_prompts = len(self.pair.prompts)
        figures: dict[str, Any] = {"num_prompts": num_prompts, "num_equal": num_prompts - len(found)}
        figures["divergences"] = [each.to_dict() for each in found]
        return Finding(cell, "identity", verdict, self._biased_parts[key], figures)

    def _divergences(self, cell: AuditCase, rule: AcceptanceRule) -> Iterator[Divergence]:
        pair, sampling = self.pair, self.samplings[cell.sampling]
        standard, other = pair.decode_standard(sampling).tokens, pair.decode(cell.draft, rule, sampling).tokens
        settings: dict[str, Any] = {"sampling": sampling, "seed": pair.seed, "width": pair.window + 1}
        for number, outputs in enumerate(zip(pair.prompts, standard, other, strict=True)):
            if (found := find_divergence(pair.target, *outputs, number=number, **settings)) is not None:
                yield found

    def _round(self, cell: AuditCase) -> Finding:
        """Whether rounds at single places have the target's distribution."""
        places, control_error = self._telling_places(cell)
        if not places:
            return Finding(cell, "round", "idle", False)
        laws = [self._law(cell, self.rules[cell.rule], place) for place in places]
        worst = max(laws, key=lambda law: law.error / law.tolerance)
        figures = {
            **worst.to_dict(),
            "surprises": sum(law.surprises for law in laws),
            "reads_right": all(law.reads_right for law in laws),
            "num_places": len(laws),
            "control_error": control_error,
        }
        verdict = "exact" if all(law.is_the_targets for law in laws) else "biased"
        return Finding(cell, "round", verdict, control_error is not None, figures)

    def _telling_places(self, cell: AuditCase) -> tuple[list[list[int]], float | None]:
        """Places where a biased round is found out, and by which error at least; without one, where something is
        guessed, and None."""
        control = control_of(self.rules[cell.rule])
        key = cell.draft, cell.sampling, type(control)
        if key not in self._places:
            laws: list[tuple[float, list[int]]] = []
            for place in self.pair.uncertain_contexts(self.samplings[cell.sampling])[: NUM_PASSED * self.num_places]:
                law = self._law(cell, control, place)
                if law.num_drafts:
                    laws.append((law.error if law.error > 2 * law.tolerance else 0.0, place))
                plain = sum(error > PLAIN for error, _ in laws)
                if plain == self.num_places or len(laws) == NUM_TRIED * self.num_places:
                    break
            laws = sorted(laws, key=lambda each: -each[0])[: self.num_places]
            telling = [error for error, _ in laws if error]
            self._places[key] = [place for _, place in laws], min(telling, default=None)
        return self._places[key]

    def _law(self, cell: AuditCase, rule: AcceptanceRule, place: Sequence[int]) -> RoundLaw:
        return measure_round(
            self.pair.target,
            self.pair.drafts[cell.draft],
            place,
            rule=rule,
            sampling=self.samplings[cell.sampling],
            num_draft_tokens=min(self.pair.window, ROUND_WINDOW),
            seed=self.pair.seed,
            trees=self._trees,
        )

    def _two_samples(self, cell: AuditCase, num_tests: int) -> Finding:
        """Whether many decodes tell the output from standard decoding's: the p-value, without a verdict yet."""
        key = cell.draft, cell.sampling
        if key not in self._biased_p_values:
            self._biased_p_values[key] = self._p_value(cell, KeepsEverything(), num_tests)
        biased = self._biased_p_values[key]
        figures = {
            "num_decodes": self.pair.num_decodes,
            "p_value": self._p_value(cell, self.rules[cell.rule], num_tests),
            "control_p_value": biased,
        }
        return Finding(cell, "samples", "", biased <= FALSE_ALARM / num_tests, figures)

    def _p_value(self, cell: AuditCase, rule: AcceptanceRule, num_tests: int) -> float:
        sampling = self.samplings[cell.sampling]
        samples = self.pair.sample_standard(sampling), self.pair.sample(cell.draft, rule, sampling)
        shuffles = math.ceil(SHUFFLES * num_tests / FALSE_ALARM)
        return permutation_test(*samples, num_permutations=shuffles, seed=self.pair.seed)

    def _lossy(self, cell: AuditCase) -> Finding:
        """What a lossy rule changes."""
        rule, sampling = self.rules[cell.rule], self.samplings[cell.sampling]
        result, standard = self.pair.decode(cell.draft, rule, sampling), self.pair.decode_standard(sampling)
        places = [] if sampling.greedy else self.pair.contexts[: self.num_places]
        laws = [self._law(cell, rule, place) for place in places]
        distances = [law.total_variation for law in laws if law.num_drafts]
        figures = {
            "num_new_tokens": result.num_new_tokens,
            "num_changed": result.num_changed,
            "perplexity": perplexity(result),
            "standard_perplexity": perplexity(standard),
            "total_variation": sum(distances) / len(distances) if distances else None,
        }
        return Finding(cell, "lossy", "measured", None, figures)
