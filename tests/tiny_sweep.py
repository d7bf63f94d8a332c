"""A sweep of a tiny model in two engines of torch."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.bench.sweep import Sweep
from lightning_specdec.bench.ways import Engine, draftings
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.models import PairSource


def sweep_of_two_engines(
    target: str,
    *,
    windows: Sequence[int],
    seconds: float,
    prompt: Sequence[int] = (1, 2, 3),
    max_new_tokens: int = 8,
) -> Sweep:
    """A sweep over the drafts of a target's directory, with one thread and with two."""
    source = PairSource(target=target, backend="torch")
    decoder = SpeculativeDecoder.load(source)
    return Sweep(
        decoder,
        source,
        [list(prompt)],
        DecodingConfig(max_new_tokens=max_new_tokens),
        engines=[Engine("torch", 1), Engine("torch", 2)],
        kinds=draftings(decoder, source),
        windows=list(windows),
        seconds=seconds,
    )
