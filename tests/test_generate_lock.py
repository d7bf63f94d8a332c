"""Two runs of `generate` never write to the same directory at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_specdec.training import GenerateText


def test_a_directory_that_a_run_writes_to_is_refused_until_the_run_ends(tmp_path: Path) -> None:
    output = tmp_path / "text"
    first = GenerateText("model", str(output))
    second = GenerateText("model", str(output))
    elsewhere = GenerateText("model", str(tmp_path / "other"))
    first._lock_directory()
    with pytest.raises(ValueError, match=r"another run writes to .*text: wait until it ends, or"):
        second._lock_directory()
    elsewhere._lock_directory()

    first.teardown("predict")
    second._lock_directory()
    with pytest.raises(KeyboardInterrupt), second._unlocked_on_failure():
        raise KeyboardInterrupt
    first._lock_directory()
    first.teardown("predict")
    elsewhere.teardown("predict")
