"""Recorded calls compute what the same calls compute unrecorded.

On a GPU they are CUDA graphs; here the calls run again over the same tensors, which stay in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import cases
import pytest
import torch

from lightning_specdec.decoding import (
    AdaptiveWindow,
    Calibration,
    Request,
    RowResult,
    Session,
    autoregressive_decode,
    recorded,
    speculative_decode,
)
from lightning_specdec.decoding.calibration import calibrate
from lightning_specdec.decoding.recorded import RecordedExecutor
from lightning_specdec.drafters import Drafter, EarlyExitDrafter, ModelDrafter
from lightning_specdec.drafters.base import is_pipelined, pipelined
from lightning_specdec.models.graphs import GraphCache, _Recording, begin_read
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.rules import Sampling

SAMPLINGS = {"greedy": Sampling(), "hot": Sampling(1.3, top_k=6), "top_p": Sampling(0.8, top_p=0.7)}


def recorded_model(model: Any) -> HuggingFaceLM:
    """A copy of the model that records its calls."""
    return deepcopy(model).record()


def recorded_drafter(drafter: Drafter) -> Drafter:
    """A copy of the drafter, with a model that records its calls."""
    drafter = deepcopy(drafter)
    if isinstance(drafter, ModelDrafter):
        drafter.model = recorded_model(drafter.model)
    return drafter


NAMES = [
    "near",
    "hotter",
    "itself",
    "early_exit",
    "early_exit_own",
    "early_exit_reduced",
    "heads",
    "lookup_exit",
]


def decisions(rows: Sequence[RowResult]) -> list[Any]:
    return [(row.tokens, row.rounds, row.counts) for row in rows]


@pytest.mark.parametrize(
    ("name", "rule", "sampling"),
    [
        (name, *turn)
        for name in NAMES
        for turn in cases.in_turn(cases.rules_of(name), [*SAMPLINGS], "llama", name)
    ],
)
def test_recorded_rounds_decide_as_unrecorded_ones(name: str, rule: str, sampling: str) -> None:
    target = cases.target("llama")
    drafter = cases.drafter(name, "llama")
    options: dict[str, Any] = {
        "max_new_tokens": 10,
        "sampling": SAMPLINGS[sampling],
        "seed": 3,
        "eos": cases.EOS,
    }
    expected = speculative_decode(
        target, drafter, cases.PROMPTS, rule=cases.RULES[rule](), **options
    )

    model = recorded_model(target)
    model_drafter = recorded_drafter(drafter)
    # The second time every call is replayed.
    for _ in range(2):
        result = speculative_decode(
            model,
            model_drafter,
            cases.PROMPTS,
            rule=cases.RULES[rule](),
            logprobs=True,
            **options,
        )
        assert decisions(result.rows) == decisions(expected.rows)


@pytest.mark.parametrize("sampling", ["greedy", "hot"])
@pytest.mark.parametrize("name", ["standard", "near", "early_exit", "heads"])
def test_recordings_serve_every_token_and_every_later_session(
    name: str,
    sampling: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if a batch shrinks by halves, and if the next text is longer."""
    recordings: list[Any] = []
    record = _Recording.__init__

    def counting_record(self: Any, *arguments: Any) -> None:
        recordings.append(arguments)
        record(self, *arguments)

    monkeypatch.setattr(_Recording, "__init__", counting_record)
    model = recorded_model(cases.target("llama"))
    drafter = None
    if name != "standard":
        drafter = recorded_drafter(cases.drafter(name, "llama"))

    counts = []
    prompts = [[1, 2, 3], [4, 5], [3], [2, 2, 9]]
    for num_new in (30, 30, 20):
        recordings.clear()
        options: dict[str, Any] = {"max_new_tokens": num_new, "sampling": SAMPLINGS[sampling]}
        if drafter is None:
            autoregressive_decode(model, prompts, **options)
        else:
            speculative_decode(model, drafter, prompts, **options)
        counts.append(len(recordings))
    assert 0 < counts[0] < 30
    assert counts[1] == 0
    assert counts[2] < 8


def test_a_recorded_verdict_keeps_the_sampling_that_it_was_recorded_with() -> None:
    """A later round of its session may draw the tokens of other rows in another way."""
    target = recorded_model(cases.target("llama"))
    drafter = recorded_drafter(cases.drafter("near", "llama"))
    options: dict[str, Any] = {"sampling": SAMPLINGS["hot"], "seed": 3, "max_length": 60}

    def decode_rows_of_two_kinds() -> None:
        session = Session(target, drafter, batch_size=2, **options)
        session.add([1, 2, 3], max_new_tokens=30)
        session.step()
        session.step()
        session.add([4, 5], max_new_tokens=4, temperature=0.0)
        session.step()

    # Its memory, and what was recorded over it, is that of the next session.
    decode_rows_of_two_kinds()

    expected = speculative_decode(
        cases.target("llama"),
        cases.drafter("near", "llama"),
        [[1, 2, 3]],
        max_new_tokens=12,
        sampling=SAMPLINGS["hot"],
        seed=3,
    )
    later = Session(target, drafter, batch_size=2, **options)
    row = later.add([1, 2, 3], max_new_tokens=12)
    while later.live:
        later.step()
    assert row.text[row.prompt_length :] == expected.rows[0].tokens


