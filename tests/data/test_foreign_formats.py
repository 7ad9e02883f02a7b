"""Readers of NRRD, MetaImage, DICOM, HDF5, NPY, NPZ, GIF and PPM: images, geometry, sentences for refused files."""

import gzip
import zipfile

import h5py
import numpy as np
import pytest
import SimpleITK
from PIL import Image as Pillow
from pydicom.uid import DeflatedExplicitVRLittleEndian

import foreign_scans as foreign
from polysite.data.images import MAX_VOXELS, files_of, read
from polysite.errors import DataError

VOLUME = np.random.default_rng(0).integers(-500, 900, (6, 5, 4)).astype(np.int16)
TURN = np.deg2rad(20)
OBLIQUE = (np.cos(TURN), np.sin(TURN), 0, -np.sin(TURN), np.cos(TURN), 0)


def refused(file, *words):
    with pytest.raises(DataError) as refusal:
        read(file)
    text = str(refusal.value)
    assert str(file) in text and "\n" not in text and [w for w in words if w not in text] == [], text


def itk_image(dtype="int16"):
    image = SimpleITK.GetImageFromArray(VOLUME.astype(dtype).transpose(2, 1, 0))
    image.SetSpacing((0.5, 0.7, 2.5))
    image.SetOrigin((-10.0, 20.0, 30.0))
    image.SetDirection((np.cos(TURN), -np.sin(TURN), 0, np.sin(TURN), np.cos(TURN), 0, 0, 0, 1))
    return image


def same_places(found, image):
    for index in ((0, 0, 0), (3, 1, 2)):
        left, back, up = image.TransformIndexToPhysicalPoint(index)
        assert found.affine @ [*index, 1] == pytest.approx([-left, -back, up, 1], abs=1e-4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["a.nrrd", "a.nhdr", "a.mha", "a.mhd"])
@pytest.mark.parametrize("dtype", ["int16", "uint8", "float32", "float64"])
def test_nrrd_and_metaimage_are_read_as_simpleitk_reads_them(tmp_path, name, packed, dtype):
    image = itk_image(dtype)
    SimpleITK.WriteImage(image, str(tmp_path / name), useCompression=packed)
    found = read(tmp_path / name)
    assert (found.array == VOLUME.astype(dtype)).all() and found.spacing == pytest.approx((0.5, 0.7, 2.5))
    assert found.unit == "mm" and found.array.dtype == dtype
    same_places(found, image)
    assert len(files_of(tmp_path / name)) == (2 if name in ("a.nhdr", "a.mhd") else 1)
    assert all(f.is_file() for f in files_of(tmp_path / name))


def nrrd(path, array, *fields, encoding="raw", size=None, lost=0):
    """Write it by hand; ``lost``: the bytes that are missing at the end."""
    voxels = array.tobytes("F")
    voxels = gzip.compress(voxels) if encoding == "gzip" else voxels
    kind = {"int16": "short", "uint8": "uchar"}[array.dtype.name]
    head = ["NRRD0005", "# by hand", f"type: {kind}", f"dimension: {array.ndim}",
            f"sizes: {' '.join(map(str, size or array.shape))}", f"encoding: {encoding}",
            "endian: " + ("big" if array.dtype.str[0] == ">" else "little"), "Segment0_Name:=x", *fields]  # fmt: skip
    path.write_bytes("\n".join(head).encode() + b"\n\n" + voxels[: len(voxels) - lost])
    return path


