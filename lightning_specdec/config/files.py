"""Files that are written whole or not at all, and where those lie that can be made again."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple


def cache_home() -> Path:
    """The cache directory: `lightning_specdec` in `$XDG_CACHE_HOME`, by default `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lightning_specdec"


def file_sha256(path: Path) -> str:
    """The sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_parent(output: Path) -> None:
    """Refuse a path to write to if the directory that would contain it does not exist.

    Directories that a user names may be misspelled, so only the last one of a path is made.

    Raises:
        ValueError: there is no such directory.
    """
    if not output.parent.exists():
        raise ValueError(f"there is no directory {output.parent}: make it first")


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that replaces `path` in one step, or is removed if writing fails.

    It is written under a temporary name in the same directory. Missing directories are created.

    Raises:
        ValueError: no file can be put there.
        OSError: the writing failed, as on a full disk; the error names `path`, and an old file
            stays.
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
                # Only its owner can read a temporary file.
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        # The error of a full disk names no file. It is caught out here, because closing the
        # temporary file writes once more and raises a second error.
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Create a directory with all its files in one step, or not at all.

    The files are written to a temporary directory next to it, which is renamed at the end. A
    killed process leaves that directory: see `remove_abandoned`.

    Yields:
        The temporary directory.

    Raises:
        ValueError: something is at `path` already.
        OSError: the writing failed; nothing is left.
    """
    if path.is_symlink() or path.exists():
        raise ValueError(f"{path} is there already and is left unchanged: choose another directory")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _locked_directory(path)
        try:
            yield temporary.path
            for written_path in temporary.path.iterdir():
                with written_path.open("rb") as file:
                    os.fsync(file.fileno())
            # A temporary directory is readable by its owner only.
            os.chmod(temporary.path, 0o755)
            os.rename(temporary.path, path)
        finally:
            shutil.rmtree(temporary.path, ignore_errors=True)
            os.close(temporary.lock)
    except OSError as error:
        # The error of a full disk names no file.
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def lock_directory(directory: Path, refusal: str) -> int:
    """Keep other processes that lock a directory out of it; returns the descriptor to close.

    Args:
        refusal: the error if another process has locked it.

    Raises:
        ValueError: another process has locked it.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ValueError(refusal) from error
    return descriptor


class _LockedDirectory(NamedTuple):
    """A temporary directory that this process holds a lock on, as the file descriptor `lock`."""

    path: Path
    lock: int


def _locked_directory(path: Path) -> _LockedDirectory:
    """A new temporary directory next to a path. Its lock marks it as in use."""
    while True:
        directory = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            lock = os.open(directory, os.O_RDONLY)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have taken it for abandoned before it was locked.
        if directory.exists():
            return _LockedDirectory(directory, lock)
        os.close(lock)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove temporary directories of `new_directory` whose process was killed while it wrote them.

    Args:
        parent: the directory that contains them. It must be this program's own: names are all that
            is checked.
        prefix: how the names of the finished directories begin.
    """
    for directory in parent.glob(f".{prefix}*"):
        if directory.is_symlink() or not directory.is_dir():
            continue
        # Another process may remove it at the same time, and some file systems have no locks.
        with suppress(OSError):
            lock = os.open(directory, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)