@pytest.mark.parametrize("name", ["near", "early_exit", "heads"])
def test_a_next_turn_goes_on_over_recorded_calls(name: str) -> None:
    """The states lack several tokens of a resumed text, which no recorded call may take for
    the last ones.
    """
    target = cases.target("llama")
    drafter = cases.drafter(name, "llama")
    plain_turns = _three_turns(Session(target, drafter, max_length=60, num_draft_tokens=3))
    session = Session(
        recorded_model(target), recorded_drafter(drafter), max_length=60, num_draft_tokens=3
    )
    assert _three_turns(session) == plain_turns


def _three_turns(session: Session) -> list[Any]:
    rows = [session.add([1, 2, 3], max_new_tokens=7)]
    for new_tokens in ([4, 5, 6, 7], [], [9, 8]):
        while session.live:
            session.step()
        prompt = [*rows[-1].text, *new_tokens]
        rows.append(session.resume(rows[-1], prompt, max_new_tokens=7))
    while session.live:
        session.step()
    return [(row.text, row.rounds) for row in rows]


class WatchedSession(Session):
    """Compares the inputs that the device computes for a round with those that the host would
    upload.
    """

    num_pipelined = 0

    def _run_round(self) -> Any:
        executor = self._executor
        if executor.has_pipelined_round:
            assert isinstance(executor, RecordedExecutor)
            assert executor.inputs is not None
            self.num_pipelined += 1
            device_inputs = executor.inputs.values.tolist()
            num_draft_tokens = executor._next_num_draft_tokens
            assert num_draft_tokens is not None
            for row, integers in zip(self._batch.rows, device_inputs, strict=True):
                if row.live:
                    window = min(num_draft_tokens, row.remaining - 1)
                    assert integers == recorded._integers(row, window)
        return super()._run_round()


