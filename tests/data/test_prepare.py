"""Preparation, and the cache of what was prepared."""

import json
import os
import subprocess
import sys
from dataclasses import replace

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


def test_no_truth_outside_the_image_is_lost():
    image, label = np.zeros((1, 9, 9, 9), np.float32), np.zeros((1, 9, 9, 9), np.uint8)
    image[0, 4, 4, 4], label[0, 8, 8, 8] = 1, 1
    assert Prepare().apply(Case("s", "c", image, label), (4, 4, 4)).label.sum() == 1


def test_z_scores_with_and_without_zeros():
    c = case()
    c.image[:, :10] = 0
    nonzero, over_all, none = (
        Prepare(normalise=n, crop=False).apply(c, (8, 8, 8)).image for n in ("nonzero", "all", "none")
    )
    for k in range(2):
        assert nonzero[k, 10:].mean() == pytest.approx(0, abs=1e-5) and nonzero[k, 10:].std() == pytest.approx(
            1, abs=1e-5
        )
        assert over_all[k].mean() == pytest.approx(0, abs=1e-5) and over_all[k].std() == pytest.approx(1, abs=1e-5)
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
    return Case("s", "c", value[None], (world[2] > 4).astype(np.uint8)[None], spacing, affine=affine), world


def test_turning_and_resampling_keep_every_value_at_its_place():
    """A linear image is resampled exactly by linear interpolation, so each axis must show its own slope."""
    affine = np.array([[0, 0, -2.0, 20], [1.5, 0, 0, -10], [0, 3.0, 0, -6], [0, 0, 0, 1]])
    c, _ = gradient((12, 9, 10), affine)
    prepare = Prepare(orientation="RAS", spacing=(1.0, 1.0, 1.5), crop=False, normalise="none")
    found = prepare.apply(c, (4, 4, 4))
    assert found.spacing == pytest.approx((1.0, 1.0, 1.5))
    core = found.image[0, 2:-2, 2:-2, 2:-2]
    for axis, step in ((0, 3 * 1.0), (1, 5 * 1.0), (2, 7 * 1.5)):
        assert np.diff(core, axis=axis) == pytest.approx(step, abs=2e-2)
    assert found.image.shape[1:] == pytest.approx((19, 18, 17), abs=1)
    turned = Prepare(orientation="LPS", crop=False, normalise="none").apply(c, (4, 4, 4)).image[0]
    assert turned.shape == (10, 12, 9) and np.diff(turned, axis=0) == pytest.approx(-6, abs=1e-3)
    assert np.diff(turned, axis=1) == pytest.approx(-7.5, abs=1e-3)
    assert np.diff(turned, axis=2) == pytest.approx(21, abs=1e-3)


def test_labels_stay_whole_and_keep_their_volume():
    c, _ = gradient((30, 30, 20), np.diag([1.0, 1.0, 2.0, 1.0]))
    found = Prepare(spacing=(1.0, 1.0, 1.0), crop=False).apply(c, (4, 4, 4))
    assert set(np.unique(found.label)) == {0, 1}
    assert found.label.mean() == pytest.approx(c.label.mean(), abs=0.05)


def test_what_cannot_be_is_refused():
    for wrong, says in (
        ({"orientation": "RAR"}, "one letter"),
        ({"spacing": (1.0, 0.0, 1.0)}, "more than zero"),
        ({"clip": (3.0, 2.0)}, "the lower first"),
    ):
        with pytest.raises(ConfigError, match=says):
            Prepare(**wrong)
    with pytest.raises(ConfigError, match="2 numbers for 3D"):
        Prepare(spacing=(1.0, 1.0)).apply(case(), (8, 8, 8))
    with pytest.raises(DataError, match=r"case 'c' of site 's': voxels of .* would fill gigabytes"):
        Prepare(spacing=(0.01, 0.01, 0.01)).apply(case(), (8, 8, 8))


def test_a_flat_image_among_volumes_is_named():
    with pytest.raises(DataError, match="case 'c' of site 's' has 2 dimensions, the patch 3"):
        Prepare().apply(case((10, 12)), (8, 8, 8))


def test_classes_pass_through():
    c = replace(case((10, 12)), label=np.array([0, 1], np.uint8))
    found = Prepare(spacing=(2.0, 2.0)).apply(c, (8, 8))
    assert found.label.tolist() == [0, 1] and found.image.shape == (2, 8, 8)


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


def test_a_unit_that_is_not_known_stays_unknown(cache, files, monkeypatch):
    monkeypatch.setattr("polysite.data.files.Case", lambda *all: Case(*all[:-1], ""))
    assert [c.unit for c in (*get(cache, files), *get(cache, files))] == [""] * 6


def test_another_configuration_or_content_is_another_entry(cache, files):
    first = get(cache, files)
    get(cache, files, Prepare(normalise="all"))
    get(cache, files, patch=(16, 16, 16))
    get(cache, replace(files, labels={"M": (1,)}))
    assert len(entries(cache)) == 12
    file = files.case_refs(0)["A"][0].files[0]
    image = nibabel.load(file)
    nibabel.save(nibabel.Nifti1Image(np.asarray(image.dataobj)[::-1].copy(), image.affine), file)
    assert not same(get(cache, files), first) and len(entries(cache)) == 13


