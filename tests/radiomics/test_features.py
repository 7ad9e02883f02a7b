"""The 93 features against PyRadiomics, against plain definitions, under turns, and with bad input."""

import json
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, localcontext
from itertools import product
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
    "voxelArrayShift": "voxel_array_shift",
    "force2D": "force2D",
    "force2Ddimension": "force2D_dimension",
    "label": "label",
}
VOLUMES = volumes()


def asked(volume: Volume):
    """The volume and its options, as they are called here."""
    options = Settings(**{OPTIONS[k]: v for k, v in volume.options.items() if k in OPTIONS})
    return (volume.image, volume.mask), {"spacing": volume.spacing, "settings": options}


def agree(found, expected, relative=1e-6, absolute=1e-12):
    for name in NAMES:
        assert found[name] == pytest.approx(expected[name], rel=relative, abs=absolute, nan_ok=True), name


def test_names():
    families = Counter(name.split("_")[0] for name in NAMES)
    assert families == {"firstorder": 18, "glcm": 24, "gldm": 14, "glrlm": 16, "glszm": 16, "ngtdm": 5}
    assert all(set(found) == set(NAMES) for found in REFERENCE.values())


@pytest.mark.parametrize("name", VOLUMES)
def test_pyradiomics(name):
    arrays, options = asked(VOLUMES[name])
    found = features(*arrays, **options)
    assert tuple(found) == NAMES and all(type(v) is float for v in found.values())
    agree(found, REFERENCE[name])


def test_pyradiomics_on_real_cases(shared):
    for name, volume in real(shared).items():
        arrays, options = asked(volume)
        agree(features(*arrays, **options), REFERENCE[name])


def prepared_features(case, patch, modalities):
    """Modality -> features of the brain after the preparation of papers B and C."""
    prepare = Prepare(normalise="padded")
    image = prepare.apply(case, patch).image
    mask = prepare.brain(image, modalities)
    return {m: features(x, mask, settings=Settings(bin_width=0.09)) for m, x in zip(modalities, image, strict=True)}


def test_pyradiomics_after_the_padded_preparation():
    """The reference was prepared without MONAI, so z-scores differ in their last bit."""
    case = Case("s", "c", scan(), np.zeros((1, *scan().shape[1:]), np.uint8))
    for modality, found in prepared_features(case, PATCH, ("t1", "flair")).items():
        agree(found, REFERENCE[f"padded: {modality}"], 1e-5)


def test_pyradiomics_after_the_padded_preparation_of_a_real_scan(shared):
    files = Files(str(shared / "tcga_lgg"), exclude=("EZ",))
    case = files.case_refs(0)["CS"][0].open()
    for modality, found in prepared_features(case, REAL_PATCH, files.modality_names).items():
        agree(found, REFERENCE[f"real: padded {modality}"], 1e-5)


def by_definition(levels):
    """Matrices by loops over voxels and sets of neighbours, nothing shared with the kernels."""
    held = {tuple(at): int(levels[tuple(at)]) for at in np.argwhere(levels)}
    steps = [s for s in product((-1, 0, 1), repeat=levels.ndim) if any(s)]

    def near(at, step, far=1):
        return tuple(a + far * s for a, s in zip(at, step, strict=True))

    pairs = {s: np.zeros((levels.max() + 1,) * 2, int) for s in steps}
    runs = {s: [] for s in steps}
    dependence, differs = [], dict.fromkeys(held.values(), 0.0)
    for at, level in held.items():
        around = [held[near(at, s)] for s in steps if near(at, s) in held]
        dependence.append((level, 1 + around.count(level)))
        differs[level] += abs(level - np.mean(around)) if around else 0.0
        for s in steps:
            if near(at, s) in held:
                pairs[s][level, held[near(at, s)]] += 1
            if held.get(near(at, s, -1)) != level:
                length = 1
                while held.get(near(at, s, length)) == level:
                    length += 1
                runs[s].append((level, length))
    zones, left = [], dict(held)
    while left:
        at, level = left.popitem()
        edge, size = [at], 0
        while edge:
            here, size = edge.pop(), size + 1
            for s in steps:
                if left.get(near(here, s)) == level:
                    del left[near(here, s)]
                    edge.append(near(here, s))
        zones.append((level, size))
    return pairs, runs, zones, dependence, differs


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1))
def test_matrices_by_definition(seed):
    rng = np.random.default_rng(seed)
    image = rng.integers(0, rng.integers(1, 6), rng.integers(1, 7, rng.choice([2, 3])))
    mask = rng.random(image.shape) < rng.choice([0.3, 0.7, 1.0])
    if mask.sum() < 2:
        return
    found = features(image, mask, settings=Settings(bin_width=1))
    pairs, runs, zones, dependence, differs = by_definition(np.where(mask, image - image[mask].min() + 1, 0))
    some = [p for p in pairs.values() if p.any()]
    i = np.arange(1 + int(image[mask].max() - image[mask].min() + 1))
    contrast = [(p * np.subtract.outer(i, i) ** 2).sum() / p.sum() for p in some]
    assert found["glcm_Contrast"] == pytest.approx(np.mean(contrast) if some else math.nan, nan_ok=True)
    if len(some) == len(pairs):  # else lines with gaps come in, which PyRadiomics counts
        emphasis = [np.mean([level**2 * length**2 for level, length in r]) for r in runs.values()]
        assert found["glrlm_LongRunHighGrayLevelEmphasis"] == pytest.approx(np.mean(emphasis))
    for name, sizes in (("glszm_SmallArea", zones), ("gldm_SmallDependence", dependence)):
        emphasis = np.mean([level**2 / size**2 for level, size in sizes])
        assert found[f"{name}HighGrayLevelEmphasis"] == pytest.approx(emphasis)
    count = {level: (image[mask] - image[mask].min() + 1 == level).sum() for level in differs}
    coarse = sum(count[level] / mask.sum() * d for level, d in differs.items())
    assert found["ngtdm_Coarseness"] == pytest.approx(1 / coarse if coarse else 1e6)


