"""Laws of training: the shipped config learns, its logs hold what they promise, its metrics are their formulas."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from cli_fixtures import call
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_fixtures import CONFIGS, EPOCHS, TrainedRun, shipped_run, shrunk, verb

from lightning_specdec.checkpoints import checkpoint, runs
from lightning_specdec.data import ArithmeticProgressions, PromptSource
from lightning_specdec.training import SafeCheckpointIO, SpeculativeTraining
from lightning_specdec.training.cli import CliTrainer, run

__all__ = ["shipped_run"]
RATES = ["loss", "draft_loss", "target_loss", "draft_accuracy"]
RATES += ["target_accuracy", "acceptance_rate", "block_efficiency"]
RATES += ["sampling_acceptance_rate", "sampling_block_efficiency"]


@pytest.fixture(scope="module")
def events(shipped_run: TrainedRun) -> EventAccumulator:
    accumulator = EventAccumulator(str(shipped_run.events), size_guidance={"histograms": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


@pytest.mark.parametrize("model", ["draft", "target"])
def test_training_losses_fall_from_about_3_9_to_half_or_less(events: EventAccumulator, model: str) -> None:
    losses = [event.value for event in events.Scalars(f"train/{model}_loss")]
    assert len(losses) == EPOCHS
    assert 3.6 < losses[0] < 4.1, "the first epoch's mean is a little below log(50) = 3.9"
    assert losses[-1] <= 0.5


def test_tensorboard_holds_every_promised_tag(events: EventAccumulator) -> None:
    tags = events.Tags()
    wanted = {f"val/{rate}" for rate in RATES} | {"train/loss", "train/draft_loss", "train/target_loss", "epoch"}
    assert set(tags["scalars"]) == wanted, "a second copy of metrics is no curve"
    assert set(tags["histograms"]) == {"val/accepted_per_round", "val/sampling_accepted_per_round"}
    assert all(len(events.Scalars(f"val/{rate}")) == EPOCHS for rate in RATES)
    histogram = events.Histograms("val/accepted_per_round")[-1].histogram_value
    efficiency = events.Scalars("val/block_efficiency")[-1].value
    assert histogram.bucket_limit == [0.5, 1.5, 2.5, 3.5]
    # Every round adds its kept guesses and one token of the target's own.
    assert (histogram.sum + histogram.num) / histogram.num == pytest.approx(efficiency)


def test_the_hparams_tab_shows_what_was_given_and_the_last_metrics(events: EventAccumulator) -> None:
    content = events.PluginTagToContent("hparams")
    given = content["_hparams_/session_start_info"].decode(errors="replace")
    assert "target/hidden_size" in given and "batch_size" in given
    announced = content["_hparams_/experiment"].decode(errors="replace")
    for name in ("draft_loss", "target_loss", "acceptance_rate", "block_efficiency"):
        assert f"val/{name}" in announced, "the tab shows the last value of that scalar"


def test_a_run_says_what_it_reached_and_nothing_else(shipped_run: TrainedRun) -> None:
    assert "best checkpoint: checkpoints/rnn/version_0/best.ckpt" in shipped_run.output
    assert "step 00:" in shipped_run.output
    assert "arning" not in shipped_run.output and "tip" not in shipped_run.output.lower()


def test_checkpoints_are_enough_by_themselves_and_say_how_they_were_made(
    shipped_run: TrainedRun, events: EventAccumulator
) -> None:
    made = checkpoint.load(shipped_run.last)
    assert made.prompts == ArithmeticProgressions(seed=26).prompts()
    assert made.recipe["epochs"] == EPOCHS and made.recipe["data"] == "ArithmeticProgressions"
    assert made.recipe["reached"]["val/target_loss"] == events.Scalars("val/target_loss")[-1].value
    best = checkpoint.load(shipped_run.best).recipe["reached"]["val/loss"]
    assert best == min(event.value for event in events.Scalars("val/loss"))


@pytest.mark.parametrize("name", ["validate", "test"])
def test_validate_and_test_read_the_same_yaml_and_the_best_checkpoint(
    shipped_run: TrainedRun,
    events: EventAccumulator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    verb(monkeypatch, shipped_run.directory, name, logger=True)
    shown = capsys.readouterr().out
    prefix = {"validate": "val", "test": "test"}[name]
    assert all(f"{prefix}/{rate}" in shown for rate in RATES)
    assert [path.name for path in (shipped_run.directory / "logs" / "rnn").iterdir()] == ["version_0"]
    if name == "validate":
        assert str(min(event.value for event in events.Scalars("val/loss")))[:6] in shown


def test_a_strangers_checkpoint_deletes_nothing(
    shipped_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning restores from a checkpoint which file it believes it has to replace."""
    precious = tmp_path / "precious.ckpt"
    shutil.copy(shipped_run.best, precious)
    content = torch.load(shipped_run.last, weights_only=True)
    victims = [str(precious), "checkpoints/rnn/../../precious.ckpt"]
    for victim in victims:
        for name, state in content["callbacks"].items():
            if "val/loss" in name:
                state.pop("dirpath", None)
                worst = torch.tensor(99.0)
                state |= {"best_k_models": {victim: worst}, "kth_best_model_path": victim}
                state |= {"kth_value": worst, "best_model_score": worst, "best_model_path": victim}
        torch.save(content, tmp_path / "stranger.ckpt")
        options = ["--ckpt_path", "stranger.ckpt", "--trainer.max_epochs", str(EPOCHS + 2)]
        verb(monkeypatch, tmp_path, "fit", *options)
        assert precious.read_bytes() == shipped_run.best.read_bytes()


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    verb(monkeypatch, tmp_path / "whole", "fit", "--trainer.max_epochs", "4")
    verb(monkeypatch, tmp_path / "halves", "fit", "--trainer.max_epochs", "2")
    verb(monkeypatch, tmp_path / "halves", "fit", "--trainer.max_epochs", "4", "--ckpt_path", "last")
    whole, halves = (checkpoint.read(tmp_path / n / "checkpoints/rnn") for n in ("whole", "halves"))
    assert whole["epoch"] == halves["epoch"] == 3 and whole["global_step"] == halves["global_step"] == 200
    assert whole["lightning_specdec"]["recipe"] == halves["lightning_specdec"]["recipe"]
    for name, weight in whole["state_dict"].items():
        assert torch.equal(weight, halves["state_dict"][name]), name


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_is_parsed_and_built(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    generates = "class_path: GenerateText" in config.read_text()
    if "target_checkpoint: checkpoints/smollm2" in config.read_text():  # built on a tiny target by `fit_shipped`
        monkeypatch.setattr(sys, "argv", ["lightning_specdec", "fit", "--config", str(config), "--print_config"])
        with pytest.raises(SystemExit, match="0"):
            run()
        return
    options = ["--trainer.max_epochs", "0", "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
    verb = "generate" if generates else "fit"
    monkeypatch.setattr(sys, "argv", ["lightning_specdec", verb, "--config", str(config), *options])
    started: list[object] = []
    if generates:  # its target is a real model, which starting would load
        monkeypatch.setattr(CliTrainer, "predict", lambda *_, **given: started.append(given["datamodule"]))
    run()
    assert [isinstance(data, PromptSource) for data in started] == [True] * generates


def test_a_users_own_file_takes_the_datas_place_and_sets_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("".join(",".join(str(start + i) for i in range(3 + start % 4)) + "\n" for start in range(40)))
    own = ("--data", "SequenceFile", "--data.path", "mine.csv")
    verb(monkeypatch, tmp_path, "fit", "--trainer.max_epochs", "1", *own)
    verb(monkeypatch, tmp_path, "fit", "--trainer.max_epochs", "1", *own, "--data.vocab_size", "70")
    made = checkpoint.load(tmp_path / "checkpoints/rnn")
    assert made.target.vocab_size == 70 and made.recipe["data_arguments"]["path"] == "mine.csv"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--trainer.max_epoch", "3"], "unrecognized arguments: --trainer.max_epoch"),
        (["--trainer.max_epochs", "three"], "trainer.max_epochs"),
        (["--config", "nowhere.yaml"], "config: File does not exist"),
        (["--model.target.hiden_size", "3"], "hiden_size"),
        (["--model.lerning_rate", "3"], "lerning_rate"),
        (["--data.xyzzy", "3"], "xyzzy"),
        (["--model.target", "RMM"], "RMM"),
        (["--model.target", "subprocess.Popen"], "Popen"),
        (["--trainer.callbacks+=torch.nn.Linear"], "not correspond to a subclass of Callback"),
        (["--trainer.callbacks+=GenerationBar"], "GenerationBar"),
        (["--model.target.hidden_size", "-3"], "hidden_size must be from 1 to 16384, got -3"),
        (["--model.learning_rate", "0"], "learning_rate must be in (0, inf)"),
        (["--data.num_train", "104"], "115 distinct sequences, and the splits need 119"),
        (["--data", "SequenceFile", "--data.path", "nowhere.csv"], "nowhere.csv cannot be read"),
        (["--ckpt_path", "nowhere.ckpt"], "nowhere.ckpt: no such checkpoint"),
        (["--ckpt_path", "last"], "no such checkpoint"),
        (["--weights_only", "false"], "unrecognized arguments: --weights_only"),
        (["--trainer.accelerator", "gpux"], "invalid accelerator name"),
    ],
)
def test_a_fault_of_the_command_line_is_one_line_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        verb(monkeypatch, tmp_path, "fit", *arguments, logger=True)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploded",)


