"""Image files: what they hold, and what damage they survive."""

import gzip
import tracemalloc
import zlib

import nibabel
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from polysite.data.images import MAX_VOXELS, read
from polysite.errors import DataError

AFFINE = np.array([[0, -1.5, 0, 10], [2.0, 0, 0, -20], [0, 0, 3.0, 5], [0, 0, 0, 1]])


def nifti(path, array, affine=AFFINE, kind=nibabel.Nifti1Image):
    nibabel.save(kind(array, affine), path)
    return path


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "float32", "float64", ">i2", ">f4"])
@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
def test_nifti_is_read_as_nibabel_reads_it(tmp_path, dtype, name, kind):
    array = np.random.default_rng(0).integers(0, 200, (5, 4, 3)).astype(dtype)
    file = nifti(tmp_path / name, array, kind=kind)
    image = read(file)
    assert (image.array == nibabel.load(file).get_fdata()).all() and image.array.dtype.isnative
    assert np.allclose(image.affine, AFFINE) and image.spacing == pytest.approx((2.0, 1.5, 3.0))
    assert image.orientation == "ALS" and image.shape == (5, 4, 3) and image.dims == 3 and image.channels == 1


def test_scaling_channels_and_lone_axes(tmp_path):
    scaled = nibabel.Nifti1Image(np.linspace(-3, 3, 24).reshape(2, 3, 4), AFFINE)
    scaled.set_data_dtype(np.int16)
    nibabel.save(scaled, tmp_path / "scaled.nii.gz")
    found = read(tmp_path / "scaled.nii.gz")
    assert found.array == pytest.approx(nibabel.load(tmp_path / "scaled.nii.gz").get_fdata(), abs=1e-6)
    many = np.random.default_rng(0).random((2, 3, 4, 5)).astype(np.float32)
    assert read(nifti(tmp_path / "many.nii.gz", many)).channels == 5
    assert (read(nifti(tmp_path / "many.nii.gz", many)).array == many).all()
    assert read(nifti(tmp_path / "lone.nii.gz", many[..., :1])).shape == (2, 3, 4)
    assert (read(nifti(tmp_path / "vector.nii.gz", many[:, :, :, None])).array == many).all()
    flat = read(nifti(tmp_path / "flat.nii.gz", many[..., 0, 0]))
    assert flat.dims == 2 and flat.spacing == pytest.approx((2.0, 1.5))


@pytest.mark.parametrize(
    ("mode", "name", "channels"),
    [("L", "a.png", 1), ("RGB", "a.png", 3), ("RGBA", "a.png", 3), ("P", "a.png", 1), ("I;16", "a.png", 1),
     ("1", "a.png", 1), ("L", "a.tif", 1), ("F", "a.tiff", 1), ("RGB", "a.jpg", 3)],
)  # fmt: skip
def test_flat_images_are_read(tmp_path, mode, name, channels):
    rows = np.arange(20, dtype=np.uint16).reshape(4, 5) * (3000 if mode == "I;16" else 10)
    picture = Pillow.fromarray(rows if mode == "I;16" else rows.astype(np.uint8))
    picture = picture if mode in ("L", "I;16") else picture.convert(mode)
    picture.save(tmp_path / name)
    found = read(tmp_path / name)
    assert found.dims == 2 and found.shape == (4, 5) and found.channels == channels
    if mode in ("L", "F", "I;16"):
        assert (found.array == rows).all()


def whole(tmp_path):
    array = np.random.default_rng(0).integers(0, 99, (12, 12, 12)).astype(np.int16)
    return nifti(tmp_path / "whole.nii", array).read_bytes()


def patched(content, at, value):
    return content[:at] + value + content[at + len(value) :]


def dims(*sizes):
    return np.array([len(sizes), *sizes], "<i2").tobytes()


def voxel(content, *size):
    """A voxel size, and no affine that would overrule it."""
    return patched(patched(content, 252, b"\0\0\0\0"), 80, np.array(size, "<f4").tobytes())


