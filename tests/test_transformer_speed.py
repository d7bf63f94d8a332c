"""Laws of the benchmark of transformers: predictions are counted right, tables are complete."""

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
    decoder = SpeculativeDecoder(target, ModelDrafter(target))
    target_row, draft_row = prediction_quality.quality(decoder, data)
    assert target_row["agreement"] == 1
    assert target_row["bits_per_byte"] is None
    assert target_row["loss"] > 0
    assert target_row.pop("predictor") == "target"
    assert draft_row.pop("predictor") == "ModelDrafter"
    assert target_row == draft_row


def test_every_exit_layer_is_a_predictor(
    prediction_quality: ModuleType, data: QuadraticProgressions
) -> None:
    decoder = SpeculativeDecoder(cases.target("llama"), EarlyExitDrafter(1))
    rows = prediction_quality.quality(decoder, data)
    assert [row["predictor"] for row in rows] == ["target", "exit 1", "exit 2"]
    for row in rows:
        assert 0 <= row["agreement"] <= 1
        assert row["loss"] > 0


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_a_head_is_judged_by_the_token_that_many_places_ahead(
    prediction_quality: ModuleType,
    data: QuadraticProgressions,
    ahead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def oracle_logits(tokens: Tensor) -> Tensor:
        future_tokens = tokens.roll(-ahead, dims=1)
        return 50.0 * torch.nn.functional.one_hot(future_tokens, cases.VOCAB)

    predictors = [prediction_quality.Predictor("oracle", ahead, oracle_logits)]
    bytes_per_token = 2.0
    monkeypatch.setattr(
        prediction_quality, "predictors_of", lambda name, drafter, target: predictors
    )
    monkeypatch.setattr(
        QuadraticProgressions, "bytes_per_token", lambda self, *splits: bytes_per_token
    )
    target = cases.target("llama")
    decoder = SpeculativeDecoder(target, ModelDrafter(target))
    target_row, oracle_row = prediction_quality.quality(decoder, data)
    assert oracle_row["accuracy"] == 1
    assert oracle_row["loss"] < 1e-6
    assert target_row["accuracy"] < 1

    bits_per_token = target_row["loss"] / math.log(2)
    assert target_row["bits_per_byte"] == pytest.approx(bits_per_token / bytes_per_token)
    if ahead == 1:
        assert oracle_row["agreement"] == pytest.approx(target_row["accuracy"])


def result_row(batch_size: int, draft: str, speedup: float | None, **values: Any) -> dict[str, Any]:
    """A row of the benchmark. Without a speedup it failed."""
    row = {
        "checkpoint": "x",
        "rule": "ExactMatch",
        "temperature": 0.0,
        "batch_size": batch_size,
        "draft": draft,
        "num_draft_tokens": 4,
        "walltime_speedup": speedup,
        "speedup_quartiles": (1.0, 2.0),
        "acceptance_rate": None,
        "block_efficiency": 2.0,
        "cost_ratio": 0.5,
        "same_tokens": True,
        "error": "no room" if speedup is None else None,
    }
    row.update(values)
    return row


def test_the_table_shows_the_best_row_of_every_setting(record_tables: ModuleType) -> None:
    rows = [
        result_row(1, "exit 1", 1.2),
        result_row(1, "exit 2", 1.5),
        result_row(4, "exit 1", None),
        result_row(16, "exit 1", 0.9),
    ]
    assert record_tables.transformer_speed_table(rows).splitlines()[2:] == [
        "| x | ExactMatch, 0 | 1 | exit 2, 4 | - | 2.00 | 0.50 | 1.50 (1.00 to 2.00) |",
        "| x | ExactMatch, 0 | 4 | failed | - | - | - | - |",
        "| x | ExactMatch, 0 | 16 | exit 1, 4 | - | 2.00 | 0.50 | 0.90 (1.00 to 2.00) |",
    ]
