"""Laws of training several drafts at once, also in stages, and of resuming such runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli_fixtures import Outcome, call, refused
from torch import Tensor
from training_fixtures import shrunk

from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.data import ArithmeticProgressions, Batch
from lightning_specdec.drafters import ModelDrafter, StagedDrafter
from lightning_specdec.models import RNN, LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.training import PairTraining


def models() -> dict[str, LanguageModel]:
    torch.manual_seed(0)
    return {
        name: RNN(30, hidden_size=size, num_layers=1)
        for name, size in (("tiny", 4), ("small", 8), ("medium", 16))
    }


def stages() -> tuple[RNN, dict[str, LanguageModel]]:
    drafts = models()
    return RNN(30, hidden_size=24), {name: drafts[name] for name in ("small", "medium")}


@torch.no_grad()
def measured(module: PairTraining, batch: Batch) -> dict[str, Tensor]:
    module.metrics.reset()
    means = module.measure(batch, "val")
    return {**{name: value for name, (value, _) in means.items()}, **module.metrics.compute()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A run of the shrunk configs/draft_sizes.yaml: its directory, and what it printed."""
    directory = tmp_path_factory.mktemp("sizes")
    config = shrunk("draft_sizes", directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        outcome = call("fit", "--config", str(config))
    assert outcome.code == 0, outcome.err
    return directory, outcome


def test_one_run_trains_all_drafts_and_decodes_with_each(
    trained: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, outcome = trained
    monkeypatch.chdir(directory)
    loaded = checkpoint.load("checkpoints/draft_sizes")
    assert list(loaded.drafts) == ["small", "tiny", "medium"]
    assert isinstance(loaded.target, HuggingFaceLM) and loaded.target.vocab_size == 24
    for name in loaded.drafts:
        decoded = call(
            "decode", "--ckpt", "checkpoints/draft_sizes", "--draft", name, "--repeats", "0"
        )
        assert decoded.code == 0 and "output identical" in decoded.out


def test_the_metrics_of_each_draft_are_those_of_its_pair() -> None:
    drafts = models()
    target = RNN(30, hidden_size=12)
    batch = ArithmeticProgressions(30, num_train=40).collate(
        [(0, [1, 2, 3, 4, 5, 6, 7]), (1, [2, 4, 6, 8])]
    )
    together = PairTraining(target, drafts=drafts)
    metrics = measured(together, batch)
    total = metrics["target_loss"]
    for name, draft in drafts.items():
        pair_metrics = measured(PairTraining(target, draft), batch)
        for rate in (
            "draft_loss",
            "acceptance_rate",
            "block_efficiency",
            "sampling_block_efficiency",
        ):
            torch.testing.assert_close(metrics[f"{name}/{rate}"], pair_metrics[rate])
        total = total + pair_metrics["draft_loss"]
    torch.testing.assert_close(metrics["draft_loss"], metrics["tiny/draft_loss"])
    torch.testing.assert_close(metrics["loss"], total)
    assert list(together.drafters) == ["tiny", "small", "medium"]


REFUSED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "names that are identifiers": (["a.b"], {}),
    "vocabulary": (["other"], {}),
    "two drafters or more": (["small"], {"stage_windows": 4}),
    "smallest first|larger": (["medium", "small"], {"stage_windows": 4}),
    "and not 'staged'": (["staged", "medium"], {"stage_windows": 4}),
    "either `draft` or `drafts`": ([], {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_drafts_that_do_not_fit_are_refused(message: str) -> None:
    names, options = REFUSED[message]
    models_by_name: dict[str, LanguageModel] = {
        **models(),
        "other": RNN(31),
        "a.b": RNN(30),
        "staged": RNN(30, hidden_size=4),
    }
    with pytest.raises(ValueError, match=message):
        PairTraining(RNN(30), drafts={name: models_by_name[name] for name in names}, **options)


@pytest.mark.slow
def test_the_pair_of_transformers_trains_and_its_checkpoint_decodes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = shrunk("transformer", tmp_path)
    monkeypatch.chdir(tmp_path)
    outcome = call("fit", "--config", str(config))
    assert outcome.code == 0 and "val/walltime_speedup" in outcome.out, outcome.err
    assert "Warning" not in outcome.err
    for verb in ("validate", "test"):
        assert call(verb, "--config", str(config)).code == 0
    config.unlink()
    decoded = call("decode", "--ckpt", "checkpoints/transformer", "--repeats", "0")
    assert decoded.code == 0 and "output identical" in decoded.out


CHANGES: dict[str, tuple[list[str], str]] = {
    "learning rate": (
        ["--model.learning_rate", "0.01"],
        "learning_rate changed from 0.001 to 0.01",
    ),
    "window": (["--model.num_draft_tokens", "2"], "num_draft_tokens changed from 4 to 2"),
    "data": (["--data.num_train", "40"], "num_train changed from 32 to 40"),
    "other data": (
        ["--data", "ArithmeticProgressions", "--data.modulo", "true", "--name", "draft_sizes"],
        "data changed from QuadraticProgressions to ArithmeticProgressions",
    ),
    "vocabulary": (["--data.vocab_size", "25"], "has networks of other sizes"),
    "network": (
        ["--model.target.model.rms_norm_eps", "0.1"],
        "target.arguments.model.rms_norm_eps changed from",
    ),
}


@pytest.mark.quick_cases("learning rate", "vocabulary")
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_does_not_go_on_with_other_settings(
    trained: tuple[Path, Outcome],
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    directory, _ = trained
    monkeypatch.chdir(directory)
    options, message = CHANGES[change]
    resumed = (
        "fit",
        "--config",
        "draft_sizes.yaml",
        "--trainer.max_epochs",
        "2",
        "--ckpt_path",
        "last",
    )
    refused(*resumed, *options, message=message)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_settings(
    trained: tuple[Path, Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, _ = trained
    monkeypatch.chdir(tmp_path)
    run_directory = directory / "checkpoints" / "draft_sizes"
    config = str(directory / "draft_sizes.yaml")
    outcome = call(
        "fit", "--config", config, "--trainer.max_epochs", "2", "--ckpt_path", str(run_directory)
    )
    assert outcome.code == 0, outcome.err
    assert checkpoint.load("checkpoints/draft_sizes").recipe["steps"] == 4


def test_typing_errors_in_a_models_config_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = shrunk("transformer", tmp_path)
    monkeypatch.chdir(tmp_path)
    for old, new, message in (
        (
            "intermediate_size",
            "intermediat_size",
            "'intermediat_size': did you mean intermediate_size",
        ),
        ("model_type: llama", "model_type: lama", "did you mean llama"),
        ("HuggingFaceLM", "HugingFaceLM", "HugingFaceLM"),
    ):
        Path("wrong.yaml").write_text(config.read_text().replace(old, new))
        refused("fit", "--config", "wrong.yaml", message=message)


def test_stages_are_measured_as_their_largest_draft_which_they_draft_as() -> None:
    target, drafts = stages()
    batch = ArithmeticProgressions(30, num_train=40).collate(
        [(0, [1, 2, 3, 4, 5, 6, 7]), (1, [2, 4, 6, 8])]
    )
    staged = PairTraining(target, drafts=drafts, stage_windows=4)
    alone = PairTraining(target, drafts=dict(reversed(drafts.items())))
    metrics = measured(staged, batch)
    torch.testing.assert_close(metrics, measured(alone, batch))
    assert "small/acceptance_rate" in metrics
    assert isinstance(staged.drafter, StagedDrafter) and list(staged.others) == ["medium", "small"]
    assert len(list(staged.parameters())) == len(list(alone.parameters())), (
        "no weight is trained twice"
    )


@pytest.mark.slow
def test_one_run_decodes_in_stages_and_with_each_draft_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = call("fit", "--config", str(shrunk("staged", tmp_path)), "--data.batch_size", "16")
    assert outcome.code == 0 and "Warning" not in outcome.err, outcome.err
    trained_pair = checkpoint.load("checkpoints/staged")
    assert next(iter(trained_pair.drafts)) == "staged" and isinstance(
        trained_pair.drafter, StagedDrafter
    )
    assert list(trained_pair.drafts) == ["staged", "medium", "small"]
    assert (
        isinstance(trained_pair.drafts["small"], ModelDrafter) and trained_pair.drafter.window == 4
    )
    for name in trained_pair.drafts:
        decoded = call("decode", "--ckpt", "checkpoints/staged", "--draft", name, "--repeats", "0")
        assert decoded.code == 0 and "output identical" in decoded.out, decoded.err
