"""Frozen 3D encoders, the choices of ``[encoder] name``, and the embeddings that they compute from volumes.

Paper: Alekseenko et al., Distance-aware non-IID federated learning, MIDL 2024, section 2 and appendix E

An encoder maps one modality of one case to C channels at P positions. Centred over the positions, the matrix of
channels × positions is M = U S Vᵀ; the embedding is the first two columns of U S / √P, C × 2 numbers. The root makes
them independent of the volume's size; the paper has U S (``positions = "sum"``). The sign of a column is arbitrary;
here its largest entry is positive.
"""

import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from polysite.errors import ConfigError, DataError, RunError

if TYPE_CHECKING:  # torch takes seconds to import, and configurations import this module
    import torch

COMPONENTS = 2
MAX_VOXELS = 1 << 21  # 128 a side; a larger volume is shrunk
MIN_SIDE = 16  # voxels: two positions of the bundled encoder; a smaller side is stretched
SHIPPED = Path(__file__).with_name("encoder.safetensors")


class Weights:
    """The file with the weights of an encoder."""

    @property
    def _file(self) -> Path:
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """Digest of the weights."""
        with self._file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()


@dataclass(frozen=True)
class Bundled(Weights):
    """A small encoder that ships with polysite and needs no download; it was trained on phantoms."""

    channels: ClassVar[int] = 128

    @property
    def words(self) -> str:
        """Description for a report."""
        return "the small encoder that ships with polysite, trained on drawn phantoms"

    @property
    def _file(self) -> Path:
        if not SHIPPED.is_file():
            raise ConfigError(f"{SHIPPED} is missing, although it ships with polysite; install polysite again")
        return SHIPPED

    def build(self) -> "torch.nn.Module":
        """Return the network with its weights: (batch, 1, *space) to (batch, channels, *smaller), in float32."""
        import safetensors
        import safetensors.torch

        from polysite.models.small_encoder import SmallEncoder

        try:
            weights = safetensors.torch.load_file(self._file)
        except (safetensors.SafetensorError, OSError) as problem:
            raise ConfigError(f"{SHIPPED} is damaged ({problem}); install polysite again") from problem
        return _filled(SmallEncoder, weights, SHIPPED, "the weights of this version; install polysite again")


@dataclass(frozen=True)
class MedicalNet(Weights):
    """MedicalNet's 3D-ResNet-18, trained on public datasets of CT and MR: the encoder of the distance-aware paper.

    Args:
        path: ``resnet_18.pth`` or ``resnet_18_23dataset.pth`` as MedicalNet publishes it; nothing is downloaded.
    """

    path: str = ""

    channels: ClassVar[int] = 512

    @property
    def words(self) -> str:
        """Description for a report."""
        return f"MedicalNet 3D-ResNet-18 from {Path(self.path).name}"

    @property
    def _file(self) -> Path:
        if not self.path:
            raise ConfigError("encoder.path is missing: name MedicalNet's checkpoint, resnet_18.pth")
        try:
            Path(self.path).open("rb").close()
        except OSError as problem:
            raise ConfigError(
                f"encoder.path = {self.path!r} cannot be opened ({problem.strerror}); name MedicalNet's checkpoint, "
                "resnet_18.pth"
            ) from problem
        return Path(self.path)

    def build(self) -> "torch.nn.Module":
        """Return the network with its weights."""
        from polysite.models.resnet3d import ResNet18

        weights = {k: v for k, v in self._state() if not k.startswith(("conv_seg.", "fc."))}  # layers after the encoder
        return _filled(ResNet18, weights, self._file, "a 3D-ResNet-18 of MedicalNet")

    def _state(self) -> Iterator[tuple[str, Any]]:
        """Yield the tensors of the checkpoint by name, without the prefix ``module.`` of training on several GPUs."""
        import torch

        file = self._file
        try:
            with warnings.catch_warnings():  # a TorchScript file is warned about before it is refused
                warnings.simplefilter("ignore")
                state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as problem:  # torch raises many types for a damaged file
            raise ConfigError(
                f"{file} is not a checkpoint of plain tensors: it is damaged, or it holds Python objects, "
                "which could run code and are not loaded; download it again"
            ) from problem
        state = state.get("state_dict", state) if isinstance(state, Mapping) else None
        if not isinstance(state, Mapping):
            raise ConfigError(f"{file} holds no parameters by name; name MedicalNet's checkpoint, resnet_18.pth")
        for name, value in state.items():
            if not str(name).endswith("num_batches_tracked"):
                yield str(name).removeprefix("module."), value


Encoder = Bundled | MedicalNet

ENCODERS: Mapping[str, type[Encoder]] = {"bundled": Bundled, "medicalnet": MedicalNet}


