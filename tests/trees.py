"""Folders with the real names of public datasets, made of tiny drawn scans: LUNA16, DFUC2021, CC359, BraTS 2017,
prostate MRI of four sites, Fed-KiTS2019, FeTS 2022.

Every function writes one dataset into a new folder and returns it. Anatomy and noise depend on the number of a case
alone, so a folder is the same whenever it is written.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import nibabel
import numpy as np
from PIL import Image

from fets import TISSUES

BRATS17 = {
    "2013": ("HGG", "Brats17_2013_{}_1"),
    "CBICA": ("HGG", "Brats17_CBICA_A{}_1"),
    "TCIA": ("LGG", "Brats17_TCIA_{}_1"),
}
CC359 = ("philips_15", "philips_3", "siemens_15", "siemens_3", "ge_15", "ge_3")
PROSTATE = {  # sites of NVIDIA FLARE's prostate example, and the names of their cases
    "I2CVB": "Patient_{}",
    "MSD": "prostate_{:02d}",
    "NCI_ISBI_3T": "Prostate3T-01-{:04d}",
    "NCI_ISBI_Dx": "ProstateDx-01-{:04d}",
}
UID = "1.3.6.1.4.1.14519.5.2.1.6279.6001.{:030d}"


def luna16(folder: Path, scans: int = 4, candidates: int = 4) -> Path:
    """Write ``subset0`` to ``subset9`` with scans as .mhd and .raw, and ``candidates_V2.csv``; half are nodules."""
    lines = ["seriesuid,coordX,coordY,coordZ,class"]
    for number in range(10 * scans):
        uid, rng = UID.format(number), np.random.default_rng(number)
        side, spacing = 24, 4.0
        scan = rng.normal(-800, 50, (side, side, side))
        for k in range(candidates):
            centre, nodule = rng.uniform(28.0, 64.0, 3), k % 2
            grid = np.stack(np.meshgrid(*[spacing * np.arange(side)] * 3, indexing="ij"), -1)
            scan[np.linalg.norm(grid - centre, axis=-1) < (10.0 if nodule else 5.0)] = 50 if nodule else -300
            lines.append(",".join([uid, *(f"{c:.2f}" for c in centre), str(nodule)]))
        home = _folder(folder / f"subset{number % 10}")
        (home / f"{uid}.raw").write_bytes(scan.astype("<i2").tobytes("F"))  # x varies fastest
        (home / f"{uid}.mhd").write_text(
            "ObjectType = Image\nNDims = 3\nBinaryData = True\nBinaryDataByteOrderMSB = False\nOffset = 0 0 0\n"
            f"TransformMatrix = 1 0 0 0 1 0 0 0 1\nElementSpacing = {spacing} {spacing} {spacing}\n"
            f"DimSize = {side} {side} {side}\nElementType = MET_SHORT\nElementDataFile = {uid}.raw\n"
        )
    (folder / "candidates_V2.csv").write_text("\n".join(lines) + "\n")
    return folder


def dfuc2021(folder: Path, cases: int = 40, size: int = 32) -> Path:
    """Write ``images/100001.jpg`` and so on with ``train.csv``: as many of every class, and two without any."""
    classes, lines = ("none", "infection", "ischaemia", "both"), ["image,none,infection,ischaemia,both"]
    home = _folder(folder / "images")
    for k in range(4 * cases + 2):
        name, rng, labelled = f"{100001 + k}.jpg", np.random.default_rng(k), k < 4 * cases
        colour = ((150, 110, 90), (170, 60, 50), (90, 80, 120), (120, 40, 90))[k % 4]
        photo = np.clip(rng.normal(colour, 25, (size, size, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(photo).save(home / name, quality=95)
        lines.append(",".join([name, *(str(int(labelled and k % 4 == c)) for c in range(len(classes)))]))
    (folder / "train.csv").write_text("\n".join(lines) + "\n")
    return folder


def cc359(folder: Path, cases: int = 3, size: int = 12) -> Path:
    """Write ``Original/CC0001_philips_15_55_M.nii.gz`` and so on, and the masks of STAPLE."""
    for k in range(cases * len(CC359)):
        case, rng = f"CC{k + 1:04d}_{CC359[k % len(CC359)]}_{40 + k}_{'MF'[k % 2]}", np.random.default_rng(k)
        brain = _ball(size, (0, 0, 0), 0.8)
        image = np.where(brain, 100 + 10 * (k % 6) + rng.normal(0, 8, brain.shape), rng.normal(10, 3, brain.shape))
        _nifti(folder / "Original" / "Original" / f"{case}.nii.gz", image.astype(np.float32))
        _nifti(folder / "Silver-standard-STAPLE" / "STAPLE" / f"{case}_staple.nii.gz", brain.astype(np.uint8))
    return folder


def brats17(folder: Path, cases: int = 10, size: int = 16) -> Path:
    """Write ``Brats17TrainingData/HGG/Brats17_CBICA_A00_1/*_flair.nii.gz`` and so on, of three institutions."""
    for number in range(cases * len(BRATS17)):
        grade, pattern = list(BRATS17.values())[number % len(BRATS17)]
        case = pattern.format(number)
        glioma(folder / "Brats17TrainingData" / grade / case, case, number, size)
    return folder


def fets22(folder: Path, sizes: Mapping[str, int], size: int = 16) -> Path:
    """Write ``FeTS2022_00000/*_flair.nii.gz`` and so on, with ``partitioning_1.csv`` of as many cases a site."""
    lines, number = ["Partition_ID,Subject_ID"], 0
    for site, count in sizes.items():
        for _ in range(count):
            case = f"FeTS2022_{number:05d}"
            glioma(folder / case, case, number, size)
            lines.append(f"{site},{case}")
            number += 1
    (folder / "partitioning_1.csv").write_text("\n".join(lines) + "\n")
    return folder


def glioma(folder: Path, case: str, number: int, size: int) -> None:
    """Write a brain with a tumour of necrosis (1), oedema (2) and enhancing tumour (4) in four modalities."""
    rng = np.random.default_rng(number)
    brain = _ball(size, (0, 0, 0), 0.85)
    centre, radius = tuple(rng.uniform(-0.3, 0.3, 3)), rng.uniform(0.3, 0.6)
    seg = np.zeros(brain.shape, np.uint8)
    for value, share in ((2, 1.0), (4, 0.75), (1, 0.45)):
        seg[_ball(size, centre, share * radius) & brain] = value
    place = np.choose(seg, [0, 2, 1, 0, 3])
    for modality, tissues in TISSUES.items():
        level = 10 * np.array(tissues, np.float32)[place] + rng.normal(0, 30, brain.shape)
        _nifti(folder / f"{case}_{modality}.nii.gz", np.where(brain, np.maximum(level, 1), 0).astype(np.int16))
    _nifti(folder / f"{case}_seg.nii.gz", seg)


def prostate(folder: Path, cases: int = 8, size: Sequence[int] = (20, 20, 8)) -> Path:
    """Write ``SITE/Image/CASE.nii.gz`` and ``SITE/Mask/CASE.nii.gz`` of four sites."""
    for s, (site, pattern) in enumerate(PROSTATE.items()):
        for k in range(cases):
            rng = np.random.default_rng([s, k])
            gland = _ball(size, (0, 0, 0), rng.uniform(0.35, 0.7))
            image = np.where(gland, 180, 90) + 20 * s + rng.normal(0, 15, gland.shape)
            case = pattern.format(k + 1)
            for place, array in (("Image", np.maximum(image, 1).astype(np.float32)), ("Mask", gland.astype(np.uint8))):
                _nifti(folder / site / place / f"{case}.nii.gz", array, spacing=(0.3, 0.3, 1.0))
    return folder


def fed_kits(folder: Path, sizes: Sequence[int] = (5, 5, 5, 5, 5, 5), size: Sequence[int] = (8, 20, 20)) -> Path:
    """Write ``data/case_00000/imaging.nii.gz`` and ``segmentation.nii.gz``, and the sites of Fed-KiTS2019.

    Slices lie along the first axis, as in KiTS19. A fifth of every site, rounded up, are test cases.
    """
    lines, number = ["case_ids,site_ids,train_test_split,train_test_split_silo"], 0
    affine = np.array([[0, 0, -1.45, 0], [0, -1.45, 0, 0], [-2.9, 0, 0, 0], [0, 0, 0, 1]])
    for site, count in enumerate(sizes):
        for k in range(count):
            case, rng = f"case_{number:05d}", np.random.default_rng(number)
            seg = np.zeros(size, np.uint8)
            for side in (-0.45, 0.45):
                seg[_ball(size, (0, 0, side), rng.uniform(0.3, 0.45))] = 1
            seg[_ball(size, (0, 0, 0.45), rng.uniform(0.1, 0.3))] = 2
            image = np.choose(seg, [-80, 60, 110]) + rng.normal(0, 10, size)
            _nifti(folder / "data" / case / "imaging.nii.gz", image.astype(np.float32), affine)
            _nifti(folder / "data" / case / "segmentation.nii.gz", seg, affine)
            part = "test" if k >= int(0.8 * count) else "train"
            lines.append(f"{case},{site},{part},{part}_{site}")
            number += 1
    (folder / "thresholded_sites.csv").write_text("\n".join(lines) + "\n")
    return folder


def _ball(size: int | Sequence[int], centre: Sequence[float], radius: float) -> np.ndarray:
    """Return the voxels of a ball; coordinates go from -1 to 1 along every axis."""
    sides = [size] * 3 if isinstance(size, int) else size
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, n) for n in sides], indexing="ij"), -1)
    return np.linalg.norm(grid - np.array(centre), axis=-1) < radius


def _nifti(
    file: Path, array: np.ndarray, affine: np.ndarray | None = None, spacing: Sequence[float] = (1.0, 1.0, 1.0)
) -> None:
    _folder(file.parent)
    image = nibabel.nifti1.Nifti1Image(array, np.diag([*spacing, 1.0]) if affine is None else affine)
    image.header.set_xyzt_units("mm")
    nibabel.save(image, file)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path
