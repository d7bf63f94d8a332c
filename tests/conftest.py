"""What every test stands on: shapes checked, one thread."""

from __future__ import annotations

import builtins
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import jaxtyping
import lightning.pytorch  # noqa: F401 - before the hook below: what is imported under it is compiled anew
import pytest
import torch
from torch.overrides import TorchFunctionMode

# The package names jaxtyping's types for type checkers only, so that decoding needs torch alone. Here the names are
# given to all modules, and each call's shapes are checked. Before the package's first import, therefore:
for _name in ("Bool", "Float", "Int"):
    setattr(builtins, _name, getattr(jaxtyping, _name))
jaxtyping.install_import_hook("lightning_specdec", "shape_checker.check")

_jaxtyped = jaxtyping.jaxtyped


def _jaxtyped_where_checked(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """What the hook decorates all with. An inner function is made anew by each call of the outer one, and a check of it
    too, which takes longer than most calls: so none is made for it where shapes are not checked."""

    def decorate(made: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable and "<locals>" in getattr(made, "__qualname__", ""):
            return made
        return _jaxtyped(made, typechecker=typechecker)

    return decorate


jaxtyping.jaxtyped = _jaxtyped_where_checked  # type: ignore[assignment]
jaxtyping.config.update("jaxtyping_disable", True)  # while tests are collected: `_shapes` says for each what it checks


@pytest.fixture(autouse=True)
def _shapes(request: pytest.FixtureRequest) -> None:
    """Every sixteenth test, by its name, checks the shapes of all calls, which takes thrice as long as the calls."""
    unchecked = request.config.getoption("shapes") == "some" and crc32(request.node.nodeid.encode()) % 16 != 0
    jaxtyping.config.update("jaxtyping_disable", unchecked)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shapes", choices=("some", "all"), default="some", help="in which tests shapes are checked")
    parser.addoption("--device", default="cpu", help="where the laws decode, as cuda")


def pytest_configure(config: pytest.Config) -> None:
    if (device := config.getoption("device")) != "cpu":
        os.environ["LIGHTNING_SPECDEC_TEST_DEVICE"] = device
        _TestTensors(device).__enter__()


class _TestTensors(TorchFunctionMode):
    """Puts tensors that test files make on the device, and leaves alone what the package makes: that is under test."""

    FACTORIES = ("tensor", "arange", "zeros", "ones", "full", "empty", "rand", "randn", "randint", "randperm", "eye")

    def __init__(self, device: str) -> None:
        super().__init__()
        import families

        self.device, self.families = device, families

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if (
            getattr(func, "__name__", "") in self.FACTORIES
            and "device" not in (kwargs or {})
            and self.families.DEVICE != "cpu"
        ):
            caller = sys._getframe(1).f_code.co_filename
            if f"{Path(__file__).parent}/" in caller and "conftest" not in caller:
                return made.to(self.device)
        return made


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported by now stays: no later collection goes through it


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on the real model run when they are asked for and it is there."""
    reason = None
    if not (Path(__file__).parent.parent / "checkpoints" / "smollm2" / "config.json").exists():
        reason = "checkpoints/smollm2 is absent: `make smollm2` writes it"
    elif "real" not in config.getoption("markexpr"):
        reason = "takes minutes on a real model: `make test-real` runs it"
    if reason is not None:
        for item in items:
            if "real" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))