TEXTURE = {"image": smooth(np.random.default_rng(3), (9, 11, 13)), "mask": ball((9, 11, 13))}
BINS = Settings(bin_width=0.3)
EXPECTED = features(**TEXTURE, settings=BINS)


@settings(deadline=None, max_examples=12)
@given(
    st.permutations(range(3)),
    st.lists(st.sampled_from([1, -1]), min_size=3, max_size=3),
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
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
    assert noise.min() < -1.05 and noise.max() < 9
    edges = np.arange(-1.05, 10.81, 0.15)
    levels = np.clip(np.digitize(noise, edges), 1, len(edges))
    found = features(noise, mask, settings=CC359)
    # whole numbers in bins of width 1, with a voxel of level 1 so that levels keep their numbers
    expected = features(levels, mask, settings=Settings(bin_width=1))
    assert levels[mask > 0].min() == 1
    for name in NAMES:
        if not name.startswith("firstorder") or name.endswith(("Entropy", "Uniformity")):
            assert found[name] == pytest.approx(expected[name], rel=1e-9), name
    assert found["firstorder_Minimum"] == noise[mask > 0].min()
    # the level of a grey value does not depend on the image: without its darkest voxels, the others keep theirs
    bright = (mask * (noise > 0.65)).astype(np.uint8)
    by_image = features(noise, bright, settings=Settings(bin_width=0.15))["glcm_JointAverage"]
    by_dataset = features(noise, bright, settings=CC359)["glcm_JointAverage"]
    assert by_dataset - by_image == pytest.approx(np.digitize(0.65, edges) - 1, abs=1e-9)
    above = features(noise + 100, mask, settings=CC359)  # everything in the last bin
    assert above["firstorder_Entropy"] == pytest.approx(0, abs=1e-12)


def test_many_at_once():
    cases = [asked(VOLUMES[name]) for name in ("textured noise", "2D", "thin sheet", "two values")] * 3
    alone = [features(*arrays, **options) for arrays, options in cases]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda case: features(*case[0], **case[1]), cases))
    assert together == alone


@pytest.mark.parametrize("room", [1, 1 << 17])
def test_little_room(monkeypatch, room):
    """Directions one after another, or a few at a time, give the same."""
    monkeypatch.setattr(extraction, "MAX_TABLE_BYTES", room)
    assert features(**TEXTURE, settings=BINS, threads=2) == EXPECTED


@pytest.mark.parametrize("dtype", [bool, np.uint8, ">i2", np.int64, np.float16, ">f4", np.float64])
def test_types_of_numbers(dtype):
    image = (TEXTURE["image"] > 0).astype(dtype)
    agree(features(image, TEXTURE["mask"]), features(image.astype(np.float64), TEXTURE["mask"] > 0))


def test_a_flat_region_has_no_skewness():
    """The mean of many times 0.1 is not 0.1: PyRadiomics gives such a region a kurtosis of 1."""
    found = features(np.full((7, 7, 7), 0.1), np.ones((7, 7, 7), np.uint8))
    assert [found[f"firstorder_{n}"] for n in ("Skewness", "Kurtosis", "Variance", "Range")] == [0, 0, 0, 0]


