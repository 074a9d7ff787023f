"""Every notebook, from the top, in a fresh kernel: no error, no warning. Left out of the default run: -m notebook."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
@pytest.mark.filterwarnings("default")  # the runner's own warnings are not the notebook's
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_FIGURES", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(path.parent)}}).execute()
    noise = [o.text for c in notebook.cells if c.cell_type == "code" for o in c.outputs if o.get("name") == "stderr"]
    assert not noise, f"{path.name} wrote to standard error: {noise}"
