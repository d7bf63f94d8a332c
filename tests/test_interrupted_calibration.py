"""Laws of measuring what calls cost: it is visible, and an interruption loses nothing."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from families import tiny

import lightning_specdec
from lightning_specdec.decoding import calibration as measuring
from lightning_specdec.decoding.calibration import FEWEST_PASSES, calibrate, load_or_measure
from lightning_specdec.drafters import NGramDrafter


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The passes that are measured. No more than the fewest are needed."""
    measured: list[Any] = []
    measure = measuring._measure

    def counted_measure(*arguments: Any) -> Any:
        one_pass = measure(*arguments)
        measured.append(one_pass)
        return one_pass

    monkeypatch.setattr(measuring, "_measure", counted_measure)
    monkeypatch.setattr(measuring, "MOST_PASSES", FEWEST_PASSES)
    return measured


def interrupt_after(num_passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C in the pass after `num_passes`, once."""
    measure = measuring._measure
    num_calls = 0

    def interrupted_measure(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == num_passes + 1:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(measuring, "_measure", interrupted_measure)


def test_an_interrupted_measurement_goes_on_where_it_was(
    tmp_path: Path,
    passes: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="lightning_specdec")
    target = cases.target("rnn")
    # The first pass only warms up.
    interrupt_after(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        load_or_measure(target, NGramDrafter())
    assert "what was measured is kept" in caplog.text
    kept_passes = passes[1:]
    assert len(kept_passes) == 2

    costs = load_or_measure(target, NGramDrafter())
    assert len(passes) == 3 + 1 + (FEWEST_PASSES - 2)
    counted = [*kept_passes, *passes[4:]]
    verify_seconds = sorted(one_pass.window_rounds[0]["verify"] for one_pass in counted)
    middle = len(verify_seconds) // 2
    median = (verify_seconds[middle - 1] + verify_seconds[middle]) / 2
    assert costs.target_seconds[0] == pytest.approx(median)
    assert not list(tmp_path.rglob("*.partial"))
    assert load_or_measure(target, NGramDrafter()) == costs


@pytest.mark.parametrize(
    "damage",
    [
        lambda values: "",
        lambda values: json.dumps({**values, "windows": [1, 2]}),
        lambda values: json.dumps({**values, "length": 3}),
        lambda values: json.dumps({**values, "passes": [[{"verify": 1.0}]]}),
        lambda values: json.dumps({**values, "passes": [values["passes"][0][:-1]]}),
        lambda values: json.dumps(values).replace("0.0", "-1.0", 1).replace("e-", "e+"),
    ],
)
def test_notes_that_are_damaged_or_of_another_measurement_are_not_used(
    damage: Any, tmp_path: Path, passes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = cases.target("rnn")
    interrupt_after(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        load_or_measure(target, NGramDrafter())
    (path,) = tmp_path.rglob("*.partial")
    values = json.loads(path.read_text())
    values["passes"][0][0]["draft"] = 0.0
    path.write_text(damage(values))
    passes.clear()
    load_or_measure(target, NGramDrafter())
    assert len(passes) == FEWEST_PASSES + 1


@pytest.mark.parametrize(("seconds", "level"), [(1.5, logging.INFO), (17.5, logging.WARNING)])
def test_the_log_says_what_is_measured_and_how_long_it_took(
    seconds: float,
    level: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What took so long that Python showed its progress is also shown to have ended."""
    now = 0.0

    def slow_calibrate(*pair: Any, **options: Any) -> Any:
        nonlocal now
        costs = calibrate(*pair, **{**options, "seconds": 0.0})
        now += seconds
        return costs

    monkeypatch.setattr(measuring, "calibrate", slow_calibrate)
    monkeypatch.setattr(measuring.time, "monotonic", lambda: now)
    caplog.set_level(logging.INFO, logger="lightning_specdec")
    measuring.inform_once.cache_clear()
    load_or_measure(cases.target("rnn"), NGramDrafter())
    first, last = caplog.records
    assert "measuring what rounds cost, once for each pair" in first.getMessage()
    assert last.getMessage() == f"measured what rounds with NGramDrafter cost, in {seconds} s"
    assert last.levelno == level

    caplog.clear()
    load_or_measure(cases.target("rnn"), NGramDrafter())
    assert not caplog.records


def test_custom_generate_says_that_it_measures_and_how_long_it_took(
    caplog: pytest.LogCaptureFixture,
) -> None:
    measuring.inform_once.cache_clear()
    caplog.set_level(logging.INFO, logger="lightning_specdec")
    model: Any = tiny("llama")
    model.generate(
        torch.tensor([[1, 2, 3]]),
        custom_generate=lightning_specdec.generate,
        num_draft_tokens="auto",
        max_new_tokens=4,
    )
    messages = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("lightning_specdec.")
    ]
    measuring_at = next(i for i, text in enumerate(messages) if "measuring what rounds" in text)
    pattern = r"measured what rounds with NGramDrafter cost, in \d+\.\d s"
    assert any(re.fullmatch(pattern, text) for text in messages[measuring_at + 1 :])
