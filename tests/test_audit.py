"""Laws of the audit: a correct pair passes, a bias is found, and a check without power says so.

`exact_rounds` computes a round's distribution with other code, on tiny vocabularies: neither
depends on the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import audit_mutant_pairs as mutant_pairs
import audit_mutants
import cases
import jaxtyping
import pytest

from lightning_specdec.audit.auditor import Audit, Auditor, CorrectsFromTarget
from lightning_specdec.audit.exact_round import measure_round
from lightning_specdec.decoding import Session, autoregressive_decode
from lightning_specdec.drafters import Drafter, ModelDrafter, NGramDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import RULES, AcceptanceRule, ExactMatch, RejectionSampling, Sampling

SEEDS = range(6)
FEW_SEEDS = range(2)
TOP_3 = Sampling(0.7, top_k=3)
PROMPT = [3, 1]
HONEST: dict[str, type[ModelDrafter]] = {"honest": ModelDrafter}
LOSSLESS_RULES = {name: RULES[name]() for name in cases.LOSSLESS}


@pytest.fixture
def _unchecked() -> None:
    """Do not check shapes: these are hundreds of equal calls, and the other tests here check
    them."""
    jaxtyping.config.update("jaxtyping_disable", True)


def tiny_pair(seed: int) -> tuple[LanguageModel, LanguageModel]:
    target = cases.MODELS["rnn"](seed, sharpness=1.2)
    return target, cases.near(target, noise=0.3, seed=seed)


def tiny_audit(
    seed: int,
    *,
    rules: Mapping[str, AcceptanceRule],
    drafter_classes: Mapping[str, type[ModelDrafter]] = HONEST,
) -> Audit:
    """The audit of a tiny pair of that seed, with drafters of these classes."""
    target, draft_model = tiny_pair(seed)
    drafts: dict[str, Drafter] = {}
    for name, drafter_class in drafter_classes.items():
        drafts[name] = drafter_class(draft_model)
    auditor = Auditor(
        target,
        drafts,
        [PROMPT, PROMPT[::-1]],
        rules=rules,
        samplings={"top 3": TOP_3},
        num_places=1,
        max_new_tokens=16,
        seed=seed,
    )
    return auditor.run()


def small_auditor(
    drafter: Drafter | None = None,
    *,
    more_drafts: Mapping[str, Drafter] | None = None,
    **settings: Any,
) -> Auditor:
    """An auditor of a pair whose draft is far from the target, with all rules."""
    target, _ = tiny_pair(1)
    if drafter is None:
        drafter = ModelDrafter(cases.near(target, noise=1.2))
    settings = {
        "rules": {name: rule() for name, rule in RULES.items()},
        "samplings": {"greedy": Sampling(), "drawn": Sampling(0.9)},
        "max_new_tokens": 8,
        **settings,
    }
    return Auditor(
        target, {"draft": drafter, **(more_drafts or {})}, cases.PROMPTS[1:3], **settings
    )


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("seed", SEEDS)
def test_every_biased_rule_is_found_and_no_correct_one(seed: int) -> None:
    biased = dict(audit_mutants.RULES)
    if seed in FEW_SEEDS:
        biased.update(audit_mutants.MORE_RULES)
    audit = tiny_audit(seed, rules={**biased, **LOSSLESS_RULES})
    assert [finding.cell.rule for finding in audit.failures] == list(biased)
    assert not audit.weak
    for finding in audit.failures:
        if finding.verdict == "error":
            assert "is not a function of its random numbers" in finding.figures["reason"]


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("seed", SEEDS)
def test_every_drafter_that_does_not_draw_from_what_it_reports_is_found(seed: int) -> None:
    biased = dict(mutant_pairs.DRAFTERS)
    if seed in FEW_SEEDS:
        biased.update(mutant_pairs.MORE_DRAFTERS)
        biased.update(mutant_pairs.NO_FUNCTIONS)
    audit = tiny_audit(seed, rules={"right": RejectionSampling()}, drafter_classes=biased)
    assert [finding.cell.draft for finding in audit.failures] == list(biased)
    assert {finding.verdict for finding in audit.failures} == {"biased"}


@pytest.mark.usefixtures("_unchecked")
def test_exact_matches_do_not_depend_on_what_a_drafter_draws_with() -> None:
    rules = {"right": ExactMatch()}
    audit = tiny_audit(0, rules=rules, drafter_classes=mutant_pairs.NO_FUNCTIONS)
    assert [finding.verdict for finding in audit.findings] == ["same"] * 3


class Breaks(ModelDrafter):
    """Cannot draft for more than two rows."""

    def propose(self, *arguments: Any) -> Any:
        request = arguments[1]
        if len(request.texts) > 2:
            raise IndexError("no room for\nmore rows")
        return super().propose(*arguments)


@pytest.mark.usefixtures("_unchecked")
def test_an_error_in_a_check_fails_that_check_with_one_line_and_the_others_go_on() -> None:
    _, draft_model = tiny_pair(1)
    auditor = small_auditor(
        Breaks(draft_model),
        more_drafts={"whole": ModelDrafter(draft_model)},
        rules={"right": RejectionSampling()},
        num_places=1,
    )
    audit = auditor.run()
    results = [(finding.cell.draft, finding.check, finding.verdict) for finding in audit.findings]
    assert results == [
        ("draft", "identity", "same"),
        ("draft", "round", "error"),
        ("whole", "identity", "same"),
        ("whole", "round", "exact"),
    ]
    (failure,) = audit.failures
    assert failure.figures == {"reason": "IndexError: no room for more rows"}


@pytest.mark.parametrize(
    ("rule", "is_right"), [(RejectionSampling(), True), (CorrectsFromTarget(), False)]
)
def test_a_biased_rule_is_found_on_another_kind_of_target(
    rule: AcceptanceRule, is_right: bool
) -> None:
    target = cases.target("transformer")
    drafter = cases.drafter("heads", "transformer")
    law = measure_round(target, drafter, PROMPT, rule=rule, sampling=Sampling(0.8))
    assert law.num_drafts > 4
    assert law.is_the_targets is is_right


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("name", mutant_pairs.LOOPS)
def test_a_loop_that_gives_a_correct_rule_the_wrong_numbers_is_found(name: str) -> None:
    with mutant_pairs.LOOPS[name]():
        audit = tiny_audit(2, rules=LOSSLESS_RULES)
    assert [finding.cell.rule for finding in audit.failures] == list(LOSSLESS_RULES)


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("name", mutant_pairs.ENDS)
def test_rejection_sampling_with_a_wrong_end_of_rows_fails_at_default_settings(name: str) -> None:
    samplings = {"greedy": Sampling(), "drawn": Sampling(1.0), "top_p": Sampling(0.7, top_p=0.9)}
    rules = {"right": RejectionSampling()}
    with mutant_pairs.ENDS[name]():
        audit = small_auditor(rules=rules, max_new_tokens=32, samplings=samplings).run()
    assert any(finding.cell.sampling != "greedy" for finding in audit.failures)


class WrongAtLast(ModelDrafter):
    """Drafts the target's own tokens, except for the last one of a round."""

    def propose(self, *arguments: Any) -> Any:
        draft = super().propose(*arguments)
        draft.tokens[:, -1] = (draft.tokens[:, -1] + 1) % self.model.vocab_size
        return draft


