"""Reader of untrusted image files: NIfTI, MetaImage and pictures; others are in ``nrrd``, ``dicom`` and ``arrays``.

No memory is allocated for voxels that a header claims before the file has delivered them, so a damaged or hostile file
ends in a DataError. Affines map voxels to millimetres, x to the right, y to the front, z upwards (NIfTI's RAS).
"""

import gzip
import math
import re
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, Protocol

import nibabel
import numpy as np
from nibabel.nifti1 import Nifti1Header
from nibabel.nifti2 import Nifti2Header
from nibabel.spatialimages import HeaderDataError

from polysite.errors import DataError

NIFTI, META, NRRD = (".nii.gz", ".nii"), (".mha", ".mhd"), (".seg.nrrd", ".nrrd", ".nhdr")
PACKED = (".ppm.gz", ".pgm.gz")  # as of STARE
FLAT = (".png", ".tif", ".tiff", ".jpg", ".jpeg", ".gif", ".ppm", ".pgm", *PACKED)
KEYED = (".h5", ".hdf5", ".npz")  # files of several arrays
ARRAYS = (*KEYED, ".npy")
DICOM = (".dcm", ".ima")  # one slice; a folder of them is a volume
SUFFIXES = (*NIFTI, *META, *NRRD, *FLAT, *ARRAYS, *DICOM)
BARE = (*FLAT, *ARRAYS)  # state no size of a voxel
MAX_VOXELS = 1 << 29  # of a file: 512 x 512 x 2000
GIF_RATIO = 2600  # pixels that a byte of a GIF can stand for: a code of 12 bits is a string of at most 3838 pixels
CHUNK = 1 << 24

META_TYPES = {
    "MET_CHAR": "i1", "MET_UCHAR": "u1", "MET_SHORT": "i2", "MET_USHORT": "u2", "MET_INT": "i4", "MET_UINT": "u4",
    "MET_LONG_LONG": "i8", "MET_ULONG_LONG": "u8", "MET_FLOAT": "f4", "MET_DOUBLE": "f8",
}  # fmt: skip


class Stream(Protocol):
    """A source of bytes."""

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes; none at the end."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """The content of an image file."""

    array: np.ndarray  # (*space) or, with several channels, (*space, channel), in the stored type
    affine: np.ndarray  # (dims + 1, dims + 1)
    unit: str = ""  # of the affine: "mm", or empty if the file does not state it

    @property
    def dims(self) -> int:
        """Number of spatial dimensions."""
        return int(self.affine.shape[0]) - 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Size in voxels, without the channels."""
        return tuple(self.array.shape[: self.dims])

    @property
    def channels(self) -> int:
        """Number of channels."""
        return int(self.array.shape[-1]) if self.array.ndim > self.dims else 1

    @property
    def spacing(self) -> tuple[float, ...]:
        """Size of a voxel."""
        return tuple(float(s) for s in np.linalg.norm(self.affine[:-1, :-1], axis=0))

    @property
    def orientation(self) -> str:
        """Directions of the axes, such as RAS or LPS; empty for 2D images."""
        return "".join(nibabel.aff2axcodes(self.affine)) if self.dims == 3 else ""


def suffix(name: str) -> str:
    """Return the image suffix of a file name, or an empty string. The name may end in the key of an array.

    >>> suffix("T1.NII.gz"), suffix("scan.h5#image"), suffix("notes.txt")
    ('.nii.gz', '.h5', '')
    """
    lower = _without_key(name)[0].lower()
    return next((s for s in SUFFIXES if lower.endswith(s)), "")


def stem(name: str) -> str:
    """Return a file name without its image suffix.

    >>> stem("case_0000.nii.gz")
    'case_0000'
    """
    return name[: len(name) - len(suffix(name))]


def is_image(cell: str) -> bool:
    """Return whether a cell of a manifest names an image: a file by its suffix, a folder of DICOM by a slash.

    >>> is_image("n01/t1.nii.gz"), is_image("n01/ct/"), is_image("HGG")
    (True, True, False)
    """
    return bool(suffix(cell)) or (cell.endswith("/") and len(cell) > 1)


def what_is_read() -> str:
    """Return the suffixes that are read, for errors."""
    return f"{', '.join(SUFFIXES)}, and folders of DICOM slices, written with a / at the end"


