"""The trained draft that ships: small, whole, and of the target whose text ships too."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from lightning_specdec import checkpoints
from lightning_specdec.drafters import EagleDrafter

ROOT = Path(__file__).parent.parent
FILE = ROOT / "checkpoints" / "smollm2_eagle.safetensors"
TEXTS = ROOT / "benchmarks" / "smollm2_text"


def test_it_is_small_whole_and_told_of() -> None:
    assert FILE.stat().st_size < 20e6
    drafter = checkpoints.load(FILE).drafter
    assert isinstance(drafter, EagleDrafter)
    assert all(torch.isfinite(weight).all() for weight in drafter.parameters())
    assert f"`{FILE.name}`" in (ROOT / "checkpoints" / "README.md").read_text()


def test_it_learned_the_shipped_text_of_its_target() -> None:
    found = checkpoints.load(FILE)
    manifests = [json.loads(path.read_text()) for path in TEXTS.glob("*/manifest.json")]
    assert found.reference is not None
    assert {each["target"]["sha256"] for each in manifests} == {found.reference.sha256}
    assert {Path(path).name for path in found.recipe["data_arguments"]["paths"]} == {
        path.parent.name for path in TEXTS.glob("*/manifest.json")
    }
