"""What data check finds: each problem by itself, then on real data."""

import json

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner

from polysite.cli import app
from polysite.data.check import check
from polysite.data.files import Files

SHAPE = (8, 9, 10)


def save(path, array, affine=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array, np.eye(4) if affine is None else affine), path)


@pytest.fixture
def tree(tmp_path):
    """Two sites of three sound cases."""
    rng = np.random.default_rng(0)
    for site in ("north", "south"):
        for k in range(3):
            folder = tmp_path / "data" / site / f"{site}{k}"
            for modality in ("flair", "t1"):
                save(folder / f"{modality}.nii.gz", rng.integers(0, 900, SHAPE).astype(np.int16))
            save(folder / "seg.nii.gz", (rng.random(SHAPE) < 0.2).astype(np.uint8))
    return tmp_path / "data"


CASE = "north/north1"


def checked(tree, **settings):
    return check(Files(path=str(tree), labels={"L": (1,)}, **settings))


def rewrite(name, change, affine=None):
    def damage(tree):
        array = np.asarray(nibabel.load(tree / CASE / f"{name}.nii.gz").dataobj).copy()
        save(tree / CASE / f"{name}.nii.gz", change(array), affine)

    return damage


def put(value, dtype=None):
    def change(a):
        a = a.astype(dtype or a.dtype)
        a[1, 1, 1] = value
        return a

    return change


def copy(source, target):
    return lambda tree: (tree / target).write_bytes((tree / source).read_bytes())


PROBLEMS = {
    "unreadable": (lambda t: (t / CASE / "t1.nii.gz").write_bytes(b"x" * 500), "error", "t1.nii.gz cannot be read"),
    "missing": (lambda t: (t / CASE / "t1.nii.gz").unlink(), "error", "t1 was not acquired; leave the case out"),
    "shape": (rewrite("t1", lambda a: a[1:]), "error", "t1.nii.gz has the shape (7, 9, 10), flair.nii.gz has (8, 9"),
    "label shape": (rewrite("seg", lambda a: a[1:]), "error", "seg.nii.gz has the shape"),
    "affine": (rewrite("t1", lambda a: a, np.diag([1.02, 1, 1, 1.0])), "error", "lie up to 0.14 voxels apart"),
    "NaN": (rewrite("t1", put(np.nan, np.float32)), "error", "t1.nii.gz: 1 voxels are NaN or infinite"),
    "label NaN": (rewrite("seg", put(np.nan, np.float32)), "error", "seg.nii.gz: 1 voxels are NaN or infinite"),
    "constant": (rewrite("t1", lambda a: 0 * a + 5), "error", "t1.nii.gz: every voxel is 5"),
    "four dimensions": (rewrite("t1", lambda a: np.stack([a, a], -1)), "error", "has 2 channels"),
    "label undeclared": (rewrite("seg", put(7)), "error", "seg.nii.gz: the values [7] are not declared"),
    "label of 255": (rewrite("seg", put(255)), "error", "if 1 and 255 mean the same, declare L=1,255"),
    "label fraction": (rewrite("seg", put(0.5, np.float32)), "error", "label values such as 0.5 are not whole"),
    "label empty": (rewrite("seg", lambda a: 0 * a), "error", "seg.nii.gz: nothing is labelled"),
    "copied modality": (copy(f"{CASE}/flair.nii.gz", f"{CASE}/t1.nii.gz"), "warning", "t1.nii.gz is a copy of flair"),
}


