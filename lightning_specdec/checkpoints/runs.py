"""Where training runs keep their checkpoints: DIRECTORY/version_N/best.ckpt and last.ckpt."""

from __future__ import annotations

import os
import re
from pathlib import Path


def versions(directory: Path) -> list[int]:
    """The numbers of a directory's runs, the newest first."""
    names = (
        re.fullmatch(r"version_([0-9]{1,9})", path.name) for path in directory.glob("version_*")
    )
    return sorted((int(name[1]) for name in names if name), reverse=True)


def find(path: str | os.PathLike[str], names: tuple[str, ...] = ("best", "last")) -> Path:
    """The checkpoint that a path means: a file itself; of a directory the newest run's first of `names`.

    Raises:
        FileNotFoundError: no run in the directory has one.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    for folder in (*(path / f"version_{number}" for number in versions(path)), path):
        for name in names:
            if (found := folder / f"{name}.ckpt").is_file():
                return found
    raise FileNotFoundError(
        f"there is no {' or '.join(names)} checkpoint in {path}: train one with `lightning_specdec fit`, or name a file"
    )
