"""A recipe warns of training text that another model wrote, and of no other."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tiny_models import write_text_model

from lightning_specdec.data.corpus import shipped_corpora
from lightning_specdec.training import draft_recipes
from lightning_specdec.training.target_shape import TargetShape


def test_text_of_another_model_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = TargetShape.of(write_text_model(tmp_path / "target"))
    manifest = json.loads((Path(shipped_corpora()[0]) / "manifest.json").read_text())
    with caplog.at_level(logging.WARNING):
        draft_recipes._warn_of_other_writers(target, [manifest])
    assert "the text was written by another model (checkpoints/smollm2)" in caplog.text

    caplog.clear()
    weights = tmp_path / "target"
    manifest["target"]["sha256"] = draft_recipes.weights_sha256(weights)
    draft_recipes._warn_of_other_writers(target, [manifest])
    manifest["target"]["sha256"] = draft_recipes.single_file_sha256(weights)
    draft_recipes._warn_of_other_writers(target, [manifest])
    assert caplog.text == ""
