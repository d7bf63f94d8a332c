"""A results directory: finished rows, one a line, and a manifest that says where and how they were measured.

A row is there once its line has ended: a line that a crash or a full disk has cut is no row, and the next run removes
it. All rows of a directory are of one config, machine and version of the libraries.
"""

from __future__ import annotations

import fcntl  # of POSIX systems
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_specdec.bench.rows import FORMAT, ResultRow
from lightning_specdec.config.files import replaced

MANIFEST, ROWS = "manifest.json", "rows.jsonl"
_SAME = ("format", "device", "processor", "threads", "torch", "transformers", "config")
"""What every row of a directory was measured with."""
_NEEDED = ("name", "config", "pairs", "prompts")


@dataclass
class Results:
    """What a directory holds: where, how and with what it was measured, and the finished rows in order."""

    directory: Path
    manifest: dict[str, Any]
    rows: list[ResultRow] = field(default_factory=list)


def read(directory: str | os.PathLike[str]) -> Results:
    """The results that a directory holds; a run may be writing to it.

    Raises:
        FileNotFoundError: there are none.
        ValueError: they are damaged, or of another format.
    """
    path = Path(directory).expanduser()
    manifest = _manifest(path)
    content = (path / ROWS).read_bytes() if (path / ROWS).exists() else b""
    return Results(path, manifest, list(_rows(path / ROWS, content)))


class ResultsWriter(Results):
    """A results directory that a run adds to; one run at a time.

    Args:
        known: the rows by cell and repeat, new ones too.
    """

    def __init__(self, results: Results, file: int, commit: str | None) -> None:
        super().__init__(results.directory, results.manifest, results.rows)
        self._file, self._commit = file, commit
        self.known = {(row.cell, row.repeat): row for row in self.rows}

    @classmethod
    def open(cls, directory: Path, manifest: Mapping[str, Any]) -> ResultsWriter:
        """Begin results, or resume those that the same config has begun on the same machine.

        Raises:
            ValueError: it holds other results, or another run is writing there.
        """
        directory.mkdir(parents=True, exist_ok=True)
        manifest = {"format": FORMAT, **json.loads(json.dumps(manifest))}
        file = os.open(directory / ROWS, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another run is writing to {directory}: wait for it, or give another name"
                ) from None
            content = (directory / ROWS).read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole:
                _check_same(directory, _manifest(directory), manifest)
                manifest = _manifest(directory) | {"commit": manifest.get("commit")}
            rows = list(_rows(directory / ROWS, content))
            os.ftruncate(file, whole)
            results = cls(Results(directory, dict(manifest), rows), file, manifest.get("commit"))
            results.update()
            return results
        except BaseException:
            os.close(file)
            raise

    def append(self, row: ResultRow) -> None:
        """Add a finished row, and return when it is on the disk.

        Raises:
            OSError: it cannot be written there (a full disk); the rows before it stay.
        """
        row = replace(row, commit=self._commit)
        content = (json.dumps(row.to_dict(), allow_nan=False) + "\n").encode()
        end = os.fstat(self._file).st_size
        try:
            written = 0
            while written < len(content):
                written += os.write(self._file, content[written:])
            os.fsync(self._file)
        except BaseException as error:  # Ctrl-C amid the writing too
            os.ftruncate(self._file, end)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(self.directory / ROWS)) from error
            raise
        self.known[row.cell, row.repeat] = row
        self.rows.append(row)

    def update(self, **entries: Any) -> None:
        self.manifest |= json.loads(json.dumps(entries))
        with replaced(self.directory / MANIFEST) as file:
            file.write((json.dumps(self.manifest, indent=1) + "\n").encode())

    def __enter__(self) -> ResultsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)


def _manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        text = f"{directory} holds no results: `lightning_specdec bench --config FILE` writes them"
        raise FileNotFoundError(text) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged: restore it, or remove {directory} and measure again"
        ) from error
    if (
        not isinstance(values, dict)
        or values.get("format") != FORMAT
        or not values.keys() >= set(_NEEDED)
    ):
        raise ValueError(
            f"{path} is not a manifest of format {FORMAT}: another version wrote it; measure again"
        )
    return dict(values)


def _rows(path: Path, content: bytes) -> Iterator[ResultRow]:
    """The rows whose lines have ended."""
    seen = set()
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            values = json.loads(line)
            row = ResultRow.from_dict(values if isinstance(values, dict) else {})
            if (row.cell, row.repeat) in seen:
                raise ValueError("is there twice")
        except (ValueError, RecursionError) as error:
            why = (
                "is damaged" if isinstance(error, json.JSONDecodeError | RecursionError) else error
            )
            raise ValueError(
                f"{path}, line {number} {why}: remove the line to measure it again"
            ) from error
        seen.add((row.cell, row.repeat))
        yield row


def _check_same(directory: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the first difference, unless a run may go on with what another one has begun."""
    had, has = (_flat("", {name: each.get(name) for name in _SAME}) for each in (found, wanted))
    for name in dict.fromkeys((*has, *had)):
        if had.get(name) != has.get(name):
            before, now = (json.dumps(each.get(name))[:60] for each in (had, has))
            raise ValueError(
                f"cannot resume {directory}: {name} changed from {before} to {now}; give this config another name "
                "(--name), or remove the directory"
            )


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {
        key: each
        for part, inner in value.items()
        for key, each in _flat(f"{name}.{part}".lstrip("."), inner).items()
    }