def test_a_bad_checkpoint_is_refused_before_anything_runs(
    shipped_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = checkpoint.read(shipped_run.last)
    (tmp_path / "text.ckpt").write_text("hello")
    (tmp_path / "empty.ckpt").write_text("")
    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "half.ckpt").write_bytes(shipped_run.last.read_bytes()[:50_000])
    torch.save({**good, "callbacks": Bomb()}, tmp_path / "bomb.ckpt")
    torch.save({"state_dict": good["state_dict"]}, tmp_path / "foreign.ckpt")
    smaller = {**good, "optimizer_states": [{**good["optimizer_states"][0]}]}
    state = {0: {name: value.flatten()[:1] for name, value in smaller["optimizer_states"][0]["state"][0].items()}}
    smaller["optimizer_states"][0]["state"] = {**smaller["optimizer_states"][0]["state"], **state}
    before = sorted(tmp_path.iterdir())
    for path in before:
        for name in ("fit", "test"):
            with pytest.raises((ValueError, FileNotFoundError), match=path.name) as caught:
                verb(monkeypatch, tmp_path, name, "--ckpt_path", path.name, logger=True)
            assert "\n" not in str(caught.value)
    torch.save(smaller, tmp_path / "smaller.ckpt")
    with pytest.raises(ValueError, match="no training run to resume, or a damaged one"):
        verb(monkeypatch, tmp_path, "fit", "--ckpt_path", "smaller.ckpt", "--trainer.max_epochs", str(EPOCHS + 1))
    (tmp_path / "smaller.ckpt").unlink()
    best, last = str(shipped_run.best), str(shipped_run.last)
    with pytest.raises(ValueError, match="is of other networks, .*embedding"):
        verb(monkeypatch, tmp_path, "test", "--ckpt_path", best, "--data.vocab_size", "60", logger=True)
    told = f"{EPOCHS} epochs behind it and the run ends after 50: raise --trainer.max_epochs"
    with pytest.raises(ValueError, match=told):
        verb(monkeypatch, tmp_path, "fit", "--ckpt_path", last, "--trainer.max_epochs", "50", logger=True)
    assert sorted(tmp_path.iterdir()) == before