class Embedder:
    """Computes the embeddings of normalised volumes, one modality of one case each: (volume, channel, component).

    Volumes may have any size, in 3D or 2D. Volumes of equal shape form batches. An embedding does not depend on the
    other volumes of its batch, nor on reduced precision of a GPU.

    Args:
        encoder: The encoder.
        device: Where it computes.
        batch: Volumes in a batch.
        positions: Components as a ``mean`` over positions or as a ``sum``, which is sqrt(P) times as large.
    """

    def __init__(
        self,
        encoder: Encoder,
        device: "str | torch.device" = "cpu",
        batch: int = 8,
        positions: Literal["mean", "sum"] = "mean",
    ):
        if batch < 1:
            raise ConfigError(f"a batch holds at least one volume, got {batch}")
        self.channels, self.positions = encoder.channels, positions
        self.fingerprint = encoder.fingerprint + " summed" * (positions == "sum")  # other numbers, other cache entries
        self.device, self.batch = device, batch
        self.network = encoder.build().to(device).eval()
        self._turn = threading.Lock()  # torch's settings in ``_embed`` hold for all threads

    def __call__(self, volumes: Sequence[np.ndarray]) -> np.ndarray:
        """Return the embeddings of some volumes."""
        embeddings = np.zeros((len(volumes), self.channels, COMPONENTS), np.float32)
        alike: dict[tuple[int, ...], list[int]] = {}
        for place, volume in enumerate(volumes):
            if volume.ndim not in (2, 3) or not volume.size:
                raise DataError(f"volume {place} has the shape {volume.shape}; an encoder takes 2D and 3D images")
            alike.setdefault(volume.shape, []).append(place)
        for places in alike.values():
            for some, embedded in self._batches(volumes, places):
                embeddings[some] = embedded
        return embeddings

    def _batches(self, volumes: Sequence[np.ndarray], places: list[int]) -> Iterator[tuple[list[int], np.ndarray]]:
        """Yield the embeddings of volumes of one shape, in batches that fit into memory."""
        import torch

        size = self.batch
        if torch.device(self.device).type == "cpu":  # large batches need memory and are not faster there
            size = max(1, min(size, MAX_VOXELS // prod(fitted(volumes[places[0]].shape))))
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

        # exact float32 on a GPU too: embeddings of different machines are compared
        exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
        with self._turn, torch.inference_mode(), exact:
            x = torch.from_numpy(volumes.astype(np.float32)).to(self.device)
            features = self.network(resize(x[:, None]))
            features = features.flatten(2)
            scale = features.shape[2] ** 0.5 if self.positions == "sum" else 1.0
            return (principal(features) * scale).float().cpu().numpy()


def fitted(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the size in 3D to which a volume is resized for an encoder.

    >>> fitted((100, 120, 90)), fitted((256, 256, 256)), fitted((3, 4, 50)), fitted((512, 512))
    ((100, 120, 90), (128, 128, 128), (16, 16, 50), (362, 362, 16))
    """
    sides = [max(s, MIN_SIDE) for s in (*shape, 1)[:3]]
    while prod(sides) > MAX_VOXELS:  # repeated, since a side may reach its minimum
        large = sum(s > MIN_SIDE for s in sides)
        factor = (MAX_VOXELS / prod(sides)) ** (1 / large)
        sides = [max(MIN_SIDE, int(s * factor + 1e-9)) for s in sides]
    return tuple(sides)


def resize(volumes: "torch.Tensor") -> "torch.Tensor":
    """Resize (batch, 1, *space) in 2D or 3D to the fitted size in 3D: area means to shrink, linear to grow."""
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
    """Return the principal components over positions: (batch, channels, positions) to (batch, channels, components).

    Components that do not exist, or are below the precision of float32, are zero.
    """
    import torch

    positions = features.shape[2]
    x = features.double()
    noise = 1e-6 * x.abs().amax((1, 2), keepdim=True)
    x = (x - x.mean(2, keepdim=True)) / positions**0.5
    if positions < x.shape[1]:  # decompose the smaller of the two Gram matrices
        _, vectors = torch.linalg.eigh(x.mT @ x)
        leading = x @ vectors
    else:
        values, vectors = torch.linalg.eigh(x @ x.mT)
        leading = vectors * values.clamp_min(0).sqrt()[:, None]
    leading = leading.flip(2)[:, :, :components]  # eigh has the largest last
    leading = torch.where(torch.linalg.vector_norm(leading, dim=1, keepdim=True) > noise, leading, 0)
    largest = leading.gather(1, leading.abs().argmax(1, keepdim=True))
    leading = torch.where(largest < 0, -leading, leading)
    return torch.nn.functional.pad(leading, (0, components - leading.shape[2]))


def _filled(
    kind: "Callable[[], torch.nn.Module]", weights: Mapping[str, Any], file: Path, what: str
) -> "torch.nn.Module":
    """Build a network and load the weights, which must be exactly those of the network."""
    import torch

    with torch.device("meta"):  # draws no random weights
        network = kind()
    own = network.state_dict()
    counts = {k: torch.tensor(0) for k in own if k.endswith("num_batches_tracked")}  # not used after training
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
