"""A trained draft <-> a small file of its own, a description beside the weights; its target lies elsewhere.

A description names a class of `DRAFTERS` and gives its arguments as plain values; nothing in a file runs.

Format: safetensors. One entry in its `__metadata__`, under `KEY`, is a JSON object with `format`, the drafter's `class`
and `arguments`, `target` (see `TargetReference`), `recipe` and `versions`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors

from lightning_specdec import __version__
from lightning_specdec.checkpoint_weights import BROKEN, stored_as, try_out, with_weights
from lightning_specdec.description import build, plain, short, spec
from lightning_specdec.drafters import DRAFTERS, Drafter
from lightning_specdec.files import replaced
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.safetensors_file import read_header, read_metadata
from lightning_specdec.target_reference import TargetReference, dtype_of

KEY = "lightning_specdec"
FORMAT = 1
SUFFIX = ".safetensors"
"""How a draft file's name ends, where one is to be told from a checkpoint."""
_LONGEST = 16 * 2**20
"""Characters of a description: numbers of a million tokens."""
_ENTRIES = {"format", "class", "arguments", "target", "recipe", "versions"}


@dataclass(frozen=True)
class DraftFile:
    """What a draft file says.

    Args:
        drafter: the description of what guesses: see `description.spec`.
        target: what it was trained for.
        recipe: how it was trained, as plain values.
        versions: of what wrote it.
    """

    drafter: dict[str, Any]
    target: TargetReference
    recipe: dict[str, Any]
    versions: dict[str, Any]


def save_draft(
    path: str | os.PathLike[str],
    drafter: Drafter,
    target: LanguageModel | TargetReference,
    *,
    recipe: dict[str, Any] | None = None,
    dtype: str | None = None,
) -> None:
    """Write a draft file. Whole or not at all.

    Args:
        drafter: what guesses.
        target: what it was trained for.
        recipe: how it was trained; its `num_draft_tokens` is the window that it will decode with.
        dtype: what the weights are stored as, for a smaller file.

    Raises:
        ValueError: such a drafter cannot be built again, it does not fit the target, or no file can be put there.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a directory: name the file to write in it")
    if isinstance(target, LanguageModel):
        drafter.check_target(target)
        _check_ends(drafter, target)
    described = spec(drafter)
    weights = {
        name: value.detach().cpu().contiguous().clone()  # a weight that has two names is written twice
        for name, value in stored_as(drafter.state_dict(), dtype).items()
    }
    try:
        with_weights(partial(build, described, DRAFTERS), "draft", weights)
    except BROKEN as error:
        raise ValueError(
            f"this {type(drafter).__name__} could not be read again, so it is not written: {error}"
        ) from error
    content = {
        "format": FORMAT,
        **described,
        "target": (target if isinstance(target, TargetReference) else TargetReference.of(target)).described(),
        "recipe": plain(recipe or {}),
        "versions": {"lightning_specdec": __version__, "torch": str(torch.__version__)},
    }
    with replaced(path) as file:
        file.write(safetensors.save(weights, {KEY: json.dumps(content)}))
        os.chmod(file.name, 0o644)


def read(path: str | os.PathLike[str]) -> DraftFile:
    """What a draft file says, no weight being read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no draft file, or a damaged one, or one of another format.
    """
    path = Path(path)
    _refuse_checkpoints(path)
    text = read_metadata(path, KEY, _LONGEST)
    if text is None:
        raise ValueError(f"{path} is no draft file of this program: it has no {KEY!r} entry; `export` writes one")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no usable draft file: its description cannot be read") from error
    found = content.get("format") if isinstance(content, dict) else None
    if type(found) is not int or found != FORMAT:
        found = short(repr(found), 40)
        raise ValueError(f"{path} has draft format {found}, this version reads {FORMAT}: update or export it anew")
    try:
        if content.keys() != _ENTRIES or not isinstance(content["versions"], dict):
            raise ValueError(f"its description has not the entries {', '.join(sorted(_ENTRIES))}")
        described = {name: content[name] for name in ("class", "arguments")}
        return DraftFile(
            described, TargetReference.read(content["target"]), plain(content["recipe"]), content["versions"]
        )
    except ValueError as error:
        raise ValueError(f"{path} is no usable draft file: {error}") from error


def build_draft(path: str | os.PathLike[str]) -> Drafter:
    """The drafter of a file, without its target.

    Raises:
        FileNotFoundError, ValueError: as `read`; and for descriptions out of range or weights that do not fit them.
    """
    described = read(path).drafter
    try:
        drafter = with_weights(partial(build, described, DRAFTERS), "draft", safetensors.load_file(path)).eval()
        try_out("draft", drafter)
    except (*BROKEN, SafetensorError) as error:
        reason = short(" ".join(str(error).split()), 300)
        raise ValueError(f"{path} is no usable draft file: {reason}") from error
    assert isinstance(drafter, Drafter)
    return drafter


def load_draft(
    path: str | os.PathLike[str], target: LanguageModel, *, dtype: torch.dtype | None = None
) -> tuple[Drafter, dict[str, Any]]:
    """The drafter of a file, where its target is, and its recipe.

    Args:
        target: what it shall guess for, which must be what it was trained for.
        dtype: what it computes in; as the target when None.

    Raises:
        FileNotFoundError, ValueError: as `build_draft`; and for another target.
    """
    found = read(path)
    found.target.check(target, str(path))
    drafter = build_draft(path)
    try:
        drafter.check_target(target)
        _check_ends(drafter, target)
    except ValueError as error:
        raise ValueError(f"{path} does not fit its target: {error}") from error
    return drafter.to(target.device, dtype or dtype_of(target)), found.recipe


def stored_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes of the weights if each took four: what computing in float32 needs, and at least what the file has."""
    return sum(4 * tensor.numel for tensor in read_header(Path(path)).values())


def is_draft_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a draft that this program wrote."""
    try:
        read(path)
    except (OSError, ValueError):
        return False
    return True


def _refuse_checkpoints(path: Path) -> None:
    """Raise unless a file is there that is no checkpoint, which a draft may be mistaken for."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such draft file; `lightning_specdec export` writes one")
    if path.is_dir():
        raise ValueError(f"{path} is a directory: name the draft file in it")
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            raise ValueError(f"{path} is a checkpoint and no draft file: give it as --ckpt, or `export` its draft")


def _check_ends(drafter: Drafter, target: LanguageModel) -> None:
    """Raise ValueError for a draft that can say only some tokens, and none that end a text of this target."""
    ends = (
        () if target.tokenizer is None else sorted(token for token in target.tokenizer.eos if token < target.vocab_size)
    )
    for part in drafter.modules():
        vocabulary: Any = getattr(part, "draft_vocabulary", None)
        if vocabulary is not None:
            vocabulary.check_has(ends, "the tokens that end a text")
