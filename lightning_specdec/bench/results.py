"""A results directory: finished rows, one a line, and a manifest that says where and how they were measured.

A row is there once its line has ended: a line that a crash or a full disk has cut is no row, and the next run removes
it. Rows of several commits may lie side by side, since each says which measured it; rows of several machines may not.
"""

from __future__ import annotations

import fcntl  # of POSIX systems
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning_specdec.bench.rows import FORMAT, ResultRow
from lightning_specdec.config.files import replaced

MANIFEST, ROWS = "manifest.json", "rows.jsonl"
_SAME = ("format", "device", "processor", "threads")
"""What every row of a directory was measured with, besides the config."""
_VERSIONS = ("lightning_specdec", "python", "torch", "transformers")
_MADE_BY = ("commit", *_VERSIONS, "cores", "memory_bytes", "cuda")
"""What may change from run to run; the manifest's `resumed` notes it."""
_NEEDED = ("name", "config", "pairs", "prompts")
_NUMBERS = re.compile(r"\[\n\s*(-?[0-9][0-9.eE+-]*(?:,\n\s*-?[0-9][0-9.eE+-]*)*)\n\s*\]")
"""A list of numbers over several lines, which is written on one."""


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
        ValueError: they are damaged, or of an unknown format.
    """
    path = Path(directory).expanduser()
    manifest = _manifest(path)
    content = (path / ROWS).read_bytes() if (path / ROWS).exists() else b""
    return Results(path, manifest, list(_rows(path / ROWS, content)))


class ResultsWriter(Results):
    """A results directory that a run adds to; one run at a time.

    Args:
        known: the rows by cell and repeat, new ones too.
        failed: cells of which a run has failed; they are not tried again.
    """

    def __init__(self, results: Results, file: int, manifest: Mapping[str, Any]) -> None:
        super().__init__(results.directory, results.manifest, results.rows)
        self._file = file
        self._made_by = {name: manifest[name] for name in _MADE_BY if manifest.get(name) is not None}
        self.known = {(row.cell, row.repeat): row for row in self.rows}
        self.failed = {row.cell for row in self.rows if row.error is not None}

    @classmethod
    def open(cls, directory: Path, manifest: Mapping[str, Any]) -> ResultsWriter:
        """Begin results, or resume those that the same config has begun on the same machine.

        Raises:
            ValueError: it holds other results, or another run is writing there.
        """
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
                raise ValueError(f"{directory} has rows and no {MANIFEST} to say what they are: remove it")
            else:
                _check_same(directory, _manifest(directory), {"format": FORMAT, **manifest})
            if whole < len(content):
                os.ftruncate(file, whole)
            rows = list(_rows(directory / ROWS, content))
            return cls(Results(directory, _manifest(directory), rows), file, manifest)
        except BaseException:
            os.close(file)
            raise

    def resume(self) -> str | None:
        """Before rows are added: note in the manifest what has changed since the last run, and say so in a line."""
        resumed = self.manifest.get("resumed", [])
        last = resumed[-1] if resumed else self.manifest
        known = {name: (last[name], now) for name, now in self._made_by.items() if last.get(name) is not None}
        changes = [f"{name} {before} -> {now}" for name, (before, now) in known.items() if before != now]
        if not changes:
            return None
        self.update(resumed=[*resumed, {"commit": None, **self._made_by, "date": _now()}])
        return f"{self.directory} goes on with {', '.join(changes)}: each row says what measured it"

    def append(self, row: ResultRow) -> None:
        """Add a finished row, and return when it is on the disk.

        Raises:
            OSError: it cannot be written there (a full disk); the rows before it stay.
        """
        versions = {name: self._made_by[name] for name in _VERSIONS if name in self._made_by}
        row = replace(row, commit=self._made_by.get("commit"), versions=versions, date=_now())
        assert (row.cell, row.repeat) not in self.known, f"{row.cell} has been measured before"
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
        if row.error is not None:
            self.failed.add(row.cell)
        self.rows.append(row)

    def update(self, **entries: Any) -> None:
        """Set entries of the manifest."""
        self.manifest |= json.loads(json.dumps(entries))
        _write_manifest(self.directory, self.manifest)

    def __enter__(self) -> ResultsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _write_manifest(directory: Path, values: Mapping[str, Any]) -> None:
    with replaced(directory / MANIFEST) as file:
        content = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", json.dumps(values, indent=1))
        file.write((content + "\n").encode())


def _manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        text = f"{directory} holds no results: `lightning_specdec bench --config FILE` writes them"
        raise FileNotFoundError(text) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: restore it, or remove {directory} and measure again") from error
    found = values.get("format") if isinstance(values, dict) else None
    if found not in range(1, FORMAT + 1):
        raise ValueError(f"{path} has the format {found!r}, this version reads 1 to {FORMAT}: measure again")
    if missing := [name for name in _NEEDED if name not in values]:
        raise ValueError(f"{path} has no {missing[0]}: restore it, or remove {directory} and measure again")
    return dict(values)


def _rows(path: Path, content: bytes) -> Iterator[ResultRow]:
    """The rows whose lines have ended; those of methods that are gone (`rolled` of format 1) are left out."""
    seen: set[tuple[str, int]] = set()
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            values = json.loads(line)
            if not isinstance(values, dict) or values.get("format") not in range(1, FORMAT + 1):
                raise ValueError("is no row of a known format")
            if values.get("way") == "rolled":
                continue
            row = ResultRow.from_dict(values)
            if (row.cell, row.repeat) in seen:
                raise ValueError("is there twice")
        except (ValueError, RecursionError) as error:
            why = "is damaged" if isinstance(error, json.JSONDecodeError | RecursionError) else error
            raise ValueError(f"{path}, line {number} {why}: remove the line, and it is measured again") from error
        seen.add((row.cell, row.repeat))
        yield row


def _check_same(directory: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the first difference, unless a run may go on with what another one has begun."""
    had, has = (
        {**{name: each.get(name) for name in _SAME}, **_flat("config", json.loads(json.dumps(each["config"])))}
        for each in (found, wanted)
    )
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
    return {key: each for part, inner in value.items() for key, each in _flat(f"{name}.{part}", inner).items()}
