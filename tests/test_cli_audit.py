"""Laws of the verb `audit`: tables that fit, one JSON document, exit codes, one line for bad input."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import audit_mutants
import pytest
from cli_fixtures import call, here, refused, succeed

from lightning_specdec.audit import auditor as auditor_module
from lightning_specdec.audit.findings import FALSE_ALARM, AuditCase, Finding
from lightning_specdec.audit.identity import Divergence
from lightning_specdec.cli import audit as cli_audit
from lightning_specdec.config.kinds import Kinds

__all__ = ["here"]
CHECKPOINT = str(Path(__file__).parent.parent / "checkpoints" / "rnn.safetensors")


FEW = ("--num_decodes", "32", "--num_places", "1", "--max_new_tokens", "4")


def test_the_command_passes_the_shipped_pair_with_a_table_of_each_rule() -> None:
    shown = succeed("audit", "--ckpt", CHECKPOINT, "--temperatures", "0", "1", *FEW)
    lines = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert shown.err == "" and lines[0] == "ModelDrafter, ExactMatch check verdict found"
    assert lines[1] == "greedy identity same 3 of 3 outputs equal standard decoding's"
    assert any(line.startswith("T=1 round exact error") for line in lines) and "total variation" in shown.out
    assert "passed: no difference from the target's output in 7 checks" in shown.out


def test_lossy_rules_alone_are_not_said_to_have_passed() -> None:
    shown = succeed("audit", "--ckpt", CHECKPOINT, *FEW, "--temperatures", "0", "--rules", "TypicalAcceptance")
    assert "nothing here should be lossless" in shown.out and "passed" not in shown.out


def test_the_document_holds_every_finding_and_one_that_is_biased_makes_the_exit_code_1() -> None:
    brief, load = (*FEW, "--rules", "RejectionSampling", "--output", "json"), Kinds.load

    def biased(self: Kinds, name: str, **options: Any) -> Any:
        return audit_mutants.FirstAlwaysKept if name == "RejectionSampling" else load(self, name, **options)

    with mock.patch.object(Kinds, "load", biased):
        outcome = call("audit", "--ckpt", CHECKPOINT, *brief, "--top_k", "5", "--num_draft_tokens", "2")
    assert outcome.code == 1 and "error: ModelDrafter, RejectionSampling, T=1, top_k=5: biased" in outcome.err
    document = outcome.json
    assert document["passed"] is False and document["false_alarm"] == FALSE_ALARM
    checks = [(each["sampling"], each["check"], each["failed"]) for each in document["findings"]]
    assert ("T=1, top_k=5", "round", True) in checks and len(checks) == 3
    assert document["manifest"]["options"]["num_draft_tokens"] == 2


def test_a_check_that_breaks_is_told_in_a_line_beside_what_the_others_found() -> None:
    brief = ("audit", "--ckpt", CHECKPOINT, *FEW, "--rules", "RejectionSampling", "--temperatures", "0", "1")
    with mock.patch.object(auditor_module, "measure_round", side_effect=RuntimeError("no\nroom")):
        outcome = call(*brief)
    assert outcome.code == 1 and outcome.err.endswith("T=1: error: RuntimeError: no room\n")
    assert all(word in outcome.out for word in ("same", "alike", "ERROR", "0 of 3 checks", "1 could not be made"))


def test_what_an_interrupted_audit_has_found_is_shown() -> None:
    with mock.patch.object(auditor_module, "perplexity", side_effect=KeyboardInterrupt):
        outcome = call("audit", "--ckpt", CHECKPOINT, *FEW, "--temperatures", "1")
    assert outcome.code == 130 and "interrupted: what is above was checked by then" in outcome.err
    assert "ModelDrafter, RejectionSampling" in outcome.out and "alike" in outcome.out
    assert "so far: no difference" in outcome.out and "passed" not in outcome.out


def test_a_bug_is_told_before_a_tie() -> None:
    ends = Divergence(1, 2, None, None, None, None, "bug")
    tie, bug = (Divergence(0, 4, (7, 9), 0.5, margin, 0.01, word) for margin, word in ((0.001, "tie"), (0.5, "bug")))

    def told(*found: Divergence) -> str:
        figures = {"num_prompts": 3, "num_equal": 3 - len(found), "divergences": [asdict(each) for each in found]}
        return cli_audit.told(Finding(AuditCase("a", "b", "c"), "identity", "bug", figures=figures))

    assert told() == "3 of 3 outputs equal standard decoding's"
    assert told(tie).endswith("; token 5 of prompt 1 is 9, not 7: 0.001 apart, rounding moves 0.01")
    assert "0.5 apart" in told(tie, bug) and told(tie, ends).endswith("; token 3 of prompt 2: one output ends there")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--rules", "Nonsense"), "there is no rule 'Nonsense'"),
        (("--rule", "ExactMatch"), "did you mean --rules?"),
        (("--temperatures", "-1"), "temperatures must be in [0, inf), got -1"),
        (("--temperatures", "1", "--top_p", "2"), "top_p must be in (0, 1], got 2"),
        (("--num_decodes", "0"), "num_decodes must be from 1"),
        (("--num_places", "0"), "num_places must be from 1"),
        (("--num_draft_tokens", "0"), "num_draft_tokens must be from 1"),
        (("--max_new_tokens", "0"), "max_new_tokens must be from 1"),
        (("--seed", "-1"), "seed must be"),
        (("--prompt", "1 2 x"), "'x' is no token"),
        (("--prompt", "1 99"), "holds 99"),
        (("--prompts_file", "absent.txt"), "absent.txt: No such file"),
        (("--draft", "absent"), "has no draft 'absent'"),
        (("--drafts", "absent", "other"), "there is no draft 'absent': there is"),
        (("--pair", "gpt2"), "got --ckpt and --pair"),
    ],
)
def test_bad_input_is_told_in_a_line(options: tuple[str, ...], told: str) -> None:
    refused("audit", "--ckpt", CHECKPOINT, *options, told=told)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("models", "told"),
    [
        ((), "name the models by one of"),
        (("--ckpt", "absent.ckpt"), "absent.ckpt"),
        (("--target", "./absent"), "./absent"),
    ],
)
def test_models_that_are_not_there_are_told_in_a_line(models: tuple[str, ...], told: str) -> None:
    refused("audit", *models, told=told)


@pytest.mark.parametrize("name", ["rnn", "early_exit", "multi_token", "text"])
def test_every_shipped_checkpoint_passes(name: str) -> None:
    """With few decodes; benchmarks/audits.py audits them in full."""
    brief = ("--num_prompts", "1", "--temperatures", "0", "1", "--rules", "ExactMatch", "RejectionSampling")
    document = call("audit", "--ckpt", CHECKPOINT.replace("rnn", name), *FEW, *brief, "--output", "json").json
    certain = [each for each in document["findings"] if each["check"] != "samples"]  # what no chance can fail
    assert {("identity", "greedy"), ("round", "T=1")} <= {(each["check"], each["sampling"]) for each in certain}
    assert {each["verdict"] for each in certain} <= {"same", "exact"} and not document["interrupted"]
