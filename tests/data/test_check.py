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


def array(tree, name):
    return np.asarray(nibabel.load(tree / CASE / f"{name}.nii.gz").dataobj).copy()


def rewrite(name, change, affine=None):
    def damage(tree):
        save(tree / CASE / f"{name}.nii.gz", change(array(tree, name)), affine)

    return damage


def with_nan(a):
    a = a.astype(np.float32)
    a[0, 0, 0] = np.nan
    return a


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
    "shape": (
        rewrite("t1", lambda a: a[1:]),
        "error",
        "t1.nii.gz has the shape (7, 9, 10), flair.nii.gz has (8, 9, 10)",
    ),
    "label shape": (rewrite("seg", lambda a: a[1:]), "error", "seg.nii.gz has the shape"),
    "affine": (rewrite("t1", lambda a: a, np.diag([1.02, 1, 1, 1.0])), "error", "lie up to 0.14 voxels apart"),
    "NaN": (rewrite("t1", with_nan), "error", "t1.nii.gz: 1 voxels are NaN or infinite"),
    "label NaN": (rewrite("seg", with_nan), "error", "seg.nii.gz: 1 voxels are NaN or infinite"),
    "constant": (rewrite("t1", lambda a: 0 * a + 5), "error", "t1.nii.gz: every voxel is 5"),
    "four dimensions": (rewrite("t1", lambda a: np.stack([a, a], -1)), "error", "has 2 channels"),
    "label undeclared": (rewrite("seg", put(7)), "error", "seg.nii.gz: the values [7] are not declared"),
    "label fraction": (rewrite("seg", put(0.5, np.float32)), "error", "label values such as 0.5 are not whole"),
    "label empty": (rewrite("seg", lambda a: 0 * a), "error", "seg.nii.gz: nothing is labelled"),
    "copied modality": (copy(f"{CASE}/flair.nii.gz", f"{CASE}/t1.nii.gz"), "warning", "t1.nii.gz is a copy of flair"),
}


