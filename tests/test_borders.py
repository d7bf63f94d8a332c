"""Which subpackage may import which: read from the files, and observed in fresh processes."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_specdec

PACKAGE = Path(lightning_specdec.__file__).parent
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
ORDER = {
    "config": 0,
    "text": 1,
    "models": 2,
    "rules": 3,
    "drafters": 4,
    "decoding": 5,
    "checkpoints": 6,
    "decoder": 7,
    "hf_generate": 8,
    "data": 9,
    "bench": 10,
    "serve": 10,
    "training": 11,
    "report": 11,
    "audit": 11,
    "cli": 12,
}
"""The floor of each subpackage, which may import only those on lower floors."""
TORCH_ONLY = (
    "rules/",
    "drafters/",
    "decoding/",
    "decoder.py",
    "models/rnn.py",
    "models/state.py",
    "models/base.py",
)
MAY_IMPORT_LIGHTNING = ("training/", "data/", "cli/")
MAY_REACH_UP = {"decoder.py": {"hf_generate", "training", "bench", "data", "audit"}}
"""`generate`, `train`, `benchmark`, `sweep` and `audit` import higher floors when called."""
RNN_PATH = str(PACKAGE.parent / "checkpoints" / "rnn.safetensors")


def imports(tree: ast.AST, *, whole: bool) -> Iterator[str]:
    """Names of imported modules, except those for type checkers.

    Args:
        tree: the parsed file.
        whole: include imports inside functions.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for statement in node.orelse:
                yield from imports(statement, whole=whole)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "the package imports by full names"
            if node.module == "lightning_specdec":
                for alias in node.names:
                    yield f"lightning_specdec.{alias.name}"
            else:
                yield node.module or ""
        elif whole or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(node, whole=whole)


@functools.cache
def syntax_tree(file: str) -> ast.Module:
    """A file of the package, parsed."""
    return ast.parse((PACKAGE / file).read_text())


@functools.cache
def imported(file: str, *, whole: bool = True) -> set[str]:
    """Names of the modules that a file of the package imports."""
    return set(imports(syntax_tree(file), whole=whole))


def subpackage(name: str) -> str:
    """The subpackage, or the module beside the subpackages, of a module or file."""
    path = name.removeprefix("lightning_specdec.").removesuffix(".py")
    return path.replace("/", ".").split(".")[0]


def packages_imported(file: str, *, whole: bool) -> set[str]:
    """First parts of the names of modules that a file imports."""
    return {name.split(".")[0] for name in imported(file, whole=whole)}


def test_the_walk_sees_imports_where_they_hide() -> None:
    source = """
from typing import TYPE_CHECKING
import a.b
if TYPE_CHECKING:
    import hidden
def f():
    from c import d
class C:
    try:
        import e
    except ImportError:
        pass
"""
    assert set(imports(ast.parse(source), whole=True)) == {"typing", "a.b", "c", "e"}
    assert set(imports(ast.parse(source), whole=False)) == {"typing", "a.b", "e"}


def test_decoding_imports_only_torch_numpy_and_the_standard_library() -> None:
    allowed = {"torch", "numpy", "lightning_specdec", *sys.stdlib_module_names}
    for file in FILES:
        if file.startswith(TORCH_ONLY):
            packages = packages_imported(file, whole=file not in MAY_REACH_UP)
            assert packages <= allowed, file


def test_lightning_stays_where_training_is() -> None:
    for file in FILES:
        if not file.startswith(MAY_IMPORT_LIGHTNING):
            packages = packages_imported(file, whole=file not in MAY_REACH_UP)
            assert packages.isdisjoint({"lightning", "pytorch_lightning", "jsonargparse"}), file


def test_a_subpackage_imports_only_those_on_lower_floors() -> None:
    for file in FILES:
        importer = subpackage(file)
        if importer not in ORDER:
            continue
        when_loaded = imported(file, whole=False)
        for name in imported(file):
            source = subpackage(name)
            is_ours = name.startswith("lightning_specdec.") and source in ORDER
            if not is_ours or source == importer:
                continue
            is_lower = ORDER[source] < ORDER[importer]
            is_exception = source in MAY_REACH_UP.get(file, ()) and name not in when_loaded
            assert is_lower or is_exception, f"{file} imports {name}"


def test_config_loads_no_torch() -> None:
    for file in FILES:
        if file.startswith("config/"):
            packages = packages_imported(file, whole=False)
            assert packages.isdisjoint({"torch", "transformers", "numpy"}), file


def test_annotations_are_those_that_the_shape_checker_takes() -> None:
    """The checker does not support `Self`: with `--shapes all`, the file could not be imported."""
    for file in FILES:
        for node in ast.walk(syntax_tree(file)):
            name = getattr(node, "id", None) or getattr(node, "attr", None)
            assert name != "Self", file


def loaded_by(statement: str, *, after: str = "", depth: int = 1) -> set[str]:
    """Names of all modules that a statement loads in a fresh process.

    Args:
        statement: Python code.
        after: code that runs first. What it loads does not count.
        depth: number of parts to which the names are shortened.
    """
    program = f"import sys\n{after}\nbefore = {{*sys.modules}}\n{statement}\n"
    program += "print(*sys.modules.keys() - before)"
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return {".".join(name.split(".")[:depth]) for name in process.stdout.split()}


def test_importing_the_package_loads_neither_torch_nor_lightning() -> None:
    statement = "import lightning_specdec; dir(lightning_specdec); lightning_specdec.__version__"
    loaded = loaded_by(statement)
    assert loaded - sys.stdlib_module_names == {"lightning_specdec"}


def test_decoding_loads_no_lightning() -> None:
    statement = (
        "from lightning_specdec import RNN, ModelDrafter, SpeculativeDecoder\n"
        "model = RNN(5); SpeculativeDecoder(model, model).decode([[1, 2]], max_new_tokens=3)"
    )
    loaded = loaded_by(statement, after="import torch")
    assert "lightning_specdec" in loaded
    training_packages = {"lightning", "jsonargparse", "torchmetrics", "tensorboard"}
    assert loaded.isdisjoint(training_packages)
    assert loaded.isdisjoint({"transformers", "jaxtyping"})


def test_measuring_loads_no_lightning() -> None:
    """Importing Lightning takes as long as everything else in a short measurement."""
    statement = (
        "from lightning_specdec import SpeculativeDecoder, audit, report\n"
        "from lightning_specdec.bench import run\n"
        "from lightning_specdec.cli import audit, bench, chat, decode\n"
        "from lightning_specdec.cli import export, info, report, serve, sweep\n"
        f"SpeculativeDecoder.from_checkpoint({RNN_PATH!r}).benchmark(max_new_tokens=2, repeats=1)"
    )
    loaded = loaded_by(statement)
    assert "lightning_specdec" in loaded
    assert loaded.isdisjoint({"lightning", "jsonargparse", "torchmetrics", "scipy"})


def test_loading_a_checkpoint_does_not_load_the_compiler_of_torch() -> None:
    """It takes a second. Building modules on the meta device loads it when weights are drawn."""
    statement = "from lightning_specdec import checkpoints\n"
    statement += f"checkpoints.load({RNN_PATH!r}).drafter"
    loaded = loaded_by(statement, depth=2)
    assert "lightning_specdec.checkpoints" in loaded
    assert "torch._dynamo" not in loaded


def test_every_public_name_is_where_the_package_says() -> None:
    for name in lightning_specdec.__all__:
        assert getattr(lightning_specdec, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lightning_specdec.nothing
