"""Brain phantoms: multi-modal MRI volumes with nested tumour labels, drawn from a seed.

Each patient is drawn in two independent steps, the anatomy (head, brain, tumour) and the acquisition (contrast, bias
field, slice thickness, noise). Hospitals differ mostly in the second, so that another hospital's scanner can scan the
same patient again.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import nibabel
import numpy as np
from numpy.typing import NDArray
from scipy import linalg, ndimage

from polysite.data.case import Case
from polysite.errors import ConfigError

MODALITIES: Final = ("t1", "t1ce", "t2", "flair")
LABELS: Final = ("WT", "TC", "ET")
GRADES: Final = ("healthy", "low", "high")

# Signal of every tissue in each modality, relative to white matter on a reference scanner.
TISSUES: Final[dict[str, tuple[float, float, float, float]]] = {
    "air": (0.00, 0.00, 0.00, 0.00),
    "scalp": (0.95, 1.05, 0.75, 0.70),
    "skull": (0.15, 0.15, 0.12, 0.12),
    "fluid": (0.32, 0.32, 2.10, 0.30),
    "grey": (0.72, 0.74, 1.25, 1.22),
    "white": (1.00, 1.00, 1.00, 1.00),
    "nuclei": (0.82, 0.84, 1.10, 1.12),
    "lesion": (0.80, 0.80, 1.60, 1.65),
    "vessel": (0.60, 1.70, 0.55, 0.60),
    "scar": (0.50, 0.52, 1.90, 1.30),
    "oedema": (0.76, 0.76, 1.65, 1.62),
    "core": (0.62, 0.68, 1.60, 1.40),
    "necrosis": (0.45, 0.48, 1.85, 1.05),
    "enhancing": (0.74, 1.80, 1.40, 1.42),
}
CODE: Final = {name: code for code, name in enumerate(TISSUES)}
WHITE_MATTER_SIGNAL: Final = 400.0  # raw scanner units

Shape = tuple[int, int, int]
Volume = NDArray[np.float64]
Mask = NDArray[np.bool_]
Tissue = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Hospital:
    """A phantom hospital: its scanner and its patients.

    Args:
        cases: Number of patients.
        scanner: Seed of the tissue contrasts; 0 is the reference scanner.
        contrast: Distance from the reference contrasts; at 1 some are reversed.
        second: Seed of the contrasts of a second scanner, for every other patient; None for one scanner.
        gamma: Exponent of the intensity curve.
        bias: Strength of the smooth bias field.
        noise: Rician noise, as a fraction of white matter signal.
        thickness: Slice thickness along z, in voxels.
        tumour: Factor of the tumour radius.
        low_grade: Share of patients with a low-grade tumour.
        healthy: Share of patients without a tumour.
        missing: Modalities that are never acquired: channels of zeros.
        margin: Voxels by which annotated regions reach beyond the true ones; negative if they stay inside.
        second_margin: The same for patients of the second scanner; None for ``margin``.
    """

    cases: int = 12
    scanner: int = 0
    contrast: float = 0.0
    second: int | None = None
    gamma: float = 1.0
    bias: float = 0.2
    noise: float = 0.03
    thickness: float = 1.0
    tumour: float = 1.0
    low_grade: float = 0.2
    healthy: float = 0.0
    missing: tuple[str, ...] = ()
    margin: int = 0
    second_margin: int | None = None

    def __post_init__(self) -> None:
        _require(self.cases >= 1, f"cases = {self.cases}: a hospital needs at least one patient")
        for name, seed in (("scanner", self.scanner), ("second", self.second or 0)):
            _require(seed >= 0, f"{name} = {seed}: it must not be negative")
        for name in ("gamma", "tumour"):
            value = getattr(self, name)
            _require(0 < value < np.inf, f"{name} = {value}: it must be positive and finite")
        for name in ("contrast", "bias", "noise"):
            value = getattr(self, name)
            _require(0 <= value < np.inf, f"{name} = {value}: it must be finite and not negative")
        _require(1 <= self.thickness < np.inf, f"thickness = {self.thickness}: a slice is at least one voxel thick")
        for name in ("low_grade", "healthy"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"{name} = {value}: it is a share between 0 and 1")
        both = self.low_grade + self.healthy
        _require(both < 1 + 1e-9, f"low_grade + healthy = {both:g}: together they are more than all patients")
        unknown = [modality for modality in self.missing if modality not in MODALITIES]
        _require(not unknown, f"missing = {list(self.missing)}: the modalities are {', '.join(MODALITIES)}")
        _require(set(self.missing) != set(MODALITIES), "missing names every modality: a hospital must acquire one")


def four_hospitals(cases: int = 12) -> dict[str, Hospital]:
    """Return the embedded federation: three related hospitals and one outlier, "island".

    `cases` is the size of the middle-sized hospitals; the others have more and fewer.
    """
    many, few = cases + cases // 2, cases - cases // 3
    return {
        "capital": Hospital(many, low_grade=0.3),
        "harbour": Hospital(cases, scanner=1, contrast=0.2, bias=0.35, noise=0.05, thickness=2.0),
        "valley": Hospital(cases, scanner=2, contrast=0.2, gamma=1.25, noise=0.06, tumour=1.1),
        "island": Hospital(few, scanner=7, contrast=0.6, gamma=0.7, bias=0.3, noise=0.04, tumour=0.85),
    }


def three_clinics(cases: int = 24) -> dict[str, Hospital]:
    """Return hospitals for a classification, with the scanners of `four_hospitals`.

    Each has another majority grade, with two cases for one case of each other grade.
    """
    capital, harbour, valley, _ = four_hospitals(cases).values()
    return {
        "capital": replace(capital, cases=cases, healthy=0.5, low_grade=0.25),
        "harbour": replace(harbour, healthy=0.25, low_grade=0.5),
        "valley": replace(valley, healthy=0.25, low_grade=0.25),
    }


def draw(hospital: Hospital, *, site: str, index: int, seed: int, shape: Shape) -> Case:
    """Draw one patient of a hospital; the same seed, site and index give the same patient."""
    tissue, regions, group, image = _patient(hospital, site, index, seed, shape)
    _, margin = _protocol(hospital, index)
    label = np.stack(_annotated(regions, tissue, margin)) & (group != "healthy")
    return Case(site=site, name=f"{site}-{index:03d}", image=image, label=label.astype(np.uint8), group=group)


def picture(
    hospital: Hospital, *, site: str, index: int, seed: int, shape: Shape, grades: Sequence[str], flat: bool
) -> Case:
    """Draw the patient that ``draw`` would draw, as a case for classification: the label is the grade, one-hot.

    With `flat` the image is the slice where the tumour is largest. A healthy head has the slice where its tumour would
    be, so that the position of the slice does not reveal the class.
    """
    _, (whole, *_), group, image = _patient(hospital, site, index, seed, shape)
    if flat:
        image = np.ascontiguousarray(image[..., int(whole.sum((0, 1)).argmax())])
    label = np.array([grade == group for grade in grades], np.uint8)
    spacing = (1.0,) * (image.ndim - 1)
    return Case(site=site, name=f"{site}-{index:03d}", image=image, label=label, spacing=spacing, group=group)


def grade(hospital: Hospital, *, site: str, index: int, seed: int) -> str:
    """Return the grade that ``draw`` gives this patient, without drawing the patient."""
    return _grade(_streams(site, index, seed)[1], hospital)


def _grade(disease: np.random.Generator, hospital: Hospital) -> str:
    # Always drawn, so that no later draw depends on the shares.
    lot = disease.random()
    return "low" if lot < hospital.low_grade else "healthy" if lot >= 1 - hospital.healthy else "high"


def _patient(
    hospital: Hospital, site: str, index: int, seed: int, shape: Shape
) -> tuple[Tissue, tuple[Mask, Mask, Mask], str, NDArray[np.float32]]:
    """Return the tissue map, the regions of the tumour (one for each of `LABELS`), the grade, and the scan.

    The regions of a healthy head are those of the tumour that it would have; they are not in the tissue map.
    """
    _require(len(shape) == 3 and min(shape) >= 24, f"shape = {shape}: a phantom has three sides of at least 24 voxels")
    slices = shape[2] / hospital.thickness
    _require(slices >= 2, f"thickness = {hospital.thickness}: {shape[2]} voxels must hold at least two slices")
    _require(min(index, seed) >= 0, f"index = {index}, seed = {seed}: neither may be negative")
    anatomy, disease, scan = _streams(site, index, seed)
    tissue, depth = _brain(anatomy, shape)
    group = _grade(disease, hospital)
    whole, core, enhancing, necrosis = _tumour(disease, tissue, depth, hospital.tumour, group == "low")
    # From the outside in: each region paints over the one that contains it.
    for name, region in {"oedema": whole, "core": core, "necrosis": necrosis, "enhancing": enhancing}.items():
        if group != "healthy":
            tissue[region] = CODE[name]
    scanner, _ = _protocol(hospital, index)
    return tissue, (whole, core, enhancing), group, _acquire(scan, tissue, hospital, scanner)


def _streams(site: str, index: int, seed: int) -> list[np.random.Generator]:
    """Return independent random generators for the anatomy, the disease and the scan of a patient."""
    patient = np.random.SeedSequence(seed, spawn_key=(zlib.crc32(site.encode()), index))
    return [np.random.default_rng(stream) for stream in patient.spawn(3)]


def _brain(random: np.random.Generator, shape: Shape) -> tuple[Tissue, Volume]:
    """Return the tissue map of a healthy head and the depth below the brain's surface."""
    a, b, c = np.array([0.84, 0.96, 0.90]) * random.uniform(0.93, 1.04, 3)
    x, y, z = (axis + 0.04 * _field(random, shape, 3) for axis in _coordinates(shape))
    radius = np.sqrt(_ellipsoid(x, y, z, (a, b, c)))
    fold = _field(random, shape, 11)
    depth = 0.80 - radius - 0.02 * random.random()

    tissue = np.full(shape, CODE["air"], np.uint8)
    tissue[radius < 1.0] = CODE["scalp"]
    tissue[radius < 0.94] = CODE["skull"]
    tissue[radius < 0.86] = CODE["fluid"]
    # Sulci open along the zero crossings of the folding field, gyri lie between them.
    sulcus = (np.abs(fold) < 0.22) & (depth < 0.12)
    tissue[(depth > 0) & ~sulcus] = CODE["grey"]
    tissue[depth > 0.12 + 0.06 * fold] = CODE["white"]
    tissue[(np.abs(x) < 0.025) & (radius > 0.45) & (radius < 0.86)] = CODE["fluid"]
    _add_deep_structures(random, tissue, np.abs(x), y, z)
    _add_distractors(random, tissue, depth)
    return tissue, depth


