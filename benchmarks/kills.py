"""Kill a run of each recipe at random times, resume it each time, and compare its end.

    python benchmarks/kills.py --target checkpoints/smollm2 --text shipped --output kills.json

The end must equal that of an uninterrupted run. Without --target, the script creates a tiny model
and generates text with it.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from markdown_tables import records_table, text_column

from lightning_specdec.bench.manifest import manifest
from lightning_specdec.checkpoints import archive
from lightning_specdec.training.draft_recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]

KILLED = -signal.SIGKILL
"""Exit code of a process that was killed."""
BAD_INPUT = 2
"""Exit code of `fit` if there is nothing left to train, among others."""
FINISHED_MESSAGES = ("finished epochs", "EarlyStopping ended")
"""What `fit` prints if its checkpoint is of a finished run."""


@dataclass
class Kills:
    """What the kills of one recipe did.

    Attributes:
        steps: step of the newest checkpoint at each kill; None if there was none.
        lost_seconds: age of that checkpoint.
    """

    steps: list[int | None] = field(default_factory=list)
    lost_seconds: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target")
    parser.add_argument("--text", nargs="+")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--max_epochs", type=int, default=12)
    parser.add_argument("--save_seconds", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "kills.json")
    options = parser.parse_args()

    generator = random.Random(options.seed)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        target = options.target
        text = options.text
        if target is None:
            target, tiny_text = write_tiny_target(home)
            text = [tiny_text]
        for recipe in options.recipes:
            arguments = fit_arguments(recipe, target, text, options)
            rows.append(measure(recipe, arguments, home, options.kills, generator))
            print(json.dumps(rows[-1]), flush=True)
            options.output.write_text(json.dumps(make_record(options, rows), indent=1) + "\n")


def write_tiny_target(home: Path) -> tuple[str, str]:
    """Write a tiny target and text that it generates. Returns their directories."""
    sys.path.insert(0, str(ROOT / "tests"))
    from generated import generate, prompt_file
    from tiny_models import write_text_model

    from lightning_specdec.data import PromptFiles

    target = write_text_model(home / "target", chat=True)
    prompts = [f"the guess {number} of the draft is" for number in range(60)]
    text = generate(target, home / "text", PromptFiles(prompt_file(home, prompts)))
    return target, str(text)


def fit_arguments(
    recipe: str,
    target: str,
    text: Sequence[str],
    options: argparse.Namespace,
) -> list[str]:
    """Arguments of `fit` for a recipe. The target's path is absolute: `fit` runs elsewhere."""
    arguments = ["--recipe", recipe, "--target", str(Path(target).resolve()), "--text", *text]
    arguments += ["--trainer.max_epochs", str(options.max_epochs)]
    arguments += ["--save_seconds", str(options.save_seconds)]
    arguments += ["--trainer.accelerator", "cpu"]
    return arguments


def measure(
    recipe: str,
    arguments: list[str],
    home: Path,
    num_kills: int,
    generator: random.Random,
) -> dict[str, Any]:
    """One recipe's row: train without interruption, then with kills, and compare the ends."""
    whole_home = home / f"{recipe}_whole"
    whole_home.mkdir()
    start = time.monotonic()
    exit_code = fit(whole_home, arguments)
    assert exit_code == 0, printed_text(whole_home)
    duration = time.monotonic() - start
    whole_end = final_state(whole_home)

    # A run may end before it is killed, so there are as many runs as all kills take.
    kills = Kills()
    end_steps: list[int] = []
    num_same = 0
    while len(kills.steps) < num_kills:
        killed_home = home / f"{recipe}_{len(end_steps)}"
        killed_home.mkdir()
        fit_with_kills(killed_home, arguments, kills, num_kills, duration, generator)
        killed_end = final_state(killed_home)
        end_steps.append(killed_end["global_step"])
        num_same += is_same_end(whole_end, killed_end)

    return {
        "recipe": recipe,
        "seconds": round(duration, 1),
        "kills": len(kills.steps),
        "step_after_each": kills.steps,
        "most_seconds_since_checkpoint": round(max(kills.lost_seconds, default=0.0), 2),
        "runs": len(end_steps),
        "steps": whole_end["global_step"],
        "steps_of_each": end_steps,
        "same_weights": num_same,
    }


