"""Write a target's checkpoint again, with trained prediction layers in place of its own."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.mtp import MtpNetwork
from lightning_specdec.models.mtp_files import find_layers, num_mtp_layers, stored_weights
from lightning_specdec.models.safetensors_file import INDEX, SINGLE, read_header, weight_files

_COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".py")
"""Files beside the weights that belong to a model."""


def write_checkpoint(folder: Path, network: MtpNetwork, target: HuggingFaceLM) -> None:
    """Write the target's files to an empty folder, with these layers under the names that they
    have in its checkpoint.

    Weight files without prediction layers are linked if the folder is on the same disk.

    Raises:
        ValueError: the target has no files, or its checkpoint has another number of layers.
    """
    if target.origin is None or not Path(target.origin.path).is_dir():
        raise ValueError("the target was not loaded from a directory that could be written again")
    stored_layers = find_layers(target)
    num_layers = num_mtp_layers(target)
    if stored_layers is not None:
        num_layers = stored_layers.num_layers
    if network.num_layers != num_layers:
        raise ValueError(
            f"the target's checkpoint is for {num_layers} prediction layers, so that it has no "
            f"place for {network.num_layers}"
        )
    directory = Path(target.origin.path)
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.suffix in _COPIED_SUFFIXES and path.name != INDEX:
            shutil.copyfile(path, folder / path.name)

    replaced_names = set() if stored_layers is None else {*stored_layers.weights}
    files = weight_files(directory)
    num_files = len(files) + 1
    weight_map: dict[str, str] = {}
    for number, path in enumerate(files, 1):
        file_name = _file_name(number, num_files)
        kept_names = _write_without(path, folder / file_name, replaced_names)
        weight_map.update(dict.fromkeys(kept_names, file_name))

    last_name = _file_name(num_files, num_files)
    weights = _in_target_dtype(stored_weights(network, target), target)
    save_file(weights, folder / last_name, {"format": "pt"})
    weight_map.update(dict.fromkeys(weights, last_name))

    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index: dict[str, Any] = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _file_name(number: int, num_files: int) -> str:
    stem = SINGLE.removesuffix(".safetensors")
    return f"{stem}-{number:05}-of-{num_files:05}.safetensors"


def _write_without(path: Path, output: Path, left_out: set[str]) -> list[str]:
    """Write a weight file without some of its weights. Returns the names of the others."""
    _, shapes = read_header(path)
    kept_names = [name for name in shapes if name not in left_out]
    if len(kept_names) == len(shapes):
        # Links are not possible across disks, and some file systems have none.
        with suppress(OSError):
            os.link(path.resolve(), output)
        if not output.exists():
            shutil.copyfile(path, output)
        return kept_names

    with safe_open(path, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in kept_names}
    save_file(weights, output, {"format": "pt"})
    return kept_names


def _in_target_dtype(weights: dict[str, Tensor], target: HuggingFaceLM) -> dict[str, Tensor]:
    """The weights in the dtype of the target's, except for those that it keeps in float32."""
    kept_parts = tuple(getattr(target.model, "_keep_in_fp32_modules_strict", None) or ())
    converted = {}
    for name, weight in weights.items():
        is_kept = any(part in name for part in kept_parts)
        converted[name] = weight if is_kept else weight.to(target.dtype)
    return converted
