"""Files that are written whole or not at all, and where those lie that can be made again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def cache_home() -> Path:
    """Where this program keeps what it can make again: `~/.cache/lightning_specdec`, by XDG's rules."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lightning_specdec"


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A new file, with a name of its own beside that one: it takes its place in one step, or is gone if writing fails.

    Missing directories are made.

    Raises:
        ValueError: no file can be put there.
        OSError: the writing failed, as on a full disk; the error names `path`, and an old file stays.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a directory: name the file to write in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        reason = "a file is where a directory must be: name another place to write to"
        raise NotADirectoryError(error.errno, reason, str(path.parent)) from error
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o644)  # a temporary file is its owner's alone
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except (
        OSError
    ) as error:  # a full disk names no file; leaving the inner block flushes again, and fails again
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A new directory, with a name of its own beside that one: it takes its place in one step, or is gone on an error.

    Raises:
        ValueError: something is there already.
        OSError: the writing failed; nothing is left.
    """
    if path.is_symlink() or path.exists():
        raise ValueError(f"{path} is there already and stays as it is: choose another directory")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=path.parent, prefix=f".{path.name}.", ignore_cleanup_errors=True
        ) as name:
            folder = Path(name)
            yield folder
            for each in folder.iterdir():
                with each.open("rb") as file:
                    os.fsync(file.fileno())
            os.chmod(folder, 0o755)  # a temporary directory is its owner's alone
            os.rename(folder, path)
    except OSError as error:  # a full disk names no file
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
