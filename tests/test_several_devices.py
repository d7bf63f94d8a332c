"""Laws of several devices: two processes, with a target on each or sharded over both, learn what one learns."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_fixtures import call
from generated import corpus, target
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.training.draft_recipes import config_for

__all__ = ["corpus", "target"]
SHARDED = {"data_parallel_size": 2, "tensor_parallel_size": 1, "save_distributed_checkpoint": False}
STRATEGIES: dict[str, Any] = {
    "auto": "auto",
    "ddp": "ddp",
    "fsdp2": {"class_path": "ModelParallelStrategy", "init_args": {**SHARDED, "process_group_backend": "gloo"}},
}


def trained(name: str, target: str, corpus: Path, home: Path) -> dict[str, Any]:
    """The checkpoint of a few steps of the recipe `eagle`, in one process or two."""
    (home / name).mkdir()
    values = config_for("eagle", target, [str(corpus)])
    devices = 1 if name == "auto" else 2
    values["model"]["init_args"] |= {"learn_from_prompts": True}
    values["data"]["init_args"] |= {"batch_size": 4 // devices, "num_val": 2, "num_test": 1}
    values["trainer"] |= {"max_epochs": 1, "limit_train_batches": 3, "accelerator": "cpu", "devices": devices}
    values["trainer"]["log_every_n_steps"] = 1
    values["trainer"] |= {"strategy": STRATEGIES[name]}
    (home / name / "run.yaml").write_text(yaml.safe_dump(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    children = []
    for rank in range(devices):  # as a launcher would start them
        children.append(os.fork())
        if not children[-1]:
            os.chdir(home / name)
            places = {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if devices > 1 else {}
            os.environ.update({**places, "XDG_CACHE_HOME": str(home / name)})
            signal.alarm(100)  # a collective that the other process never joins
            outcome = call("fit", "--config", "run.yaml")
            (home / name / f"printed-{rank}.txt").write_text(outcome.err)
            os._exit(0 if outcome.code == 0 else 1)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * devices, [path.read_text()[-2000:] for path in (home / name).glob("printed*")]
    events = EventAccumulator(str(home / name / "logs/target_eagle/version_0")).Reload()
    losses = [event.value for event in events.Scalars("train/loss")]
    return {**checkpoint.read(home / name / "checkpoints/target_eagle"), "losses": losses}


@pytest.fixture(scope="module")
def alone(target: str, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained("auto", target, corpus, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_processes_learn_what_one_learns(
    name: str, alone: dict[str, Any], target: str, corpus: Path, tmp_path: Path
) -> None:
    both = trained(name, target, corpus, tmp_path)
    assert both["global_step"] == alone["global_step"] == 3
    assert both["losses"] == pytest.approx(alone["losses"], rel=1e-5) and len(both["losses"]) == 3
    for key, weight in alone["state_dict"].items():
        torch.testing.assert_close(both["state_dict"][key], weight, rtol=1e-3, atol=1e-4)