def test_nrrd_spaces_channels_and_byte_orders(tmp_path):
    lines = ("space directions: (2,0,0) (0,3,0) (0,0,4)", "space origin: (1,2,3)")
    ras = np.array([[2, 0, 0, 1], [0, 3, 0, 2], [0, 0, 4, 3], [0, 0, 0, 1.0]])
    for space, signs in {"right-anterior-superior": (1, 1), "LPS": (-1, -1), "left-anterior-superior": (-1, 1)}.items():
        found = read(nrrd(tmp_path / "a.nrrd", VOLUME, f"space: {space}", *lines))
        assert np.allclose(found.affine, np.diag([*signs, 1, 1]) @ ras)
    big = read(nrrd(tmp_path / "big.nrrd", VOLUME.astype(">i2"), "spacings: 1 1 2", encoding="gzip"))
    assert (big.array == VOLUME).all() and big.array.dtype.isnative and big.spacing == (1, 1, 2) and big.unit == ""
    many = np.stack([VOLUME, VOLUME + 1])
    kinds = ("kinds: list domain domain domain", "space: LPS", "space directions: none (1,0,0) (0,1,0) (0,0,2)")
    found = read(nrrd(tmp_path / "x.seg.nrrd", many, *kinds))
    assert found.channels == 2 and (found.array[..., 1] == VOLUME + 1).all() and found.spacing == (1, 1, 2)
    colours = np.arange(60, dtype=np.uint8).reshape(3, 5, 4)
    flat = read(nrrd(tmp_path / "rgb.nrrd", colours, "kinds: RGB-color domain domain"))
    assert flat.dims == 2 and flat.channels == 3 and flat.shape == (5, 4)


@pytest.mark.parametrize(
    ("fields", "options", "says"),
    [
        ([], {"encoding": "bzip2"}, "write it again as raw or gzip"),
        ([], {"size": (6, 5, 40)}, "ends early"),
        ([], {"encoding": "gzip", "lost": 60}, "ends early"),
        ([], {"size": (60000, 50000, 40)}, "more than the"),
        ([], {"size": (6, 5)}, "dimension: 3 and sizes: 6 5"),
        (["kinds: list vector domain"], {}, "directions of space"),
        (["space directions: (1,0) (0,1,0) (0,0,1)"], {}, "differ in length"),
        (["space directions: (0,0,0) (0,1,0) (0,0,1)"], {}, "degenerate"),
        (["data file: ../../etc/passwd"], {}, "not one file beside it"),
        (["data file: LIST"], {}, "not one file beside it"),
        (["byte skip: 99999999999"], {}, "begin after"),
    ],
)
def test_a_bad_nrrd_is_one_sentence(tmp_path, fields, options, says):
    refused(nrrd(tmp_path / "a.nrrd", VOLUME, *fields, **options), says)


@pytest.mark.parametrize("axes", [(1, 0, 0, 0, 1, 0), OBLIQUE, (0, 1, 0, 0, 0, -1)])
@pytest.mark.parametrize("name", ["IM{:04d}.dcm", "IM{:04d}", "1.2.840.{}"])
def test_a_dicom_series_is_read_as_simpleitk_reads_it(tmp_path, axes, name):
    folder = foreign.dicom_series(tmp_path / "ct", VOLUME, axes=axes, name=name)
    (folder / "DICOMDIR").write_bytes(b"x")
    (folder / "notes.txt").write_text("x")
    found = read(folder)
    reader = SimpleITK.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(folder)))
    image = reader.Execute()
    assert (found.array == SimpleITK.GetArrayFromImage(image).transpose(2, 1, 0)).all()
    assert (found.array == VOLUME).all() and found.spacing == pytest.approx((0.7, 0.8, 2.5)) and found.unit == "mm"
    same_places(found, image)
    assert len(files_of(folder)) == 4


def test_a_single_dicom_file_is_a_picture_with_a_spacing(tmp_path):
    folder = foreign.dicom_series(tmp_path / "x", VOLUME[..., :1])
    found, series = read(folder / "IM0000.dcm"), read(folder)
    assert found.dims == 2 and (found.array == VOLUME[..., 0]).all() and found.spacing == pytest.approx((0.7, 0.8))
    assert series.shape == (6, 5, 1) and series.spacing[2] == 2.5


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ([0, 2.5, 7.5, 10], "slices are missing (5 mm lie between"),
        ([0, 2.5, 6.1, 8.6], "unequally spaced"),
        ([0, 2.5, 2.5, 5], "lie at the same place"),
    ],
)
def test_slices_with_gaps_and_two_series_are_refused(tmp_path, places, says):
    refused(foreign.dicom_series(tmp_path / "x", VOLUME, places=places), says)
    foreign.dicom_series(tmp_path / "x", VOLUME[..., :2], name="other{}.dcm")
    refused(tmp_path / "x", "2 DICOM series: CT series 3 (4 files from IM0000.dcm), CT series 3 (2 files from other0")