def exact_moments(values):
    """Skewness and kurtosis with a hundred digits, but for the last rounding."""
    with localcontext(prec=100):
        exact = [Decimal(float(v)) for v in values]
        mean = sum(exact) / len(exact)
        second, third, fourth = (sum((v - mean) ** k for v in exact) / len(exact) for k in (2, 3, 4))
        return float(third / second ** Decimal("1.5")), float(fourth / second**2)


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e5, 1e8, 1e10])
def test_an_offset_does_not_blur_skewness(offset):
    image = np.random.default_rng(1).gamma(2.0, 10.0, (17, 19, 23)) + offset
    found = features(image, np.ones(image.shape, np.uint8), settings=Settings(bin_count=32))
    skewness, kurtosis = exact_moments(image.ravel())
    assert found["firstorder_Skewness"] == pytest.approx(skewness, rel=1e-12)
    assert found["firstorder_Kurtosis"] == pytest.approx(kurtosis, rel=1e-12)


def test_rare_levels_among_many():
    """Where ε weighs in the MCC, the quick way and the plain way to its eigenvalues agree."""
    from polysite.radiomics.formulas import EPS, maximal_correlation

    rng = np.random.default_rng(0)
    for voxels in (10**4, 3 * 10**6, 3 * 10**7, 10**9):
        counts = rng.poisson(np.exp(-(np.subtract.outer(np.arange(30), np.arange(30)) ** 2) / 40) * voxels / 300)
        counts = (counts + counts.T).astype(float)
        counts[0], counts[:, 0] = 0, 0
        counts[0, 0] = 2  # one pair that touches nothing else
        p = counts / counts.sum()
        x = p.sum(1)
        plain = np.sort(np.linalg.eigvals((p / (np.outer(x, x) + EPS)) @ p.T).real)[-2] ** 0.5
        assert maximal_correlation(p, x, np.outer(x, x)) == pytest.approx(plain, rel=1e-6)


CUBE = np.arange(27.0).reshape(3, 3, 3)
HOLED = np.where(CUBE == 13, np.nan, CUBE)
ONE, ALL = (CUBE == 4).astype(np.uint8), np.ones((3, 3, 3), np.uint8)
BAD = {
    "empty mask": (CUBE, 0 * ALL, {}, DataError, "no voxel of label 1"),
    "another label": (CUBE, ALL, {"label": 2}, DataError, "no voxel of label 2"),
    "one voxel": (CUBE, ONE, {}, DataError, "one voxel of label 1"),
    "NaN": (HOLED, ALL, {}, DataError, "NaN or infinity"),
    "infinity": (np.where(CUBE == 13, np.inf, CUBE), ALL, {}, DataError, "NaN or infinity"),
    "shapes": (CUBE, ALL[:2], {}, DataError, r"\(3, 3, 3\), the mask \(2, 3, 3\)"),
    "four axes": (CUBE[None], ALL[None], {}, DataError, "two or three axes"),
    "absurd width": (CUBE, ALL, {"bin_width": 1e-7}, ConfigError, "more than 4096 bins; take a width near 0.26"),
    "slices of no axis": (CUBE, ALL, {"force2D": True, "force2D_dimension": 3}, ConfigError, "3 axes, counted from 0"),
}


@pytest.mark.parametrize("what", BAD)
def test_refused(what):
    image, mask, options, error, words = BAD[what]
    with pytest.raises(error, match=words):
        features(image, mask, settings=Settings(**options))


@pytest.mark.parametrize("spacing", [(1, 1), (1, 1, 0), (1, 1, math.nan)])
def test_refused_spacing(spacing):
    with pytest.raises(DataError, match="a positive size for each"):
        features(CUBE, ALL, spacing=spacing)


@pytest.mark.parametrize(
    "options",
    [
        {"bin_width": 0},
        {"bin_width": math.nan},
        {"bin_count": 0},
        {"bin_count": 10**7},
        {"bin_range": (3.0, 1.0)},
        {"bin_range": (1.0,)},
        {"bin_range": (0.0, math.inf)},
        {"bin_range": (0.0, 1.0), "bin_count": 5},
        {"voxel_array_shift": math.inf},
    ],
)
def test_refused_settings(options):
    with pytest.raises(ConfigError, match="give a"):
        Settings(**options)


def test_refused_numbers():
    with pytest.raises(DataError, match="complex128"):
        features(CUBE + 1j, ALL)


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
