"""Images and masks of every awkward kind, from seeds alone: the reference and the test make the same."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, eq=False)
class Volume:
    """With the options as PyRadiomics calls them."""

    image: np.ndarray
    mask: np.ndarray
    spacing: tuple[float, ...] = (1.0, 1.0, 1.0)
    options: dict = field(default_factory=dict)


def smooth(rng, shape):
    """Noise averaged with its neighbours, axis by axis, and z-scored."""
    found = rng.normal(size=shape)
    for axis in range(len(shape)):
        found = found + 0.5 * (np.roll(found, 1, axis) + np.roll(found, -1, axis))
    return (found - found.mean()) / found.std()


def ball(shape, radius=0.9):
    far = [((x - (n - 1) / 2) / (n / 2)) ** 2 for x, n in zip(np.ogrid[*map(slice, shape)], shape, strict=True)]
    return (sum(far) < radius**2).astype(np.uint8)


def voxels(shape, *where):
    found = np.zeros(shape, np.uint8)
    for at in where:
        found[at] = 1
    return found


PATCH, REAL_PATCH = (24, 16, 32), (128, 128, 32)  # that the padded volumes are padded to


def scan() -> np.ndarray:
    """T1 and FLAIR of a drawn head on black, as they are stored."""
    rng, shape = np.random.default_rng(5), (20, 18, 22)
    head = ball(shape, 0.8)
    return np.stack([head * np.round(400 + 90 * smooth(rng, shape)) for _ in range(2)]).astype(np.float32)


def padded(image: np.ndarray, patch: tuple[int, ...]) -> np.ndarray:
    """Crop to what is not zero, pad with zeros to the patch, then z-scores over all voxels; without MONAI."""
    box = tuple(slice(i.min(), i.max() + 1) for i in np.nonzero(image.any(0)))
    image = image[:, *box]
    rims = [((wide := max(p - n, 0)) // 2, wide - wide // 2) for n, p in zip(image.shape[1:], patch, strict=True)]
    image = np.pad(image, [(0, 0), *rims]).astype(np.float64)
    axes = (1, 2, 3)
    return ((image - image.mean(axes, keepdims=True)) / image.std(axes, keepdims=True)).astype(np.float32)


def brains(image: np.ndarray, patch: tuple[int, ...], names: tuple[str, ...]) -> dict[str, Volume]:
    """Every modality after that preparation, in the mask of the brain, FLAIR above its minimum."""
    made = padded(image, patch)
    flair = made[names.index("flair")]
    mask = (flair > flair.min()).astype(np.uint8)
    return {name: Volume(m, mask, options={"binWidth": 0.09}) for name, m in zip(names, made, strict=True)}


def volumes() -> dict[str, Volume]:
    rng = np.random.default_rng(8)
    shape = (14, 17, 19)
    noise = smooth(rng, shape)
    ones = np.ones(shape, np.uint8)
    sheet, thick = voxels(shape, (slice(None), 8)), voxels(shape, (slice(None), slice(None), slice(7, 9)))
    slanted = np.fromfunction(lambda i, j, k: (i + j + k) % 11 == 0, shape).astype(np.uint8)
    scattered = (rng.random(shape) < 0.04).astype(np.uint8)
    border = (rng.random(shape) < 0.6).astype(np.uint8)
    labels = (rng.random(shape) * 4).astype(np.int16)
    flat = smooth(rng, (31, 37))
    ct = np.round(300 * noise).astype(np.int16)
    large = smooth(rng, (60, 72, 64)).astype(np.float32)
    ninth = {"binWidth": 0.09}
    thin = {**ninth, "minimumROIDimensions": 1}  # lines, which PyRadiomics refuses unless told otherwise
    return {
        "textured noise": Volume(noise, ball(shape), options=ninth),
        "single precision": Volume(noise.astype(np.float32), ball(shape), options=ninth),
        "whole numbers": Volume(ct, ball(shape)),
        "whole numbers, wide bins": Volume(ct, ball(shape), options={"binWidth": 100}),
        "constant": Volume(np.full(shape, 7.0), ball(shape)),
        "two values": Volume((noise > 0.3) * 60.0, ball(shape)),
        "two voxels": Volume(noise, voxels(shape, (3, 4, 5), (4, 5, 4)), options=ninth),
        "two voxels apart": Volume(noise, voxels(shape, (3, 4, 5), (3, 4, 8)), options=thin),
        "a line": Volume(noise, voxels(shape, (3, slice(2, 11), 5)), options=thin),
        "thin sheet": Volume(noise, sheet, options=ninth),
        "sheet of two": Volume(noise, thick, options=ninth),
        "slanted sheets": Volume(noise, slanted, options=ninth),
        "scattered voxels": Volume(noise, scattered, options={"binWidth": 0.5}),
        "full, touching the border": Volume(noise, ones, options=ninth),
        "holes, touching the border": Volume(noise, border, options={"binWidth": 0.4}),
        "anisotropic": Volume(noise, ball(shape), (0.7, 1.2, 5.0), ninth),
        "bin count": Volume(noise, ball(shape), options={"binCount": 32}),
        "bin count, single precision": Volume(noise.astype(np.float32), border, options={"binCount": 25}),
        "bin count, constant": Volume(np.full(shape, -3.5), ball(shape), options={"binCount": 8}),
        "values on edges": Volume(np.round(noise * 4) / 4, border, options={"binWidth": 0.25}),
        "values near edges": Volume(np.round(noise * 10) * 0.1, border, options={"binWidth": 0.1}),
        "third label": Volume(noise, labels, options={"binWidth": 0.3, "label": 3}),
        "2D": Volume(flat, ball(flat.shape), (0.5, 2.0), {"binWidth": 0.2}),
        "2D, full, two values": Volume((flat > 0) * 100, np.ones(flat.shape, np.uint8), (1.0, 1.0)),
        "one grey level stands apart": Volume(noise + 50 * (noise > 2), ball(shape), options={"binWidth": 0.5}),
        "many grey levels": Volume(noise, ball(shape), options={"binWidth": 0.01}),
        "large": Volume(large, ball(large.shape), options=ninth),
        "large zones": Volume(large, ball(large.shape, 1.0), options={"binWidth": 1.5}),
        **{f"padded: {name}": volume for name, volume in brains(scan(), PATCH, ("t1", "flair")).items()},
    }


def real(shared) -> dict[str, Volume]:
    """A tumour, a whole head, a padded head and a hippocampus, of the data beside the repository."""
    import nibabel

    tumour = sorted((shared / "tcga_lgg" / "CS").iterdir())[0]
    flair, seg = (np.asarray(nibabel.load(tumour / f"{name}.nii.gz").dataobj) for name in ("flair", "seg"))
    brain = (flair > 0).astype(np.uint8)
    three = [np.asarray(nibabel.load(tumour / f"{name}.nii.gz").dataobj) for name in ("flair", "post", "pre")]
    heads = brains(np.stack(three).astype(np.float32), REAL_PATCH, ("flair", "post", "pre"))
    hippocampus = shared / "msd_hippocampus"
    name = sorted(p.name for p in (hippocampus / "images").glob("*.nii.gz"))[0]
    image, label = (nibabel.load(hippocampus / kind / name) for kind in ("images", "labels"))
    return {
        "real: tumour": Volume(flair, seg, options={"binWidth": 5}),
        "real: head": Volume(flair.astype(np.float32), brain, options={"binCount": 64}),
        **{f"real: padded {name}": volume for name, volume in heads.items()},
        "real: hippocampus": Volume(
            np.asarray(image.dataobj),
            np.asarray(label.dataobj).astype(np.int16),
            tuple(map(float, image.header.get_zooms()[:3])),
            {"binCount": 32, "label": 2},
        ),
    }