@pytest.mark.parametrize(("damage", "kind", "says"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_each_problem_is_found_and_nothing_else(tree, damage, kind, says):
    assert checked(tree).problems == []
    damage(tree)
    (found,) = checked(tree).problems
    assert (found.site, found.case, found.kind) == ("north", "north1", kind), found
    assert says in found.what and "\n" not in found.what
    allowed = {p.kind for p in checked(tree, allow=("missing", "empty")).problems}
    assert allowed == {"warning" if "was not acquired" in says or "nothing is labelled" in says else kind}


def test_a_patient_in_two_hospitals_is_found(tree):
    copy(f"{CASE}/flair.nii.gz", "south/south2/flair.nii.gz")(tree)
    (problem,) = checked(tree).problems
    assert problem.site == "south" and problem.kind == "error"
    assert "holds the same voxels as case 'north1' at site 'north', so one patient may train and test" in problem.what


def test_a_whole_case_on_another_grid(tree):
    """Implausible voxels and turned axes are no matter of one image against another."""
    for affine, kind, says in (
        (np.diag([0.001, 1, 1, 1.0]), "error", "a voxel of 0.001 x 1 x 1 mm is not plausible"),
        (np.diag([-1, -1, 1, 1.0]), "warning", "the axes point to LPS, mostly it is RAS; set prepare.orientation"),
    ):
        for name in ("flair", "t1", "seg"):
            rewrite(name, lambda a: a, affine)(tree)
        (problem,) = checked(tree).problems
        assert problem.kind == kind and says in problem.what


def run(tree, label, *words):
    return CliRunner().invoke(app, ["data", "check", str(tree), "--set", f"data.labels={{{label}=[1]}}", *words])


def test_the_command_shows_a_table_a_line_a_problem_and_an_exit_code(tree):
    sound = run(tree, "L")
    assert sound.exit_code == 0 and "6 cases, 0 errors, 0 warnings: fit to train on" in sound.output
    copy(f"{CASE}/flair.nii.gz", f"{CASE}/t1.nii.gz")(tree)
    assert run(tree, "L").exit_code == 0 and run(tree, "L", "--strict").exit_code == 1
    rewrite("seg", put(7))(tree)
    bad = run(tree, "L")
    assert bad.exit_code == 1 and "not fit to train on" in bad.output
    lines = [line for line in bad.output.splitlines() if line.startswith(("error", "warning"))]
    assert len(lines) == 2 and all("north · north1" in line for line in lines)
    report = json.loads(run(tree, "L", "--json").stdout)
    assert report["ok"] is False and {p["kind"] for p in report["problems"]} == {"error", "warning"}
    assert [(s["site"], s["cases"], s["errors"]) for s in report["sites"]] == [("north", 3, 1), ("south", 3, 0)]
    assert report["sites"][1]["shape"] == [[8, 8], [9, 9], [10, 10]]


def test_the_flair_copies_of_the_real_hospitals_are_reported(shared):
    report = check(Files(path=str(shared / "tcga_lgg"), labels={"tumour": (1,)}))
    assert {s["site"]: s["cases"] for s in report.sites()} == {"CS": 14, "DU": 14, "EZ": 1, "FG": 12, "HT": 14}
    listed = (shared / "tcga_lgg" / "manifest.csv").read_text().splitlines()[1:]
    known = {(c.split(",")[1], m) for c in listed for m, k in (("pre", 6), ("post", 7)) if c.split(",")[k] == "1"}
    copies = [p for p in report.problems if "is a copy of flair" in p.what]
    assert {(p.case, p.what.split(", so ")[1].split()[0]) for p in copies} == known and len(known) == 6


def test_cases_of_a_site_with_the_same_problem_are_one_line(tree):
    for site, value in (("north", 7), ("south", 1)):
        for case in range(3):
            save(tree / f"{site}/{site}{case}/seg.nii.gz", np.pad(np.full((4, 5, 6), value, np.uint8), 2))
    shown = run(tree, "lesion")
    (line,) = [line for line in shown.stdout.splitlines() if line.startswith("error")]
    assert line.startswith("error 3 cases of north (north0, north1, ...): label: the values [7] are not declared")
    assert "3 errors" in shown.stdout and shown.exit_code == 1 and "--all lists every case" in shown.stdout
    assert sum(line.startswith("error north · north") for line in run(tree, "lesion", "--all").stdout.splitlines()) == 3
