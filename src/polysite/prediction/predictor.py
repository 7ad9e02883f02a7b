"""The predictor: from a prepared scan to masks, by the model of a finished run.

Scans are prepared as in training. Windows are those of validation, unless other ones are asked for. A run with
clusters of patients (CFFT) chooses the model of every scan by its radiomic features, as ``routing`` describes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook

from polysite import machine
from polysite.data.case import Case
from polysite.data.placement import Placement
from polysite.data.prepare import Prepare
from polysite.errors import ConfigError
from polysite.export.served_model import ServedModel, hidden_modalities, open_finished, served_model
from polysite.payload import SiteId
from polysite.prediction.routing import GLOBAL, Route, route
from polysite.training import tasks
from polysite.training.cleaning import cleaned
from polysite.training.network import Network
from polysite.training.predict import BATCH, count_windows, mirrored, windowed, windows_per_pass
from polysite.training.torch_site import radiomics_of

SHARE = 0.5  # of the free memory that a pass, or the logits of a scan, may take
FLOAT = 4  # bytes of a number
Step = Callable[[float], None]


@dataclass(frozen=True, eq=False)
class Prediction:
    """What was predicted for a scan."""

    masks: np.ndarray | None = None  # (label, *space) of the scan; None in a classification
    probabilities: np.ndarray | None = None  # of every class, in a classification
    route: Route | None = None  # to the model of a cluster; None for a run with one model


class Predictor:
    """The model of a finished run, ready to predict.

    Args:
        run: Folder of the finished run.
        site: Hospital whose model is used; None where all hospitals share one.
        mirror: Average over all mirror images of every window: 8 times the time in 3D, 4 times in 2D; None: as in
            validation.
        overlap: Share of a window that the next one overlaps, 0 to less than 1; None: as in validation.
        batch: Windows per pass; 0 for as many as suit the device and its free memory.
        device: "auto", "cpu", "cuda" or "cuda:1".
    """

    def __init__(
        self,
        run: Path | str,
        *,
        site: SiteId | None = None,
        mirror: bool | None = None,
        overlap: float | None = None,
        batch: int = 0,
        device: str = "auto",
    ):
        if overlap is not None and not 0 <= overlap < 1:
            raise ConfigError(f"the overlap {overlap} must lie in [0, 1)")
        if batch < 0:
            raise ConfigError(f"the batch {batch} must be a number of windows, or 0 to choose it")
        self.site = site
        self.served = _served(run, site)
        result = self.served.result
        self.study, self.labels, self.modalities = self.served.study, result.labels, result.modalities
        self.task = tasks.find(result.task, self.study.train.exclusive)
        self.zero = hidden_modalities(self.study, site)
        self.missing = "missing" in getattr(self.study.data, "allow", ())
        train = self.study.train
        self.window = tuple(train.window or train.patch)
        self.overlap = train.overlap if overlap is None else overlap
        self.mirror = train.mirror if mirror is None else mirror
        self.network = self._network(device)
        self.device = self.network.device
        self._bytes = self._pass_bytes()
        self.batch = batch or self._batch()

    @property
    def classifies(self) -> bool:
        """Whether the task is classification."""
        return isinstance(self.task, tasks.Classify)

    @property
    def exclusive(self) -> bool:
        """Whether a voxel has at most one label."""
        return isinstance(self.task, tasks.Exclusive)

    @property
    def dims(self) -> int:
        """Spatial dimensions of a scan: 3 for volumes that are predicted slice by slice."""
        return len(self.window) + bool(self.study.slices.axis)

    @property
    def prepare(self) -> Prepare:
        """The preparation of a scan; slices of a volume lie along its first axis."""
        return self.study.slices.oriented(self.study.prepare)

    def prepared(self, case: Case) -> tuple[Case, Placement]:
        """Return a scan as the network sees it, and its place in the scan."""
        flat = (1,) * bool(self.study.slices.axis)
        return self.prepare.place(case, (*flat, *self.study.train.patch))

    def predict(self, case: Case, place: Placement, step: Step = lambda _: None) -> Prediction:
        """Return the prediction of a prepared scan.

        Args:
            case: The prepared scan.
            place: Its place in the scan.
            step: Called with the share of the windows that are done.
        """
        route = self._choose(case)
        if self.classifies:
            return Prediction(probabilities=self._classify(case.image, step), route=route)
        masks = np.stack(list(self._masks(case, step)), 1) if self.study.slices.axis else next(self._masks(case, step))
        return Prediction(masks=place.restore(masks), route=route)

    def count(self, case: Case) -> int:
        """Return the number of windows of a prepared scan, without their mirror images."""
        if self.classifies:
            return 1
        space = case.image.shape[1:]
        slices = space[0] if self.study.slices.axis else 1
        return slices * count_windows(space[-len(self.window) :], self.window, self.overlap)

    def _masks(self, case: Case, step: Step) -> Iterator[np.ndarray]:
        """Yield the cleaned masks of a prepared volume, or of each of its slices."""
        stack = bool(self.study.slices.axis)
        parts = [case.image[:, k] for k in range(case.image.shape[1])] if stack else [case.image]
        total, clean = self.count(case), self.study.train.clean
        home = self._home(parts[0].shape[1:])
        done = 0

        def network(x: torch.Tensor) -> torch.Tensor:
            nonlocal done
            logits = self.logits(x.to(self.device))
            done += len(x)
            step(done / total)
            return logits.to(home)

        images = ((str(k), torch.from_numpy(np.ascontiguousarray(part)).to(home)) for k, part in enumerate(parts))
        spacing = case.spacing[-len(self.window) :]
        with torch.inference_mode():
            for _, logits in windowed(network, images, self.window, self.overlap, self.batch):
                masks = self.task.masks(logits).cpu().numpy()
                yield cleaned(masks, clean, spacing, case.unit, self.exclusive) if clean.does else masks

    def _classify(self, image: np.ndarray, step: Step) -> np.ndarray:
        with torch.inference_mode():
            logits = self.logits(torch.from_numpy(image)[None].to(self.device))[0]
        step(1.0)
        return np.asarray(torch.softmax(logits, 0).cpu())

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits for a batch of windows."""
        infer = self.network.infer
        return (mirrored(infer) if self.mirror else infer)(x)

    def _network(self, device: str) -> Network:
        """Return the network of the run with its parameters, on the device, in evaluation mode."""
        module = self.study.model.build(
            dims=len(self.window),
            modalities=len(self.modalities),
            outputs=self.task.outputs(self.labels),
            seed=self.study.seed,
        )
        network = Network(module, replace(self.study.train, device=device, compile=False))
        network.write(_lifted(self.served.model, network))
        network.module.eval()
        return network

    def _choose(self, case: Case) -> Route | None:
        """Give the network the model of a scan's cluster; return the route, None for a run with one model."""
        clusters = self.served.clusters
        if clusters is None:
            return None
        mask = self.prepare.brain(case.image, self.modalities)
        vector = radiomics_of(case.image, mask, case.spacing, clusters.bin_width)
        found = route(clusters.mixture, clusters.cases, vector)
        chosen = clusters.start if found.model == GLOBAL else clusters.models[found.model]
        self.network.write(_lifted(chosen, self.network))
        return found

    def _home(self, size: Sequence[int]) -> torch.device:
        """Return where the logits of a scan are summed: on the device, or in main memory if they do not fit there."""
        if self.device.type == "cpu":
            return self.device
        channels = len(self.modalities) + self.task.outputs(self.labels) + 1
        needed = FLOAT * channels * int(np.prod(np.maximum(size, self.window)))
        free, _ = torch.cuda.mem_get_info(self.device)
        return self.device if needed < SHARE * free else torch.device("cpu")

    def _batch(self) -> int:
        """Return the number of windows per pass that suits the device and fits into its free memory."""
        usual = BATCH if self.device.type == "cpu" else windows_per_pass(self.window)
        free = machine.memory().free if self.device.type == "cpu" else torch.cuda.mem_get_info(self.device)[0]
        return int(max(1, min(usual, SHARE * free // max(1, self._bytes))))

    def _pass_bytes(self) -> int:
        """Return an upper bound of the bytes that one window takes: the outputs of all layers.

        They are those of a small window, scaled to the number of voxels. A forward pass frees most of them on its way.
        """
        side = tuple(min(n, 2 * self.study.model.divisor) for n in self.window)
        count = 0

        def note(layer: torch.nn.Module, _: Any, made: Any) -> None:
            nonlocal count
            if isinstance(made, torch.Tensor) and next(layer.parameters(recurse=False), None) is not None:
                count += made.numel()

        hook = register_module_forward_hook(note)
        try:
            with torch.inference_mode():
                self.network.module(torch.zeros((1, len(self.modalities), *side), device=self.device))
        except (RuntimeError, ValueError):  # a network that wants another size: nothing is known
            count = 0
        finally:
            hook.remove()
        return int(FLOAT * count * np.prod(self.window) / np.prod(side))


def _lifted(model: Any, network: Network) -> dict[str, torch.Tensor]:
    return {k: torch.as_tensor(v, device=network.device) for k, v in model.items()}


def _served(run: Path | str, site: SiteId | None) -> ServedModel:
    """Return the model of a run. Of runs whose hospitals share a model, the site need not be one of theirs."""
    folder = open_finished(run)
    shared = (folder.path / "models" / "best.safetensors").exists()
    known = site is None or site in folder.result.validation
    return served_model(folder, site if known or not shared else None)
