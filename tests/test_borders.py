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
    name: floor
    for floor, names in enumerate(
        (
            ("config",),
            ("text",),
            ("models",),
            ("rules",),
            ("drafters",),
            ("decoding",),
            ("checkpoints",),
            ("decoder",),
            ("hf_generate",),
            ("data",),
            ("training", "bench"),
            ("report", "audit"),
            ("cli",),
        )
    )
    for name in names
}
"""A room may import those on the floors below it."""
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
"""Inside a method: `generate`, `train`, `benchmark`, `sweep` and `audit` import what lies behind them."""


def imports(tree: ast.AST, *, whole: bool) -> Iterator[str]:
    """Names of imported modules, without those for type checkers; with `whole`, those inside functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                yield from imports(other, whole=whole)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "the house imports by full names"
            base = node.module or ""
            yield from (
                [f"{base}.{alias.name}" for alias in node.names]
                if base == "lightning_specdec"
                else [base]
            )
        elif whole or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(node, whole=whole)


@functools.cache
def imported(file: str, *, whole: bool = True) -> set[str]:
    return set(imports(ast.parse((PACKAGE / file).read_text()), whole=whole))


def room(name: str) -> str:
    """The room that a module or a file belongs to."""
    return (
        name.removeprefix("lightning_specdec.").removesuffix(".py").replace("/", ".").split(".")[0]
    )


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
    for file in (file for file in FILES if file.startswith(TORCH_ONLY)):
        names = imported(file, whole=file not in MAY_REACH_UP)
        assert {name.split(".")[0] for name in names} <= {
            "torch",
            "numpy",
            "lightning_specdec",
            *sys.stdlib_module_names,
        }, file


def test_lightning_stays_where_training_is() -> None:
    for file in (file for file in FILES if not file.startswith(MAY_IMPORT_LIGHTNING)):
        names = {name.split(".")[0] for name in imported(file, whole=file not in MAY_REACH_UP)}
        assert not names & {"lightning", "pytorch_lightning", "jsonargparse"}, file


def test_a_room_imports_only_those_below_it() -> None:
    for file in (file for file in FILES if room(file) in ORDER):
        for name in imported(file):
            if (
                name.startswith("lightning_specdec.")
                and (other := room(name)) in ORDER
                and other != room(file)
            ):
                inside = other in MAY_REACH_UP.get(file, ()) and name not in imported(
                    file, whole=False
                )
                assert inside or ORDER[other] < ORDER[room(file)], f"{file} imports {name}"


def test_config_loads_no_torch() -> None:
    for file in (file for file in FILES if file.startswith("config/")):
        names = {name.split(".")[0] for name in imported(file, whole=False)}
        assert not names & {"torch", "transformers", "numpy"}, file


def test_annotations_are_those_that_the_shape_checker_takes() -> None:
    """It takes no `Self`: no file could be imported with `--shapes all`, nor such a method called in a checked test."""
    for file in FILES:
        names = {
            getattr(node, "id", getattr(node, "attr", ""))
            for node in ast.walk(ast.parse((PACKAGE / file).read_text()))
        }
        assert "Self" not in names, file


def loaded_by(statement: str, *, after: str = "", depth: int = 1) -> set[str]:
    """Names, to that depth, of all modules that this statement loads in a fresh process, after another one."""
    names = f"{{'.'.join(name.split('.')[:{depth}]) for name in sys.modules.keys() - before}}"
    program = f"import sys\n{after}\nbefore = {{*sys.modules}}\n{statement}\nprint(*{names})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_importing_the_package_loads_neither_torch_nor_lightning() -> None:
    loaded = loaded_by(
        "import lightning_specdec; dir(lightning_specdec); lightning_specdec.__version__"
    )
    assert loaded - sys.stdlib_module_names == {"lightning_specdec"}


def test_decoding_loads_no_lightning() -> None:
    statement = (
        "from lightning_specdec import RNN, ModelDrafter, SpeculativeDecoder\n"
        "model = RNN(5); SpeculativeDecoder(model, model).decode([[1, 2]], max_new_tokens=3)"
    )
    loaded = loaded_by(statement, after="import torch")
    assert "lightning_specdec" in loaded
    assert loaded.isdisjoint(
        {"lightning", "jsonargparse", "torchmetrics", "tensorboard", "transformers", "jaxtyping"}
    )


def test_measuring_loads_no_lightning() -> None:
    """It takes as long as everything else in a short measurement."""
    path = str(Path(__file__).parent.parent / "checkpoints" / "rnn.safetensors")
    statement = (
        "from lightning_specdec import SpeculativeDecoder, audit, report\n"
        "from lightning_specdec.bench import run\n"
        "from lightning_specdec.cli import audit, bench, chat, decode, export, info, report, sweep\n"
        f"SpeculativeDecoder.from_checkpoint({path!r}).benchmark(max_new_tokens=2, repeats=1)"
    )
    loaded = loaded_by(statement)
    assert "lightning_specdec" in loaded and loaded.isdisjoint(
        {"lightning", "jsonargparse", "torchmetrics", "scipy"}
    )


def test_loading_a_checkpoint_does_not_load_the_compiler_of_torch() -> None:
    """It takes a second; building modules without memory loads it where initial weights are drawn."""
    path = str(Path(__file__).parent.parent / "checkpoints" / "rnn.safetensors")
    loaded = loaded_by(
        f"from lightning_specdec import checkpoints; checkpoints.load({path!r}).drafter", depth=2
    )
    assert "lightning_specdec.checkpoints" in loaded and "torch._dynamo" not in loaded


def test_every_public_name_is_where_the_package_says() -> None:
    for name in lightning_specdec.__all__:
        assert getattr(lightning_specdec, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lightning_specdec.nothing