def _add_deep_structures(random: np.random.Generator, tissue: Tissue, lateral: Volume, y: Volume, z: Volume) -> None:
    """Paint the deep grey nuclei and the lateral ventricles, the same on both sides."""
    size = random.uniform(0.7, 1.5)  # ventricles widen with age
    thalamus = _ellipsoid(lateral - 0.14, y + 0.10, z + 0.12, (0.10, 0.17, 0.12))
    putamen = _ellipsoid(lateral - 0.30, y - 0.08, z + 0.08, (0.07, 0.20, 0.14))
    tissue[(thalamus < 1) | (putamen < 1)] = CODE["nuclei"]
    # The horns bend outwards away from the middle.
    bend = lateral - 0.09 - 0.25 * y**2
    horns = _ellipsoid(bend, y, z - 0.12, (0.07 * size, 0.42, 0.13 * size))
    tissue[horns < 1] = CODE["fluid"]


def _add_distractors(random: np.random.Generator, tissue: Tissue, depth: Volume) -> None:
    """Paint lesions, vessels and scars, which look like tumour in one modality."""
    shape = tissue.shape
    inside = depth > 0.02
    spots = _field(random, shape, 13) > random.uniform(1.9, 3.2)
    tissue[spots & (tissue == CODE["white"])] = CODE["lesion"]
    # Two fields vanish together along curves, which are thin and winding like vessels.
    tube = np.hypot(_field(random, shape, 6), _field(random, shape, 6))
    tissue[inside & (tube < random.uniform(0.12, 0.22))] = CODE["vessel"]
    scar = _field(random, shape, 5) > random.uniform(1.6, 3.6)
    tissue[inside & scar & (depth < 0.35)] = CODE["scar"]


