"""Laws of training several drafts at once, from a YAML to the command line, and of runs that go on otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_fixtures import Outcome, call, refused
from training_fixtures import CONFIGS, shrunk

from lightning_specdec import checkpoint
from lightning_specdec.data import ArithmeticProgressions
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.models import RNN
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.training import DraftSizesTraining, PairMetrics
from lightning_specdec.training.draft_sizes import DraftSizesMetrics


def models() -> dict[str, RNN]:
    torch.manual_seed(0)
    return {name: RNN(30, hidden_size=size, num_layers=1) for name, size in (("tiny", 4), ("small", 8), ("medium", 16))}


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
    loaded = checkpoint.load("checkpoints/draft_sizes/last.ckpt")
    assert list(loaded.drafters) == ["small", "tiny", "medium"] and loaded.name == "small"
    assert isinstance(loaded.target, HuggingFaceLM) and loaded.target.vocab_size == 24
    for name in loaded.drafters:
        assert f"val/{name}/acceptance_rate" in outcome.out and f"val/{name}/block_efficiency" in outcome.out
        assert f"train/{name}/draft_loss" in outcome.out
        shown = call("decode", "--ckpt", "checkpoints/draft_sizes/last.ckpt", "--draft", name, "--repeats", "0")
        assert shown.code == 0 and "lossless" in shown.out


def test_the_metrics_of_each_draft_are_those_of_its_pair() -> None:
    drafts = models()
    target = RNN(30, hidden_size=12)
    module = DraftSizesTraining(target, drafts, main="small")  # type: ignore[arg-type]
    batch = ArithmeticProgressions(30, num_train=40).collate([(0, [1, 2, 3, 4, 5, 6, 7]), (1, [2, 4, 6, 8])])
    with torch.no_grad():
        module.measure(module.val_metrics, batch, "val")
        found = module.val_metrics.compute()
        total = found["target_loss"]
        for name, draft in drafts.items():
            alone = PairMetrics(3)
            inputs = batch.tokens[:, :-1]
            alone.update(draft(inputs).logits, target(inputs).logits, batch)
            wanted = alone.compute()
            for rate in ("draft_loss", "acceptance_rate", "block_efficiency", "sampling_block_efficiency"):
                torch.testing.assert_close(found[f"{name}/{rate}"], wanted[rate])
            if name == "small":
                torch.testing.assert_close(found["draft_loss"], wanted["draft_loss"])
            total = total + wanted["draft_loss"]
    torch.testing.assert_close(found["loss"], total)
    module.val_metrics.reset()
    assert isinstance(module.val_metrics, DraftSizesMetrics)
    assert module.val_metrics.of("small").draft.num_tokens == module.val_metrics.of("tiny").draft.num_tokens == 0


def test_the_main_draft_is_the_first_or_the_one_that_is_named() -> None:
    target = RNN(30)
    assert DraftSizesTraining(target, models()).draft_name == "tiny"  # type: ignore[arg-type]
    module = DraftSizesTraining(target, models(), main="medium")  # type: ignore[arg-type]
    assert list(module.drafters) == ["medium", "tiny", "small"] and isinstance(module.drafter, ModelDrafter)
    with pytest.raises(ValueError, match="main must be one of the drafts"):
        DraftSizesTraining(target, models(), main="huge")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="each with a word for a name"):
        DraftSizesTraining(target, {"a.b": RNN(30)})
    with pytest.raises(ValueError, match="vocabulary"):
        DraftSizesTraining(target, {"a": RNN(31)})


def test_the_pair_of_transformers_trains_and_its_checkpoint_decodes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = shrunk("transformer", tmp_path)
    monkeypatch.chdir(tmp_path)
    outcome = call("fit", "--config", str(config))
    assert outcome.code == 0 and "val/walltime_speedup" in outcome.out, outcome.err
    assert "Warning" not in outcome.err
    for verb in ("validate", "test", "predict"):
        assert call(verb, "--config", str(config)).code == 0
    config.unlink()
    shown = call("decode", "--ckpt", "checkpoints/transformer/last.ckpt", "--repeats", "0")
    assert shown.code == 0 and "lossless" in shown.out


CHANGES: dict[str, tuple[list[str], str]] = {
    "learning rate": (["--model.learning_rate", "0.01"], "learning_rate was 0.001 and is 0.01 now"),
    "window": (["--model.num_draft_tokens", "2"], "num_draft_tokens was 4 and is 2 now"),
    "main": (["--model.main", "tiny"], "main was small and is tiny now"),
    "data": (["--data.num_train", "40"], "data_arguments.num_train was 32 and is 40 now"),
    "other data": (
        ["--data", "ArithmeticProgressions", "--data.modulo", "true"],
        "data was QuadraticProgressions and is ArithmeticProgressions",
    ),
    "vocabulary": (["--data.vocab_size", "25"], "data_arguments.vocab_size was 24 and is 25 now"),
    "network": (["--model.target.model.rms_norm_eps", "0.1"], "target.rms_norm_eps was 1e-06 and is 0.1 now"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_does_not_go_on_with_other_settings(
    trained: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    directory, _ = trained
    monkeypatch.chdir(directory)
    options, told = CHANGES[change]
    resumed = ("fit", "--config", "draft_sizes.yaml", "--trainer.max_epochs", "2", "--ckpt_path", "last")
    refused(*resumed, *options, told=told)


def test_a_run_goes_on_with_the_same_settings(
    trained: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = trained
    monkeypatch.chdir(tmp_path)
    last = directory / "checkpoints" / "draft_sizes" / "last.ckpt"
    config = str(directory / "draft_sizes.yaml")
    outcome = call("fit", "--config", config, "--trainer.max_epochs", "2", "--ckpt_path", str(last))
    assert outcome.code == 0, outcome.err
    assert checkpoint.load("checkpoints/draft_sizes/last.ckpt").training == {"epoch": 1, "global_step": 4}


def test_a_checkpoint_of_another_kind_of_training_is_one_line(
    trained: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = trained
    monkeypatch.chdir(tmp_path)
    last = str(directory / "checkpoints" / "draft_sizes" / "last.ckpt")
    config = str(shrunk("transformer", tmp_path))
    refused("fit", "--config", config, "--ckpt_path", last, told="training was DraftSizesTraining and is PairTraining")
    for verb in ("validate", "test", "predict"):
        refused(verb, "--config", config, "--ckpt_path", last, told="is of other networks (others.")


def test_typing_errors_in_a_models_config_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = shrunk("transformer", tmp_path)
    monkeypatch.chdir(tmp_path)
    for old, new, told in (
        ("intermediate_size", "intermediat_size", "'intermediat_size': did you mean intermediate_size"),
        ("model_type: llama", "model_type: lama", "did you mean llama"),
        ("HuggingFaceLM", "HugingFaceLM", "there is no class HugingFaceLM"),
    ):
        Path("wrong.yaml").write_text(config.read_text().replace(old, new))
        refused("fit", "--config", "wrong.yaml", told=told)


def test_transformers_are_imported_for_the_configs_that_name_them() -> None:
    """The process ends where their import begins: nothing more would be seen of it than how long it takes."""
    program = f"""
import sys
from lightning_specdec.training.cli import import_named

class Asked:
    def find_spec(self, name, path=None, target=None):
        if name == "lightning_specdec.models.huggingface":
            print("imported")
            sys.exit()

sys.meta_path.insert(0, Asked())
import_named(["--config", {str(CONFIGS / "rnn.yaml")!r}])
print("not")
import_named(["--config", {str(CONFIGS / "transformer.yaml")!r}])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["not", "imported"]
