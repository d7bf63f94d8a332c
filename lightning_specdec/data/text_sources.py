"""Files of text: found, checked, and dealt out to the splits whole."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NO_SOURCES = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
)
"""Directories of an installed Python that hold other things than its standard library, or its tests, or files that a
program wrote: tables of characters, the manual. A model would have too easy a time with those."""


@dataclass(frozen=True)
class TextFile:
    """One file of valid text.

    Args:
        name: its path below the directory that was asked for.
        path: where it is.
        num_bytes: its size.
        digest: of its bytes, by SHA-256.
    """

    name: str
    path: Path
    num_bytes: int
    digest: str

    @property
    def key(self) -> tuple[str, str]:
        """A number by chance, as good as: the file's place in the line when files are dealt out."""
        return _key(self.name), self.digest

    def read(self) -> bytes:
        """The file's bytes, as they were when it was found.

        Raises:
            ValueError: it is not what it was.
        """
        content = _bytes(self.path)
        if hashlib.sha256(content).hexdigest() != self.digest:
            raise ValueError(f"{self.path} changed while it was read: start again when nothing writes to it")
        return content


@dataclass(frozen=True)
class Found:
    """The files of a source, and how many were left out.

    Args:
        files: by name.
        num_empty: files without a byte.
        num_repeated: files that say what another one says.
        num_over: files that the cap left no room for.
    """

    files: list[TextFile]
    num_empty: int
    num_repeated: int
    num_over: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files)


def find_texts(paths: Sequence[str] | None, *, max_bytes: int | None) -> Found:
    """The text files of a source.

    Args:
        paths: files, directories (all files below them but hidden ones) and patterns such as `src/**/*.py`; the
            running Python's own standard library without its tests when None.
        max_bytes: files are taken, in an order by chance that their names fix, while they fit in so many bytes.

    Raises:
        FileNotFoundError: a path does not exist, or a pattern fits no file.
        ValueError: a file cannot be read or is not UTF-8, or nothing is left.
    """
    # A file may be named twice, by itself and by its directory.
    named = {path.resolve(): (name, path) for name, path in _listed(paths)}.values()
    sizes = [(_key(name), name, path, path.stat().st_size) for name, path in named]
    taken: list[tuple[str, Path]] = []
    num_bytes = 0
    for _, name, path, size in sorted(sizes):
        if size and (max_bytes is None or num_bytes + size <= max_bytes):
            taken.append((name, path))
            num_bytes += size
    num_empty = sum(not size for *_, size in sizes)
    files: dict[str, TextFile] = {}
    for name, path in sorted(taken):
        file = _checked(name, path)
        files.setdefault(file.digest, file)
    if not files:
        what = "empty" if num_empty == len(sizes) else f"empty or larger than max_bytes ({max_bytes})"
        which = "the file is" if len(sizes) == 1 else f"all {len(sizes)} files are"
        raise ValueError(f"{_said(paths)}: {which} {what}: give files with text in them")
    return Found(list(files.values()), num_empty, len(taken) - len(files), len(sizes) - num_empty - len(taken))


def hold_out(found: Found, share: float) -> tuple[list[TextFile], list[TextFile], list[TextFile]]:
    """Files for training, validation and test.

    Theory: two halves of a file resemble each other, so only a file that was left out as a whole tells how a model does
    on text that it has not seen. Which files those are is a matter of chance, and their names are the dice.

    Args:
        share: of the bytes, for validation and for test each; one file at least.

    Raises:
        ValueError: there are fewer than three files.
    """
    files = found.files
    if len(files) < 3:
        number = "the only file" if len(files) == 1 else "one of only two files"
        cap = f", or raise max_bytes, which {found.num_over} do not fit in" if found.num_over else ""
        raise ValueError(
            f"{files[0].path} is {number} with text of its own, and training, validation and test each need one: give "
            f"three files or more (`split -n l/20 corpus.txt part-` cuts one into 20){cap}"
        )
    room = share * found.num_bytes
    train: list[TextFile] = []
    held: tuple[list[TextFile], list[TextFile]] = [], []
    for file in sorted(files, key=lambda file: file.key):
        smaller = min(held, key=_size)
        (smaller if _size(smaller) + file.num_bytes <= room else train).append(file)
    for split in held:
        if not split:
            split.append(train.pop(min(range(len(train)), key=lambda i: train[i].num_bytes)))
    return train, *held


def _size(files: Sequence[TextFile]) -> int:
    return sum(file.num_bytes for file in files)


def _key(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()


def _said(paths: Sequence[str] | None) -> str:
    return "the standard library" if paths is None else ", ".join(paths)


def _listed(paths: Sequence[str] | None) -> Iterator[tuple[str, Path]]:
    """Names and places of all files that the paths mean."""
    if paths is None:
        root = Path(sysconfig.get_path("stdlib"))
        # The build's own settings, which no two machines share, are no part of the library.
        sources = ((name, path) for name, path in _below(root, NO_SOURCES) if name.endswith(".py"))
        if not (found := [(name, path) for name, path in sources if not name.startswith("_sysconfigdata")]):
            raise FileNotFoundError(f"{root} holds no sources of Python's standard library: name texts by data.paths")
        yield from found
        return
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            if not (found := list(_below(path))):
                raise ValueError(f"{given} is a directory without files: name one that has some")
            yield from found
        elif path.exists():
            yield path.name, path
        elif glob.has_magic(given):
            yield from _matching(given, str(path))
        else:
            raise FileNotFoundError(f"{given} does not exist: check the path that data.paths gives")


def _matching(given: str, pattern: str) -> Iterator[tuple[str, Path]]:
    parts = Path(pattern).parts
    root = Path(*parts[: next(i for i, part in enumerate(parts) if glob.has_magic(part))])
    found = [path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file()]
    if not found:
        raise FileNotFoundError(f"{given} fits no file: check the pattern that data.paths gives (** goes any depth)")
    for path in sorted(found):
        yield path.relative_to(root).as_posix(), path


def _below(root: Path, skipped: frozenset[str] = frozenset({"__pycache__"})) -> Iterator[tuple[str, Path]]:
    """Names and places of the files below a directory, without hidden ones."""
    for folder, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(files):
            path = Path(folder) / name
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(root).as_posix(), path


def _refuse(error: OSError) -> None:
    raise ValueError(f"{error.filename} cannot be read: {error.strerror}")


def _checked(name: str, path: Path) -> TextFile:
    content = _bytes(path)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not text (byte {error.start} is not UTF-8): save it as UTF-8, or leave it out (data.paths "
            "takes patterns such as 'corpus/**/*.txt')"
        ) from None
    return TextFile(name, path, len(content), hashlib.sha256(content).hexdigest())


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
