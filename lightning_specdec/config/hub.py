"""Find a model's directory, downloading from the Hugging Face Hub what is not on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from lightning_specdec.config.terminal import one_line

_SMALL = ("*.json", "*.txt", "*.model", "*.jinja")
_WEIGHTS = ("model*.safetensors", "model*.safetensors.index.json")

log = logging.getLogger(__name__)


def find(
    source: str | os.PathLike[str], *, revision: str | None = None, code: bool = False
) -> Path:
    """The directory of a model: a local one, or one of the hub with all its small files.

    Args:
        source: a directory, or a name on the hub.
        revision: a branch, tag or commit on the hub; the default branch when None.
        code: whether to fetch Python files too.

    Raises:
        ValueError: there is no such model, or it cannot be read.
    """
    name, path = os.fspath(source), Path(source).expanduser()
    if not name or not path.exists():
        return _snapshot(name, revision, (*_SMALL, "*.py") if code else _SMALL)
    if revision is not None:
        raise ValueError(
            f"{name} is here, and only models of the hub have revisions: drop the revision"
        )
    if not path.is_dir():
        raise ValueError(
            f"{name} is a file: name a model's directory or id on the hub, or give a checkpoint as --ckpt"
        )
    return path


def download_weights(source: str, path: Path) -> None:
    """Complete the directory that `find` gave for a model of the hub; local directories stay as they are.

    Raises:
        ValueError: the hub refuses, or the connection broke.
    """
    if not Path(source).expanduser().is_dir():
        if not any(path.glob("*.safetensors")):
            log.info("downloading the weights of %s from the hub", source)
        _snapshot(source, path.name, _WEIGHTS)


def cached(name: str) -> Path | None:
    """The copy of an earlier download, without asking the hub; None where there is none."""
    try:
        path = _snapshot(name, None, ["config.json"], offline=True)
    except ValueError:
        return None
    return path if (path / "config.json").is_file() else None


def _snapshot(
    name: str, revision: str | None, patterns: Sequence[str], *, offline: bool = False
) -> Path:
    """The snapshot of a model in the hub's cache; an earlier download where the hub cannot be reached."""
    from huggingface_hub import errors, snapshot_download

    try:
        endpoint = os.environ.get("HF_ENDPOINT")
        found = snapshot_download(
            name,
            revision=revision,
            endpoint=endpoint,
            allow_patterns=list(patterns),
            local_files_only=offline,
        )
        return Path(found)
    except (errors.HFValidationError, errors.HTTPError, OSError) as error:
        cause = one_line(error.__cause__ or error)[:300]
        raise ValueError(
            f"there is no directory {name}, and the hub gives none (revision {revision or 'main'}: {cause}): check "
            "the name and the network; set HF_TOKEN for gated and private models"
        ) from error
