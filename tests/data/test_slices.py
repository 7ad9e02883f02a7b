"""Volumes that are cut into 2D cases: which slices, which way up, and that no patient is in two splits."""

from dataclasses import replace

import numpy as np
import pytest

import polysite as ps
from polysite.config import dump, parse
from polysite.data import files as reading
from polysite.data.case import Case, CaseRef
from polysite.data.federation import HideModalities, Iid
from polysite.data.phantom import write
from polysite.data.prepare import Prepare
from polysite.data.slices import Slices, volume_of
from polysite.errors import ConfigError, DataError
from polysite.study import build_sites, deal_cases, deal_volumes

PLAIN = Prepare(crop=False, normalise="none")
SITES = {name: ps.Hospital(cases=5, scanner=k) for k, name in enumerate(("east", "west"))}
STUDY = ps.Study(
    model=ps.UNet(filters=(2, 4, 4)),
    data=ps.Phantom(shape=(24, 24, 24), sites=SITES),
    slices=Slices("axial", labelled=True, most=3),
    train=ps.Train(patch=(16, 16), batch=4, device="cpu", augment="none"),
    run=ps.Plan(rounds=1),
)
RAS, LPS = np.eye(4), np.diag([-1.0, -1.0, 1.0, 1.0])
VALUES = np.arange(2 * 3 * 4, dtype=np.float32).reshape(1, 2, 3, 4)  # to the right, to the front, to the head


def volume(image=VALUES, affine=RAS, **facts):
    """A volume whose label is where the image is above 20."""
    label = (image[:1] > 20).astype(np.uint8)
    spacing = tuple(float(s) for s in np.abs(np.diag(affine))[:3])
    return CaseRef("s", "c", lambda: Case("s", "c", image.copy(), label, spacing, affine=affine), lambda: {}, **facts)


def cut(ref, settings, prepare=PLAIN, patch=(1, 1)):
    return [case.open() for case in settings.cut([ref], prepare, patch)[ref]]


@pytest.mark.parametrize(("axis", "at"), [("axial", "c/z000"), ("coronal", "c/y000"), ("sagittal", "c/x000")])
def test_slices_are_upright_however_the_volume_is_stored(axis, at):
    """Seen from the feet, the front and the left; the patient's left, or back, is on the right."""
    x = VALUES[0]
    wanted = {
        "axial": [x[::-1, ::-1, k].T for k in range(4)],
        "coronal": [x[::-1, k, ::-1].T for k in range(3)],
        "sagittal": [x[k, ::-1, ::-1].T for k in range(2)],
    }[axis]
    for ref in (volume(), volume(VALUES[:, ::-1, ::-1], LPS)):
        found = cut(ref, Slices(axis))
        assert found[0].name == at
        assert [case.image[0].tolist() for case in found] == [each.tolist() for each in wanted]
        assert all(case.label.tolist() == (case.image > 20).tolist() for case in found)


def test_the_voxel_size_of_a_slice_is_that_of_its_rows_and_columns():
    ref = volume(affine=np.diag([1.0, 2.0, 5.0, 1.0]))
    found = {axis: cut(ref, Slices(axis))[0].spacing for axis in ("axial", "coronal", "sagittal")}
    assert found == {"axial": (2.0, 1.0), "coronal": (5.0, 1.0), "sagittal": (5.0, 2.0)}


def test_volumes_are_prepared_before_they_are_cut():
    """The z-score is that of the volume, so a bright slice stays bright; slices are padded to the patch."""
    z_scores = Prepare(crop=False, normalise="all")
    found = cut(volume(), Slices("axial"), z_scores, (8, 8))
    assert {case.image.shape for case in found} == {(1, 8, 8)}
    means = [case.image[0, 2:5, 3:5].mean() for case in found]
    assert means == sorted(means) and sum(means) == pytest.approx(0, abs=1e-6)
    resampled = cut(volume(), Slices("axial"), replace(PLAIN, spacing=(0.5, 1, 1)))
    assert len(resampled) > len(found)  # slice, row, column
    hidden = volume(np.concatenate([VALUES + 1, VALUES + 2]), hidden=(1,))
    assert all(c.image[0].any() and not c.image[1].any() for c in cut(hidden, Slices("axial"), z_scores))
    classified = replace(volume(), read=lambda: Case("s", "c", VALUES, np.array([0, 1], np.uint8)))
    assert [c.label.tolist() for c in cut(classified, Slices("axial", most=2))] == [[0, 1]] * 2


def test_labelled_then_every_then_most():
    marks = [False, True, True, True, True, True, True, False]
    assert Slices("axial", labelled=True).chosen(marks) == [1, 2, 3, 4, 5, 6]
    assert Slices("axial", labelled=True, every=2).chosen(marks) == [1, 3, 5]
    assert Slices("axial", labelled=True, every=2, most=1).chosen(marks) == [3]
    assert Slices("axial", every=3).chosen(marks) == [0, 3, 6]
    assert Slices("axial", most=99).chosen(marks) == list(range(8))
    assert Slices("axial", labelled=True).chosen([False] * 3) == []


