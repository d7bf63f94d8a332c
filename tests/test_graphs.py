"""Calls that are recorded and replayed give what the same calls give unrecorded: on a GPU CUDA graphs, here the same
tensors that stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import cases
import pytest
import torch

from lightning_specdec.decoding import (
    AdaptiveWindow,
    Calibration,
    Row,
    Session,
    autoregressive,
    autoregressive_decode,
    speculative_decode,
)
from lightning_specdec.decoding import session as session_module
from lightning_specdec.decoding.batch import Upload
from lightning_specdec.decoding.calibration import calibrate
from lightning_specdec.drafters import Drafter, EarlyExitDrafter, ModelDrafter
from lightning_specdec.models.graphs import GraphCache, _Recording, begin_read
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


@pytest.mark.parametrize(
    ("name", "rule", "sampling"),
    [
        (name, *turn)
        for name in NAMES
        for turn in cases.in_turn(cases.rules_of(name), [*SAMPLINGS], "llama", name)
    ],
)
def test_recorded_rounds_decide_as_unrecorded_ones(name: str, rule: str, sampling: str) -> None:
    target, drafter = cases.target("llama"), cases.drafter(name, "llama")
    options: dict[str, Any] = {
        "max_new_tokens": 14,
        "sampling": SAMPLINGS[sampling],
        "seed": 3,
        "eos": cases.EOS,
    }
    plain = speculative_decode(target, drafter, cases.PROMPTS, rule=cases.RULES[rule](), **options)
    model, other = recorded(target), recording(drafter)
    for _ in range(2):  # the second time all is replayed
        again = speculative_decode(
            model, other, cases.PROMPTS, rule=cases.RULES[rule](), logprobs=True, **options
        )
        assert [(row.tokens, row.rounds, row.counts) for row in again.rows] == [
            (row.tokens, row.rounds, row.counts) for row in plain.rows
        ]


@pytest.mark.parametrize("sampling", ["greedy", "hot"])
@pytest.mark.parametrize("name", ["standard", "near", "early_exit", "heads"])
def test_recordings_serve_every_token_and_every_later_session(
    name: str, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a batch shrinks by halves, and where the next text is longer."""
    model, recordings, plain = recorded(cases.target("llama")), list[Any](), _Recording.__init__

    def counted(self: Any, *arguments: Any) -> None:
        recordings.append(arguments)
        plain(self, *arguments)

    monkeypatch.setattr(_Recording, "__init__", counted)
    drafter = None if name == "standard" else recording(cases.drafter(name, "llama"))
    counts, prompts = [], [[1, 2, 3], [4, 5], [3], [2, 2, 9]]
    for num_new in (30, 30, 20):
        recordings.clear()
        options: dict[str, Any] = {"max_new_tokens": num_new, "sampling": SAMPLINGS[sampling]}
        if drafter is None:
            autoregressive_decode(model, prompts, **options)
        else:
            speculative_decode(model, drafter, prompts, **options)
        counts.append(len(recordings))
    assert 0 < counts[0] < 30 and counts[1] == 0 and counts[2] < 8, counts


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


class Watched(Session):
    """Compares what the device makes of a round that the host has not read with what the host makes of it."""

    num_ahead = 0

    def _round(self, **options: Any) -> Any:
        if self._ahead is not None:
            self.num_ahead += 1
            rows, graphs = self._batch.rows, self._batch.graphs
            assert graphs is not None
            windows = [min(self._ahead, row.remaining - 1) for row in rows]
            wanted = (
                Upload(graphs, torch.zeros(len(rows), Upload.WIDTH).long())
                .fill(rows, windows)
                .values.tolist()
            )
            made = graphs.buffer("round", (len(rows), Upload.WIDTH), torch.long).tolist()
            assert all(
                one == other for row, one, other in zip(rows, made, wanted, strict=True) if row.live
            )
        return super()._round(**options)


