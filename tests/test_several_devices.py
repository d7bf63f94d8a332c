"""Laws of several devices: two processes learn what one process learns."""

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
    name: str,
    target: str,
    corpus: Path,
    home: Path,
    *,
    resumed: bool = False,
) -> dict[str, Any]:
    """The checkpoint of a few steps of the recipe `eagle`; if resumed, of one more epoch.

    Args:
        name: one of `STRATEGIES`; `auto` runs in one process, the other ones in two.
    """
    directory = home / name
    directory.mkdir(exist_ok=resumed)
    num_processes = 1 if name == "auto" else 2
    config = run_config(name, target, corpus, num_processes)
    config["trainer"]["max_epochs"] = 2 if resumed else 1
    (directory / "run.yaml").write_text(yaml.safe_dump(config))

    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = str(free_socket.getsockname()[1])
    children = []
    for rank in range(num_processes):
        child = os.fork()
        if child == 0:
            os.chdir(directory)
            os.environ["XDG_CACHE_HOME"] = str(directory)
            if num_processes > 1:
                # As a launcher would start them.
                os.environ["LOCAL_RANK"] = str(rank)
                os.environ["MASTER_ADDR"] = "127.0.0.1"
                os.environ["MASTER_PORT"] = port
            signal.alarm(100)  # ends a process that waits for a collective of the other one
            resume = ["--ckpt_path", "last"] if resumed else []
            outcome = call("fit", "--config", "run.yaml", *resume)
            (directory / f"printed-{rank}.txt").write_text(outcome.err)
            os._exit(0 if outcome.code == 0 else 1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    printed = [path.read_text()[-2000:] for path in directory.glob("printed*")]
    assert codes == [0] * num_processes, printed

    curves = EventAccumulator(str(directory / "logs/target_eagle_text/version_0")).Reload()
    content = checkpoint.read(directory / "checkpoints/target_eagle_text/version_0/last.ckpt")
    return {**content, "losses": [event.value for event in curves.Scalars("train/loss")]}


def run_config(name: str, target: str, corpus: Path, num_processes: int) -> dict[str, Any]:
    config = config_for("eagle", target, [str(corpus)])
    config["model"]["init_args"]["learn_from_prompts"] = True
    config["data"]["init_args"].update(
        {"batch_size": 4 // num_processes, "num_val": 2, "num_test": 1}
    )
    config["trainer"].update(
        {
            "limit_train_batches": 3,
            "accelerator": "cpu",
            "devices": num_processes,
            "strategy": STRATEGIES[name],
            "log_every_n_steps": 1,
        }
    )
    decode_held_out = config["trainer"]["callbacks"][0]
    decode_held_out["init_args"] = {"num_prompts": 1, "max_new_tokens": 4}
    return config


@pytest.fixture(scope="module")
def single_process(
    target: str,
    corpus: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    """The checkpoint of a run, and of the same run after it was resumed."""
    home = tmp_path_factory.mktemp("single")
    return [trained("auto", target, corpus, home, resumed=resumed) for resumed in (False, True)]


@pytest.mark.quick_cases("ddp")
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_processes_learn_what_one_learns(
    name: str,
    single_process: list[dict[str, Any]],
    target: str,
    corpus: Path,
    tmp_path: Path,
) -> None:
    parts = (False, True) if name == "fsdp2" else (False,)
    for resumed in parts:
        single = single_process[resumed]
        double = trained(name, target, corpus, tmp_path, resumed=resumed)
        num_steps = 6 if resumed else 3
        assert double["global_step"] == single["global_step"] == num_steps
        assert len(double["losses"]) == num_steps
        tolerance = 1e-3 if resumed else 1e-5
        assert double["losses"] == pytest.approx(single["losses"], rel=tolerance)
        for key, weight in single["state_dict"].items():
            torch.testing.assert_close(double["state_dict"][key], weight, rtol=1e-3, atol=1e-4)
