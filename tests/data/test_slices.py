"""Volumes that are cut into 2D cases: which slices, which way up, and that no patient is in two splits."""

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import polysite as ps
from polysite.cli import app
from polysite.config import dump, parse
from polysite.costs.model import Cost
from polysite.data import files as reading
from polysite.data.case import Case, CaseRef
from polysite.data.federation import HideModalities, Iid
from polysite.data.phantom import write
from polysite.data.prepare import Prepare
from polysite.data.slices import Slices, volume_of
from polysite.errors import ConfigError, DataError
from polysite.study import build_sites, cost, deal_cases, deal_volumes

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
    assert {axis: cut(ref, Slices(axis))[0].spacing for axis in ("axial", "coronal", "sagittal")} == {
        "axial": (2.0, 1.0),
        "coronal": (5.0, 1.0),
        "sagittal": (5.0, 2.0),
    }


def test_volumes_are_prepared_before_they_are_cut():
    """The z-score is that of the volume, so a bright slice stays bright; slices are padded to the patch."""
    found = cut(volume(), Slices("axial"), Prepare(crop=False, normalise="all"), (8, 8))
    assert {case.image.shape for case in found} == {(1, 8, 8)}
    means = [case.image[0, 2:5, 3:5].mean() for case in found]
    assert means == sorted(means) and sum(means) == pytest.approx(0, abs=1e-6)
    resampled = cut(volume(), Slices("axial"), replace(PLAIN, spacing=(0.5, 1, 1)))
    assert len(resampled) > len(found)  # slice, row, column


def test_hidden_modalities_stay_hidden():
    image = np.concatenate([VALUES + 1, VALUES + 2])
    for case in cut(volume(image, hidden=(1,)), Slices("axial"), Prepare(crop=False, normalise="all")):
        assert case.image[0].any() and not case.image[1].any()


def test_labelled_then_every_then_most():
    marks = [False, True, True, True, True, True, True, False]
    assert Slices("axial", labelled=True).chosen(marks) == [1, 2, 3, 4, 5, 6]
    assert Slices("axial", labelled=True, every=2).chosen(marks) == [1, 3, 5]
    assert Slices("axial", labelled=True, every=2, most=1).chosen(marks) == [3]
    assert Slices("axial", every=3).chosen(marks) == [0, 3, 6]
    assert Slices("axial", most=99).chosen(marks) == list(range(8))
    assert Slices("axial", labelled=True).chosen([False] * 3) == []


@pytest.mark.parametrize("federation", [None, Iid(2), HideModalities(1)])
def test_no_patient_is_in_two_splits(federation):
    study = STUDY if federation is None else replace(STUDY, federation=federation)
    volumes, cases = deal_volumes(study), deal_cases(study)
    for site, splits in volumes.items():
        for split, whole in splits.items():
            assert {volume_of(c.name) for c in cases[site][split]} == {c.name for c in whole}
            assert {c.source for c in cases[site][split]} == {c.source for c in whole}
            assert len(cases[site][split]) == 3 * len(whole)
            assert {c.hidden for c in cases[site][split]} == {c.hidden for c in whole}
    where = {}
    for splits in cases.values():
        for split, found in splits.items():
            for case in found:
                assert where.setdefault(case.source, split) == split


def test_a_run_is_trained_evaluated_and_split_again(tmp_path):
    run = ps.train(STUDY, tmp_path / "run")
    assert {volume_of(name) for name in run.result.test["east"]} < {f"east-{k:03d}" for k in range(5)}
    assert len(run.result.test["east"]) == 3
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "east: 9 train, 3 validation, 3 test slices of 5 volumes" in log
    rows = (tmp_path / "run" / "split.csv").read_text().splitlines()
    assert len(rows) == 1 + 10 and "/z" not in "".join(rows)
    again = replace(STUDY, split=ps.Split(file=str(tmp_path / "run" / "split.csv")))
    names = [[c.name for s in d.values() for k in s.values() for c in k] for d in map(deal_cases, (STUDY, again))]
    assert names[0] == names[1]
    assert parse(dump(STUDY)) == STUDY
    ps.evaluate(tmp_path / "run", "validation")


@pytest.fixture
def tree(tmp_path):
    """A folder of phantoms, and the study of its slices."""
    refs = STUDY.data.case_refs(0)
    write((case.open() for cases in refs.values() for case in cases), tmp_path / "scans")
    labels = {"WT": (1, 2, 4), "TC": (1, 4), "ET": (4,)}
    return replace(STUDY, data=ps.Files(str(tmp_path / "scans"), labels=labels))