DAMAGE = {
    "empty": (lambda c: b"", "empty or shorter"),
    "only a header": (lambda c: c[:352], "ends early"),
    "wrong magic": (lambda c: patched(c, 344, b"nope"), "does not begin with the header"),
    "text": (lambda c: b"hello" * 200, "does not begin with the header"),
    "huge": (lambda c: patched(c, 40, dims(32000, 32000, 32000)), "claims 3.28e+13 voxels, more than the 5.37e+08"),
    "large": (lambda c: patched(c, 40, dims(800, 800, 800)), "ends early"),
    "negative side": (lambda c: patched(c, 40, dims(12, -12, 12)), "claims the shape"),
    "no side": (lambda c: patched(c, 40, dims(12, 0, 12)), "claims the shape"),
    "nine dimensions": (lambda c: patched(c, 40, b"\x09\0"), "claims"),
    "unknown type": (lambda c: patched(c, 70, b"\x63\0"), ""),
    "complex voxels": (lambda c: patched(c, 70, b"\x20\0"), "not plain numbers"),
    "voxels before the header ends": (lambda c: patched(c, 108, np.float32(7).tobytes()), "puts the voxels at byte 7"),
    "voxels at infinity": (lambda c: patched(c, 108, np.float32(np.inf).tobytes()), "puts the voxels at byte inf"),
    "affine of NaN": (lambda c: patched(c, 280, np.full(4, np.nan, "<f4").tobytes()), "NaN or infinite"),
    "flat affine": (lambda c: patched(c, 280, np.zeros(4, "<f4").tobytes()), "degenerate"),
    "negative voxel": (lambda c: voxel(c, -1, 1, 1), "its voxel size is negative: [-1.0, 1.0, 1.0]"),
    "voxel of nothing": (lambda c: voxel(c, 1, 0, 1), "degenerate"),
    "voxel of NaN": (lambda c: voxel(c, 1, np.nan, 1), "NaN or infinite"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("damage", "says"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_one_sentence_with_the_name_of_the_file(tmp_path, damage, says, packed):
    """Nor is memory taken for what is not there."""
    content = damage(whole(tmp_path))
    file = tmp_path / ("bad.nii.gz" if packed else "bad.nii")
    file.write_bytes(gzip.compress(content) if packed else content)
    tracemalloc.start()
    with pytest.raises(DataError, match=r"bad\.nii") as refusal:
        read(file)
    _, taken = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert says in str(refusal.value) and "\n" not in str(refusal.value) and taken < 100 << 20


def test_a_damaged_packing_is_noticed_even_behind_the_voxels(tmp_path):
    packed = gzip.compress(whole(tmp_path))
    for name, content in {
        "cut": packed[:-40],
        "checksum": packed[:-8] + b"\0\0\0\0" + packed[-4:],
        "flipped": patched(packed, len(packed) // 2, bytes([packed[len(packed) // 2] ^ 255])),
    }.items():
        (tmp_path / f"{name}.nii.gz").write_bytes(content)
        with pytest.raises(DataError, match=f"{name}.nii.gz cannot be read"):
            read(tmp_path / f"{name}.nii.gz")


def test_other_formats_are_damaged_in_a_sentence_too(tmp_path):
    head = "ObjectType = Image\nNDims = 3\nDimSize = 4 4 4\nElementType = MET_SHORT\nElementDataFile = "
    bad = {
        "outside.mhd": (head + "../secret.raw\n").encode(),
        "absent.mhd": (head + "absent.raw\n").encode(),
        "short.mha": (head + "LOCAL\n").encode() + b"\0" * 9,
        "endless.mha": b"A = B\n" * 500,
        "binary.mha": bytes(range(256)),
        "shape.mha": head.replace("4 4 4", "4 four 4").encode() + b"LOCAL\n",
        "packed.mha": (
            head.replace("ElementDataFile", "CompressedData = True\nElementDataFile") + "LOCAL\nxx"
        ).encode(),
        "bomb.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\1\0\0\0\1\0\0\x08\0\0\0\0"
        + zlib.crc32(b"IHDR\0\1\0\0\0\1\0\0\x08\0\0\0\0").to_bytes(4, "big"),
        "broken.png": b"\x89PNG\r\n\x1a\n" + b"\0" * 30,
        "text.tif": b"II*\0 this is no picture",
        "notes.txt": b"",
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=name) as refusal:
            read(tmp_path / name)
        assert "\n" not in str(refusal.value)
    for name in ("nowhere.nii.gz", ".", "long" * 99 + ".nii"):
        with pytest.raises(DataError):
            read(tmp_path / name)


@given(st.lists(st.tuples(st.integers(0, 351), st.integers(0, 255)), min_size=1, max_size=12), st.integers(0, 5000))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_header_is_read_or_refused(tmp_path, changes, length):
    content = bytearray(whole(tmp_path)[: 4000 - length if length < 3000 else None])
    for at, value in changes:
        if at < len(content):
            content[at] = value
    file = tmp_path / "fuzz.nii"
    file.write_bytes(content)
    try:
        image = read(file)
    except DataError as refusal:
        assert "fuzz.nii" in str(refusal) and "\n" not in str(refusal)
    else:
        assert image.array.size <= MAX_VOXELS and np.isfinite(image.affine).all()
