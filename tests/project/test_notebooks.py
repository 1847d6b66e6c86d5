"""The notebooks run from top to bottom, draw, and are committed with what they show."""

import json
import re
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS = (
    900  # A minute alone on two cores: only a notebook that never ends takes as long.
)
MACHINE_PATH = re.compile(
    r"/(home|root|tmp|Users|private|opt|mnt|work)/|site-packages|[A-Z]:\\\\?Users"
)
PNG = "image/png"

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of(path, kind):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == kind]


def outputs_of(cells):
    return [output for cell in cells for output in cell["outputs"]]


def image_count(outputs):
    return sum(PNG in output.get("data", {}) for output in outputs)


def text_of(output):
    """Return all of an output but its images, whose base64 may spell anything."""
    data = output.get("data", {})
    shown = {kind: value for kind, value in data.items() if kind != PNG}
    return json.dumps({**output, "data": shown})


@pytest.mark.slow
@every_notebook
def test_runs_and_draws(path, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    for needed in ("ipykernel", "matplotlib", "sklearn"):
        pytest.importorskip(needed)
    # Neither a person's own start-up files, nor a history to lock.
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    deadline = time.monotonic() + SECONDS
    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        timeout_func=lambda cell: max(1, int(deadline - time.monotonic())),
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute()  # Raises with the cell and its traceback where one fails.
    executed = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert image_count(outputs_of(executed)) >= 1


@every_notebook
def test_is_committed_as_run_from_top_to_bottom(path):
    code = cells_of(path, "code")
    counts = [cell["execution_count"] for cell in code]
    assert counts == list(range(1, len(code) + 1))
    assert image_count(outputs_of(code)) >= 1
    for output in outputs_of(code):
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr", text_of(output)


@every_notebook
def test_holds_nothing_of_the_machine_that_ran_it(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert not [cell["id"] for cell in notebook["cells"] if cell["metadata"]]
    sources = ["".join(cell["source"]) for cell in notebook["cells"]]
    texts = [text_of(output) for output in outputs_of(cells_of(path, "code"))]
    found = [text for text in sources + texts if MACHINE_PATH.search(text)]
    assert not found


@every_notebook
def test_links_to_files_that_exist(path):
    text = "\n".join("".join(cell["source"]) for cell in cells_of(path, "markdown"))
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", text)
    assert not [target for target in targets if not (FOLDER / target).exists()]