def _decode(session: Session, script: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Decode rows that are added, cancelled and resumed, each after a number of rounds."""
    rows: list[Request] = []
    for num_rounds, action, argument in script:
        for _ in range(num_rounds):
            session.step()
        if action == "add":
            rows.append(session.add(argument, max_new_tokens=30))
        elif action == "cancel":
            session.cancel(rows[argument])
        else:
            row = rows[argument]
            while row.live:
                session.step()
            rows.append(session.resume(row, [*row.text, 5], max_new_tokens=20))
    while session.live:
        session.step()
    finished = [row for row in rows if row.stop_reason != "cancelled"]
    return [(row.text, row.stop_reason, row.rounds) for row in finished]


COMING_AND_GOING = [
    (0, "add", [1, 2, 3]),
    (6, "add", [4, 5]),
    (7, "add", [3]),
    (5, "cancel", 2),
    (0, "resume", 0),
    (3, "add", [2, 2, 9]),
    (0, "resume", 3),
]


@pytest.mark.quick_cases("heads-greedy", "early_exit-hot", "lookup_exit-greedy")
@pytest.mark.parametrize(("sampling", "eos"), [("greedy", cases.EOS), ("hot", None)])
@pytest.mark.parametrize("name", ["near", "early_exit", "heads", "lookup_exit"])
def test_pipelined_rounds_are_those_that_the_host_asks_for(
    name: str,
    sampling: str,
    eos: Any,
) -> None:
    options: dict[str, Any] = {
        "max_length": 90,
        "num_draft_tokens": 3,
        "seed": 7,
        "eos": eos,
        "sampling": SAMPLINGS[sampling],
        "rule": "RejectionSampling",
    }
    target = cases.target("llama")
    drafter = cases.drafter(name, "llama")
    expected = _decode(Session(target, drafter, **options), COMING_AND_GOING)
    session = WatchedSession(recorded_model(target), recorded_drafter(drafter), **options)
    assert _decode(session, COMING_AND_GOING) == expected
    assert (session.num_pipelined > 0) == is_pipelined(drafter)


@pytest.mark.parametrize("name", ["near", "early_exit", "heads"])
def test_a_pipelined_round_uploads_nothing_and_reads_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(
        recorded_model(cases.target("llama")),
        recorded_drafter(cases.drafter(name, "llama")),
        max_length=90,
    )
    for prompt in ([1, 2, 3], [4, 5]):
        session.add(prompt, max_new_tokens=64)
    for _ in range(5):
        session.step()

    counts: Counter[str] = Counter()

    def counting(function_name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[function_name] += 1
            return function(*arguments, **options)

        return call

    functions = ((RecordedExecutor, "_upload"), (torch.Tensor, "tolist"), (torch, "tensor"))
    for owner, function_name in functions:
        function = getattr(owner, function_name)
        monkeypatch.setattr(owner, function_name, counting(function_name, function))
    for _ in range(4):
        assert len(session.step()) == 2
    assert counts == {"tolist": 4}


INTERRUPTED = {
    "begin": GraphCache,
    "repeat": GraphCache,
    "_write_next_inputs": RecordedExecutor,
}
"""Classes of the methods after which Ctrl-C is pressed; the others belong to a session's parts."""


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("heads", "begin"),
        ("heads", "_write_next_inputs"),
        ("heads", "repeat"),
        ("heads", "read"),
        ("heads", "commit"),
        ("heads", "observe"),
        ("heads", "learn"),
        ("near", "_write_next_inputs"),
        ("near", "read"),
        ("near", "observe"),
        ("early_exit", "read"),
    ],
)
def test_a_session_goes_on_after_ctrl_c_while_a_round_is_pipelined(
    name: str,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = cases.target("llama")
    options: dict[str, Any] = {"sampling": SAMPLINGS["hot"], "seed": 2}
    expected = speculative_decode(
        target, cases.drafter(name, "llama"), cases.PROMPTS, max_new_tokens=30, **options
    )
    drafter = recorded_drafter(cases.drafter(name, "llama"))
    session = Session(recorded_model(target), drafter, max_length=90, **options)
    rows = [session.add(prompt, max_new_tokens=30) for prompt in cases.PROMPTS]
    num_calls = 0

    def interrupting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            result = function(*arguments, **options)
            if num_calls in (4, 6, 7):  # no round is pipelined before
                raise KeyboardInterrupt
            return result

        return call

    if method == "read":
        monkeypatch.setattr(recorded, "begin_read", lambda values: interrupting(begin_read(values)))
    else:
        parts = {"commit": session._verification, "observe": drafter, "learn": session._plan}
        owner: Any = {**INTERRUPTED, **parts}[method]
        monkeypatch.setattr(owner, method, interrupting(getattr(owner, method)))

    num_interrupts = 0
    while session.live:
        try:
            session.step()
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts > 1
    assert [row.result().tokens for row in rows] == expected.tokens


@pytest.mark.parametrize("name", ["near", "early_exit", "heads"])
def test_rows_whose_logits_are_not_finite_end_alone(name: str) -> None:
    """A row that failed has no new token, and its slot still takes part in the next calls."""
    target = deepcopy(cases.target("llama"))
    assert target.embedding_table is not None
    target.embedding_table.data[7] = torch.nan
    drafter = cases.drafter(name, "llama")
    prompts = [[1, 2, 3], [4, 5], [3, 3, 1], [2]]

    expected = speculative_decode(target, drafter, prompts, max_new_tokens=40).rows
    rows = speculative_decode(
        recorded_model(target), recorded_drafter(drafter), prompts, max_new_tokens=40
    ).rows
    for row, expected_row in zip(rows, expected, strict=True):
        assert row.tokens == expected_row.tokens
        assert row.stop_reason == expected_row.stop_reason == "failed"
    assert max(len(row.tokens) for row in expected) > 1


def test_a_drafter_that_overrides_a_method_is_pipelined_only_if_the_override_is_declared() -> None:
    class Watching(EarlyExitDrafter):
        def observe(self, state: Any, output: Any, num_accepted: Any) -> None:
            """Reads the output, which the next round would have overwritten."""

    class Renamed(EarlyExitDrafter):
        pass

    class Mixed(Watching, Renamed):
        pass

    class Declared(Mixed):
        @pipelined
        def observe(self, state: Any, output: Any, num_accepted: Any) -> None:
            """Reads nothing."""

    class Drafting(Declared):
        def propose(self, *arguments: Any) -> Any:
            return super().propose(*arguments)

    assert is_pipelined(EarlyExitDrafter(1))
    assert is_pipelined(Renamed(1))
    assert not is_pipelined(Watching(1))
    assert not is_pipelined(Mixed(1))
    assert is_pipelined(Declared(1))
    assert not is_pipelined(Drafting(1))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_batches_of_any_size_are_pipelined(batch_size: int) -> None:
    session = WatchedSession(
        recorded_model(cases.target("llama")),
        EarlyExitDrafter(1),
        max_length=40,
        batch_size=batch_size,
    )
    for i in range(batch_size):
        session.add([1, i], max_new_tokens=20)
    for _ in range(8):
        session.step()
    assert session.num_pipelined


def test_recordings_outlive_no_drafter() -> None:
    """Another drafter may have the memory address of a former one."""
    target = cases.target("llama")
    model = recorded_model(target)
    for exit_layer in (1, 2, 1, 2, 1, 2):
        drafter = EarlyExitDrafter(exit_layer)
        expected = speculative_decode(target, drafter, [1, 2, 3], max_new_tokens=14)
        drafter = EarlyExitDrafter(exit_layer)
        result = speculative_decode(model, drafter, [1, 2, 3], max_new_tokens=14)
        assert result.rows[0].rounds == expected.rows[0].rounds


@pytest.mark.parametrize(("sampling", "shares_windows"), [("greedy", True), ("hot", False)])
def test_adaptive_windows_are_pipelined_if_rows_share_them(
    sampling: str, shares_windows: bool
) -> None:
    costs = Calibration((1, 2, 5), (1.0, 1.05, 1.1), (0.1, 0.1, 0.1), 0.1, 0.1, 0.01)
    target = cases.target("llama")
    session = WatchedSession(
        recorded_model(target),
        recorded_drafter(cases.drafter("near", "llama")),
        rule="RejectionSampling",
        sampling=SAMPLINGS[sampling],
        max_length=90,
        num_draft_tokens=AdaptiveWindow(costs),
    )
    rows = [session.add(prompt, max_new_tokens=40) for prompt in cases.PROMPTS]
    while session.live:
        session.step()
    assert (session.num_pipelined > 0) == shares_windows
    if not shares_windows:
        return

    graphs: Any = session._batch.target_state.graphs
    widths = {shape[1] for name, shape, _ in graphs._buffers if name == "tokens"}
    assert widths <= {2, 5}, "calls were recorded for a window that was not measured"
    expected = autoregressive_decode(target, cases.PROMPTS, max_new_tokens=40)
    assert [row.result().tokens for row in rows] == expected.tokens


@pytest.mark.parametrize("sampling", [*SAMPLINGS])
@pytest.mark.parametrize("logprobs", [False, True])
def test_standard_decoding_launches_the_next_call_before_it_reads_a_token(
    sampling: str,
    logprobs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "sampling": SAMPLINGS[sampling],
        "eos": cases.EOS,
        "logprobs": logprobs,
    }
    target = cases.target("llama")
    expected = autoregressive_decode(target, cases.PROMPTS, **options)

    events: list[str] = []

    def reporting(event: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            events.append(event)
            return function(*arguments, **options)

        return call

    model = recorded_model(target)
    model.forward = reporting("call", model.forward)  # type: ignore[method-assign]
    monkeypatch.setattr(
        recorded, "begin_read", lambda values: reporting("read", begin_read(values))
    )
    result = autoregressive_decode(model, cases.PROMPTS, **options)
    for row, expected_row in zip(result.rows, expected.rows, strict=True):
        assert row.tokens == expected_row.tokens
        assert row.stop_reason == expected_row.stop_reason
        if logprobs:
            assert row.logprobs == pytest.approx(expected_row.logprobs, abs=1e-5)
        else:
            assert row.logprobs is None
    assert events[:5] == ["call", "call", "read", "call", "read"]


def test_a_calibration_measures_pipelined_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    write_next_inputs = RecordedExecutor._write_next_inputs

    def reporting(self: RecordedExecutor, outcome: torch.Tensor) -> None:
        launched.append(self.num_draft_tokens)
        write_next_inputs(self, outcome)

    monkeypatch.setattr(RecordedExecutor, "_write_next_inputs", reporting)
    calibration = calibrate(
        recorded_model(cases.target("llama")),
        recorded_drafter(cases.drafter("early_exit", "llama")),
        context_length=5,
        windows=(1, 2),
        seconds=0.0,
    )
    assert launched[-12:] == [1] * 4 + [2] * 4 + [0] * 4
    assert calibration.widths == (1, 2, 3)
    assert min(calibration.target_seconds) > 0


@pytest.mark.parametrize("method", ["add", "save"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}], ids=["greedy", "random"])
def test_the_only_row_may_be_cancelled_while_a_round_is_pipelined(
    method: str, options: dict[str, Any]
) -> None:
    target = cases.target("llama")
    drafter = cases.drafter("heads", "llama")
    session = Session(recorded_model(target), recorded_drafter(drafter), max_length=90)
    row = session.add([1, 2, 3], max_new_tokens=64, **options)
    # Rows with settings that differ from the session's are not recorded.
    expects_pipelined = not options
    for _ in range(8):
        session.step()
    assert session._executor.has_pipelined_round == expects_pipelined

    session.cancel(row)
    if method == "save":
        assert session.save(row) is not None
    next_row = session.add([4, 5], max_new_tokens=9)
    while next_row.live:
        session.step()
    expected = autoregressive_decode(target, [4, 5], max_new_tokens=9)
    assert next_row.result().tokens == expected.tokens[0]
