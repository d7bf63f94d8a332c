"""A model's name -> a directory on this machine, downloaded from the hub where it has to be."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

HUB = "https://huggingface.co"
TIMEOUT_SECONDS = 10.0
"""For the first answer of the hub: where there is no network, waiting longer helps nobody."""
_TEXT = (".json", ".txt", ".model", ".jinja")
_WEIGHTS = (".safetensors", ".safetensors.index.json")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """Where a model is.

    Args:
        path: its directory, which has everything but perhaps the weights.
        hub_id: its name on the hub if its weights are still to be downloaded from there.
        commit: the state of the hub's repository that was found.
        weights: the files of weights, and how many bytes they have.
    """

    path: Path
    hub_id: str | None = None
    commit: str | None = None
    weights: tuple[tuple[str, int], ...] = ()


def find(source: str | os.PathLike[str], *, revision: str | None = None, code: bool = False) -> Found:
    """The directory of a model: a local one as it is, one of the hub with all its small files.

    Args:
        source: a directory, or a name on the hub.
        revision: a branch, tag or commit on the hub; the newest state when None.
        code: whether Python files are wanted too.

    Raises:
        ValueError: nothing of that name can be had.
    """
    name, path = os.fspath(source), Path(source).expanduser()
    if name and path.is_dir():
        if revision is not None:
            raise ValueError(f"{source} is a directory, and only a model of the hub has revisions: drop the revision")
        return Found(path)
    if path.is_file():
        raise ValueError(f"{name} is a file: name the directory of a model, or its id on the hub")
    if path.is_absolute() or name.startswith((".", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name:
        raise ValueError(f"{name}: there is no such directory")
    return _find_on_hub(name, revision, code)


def _find_on_hub(name: str, revision: str | None, code: bool) -> Found:
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.errors import HTTPError

    _check_name(name)
    if constants.is_offline_mode():
        return _find_in_cache(name, revision, "HF_HUB_OFFLINE is set, so the hub is not asked")
    endpoint = _endpoint()
    try:
        info = HfApi(endpoint=endpoint).model_info(
            name, revision=revision, timeout=TIMEOUT_SECONDS, files_metadata=True
        )
    except (HTTPError, OSError) as error:
        if getattr(error, "response", None) is None:  # nobody answered
            return _find_in_cache(name, revision, f"the hub cannot be reached at {endpoint}: check the network")
        _refuse(name, revision, error)
    except ValueError as error:
        raise ValueError(f"{endpoint} does not answer as the hub does: check HF_ENDPOINT and the network") from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or [] if "/" not in file.rfilename}
    weights = tuple((file, size) for file, size in sizes.items() if file.endswith(_WEIGHTS))
    wanted = [file for file in sizes if file.endswith(_TEXT) or (code and file.endswith(".py"))]
    if "config.json" not in sizes:
        raise ValueError(f"{name} on the hub is no model of transformers: it has no config.json")
    try:
        # By the revision's name once, so that the cache knows what it stands for when the hub is gone.
        config = hf_hub_download(name, "config.json", revision=revision, endpoint=endpoint)
        for file in wanted:
            hf_hub_download(name, file, revision=info.sha, endpoint=endpoint)
    except (HTTPError, OSError) as error:
        _refuse(name, revision, error)
    return Found(Path(config).parent, name, info.sha, weights)


def download_weights(found: Found) -> None:
    """Complete the directory of a model of the hub; nothing to do for a local one.

    Raises:
        ValueError: the hub refuses, or the connection broke.
    """
    if found.hub_id is None:
        return
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HTTPError

    names = [name for name, _ in found.weights]
    single = "model.safetensors"
    wanted = [single] if single in names else [name for name in names if name.startswith("model")]
    size = sum(size for name, size in found.weights if name in wanted)
    if any(not (found.path / name).exists() for name in wanted):
        log.info("downloading %s from the hub: %.1f GB", found.hub_id, size / 1e9)
    try:
        for name in wanted:
            hf_hub_download(found.hub_id, name, revision=found.commit, endpoint=_endpoint())
    except (HTTPError, OSError) as error:
        _refuse(found.hub_id, None, error)


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")


def _check_name(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(
            f"{name[:80]!r} is neither a directory here nor a name on the hub: give one like openai-community/gpt2"
        ) from error


def cached(name: str, revision: str | None = None) -> Path | None:
    """The copy that an earlier download left on this machine, nobody else being asked; None where there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        path = Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=["config.json"]))
    except (HFValidationError, HTTPError, OSError):
        return None
    return path if (path / "config.json").is_file() else None


def _find_in_cache(name: str, revision: str | None, reason: str) -> Found:
    """What `cached` gives, of a name that can be one."""
    path = cached(name, revision)
    if path is None:
        raise ValueError(f"{name} is no directory here and was not downloaded before, and {reason}")
    log.warning("%s, so the copy of %s from an earlier download is taken", reason, name)
    return Found(path)


def _refuse(name: str, revision: str | None, error: Exception) -> NoReturn:
    """Raise what the hub's refusal means as one line."""
    from huggingface_hub.errors import DisabledRepoError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    code = getattr(getattr(error, "response", None), "status_code", None)
    where = f"{_endpoint()}/{name}"
    if isinstance(error, GatedRepoError):
        reason = f"{name} is gated: accept its terms at {where}, then set HF_TOKEN to a token of your account"
    elif isinstance(error, RevisionNotFoundError):
        reason = f"{name} has no revision {revision!r}: see {where} for its branches and tags"
    elif isinstance(error, DisabledRepoError):
        reason = f"{name} was disabled on the hub: choose another model"
    elif isinstance(error, RepositoryNotFoundError) or code == 404:
        reason = f"there is no model {name!r} on the hub, or it is private: check the name, or set HF_TOKEN"
    elif code in (401, 403):
        reason = f"the hub refuses {name} ({code}): set HF_TOKEN to a token that may read it"
    elif code is not None:
        reason = f"the hub answered {code} for {name}: try again later"
    elif isinstance(error, OSError) and error.strerror:
        reason = f"{name} cannot be downloaded: {error.strerror}"
    else:
        reason = f"the connection to the hub broke while {name} was downloaded: try again"
    raise ValueError(reason) from error
