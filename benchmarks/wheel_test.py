"""Build a wheel, install it into an empty environment, and run fit, decode and bench there with its configs.

python benchmarks/wheel_test.py        (make wheel-test; minutes, most of them installation)
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CALLS = (
    "fit --config configs/rnn.yaml --trainer.max_epochs 2 --trainer.accelerator cpu",
    "export --ckpt checkpoints/rnn --output checkpoints/rnn.safetensors",
    "decode checkpoints/rnn.safetensors --prompt '1 2 3' --repeats 2",
    "bench --config configs/bench/rnn.yaml",
    "report results/rnn",
    "audit --ckpt checkpoints/rnn.safetensors",
    "info",
)
"""Commands to run in an empty directory, one after the other."""

SHIPPED_TEXT = """
from lightning_specdec.data import GeneratedText
from lightning_specdec.data.corpus import shipped_corpora

data = GeneratedText(shipped_corpora(), vocab_size=49152)
assert len(data.rows("train")) > 10_000, "the wheel does not have the text of `fit --text shipped`"
"""
"""Read the text of `fit --text shipped`. A training with it needs SmolLM2, which the wheel does not have."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--directory",
        type=Path,
        help="directory to build and install in (default: a temporary one)",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = (options.directory or Path(temporary)).resolve()
        python = directory / "environment" / "bin" / "python"
        if not python.exists():
            _run([sys.executable, "-m", "venv", str(python.parent.parent)], directory)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        _run(
            [*pip, "wheel", "--no-deps", "--wheel-dir", str(directory / "dist"), str(ROOT)],
            directory,
        )
        (wheel,) = (directory / "dist").glob("*.whl")
        _run([*pip, "install", "torch>=2.11,<2.14"], directory)
        _run([*pip, "install", str(wheel)], directory)
        elsewhere = directory / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        for call in CALLS:
            _run(["sh", "-c", f"{python.parent / 'lightning_specdec'} {call}"], elsewhere)
        _run([str(python), "-c", SHIPPED_TEXT], elsewhere)
        print("the wheel works")


def _run(words: list[str], directory: Path) -> None:
    print(f"$ {' '.join(words)}", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(words, cwd=directory, check=True, env=environment)


if __name__ == "__main__":
    main()
