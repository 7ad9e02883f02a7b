"""Preparation, and the cache of what was prepared."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import nibabel
import numpy as np
import pytest
from monai.transforms import Compose, CropForeground, NormalizeIntensity, ResizeWithPadOrCrop, SpatialPad

from polysite.data.cache import Cache, place
from polysite.data.case import Case
from polysite.data.files import Files
from polysite.data.prepare import Prepare
from polysite.errors import ConfigError, DataError


def case(shape=(20, 20, 20), **kwargs):
    image = np.random.default_rng(0).uniform(1, 9, (2, *shape)).astype(np.float32)
    return Case("s", "c", image, (image[:1] > 5).astype(np.uint8), (1.0,) * len(shape), **kwargs)


def test_cropped_to_the_foreground_and_padded_to_the_patch():
    c = case()
    inside = (slice(None), slice(4, 15), slice(3, 9), slice(10, 12))
    image, label = np.zeros_like(c.image), np.zeros_like(c.label)
    image[inside], label[inside] = c.image[inside], c.label[inside]
    found = Prepare().apply(Case("s", "c", image, label), (8, 8, 8))
    assert found.image.shape == (2, 11, 8, 8) and found.label.sum() == label.sum()
    assert found.image[:, :, 1:7, 3:5].std() == pytest.approx(1, abs=1e-3) and not found.image[:, :, 0].any()
    uncropped = Prepare(crop=False).apply(Case("s", "c", image, label), (8, 8, 8))
    assert uncropped.image.shape == (2, 20, 20, 20)
    label[:], label[0, 19, 19, 19] = 0, 1  # no truth outside the image is lost
    assert Prepare().apply(Case("s", "c", image, label), (4, 4, 4)).label.sum() == 1
    flat = replace(case((10, 12)), label=np.array([0, 1], np.uint8))  # a class passes through
    found = Prepare(spacing=(2.0, 2.0)).apply(flat, (8, 8))
    assert found.label.tolist() == [0, 1] and found.image.shape == (2, 8, 8)


def test_z_scores_with_and_without_zeros():
    c = case()
    c.image[:, :10] = 0
    ways = ("nonzero", "all", "none")
    nonzero, over_all, none = (Prepare(normalise=n, crop=False).apply(c, (8, 8, 8)).image for n in ways)
    for scores in (*nonzero[:, 10:], *over_all):
        assert scores.mean() == pytest.approx(0, abs=1e-5) and scores.std() == pytest.approx(1, abs=1e-5)
    assert not nonzero[:, :10].any() and over_all[:, :10].all() and (none == c.image).all()
    assert nonzero == pytest.approx(np.asarray(NormalizeIntensity(nonzero=True, channel_wise=True)(c.image)), abs=1e-5)
    clipped = Prepare(clip=(3, 5), normalise="none").apply(case(), (8, 8, 8)).image
    assert clipped.min() == 3 and clipped.max() == 5
    empty = replace(c, image=np.zeros_like(c.image))
    assert not Prepare().apply(empty, (8, 8, 8)).image.any()
    padded = Prepare(normalise="none").apply(case((6, 6, 6)), (8, 8, 8)).image
    assert (padded[:, 0].max((1, 2)) == padded.min((1, 2, 3))).all()  # the darkest value, not zero


def gradient(shape, affine):
    """An image whose value is 3x + 5y + 7z + 400 at the point (x, y, z) of the patient, and a label of one slab."""
    index = np.stack([*np.meshgrid(*map(np.arange, shape), indexing="ij"), np.ones(shape)])
    world = np.einsum("ij,jxyz->ixyz", affine, index)
    value = (3 * world[0] + 5 * world[1] + 7 * world[2] + 400).astype(np.float32)
    spacing = tuple(np.linalg.norm(affine[:3, :3], axis=0))
    return Case("s", "c", value[None], (world[2] > 4).astype(np.uint8)[None], spacing, affine=affine)


def test_turning_and_resampling_keep_every_value_at_its_place():
    """A linear image is resampled exactly by linear interpolation, so each axis must show its own slope."""
    affine = np.array([[0, 0, -2.0, 20], [1.5, 0, 0, -10], [0, 3.0, 0, -6], [0, 0, 0, 1]])
    c = gradient((12, 9, 10), affine)
    prepare = Prepare(orientation="RAS", spacing=(1.0, 1.0, 1.5), crop=False, normalise="none")
    found = prepare.apply(c, (4, 4, 4))
    assert found.spacing == pytest.approx((1.0, 1.0, 1.5))
    core = found.image[0, 2:-2, 2:-2, 2:-2]
    for axis, step in ((0, 3 * 1.0), (1, 5 * 1.0), (2, 7 * 1.5)):
        assert np.diff(core, axis=axis) == pytest.approx(step, abs=2e-2)
    assert found.image.shape[1:] == pytest.approx((19, 18, 17), abs=1)
    turned = Prepare(orientation="LPS", crop=False, normalise="none").apply(c, (4, 4, 4)).image[0]
    assert turned.shape == (10, 12, 9)
    for axis, step in enumerate((-6, -7.5, 21)):
        assert np.diff(turned, axis=axis) == pytest.approx(step, abs=1e-3)
    thick = gradient((30, 30, 20), np.diag([1.0, 1.0, 2.0, 1.0]))  # labels stay whole and keep their volume
    label = Prepare(spacing=(1.0, 1.0, 1.0), crop=False).apply(thick, (4, 4, 4)).label
    assert set(np.unique(label)) == {0, 1} and label.mean() == pytest.approx(thick.label.mean(), abs=0.05)


@pytest.mark.parametrize(
    ("wrong", "shape", "error", "says"),
    [
        ({"orientation": "RAR"}, (9, 9, 9), ConfigError, "one letter"),
        ({"spacing": (1.0, 0.0, 1.0)}, (9, 9, 9), ConfigError, "more than zero"),
        ({"clip": (3.0, 2.0)}, (9, 9, 9), ConfigError, "the lower first"),
        ({"size": (-1, 16, 16)}, (9, 9, 9), ConfigError, "0 to keep an axis"),
        ({"size": (16, 16)}, (9, 9, 9), ConfigError, "2 numbers for 3D data"),
        ({"spacing": (1.0, 1.0)}, (9, 9, 9), ConfigError, "2 numbers for 3D"),
        ({"spacing": (0.01, 0.01, 0.01)}, (20, 20, 20), DataError,
         r"case 'c' of site 's': voxels of .* would fill gigabytes"),
        ({}, (10, 12), DataError, "case 'c' of site 's' has 2 dimensions, the patch 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(wrong, shape, error, says):
    with pytest.raises(error, match=says):
        Prepare(**wrong).apply(case(shape), (8, 8, 8))


@pytest.fixture
def files(tmp_path):
    for k in range(3):
        folder = tmp_path / "data" / "A" / f"{k}"
        folder.mkdir(parents=True)
        image = np.random.default_rng(k).integers(1, 99, (9, 9, 9)).astype(np.int16)
        for name, array in (("t1", image), ("seg", (image > 50).astype(np.uint8))):
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), folder / f"{name}.nii.gz")
    return Files(path=str(tmp_path / "data"), labels={"L": (1,)})


def entries(place):
    return sorted(place.glob("*.safetensors"))


def get(cache, files, prepare=Prepare(), patch=(8, 8, 8)):
    return [Cache(cache).get(p, prepare, patch) for p in files.case_refs(0)["A"]]


def same(a, b):
    return all(
        (x.image == y.image).all() and (x.label == y.label).all() and x.name == y.name
        for x, y in zip(a, b, strict=True)
    )


def test_the_second_time_nothing_is_read(cache, files, monkeypatch):
    first = get(cache, files)
    assert len(entries(cache)) == 3 and {c.name for c in first} == {"0", "1", "2"}
    monkeypatch.setattr("polysite.data.files.open_case", None)
    again = get(cache, files)
    assert same(first, again) and isinstance(again[0].image.base, np.memmap)
    assert oct(entries(cache)[0].stat().st_mode & 0o777) == "0o600"


def test_another_configuration_or_content_is_another_entry(cache, files, tmp_path):
    first = get(cache, files)
    get(cache, files, Prepare(normalise="all"))
    get(cache, files, patch=(16, 16, 16))
    get(cache, replace(files, labels={"M": (1,)}))
    assert len(entries(cache)) == 12
    ref = files.case_refs(0)["A"][0]
    image = nibabel.load(ref.files[0])
    nibabel.save(nibabel.Nifti1Image(np.asarray(image.dataobj)[::-1].copy(), image.affine), ref.files[0])
    assert not same(get(cache, files), first) and len(entries(cache)) == 13
    assert not Cache(cache).get(replace(ref, hidden=(0,)), Prepare(), (8, 8, 8)).image.any()
    assert len(entries(cache)) == 14
    (tmp_path / "data").rename(tmp_path / "moved")  # a moved file is known by its content
    get(cache, replace(files, path=str(tmp_path / "moved")))
    assert len(entries(cache)) == 14


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "header", "notes"])
def test_a_damaged_entry_is_made_again(cache, files, damage):
    first = [replace(c, image=np.array(c.image), label=np.array(c.label)) for c in get(cache, files)]
    for entry in entries(cache) if damage != "notes" else ():
        content = entry.read_bytes()
        flipped = content[:-50] + bytes([content[-50] ^ 1]) + content[-49:]
        damaged = {"cut": content[:-10], "flipped": flipped, "empty": b"", "header": b"\xff" * 8 + content[8:]}
        entry.write_bytes(damaged[damage])
    for note in (cache / "stamps").iterdir() if damage == "notes" else ():
        note.write_text("{")
    assert same(get(cache, files), first)
    assert len(entries(cache)) == 3 and not list(cache.rglob("*.partial"))


def test_runs_at_the_same_time_do_not_disturb_one_another(cache, files):
    found = []

    def run(_):
        for _ in range(6):
            found.append(get(cache, files))
            for entry in entries(cache):
                entry.unlink(missing_ok=True)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, range(2)))
    assert len(found) == 12 and all(same(found[0], other) for other in found)


def test_a_full_disk_or_a_cache_that_cannot_be_is_one_sentence(cache, files, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        get(tmp_path / "file", files)
    monkeypatch.setattr("os.fdopen", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\): make room .* POLYSITE_CACHE"):
        get(cache, files)
    assert not list(cache.rglob("*.partial"))
    monkeypatch.delenv("POLYSITE_CACHE")
    monkeypatch.setattr("pathlib.Path.home", Mock(side_effect=RuntimeError("no home")))
    with pytest.raises(ConfigError, match="set POLYSITE_CACHE"):
        place()


def test_the_cache_can_be_measured_and_cleared(cache, files):
    (cache / "mine.safetensors").write_bytes(b"not of the cache")
    get(cache, files)
    size = Cache(cache).size
    assert size > sum(e.stat().st_size for e in entries(cache) if e.name != "mine.safetensors") > 0
    (cache / f".{'a' * 40}.safetensors.{'b' * 12}.partial").touch()  # of a run that was killed
    assert Cache(cache).clear() == size and Cache(cache).size == 0
    assert [f.name for f in cache.rglob("*") if f.is_file()] == ["mine.safetensors"]


def test_the_voxels_beside_a_header_count(cache, tmp_path):
    """A .mhd holds no voxels: its .raw changes and the entry must be another."""
    head = "ObjectType = Image\nNDims = 3\nDimSize = 9 9 9\nElementType = MET_UCHAR\nElementDataFile = {}.raw\n"
    folder = tmp_path / "data" / "A" / "1"
    folder.mkdir(parents=True)
    for name in ("ct", "seg"):
        (folder / f"{name}.mhd").write_text(head.format(name))
    (folder / "ct.raw").write_bytes(bytes(range(243)) * 3)
    files = Files(path=str(tmp_path / "data"), labels={"L": (1,)})
    for labelled in (1, 3):
        (folder / "seg.raw").write_bytes(b"\1" * labelled + bytes(729 - labelled))
        assert get(cache, files)[0].label.sum() == labelled
    assert len(entries(cache)) == 2


def published(image, patch):
    """Crop, pad, then z-scores over all voxels, with the transforms of the published code of papers B and C."""
    crop = CropForeground(select_fn=lambda x: x > 0, allow_smaller=True)
    z_scores = NormalizeIntensity(nonzero=False, channel_wise=True)
    return np.asarray(Compose([crop, SpatialPad(patch), z_scores])(image.copy()))


@pytest.mark.parametrize("patch", [(8, 8, 8), (16, 24, 16), (32, 32, 32)])
def test_padded_is_crop_pad_and_z_scores_of_everything(patch):
    c, prepare = case(), Prepare(normalise="padded")
    c.image[:, :3], c.image[:, :, 12:], c.image[1, :, :, :5] = 0, 0, 0
    c.label[:] = c.label * (c.image > 0).any(0)
    found = prepare.apply(c, patch)
    unpadded = 2e-6 if patch == (8, 8, 8) else 0  # MONAI then sums a strided crop, which rounds differently
    np.testing.assert_allclose(found.image, published(c.image, patch), rtol=0, atol=unpadded)
    assert found.image.shape[1:] == found.label.shape[1:] and found.label.sum() == c.label.sum()
    c.image[1] = 0  # not acquired
    absent = prepare.apply(c, patch).image
    assert not absent[1].any() and absent[0].min() < 0


def test_sizes_are_cropped_and_padded_about_the_centre():
    c = case((20, 9, 12))
    found = Prepare(size=(0, 16, 8), normalise="none").apply(c, (8, 8, 8))
    np.testing.assert_array_equal(found.label[:, :, 3:12], c.label[..., 2:10])
    for k in range(2):  # the darkest value, since zero means nothing here
        np.testing.assert_array_equal(found.image[k, :, 3:12], c.image[k, ..., 2:10])
        assert (found.image[k, :, :3] == c.image[k].min()).all() and not found.label[:, :, 12:].any()
    padded = Prepare(size=(0, 16, 8), normalise="padded").apply(c, (8, 8, 8)).image
    by_monai = [ResizeWithPadOrCrop((20, 16, 8)), NormalizeIntensity(channel_wise=True)]
    np.testing.assert_array_equal(padded, np.asarray(Compose(by_monai)(c.image.copy())))


def head(modalities, **changes):
    """Preparation -> what it takes for the brain, and the mask of it: a ball in a box, dark where changes say."""
    grid = np.stack(np.meshgrid(*[np.arange(14)] * 3, indexing="ij"))
    ball = ((grid - 6.5) ** 2).sum(0) < 25
    rng = np.random.default_rng(0)
    image = np.stack([ball * rng.uniform(5, 9, ball.shape) for _ in modalities]).astype(np.float32)
    for k, end in changes.items():
        image[modalities.index(k)] *= grid[0] < end
    raw, masks = Case("s", "c", image, ball[None].astype(np.uint8)), {}
    for how in ("nonzero", "all", "padded"):
        prepared = Prepare(normalise=how).apply(raw, (20, 20, 20))
        masks[how] = Prepare(normalise=how).brain(prepared.image, modalities), prepared.label[0] > 0
    return masks


def test_the_brain_is_where_flair_exceeds_its_minimum():
    """The same in every preparation, and never padding; without FLAIR, or if it was not acquired, any modality."""
    for given in (head(["t1", "T2_FLAIR"]), head(["t1", "t2"], t2=7), head(["t1", "flair"], flair=0)):
        for mask, ball in given.values():
            np.testing.assert_array_equal(mask, ball)
    masks = head(["t1", "T2_FLAIR"], T2_FLAIR=7)
    np.testing.assert_array_equal(*masks["nonzero"])
    for mask, ball in (masks["all"], masks["padded"]):
        assert (mask < ball).any() and mask.sum() * 2 == ball.sum()