def test_hidden_modalities_are_another_entry(cache, files):
    (first, *_) = files.case_refs(0)["A"]
    seen = Cache(cache).get(first, Prepare(), (8, 8, 8))
    blind = Cache(cache).get(replace(first, hidden=(0,)), Prepare(), (8, 8, 8))
    assert seen.image.any() and not blind.image.any() and len(entries(cache)) == 2


def test_a_moved_file_is_known_by_its_content(cache, files, tmp_path):
    get(cache, files)
    (tmp_path / "data").rename(tmp_path / "moved")
    get(cache, replace(files, path=str(tmp_path / "moved")))
    assert len(entries(cache)) == 3


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "header", "notes"])
def test_a_damaged_entry_is_made_again(cache, files, damage):
    first = [(np.array(c.image), np.array(c.label)) for c in get(cache, files)]
    for entry in entries(cache):
        content = bytearray(entry.read_bytes())
        if damage == "flipped":
            content[-50] ^= 1
        changed = {"cut": content[:-10], "empty": b"", "header": b"\xff" * 8 + content[8:]}.get(damage, content)
        if damage != "notes":
            entry.write_bytes(bytes(changed))
    if damage == "notes":
        for note in (cache / "stamps").iterdir():
            note.write_text("{")
    again = get(cache, files)
    assert all((a == c.image).all() and (b == c.label).all() for (a, b), c in zip(first, again, strict=True))
    assert len(entries(cache)) == 3 and not list(cache.rglob("*.partial"))


RACE = """
import sys
from polysite.data.cache import Cache, place
from polysite.data.files import Files
from polysite.data.prepare import Prepare
for _ in range(6):
    for p in Files(path=sys.argv[1], labels={"L": (1,)}).case_refs(0)["A"]:
        case = Cache(place()).get(p, Prepare(), (8, 8, 8))
        print(p.name, float(case.image.sum()), int(case.label.sum()))
    for entry in place().glob("*.safetensors"):
        entry.unlink(missing_ok=True)
"""


@pytest.mark.slow
def test_runs_at_the_same_time_do_not_disturb_one_another(cache, files):
    words = [sys.executable, "-c", RACE, files.path]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) for _ in range(2)
    ]
    said = [r.communicate(timeout=120) for r in runs]
    assert all(r.returncode == 0 for r in runs), said
    assert len({line for out, _ in said for line in out.splitlines()}) == 3


def test_a_full_disk_is_one_sentence(cache, files, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fdopen", full)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\): make room .* POLYSITE_CACHE"):
        get(cache, files)
    assert not list(cache.rglob("*.partial"))


def test_the_cache_can_be_measured_and_cleared(cache, files):
    (cache / "mine.safetensors").write_bytes(b"not of the cache")
    get(cache, files)
    size = Cache(cache).size
    assert size > sum(e.stat().st_size for e in entries(cache) if e.name != "mine.safetensors") > 0
    (cache / f".{'a' * 40}.safetensors.{'b' * 12}.partial").touch()  # of a run that was killed
    assert Cache(cache).clear() == size and Cache(cache).size == 0
    assert [f.name for f in cache.rglob("*") if f.is_file()] == ["mine.safetensors"]


def test_notes_are_json(cache, files):
    get(cache, files)
    assert all({"stamp", "digest"} == json.loads(n.read_text()).keys() for n in (cache / "stamps").iterdir())


def test_the_voxels_beside_a_header_count(cache, tmp_path):
    """A .mhd holds no voxels: its .raw changes and the entry must be another."""
    head = "ObjectType = Image\nNDims = 3\nDimSize = 9 9 9\nElementType = MET_UCHAR\nElementDataFile = {}.raw\n"
    folder = tmp_path / "data" / "A" / "1"
    folder.mkdir(parents=True)
    for name in ("ct", "seg"):
        (folder / f"{name}.mhd").write_text(head.format(name))
    (folder / "ct.raw").write_bytes(bytes(range(243)) * 3)
    (folder / "seg.raw").write_bytes(b"\1" + b"\0" * 728)
    files = Files(path=str(tmp_path / "data"), labels={"L": (1,)})
    assert get(cache, files)[0].label.sum() == 1
    (folder / "seg.raw").write_bytes(b"\1" * 3 + b"\0" * 726)
    assert get(cache, files)[0].label.sum() == 3 and len(entries(cache)) == 2


