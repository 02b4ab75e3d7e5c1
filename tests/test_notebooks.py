"""The notebooks run from top to bottom and are stored with the outputs of such a run."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def verdicts(notebook: nbformat.NotebookNode) -> list[str]:
    """The first hypothesis of each table of explanations that the notebook prints.

    Numbers may differ from one processor to another; what they say may not.
    """
    first_rows = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            rows = re.findall(r"^  (\w+) +\d+%", output.get("text", ""), re.MULTILINE)
            first_rows += rows[:1]
    return first_rows


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


# The kernel's own start-up opens an event loop that warns as it closes; nothing of ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_comes_to_the_stored_verdicts(path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    fresh = nbformat.read(path, as_version=4)
    NotebookClient(fresh, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    for cell in stored.cells:
        if cell.cell_type == "code":
            assert cell.outputs or cell.execution_count
            assert not any(output.output_type == "error" for output in cell.outputs)
    assert verdicts(fresh) == verdicts(stored) != []
