"""Laws 5 and 7: a row's tokens depend on its prompt, its index and the seed, and on nothing that happens beside it.

Then what a session refuses, notices and lets go of: contexts too short, logits that are no numbers, rows that ended.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from cases import Wrapped
from torch import Tensor

from lightning_specdec.decoding import (
    AdaptiveWindow,
    Calibration,
    Row,
    Session,
    autoregressive_decode,
    open_session,
    run,
    speculative_decode,
    stream,
)
from lightning_specdec.decoding import speculative_decode as decode
from lightning_specdec.decoding.rows import power_of_two
from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput
from lightning_specdec.rules import Sampling


@pytest.mark.parametrize(
    ("target", "drafter", "rule", "temperature"),
    [
        (*pair, *turn)
        for pair in cases.ONE_EACH
        for turn in cases.few(cases.in_turn(cases.rules_of(pair[1]), (0.0, 1.0), *pair), *pair)
    ],
)
def test_a_ragged_batch_equals_its_rows_decoded_one_by_one(
    target: str, drafter: str, rule: str, temperature: float
) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 9,
        "rule": cases.RULES[rule](),
        "sampling": Sampling(temperature),
        "eos": cases.EOS,
        "seed": 4,
    }
    model, guesser = cases.target(target), cases.drafter(drafter, target)
    batch = speculative_decode(model, guesser, cases.PROMPTS, **options)
    for index, row in enumerate(batch.rows):
        alone = speculative_decode(
            model, guesser, cases.PROMPTS[index], indices=[index], **options
        ).rows[0]
        assert (row.tokens, row.stop_reason, row.counts, row.rounds) == (
            alone.tokens,
            alone.stop_reason,
            alone.counts,
            alone.rounds,
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("target", cases.MODELS)
def test_standard_decoding_of_a_ragged_batch_equals_its_rows_decoded_one_by_one(
    target: str, temperature: float
) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 9,
        "sampling": Sampling(temperature),
        "eos": cases.EOS,
        "seed": 4,
    }
    batch = autoregressive_decode(cases.target(target), cases.PROMPTS, **options)
    for index, prompt in enumerate(cases.PROMPTS):
        alone = autoregressive_decode(cases.target(target), prompt, indices=[index], **options)
        assert batch.tokens[index] == alone.tokens[0]


@pytest.mark.parametrize(
    ("target", "drafter", "rule"),
    [
        *((*pair, "RejectionSampling") for pair in cases.ONE_EACH),
        *(
            (*pair, "ExactMatch")
            for pair in cases.ONE_EACH
            if pair[1] in ("ragged", "cross", "early_exit")
        ),
    ],
)
def test_rows_that_come_and_go_change_nothing_for_the_others(
    target: str, drafter: str, rule: str
) -> None:
    """Rows are added and cancelled at random: the batch grows, shrinks and reuses slots, each row is as if alone."""
    assert any(
        _come_and_go(target, drafter, rule, seed) == {"eos", "length", "cancelled"}
        for seed in range(4)
    )


def _come_and_go(target: str, drafter: str, rule: str, seed: int) -> set[str | None]:
    """Check the rows of one random session; gives the reasons for which they stopped."""
    generator, model, guesser = (
        random.Random(seed),
        cases.target(target),
        cases.drafter(drafter, target),
    )
    options: dict[str, Any] = {
        "rule": cases.RULES[rule](),
        "sampling": Sampling(0.9),
        "eos": cases.EOS,
        "seed": 7,
    }
    session = Session(model, guesser, max_length=24, num_draft_tokens=3, **options)
    added: list[tuple[Row, list[int], int]] = []
    events: dict[int, list[int]] = {}
    batch_sizes = []
    for turn in range(40):
        while (turn < 14 and generator.random() < 0.6) or (
            turn > 25 and turn < 30 and not session.live
        ):
            prompt = [generator.randrange(cases.VOCAB) for _ in range(generator.randint(1, 8))]
            wanted = generator.randint(1, 12)
            added.append((session.add(prompt, max_new_tokens=wanted), prompt, wanted))
        if session.live and generator.random() < 0.15:
            session.cancel(generator.choice(session.live))
        for row, tokens in session.step():
            events.setdefault(row.index, []).extend(tokens)
        batch_sizes.append(len(session._batch.rows))
    assert not session.live and session.step() == []
    assert max(batch_sizes) >= 4 and batch_sizes[-1] < max(batch_sizes)
    assert all(size == power_of_two(size) for size in batch_sizes)
    reasons: set[str | None] = set()
    for (row, prompt, wanted), result in zip(added, session.result().rows, strict=True):
        alone = speculative_decode(
            model, guesser, prompt, max_new_tokens=wanted, indices=[row.index], **options
        )
        expected = alone.tokens[0]
        if result.stop_reason == "cancelled":
            expected = expected[: len(result.tokens)]
        assert result.tokens == expected == events.get(row.index, [])
        reasons.add(result.stop_reason)
    return reasons


SAMPLE = """
from lightning_specdec import SpeculativeDecoder

