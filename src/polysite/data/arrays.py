"""Reader of arrays without geometry: HDF5 (``.h5``, ``.hdf5``), NPY and NPZ.

``scan.h5#image`` names the array ``image`` of a file with several. The axes are those of the array, channels last; the
size of a voxel comes from the column ``spacing`` of the manifest. Nothing is unpickled, and no other file is opened.
"""

import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from polysite.data.images import MAX_VOXELS, Image, native, read_voxels

RATIO = 1100  # bytes that a compressed byte can stand for: deflate packs up to 1032
MAX_KEYS = 10_000
MAX_HEADER = 10_000  # bytes; NumPy's own limit, which it checks after it has read them


def read(file: Path, key: str) -> Image:
    """Return the image in a file; the key may be left out where the file holds one array."""
    kind = file.suffix.lower()
    array = _npy(file) if kind == ".npy" else _npz(file, key) if kind == ".npz" else _hdf5(file, key)
    return _image(array)


def keys(file: Path) -> list[str]:
    """Return the names of the arrays in a file that may be images: numbers in at least two dimensions."""
    if file.suffix.lower() == ".npy":
        return []
    if file.suffix.lower() == ".npz":
        with _unpacked(file) as packed:
            return _members(packed)
    with _opened(file) as root:
        return _datasets(root)


def _image(array: np.ndarray) -> Image:
    """Return an array as an image: a picture of three colours has the type uint8 and the shape (row, column, 3)."""
    if array.dtype == bool:
        array = array.astype(np.uint8)
    if array.dtype.kind not in "iuf" or array.dtype.itemsize > 8:
        raise ValueError(f"its array is of the type {array.dtype}, not of plain numbers")
    if array.dtype.itemsize == 2 and array.dtype.kind == "f":
        array = array.astype(np.float32)
    if array.ndim > 3:
        array = array.reshape([n for n in array.shape if n > 1])
    colours = array.ndim == 3 and array.shape[-1] == 3 and array.dtype == np.uint8
    dims = 2 if colours or array.ndim == 2 else 3
    if array.ndim not in (2, 3, 4):
        raise ValueError(f"its array has the shape {array.shape}; an image has 2 or 3 axes, and one more for channels")
    return Image(native(array), np.eye(dims + 1))


def _npy(file: Path) -> np.ndarray:
    with file.open("rb") as stream:
        return _plain(stream)


@contextmanager
def _unpacked(file: Path) -> Iterator[zipfile.ZipFile]:
    """Open an NPZ file; errors of ``zipfile`` become ValueError."""
    try:
        with zipfile.ZipFile(file) as packed:
            yield packed
    except (zipfile.BadZipFile, NotImplementedError) as problem:
        raise ValueError(f"it is no NPZ file or damaged ({problem})") from problem


def _members(packed: zipfile.ZipFile) -> list[str]:
    return [n.removesuffix(".npy") for n in packed.namelist()[:MAX_KEYS] if n.endswith(".npy")]


def _npz(file: Path, key: str) -> np.ndarray:
    with _unpacked(file) as packed, packed.open(f"{_chosen(key, _members(packed))}.npy") as stream:
        return _plain(stream)


def _plain(stream: IO[bytes]) -> np.ndarray:
    """Read an array in NumPy's format, piece by piece: NumPy would allocate all that a header claims."""
    start = stream.read(8)
    if start[:6] != npy.MAGIC_PREFIX or start[6:7] not in (b"\1", b"\2", b"\3"):
        raise ValueError("it does not begin with the header of an NPY file")
    length = stream.read(2 if start[6:7] == b"\1" else 4)
    size = int.from_bytes(length, "little")
    if size > MAX_HEADER:
        raise ValueError(f"its header has {size} bytes")
    header = npy.read_array_header_1_0 if len(length) == 2 else npy.read_array_header_2_0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shape, fortran, dtype = header(BytesIO(length + stream.read(size)))
    except Exception as problem:  # of many kinds, since NumPy has Python's parser read a header
        raise ValueError(f"its header is no description of an array ({type(problem).__name__})") from None
    if dtype.hasobject or dtype.kind not in "biuf":
        raise ValueError(f"its array is of the type {dtype}, not of plain numbers")
    if not shape:
        raise ValueError("its header claims the shape ()")
    array = read_voxels(stream, shape if fortran else shape[::-1], dtype)
    return array if fortran else array.transpose()


def _chosen(key: str, names: list[str]) -> str:
    """Return the array to read."""
    if key in names or f"/{key}" in names or (not key and len(names) == 1):
        return key or names[0]
    shown = ", ".join(names[:20]) + ", ..." * (len(names) > 20) if names else "no array of two dimensions or more"
    asked = f"has no array {key!r}" if key else "holds several arrays, so say which, as in FILE#KEY"
    raise ValueError(f"it {asked if names else 'cannot be an image'}; it holds {shown}")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    import h5py  # here, since most datasets do without it

    with h5py.File(file, "r", locking=False) as root:
        yield root


def _hdf5(file: Path, key: str) -> np.ndarray:
    with _opened(file) as root:
        names = _datasets(root)
        found = root[_chosen(key.strip("/"), names)]
        if found.is_virtual or found.external:
            raise ValueError("its array lies in other files; copy it into one file")
        if found.size > MAX_VOXELS:
            raise ValueError(f"its array has {found.size:.3g} voxels, more than the {MAX_VOXELS:.3g} allowed")
        stored, wanted = found.id.get_storage_size(), prod(found.shape) * found.dtype.itemsize
        if wanted > RATIO * stored + (1 << 16):
            raise ValueError(f"it ends early: {stored} bytes are stored for {wanted} bytes of voxels")
        return np.asarray(found[()])


def _datasets(root: Any) -> list[str]:
    """Return the arrays of an HDF5 file, by path. Links to other places are not followed."""
    import h5py

    names: list[str] = []
    groups = [("", root, 0)]
    while groups and len(names) < MAX_KEYS:
        above, group, depth = groups.pop(0)
        for name in list(group)[:MAX_KEYS]:
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                continue
            found, path = group[name], f"{above}/{name}".lstrip("/")
            if isinstance(found, h5py.Group) and depth < 4:
                groups.append((path, found, depth + 1))
            elif isinstance(found, h5py.Dataset) and len(found.shape or ()) >= 2 and found.dtype.kind in "biuf":
                names.append(path)
    return names