def _without_key(name: str) -> tuple[str, str]:
    """Split ``scan.h5#image`` into file and key."""
    match = re.match(r"(.*?\.(?:h5|hdf5|npz))#(.+)$", name, re.IGNORECASE | re.DOTALL)
    return (match[1], match[2]) if match else (name, "")


def location(file: Path) -> tuple[Path, str]:
    """Return the file of an image and the key of its array, which is empty in most formats."""
    name, key = _without_key(str(file))
    return Path(name), key


def read(file: Path) -> Image:
    """Return the image in a file, or in a folder of DICOM slices; raise DataError if there is none."""
    kind, (place, key) = suffix(str(file)), location(file)
    with _refusals(file):
        if not kind and file.is_dir():
            from polysite.data import dicom

            image = dicom.read_series(file)
        elif not kind:
            ending = f"{file.suffix} files are not read; " if file.suffix else ""
            raise DataError(f"{file} is no image that polysite reads: {ending}it reads {what_is_read()}")
        elif not place.is_file():
            raise DataError(f"{place} does not exist" if not place.exists() else f"{place} is not a file")
        else:
            image = _opened(place, kind, key)
        if not np.isfinite(image.affine).all():
            raise ValueError("its affine holds NaN or infinite values")
        if not 1e-9 < abs(np.linalg.det(image.affine)) < 1e9:
            raise ValueError("its affine or voxel size is degenerate")
    return image


def _opened(file: Path, kind: str, key: str) -> Image:
    """Read a file of a known kind. Libraries that few datasets need are imported on their first file."""
    if kind in NIFTI:
        return _nifti(file)
    if kind in META:
        return _meta(file)
    if kind in FLAT:
        return _flat(file, kind)
    from polysite.data import arrays, dicom, nrrd

    if kind in NRRD:
        return nrrd.read(file)
    return dicom.read_slice(file) if kind in DICOM else arrays.read(file, key)


def files_of(file: Path) -> tuple[Path, ...]:
    """Return the files that hold an image: ``.mhd`` and ``.nhdr`` have a second file, a DICOM series has many."""
    kind, (place, _) = suffix(str(file)), location(file)
    with _refusals(file):
        if not kind and file.is_dir():
            from polysite.data import dicom

            return dicom.slices_of(file)
        if kind == ".nhdr":
            from polysite.data import nrrd

            voxels = nrrd.data_file(file)
            return (file, voxels) if voxels else (file,)
        if kind != ".mhd":
            return (place,)
        with file.open("rb") as stream:
            source = _meta_header(stream)["ElementDataFile"]
        return (file,) if source == "LOCAL" else (file, file.parent / Path(source).name)


def keys(file: Path) -> list[str]:
    """Return the names of the arrays in a file of several."""
    from polysite.data import arrays

    with _refusals(file):
        return arrays.keys(file)


@contextmanager
def _refusals(file: Path) -> Iterator[None]:
    """Turn the errors of libraries about a damaged file into a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except (
        OSError, EOFError, ValueError, TypeError, KeyError, IndexError, ArithmeticError, MemoryError, SyntaxError,
        RuntimeError, struct.error, zlib.error, HeaderDataError, np.linalg.LinAlgError, Warning,
    ) as problem:  # fmt: skip
        why = str(problem) or type(problem).__name__
        raise DataError(f"{file} cannot be read: {' '.join(why.split())}") from problem


def read_voxels(stream: Stream, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Read as many bytes as the shape needs, piece by piece."""
    if any(n < 1 for n in shape):
        raise ValueError(f"its header claims the shape {shape}")
    wanted = math.prod(shape) * dtype.itemsize
    if math.prod(shape) > MAX_VOXELS:
        raise ValueError(f"its header claims {math.prod(shape):.3g} voxels, more than the {MAX_VOXELS:.3g} allowed")
    content = bytearray()
    while len(content) < wanted:
        piece = stream.read(min(CHUNK, wanted - len(content)))
        if not piece:
            raise ValueError(f"it ends early: {len(content)} of {wanted} bytes of voxels are there")
        content += piece
    return np.frombuffer(content, dtype).reshape(shape, order="F")


