"""The notebooks run from top to bottom and are stored with the outputs of such a run."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What each code cell printed, without the pictures."""
    return [
        "".join(output.text for output in cell.outputs if output.output_type == "stream")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


# The kernel's own start-up opens an event loop that warns as it closes; nothing of ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_says_what_is_stored(path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    fresh = nbformat.read(path, as_version=4)
    NotebookClient(fresh, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert all(
        cell.outputs or cell.execution_count for cell in stored.cells if cell.cell_type == "code"
    )
    assert printed(fresh) == printed(stored)
