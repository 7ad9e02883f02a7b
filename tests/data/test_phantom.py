"""The phantom federation: deterministic, anatomically ordered, and different where it says so."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import ndimage

from polysite.data.phantom import LABELS, MODALITIES, Hospital, draw, four_hospitals
from polysite.data.sources import Phantom, PhantomClasses
from polysite.errors import ConfigError

SHAPE = (32, 32, 32)
PLAIN = Hospital(low_grade=0.0)


def patients(hospital, n=8, seed=0, shape=SHAPE, site="s"):
    return [draw(hospital, site=site, index=i, seed=seed, shape=shape) for i in range(n)]


def bits(cases):
    return [(c.image.tobytes(), c.label.tobytes()) for c in cases]


def test_the_same_seed_site_and_index_are_the_same_patient():
    first, *others = patients(PLAIN, 2)
    assert bits(patients(PLAIN, 2)) == bits([first, *others])
    others += [patients(PLAIN, 1, seed=1)[0], patients(PLAIN, 1, site="t")[0]]
    assert all(o.image.tobytes() != first.image.tobytes() for o in others)


@pytest.mark.parametrize("shape", [(24, 24, 24), (32, 40, 28)])
def test_labels_are_nested_and_air_is_zero(shape):
    for case in [c for name, h in four_hospitals().items() for c in patients(h, 3, shape=shape, site=name)]:
        whole, core, enhancing = case.label.astype(bool)
        assert case.image.shape == (len(MODALITIES), *shape) and case.label.shape == (len(LABELS), *shape)
        assert case.image.dtype == np.float32 and np.isfinite(case.image).all() and (case.image >= 0).all()
        assert whole.any() and not (core & ~whole).any() and not (enhancing & ~core).any()
        assert (case.image[:, 0, 0, 0] == 0).all() and (case.image[:, whole] > 0).all()


def test_hospitals_differ_in_the_ways_they_say():
    def volume(label=0, **changes):
        return np.mean([c.label[label].sum() for c in patients(replace(PLAIN, **changes), 12)])

    assert volume(tumour=1.3) > 1.4 * volume() and volume(2, low_grade=1.0) < 0.4 * volume(2)
    missing = patients(replace(PLAIN, missing=("t1ce",)), 2)
    assert all((c.image[1] == 0).all() and c.image[0].any() for c in missing)
    assert {c.group for c in patients(replace(PLAIN, low_grade=0.5), 12)} == {"low", "high"}
    for setting in ({"contrast": 0.8}, {"gamma": 2.5}, {"bias": 1.0}, {"noise": 0.2}, {"thickness": 4.0}):
        for a, b in zip(patients(PLAIN, 2), patients(replace(PLAIN, scanner=2, **setting), 2), strict=True):
            head = a.image[0] > 0  # not only the scale of the shades differs
            assert np.corrcoef(a.image[:, head].ravel(), b.image[:, head].ravel())[0, 1] < 0.98
            assert (a.label == b.label).all()


@pytest.mark.parametrize(
    "wrong",
    [{"cases": -1}, {"gamma": 0}, {"missing": ("x",)}, {"missing": MODALITIES}, {"low_grade": 2}, {"healthy": -0.1},
     {"thickness": 0.5}, {"noise": float("nan")}, {"low_grade": 0.6, "healthy": 0.5}],
)  # fmt: skip
def test_impossible_hospitals_are_refused(wrong):
    with pytest.raises(ConfigError):
        Hospital(**wrong)


def test_some_patients_are_healthy_and_the_others_as_they_were():
    """A share of healthy patients takes tumours away and moves nothing else."""
    ill, mixed = (patients(replace(PLAIN, low_grade=0.3, healthy=h), 12) for h in (0.0, 0.4))
    assert {c.group for c in mixed} == {"healthy", "low", "high"}
    for a, b in zip(ill, mixed, strict=True):
        assert b.label.any() == (b.group != "healthy")
        changed = (a.image != b.image).any(0)
        near = ndimage.binary_dilation(a.label[0], iterations=5)  # as far as a scanner blurs
        assert not (changed & ~near).any() and changed.any() == (b.group == "healthy")
    with pytest.raises(ConfigError, match="all patients are of one class, 'high'"):
        PhantomClasses(sites={"a": PLAIN})


@pytest.mark.parametrize("flat", [True, False])
def test_phantoms_can_be_classified(flat):
    """The same heads as those that are segmented: whole, or the slice where the tumour is largest."""
    hospitals = {"a": Hospital(cases=9, healthy=0.4, low_grade=0.3), "b": Hospital(cases=3, low_grade=0.5)}
    source = PhantomClasses(shape=SHAPE, flat=flat, sites=hospitals)
    assert source.label_names == ("healthy", "low", "high")
    assert (source.task, source.dims) == ("classification", 2 + (not flat))
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
    assert PhantomClasses(sites={"a": Hospital(), "b": Hospital(low_grade=0.9)}).label_names == ("low", "high")
