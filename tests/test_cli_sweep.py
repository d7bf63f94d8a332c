"""Laws of `sweep`: a table or one JSON document, the best and its command, failures shown, one line for bad input."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import SCRIPT, call, refused, succeed
from tiny_heads import family
from tiny_models import write, write_drafts, write_text_model

from lightning_specdec import SpeculativeDecoder, checkpoint, cli_sweep
from lightning_specdec.bench import sweep as sweep_module
from lightning_specdec.bench.sweep import SweepRow
from lightning_specdec.drafters import MultiTokenDrafter

RNN = str(Path(__file__).parent.parent / "checkpoints" / "rnn.ckpt")
BRIEF = ("--repeats", "1", "--max_new_tokens", "6", "--num_draft_tokens", "2", "3")
EXITS = ("--target", "target", "--drafter", "EarlyExitDrafter")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tiny models. Read it, do not write to it."""
    home = tmp_path_factory.mktemp("sweep")
    write_text_model(home / "target")
    write_text_model(home / "draft", "gpt2", seed=2, n_layer=1, n_positions=512)
    write(home / "gemma", "gemma3_text")
    write_drafts(home / "drafts.ckpt", "small")
    return home


@pytest.fixture(autouse=True)
def _there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def test_a_document_holds_every_row_the_best_and_the_command_that_decodes_like_it() -> None:
    outcome = succeed("sweep", *EXITS, *BRIEF, "--prompt", "the cat", "--prompt", "a", "--output", "json")
    document = outcome.json
    cells = [(row["draft"], row["num_draft_tokens"]) for row in document["rows"]]
    assert cells == [("exit 1", 2), ("exit 1", 3), ("exit 2", 2), ("exit 2", 3)] and outcome.err == ""
    for row in document["rows"]:
        assert row["same_tokens"] is True and row["error"] is None and row["lossless"]
        assert all(row[name] > 0 for name in ("walltime_speedup", "block_efficiency", "cost_ratio"))
        assert len(row["standard"]["runs"]["seconds"]) == len(row["speculative"]["runs"]["seconds"]) == 1
    best = document["rows"][document["best"]]
    assert best["walltime_speedup"] == max(row["walltime_speedup"] for row in document["rows"])
    assert {"torch", "threads", "commit", "options"} <= document["manifest"].keys() and not document["interrupted"]
    program, *words = shlex.split(document["command"])
    assert program == "lightning_specdec"
    decoded = succeed(*words, "--repeats", "0", "--output", "json").json
    options = decoded["manifest"]["options"]
    assert f"exit {options['exit_layer']}" == best["draft"] and options["drafter"] == "EarlyExitDrafter"
    assert options["num_draft_tokens"] == best["num_draft_tokens"] and options["max_new_tokens"] == 6
    assert [each["prompt_text"] for each in decoded["prompts"]] == ["the cat", "a"]
    assert all(each["standard"]["tokens"] == each["speculative"]["tokens"] for each in decoded["prompts"])


def test_the_table_shows_every_row_and_marks_the_best() -> None:
    shown = succeed("sweep", *EXITS, *BRIEF, "--exit_layers", "2", "--prompt", "the cat").out
    header, *rows = shown.splitlines()[:3]
    assert header.split() == [
        "draft",
        "window",
        "acceptance_rate",
        "block_efficiency",
        "cost_ratio",
        "walltime_speedup",
    ]
    assert [row.split()[:3] for row in rows] == [["exit", "2", "2"], ["exit", "2", "3"]]
    assert sum(row.endswith("<- best") for row in rows) == 1
    assert "times as fast as standard decoding" in shown or "slower than standard decoding" in shown
    assert "  lightning_specdec decode --target target --drafter EarlyExitDrafter" in shown
    assert "1 prompt, 6 new tokens, batch 1, 1 repeat, networks of both sides fused," in shown


