"""Laws of `sweep`: one table or JSON document, the best row with its command, shown failures."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import call, refused, succeed
from tiny_models import write_drafts, write_text_model

from lightning_specdec.bench.measure import Case
from lightning_specdec.bench.records import Comparison
from lightning_specdec.bench.statistics import Interval

RNN = str(Path(__file__).parent.parent / "checkpoints" / "rnn.safetensors")
BRIEF = ("--repeats", "1", "--max_new_tokens", "6", "--num_draft_tokens", "2", "3")
WITH_LOOKUP = ("sweep", "--target", "target", *BRIEF, "--prompt", "the cat")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read-only directory with tiny models."""
    home = tmp_path_factory.mktemp("sweep")
    write_text_model(home / "target")
    write_drafts(home / "drafts.ckpt", "small")
    return home


@pytest.fixture(autouse=True)
def _in_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def fail_at_window_three(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Raise this error in each run with three draft tokens."""
    run = Case.run

    def failing_run(self: Case, repeat: int) -> Any:
        if self.draft is not None and self.config.num_draft_tokens == 3:
            raise error
        return run(self, repeat)

    monkeypatch.setattr(Case, "run", failing_run)


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
    assert not document["interrupted"]
    expected_cells = []
    for name in names:
        expected_cells += [(name, 2), (name, 3)]
    cells = [(row["draft"], row["num_draft_tokens"]) for row in document["rows"]]
    assert cells == expected_cells
    for row in document["rows"]:
        assert row["same_tokens"]
        assert row["error"] is None
        assert row["walltime_speedup"] > 0

    command = shlex.split(document["command"])[1:]
    decoded = succeed(*command, "--repeats", "0", "--output", "json").json
    best_row = document["rows"][document["best"]]
    options = decoded["manifest"]["options"]
    assert options["num_draft_tokens"] == best_row["num_draft_tokens"]
    assert options["max_new_tokens"] == 6
    if "exit " in best_row["draft"]:
        exit_layer = best_row["draft"][-1]
        assert options["drafter"]["init_args"] == {"exit_layer": exit_layer}
    for prompt in decoded["prompts"]:
        assert prompt["standard"]["tokens"] == prompt["speculative"]["tokens"]


@pytest.mark.parametrize("speedup", [0.4, 2.0])
def test_the_table_shows_every_row_and_marks_the_best(
    speedup: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Comparison, "walltime_speedup", Interval(speedup, speedup, speedup))
    monkeypatch.setattr(Comparison, "num_pairs", 5)
    text = succeed(*WITH_LOOKUP).out
    header, row_of_two, row_of_three = text.partition("\n\n")[0].splitlines()[-3:]
    assert header.split()[:2] == ["method", "window"]
    assert header.split()[-1] == "speedup"
    assert row_of_two.split()[:2] == ["NGramDrafter", "2"]
    assert row_of_three.split()[:2] == ["NGramDrafter", "3"]

    num_best = 1 if speedup > 1 else 0
    assert text.count("<- best") == num_best
    assert text.count("\nlightning_specdec decode ") == num_best
    assert ("\nnothing here is proven faster" in text) == (speedup < 1)
    assert "\n1 prompt, batch" in text


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

    def speedup(self: Comparison) -> Interval:
        return speedups[self.case.num_draft_tokens]  # type: ignore[index]

    monkeypatch.setattr(Comparison, "walltime_speedup", property(speedup))
    monkeypatch.setattr(Comparison, "num_pairs", 5)
    text = succeed(*WITH_LOOKUP).out
    assert re.findall("<- .*", text) == marks


def test_other_tokens_and_failures_are_shown_and_make_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            "lightning_specdec.bench.measure._beside", lambda *results: {"same_tokens": False}
        )
        outcome = call("sweep", "--ckpt", RNN, *BRIEF)
    assert outcome.code == 1
    assert outcome.out.count("OTHER TOKENS than standard decoding") == 2

    fail_at_window_three(monkeypatch, RuntimeError("out of\nmemory"))
    outcome = call("sweep", "--ckpt", RNN, *BRIEF)
    assert outcome.code == 1
    assert "failed: out of memory\n" in outcome.out


def test_ctrl_c_leaves_the_rows_that_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at_window_three(monkeypatch, KeyboardInterrupt())
    outcome = call("sweep", "--ckpt", RNN, *BRIEF, "--output", "json")
    assert outcome.code == 130
    assert outcome.json["interrupted"]
    assert outcome.json["best"] == 0
    assert [row["num_draft_tokens"] for row in outcome.json["rows"]] == [2]

    outcome = call("sweep", "--ckpt", RNN, *BRIEF)
    assert outcome.code == 130
    assert re.search(r"\nmethod +window .*\nModelDrafter +2 ", outcome.out)


def test_the_table_is_ordered_by_the_lower_ends_of_the_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lower_ends = {2: 0.9, 3: 1.1, 4: 1.0}

    def speedup(self: Comparison) -> Interval:
        lower_end = lower_ends[self.case.num_draft_tokens]  # type: ignore[index]
        return Interval(1.2, lower_end, 1.4)

    monkeypatch.setattr(Comparison, "walltime_speedup", property(speedup))
    text = succeed("sweep", "--ckpt", RNN, *BRIEF, "4").out
    assert re.findall(r"^ModelDrafter +(\d)", text, re.M) == ["3", "4", "2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_draft_tokens", "0"], "num_draft_tokens must be"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--drafts", "tiny"], "tiny"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    refused("sweep", "--ckpt", RNN, *arguments, message=message)
