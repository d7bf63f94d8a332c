"""Laws of `decode`: outputs of both methods, the fate of each draft token, one table or JSON."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make
from cli_fixtures import QUICK, call, ckpt, shipped_run, succeed
from report_records import cells_of, faster, standard

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.audit.agreement import OutputAgreement, compare_outputs
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
    assert outcome.err == ""
    assert outcome.out.count("\n") == 1
    document = outcome.json
    prompts = [prompt["prompt"] for prompt in document["prompts"]]
    assert prompts == checkpoint.load(ckpt).prompts

    for prompt in document["prompts"]:
        assert prompt["standard"]["tokens"] == prompt["speculative"]["tokens"]
        assert len(prompt["speculative"]["tokens"]) == 7
        assert prompt["standard"]["counts"] is None
        counts = prompt["speculative"]["counts"]
        assert counts["num_accepted"] <= counts["num_tested"] <= counts["num_proposed"]

    summary = document["summary"]
    for side in ("standard", "speculative"):
        assert len(summary[side]["runs"]["seconds"]) == 2
    for rate in (
        "walltime_speedup",
        "latency_reduction",
        "acceptance_rate",
        "draft_utilization",
        "block_efficiency",
    ):
        assert isinstance(summary[rate], float), rate

    manifest = document["manifest"]
    assert {"device", "threads", "torch", "commit", "checkpoint_sha256"} <= manifest.keys()
    assert manifest["options"]["num_draft_tokens"] == 3


def marked_output(rounds: list[dict[str, Any]]) -> str:
    """A prompt's tokens, with the accepted draft tokens in brackets."""
    words: list[str] = []
    for round_ in rounds:
        accepted_tokens = round_["drafted"][: round_["num_accepted"]]
        if accepted_tokens:
            words.append(f"[{' '.join(map(str, accepted_tokens))}]")
        if round_["next_token"] is not None:
            words.append(str(round_["next_token"]))

    # Neighboring blocks are printed as one.
    return " ".join(words).replace("] [", " ")


def test_the_answer_comes_first_then_clean_outputs_then_the_fates_then_the_table(
    ckpt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_shown = 2
    monkeypatch.setattr("lightning_specdec.cli.decode.FEW_PROMPTS", num_shown)
    command = ("decode", ckpt, *QUICK, "--num_draft_tokens", "4")
    text = succeed(*command).out
    verbose_text = succeed(*command, "-v").out
    quiet_text = succeed(*command, "-q").out
    document = succeed(*command, "--output", "json").json
    output_lines = []
    for prompt in document["prompts"]:
        output_lines.append(" ".join(map(str, prompt["speculative"]["tokens"])))
    assert quiet_text == "".join(f"{line}\n" for line in output_lines)
    assert "\x1b" not in text

    # The first line is the answer, and its figures agree with each other.
    decided = r"(?:faster|slower): \d+\.\d\dx \[[\d.]+, [\d.]+\]"
    unsure = r"too (?:few runs|noisy) to tell: \d+\.\d\dx(?: \[[\d.]+, [\d.]+\])?"
    speeds = r" \(([\d.,]+) -> ([\d.,]+) tokens/s\), output identical"
    answer = re.fullmatch(f"(?:{decided}|{unsure})" + speeds, text.splitlines()[0])
    assert answer
    standard_speed = float(answer[1].replace(",", ""))
    speculative_speed = float(answer[2].replace(",", ""))
    (speedup,) = re.findall(r"\d+\.\d\d(?=x)", answer[0])
    assert speculative_speed / standard_speed == pytest.approx(float(speedup), abs=0.006)

    # Then each prompt with its output, and, only with -v, the output with its marks.
    for prompt in document["prompts"]:
        index = prompt["index"]
        prompt_tokens = " ".join(map(str, prompt["prompt"]))
        new_tokens = " ".join(map(str, prompt["speculative"]["tokens"]))
        entry = f"prompt {index}: {prompt_tokens}\n    {new_tokens}\n"
        assert (entry in text) == (index < num_shown)
        assert entry in verbose_text
        marked = marked_output(prompt["speculative"]["rounds"])
        assert f"{entry}  marked\n    {marked}\n" in verbose_text
    assert "  marks: [draft token kept], the target's own\n" in text
    assert "\n1 more prompt: -v" in text

    # Then the table.
    assert re.search(r"\n +ModelDrafter,\n +standard +window 4\nseconds ", text)
    assert "time by phase" not in text
    assert "time by phase" in verbose_text


def test_on_a_terminal_lines_are_no_wider_and_rejected_tokens_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = []
    tokens = []
    expected_words = []
    for i in range(20):
        # One of three draft tokens is accepted. The display shows the first rejected one.
        rounds.append(Round([100 + i, 200, 300], 1, 400))
        tokens += [100 + i, 400]
        expected_words += [str(100 + i), "200", "400"]
    row = RowResult(0, [1], tokens, "length", 20, [0.1] * 40, rounds=rounds)
    result = DecodeResult([row], 1.0, {}, 20, 20, rule="ExactMatch")

    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((40, 24)))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    text = decode.outputs(None, None, result, [None], color=True)
    plain, marked = text.split("  marked\n")
    visible_lines = re.sub(r"\x1b\[[\d;]*m", "", marked).splitlines()
    # The last line explains the marks.
    marked_lines = visible_lines[:-1]
    for line in (*plain.splitlines(), *marked_lines):
        assert len(line) <= 40
    assert " ".join(marked_lines).split() == expected_words


