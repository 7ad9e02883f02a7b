"""The exchange of an assessment: statistics of a hospital's cases leave, images and single cases do not.

Paper: Alekseenko et al., Distance-aware non-IID federated learning, MIDL 2024, section 2 and appendices C to E

    every quantity (largest intensity of a modality, volume of a label)    at most ``levels`` quantiles
    the embedding, the two leading components of an encoder's features     its mean over the cases, and at most
      in every modality (zero if one was not acquired)                     ``levels`` quantiles along each of
                                                                           ``projections`` fixed random directions
    the angles between a case's components and the mean ones               at most ``levels`` quantiles

The paper sends the numbers of every case. Here each list is sorted by itself, so that the numbers of one case cannot be
linked, and a site with fewer than ``fewest`` cases sends only their number. The paper averages modalities
(``modalities = "mean"``); side by side they distinguish scanners more often, as docs/assess.md shows.

With ``private.epsilon`` sums of bounded numbers leave instead, under noise (``bounds.py``).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np

from polysite.algorithms.base import Facts
from polysite.errors import ConfigError
from polysite.heterogeneity.bounds import CLASS, EMBEDDING, INTENSITY, SQUARE, VOLUME, PrivateSums, bounded_sums
from polysite.heterogeneity.distances import Values, angle, slices
from polysite.payload import Payload, SiteId, natural
from polysite.privacy import Release
from polysite.site import AssessedSite, Cases
from polysite.tree import Tree

MAX_PROJECTIONS = 128


@dataclass(frozen=True, slots=True)
class State:
    """The server's state: the replies of all sites."""

    replies: Mapping[SiteId, Payload]


