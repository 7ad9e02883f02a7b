"""Every notebook runs from top to bottom, and is a file that Jupyter opens."""

import json
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))
TINY = {"CASES": 5, "ROUNDS": 1, "STRATEGIES": ("fedavg",)}  # for what the cell of parameters sets
OUTPUT_KEYS = {
    "stream": {"name", "output_type", "text"},
    "execute_result": {"data", "execution_count", "metadata", "output_type"},
}


def cells(path, kind="code"):
    return [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == kind]


@pytest.mark.release
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    names, tiny = {"__name__": "__main__"}, 0
    try:
        for k, cell in enumerate(cells(path)):
            exec(compile("".join(cell["source"]), f"{path.name}, cell {k}", "exec"), names)
            if "parameters" in cell["metadata"].get("tags", ()):
                tiny += len(TINY.keys() & names.keys())
                names.update({name: value for name, value in TINY.items() if name in names})
    finally:
        sys.modules.pop("my_lab", None)  # written by a notebook into a folder that is gone
    assert tiny >= 2
    assert list(tmp_path.rglob("result.json"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_format_of_jupyter(path):
    """The parts of the format 4.5 that Jupyter insists on."""
    book = json.loads(path.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5) and book["metadata"]["kernelspec"]["name"] == "python3"
    ids = [c["id"] for c in book["cells"]]
    assert len(set(ids)) == len(ids) and all(0 < len(i) <= 64 and i.replace("-", "").isalnum() for i in ids)
    for cell in book["cells"]:
        assert isinstance(cell["metadata"], dict) and all(isinstance(line, str) for line in cell["source"])
        assert cell["cell_type"] in ("code", "markdown") and ("outputs" in cell) == (cell["cell_type"] == "code")
        for output in cell.get("outputs", ()):
            assert output.keys() == OUTPUT_KEYS[output["output_type"]]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_shows_was_computed_without_an_error(path):
    assert any(c["outputs"] for c in cells(path))


def test_there_are_four():
    assert {p.stem for p in NOTEBOOKS} == {"first_federation", "own_data", "own_algorithm", "assess_and_advise"}
