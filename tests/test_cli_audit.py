"""Laws of the verb `audit`: tables that fit, one JSON document, exit codes, one line for bad input."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import audit_mutants
import pytest
from cli_fixtures import call, here, refused, succeed

from lightning_specdec import cli_audit
from lightning_specdec.bench.audit import auditor as auditor_module
from lightning_specdec.bench.audit.divergence import Divergence
from lightning_specdec.bench.audit.findings import FALSE_ALARM, AuditCase, Finding

__all__ = ["here"]
CHECKPOINT = str(Path(__file__).parent.parent / "checkpoints" / "rnn.ckpt")


FEW = ("--num_decodes", "32", "--num_places", "1", "--max_new_tokens", "4")


def test_the_command_passes_the_shipped_pair_with_tables_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = succeed("audit", "--ckpt", CHECKPOINT, "--temperatures", "0", "1", *FEW)
    assert shown.err == "" and max(map(len, shown.out.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert lines[0] == "ModelDrafter, ExactMatch"
    assert lines[1] == "greedy identity same 3 of 3 outputs equal standard decoding's"
    assert lines[lines.index("ModelDrafter, RejectionSampling") + 2].startswith("T=1 round exact error")
    assert "total variation" in " ".join(lines) and "passed: nothing in 7 checks tells the output from the" in shown.out
    assert "samples of 32 decodes, rounds at 1 place," in " ".join(lines)


def test_lossy_rules_alone_are_not_said_to_have_passed() -> None:
    shown = succeed("audit", "--ckpt", CHECKPOINT, *FEW, "--temperatures", "0", "--rules", "TypicalAcceptance")
    assert "nothing here should be lossless" in shown.out and "passed" not in shown.out


def test_the_document_holds_every_finding_and_one_that_is_biased_makes_the_exit_code_1() -> None:
    brief = (*FEW, "--rules", "RejectionSampling", "--output", "json")
    with mock.patch.dict(cli_audit.RULES, RejectionSampling=audit_mutants.FirstAlwaysKept):
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
    assert (
        outcome.code == 1
        and outcome.err == "error: ModelDrafter, RejectionSampling, T=1: error: RuntimeError: no room\n"
    )
    assert "same" in outcome.out and "alike" in outcome.out and "ERROR" in outcome.out
    assert "FAILED: 1 of 3 checks could not be made" in outcome.out and "say that" not in outcome.out


def test_what_an_interrupted_audit_has_found_is_shown() -> None:
    with mock.patch.object(auditor_module, "perplexity", side_effect=KeyboardInterrupt):
        outcome = call("audit", "--ckpt", CHECKPOINT, *FEW, "--temperatures", "1")
    assert outcome.code == 130 and "interrupted: what is above was settled by then" in outcome.err
    assert "ModelDrafter, RejectionSampling" in outcome.out and "alike" in outcome.out
    assert "so far: nothing in" in outcome.out and "passed" not in outcome.out


def test_a_bug_is_told_before_a_tie() -> None:
    ends = Divergence(1, 2, None, None, None, None, "bug")
    tie, bug = (Divergence(0, 4, (7, 9), 0.5, margin, 0.01, word) for margin, word in ((0.001, "tie"), (0.5, "bug")))

    def told(*found: Divergence) -> str:
        figures = {"num_prompts": 3, "num_equal": 3 - len(found), "divergences": [each.to_dict() for each in found]}
        return cli_audit.told(Finding(AuditCase("a", "b", "c"), "identity", "bug", figures=figures))

    assert told() == "3 of 3 outputs equal standard decoding's"
    assert told(tie).endswith("; token 5 of prompt 1 is 9, not 7: 0.001 apart, rounding moves 0.01")
    assert "0.5 apart" in told(tie, bug) and told(tie, ends).endswith("; token 3 of prompt 2: one output ends there")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--rules", "Nonsense"), "invalid choice: 'Nonsense'"),
        (("--rule", "ExactMatch"), "audit takes several: give --rules"),
        (("--temperatures", "-1"), "temperature must be in [0, inf), got -1"),
        (("--temperatures", "1", "--top_p", "2"), "top_p must be in (0, 1], got 2"),
        (("--num_decodes", "0"), "num_decodes must be from 1"),
        (("--num_places", "0"), "num_places must be from 1"),
        (("--num_draft_tokens", "0"), "num_draft_tokens must be from 1"),
        (("--max_new_tokens", "0"), "max_new_tokens must be from 1"),
        (("--seed", "-1"), "seed must be"),
        (("--exit_layers", "2"), "exit layers are of early exits"),
        (("--raw", "--chat_template"), "exclude each other"),
        (("--prompt", "1 2 x"), "'x' is no token"),
        (("--prompt", "1 99"), "holds 99"),
        (("--prompts_file", "absent.txt"), "absent.txt: No such file"),
        (("--draft", "a", "--drafts", "b"), "exclude each other"),
        (("--drafts", "absent", "other"), "there is no draft 'absent' to choose"),
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
        (("--target", "./absent", "--drafts", "small"), "./absent"),
    ],
)
def test_models_that_are_not_there_are_told_in_a_line(models: tuple[str, ...], told: str) -> None:
    refused("audit", *models, told=told)


@pytest.mark.parametrize("path", sorted(Path(CHECKPOINT).parent.glob("*.ckpt")), ids=lambda path: path.name)
def test_every_shipped_checkpoint_passes(path: Path) -> None:
    """With few decodes; benchmarks/audits.py audits them in full."""
    brief = ("--num_prompts", "1", "--temperatures", "0", "1", "--rules", "ExactMatch", "RejectionSampling")
    document = call("audit", "--ckpt", str(path), *FEW, *brief, "--output", "json").json
    certain = [each for each in document["findings"] if each["check"] != "samples"]  # what no chance can fail
    assert {("identity", "greedy"), ("round", "T=1")} <= {(each["check"], each["sampling"]) for each in certain}
    assert {each["verdict"] for each in certain} <= {"same", "exact"} and not document["interrupted"]
