"""Laws of `decode`: both outputs, the fate of each draft token, one table or one JSON document."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make
from cli_fixtures import QUICK, call, ckpt, shipped_run, succeed
from report_rows import cells_of, faster, standard

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.audit.agreement import compare_outputs
from lightning_specdec.audit.identity import Divergence
from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.cli import decode
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding import DecodeInterrupted, DecodeResult, RowResult
from lightning_specdec.decoding.results import Round
from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.models import RNN
from lightning_specdec.rules import RULES

__all__ = ["ckpt", "shipped_run"]


def test_without_a_prompt_the_stored_prompts_get_seven_tokens_with_both_methods(ckpt: str) -> None:
    outcome = succeed("decode", "--ckpt", ckpt, "--repeats", "2", "--output", "json")
    document, summary, manifest = outcome.json, outcome.json["summary"], outcome.json["manifest"]
    assert outcome.err == "" and outcome.out.count("\n") == 1
    assert [each["prompt"] for each in document["prompts"]] == checkpoint.load(ckpt).prompts
    for each in document["prompts"]:
        assert each["standard"]["tokens"] == each["speculative"]["tokens"]
        assert len(each["speculative"]["tokens"]) == 7 and each["standard"]["counts"] is None
        counts = each["speculative"]["counts"]
        assert counts["num_accepted"] <= counts["num_tested"] <= counts["num_proposed"]
    rates = (
        "walltime_speedup",
        "latency_reduction",
        "acceptance_rate",
        "draft_utilization",
        "block_efficiency",
    )
    assert all(isinstance(summary[name], float) for name in rates)
    assert all(len(summary[side]["runs"]["seconds"]) == 2 for side in ("standard", "speculative"))
    assert {"device", "threads", "torch", "commit", "checkpoint_sha256"} <= manifest.keys()
    assert manifest["options"]["num_draft_tokens"] == 3


def test_the_answer_comes_first_then_clean_outputs_then_the_fates_then_the_table(
    ckpt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_specdec.cli.decode.FEW_PROMPTS", few := 2)
    options = ("decode", ckpt, *QUICK, "--num_draft_tokens", "4")
    printed, verbose = succeed(*options).out, succeed(*options, "-v").out
    document, quiet = succeed(*options, "--output", "json").json, succeed(*options, "-q").out
    assert quiet.count("\n") == 1 and quiet.endswith(", output identical\n")
    decided = r"(?:faster|slower): \d+\.\d\dx \[[\d.]+, [\d.]+\]"
    unsure = r"too (?:few runs|noisy) to tell: \d+\.\d\dx(?: \[[\d.]+, [\d.]+\])?"
    speeds = r" \(([\d.,]+) -> ([\d.,]+) tokens/s\), output identical"
    first = re.fullmatch(f"(?:{decided}|{unsure})" + speeds, printed.splitlines()[0])
    assert "\x1b" not in printed and first
    before, after = (float(each.replace(",", "")) for each in first.groups())
    (ratio,) = re.findall(r"\d+\.\d\d(?=x)", printed.splitlines()[0])
    assert after / before == pytest.approx(float(ratio), abs=0.006)
    for each in document["prompts"]:
        words: list[str] = []
        for turn in each["speculative"]["rounds"]:
            kept, next_token = turn["drafted"][: turn["num_accepted"]], turn["next_token"]
            words += [f"[{' '.join(map(str, kept))}]"] if kept else []
            words += [] if next_token is None else [str(next_token)]
        clean, marked = " ".join(map(str, each["speculative"]["tokens"])), " ".join(words)
        entry = f"prompt {each['index']}: {' '.join(map(str, each['prompt']))}\n    {clean}\n"
        assert (entry in printed) == (each["index"] < few) and entry in verbose
        assert f"{entry}  marked\n    {marked.replace('] [', ' ')}\n" in verbose
    assert (
        "  marks: [draft token kept], the target's own\n" in printed
        and "time by phase" not in printed
    )
    assert re.search(r"\n +ModelDrafter,\n +standard +window 4\nseconds ", printed)
    assert "\n1 more prompt: -v" in printed and "time by phase" in verbose


def test_on_a_terminal_lines_are_no_wider_and_rejected_tokens_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = [Round([100 + i, 200, 300], 1, 400) for i in range(20)]
    row = RowResult(
        0,
        [1],
        [each for i in range(20) for each in (100 + i, 400)],
        "length",
        20,
        [0.1] * 40,
        rounds=rounds,
    )
    outcome = DecodeResult([row], 1.0, {}, 20, 20, rule="ExactMatch")
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((40, 24)))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    plain, marked = decode.outputs(None, None, outcome, [None], color=True).split("  marked\n")
    seen = re.sub(r"\x1b\[[\d;]*m", "", marked).splitlines()[:-1]
    assert all(len(line) <= 40 for line in (*plain.splitlines(), *seen))
    assert " ".join(" ".join(seen).split()) == " ".join(f"{100 + i} 200 400" for i in range(20))


def test_where_the_methods_stopped_for_other_reasons_both_are_named() -> None:
    rows = [RowResult(0, [1], [2, 3], "length", 2, []), RowResult(0, [1], [2, 4], "eos", 2, [])]
    plain, drafted = (DecodeResult([each], 1.0, {}, 2, 2) for each in rows)
    told = "prompt 0: 1\n    2 4\n  standard\n    2 3\n  (stopped: eos, standard: length)\n"
    assert told in decode.outputs(None, plain, drafted, [None])


@pytest.mark.parametrize(
    ("speedups", "told"),
    [
        ([[1.5, 1.6], [1.6, 1.5]], "faster: 1.55x ["),
        ([[0.5, 0.6], [0.6, 0.5]], "slower: 0.55x ["),
        ([[0.8, 1.6], [1.5, 0.9]], "too noisy to tell: 1.10x ["),
        ([[0.2, 9.0], [9.0, 0.1]], "too noisy to tell: 0.26x ("),
        ([[1.5]], "too few runs to tell: 1.50x ("),
    ],
)
def test_a_gain_is_claimed_only_where_its_interval_lies_above_one(
    speedups: list[list[float]], told: str
) -> None:
    rows = [standard(len(each), repeat=i) for i, each in enumerate(speedups)]
    rows += [faster(each, repeat=i) for i, each in enumerate(speedups)]
    assert decode.describe_speed(cells_of(rows)[1]).startswith(told)


@pytest.mark.parametrize(
    "options",
    [
        [
            "--rule",
            "RejectionSampling",
            "--temperature",
            "0.7",
            "--top_k",
            "9",
            "--top_p",
            "0.9",
            "--min_p",
            "0.01",
        ],
        ["--rule", "EpsilonThreshold", "--rule.epsilon=0.2"],
        [
            "--rule",
            "TypicalAcceptance",
            "--rule.epsilon",
            "0.05",
            "--rule.delta",
            "0.2",
            "--temperature",
            "1",
        ],
    ],
    ids=" ".join,
)
def test_a_lossy_rule_says_so_and_how_many_tokens_differ(ckpt: str, options: list[str]) -> None:
    given = ("decode", ckpt, *QUICK, "--num-draft-tokens", "5", *options)
    first, document = succeed(*given).out.splitlines()[0], succeed(*given, "--output", "json").json
    pairs = [
        (each["standard"]["tokens"], each["speculative"]["tokens"]) for each in document["prompts"]
    ]
    differing = sum(a != b for pair in pairs for a, b in zip(*pair, strict=True))
    assert document["summary"]["lossless"] == RULES[options[1]].lossless
    if RULES[options[1]].lossless:
        assert (
            "output identical" if not differing else "as two draws of the same distribution do"
        ) in first
    else:
        assert (
            f"LOSSY: {differing} of {sum(len(standard) for standard, _ in pairs)} new tokens differ"
            in first
        )
        assert f"{options[1]} kept {document['summary']['num_changed']} draft token" in first


def result(*rows: list[int], rule: str | None = None, **fields: Any) -> DecodeResult:
    """An outcome of one-token prompts with these new tokens."""
    found = [RowResult(i, [1], row, "length", 2, [0.1] * len(row)) for i, row in enumerate(rows)]
    return DecodeResult(found, 1.0, {}, 2, 0, rule=rule, **fields)


def test_ctrl_c_keeps_the_batches_that_are_over_and_the_current_one(
    ckpt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(self: Any, batch: Any, config: Any, *, indices: range) -> DecodeResult:
        row = RowResult(indices[0], batch[0], [8 + indices[0]], "length", 1, [0.1])
        found = DecodeResult([row], 1.0, {}, 1, 0, rule="ExactMatch")
        if indices[0] == 1:
            raise DecodeInterrupted(found)
        return found

    monkeypatch.setattr(SpeculativeDecoder, "decode", decode)
    outcome = call("decode", ckpt, "--output", "json")
    assert outcome.code == 130 and outcome.json["summary"] == {}
    tokens = [each.get("speculative", {}).get("tokens") for each in outcome.json["prompts"]]
    assert tokens == [[8], [9], None] and all(
        "standard" in each for each in outcome.json["prompts"]
    )


def test_where_outputs_differ_a_near_tie_is_told_from_a_fault(
    ckpt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*tokens: int, rule: str = "ExactMatch", **config: Any) -> str:
        other = result([1, 2, 3], [*tokens], rule=rule)
        decoder = SpeculativeDecoder.from_checkpoint(ckpt)
        standard = result([1, 2, 3], [5, 6])
        return compare_outputs(decoder, standard, other, DecodingConfig(**config)).text

    assert told(5, 6) == "output identical"
    fault = "NOT a near-tie in float32: `lightning_specdec audit` looks closer"
    assert told(5, 7) == f"output differs in 1 of 2 prompts, first at token 2 of prompt 1 ({fault})"
    tie = Divergence(1, 1, (6, 7), 0.0, 0.0, 0.1, "tie")
    monkeypatch.setattr(
        "lightning_specdec.audit.agreement.find_divergence", lambda *given, **options: tie
    )
    assert told(5, 7).endswith("first at token 2 of prompt 1 (near-tie in float32)")
    one, other = result([5, 6]), result([5, 7], rule="ExactMatch")
    decoder = SpeculativeDecoder.from_checkpoint(ckpt)
    found = compare_outputs(decoder, one, other, DecodingConfig())
    assert found.kind == "near-tie"
    assert found.text == "output differs at token 2 (near-tie in float32)"
    assert "two draws" in told(5, 7, rule="RejectionSampling", temperature=1.0)


@pytest.mark.parametrize("mode", ["standard", "speculative"])
def test_one_mode_runs_that_method_alone(ckpt: str, mode: str) -> None:
    document = succeed("decode", "--ckpt", ckpt, *QUICK, "--mode", mode, "--output", "json").json
    other = {"standard": "speculative", "speculative": "standard"}[mode]
    assert document["summary"][other] is None and document["summary"]["walltime_speedup"] is None
    assert all(mode in each and other not in each for each in document["prompts"])
    assert "identical" not in succeed("decode", "--ckpt", ckpt, *QUICK, "--mode", mode).out


def test_eos_logprobs_threads_seed_and_dtype_do_what_they_say(ckpt: str) -> None:
    options = (
        "decode",
        "--ckpt",
        ckpt,
        *QUICK,
        "--prompt",
        "1 2 3",
        "--eos",
        "5",
        "--eos",
        "49",
        "--logprobs",
    )
    document = succeed(*options, "--threads", "1", "--dtype", "float64", "--output", "json").json
    (row,) = document["prompts"]
    for side in ("standard", "speculative"):
        assert row[side]["tokens"] == [4, 5] and row[side]["stop_reason"] == "eos"
        assert len(row[side]["logprobs"]) == 2 and all(
            value <= 0 for value in row[side]["logprobs"]
        )
    assert document["manifest"]["threads"] == 1
    printed = succeed(*options, "--dtype", "bfloat16").out
    assert re.search(r"\n  logprobs\n.*\n  \(stopped: eos\)\n  marks: ", printed), (
        "behind all of a prompt's output"
    )
    drawn = (
        "decode",
        ckpt,
        "--repeats",
        "0",
        "--temperature",
        "1",
        "--max_new_tokens",
        "12",
        "--seed",
    )
    assert succeed(*drawn, "3").out == succeed(*drawn, "3").out != succeed(*drawn, "4").out


def test_a_prompt_whose_logits_are_not_finite_fails(tmp_path: Path) -> None:
    decoder = SpeculativeDecoder(make(RNN, 1, embedding_size=8, hidden_size=16), NGramDrafter())
    with torch.no_grad():
        for parameter in decoder.target.parameters():
            parameter.fill_(1e38)
    decoder.save(tmp_path / "broken.safetensors")
    prompts = ("--prompt", "1 2 3", "--prompt", "4")
    outcome = call("decode", str(tmp_path / "broken.safetensors"), *prompts, "--output", "json")
    assert outcome.code == 1 and "failed: " in outcome.err and "prompt 0, 1" in outcome.err
    assert outcome.json["summary"] == {} and len(outcome.json["prompts"]) == 2
