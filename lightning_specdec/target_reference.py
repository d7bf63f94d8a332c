"""What a file says of a target whose weights lie elsewhere, and how that target is found again.

A stranger's file may name any place: what is read there is a directory of this machine, its safetensors weights alone,
and only where their sha256 is the one that the file wants.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_specdec.description import short
from lightning_specdec.models import LanguageModel, hub
from lightning_specdec.models.identity import Origin, weights_sha256

_NUMBERS = ("vocab_size", "hidden_size", "num_layers")
_TEXTS = ("source", "sha256", "class", "tokenizer", "dtype")


@dataclass(frozen=True)
class TargetReference:
    """A target by its place, its weights and its sizes.

    Args:
        source: its directory or its name on the hub; None where it came from no such place.
        sha256: see `models.identity.weights_sha256`; None where there are no files.
        kind: its class; of a model of transformers, the class there.
        vocab_size, hidden_size, num_layers: its own; None where it has none.
        tokenizer: the tokenizer's fingerprint; None where it has none.
        dtype: what it computes in.
    """

    source: str | None
    sha256: str | None
    kind: str
    vocab_size: int
    hidden_size: int | None
    num_layers: int | None
    tokenizer: str | None
    dtype: str

    @classmethod
    def of(cls, target: LanguageModel) -> TargetReference:
        """What is to be said of this target."""
        origin = origin_of(target)
        return cls(
            None if origin is None else origin.source,
            None if origin is None else origin.sha256,
            type(getattr(target, "model", target)).__name__,
            target.vocab_size,
            target.hidden_size,
            target.num_layers,
            None if target.tokenizer is None else target.tokenizer.fingerprint,
            str(dtype_of(target)).removeprefix("torch."),
        )

    @classmethod
    def read(cls, described: object) -> TargetReference:
        """The inverse of `described`, for what a stranger may have written.

        Raises:
            ValueError: this describes no target.
        """
        wrong = ValueError(f"it says nothing usable of its target, got {short(repr(described), 80)}")
        if not isinstance(described, dict) or described.keys() != {*_NUMBERS, *_TEXTS}:
            raise wrong
        texts, numbers = [described[name] for name in _TEXTS], [described[name] for name in _NUMBERS]
        if not all(each is None or (isinstance(each, str) and 0 < len(each) <= 4096) for each in texts):
            raise wrong
        if not all(each is None or (type(each) is int and 0 < each < 2**31) for each in numbers):
            raise wrong
        sha256 = described["sha256"]
        if None in (described["class"], described["dtype"], described["vocab_size"]) or (
            sha256 is not None and not re.fullmatch("[0-9a-f]{64}", sha256)
        ):
            raise wrong
        return cls(kind=described["class"], **{name: value for name, value in described.items() if name != "class"})

    def described(self) -> dict[str, Any]:
        """The reference as plain values."""
        plain = {**vars(self), "class": self.kind}
        return {name: plain[name] for name in (*_TEXTS, *_NUMBERS)}

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
        known = ("sha256",)
        if self.sha256 is None or other.sha256 is None:
            known = ("kind", *_NUMBERS, "tokenizer")  # type: ignore[assignment]
        for name in known:
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
        if isinstance(given, LanguageModel):
            self.check(given, who)
            return given
        from lightning_specdec.models.loading import load_model

        assert self.source is not None
        if given is not None:
            target = load_model(given, dtype=self.dtype)
            self.check(target, who)
            return target
        path = self.place()
        if path is None:
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
        assert self.source is not None
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
        target.origin = None  # type: ignore[assignment]


def dtype_of(target: LanguageModel) -> torch.dtype:
    """What a target computes in, which its quantized weights do not tell."""
    return next(weight.dtype for weight in target.parameters() if weight.is_floating_point())