@dataclass(frozen=True)
class Assess:
    """Settings of an assessment: what the sites send, and how it is compared.

    Args:
        cases: Describe the training cases or all; test cases should not decide about a strategy.
        fewest: A site with fewer cases sends only their number; at least 1.
        levels: Largest number of quantiles of a quantity, at least 2; more cases are averaged in equal slices.
        modalities: Embeddings of the modalities side by side (``apart``), or averaged as in the paper (``mean``).
        projections: Directions along which embeddings are compared, at most 128 and half the numbers of an embedding;
            0 for no embeddings.
        positions: Components of an embedding as a mean over the encoder's positions (``mean``), which does not depend
            on the size of a scan, or as a sum, as in the paper (``sum``: sqrt(P) times as large with P positions).
        scale: Divide the distance of two sites in a quantity by its standard deviation over all sites (``pooled``), by
            that of the site that comes first in the order of names, as in the paper (``first``), or not (``none``).
        combine: Average the modality and the label with the largest distances (``max``), or all quantities (``mean``).
        take: Sites that join the group of the most distant one: a number, ``least`` or ``literal`` (all but two).
        permutations: Permutations of a test with a small p, at least 99; up to 50 000 for many pairs. Other tests have
            1000.
        resamples: Resamples of every bootstrap interval, at least 100.
        private: Differential privacy for every patient described: bounded sums under noise instead of lists.
    """

    cases: Literal["train", "all"] = "train"
    fewest: int = 3
    levels: int = 256
    modalities: Literal["apart", "mean"] = "apart"
    projections: int = 64
    positions: Literal["mean", "sum"] = "mean"
    scale: Literal["pooled", "first", "none"] = "pooled"
    combine: Literal["max", "mean"] = "max"
    take: Literal["least", "literal"] | int = "least"
    permutations: int = 9999
    resamples: int = 300
    private: PrivateSums = PrivateSums()

    facts: ClassVar[Facts] = Facts(strangers=False)

    def __post_init__(self) -> None:
        least = {"fewest": 1, "levels": 2, "projections": 0, "permutations": 99, "resamples": 100, "take": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, int) and value < low:
                raise ConfigError(f"assess.{name} = {value} must be at least {low}")
        self._limit(MAX_PROJECTIONS)

    def _limit(self, largest: int) -> None:
        if self.projections > largest:
            raise ConfigError(
                f"assess.projections = {self.projections}: from more than {largest}, cases could be rebuilt"
            )

    @property
    def reply(self) -> Mapping[str, Literal["statistics", "number"]]:
        """Kind of every field of a reply."""
        plain: dict[str, Literal["statistics", "number"]]
        if self.private.on:
            return {"cases": "number", "patients": "number", "encoder": "number", "sums": "statistics"}
        plain = {"cases": "number", "metric": "number", "unlabelled": "number"}
        plain |= {"quantiles": "statistics", "absent": "statistics"}
        if self.projections:
            plain |= {"encoder": "number", "mean": "statistics", "directions": "statistics", "angles": "statistics"}
        return plain

    @property
    def describes(self) -> Literal["sums", "quantiles"]:
        """Field of a reply that describes the cases; it is empty at a site with too few of them."""
        return "sums" if self.private.on else "quantiles"

    @property
    def release(self) -> Release | None:
        """What the statistics of a reply cost under noise; None if they leave without it."""
        return self.private.release

    def release_of(self, got: Payload) -> Release | None:
        """What the statistics that a payload asks for cost under noise; None without noise."""
        return self.release

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        """Return the state before the exchange."""
        return State({})

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        """Return an empty payload for every site."""
        return {i: Payload() for i in cohort}

    def local(self, got: Payload, memory: Payload, site: AssessedSite) -> tuple[Payload, Payload]:
        """Return the statistics of a site's cases."""
        if site.size < self.fewest:
            nothing: dict[str, Tree | float] = {f: {} if k == "statistics" else 0.0 for f, k in self.reply.items()}
            return Payload(**{**nothing, "cases": site.size}), memory
        if self.private.on:
            return self._bounded(site), memory
        quantities, absent = dict(site.features("metadata")), site.features("absent")
        metric = float(quantities.pop("metric").min())
        labels = [absent[name] for name in quantities if not name.startswith(INTENSITY)]
        reply: dict[str, Tree | float] = {
            "cases": site.size,
            "metric": metric,
            "unlabelled": float(np.logical_and.reduce(labels).sum()) if labels else 0.0,
            "quantiles": {name: slices(values, self.levels) for name, values in quantities.items()},
            "absent": {name: np.array([float(absent[name].sum())]) for name in quantities},
        }
        if self.projections:
            reply |= self._embedding(site)
        return Payload(**reply), memory

    def _bounded(self, site: AssessedSite) -> Payload:
        """Return bounded sums, before noise."""
        patients, encoder, vectors = site.features("patients")["patients"], 0.0, None
        if self.projections:
            features = site.features("embedding")
            encoder, vectors = float(features["encoder"].item()), self.vectors(features["embedding"])
            vectors = vectors.reshape(len(vectors), -1)
        quantities, absent = site.features("cases"), site.features("absent")
        sums = bounded_sums(self.private, quantities, absent, patients, vectors)
        return Payload(cases=site.size, patients=len(np.unique(patients)), encoder=encoder, sums=sums)

    def _embedding(self, site: AssessedSite) -> dict[str, Tree | float]:
        features = site.features("embedding")
        cases = self.vectors(features["embedding"])
        self._limit(cases[0].size // 2)
        mean, flat = cases.mean(0), cases.reshape(len(cases), -1)
        along = directions(flat.shape[1], self.projections) @ flat.T
        turned = {
            component(k): np.array([angle(case[:, k], mean[:, k]) for case in cases]) for k in range(mean.shape[1])
        }
        return {
            "encoder": float(features["encoder"].item()),
            "mean": {component(k): mean[:, k].copy() for k in range(mean.shape[1])},
            "directions": {"embedding": np.stack([slices(row, self.levels) for row in along])},
            "angles": {name: slices(values, self.levels) for name, values in turned.items()},
        }

    def vectors(self, embedding: Values) -> Values:
        """Return the vectors to compare, (case, channel, component); embeddings also have an axis of modalities."""
        cases = embedding.astype(np.float64)  # (case, modality, channel, component)
        if self.modalities == "mean":
            acquired = cases.any((2, 3))
            cases = cases.sum(1) / np.maximum(acquired.sum(1), 1)[:, None, None]
        return cases.reshape(len(cases), -1, cases.shape[-1])

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        """Return the state with these replies."""
        return State({i: replies[i] for i in natural(replies)})

    def serve(self, got: Payload, memory: Payload, site: AssessedSite, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        """Yield nothing: an assessment has no model."""
        return iter(())


def component(k: int) -> str:
    """Return the name of a component of the embedding."""
    return f"component {k + 1}"


@lru_cache(maxsize=8)
def directions(size: int, count: int) -> Values:
    """Return random directions of length sqrt(size), the same at all sites.

    The mean square of a vector along them estimates its squared length.
    """
    drawn = np.random.default_rng(0).standard_normal((count, size))
    return drawn * (np.sqrt(size) / np.linalg.norm(drawn, axis=1, keepdims=True))  # type: ignore[no-any-return]


def odd(replies: Mapping[SiteId, Payload], settings: Assess) -> dict[SiteId, str]:
    """Return the sites with replies that cannot be compared with the others, and why."""
    malformed = _malformed_sums if settings.private.on else _malformed
    described = {i: r for i, r in replies.items() if r[settings.describes]}
    problems = {i: problem for i, r in described.items() if (problem := malformed(r, settings))}
    forms = {i: _form(r, settings) for i, r in described.items() if i not in problems}
    usual = Counter(forms.values()).most_common(1)[0][0] if forms else ()
    for i, form in forms.items():
        for what, own, common in zip(FORM, form, usual, strict=True):
            if own != common:
                problems.setdefault(i, f"it has other {what} than most sites: {own} instead of {common}"[:200])
    return problems


def _form(reply: Payload, settings: Assess) -> tuple[Any, ...]:
    """Return the facts that must be the same at all hospitals, in the order of ``FORM``."""
    embedding = reply.get("sums", reply.get("mean", {}))
    shapes = tuple((name, embedding[name].shape) for name in sorted(embedding))
    return tuple(sorted(reply[settings.describes])), reply.get("metric", 0.0), reply.get("encoder", 0.0), shapes


FORM = ("quantities", "units (3: millimetres, 0: voxels)", "encoder weights", "embedding")


def _malformed(reply: Payload, settings: Assess) -> str | None:
    """Return what is wrong with a reply that no honest site can send, or None."""
    cases = reply["cases"]
    if cases < settings.fewest or cases != int(cases) or reply["unlabelled"] > cases:
        described = f"{cases:g} cases, {reply['unlabelled']:g} of them unlabelled"
        return f"it describes {described}; at least assess.fewest = {settings.fewest} are asked for"
    length = min(int(cases), settings.levels)
    for name, values in reply["quantiles"].items():
        if name.partition(" ")[0] not in (INTENSITY, VOLUME, CLASS):
            return f"there is no quantity called {name!r}"
        if values.shape != (length,) or (np.diff(values) < 0).any():
            return f"the quantiles of {name!r} are not {length} ascending numbers"
        if not name.startswith(INTENSITY) and values[0] < 0:
            return f"the quantiles of {name!r} are negative"
    if reply["absent"].keys() != reply["quantiles"].keys():
        return "it does not say of every quantity how often it is absent"
    if any(v.shape != (1,) or not 0 <= v[0] <= cases for v in reply["absent"].values()):
        return "a quantity is absent in more cases than there are"
    if not settings.projections:
        return None
    along = reply["directions"].get("embedding")
    if along is None or along.shape != (settings.projections, length) or (np.diff(along) < 0).any():
        return f"the embedding is not {length} ascending numbers along each of {settings.projections} directions"
    if not reply["mean"] or any(v.ndim != 1 for v in reply["mean"].values()):
        return "the mean of the embedding is not a list of numbers"
    if reply["angles"].keys() != reply["mean"].keys() or any(v.shape != (length,) for v in reply["angles"].values()):
        return f"the angles are not {length} numbers for every component"
    return None


def _malformed_sums(reply: Payload, settings: Assess) -> str | None:
    """Return what is wrong with sums that no honest site can send, or None."""
    cases, patients = reply["cases"], reply["patients"]
    kinds = {name.partition(" ")[0] for name in reply["sums"]} - {EMBEDDING, SQUARE}
    if not kinds or not kinds <= {INTENSITY, VOLUME, CLASS}:
        return "its sums are not of quantities of an assessment"
    if not settings.fewest <= cases or not 1 <= patients <= cases:
        return f"it describes {cases:g} cases of {patients:g} patients, which cannot be"
    return None


def left(reply: Payload) -> str:
    """Return a description of what a reply holds.

    >>> left(Payload(cases=900, metric=1, quantiles={"intensity t1": np.zeros(256), "volume WT": np.zeros(256)}))
    'the number of its cases; 256 quantiles of 2 quantities; counts of what is absent; if voxel sizes are known'
    """
    contents = ["the number of its cases"]
    if reply.get("sums"):
        count = sum(v.size for v in reply["sums"].values())
        contents += ["the number of its patients", f"{count} sums of bounded numbers under noise", "the encoder"]
    if reply.get("quantiles"):
        lists = reply["quantiles"]
        count = len(next(iter(lists.values())))
        one = "sorted values, one for each case," if count == reply["cases"] else "quantiles"
        contents.append(f"{count} {one} of {_many(len(lists), 'quantity', 'quantities')}")
        contents += ["counts of what is absent", "if voxel sizes are known"]
    if reply.get("mean"):
        numbers, (along, _) = sum(v.size for v in reply["mean"].values()), reply["directions"]["embedding"].shape
        contents.append(f"the mean of an embedding ({numbers} numbers), and {count} {one} along {along} directions")
        contents.append(f"{count} {one} of {_many(len(reply['angles']), 'angle', 'angles')}")
        contents.append("a checksum of the encoder")
    return "; ".join(contents)


def _many(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
