"""A results directory: what was measured, a finished run a line, and a manifest that says where and how.

A row is there once its line has ended: a line that a crash or a full disk has cut is no row, and is cut off by the next
run. Rows of several commits or versions may lie side by side, since each says which are its own; rows of several
machines may not.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_specdec.bench.row import FORMAT, ResultRow, lacking
from lightning_specdec.files import replaced

MANIFEST, ROWS = "manifest.json", "rows.jsonl"
_SAME = ("device", "processor", "threads")
"""What every row of a directory was measured with; the config comes first."""
_VERSIONS = ("lightning_specdec", "python", "torch", "transformers")
"""What may have changed since the first row, as the commit may."""
_MACHINE = ("cores", "memory_bytes", "cuda")
"""The same of the machine: a virtual one has them changed."""
_NEEDED = ("name", "config", "pairs", "prompts")
"""What no manifest goes without."""
_KINDS: dict[str, Any] = {
    "cell": str,
    "repeat": int,
    "pair": str,
    "way": str,
    "domain": str,
    "error": (str, type(None)),
}
"""Of what rows are told apart by."""
_NUMBERS = re.compile(r"\[\n\s*(-?[0-9][0-9.eE+-]*(?:,\n\s*-?[0-9][0-9.eE+-]*)*)\n\s*\]")
"""A list of numbers over several lines; no text of JSON holds a line's end."""

StoredRow = dict[str, Any]
"""A `ResultRow` as it was read."""
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
    rows: list[StoredRow] = field(default_factory=list)


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
        manifest: what this run says of itself, whoever began the results.
    """

    def __init__(self, results: Results, file: int, manifest: Mapping[str, Any]) -> None:
        self.results = results
        self._file = file
        self._made_by = {
            name: manifest[name] for name in ("commit", *_VERSIONS, *_MACHINE) if manifest.get(name) is not None
        }
        self._by_key: dict[Key, StoredRow] = {}
        self._failed: set[str] = set()
        for row in results.rows:
            self._remember(row)

    def _remember(self, row: StoredRow) -> None:
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
            return cls(Results(directory, _manifest(directory), rows), file, manifest)
        except BaseException:
            os.close(file)
            raise

    def row(self, cell: str, repeat: int) -> StoredRow | None:
        """This run of the cell, if it is there."""
        return self._by_key.get((cell, repeat))

    def failed(self, cell: str) -> bool:
        """Whether a run of the cell has failed: what failed once is not tried again."""
        return cell in self._failed

    def failed_drafts(self, pair: str) -> dict[str, str]:
        """The drafts of a pair that could not be made ready, by the reason."""
        failed = [row for row in self.results.rows if row["pair"] == pair and row["error"] is not None]
        return {row["draft"]: row["error"] for row in failed if row["draft"] is not None and row["draft_kind"] is None}

    def resume(self) -> str | None:
        """Before rows are added: note in the manifest (`resumed`) that this program is not the one that added the last
        ones, and say so in a line; None where it is the same."""
        resumed = self.results.manifest.get("resumed", [])
        last = resumed[-1] if resumed else self.results.manifest
        known = {name: (last[name], now) for name, now in self._made_by.items() if last.get(name) is not None}
        changes = [f"{name} {before} -> {now}" for name, (before, now) in known.items() if before != now]
        if not changes:
            return None
        self.update(resumed=[*resumed, {"commit": None, **self._made_by, "date": _now()}])
        return f"{self.results.directory} goes on with {', '.join(changes)}: each row says what it was measured by"

    def append(self, row: ResultRow) -> None:
        """Add a finished run, by this program and at this time, and return when it is on the disk.

        Raises:
            OSError: it cannot be written there (a full disk); the rows before it stay.
        """
        versions = {name: self._made_by[name] for name in _VERSIONS if name in self._made_by}
        line = replace(row, commit=self._made_by.get("commit"), versions=versions, date=_now()).to_dict()
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


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _key(row: Mapping[str, Any]) -> Key:
    return str(row["cell"]), int(row["repeat"])


def _write_manifest(directory: Path, values: Mapping[str, Any]) -> None:
    try:
        with replaced(directory / MANIFEST) as file:
            content = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", json.dumps(values, indent=1))
            file.write((content + "\n").encode())
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
    if missing := [name for name in _NEEDED if name not in values]:
        raise ValueError(f"{path} has no {missing[0]}: restore it, or remove {directory} and measure again")
    return values


def _rows(path: Path, content: bytes) -> Iterator[StoredRow]:
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
        if missing := lacking(row):
            told = ", ".join(missing[:3])
            raise ValueError(f"{path}, line {number} has no {told}: remove the line, and it is measured again")
        if wrong := [name for name, kinds in _KINDS.items() if not isinstance(row[name], kinds)]:
            told = f"has a {wrong[0]} that is none, {_short(row[wrong[0]])}"
            raise ValueError(f"{path}, line {number} {told}: remove the line, and it is measured again")
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
            raise ValueError(
                f"{directory} holds other results ({told}): give this config another name (--name), or remove them"
            )


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {key: each for part, inner in value.items() for key, each in _flat(f"{name}.{part}", inner).items()}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
