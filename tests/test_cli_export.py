"""Laws of `export` and `info`: no file is lost by a slip of the hand, and a recipe can be read."""

from __future__ import annotations

import shutil
from pathlib import Path

from cli_fixtures import ckpt, here, refused, shipped_run, succeed

from lightning_specdec import checkpoint

__all__ = ["ckpt", "here", "shipped_run"]


def test_an_export_replaces_nothing_but_an_earlier_export(ckpt: str, here: None) -> None:
    shutil.copy(ckpt, "trained.ckpt")
    shutil.copy(ckpt, "other.ckpt")
    Path("link.ckpt").symlink_to("trained.ckpt")
    Path("README.md").write_text("read me")
    Path("empty").touch()
    for path in ("trained.ckpt", "./trained.ckpt", "link.ckpt"):
        refused("export", "--ckpt", "trained.ckpt", "--output", path, told="is the input, and training goes on from it")
    for path in ("README.md", "empty", "other.ckpt"):
        refused("export", "--ckpt", "trained.ckpt", "--output", path, told="is no exported checkpoint: choose another")
    for path in ("new.ckpt", "new.ckpt"):
        succeed("export", "--ckpt", "trained.ckpt", "--output", path)
    succeed("export", "--ckpt", "new.ckpt", "--output", "new.ckpt", "--dtype", "bfloat16")
    assert checkpoint.is_exported("new.ckpt") and not checkpoint.is_exported("trained.ckpt")


def test_what_is_no_file_is_not_replaced(ckpt: str, here: None) -> None:
    refused("export", "--ckpt", ckpt, "--output", "/dev/null", told="is no exported checkpoint")


def test_the_losses_of_a_recipe_have_a_line_each_and_four_digits(ckpt: str, tmp_path: Path) -> None:
    loaded, path = checkpoint.load(ckpt), str(tmp_path / "own.ckpt")
    recipe = {
        "losses": {"val/loss": 0.24335110187530518, "val/x": float("inf"), "\x1b[31m": [1]},
        "rate": 0.00012345678,
    }
    checkpoint.save(path, loaded.target, loaded.drafter, recipe=recipe)
    shown = succeed("info", "--ckpt", path).out
    for line in ("losses val/loss: 0.2434", "losses val/x: inf", "losses \\u001b[31m: [1]", "rate: 0.00012345678"):
        assert f"\nrecipe      {line}\n" in shown
    checkpoint.save(path, loaded.target, loaded.drafter, recipe={"losses": [0.5]})
    assert "recipe      losses: [0.5]\n" in succeed("info", "--ckpt", path).out
