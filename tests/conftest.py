"""What every test stands on: shapes checked, one thread."""

from __future__ import annotations

import builtins

import jaxtyping
import pytest
import torch

# The package names jaxtyping's types for type checkers only, so that decoding needs torch alone. Here the names are
# given to all modules, and each call's shapes are checked. Before the package's first import, therefore:
for _name in ("Bool", "Float", "Int"):
    setattr(builtins, _name, getattr(jaxtyping, _name))
jaxtyping.install_import_hook("lightning_specdec", "shape_checker.check")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
