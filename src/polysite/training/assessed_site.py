"""The site of an assessment: every case is opened once, measured, embedded and released.

A case is described by the largest stored intensity of every modality, the volume of every label (for a class: 1 or 0),
and its embedding. For the embedding, every modality is prepared as for training and encoded by itself; it is zero for a
modality that was not acquired.
"""

import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np

from polysite import machine
from polysite.data.cache import Arrays, Cache
from polysite.data.case import Case, CaseRef
from polysite.data.prepare import Prepare
from polysite.errors import DataError
from polysite.heterogeneity.bounds import CLASS, INTENSITY, VOLUME
from polysite.models.encoders import COMPONENTS, Embedder
from polysite.site import Fit
from polysite.tree import Tree

Opened = tuple[Arrays, list[np.ndarray | None]]  # facts, and volumes to embed; no volumes if all is cached
BATCH = 4  # cases that are embedded in one call
NOISE = 7  # sets the noise of a simulation apart from other randomness
VERSION = 1  # of the measurements; a new version makes all cached descriptions again


class TorchAssessedSite:
    """A site that answers an assessment. Cases are opened on the first request, each once."""

    def __init__(
        self,
        name: str,
        refs: Sequence[CaseRef],
        modalities: Sequence[str],
        labels: Sequence[str],
        dims: int,
        classes: bool,
        prepare: Prepare,
        embedder: Embedder | None,
        cache: Cache,
        watch: Callable[[str], None] = lambda case: None,
        seed: int = 0,
    ):
        self.name, self.refs, self.dims, self.classes = name, tuple(refs), dims, classes
        self.modalities, self.labels = tuple(modalities), tuple(labels)
        # the encoder was trained on z-scores
        self.prepare = replace(prepare, normalise="nonzero") if prepare.normalise == "none" else prepare
        self.embedder, self.cache, self.watch = embedder, cache, watch
        self.fits: tuple[Fit, ...] = ()
        self.seed, self.unpredictable = seed, False
        self._described: list[Arrays] = []

    @property
    def size(self) -> int:
        """Number of cases described."""
        return len(self.refs)

    def at(self, round: int) -> "TorchAssessedSite":
        """Return this site: an assessment has no randomness."""
        return self

    def lift(self, params: Tree) -> Tree:
        """Return the parameters unchanged."""
        return params

    def noise_rng(self) -> np.random.Generator:
        """Return the source of noise: the operating system at a hospital; (seed, site) in a simulation, which can be
        repeated and therefore protects no patient."""
        drawn = secrets.randbits(256) if self.unpredictable else [self.seed, crc32(self.name.encode()), NOISE]
        return np.random.default_rng(drawn)

    def features(self, kind: str) -> Mapping[str, np.ndarray]:
        """Return arrays with one row per case, as ``polysite.site.AssessedSite`` defines them."""
        if not self._described:
            self._described = list(self._describe())
        if kind == "embedding":
            if self.embedder is None:
                raise DataError(f"site {self.name!r} was not given an encoder")
            code = np.array(float(crc32(self.embedder.fingerprint.encode())))
            by_name = np.argsort(self.modalities)  # independent of the order in a study
            return {"embedding": self._all("embedding")[:, by_name], "encoder": code}
        if kind == "patients":  # a case without an identifier is a patient
            known_by = [ref.patient or f"\0{k}" for k, ref in enumerate(self.refs)]
            return {"patients": np.unique(known_by, return_inverse=True)[1]}
        labels = self._all("label")
        if kind == "absent":
            return self._named(self._all("acquired") == 0, labels == 0)
        voxel = self._all("voxel")
        if kind == "cases":  # no case changes the unit of another
            size = 1.0 if self.classes else np.where(voxel > 0, voxel, 0.1**self.dims)[:, None]
            return self._named(self._all("intensity"), labels * size)
        known = bool(voxel.all())  # if one case has no voxel size, all are counted in voxels
        unit = 1.0 if self.classes else voxel[:, None] if known else 0.001
        return {
            **self._named(self._all("intensity"), labels * unit),
            "metric": np.full(self.size, float(self.dims if known else 0)),
        }

    def _all(self, what: str) -> np.ndarray:
        return np.stack([case[what] for case in self._described])

    def _named(self, modalities: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        """Return the columns by the name of their quantity."""
        named = [f"{INTENSITY} {m}" for m in self.modalities]
        named += [f"{CLASS if self.classes else VOLUME} {k}" for k in self.labels]
        return dict(zip(named, np.hstack([modalities, labels]).T, strict=True))

    def _describe(self) -> Iterator[Arrays]:
        """Yield the descriptions in order; threads open the next cases while a batch is embedded."""
        ahead: deque[Future[Opened]] = deque()
        left = iter(self.refs)
        with ThreadPoolExecutor(machine.cores()) as pool:
            try:
                for done in range(0, self.size, BATCH):
                    ahead.extend(pool.submit(self._open, ref) for ref in islice(left, 2 * BATCH - len(ahead)))
                    group = [ahead.popleft().result() for _ in range(min(BATCH, len(ahead)))]
                    yield from self._embed(self.refs[done : done + BATCH], group)
            finally:
                pool.shutdown(cancel_futures=True)

    def _open(self, ref: CaseRef) -> Opened:
        """Return the facts of a case, and the volumes that still need an embedding."""
        known = self.cache.recall(ref, self._how)
        if known is not None:
            return known, []
        case = ref.open()
        if not case.image.any():
            raise DataError(f"case {case.name!r} of site {case.site!r}: every voxel of every modality is zero")
        return self._measure(case), self._volumes(case) if self.embedder else [None]

    def _embed(self, refs: Sequence[CaseRef], group: Sequence[Opened]) -> Iterator[Arrays]:
        volumes = [v for _, each in group for v in each if v is not None]
        embedded = iter(self.embedder(volumes) if self.embedder and volumes else ())
        for ref, (known, each) in zip(refs, group, strict=True):
            if self.embedder and each:
                nothing = np.zeros((self.embedder.channels, COMPONENTS), np.float32)
                rows = [nothing if volume is None else next(embedded) for volume in each]
                known = {**known, "embedding": np.stack(rows)}
            if each:
                self.cache.keep(ref, self._how, known)
            self.watch(f"{self.name} · {ref.name}")
            yield known

    @property
    def _how(self) -> list[Any]:
        encoder = self.embedder.fingerprint if self.embedder else ""
        return [VERSION, version("monai"), asdict(self.prepare), encoder]

    def _measure(self, case: Case) -> Arrays:
        label = case.label if self.classes else case.label.reshape(len(case.label), -1).sum(1, dtype=np.float64)
        size = np.prod(case.spacing) / (100 if self.dims == 2 else 1000)  # square centimetres, or millilitres
        return {
            "intensity": np.array([x.max() for x in case.image], np.float64),
            "acquired": np.array([x.any() for x in case.image], np.float64),
            "label": label.astype(np.float64),
            "voxel": np.array(size if case.unit == "mm" else 0.0),
        }

    def _volumes(self, case: Case) -> list[np.ndarray | None]:
        """Return the prepared modalities; None for one that was not acquired."""
        prepared = self.prepare.apply(case, [1] * (case.image.ndim - 1))
        return [m if raw.any() else None for raw, m in zip(case.image, prepared.image, strict=True)]
