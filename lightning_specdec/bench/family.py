"""Smaller models of a target's family that are already on this machine, found without loading."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_specdec.models import LanguageModel
from lightning_specdec.models.safetensors_file import read_header, weight_files
from lightning_specdec.text.tokenizer import TOKENIZER_FILES

log = logging.getLogger(__name__)

LARGEST_SHARE = 0.5
"""A draft with more than this share of the target's parameters hardly ever pays."""
MOST_MODELS = 2
"""Models to try. The smallest ones are the cheapest to load and to draft with."""
BESIDE_TARGET = "beside the target"
IN_HUB_CACHE = "in the Hugging Face cache"

_MERGES = "merges.txt"
"""Part of tokenizers that have a vocab.json."""


@dataclass(frozen=True)
class FamilyModel:
    """A model that reads the target's tokens and has clearly fewer parameters.

    Args:
        source: a directory, or a name on the Hub.
        revision: the commit in the Hub's cache; None for a directory.
        num_parameters: numbers in its weight files.
        place: where it was found.
    """

    source: str
    revision: str | None
    num_parameters: int
    place: str

    @property
    def name(self) -> str:
        """Its name in tables."""
        return Path(self.source).name


def family_models(target: LanguageModel, *, cache: Path | None = None) -> list[FamilyModel]:
    """The smallest models with the target's tokenizer, beside it and in the Hub's cache.

    Only configs, tokenizer files and the headers of weight files are read. Models that are
    quantized, that need their own code, or whose files are incomplete are left out.

    Args:
        cache: directory of the Hub's cache; None for the default.
    """
    if target.origin is None or not target.origin.path.is_dir():
        return []
    directory = target.origin.path
    largest = int(LARGEST_SHARE * target.num_parameters)
    models: list[FamilyModel] = []
    seen = {directory.resolve()}
    for candidate in (*_beside(directory), *_in_cache(cache)):
        resolved_path = candidate.path.resolve()
        if resolved_path in seen:
            continue
        seen.add(resolved_path)
        num_parameters = _num_parameters(candidate.path)
        if num_parameters is None or num_parameters > largest:
            continue
        if has_same_tokenizer(candidate.path, directory):
            model = FamilyModel(
                candidate.source, candidate.revision, num_parameters, candidate.place
            )
            models.append(model)
    models.sort(key=lambda model: model.num_parameters)
    return models[:MOST_MODELS]


class _Candidate(NamedTuple):
    """A model that may be a draft: as of `FamilyModel`, and its directory."""

    source: str
    revision: str | None
    place: str
    path: Path


def _beside(directory: Path) -> Iterator[_Candidate]:
    """Models in the directory that contains the target's."""
    try:
        siblings = sorted(directory.parent.iterdir())
    except OSError:
        return
    for sibling in siblings:
        if (sibling / "config.json").is_file():
            yield _Candidate(str(sibling), None, BESIDE_TARGET, sibling)


def _in_cache(cache: Path | None) -> Iterator[_Candidate]:
    """Models of the Hub's cache, in the revision that its default branch had last."""
    # Imported here because it takes longer than all of --help.
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir(cache).repos
    except (CacheNotFound, ValueError, OSError) as error:
        log.debug("there is no Hugging Face cache: %s", error)
        return
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        if repository.repo_type != "model":
            continue
        for revision in repository.revisions:
            if "main" in revision.refs:
                yield _Candidate(
                    repository.repo_id, revision.commit_hash, IN_HUB_CACHE, revision.snapshot_path
                )


def _num_parameters(directory: Path) -> int | None:
    """The numbers in a model's weight files; None if it cannot draft without more ado."""
    config = _read_json(directory / "config.json")
    if not isinstance(config, dict):
        return None
    architectures = config.get("architectures") or []
    is_causal = any(str(name).endswith("ForCausalLM") for name in architectures)
    if not is_causal or "auto_map" in config or "quantization_config" in config:
        return None
    try:
        shapes: list[list[int]] = []
        for file in weight_files(directory):
            shapes.extend(read_header(file)[1].values())
    except (ValueError, OSError) as error:
        log.debug("%s is taken for no draft: %s", directory, error)
        return None
    return sum(math.prod(shape) for shape in shapes)


def has_same_tokenizer(directory: Path, other_directory: Path) -> bool:
    """Whether the tokenizers of two models have the same tokens, under the same numbers."""
    path = directory / "tokenizer.json"
    other_path = other_directory / "tokenizer.json"
    if path.is_file() and other_path.is_file():
        if path.read_bytes() == other_path.read_bytes():
            return True
        tokens = _tokens(_read_json(path))
        return tokens is not None and tokens == _tokens(_read_json(other_path))

    # Tokenizers of other kinds are equal if their files are.
    names = [*TOKENIZER_FILES, _MERGES]
    files = _existing(directory, names)
    if not files or files != _existing(other_directory, names):
        return False
    return all(
        (directory / name).read_bytes() == (other_directory / name).read_bytes() for name in files
    )


def _existing(directory: Path, names: Iterable[str]) -> list[str]:
    return [name for name in names if (directory / name).is_file()]


def _tokens(tokenizer: Any) -> tuple[Any, Any] | None:
    """The model of a tokenizer.json and its added tokens by number; None if it is damaged."""
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("model"), dict):
        return None
    try:
        added = {token["id"]: token["content"] for token in tokenizer.get("added_tokens") or []}
    except (TypeError, KeyError):
        return None
    return tokenizer["model"], added


def _read_json(path: Path) -> Any:
    """The content of a JSON file; None if there is none, or if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
