"""Which models decode: a target and its draft, given as files, directories or Hub names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_specdec.config.hub import has_model
from lightning_specdec.config.kinds import DRAFTERS, Choice
from lightning_specdec.config.settings import Settings, nearest_path, setting

CHECKPOINTS = "checkpoints"
"""Directory of a clone of the repository that contains the models and drafts that ship."""
MAKE_TARGETS = {
    "smollm2": "smollm2",
    "qwen_coder_1.5b": "qwen_coder",
    "qwen_coder_0.5b": "qwen_coder",
}
"""Targets of the Makefile that write models to that directory, by the models' names."""
FILE_SUFFIXES = (".safetensors", ".ckpt")
"""Endings of checkpoints and draft files."""
DEFAULT_DEVICE = "cpu"
DTYPES = ("float32", "bfloat16", "float16", "float64")
QUANTIZATIONS = ("int8", "int4")
BACKENDS = ("auto", "torch", "openvino")
MOST_SMALL = 10_000_000
"""Models with at most this many parameters are converted to another backend only on request."""
ENGINES = ("vllm", "sglang", "llama.cpp", "transformers")
"""Programs that a draft can be exported for."""


@dataclass(frozen=True, kw_only=True)
class TargetSource(Settings):
    """The model whose output is wanted: one of `ckpt`, `pair` and `target`."""

    ckpt: str | None = setting(
        None,
        "checkpoint or shipped pair that holds the draft and usually the target; give --target, "
        "too, if it does not",
        metavar="FILE",
    )
    pair: str | None = setting(
        None, "pair of the registry (see `lightning_specdec info`)", metavar="NAME"
    )
    target: Any = setting(
        None,
        "pretrained target: a directory, a GGUF file or a Hub name",
        metavar="MODEL",
    )
    dtype: str | None = setting(None, "compute in this dtype; default: as stored", choices=DTYPES)
    adapter: Any = setting(
        None,
        "adapter of PEFT to merge into the target: a directory or a Hub name",
        metavar="ADAPTER",
    )
    quantization: str | None = setting(None, "quantize the target's weights", choices=QUANTIZATIONS)
    revision: str | None = setting(None, "branch, tag or commit of the target on the Hub")
    trust_remote_code: bool = setting(
        False, "run Python code that comes with a model: read it first"
    )
    device: str | None = setting(
        None,
        f"device to decode on, for example cuda:0; default: that of the pair, or {DEFAULT_DEVICE}",
        metavar="DEVICE",
    )
    backend: str = setting(
        "auto",
        "backend for pretrained models; auto: OpenVINO on a CPU if installed and faster, "
        "torch for quantized ones",
        choices=BACKENDS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_source(self, "target")
        check_adapter(self, "adapter")

        names = [name for name in ("ckpt", "pair", "target") if getattr(self, name) is not None]
        # A checkpoint may refer to a target that is stored elsewhere.
        if len(names) == 1 or names == ["ckpt", "target"]:
            return
        got = " and ".join(f"--{name}" for name in names) or "none"
        raise ValueError(
            "name the models by one of MODEL, --ckpt, --pair, and --target, for example "
            f"checkpoints/rnn.safetensors, --pair gpt2, or --target DIR; got {got}"
        )


@dataclass(frozen=True, kw_only=True)
class DraftSource(Settings):
    """The drafter: by default that of the pair or checkpoint, or prompt lookup."""

    draft: Any = setting(
        None,
        "draft model, draft file, or the name of one of a checkpoint's drafts",
        metavar="MODEL|FILE|NAME",
    )
    drafter: Any = setting(None, "drafter class, by name or import path", metavar="NAME")
    draft_dtype: str | None = setting(
        None, "compute the draft in this dtype; default: the target's", choices=DTYPES
    )
    draft_quantization: str | None = setting(
        None,
        "quantize the draft; without --draft, draft with a quantized copy of the target",
        choices=QUANTIZATIONS,
    )
    draft_revision: str | None = setting(None, "branch, tag or commit of the draft on the Hub")
    draft_adapter: Any = setting(
        None,
        "adapter of PEFT to merge into the draft model: a directory or a Hub name",
        metavar="ADAPTER",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_source(self, "draft")
        check_adapter(self, "draft_adapter")
        if self.drafter is not None:
            choice = Choice.read(self.drafter, "drafter")
            DRAFTERS.check(choice.name)
            object.__setattr__(self, "drafter", choice)


PRETRAINED_ONLY = (
    "quantization",
    "draft_quantization",
    "draft_dtype",
    "revision",
    "draft_revision",
    "draft_adapter",
    "trust_remote_code",
)
"""Fields that do not apply to a checkpoint, which stores these properties."""
_CHECK_PATH = ": check the path"
"""The advice on a path that resembles no other."""


@dataclass(frozen=True, kw_only=True)
class PairSource(DraftSource, TargetSource):
    """A target and its drafter. One of `target`, `pair` and `ckpt` is required.

    Raises:
        ValueError: a field is wrong, or fields exclude each other.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ckpt is None:
            return
        if self.adapter is not None and self.target is None:
            raise ValueError(
                "--adapter changes a pretrained target: with --ckpt, give that target as --target"
            )
        for name in PRETRAINED_ONLY:
            if getattr(self, name):
                raise ValueError(
                    f"--{name} is for pretrained models (--pair, --target): "
                    "a checkpoint has its own"
                )

    @property
    def chosen_device(self) -> str:
        """The device to decode on."""
        return self.device or DEFAULT_DEVICE

    @property
    def name(self) -> str:
        """What is loaded, for messages."""
        return str(self.ckpt or self.pair or self.target)


def check_source(settings: Settings, name: str) -> None:
    """Raise ValueError unless this field is text, a path (stored as text), a module, or None."""
    value = getattr(settings, name)
    if isinstance(value, os.PathLike):
        object.__setattr__(settings, name, os.fspath(value))
        return

    # torch is not imported here, so a module is recognized by its method.
    is_module = callable(getattr(value, "parameters", None))
    if value is not None and not isinstance(value, str) and not is_module:
        raise ValueError(f"{name} must be a model's name or directory, or a model, got {value!r}")


def check_adapter(settings: Settings, name: str) -> None:
    """Raise ValueError unless this field is text, a path (stored as text), or None."""
    value = getattr(settings, name)
    if isinstance(value, os.PathLike):
        object.__setattr__(settings, name, os.fspath(value))
    elif value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be an adapter's directory or Hub name, got {value!r}")


def check_directory(source: str) -> None:
    """Raise ValueError if `source` is meant as a model's directory and is not one.

    A source is a path if it starts like one, or if its parent directory exists. Anything else may
    be a Hub name.
    """
    path = Path(source).expanduser()
    if path.is_dir() and not has_model(path):
        raise ValueError(f"{source} is not a model directory: it has no config.json")

    starts_like_path = source.startswith((".", "/", "~"))
    has_parent_here = "/" in source and path.parent.is_dir()
    is_of_clone = source.startswith(f"{CHECKPOINTS}/")
    if not path.exists() and (starts_like_path or has_parent_here or is_of_clone):
        raise ValueError(f"there is no directory {source}{advice_on_path(path)}")


def check_draft(draft: str) -> None:
    """Raise ValueError unless this is a file, a directory, or may be a Hub name."""
    path = Path(draft).expanduser()
    if path.is_file():
        return
    if path.suffix in FILE_SUFFIXES and not path.exists():
        raise ValueError(f"there is no draft file {draft}{advice_on_path(path)}")
    if is_run(path):
        return
    check_directory(draft)


def is_run(path: Path) -> bool:
    """Whether a directory contains checkpoints of training runs, and is not a model."""
    if not path.is_dir() or (path / "config.json").exists():
        return False
    return any(path.glob("version_*/*.ckpt")) or any(path.glob("*.ckpt"))


def advice_on_path(path: Path) -> str:
    """The end of a message about a path that does not exist: a similar name, or what to do."""
    neighbors = [str(neighbor) for neighbor in path.parent.glob("*")]
    advice = nearest_path(str(path), neighbors)
    if advice:
        return advice
    if path.parts[:1] == (CHECKPOINTS,):
        advice = (
            f" in {Path.cwd()}: the files in {CHECKPOINTS}/ are part of a clone of the repository, "
            "and `fit` writes runs there"
        )
        make_target = MAKE_TARGETS.get(path.name)
        if make_target is not None:
            advice += f", where `make {make_target}` writes this one"
        return advice
    return _CHECK_PATH


def holds_its_target(path: Path | str) -> str:
    """Why a file that holds a pair is no draft for another target, and how to use it."""
    return (
        f"it holds its target itself, and decodes with no other: use --ckpt {path} without --target"
    )


def other_drafter(drafter_name: str, chosen_name: str) -> ValueError:
    """The error of a drafter that is chosen for a draft of another class."""
    return ValueError(f"the draft is a {drafter_name} already: drop --drafter {chosen_name}")


def missing_checkpoint(path: Path) -> FileNotFoundError:
    """The error of a checkpoint that does not exist."""
    advice = advice_on_path(path)
    if advice == _CHECK_PATH:
        advice = ": check the path, or train one with `lightning_specdec fit --config ...`"
    return FileNotFoundError(f"{path}: no such checkpoint{advice}")
