"""Laws of `decode`: both outputs, the fate of each guess, one table or one JSON document."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cli_fixtures import call, ckpt, shipped_run, succeed

from lightning_specdec import SpeculativeDecoder, checkpoint, cli_decode, cli_options
from lightning_specdec.bench.runner import Benchmark, Runs
from lightning_specdec.cli_report import decoded_text, summary_table
from lightning_specdec.cli_shown import in_batches
from lightning_specdec.inference import DecodeInterrupted, DecodeResult, RowResult
from lightning_specdec.inference.timing import PHASES
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
    assert all(isinstance(summary[name], float) for name in rates | {"predicted_speedup", "warmup_seconds"})
    for side in ("standard", "speculative"):
        phases = {f"{phase}_seconds" for phase in ("draft", "verify", "accept", "rest")}
        assert {"seconds", "tokens_per_second", "time_to_first_token", "num_target_calls", *phases} <= summary[
            side
        ].keys()
        assert len(summary[side]["runs"]["seconds"]) == 2
    assert {"device", "threads", "torch", "commit", "checkpoint_sha256", "options"} <= manifest.keys()
    assert manifest["options"]["num_draft_tokens"] == 3


def test_the_text_shows_the_fate_of_each_guess_by_marks_where_there_is_no_terminal(ckpt: str) -> None:
    options = ("decode", "--ckpt", ckpt, *QUICK, "--num_draft_tokens", "4")
    shown, document = succeed(*options).out, succeed(*options, "--output", "json").json
    assert "\x1b" not in shown and "ExactMatch is lossless: all 21 new tokens equal" in shown
    for each in document["prompts"]:
        words: list[str] = []
        for turn in each["speculative"]["rounds"]:
            words += map(str, turn["drafted"][: turn["num_accepted"]])
            rejected = turn["drafted"][turn["num_accepted"] :][:1]
            words += [f"x{token}" for token in rejected]
            words += [] if turn["next_token"] is None else [f"{'=' if rejected else '+'}{turn['next_token']}"]
        assert f"  speculative  {' '.join(words)}\n" in shown
        assert f"prompt {each['index']}: {' '.join(map(str, each['prompt']))}\n" in shown
    for row in ("walltime_speedup", "latency_reduction", "predicted_speedup", "target_calls"):
        assert f"\n{row} " in shown


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
    options = cli_options.make_parser("decode").parse_args(["--ckpt", ckpt, *QUICK])
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert cli_decode.decode(options) == 0
        terminal.flush()
        reader.join(timeout=10)
        monkeypatch.undo()
    os.close(leader)
    assert (b"\x1b[32m" in received) == (no_color == "") and b"kept guess" in received


@pytest.mark.parametrize(
    "options",
    [
        ["--rule", "ExactMatch", "--temperature", "1"],
        ["--rule", "RejectionSampling", "--temperature", "0.7", "--top_k", "9", "--top_p", "0.9", "--min_p", "0.01"],
        ["--rule", "EpsilonThreshold", "--rule.epsilon", "0.9", "--temperature", "1"],
        ["--rule", "EpsilonThreshold", "--epsilon", "0.2"],
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
    if rule.lossless:
        assert f"{options[1]} is lossless" in outcome.out and document["summary"]["num_changed"] is None
    else:
        total = sum(len(standard) for standard, _ in pairs)
        assert f"{options[1]} is LOSSY: {differing} of {total} new tokens differ" in outcome.out
        changed = document["summary"]["num_changed"]
        kept = "1 kept guess is" if changed == 1 else f"{changed} kept guesses are"
        assert f"; {kept} not what the target would have drawn there" in outcome.out


@pytest.mark.parametrize("size", ["1", "2", "3"])
def test_batches_hold_for_what_is_shown_and_change_no_token(
    ckpt: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[Any]] = {"decode": [], "decode_standard": []}
    for name, calls in seen.items():
        whole = getattr(SpeculativeDecoder, name)

        def watched(self: Any, prompts: Any, *, whole: Any = whole, calls: Any = calls, **options: Any) -> Any:
            calls.append(options["indices"])
            return whole(self, prompts, **options)

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


def test_ctrl_c_keeps_the_batches_that_are_over_and_the_one_in_progress() -> None:
    def result(tokens: list[int], index: int) -> DecodeResult:
        return DecodeResult([RowResult(index, [1], tokens, "length", 1, [0.1])], 1.0, {}, 1, 0)

    def decode(batch: list[list[int]], indices: list[int]) -> DecodeResult:
        if indices == [1]:
            raise DecodeInterrupted(result([9], 1))
        return result([8, 8], indices[0])

    with pytest.raises(DecodeInterrupted) as stopped:
        in_batches(decode, [[1], [2], [3]], 1)
    assert stopped.value.result.tokens == [[8, 8], [9]]
    shown = decoded_text(
        in_batches(lambda _, n: result([8, 8], n[0]), [[1]] * 3, 1), stopped.value.result, colour=False
    )
    assert "prompt 2: 1\n  standard     8 8\n" in shown, "what only one way has settled is shown too"


def test_quartiles_are_shown_of_three_repeats_or_more(ckpt: str) -> None:
    few, enough = (succeed("decode", "--ckpt", ckpt, "--repeats", number).out for number in ("2", "3"))
    assert "quartile" not in few and "\nfirst quartile " in enough and "\nthird quartile " in enough


@pytest.mark.parametrize(
    ("given", "default", "seconds", "repeats", "warmup", "told"),
    [
        (False, 10, 0.001, 10, 3, "10 repeats, about 1 s"),
        (False, 10, 2.5, 8, 0, "8 repeats, about 20 s"),
        (False, 10, 12.7, 2, 0, "2 repeats, about 25 s"),
        (False, 2, 9.0, 2, 0, "2 repeats, about 18 s"),
        (True, 1, 30.0, 1, 3, "1 repeat, about 120 s"),
    ],
)
def test_measuring_says_how_long_it_takes_and_takes_long_where_the_user_says_so_alone(
    given: bool,
    default: int,
    seconds: float,
    repeats: int,
    warmup: int,
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = cli_options.make_parser("decode").parse_args(["--ckpt", "x.ckpt", "--repeats", str(default)])
    with caplog.at_level("DEBUG", "lightning_specdec"):
        assert cli_decode._plan(options, seconds, chosen=given) == warmup
    assert options.repeats == repeats and f"measuring {told}: --repeats 0 leaves it out" in caplog.text


def test_a_checkpoint_decodes_with_the_window_of_its_recipe_unless_another_is_given(ckpt: str, tmp_path: Path) -> None:
    loaded = checkpoint.load(ckpt)
    path = str(tmp_path / "own.ckpt")

    def window(*options: str) -> Any:
        document = succeed("decode", "--ckpt", path, "--repeats", "0", "--output", "json", *options).json
        return document["manifest"]["options"]["num_draft_tokens"]

    for recipe, expected in (({"num_draft_tokens": 5}, 5), ({}, 3)):
        checkpoint.save(path, loaded.target, loaded.drafter, prompts=[[1, 2]], recipe=recipe)
        assert window() == expected and window("--num_draft_tokens", "2") == 2
        assert window("--drafter", "NGramDrafter") == 3  # the recipe is of another draft
    for foreign in (0, 2**40, "4", True, 2.0):
        checkpoint.save(path, loaded.target, loaded.drafter, prompts=[[1, 2]], recipe={"num_draft_tokens": foreign})
        outcome = call("decode", "--ckpt", path, "--repeats", "0")
        assert outcome.code == 2 and outcome.out == "" and outcome.err.count("\n") == 1
        assert "num_draft_tokens of the checkpoint's recipe must be" in outcome.err
        assert window("--num_draft_tokens", "2") == 2


def test_no_repeats_show_the_outputs_and_no_table(ckpt: str) -> None:
    whole, brief = (succeed("decode", "--ckpt", ckpt, "--repeats", number).out for number in ("1", "0"))
    assert whole.startswith(brief.rstrip("\n")) and brief.rstrip().endswith("equal the standard output")
    assert succeed("decode", "--ckpt", ckpt, "--repeats", "0", "--output", "json").json["summary"] == {}


def test_the_outputs_are_shown_before_anything_is_timed(
    ckpt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def benchmark(self: Any, prompts: Any, **options: Any) -> Any:
        assert "all 21 new tokens equal" in capsys.readouterr().out
        raise KeyboardInterrupt

    monkeypatch.setattr(SpeculativeDecoder, "benchmark", benchmark)
    options = ["--ckpt", ckpt, "--repeats", "5", "--max_new_tokens", "7"]
    assert cli_decode.decode(cli_options.make_parser("decode").parse_args(options)) == 130


def test_what_was_not_warmed_has_no_row() -> None:
    runs = Runs(
        [1.0], [DecodeResult([RowResult(0, [1], [2], "length", 1, [0.1])], 1.0, dict.fromkeys(PHASES, 0.2), 1, 0)]
    )
    machine = {"device": "cpu", "processor": "", "threads": 1, "torch": "", "commit": None}
    for seconds, rows in ((0.0004, 0), (0.31, 1)):
        summary = Benchmark(runs, None, None, None, seconds, 3).summary()
        assert summary_table(summary, num_prompts=1, manifest=machine).count("warmup_seconds") == rows


def test_a_terminal_is_told_what_takes_its_time(ckpt: str) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    told = Terminal()
    options = cli_options.make_parser("decode").parse_args(["--ckpt", ckpt, *QUICK])
    with mock.patch.object(sys, "stderr", told):
        assert cli_decode.decode(options) == 0
    measuring = "INFO: measuring 1 repeat, about 1 s: --repeats 0 leaves it out"
    assert told.getvalue().splitlines() == [f"INFO: loading {ckpt} ...", measuring]


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
    assert prompts_of("--ckpt", ckpt, "-", stdin="1 2 3\n4 5\n") == ragged[:2]
    assert prompts_of("--ckpt", ckpt, "--prompts_file", "-", stdin="[1, 2, 3]\n") == ragged[:1]


@pytest.mark.parametrize("mode", ["standard", "speculative"])
def test_one_mode_runs_that_way_alone(ckpt: str, mode: str) -> None:
    document = succeed("decode", "--ckpt", ckpt, *QUICK, "--mode", mode, "--output", "json").json
    other = {"standard": "speculative", "speculative": "standard"}[mode]
    assert document["summary"][other] is None and document["summary"]["walltime_speedup"] is None
    assert all(mode in each and other not in each for each in document["prompts"])
    shown = succeed("decode", "--ckpt", ckpt, *QUICK, "--mode", mode).out
    assert f"  {mode}  " in shown and f"  {other}  " not in shown


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
    shown = succeed(*options, "--dtype", "bfloat16").out
    assert "(stopped: eos)" in shown and "  logprobs  " in shown


def test_messages_are_json_lines_when_asked_for(ckpt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CXX", "nowhere"), ("PATH", ""), ("XDG_CACHE_HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)
    outcome = succeed("decode", "--ckpt", ckpt, *QUICK, "--compile", "--log_json", "--output", "json")
    message = json.loads(outcome.err)
    assert message["level"] == "warning" and "no C++ compiler" in message["message"]
    assert succeed("decode", "--ckpt", ckpt, *QUICK, "--compile", "--log_level", "error").err == ""
    assert outcome.json["summary"]["walltime_speedup"] > 0
