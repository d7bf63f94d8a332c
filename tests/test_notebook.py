"""The notebooks run from their first cell to their last, on fewer prompts, and what is committed is such a run."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "notebooks").glob("*.ipynb"))
FEWER = {
    "acceptance_study": "NUM_TEXTS, NUM_NEW, NUM_DRAWS, REPEATS = 3, 24, 4, 2",
}
"""What stands in the place of the cell that is tagged "parameters"."""
LARGEST = 300_000


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for cell in code(notebook) for output in cell.outputs)


def failures(notebook: nbformat.NotebookNode) -> list[str]:
    """What a reader should not see: errors, and whatever went to stderr."""
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    errors = [output.evalue for output in outputs if output.output_type == "error"]
    return errors + [output.text for output in outputs if output.get("name") == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_finds_what_it_says(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # its warning is about a debugger that nobody uses
    notebook = read(path)
    (parameters,) = (cell for cell in code(notebook) if "parameters" in cell.metadata.get("tags", []))
    names = set(re.findall(r"^(\w+) =", parameters.source, flags=re.MULTILINE))
    assert names == set(re.findall(r"[A-Z_]+", FEWER[path.stem]))
    parameters.source = FEWER[path.stem]
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert failures(notebook) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_a_run_from_top_to_bottom(path: Path) -> None:
    notebook = read(path)
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    assert failures(notebook) == []
    assert path.stat().st_size < LARGEST
    for place in (Path(__file__).parent.parent, Path.home(), Path("/tmp")):
        assert f"{place}/" not in printed(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_file_that_a_notebook_points_to_is_there(path: Path) -> None:
    texts = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    links = re.findall(r"\]\(([^)#]+)", "\n".join(texts))
    assert links and [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_there_is_a_notebook() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(FEWER)
