"""The notebooks run from the first cell to the last, as they lie in the repository: without outputs."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_outputs_are_stored(path):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
    assert "%pip install" in notebook.cells[1].source and "PREALLOCATE" in notebook.cells[1].source


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, monkeypatch):
    """On the real model, with fewer training steps than a reader takes."""
    monkeypatch.setenv("KVSPARSE_NOTEBOOK_STEPS", "6")
    monkeypatch.setitem(os.environ, "XLA_FLAGS", "")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=170, kernel_name="python3").execute(cwd=str(path.parent))
    errors = [out for cell in notebook.cells for out in cell.get("outputs", ()) if out.output_type == "error"]
    assert not errors
    assert any("image/png" in out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", ())) or (
        path.stem.startswith("5")
    )
