"""Where training runs keep their checkpoints: DIRECTORY/version_N/best.ckpt and last.ckpt."""

from __future__ import annotations

import os
import re
from pathlib import Path


def versions(directory: Path) -> list[int]:
    """The version numbers of a directory's runs, the newest first."""
    numbers = []
    for path in directory.glob("version_*"):
        match = re.fullmatch(r"version_([0-9]{1,9})", path.name)
        if match:
            numbers.append(int(match[1]))
    return sorted(numbers, reverse=True)


def find(path: str | os.PathLike[str], names: tuple[str, ...] = ("best", "last")) -> Path:
    """The checkpoint that a path selects: the file itself, or one of a directory's newest run.

    Args:
        path: a file, or a directory of runs.
        names: names of checkpoints; the newest run that has any of them counts, and the first name
            in it.

    Raises:
        FileNotFoundError: no run in the directory has such a checkpoint.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    run_directories = [path / f"version_{number}" for number in versions(path)]
    for directory in [*run_directories, path]:
        for name in names:
            checkpoint_path = directory / f"{name}.ckpt"
            if checkpoint_path.is_file():
                return checkpoint_path
    raise FileNotFoundError(
        f"there is no {' or '.join(names)} checkpoint in {path}: train one with "
        "`lightning_specdec fit`, or name a file"
    )
