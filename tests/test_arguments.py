"""Laws of arguments: prompts in every form, and one ValueError that says what to do."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch

from lightning_specdec.decoding import autoregressive_decode, speculative_decode

TARGET = cases.target("rnn")
DRAFTER = cases.drafter("near", "rnn")


def test_a_prompt_is_the_same_prompt_in_every_form() -> None:
    expected = autoregressive_decode(TARGET, [[1, 2, 3]], max_new_tokens=5).tokens
    tensor = torch.tensor([1, 2, 3])
    forms: list[Any] = [
        [1, 2, 3],
        [(1, 2, 3)],
        tensor,
        tensor[None],
        tensor.int(),
        [tensor],
        range(1, 4),
    ]
    for prompts in forms:
        result = speculative_decode(TARGET, DRAFTER, prompts, max_new_tokens=5)
        standard = autoregressive_decode(TARGET, prompts, max_new_tokens=5)
        assert result.tokens == expected
        assert standard.tokens == expected

    three_prompts = [[1], [2], [3]]
    result = speculative_decode(TARGET, DRAFTER, three_prompts, max_new_tokens=2)
    assert len(result.rows) == 3


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], "no prompt"),
    ([[1], []], "prompt 1 is empty"),
    ([1, cases.VOCAB], "holds 11: tokens of this model are integers from 0 to 10"),
    ([[1, 2], [3, -1]], "prompt 1 holds -1"),
    (torch.tensor([1.0, 2.0]), r"holds 1\.0"),
    (torch.tensor([True, False]), "holds True"),
]
BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, "max_new_tokens must be"),
    ({"eos": [1, -1]}, "eos must be from 0 to 10, got -1"),
    ({"indices": [0, 1]}, "1 prompts but 2 indices"),
    ({"seed": 2**63}, "seed must be from 0"),
    ({"num_draft_tokens": True}, "num_draft_tokens must be"),
    ({"temperature": float("nan")}, "temperature must be"),
    ({"top_p": 0.0}, "top_p must be"),
]
BAD_ARGUMENTS: list[tuple[Any, dict[str, Any], str]] = [
    *((prompts, {}, message) for prompts, message in BAD_PROMPTS),
    *(([[1, 2]], settings, message) for settings, message in BAD_SETTINGS),
]


@pytest.mark.parametrize(("prompts", "options", "message"), BAD_ARGUMENTS, ids=str)
def test_bad_prompts_and_settings_are_refused_by_both_methods(
    prompts: Any,
    options: dict[str, Any],
    message: str,
) -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 4, **options}
    with pytest.raises(ValueError, match=message):
        speculative_decode(TARGET, DRAFTER, prompts, **arguments)
    with pytest.raises(ValueError, match=message):
        autoregressive_decode(TARGET, prompts, **arguments)
