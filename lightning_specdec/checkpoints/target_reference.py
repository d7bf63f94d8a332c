"""A target whose weights lie elsewhere: how a file names it, and how it is found again.

A stranger's file may name any place: only a directory of this machine is read, and no code in it runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
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

    @classmethod
    def of(cls, target: LanguageModel) -> TargetReference:
        """The reference to this target."""
        return cls(
            source=None if target.origin is None else target.origin.source,
            sha256=None if target.origin is None else target.origin.sha256,
            kind=type(getattr(target, "model", target)).__name__,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
            tokenizer=None if target.tokenizer is None else target.tokenizer.fingerprint,
            dtype=str(dtype_of(target)).removeprefix("torch."),
        )

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        return {"class": values.pop("kind"), **values}

    @classmethod
    def from_dict(cls: type[TargetReference], values: object, where: str = "") -> TargetReference:
        # Files say "class", which cannot name a field in Python.
        if isinstance(values, Mapping) and "class" in values:
            values = {("kind" if key == "class" else key): value for key, value in values.items()}
        return super().from_dict(values, where)

    def __str__(self) -> str:
        name = short(self.source or f"a {self.kind}", 200)
        return name if self.sha256 is None else f"{name} (sha256 {self.sha256[:12]}...)"

    def check(self, target: LanguageModel, who: str) -> None:
        """Raise ValueError unless this is the target that is meant.

        By the weights' sha256 where both are known; else by the class, the sizes and the tokens.

        Args:
            who: what wants it, in an error.
        """
        other = TargetReference.of(target)
        names = ["kind", "vocab_size", "hidden_size", "num_layers", "tokenizer"]
        for name in ["sha256"] if self.sha256 and other.sha256 else names:
            own, found = getattr(self, name), getattr(other, name)
            if None not in (own, found) and own != found:
                raise ValueError(
                    f"{who} was trained for {self}, the target {other} has another {name}: give its own"
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

        place = self._place() if given is None else given
        if place is None:
            raise ValueError(
                f"{who} needs its target {self}, which is not here: give its directory with --target"
            )
        if (
            isinstance(place, Path) and weights_sha256(place) != self.sha256
        ):  # a stranger may have named any place
            raise ValueError(
                f"{who} was trained for {self}, which has another sha256 now: give its own with --target"
            )
        target = place if isinstance(place, LanguageModel) else load_model(place, dtype=self.dtype)
        self.check(target, who)
        if isinstance(place, Path) and self.source is not None:
            target.origin = Origin(self.source, place)
        return target

    def _place(self) -> Path | None:
        """The directory of that name, or what an earlier download left of it; None where neither is here."""
        if not self.source or not self.sha256:
            return None
        path = os.path.expanduser(self.source)
        return Path(path) if os.path.isdir(path) else hub.cached(self.source)


def dtype_of(target: LanguageModel) -> torch.dtype:
    """What a target computes in, which its quantized weights do not tell."""
    return next(weight.dtype for weight in target.parameters() if weight.is_floating_point())