def _tumour(
    random: np.random.Generator, tissue: Tissue, depth: Volume, factor: float, low: bool
) -> tuple[Mask, Mask, Mask, Mask]:
    """Return the whole tumour, its core, and the enhancing and necrotic regions of the core."""
    shape = tissue.shape
    seat = np.argwhere((tissue == CODE["white"]) & (depth > 0.15))
    position = seat[int(random.random() * len(seat))]
    radius = 0.38 * factor * np.exp(0.18 * random.standard_normal())
    offset = random.uniform(-0.12, 0.12, 3)
    share, hollow = random.uniform(0.6, 0.8), random.uniform(0.3, 0.6)
    ragged = [np.exp(0.22 * _field(random, shape, 6)) for _ in range(2)]
    patchy = _field(random, shape, 9)

    grid = zip(_coordinates(shape), position, strict=True)
    x, y, z = (axis - axis.flat[place] for axis, place in grid)
    a, b, c = radius * np.exp(random.uniform(-0.2, 0.2, 3))
    distance = np.sqrt(_ellipsoid(x, y, z, (a, b, c))) * ragged[0]
    x, y, z = x - offset[0] * a, y - offset[1] * b, z - offset[2] * c
    inner = np.sqrt(_ellipsoid(x, y, z, (a, b, c))) * ragged[1] / share

    # The mass presses sulci and ventricles shut, so it covers whatever lies inside the brain.
    whole = (depth > 0) & (distance < 1)
    core = whole & (inner < 1)
    if low:  # a few enhancing patches: with none at all, one stray voxel would turn a patient's Dice from 1 to 0
        return whole, core, core & (patchy > 1.0), np.zeros_like(core)
    necrosis = core & (inner < hollow)
    return whole, core, core & ~necrosis & (patchy > -1.6), necrosis


