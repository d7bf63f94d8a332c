"""Laws 5 and 7: a row's tokens depend on its prompt, its index and the seed, and on nothing that
happens beside it.

Then what a session refuses and releases: contexts too short, logits that are not finite, rows that
ended.
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
    Request,
    Session,
    autoregressive_decode,
    open_session,
    run,
    speculative_decode,
    stream,
)
from lightning_specdec.decoding.requests import power_of_two
from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput
from lightning_specdec.rules import Sampling


@pytest.mark.quick_cases(*cases.QUICK_DRAFTERS)
@pytest.mark.parametrize(
    ("target", "drafter", "rule", "temperature"),
    [
        (*pair, *turn)
        for pair in cases.ONE_EACH
        for turn in cases.few(cases.in_turn(cases.rules_of(pair[1]), (0.0, 1.0), *pair), *pair)
    ],
)
def test_a_ragged_batch_equals_its_rows_decoded_one_by_one(
    target: str,
    drafter: str,
    rule: str,
    temperature: float,
) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 9,
        "rule": cases.RULES[rule](),
        "sampling": Sampling(temperature),
        "eos": cases.EOS,
        "seed": 4,
    }
    target_model = cases.target(target)
    drafter_object = cases.drafter(drafter, target)
    batch = speculative_decode(target_model, drafter_object, cases.PROMPTS, **options)
    for index, row in enumerate(batch.rows):
        prompt = cases.PROMPTS[index]
        single = speculative_decode(
            target_model, drafter_object, prompt, indices=[index], **options
        ).rows[0]
        assert row.tokens == single.tokens
        assert row.stop_reason == single.stop_reason
        assert row.counts == single.counts
        assert row.rounds == single.rounds


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
        single = autoregressive_decode(cases.target(target), prompt, indices=[index], **options)
        assert batch.tokens[index] == single.tokens[0]


@pytest.mark.quick_cases(*cases.QUICK_DRAFTERS)
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
    target: str,
    drafter: str,
    rule: str,
) -> None:
    """Rows are added and cancelled at random. The batch grows, shrinks and reuses slots."""
    all_reasons = {"eos", "length", "cancelled"}
    assert any(_come_and_go(target, drafter, rule, seed) == all_reasons for seed in range(4))


def _come_and_go(target: str, drafter: str, rule: str, seed: int) -> set[str]:
    """Check the rows of one random session. Returns their stop reasons."""
    generator = random.Random(seed)
    target_model = cases.target(target)
    drafter_object = cases.drafter(drafter, target)
    options: dict[str, Any] = {
        "rule": cases.RULES[rule](),
        "sampling": Sampling(0.9),
        "eos": cases.EOS,
        "seed": 7,
    }
    session = Session(target_model, drafter_object, max_length=24, num_draft_tokens=3, **options)
    requests: list[tuple[Request, list[int], int]] = []
    streamed: dict[int, list[int]] = {}
    batch_sizes = []

    def wants_a_row(turn: int) -> bool:
        if turn < 14:
            return generator.random() < 0.6
        return 25 < turn < 30 and not session.live

    for turn in range(40):
        while wants_a_row(turn):
            length = generator.randint(1, 8)
            prompt = [generator.randrange(cases.VOCAB) for _ in range(length)]
            max_new_tokens = generator.randint(1, 12)
            row = session.add(prompt, max_new_tokens=max_new_tokens)
            requests.append((row, prompt, max_new_tokens))
        if session.live and generator.random() < 0.15:
            session.cancel(generator.choice(session.live))
        for row, tokens in session.step():
            streamed.setdefault(row.index, []).extend(tokens)
        batch_sizes.append(len(session._batch.rows))

    assert not session.live
    assert session.step() == []
    assert max(batch_sizes) >= 4
    assert batch_sizes[-1] < max(batch_sizes)
    assert all(size == power_of_two(size) for size in batch_sizes)

    reasons: set[str] = set()
    results = session.result().rows
    for (row, prompt, max_new_tokens), result in zip(requests, results, strict=True):
        single = speculative_decode(
            target_model,
            drafter_object,
            prompt,
            max_new_tokens=max_new_tokens,
            indices=[row.index],
            **options,
        )
        expected = single.tokens[0]
        if result.stop_reason == "cancelled":
            expected = expected[: len(result.tokens)]
        assert result.tokens == expected
        assert streamed.get(row.index, []) == expected
        reasons.add(result.stop_reason)
    return reasons


SAMPLE = """
from lightning_specdec import SpeculativeDecoder

def sample(path):
    decoder = SpeculativeDecoder.from_checkpoint(path)
    options = {"max_new_tokens": 7, "temperature": 1.0}
    results = [
        decoder.decode(decoder.prompts[:3], rule="RejectionSampling", seed=0, **options),
        decoder.decode(decoder.prompts[:3], rule="ExactMatch", seed=1, **options),
    ]
    return [result.tokens for result in results]