def test_what_is_no_series_is_refused_in_a_sentence_without_identifiers(tmp_path):
    (tmp_path / "none").mkdir()
    refused(tmp_path / "none", "without DICOM files")
    folder = foreign.dicom_series(tmp_path / "x", VOLUME)
    sound = (folder / "IM0001.dcm").read_bytes()
    for content, says in (
        (sound[:400], "damaged|has no|without an image"),
        (sound[:-10], "damaged"),
        (b"hello", "does not begin with the header"),
        (sound.replace(b"0.8\\0.7 ", b"Doe^Jane"), "damaged"),
    ):
        (folder / "IM0001.dcm").write_bytes(content)
        with pytest.raises(DataError, match=says) as refusal:
            read(folder)
        assert not [s for s in foreign.SECRETS if s in str(refusal.value)] and refusal.value.__cause__ is None
    deflated = foreign.dicom_series(tmp_path / "deflated", VOLUME, syntax=DeflatedExplicitVRLittleEndian)
    with pytest.raises(DataError, match="deflated as a whole"):
        read(deflated)


@pytest.mark.parametrize("name", ["a.h5", "a.hdf5", "a.npz"])
def test_an_array_is_found_by_its_key(tmp_path, name):
    if name == "a.npz":
        np.savez_compressed(tmp_path / name, image=VOLUME, label=VOLUME > 0)
    else:
        with h5py.File(tmp_path / name, "w") as file:
            file.create_dataset("image", data=VOLUME, compression="gzip")
            file["label"], file["scalar"] = VOLUME > 0, 3.0
    found = read(tmp_path / f"{name}#image")
    assert (found.array == VOLUME).all() and found.dims == 3 and found.unit == "" and found.spacing == (1, 1, 1)
    assert set(np.unique(read(tmp_path / f"{name}#label").array)) == {0, 1}
    assert files_of(tmp_path / f"{name}#image") == (tmp_path / name,)
    refused(tmp_path / f"{name}#mask", "no array 'mask'", "it holds image, label")
    refused(tmp_path / name, "say which, as in FILE#KEY")