def _nifti(file: Path) -> Image:
    with file.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    with gzip.open(file) if packed else file.open("rb") as stream:
        size = stream.read(4)
        kind = Nifti2Header if size in (b"\x1c\x02\0\0", b"\0\0\x02\x1c") else Nifti1Header  # 540 bytes, or 348
        block = size + stream.read(kind.template_dtype.itemsize - 4)
        if len(block) < kind.template_dtype.itemsize:
            raise ValueError("it is empty or shorter than a NIfTI header")
        header = kind(block, check=False)
        if header["magic"].tobytes()[:3] not in (b"n+1", b"n+2"):
            raise ValueError("it does not begin with the header of a NIfTI file")
        count = int(header["dim"][0])
        if not 2 <= count <= 7:
            raise ValueError(f"its header claims {count} dimensions")
        shape = tuple(int(n) for n in header["dim"][1 : count + 1])
        dtype = header.get_data_dtype()
        if dtype.kind not in "iuf" or dtype.itemsize > 8:
            raise ValueError(f"its voxels are of type {dtype}, not plain numbers")
        offset = float(header["vox_offset"])
        if not len(block) <= offset <= 1 << 24:
            raise ValueError(f"its header puts the voxels at byte {offset:g}")
        stream.read(int(offset) - len(block))
        array = read_voxels(stream, shape, dtype)
        if packed:  # gzip checks its checksum at the end
            stream.read(CHUNK)
        slope, shift = (float(v) for v in (header["scl_slope"], header["scl_inter"]))
    dims = 2 if count == 2 else 3
    array = array.reshape([*shape[:dims], *(n for n in shape[dims:] if n > 1)], order="F")
    if array.ndim > dims + 1:
        raise ValueError(f"its shape {shape} is neither a volume nor a volume of several channels")
    if math.isfinite(slope) and math.isfinite(shift) and slope != 0 and (slope, shift) != (1.0, 0.0):
        array = array.astype(np.float32)
        array *= np.float32(slope)
        array += np.float32(shift)
    if not int(header["sform_code"]) and (header["pixdim"][1 : dims + 1] < 0).any():
        raise ValueError(f"its voxel size is negative: {header['pixdim'][1 : dims + 1].tolist()}")
    affine = np.asarray(header.get_best_affine(), np.float64)
    if dims == 2:
        affine = np.diag([*np.linalg.norm(affine[:3, :2], axis=0), 1.0])
    return Image(native(array), affine, "mm" if int(header["xyzt_units"]) & 7 == 2 else "")


def native(array: np.ndarray) -> np.ndarray:
    """Return an array in the byte order of this machine."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _meta(file: Path) -> Image:
    """Read a MetaImage, the format of LUNA16: a text header, and the voxels after it or in a second file."""
    with file.open("rb") as stream:
        head = _meta_header(stream)
        dims, shape = int(head["NDims"]), tuple(int(n) for n in head["DimSize"].split())
        if dims not in (2, 3) or len(shape) != dims:
            raise ValueError(f"it has NDims = {dims} and DimSize = {head['DimSize']}; an image has 2 or 3 dimensions")
        kind = head["ElementType"]
        if kind not in META_TYPES:
            raise ValueError(f"its ElementType {kind} is not one of {', '.join(META_TYPES)}")
        dtype = np.dtype(
            (">" if _true(head, "BinaryDataByteOrderMSB", "ElementByteOrderMSB") else "<") + META_TYPES[kind]
        )
        channels = int(head.get("ElementNumberOfChannels", "1"))
        full = (channels, *shape) if channels > 1 else shape
        source = head["ElementDataFile"]
        if source == "LOCAL":
            array = _meta_voxels(stream, head, full, dtype)
        else:
            if Path(source).name != source:
                raise ValueError(f"its ElementDataFile {source!r} is not a file beside it")
            with (file.parent / source).open("rb") as beside:
                array = _meta_voxels(beside, head, full, dtype)
    array = np.moveaxis(array, 0, -1) if channels > 1 else array
    spacing = _numbers(head, ("ElementSpacing", "ElementSize"), [1.0] * dims)
    axes = np.array(_numbers(head, ("TransformMatrix", "Rotation", "Orientation"), list(np.eye(dims).ravel())))
    origin = _numbers(head, ("Offset", "Position", "Origin"), [0.0] * dims)
    affine = np.eye(dims + 1)
    affine[:-1, :-1] = axes.reshape(dims, dims).T * spacing
    affine[:-1, -1] = origin
    if dims == 3:
        affine[:2] *= -1  # MetaImage's x and y point to the left and to the back
    return Image(native(array), affine, "mm")


def _meta_header(stream: BufferedReader) -> Mapping[str, str]:
    head: dict[str, str] = {}
    while "ElementDataFile" not in head:
        line = stream.readline(4096)
        key, sign, value = line.decode("ascii", "replace").partition("=")
        if not sign or len(head) > 200:
            raise ValueError("it has no MetaImage header that ends in ElementDataFile")
        head[key.strip()] = value.strip()
    lacking = [k for k in ("NDims", "DimSize", "ElementType") if k not in head]
    if lacking:
        raise ValueError(f"its header lacks {', '.join(lacking)}")
    return head


def _meta_voxels(
    stream: BufferedReader, head: Mapping[str, str], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> np.ndarray:
    skip = int(head.get("HeaderSize", "0"))
    if skip > 0:
        stream.seek(skip)
    if skip < 0:  # the voxels are the end of the file
        stream.seek(-math.prod(shape) * dtype.itemsize, 2)
    return read_voxels(Inflating(stream) if _true(head, "CompressedData") else stream, shape, dtype)


class Inflating:
    """A zlib or gzip stream that never decompresses more bytes than are requested."""

    def __init__(self, stream: BufferedReader):
        self.stream, self.engine = stream, zlib.decompressobj(wbits=47)  # either kind

    def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes; none at the end."""
        while not self.engine.eof:
            packed = self.engine.unconsumed_tail or self.stream.read(1 << 16)
            inflated = self.engine.decompress(packed, size)
            if inflated or not packed:
                return inflated
        return b""


