"""A calibration has the costs of real rounds.

Its file is checked, and each pair is measured once.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import cases
import pytest
from families import tiny
from tiny_block import fitted_block
from tiny_eagle import fitted_eagle
from torch import Tensor

from lightning_specdec.decoding import Calibration
from lightning_specdec.decoding import calibration as measuring
from lightning_specdec.decoding.calibration import WINDOWS, calibrate, load_or_measure
from lightning_specdec.drafters import Draft, ModelDrafter, NGramDrafter, NGramWithFallback
from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.rules import RejectionSampling, Sampling

COSTS = Calibration((1, 3, 5), (1.0, 2.0, 2.5), (0.1, 0.1, 0.2), 0.5, 0.25, 0.05)


class Clockwork(cases.Wrapped):
    """A model whose calls take a fixed time: the clock is a number that they add to."""

    now = 0.0

    def __init__(self, model: LanguageModel, call: float, token: float) -> None:
        super().__init__(model)
        self.call_seconds = call
        self.token_seconds = token

    def forward(
        self,
        tokens: Tensor,
        state: DecodeState | None = None,
        **options: Any,
    ) -> ModelOutput:
        Clockwork.now += self.call_seconds + self.token_seconds * tokens.shape[1]
        return super().forward(tokens, state, **options)


@pytest.mark.parametrize("size", [1, 3])
def test_a_calibration_finds_the_costs_that_the_calls_have(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lightning_specdec.decoding.timing.time.perf_counter", lambda: Clockwork.now
    )
    target = Clockwork(cases.target("rnn"), 1.0, 0.1)
    model_drafter = ModelDrafter(Clockwork(cases.MODELS["rnn"](8), 0.2, 0.01))
    target_seconds = [1.0 + 0.1 * (window + 1) for window in (0, *WINDOWS)]
    for drafter in (model_drafter, NGramWithFallback(NGramDrafter(), model_drafter)):
        calibration = calibrate(target, drafter, batch_size=size, context_length=100)
        assert calibration.target_seconds == pytest.approx(target_seconds)
        assert calibration.loop_seconds == pytest.approx([0.0] * 6, abs=1e-9)
        assert calibration.draft_seconds == pytest.approx(0.01)
        assert calibration.draft_step_seconds == pytest.approx(0.21)
        assert calibration.target_token_seconds == pytest.approx(0.1)


@pytest.mark.parametrize("with_lookup", [False, True])
@pytest.mark.parametrize("make_drafter", [fitted_eagle, fitted_block])
def test_windows_that_a_draft_would_end_early_are_measured_in_full(
    make_drafter: Any, with_lookup: bool
) -> None:
    """Otherwise the cost of a token would be hidden, and `auto` would take the widest window."""
    target = cases.target("llama")
    drafter: Any = make_drafter(target).at(1.0)
    drafted: Counter[tuple[int, int]] = Counter()

    class Counted(type(drafter)):  # type: ignore[misc]
        def propose(self, state: Any, request: Any, windows: Any, sampling: Sampling) -> Draft:
            draft: Draft = super().propose(state, request, windows, sampling)
            drafted[max(windows), draft.tokens.shape[1]] += 1
            return draft

    drafter.__class__ = Counted
    if with_lookup:
        drafter = NGramWithFallback(NGramDrafter(), drafter)
    calibrate(target, drafter, windows=(2, 4), seconds=0)
    # The round that reads the prompt has no draft.
    assert {window: num_drafted for window, num_drafted in drafted if num_drafted} == {2: 2, 4: 4}


@pytest.mark.quick_cases(*cases.QUICK_DRAFTERS)
@pytest.mark.parametrize(
    ("target", "drafter", "rule", "windows"),
    [
        (*pair, *chosen)
        for pair in cases.pairs(targets=["transformer"])
        for chosen in ((None, WINDOWS[::4]), (RejectionSampling(), (2, 4)))[
            pair[1] in cases.VARIANTS :
        ]
    ],
)
def test_every_drafter_can_be_measured(
    target: str,
    drafter: str,
    rule: Any,
    windows: tuple[int, ...],
) -> None:
    calibration = calibrate(
        cases.target(target),
        cases.drafter(drafter, target),
        rule=rule,
        sampling=Sampling(1.0 if rule else 0.0),
        context_length=20,
        windows=windows,
        seconds=0.0,
    )
    largest_width = calibration.widths[-1]
    assert largest_width <= max(windows) + 1
    for window in range(largest_width):
        seconds = calibration.round_seconds(window)
        assert math.isfinite(seconds)
        assert seconds > 0


class OneToken(cases.Repeater):
    """Drafts token 0 once, whatever the window."""

    most_accepted = 0

    def propose(self, state: Any, request: Any, windows: Any, sampling: Sampling) -> Draft:
        return Draft(request.last_two_tokens[:, :1] * 0)

    def observe(self, state: Any, output: ModelOutput, num_accepted: Any) -> None:
        self.most_accepted = max(self.most_accepted, *num_accepted)


def test_no_more_draft_tokens_are_accepted_than_were_drafted() -> None:
    """The target always draws 0, with which drafts are padded."""
    target = cases.MODELS["rnn"]()
    drafter = OneToken()
    for parameter in target.parameters():
        parameter.data.zero_()
    calibrate(target, drafter, context_length=20, seconds=0.0)
    assert drafter.most_accepted == 1


def broken(**changes: Any) -> str:
    """The file of a calibration with wrong values."""
    return json.dumps({**COSTS.to_dict(), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        broken(widths=[2, 3, 5]),
        broken(target_seconds=[0.0, 2.0, 3.0]),
        broken(draft_seconds=math.nan),
    ],
)
def test_a_pair_whose_file_is_invalid_is_measured_again(
    tmp_path: Path,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "calibrate", lambda *_, **__: COSTS)
    assert load_or_measure(cases.target("rnn"), NGramDrafter()) == COSTS
    (path,) = tmp_path.rglob("*.json")
    path.write_text(text)
    assert load_or_measure(cases.target("rnn"), NGramDrafter()) == COSTS
    assert Calibration.from_dict(json.loads(path.read_text())) == COSTS


@pytest.mark.parametrize(("num_positions", "widest"), [(12, 2), (48, 9), (76, 9), (80, 17)])
def test_a_short_context_is_measured_with_shorter_windows(num_positions: int, widest: int) -> None:
    model = HuggingFaceLM(tiny("llama", max_position_embeddings=num_positions))
    assert calibrate(model, NGramDrafter(), seconds=0.0).widths[-1] == widest


def test_a_pair_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    batch_sizes = []

    def counting_calibrate(*arguments: Any, **options: Any) -> Calibration:
        batch_sizes.append(options["batch_size"])
        return COSTS

    monkeypatch.setattr(measuring, "calibrate", counting_calibrate)
    target = cases.MODELS["rnn"]()
    drafter = ModelDrafter(cases.MODELS["rnn"](3))
    load_or_measure(target, drafter)
    load_or_measure(cases.MODELS["rnn"](7), drafter)  # weights of another value cost the same
    assert batch_sizes == [1]

    load_or_measure(target, drafter, batch_size=2)
    load_or_measure(target, drafter, temperature=1.0)
    load_or_measure(target, drafter, rule="RejectionSampling")
    load_or_measure(cases.MODELS["rnn"](hidden_size=32), drafter)
    assert batch_sizes == [1, 2, 1, 1, 1]


def test_what_cannot_be_written_is_measured_once_by_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    measured = []

    def counting_calibrate(*arguments: Any, **options: Any) -> Calibration:
        measured.append(options["batch_size"])
        return COSTS

    monkeypatch.setattr(measuring, "calibrate", counting_calibrate)
    monkeypatch.setattr(measuring, "_not_written", {})
    target = cases.target("rnn")
    for _ in range(3):
        assert load_or_measure(target, NGramDrafter()) == COSTS
    assert measured == [1]


def test_models_of_another_context_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short context is measured with fewer windows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []

    def counting_calibrate(*arguments: Any, **options: Any) -> Calibration:
        measured.append(options["batch_size"])
        return COSTS

    monkeypatch.setattr(measuring, "calibrate", counting_calibrate)
    for max_positions in (40, 512, 40):
        target = cases.MODELS["llama"](max_position_embeddings=max_positions)
        load_or_measure(target, NGramDrafter())
    assert len(measured) == 2


def test_other_numbers_of_the_same_steps_of_sampling_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []

    def counting_calibrate(*arguments: Any, **options: Any) -> Calibration:
        measured.append(arguments)
        return COSTS

    monkeypatch.setattr(measuring, "calibrate", counting_calibrate)
    target = cases.target("rnn")
    for temperature in (0.7, 1.0, 1.2):
        load_or_measure(target, NGramDrafter(), temperature=temperature)
    assert len(measured) == 1

    for top_p in (0.9, 0.95):
        load_or_measure(target, NGramDrafter(), temperature=1.0, top_p=top_p)
    load_or_measure(target, NGramDrafter(), temperature=1.0, top_k=5)
    load_or_measure(target, NGramDrafter(), temperature=1.0, repetition_penalty=1.2)
    assert len(measured) == 4


@pytest.mark.parametrize(
    ("num_passes", "elapsed", "more"),
    [
        (3, 0.1, True),
        (11, 0.1, True),
        (12, 0.1, False),
        (4, 2.5, False),
        (3, 9.0, True),
        (1, 29.0, True),
        (2, 29.0, False),
        (0, 50.0, True),
        (1, 50.0, False),
    ],
)
def test_slow_rounds_are_measured_fewer_times(num_passes: int, elapsed: float, more: bool) -> None:
    assert measuring._needs_another(num_passes, elapsed, 2.0) == more


def test_another_release_of_openvino_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "calibrate", lambda *_, **__: COSTS)
    target = cases.MODELS["rnn"]()
    for backend, release, num_files in (
        ("torch", "1", 1),
        ("torch", "2", 1),
        ("openvino", "1", 2),
        ("openvino", "2", 3),
    ):
        monkeypatch.setattr(type(target), "backend", backend)
        monkeypatch.setattr("importlib.metadata.version", lambda name, version=release: version)
        load_or_measure(target, NGramDrafter())
        assert len(list(tmp_path.rglob("*.json"))) == num_files