def _annotated(regions: Sequence[Mask], tissue: Tissue, margin: int) -> Sequence[Mask]:
    """Return the regions as a hospital outlines them: wider or narrower than they are, within the head."""
    if not margin:
        return regions
    head, change = tissue != CODE["air"], ndimage.binary_dilation if margin > 0 else ndimage.binary_erosion
    return [change(region, iterations=abs(margin)) & head for region in regions]


def _protocol(hospital: Hospital, index: int) -> tuple[int, int]:
    """Return the scanner of a patient, and how far the annotation reaches beyond the true regions."""
    if hospital.second is None or index % 2 == 0:
        return hospital.scanner, hospital.margin
    return hospital.second, hospital.margin if hospital.second_margin is None else hospital.second_margin


def _acquire(random: np.random.Generator, tissue: Tissue, hospital: Hospital, scanner: int) -> NDArray[np.float32]:
    """Scan a tissue map: (modality, x, y, z) in raw scanner units, exactly zero in air."""
    shape = tissue.shape
    table = _contrasts(scanner, hospital.contrast)
    table = table * np.exp(0.13 * random.standard_normal(table.shape))  # patients vary
    gain = WHITE_MATTER_SIGNAL * np.exp(0.2 * random.standard_normal(len(MODALITIES)))
    image = np.empty((len(MODALITIES), *shape), np.float32)
    for channel, modality in enumerate(MODALITIES):
        signal = ndimage.gaussian_filter(table[:, channel].astype(np.float32)[tissue], 0.5)
        texture = 1 + 0.04 * _field(random, shape, 14)
        coil = np.exp(hospital.bias / 2 * _field(random, shape, 2))
        signal = _slices(signal**hospital.gamma * texture * coil, hospital.thickness)
        spread = hospital.noise * table[CODE["white"], channel] ** hospital.gamma
        noise = spread * random.standard_normal((2, *shape), dtype=np.float32)
        image[channel] = gain[channel] * np.hypot(signal + noise[0], noise[1])
        if modality in hospital.missing:
            image[channel] = 0
    image[:, tissue == CODE["air"]] = 0
    return image