def test_groups_of_hdf5_and_links_to_other_files(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["secret"] = VOLUME
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["scans/t1"] = VOLUME
        file["far"] = h5py.ExternalLink("other.h5", "/secret")
        file.create_dataset("huge", shape=(50_000, 50_000), dtype="f4", chunks=(100, 100))
        file.create_dataset("empty", shape=(4000, 4000), dtype="f4", chunks=(100, 100))
        virtual = h5py.VirtualLayout(VOLUME.shape, VOLUME.dtype)
        virtual[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "secret", VOLUME.shape)
        file.create_virtual_dataset("virtual", virtual)
    assert (read(tmp_path / "a.h5#scans/t1").array == VOLUME).all()
    refused(tmp_path / "a.h5#far", "no array 'far'")
    refused(tmp_path / "a.h5#huge", f"more than the {MAX_VOXELS:.3g}")
    refused(tmp_path / "a.h5#empty", "ends early")
    refused(tmp_path / "a.h5#virtual", "in other files")


@pytest.mark.parametrize(
    ("shape", "dtype", "order", "dims", "channels"),
    [((5, 4), ">f4", "C", 2, 1), ((5, 4, 3), "u1", "C", 2, 3), ((5, 4, 3), "i2", "F", 3, 1),
     ((1, 5, 4, 6), "f2", "F", 3, 1), ((5, 4, 6, 2), "?", "C", 3, 2)],
)  # fmt: skip
def test_npy_of_all_shapes_and_kinds(tmp_path, shape, dtype, order, dims, channels):
    array = np.asarray(np.arange(np.prod(shape)).reshape(shape) % 200, dtype, order=order)
    np.save(tmp_path / "a.npy", array)
    found = read(tmp_path / "a.npy")
    assert (found.dims, found.channels) == (dims, channels) and (found.array == array.squeeze()).all()
    assert found.array.dtype.isnative and found.array.dtype.kind in "iuf"


def test_what_is_no_array_is_refused(tmp_path):
    np.save(tmp_path / "line.npy", np.ones(5))
    np.save(tmp_path / "objects.npy", np.array([[{}, 1]]), allow_pickle=True)
    np.savez(tmp_path / "objects.npz", image=np.array([[{}, 1]]))
    for name, header in {"deep": "[" * 1000, "cut": "{'descr': '<f4'", "odd": "1_"}.items():
        size = len(header).to_bytes(2, "little")
        (tmp_path / f"{name}.npy").write_bytes(b"\x93NUMPY\x01\x00" + size + header.encode())
    with zipfile.ZipFile(tmp_path / "long.npz", "w", zipfile.ZIP_DEFLATED) as packed:  # it is not unpacked
        packed.writestr("image.npy", b"\x93NUMPY\x02\x00" + (1 << 30).to_bytes(4, "little") + bytes(1 << 20))
    for name in ("text.npy", "text.npz", "text.h5", "text.nrrd"):
        (tmp_path / name).write_text("hello")
    for names, says in {
        ("line.npy",): "the shape (5,)",
        ("objects.npy", "objects.npz"): "not of plain numbers",
        ("deep.npy", "cut.npy", "odd.npy"): "no description of an array",
        ("long.npz",): "its header has 1073741824 bytes",
        ("text.npy", "text.npz", "text.h5"): "cannot be read",
        ("text.nrrd",): "does not begin with the header of a NRRD file",
        ("a.mgz",): ".mgz files are not read",
    }.items():
        for name in names:
            refused(tmp_path / name, says)


def test_a_gif_of_greys_has_its_greys_whatever_its_palette(tmp_path):
    mask = np.zeros((5, 4), np.uint8)
    mask[1:3] = 1
    for palette, values in (((0, 0, 0, 255, 255, 255), (0, 255)), ((255, 255, 255, 0, 0, 0), (255, 0))):
        picture = Pillow.frombytes("P", (4, 5), mask.tobytes())
        picture.putpalette(palette)
        picture.save(tmp_path / "a.gif")
        assert (read(tmp_path / "a.gif").array == np.where(mask, values[1], values[0])).all()
    frames = [Pillow.fromarray(np.full((4, 4), v, np.uint8)) for v in (0, 99)]
    frames[0].save(tmp_path / "many.gif", save_all=True, append_images=frames[1:])
    refused(tmp_path / "many.gif", "holds 2 pictures")
    content = bytearray((tmp_path / "many.gif").read_bytes())
    content[6:10] = (13000).to_bytes(2, "little") * 2
    (tmp_path / "bomb.gif").write_bytes(content)
    refused(tmp_path / "bomb.gif", "cannot hold 13000 x 13000 pixels")
    Pillow.new("P", (3000, 3000)).save(tmp_path / "empty.gif")  # packed as tightly as can be
    assert not read(tmp_path / "empty.gif").array.any()


def test_ppm_and_pgm_also_packed(tmp_path):
    colours = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    content = b"P6 5 4 255\n" + colours.tobytes()
    for name, stored in (("a.ppm", content), ("a.ppm.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(stored)
        assert (read(tmp_path / name).array == colours).all() and read(tmp_path / name).channels == 3
    (tmp_path / "a.pgm").write_bytes(b"P5 5 4 255\n" + bytes(range(20)))
    assert (read(tmp_path / "a.pgm").array == np.arange(20).reshape(4, 5)).all()
    (tmp_path / "a.pgm").write_bytes(b"P5 5 4 255\n" + bytes(3))
    refused(tmp_path / "a.pgm", "cannot be read")
