"""What the calls of decoding cost on a machine: a recorded calibration, which an adaptive window plans with."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lightning_specdec.checks import require_int, require_number

FORMAT = 1
"""Counted up when the fields change, so that a file of another version is not misread."""


_SINGLE = ("draft_seconds", "draft_step_seconds", "draft_token_seconds", "target_token_seconds")


@dataclass(frozen=True)
class Costs:
    """Seconds of the calls for one size of batch.

    Args:
        batch_size: rows.
        widths: numbers of tokens that the target's call was measured with; rising, the first one 1.
        target_seconds: the target's call at each width, at the calibration's context.
        loop_seconds: what a round costs besides its calls (verdict, reading, bookkeeping), at each width.
        draft_seconds: a draft of any length: what does not grow with the window.
        draft_step_seconds: each guess.
        draft_token_seconds: each token of text that the draft reads beyond those that a round leaves behind.
        target_token_seconds: each token of the prompt that the target reads.
    """

    batch_size: int
    widths: tuple[int, ...]
    target_seconds: tuple[float, ...]
    loop_seconds: tuple[float, ...]
    draft_seconds: float
    draft_step_seconds: float
    draft_token_seconds: float
    target_token_seconds: float

    def __post_init__(self) -> None:
        require_int("batch_size", self.batch_size, 1)
        for name in ("target_seconds", "loop_seconds"):
            if len(getattr(self, name)) != len(self.widths):
                raise ValueError(f"{name} must have one figure for each of the {len(self.widths)} widths: measure anew")
        if self.widths[:1] != (1,) or list(self.widths) != sorted(set(self.widths)):
            raise ValueError(f"widths must rise from 1, got {list(self.widths)}: measure anew")
        for seconds in self.target_seconds:
            require_number("target_seconds", seconds, low=0, low_open=True)
        for name in _SINGLE:
            require_number(name, getattr(self, name), low=0)
        for seconds in self.loop_seconds:
            require_number("loop_seconds", seconds, low=0)

    @property
    def largest_window(self) -> int:
        """Guesses that the widest measured call verifies; beyond it nothing is known."""
        return self.widths[-1] - 1

    def round_seconds(self, num_guesses: int) -> float:
        """A round without its draft, linear between the measured widths; 0 guesses are a plain step."""
        width = num_guesses + 1
        seconds = [call + loop for call, loop in zip(self.target_seconds, self.loop_seconds, strict=True)]
        right = bisect_left(self.widths, width)
        if right == len(self.widths):
            raise ValueError(f"a call on {width} tokens was not measured, {self.widths[-1]} at most: measure anew")
        if self.widths[right] == width:
            return seconds[right]
        low, high = self.widths[right - 1], self.widths[right]
        return seconds[right - 1] + (seconds[right] - seconds[right - 1]) * (width - low) / (high - low)


@dataclass(frozen=True)
class Calibration:
    """The costs of a target with its draft on a machine, by size of batch.

    Args:
        costs: one for each size of batch that was measured, in rising order.
        context_length: tokens of text at which the calls were measured.
        target, drafter, device, dtype: what was measured, in words.
        threads: of the CPU.
    """

    costs: tuple[Costs, ...]
    context_length: int
    target: str = ""
    drafter: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1

    def __post_init__(self) -> None:
        sizes = [costs.batch_size for costs in self.costs]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"a calibration's sizes of batch must rise, got {sizes}: measure anew")

    @property
    def largest_window(self) -> int:
        """Guesses that every measured size of batch can verify."""
        return min(costs.largest_window for costs in self.costs)

    def at(self, batch_size: int) -> Costs:
        """The costs of the smallest measured batch that holds so many rows; of the largest one where none does."""
        return next((costs for costs in self.costs if costs.batch_size >= batch_size), self.costs[-1])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # lists for tuples, as a file would give them back
        return {"format": FORMAT, **plain}

    @classmethod
    def from_dict(cls, values: Any) -> Calibration:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a figure is missing, unknown, or none that could have been measured.
        """
        if not isinstance(values, Mapping) or values.get("format") != FORMAT:
            raise ValueError(f"this is no calibration of format {FORMAT}: measure anew")
        plain = _known(cls, {name: value for name, value in values.items() if name != "format"})
        if not isinstance(plain["costs"], list | tuple):
            raise ValueError("a calibration's costs must be a list: measure anew")
        for name in ("context_length", "threads"):
            require_int(name, plain[name], 1)
        for name in ("target", "drafter", "device", "dtype"):
            if not isinstance(plain[name], str):
                raise ValueError(f"{name} must be a text, got {plain[name]!r}: measure anew")
        return cls(**{**plain, "costs": tuple(_costs(each) for each in plain["costs"])})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON; the file is there whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a file that `save` wrote.

        Raises:
            FileNotFoundError: there is none.
            ValueError: the file holds something else.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no calibration at {path}: leave the option out to measure one") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, ValueError) as error:
            raise ValueError(f"{path} cannot be used as a calibration: {error}") from None


def _costs(values: Any) -> Costs:
    plain = _known(Costs, values)
    for name in ("widths", "target_seconds", "loop_seconds"):
        if not isinstance(plain[name], list | tuple):
            raise ValueError(f"{name} must be a list, got {plain[name]!r}: measure anew")
    widths = tuple(require_int("widths", width, 1) for width in plain["widths"])
    seconds = {
        name: tuple(require_number(name, each, low=0, high=math.inf) for each in plain[name])
        for name in ("target_seconds", "loop_seconds")
    }
    for name in _SINGLE:
        require_number(name, plain[name], low=0)
    require_int("batch_size", plain["batch_size"], 1)
    return Costs(**{**plain, "widths": widths, **seconds})


def _known(cls: type[Any], values: Any) -> dict[str, Any]:
    """The values, if they are exactly the fields of that class."""
    names = {field.name for field in fields(cls)}
    if not isinstance(values, Mapping) or set(values) != names:
        got = sorted(values) if isinstance(values, Mapping) else values
        raise ValueError(f"{cls.__name__} has the fields {sorted(names)}, got {got}: measure anew")
    return dict(values)
