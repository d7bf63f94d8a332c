"""What a session refuses, notices and lets go of: contexts too short, logits that are no numbers, rows that ended."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from cases import Wrapped
from torch import Tensor

from lightning_specdec.decoding import AdaptiveWindow, Calibration, Session, autoregressive_decode, open_session, run
from lightning_specdec.decoding import speculative_decode as decode
from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput
from lightning_specdec.rules import Sampling


class Broken(Wrapped):
    """From its n-th call on, one logit of the last position of the last row is `value`."""

    def __init__(self, model: LanguageModel, value: float, call: int = 3) -> None:
        super().__init__(model)
        self.value, self.calls_left = value, call

    def forward(self, tokens: Tensor, state: DecodeState | None = None, **options: Any) -> ModelOutput:
        output = super().forward(tokens, state, **options)
        self.calls_left -= 1
        if self.calls_left <= 0:
            output.logits[-1, -1, 4] = self.value
        return output


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["standard", "ExactMatch", "RejectionSampling", "plain rounds"])
def test_a_row_whose_logits_are_no_numbers_ends_alone(
    method: str, temperature: float, value: float, logprobs: bool
) -> None:
    whole = cases.standard("rnn", Sampling(temperature), 30, None).tokens
    model = Broken(cases.target("rnn"), value)
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": temperature, "logprobs": logprobs}
    if method == "standard":
        result = autoregressive_decode(model, cases.PROMPTS, **options)
    else:
        window = 2 if method != "plain rounds" else never()
        rule = "RejectionSampling" if method == "RejectionSampling" else None
        drafter = cases.drafter("itself", "rnn")
        result = decode(model, drafter, cases.PROMPTS, num_draft_tokens=window, rule=rule, **options)
    *others, failed = result.rows
    assert [row.stop_reason for row in result.rows] == ["length"] * 3 + ["failed"]
    assert failed.index == 3 and 2 <= len(failed.tokens) < 30
    assert failed.logprobs is None or len(failed.logprobs) == len(failed.tokens)
    if method != "RejectionSampling" or not temperature:
        assert [row.tokens for row in others] == whole[:3] and failed.tokens == whole[3][: len(failed.tokens)]


@pytest.mark.parametrize("target", ["rnn", "transformer", "llama"])
def test_nothing_of_a_failed_row_is_left_to_the_next_in_its_place(target: str) -> None:
    model = Poisoned(cases.target(target))
    session = Session(model, cases.drafter("near", target), max_length=30)
    row = session.add([1, 2, 3], max_new_tokens=9)
    session.step()
    assert row.stop_reason == "failed" and row.num_new == 0
    for begin in (lambda: session.add([3, 1], max_new_tokens=9), lambda: session.resume(row, [3, 1], max_new_tokens=9)):
        model.armed = False
        other = begin()
        while other.live:
            session.step()
        expected = autoregressive_decode(cases.target(target), [3, 1], max_new_tokens=9).tokens[0]
        assert other.result().tokens == expected


class Poisoned(Wrapped):
    """Its state and its logits are full of NaN after a call while `armed`."""

    armed = True

    def forward(self, tokens: Tensor, state: DecodeState | None = None, **options: Any) -> ModelOutput:
        output = super().forward(tokens, state, **options)
        if self.armed:
            output.logits.fill_(torch.nan)
            for held in vars(state).values():
                for part in held if isinstance(held, list | tuple) else [held]:
                    if isinstance(part, Tensor) and part.is_floating_point():
                        part.fill_(torch.nan)
        return output


def never() -> AdaptiveWindow:
    """A window that never opens: wide calls cost too much."""
    return AdaptiveWindow(Calibration((1, 3), (1.0, 9.0), (0.0, 0.0), 1.0, 1.0, 0.0))


def test_a_text_longer_than_the_targets_context_is_refused_before_decoding() -> None:
    model, drafter = Wrapped(cases.target("rnn"), 12), cases.drafter("near", "rnn")
    told = "a prompt of 7 tokens and 6 new ones do not fit the target's context of 12"
    with pytest.raises(ValueError, match=told):
        autoregressive_decode(model, cases.PROMPTS, max_new_tokens=6)
    with pytest.raises(ValueError, match=told):
        open_session(model, drafter, cases.PROMPTS, max_new_tokens=6)
    session = Session(model, drafter, max_length=40)
    with pytest.raises(ValueError, match=told):
        session.add(cases.PROMPTS[3], max_new_tokens=6)
    assert session.result().rows == [] and session.live == []
    expected = autoregressive_decode(model, cases.PROMPTS, max_new_tokens=5)
    assert decode(model, drafter, cases.PROMPTS, max_new_tokens=5).tokens == expected.tokens


def test_a_row_that_was_released_is_gone_and_the_others_are_not() -> None:
    session = Session(cases.target("rnn"), cases.drafter("near", "rnn"), max_length=30, batch_size=2)
    rows = [session.add(prompt, max_new_tokens=6) for prompt in cases.PROMPTS[:2]]
    with pytest.raises(ValueError, match="still being decoded"):
        session.release(rows[0])
    expected = run(session).tokens
    session.release(rows[0])
    assert session.result().tokens == expected[1:]
    for _ in range(50):  # a server's life
        row = session.add(cases.PROMPTS[2], max_new_tokens=2)
        run(session)
        session.release(row)
    assert len(session._added) == 1 and len(session._batch.rows) <= 2
