"""Reader and writer of NRRD files (``.nrrd``, and ``.nhdr`` with the voxels in a second file).

The reader keeps to the bounds of ``images``. An axis that is no direction of space (kinds such as ``list``,
``vector`` or ``RGB-color``) holds the channels.
"""

import gzip
import math
import re
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path

import numpy as np

from polysite.data.images import Image, Inflating, native, read_voxels

MAX_LINES = 10_000  # of a header: Slicer writes some for every segment
TYPES = {
    "i1": "signed char, int8, int8_t", "u1": "uchar, unsigned char, uint8, uint8_t",
    "i2": "short, short int, signed short, signed short int, int16, int16_t",
    "u2": "ushort, unsigned short, unsigned short int, uint16, uint16_t",
    "i4": "int, signed int, int32, int32_t", "u4": "uint, unsigned int, uint32, uint32_t",
    "i8": "longlong, long long, long long int, signed long long, signed long long int, int64, int64_t",
    "u8": "ulonglong, unsigned long long, unsigned long long int, uint64, uint64_t", "f4": "float", "f8": "double",
}  # fmt: skip
CODES = {name: code for code, names in TYPES.items() for name in names.split(", ")}
SPATIAL = ("domain", "space", "time", "???", "none")
# signs of the first two axes that make a space RAS; a file without a known space is read as LPS, as ITK does
SPACES = {"right-anterior-superior": (1, 1), "ras": (1, 1), "left-anterior-superior": (-1, 1), "las": (-1, 1)}
PATIENT = (*SPACES, "left-posterior-superior", "lps")


def read(file: Path) -> Image:
    """Return the image in a file."""
    with file.open("rb") as stream:
        head = _header(stream)
        sizes = tuple(int(n) for n in head["sizes"].split())
        if len(sizes) != int(head["dimension"]) or not 2 <= len(sizes) <= 4:
            raise ValueError(f"it has dimension: {head['dimension']} and sizes: {head['sizes']}")
        code = CODES.get(head["type"].lower())
        if code is None:
            raise ValueError(f"its voxels are of the type {head['type']!r}, not plain numbers")
        dtype = np.dtype((">" if head.get("endian", "little").lower() == "big" else "<") + code)
        source = _source(head)
        if source:
            with (file.parent / source).open("rb") as beside:
                array = _array(beside, head, sizes, dtype)
        else:
            array = _array(stream, head, sizes, dtype)
    steps = _steps(head, len(sizes))
    space = [k for k, step in enumerate(steps) if step is not None]
    if not 2 <= len(space) <= 3 or len(sizes) - len(space) > 1:
        raise ValueError(
            f"it has {len(sizes)} axes, of which {len(space)} are directions of space; an image has 2 or 3 of them and "
            "at most one axis of channels (the field 'kinds' says which)"
        )
    array = array.transpose([*space, *(k for k in range(len(sizes)) if k not in space)])
    unit = "mm" if head.get("space", "").lower() in PATIENT or '"mm"' in head.get("space units", "") else ""
    return Image(native(array), _affine(head, [np.array(steps[k]) for k in space]), unit)


def data_file(file: Path) -> Path | None:
    """Return the second file, which holds the voxels; None if they are in the file itself."""
    with file.open("rb") as stream:
        source = _source(_header(stream))
    return file.parent / source if source else None


def write(mask: np.ndarray, source: Path | None, affine: np.ndarray) -> bytes:
    """Return a mask as the content of an NRRD file.

    Args:
        mask: Bytes on the grid of a scan.
        source: The NRRD file of the scan, whose geometry is repeated word for word; None: that of the affine, in LPS.
        affine: Voxels to millimetres, in RAS.
    """
    if source is not None:
        with source.open("rb") as stream:
            geometry = _repeated(_header(stream))
    elif mask.ndim == 2:
        geometry = {"spacings": " ".join(repr(float(v)) for v in np.diag(affine)[:2])}
    else:
        axes = np.diag([-1.0, -1.0, 1.0]) @ affine[:3]
        directions = " ".join(f"({','.join(repr(float(v)) for v in axes[:, k])})" for k in range(3))
        origin = ",".join(repr(float(v)) for v in axes[:, 3])
        geometry = {
            "space": "left-posterior-superior", "space directions": directions, "space origin": f"({origin})",
        }  # fmt: skip
    fields = {
        "type": "uint8",
        "dimension": str(mask.ndim),
        "sizes": " ".join(map(str, mask.shape)),
        **geometry,
        "kinds": " ".join(["domain"] * mask.ndim),
        "encoding": "gzip",
    }
    head = "NRRD0004\n" + "".join(f"{key}: {value}\n" for key, value in fields.items()) + "\n"
    return head.encode() + gzip.compress(mask.astype(np.uint8).tobytes("F"), 6, mtime=0)


