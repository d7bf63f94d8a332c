"""Find a model's directory, downloading from the Hugging Face Hub what is not on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

HUB = "https://huggingface.co"
_SMALL = ("*.json", "*.txt", "*.model", "*.jinja")
_WEIGHTS = ("model*.safetensors", "model*.safetensors.index.json")

log = logging.getLogger(__name__)


def find(source: str | os.PathLike[str], *, revision: str | None = None, code: bool = False) -> Path:
    """The directory of a model: a local one, or one of the hub with all its small files.

    Args:
        source: a directory, or a name on the hub.
        revision: a branch, tag or commit on the hub; the default branch when None.
        code: whether to fetch Python files too.

    Raises:
        ValueError: there is no such model, or it cannot be read.
    """
    name, path = os.fspath(source), Path(source).expanduser()
    if name and path.is_dir():
        if revision is not None:
            raise ValueError(f"{source} is a directory, and only models of the hub have revisions: drop the revision")
        return path
    if path.is_file():
        raise ValueError(f"{name} is a file: name the directory of a model, or its id on the hub")
    if path.is_absolute() or name.startswith((".", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name:
        raise ValueError(f"{name}: there is no such directory")
    return _snapshot(name, revision, (*_SMALL, "*.py") if code else _SMALL)


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
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        path = Path(snapshot_download(name, local_files_only=True, allow_patterns=["config.json"]))
    except (HFValidationError, HTTPError, OSError):
        return None
    return path if (path / "config.json").is_file() else None


def _snapshot(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The snapshot of a model in the hub's cache; an earlier download where the hub cannot be reached."""
    from huggingface_hub import errors, snapshot_download

    endpoint = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    try:
        return Path(snapshot_download(name, revision=revision, endpoint=endpoint, allow_patterns=list(patterns)))
    except errors.HFValidationError as error:
        raise ValueError(
            f"{name[:80]!r} is neither a directory here nor a name on the hub: give one like openai-community/gpt2"
        ) from error
    except (errors.HTTPError, OSError) as error:
        missing = isinstance(error, errors.LocalEntryNotFoundError)
        cause = error.__cause__ if missing else error
        code = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(cause, errors.GatedRepoError):
            reason = f"{name} is gated: accept its terms at {endpoint}/{name}, then set HF_TOKEN to your access token"
        elif isinstance(cause, errors.RevisionNotFoundError):
            reason = f"{name} has no revision {revision!r}: see {endpoint}/{name} for its branches and tags"
        elif isinstance(cause, errors.RepositoryNotFoundError) or code == 404:
            reason = f"there is no model {name!r} on the hub, or it is private: check the name, or set HF_TOKEN"
        elif code is not None:
            reason = f"the hub answered {code} for {name}: try again later, or set HF_TOKEN to a token that may read it"
        elif missing:
            reason = (
                f"{name} is not a directory here, was not downloaded before, and the hub cannot be reached at "
                f"{endpoint}: check the network, and that HF_HUB_OFFLINE is not set"
            )
        else:
            reason = f"{name} cannot be downloaded: {getattr(error, 'strerror', None) or 'the connection broke'}"
        raise ValueError(reason) from error
