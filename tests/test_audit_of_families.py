"""Laws of the audit on recurrent and hybrid targets, whose rows return to snapshots."""

from __future__ import annotations

from typing import Any

import jaxtyping
import pytest
from families import tiny
from row_families import FAMILIES, noisy

from lightning_specdec.audit.auditor import Audit, Auditor
from lightning_specdec.audit.biased_rules import BIASED_RULES
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.snapshot_state import SnapshotState
from lightning_specdec.rules import AcceptanceRule, ExactMatch, RejectionSampling, Sampling

VOCAB_SIZE = 3
"""The audit computes the distribution of a round over all drafts."""
LAYERS: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "rwkv": {"num_hidden_layers": 2},
}
"""Few, since the audit makes thousands of calls."""
some_families = pytest.mark.parametrize("family", LAYERS)


@pytest.fixture(autouse=True)
def _unchecked() -> None:
    """Do not check shapes: these are hundreds of equal calls, and the other tests check them."""
    jaxtyping.config.update("jaxtyping_disable", True)


def audit(family: str, rules: dict[str, AcceptanceRule]) -> Audit:
    """The audit of a tiny target with a similar draft model."""
    sizes: dict[str, Any] = {**FAMILIES[family], **LAYERS[family], "vocab_size": VOCAB_SIZE}
    target = HuggingFaceLM(tiny(family, sharpness=3.0, **sizes))
    assert isinstance(target.init_state(1, 8), SnapshotState)
    draft = HuggingFaceLM(noisy(tiny(family, sharpness=3.0, **sizes), seed=3, noise=0.2))
    auditor = Auditor(
        target,
        {"similar": ModelDrafter(draft)},
        [[2, 1, 0, 2, 1]],
        rules=rules,
        samplings={"greedy": Sampling(), "drawn": Sampling(0.9)},
        num_places=1,
        max_new_tokens=6,
        num_draft_tokens=2,
        seed=1,
    )
    return auditor.run()


@pytest.mark.quick_cases("rwkv")
@some_families
def test_a_target_whose_rows_return_to_snapshots_passes(family: str) -> None:
    result = audit(family, {"match": ExactMatch(), "rejection": RejectionSampling()})
    assert not result.failures
    assert {finding.check for finding in result.findings} == {"identity", "round"}
    assert not any(finding.verdict == "error" for finding in result.findings)


@pytest.mark.quick_cases("rwkv")
@some_families
def test_the_biased_controls_fail_there(family: str) -> None:
    result = audit(family, {name: rule() for name, rule in BIASED_RULES.items()})
    failed_rules = {finding.cell.rule for finding in result.failures}
    assert failed_rules == set(BIASED_RULES)
