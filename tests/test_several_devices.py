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
    "fsdp2": {
        "class_path": "ShardedTarget",
        "init_args": {**SHARDED, "process_group_backend": "gloo"},
    },
}


def trained(
    name: str, target: str, corpus: Path, home: Path, *, resumed: bool = False
) -> dict[str, Any]:
    """The checkpoint of a few steps of the recipe `eagle`, in one process or two; resumed, of an epoch more."""
    (home / name).mkdir(exist_ok=resumed)
    values = config_for("eagle", target, [str(corpus)])
    devices = 1 if name == "auto" else 2
    values["model"]["init_args"] |= {"learn_from_prompts": True}
    values["data"]["init_args"] |= {"batch_size": 4 // devices, "num_val": 2, "num_test": 1}
    values["trainer"] |= {
        "max_epochs": 1 + resumed,
        "limit_train_batches": 3,
        "accelerator": "cpu",
        "devices": devices,
    }
    values["trainer"] |= {"strategy": STRATEGIES[name], "log_every_n_steps": 1}
    values["trainer"]["callbacks"][0]["init_args"] = {
        "num_prompts": 1,
        "max_new_tokens": 4,
    }  # of DecodeHeldOut
    (home / name / "run.yaml").write_text(yaml.safe_dump(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    children = []
    for rank in range(devices):  # as a launcher would start them
        children.append(os.fork())
        if not children[-1]:
            os.chdir(home / name)
            places = (
                {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                if devices > 1
                else {}
            )
            os.environ.update({**places, "XDG_CACHE_HOME": str(home / name)})
            signal.alarm(100)  # a collective that the other process never joins
            outcome = call("fit", "--config", "run.yaml", *["--ckpt_path", "last"] * resumed)
            (home / name / f"printed-{rank}.txt").write_text(outcome.err)
            os._exit(0 if outcome.code == 0 else 1)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * devices, [
        path.read_text()[-2000:] for path in (home / name).glob("printed*")
    ]
    events = EventAccumulator(str(home / name / "logs/target_eagle/version_0")).Reload()
    losses = [event.value for event in events.Scalars("train/loss")]
    return {
        **checkpoint.read(home / name / "checkpoints/target_eagle/version_0/last.ckpt"),
        "losses": losses,
    }


@pytest.fixture(scope="module")
def alone(
    target: str, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Of a run, and of that run when it was resumed."""
    home = tmp_path_factory.mktemp("alone")
    return [trained("auto", target, corpus, home, resumed=resumed) for resumed in (False, True)]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_processes_learn_what_one_learns(
    name: str, alone: list[dict[str, Any]], target: str, corpus: Path, tmp_path: Path
) -> None:
    for resumed in (False, True)[: 1 + (name == "fsdp2")]:
        one, both = alone[resumed], trained(name, target, corpus, tmp_path, resumed=resumed)
        assert both["global_step"] == one["global_step"] == 3 + 3 * resumed
        assert both["losses"] == pytest.approx(one["losses"], rel=1e-3 if resumed else 1e-5)
        assert len(both["losses"]) == 3 + 3 * resumed
        for key, weight in one["state_dict"].items():
            torch.testing.assert_close(both["state_dict"][key], weight, rtol=1e-3, atol=1e-4)