def _true(head: Mapping[str, str], *keys: str) -> bool:
    return any(head.get(k, "").lower() == "true" for k in keys)


def _numbers(head: Mapping[str, str], keys: tuple[str, ...], default: list[float]) -> list[float]:
    text = next((head[k] for k in keys if k in head), None)
    numbers = default if text is None else [float(v) for v in text.split()]
    if len(numbers) != len(default):
        raise ValueError(f"its {keys[0]} holds {len(numbers)} numbers instead of {len(default)}")
    return numbers


def _flat(file: Path, kind: str) -> Image:
    """Read a 2D image as (row, column): colours become channels, a palette its indices; transparency is dropped.

    A GIF of greys has its greys instead: which index is white differs from program to program.
    """
    with _picture(file, kind) as picture:
        width, height = picture.size
        if width * height * len(picture.getbands()) > MAX_VOXELS:
            raise ValueError(f"it has {width} x {height} pixels, more than the {MAX_VOXELS:.3g} allowed")
        size = file.stat().st_size
        if kind == ".gif" and width * height > GIF_RATIO * size + (1 << 16):
            raise ValueError(f"it ends early: {size} bytes cannot hold {width} x {height} pixels")
        frames = getattr(picture, "n_frames", 1)
        if frames > 1:
            raise ValueError(f"it holds {frames} pictures; write one file each, or a volume as NIfTI")
        mode = {"RGBA": "RGB", "LA": "L", "PA": "P"}.get(picture.mode, picture.mode)
        if mode not in ("1", "L", "P", "I", "F", "RGB") and not mode.startswith("I;16"):
            raise ValueError(f"its pixels are of the kind {mode}; write grey, indexed or RGB pixels")
        if kind == ".gif" and mode == "P":
            colours = np.asarray(picture.convert("RGB"))
            array = colours[..., 0] if (colours == colours[..., :1]).all() else np.asarray(picture)
        else:
            array = np.asarray(picture if mode == picture.mode else picture.convert(mode))
    return Image(array.astype(np.uint8) if array.dtype == bool else native(array), np.eye(3))


def _picture(file: Path, kind: str) -> Any:
    """Open a picture from memory: a file would be asked for as many bytes as it claims."""
    from PIL import Image as Pillow

    if kind in PACKED:
        with gzip.open(file) as stream:
            content = stream.read(1 << 28)
    else:
        content = file.read_bytes()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Pillow.DecompressionBombWarning)  # sizes are checked by `_flat`
            return Pillow.open(BytesIO(content))
    except Pillow.DecompressionBombError as problem:
        raise ValueError("it claims more pixels than a picture has") from problem


def colours(file: Path) -> int:
    """Return the number of colours of a picture, by its header: 3 or 1."""
    kind = suffix(str(file))
    with _refusals(file), _picture(file, kind) as picture:
        return 3 if picture.mode in ("RGB", "RGBA") else 1
