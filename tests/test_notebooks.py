"""The notebooks run from the first cell to the last, as they lie in the repository: without outputs."""

import dataclasses
import shutil
from pathlib import Path

import jax
import nbformat
import pytest
from nbclient import NotebookClient

import kvsparse_jax as kvs

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_outputs_are_stored(path):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
    assert "%pip install" in notebook.cells[1].source and "PREALLOCATE" in notebook.cells[1].source


@pytest.fixture(scope="session")
def shallow(tmp_path_factory):
    """The real model's first four layers, which say nothing sensible, with its tokenizer."""
    lm = kvs.load("smollm2-135m", dtype="bfloat16")
    layers = jax.tree.map(lambda x: x[:4], lm.params["layers"])
    directory = dataclasses.replace(
        lm,
        config=dataclasses.replace(lm.config, layers=4),
        params={**lm.params, "layers": layers},
        hf_config=lm.hf_config | {"num_hidden_layers": 4},
        source=None,
    ).save(tmp_path_factory.mktemp("notebooks") / "model")
    for file in lm.source.iterdir():
        if not (directory / file.name).exists():
            shutil.copy(file, directory)
    return directory


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, monkeypatch, shallow):
    """The first on the real model, the others on a shallow one, with fewer training steps than a reader takes."""
    if path.stem.startswith("1"):
        monkeypatch.setenv("XLA_FLAGS", "")
    else:
        monkeypatch.setenv("KVSPARSE_NOTEBOOK_MODEL", str(shallow))
    monkeypatch.setenv("KVSPARSE_NOTEBOOK_STEPS", "6")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=170, kernel_name="python3").execute(cwd=str(path.parent))
    errors = [out for cell in notebook.cells for out in cell.get("outputs", ()) if out.output_type == "error"]
    assert not errors
    assert any("image/png" in out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", ())) or (
        path.stem.startswith("5")
    )
