"""Laws of the verb `audit`: tables that fit, one JSON document, exit codes, one line for bad input."""

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
CHECKPOINT = str(Path(__file__).parent.parent / "checkpoints" / "rnn.safetensors")


FEW = ("--num_places", "1", "--max_new_tokens", "4")


def test_the_command_passes_the_shipped_pair_with_a_table_of_each_rule() -> None:
    shown = succeed("audit", "--ckpt", CHECKPOINT, "--temperatures", "0", "1", *FEW)
    lines = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert shown.err == "" and lines[:2] == [
        "ModelDrafter, ExactMatch",
        "sampling check verdict found",
    ]
    assert lines[2] == "greedy identity same 3 of 3 outputs are the target's"
    assert (
        any(line.startswith("T=1 round exact error ") for line in lines)
        and "perplexity" in shown.out
    )
    assert all(f"\n{check}: " in shown.out for check in ("identity", "round", "lossy"))
    assert "passed: no difference from the target's output in 4 checks" in shown.out


def test_lossy_rules_alone_are_not_said_to_have_passed() -> None:
    shown = succeed(
        "audit", "--ckpt", CHECKPOINT, *FEW, "--temperatures", "0", "--rules", "TypicalAcceptance"
    )
    assert "nothing here should be lossless" in shown.out and "passed" not in shown.out


def test_the_document_holds_every_finding_and_one_that_is_biased_makes_the_exit_code_1() -> None:
    brief, load = (*FEW, "--rules", "RejectionSampling", "--output", "json"), Kinds.load

    def biased(self: Kinds, name: str, **options: Any) -> Any:
        return (
            audit_mutants.FirstAlwaysKept
            if name == "RejectionSampling"
            else load(self, name, **options)
        )

    with mock.patch.object(Kinds, "load", biased):
        outcome = call(
            "audit", "--ckpt", CHECKPOINT, *brief, "--top_k", "5", "--num_draft_tokens", "2"
        )
    assert (
        outcome.code == 1
        and "error: ModelDrafter, RejectionSampling, T=1, top_k=5: biased" in outcome.err
    )
    document = outcome.json
    assert document["passed"] is False
    checks = [(each["sampling"], each["check"], each["failed"]) for each in document["findings"]]
    assert ("T=1, top_k=5", "round", True) in checks and len(checks) == 2
    assert document["manifest"]["options"]["num_draft_tokens"] == 2


def test_a_check_that_breaks_is_told_in_a_line_beside_what_the_others_found() -> None:
    brief = (
        "audit",
        "--ckpt",
        CHECKPOINT,
        *FEW,
        "--rules",
        "RejectionSampling",
        "--temperatures",
        "0",
        "1",
    )
    with mock.patch.object(auditor_module, "measure_round", side_effect=RuntimeError("no\nroom")):
        outcome = call(*brief)
    assert outcome.code == 1 and outcome.err.endswith("RuntimeError: no room\n")
    assert all(word in outcome.out for word in ("same", "ERROR", "FAILED: 1 of 2 checks"))


def test_what_an_interrupted_audit_has_found_is_shown() -> None:
    with mock.patch.object(auditor_module, "perplexity", side_effect=KeyboardInterrupt):
        outcome = call("audit", "--ckpt", CHECKPOINT, *FEW, "--temperatures", "1")
    assert outcome.code == 130 and "interrupted: what is above was checked by then" in outcome.err
    assert "ModelDrafter, RejectionSampling" in outcome.out and "exact" in outcome.out
    assert "so far: no difference" in outcome.out and "passed" not in outcome.out


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--rules", "Nonsense"), "there is no rule 'Nonsense'"),
        (("--rule", "ExactMatch"), "did you mean --rules?"),
        (("--temperatures", "-1"), "temperatures must be in [0, inf), got -1"),
        (("--drafts", "absent", "other"), "there is no draft 'absent': there is"),
        (("--pair", "gpt2"), "got --ckpt and --pair"),
    ],
)
def test_bad_input_is_told_in_a_line(options: tuple[str, ...], told: str) -> None:
    refused("audit", "--ckpt", CHECKPOINT, *options, told=told)


@pytest.mark.parametrize("name", ["rnn", "early_exit", "multi_token", "text"])
def test_every_shipped_checkpoint_passes(name: str) -> None:
    """With few places; benchmarks/audits.py audits them in full."""
    brief = (
        "--num_prompts",
        "1",
        "--temperatures",
        "0",
        "1",
        "--rules",
        "ExactMatch",
        "RejectionSampling",
    )
    document = call(
        "audit", "--ckpt", CHECKPOINT.replace("rnn", name), *FEW, *brief, "--output", "json"
    ).json
    assert {("identity", "greedy"), ("round", "T=1")} <= {
        (each["check"], each["sampling"]) for each in document["findings"]
    }
    assert {each["verdict"] for each in document["findings"]} <= {"same", "exact"} and not document[
        "interrupted"
    ]
