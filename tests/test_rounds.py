"""A round from outside: one read of the device, and what is left after Ctrl-C in its middle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_specdec.decoding import (
    DecodeInterrupted,
    Session,
    autoregressive_decode,
    open_session,
    speculative_decode,
)
from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput
from lightning_specdec.rules import Sampling


class Interrupted(cases.Wrapped):
    """A model at whose n-th call somebody presses Ctrl-C."""

    def __init__(self, model: LanguageModel, at_call: int) -> None:
        super().__init__(model)
        self.calls_left = at_call

    def forward(
        self,
        tokens: Tensor,
        state: DecodeState | None = None,
        **options: Any,
    ) -> ModelOutput:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise KeyboardInterrupt
        return super().forward(tokens, state, **options)


@pytest.mark.parametrize("speculative", [True, False])
def test_ctrl_c_hands_over_what_is_committed(speculative: bool) -> None:
    model = Interrupted(cases.target("rnn"), 3)
    drafter = cases.drafter("near", "rnn")
    with pytest.raises(DecodeInterrupted) as caught:
        if speculative:
            speculative_decode(model, drafter, cases.PROMPTS, max_new_tokens=30)
        else:
            autoregressive_decode(model, cases.PROMPTS, max_new_tokens=30)

    expected = autoregressive_decode(cases.target("rnn"), cases.PROMPTS, max_new_tokens=30).tokens
    for row, tokens in zip(caught.value.result.rows, expected, strict=True):
        assert row.stop_reason == "interrupted"
        assert row.num_rounds == 2
        assert 2 <= len(row.tokens) < 30
        assert row.tokens == tokens[: len(row.tokens)]


def test_a_session_goes_on_after_a_failed_call() -> None:
    model = Interrupted(cases.target("rnn"), 3)
    drafter = cases.drafter("near", "rnn")
    session = open_session(model, drafter, cases.PROMPTS, max_new_tokens=12, sampling=Sampling(1.0))
    num_failures = 0
    while session.live:
        try:
            session.step()
        except KeyboardInterrupt:
            num_failures += 1
    assert num_failures == 1
    expected = cases.standard("rnn", Sampling(1.0), 12, None)
    assert session.result().tokens == expected.tokens


class Reads(TorchDispatchMode):
    """Lists the operations and methods that make a host wait for its device."""

    METHODS = (
        "tolist",
        "item",
        "numpy",
        "cpu",
        "nonzero",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__array__",
    )
    OPERATIONS = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique",
        "_unique2",
        "equal",
        "is_nonzero",
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen: list[str] = []
        for name in self.METHODS:
            method = getattr(torch.Tensor, name)
            monkeypatch.setattr(torch.Tensor, name, self.counted(name, method))

    def counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            self.seen.append(name)
            with torch._C.DisableTorchFunction():  # which would call this again
                return method(tensor, *arguments, **options)

        return call

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if operation._schema.name.removeprefix("aten::") in self.OPERATIONS:
            self.seen.append(operation._schema.name)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", cases.RULES)
@pytest.mark.parametrize(
    ("target", "name"), cases.pairs(["near", "early_exit", "heads"], ["rnn", "transformer"])
)
def test_the_host_reads_the_device_once_a_round(
    target: str,
    name: str,
    rule: str,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = Session(
        cases.target(target),
        cases.drafter(name, target),
        max_length=40,
        rule=cases.RULES[rule](),
        sampling=Sampling(temperature, top_p=0.9),
        eos=cases.EOS,
        seed=1,
        logprobs=True,
    )
    round_reads = []
    with Reads(monkeypatch) as reads:
        for prompt in cases.PROMPTS:
            session.add(prompt, max_new_tokens=12)
            session.cancel(session.add(prompt, max_new_tokens=12))
        while session.live:
            reads.seen.clear()
            session.step()
            round_reads.append(list(reads.seen))
    assert len(round_reads) > 2
    assert all(names == ["tolist"] for names in round_reads), round_reads


def test_the_count_of_reads_sees_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with Reads(monkeypatch) as reads:
        values = torch.tensor([1.0, 0.0])
        _ = values[values > 0]
        _ = values.sum().item()
        _ = bool(values[0])
        _ = values.tolist()
    assert len(reads.seen) >= 4
