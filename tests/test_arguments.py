"""What a user may hand in, in every form, and what is refused: by one ValueError that says what to do."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch

from lightning_specdec.decoding import Session, autoregressive_decode, speculative_decode
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.models import RNN
from lightning_specdec.rules import EpsilonThreshold, Sampling, TypicalAcceptance

TARGET, DRAFTER = cases.target("rnn"), cases.drafter("near", "rnn")


@pytest.mark.parametrize(
    "prompts",
    [
        [[1, 2, 3]],
        [1, 2, 3],
        (1, 2, 3),
        [(1, 2, 3)],
        torch.tensor([1, 2, 3]),
        torch.tensor([[1, 2, 3]]),
        torch.tensor([[1, 2, 3]], dtype=torch.int32),
        [torch.tensor([1, 2, 3])],
        range(1, 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_prompt_is_the_same_prompt_in_every_form(prompts: Any) -> None:
    expected = autoregressive_decode(TARGET, [[1, 2, 3]], max_new_tokens=5).tokens
    assert speculative_decode(TARGET, DRAFTER, prompts, max_new_tokens=5).tokens == expected
    assert autoregressive_decode(TARGET, prompts, max_new_tokens=5).tokens == expected


def test_a_list_is_one_prompt_and_a_list_of_lists_is_several() -> None:
    assert len(speculative_decode(TARGET, DRAFTER, [1, 2, 3], max_new_tokens=2).rows) == 1
    assert len(speculative_decode(TARGET, DRAFTER, [[1], [2], [3]], max_new_tokens=2).rows) == 3
    assert len(speculative_decode(TARGET, DRAFTER, torch.tensor([[1, 2], [3, 4]]), max_new_tokens=2).rows) == 2


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "none": ([], "no prompt"),
    "empty": ([[]], "prompt 0 is empty"),
    "one empty": ([[1], []], "prompt 1 is empty"),
    "empty tensor": (torch.zeros(0, dtype=torch.long), "no prompt"),
    "empty rows": (torch.zeros(2, 0, dtype=torch.long), "prompt 0 is empty"),
    "too large": ([1, cases.VOCAB], "holds 11: tokens of this model are integers from 0 to 10"),
    "negative": ([[1, 2], [3, -1]], "prompt 1 holds -1"),
    "floats": (torch.tensor([1.0, 2.0]), r"holds 1\.0"),
    "a tensor of three dimensions": (torch.ones(1, 2, 2, dtype=torch.long), r"holds \[1, 1\]"),
    "booleans": (torch.tensor([True, False]), "holds True"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused(name: str) -> None:
    prompts, message = BAD_PROMPTS[name]
    with pytest.raises(ValueError, match=message):
        speculative_decode(TARGET, DRAFTER, prompts, max_new_tokens=4)
    with pytest.raises(ValueError, match=message):
        autoregressive_decode(TARGET, prompts, max_new_tokens=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"max_new_tokens": -3}, "max_new_tokens must be"),
        ({"eos": cases.VOCAB}, "eos must be from 0 to 10, got 11"),
        ({"eos": [1, -1]}, "eos must be from 0 to 10, got -1"),
        ({"indices": [0, 1]}, "1 prompts but 2 indices"),
        ({"seed": -1}, "seed must be from 0"),
        ({"seed": 2**63}, "seed must be from 0"),
        *(({"num_draft_tokens": window}, "num_draft_tokens must be") for window in (0, -1, True)),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_on_both_sides(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 4, **options}
    with pytest.raises(ValueError, match=message):
        speculative_decode(TARGET, DRAFTER, [[1, 2]], **arguments)
    with pytest.raises(ValueError, match=message):
        autoregressive_decode(TARGET, [[1, 2]], **arguments)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-1.0, float("nan"), float("inf"), 1e-9]),
        ("top_k", [0, -2]),
        ("top_p", [0.0, 1.5, -0.1]),
        ("min_p", [-0.1, 1.5, float("nan")]),
    ],
)
def test_sampling_out_of_range_is_refused(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{name} must be"):
            Sampling(**{"temperature": 1.0, name: value})


@pytest.mark.parametrize("value", [0.0, -0.1, 1.1, float("nan")])
def test_thresholds_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="epsilon must be in"):
        EpsilonThreshold(value)
    with pytest.raises(ValueError, match="epsilon must be in"):
        TypicalAcceptance(value)
    with pytest.raises(ValueError, match="delta must be in"):
        TypicalAcceptance(0.1, value)


@pytest.mark.parametrize("name", ["embedding_size", "hidden_size", "num_layers"])
def test_sizes_of_networks_are_checked(name: str) -> None:
    for value in (0, -1, 2**30):
        with pytest.raises(ValueError, match=f"{name} must be from 1 to"):
            RNN(5, **{name: value})
    with pytest.raises(ValueError, match="vocab_size must be from 2"):
        RNN(1)


def test_two_vocabularies_are_refused_with_both_sizes() -> None:
    other = ModelDrafter(cases.MODELS["rnn"](1, vocab_size=7))
    with pytest.raises(ValueError, match="the draft has a vocabulary of 7 tokens, the target one of 11"):
        speculative_decode(TARGET, other, [[1, 2]], max_new_tokens=4)


def test_a_session_refuses_what_it_has_no_room_for() -> None:
    session = Session(TARGET, DRAFTER, max_length=10)
    with pytest.raises(ValueError, match="a prompt of 3 tokens and 8 new ones exceed max_length=10"):
        session.add([1, 2, 3], max_new_tokens=8)
    with pytest.raises(ValueError, match="the prompt is empty"):
        session.add([], max_new_tokens=2)
    with pytest.raises(ValueError, match="max_new_tokens must be"):
        session.add([1], max_new_tokens=0)
    with pytest.raises(ValueError, match="max_length must be at least 2"):
        Session(TARGET, DRAFTER, max_length=1)
    row = session.add([1, 2, 3], max_new_tokens=7)
    while session.step():
        pass
    assert row.num_new == 7
    assert session.result().tokens == autoregressive_decode(TARGET, [1, 2, 3], max_new_tokens=7).tokens
