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
from lightning_specdec.training import MultiTokenTraining, PairTraining, StagedTraining

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
    refused(*frozen_on(config, other), told="has a vocabulary of 256 tokens, the data one of 24")
    of_text = stored(tmp_path / "text.ckpt", 24, "bytes")
    refused(*frozen_on(config, of_text), told="has the tokenizer bytes, the data have none")
    MultiTokenTraining(target_checkpoint=stored(tmp_path / "same.ckpt", 24), freeze_target=True).check_data(data())


@pytest.mark.parametrize(
    ("contexts", "arguments", "max_new_tokens", "told"),
    [
        ((10, 64), {}, 4, "sequences have 14 tokens, .* the target reads 10"),
        ((64, 10), {}, 4, "sequences have 14 tokens, .* the draft reads 10"),
        ((64, 128), {}, 62, "prompts with max_new_tokens 65, and the target reads 64"),
        ((128, 64), {"prompt_length": 5}, 60, "prompts with max_new_tokens 65, and the draft reads 64"),
    ],
)
def test_what_outgrows_a_context_is_refused_before_the_run(
    contexts: tuple[int, int], arguments: dict[str, Any], max_new_tokens: int, told: str
) -> None:
    target, draft = map(llama, contexts)
    with pytest.raises(ValueError, match=told):
        PairTraining(target, draft, max_new_tokens=max_new_tokens).check_data(data(**arguments))
    PairTraining(llama(64), llama(64), max_new_tokens=61).check_data(data())


def test_of_several_drafts_the_one_that_reads_too_little_is_named() -> None:
    torch.manual_seed(0)
    drafts = {"small": llama(10), "medium": RNN(24, hidden_size=96)}
    with pytest.raises(ValueError, match="the draft small reads 10"):
        StagedTraining(llama(64, num_hidden_layers=3), drafts).check_data(data())
