"""The notebooks run from top to bottom in a fresh kernel of this Python, and lie in the repository without results."""

import os
import pathlib

import nbclient
import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIGURES = {"prefix_cache": 2, "quickstart": 4, "sharding": 4}


def read(path: pathlib.Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def executed(path: pathlib.Path, directory: pathlib.Path, monkeypatch) -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh kernel that works in an empty directory."""
    # A kernel named python3 may belong to another Python; this one is written by, and for, the running interpreter.
    write_kernel_spec(directory / "jupyter" / "kernels" / "this-python")
    work = directory / "work"
    work.mkdir()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "JUPYTER_PATH": directory / "jupyter", "JUPYTER_RUNTIME_DIR": directory / "runtime",
        "IPYTHONDIR": directory / "ipython", "MPLCONFIGDIR": directory / "matplotlib",
        "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    notebook = read(path)
    nbclient.NotebookClient(
        notebook, kernel_name="this-python", timeout=600, resources={"metadata": {"path": str(work)}}
    ).execute()
    assert not list(work.iterdir()), "the notebook leaves files behind"
    return notebook


def test_every_notebook_is_expected():
    assert {path.stem for path in NOTEBOOKS} == set(FIGURES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_shows_its_figures(path, tmp_path, monkeypatch):
    outputs = [output for cell in executed(path, tmp_path, monkeypatch).cells for output in cell.get("outputs", [])]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(figures) == FIGURES[path.stem]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_without_results_in_a_form_that_diffs_well(path):
    notebook = read(path)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.metadata == {}, cell.id
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, cell.id
            # A cell's id says what it shows, and the prose before it why.
            before = notebook.cells[notebook.cells.index(cell) - 1]
            assert (before.cell_type, before.id) == ("markdown", f"{cell.id}-intro")
    # Jupyter's own way of writing.
    assert path.read_text(encoding="utf-8") == nbformat.writes(notebook) + "\n"
    assert set(notebook.metadata) == {"kernelspec", "language_info"} and notebook.metadata.kernelspec.name == "python3"
