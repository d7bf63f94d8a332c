"""Kill a run of each recipe at random times, resume it each time, and compare its end with an uninterrupted run.

    python benchmarks/kills.py --target checkpoints/smollm2 --text shipped --output docs/results/kills.json

Without --target, the script creates a tiny model and generates text with it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from record_tables import markdown_table

from lightning_specdec.bench.manifest import manifest
from lightning_specdec.checkpoints import archive
from lightning_specdec.training.draft_recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]


def tiny(home: Path) -> tuple[str, str]:
    """Directories of a tiny target and of its text."""
    sys.path.insert(0, str(ROOT / "tests"))
    from generated import generate, prompt_file
    from tiny_models import write_text_model

    from lightning_specdec.data import PromptFiles

    target = write_text_model(home / "target", chat=True)
    prompts = [f"the guess {number} of the draft is" for number in range(60)]
    return target, str(generate(target, home / "text", PromptFiles(prompt_file(home, prompts))))


def end(home: Path) -> dict[str, Any]:
    """Newest state of the only run below a directory."""
    (path,) = home.glob("checkpoints/*/version_*/last.ckpt")
    return archive.read(path)


def fit(home: Path, words: list[str], seconds: float | None = None) -> int:
    """Run `fit` in a directory, killed by SIGKILL after a number of seconds. Returns its exit code."""
    command = [sys.executable, "-m", "lightning_specdec", "fit", *words]
    with (home / "printed.txt").open("ab") as printed:
        process = subprocess.Popen(command, cwd=home, stdout=printed, stderr=printed)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def measure(
    recipe: str, words: list[str], home: Path, num_kills: int, draw: random.Random
) -> dict[str, Any]:
    """One recipe's row."""
    whole = home / f"{recipe}_whole"
    whole.mkdir()
    began = time.monotonic()
    assert fit(whole, words) == 0, (whole / "printed.txt").read_text()[-2000:]
    duration, one = time.monotonic() - began, end(whole)
    steps: list[int | None] = []
    lost: list[float] = []
    same: list[bool] = []
    ends: list[int] = []
    while len(steps) < num_kills:  # a run that ends before its kill time is repeated
        killed, code = home / f"{recipe}_{len(same)}", -9
        killed.mkdir()
        while code:
            found = list(killed.glob("checkpoints/*/version_*/last.ckpt"))
            moment = draw.uniform(0.2, 1.0) * duration if len(steps) < num_kills else None
            code = fit(killed, [*words, *["--ckpt_path", "last"][: 2 * len(found)]], moment)
            printed = (killed / "printed.txt").read_text()
            if code == 2 and (
                "finished epochs" in printed[-400:] or "EarlyStopping ended" in printed[-400:]
            ):
                code = 0  # it was killed after its last checkpoint: nothing is left to do
            assert code in (0, -9), printed[-2000:]
            found = list(killed.glob("checkpoints/*/version_*/last.ckpt"))
            if code:
                steps.append(archive.read(found[0])["global_step"] if found else None)
                lost += [time.time() - found[0].stat().st_mtime] if found else []
        other = end(killed)
        weights = (
            torch.equal(value, other["state_dict"][name])
            for name, value in one["state_dict"].items()
        )
        same.append(one["global_step"] == other["global_step"] and all(weights))
        ends.append(other["global_step"])
    return {
        "recipe": recipe,
        "seconds": round(duration, 1),
        "kills": len(steps),
        "step_after_each": steps,
        "most_seconds_since_checkpoint": round(max(lost, default=0.0), 2),
        "runs": len(same),
        "steps": one["global_step"],
        "steps_of_each": ends,
        "same_weights": sum(same),
    }


def record(given: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the output holds."""
    told = {
        name: value
        for name, value in vars(given).items()
        if name not in ("target", "text", "output")
    }
    told["target"] = Path(given.target).name if given.target else "tiny"
    return {"manifest": manifest(options=told, device=torch.device("cpu")), "rows": rows}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: what each recipe's kills lost, and how many runs ended as the uninterrupted one."""
    names = ("recipe", "steps", "kills", "most_seconds_since_checkpoint", "runs", "same_weights")
    heads = ("Recipe", "Steps of a run", "Kills", "Longest time lost, s", "Runs", "Same weights")
    return markdown_table(heads, [[str(row[name]) for name in names] for row in rows])


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
    given = parser.parse_args()
    draw, rows = random.Random(given.seed), []
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        target, text = (
            (given.target, given.text) if given.target else ((made := tiny(home))[0], [made[1]])
        )
        for recipe in given.recipes:
            words = ["--recipe", recipe, "--target", str(Path(target).resolve()), "--text", *text]
            words += [
                "--trainer.max_epochs",
                str(given.max_epochs),
                "--save_seconds",
                str(given.save_seconds),
            ]
            words += ["--trainer.accelerator", "cpu"]
            rows.append(measure(recipe, words, home, given.kills, draw))
            print(json.dumps(rows[-1]), flush=True)
            given.output.write_text(json.dumps(record(given, rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
