"""Build a wheel, install it into an empty environment, and run fit, decode and bench there.

    python benchmarks/wheel_test.py

`make wheel-test` does the same. It takes minutes, most of them for the installation.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    "fit --config configs/rnn.yaml --trainer.max_epochs 2 --trainer.accelerator cpu",
    "export --ckpt checkpoints/rnn --output checkpoints/rnn.safetensors",
    "decode checkpoints/rnn.safetensors --prompt '1 2 3' --repeats 2",
    "bench --config configs/bench/rnn.yaml",
    "report results/rnn",
    "audit --ckpt checkpoints/rnn.safetensors",
    "info",
)
"""Commands to run in an empty directory, in this order."""

SHIPPED_TEXT = """
from lightning_specdec.data import GeneratedText
from lightning_specdec.data.corpus import shipped_corpora

data = GeneratedText(shipped_corpora(), vocab_size=49152)
assert len(data.rows("train")) > 10_000, "the wheel does not have the text of `fit --text shipped`"
"""
"""Reads the text of `fit --text shipped`. Training on it needs SmolLM2, which no wheel contains."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--directory",
        type=Path,
        help="directory to build and install in (default: a temporary one)",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        check_wheel(directory.resolve())
    print("the wheel works")


def check_wheel(directory: Path) -> None:
    """Build the wheel, install it, and run the commands, all below a directory."""
    environment = directory / "environment"
    python = environment / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", str(environment)], directory)

    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheels = directory / "dist"
    run([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)], directory)
    (wheel,) = wheels.glob("*.whl")
    run([*pip, "install", "torch>=2.11,<2.14"], directory)
    run([*pip, "install", str(wheel)], directory)

    # An empty directory, so that nothing is read from the repository.
    empty_directory = directory / "elsewhere"
    empty_directory.mkdir(exist_ok=True)
    program = environment / "bin" / "lightning_specdec"
    for command in COMMANDS:
        run(["sh", "-c", f"{program} {command}"], empty_directory)
    run([str(python), "-c", SHIPPED_TEXT], empty_directory)


def run(command: list[str], directory: Path) -> None:
    """Print a command and run it, without the sources of the repository on the path."""
    print(f"$ {' '.join(command)}", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, cwd=directory, check=True, env=environment)


if __name__ == "__main__":
    main()