def test_a_volume_is_read_once_and_mapped_from_the_cache(tree, cache, monkeypatch):
    told = []
    volumes = [case for cases in tree.data.case_refs(0).values() for case in cases]
    tree.cut(volumes, lambda *given: told.append(given))
    assert told[0] == (1, 10, "east · east-000") and told[-1][:2] == (10, 10)
    first = deal_cases(tree)
    entries = sorted(cache.glob("*.safetensors"))
    assert len(entries) == 10  # volumes, not slices
    monkeypatch.setattr(reading, "open_case", lambda *given: pytest.fail("a file was read again"))
    sites = build_sites(tree, deal_cases(tree))
    assert sorted(cache.glob("*.safetensors")) == entries
    assert {s: list(site.cases("train")) for s, site in sites.items()} == {
        s: [c.name for c in splits["train"]] for s, splits in first.items()
    }
    on_disk = build_sites(replace(tree, train=replace(tree.train, cases="disk")))
    name = sites["east"].cases("test")[0]
    for one, other in zip(sites["east"]._volumes[name], on_disk["east"]._volumes[name], strict=True):
        assert one.ndim == 3 and min(one.shape[1:]) >= 16 and one.equal(other)


def test_a_check_counts_slices_and_a_preview_shows_them(tree, tmp_path):
    file = tmp_path / "study.toml"
    file.write_text(dump(tree))
    done = CliRunner().invoke(app, ["data", "check", str(file), "--json"])
    assert done.exit_code == 0, done.output
    assert "east: 15 slices of 5 volumes, 3 of each" in done.output
    done = CliRunner().invoke(app, ["data", "preview", str(file), "--out", str(tmp_path / "sheets"), "--cases", "2"])
    assert done.exit_code == 0 and (tmp_path / "sheets" / "east.png").is_file(), done.output


def test_volumes_without_a_label_are_left_out_and_named(tmp_path):
    sick = replace(STUDY, data=ps.Phantom(shape=(24, 24, 24), sites={"north": ps.Hospital(cases=6, healthy=0.4)}))
    healthy = {c.name for c in sick.data.case_refs(0)["north"] if not any(c.volumes().values())}
    assert healthy
    run = ps.train(replace(sick, run=ps.Plan(rounds=1)), tmp_path / "run", evaluate=False)
    log = (run.folder.path / "log.txt").read_text()
    assert all(name in log for name in healthy) and "no slice with a label" in log


def test_counted_volumes_have_as_many_slices_as_the_study_says():
    counted = parse("", {"data.name": "counted", "data.sizes": "{ a = 10, b = 20 }", "train.patch": "[16, 16]"})
    study = replace(counted, slices=Slices("axial", most=50))
    assert {s: len(splits["train"]) for s, splits in deal_cases(study).items()} == {"a": 300, "b": 600}
    assert isinstance(cost(replace(study, run=ps.Plan(rounds=1))), Cost)
    with pytest.raises(ConfigError, match=r"only counted.*slices\.most"):
        deal_cases(replace(study, slices=Slices("axial")))


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


def test_slices_of_a_classified_volume_have_its_class():
    study = replace(
        STUDY, slices=Slices("coronal", most=2), model=parse("", {"model": "densenet_small"}).model,
        data=parse("", {"data": "{ name = 'phantom_classes', flat = false, shape = [24, 24, 24] }"}).data,
    )  # fmt: skip
    case = next(c for splits in deal_cases(study).values() for c in splits["train"])
    assert case.open().image.ndim == 3 and case.open().label.ndim == 1 and "/y" in case.name


def test_no_slice_to_train_on_is_said():
    north = ps.Hospital(cases=4, healthy=1.0, low_grade=0.0)
    healthy = replace(STUDY, data=ps.Phantom(shape=(24, 24, 24), sites={"north": north}))
    with pytest.raises(DataError, match=r"no volume has a slice to train on; set slices\.labelled = false"):
        deal_cases(healthy)


def test_exclusive_classes_of_real_slices(shared, tmp_path):
    """Coronal slices of real hippocampi, with cross-entropy over background, anterior and posterior."""
    study = parse(
        "",
        {
            "data.name": "files", "data.path": str(shared / "msd_hippocampus"), "slices.axis": "coronal",
            "data.labels": "{ anterior = [1], posterior = [2] }",
            "slices.most": "2", "slices.labelled": "true", "train.patch": "[32, 32]", "train.exclusive": "true",
            "train.loss": "ce", "train.device": "cpu", "run.rounds": "1", "model.filters": "[4, 8, 8]",
        },
    )  # fmt: skip
    run = ps.train(study, tmp_path / "run", evaluate=False)
    (scores,) = run.result.test.values()
    assert set(next(iter(scores.values())).labels) == {"anterior", "posterior"}
    assert len(scores) == 2 * len({volume_of(name) for name in scores})
    (first,) = run.folder.records()
    assert 0 < next(iter(first.sites.values())).loss < 1.2  # about log 3 for a network that knows nothing
