"""What tells a model's weights from any other's: a sha256 over their files, remembered while these stay as they are."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lightning_specdec.files import cache_home, replaced
from lightning_specdec.models.safetensors_file import weight_files

_DIGEST = re.compile(r"[0-9a-f]{64}")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """Where a model came from, its weights as they are in its files.

    Args:
        source: its directory or its name on the hub, as it was given.
        path: the directory that was read.
    """

    source: str
    path: Path

    @cached_property
    def sha256(self) -> str:
        """See `weights_sha256`."""
        return weights_sha256(self.path)


def weights_sha256(directory: Path) -> str:
    """The sha256 over a directory's files of weights, one behind the other in the order of their names.

    It is what `cat model*.safetensors | sha256sum` says. Reading gigabytes takes seconds, so it is remembered in
    `files.cache_home()`, by the files' paths, sizes and times of change.

    Raises:
        ValueError: there are no weights, or a file is missing.
    """
    files = weight_files(directory)
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps(states).encode()).hexdigest()[:24]
    remembered = cache_home() / f"weights-{key}.sha256"
    try:
        known = remembered.read_text(encoding="ascii")
        if _DIGEST.fullmatch(known):
            return known
    except (OSError, UnicodeDecodeError):
        pass  # not known yet
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    found = digest.hexdigest()
    try:
        with replaced(remembered) as file:
            file.write(found.encode())
    except OSError as error:
        log.info("the sha256 of %s cannot be remembered and will be computed again: %s", directory, error)
    return found