"""


def test_the_same_seed_gives_the_same_tokens_in_one_process_or_two() -> None:
    torch.rand(100)  # the global generator has no part in it
    path = str(Path(__file__).parent.parent / "checkpoints" / "rnn.safetensors")
    namespace: dict[str, Any] = {}
    exec(SAMPLE, namespace)
    sample = namespace["sample"]
    tokens = sample(path)
    torch.rand(7)
    assert sample(path) == tokens

    program = f"{SAMPLE}\nimport json; print(json.dumps(sample({path!r})))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    process = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(process.stdout) == tokens


@pytest.mark.parametrize("rule", cases.RULES)
def test_a_stream_yields_the_tokens_of_the_whole_decode(rule: str) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 9,
        "rule": cases.RULES[rule](),
        "sampling": Sampling(1.0),
    }
    target = cases.target("rnn")
    drafter = cases.drafter("near", "rnn")
    session = open_session(target, drafter, cases.PROMPTS, eos=cases.EOS, **options)
    streamed: dict[int, list[int]] = {}
    for index, token in stream(session):
        streamed.setdefault(index, []).append(token)
    expected = speculative_decode(target, drafter, cases.PROMPTS, eos=cases.EOS, **options)
    assert [streamed[i] for i in range(len(cases.PROMPTS))] == expected.tokens


class Broken(Wrapped):
    """From its n-th call on, one logit of the last position of the last row is `value`."""

    def __init__(self, model: LanguageModel, value: float, call: int = 3) -> None:
        super().__init__(model)
        self.value = value
        self.calls_left = call

    def forward(
        self,
        tokens: Tensor,
        state: DecodeState | None = None,
        **options: Any,
    ) -> ModelOutput:
        output = super().forward(tokens, state, **options)
        self.calls_left -= 1
        if self.calls_left <= 0:
            output.logits[-1, -1, 4] = self.value
        return output


@pytest.mark.parametrize(
    ("value", "logprobs"), [(float("nan"), False), (float("inf"), True)], ids=["nan", "inf"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["standard", "ExactMatch", "RejectionSampling", "plain rounds"])
def test_a_row_whose_logits_are_not_finite_ends_alone(
    method: str,
    temperature: float,
    value: float,
    logprobs: bool,
) -> None:
    expected = cases.standard("rnn", Sampling(temperature), 30, None).tokens
    model = Broken(cases.target("rnn"), value)
    options: dict[str, Any] = {
        "max_new_tokens": 30,
        "temperature": temperature,
        "logprobs": logprobs,
    }
    if method == "standard":
        result = autoregressive_decode(model, cases.PROMPTS, **options)
    else:
        result = speculative_decode(
            model,
            cases.drafter("itself", "rnn"),
            cases.PROMPTS,
            num_draft_tokens=never() if method == "plain rounds" else 2,
            rule="RejectionSampling" if method == "RejectionSampling" else None,
            **options,
        )

    assert [row.stop_reason for row in result.rows] == ["length"] * 3 + ["failed"]
    failed = result.rows[3]
    assert failed.index == 3
    assert 2 <= len(failed.tokens) < 30
    if logprobs:
        assert failed.logprobs is not None
        assert len(failed.logprobs) == len(failed.tokens)
    if method != "RejectionSampling" or not temperature:
        assert result.tokens[:3] == expected[:3]
        assert failed.tokens == expected[3][: len(failed.tokens)]


@pytest.mark.parametrize("target", ["rnn", "transformer", "llama"])
def test_nothing_of_a_failed_row_is_left_to_the_next_in_its_slot(target: str) -> None:
    model = Poisoned(cases.target(target))
    session = Session(model, cases.drafter("near", target), max_length=30)
    failed = session.add([1, 2, 3], max_new_tokens=9)
    session.step()
    assert failed.stop_reason == "failed"
    assert failed.num_new == 0

    model.armed = False
    expected = autoregressive_decode(cases.target(target), [3, 1], max_new_tokens=9).tokens[0]
    for resumes in (False, True):
        if resumes:
            row = session.resume(failed, [3, 1], max_new_tokens=9)
        else:
            row = session.add([3, 1], max_new_tokens=9)
        while row.live:
            session.step()
        assert row.result().tokens == expected


class Poisoned(Wrapped):
    """Its state and its logits are full of NaN after a call while `armed`."""

    armed = True

    def forward(
        self,
        tokens: Tensor,
        state: DecodeState | None = None,
        **options: Any,
    ) -> ModelOutput:
        output = super().forward(tokens, state, **options)
        if self.armed:
            output.logits.fill_(torch.nan)
            for value in vars(state).values():
                parts = value if isinstance(value, list | tuple) else [value]
                for part in parts:
                    if isinstance(part, Tensor) and part.is_floating_point():
                        part.fill_(torch.nan)
        return output


def never() -> AdaptiveWindow:
    """A window that never opens: wide calls cost too much."""
    return AdaptiveWindow(Calibration((1, 3), (1.0, 9.0), (0.0, 0.0), 1.0, 1.0, 0.0))


def test_a_text_longer_than_the_targets_context_is_refused_before_decoding() -> None:
    model = Wrapped(cases.target("rnn"), 12)
    drafter = cases.drafter("near", "rnn")
    message = "a prompt of 7 tokens and 7 new ones do not fit the target's context of 12"
    with pytest.raises(ValueError, match=message):
        autoregressive_decode(model, cases.PROMPTS, max_new_tokens=7)
    with pytest.raises(ValueError, match=message):
        open_session(model, drafter, cases.PROMPTS, max_new_tokens=7)
    session = Session(model, drafter, max_length=40)
    with pytest.raises(ValueError, match=message):
        session.add(cases.PROMPTS[3], max_new_tokens=7)
    assert session.result().rows == []
    assert session.live == []
    result = speculative_decode(model, drafter, cases.PROMPTS, max_new_tokens=6)
    expected = autoregressive_decode(model, cases.PROMPTS, max_new_tokens=6)
    assert result.tokens == expected.tokens


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
    assert len(session._added) == 1
    assert len(session._batch.rows) <= 2
