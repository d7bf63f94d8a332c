"""Settings of all tests: shapes are checked in some, and torch uses one thread."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import case_selection
import pytest

# Tests start many fresh processes. These load compiled files faster than sources, even where the
# environment forbids writing them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

SHAPE_CHECK_SHARE = 32
"""One test in this many checks shapes, which may take three times as long."""
TENSOR_FACTORIES = (
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


@pytest.fixture(autouse=True)
def _shapes(request: pytest.FixtureRequest) -> None:
    """Check shapes in some tests, chosen by name, or in all of them."""
    import jaxtyping

    is_chosen = crc32(request.node.nodeid.encode()) % SHAPE_CHECK_SHARE == 0
    checks_all = request.config.getoption("shapes") == "all"
    jaxtyping.config.update("jaxtyping_disable", not (is_chosen or checks_all))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shapes",
        choices=("some", "all"),
        default="some",
        help="in which tests shapes are checked",
    )
    parser.addoption(
        "--cases",
        choices=("each", "all"),
        default="all",
        help="each: enough cases to cover each value of each parameter, and no slow tests",
    )
    parser.addoption("--device", default="cpu", help="device that the laws decode on, as cuda")


def pytest_configure(config: pytest.Config) -> None:
    is_distributed = config.getoption("dist", "no") != "no"
    if is_distributed and not hasattr(config, "workerinput"):
        # This process only distributes tests to the workers.
        return

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts its background jobs like this, and tests send Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)

    import shape_checker

    shape_checker.install(lazily=config.getoption("shapes") == "some")
    device = config.getoption("device")
    if device != "cpu":
        os.environ["LIGHTNING_SPECDEC_TEST_DEVICE"] = device
        _put_test_tensors_on(device)


def _put_test_tensors_on(device: str) -> None:
    """Put tensors that test files create on the device.

    Tensors that the package creates stay where it puts them: that is under test.
    """
    import families
    from torch.overrides import TorchFunctionMode

    test_directory = f"{Path(__file__).parent}/"

    class TestTensors(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Any,
            types: Any,
            args: Any = (),
            kwargs: Any = None,
        ) -> Any:
            options = kwargs or {}
            result = func(*args, **options)
            is_factory = getattr(func, "__name__", "") in TENSOR_FACTORIES
            if not is_factory or "device" in options or families.DEVICE == "cpu":
                return result
            caller = sys._getframe(1).f_code.co_filename
            is_test_file = test_directory in caller and "conftest" not in caller
            return result.to(device) if is_test_file else result

    TestTensors().__enter__()


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """A test leaves Ctrl-C as it was, so that it ends later calls too."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _training(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Train the run that some tests read in the background, while other tests run."""
    for item in request.session.items:
        if "shipped_run" in getattr(item, "fixturenames", ()):
            import training_fixtures

            training_fixtures.begin_training(tmp_path_factory)
            return


def pytest_collection_finish() -> None:
    # What is imported by now stays: later collections need not traverse it.
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select and order the tests, and skip those on the real model unless they are requested.

    Tests of the trained run come late, when it is trained. OpenVINO's come last: a process that
    used it can crash when it is forked and the fork receives a signal.
    """

    if config.getoption("cases") == "each":
        items[:], deselected = case_selection.select_cases(items)
        config.hook.pytest_deselected(items=deselected)

    def runs_late(item: Any) -> tuple[bool, bool]:
        return item.path.stem == "test_openvino", "shipped_run" in item.fixturenames

    items.sort(key=runs_late)

    model = Path(__file__).parent.parent / "checkpoints" / "smollm2"
    if not (model / "config.json").exists():
        reason = "checkpoints/smollm2 is absent: `make smollm2` writes it"
    elif "real" not in config.getoption("markexpr"):
        reason = "takes minutes on a real model: `make test-real` runs it"
    else:
        return
    for item in items:
        if "real" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))
