"""The 93 features against PyRadiomics, against plain definitions, under turns, and with bad input."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, localcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polysite.data.case import Case
from polysite.data.files import Files
from polysite.data.prepare import Prepare
from polysite.errors import ConfigError, DataError
from polysite.radiomics import NAMES, Settings, comparable, extraction, features
from radiomics.volumes import PATCH, REAL_PATCH, Volume, ball, real, scan, smooth, volumes

REFERENCE = json.loads((Path(__file__).parent / "reference.json").read_text())
OPTIONS = {
    "binWidth": "bin_width",
    "binCount": "bin_count",
    "label": "label",
}
VOLUMES = volumes()


def asked(volume: Volume):
    """The volume and its options, as they are called here."""
    options = Settings(**{OPTIONS[k]: v for k, v in volume.options.items() if k in OPTIONS})
    return (volume.image, volume.mask), {"spacing": volume.spacing, "settings": options}


def agree(found, expected, relative=1e-6):
    for name in NAMES:
        assert found[name] == pytest.approx(expected[name], rel=relative, abs=1e-12, nan_ok=True), name


@pytest.mark.parametrize("name", VOLUMES)
def test_pyradiomics(name):
    arrays, options = asked(VOLUMES[name])
    found = features(*arrays, **options)
    assert tuple(found) == NAMES and {*NAMES} == {*REFERENCE[name]} and all(type(v) is float for v in found.values())
    agree(found, REFERENCE[name])


def test_many_at_once():
    cases = [asked(VOLUMES[name]) for name in ("textured noise", "2D", "thin sheet", "two values")] * 3
    alone = [features(*arrays, **options) for arrays, options in cases]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda case: features(*case[0], **case[1]), cases)) == alone


def test_pyradiomics_on_real_cases(shared):
    for name, volume in real(shared).items():
        arrays, options = asked(volume)
        agree(features(*arrays, **options), REFERENCE[name])
    files = Files(str(shared / "tcga_lgg"), exclude=("EZ",))
    agree_prepared(files.case_refs(0)["CS"][0].open(), REAL_PATCH, files.modality_names, "real: padded")


def agree_prepared(case, patch, modalities, name):
    """Features of the brain after the preparation of papers B and C; z-scores differ from MONAI's in their last bit."""
    prepare = Prepare(normalise="padded")
    image = prepare.apply(case, patch).image
    mask = prepare.brain(image, modalities)
    for modality, x in zip(modalities, image, strict=True):
        agree(features(x, mask, settings=Settings(bin_width=0.09)), REFERENCE[f"{name} {modality}"], 1e-5)


def test_pyradiomics_after_the_padded_preparation():
    case = Case("s", "c", scan(), np.zeros((1, *scan().shape[1:]), np.uint8))
    agree_prepared(case, PATCH, ("t1", "flair"), "padded:")


TEXTURE = {"image": smooth(np.random.default_rng(3), (9, 11, 13)), "mask": ball((9, 11, 13))}
BINS = Settings(bin_width=0.3)
EXPECTED = features(**TEXTURE, settings=BINS)


@settings(deadline=None, max_examples=12)
@given(
    st.permutations(range(3)),
    st.tuples(*[st.sampled_from([1, -1])] * 3),
    st.tuples(*[st.integers(0, 3)] * 6),
    st.integers(1, 5),
    st.booleans(),
)
def test_turns_padding_labels_and_threads_change_nothing(order, signs, rim, threads, fortran):
    image, mask = (np.transpose(a, order)[tuple(slice(None, None, s) for s in signs)] for a in TEXTURE.values())
    rims = np.reshape(rim, (3, 2)).tolist()
    image, mask = np.pad(image, rims, constant_values=np.nan), np.pad(mask * 7, rims, constant_values=3)
    image, mask = (np.asfortranarray(a) if fortran else a for a in (image, mask))
    image.setflags(write=False)
    mask.setflags(write=False)
    found = features(image, mask, settings=Settings(bin_width=0.3, label=7), threads=threads)
    agree(found, EXPECTED, 1e-10)


CC359 = Settings(bin_width=0.15, bin_range=(-1.01, 10.81))  # paper C, appendix C


