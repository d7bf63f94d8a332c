"""Which prompts `audit --engine` asks: those that fit the target's context in the form in which the
engine takes them."""

from __future__ import annotations

from typing import Any

import pytest
from local_server import serving
from stand_in_engine import Answers, stand_in
from text_model import model

from lightning_specdec.audit.engine_audit import EngineAuditor, EngineFindings, EnginePrompt
from lightning_specdec.audit.engine_client import EngineClient
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.rules import Sampling

__all__ = ["model"]
NUM_NEW = 4
LONG_TEXT = "the oak speaks " * 200
SHORT_TEXTS = ("the oak", "the lightning", "the lightning speaks")


@pytest.fixture(scope="module")
def decoder(model: str) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(model, NGramDrafter())


def audit(
    decoder: SpeculativeDecoder,
    prompts: list[EnginePrompt],
    *,
    takes_tokens: bool,
    num_prompts: int = 64,
) -> tuple[EngineFindings, list[dict[str, Any]]]:
    """The findings of a greedy audit, and its requests with whole answers."""
    handler = stand_in(Answers(decoder, takes_tokens=takes_tokens))
    with serving(handler) as address:
        auditor = EngineAuditor(
            EngineClient(f"http://{address}"),
            decoder.target,
            decoder.tokenizer,
            prompts,
            sampling=Sampling(),
            engine_dtype="float32",
            num_prompts=num_prompts,
            # The probes ask for four tokens, so these are other requests.
            max_new_tokens=NUM_NEW + 1,
            num_clients=1,
        )
        findings = auditor.run()
    bodies = [body for body in handler.answers.bodies if body["max_tokens"] == NUM_NEW + 1]
    return findings, bodies


def long_tokens(decoder: SpeculativeDecoder) -> list[int]:
    """Tokens that exceed the target's context."""
    tokens = decoder.encode(LONG_TEXT)
    assert decoder.target.max_positions is not None
    assert len(tokens) > decoder.target.max_positions
    return tokens


def test_a_text_that_is_too_long_is_left_out_although_its_tokens_fit(
    decoder: SpeculativeDecoder,
) -> None:
    short_tokens = decoder.encode(SHORT_TEXTS[0])
    prompts = [EnginePrompt(short_tokens, LONG_TEXT), EnginePrompt(short_tokens, SHORT_TEXTS[0])]
    findings, bodies = audit(decoder, prompts, takes_tokens=False)
    assert [body["prompt"] for body in bodies] == [SHORT_TEXTS[0]]
    assert findings.greedy.num_equal == findings.greedy.num_tokens == NUM_NEW + 1
    assert any(warning.startswith("1 prompts are left out") for warning in findings.warnings)


def test_a_text_that_fits_is_asked_although_its_tokens_are_too_long(
    decoder: SpeculativeDecoder,
) -> None:
    """A chat template may add more than there is room for."""
    prompts = [EnginePrompt(long_tokens(decoder), text) for text in SHORT_TEXTS]
    findings, bodies = audit(decoder, prompts, takes_tokens=False)
    assert [body["prompt"] for body in bodies] == list(SHORT_TEXTS)
    assert findings.greedy.num_answers == 3
    assert not any("left out" in warning for warning in findings.warnings)


def test_prompts_without_text_do_not_count_where_texts_are_sent(
    decoder: SpeculativeDecoder,
) -> None:
    short_tokens = decoder.encode(SHORT_TEXTS[0])
    prompts = [EnginePrompt(short_tokens), EnginePrompt(short_tokens)]
    prompts += [EnginePrompt(short_tokens, text) for text in SHORT_TEXTS]
    _, bodies = audit(decoder, prompts, takes_tokens=False, num_prompts=2)
    assert [body["prompt"] for body in bodies] == list(SHORT_TEXTS[:2])


def test_an_engine_that_takes_tokens_gets_those_that_fit(decoder: SpeculativeDecoder) -> None:
    """The first prompt is too long for a probe, too, which must not look like a refusal."""
    short_tokens = decoder.encode(SHORT_TEXTS[0])
    prompts = [EnginePrompt(long_tokens(decoder), "any"), EnginePrompt(short_tokens, LONG_TEXT)]
    findings, bodies = audit(decoder, prompts, takes_tokens=True)
    assert findings.prompts_as_tokens
    assert [body["prompt"] for body in bodies] == [short_tokens]