def _decode(session: Session, script: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows that are added, cancelled and resumed, each after so many rounds."""
    rows: list[Row] = []
    for num_rounds, action, *given in script:
        for _ in range(num_rounds):
            session.step()
        if action == "add":
            rows.append(session.add(*given, max_new_tokens=30))
        elif action == "cancel":
            session.cancel(rows[given[0]])
        else:
            while rows[given[0]].live:
                session.step()
            rows.append(
                session.resume(rows[given[0]], [*rows[given[0]].text, 5], max_new_tokens=20)
            )
    while session.live:
        session.step()
    return [
        (row.text, row.stop_reason, row.rounds) for row in rows if row.stop_reason != "cancelled"
    ]


COMING_AND_GOING = [
    (0, "add", [1, 2, 3]),
    (6, "add", [4, 5]),
    (7, "add", [3]),
    (5, "cancel", 2),
    (0, "resume", 0),
    (3, "add", [2, 2, 9]),
    (0, "resume", 3),
]


@pytest.mark.parametrize(("sampling", "eos"), [("greedy", cases.EOS), ("hot", None)])
@pytest.mark.parametrize("name", ["near", "early_exit", "heads", "lookup_exit"])
def test_rounds_that_run_ahead_are_those_that_the_host_asks_for(
    name: str, sampling: str, eos: Any
) -> None:
    options = {
        "max_length": 90,
        "num_draft_tokens": 3,
        "seed": 7,
        "eos": eos,
        "sampling": SAMPLINGS[sampling],
    }
    options["rule"] = "RejectionSampling"
    target, drafter = cases.target("llama"), cases.drafter(name, "llama")
    plain = _decode(Session(target, drafter, **options), COMING_AND_GOING)
    session = Watched(recorded(target), recording(drafter), **options)
    assert _decode(session, COMING_AND_GOING) == plain
    assert (session.num_ahead > 0) == drafter.runs_ahead


@pytest.mark.parametrize("name", ["near", "early_exit", "heads"])
def test_a_round_in_full_swing_uploads_nothing_and_reads_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(
        recorded(cases.target("llama")), recording(cases.drafter(name, "llama")), max_length=90
    )
    for prompt in ([1, 2, 3], [4, 5]):
        session.add(prompt, max_new_tokens=64)
    for _ in range(5):
        session.step()
    counted: Counter[str] = Counter()
    for owner, what in ((Upload, "fill"), (torch.Tensor, "tolist"), (torch, "tensor")):
        plain = getattr(owner, what)
        monkeypatch.setattr(
            owner, what, lambda *a, w=what, f=plain, **o: counted.update([w]) or f(*a, **o)
        )
    for _ in range(4):
        assert len(session.step()) == 2
    assert counted == {"tolist": 4}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *(
            ("heads", place)
            for place in ("begin", "go_on", "repeat", "read", "commit", "observe", "learn")
        ),
        *(("near", place) for place in ("go_on", "read", "observe")),
        ("early_exit", "read"),
    ],
)
def test_a_session_goes_on_after_ctrl_c_while_a_round_runs_ahead(
    name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = cases.target("llama"), cases.drafter(name, "llama")
    options: dict[str, Any] = {"sampling": SAMPLINGS["hot"], "seed": 2}
    wanted = speculative_decode(target, drafter, cases.PROMPTS, max_new_tokens=30, **options).tokens
    calls, ours = Counter[str](), recording(drafter)
    session = Session(recorded(target), ours, max_length=90, **options)
    rows = [session.add(prompt, max_new_tokens=30) for prompt in cases.PROMPTS]

    def broken(call: Any) -> Any:
        def calling(*args: Any, **options: Any) -> Any:
            calls[place] += 1
            made = call(*args, **options)
            if calls[place] in (4, 6, 7):  # the first ones before anything runs ahead
                raise KeyboardInterrupt
            return made

        return calling

    if place == "read":
        monkeypatch.setattr(session_module, "begin_read", lambda values: broken(begin_read(values)))
    else:
        owner = {
            "begin": GraphCache,
            "repeat": GraphCache,
            "go_on": Upload,
            "commit": session._verification,
        }.get(place, ours if place == "observe" else session._plan)
        monkeypatch.setattr(owner, place, broken(getattr(owner, place)))
    failures = 0
    while session.live:
        try:
            session.step()
        except KeyboardInterrupt:
            failures += 1
    assert failures > 1
    assert [row.result().tokens for row in rows] == wanted


@pytest.mark.parametrize("name", ["near", "early_exit", "heads"])
def test_rows_whose_logits_are_no_numbers_end_alone(name: str) -> None:
    """A row that failed has no new token, and its place is read all the same."""
    target = deepcopy(cases.target("llama"))
    target.embedding_table.data[7] = torch.nan  # type: ignore[union-attr]
    prompts = [[1, 2, 3], [4, 5], [3, 3, 1], [2]]
    plain, again = (
        speculative_decode(model, drafter, prompts, max_new_tokens=40).rows
        for model, drafter in (
            (target, cases.drafter(name, "llama")),
            (recorded(target), recording(cases.drafter(name, "llama"))),
        )
    )
    assert [(row.tokens, row.stop_reason) for row in again] == [
        (row.tokens, row.stop_reason) for row in plain
    ]
    assert {row.stop_reason for row in plain} == {"failed"} and max(
        len(row.tokens) for row in plain
    ) > 1


def test_a_drafter_with_its_own_methods_runs_ahead_only_if_it_says_so() -> None:
    class Watching(EarlyExitDrafter):
        def observe(self, state: Any, output: Any, num_accepted: Any) -> None:
            """Reads the output, which the next round's would have overwritten."""

    class Renamed(EarlyExitDrafter):
        pass

    class Mixed(Watching, Renamed):
        pass

    class Daring(Mixed):
        runs_ahead = True

    found = [each.runs_ahead for each in (EarlyExitDrafter, Renamed, Watching, Mixed, Daring)]
    assert found == [True, True, False, False, True]


def test_batches_of_any_size_run_ahead() -> None:
    for size in (1, 2, 3, 5):
        session = Watched(
            recorded(cases.target("llama")), EarlyExitDrafter(1), max_length=40, batch_size=size
        )
        for i in range(size):
            session.add([1, i], max_new_tokens=20)
        for _ in range(8):
            session.step()
        assert session.num_ahead, size


def test_recordings_outlive_no_drafter() -> None:
    """Another drafter may lie where a former one lay."""
    target = recorded(cases.target("llama"))
    for exit_layer in (1, 2, 1, 2, 1, 2):
        rounds = [
            speculative_decode(model, EarlyExitDrafter(exit_layer), [1, 2, 3], max_new_tokens=14)
            .rows[0]
            .rounds
            for model in (cases.target("llama"), target)
        ]
        assert rounds[0] == rounds[1]


def test_adaptive_windows_run_ahead_where_rows_share_them() -> None:
    costs = Calibration((1, 2, 5), (1.0, 1.05, 1.1), (0.1, 0.1, 0.1), 0.1, 0.1, 0.01)
    options: dict[str, Any] = {"max_length": 90, "num_draft_tokens": AdaptiveWindow(costs)}
    target, drafter = cases.target("llama"), cases.drafter("near", "llama")
    plain = autoregressive_decode(target, cases.PROMPTS, max_new_tokens=40)
    for sampling, ahead in (("greedy", True), ("hot", False)):
        session = Watched(
            recorded(target),
            recording(drafter),
            rule="RejectionSampling",
            sampling=SAMPLINGS[sampling],
            **options,
        )
        rows = [session.add(prompt, max_new_tokens=40) for prompt in cases.PROMPTS]
        while session.live:
            session.step()
        assert (session.num_ahead > 0) == ahead
        if ahead:
            buffers: Any = session._batch.graphs._buffers  # type: ignore[union-attr]
            widths = {shape[1] for what, shape, _ in buffers if what == "tokens"}
            assert widths <= {2, 5}, "calls were recorded for a window that was not measured"
            assert [row.result().tokens for row in rows] == [row.tokens for row in plain.rows]


@pytest.mark.parametrize("sampling", [*SAMPLINGS])
@pytest.mark.parametrize("logprobs", [False, True])
def test_standard_decoding_launches_the_next_call_before_it_reads_a_token(
    sampling: str, logprobs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "sampling": SAMPLINGS[sampling],
        "eos": cases.EOS,
    }
    target, model, events = cases.target("llama"), recorded(cases.target("llama")), list[str]()
    plain = autoregressive_decode(target, cases.PROMPTS, logprobs=logprobs, **options)

    def said(what: str, call: Any) -> Any:
        def calling(*args: Any, **options: Any) -> Any:
            events.append(what)
            return call(*args, **options)

        return calling

    model.forward = said("call", model.forward)  # type: ignore[method-assign]
    monkeypatch.setattr(
        autoregressive, "begin_read", lambda values: said("read", begin_read(values))
    )
    found = autoregressive_decode(model, cases.PROMPTS, logprobs=logprobs, **options)
    for one, other in zip(found.rows, plain.rows, strict=True):
        assert (one.tokens, one.stop_reason) == (other.tokens, other.stop_reason)
        assert one.logprobs == (pytest.approx(other.logprobs, abs=1e-5) if logprobs else None)
    assert events[:5] == ["call", "call", "read", "call", "read"]


def test_a_calibration_measures_recorded_rounds_that_run_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widths, plain = list[int](), Upload.go_on

    def go_on(self: Upload, outcome: torch.Tensor, width: int, vocab_size: int) -> None:
        widths.append(width)
        plain(self, outcome, width, vocab_size)

    monkeypatch.setattr(Upload, "go_on", go_on)
    options: dict[str, Any] = {"context_length": 5, "windows": (1, 2), "seconds": 0.0}
    found = calibrate(
        recorded(cases.target("llama")), recording(cases.drafter("early_exit", "llama")), **options
    )
    assert widths[-12:] == [1] * 4 + [2] * 4 + [0] * 4
    assert found.widths == (1, 2, 3) and min(found.target_seconds) > 0
