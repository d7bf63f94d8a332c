"""Laws of the verb `audit`: tables that fit, one JSON document, exit codes, one line for bad
input."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import audit_mutants
import pytest
from cli_fixtures import call, here, refused, succeed

from lightning_specdec.audit import auditor as auditor_module
from lightning_specdec.config.kinds import Kinds

__all__ = ["here"]

CHECKPOINTS = Path(__file__).parent.parent / "checkpoints"
AUDIT = ("audit", "--ckpt", str(CHECKPOINTS / "rnn.safetensors"))
FEW = ("--num_places", "1", "--max_new_tokens", "4")
BOTH_TEMPERATURES = ("--temperatures", "0", "1")


def test_the_command_passes_the_shipped_pair_with_a_table_of_each_rule() -> None:
    outcome = succeed(*AUDIT, *FEW, *BOTH_TEMPERATURES)
    assert outcome.err == ""
    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert lines[:3] == [
        "ModelDrafter, ExactMatch",
        "sampling check verdict found",
        "greedy identity same 3 of 3 outputs are the target's",
    ]
    assert any(line.startswith("T=1 round exact error ") for line in lines)
    assert "perplexity" in outcome.out
    for check in ("identity", "round", "lossy"):
        assert f"\n{check}: " in outcome.out
    assert "passed: no difference from the target's output in 4 checks" in outcome.out


def test_lossy_rules_alone_are_not_said_to_have_passed() -> None:
    rules = ("--rules", "TypicalAcceptance")
    output = succeed(*AUDIT, *FEW, *rules, "--temperatures", "0").out
    assert "nothing here should be lossless" in output
    assert "passed" not in output


def test_the_document_has_every_finding_and_a_biased_one_makes_the_exit_code_1() -> None:
    load = Kinds.load

    def load_biased(self: Kinds, name: str, **options: Any) -> Any:
        if name == "RejectionSampling":
            return audit_mutants.FirstAlwaysKept
        return load(self, name, **options)

    with mock.patch.object(Kinds, "load", load_biased):
        outcome = call(
            *AUDIT,
            *FEW,
            *("--rules", "RejectionSampling"),
            *("--output", "json"),
            *("--top_k", "5"),
            *("--num_draft_tokens", "2"),
        )
    assert outcome.code == 1
    assert "error: ModelDrafter, RejectionSampling, T=1, top_k=5: biased" in outcome.err
    document = outcome.json
    assert document["passed"] is False
    findings = document["findings"]
    checks = [(finding["sampling"], finding["check"], finding["failed"]) for finding in findings]
    assert ("T=1, top_k=5", "round", True) in checks
    assert len(checks) == 2
    assert document["manifest"]["options"]["num_draft_tokens"] == 2


def test_a_check_that_breaks_is_a_line_beside_the_results_of_the_others() -> None:
    rules = ("--rules", "RejectionSampling")
    error = RuntimeError("no\nroom")
    with mock.patch.object(auditor_module, "measure_round", side_effect=error):
        outcome = call(*AUDIT, *FEW, *rules, *BOTH_TEMPERATURES)
    assert outcome.code == 1
    assert outcome.err.endswith("RuntimeError: no room\n")
    for word in ("same", "ERROR", "FAILED: 1 of 2 checks"):
        assert word in outcome.out


def test_what_an_interrupted_audit_has_found_is_shown() -> None:
    with mock.patch.object(auditor_module, "perplexity", side_effect=KeyboardInterrupt):
        outcome = call(*AUDIT, *FEW, "--temperatures", "1")
    assert outcome.code == 130
    assert "interrupted: what is above was checked by then" in outcome.err
    assert "ModelDrafter, RejectionSampling" in outcome.out
    assert "exact" in outcome.out
    assert "so far: no difference" in outcome.out
    assert "passed" not in outcome.out


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rules", "Nonsense"), "there is no rule 'Nonsense'"),
        (("--rule", "ExactMatch"), "did you mean --rules?"),
        (("--temperatures", "-1"), "temperatures must be in [0, inf), got -1"),
        (("--drafts", "absent", "other"), "there is no draft 'absent': there is"),
        (("--pair", "gpt2"), "got --ckpt and --pair"),
    ],
)
def test_bad_input_is_one_line(options: tuple[str, ...], message: str) -> None:
    refused(*AUDIT, *options, message=message)


@pytest.mark.quick_cases("rnn")
@pytest.mark.parametrize("name", ["rnn", "early_exit", "medusa", "text"])
def test_every_shipped_checkpoint_passes(name: str) -> None:
    """With few places; `audit` without options audits them in full."""
    document = call(
        *("audit", "--ckpt", str(CHECKPOINTS / f"{name}.safetensors")),
        *FEW,
        *("--num_prompts", "1"),
        *BOTH_TEMPERATURES,
        *("--rules", "ExactMatch", "RejectionSampling"),
        *("--output", "json"),
    ).json
    findings = document["findings"]
    checks = {(finding["check"], finding["sampling"]) for finding in findings}
    assert {("identity", "greedy"), ("round", "T=1")} <= checks
    assert {finding["verdict"] for finding in findings} <= {"same", "exact"}
    assert not document["interrupted"]