def sample(path):
    decoder = SpeculativeDecoder.from_checkpoint(path)
    kinds = [("RejectionSampling", 0), ("ExactMatch", 1)]
    return [
        decoder.decode(decoder.prompts[:3], max_new_tokens=7, temperature=1.0, rule=rule, seed=seed).tokens
        for rule, seed in kinds
    ]
"""


def test_the_same_seed_gives_the_same_tokens_in_one_process_or_two() -> None:
    torch.rand(100)  # the global generator has no part in it
    path = str(Path(__file__).parent.parent / "checkpoints" / "rnn.safetensors")
    made: dict[str, Any] = {}
    exec(SAMPLE, made)
    here = made["sample"](path)
    torch.rand(7)
    assert made["sample"](path) == here
    program = f"{SAMPLE}\nimport json; print(json.dumps(sample({path!r})))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(done.stdout) == here


@pytest.mark.parametrize("rule", cases.RULES)
def test_a_stream_yields_the_tokens_of_the_whole_decode(rule: str) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 9,
        "rule": cases.RULES[rule](),
        "sampling": Sampling(1.0),
    }
    model, drafter = cases.target("rnn"), cases.drafter("near", "rnn")
    streamed: dict[int, list[int]] = {}
    for index, token in stream(
        open_session(model, drafter, cases.PROMPTS, eos=cases.EOS, **options)
    ):
        streamed.setdefault(index, []).append(token)
    whole = speculative_decode(model, drafter, cases.PROMPTS, eos=cases.EOS, **options)
    assert [streamed[i] for i in range(len(cases.PROMPTS))] == whole.tokens


class Broken(Wrapped):
    """From its n-th call on, one logit of the last position of the last row is `value`."""

    def __init__(self, model: LanguageModel, value: float, call: int = 3) -> None:
        super().__init__(model)
        self.value, self.calls_left = value, call

    def forward(
        self, tokens: Tensor, state: DecodeState | None = None, **options: Any
    ) -> ModelOutput:
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
    options: dict[str, Any] = {
        "max_new_tokens": 30,
        "temperature": temperature,
        "logprobs": logprobs,
    }
    if method == "standard":
        result = autoregressive_decode(model, cases.PROMPTS, **options)
    else:
        window = 2 if method != "plain rounds" else never()
        rule = "RejectionSampling" if method == "RejectionSampling" else None
        drafter = cases.drafter("itself", "rnn")
        result = decode(
            model, drafter, cases.PROMPTS, num_draft_tokens=window, rule=rule, **options
        )
    *others, failed = result.rows
    assert [row.stop_reason for row in result.rows] == ["length"] * 3 + ["failed"]
    assert failed.index == 3 and 2 <= len(failed.tokens) < 30
    assert failed.logprobs is None or len(failed.logprobs) == len(failed.tokens)
    if method != "RejectionSampling" or not temperature:
        assert [row.tokens for row in others] == whole[:3] and failed.tokens == whole[3][
            : len(failed.tokens)
        ]


@pytest.mark.parametrize("target", ["rnn", "transformer", "llama"])
def test_nothing_of_a_failed_row_is_left_to_the_next_in_its_place(target: str) -> None:
    model = Poisoned(cases.target(target))
    session = Session(model, cases.drafter("near", target), max_length=30)
    row = session.add([1, 2, 3], max_new_tokens=9)
    session.step()
    assert row.stop_reason == "failed" and row.num_new == 0
    for begin in (
        lambda: session.add([3, 1], max_new_tokens=9),
        lambda: session.resume(row, [3, 1], max_new_tokens=9),
    ):
        model.armed = False
        other = begin()
        while other.live:
            session.step()
        expected = autoregressive_decode(cases.target(target), [3, 1], max_new_tokens=9).tokens[0]
        assert other.result().tokens == expected


class Poisoned(Wrapped):
    """Its state and its logits are full of NaN after a call while `armed`."""

    armed = True

    def forward(
        self, tokens: Tensor, state: DecodeState | None = None, **options: Any
    ) -> ModelOutput:
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
    session = Session(
        cases.target("rnn"), cases.drafter("near", "rnn"), max_length=30, batch_size=2
    )
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
