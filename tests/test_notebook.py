"""The notebooks run from top to bottom, on fewer prompts, and are committed after such a run."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from tiny_models import write_text_model

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "notebooks").glob("*.ipynb"))
FEWER = {
    "acceptance_study": "NUM_TEXTS, NUM_NEW, NUM_DRAWS, REPEATS = 3, 12, 3, 2",
    "transformers": "MODEL, DRAFT, NUM_NEW = {models!r} + '/target', {models!r} + '/draft', 12",
}
"""Code that replaces the cell tagged "parameters". {models} is a directory of tiny models."""
MAX_BYTES = 300_000


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def failures(notebook: nbformat.NotebookNode) -> list[str]:
    """Errors, and everything that was printed to stderr."""
    failures = []
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                failures.append(str(output))
    return failures


def parameter_cell(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The one cell that is tagged "parameters"."""
    cells = []
    for cell in code_cells(notebook):
        if "parameters" in cell.metadata.get("tags", []):
            cells.append(cell)
    assert len(cells) == 1
    return cells[0]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_finds_what_it_says(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    # The kernel would warn about its debugger, which is not used.
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")

    if path.stem == "transformers":
        write_text_model(tmp_path / "target", chat=True, seed=0)
        write_text_model(tmp_path / "draft", chat=True, seed=1)
    notebook = nbformat.read(path, as_version=4)
    parameter_cell(notebook).source = FEWER[path.stem].format(models=str(tmp_path))

    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=600, resources=resources).execute()
    assert failures(notebook) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_a_run_from_top_to_bottom(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    assert failures(notebook) == []
    assert path.stat().st_size < MAX_BYTES