def test_a_checkpoint_is_swept_with_its_own_draft_and_prompts_as_it_was_asked_for() -> None:
    options = (
        "--temperature",
        "1",
        "--rule",
        "RejectionSampling",
        "--batch_size",
        "3",
        "--fuse",
        "none",
        "--seed",
        "4",
    )
    document = succeed("sweep", "--ckpt", RNN, *BRIEF, *options, "--output", "json").json
    assert [row["draft"] for row in document["rows"]] == ["ModelDrafter"] * 2
    assert all(row["same_tokens"] is None and row["batch_size"] == 3 for row in document["rows"])
    words = shlex.split(document["command"])
    for name, value in (
        ("--rule", "RejectionSampling"),
        ("--temperature", "1.0"),
        ("--batch_size", "3"),
        ("--seed", "4"),
    ):
        assert words[words.index(name) + 1] == value
    assert words[words.index("--ckpt") + 1] == RNN and "--fuse" not in words and "--repeats" not in words
    lookup = succeed("sweep", "--ckpt", RNN, *BRIEF, "--drafter", "NGramDrafter", "--drafter.max_ngram", "3").out
    assert "NGramDrafter  " in lookup and "--drafter NGramDrafter --drafter.max_ngram 3" in lookup


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["small", "exit, exit 1", "exit, exit 2"]),
        (["--drafts", "small"], ["small"]),
        (["--drafts", "exit", "small", "--exit_layers", "2"], ["exit, exit 2", "small"]),
        (["--draft", "exit", "--exit_layers", "2"], ["exit, exit 2"]),
        (["--drafter", "EarlyExitDrafter"], ["exit 1", "exit 2"]),
    ],
    ids=str,
)
def test_a_checkpoints_drafts_and_exits_are_swept_by_their_names(arguments: list[str], names: list[str]) -> None:
    brief = ("--repeats", "1", "--max_new_tokens", "4", "--num_draft_tokens", "2", "--output", "json")
    document = succeed("sweep", "--ckpt", "drafts.ckpt", *arguments, *brief).json
    assert [row["draft"] for row in document["rows"]] == names
    assert all(row["same_tokens"] for row in document["rows"])
    best = document["rows"][document["best"]]["draft"]
    words = shlex.split(document["command"])
    succeed(*words[1:], "--repeats", "0")
    draft, _, layer = best.rpartition("exit ")
    assert ("--exit_layer" in words) == bool(layer and layer.isdigit())
    if draft.endswith(", ") or best == "small":
        assert words[words.index("--draft") + 1] == (best if best == "small" else "exit")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "\n3 prompts, 6 new"),
        (["--num_prompts", "2"], "\nthe first 2 of 3 prompts, "),
        ([word for i in range(5) for word in ("--prompt", f"1 {i}")], "\n5 prompts, "),
    ],
    ids=str,
)
def test_of_the_models_own_prompts_the_first_are_taken_and_of_given_ones_all(arguments: list[str], told: str) -> None:
    assert told in succeed("sweep", "--ckpt", RNN, *BRIEF, *arguments).out


def test_rows_are_told_as_they_come_to_those_who_wait_and_those_who_debug() -> None:
    told = succeed("sweep", "--ckpt", RNN, *BRIEF, "--log_level", "debug").err
    assert "measuring 2 rows ..." in told and "1 of 2: ModelDrafter" in told and "2 of 2: ModelDrafter" in told


def test_a_checkpoints_only_draft_has_the_name_that_decode_knows() -> None:
    document = succeed("sweep", "--ckpt", RNN, *BRIEF, "--drafts", "main", "--output", "json").json
    assert [row["draft"] for row in document["rows"]] == ["ModelDrafter"] * 2
    succeed(*shlex.split(document["command"])[1:], "--repeats", "0")


@pytest.mark.parametrize(
    ("windows", "measured"), [(["1", "2"], [1, 2]), (["1", "2", "4", "8"], [1, 2]), (["6", "8"], [2])], ids=str
)
def test_no_window_is_measured_that_is_larger_than_what_heads_can_guess(
    windows: list[str], measured: list[int], tmp_path: Path
) -> None:
    target = family("llama")
    heads = MultiTokenDrafter(2, hidden_size=int(target.hidden_size or 0), vocab_size=target.vocab_size)
    path = str(tmp_path / "heads.ckpt")
    checkpoint.save(path, target, heads, prompts=[[1, 2, 3]])
    brief = ("--repeats", "1", "--max_new_tokens", "4", "--output", "json")
    outcome = succeed("sweep", "--ckpt", path, *brief, "--num_draft_tokens", *windows)
    assert [row["num_draft_tokens"] for row in outcome.json["rows"]] == measured
    told = "WARNING: MultiTokenDrafter guesses at most 2 tokens a round: larger windows are left out\n"
    assert outcome.err == ("" if windows == ["1", "2"] else told)
    decoded = succeed("decode", "--ckpt", path, *brief, "--num_draft_tokens", windows[-1])
    assert ("guesses at most 2 tokens a round" in decoded.err) == (windows != ["1", "2"])


