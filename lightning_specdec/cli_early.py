"""What can be refused before torch is imported: which models are named, and whether they can be at that place."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from lightning_specdec.cli_parser import UsageError
from lightning_specdec.pairs import get_pair

PLACES = ("target", "draft", "MODEL")
"""The options that hold a model's directory, or its name on the hub."""
KINDS = ("ckpt", "pair", "target")
"""The options that name what decodes; one of them is given."""


def check_models(options: Namespace) -> None:
    """Raise ValueError where the options name no models, several, or some that are not there."""
    values = vars(options)
    if "target" in values:
        named_model(options)
    if values.get("pair") is not None:
        get_pair(options.pair)
    for name in PLACES:
        if values.get(name) is None or (name == "draft" and values.get("ckpt") is not None):
            continue  # a checkpoint's drafts have names
        if name == "draft" and values[name].endswith(".safetensors") and not Path(values[name]).expanduser().exists():
            raise ValueError(f"there is no draft file {values[name]}: check the path")
        check_place(values[name])


def named_model(options: Namespace) -> str:
    """Which of `KINDS` is given; a checkpoint's target may be given anew beside it.

    Raises:
        UsageError: none is, or several are.
    """
    values = vars(options)
    named = [name for name in KINDS if values.get(name) is not None]
    if named == ["ckpt", "target"]:
        return "ckpt"
    if len(named) != 1:
        known = [f"--{name}" for name in KINDS if name in values]
        got = " and ".join(f"--{name}" for name in named) or "none"
        raise UsageError(f"name the models by one of {', '.join(known)}, got {got} (see --help)")
    return named[0]


def check_place(source: str) -> None:
    """Raise ValueError for what is meant as a directory and is none, or holds no model.

    A path begins as one, or has a parent here: anything else may be a name on the hub.
    """
    path = Path(source).expanduser()
    if source and path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        if "config.json" not in names and "adapter_config.json" not in names:
            listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"
            raise ValueError(f"{source} is no model's directory: it has no config.json (it holds {listed})")
    elif not path.exists() and (source.startswith((".", "/", "~")) or ("/" in source and path.parent.is_dir())):
        raise ValueError(f"there is no directory {source}: check the path")
