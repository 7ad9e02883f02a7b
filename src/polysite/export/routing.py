"""The model of a new scan, chosen by its radiomic features: features, scaling, principal components, mixture, model.

A bundle of a run with clusters of cases holds all of them and runs on unlabelled scans. A scan that is far from all
clusters is unlike those that the clusters were fitted to; it gets the model that the clusters began from.

A scan is far if one of two things holds (our choice, the paper has no such rule). More than half of its features lie
outside the range from the 2nd to the 98th percentile of the fitted cases: since scaling clips them, the mixture cannot
see how far. Or the squared Mahalanobis distance to the nearest cluster exceeds the 99.9 % quantile of new cases of that
cluster. With the covariance S of n cases around K means in D dimensions, v = n - K degrees of freedom, and a cluster of
share w (Hotelling's prediction region):

    (x - mu)' S^-1 (x - mu)  >  (1 + 1 / (w n))  D v / (v - D + 1)  F(0.999; D, v - D + 1)

With v < D the covariance says nothing about new cases, and only the first rule applies.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

from polysite.cluster.mixture import Mixture, Values, squared_mahalanobis
from polysite.data.prepare import Prepare
from polysite.spreadsheets import write_mappings
from polysite.training.torch_site import radiomics_of

QUANTILE = 0.999
OUTSIDE = 0.5  # share of the features that differ between the fitted cases
CLUSTERS = "clusters.safetensors"
GLOBAL = -1  # route of a scan that is far from all clusters


def cluster_file(number: int) -> str:
    """Return the name of the file of a cluster's model."""
    return f"cluster_{number}.safetensors"


def limits(mixture: Mixture, cases: float) -> Values:
    """Return for every cluster the squared distance beyond which a scan is far from it.

    Args:
        mixture: The clusters.
        cases: Number of cases that they were fitted to.
    """
    from scipy.stats import f

    count, dims = mixture.means.shape
    free = cases - count
    if free < dims:
        return np.full(count, np.inf)
    own = np.maximum(mixture.weights * cases, 1.0)  # a cluster without a case counts as one of a single case
    wide: Values = (1 + 1 / own) * dims * free / (free - dims + 1) * f.ppf(QUANTILE, dims, free - dims + 1)
    return wide


def distances(mixture: Mixture, vectors: Values) -> Values:
    """Return squared Mahalanobis distances, cases x clusters."""
    from scipy.linalg import cholesky

    return squared_mahalanobis(mixture.transform(vectors), mixture.means, cholesky(mixture.covariance, lower=True))


def outside(mixture: Mixture, vector: Values) -> float:
    """Return the share of a case's features that lie outside the range that is scaled, without constant features."""
    differ = mixture.high > mixture.low
    beyond = (vector < mixture.low) | (vector > mixture.high)
    return float(beyond[differ].mean())


@dataclass(frozen=True)
class Route:
    """The model of a scan: that of its cluster, or the global one (-1)."""

    model: int
    cluster: int  # the most probable one, whether near or far
    distance: float  # from the nearest cluster, or of the features from their ranges; above 1 is far

    def row(self, case: str) -> dict[str, Any]:
        """Return the row of a case in routes.csv."""
        model = "global" if self.model == GLOBAL else f"cluster {self.model}"
        return {"case": case, "cluster": self.cluster, "model": model, "distance": f"{self.distance:.4g}"}


def route(mixture: Mixture, cases: float, vector: Values) -> Route:
    """Choose the model of a case from its features."""
    cluster = int(mixture.assign(vector[None])[0])
    apart = max(
        float((distances(mixture, vector[None])[0] / limits(mixture, cases)).min()), outside(mixture, vector) / OUTSIDE
    )
    return Route(GLOBAL if apart > 1 else cluster, cluster, apart)


class Router:
    """Chooses the network of a prepared scan; a bundle calls it before it predicts.

    Args:
        folder: Folder of the weights and of the clusters.
        network: The global network, with its weights; networks of clusters are copies of it.
        cases: Number of cases that the clusters were fitted to.
        bin_width: Width of the grey-level bins.
        normalise: The setting ``prepare.normalise``, by which the brain is found.
        modalities: Names of the modalities.
    """

    def __init__(
        self,
        folder: str,
        network: torch.nn.Module,
        cases: float,
        bin_width: float,
        normalise: Any,
        modalities: Sequence[str],
    ):
        place = Path(folder)
        self.mixture = Mixture.of(safetensors.numpy.load_file(place / CLUSTERS))
        self.cases, self.bin_width, self.modalities = cases, bin_width, tuple(modalities)
        self.prepare = Prepare(normalise=normalise)
        self.networks = {GLOBAL: network}
        for number in range(len(self.mixture.weights)):
            own = deepcopy(network)
            safetensors.torch.load_model(own, place / cluster_file(number))
            self.networks[number] = own.eval()
        self.routes: list[tuple[dict[str, Any], Route]] = []  # of all scans, with their metadata

    def route(self, image: Any) -> Route:
        """Return the route of a prepared scan, a MetaTensor (modality, *space)."""
        array = image.as_tensor().cpu().numpy()
        spacing = np.linalg.norm(np.asarray(image.affine)[: array.ndim - 1, : array.ndim - 1], axis=0)
        mask = self.prepare.brain(array, self.modalities)
        return route(self.mixture, self.cases, radiomics_of(array, mask, spacing.tolist(), self.bin_width))

    def __call__(self, image: Any) -> torch.nn.Module:
        """Return the network of a prepared scan, and remember its route."""
        found = self.route(image)
        self.routes.append((dict(image.meta), found))
        return self.networks[found.model]

    def write(self, folder: str, name_of: Callable[[dict[str, Any]], str]) -> None:
        """Write routes.csv: the cluster of every scan, the model that it got, and how far it is."""
        path = Path(folder) / "routes.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not self.routes:
            return
        with path.open("w", newline="", encoding="utf-8") as file:
            write_mappings(file, [found.row(name_of(meta)) for meta, found in self.routes], "\n")
