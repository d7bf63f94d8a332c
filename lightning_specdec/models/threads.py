"""Threads of the CPU: how many compute while a network runs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

# `torch.set_num_threads` also sets the number for Python threads that start later, and they keep
# it. OpenMP's own function changes the calling thread only.
_set_num_threads = getattr(
    ctypes.CDLL(torch._C.__file__), "omp_set_num_threads", torch.set_num_threads
)


def one_thread(enabled: bool) -> AbstractContextManager[None]:
    """Run torch on one thread inside the block, if `enabled`.

    After each operation, torch's worker threads spin while they wait for the next one. Next to
    OpenVINO, which has its own threads, this costs more than the workers save.
    """
    return _one_thread() if enabled else nullcontext()


@contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    _set_num_threads(1)
    try:
        yield
    finally:
        _set_num_threads(num_threads)


BUSY_LOAD_PER_CORE = 1.25
"""System load per core above which other processes slow decoding down."""


def is_busy() -> bool:
    """Whether other processes keep the cores busy, so that one thread is often the fastest."""
    num_cores = os.cpu_count() or 1
    return os.getloadavg()[0] > BUSY_LOAD_PER_CORE * num_cores
