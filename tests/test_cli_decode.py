"""Laws of `decode`: both outputs, the fate of each guess, one table or one JSON document."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cases import make
from cli_fixtures import call, ckpt, shipped_run, succeed

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.audit.identity import Divergence
from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.cli import decode as cli_decode
from lightning_specdec.cli import shown
from lightning_specdec.cli.main import make_parser
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding import Counts, DecodeInterrupted, DecodeResult, Round, RowResult
from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.models import RNN
from lightning_specdec.rules import RULES

__all__ = ["ckpt", "shipped_run"]
QUICK = ("--repeats", "1")


def test_without_a_prompt_the_stored_prompts_get_seven_tokens_both_ways(ckpt: str) -> None:
    document = succeed("decode", "--ckpt", ckpt, *QUICK, "--output", "json").json
    assert [each["prompt"] for each in document["prompts"]] == checkpoint.load(ckpt).prompts
    for each in document["prompts"]:
        assert each["standard"]["tokens"] == each["speculative"]["tokens"]
        assert len(each["speculative"]["tokens"]) == 7
        assert each["standard"]["counts"] is None
        counts = each["speculative"]["counts"]
        assert counts["num_accepted"] <= counts["num_tested"] <= counts["num_proposed"]


def test_the_json_document_holds_the_tables_rows_under_their_names(ckpt: str) -> None:
    outcome = succeed("decode", "--ckpt", ckpt, "--repeats", "2", "--output", "json")
    summary, manifest = outcome.json["summary"], outcome.json["manifest"]
    assert outcome.err == "" and outcome.out.count("\n") == 1
    rates = {"walltime_speedup", "latency_reduction", "acceptance_rate", "draft_utilization", "block_efficiency"}
    assert all(isinstance(summary[name], float) for name in rates | {"predicted_speedup"})
    for side in ("standard", "speculative"):
        phases = {f"{phase}_seconds" for phase in ("draft", "verify", "accept", "rest")}
        assert {"seconds", "tokens_per_second", "time_to_first_token", "num_target_calls", *phases} <= summary[
            side
        ].keys()
        assert len(summary[side]["runs"]["seconds"]) == 2
    assert {"device", "threads", "torch", "commit", "checkpoint_sha256", "options"} <= manifest.keys()
    assert manifest["options"]["num_draft_tokens"] == 3


def test_the_answer_comes_first_then_clean_outputs_then_the_fates_then_the_table(ckpt: str) -> None:
    options = ("decode", ckpt, *QUICK, "--num_draft_tokens", "4")
    printed, document = succeed(*options).out, succeed(*options, "--output", "json").json
    first = r"(\d+\.\d\dx faster|not faster: \d\.\d\dx) \([\d.,]+ -> [\d.,]+ tokens/s\), output identical"
    assert "\x1b" not in printed and re.fullmatch(first, printed.splitlines()[0])
    for each in document["prompts"]:
        words: list[str] = []
        for turn in each["speculative"]["rounds"]:
            kept, next_token = turn["drafted"][: turn["num_accepted"]], turn["next_token"]
            words += [f"[{' '.join(map(str, kept))}]"] if kept else []
            words += [f"-{token}-" for token in turn["drafted"][turn["num_accepted"] :][:1] if next_token is not None]
            words += [] if next_token is None else [str(next_token)]
        clean, marked = " ".join(map(str, each["speculative"]["tokens"])), " ".join(words)
        assert f"\n    {clean}\n  by round\n    {marked.replace('] [', ' ')}\n" in printed
        assert f"prompt {each['index']}: {' '.join(map(str, each['prompt']))}\n" in printed
    table = printed[printed.index("standard  speculative") :]
    assert "[draft token kept], -rejected-, the target's own" in printed and "verify" not in table
    assert all(f"\n{row} " in table for row in ("seconds", "tokens/s", "target calls", "block efficiency"))
    assert "verify, seconds" in succeed(*options, "-v").out


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_gets_colours_unless_it_asks_for_none(
    ckpt: str, monkeypatch: pytest.MonkeyPatch, no_color: str
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    leader, follower = os.openpty()
    received = bytearray()

    def read() -> None:
        while b"commit" not in received:
            received.extend(os.read(leader, 65536))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert cli_decode.run(make_parser("decode").read([ckpt, *QUICK])) == 0
        terminal.flush()
        reader.join(timeout=10)
        monkeypatch.undo()
    os.close(leader)
    assert (
        (b"\x1b[32m" in received) == (no_color == "")
        and b"draft token kept" in received
        and (b"[draft" in received) == (no_color == "1")
    )


@pytest.mark.parametrize(
    "options",
    [
        ["--rule", "ExactMatch", "--temperature", "1"],
        ["--rule", "RejectionSampling", "--temperature", "0.7", "--top_k", "9", "--top_p", "0.9", "--min_p", "0.01"],
        ["--rule", "EpsilonThreshold", "--rule.epsilon", "0.9", "--temperature", "1"],
        ["--rule", "EpsilonThreshold", "--rule.epsilon=0.2"],
        ["--rule", "TypicalAcceptance", "--rule.epsilon", "0.05", "--rule.delta", "0.2", "--temperature", "1"],
        ["--rule", "TypicalAcceptance", "--batch_size", "3", "--max-new-tokens", "9"],
    ],
    ids=" ".join,
)
def test_a_lossy_rule_says_so_and_how_many_tokens_differ(ckpt: str, options: list[str]) -> None:
    outcome = succeed("decode", "--ckpt", ckpt, *QUICK, "--num-draft-tokens", "5", *options)
    document = succeed("decode", "--ckpt", ckpt, *QUICK, "--num-draft-tokens", "5", *options, "--output", "json").json
    rule = RULES[options[1]]
    pairs = [(each["standard"]["tokens"], each["speculative"]["tokens"]) for each in document["prompts"]]
    differing = sum(a != b for pair in pairs for a, b in zip(*pair, strict=True))
    assert document["summary"]["lossless"] == rule.lossless
    first = outcome.out.splitlines()[0]
    if rule.lossless:
        assert "LOSSY" not in first and document["summary"]["num_changed"] is None
        assert ("output identical" if not differing else "as two draws of the same distribution do") in first
    else:
        total = sum(len(standard) for standard, _ in pairs)
        assert f"LOSSY: {differing} of {total} new tokens differ" in first
        assert f"{options[1]} kept {document['summary']['num_changed']} draft token" in first


@pytest.mark.parametrize("size", ["1", "2", "3"])
def test_batches_hold_for_what_is_shown_and_change_no_token(
    ckpt: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[Any]] = {"decode": [], "decode_standard": []}
    for name, calls in seen.items():
        whole = getattr(SpeculativeDecoder, name)

        def watched(self: Any, *given: Any, whole: Any = whole, calls: Any = calls, **options: Any) -> Any:
            calls.append(options["indices"])
            return whole(self, *given, **options)

        monkeypatch.setattr(SpeculativeDecoder, name, watched)
    drawn = ("--repeats", "0", "--temperature", "1", "--rule", "RejectionSampling", "--seed", "2")
    document = succeed("decode", "--ckpt", ckpt, *drawn, "--batch_size", size, "--output", "json").json
    expected = {"1": [[0], [1], [2]], "2": [[0, 1], [2]], "3": [[0, 1, 2]]}[size]
    assert seen == {"decode": expected, "decode_standard": expected}
    monkeypatch.undo()
    decoder = SpeculativeDecoder.from_checkpoint(ckpt)
    whole = decoder.decode(
        decoder.prompts, max_new_tokens=7, temperature=1.0, rule=RULES["RejectionSampling"](), seed=2
    )
    assert [each["speculative"]["tokens"] for each in document["prompts"]] == whole.tokens
    assert [each["index"] for each in document["prompts"]] == [0, 1, 2]


def result(*rows: list[int], rule: str | None = None, **fields: Any) -> DecodeResult:
    """An outcome of one-token prompts with these new tokens."""
    found = [RowResult(i, [1], row, "length", 2, [0.1] * len(row)) for i, row in enumerate(rows)]
    return DecodeResult(found, 1.0, {}, 2, 0, rule=rule, **fields)


def test_ctrl_c_keeps_the_batches_that_are_over_and_the_one_in_progress(
    ckpt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(self: Any, batch: Any, config: Any, *, indices: list[int]) -> DecodeResult:
        row = RowResult(indices[0], batch[0], [8, 8], "length", 1, [0.1] * 2)
        if indices == [1]:
            raise DecodeInterrupted(DecodeResult([replace(row, tokens=[9])], 1.0, {}, 1, 0, rule="ExactMatch"))
        return DecodeResult([row], 1.0, {}, 1, 0, rule="ExactMatch")

    monkeypatch.setattr(SpeculativeDecoder, "decode", decode)
    outcome = call("decode", ckpt, "--output", "json")
    assert outcome.code == 130 and outcome.json["summary"] == {}
    tokens = [each.get("speculative", {}).get("tokens") for each in outcome.json["prompts"]]
    assert tokens == [[8, 8], [9], None] and all("standard" in each for each in outcome.json["prompts"])


@pytest.mark.parametrize(
    ("given", "seconds", "repeats", "warmup", "told"),
    [
        (None, 0.001, 10, 3, "10 repeats, about 1 s"),
        (None, 2.5, 8, 0, "8 repeats, about 20 s"),
        (None, 12.7, 2, 0, "2 repeats, about 25 s"),
        (1, 30.0, 1, 0, "1 repeat, about 30 s"),
    ],
)
def test_measuring_says_how_long_it_takes_and_takes_long_where_the_user_says_so_alone(
    given: int | None, seconds: float, repeats: int, warmup: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "lightning_specdec"):
        assert cli_decode.plan(given, seconds) == (repeats, warmup)
    assert f"measuring {told}: --repeats 0 leaves it out" in caplog.text


def agreement(ckpt: str, one: DecodeResult, other: DecodeResult, **config: Any) -> str:
    decoder = SpeculativeDecoder.from_checkpoint(ckpt)
    return shown.agreement(decoder, one, other, DecodingConfig(**config))


def test_where_outputs_part_it_is_said_whether_rounding_can_have_done_it(
    ckpt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = result([1, 2, 3], [5, 6]), result([1, 2, 3], [5, 7], rule="ExactMatch")
    assert agreement(ckpt, one, result([1, 2, 3], [5, 6], rule="ExactMatch")) == "output identical"
    told = agreement(ckpt, one, other)
    assert told.startswith("output differs in 1 of 2 prompts, first at token 2 (NOT a near-tie in float32")
    tie = Divergence(1, 1, (6, 7), 0.0, 0.0, 0.1, "tie")
    monkeypatch.setattr("lightning_specdec.audit.identity.find_divergence", lambda *given, **options: tie)
    assert agreement(ckpt, one, other).endswith("first at token 2 (near-tie in float32)")
    drawn = result([1, 2, 3], [5, 7], rule="RejectionSampling")
    assert "two draws" in agreement(ckpt, one, drawn, temperature=1.0, rule="RejectionSampling")


def test_an_adaptive_window_says_what_it_chose() -> None:
    def told(*numbers: int) -> str:
        rounds = [Round([7] * number, 0, 1) for number in numbers]
        row = RowResult(0, [1], [1] * len(numbers), "length", len(numbers), [0.1] * len(numbers), Counts(), rounds)
        found = DecodeResult([row], 1.0, {}, 2, 0, rule="ExactMatch", window={"kind": "AdaptiveWindow"})
        return shown.answer(None, None, found, {}, DecodingConfig())  # type: ignore[arg-type]

    assert told(0, 8, 1) == "3.0 draft tokens per round on average" and told(0, 0) == "nothing was drafted"


def test_a_checkpoint_decodes_with_the_window_of_its_recipe_unless_another_is_given(ckpt: str, tmp_path: Path) -> None:
    loaded = checkpoint.load(ckpt)
    path = str(tmp_path / "own.ckpt")

    def window(*options: str) -> Any:
        document = succeed("decode", "--ckpt", path, "--repeats", "0", "--output", "json", *options).json
        return document["manifest"]["options"]["num_draft_tokens"]

    for recipe, expected in (({"num_draft_tokens": 5}, 5), ({}, 3)):
        checkpoint.save(path, loaded.target, loaded.drafter, prompts=[[1, 2]], recipe=recipe)
        assert window() == expected and window("--num_draft_tokens", "2") == 2
    for foreign in (0, 2**40, "4", True, 2.0):
        checkpoint.save(path, loaded.target, loaded.drafter, prompts=[[1, 2]], recipe={"num_draft_tokens": foreign})
        outcome = call("decode", "--ckpt", path, "--repeats", "0")
        assert outcome.code == 2 and outcome.out == "" and outcome.err.count("\n") == 1
        assert "num_draft_tokens of" in outcome.err and "must be" in outcome.err


def test_no_repeats_show_the_outputs_and_no_table(ckpt: str) -> None:
    brief = succeed("decode", ckpt, "--repeats", "0").out
    assert brief.startswith("output identical\n\nprompt 0: ") and "tokens/s" not in brief
    assert succeed("decode", ckpt, "--repeats", "0", "--output", "json").json["summary"] == {}


def test_a_terminal_is_told_what_takes_its_time_unless_it_asks_for_quiet(ckpt: str) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for flags, expected in (((), ["loading", "decoding", "measuring"]), (("-q",), [])):
        told = Terminal()
        with mock.patch.object(sys, "stderr", told):
            assert cli_decode.run(make_parser("decode").read([ckpt, *QUICK, *flags])) == 0
        assert [line.split()[1] for line in told.getvalue().splitlines()] == expected


def prompts_of(*arguments: str, stdin: str = "") -> list[list[int]]:
    outcome = succeed("decode", *QUICK, "--max_new_tokens", "1", "--output", "json", *arguments, stdin=stdin)
    return [each["prompt"] for each in outcome.json["prompts"]]


def test_prompts_come_from_options_files_and_stdin(ckpt: str, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("1 2 3\n\n[4, 5]\n6,7\r\n")
    ragged = [[1, 2, 3], [4, 5], [6, 7]]
    assert prompts_of("--ckpt", ckpt, "--prompt", "1 2 3", "--prompt", "[4, 5]", "--prompt=6") == [*ragged[:2], [6]]
    assert prompts_of("--ckpt", ckpt, "--prompts_file", str(tmp_path / "lines.txt")) == ragged
    assert prompts_of("--ckpt", ckpt, "--prompt", "9", "--prompts_file", str(tmp_path / "lines.txt")) == [[9], *ragged]
    assert prompts_of("--ckpt", ckpt, "--prompt", "-", stdin="1 2 3\n4 5\n") == ragged[:2]
    assert prompts_of("--ckpt", ckpt, "--prompts_file", "-", stdin="[1, 2, 3]\n") == ragged[:1]


@pytest.mark.parametrize("mode", ["standard", "speculative"])
def test_one_mode_runs_that_way_alone(ckpt: str, mode: str) -> None:
    document = succeed("decode", "--ckpt", ckpt, *QUICK, "--mode", mode, "--output", "json").json
    other = {"standard": "speculative", "speculative": "standard"}[mode]
    assert document["summary"][other] is None and document["summary"]["walltime_speedup"] is None
    assert all(mode in each and other not in each for each in document["prompts"])
    printed = succeed("decode", "--ckpt", ckpt, *QUICK, "--mode", mode).out
    assert f"  {mode}\n" in printed and other not in printed and "identical" not in printed


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(ckpt: str) -> None:
    def tokens(seed: str) -> list[Any]:
        options = ("--temperature", "1", "--max_new_tokens", "12", "--seed", seed, "--rule", "RejectionSampling")
        document = succeed("decode", "--ckpt", ckpt, *QUICK, *options, "--output", "json").json
        return [(each["standard"]["tokens"], each["speculative"]["tokens"]) for each in document["prompts"]]

    assert tokens("3") == tokens("3") != tokens("4")


def test_eos_logprobs_threads_and_dtype_do_what_they_say(ckpt: str) -> None:
    options = ("decode", "--ckpt", ckpt, *QUICK, "--prompt", "1 2 3", "--eos", "5", "--eos", "49", "--logprobs")
    document = succeed(*options, "--threads", "1", "--dtype", "float64", "--output", "json").json
    (row,) = document["prompts"]
    for side in ("standard", "speculative"):
        assert row[side]["tokens"] == [4, 5] and row[side]["stop_reason"] == "eos"
        assert len(row[side]["logprobs"]) == 2 and all(value <= 0 for value in row[side]["logprobs"])
    assert document["manifest"]["threads"] == 1
    printed = succeed(*options, "--dtype", "bfloat16").out
    assert "(stopped: eos)" in printed and "  logprobs\n" in printed


def test_compiling_what_cannot_be_compiled_is_a_warning(ckpt: str) -> None:
    outcome = succeed("decode", ckpt, *QUICK, "--compile", "--output", "json")
    assert "WARNING: " in outcome.err and "transformers" in outcome.err
    assert succeed("decode", ckpt, *QUICK, "--compile", "-q").err == ""
    assert outcome.json["summary"]["walltime_speedup"] > 0


@pytest.mark.parametrize("mode", ["both", "standard", "speculative"])
def test_a_prompt_whose_logits_are_not_finite_is_told_by_the_exit_code(tmp_path: Path, mode: str) -> None:
    decoder = SpeculativeDecoder(make(RNN, 1, embedding_size=8, hidden_size=16), NGramDrafter())
    with torch.no_grad():
        for parameter in decoder.target.parameters():
            parameter.fill_(1e38)
    decoder.save(tmp_path / "broken.safetensors")
    prompts = ("--prompt", "1 2 3", "--prompt", "4")
    outcome = call("decode", str(tmp_path / "broken.safetensors"), *prompts, "--mode", mode, "--output", "json")
    assert outcome.code == 1 and "failed: " in outcome.err and "prompt 0, 1" in outcome.err
    assert outcome.json["summary"] == {} and len(outcome.json["prompts"]) == 2
