"""Laws of the audit: what is the target's passes, what is biased is found out, and where that could not be, it says so.

`test_distribution` computes a round's law by other code, on tiny vocabularies: neither stands on the other.
"""

from __future__ import annotations

from collections.abc import Mapping
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

SEEDS, FEW_SEEDS = range(10), range(2)
FEW = Sampling(0.7, top_k=3)
PROMPT = [3, 1]
HONEST: dict[str, type[ModelDrafter]] = {"honest": ModelDrafter}
RIGHT = {name: RULES[name]() for name in cases.LOSSLESS}


@pytest.fixture
def _unchecked() -> None:
    """No shapes are checked: these are hundreds of calls alike, and the other tests here check them."""
    jaxtyping.config.update("jaxtyping_disable", True)


def tiny_pair(seed: int) -> tuple[LanguageModel, LanguageModel]:
    target = cases.MODELS["rnn"](seed, sharpness=1.2)
    return target, cases.near(target, noise=0.3, seed=seed)


def tiny_audit(
    seed: int,
    *,
    rules: Mapping[str, AcceptanceRule],
    kinds: Mapping[str, type[ModelDrafter]] = HONEST,
) -> Audit:
    """The audit of a tiny pair of that seed, with drafters of these kinds."""
    target, draft = tiny_pair(seed)
    drafts: dict[str, Drafter] = {name: kind(draft) for name, kind in kinds.items()}
    settings: dict[str, Any] = {"max_new_tokens": 16, "num_places": 1, "seed": seed}
    return Auditor(
        target, drafts, [PROMPT, PROMPT[::-1]], rules=rules, samplings={"few": FEW}, **settings
    ).run()


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("seed", SEEDS)
def test_every_biased_rule_is_found_out_and_no_right_one(seed: int) -> None:
    biased = audit_mutants.RULES | (audit_mutants.MORE_RULES if seed in FEW_SEEDS else {})
    audit = tiny_audit(seed, rules={**biased, **RIGHT})
    assert [finding.cell.rule for finding in audit.failures] == list(biased)
    reasons = [
        finding.figures["reason"] for finding in audit.failures if finding.verdict == "error"
    ]
    assert not audit.weak and all(
        "is not a function of its random numbers" in reason for reason in reasons
    )


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("seed", SEEDS)
def test_every_drafter_that_does_not_draw_from_what_it_reports_is_found_out(seed: int) -> None:
    more = mutant_pairs.MORE_DRAFTERS | mutant_pairs.NO_FUNCTIONS if seed in FEW_SEEDS else {}
    biased = mutant_pairs.DRAFTERS | more
    audit = tiny_audit(seed, rules={"right": RejectionSampling()}, kinds=biased)
    assert [finding.cell.draft for finding in audit.failures] == list(biased)
    assert {finding.verdict for finding in audit.failures} == {"biased"}


@pytest.mark.usefixtures("_unchecked")
def test_exact_matches_do_not_depend_on_what_a_drafter_draws_with() -> None:
    audit = tiny_audit(0, rules={"right": ExactMatch()}, kinds=mutant_pairs.NO_FUNCTIONS)
    assert [finding.verdict for finding in audit.findings] == ["same"] * 3


class Breaks(ModelDrafter):
    """Cannot draft for more rows than two."""

    def propose(self, *arguments: Any) -> Any:
        context = arguments[1]
        if len(context.texts) > 2:
            raise IndexError("no room for\nmore rows")
        return super().propose(*arguments)


@pytest.mark.usefixtures("_unchecked")
def test_what_breaks_in_a_check_fails_that_check_with_one_line_and_the_others_go_on() -> None:
    _, draft = tiny_pair(1)
    rules = {"right": RejectionSampling()}
    audit = small_auditor(Breaks(draft), whole=ModelDrafter(draft), rules=rules, num_places=1).run()
    found = [(each.cell.draft, each.check, each.verdict) for each in audit.findings]
    assert found == [
        ("draft", "identity", "same"),
        ("draft", "round", "error"),
        ("whole", "identity", "same"),
        ("whole", "round", "exact"),
    ]
    assert [each.figures for each in audit.failures] == [
        {"reason": "IndexError: no room for more rows"}
    ]


def test_a_biased_rule_is_found_out_on_another_kind_of_target() -> None:
    target = cases.target("transformer")
    for rule, right in ((RejectionSampling(), True), (CorrectsFromTarget(), False)):
        law = measure_round(
            target, cases.drafter("heads", "transformer"), PROMPT, rule=rule, sampling=Sampling(0.8)
        )
        assert law.num_drafts > 4 and law.is_the_targets is right


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("loop", mutant_pairs.LOOPS)
def test_a_loop_that_gives_a_right_rule_the_wrong_numbers_is_found_out(loop: str) -> None:
    with mutant_pairs.LOOPS[loop]():
        audit = tiny_audit(2, rules=RIGHT)
    assert [finding.cell.rule for finding in audit.failures] == list(RIGHT)


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("name", mutant_pairs.ENDS)
def test_rejection_sampling_with_a_wrong_end_of_rows_fails_at_default_settings(name: str) -> None:
    samplings = {"greedy": Sampling(), "drawn": Sampling(1.0), "top_p": Sampling(0.7, top_p=0.9)}
    with mutant_pairs.ENDS[name]():
        audit = small_auditor(
            rules={"right": RejectionSampling()}, max_new_tokens=32, samplings=samplings
        ).run()
    assert any(finding.cell.sampling != "greedy" for finding in audit.failures)


