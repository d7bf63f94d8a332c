"""Laws of training drafts in stages: trained as each alone, decoded together, there by name for comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_fixtures import call
from training_fixtures import shrunk

from lightning_specdec import checkpoint
from lightning_specdec.data import ArithmeticProgressions
from lightning_specdec.drafters import ModelDrafter, StagedDrafter
from lightning_specdec.models import RNN, LanguageModel
from lightning_specdec.training import DraftSizesTraining, StagedTraining


def models() -> tuple[RNN, dict[str, LanguageModel]]:
    torch.manual_seed(0)
    return RNN(30, hidden_size=24), {"small": RNN(30, hidden_size=4), "medium": RNN(30, hidden_size=12)}


def test_stages_are_measured_as_their_largest_draft_which_they_guess_as() -> None:
    target, drafts = models()
    staged, alone = StagedTraining(target, drafts), DraftSizesTraining(target, drafts, main="medium")
    batch = ArithmeticProgressions(30, num_train=40).collate([(0, [1, 2, 3, 4, 5, 6, 7]), (1, [2, 4, 6, 8])])
    found = []
    for module in (staged, alone):
        with torch.no_grad():
            module.measure(module.val_metrics, batch, "val")
        found.append(module.val_metrics.compute())
    assert found[0] == found[1] and "small/acceptance_rate" in found[0]
    assert isinstance(staged.drafter, StagedDrafter) and list(staged.others) == ["medium", "small"]
    assert len(list(staged.parameters())) == len(list(alone.parameters())), "no weight is trained twice"


def test_stages_that_cannot_stand_where_they_do_are_refused() -> None:
    target, drafts = models()
    with pytest.raises(ValueError, match="two drafters or more"):
        StagedTraining(target, {"small": drafts["small"]})
    with pytest.raises(ValueError, match="smallest first|larger"):
        StagedTraining(target, {"medium": drafts["medium"], "small": drafts["small"]})
    with pytest.raises(ValueError, match="no draft may be called 'staged'"):
        StagedTraining(target, {"staged": drafts["small"], "medium": drafts["medium"]})
    with pytest.raises(ValueError, match="drafts must be models"):
        StagedTraining(target, {})


def test_one_run_decodes_in_stages_and_with_each_draft_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = call("fit", "--config", str(shrunk("staged", tmp_path)), "--data.batch_size", "16")
    assert outcome.code == 0 and "Warning" not in outcome.err, outcome.err
    made = checkpoint.load("checkpoints/staged/last.ckpt")
    assert made.name == "staged" and isinstance(made.drafter, StagedDrafter)
    assert list(made.drafters) == ["staged", "medium", "small"]
    assert isinstance(made.drafters["small"], ModelDrafter) and made.drafter.stage_windows == [4]
    for name in made.drafters:
        shown = call("decode", "--ckpt", "checkpoints/staged/last.ckpt", "--draft", name, "--repeats", "0")
        assert shown.code == 0 and "lossless" in shown.out, shown.err