@pytest.mark.parametrize("federation", [STUDY.federation, Iid(2), HideModalities(1)], ids=lambda f: type(f).__name__)
def test_no_patient_is_in_two_splits(federation):
    study, where = replace(STUDY, federation=federation), {}
    volumes, cases = deal_volumes(study), deal_cases(study)
    for site, split, whole in ((s, k, v) for s, splits in volumes.items() for k, v in splits.items()):
        found = cases[site][split]
        assert {volume_of(c.name) for c in found} == {c.name for c in whole} and len(found) == 3 * len(whole)
        assert {(c.source, c.hidden) for c in found} == {(c.source, c.hidden) for c in whole}
        assert all(where.setdefault(c.source, split) == split for c in found)


def test_a_run_is_trained_evaluated_and_split_again(tmp_path):
    """A volume without a label is left out and named."""
    sick = ps.Phantom(shape=(24, 24, 24), sites={**SITES, "north": ps.Hospital(cases=6, healthy=0.4)})
    study = replace(STUDY, data=sick)
    healthy = {c.name for c in sick.case_refs(0)["north"] if not any(c.volumes().values())}
    run = ps.train(study, tmp_path / "run")
    assert {volume_of(name) for name in run.result.test["east"]} < {f"east-{k:03d}" for k in range(5)}
    assert len(run.result.test["east"]) == 3
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "east: 9 train, 3 validation, 3 test slices of 5 volumes" in log
    assert healthy and all(name in log for name in healthy) and "no slice with a label" in log
    rows = (tmp_path / "run" / "split.csv").read_text()
    assert len(rows.splitlines()) == 1 + 16 - len(healthy) and "/z" not in rows
    again = replace(study, split=ps.Split(file=str(tmp_path / "run" / "split.csv")))
    names = [[c.name for s in d.values() for k in s.values() for c in k] for d in map(deal_cases, (study, again))]
    assert names[0] == names[1] and parse(dump(study)) == study
    ps.evaluate(tmp_path / "run", "validation")
    north = ps.Phantom(shape=(24, 24, 24), sites={"north": ps.Hospital(cases=4, healthy=1.0, low_grade=0.0)})
    with pytest.raises(DataError, match=r"no volume has a slice to train on; set slices\.labelled = false"):
        deal_cases(replace(STUDY, data=north))


def test_a_volume_is_read_once_and_mapped_from_the_cache(tmp_path, cache, monkeypatch):
    write((case.open() for cases in STUDY.data.case_refs(0).values() for case in cases), tmp_path / "scans")
    labels = {"WT": (1, 2, 4), "TC": (1, 4), "ET": (4,)}
    tree, told = replace(STUDY, data=ps.Files(str(tmp_path / "scans"), labels=labels)), []
    volumes = [case for cases in tree.data.case_refs(0).values() for case in cases]
    tree.cut(volumes, lambda *given: told.append(given))
    assert told[0] == (1, 10, "east · east-000") and told[-1][:2] == (10, 10)
    first = deal_cases(tree)
    entries = sorted(cache.glob("*.safetensors"))
    assert len(entries) == 10  # volumes, not slices
    monkeypatch.setattr(reading, "open_case", lambda *given: pytest.fail("a file was read again"))
    sites, on_disk = (build_sites(replace(tree, train=replace(tree.train, cases=c))) for c in ("device", "disk"))
    assert sorted(cache.glob("*.safetensors")) == entries
    for name, site in sites.items():
        assert list(site.cases("train")) == [c.name for c in first[name]["train"]]
    name = sites["east"].cases("test")[0]
    for one, other in zip(sites["east"]._volumes[name], on_disk["east"]._volumes[name], strict=True):
        assert one.ndim == 3 and min(one.shape[1:]) >= 16 and one.equal(other)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"slices.axis": "axle"}, "must be one of"),
        ({"slices.every": "0"}, "slices.every = 0"),
        ({"slices.axis": "axial", "slices.most": "-1"}, "slices.most = -1"),
        ({"slices.most": "3"}, r"\[slices\] has no axis"),
        ({"slices.axis": "axial", "prepare.orientation": "RAS"}, "leave out prepare.orientation"),
        ({"slices.axis": "axial"}, r"3 sides for 2D slices; set it to \[32, 32\]"),
        ({"slices.axis": "axial", "train.patch": "[32, 32]", "prepare.spacing": "[1, 1]"}, "slice, row and column"),
        ({"slices.axis": "axial", "data.name": "phantom_classes", "model": "densenet_small"}, "the data are 2D"),
        (
            {"slices.axis": "axial", "slices.labelled": "true", "data": "{ name = 'phantom_classes', flat = false }",
             "model": "densenet_small"}, "these data have classes"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(given, why):
    with pytest.raises(ConfigError, match=why):
        parse("", given).check()