def _repeated(head: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a header that say where the voxels lie, without those of an axis of channels."""
    count = int(head["dimension"])
    space = [k for k, step in enumerate(_steps(head, count)) if step is not None]
    found = {k: head[k] for k in ("space", "space dimension", "space origin", "space units") if k in head}
    if "space directions" in head:
        texts = re.findall(r"none|\([^)]*\)", head["space directions"])
        found["space directions"] = " ".join(texts[k] for k in space)
    for key in ("spacings", "units", "axis mins"):
        words = re.findall(r'"[^"]*"|\S+', head.get(key, ""))
        if len(words) == count:
            found[key] = " ".join(words[k] for k in space)
    return found


def _source(head: Mapping[str, str]) -> str:
    source = head.get("data file", head.get("datafile", ""))
    if Path(source).name != source or source.upper().startswith("LIST") or "%" in source:
        raise ValueError(f"its data file {source!r} is not one file beside it")
    return source


def _header(stream: BufferedReader) -> Mapping[str, str]:
    if not re.fullmatch(rb"NRRD000[1-5]\r?\n", stream.readline(16)):
        raise ValueError("it does not begin with the header of a NRRD file")
    head: dict[str, str] = {}
    for _ in range(MAX_LINES):
        line = stream.readline(1 << 16).decode("utf-8", "replace")
        if not line.strip():
            break
        key, sign, value = line.partition(":")
        if not line.startswith("#") and sign and not value.startswith("="):  # := are remarks of other programs
            head[key.strip().lower()] = value.strip()
    lacking = [k for k in ("dimension", "type", "sizes", "encoding") if k not in head]
    if lacking:
        raise ValueError(f"its header lacks {', '.join(lacking)}")
    return head


def _array(
    stream: BufferedReader, head: Mapping[str, str], sizes: tuple[int, ...], dtype: "np.dtype[np.generic]"
) -> np.ndarray:
    encoding = head["encoding"].lower()
    if encoding not in ("raw", "gzip", "gz"):
        raise ValueError(f"its encoding is {encoding!r}; write it again as raw or gzip")
    lines, skip = (int(head.get(f"{k} skip", head.get(f"{k}skip", "0"))) for k in ("line", "byte"))
    if not 0 <= lines <= MAX_LINES or not -1 <= skip <= 1 << 24:
        raise ValueError(f"its voxels begin after {lines} lines and {skip} bytes")
    for _ in range(lines):
        stream.readline(1 << 20)
    if encoding != "raw":
        inflating = Inflating(stream)
        while skip > 0 and (piece := inflating.read(skip)):
            skip -= len(piece)
        return read_voxels(inflating, sizes, dtype)
    if skip < 0:  # the voxels are the end of the file
        stream.seek(-math.prod(sizes) * dtype.itemsize, 2)
    else:
        stream.seek(skip, 1)
    return read_voxels(stream, sizes, dtype)


def _steps(head: Mapping[str, str], count: int) -> list[list[float] | None]:
    """Return the step of one voxel along every axis; None along an axis of channels."""
    kinds = head.get("kinds", "domain " * count).lower().split()
    if len(kinds) != count:
        raise ValueError(f"its kinds are {len(kinds)} words for {count} axes")
    axes = [kind in SPATIAL for kind in kinds]
    if "space directions" in head:
        texts = re.findall(r"none|\([^)]*\)", head["space directions"].lower())
        if len(texts) != count:
            raise ValueError(f"its space directions are {len(texts)} vectors for {count} axes")
        steps = [None if t == "none" else [float(v) for v in t.strip("()").split(",")] for t in texts]
        return [step if axis else None for step, axis in zip(steps, axes, strict=True)]
    sizes = [float(v) for v in head.get("spacings", "1 " * count).split()]
    if len(sizes) != count:
        raise ValueError(f"its spacings are {len(sizes)} numbers for {count} axes")
    space = [k for k in range(count) if axes[k] and not math.isnan(sizes[k])]
    units = dict(zip(space, np.eye(len(space)), strict=True))
    return [(units[k] * sizes[k]).tolist() if k in units else None for k in range(count)]


def _affine(head: Mapping[str, str], steps: list[np.ndarray]) -> np.ndarray:
    """Return the affine of the axes of space, in RAS; of a 2D image only the size of its voxels."""
    if len({len(s) for s in steps}) > 1 or len(steps[0]) not in (2, 3):
        raise ValueError("its space directions differ in length or have neither 2 nor 3 numbers")
    if len(steps) == 2:
        return np.diag([*(float(np.linalg.norm(s)) for s in steps), 1.0])
    affine = np.eye(4)
    origin = [float(v) for v in head.get("space origin", "(0,0,0)").strip("()").split(",")]
    if len(steps[0]) != 3 or len(origin) != 3:
        raise ValueError("its space origin or directions do not have three numbers")
    affine[:3, :3], affine[:3, 3] = np.stack(steps, axis=1), origin
    signs = SPACES.get(head.get("space", "").lower(), (-1, -1))
    affine[:2] *= np.array(signs)[:, None]
    return affine
