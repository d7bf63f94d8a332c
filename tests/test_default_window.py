"""Draft tokens per round if nobody chooses: adaptive for all but small targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
from tiny_models import write

from lightning_specdec import NGramDrafter, SpeculativeDecoder, decoder
from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.decoding import AdaptiveWindow, Calibration
from lightning_specdec.rules import ExactMatch, Sampling


@pytest.fixture
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "MOST_SMALL", 0)


def test_a_small_target_has_the_stored_number_or_three(tmp_path: Path) -> None:
    target = cases.target("rnn")
    assert SpeculativeDecoder(target).num_draft_tokens == 3

    path = tmp_path / "pair.safetensors"
    checkpoint.save(path, target, NGramDrafter(), recipe={"num_draft_tokens": 5})
    assert SpeculativeDecoder.from_checkpoint(path).num_draft_tokens == 5


@pytest.mark.usefixtures("_all_are_large")
def test_a_large_target_adapts_whatever_a_file_recommends(tmp_path: Path) -> None:
    target = cases.target("rnn")
    assert SpeculativeDecoder(target).num_draft_tokens == "auto"

    path = tmp_path / "pair.safetensors"
    checkpoint.save(path, target, NGramDrafter(), recipe={"num_draft_tokens": 5})
    assert SpeculativeDecoder.from_checkpoint(path).num_draft_tokens == "auto"

    write(tmp_path / "llama")
    assert SpeculativeDecoder.from_pretrained(tmp_path / "llama").num_draft_tokens == "auto"


@pytest.mark.usefixtures("_all_are_large")
def test_a_number_that_the_user_or_the_pair_names_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SpeculativeDecoder(cases.target("rnn"), num_draft_tokens=2).num_draft_tokens == 2

    monkeypatch.chdir(tmp_path)
    write(tmp_path / "llama")
    directory = tmp_path / "configs" / "pairs"
    directory.mkdir(parents=True)
    (directory / "mine.yaml").write_text(
        "description: a small model with prompt lookup\n"
        "target:\n"
        "  source: llama\n"
        "  dtype: float32\n"
        "  size: {parameters: 1000, matrix_parameters: 900, kept_parameters: 100}\n"
        "drafter: NGramDrafter\n"
        "num_draft_tokens: 6\n"
    )
    assert SpeculativeDecoder.from_pair("mine").num_draft_tokens == 6
    assert SpeculativeDecoder.from_pair("mine", num_draft_tokens=2).num_draft_tokens == 2
    own_draft = SpeculativeDecoder.from_pair("mine", draft=tmp_path / "llama")
    assert own_draft.num_draft_tokens == "auto"


COSTS = Calibration((1, 2, 5), (1.0, 1.1, 1.3), (0.1, 0.1, 0.1), 0.0, 0.1, 0.01)


@pytest.fixture
def measured_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes whose costs were asked for."""
    sizes: list[int] = []

    def load_or_measure(*pair: object, batch_size: int) -> Calibration:
        sizes.append(batch_size)
        return COSTS

    monkeypatch.setattr("lightning_specdec.decoding.calibration.load_or_measure", load_or_measure)
    return sizes


def decoder_of_pair() -> SpeculativeDecoder:
    return SpeculativeDecoder(
        cases.target("rnn"), cases.drafter("near", "rnn"), num_draft_tokens="auto"
    )


def test_batches_of_as_many_slots_have_the_same_costs(measured_sizes: list[int]) -> None:
    pair = decoder_of_pair()
    for num_prompts in (5, 6, 8, 3):
        pair.decode([[1, 2]] * num_prompts, max_new_tokens=2)
    assert measured_sizes == [8, 8, 8, 4]


def test_output_that_depends_on_windows_does_not_depend_on_the_batch(
    measured_sizes: list[int],
) -> None:
    pair = decoder_of_pair()
    options: dict[str, Any] = {
        "temperature": 1.0,
        "rule": "RejectionSampling",
        "max_new_tokens": 4,
    }
    together = pair.decode([[1, 2], [3], [4, 5, 6]], **options).tokens
    alone = [
        pair.decode([prompt], indices=[i], **options).tokens[0]
        for i, prompt in enumerate([[1, 2], [3], [4, 5, 6]])
    ]
    assert measured_sizes == [1, 1, 1, 1]
    assert together == alone

    measured_sizes.clear()
    pair.window(temperature=1.0, rule="ExactMatch", batch_size=[1, 4])
    assert measured_sizes == [1, 4]


@pytest.mark.parametrize("prompts", [[[1, 999]], [[]], [[1, 2], "text"]])
def test_wrong_prompts_are_refused_before_anything_is_measured(
    prompts: list[object], measured_sizes: list[int]
) -> None:
    with pytest.raises(ValueError, match=r"prompt|text"):
        decoder_of_pair().decode(prompts)
    assert measured_sizes == []


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, "4", None, [0], [1, "x"]])
def test_a_wrong_batch_size_is_one_line(batch_size: object, measured_sizes: list[int]) -> None:
    pair = decoder_of_pair()
    with pytest.raises(ValueError, match="batch_size must be"):
        pair.window(batch_size=batch_size)  # type: ignore[arg-type]
    assert measured_sizes == []


@pytest.mark.usefixtures("_all_are_large")
def test_an_audit_has_the_same_number_in_each_round() -> None:
    pair = SpeculativeDecoder(cases.target("rnn"), cases.drafter("near", "rnn"))
    assert pair.num_draft_tokens == "auto"
    choices: dict[str, Any] = {
        "rules": {"ExactMatch": ExactMatch()},
        "samplings": {"greedy": Sampling()},
    }
    assert pair.audit([[1, 2]], max_new_tokens=4, **choices).window == 3
    assert pair.audit([[1, 2]], max_new_tokens=4, num_draft_tokens=2, **choices).window == 2
    with pytest.raises(ValueError, match="num_draft_tokens must be an integer"):
        pair.audit([[1, 2]], num_draft_tokens="auto", **choices)


def test_the_window_of_a_decoder_counts_one_batch(measured_sizes: list[int]) -> None:
    window = decoder_of_pair().window(batch_size=3)
    assert isinstance(window, AdaptiveWindow)
    assert window.costs.by_size == {4: COSTS}
