"""Laws of what is looked at before a run starts: what it would write over, and whether its networks fit its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli_fixtures import call, here, refused
from families import tiny
from training_fixtures import shrunk

from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.data import QuadraticProgressions
from lightning_specdec.drafters import MultiTokenDrafter
from lightning_specdec.models import RNN
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.training import MultiTokenTraining, PairTraining

__all__ = ["here"]


def data(**arguments: Any) -> QuadraticProgressions:
    given = {
        "vocab_size": 24,
        "length": 14,
        "num_train": 4,
        "num_val": 2,
        "num_test": 2,
        "prompt_length": 3,
        **arguments,
    }
    return QuadraticProgressions(**given)


def llama(context: int, **sizes: int) -> HuggingFaceLM:
    return HuggingFaceLM(tiny("llama", vocab_size=24, max_position_embeddings=context, **sizes))


def stored(path: Path, vocab_size: int, tokenizer: str | None = None) -> str:
    """A checkpoint with a target of that vocabulary."""
    target = HuggingFaceLM(tiny("llama", vocab_size=vocab_size))
    assert target.hidden_size is not None
    drafter = MultiTokenDrafter(2, hidden_size=target.hidden_size, vocab_size=vocab_size).init_from(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save(path, target, drafter, tokenizer=tokenizer)
    return str(path)


def frozen_on(config: Path, source: str) -> list[str]:
    given = ["--model.target", "null", "--model.target_checkpoint", source, "--model.freeze_target", "true"]
    return ["fit", "--config", str(config), *given]


@pytest.mark.usefixtures("here")
def test_a_metric_that_is_not_there_to_stop_by_is_one_line_with_those_that_are(tmp_path: Path) -> None:
    stopping = ["--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "val/los"]
    outcome = call("fit", "--config", str(shrunk("multi_token", tmp_path)), *stopping)
    assert outcome.code == 2 and "Traceback" not in outcome.err
    line = outcome.err.splitlines()[-1]
    assert line.startswith("error: Early stopping conditioned on metric `val/los` which is not available.")
    assert "`val/loss`" in line


@pytest.mark.usefixtures("here")
def test_a_target_of_another_vocabulary_or_tokenizer_is_refused(tmp_path: Path) -> None:
    config = shrunk("multi_token", tmp_path)
    other = stored(tmp_path / "other.ckpt", 256, "bytes")
    refused(*frozen_on(config, other), told="has 256 tokens and the tokenizer bytes, the data have 24 and none")
    of_text = stored(tmp_path / "text.ckpt", 24, "bytes")
    refused(*frozen_on(config, of_text), told="has 24 tokens and the tokenizer bytes, the data have 24 and none")
    MultiTokenTraining(target_checkpoint=stored(tmp_path / "same.ckpt", 24), freeze_target=True).check_data(data())


def test_of_several_drafts_the_one_that_reads_too_little_is_named() -> None:
    torch.manual_seed(0)
    drafts = {"small": llama(10), "medium": RNN(24, hidden_size=96)}
    with pytest.raises(ValueError, match="sequences have 14 tokens, and small reads 10"):
        PairTraining(RNN(24), drafts=drafts).check_data(data())