def test_a_cache_that_cannot_be_is_said(cache, files, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        get(tmp_path / "file", files)
    monkeypatch.delenv("POLYSITE_CACHE")
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(ConfigError, match="set POLYSITE_CACHE"):
        place()


def published(image, patch):
    """Crop, pad, then z-scores over all voxels, with the transforms of the published code of papers B and C."""
    steps = [
        CropForeground(select_fn=lambda x: x > 0, allow_smaller=True),
        SpatialPad(patch),
        NormalizeIntensity(nonzero=False, channel_wise=True),
    ]
    return np.asarray(Compose(steps)(image.copy()))


PADDED = Prepare(normalise="padded")


@pytest.mark.parametrize("patch", [(8, 8, 8), (16, 24, 16), (32, 32, 32)])
def test_padded_is_crop_pad_and_z_scores_of_everything(patch):
    c = case()
    c.image[:, :3], c.image[:, :, 12:], c.image[1, :, :, :5] = 0, 0, 0
    c.label[:] = c.label * (c.image > 0).any(0)
    found = PADDED.apply(c, patch)
    unpadded = 2e-6 if patch == (8, 8, 8) else 0  # MONAI then sums a strided crop, which rounds differently
    np.testing.assert_allclose(found.image, published(c.image, patch), rtol=0, atol=unpadded)
    assert found.image.shape[1:] == found.label.shape[1:] and found.label.sum() == c.label.sum()
    assert found.image.mean((1, 2, 3)) == pytest.approx(0, abs=1e-5)
    assert found.image.std((1, 2, 3)) == pytest.approx(1, abs=1e-5)


def test_padded_on_a_real_scan_and_through_the_cache(shared, tmp_path):
    refs = Files(str(shared / "tcga_lgg"), exclude=("EZ",)).case_refs(0)["CS"][:2]
    for ref in refs:
        expected = published(ref.open().image, (96, 128, 32))
        store = Cache(tmp_path)
        for _ in ("made", "opened"):
            np.testing.assert_array_equal(store.get(ref, PADDED, (96, 128, 32)).image, expected)


def test_a_modality_that_was_not_acquired_stays_zero():
    c = case((10, 10, 10))
    c.image[1] = 0
    found = PADDED.apply(c, (16, 16, 16)).image
    assert not found[1].any() and found[0].min() < 0


def test_sizes_are_cropped_and_padded_about_the_centre():
    c = case((20, 9, 12))
    found = Prepare(size=(0, 16, 8), normalise="none").apply(c, (8, 8, 8))
    np.testing.assert_array_equal(found.image[:, :, 3:12], c.image[..., 2:10])
    np.testing.assert_array_equal(found.label[:, :, 3:12], c.label[..., 2:10])
    for k in range(2):  # the darkest value, since zero means nothing here
        assert (found.image[k, :, :3] == c.image[k].min()).all() and not found.label[:, :, 12:].any()
    padded = Prepare(size=(0, 16, 8), normalise="padded").apply(c, (8, 8, 8)).image
    by_monai = [ResizeWithPadOrCrop((20, 16, 8)), NormalizeIntensity(channel_wise=True)]
    np.testing.assert_array_equal(padded, np.asarray(Compose(by_monai)(c.image.copy())))
    with pytest.raises(ConfigError, match="2 numbers for 3D data"):
        Prepare(size=(16, 16)).apply(c, (8, 8, 8))
    with pytest.raises(ConfigError, match="0 to keep an axis"):
        Prepare(size=(-1, 16, 16))


def head(modalities, **changes):
    """A ball in a box: the mask of it, and what each preparation takes for the brain."""
    grid = np.stack(np.meshgrid(*[np.arange(14)] * 3, indexing="ij"))
    ball = ((grid - 6.5) ** 2).sum(0) < 25
    rng = np.random.default_rng(0)
    image = np.stack([ball * rng.uniform(5, 9, ball.shape) for _ in modalities]).astype(np.float32)
    for k, where in changes.items():
        image[modalities.index(k)] *= where(grid)
    raw = Case("s", "c", image, ball[None].astype(np.uint8))
    masks = {}
    for how in ("nonzero", "all", "padded"):
        prepared = Prepare(normalise=how).apply(raw, (20, 20, 20))
        masks[how] = Prepare(normalise=how).brain(prepared.image, modalities), prepared.label[0] > 0
    return masks


def test_the_brain_is_the_same_in_every_preparation_and_never_padding():
    for mask, ball in head(["t1", "T2_FLAIR"]).values():
        np.testing.assert_array_equal(mask, ball)


def test_the_brain_is_where_flair_exceeds_its_minimum():
    def half(grid):
        return grid[0] < 7

    masks = head(["t1", "T2_FLAIR"], T2_FLAIR=half)
    assert all((masks[how][0] < masks[how][1]).any() and masks[how][0].sum() * 2 == masks[how][1].sum()
               for how in ("all", "padded"))  # fmt: skip
    np.testing.assert_array_equal(*masks["nonzero"])
    for mask, ball in head(["t1", "t2"], t2=half).values():  # no FLAIR: any modality
        np.testing.assert_array_equal(mask, ball)
    for mask, ball in head(["t1", "flair"], flair=lambda grid: grid[0] < 0).values():  # not acquired
        np.testing.assert_array_equal(mask, ball)
