"""A results directory: what was measured, a finished run a line, and a manifest that says where and how.

Knows nothing of how anything was measured, nor of torch. A row is there once its line has ended: a line that a crash
or a full disk has cut is no row, and is cut off by the next run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_specdec.files import replaced

FORMAT = 1
"""Counted up when rows or manifests change, so that results of another version are not misread."""
MANIFEST, ROWS = "manifest.json", "rows.jsonl"
_SAME = ("lightning_specdec", "torch", "device", "processor", "threads")
"""What every row of a directory was measured with; the config comes first."""

Row = dict[str, Any]
Key = tuple[str, int]
"""A cell and its repeat."""


@dataclass
class Results:
    """What a directory holds.

    Args:
        directory: where it lies.
        manifest: where, how and with what it was measured.
        rows: finished runs, in the order in which they ended.
    """

    directory: Path
    manifest: dict[str, Any]
    rows: list[Row] = field(default_factory=list)


def read(directory: str | os.PathLike[str]) -> Results:
    """The results that a directory holds; a run may be writing to it.

    Raises:
        FileNotFoundError: there are none.
        ValueError: they are torn, or of another version.
    """
    path = Path(directory).expanduser()
    manifest = _manifest(path)
    try:
        content = (path / ROWS).read_bytes()
    except FileNotFoundError:
        content = b""
    return Results(path, manifest, list(_rows(path / ROWS, content)))


class ResultsWriter:
    """A results directory that a run adds to; one run at a time.

    Args:
        results: what it holds so far, the new rows too.
        file: the rows', open at its end.
    """

    def __init__(self, results: Results, file: int) -> None:
        self.results = results
        self._file = file
        self._by_key: dict[Key, Row] = {}
        self._failed: set[str] = set()
        for row in results.rows:
            self._remember(row)

    def _remember(self, row: Row) -> None:
        self._by_key[_key(row)] = row
        if row["error"] is not None:
            self._failed.add(row["cell"])

    @classmethod
    def open(cls, directory: Path, manifest: Mapping[str, Any]) -> ResultsWriter:
        """Begin results, or go on with those that the same config has begun on the same machine.

        Args:
            directory: made where it is missing.
            manifest: what a new one says; of results that are there it must say the same (`_SAME`).

        Raises:
            ValueError: it holds other results, or another run is writing there.
        """
        import fcntl  # of POSIX systems

        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / ROWS, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another run is writing to {directory}: wait for it, or give another name") from None
            for left in directory.glob(f".{MANIFEST}.*"):  # by a run that was killed
                left.unlink()
            content = (directory / ROWS).read_bytes()
            whole = content.rfind(b"\n") + 1
            if not whole:  # nothing has been measured there, whatever was begun
                _write_manifest(directory, {"format": FORMAT, **manifest})
            elif not (directory / MANIFEST).exists():
                raise ValueError(f"{directory} has rows and no {MANIFEST}, so nobody knows what they are: remove it")
            else:
                _check_same(directory, _manifest(directory), manifest)
            if whole < len(content):
                os.ftruncate(file, whole)
            rows = list(_rows(directory / ROWS, content))
            return cls(Results(directory, _manifest(directory), rows), file)
        except BaseException:
            os.close(file)
            raise

    def row(self, cell: str, repeat: int) -> Row | None:
        """This run of the cell, if it is there."""
        return self._by_key.get((cell, repeat))

    def failed(self, cell: str) -> bool:
        """Whether a run of the cell has failed: what failed once is not tried again."""
        return cell in self._failed

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a finished run, and return when it is on the disk.

        Raises:
            OSError: it cannot be written there (a full disk); the rows before it stay.
        """
        line = {"format": FORMAT, **row}
        assert _key(line) not in self._by_key, f"{_key(line)} has been measured before"
        content = (json.dumps(line, allow_nan=False) + "\n").encode()
        end = os.fstat(self._file).st_size
        try:
            written = 0
            while written < len(content):
                written += os.write(self._file, content[written:])
            os.fsync(self._file)
        except BaseException as error:  # Ctrl-C amid the writing too
            os.ftruncate(self._file, end)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(self.results.directory / ROWS)) from error
            raise
        self._remember(line)
        self.results.rows.append(line)

    def update(self, **entries: Any) -> None:
        """Set entries of the manifest."""
        self.results.manifest |= json.loads(json.dumps(entries))
        _write_manifest(self.results.directory, self.results.manifest)

    def close(self) -> None:
        """Let the next run write."""
        os.close(self._file)

    def __enter__(self) -> ResultsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _key(row: Mapping[str, Any]) -> Key:
    return str(row["cell"]), int(row["repeat"])


def _write_manifest(directory: Path, values: Mapping[str, Any]) -> None:
    try:
        with replaced(directory / MANIFEST) as file:
            file.write((json.dumps(values, indent=1) + "\n").encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(directory / MANIFEST)) from error


def _manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        told = f"{directory} holds no results: `lightning_specdec bench --config FILE` writes them"
        raise FileNotFoundError(told) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is torn or damaged: restore it, or remove {directory} and measure again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is no manifest of results: restore it, or remove {directory} and measure again")
    if values.get("format") != FORMAT:
        by = values.get("lightning_specdec", "another program")
        raise ValueError(
            f"{directory} holds results of format {values.get('format')!r} (by {by}), this version reads {FORMAT}: "
            "measure again under another name"
        )
    return values


def _rows(path: Path, content: bytes) -> Iterator[Row]:
    """The rows whose lines have ended."""
    seen: set[Key] = set()
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is damaged: remove the line, and it is measured again") from error
        if not isinstance(row, dict) or row.get("format") != FORMAT:
            got = row.get("format") if isinstance(row, dict) else row
            raise ValueError(f"{path}, line {number} is no row of format {FORMAT}, got {got!r}: measure again")
        if not isinstance(row.get("cell"), str) or not isinstance(row.get("repeat"), int) or "error" not in row:
            raise ValueError(
                f"{path}, line {number} names no cell or repeat: remove the line, and it is measured again"
            )
        if _key(row) in seen:
            raise ValueError(f"{path}, line {number} is there twice: remove the line")
        seen.add(_key(row))
        yield row


def _check_same(directory: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the first difference, unless a run may go on with what another one has begun."""
    had, has = (_flat("config", json.loads(json.dumps(each["config"]))) for each in (found, wanted))
    for values, manifest in ((had, found), (has, wanted)):
        values |= {name: manifest.get(name) for name in _SAME}
    for name in dict.fromkeys((*has, *had)):
        if had.get(name) != has.get(name):
            told = f"{name} was {_short(had.get(name))} there and is {_short(has.get(name))} now"
            raise ValueError(f"{directory} holds other results ({told}): give this config another name, or remove them")


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {key: each for part, inner in value.items() for key, each in _flat(f"{name}.{part}", inner).items()}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
