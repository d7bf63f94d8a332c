"""Calls of all widths give the same logits, or results say that they are not lossless."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.audit.auditor import Auditor
from lightning_specdec.config.files import cache_home
from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.models import agreement
from lightning_specdec.models.agreement import agreement_of, measure
from lightning_specdec.models.base import ModelOutput
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.rnn import RNN
from lightning_specdec.rules import ExactMatch, RejectionSampling, Sampling


class DisagreeingLM(HuggingFaceLM):
    """Adds 3% of the logits' range to a token's logit in calls on one token of each row."""

    def forward(self, tokens: Any, *arguments: Any, **options: Any) -> ModelOutput:
        output = super().forward(tokens, *arguments, **options)
        if tokens.shape[1] == 1:
            logits_range = output.logits.max() - output.logits.min()
            output.logits[..., 5] += 0.03 * logits_range
        return output

    def packed(self) -> HuggingFaceLM:
        return self


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_home()


@pytest.fixture
def everything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "needs_measurement", lambda model: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [lambda: HuggingFaceLM(tiny("llama")), lambda: RNN(67)])
def test_healthy_models_agree_in_calls_of_all_widths(make: Any, dtype: torch.dtype) -> None:
    outcome = measure(make().to(dtype).eval().packed())
    assert outcome.holds and outcome.reason is None


def test_a_model_that_computes_otherwise_on_one_token_is_found() -> None:
    outcome = measure(DisagreeingLM(tiny("llama")))
    assert not outcome.holds and outcome.calls.startswith("one token")
    assert outcome.difference == pytest.approx(0.03, rel=0.2)


def test_results_are_not_lossless_where_the_target_disagrees_with_itself(
    cache: Path, everything_is_measured: None
) -> None:
    decoder = SpeculativeDecoder(DisagreeingLM(tiny("llama")), NGramDrafter())
    drafted = decoder.decode([1, 2, 3], max_new_tokens=4)
    standard = decoder.decode_standard([1, 2, 3], max_new_tokens=4)
    for result in (drafted, standard):
        assert not result.lossless
        assert "calls on one token and longer calls" in str(result.lossy_reason)


def test_an_audit_fails_where_the_target_disagrees_with_itself(
    cache: Path, everything_is_measured: None
) -> None:
    decoder = SpeculativeDecoder(DisagreeingLM(tiny("llama")), NGramDrafter())
    auditor: Auditor = decoder.audit(
        [[1, 2, 3]],
        drafters={"ngram": NGramDrafter()},
        rules={"exact": ExactMatch(), "rejection": RejectionSampling()},
        samplings={"T=1": Sampling(temperature=1.0)},
    )
    findings = auditor.run().findings
    assert [finding.verdict for finding in findings] == ["not lossless", "not lossless"]
    assert all(finding.failed for finding in findings)
    assert all("calls on one token" in finding.figures["reason"] for finding in findings)


def test_the_outcome_is_measured_once_and_kept(
    cache: Path,
    everything_is_measured: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "lightning_specdec.models.agreement")
    model = HuggingFaceLM(tiny("llama"))
    first = agreement_of(model)
    assert first is not None and first.holds
    assert len(caplog.messages) == 1
    (path,) = cache.glob("agreement-*.json")

    monkeypatch.setattr(agreement, "measure", None)
    assert agreement_of(model) == first
    monkeypatch.undo()

    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    path.write_text('{"difference": ')
    assert agreement_of(HuggingFaceLM(tiny("llama")).to(torch.bfloat16)) is not None


def test_a_plain_float32_model_of_torch_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "measure", None)
    assert agreement_of(HuggingFaceLM(tiny("llama")).packed()) is None
    assert agreement_of(RNN(67)) is None


def test_nan_does_not_agree() -> None:
    model = HuggingFaceLM(tiny("llama"))
    with torch.no_grad():
        model.model.lm_head.weight.fill_(torch.nan)
    assert not measure(model).holds