def test_quartiles_are_shown_of_three_repeats_or_more() -> None:
    brief = ("--max_new_tokens", "4", "--num_draft_tokens", "2")
    few, enough = (succeed("sweep", "--ckpt", RNN, *brief, "--repeats", number).out for number in ("2", "3"))
    assert "quartiles" not in few and " to " not in few.splitlines()[1]
    assert few.splitlines()[0].endswith("walltime_speedup") and few.splitlines()[1].count("(") == 0
    assert enough.splitlines()[0].endswith("  (quartiles)") and " to " in enough.splitlines()[1]


def test_a_draft_model_is_swept_by_its_name() -> None:
    document = succeed(
        "sweep", "--target", "target", "--draft", "draft", *BRIEF, "--prompt", "a", "--output", "json"
    ).json
    assert [row["draft"] for row in document["rows"]] == ["ModelDrafter"] * 2
    assert "--target target --draft draft" in document["command"]


def test_rows_that_fail_are_shown_and_make_the_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sweep_module.compare

    def compare(*arguments: Any, num_draft_tokens: int, **options: Any) -> Any:
        if num_draft_tokens == 3:
            raise RuntimeError("out of\nmemory")
        return real(*arguments, num_draft_tokens=num_draft_tokens, **options)

    monkeypatch.setattr(sweep_module, "compare", compare)
    outcome = call("sweep", "--ckpt", RNN, *BRIEF)
    assert outcome.code == 1 and "  failed: out of memory\n" in outcome.out and "<- best" in outcome.out
    document = call("sweep", "--ckpt", RNN, *BRIEF, "--output", "json").json
    assert [row["error"] for row in document["rows"]] == [None, "out of memory"] and document["best"] == 0
    everything = call("sweep", "--ckpt", RNN, "--num_draft_tokens", "3")
    assert everything.code == 1 and "best" not in everything.out and "failed: out of memory" in everything.out


def test_other_tokens_are_told_loudly_and_make_the_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SweepRow, "parting", property(lambda row: (2, 4) if row.num_draft_tokens == 3 else None))
    outcome = call("sweep", "--ckpt", RNN, *BRIEF)
    assert outcome.code == 1 and outcome.out.count("OTHER TOKENS than standard decoding") == 1
    assert outcome.err == (
        "error: ModelDrafter, window 3: ExactMatch gave other tokens than standard decoding, from token 5 of prompt 2 "
        "on, in float32\n"
    )
    document = call("sweep", "--ckpt", RNN, *BRIEF, "--output", "json").json
    assert [row["same_tokens"] for row in document["rows"]] == [True, False] and document["best"] == 0


def test_what_loses_against_standard_decoding_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SweepRow, "walltime_speedup", property(lambda row: 0.5 + row.num_draft_tokens / 10))
    shown = succeed("sweep", "--ckpt", RNN, *BRIEF).out
    assert "ModelDrafter with a window of 3 is the fastest of these, and slower than standard decoding" in shown


