"""How many CPU threads a model deserves."""

from __future__ import annotations

import os

import torch

SMALL = 1_000_000
"""Parameters below which a product is done before a second thread has woken up."""


def limit_threads(num_parameters: int) -> None:
    """One thread for small networks, unless the user has said otherwise by OMP_NUM_THREADS.

    Theory: torch shares each operation among its threads and waits for all. For a product of a few thousand numbers the
    waiting is the cost, and on a machine with other work it can be a hundred times the work.
    """
    if num_parameters < SMALL and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)
