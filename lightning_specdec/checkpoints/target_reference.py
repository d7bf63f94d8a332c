"""A target whose weights lie elsewhere: how a file names it, and how it is found again.

A stranger's file may name any place: what is read there is a directory of this machine, its safetensors weights alone,
and only where their sha256 is the one that the file names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_specdec.config import hub
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.config.terminal import short
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.safetensors_file import Origin, weights_sha256


@dataclass(frozen=True)
class TargetReference(Settings):
    """A target by its place, its weights and its sizes."""

    source: str | None = setting(help="its directory or its name on the hub")
    sha256: str | None = setting(help="see `weights_sha256`; None where there are no files")
    kind: str = setting(help="its class; of a model of transformers, the class there")
    vocab_size: int = setting(minimum=1, maximum=2**31)
    hidden_size: int | None = setting(minimum=1, maximum=2**31)
    num_layers: int | None = setting(minimum=1, maximum=2**31)
    tokenizer: str | None = setting(help="the tokenizer's fingerprint")
    dtype: str = setting(help="what it computes in")

    def __post_init__(self) -> None:
        super().__post_init__()
        texts = (self.source, self.kind, self.tokenizer, self.dtype)
        if not all(text is None or 0 < len(text) <= 4096 for text in texts) or (
            self.sha256 is not None and not re.fullmatch("[0-9a-f]{64}", self.sha256)
        ):
            raise ValueError("a name is empty or too long, or its sha256 is none")

    @classmethod
    def of(cls, target: LanguageModel) -> TargetReference:
        """The reference to this target."""
        origin = origin_of(target)
        return cls(
            source=None if origin is None else origin.source,
            sha256=None if origin is None else origin.sha256,
            kind=type(getattr(target, "model", target)).__name__,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
            tokenizer=None if target.tokenizer is None else target.tokenizer.fingerprint,
            dtype=str(dtype_of(target)).removeprefix("torch."),
        )

    @classmethod
    def read(cls, described: object) -> TargetReference:
        """The inverse of `described`, for what a stranger may have written.

        Raises:
            ValueError: this describes no target.
        """
        try:
            return cls.from_dict({{"class": "kind"}.get(name, name): value for name, value in described.items()})  # type: ignore[attr-defined]
        except (ValueError, AttributeError) as error:
            reason = short(str(error), 80)
            raise ValueError(f"it says nothing usable of its target ({reason})") from error

    def described(self) -> dict[str, Any]:
        """The reference as plain values."""
        return {{"kind": "class"}.get(name, name): value for name, value in self.to_dict().items()}

    def __str__(self) -> str:
        name = f"a {self.kind}" if self.source is None else self.source
        return short(" ".join(name.split()), 200) + ("" if self.sha256 is None else f" (sha256 {self.sha256[:12]}...)")

    def check(self, target: LanguageModel, who: str) -> None:
        """Raise ValueError unless this is the target that is meant.

        By the weights' sha256 where both are known; else by the class, the sizes and the tokens.

        Args:
            who: what wants it, in an error.
        """
        other = TargetReference.of(target)
        names = ["sha256"]
        if self.sha256 is None or other.sha256 is None:
            names = ["kind", "vocab_size", "hidden_size", "num_layers", "tokenizer"]
        for name in names:
            own, found = getattr(self, name), getattr(other, name)
            if own is not None and found is not None and own != found:
                why = "" if name == "sha256" else f": its {name.replace('kind', 'class')} is {found} and not {own}"
                raise ValueError(
                    f"{who} was trained for {self}, the target {other} is another{why}: give its own target"
                )

    def load(self, given: str | LanguageModel | None, who: str) -> LanguageModel:
        """The target, from where it is said to be.

        Args:
            given: where it is instead, or the target itself.
            who: what wants it, in an error.

        Raises:
            ValueError: it is not there, cannot be loaded, or is another.
        """
        from lightning_specdec.models.loading import load_model

        if given is not None:
            target = given if isinstance(given, LanguageModel) else load_model(given, dtype=self.dtype)
            self.check(target, who)
            return target
        path = self.place()
        if path is None or self.source is None:
            raise ValueError(f"{who} needs its target {self}, which is not here: give its directory with --target")
        if (found := weights_sha256(path)) != self.sha256:
            raise ValueError(
                f"{who} was trained for {self}, what is there now is another (sha256 {found[:12]}...): "
                "give its own target with --target"
            )
        target = load_model(path, dtype=self.dtype)
        target.origin = Origin(self.source, path)
        return target

    def place(self) -> Path | None:
        """The directory of that name, or what an earlier download left of it; None where neither is here."""
        if self.source is None or self.sha256 is None:
            return None
        path = Path(self.source).expanduser()
        return path if path.is_dir() else hub.cached(self.source)


def origin_of(target: LanguageModel) -> Origin | None:
    """The files that a target's weights were read from; None where it was made or trained here."""
    found = getattr(target, "origin", None)
    assert found is None or isinstance(found, Origin)
    return found


def forget_origin(target: LanguageModel) -> None:
    """Say that a target's weights are no longer those of its files, since they are trained or were replaced."""
    if origin_of(target) is not None:
        target.origin = None


def dtype_of(target: LanguageModel) -> torch.dtype:
    """What a target computes in, which its quantized weights do not tell."""
    return next(weight.dtype for weight in target.parameters() if weight.is_floating_point())
