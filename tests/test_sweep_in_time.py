"""Laws of a sweep with little time, and of what it tries with a checkpoint of text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_models import write_text_model
from tiny_sweep import sweep_of_two_engines

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.bench.scouts import SUFFIX_NAME, scouts
from lightning_specdec.bench.sweep import NO_TIME
from lightning_specdec.bench.ways import draftings
from lightning_specdec.cli.sweep import _warn_of_slow_loading
from lightning_specdec.config.models import PairSource

CHECKPOINTS = Path(__file__).parent.parent / "checkpoints"


def test_without_time_no_further_engine_is_loaded(tmp_path: Path) -> None:
    write_text_model(tmp_path / "target")
    sweep = sweep_of_two_engines(str(tmp_path / "target"), windows=[2], seconds=0.0)
    sweep.run()
    assert sweep.not_measured["torch, 2 threads"] == NO_TIME
    assert sweep.standing().comparisons
    assert all("2 threads" not in str(row.case.draft) for row in sweep.standing().comparisons)


def test_slow_loading_is_said_with_a_time_that_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_slow_loading(60.0, 3.0)
    assert not caplog.records
    _warn_of_slow_loading(183.0, 3.0)
    message = caplog.records[-1].getMessage()
    assert message == (
        "loading took 183 s of --minutes 3, so few ways are compared: give --minutes 8"
    )


@pytest.mark.parametrize(("name", "is_text"), [("text", True), ("rnn", False), ("medusa", False)])
def test_the_suffix_corpus_is_tried_with_a_checkpoint_of_text(
    name: str, is_text: bool, tmp_path: Path
) -> None:
    path = tmp_path / f"{name}.safetensors"
    shutil.copy(CHECKPOINTS / path.name, path)
    source = PairSource(ckpt=str(path))
    decoder = SpeculativeDecoder.load(source)
    kinds = draftings(decoder, source)
    found = scouts(decoder, source, kinds)
    assert [scout.drafting.name for scout in found] == ([SUFFIX_NAME] if is_text else [])
    assert scouts(decoder, source, kinds, has_choice=True) == []
    for scout in found:
        assert scout.followers
        for drafting in (scout.drafting, *scout.followers):
            # Each can be loaded and decodes.
            fields = {"ckpt": str(path), **drafting.fields}
            pair = SpeculativeDecoder.load(PairSource(**fields))
            row = pair.decode([list(b"the cat sat on the")], max_new_tokens=6).rows[0]
            expected = pair.decode_standard([list(b"the cat sat on the")], max_new_tokens=6)
            assert row.tokens == expected.rows[0].tokens
