"""Frozen 3D encoders, the choices of ``[encoder] name``, and what they make of a volume: its embedding.

Paper: Alekseenko et al., Distance-aware non-IID federated learning, MIDL 2024, section 2 and appendix E

An encoder maps one modality of one case to C channels at P positions. Centred over the positions, the matrix of
channels × positions is M = U S Vᵀ; the embedding is U S / √P with its first two columns, C × 2 numbers. The root keeps
them from growing with the volume. A column's sign is arbitrary in a decomposition; here its largest entry is positive.
"""

import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from polysite.errors import ConfigError, DataError, RunError

if TYPE_CHECKING:  # seconds, which reading a configuration need not wait
    import torch

COMPONENTS = 2
LARGEST = 1 << 21  # voxels: 128 a side; a larger volume is shrunk
SMALLEST = 16  # voxels a side: two positions of the encoders that ship; a smaller side is stretched
SHIPPED = Path(__file__).with_name("encoder.safetensors")


class Encoder(Protocol):
    channels: ClassVar[int]

    @property
    def words(self) -> str:
        """What it is, as a report says it."""
        ...

    @property
    def fingerprint(self) -> str:
        """A digest of its weights."""
        ...

    def build(self) -> "torch.nn.Module":
        """The network with its weights: (batch, 1, *space) to (batch, channels, *fewer), in float32."""
        ...


@dataclass(frozen=True)
class Bundled:
    """A small encoder that ships with polysite and needs no download; it has seen drawn phantoms only."""

    channels: ClassVar[int] = 128

    @property
    def words(self) -> str:
        return "the small encoder that ships with polysite, trained on drawn phantoms"

    @property
    def fingerprint(self) -> str:
        return _digest(self._file)

    @property
    def _file(self) -> Path:
        if not SHIPPED.is_file():
            raise ConfigError(f"{SHIPPED} is missing, although it ships with polysite; install polysite again")
        return SHIPPED

    def build(self) -> "torch.nn.Module":
        import safetensors
        import safetensors.torch

        from polysite.models.small_encoder import SmallEncoder

        try:
            weights = safetensors.torch.load_file(self._file)
        except (safetensors.SafetensorError, OSError) as problem:
            raise ConfigError(f"{SHIPPED} is damaged ({problem}); install polysite again") from problem
        return _filled(SmallEncoder, weights, SHIPPED, "the weights of this version; install polysite again")


@dataclass(frozen=True)
class MedicalNet:
    """MedicalNet's 3D-ResNet-18, trained on public datasets of CT and MR: the encoder of the distance-aware paper."""

    path: str = ""  # resnet_18.pth or resnet_18_23dataset.pth as MedicalNet publishes it; nothing is downloaded

    channels: ClassVar[int] = 512

    @property
    def words(self) -> str:
        return f"MedicalNet 3D-ResNet-18 from {Path(self.path).name}"

    @property
    def fingerprint(self) -> str:
        return _digest(self._file)

    @property
    def _file(self) -> Path:
        if not self.path:
            raise ConfigError("encoder.path is missing: name MedicalNet's checkpoint, resnet_18.pth")
        return _existing(self.path, "name MedicalNet's checkpoint, resnet_18.pth")

    def build(self) -> "torch.nn.Module":
        from polysite.models.resnet3d import ResNet18

        weights = {k: v for k, v in self._state() if not k.startswith(("conv_seg.", "fc."))}  # what follows the encoder
        network = partial(ResNet18, "B" if any(".downsample." in k for k in weights) else "A")
        return _filled(network, weights, self._file, "a 3D-ResNet-18 of MedicalNet")

    def _state(self) -> Iterator[tuple[str, Any]]:
        """Its entries by name, without the ``module.`` of a network that was trained on several GPUs."""
        import torch

        file = self._file
        try:
            with warnings.catch_warnings():  # a TorchScript file is warned about before it is refused
                warnings.simplefilter("ignore")
                found = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as problem:  # whatever a damaged file makes torch say
            raise ConfigError(
                f"{file} is not a checkpoint of plain tensors: it is damaged, or it holds Python objects, "
                "which could run code and are not loaded; download it again"
            ) from problem
        found = found.get("state_dict", found) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            raise ConfigError(f"{file} holds no parameters by name; name MedicalNet's checkpoint, resnet_18.pth")
        for name, value in found.items():
            if not str(name).endswith("num_batches_tracked"):
                yield str(name).removeprefix("module."), value


