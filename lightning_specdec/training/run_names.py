"""Names of training runs: one name has runs of one target on one text only."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_specdec.checkpoints import runs

CONFIG_FILE = "config.yaml"
"""The resolved config of a run, beside its checkpoints."""
_DATA_ARGUMENTS = ("path", "paths")
_TARGET_ARGUMENTS = ("target_checkpoint", "target_adapter")


def name_of_path(path: str) -> str | None:
    """The last word of a path, without the ending of a file: "notes" of `notes/**/*.md`."""
    words = re.findall(r"\w+", re.sub(r"\.\w+$", "", path))
    return words[-1] if words else None


def name_of_text(paths: Sequence[str]) -> str:
    """A name for text files, directories, and patterns."""
    name = name_of_path(paths[0]) or "text"
    num_others = len(paths) - 1
    return f"{name}_and_{num_others}_more" if num_others else name


def number_of_runs(directory: Path, config: Mapping[str, Any], *, is_resumed: bool) -> int:
    """The number that the name of a config's runs gets; 1 for none.

    Runs of another target or of other data keep their place. These runs then get the first number
    from 2 on that is free, or that has runs of the same target and data.

    Args:
        directory: where the runs' checkpoints would go.
        config: the resolved config.
        is_resumed: whether such a run must be there. If none is, the number is 1.
    """
    for number in itertools.count(1):
        stored_config = _newest_config(numbered(directory, number))
        if stored_config is None:
            return 1 if is_resumed else number
        if _subject(stored_config) == _subject(config):
            return number
    raise AssertionError("numbers do not end")


def number_of_resumed(directory: Path, checkpoint: Path) -> int | None:
    """The number of the runs among which a checkpoint is; None if it is somewhere else.

    A run that is resumed stays among them, also if its target has moved to another place.
    """
    for number in itertools.count(1):
        runs_directory = numbered(directory, number)
        if not runs_directory.is_dir():
            return None
        if checkpoint.resolve().is_relative_to(runs_directory.resolve()):
            return number
    raise AssertionError("numbers do not end")


def numbered(directory: Path, number: int) -> Path:
    """The directory of runs with that number."""
    return directory if number == 1 else directory.with_name(f"{directory.name}_{number}")


def _newest_config(directory: Path) -> Mapping[str, Any] | None:
    """The config of the newest run in a directory; None without any that can be read."""
    for version in runs.versions(directory):
        path = directory / f"version_{version}" / CONFIG_FILE
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        if isinstance(config, Mapping):
            return config
    return None


def _subject(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's draft is for: its target, and the data that it learns from."""
    data_class, data_arguments = _section(config.get("data"))
    _, model_arguments = _section(config.get("model"))
    subject: dict[str, Any] = {"data": data_class}
    for name in _DATA_ARGUMENTS:
        subject[name] = data_arguments.get(name)
    for name in _TARGET_ARGUMENTS:
        subject[name] = model_arguments.get(name)
    return subject


def _section(section: Any) -> tuple[str, Mapping[str, Any]]:
    """The class of a section of a config, without its module, and its arguments."""
    if not isinstance(section, Mapping):
        return "", {}
    class_name = str(section.get("class_path", "")).rpartition(".")[2]
    arguments = section.get("init_args")
    return class_name, arguments if isinstance(arguments, Mapping) else {}
