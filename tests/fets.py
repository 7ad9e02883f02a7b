"""A folder like FeTS 2022, made of tiny scans: real names, sites and published folds, drawn brains and tumours.

The names come from the real partition and folds in ``shared/data``, which the package does not hold.
"""

import csv
import gzip
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import nibabel
import numpy as np

PARTITION = Path("fets_partitions/fets2022_partitioning_1.csv")
FOLDS = {  # folder beside the cases -> folder of the published files
    "folds": Path("fets_folds/partitioning_1_folds"),
    "folds_limited": Path("fets_folds/partitioning_1_homogeneous_known_tumor_folds"),
}
NAME = "partitioning_1_{part}_fold_{fold}.csv"
# brightness of grey matter, oedema (2), necrosis (1) and enhancing tumour (4)
TISSUES = {"flair": (40, 90, 60, 70), "t1": (60, 50, 30, 55), "t1ce": (60, 55, 35, 110), "t2": (45, 85, 95, 75)}


def write(folder: Path, shared: Path, share: float = 1.0, size: int = 16, cases: Sequence[str] = ()) -> Path:
    """Write the fake dataset and return its folder.

    ``folder`` holds ``FeTS2022_xxxxx/FeTS2022_xxxxx_{flair,t1,t1ce,t2,seg}.nii.gz``, ``partitioning_1.csv``, and the
    published folds of the written cases, ``folds/partitioning_1_test_fold_0.csv`` and so on, and ``folds_limited/``.

    Args:
        folder: Folder to make.
        shared: Folder of the real data, with the partition and the folds.
        share: Share of the cases. Every site keeps a case in every fold where it has one, limited folds included, and
            the cases that two folds test.
        size: Voxels along every axis.
        cases: Names of cases to write whatever the share.
    """
    site_of = {r["Subject_ID"]: r["Partition_ID"] for r in _rows(shared / PARTITION)}
    folds = {name: _published(shared / place) for name, place in FOLDS.items()}
    selected = _selected(site_of, folds, share)
    kept = dict.fromkeys(c for c in site_of if c in selected or c in cases)
    folder.mkdir(parents=True)
    _table(folder / "partitioning_1.csv", [{"Partition_ID": site_of[c], "Subject_ID": c} for c in kept])
    for name, parts in folds.items():
        (folder / name).mkdir()
        for (part, fold), rows in parts.items():
            _table(folder / name / NAME.format(part=part, fold=fold), [r for r in rows if r["Subject_ID"] in kept])
    grid = _grid(size)
    for case in kept:
        _scan(folder / case, case, grid)
    return folder


def _selected(site_of, folds, share: float) -> dict[str, None]:
    """Return the names of the cases to write, in the order of the partition."""
    tested = {name: {k: rows for (part, k), rows in parts.items() if part == "test"} for name, parts in folds.items()}
    kept: set[str] = set()
    for name in reversed(tested):  # the limited folds first: all their cases are in the full ones as well
        where, times = defaultdict(list), defaultdict(int)
        for k, rows in tested[name].items():
            for row in rows:
                where[site_of[row["Subject_ID"]], k].append(row["Subject_ID"])
                times[row["Subject_ID"]] += 1
        for cases in where.values():
            ordered = sorted(cases, key=lambda c: (times[c] == 1, c not in kept, c))
            kept.update(ordered[: max(1, round(share * len(cases)))])
    return dict.fromkeys(c for c in site_of if c in kept)


def _grid(size: int) -> np.ndarray:
    """Return the coordinates of the voxels, from -1 to 1."""
    return np.stack(np.meshgrid(*[np.linspace(-1, 1, size, dtype=np.float32)] * 3, indexing="ij"))


def _scan(folder: Path, case: str, grid: np.ndarray) -> None:
    """Draw a brain with a tumour; one of three scanner types, whatever the site, sets contrast and noise."""
    rng = np.random.default_rng(int(case.rpartition("_")[2]))
    brain = np.linalg.norm(grid / rng.uniform(0.75, 0.9, (3, 1, 1, 1)), axis=0) < 1
    centre, radius = rng.uniform(-0.3, 0.3, (3, 1, 1, 1)), rng.uniform(0.4, 0.55)
    away = np.linalg.norm(grid - centre, axis=0) / radius
    seg = np.where(brain, np.select([away < 0.4, away < 0.7, away < 1], [1, 4, 2], 0), 0).astype(np.uint8)
    place = np.choose(seg, [0, 2, 1, 0, 3])  # of the brightness
    kind = rng.integers(3)
    folder.mkdir()
    for modality, tissues in TISSUES.items():
        level = 10 * np.power(np.array(tissues, np.float32), (1.0, 1.15, 0.9)[kind])[place]
        image = np.where(brain, level + (20, 60, 100)[kind] * rng.standard_normal(brain.shape, np.float32), 0)
        _nifti(folder / f"{case}_{modality}.nii.gz", np.maximum(image, brain).astype(np.int16))
    _nifti(folder / f"{case}_seg.nii.gz", seg)


def _nifti(file: Path, array: np.ndarray) -> None:
    header = nibabel.Nifti1Header()
    header.set_data_dtype(array.dtype)
    header.set_data_shape(array.shape)
    header.set_xyzt_units("mm")
    header["magic"], header["vox_offset"] = b"n+1", 352
    header.set_sform(np.eye(4), 1)
    file.write_bytes(gzip.compress(header.binaryblock + bytes(4) + array.tobytes("F"), 1, mtime=0))


def _published(folder: Path) -> dict[tuple[str, int], list[dict[str, str]]]:
    """Return the rows of the published files, by part (test or train) and fold."""
    return {(p, k): _rows(folder / NAME.format(part=p, fold=k)) for p in ("test", "train") for k in range(5)}


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def _table(file: Path, rows: list[dict[str, str]]) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