@dataclass(frozen=True)
class DeepBet:
    """The brain finder of the package deepbet (MIT), trained on T1-weighted heads; small, and pip can install it."""

    path: str = ""  # bbox_model.pt of deepbet 1.0.2, unzipped from its wheel; empty: that of the installed package

    channels: ClassVar[int] = 128
    digest: ClassVar[str] = "39a7b2b5f799faa1391ea97bfcdc0b9299f20d84f2316a4ff8918dc4685e40aa"

    @property
    def words(self) -> str:
        return "the brain finder of deepbet 1.0.2"

    @property
    def fingerprint(self) -> str:
        return _digest(self._file)

    @property
    def _file(self) -> Path:
        if self.path:
            return _existing(self.path, "name bbox_model.pt of deepbet 1.0.2, or leave encoder.path out to search it")
        try:
            file = Path(str(distribution("deepbet").locate_file("data/models/bbox_model.pt")))
        except PackageNotFoundError as problem:
            raise ConfigError(
                "deepbet is not installed here: pip install --no-deps deepbet==1.0.2, "
                "or name the bbox_model.pt of its wheel in encoder.path"
            ) from problem
        if not file.is_file():
            raise ConfigError(f"deepbet is installed without {file}: pip install --no-deps deepbet==1.0.2")
        return file

    def build(self) -> "torch.nn.Module":
        import torch

        from polysite.models.deepbet import HeadEncoder

        file = self._file
        if self.fingerprint != self.digest:  # TorchScript is a program: open the one that is known, and no other
            raise ConfigError(f"{file} is not the bbox_model.pt of deepbet 1.0.2, the only one that is known here")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch would rather see its successor
            scripted = torch.jit.load(file, map_location="cpu")  # type: ignore[no-untyped-call]
        half = {k: v.detach() for k, v in scripted.named_parameters() if k.startswith(("init.", "down"))}
        return _filled(HeadEncoder, half, file, "deepbet 1.0.2")


ENCODERS: Mapping[str, type[Bundled] | type[MedicalNet] | type[DeepBet]] = {
    "bundled": Bundled,
    "medicalnet": MedicalNet,
    "deepbet": DeepBet,
}


