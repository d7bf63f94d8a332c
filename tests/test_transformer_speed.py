"""Predictions of drafts are counted correctly, and the table of the transformers has every setting."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

from lightning_specdec import ModelDrafter, SpeculativeDecoder
from lightning_specdec.data import QuadraticProgressions
from lightning_specdec.drafters import EarlyExitDrafter

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def prediction_quality(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("prediction_quality")


@pytest.fixture
def record_tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("record_tables")


@pytest.fixture
def data() -> QuadraticProgressions:
    return QuadraticProgressions(cases.VOCAB, 12, num_val=1, num_test=5, batch_size=2)


def test_the_target_as_its_own_draft_predicts_as_it_does(
    prediction_quality: ModuleType, data: QuadraticProgressions
) -> None:
    target = cases.target("llama")
    own, draft = prediction_quality.quality(SpeculativeDecoder(target, ModelDrafter(target)), data)
    assert (own["predictor"], draft["predictor"]) == ("target", "ModelDrafter")
    assert {**own, "predictor": ""} == {**draft, "predictor": ""} and own["agreement"] == 1
    assert own["bits_per_byte"] is None and own["loss"] > 0
    rows = prediction_quality.quality(SpeculativeDecoder(target, EarlyExitDrafter(1)), data)
    assert [row["predictor"] for row in rows] == ["target", "exit 1", "exit 2"]
    assert all(0 <= row["agreement"] <= 1 and row["loss"] > 0 for row in rows)


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_a_head_is_judged_by_the_token_that_many_places_ahead(
    prediction_quality: ModuleType,
    data: QuadraticProgressions,
    ahead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def knows(tokens: Tensor) -> Tensor:
        return 50.0 * torch.nn.functional.one_hot(tokens.roll(-ahead, dims=1), cases.VOCAB)

    oracle_predictor = prediction_quality.Predictor("oracle", ahead, knows)
    monkeypatch.setattr(
        prediction_quality, "predictors_of", lambda name, drafter, target: [oracle_predictor]
    )
    monkeypatch.setattr(QuadraticProgressions, "bytes_per_token", lambda self, *splits: 2.0)
    target = cases.target("llama")
    own, oracle = prediction_quality.quality(SpeculativeDecoder(target, ModelDrafter(target)), data)
    assert oracle["accuracy"] == 1 and oracle["loss"] < 1e-6 and own["accuracy"] < 1
    assert own["bits_per_byte"] == pytest.approx(own["loss"] / math.log(2) / 2)
    if ahead == 1:
        assert oracle["agreement"] == pytest.approx(own["accuracy"])


def test_the_table_shows_the_best_row_of_every_setting(record_tables: ModuleType) -> None:
    def row(batch_size: int, draft: str, speedup: float | None, **others: Any) -> dict[str, Any]:
        figures = {
            "acceptance_rate": None,
            "block_efficiency": 2.0,
            "cost_ratio": 0.5,
            "same_tokens": True,
        }
        given = {
            "checkpoint": "x",
            "rule": "ExactMatch",
            "temperature": 0.0,
            "batch_size": batch_size,
            "draft": draft,
        }
        error = "no room" if speedup is None else None
        given |= {
            "num_draft_tokens": 4,
            "walltime_speedup": speedup,
            "speedup_quartiles": (1.0, 2.0),
            "error": error,
        }
        return {**figures, **given, **others}

    rows = [
        row(1, "exit 1", 1.2),
        row(1, "exit 2", 1.5),
        row(4, "exit 1", None),
        row(16, "exit 1", 0.9),
    ]
    assert record_tables.transformer_speed_table(rows).splitlines()[2:] == [
        "| x | ExactMatch, 0 | 1 | exit 2, 4 | - | 2.00 | 0.50 | 1.50 (1.00 to 2.00) |",
        "| x | ExactMatch, 0 | 4 | failed | - | - | - | - |",
        "| x | ExactMatch, 0 | 16 | exit 1, 4 | - | 2.00 | 0.50 | 0.90 (1.00 to 2.00) |",
    ]