def test_ctrl_c_prints_the_rows_that_are_there_and_says_130() -> None:
    options = ["sweep", "--ckpt", RNN, "--repeats", "1", "--max_new_tokens", "1000", "--log_level", "debug"]
    command = [SCRIPT, *options, "--num_draft_tokens", *map(str, range(1, 200))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if ": ModelDrafter" in line:  # a row is over
                break
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 130 and err.endswith("interrupted: what is above was settled by then\n")
    assert out.startswith("draft ") and "<- best" in out and out.count("\nModelDrafter  ") < 199


def test_ctrl_c_leaves_a_whole_document(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sweep_module.compare

    def compare(*arguments: Any, num_draft_tokens: int, **options: Any) -> Any:
        if num_draft_tokens == 3:
            raise KeyboardInterrupt
        return real(*arguments, num_draft_tokens=num_draft_tokens, **options)

    monkeypatch.setattr(sweep_module, "compare", compare)
    outcome = call("sweep", "--ckpt", RNN, *BRIEF, "--output", "json")
    assert outcome.code == 130 and outcome.json["interrupted"] and outcome.json["best"] == 0
    assert [row["num_draft_tokens"] for row in outcome.json["rows"]] == [2]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "name the models by one of --ckpt, --pair, --target, got none"),
        (["--ckpt", "nowhere.ckpt"], "nowhere.ckpt: no such checkpoint"),
        (["--ckpt", RNN, "--num_draft_tokens", "0"], "num_draft_tokens must be from 1"),
        (
            ["--ckpt", RNN, "--num_draft_tokens", "auto"],
            "must be integers, each a window to measure, as 2 4 8, got 'auto'",
        ),
        (["--ckpt", RNN, "--repeats", "0"], "repeats must be at least 1"),
        (["--ckpt", RNN, "--num_prompts", "0"], "num_prompts must be at least 1"),
        (["--ckpt", RNN, "--batch_size", "0"], "batch_size must be at least 1"),
        (
            ["--ckpt", RNN, "--exit_layers", "1"],
            "exit layers are of early exits, and what guesses here is a ModelDrafter",
        ),
        (["--ckpt", RNN, "--exit_layer", "1"], "sweep takes several: give --exit_layers"),
        (["--ckpt", RNN, "--drafter", "EarlyExitDrafter", "--exit_layers", "1"], "RNN has no layers to exit from"),
        (["--ckpt", RNN, "--drafts", "tiny"], "the checkpoint has no draft 'tiny': it has main"),
        (["--ckpt", RNN, "--drafts", "tiny", "--draft", "tiny"], "--draft and --drafts exclude each other"),
        (["--target", "target", "--drafts", "tiny"], "--drafts are a checkpoint's"),
        (["--ckpt", RNN, "--draft", "tiny"], "the checkpoint has no draft 'tiny'"),
        (["--ckpt", "drafts.ckpt", "--drafts", "tiny"], "the checkpoint has no draft 'tiny': it has small, exit"),
        (["--ckpt", "drafts.ckpt", "--drafts", "small", "--exit_layers", "1"], "what guesses here is a ModelDrafter"),
        (["--ckpt", RNN, "--fuse", "one"], "invalid choice: 'one'"),
        (["--ckpt", RNN, "--prompt", "1 99"], "--prompt 1 holds 99"),
        ([*EXITS, "--exit_layers", "1", "3"], "exit_layer must be from 1 to 2, got 3"),
        ([*EXITS, "--exit_layers", "0"], "exit_layers must be at least 1"),
        ([*EXITS, "--draft", "draft"], "EarlyExitDrafter guesses without a model"),
        (["--target", "target", "--exit_layers", "1"], "exit layers are of early exits"),
        (["--target", "target", "--max_new_tokens", "600", "--prompt", "a"], "the target's context holds 512"),
        (["--target", "gemma", "--drafter", "EarlyExitDrafter"], "cannot be taken apart"),
        (["--ckpt", RNN, "--eos", "50"], "eos must be from 0 to 49"),
    ],
    ids=lambda value: " ".join(value[-3:])[-50:] if isinstance(value, list) else "",
)
def test_what_cannot_be_swept_is_one_line_and_exit_code_2(arguments: list[str], told: str) -> None:
    refused("sweep", *arguments, told=told)


def test_python_sweeps_too() -> None:
    decoder = SpeculativeDecoder.from_pretrained("target", "draft")
    rows = list(decoder.sweep("the cat", windows=(2,), max_new_tokens=5, repeats=1, warmup=0))
    assert [(row.draft, row.same_tokens) for row in rows] == [("ModelDrafter", True)]
    assert cli_sweep.best(rows) is rows[0]