def test_draft_tokens_after_a_stop_are_not_learned_from() -> None:
    """Also if the stop is the last token that was accepted, so that nothing follows it."""
    target = cases.MODELS["rnn"](1)
    tokens = autoregressive_decode(target, [PROMPT], max_new_tokens=9).tokens[0]
    for eos in tokens:
        num_new = tokens.index(eos) + 1
        session = Session(target, WrongAtLast(target), max_length=32, num_draft_tokens=3, eos=eos)
        request = session.add(PROMPT, max_new_tokens=24)
        with recorded_outcomes(session) as outcomes:
            while session.step():
                pass
        assert request.text[len(PROMPT) :] == tokens[:num_new]

        last_outcome = outcomes[-1]
        # Of three draft tokens two are accepted, and a correction follows.
        num_accepted = num_new % 3 or 2
        assert last_outcome.num_accepted == num_accepted
        if num_new % 3:
            assert last_outcome.window == last_outcome.num_made == num_accepted


@contextmanager
def recorded_outcomes(session: Session) -> Iterator[list[Any]]:
    """Record the outcomes of rounds that the session's window learns from."""
    outcomes: list[Any] = []

    def learn(plan: Any, new_outcomes: Any) -> None:
        outcomes.extend(new_outcomes)

    with mock.patch.object(type(session._plan), "learn", learn):
        yield outcomes


