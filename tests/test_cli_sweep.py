"""Laws of `sweep`: a table or one JSON document, the best and its command, failures shown, one line for bad input."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import call, refused, succeed
from tiny_models import write_drafts, write_text_model

from lightning_specdec.bench.measure import Case

RNN = str(Path(__file__).parent.parent / "checkpoints" / "rnn.safetensors")
BRIEF = ("--repeats", "1", "--max_new_tokens", "6", "--num_draft_tokens", "2", "3")
EXITS = ("--target", "target", "--drafter", "EarlyExitDrafter")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tiny models. Read it, do not write to it."""
    home = tmp_path_factory.mktemp("sweep")
    write_text_model(home / "target")
    write_drafts(home / "drafts.ckpt", "small")
    return home


@pytest.fixture(autouse=True)
def _there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let runs with a window of 3 fail."""
    run = Case.run

    def failing(self: Case, repeat: int) -> Any:
        if self.draft is not None and self.config.num_draft_tokens == 3:
            raise error
        return run(self, repeat)

    monkeypatch.setattr(Case, "run", failing)


def test_a_document_holds_every_row_the_best_and_the_command_that_decodes_like_it() -> None:
    exits = (*EXITS, "--exit_layers", "1", "2")
    document = succeed("sweep", *exits, *BRIEF, "--prompt", "the cat", "--prompt", "a", "--output", "json").json
    cells = [(row["draft"], row["num_draft_tokens"]) for row in document["rows"]]
    assert cells == [("exit 1", 2), ("exit 1", 3), ("exit 2", 2), ("exit 2", 3)]
    for row in document["rows"]:
        assert row["same_tokens"] is True and row["error"] is None and row["lossless"]
        assert all(row[name] > 0 for name in ("walltime_speedup", "block_efficiency", "cost_ratio"))
    best = document["rows"][document["best"]]
    lows = [row["walltime_speedup_low"] for row in document["rows"]]
    assert all(lows) and best["walltime_speedup_low"] == max(lows)
    assert {"torch", "threads", "commit", "options"} <= document["manifest"].keys() and not document["interrupted"]
    program, *words = shlex.split(document["command"])
    assert program == "lightning_specdec"
    decoded = succeed(*words, "--repeats", "0", "--output", "json").json
    options = decoded["manifest"]["options"]
    assert options["num_draft_tokens"] == best["num_draft_tokens"] and options["max_new_tokens"] == 6
    assert f"exit {options['drafter']['init_args']['exit_layer']}" == best["draft"]
    assert all(each["standard"]["tokens"] == each["speculative"]["tokens"] for each in decoded["prompts"])


def test_the_table_shows_every_row_and_marks_the_best() -> None:
    shown = succeed("sweep", *EXITS, *BRIEF, "--exit_layers", "2", "--prompt", "the cat").out
    header, *rows = shown.splitlines()[:3]
    assert header.split()[:2] == ["method", "window"] and header.split()[-1] == "walltime_speedup"
    assert [row.split()[:3] for row in rows] == [["exit", "2", "2"], ["exit", "2", "3"]]
    assert sum(row.endswith("<- best") for row in rows) == 1
    assert "times as fast as standard decoding" in shown or "slower than standard decoding" in shown
    assert (
        "  lightning_specdec decode --target target" in shown and "1 prompt, 6 new tokens, batch 1, 1 repeat" in shown
    )


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["small", "exit, exit 1", "exit, exit 2"]),
        (["--drafts", "small"], ["small"]),
        (["--drafts", "exit", "small", "--exit_layers", "2"], ["exit, exit 2", "small"]),
        (["--draft", "exit", "--exit_layers", "2"], ["exit, exit 2"]),
    ],
    ids=str,
)
def test_a_checkpoints_drafts_and_exits_are_swept_by_their_names(arguments: list[str], names: list[str]) -> None:
    brief = ("--repeats", "1", "--max_new_tokens", "4", "--num_draft_tokens", "2", "--output", "json")
    document = succeed("sweep", "--ckpt", "drafts.ckpt", *arguments, *brief).json
    assert [row["draft"] for row in document["rows"]] == names and all(row["same_tokens"] for row in document["rows"])
    succeed(*shlex.split(document["command"])[1:], "--repeats", "0")


def test_a_sweep_decodes_as_it_is_asked_and_repeats_its_flags_in_the_command() -> None:
    flags = {"--rule": "RejectionSampling", "--temperature": "1.0", "--batch_size": "3", "--seed": "4"}
    given = [word for pair in flags.items() for word in pair]
    document = succeed("sweep", "--ckpt", RNN, *BRIEF, *given, "--output", "json").json
    assert all(row["same_tokens"] is None and row["batch_size"] == 3 for row in document["rows"])
    words = shlex.split(document["command"])
    assert all(words[words.index(name) + 1] == value for name, value in flags.items()) and "--repeats" not in words
    assert "the first 2 of 3 prompts" in succeed("sweep", "--ckpt", RNN, *BRIEF, "--num_prompts", "2").out


def test_rows_that_fail_are_shown_and_make_the_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, RuntimeError("out of\nmemory"))
    outcome = call("sweep", "--ckpt", RNN, *BRIEF)
    assert outcome.code == 1 and "failed: out of memory\n" in outcome.out and "<- best" in outcome.out
    document = call("sweep", "--ckpt", RNN, *BRIEF, "--output", "json").json
    assert [row["error"] for row in document["rows"]] == [None, "out of memory"] and document["best"] == 0


def test_other_tokens_are_told_loudly_and_make_the_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lightning_specdec.bench.measure._beside", lambda *more: {"same_tokens": False, "differs_at": [2, 4]}
    )
    outcome = call("sweep", "--ckpt", RNN, *BRIEF)
    assert outcome.code == 1 and outcome.out.count("OTHER TOKENS than standard decoding") == 2
    assert outcome.err.count("gave other tokens than standard decoding, from token 5 of prompt 2 on, in float32") == 2


def test_ctrl_c_leaves_the_rows_that_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, KeyboardInterrupt())
    outcome = call("sweep", "--ckpt", RNN, *BRIEF, "--output", "json")
    assert outcome.code == 130 and outcome.json["interrupted"] and outcome.json["best"] == 0
    assert [row["num_draft_tokens"] for row in outcome.json["rows"]] == [2]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ckpt", "nowhere.ckpt"], "nowhere.ckpt"),
        (["--ckpt", RNN, "--num_draft_tokens", "0"], "num_draft_tokens must be"),
        (["--ckpt", RNN, "--repeats", "0"], "repeats must be at least 1"),
        (["--ckpt", RNN, "--num_prompts", "0"], "num_prompts must be at least 1"),
        (["--ckpt", RNN, "--batch_size", "0"], "batch_size must be"),
        (["--ckpt", RNN, "--exit_layers", "1"], "exit layers are of early exits"),
        (["--ckpt", RNN, "--drafts", "tiny", "--draft", "tiny"], "--draft and --drafts exclude each other"),
        (["--target", "target", "--drafts", "tiny"], "--drafts are a checkpoint's"),
        (["--ckpt", "drafts.ckpt", "--drafts", "tiny"], "tiny"),
        (["--ckpt", RNN, "--prompt", "1 99"], "--prompt 1 holds 99"),
        ([*EXITS, "--exit_layers", "1", "3"], "exit_layer must be from 1 to 2, got 3"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(arguments: list[str], told: str) -> None:
    refused("sweep", *arguments, *(() if "--repeats" in arguments else ("--repeats", "1")), told=told)