def test_where_the_methods_stopped_for_other_reasons_both_are_named() -> None:
    standard_row = RowResult(0, [1], [2, 3], "length", 2, [])
    speculative_row = RowResult(0, [1], [2, 4], "eos", 2, [])
    standard_result = DecodeResult([standard_row], 1.0, {}, 2, 2)
    speculative_result = DecodeResult([speculative_row], 1.0, {}, 2, 2)
    text = decode.outputs(None, standard_result, speculative_result, [None])
    entry = "prompt 0: 1\n    2 4\n  standard\n    2 3\n  (stopped: eos, standard: length)\n"
    assert entry in text


@pytest.mark.parametrize(
    ("speedups", "verdict"),
    [
        ([[1.5, 1.6], [1.6, 1.5]], "faster: 1.55x ["),
        ([[0.5, 0.6], [0.6, 0.5]], "slower: 0.55x ["),
        ([[0.8, 1.6], [1.5, 0.9]], "too noisy to tell: 1.10x ["),
        ([[0.2, 9.0], [9.0, 0.1]], "too noisy to tell: 0.26x ("),
        ([[1.5]], "too few runs to tell: 1.50x ("),
    ],
)
def test_a_gain_is_claimed_only_where_its_interval_lies_above_one(
    speedups: list[list[float]], verdict: str
) -> None:
    rows = []
    for repeat, prompt_speedups in enumerate(speedups):
        rows.append(standard(len(prompt_speedups), repeat=repeat))
    for repeat, prompt_speedups in enumerate(speedups):
        rows.append(faster(prompt_speedups, repeat=repeat))
    comparison = cells_of(rows)[1]
    assert decode.describe_speed(comparison).startswith(verdict)


REJECTION_SAMPLING = "--rule RejectionSampling --temperature 0.7 --top_k 9 --top_p 0.9 --min_p 0.01"
EPSILON_THRESHOLD = "--rule EpsilonThreshold --rule.epsilon=0.2"
TYPICAL_ACCEPTANCE = "--rule TypicalAcceptance --rule.epsilon 0.05 --rule.delta 0.2 --temperature 1"


@pytest.mark.parametrize("options", [REJECTION_SAMPLING, EPSILON_THRESHOLD, TYPICAL_ACCEPTANCE])
def test_a_lossy_rule_says_so_and_how_many_tokens_differ(ckpt: str, options: str) -> None:
    rule = options.split()[1]
    command = ("decode", ckpt, *QUICK, "--num-draft-tokens", "5", *options.split())
    answer = succeed(*command).out.splitlines()[0]
    document = succeed(*command, "--output", "json").json
    num_tokens = 0
    num_differing = 0
    for prompt in document["prompts"]:
        standard_tokens = prompt["standard"]["tokens"]
        speculative_tokens = prompt["speculative"]["tokens"]
        num_tokens += len(standard_tokens)
        for expected, token in zip(standard_tokens, speculative_tokens, strict=True):
            num_differing += int(token != expected)

    assert document["summary"]["lossless"] == RULES[rule].lossless
    if not RULES[rule].lossless:
        assert f"LOSSY: {num_differing} of {num_tokens} new tokens differ" in answer
        assert f"{rule} kept {document['summary']['num_changed']} draft token" in answer
    elif num_differing > 0:
        assert "as two draws of the same distribution do" in answer
    else:
        assert "output identical" in answer


def result(*token_rows: list[int], rule: str | None = None) -> DecodeResult:
    """A result of one-token prompts with these new tokens."""
    rows = []
    for index, tokens in enumerate(token_rows):
        rows.append(RowResult(index, [1], tokens, "length", 2, [0.1] * len(tokens)))
    return DecodeResult(rows, 1.0, {}, 2, 0, rule=rule)