@pytest.mark.parametrize(
    "drafter_name", ["hotter", "ragged", "staged", "cross", "lookup_first", "repeater", "itself"]
)
def test_one_round_of_every_kind_of_draft_is_the_targets(drafter_name: str) -> None:
    law = measure_round(
        cases.target("rnn"),
        cases.drafter(drafter_name, "rnn"),
        [1, 2, 3, 1, 2],
        rule=RejectionSampling(),
        sampling=Sampling(0.8),
    )
    assert law.num_drafts
    assert law.is_the_targets, law


def test_an_exact_round_is_far_more_exact_than_it_must_be() -> None:
    target, draft_model = tiny_pair(0)
    drafter = ModelDrafter(draft_model)
    law = measure_round(target, drafter, PROMPT, rule=RejectionSampling(), sampling=TOP_3)
    assert law.is_the_targets
    assert law.error < 0.2 * law.tolerance < 1e-6
    assert law.num_drafts == 9


@pytest.mark.usefixtures("_unchecked")
def test_a_correct_pair_passes_with_power_and_lossy_rules_are_measured_not_failed() -> None:
    audit = small_auditor().run()
    assert not audit.failures
    assert not audit.weak

    expected = {
        ("ExactMatch", "drawn", "identity"): "same",
        ("RejectionSampling", "drawn", "round"): "exact",
    }
    for rule in RULES:
        if rule in LOSSLESS_RULES:
            expected[rule, "greedy", "identity"] = "same"
        else:
            expected[rule, "greedy", "lossy"] = "measured"
            expected[rule, "drawn", "lossy"] = "measured"
    verdicts = {}
    for finding in audit.findings:
        verdicts[finding.cell.rule, finding.cell.sampling, finding.check] = finding.verdict
    assert verdicts == expected

    lossy_findings = [finding for finding in audit.findings if finding.check == "lossy"]
    drawn_finding = next(finding for finding in lossy_findings if finding.cell.sampling == "drawn")
    assert drawn_finding.figures["num_changed"] > 0


@pytest.mark.usefixtures("_unchecked")
def test_the_same_seed_finds_the_same() -> None:
    settings: dict[str, Any] = {
        "rules": {"RejectionSampling": RejectionSampling()},
        "seed": 3,
        "num_places": 1,
    }
    document = small_auditor(**settings).run().to_dict()
    assert small_auditor(**settings).run().to_dict() == document


@pytest.mark.usefixtures("_unchecked")
def test_if_no_bias_could_show_the_audit_says_that_it_had_not_enough_power() -> None:
    target, _ = tiny_pair(1)
    audit = small_auditor(ModelDrafter(target), rules={"right": RejectionSampling()}).run()
    assert not audit.failures
    assert [finding.check for finding in audit.weak] == ["identity", "round"]


def test_a_draft_that_proposes_nothing_is_idle() -> None:
    auditor = small_auditor(
        NGramDrafter(min_ngram=8, max_ngram=8),
        rules={"right": RejectionSampling()},
        samplings={"drawn": Sampling(5.0)},
        max_new_tokens=2,
    )
    (finding,) = auditor.run().findings
    assert finding.verdict == "idle"
    assert finding.enough_power is False


def test_a_rule_that_needs_logits_is_left_out_for_a_draft_without() -> None:
    auditor = small_auditor(NGramDrafter())
    assert auditor.audit.left_out == [("draft", "EpsilonThreshold")]
    assert "EpsilonThreshold" not in {cell.rule for cell in auditor.cells()}


def test_a_single_rule_that_needs_logits_is_refused_for_a_draft_without() -> None:
    rules = {"EpsilonThreshold": RULES["EpsilonThreshold"]()}
    message = "EpsilonThreshold compares the draft's logits, and draft has none"
    with pytest.raises(ValueError, match=message):
        small_auditor(NGramDrafter(), rules=rules)