def test_an_exported_checkpoint_is_validated_but_not_resumed(
    shipped_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = checkpoint.load(shipped_run.best)
    checkpoint.save(tmp_path / "models.ckpt", made.target, made.drafter)
    verb(monkeypatch, tmp_path, "validate", "--ckpt_path", "models.ckpt")
    assert str(made.recipe["reached"]["val/loss"])[:6] in capsys.readouterr().out
    with pytest.raises(ValueError, match="models.ckpt holds no training run to resume"):
        verb(monkeypatch, tmp_path, "fit", "--ckpt_path", "models.ckpt")


def test_a_run_killed_at_any_moment_leaves_a_whole_checkpoint(shipped_run: TrainedRun, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    shutil.copy(shipped_run.last, path)
    content = checkpoint.read(shipped_run.last)
    for attempt in range(12):
        child = os.fork()
        if not child:
            while True:
                SafeCheckpointIO().save_checkpoint(content, path)
        time.sleep(0.02 + 0.003 * attempt)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert checkpoint.load(path).training["epoch"] == EPOCHS - 1


@pytest.mark.parametrize("num_values", [1, 2**18])
def test_a_full_disk_names_the_file_and_leaves_the_old_checkpoint_alone(tmp_path: Path, num_values: int) -> None:
    path = tmp_path / "best.ckpt"
    SafeCheckpointIO().save_checkpoint({"epoch": 1}, path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        with pytest.raises(OSError) as refused:
            SafeCheckpointIO().save_checkpoint({"epoch": 2, "weights": torch.ones(num_values)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.value.filename == str(path)
    assert [each.name for each in tmp_path.iterdir()] == ["best.ckpt"]
    assert SafeCheckpointIO().load_checkpoint(path)["epoch"] == 1


def test_only_what_this_run_has_written_is_ever_removed(tmp_path: Path) -> None:
    io = SafeCheckpointIO()
    (tmp_path / "folder.ckpt").mkdir()
    for name in ("notes.txt", "old.ckpt"):
        (tmp_path / name).write_text("")
    io.save_checkpoint({}, tmp_path / "mine.ckpt")
    for path in sorted(tmp_path.iterdir()):
        io.remove_checkpoint(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.ckpt", "notes.txt", "old.ckpt"]


class Stop:
    """Ends a run at its third step: by Ctrl-C, a signal, or an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
        def stop(module: SpeculativeTraining, *_: object) -> None:
            if module.trainer.global_step == 3:
                if how == "SIGTERM":
                    os.kill(os.getpid(), signal.SIGTERM)
                else:
                    raise KeyboardInterrupt if how == "SIGINT" else RuntimeError("broken")

        monkeypatch.setattr(SpeculativeTraining, "on_train_batch_end", stop)


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "error"])
def test_a_run_stopped_in_its_first_epoch_goes_on_and_ends_where_a_whole_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    verb(monkeypatch, tmp_path / "whole", "fit", "--trainer.max_epochs", "1")
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    with monkeypatch.context() as stopped, pytest.raises((SystemExit, RuntimeError)):
        Stop(stopped, how)
        verb(stopped, tmp_path / "halves", "fit", "--trainer.max_epochs", "1", logger=True)
    for each, handler in handlers.items():
        signal.signal(each, handler)
    events = EventAccumulator(str(tmp_path / "halves" / "logs" / "rnn" / "version_0"))
    assert "hparams" not in events.Reload().Tags().get("tensors", []) and not events.summary_metadata
    verb(monkeypatch, tmp_path / "halves", "fit", "--trainer.max_epochs", "1", "--ckpt_path", "last", logger=True)
    whole, halves = (checkpoint.read(tmp_path / n / "checkpoints/rnn") for n in ("whole", "halves"))
    assert whole["global_step"] == halves["global_step"] == 50
    assert all(torch.equal(weight, halves["state_dict"][name]) for name, weight in whole["state_dict"].items())
    assert [path.name for path in (tmp_path / "halves" / "logs" / "rnn").iterdir()] == ["version_0"]


@pytest.mark.parametrize("name", ["draft_sizes", "early_exit", "multi_token", "staged", "transformer"])
def test_every_shipped_config_goes_on_after_an_interrupt_in_its_first_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config, last = shrunk(name, tmp_path), tmp_path / "checkpoints" / name / "version_0" / "last.ckpt"
    monkeypatch.chdir(tmp_path)
    steps = ("--data.batch_size", "4")
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as stopped:
        Stop(stopped, "SIGINT")
        assert call("fit", "--config", str(config), *steps).code == 130
    signal.signal(signal.SIGINT, handler)
    assert checkpoint.read(last)["global_step"] == 3
    assert call("fit", "--config", str(config), *steps, "--ckpt_path", "last").code == 0
    assert checkpoint.read(last)["global_step"] == 8


def test_a_new_run_leaves_the_files_of_the_one_before_and_decode_takes_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in tmp_path.rglob("version_0/*") if path.is_file()}

    verb(monkeypatch, tmp_path, "fit", "--trainer.max_epochs", "1", logger=True)
    before = files()
    verb(monkeypatch, tmp_path, "fit", "--trainer.max_epochs", "2", logger=True)
    assert files() == before and len(before) == 5
    home = tmp_path / "checkpoints" / "rnn"
    assert runs.find(home) == home / "version_1" / "best.ckpt" and runs.find(home, ("last",)).parent.name == "version_1"
    assert [path.name for path in sorted((tmp_path / "logs" / "rnn").iterdir())] == ["version_0", "version_1"]
    assert checkpoint.load(home).recipe["epochs"] == 2
    for folder in ("version_9", "version_10", "version_x"):
        (home / folder).mkdir()
    shutil.copy(home / "version_0" / "best.ckpt", home / "version_10" / "last.ckpt")
    assert runs.find(home) == home / "version_10" / "last.ckpt", "numbers, not words, and runs without a checkpoint not"
    with pytest.raises(FileNotFoundError, match="no best or last checkpoint in"):
        runs.find(home / "version_x")


def test_a_directory_has_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verb(monkeypatch, tmp_path, "fit", "--trainer.max_epochs", "1")
    directory = os.open(tmp_path / "checkpoints" / "rnn" / "version_0", os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    resumed = ("fit", "--trainer.max_epochs", "2", "--ckpt_path", "last")
    with pytest.raises(ValueError, match="another run writes to checkpoints/rnn/version_0"):
        verb(monkeypatch, tmp_path, *resumed)
    os.close(directory)
    verb(monkeypatch, tmp_path, *resumed)


OWN = """
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

class Mine(LightningDataModule):
    def loader(self):
        rows = [{"tokens": torch.arange(i, i + 6), "lengths": torch.tensor(6)} for i in range(20)]
        return DataLoader(rows, batch_size=5)

    train_dataloader = val_dataloader = test_dataloader = loader
"""


def test_a_users_own_data_module_is_named_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_data.py").write_text(OWN)
    config = yaml.safe_load((CONFIGS / "rnn.yaml").read_text())
    for model in ("target", "draft"):
        config["model"]["init_args"][model]["init_args"]["vocab_size"] = 50
    config["data"] = {"class_path": "own_data.Mine"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    options = ("--config", "own.yaml", "--trainer.accelerator", "cpu", "--trainer.logger", "false")
    assert call("fit", *options, "--trainer.max_epochs", "2").code == 0
    assert call("fit", *options, "--trainer.max_epochs", "3", "--ckpt_path", "last").code == 0
    assert checkpoint.load(tmp_path / "checkpoints" / "rnn").recipe["data"] == "Mine"
