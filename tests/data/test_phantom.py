"""The phantom federation: deterministic, anatomically ordered, and different where it says so."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import ndimage

from polysite.data.phantom import LABELS, MODALITIES, Hospital, draw, four_hospitals, three_clinics
from polysite.data.prepare import Prepare
from polysite.data.sources import Phantom, PhantomClasses
from polysite.errors import ConfigError

SHAPE = (32, 32, 32)
PLAIN = Hospital(low_grade=0.0)


def patients(hospital, n=8, seed=0, shape=SHAPE, site="s"):
    return [draw(hospital, site=site, index=i, seed=seed, shape=shape) for i in range(n)]


def test_the_same_seed_site_and_index_are_the_same_patient():
    first, again = patients(PLAIN, 2), patients(PLAIN, 2)
    assert all(
        a.image.tobytes() == b.image.tobytes() and a.label.tobytes() == b.label.tobytes()
        for a, b in zip(first, again, strict=True)
    )
    others = [patients(PLAIN, 1, seed=1)[0], patients(PLAIN, 1, site="t")[0], first[1]]
    assert all(o.image.tobytes() != first[0].image.tobytes() for o in others)


@pytest.mark.parametrize("shape", [(24, 24, 24), (32, 40, 28), (64, 64, 64)])
def test_labels_are_nested_and_air_is_zero(shape):
    for case in [c for name, h in four_hospitals().items() for c in patients(h, 3, shape=shape, site=name)]:
        whole, core, enhancing = case.label.astype(bool)
        assert case.image.shape == (len(MODALITIES), *shape) and case.label.shape == (len(LABELS), *shape)
        assert case.image.dtype == np.float32 and np.isfinite(case.image).all() and (case.image >= 0).all()
        assert whole.any() and not (core & ~whole).any() and not (enhancing & ~core).any()
        assert (case.image[:, 0, 0, 0] == 0).all() and (case.image[:, whole] > 0).all()


def test_a_patient_can_be_scanned_again_elsewhere():
    here = patients(PLAIN, 3)
    there = patients(replace(PLAIN, scanner=3, contrast=0.8, gamma=0.7, thickness=3.0, noise=0.1), 3)
    for a, b in zip(here, there, strict=True):
        assert (a.label == b.label).all() and not np.allclose(a.image, b.image)


def volume(hospital, label=0):
    return np.mean([c.label[label].sum() for c in patients(hospital, 12)])


def inside(hospital, f):
    """Mean over patients of a statistic of the z-scored images."""
    return np.mean([f(Prepare().apply(c, SHAPE).image) for c in patients(hospital, 6)])


def roughness(axis):
    return lambda image: np.abs(np.diff(image, axis=axis)).mean()


def test_hospitals_differ_in_the_ways_they_say():
    assert volume(replace(PLAIN, tumour=1.3)) > 1.4 * volume(PLAIN)
    assert volume(replace(PLAIN, low_grade=1.0), label=2) < 0.4 * volume(PLAIN, label=2)
    assert inside(replace(PLAIN, noise=0.2), roughness(1)) > 1.1 * inside(PLAIN, roughness(1))
    assert inside(replace(PLAIN, thickness=4.0), roughness(3)) < 0.8 * inside(PLAIN, roughness(3))
    assert inside(replace(PLAIN, thickness=4.0), roughness(1)) > 0.8 * inside(PLAIN, roughness(1))
    missing = patients(replace(PLAIN, missing=("t1ce",)), 2)
    assert all((c.image[1] == 0).all() and c.image[0].any() for c in missing)
    groups = {c.group for c in patients(replace(PLAIN, low_grade=0.5), 12)}
    assert groups == {"low", "high"}


@pytest.mark.parametrize("setting", ["contrast", "gamma", "bias"])
def test_scanners_change_the_shades_and_not_only_their_scale(setting):
    other = replace(PLAIN, scanner=2, **{setting: {"contrast": 0.8, "gamma": 2.5, "bias": 1.0}[setting]})
    for a, b in zip(patients(PLAIN, 3), patients(other, 3), strict=True):
        head = a.image[0] > 0
        assert np.corrcoef(a.image[:, head].ravel(), b.image[:, head].ravel())[0, 1] < 0.97


def test_the_federation_has_four_hospitals_of_different_size():
    sites = Phantom(shape=(24, 24, 24), sites=four_hospitals(6)).case_refs(0)
    assert len(sites) == 4 and len({len(c) for c in sites.values()}) > 1
    assert len({c.name for cases in sites.values() for c in cases}) == sum(map(len, sites.values()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"cases": -1},
        {"gamma": 0},
        {"missing": ("x",)},
        {"missing": MODALITIES},
        {"low_grade": 2},
        {"healthy": -0.1},
        {"thickness": 0.5},
        {"noise": float("nan")},
    ],
)
def test_impossible_hospitals_are_refused(wrong):
    with pytest.raises(ConfigError):
        Hospital(**wrong)


def test_some_patients_are_healthy_and_the_others_as_they_were():
    """A share of healthy patients takes tumours away and moves nothing else."""
    ill, mixed = patients(replace(PLAIN, low_grade=0.3), 12), patients(replace(PLAIN, low_grade=0.3, healthy=0.4), 12)
    healthy = [c.group == "healthy" for c in mixed]
    assert 0 < sum(healthy) < 12 and {c.group for c in mixed} == {"healthy", "low", "high"}
    for a, b, well in zip(ill, mixed, healthy, strict=True):
        assert b.label.any() != well and (well or a.image.tobytes() == b.image.tobytes())
        changed = (a.image != b.image).any(0)
        near = ndimage.binary_dilation(a.label[0], iterations=5)  # as far as a scanner blurs
        assert not (changed & ~near).any() and changed.any() == well


def test_hospitals_may_outline_wider_or_narrower():
    """The scans are the same; the outlines move by whole voxels, stay nested and leave the head at no place."""
    true, wide, narrow = (patients(replace(PLAIN, margin=m), 4) for m in (0, 2, -1))
    for case, wider, narrower in zip(true, wide, narrow, strict=True):
        assert case.image.tobytes() == wider.image.tobytes() == narrower.image.tobytes()
        for label, more, less in zip(case.label, wider.label, narrower.label, strict=True):
            assert (ndimage.binary_dilation(label, iterations=2) >= more.astype(bool)).all()
            assert (less == ndimage.binary_erosion(label)).all() and less.sum() < label.sum() < more.sum()
        assert (wider.label[0] >= wider.label[1]).all() and (wider.label[1] >= wider.label[2]).all()
        assert (wider.image[:, wider.label[0] == 1] > 0).all()


def test_outlines_may_depend_on_the_scanner():
    narrow, wide = (patients(replace(PLAIN, second=7, margin=m), 4) for m in (-1, 2))
    both = patients(replace(PLAIN, second=7, margin=-1, second_margin=2), 4)
    for k, case in enumerate(both):
        assert case.label.tobytes() == (wide if k % 2 else narrow)[k].label.tobytes()


@pytest.mark.parametrize("flat", [True, False])
def test_phantoms_can_be_classified(flat):
    """The same heads as those that are segmented: whole, or the slice where the tumour is largest."""
    hospitals = {"a": Hospital(cases=9, healthy=0.4, low_grade=0.3), "b": Hospital(cases=3, low_grade=0.5)}
    source = PhantomClasses(shape=SHAPE, flat=flat, sites=hospitals)
    assert source.label_names == ("healthy", "low", "high") and (source.task, source.dims) == (
        "classification",
        2 + (not flat),
    )
    volumes = Phantom(shape=SHAPE, sites=hospitals).case_refs(0)["a"]
    for p, other in zip(source.case_refs(0)["a"], volumes, strict=True):
        case, volume = p.open(), other.open()
        assert case.image.ndim == len(case.spacing) + 1 == 1 + source.dims and case.image.dtype == np.float32
        assert p.name == other.name and p.category == p.group == case.group == volume.group
        assert case.label.tolist() == [float(n == p.category) for n in source.label_names] == list(p.volumes().values())
        if not flat:
            assert case.image.tobytes() == volume.image.tobytes()
        elif volume.label.any():
            assert (case.image == volume.image[..., volume.label[0].sum((0, 1)).argmax()]).all()
    assert {len(patients) for patients in source.case_refs(0).values()} == {9, 3}


def test_hospitals_that_are_classified_have_classes_of_their_own():
    shares = {
        name: [np.mean([p.category == g for p in found]) for g in ("healthy", "low", "high")]
        for name, found in PhantomClasses(sites=three_clinics(200)).case_refs(0).items()
    }
    assert [int(np.argmax(s)) for s in shares.values()] == [0, 1, 2]
    assert all(
        s == pytest.approx([0.25 + 0.25 * (k == n) for n in range(3)], abs=0.1) for k, s in enumerate(shares.values())
    )
    two = PhantomClasses(sites={"a": Hospital(), "b": Hospital(low_grade=0.9)})
    assert two.label_names == ("low", "high")
    with pytest.raises(ConfigError, match="all patients are of one class, 'high'"):
        PhantomClasses(sites={"a": PLAIN})
    with pytest.raises(ConfigError, match="three sides of at least 24 voxels"):
        PhantomClasses(shape=(32, 32))
    with pytest.raises(ConfigError, match="at least one hospital"):
        PhantomClasses(sites={})
    with pytest.raises(ConfigError, match=r"low_grade \+ healthy = 1.1: together they are more than all patients"):
        Hospital(low_grade=0.6, healthy=0.5)
