"""Laws of calls that read a long prompt at once: they are announced, and short ones are not."""

from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("openvino")

from test_openvino import openvino_llama

from lightning_specdec.models import openvino


def test_a_long_prompt_is_announced_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = openvino_llama()
    monkeypatch.setattr(openvino, "LONG_CALL_TOKENS", 20)
    caplog.set_level(logging.INFO, logger="lightning_specdec")
    tokens = torch.arange(20)[None] % model.vocab_size

    model(tokens[:, :19])
    assert not [record for record in caplog.records if "one call" in record.getMessage()]

    run = openvino._Graph.run
    logged: list[str] = []

    def observed(self: openvino._Graph, *arguments: object) -> object:
        logged.extend(record.getMessage() for record in caplog.records)
        return run(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(openvino._Graph, "run", observed)
    model(tokens)
    assert "reading 20 tokens of the prompt in one call" in logged