class WrongAtLast(ModelDrafter):
    """Drafts the target's own tokens, but for the last one of a round."""

    def propose(self, *arguments: Any) -> Any:
        draft = super().propose(*arguments)
        draft.tokens[:, -1] = (draft.tokens[:, -1] + 1) % self.model.vocab_size
        return draft


def test_draft_tokens_behind_a_stop_are_not_learnt_from() -> None:
    """Also where the stop is the last token that was accepted, so that nothing follows it."""
    target = cases.MODELS["rnn"](1)
    tokens = autoregressive_decode(target, [PROMPT], max_new_tokens=9).tokens[0]
    for eos in tokens:
        cut = tokens.index(eos) + 1
        session = Session(target, WrongAtLast(target), max_length=32, num_draft_tokens=3, eos=eos)
        row, learnt = session.add(PROMPT, max_new_tokens=24), []
        with mock.patch.object(
            type(session._plan), "learn", lambda plan, outcomes: learnt.extend(outcomes)
        ):  # noqa: B023
            while session.step():
                pass
        assert row.text[len(PROMPT) :] == tokens[:cut]
        last = learnt[-1]
        accepted = cut % 3 or 2  # of three draft tokens two are accepted, and a correction follows
        assert last.num_accepted == accepted and (
            last.window == last.num_made == accepted or cut % 3 == 0
        )


def test_an_exact_round_is_far_more_exact_than_it_must_be() -> None:
    target, draft = tiny_pair(0)
    law = measure_round(target, ModelDrafter(draft), PROMPT, rule=RejectionSampling(), sampling=FEW)
    assert law.is_the_targets and law.error < 0.2 * law.tolerance < 1e-6 and law.num_drafts == 9


@pytest.mark.parametrize(
    "name", ["hotter", "ragged", "staged", "cross", "lookup_first", "repeater", "itself"]
)
def test_one_round_of_every_kind_of_draft_is_the_targets(name: str) -> None:
    prompt, rule = [1, 2, 3, 1, 2], RejectionSampling()
    law = measure_round(
        cases.target("rnn"), cases.drafter(name, "rnn"), prompt, rule=rule, sampling=Sampling(0.8)
    )
    assert law.num_drafts and law.is_the_targets, law


def small_auditor(
    drafter: Drafter | None = None, *, whole: Drafter | None = None, **settings: Any
) -> Auditor:
    target, _ = tiny_pair(1)
    given: dict[str, Any] = {
        "rules": {name: rule() for name, rule in RULES.items()},
        "samplings": {"greedy": Sampling(), "drawn": Sampling(0.9)},
        "max_new_tokens": 8,
        **settings,
    }
    drafts = {"draft": ModelDrafter(cases.near(target, noise=1.2)) if drafter is None else drafter}
    drafts |= {} if whole is None else {"whole": whole}
    return Auditor(target, drafts, cases.PROMPTS[1:3], **given)


@pytest.mark.usefixtures("_unchecked")
def test_a_right_pair_passes_with_power_and_lossy_rules_are_measured_not_failed() -> None:
    audit = small_auditor().run()
    assert not audit.failures and not audit.weak
    found = {
        (each.cell.rule, each.cell.sampling, each.check): each.verdict for each in audit.findings
    }
    lossy = {
        (rule, setting, "lossy"): "measured"
        for rule in RULES.keys() - RIGHT
        for setting in ("greedy", "drawn")
    }
    greedy = {(rule, "greedy", "identity"): "same" for rule in RIGHT}
    drawn = {
        ("ExactMatch", "drawn", "identity"): "same",
        ("RejectionSampling", "drawn", "round"): "exact",
    }
    assert found == drawn | lossy | greedy
    measured = next(
        each for each in audit.findings if each.check == "lossy" and each.cell.sampling == "drawn"
    )
    assert measured.figures["num_changed"] > 0


@pytest.mark.usefixtures("_unchecked")
def test_the_same_seed_finds_the_same() -> None:
    rules = {"RejectionSampling": RejectionSampling()}
    one, other = (
        small_auditor(rules=rules, seed=3, num_places=1).run().to_dict() for _ in range(2)
    )
    assert one == other


@pytest.mark.usefixtures("_unchecked")
def test_where_no_bias_could_show_the_audit_says_that_it_had_not_enough_power() -> None:
    target, _ = tiny_pair(1)
    audit = small_auditor(ModelDrafter(target), rules={"right": RejectionSampling()}).run()
    assert not audit.failures
    assert [finding.check for finding in audit.weak] == ["identity", "round"]


def test_a_draft_that_proposes_nothing_is_idle() -> None:
    never, rules = NGramDrafter(min_ngram=8, max_ngram=8), {"right": RejectionSampling()}
    (finding,) = (
        small_auditor(never, rules=rules, samplings={"drawn": Sampling(5.0)}, max_new_tokens=2)
        .run()
        .findings
    )
    assert (finding.verdict, finding.enough_power) == ("idle", False)


def test_a_rule_that_wants_logits_is_left_out_of_a_draft_without_and_told() -> None:
    auditor = small_auditor(NGramDrafter())
    assert auditor.audit.left_out == [("draft", "EpsilonThreshold")]
    assert "EpsilonThreshold" not in {cell.rule for cell in auditor.cells()}
    with pytest.raises(
        ValueError, match="EpsilonThreshold compares the draft's logits, and draft has none"
    ):
        small_auditor(NGramDrafter(), rules={"EpsilonThreshold": RULES["EpsilonThreshold"]()})
