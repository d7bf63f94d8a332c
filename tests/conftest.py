"""What every test stands on: shapes checked, one thread."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

# Tests start many fresh processes: these read compiled files, also where the environment forbids to write them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(autouse=True)
def _shapes(request: pytest.FixtureRequest) -> None:
    """Every sixteenth test, by its name, checks the shapes of all calls, which takes thrice as long as the calls."""
    import jaxtyping

    unchecked = (
        request.config.getoption("shapes") == "some"
        and crc32(request.node.nodeid.encode()) % 16 != 0
    )
    jaxtyping.config.update("jaxtyping_disable", unchecked)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shapes",
        choices=("some", "all"),
        default="some",
        help="in which tests shapes are checked",
    )
    parser.addoption("--device", default="cpu", help="where the laws decode, as cuda")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return  # this process gives tests to others
    import shape_checker

    shape_checker.install(lazily=config.getoption("shapes") == "some")
    if (device := config.getoption("device")) != "cpu":
        os.environ["LIGHTNING_SPECDEC_TEST_DEVICE"] = device
        _put_test_tensors_on(device)


def _put_test_tensors_on(device: str) -> None:
    """Puts tensors that test files make on the device, and leaves alone what the package makes: that is under test."""
    import families
    from torch.overrides import TorchFunctionMode

    factories = (
        "tensor",
        "arange",
        "zeros",
        "ones",
        "full",
        "empty",
        "rand",
        "randn",
        "randint",
        "randperm",
        "eye",
    )

    class TestTensors(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            is_factory = getattr(func, "__name__", "") in factories and "device" not in (
                kwargs or {}
            )
            if is_factory and families.DEVICE != "cpu":
                caller = sys._getframe(1).f_code.co_filename
                if f"{Path(__file__).parent}/" in caller and "conftest" not in caller:
                    return made.to(device)
            return made

    TestTensors().__enter__()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _training(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The run that some tests read is trained beside the tests that do not."""
    if any("shipped_run" in item.fixturenames for item in request.session.items):  # type: ignore[attr-defined]
        import training_fixtures

        training_fixtures.begin_training(tmp_path_factory)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker begins with tests that follow each other, whose models it makes once, and takes over others' later."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported by now stays: no later collection goes through it


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on the real model run when they are asked for and it is there. Last come those of the trained run, and
    OpenVINO's: a process in which it ran can crash when it is forked and the fork is told to stop."""

    def runs_late(item: Any) -> tuple[bool, bool]:
        return item.path.stem == "test_openvino", "shipped_run" in item.fixturenames

    items.sort(key=runs_late)
    reason = None
    if not (Path(__file__).parent.parent / "checkpoints" / "smollm2" / "config.json").exists():
        reason = "checkpoints/smollm2 is absent: `make smollm2` writes it"
    elif "real" not in config.getoption("markexpr"):
        reason = "takes minutes on a real model: `make test-real` runs it"
    if reason is not None:
        for item in items:
            if "real" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))
