"""A digest of all training data, to detect that a resumed run would read other texts."""

from __future__ import annotations

import hashlib
from weakref import WeakKeyDictionary

from lightning_specdec.data import QuadraticProgressions, TokenData
from lightning_specdec.data.base import SPLITS

_ROWS_AT_ONCE = 64

_digests: WeakKeyDictionary[TokenData, str] = WeakKeyDictionary()
"""Digests that were computed, by the data module, which reads its files only once."""


def data_digest(data: TokenData) -> str | None:
    """Return the SHA-256 of the tokens of all splits; None if a formula makes the rows.

    It is computed once for each data module. Reading all rows once takes about as long as preparing
    an epoch's batches. Progressions follow from their arguments alone, and computing a quarter of a
    million of them takes seconds.
    """
    if isinstance(data, QuadraticProgressions):
        return None
    if data not in _digests:
        _digests[data] = _digest_of(data)
    return _digests[data]


def _digest_of(data: TokenData) -> str:
    digest = hashlib.sha256()
    for split in SPLITS:
        rows = data.rows(split)
        digest.update(f"{split} {len(rows)}".encode())
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, len(rows))
            batch = data.collate([rows[row_index] for row_index in range(start, stop)])
            for tensor in (batch.lengths, batch.prompt_lengths, batch.tokens):
                digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