class Embedder:
    """Volumes, each one modality of one case and normalised, to an array of (volume, channel, component).

    They may have any size, in 3D or 2D. Those of equal shape go through the network together; the answer to one does
    not depend on the others, nor on a GPU's short cuts.
    """

    def __init__(self, encoder: Encoder, device: "str | torch.device" = "cpu", batch: int = 8):
        if batch < 1:
            raise ConfigError(f"a batch holds at least one volume, got {batch}")
        self.channels, self.fingerprint = encoder.channels, encoder.fingerprint
        self.device, self.batch = device, batch
        self.network = encoder.build().to(device).eval()
        self._turn = threading.Lock()  # several threads may ask, and torch's settings below are those of all

    def __call__(self, volumes: Sequence[np.ndarray]) -> np.ndarray:
        found = np.zeros((len(volumes), self.channels, COMPONENTS), np.float32)
        alike: dict[tuple[int, ...], list[int]] = {}
        for place, volume in enumerate(volumes):
            if volume.ndim not in (2, 3) or not volume.size:
                raise DataError(f"volume {place} has the shape {volume.shape}; an encoder takes 2D and 3D images")
            alike.setdefault(volume.shape, []).append(place)
        for places in alike.values():
            for some, embedded in self._batches(volumes, places):
                found[some] = embedded
        return found

    def _batches(self, volumes: Sequence[np.ndarray], places: list[int]) -> Iterator[tuple[list[int], np.ndarray]]:
        """Volumes of one shape, as many at a time as fit."""
        import torch

        size = self.batch
        if torch.device(self.device).type == "cpu":  # many large ones would need memory and gain nothing
            size = max(1, min(size, LARGEST // prod(fitted(volumes[places[0]].shape))))
        while places:
            some = places[:size]
            try:
                embedded = self._embed(np.stack([volumes[k] for k in some]))
            except torch.OutOfMemoryError as problem:
                if len(some) == 1:
                    shape = volumes[some[0]].shape
                    raise RunError(f"the GPU has no room for a volume of {shape}; compute on the CPU") from problem
                size = len(some) // 2
                continue
            yield some, embedded
            places = places[size:]

    def _embed(self, volumes: np.ndarray) -> np.ndarray:
        import torch

        # exact float32 on a GPU too: what hospitals compute on different machines is compared
        exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
        with self._turn, torch.inference_mode(), exact:
            x = torch.from_numpy(volumes.astype(np.float32)).to(self.device)
            features = self.network(resize(x[:, None]))
            return principal(features.flatten(2)).float().cpu().numpy()


def fitted(shape: Sequence[int]) -> tuple[int, ...]:
    """The size in 3D at which an encoder sees a volume.

    >>> fitted((100, 120, 90)), fitted((256, 256, 256)), fitted((3, 4, 50)), fitted((512, 512))
    ((100, 120, 90), (128, 128, 128), (16, 16, 50), (362, 362, 16))
    """
    sides = [max(s, SMALLEST) for s in (*shape, 1)[:3]]
    while prod(sides) > LARGEST:  # again where a side has met its minimum
        large = sum(s > SMALLEST for s in sides)
        factor = (LARGEST / prod(sides)) ** (1 / large)
        sides = [max(SMALLEST, int(s * factor + 1e-9)) for s in sides]
    return tuple(sides)


def resize(volumes: "torch.Tensor") -> "torch.Tensor":
    """(batch, 1, *space) in 2D or 3D to the fitted size in 3D: means where it shrinks, linear where it grows."""
    from torch.nn import functional

    shape = volumes.shape[2:]
    volumes, sides = volumes.reshape(*volumes.shape[:2], *(*shape, 1)[:3]), fitted(shape)
    smaller = [min(pair) for pair in zip(volumes.shape[2:], sides, strict=True)]
    if tuple(volumes.shape[2:]) != tuple(smaller):
        volumes = functional.interpolate(volumes, smaller, mode="area")
    if tuple(smaller) != sides:
        volumes = functional.interpolate(volumes, sides, mode="trilinear", align_corners=False)
    return volumes


def principal(features: "torch.Tensor", components: int = COMPONENTS) -> "torch.Tensor":
    """(batch, channels, positions) to (batch, channels, components): the principal components over the positions.

    Components that do not exist, or are smaller than what float32 can tell, are zero.
    """
    import torch

    positions = features.shape[2]
    x = features.double()
    noise = 1e-6 * x.abs().amax((1, 2), keepdim=True)
    x = (x - x.mean(2, keepdim=True)) / positions**0.5
    if positions < x.shape[1]:  # the smaller of the two matrices of products
        _, vectors = torch.linalg.eigh(x.mT @ x)
        found = x @ vectors
    else:
        values, vectors = torch.linalg.eigh(x @ x.mT)
        found = vectors * values.clamp_min(0).sqrt()[:, None]
    found = found.flip(2)[:, :, :components]  # eigh has the largest last
    found = torch.where(torch.linalg.vector_norm(found, dim=1, keepdim=True) > noise, found, 0)
    largest = found.gather(1, found.abs().argmax(1, keepdim=True))
    found = torch.where(largest < 0, -found, found)
    return torch.nn.functional.pad(found, (0, components - found.shape[2]))


def _filled(
    kind: "Callable[[], torch.nn.Module]", weights: Mapping[str, Any], file: Path, what: str
) -> "torch.nn.Module":
    """A network with these weights, which must be all of its own and no others."""
    import torch

    with torch.device("meta"):  # draws no random weights
        network = kind()
    own = network.state_dict()
    counts = {k: torch.tensor(0) for k in own if k.endswith("num_batches_tracked")}  # of no use after training
    odd = sorted((own.keys() - counts.keys()) ^ weights.keys())
    if odd:
        raise ConfigError(f"{file} {'lacks' if odd[0] in own else 'also holds'} {odd[0]!r}: it is not {what}")
    for name, value in weights.items():
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        if shape != tuple(own[name].shape):
            raise ConfigError(f"{file}: {name!r} is {shape}, not {tuple(own[name].shape)}: it is not {what}")
        if not value.isfinite().all():
            raise ConfigError(f"{file}: {name!r} holds NaN or infinite weights; get the file again")
    network.to_empty(device="cpu").load_state_dict({**weights, **counts})
    return network


def _existing(path: str, otherwise: str) -> Path:
    try:
        Path(path).open("rb").close()
    except OSError as problem:
        raise ConfigError(f"encoder.path = {path!r} cannot be opened ({problem.strerror}); {otherwise}") from problem
    return Path(path)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
