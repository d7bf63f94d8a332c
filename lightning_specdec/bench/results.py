"""A results directory: finished rows, one a line, and a manifest of how they were measured.

A row counts once its line has ended. A line cut off by a crash or a full disk is no row, and the
next run removes it. All rows of a directory have one config, machine and version of the libraries.
"""

from __future__ import annotations

import fcntl  # of POSIX systems
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_specdec.bench.records import FORMAT, Record
from lightning_specdec.config.files import replaced

MANIFEST = "manifest.json"
ROWS = "rows.jsonl"
_FIXED_ENTRIES = ("format", "device", "processor", "threads", "torch", "transformers", "config")
"""Entries of the manifest that every row of a directory was measured with."""
_REQUIRED_ENTRIES = ("name", "config", "pairs", "prompts")


@dataclass
class Results:
    """The contents of a directory: how it was measured, and the finished rows in order."""

    directory: Path
    manifest: dict[str, Any]
    rows: list[Record] = field(default_factory=list)


def read(directory: str | os.PathLike[str]) -> Results:
    """Read the results of a directory, also while a run writes to it.

    Raises:
        FileNotFoundError: there are no results.
        ValueError: they are damaged, or of another format.
    """
    path = Path(directory).expanduser()
    manifest = _read_manifest(path)
    rows_path = path / ROWS
    content = rows_path.read_bytes() if rows_path.exists() else b""
    return Results(path, manifest, list(_parse_rows(rows_path, content)))


class ResultsWriter(Results):
    """A results directory that a run adds to; one run at a time.

    Args:
        file: descriptor of the file of rows, locked and open for appending.
        commit: git commit that new rows are recorded with.

    Attributes:
        known: the rows by cell and repeat, new ones included.
    """

    def __init__(self, results: Results, file: int, commit: str | None) -> None:
        super().__init__(results.directory, results.manifest, results.rows)
        self._file = file
        self._commit = commit
        self.known = {(row.cell, row.repeat): row for row in self.rows}

    @classmethod
    def open(cls, directory: Path, manifest: Mapping[str, Any]) -> ResultsWriter:
        """Begin results, or resume those of the same config on the same machine.

        Raises:
            ValueError: the directory has other results, or another run is writing to it.
        """
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / ROWS, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _lock(file, directory)
            return cls._open_locked(directory, file, manifest)
        except BaseException:
            os.close(file)
            raise

    @classmethod
    def _open_locked(cls, directory: Path, file: int, manifest: Mapping[str, Any]) -> ResultsWriter:
        # Through JSON, so that it compares with a manifest that was read.
        new_manifest = {"format": FORMAT, **json.loads(json.dumps(manifest))}
        commit = new_manifest.get("commit")

        content = (directory / ROWS).read_bytes()
        length_of_whole_lines = content.rfind(b"\n") + 1
        if length_of_whole_lines:
            old_manifest = _read_manifest(directory)
            _check_resumable(directory, old_manifest, new_manifest)
            new_manifest = {**old_manifest, "commit": commit}
        rows = list(_parse_rows(directory / ROWS, content))

        # Remove the beginning of a row that an earlier run could not finish.
        os.ftruncate(file, length_of_whole_lines)
        writer = cls(Results(directory, new_manifest, rows), file, commit)
        writer.update()
        return writer

    def append(self, row: Record) -> None:
        """Add a finished row; returns when it is on the disk.

        Raises:
            OSError: it cannot be written (a full disk); earlier rows stay.
        """
        row = replace(row, commit=self._commit)
        line = json.dumps(row.to_dict(), allow_nan=False) + "\n"
        content = line.encode()
        old_size = os.fstat(self._file).st_size
        try:
            num_written = 0
            while num_written < len(content):
                num_written += os.write(self._file, content[num_written:])
            os.fsync(self._file)
        except BaseException as error:
            # Ctrl-C must not leave half a row either.
            os.ftruncate(self._file, old_size)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(self.directory / ROWS)) from error
            raise
        self.known[row.cell, row.repeat] = row
        self.rows.append(row)

    def update(self, **entries: Any) -> None:
        """Write the manifest, with these entries changed."""
        self.manifest.update(json.loads(json.dumps(entries)))
        text = json.dumps(self.manifest, indent=1) + "\n"
        with replaced(self.directory / MANIFEST) as file:
            file.write(text.encode())

    def __enter__(self) -> ResultsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)


def _lock(file: int, directory: Path) -> None:
    """Lock a file until it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"another run is writing to {directory}: wait for it, or give another name"
        ) from None


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{directory} holds no results: `lightning_specdec bench --config FILE` writes them"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged: restore it, or remove {directory} and measure again"
        ) from error

    is_manifest = isinstance(values, dict) and values.get("format") == FORMAT
    if not is_manifest or not values.keys() >= set(_REQUIRED_ENTRIES):
        raise ValueError(
            f"{path} is not a manifest of format {FORMAT}: another version wrote it; measure again"
        )
    return dict(values)


def _parse_rows(path: Path, content: bytes) -> Iterator[Record]:
    """The rows of a file whose lines have ended.

    Args:
        path: names the file in errors.
    """
    seen_runs = set()
    whole_lines = content.split(b"\n")[:-1]
    for line_number, line in enumerate(whole_lines, start=1):
        try:
            row = _parse_row(line)
            if (row.cell, row.repeat) in seen_runs:
                raise ValueError("is there twice")
        except ValueError as error:
            raise ValueError(
                f"{path}, line {line_number} {error}: remove the line to measure it again"
            ) from error
        seen_runs.add((row.cell, row.repeat))
        yield row


def _parse_row(line: bytes) -> Record:
    try:
        values = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError("is damaged") from error
    if not isinstance(values, dict):
        values = {}
    return Record.from_dict(values)


def _check_resumable(
    directory: Path,
    old_manifest: Mapping[str, Any],
    new_manifest: Mapping[str, Any],
) -> None:
    """Check that a run may continue what an earlier one has begun.

    Raises:
        ValueError: it may not; names the first difference.
    """
    old_entries = _flatten("", {name: old_manifest.get(name) for name in _FIXED_ENTRIES})
    new_entries = _flatten("", {name: new_manifest.get(name) for name in _FIXED_ENTRIES})
    for name in dict.fromkeys((*new_entries, *old_entries)):
        old_value = old_entries.get(name)
        new_value = new_entries.get(name)
        if old_value != new_value:
            raise ValueError(
                f"cannot resume {directory}: {name} changed from {json.dumps(old_value)[:60]} to "
                f"{json.dumps(new_value)[:60]}; give this config another name (--name), or remove "
                "the directory"
            )


def _flatten(prefix: str, value: Any) -> dict[str, Any]:
    """Nested entries by their path, as `config.pairs.rnn.ckpt`."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    entries: dict[str, Any] = {}
    for name, inner_value in value.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        entries.update(_flatten(path, inner_value))
    return entries
