"""Laws of `sweep`: a table or one JSON document, the best and its command, failures shown, one line for bad input."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import call, refused, succeed
from tiny_models import write_drafts, write_text_model

from lightning_specdec.bench.measure import Case
from lightning_specdec.bench.rows import Comparison
from lightning_specdec.bench.statistics import Interval

RNN = str(Path(__file__).parent.parent / "checkpoints" / "rnn.safetensors")
BRIEF = ("--repeats", "1", "--max_new_tokens", "6", "--num_draft_tokens", "2", "3")


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


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["small", "exit, exit 1", "exit, exit 2"]),
        (["--drafts", "small"], ["small"]),
        (["--draft", "small"], ["small"]),
        (["--drafter", "EarlyExitDrafter", "--drafter.exit_layer", "2"], ["EarlyExitDrafter"]),
    ],
    ids=str,
)
def test_every_draft_and_window_is_a_row_and_the_command_decodes_like_the_best(
    arguments: list[str], names: list[str]
) -> None:
    document = succeed("sweep", "drafts.ckpt", *arguments, *BRIEF, "--output", "json").json
    cells = [(row["draft"], row["num_draft_tokens"]) for row in document["rows"]]
    assert (
        cells == [(name, window) for name in names for window in (2, 3)]
        and not document["interrupted"]
    )
    assert all(
        row["same_tokens"] and row["error"] is None and row["walltime_speedup"] > 0
        for row in document["rows"]
    )
    decoded = succeed(
        *shlex.split(document["command"])[1:], "--repeats", "0", "--output", "json"
    ).json
    best, options = document["rows"][document["best"]], decoded["manifest"]["options"]
    assert (
        options["num_draft_tokens"] == best["num_draft_tokens"] and options["max_new_tokens"] == 6
    )
    if "exit " in best["draft"]:
        assert options["drafter"]["init_args"] == {"exit_layer": best["draft"][-1]}
    assert all(
        each["standard"]["tokens"] == each["speculative"]["tokens"] for each in decoded["prompts"]
    )


@pytest.mark.parametrize("speedup", [0.4, 2.0])
def test_the_table_shows_every_row_and_marks_the_best(
    speedup: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Comparison, "walltime_speedup", Interval(speedup, speedup, speedup))
    monkeypatch.setattr(Comparison, "num_pairs", 5)
    shown = succeed("sweep", "--target", "target", *BRIEF, "--prompt", "the cat").out
    *_, header, first, second = shown.partition("\n\n")[0].splitlines()
    rows = [first, second]
    assert header.split()[:2] == ["method", "window"] and header.split()[-1] == "speedup"
    assert [row.split()[:2] for row in rows] == [["NGramDrafter", "2"], ["NGramDrafter", "3"]]
    assert shown.count("<- best") == shown.count("\nlightning_specdec decode ") == (speedup > 1)
    assert ("\nnothing here is proven faster" in shown) == (speedup < 1)
    assert "\n1 prompt, batch" in shown


@pytest.mark.parametrize(
    ("low", "marks"),
    [
        (1.5, ["<- best"]),
        (1.3, ["<- best", "<- may be as fast"]),
        (float("nan"), []),
    ],
)
def test_rows_within_the_interval_of_the_best_are_marked_as_equal(
    low: float, marks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    speedups = {2: Interval(1.2, 1.0, 1.4), 3: Interval(1.6, low, 1.7)}
    monkeypatch.setattr(
        Comparison, "walltime_speedup", property(lambda self: speedups[self.case.num_draft_tokens])
    )
    monkeypatch.setattr(Comparison, "num_pairs", 5)
    shown = succeed("sweep", "--target", "target", *BRIEF, "--prompt", "the cat").out
    assert re.findall("<- .*", shown) == marks


def test_other_tokens_and_failures_are_shown_and_make_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            "lightning_specdec.bench.measure._beside", lambda *more: {"same_tokens": False}
        )
        outcome = call("sweep", "--ckpt", RNN, *BRIEF)
    assert outcome.code == 1 and outcome.out.count("OTHER TOKENS than standard decoding") == 2
    fail(monkeypatch, RuntimeError("out of\nmemory"))
    outcome = call("sweep", "--ckpt", RNN, *BRIEF)
    assert outcome.code == 1 and "failed: out of memory\n" in outcome.out


def test_ctrl_c_leaves_the_rows_that_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, KeyboardInterrupt())
    outcome = call("sweep", "--ckpt", RNN, *BRIEF, "--output", "json")
    assert outcome.code == 130 and outcome.json["interrupted"] and outcome.json["best"] == 0
    assert [row["num_draft_tokens"] for row in outcome.json["rows"]] == [2]
    outcome = call("sweep", "--ckpt", RNN, *BRIEF)
    assert outcome.code == 130 and re.search(r"\nmethod +window .*\nModelDrafter +2 ", outcome.out)


def test_the_table_is_ordered_by_the_lower_ends_of_the_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def speedup(self: Comparison) -> Interval:
        low = {2: 0.9, 3: 1.1, 4: 1.0}[self.case.num_draft_tokens]  # type: ignore[index]
        return Interval(1.2, low, 1.4)

    monkeypatch.setattr(Comparison, "walltime_speedup", property(speedup))
    printed = succeed("sweep", "--ckpt", RNN, *BRIEF, "4").out
    assert re.findall(r"^ModelDrafter +(\d)", printed, re.M) == ["3", "4", "2"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--num_draft_tokens", "0"], "num_draft_tokens must be"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--drafts", "tiny"], "tiny"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(arguments: list[str], told: str) -> None:
    refused("sweep", "--ckpt", RNN, *arguments, told=told)
