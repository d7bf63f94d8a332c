"""A progress bar outside a terminal prints whole lines."""

from __future__ import annotations

import pytest

from lightning_specdec.training import callbacks
from lightning_specdec.training.callbacks import progress_bar


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "LINE_SECONDS", 0.0)


def test_a_bar_in_a_pipe_prints_a_line_for_each_state(capsys: pytest.CaptureFixture[str]) -> None:
    bar = progress_bar(4, "step")
    bar.set_postfix({"loss": 2.5}, refresh=False)
    bar.update(2)
    bar.update(2)
    bar.close()
    text = capsys.readouterr().err
    assert "\r" not in text
    lines = text.splitlines()
    assert lines[0].startswith("0% 0/4 step 00:00<")
    assert lines[1] == "50% 2/4 step 00:00<00:00, loss=2.500"
    assert lines[2] == "100% 4/4 step 00:00<00:00, loss=2.500"
    assert len(lines) == 3
    assert text.endswith("\n")


def test_a_bar_that_is_not_shown_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    bar = progress_bar(4, "step", shown=False)
    bar.update(4)
    bar.close()
    assert capsys.readouterr().err == ""
