"""A target whose weights are not in the file: how the file names it, and how it is found again.

A file from a stranger may name any directory: only directories of this machine are read, and no
code in them runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_specdec.config import hub
from lightning_specdec.config.settings import Settings, check, setting
from lightning_specdec.config.terminal import short
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.safetensors_file import Origin

_SINGLE_FILE_SHA256 = "target_single_file_sha256"
"""Name of another entry of a file, next to "target"."""
_ADAPTER = "target_adapter"
"""Likewise, for the adapter that is merged into the target."""


@dataclass(frozen=True)
class TargetReference(Settings):
    """A target by its source, its weights and its sizes."""

    source: str | None = setting(help="its directory or its name on the hub")
    sha256: str | None = setting(help="see `weights_sha256`; None where there are no files")
    kind: str = setting(help="its class; of a model of transformers, the class there")
    vocab_size: int = setting(minimum=1, maximum=2**31)
    hidden_size: int | None = setting(minimum=1, maximum=2**31)
    num_layers: int | None = setting(minimum=1, maximum=2**31)
    tokenizer: str | None = setting(help="the tokenizer's fingerprint")
    dtype: str = setting(help="what it computes in")
    single_file_sha256: str | None = setting(
        None, "see `single_file_sha256`; None if it equals `sha256` or is unknown"
    )
    adapter: str | None = setting(
        None, "the adapter that is merged into its weights; the hashes are of both"
    )

    @classmethod
    def of(cls, target: LanguageModel) -> TargetReference:
        """Return the reference to a target."""
        source = None
        sha256 = None
        single_file_sha256 = None
        adapter = None
        if target.origin is not None:
            if target.origin.adapter is not None:
                adapter = target.origin.adapter.source
            source = target.origin.source
            sha256 = target.origin.sha256
            if target.origin.single_file_sha256 != sha256:
                single_file_sha256 = target.origin.single_file_sha256

        return cls(
            source=source,
            sha256=sha256,
            kind=type(getattr(target, "model", target)).__name__,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
            tokenizer=None if target.tokenizer is None else target.tokenizer.fingerprint,
            dtype=str(dtype_of(target)).removeprefix("torch."),
            single_file_sha256=single_file_sha256,
            adapter=adapter,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the values under the names in files, without `single_file_sha256` and `adapter`.

        Files store these separately, because older versions refuse unknown entries here.
        """
        values = super().to_dict()
        values.pop("single_file_sha256")
        values.pop("adapter")
        return {"class": values.pop("kind"), **values}

    @classmethod
    def from_dict(cls: type[TargetReference], values: object, where: str = "") -> TargetReference:
        # Files use the name "class", which a Python field cannot have.
        if isinstance(values, Mapping) and "class" in values:
            values = {("kind" if key == "class" else key): value for key, value in values.items()}
        return super().from_dict(values, where)

    def to_document(self) -> dict[str, Any]:
        """Return the entries of a file that names this target."""
        document: dict[str, Any] = {"target": self.to_dict()}
        if self.single_file_sha256 is not None:
            document[_SINGLE_FILE_SHA256] = self.single_file_sha256
        if self.adapter is not None:
            document[_ADAPTER] = self.adapter
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> TargetReference:
        """Return the target that a file names; raises ValueError for wrong values."""
        reference = cls.from_dict(document["target"], "its target.")
        sha256 = document.get(_SINGLE_FILE_SHA256)
        adapter = document.get(_ADAPTER)
        check(f"its {_SINGLE_FILE_SHA256}", sha256, str | None, {})
        check(f"its {_ADAPTER}", adapter, str | None, {})
        return replace(reference, single_file_sha256=sha256, adapter=adapter)

    def __str__(self) -> str:
        name = short(self.source or f"a {self.kind}", 200)
        if self.adapter is not None:
            name = f"{name} with the adapter {short(self.adapter, 200)}"
        if self.sha256 is None:
            return name
        return f"{name} (sha256 {self.sha256[:12]}...)"

    def has_weights_of(self, origin: Origin) -> bool:
        """Whether the files of this origin contain the same weights, in one file or in several."""
        if origin.sha256 == self.sha256:
            return True
        # The same weights may be distributed over other files than when the reference was made.
        return origin.single_file_sha256 in (self.sha256, self.single_file_sha256)

    def check(self, target: LanguageModel, who: str) -> None:
        """Raise ValueError unless this reference is to that target.

        Compares the weights' sha256 if both are known, else the class, the sizes and the tokenizer.

        Args:
            who: what needs the target, for the error message.
        """
        if self.sha256 and target.origin is not None:
            if not self.has_weights_of(target.origin):
                raise self._different(TargetReference.of(target), "sha256", who)
            return

        actual = TargetReference.of(target)
        for name in ("kind", "vocab_size", "hidden_size", "num_layers", "tokenizer"):
            expected_value = getattr(self, name)
            actual_value = getattr(actual, name)
            is_known = expected_value is not None and actual_value is not None
            if is_known and expected_value != actual_value:
                raise self._different(actual, name, who)

    def _different(self, actual: TargetReference, name: str, who: str) -> ValueError:
        return ValueError(
            f"{who} was trained for {self}, the target {actual} has another {name}: "
            "pass the target that it was trained for"
        )

    def load(
        self,
        given: str | LanguageModel | None,
        who: str,
        *,
        adapter: str | None = None,
    ) -> LanguageModel:
        """Return the target, loaded from its source unless it is passed.

        Args:
            given: where the target is now, or the loaded target.
            who: what needs the target, for the error message.
            adapter: where its adapter is now; where it was before when None.

        Raises:
            ValueError: the target is missing, cannot be loaded, or has other weights.
        """
        from lightning_specdec.models.loading import load_model

        if given is None:
            target = self._load_from_source(who)
        elif isinstance(given, LanguageModel):
            target = given
        else:
            target = load_model(given, dtype=self.dtype, adapter=adapter or self.adapter)
        self.check(target, who)
        return target

    def _load_from_source(self, who: str) -> LanguageModel:
        from lightning_specdec.models.adapters import find_adapter
        from lightning_specdec.models.loading import load_model

        directory = self._directory()
        if directory is None or self.source is None:
            raise ValueError(
                f"{who} needs its target {self}, which is not here: "
                "give its directory with --target"
            )

        # A stranger's file may name any directory, so its weights are compared before it is loaded.
        adapter = None if self.adapter is None else find_adapter(self.adapter, offline=True)
        origin = Origin(self.source, directory, adapter)
        if not self.has_weights_of(origin):
            raise ValueError(
                f"{who} was trained for {self}, which has another sha256 now: "
                "pass the target that it was trained for with --target"
            )
        target = load_model(directory, dtype=self.dtype, adapter=self.adapter)
        target.origin = origin
        return target

    def _directory(self) -> Path | None:
        """Return the directory named by `source`, or its earlier download from the Hub, or None."""
        if not self.source or not self.sha256:
            return None
        path = Path(os.path.expanduser(self.source))
        # os.path.isdir returns False for names that no path can have, such as those with NUL.
        return path if os.path.isdir(path) or hub.is_gguf(path) else hub.cached(self.source)


def dtype_of(target: LanguageModel) -> torch.dtype:
    """Return the dtype that a target computes in, which its quantized weights do not have."""
    for weight in target.parameters():
        if weight.is_floating_point() and weight.dtype.itemsize > 1:
            return weight.dtype
    raise ValueError("the target has no floating-point weights")