def fit_with_kills(
    home: Path,
    arguments: list[str],
    kills: Kills,
    num_kills: int,
    duration: float,
    generator: random.Random,
) -> None:
    """Train until the end, killed at random times and resumed.

    Args:
        kills: what the kills did; those of this run are added.
        num_kills: how many kills there should be in all; then the run may end.
        duration: seconds of an uninterrupted run.
    """
    is_finished = False
    while not is_finished:
        resume_arguments: list[str] = []
        if last_checkpoint(home) is not None:
            resume_arguments = ["--ckpt_path", "last"]
        kill_after = None
        if len(kills.steps) < num_kills:
            kill_after = generator.uniform(0.2, 1.0) * duration

        exit_code = fit(home, [*arguments, *resume_arguments], kill_after)
        if exit_code == KILLED:
            checkpoint = last_checkpoint(home)
            if checkpoint is None:
                kills.steps.append(None)
            else:
                kills.steps.append(archive.read(checkpoint)["global_step"])
                kills.lost_seconds.append(time.time() - checkpoint.stat().st_mtime)
            continue

        # A run that was killed after its last checkpoint has nothing left to train.
        is_finished = exit_code == 0 or (exit_code == BAD_INPUT and has_finished(home))
        assert is_finished, printed_text(home)


def fit(home: Path, arguments: list[str], kill_after: float | None = None) -> int:
    """Run `fit` in a directory, killed after a number of seconds. Returns its exit code."""
    command = [sys.executable, "-m", "lightning_specdec", "fit", *arguments]
    with (home / "printed.txt").open("ab") as printed:
        process = subprocess.Popen(command, cwd=home, stdout=printed, stderr=printed)
        try:
            return process.wait(kill_after)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def printed_text(home: Path) -> str:
    """The end of what `fit` printed."""
    return (home / "printed.txt").read_text()[-2000:]


def has_finished(home: Path) -> bool:
    """Whether the last run printed that training is finished."""
    last_lines = printed_text(home)[-400:]
    return any(message in last_lines for message in FINISHED_MESSAGES)


def last_checkpoint(home: Path) -> Path | None:
    """The newest checkpoint of the only run in a directory."""
    return next(home.glob("checkpoints/*/version_*/last.ckpt"), None)


def final_state(home: Path) -> dict[str, Any]:
    """The content of the newest checkpoint."""
    checkpoint = last_checkpoint(home)
    assert checkpoint is not None, printed_text(home)
    return archive.read(checkpoint)


def is_same_end(state: dict[str, Any], other_state: dict[str, Any]) -> bool:
    """Whether two runs ended after the same steps with the same weights."""
    if state["global_step"] != other_state["global_step"]:
        return False
    other_weights = other_state["state_dict"]
    return all(
        torch.equal(weight, other_weights[name]) for name, weight in state["state_dict"].items()
    )


def make_record(options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The record, without paths of this machine."""
    settings = {
        "recipes": options.recipes,
        "kills": options.kills,
        "max_epochs": options.max_epochs,
        "save_seconds": options.save_seconds,
        "seed": options.seed,
        "target": Path(options.target).name if options.target else "tiny",
    }
    return {"manifest": manifest(options=settings, device=torch.device("cpu")), "rows": rows}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """What each recipe's kills lost, and how many runs ended like the uninterrupted one."""
    columns = {
        "Recipe": text_column("recipe"),
        "Steps of a run": text_column("steps"),
        "Kills": text_column("kills"),
        "Longest time lost, s": text_column("most_seconds_since_checkpoint"),
        "Runs": text_column("runs"),
        "Same weights": text_column("same_weights"),
    }
    return records_table(columns, rows)


if __name__ == "__main__":
    main()