@pytest.mark.parametrize(("damage", "kind", "says"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_each_problem_is_found_and_nothing_else(tree, damage, kind, says):
    files = Files(path=str(tree), labels={"L": (1,)})
    assert check(files).problems == []
    damage(tree)
    found = check(Files(path=str(tree), labels={"L": (1,)})).problems
    assert [(p.site, p.case, p.kind) for p in found] == [("north", "north1", kind)], found
    assert says in found[0].what and "\n" not in found[0].what


def test_a_patient_in_two_hospitals_is_found(tree):
    copy(f"{CASE}/flair.nii.gz", "south/south2/flair.nii.gz")(tree)
    (problem,) = check(Files(path=str(tree), labels={"L": (1,)})).problems
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
        (problem,) = check(Files(path=str(tree), labels={"L": (1,)})).problems
        assert problem.kind == kind and says in problem.what


def test_what_is_allowed_is_a_warning(tree):
    (tree / CASE / "t1.nii.gz").unlink()
    rewrite("seg", lambda a: 0 * a)(tree)
    files = Files(path=str(tree), labels={"L": (1,)}, allow=("missing", "empty"))
    assert [p.kind for p in check(files).problems] == ["warning", "warning"]


def test_the_command_shows_a_table_a_line_a_problem_and_an_exit_code(tree):
    def run(*words):
        return CliRunner().invoke(app, ["data", "check", str(tree), "--set", "data.labels={L=[1]}", *words])

    sound = run()
    assert sound.exit_code == 0 and "6 cases, 0 errors, 0 warnings: fit to train on" in sound.output
    copy(f"{CASE}/flair.nii.gz", f"{CASE}/t1.nii.gz")(tree)
    assert run().exit_code == 0 and run("--strict").exit_code == 1
    rewrite("seg", put(7))(tree)
    bad = run()
    assert bad.exit_code == 1 and "not fit to train on" in bad.output
    lines = [line for line in bad.output.splitlines() if line.startswith(("error", "warning"))]
    assert len(lines) == 2 and all("north · north1" in line for line in lines)
    report = json.loads(run("--json").stdout)
    assert report["ok"] is False and {p["kind"] for p in report["problems"]} == {"error", "warning"}
    assert [(s["site"], s["cases"], s["errors"]) for s in report["sites"]] == [("north", 3, 1), ("south", 3, 0)]
    assert report["sites"][1]["shape"] == [[8, 8], [9, 9], [10, 10]]


def test_the_flair_copies_of_the_real_hospitals_are_reported(shared):
    report = check(Files(path=str(shared / "tcga_lgg"), labels={"tumour": (1,)}))
    assert [(s["site"], s["cases"]) for s in report.sites()] == [
        ("CS", 14),
        ("DU", 14),
        ("EZ", 1),
        ("FG", 12),
        ("HT", 14),
    ]
    listed = (shared / "tcga_lgg" / "manifest.csv").read_text().splitlines()[1:]
    known = {(c.split(",")[1], m) for c in listed for m, k in (("pre", 6), ("post", 7)) if c.split(",")[k] == "1"}
    copies = [p for p in report.problems if "is a copy of flair" in p.what]
    found = {(p.case, p.what.split(", so ")[1].split()[0]) for p in copies}
    assert found == known and len(known) == 6


def test_a_stray_file_is_one_line(tree):
    copy(f"{CASE}/flair.nii.gz", f"{CASE}/flair (copy).nii.gz")(tree)
    found = check(Files(path=str(tree), labels={"L": (1,)})).problems
    says = [p.what for p in found if p.kind == "error"]
    assert len(says) == 1 and says[0].startswith("only 1 of 6 cases have 'flair (copy)' (north/north1/flair (copy)")


def test_amounts_are_said_in_the_unit_of_the_files(tree):
    report = check(Files(path=str(tree), labels={"L": (1,)}))
    assert all(s["labels"]["L"].endswith(" voxels") and s["unit"] == "(unit unknown)" for s in report.sites())
    for file in tree.rglob("*.nii.gz"):
        image = nibabel.load(file)
        image.header.set_xyzt_units("mm")
        nibabel.save(nibabel.Nifti1Image(np.asarray(image.dataobj), image.affine, image.header), file)
    (first, *_) = check(Files(path=str(tree), labels={"L": (1,)})).sites()
    voxels = np.median([np.asarray(nibabel.load(f).dataobj).sum() for f in (tree / "north").rglob("seg.nii.gz")])
    assert first["labels"]["L"] == f"{voxels / 1000:.3g} ml" and first["unit"] == "mm"


def test_cases_of_a_site_with_the_same_problem_are_one_line(tree):
    for case in range(3):
        save(tree / f"north/north{case}/seg.nii.gz", np.pad(np.full((4, 5, 6), 7, np.uint8), 2))
        save(tree / f"south/south{case}/seg.nii.gz", np.pad(np.ones((4, 5, 6), np.uint8), 2))
    command = ["data", "check", str(tree), "--set", 'data.labels={"lesion"=[1]}']
    shown = CliRunner().invoke(app, command)
    lines = [line for line in shown.stdout.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and "3 errors" in shown.stdout and shown.exit_code == 1
    assert lines[0].startswith("error 3 cases of north (north0, north1, ...): label: the values [7] are not declared")
    assert "--all lists every case" in shown.stdout
    whole = CliRunner().invoke(app, [*command, "--all"])
    assert sum(line.startswith("error north · north") for line in whole.stdout.splitlines()) == 3
    problems = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["problems"]
    assert len(problems) == 3 and problems[0].keys() == {"site", "case", "kind", "what"}


def test_a_mask_of_other_values_names_the_remedy(tree):
    save(tree / "north/north1/seg.nii.gz", np.pad(np.full((4, 5, 6), 255, np.uint8), 2))
    report = check(Files(str(tree), labels={"vessel": (1,)}))
    assert "if 1 and 255 mean the same, declare vessel=1,255" in report.errors[0].what
