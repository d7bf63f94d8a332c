"""Find a model's directory, and download from the Hugging Face Hub what is not on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from lightning_specdec.config.terminal import one_line

_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "README.md")
_WEIGHT_FILES = ("model*.safetensors", "model*.safetensors.index.json")

log = logging.getLogger(__name__)


def find(
    source: str | os.PathLike[str], *, revision: str | None = None, code: bool = False
) -> Path:
    """Return the directory of a model: a local one, or one from the Hub with all its small files.

    Args:
        source: a directory, or a name on the Hub.
        revision: a branch, tag or commit on the Hub; None for the default branch.
        code: whether to download Python files too.

    Raises:
        ValueError: there is no such model, or it cannot be read.
    """
    name = os.fspath(source)
    path = Path(source).expanduser()

    if not name or not path.exists():
        patterns: tuple[str, ...] = _SMALL_FILES
        if code:
            patterns = (*_SMALL_FILES, "*.py")
        return _snapshot(name, revision, patterns)

    if revision is not None:
        raise ValueError(
            f"{name} is a local path, and a revision applies only to Hub models: drop the revision"
        )
    if not path.is_dir():
        raise ValueError(
            f"{name} is a file: name a model's directory or Hub id, or give a checkpoint as --ckpt"
        )
    return path


def download_weights(source: str, path: Path) -> None:
    """Download the weights into the directory that `find` returned for a Hub model.

    Local directories stay unchanged.

    Raises:
        ValueError: the Hub refuses, or the connection failed.
    """
    if Path(source).expanduser().is_dir():
        return
    if not any(path.glob("*.safetensors")):
        log.info("downloading the weights of %s from the Hub", source)

    # A snapshot's directory is named after its commit.
    commit = path.name
    _snapshot(source, commit, _WEIGHT_FILES)


def cached(name: str) -> Path | None:
    """Return the directory of an earlier download without contacting the Hub, or None."""
    try:
        path = _snapshot(name, None, ["config.json"], offline=True)
    except ValueError:
        return None
    return path if (path / "config.json").is_file() else None


def _snapshot(
    name: str, revision: str | None, patterns: Sequence[str], *, offline: bool = False
) -> Path:
    """Return a model's snapshot in the Hub's cache; an earlier one if the Hub is unreachable."""
    # Imported here because it takes longer than all of --help.
    from huggingface_hub import errors, snapshot_download

    try:
        directory = snapshot_download(
            name,
            revision=revision,
            endpoint=os.environ.get("HF_ENDPOINT"),
            allow_patterns=list(patterns),
            local_files_only=offline,
        )
    except (errors.HFValidationError, errors.HTTPError, OSError) as error:
        cause = one_line(error.__cause__ or error)[:300]
        raise ValueError(
            f"there is no directory {name}, and the Hub returned none "
            f"(revision {revision or 'main'}: {cause}): check the name and the network; "
            "set HF_TOKEN for gated and private models"
        ) from error
    return Path(directory)
