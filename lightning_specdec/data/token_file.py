"""Tokens that are written to the disk once, and from then on read where they are needed."""

from __future__ import annotations

import tokenize
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lightning_specdec.files import replaced

DTYPES = (np.uint8, np.uint16, np.uint32)


def smallest_dtype(num_tokens: int) -> np.dtype[np.unsignedinteger]:
    """The smallest kind of integer that has room for tokens below `num_tokens`."""
    return next(np.dtype(dtype) for dtype in DTYPES if num_tokens - 1 <= np.iinfo(dtype).max)


def token_file(path: Path, dtype: np.dtype[np.unsignedinteger], make: Callable[[], np.ndarray]) -> np.memmap:
    """The tokens of a file, which `make` gives where the file is missing or damaged.

    Theory: a memory map reads a page when one of its tokens is asked for, so a text may be larger than the memory and
    all processes share one copy. The file is written under another name and put in its place in one step: whoever
    opens it finds all of it or none, and of several processes that make it at once the last one's, which is the
    same, stays.

    Args:
        path: named by what the tokens depend on, since a file that is there is taken as it is.
        dtype: of the tokens.
        make: the tokens, in one dimension, at least one.

    Raises:
        ValueError: no file can be put there.
    """
    try:
        if (tokens := _opened(path, dtype)) is None:
            made = make().astype(dtype, copy=False)
            with replaced(path) as file:
                np.save(file, made)
            tokens = _opened(path, dtype)
    except OSError as error:
        raise ValueError(f"{path} cannot be used ({error.strerror or error}): give another data.cache_dir") from error
    assert tokens is not None, "a file that was just written is whole"
    return tokens


def _opened(path: Path, dtype: np.dtype[np.unsignedinteger]) -> np.memmap | None:
    """The file's tokens; None where there is none, or a damaged one."""
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        return None
    except (ValueError, tokenize.TokenError):  # cut off, or none of numpy's
        return None
    whole = tokens.ndim == 1 and tokens.dtype == dtype
    return tokens if whole and tokens.offset + tokens.nbytes == path.stat().st_size else None