def test_bins_of_a_whole_dataset():
    """Levels by NumPy: those of the edges between the dataset's smallest and largest value."""
    noise, mask = 1 + 2 * smooth(np.random.default_rng(6), (12, 13, 14)), ball((12, 13, 14))
    edges = np.arange(-1.05, 10.81, 0.15)
    levels = np.clip(np.digitize(noise, edges), 1, len(edges))
    assert noise.min() < -1.05 and noise.max() < 9 and levels[mask > 0].min() == 1
    found = features(noise, mask, settings=CC359)
    # whole numbers in bins of width 1, with a voxel of level 1 so that levels keep their numbers
    expected = features(levels, mask, settings=Settings(bin_width=1))
    for name in NAMES:
        if not name.startswith("firstorder") or name.endswith(("Entropy", "Uniformity")):
            assert found[name] == pytest.approx(expected[name], rel=1e-9), name
    assert found["firstorder_Minimum"] == noise[mask > 0].min()
    # the level of a grey value does not depend on the image: without its darkest voxels, the others keep theirs
    bright = (mask * (noise > 0.65)).astype(np.uint8)
    by_image, by_dataset = (features(noise, bright, settings=s) for s in (Settings(bin_width=0.15), CC359))
    moved = by_dataset["glcm_JointAverage"] - by_image["glcm_JointAverage"]
    assert moved == pytest.approx(np.digitize(0.65, edges) - 1, abs=1e-9)
    above = features(noise + 100, mask, settings=CC359)  # everything in the last bin
    assert above["firstorder_Entropy"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("room", [1, 1 << 17])
def test_little_room(monkeypatch, room):
    """Directions one after another, or a few at a time, give the same."""
    monkeypatch.setattr(extraction, "MAX_TABLE_BYTES", room)
    assert features(**TEXTURE, settings=BINS, threads=2) == EXPECTED


def test_a_flat_region_has_no_skewness():
    """The mean of many times 0.1 is not 0.1: PyRadiomics gives such a region a kurtosis of 1."""
    found = features(np.full((7, 7, 7), 0.1), np.ones((7, 7, 7), np.uint8))
    assert [found[f"firstorder_{n}"] for n in ("Skewness", "Kurtosis", "Variance", "Range")] == [0, 0, 0, 0]


@pytest.mark.parametrize("offset", [0.0, -1e5, 1e10])
def test_an_offset_does_not_blur_skewness(offset):
    """Against a hundred digits, but for the last rounding."""
    image = np.random.default_rng(1).gamma(2.0, 10.0, (17, 19, 23)) + offset
    found = features(image, np.ones(image.shape, np.uint8), settings=Settings(bin_count=32))
    with localcontext(prec=100):
        exact = [Decimal(float(v)) for v in image.ravel()]
        mean = sum(exact) / len(exact)
        second, third, fourth = (sum((v - mean) ** k for v in exact) / len(exact) for k in (2, 3, 4))
        skewness, kurtosis = float(third / second ** Decimal("1.5")), float(fourth / second**2)
    assert found["firstorder_Skewness"] == pytest.approx(skewness, rel=1e-12)
    assert found["firstorder_Kurtosis"] == pytest.approx(kurtosis, rel=1e-12)


CUBE = np.arange(27.0).reshape(3, 3, 3)
HOLED = np.where(CUBE == 13, np.nan, CUBE)
ONE, ALL = (CUBE == 4).astype(np.uint8), np.ones((3, 3, 3), np.uint8)
BAD = {
    "empty mask": (CUBE, 0 * ALL, {}, "no voxel of label 1"),
    "another label": (CUBE, ALL, {"settings": Settings(label=2)}, "no voxel of label 2"),
    "one voxel": (CUBE, ONE, {}, "one voxel of label 1"),
    "NaN": (HOLED, ALL, {}, "NaN or infinity"),
    "infinity": (np.where(CUBE == 13, np.inf, CUBE), ALL, {}, "NaN or infinity"),
    "complex": (CUBE + 1j, ALL, {}, "complex128"),
    "shapes": (CUBE, ALL[:2], {}, r"\(3, 3, 3\), the mask \(2, 3, 3\)"),
    "four axes": (CUBE[None], ALL[None], {}, "two or three axes"),
    "two sizes of voxels": (CUBE, ALL, {"spacing": (1, 1)}, "a positive size for each"),
    "no size": (CUBE, ALL, {"spacing": (1, 1, 0)}, "a positive size for each"),
    "size of NaN": (CUBE, ALL, {"spacing": (1, 1, math.nan)}, "a positive size for each"),
}
THIN = Settings(bin_width=1e-7)
BAD_SETTINGS = {
    "absurd width": (lambda: features(CUBE, ALL, settings=THIN), "more than 4096 bins; take a width near 0.26"),
    "no width": (lambda: Settings(bin_width=0), "give a"),
    "width of NaN": (lambda: Settings(bin_width=math.nan), "give a"),
    "no bin": (lambda: Settings(bin_count=0), "give a"),
    "too many bins": (lambda: Settings(bin_count=10**7), "give a"),
    "turned range": (lambda: Settings(bin_range=(3.0, 1.0)), "give a"),
    "half a range": (lambda: Settings(bin_range=(1.0,)), "give a"),
    "endless range": (lambda: Settings(bin_range=(0.0, math.inf)), "give a"),
    "range and count": (lambda: Settings(bin_range=(0.0, 1.0), bin_count=5), "give a"),
}


@pytest.mark.parametrize(("image", "mask", "options", "words"), BAD.values(), ids=BAD.keys())
def test_refused(image, mask, options, words):
    with pytest.raises(DataError, match=words):
        features(image, mask, **options)


@pytest.mark.parametrize(("use", "words"), BAD_SETTINGS.values(), ids=BAD_SETTINGS.keys())
def test_refused_settings(use, words):
    with pytest.raises(ConfigError, match=words):
        use()


def test_a_mean_that_is_rounding_and_what_is_undefined_do_not_set_cases_apart():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3, 2 * len(NAMES))) + 5
    mean, size = (NAMES.index(f"firstorder_{n}") for n in ("Mean", "RootMeanSquared"))
    rows[:, size], rows[0, mean], rows[1, mean] = 1.0, 3e-8, 0.01
    rows[2, 7] = np.nan
    found = comparable(rows)
    assert found[0, mean] == 0 and found[1, mean] == 0.01 and found[2, 7] == 0
    rows[0, mean] = rows[2, 7] = 0
    assert np.array_equal(found, rows)
