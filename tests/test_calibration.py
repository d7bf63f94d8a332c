"""A calibration is what it says: costs of real rounds, a file that is checked, measured once."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from tiny_eagle import eagle
from torch import Tensor

from lightning_specdec.decoding import Calibration, Costs, Session
from lightning_specdec.decoding import calibration as measuring
from lightning_specdec.decoding.calibration import FEWEST_REPEATS, WIDTHS, calibrate, fingerprint, load_or_measure
from lightning_specdec.drafters import Draft, DraftRequest, DraftState, ModelDrafter, NGramDrafter, NGramWithFallback
from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput
from lightning_specdec.rules import RejectionSampling, Sampling

COSTS = Costs(2, (1, 3, 5), (1.0, 2.0, 2.5), (0.1, 0.1, 0.2), 0.5, 0.25, 0.01, 0.05)


class Clockwork(cases.Wrapped):
    """A model whose calls take as long as is written down: the clock is a number that they add to."""

    now = 0.0

    def __init__(self, model: LanguageModel, call: float, token: float) -> None:
        super().__init__(model)
        self.call, self.token = call, token

    def forward(self, tokens: Tensor, state: DecodeState | None = None, **options: Any) -> ModelOutput:
        Clockwork.now += self.call + self.token * tokens.shape[1]
        return super().forward(tokens, state, **options)


@pytest.mark.parametrize("size", [1, 3])
def test_a_calibration_finds_the_costs_that_the_calls_have(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_specdec.decoding.timing.time.perf_counter", lambda: Clockwork.now)
    target = Clockwork(cases.target("rnn"), 1.0, 0.1)
    drafter = ModelDrafter(Clockwork(cases.MODELS["rnn"](8), 0.2, 0.01))
    found = calibrate(target, drafter, batch_sizes=(size,), context_length=100).at(size)
    assert found.widths == WIDTHS and found.batch_size == size
    for width, seconds in zip(found.widths, found.target_seconds, strict=True):
        assert seconds == pytest.approx(1.0 + 0.1 * width)
    assert found.loop_seconds == pytest.approx([0.0] * len(WIDTHS), abs=1e-9)
    # The first call of a draft reads the text's last two tokens, the others one.
    assert found.draft_seconds == pytest.approx(0.01) and found.draft_step_seconds == pytest.approx(0.21)
    assert found.target_token_seconds == pytest.approx(0.1, rel=0.02)
    assert found.draft_token_seconds == pytest.approx(0.01, rel=0.03)


@pytest.mark.parametrize(
    ("rule", "widths"), [(None, WIDTHS), (RejectionSampling(), (1, 3, 5))], ids=["greedy", "drawing"]
)
@pytest.mark.parametrize(("target", "drafter"), cases.pairs(targets=["transformer"]))
def test_every_drafter_can_be_measured(target: str, drafter: str, rule: Any, widths: tuple[int, ...]) -> None:
    """Each at all widths, and each drawing: what that needs besides, it needs at two widths as at six."""
    sampling = Sampling(1.0) if rule else None
    found = calibrate(
        cases.target(target),
        cases.drafter(drafter, target),
        context_length=20,
        widths=widths,
        seconds=0.01,
        rule=rule,
        sampling=sampling,
    )
    costs = found.at(1)
    seconds = [costs.round_seconds(i) for i in range(max(widths))]
    assert all(math.isfinite(each) and each > 0 for each in seconds)
    assert all(wide >= narrow * (1 - 1e-12) for narrow, wide in itertools.pairwise(seconds)), "sums of two figures each"
    assert costs.draft_step_seconds >= 0 and costs.draft_seconds >= 0 and costs.draft_token_seconds >= 0
    assert found.largest_window == max(widths) - 1 and found.context_length == 20


def test_measuring_costs_a_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, step = [], Session.step

    def counted(session: Session) -> Any:
        rounds.append(session)
        return step(session)

    monkeypatch.setattr(Session, "step", counted)
    calibrate(cases.target("rnn"), NGramDrafter(), seconds=1e-9)
    assert len(rounds) <= 60


def test_a_calibration_keeps_within_the_models_contexts() -> None:
    class Short(Clockwork):
        def forward(self, tokens: Tensor, state: DecodeState | None = None, **options: Any) -> ModelOutput:
            output = super().forward(tokens, state, **options)
            assert state is None or max(state.consumed) <= 260 + 17
            return output

    target = Short(cases.target("rnn"), 0, 0)
    target.max_positions = 260
    assert calibrate(target, NGramDrafter(), context_length=500).context_length < 260
    target.max_positions = 50
    with pytest.raises(ValueError, match="the models hold 50: measure fewer widths"):
        calibrate(target, NGramDrafter())
    with pytest.raises(ValueError, match="widths must have one above 1"):
        calibrate(cases.target("rnn"), NGramDrafter(), widths=(1,))


def test_rounds_between_the_measured_widths_cost_what_lies_between() -> None:
    assert [COSTS.round_seconds(i) for i in range(5)] == pytest.approx([1.1, 1.6, 2.1, 2.4, 2.7])
    with pytest.raises(ValueError, match="a call on 6 tokens was not measured, 5 at most"):
        COSTS.round_seconds(5)


def test_a_batch_takes_the_costs_of_the_next_larger_one() -> None:
    sizes = Calibration(tuple(COSTS.changed(batch_size=size) for size in (1, 4, 16)), 10)
    assert [sizes.at(size).batch_size for size in (1, 2, 4, 5, 16, 40)] == [1, 4, 4, 16, 16, 16]


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = Calibration((COSTS,), 64, target="a target", drafter="a draft", threads=2)
    made.save(tmp_path / "deep" / "costs.json")
    assert Calibration.load(tmp_path / "deep" / "costs.json") == made
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["costs.json"]


def broken(**changes: Any) -> str:
    values = Calibration((COSTS,), 64).to_dict()
    for name, value in changes.items():
        owner = values if name in values else values["costs"][0]
        owner[name] = value
    return json.dumps(values)


def test_a_calibration_of_an_earlier_version_is_read() -> None:
    values = {"format": 1, **Calibration((COSTS,), 64).to_dict()}
    assert Calibration.from_dict(json.loads(json.dumps(values))) == Calibration((COSTS,), 64)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]",
        broken(costs=[]),
        broken(costs=3),
        broken(costs=[{"batch_size": 1}]),
        broken(widths=[2, 3, 5]),
        broken(widths=[1, 5, 3]),
        broken(widths=[1, 3]),
        broken(target_seconds=[1.0, -2.0, 3.0]),
        broken(target_seconds=[0.0, 2.0, 3.0]),
        broken(target_seconds="fast"),
        broken(draft_seconds=math.nan),
        broken(draft_step_seconds="1"),
        broken(batch_size=0),
        broken(context_length="long"),
        broken(threads=-1),
        broken(device=[]),
    ],
)
def test_a_file_that_is_no_calibration_is_refused_and_measured_again(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "calibrate", lambda *_, **__: Calibration((COSTS,), 64))
    made = load_or_measure(cases.target("rnn"), NGramDrafter())
    (path,) = tmp_path.rglob("*.json")
    path.write_text(text)
    with pytest.raises(ValueError, match="cannot be used as a calibration") as caught:
        Calibration.load(path)
    assert str(path) in str(caught.value)
    assert load_or_measure(cases.target("rnn"), NGramDrafter()) == made == Calibration.load(path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="there is no calibration at .*json"):
        Calibration.load(path)


def test_a_pair_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []

    def count(*arguments: Any, **options: Any) -> Calibration:
        measured.append(options["batch_sizes"])
        return calibrate(*arguments, **options, seconds=1e-9)

    calibrate = measuring.calibrate
    monkeypatch.setattr(measuring, "calibrate", count)
    model, drafter = cases.MODELS["rnn"](), ModelDrafter(cases.MODELS["rnn"](3))
    first = load_or_measure(model, drafter)
    assert load_or_measure(cases.MODELS["rnn"](7), drafter) == first, "weights of another value cost the same"
    assert measured == [(1,)]
    for options in ({"batch_size": 2}, {"temperature": 1.0}, {"rule": "RejectionSampling"}):
        load_or_measure(model, drafter, **options)
    load_or_measure(cases.MODELS["rnn"](hidden_size=32), drafter)
    assert len(measured) == 5
    (files := sorted(tmp_path.rglob("calibration-*.json")))[0].write_text("half a fi")
    for _ in range(2):
        load_or_measure(model, drafter)
        load_or_measure(model, drafter, batch_size=2)
    assert len(measured) <= 6 and len(files) == 5


def test_of_one_that_looks_up_first_the_draft_behind_it_is_measured() -> None:
    model = cases.MODELS["rnn"]()
    asked: list[int] = []

    class Behind(ModelDrafter):
        def propose(
            self, state: DraftState, request: DraftRequest, windows: Sequence[int], sampling: Sampling
        ) -> Draft:
            asked.append(max(windows))
            return super().propose(state, request, windows, sampling)

    found = calibrate(model, NGramWithFallback(NGramDrafter(), Behind(cases.related(model))), seconds=0.01)
    assert all(asked.count(width - 1) >= FEWEST_REPEATS for width in WIDTHS[1:])
    assert found.drafter == "NGramWithFallback"


def test_a_fingerprint_tells_kinds_and_sizes_apart() -> None:
    small, large = cases.MODELS["rnn"](), cases.MODELS["rnn"](hidden_size=32)
    compiled = cases.MODELS["rnn"]()
    compiled.forward = compiled.forward  # type: ignore[method-assign]
    different = [small, large, small.fused(), cases.MODELS["transformer"](), compiled, cases.MODELS["rnn"]().double()]
    assert len({fingerprint(each) for each in different}) == len(different)
    assert fingerprint(NGramDrafter(3)) != fingerprint(NGramDrafter(4))
    assert fingerprint(small) == fingerprint(cases.MODELS["rnn"](5))
    draft = cases.DRAFTERS["near"](small)
    assert fingerprint(NGramWithFallback(NGramDrafter(), draft)) != fingerprint(
        NGramWithFallback(NGramDrafter(min_ngram=2), draft)
    )
    wide, narrow = (eagle(cases.MODELS["transformer"](), attention_window=window) for window in (None, 3))
    assert fingerprint(wide) != fingerprint(narrow)
    assert isinstance(torch.get_num_threads(), int)