def _contrasts(scanner: int, strength: float) -> Volume:
    """Return the (tissue, modality) signal table of a scanner.

    A rotation mixes the logarithmic contrasts of the modalities. It preserves the distances between tissues, so every
    scanner shows the tumour about as well as the reference, in other shades.
    """
    table = np.array(list(TISSUES.values()))
    if scanner > 0:
        square = np.random.default_rng(scanner).standard_normal((len(MODALITIES),) * 2)
        turn = square - square.T
        turn *= strength * np.pi / 2 / np.linalg.norm(turn, 2)
        brain = table[CODE["fluid"] :]  # a view; air, scalp and skull look alike everywhere
        rotated = np.log(brain) @ linalg.expm(turn)
        brain[:] = np.exp(np.clip(rotated, -1.6, 0.9))  # within what a scanner can record
    return table


def _slices(signal: Volume, thickness: float) -> Volume:
    """Average over slices of the given thickness along z, then resample to the voxel grid."""
    if thickness == 1:
        return signal
    depth = signal.shape[-1]
    blurred = ndimage.gaussian_filter1d(signal, thickness / 2.355, axis=-1, mode="nearest")
    centres = np.arange((thickness - 1) / 2, depth - 1, thickness)
    return _sample(_sample(blurred, centres), (np.arange(depth) - centres[0]) / thickness)


def _sample(signal: Volume, position: Volume) -> Volume:
    """Interpolate linearly along z."""
    position = np.clip(position, 0, signal.shape[-1] - 1)
    lower = np.minimum(position.astype(int), signal.shape[-1] - 2)
    weight = position - lower
    value: Volume = signal[..., lower] * (1 - weight) + signal[..., lower + 1] * weight
    return value


def _field(random: np.random.Generator, shape: tuple[int, ...], knots: int) -> Volume:
    """Return a smooth random field of mean 0 and variance 1, with `knots` knots a side."""
    field = random.standard_normal((knots + 3,) * len(shape))
    for side in shape:
        offset = np.linspace(1, knots + 1, side)[:, None] - np.arange(knots + 3)
        weight = np.maximum(0, 2 - np.abs(offset)) ** 3 - 4 * np.maximum(0, 1 - np.abs(offset)) ** 3
        weight /= np.linalg.norm(weight, axis=1, keepdims=True)
        # Takes the first axis and appends the interpolated one, so that three passes interpolate all axes.
        field = np.einsum("a...,na->...n", field, weight)
    return field


def _coordinates(shape: tuple[int, ...]) -> list[Volume]:
    """Return open grids of coordinates from -1 to 1 along each axis."""
    return list(np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij", sparse=True))


def _ellipsoid(x: Volume, y: Volume, z: Volume, axes: tuple[float, float, float]) -> Volume:
    """Return the squared distance from the origin in units of the half axes."""
    return (x / axes[0]) ** 2 + (y / axes[1]) ** 2 + (z / axes[2]) ** 2


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def write(cases: Iterable[Case], root: Path) -> None:
    """Write cases as ``SITE/CASE/modality.nii.gz`` with ``seg.nii.gz``: 1 core, 2 oedema, 4 enhancing."""
    for case in cases:
        folder = root / case.site / case.name
        folder.mkdir(parents=True, exist_ok=True)
        whole, core, enhancing = case.label.astype(bool)
        truth = np.select([enhancing, core, whole], [4, 1, 2]).astype(np.uint8)
        for name, array in (*zip(MODALITIES, case.image, strict=True), ("seg", truth)):
            image = nibabel.nifti1.Nifti1Image(array, np.diag([*case.spacing, 1.0]))
            image.header.set_xyzt_units("mm")
            nibabel.save(image, folder / f"{name}.nii.gz")
