"""Find a model's directory, and download from the Hugging Face Hub what is not on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from lightning_specdec.config.settings import nearest
from lightning_specdec.config.terminal import one_line

_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "README.md")
GGUF_SUFFIX = ".gguf"
_WEIGHT_FILES = ("model*.safetensors", "model*.safetensors.index.json")

log = logging.getLogger(__name__)


class NotFoundError(ValueError):
    """A model is neither on this machine nor available from the Hub."""


def find(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    code: bool = False,
) -> Path:
    """Return the directory of a model: a local one, or one from the Hub with all its small files.

    Of a model in a GGUF file, return the file.

    Args:
        source: a directory, a GGUF file, or a name on the Hub.
        revision: a branch, tag or commit on the Hub; None for the default branch.
        code: whether to download Python files too.

    Raises:
        NotFoundError: there is no such model.
        ValueError: it cannot be read.
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
    if is_gguf(path):
        return path
    if not path.is_dir():
        raise ValueError(
            f"{name} is a file: name a model's directory or Hub id, or give a checkpoint as --ckpt"
        )
    return _only_gguf_file(path) or path


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file."""
    return path.suffix.lower() == GGUF_SUFFIX and path.is_file()


def has_model(directory: Path) -> bool:
    """Whether a directory contains a model: a config.json, or a GGUF file."""
    return (directory / "config.json").is_file() or any(directory.glob(f"*{GGUF_SUFFIX}"))


def _only_gguf_file(directory: Path) -> Path | None:
    """Return the GGUF file of a directory that contains no other model."""
    files = sorted(directory.glob(f"*{GGUF_SUFFIX}"))
    if not files or (directory / "config.json").is_file():
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise ValueError(f"{directory} has {len(files)} GGUF files ({names}): name one of them")
    return files[0]


def find_adapter(
    source: str | os.PathLike[str],
    file_names: Sequence[str],
    *,
    offline: bool = False,
) -> Path:
    """Return the directory of an adapter: a local one, or one from the Hub with all its files.

    Args:
        source: a directory, or a name on the Hub.
        file_names: the files that make an adapter.
        offline: whether to leave the Hub alone, so that only an earlier download is found.

    Raises:
        ValueError: there is no such directory and no such repository.
    """
    name = os.fspath(source)
    path = Path(source).expanduser()
    if name and path.is_dir():
        return path
    if name and path.exists():
        raise ValueError(f"{name} is a file: name the adapter's directory")
    return _snapshot(name, None, (*_SMALL_FILES, *file_names), offline=offline)


def download_weights(source: str, path: Path) -> None:
    """Download the weights into the directory that `find` returned for a Hub model.

    Local directories stay unchanged.

    Raises:
        ValueError: the Hub refuses, or the connection failed.
    """
    if Path(source).expanduser().exists():
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


def check_upload(name: str) -> None:
    """Raise ValueError unless a repository may have this name and there is a token to write it."""
    from huggingface_hub import errors, get_token
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except errors.HFValidationError as error:
        raise ValueError(f"{name!r} is no name of a repository: {one_line(error)}") from error
    if get_token() is None:
        raise ValueError("an upload to the Hub needs a token: set HF_TOKEN, or run `hf auth login`")


def upload(directory: Path, name: str) -> str:
    """Upload all files of a directory to a model repository, which is created if it is missing.

    Args:
        directory: what to upload.
        name: the repository, as `USER/NAME`.

    Returns:
        The address of the new commit.

    Raises:
        ValueError: the Hub refuses, or the connection failed.
    """
    from huggingface_hub import HfApi, errors

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        api.create_repo(name, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name, folder_path=directory, commit_message="Upload a draft"
        )
    except (errors.HfHubHTTPError, errors.HTTPError, OSError, ValueError) as error:
        cause = one_line(error.__cause__ or error)[:300]
        raise ValueError(
            f"{directory} is written, and could not be uploaded to {name} ({cause}): check the "
            "name, HF_TOKEN and the network"
        ) from error
    return str(commit.commit_url)


def _snapshot(
    name: str,
    revision: str | None,
    patterns: Sequence[str],
    *,
    offline: bool = False,
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
        models_here = [path.parent.name for path in Path().glob("*/config.json")]
        advice = nearest(name, models_here) or (
            ": check the name and the network; set HF_TOKEN for gated and private models"
        )
        raise NotFoundError(
            f"there is no directory {name}, and the Hub returned none "
            f"(revision {revision or 'main'}: {cause}){advice}"
        ) from error
    return Path(directory)
