"""The notebooks run from their first cell to their last, on fewer prompts, and what is committed is such a run."""

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
"""What stands in the place of the cell that is tagged "parameters"; {models} holds tiny ones."""
LARGEST = 300_000


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def failures(notebook: nbformat.NotebookNode) -> list[str]:
    """Errors, and whatever went to stderr."""
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    return [
        str(output)
        for output in outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_finds_what_it_says(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    monkeypatch.setenv(
        "PYDEVD_DISABLE_FILE_VALIDATION", "1"
    )  # its warning is about a debugger that nobody uses
    notebook = nbformat.read(path, as_version=4)
    (parameters,) = (
        cell for cell in code(notebook) if "parameters" in cell.metadata.get("tags", [])
    )
    if path.stem == "transformers":
        for seed, name in enumerate(("target", "draft")):
            write_text_model(tmp_path / name, chat=True, seed=seed)
    parameters.source = FEWER[path.stem].format(models=str(tmp_path))
    NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    assert failures(notebook) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_a_run_from_top_to_bottom(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in code(notebook)] == list(
        range(1, len(code(notebook)) + 1)
    )
    assert failures(notebook) == []
    assert path.stat().st_size < LARGEST