def test_without_repeats_only_the_prompts_that_fit_into_the_time_are_measured(
    ckpt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ("--prompt", "1 2 3", "--prompt", "2 4 6", "--prompt", "3 6 9")
    monkeypatch.setattr(decode, "MAX_MEASURE_SECONDS", 0.0)

    shown = succeed("decode", ckpt, *prompts)
    assert "the first 1 of 3 prompts, batch size 1" in shown.out
    document = succeed("decode", ckpt, *prompts, "--batch_size", "2", "--output", "json").json
    assert document["num_measured_prompts"] == 2
    assert document["summary"]["standard"]["num_new_tokens"] == 2 * decode.FEW_TOKENS
    assert len(document["prompts"]) == 3

    # Who asks for repeats gets them, of all prompts.
    document = succeed("decode", ckpt, *prompts, "--repeats", "1", "--output", "json").json
    assert document["num_measured_prompts"] == 3


def test_ctrl_c_keeps_the_batches_that_are_over_and_the_current_one(
    ckpt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted_decode(self: Any, batch: Any, config: Any, *, indices: range) -> DecodeResult:
        index = indices[0]
        row = RowResult(index, batch[0], [8 + index], "length", 1, [0.1])
        batch_result = DecodeResult([row], 1.0, {}, 1, 0, rule="ExactMatch")
        if index == 1:
            raise DecodeInterrupted(batch_result)
        return batch_result

    monkeypatch.setattr(SpeculativeDecoder, "decode", interrupted_decode)
    outcome = call("decode", ckpt, "--output", "json")
    assert outcome.code == 130
    assert outcome.json["summary"] == {}
    finished_prompt, interrupted_prompt, missing_prompt = outcome.json["prompts"]
    assert finished_prompt["speculative"]["tokens"] == [8]
    assert interrupted_prompt["speculative"]["tokens"] == [9]
    assert missing_prompt.get("speculative", {}).get("tokens") is None
    for prompt in outcome.json["prompts"]:
        assert "standard" in prompt


def test_where_outputs_differ_a_near_tie_is_distinguished_from_a_fault(
    ckpt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = SpeculativeDecoder.from_checkpoint(ckpt)
    standard_result = result([1, 2, 3], [5, 6])

    def agreement(*tokens: int, rule: str = "ExactMatch", **config: Any) -> OutputAgreement:
        speculative_result = result([1, 2, 3], [*tokens], rule=rule)
        return compare_outputs(
            decoder, standard_result, speculative_result, DecodingConfig(**config)
        )

    assert agreement(5, 6).text == "output identical"
    where = "first at token 2 of prompt 1"
    fault = "NOT a near-tie in float32: `lightning_specdec audit` looks closer"
    assert agreement(5, 7).text == f"output differs in 1 of 2 prompts, {where} ({fault})"

    tie = Divergence(1, 1, (6, 7), 0.0, 0.0, 0.1, "tie")
    monkeypatch.setattr(
        "lightning_specdec.audit.agreement.find_divergence", lambda *arguments, **options: tie
    )
    assert agreement(5, 7).text.endswith(f"{where} (near-tie in float32)")
    single = compare_outputs(
        decoder, result([5, 6]), result([5, 7], rule="ExactMatch"), DecodingConfig()
    )
    assert single.kind == "near-tie"
    assert single.text == "output differs at token 2 (near-tie in float32)"
    assert "two draws" in agreement(5, 7, rule="RejectionSampling", temperature=1.0).text


@pytest.mark.parametrize("mode", ["standard", "speculative"])
def test_one_mode_runs_that_method_alone(ckpt: str, mode: str) -> None:
    command = ("decode", "--ckpt", ckpt, *QUICK, "--mode", mode)
    document = succeed(*command, "--output", "json").json
    skipped_mode = "speculative" if mode == "standard" else "standard"
    assert document["summary"][skipped_mode] is None
    assert document["summary"]["walltime_speedup"] is None
    for prompt in document["prompts"]:
        assert mode in prompt
        assert skipped_mode not in prompt
    assert "identical" not in succeed(*command).out


def test_eos_logprobs_threads_and_dtype_do_what_they_say(ckpt: str) -> None:
    command = ["decode", "--ckpt", ckpt, *QUICK, "--prompt", "1 2 3"]
    command += ["--eos", "5", "--eos", "49", "--logprobs"]
    document = succeed(*command, "--threads", "1", "--dtype", "float64", "--output", "json").json
    assert document["manifest"]["threads"] == 1
    (prompt,) = document["prompts"]
    for side in ("standard", "speculative"):
        assert prompt[side]["tokens"] == [4, 5]
        assert prompt[side]["stop_reason"] == "eos"
        assert len(prompt[side]["logprobs"]) == 2
        assert max(prompt[side]["logprobs"]) <= 0

    text = succeed(*command, "--dtype", "bfloat16").out
    order = re.search(r"\n  logprobs\n.*\n  \(stopped: eos\)\n  marks: ", text)
    assert order, "the marks are explained after all output of a prompt"


def test_the_seed_decides_what_is_sampled(ckpt: str) -> None:
    command = ["decode", ckpt, "--repeats", "0", "--temperature", "1", "--max_new_tokens", "12"]
    sampled = succeed(*command, "--seed", "3").out
    assert succeed(*command, "--seed", "3").out == sampled
    assert succeed(*command, "--seed", "4").out != sampled


def test_a_prompt_whose_logits_are_not_finite_fails(tmp_path: Path) -> None:
    decoder = SpeculativeDecoder(make(RNN, 1, embedding_size=8, hidden_size=16), NGramDrafter())
    with torch.no_grad():
        for parameter in decoder.target.parameters():
            parameter.fill_(1e38)
    path = tmp_path / "broken.safetensors"
    decoder.save(path)

    prompts = ("--prompt", "1 2 3", "--prompt", "4")
    outcome = call("decode", str(path), *prompts, "--output", "json")
    assert outcome.code == 1
    assert "failed: " in outcome.err
    assert "prompt 0, 1" in outcome.err
    assert outcome.json["summary"] == {}
    assert len(outcome.json["prompts"]) == 2
