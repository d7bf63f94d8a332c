"""Which models decode: a target and its draft, named by files, directories or names on the hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_specdec.config.kinds import DRAFTERS, Choice
from lightning_specdec.config.settings import Settings, setting

DTYPES = ("float32", "bfloat16", "float16", "float64")
QUANTIZATIONS = ("int8", "int4")
BACKENDS = ("auto", "torch", "openvino")
MOST_SMALL = 10_000_000
"""Parameters of a model that is not converted to another backend unless that is asked for."""
ENGINES = ("vllm", "sglang", "llama.cpp", "transformers")
"""Programs that an exported draft is written for."""


@dataclass(frozen=True, kw_only=True)
class TargetSource(Settings):
    """The model whose output is wanted: one of `ckpt`, `pair` and `target`."""

    ckpt: str | None = setting(
        None,
        "checkpoint or shipped pair that holds the draft and usually the target",
        metavar="FILE",
    )
    pair: str | None = setting(
        None, "pair of the registry (see `lightning_specdec info`)", metavar="NAME"
    )
    target: Any = setting(
        None,
        "pretrained target: a directory or a name on the hub; with --ckpt, where its target is",
        metavar="MODEL",
    )
    dtype: str | None = setting(None, "compute in this dtype; default: as stored", choices=DTYPES)
    quantization: str | None = setting(None, "quantize the target's weights", choices=QUANTIZATIONS)
    revision: str | None = setting(None, "branch, tag or commit of the target on the hub")
    trust_remote_code: bool = setting(
        False, "run Python code that comes with a model: read it first"
    )
    device: str = setting("cpu", "device to decode on, for example cpu or cuda:0")
    backend: str = setting(
        "auto",
        "backend for pretrained models; auto: OpenVINO on a CPU if installed and faster, torch for quantized ones",
        choices=BACKENDS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_source(self, "target")
        named = [name for name in ("ckpt", "pair", "target") if getattr(self, name) is not None]
        if len(named) != 1 and named != ["ckpt", "target"]:
            got = " and ".join(f"--{name}" for name in named) or "none"
            example = "checkpoints/rnn.safetensors or --target gpt2"
            raise ValueError(
                f"name the models by one of MODEL, --ckpt, --pair, --target (as {example}), got {got}"
            )


@dataclass(frozen=True, kw_only=True)
class DraftSource(Settings):
    """The drafter: by default the pair's or checkpoint's own, prompt lookup where there is none."""

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
    draft_revision: str | None = setting(None, "branch, tag or commit of the draft on the hub")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_source(self, "draft")
        if self.drafter is not None:
            choice = Choice.read(self.drafter, "drafter")
            DRAFTERS.check(choice.name)
            object.__setattr__(self, "drafter", choice)


@dataclass(frozen=True, kw_only=True)
class PairSource(DraftSource, TargetSource):
    """The names of a target and its drafter: one of `target`, `pair` and `ckpt` is required.

    Raises:
        ValueError: a field is wrong, or fields exclude each other.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ckpt is not None:
            names = (
                "quantization",
                "draft_quantization",
                "draft_dtype",
                "revision",
                "draft_revision",
            )
            for name in (*names, "trust_remote_code"):
                if getattr(self, name):
                    raise ValueError(
                        f"--{name} is for pretrained models (--pair, --target): a checkpoint has its own"
                    )

    @property
    def name(self) -> str:
        """What is loaded, for messages."""
        return str(self.ckpt or self.pair or self.target)


def check_source(settings: Settings, name: str) -> None:
    """Raise ValueError unless this field is text, a path (kept as text), a loaded module, or None."""
    value = getattr(settings, name)
    if isinstance(value, os.PathLike):
        object.__setattr__(settings, name, os.fspath(value))
    elif not (
        value is None or isinstance(value, str) or callable(getattr(value, "parameters", None))
    ):
        raise ValueError(f"{name} must be a model's name or directory, or a model, got {value!r}")


def check_directory(source: str) -> None:
    """Raise ValueError for what is meant as a model's directory and is none.

    A path begins as one, or has a parent directory here: anything else may be a name on the hub.
    """
    path = Path(source).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{source} is not a model directory: it has no config.json")
    if not path.exists() and (
        source.startswith((".", "/", "~")) or ("/" in source and path.parent.is_dir())
    ):
        raise ValueError(f"there is no directory {source}: check the path")
