"""Calls that are recorded and replayed give what the same calls give unrecorded: on a GPU CUDA graphs, here the same
tensors that stay."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import cases
import pytest

from lightning_specdec.decoding import Session, speculative_decode
from lightning_specdec.drafters import Drafter, EarlyExitDrafter, ModelDrafter
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.rules import Sampling

SAMPLINGS = {"greedy": Sampling(), "hot": Sampling(1.3, top_k=6), "top_p": Sampling(0.8, top_p=0.7)}


def recorded(model: Any) -> HuggingFaceLM:
    return deepcopy(model).record()


def recording(drafter: Drafter) -> Drafter:
    """The drafter with a model of its own that records."""
    other = deepcopy(drafter)
    if isinstance(other, ModelDrafter):
        other.model = recorded(other.model)
    return other


NAMES = ["near", "hotter", "itself", "early_exit", "early_exit_own", "early_exit_reduced", "heads", "lookup_exit"]


@pytest.mark.parametrize(
    ("name", "rule", "sampling"),
    [(name, *turn) for name in NAMES for turn in cases.in_turn(cases.rules_of(name), [*SAMPLINGS], "llama", name)],
)
def test_recorded_rounds_decide_as_unrecorded_ones(name: str, rule: str, sampling: str) -> None:
    target, drafter = cases.target("llama"), cases.drafter(name, "llama")
    options: dict[str, Any] = {"max_new_tokens": 14, "sampling": SAMPLINGS[sampling], "seed": 3, "eos": cases.EOS}
    plain = speculative_decode(target, drafter, cases.PROMPTS, rule=cases.RULES[rule](), **options)
    model, other = recorded(target), recording(drafter)
    for _ in range(2):  # the second time all is replayed
        again = speculative_decode(model, other, cases.PROMPTS, rule=cases.RULES[rule](), logprobs=True, **options)
        assert [(row.tokens, row.rounds, row.counts) for row in again.rows] == [
            (row.tokens, row.rounds, row.counts) for row in plain.rows
        ]


def test_a_second_session_records_nothing() -> None:
    model, drafter = recorded(cases.target("llama")), EarlyExitDrafter(1)
    counts = []
    for prompt in ([1, 2, 3], [1, 2, 3], [1, 2, 3]):
        speculative_decode(model, drafter, prompt, max_new_tokens=12)
        assert model._pool is not None
        (storage,) = model._pool._idle
        assert storage.graphs is not None
        keys: list[Any] = list(storage.graphs._recordings)
        counts.append(len(keys))
    assert counts[1] == counts[2], "a text of the same length was recorded again"


@pytest.mark.parametrize("name", ["near", "early_exit", "heads"])
def test_a_next_turn_goes_on_over_recorded_calls(name: str) -> None:
    """The states lag behind a resumed text by several tokens, whose places no recorded call may take for the last."""
    found = []
    for model, drafter in (
        (cases.target("llama"), cases.drafter(name, "llama")),
        (recorded(cases.target("llama")), recording(cases.drafter(name, "llama"))),
    ):
        session = Session(model, drafter, max_length=60, num_draft_tokens=3)
        row, rows = session.add([1, 2, 3], max_new_tokens=7), []
        for more in ([4, 5, 6, 7], [], [9, 8]):
            while session.live:
                session.step()
            rows.append(row)
            row = session.resume(row, [*row.text, *more], max_new_tokens=7)
        while session.live:
            session.step()
        found.append([(each.text, each.rounds) for each in (*rows, row)])
    assert found[0] == found[1]
