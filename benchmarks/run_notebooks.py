"""Run the notebooks of docs/notebooks again, in place; needs `pip install nbclient ipykernel`."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"


def main() -> None:
    """Run all of them; what they show is kept, charts as drawings, but no progress on stderr."""
    os.environ["TQDM_DISABLE"] = "1"
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        first = nbformat.v4.new_code_cell("import altair; _ = altair.renderers.enable('svg')")
        notebook.cells.insert(0, first)
        NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
        notebook.cells.remove(first)
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
