"""CFFT: clustering of patients instead of hospitals, and one fine-tuned model per cluster.

Paper: Manthe et al., Whole-brain radiomics for clustered federated personalization in brain tumor segmentation, 2023

    z = scale, project, cluster(radiomic features of a case)                           once, over all training cases
    w_c <- sum_k n_ck / N_c fit_k(w_c; the cases of cluster c at site k)               from the model before, all c
    a patient of cluster c is served the best w_c so far, by the validation cases of cluster c

CFFT is a phase after another algorithm. It first fits the clusters: 93 radiomic features per modality, within the head,
are scaled between their 2nd and 98th percentile, projected on principal components and clustered by a Gaussian mixture.
``fit = "federated"`` computes all three from sums over cases (cluster/federated_mixture.py, about 15 to 50 exchanges),
so the features of a case stay at its site. ``fit = "pooled"``, as in the paper, sends the features, in one exchange.
Both take the same starts and find the same clusters. Unless sums are added up securely (``run.secure``), the server
sees those of each site, and the sum over a cluster with one case at a site is that case: a hospital whose policy
requires a minimum refuses such a study.
Then the sites receive the clusters and report their numbers of cases in each. ``rounds`` of fine-tuning follow, and one
more exchange that scores the last models. The phase then ends by itself. ``run.rounds`` must leave room for all
exchanges; ``run.patience`` is ignored. Only rounds of fine-tuning count for the decay of the learning rate: the first
has the rate lr, the next lr * gamma, however many exchanges the fit took.

A site receives the models of the clusters that it has cases of, and replies with these only. A cluster without
validation cases at any site is sent to all sites and scored on all their validation cases. A cluster without training
cases keeps the initial model of the phase, which is a candidate in every cluster. A site that was absent when the
clusters were announced receives them when it is asked next. Scores of a round come from the sites that are present.
With ``run.pooled`` all cases are in one place: the paper's "ideal", an upper bound.

With ``together`` the server needs only sums over the sites, so that they can be secure: every site receives the models
of all clusters and replies n_ck w_ck of all, zeros where it has no case, with the numbers n_ck. This gives the same
clusters and models for more bytes. What the server then does not know is which site has cases of which cluster.

With ``noisy.epsilon`` the fit is differentially private (cluster/noisy_mixture.py), and so is the fine-tuning, which
needs train.private.unit = "patient". Whether a cluster has patients at a site must not show, so every site trains the
models of all clusters, with the noise, the draws and the divisor of all its patients, and weighs them by its training
cases: a cluster with few patients moves little. All cases of a patient go to the cluster of the first, so that a
patient is in one fit, and a round costs as much as one.

The paper takes ten clusters, fitted to training and validation cases with 20 restarts of 100 iterations and seed 6, 50
rounds, no augmentation (train.augment = "none") and bin_width 0.09 (0.15 for CC359). Several numbers of clusters are
compared by BIC; the paper chose ten by validation Dice, which takes a run for each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import reduce
from math import fsum
from typing import Any, ClassVar, Literal

import numpy as np

from polysite import tree
from polysite.algorithms.base import INF, TINY, Facts, Kind, within
from polysite.cluster import federated_mixture, noisy_mixture
from polysite.cluster.mixture import CaseClusters, Mixture, Settings
from polysite.cluster.noisy_mixture import NoisyClusters
from polysite.cluster.pooled_mixture import pooled
from polysite.cluster.remarks import remarks, sites_index
from polysite.errors import ConfigError, DataError
from polysite.payload import Payload, SiteId, mean, plain
from polysite.privacy import Release
from polysite.radiomics.formulas import NAMES
from polysite.site import Budget, Cases, Site
from polysite.tree import Tree

Counts = Mapping[str, float]  # cluster -> cases
FIT = 19  # exchanges of a federated fit beside its iterations: moments, counts, products, groups, check
ALL = "*"  # stands for all sites, with ``together``
ABSURD = 1e12  # times the median of the other sites; squares of honest features were 1e7 times as large (TCGA-LGG)


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    start: Tree
    fit: federated_mixture.State | noisy_mixture.State | None = None  # while clusters are fitted from sums
    mixture: Mapping[str, Any] | None = None  # arrays of the clusters, once fitted
    kept: float = 1.0  # share of the variance that the principal components keep
    agreement: float = 1.0  # adjusted Rand index of the best restarts of the mixture
    fitted: float = 0.0  # cases that the mixture was fitted to
    models: Mapping[str, Tree] = field(default_factory=dict)  # of every cluster with training cases
    best: Mapping[str, Tree] = field(default_factory=dict)
    scores: Counts = field(default_factory=dict)  # mean scores of the best models
    # training cases per cluster, of sites that have the clusters
    train: Mapping[SiteId, Counts] = field(default_factory=dict)
    judges: Mapping[SiteId, Counts] = field(default_factory=dict)  # validation cases per cluster
    judged: int = 0  # exchanges in which models were scored


@dataclass(frozen=True)
class Cfft:
    """Clustering of cases by radiomics, then fine-tuning of one model per cluster.

    Args:
        components: Number of clusters, at least 1; of several numbers, the one with the lowest BIC is used. The paper
            takes 10.
        rounds: Rounds of fine-tuning, at least 1; 50 in the paper.
        fit: How clusters are fitted: federated, from sums alone, or pooled, from the features of every case (the
            paper).
        bin_width: Width of the grey-level bins of the radiomic features, more than 0, in standard deviations of
            the image; 0.09 in the paper.
        dimensions: Principal components that the features are projected on, at least 1; 30 in the paper.
        restarts: Random starts of the Gaussian mixture, at least 1; 20 in the paper. The default is our choice, for
            less traffic in a federated fit.
        iterations: Largest number of iterations of the Gaussian mixture, at least 1; 100 in the paper. The default is
            our choice: every iteration of a federated fit is an exchange.
        starts: Starts of the Gaussian mixture: shared, the same for a federated and a pooled fit, or kmeans, those of
            scikit-learn (the paper), only with a pooled fit.
        cases: Cases that the clusters are fitted to: train, or train+validation (the paper).
        least: Fewest training cases of a cluster at a site, at least 1; a site with fewer does not train that cluster.
        seed: Seed of the Gaussian mixture, at least 0; 6 in the paper.
        lr: Local learning rate, more than 0; None: the site's own (train.lr).
        epochs: Local epochs per round, at least 1; None: the site's own (train.epochs).
        steps: Local iterations per round, at least 1, instead of epochs.
        choose: Serve the best model of every cluster by its validation cases (the paper); false: the last one.
        together: Send all sites the models of all clusters, so that the server needs only sums over the sites, as with
            run.secure; not with fit = "pooled".
        noisy: Differential privacy of the clusters; with together = true, one number of components and least = 1.
    """

    components: tuple[int, ...] = (10,)
    rounds: int = 50
    fit: Literal["federated", "pooled"] = "federated"
    bin_width: float = 0.09
    dimensions: int = 30
    restarts: int = 5
    iterations: int = 30
    starts: Literal["shared", "kmeans"] = "shared"
    cases: Literal["train", "train+validation"] = "train"
    least: int = 1
    seed: int = 0
    lr: float | None = None
    epochs: int | None = None
    steps: int | None = None
    choose: bool = True
    together: bool = False
    noisy: NoisyClusters = NoisyClusters()

    reply: ClassVar[Mapping[str, Kind]] = {
        "sums?": "statistics",  # sums of features
        "features?": "cases",  # with a pooled fit: one row per case
        "counts?": "counts",  # cases per cluster, and the sums of their scores
        "cluster_*": "model",
    }

    def __post_init__(self) -> None:
        within(self, rounds=(1, INF), least=(1, INF), epochs=(1, INF), steps=(1, INF))
        within(self, bin_width=(TINY, INF), lr=(TINY, INF))
        _ = self.settings  # refuses invalid settings of the mixture
        if self.starts == "kmeans" and self.fit == "federated":
            raise ConfigError(
                "starts = 'kmeans' begins from single cases, which stay at their sites; use starts = 'shared', or "
                "fit = 'pooled'"
            )
        if self.together and self.fit == "pooled":
            raise ConfigError("together = true needs only sums over the sites, so nothing is pooled: leave out fit")
        if self.noisy.on and (not self.together or len(set(self.components)) > 1 or self.least > 1):
            raise ConfigError(
                "noisy.epsilon needs together = true, one number of components and least = 1: what else depends on the "
                "patients of a cluster would leave without noise"
            )

    def release_of(self, got: Payload) -> Release | None:
        """What the statistics that a payload asks for cost under noise; None if there are none, or no noise."""
        return self.noisy.release if self.noisy.on and "sums" in got else None

    @property
    def facts(self) -> Facts:
        """Facts for configurations and policies: it continues from a model, ends a study and sends sums of scores."""
        fit = FIT + self.iterations if self.fit == "federated" else 1
        fit = self.noisy.exchanges if self.noisy.on else fit
        return Facts(
            needs="sum" if self.together else "each",
            needs_model=True,
            ends_study=True,
            poolable=True,
            groupable=False,
            sends_scores=True,
            exchanges=fit + 1 + self.rounds + 1,  # fit of the clusters, their announcement, tuning, the last scores
            masks_head=True,
            only_fits=self.noisy.on,
            noisy_sums=self.noisy.on,
            disjoint_fits=self.noisy.on,
            sums_with="algorithm.together = true",
        )

    def check_sites(self, train: Mapping[SiteId, int], validation: Mapping[SiteId, int]) -> None:
        """Refuse sites with too few cases for the clusters, and sites that cannot choose the best model."""
        fitted = {i: n + (validation.get(i, 0) if "validation" in self.splits else 0) for i, n in train.items()}
        cases = sum(fitted.values())
        if cases < max(self.components):
            raise ConfigError(
                f"cfft wants {max(self.components)} clusters, and the sites have {cases} cases in all to fit them to; "
                "lower algorithm.components"
            )
        if not any(n and validation.get(i, 0) for i, n in train.items()):
            raise DataError("no site that trains has a validation case, by which cfft chooses; raise split.validation")

    def small_sums(self, fewest: int) -> str:
        """Return which sums over fewer than ``fewest`` cases leave a site, and the setting that prevents it."""
        if self.fit == "pooled" or self.noisy.on or fewest <= 1:
            return ""
        return (
            "cfft sums the features of the cases of every cluster, and a cluster may have a single case here (the "
            'study could set run.secure.use = "on" and algorithm.together = true)'
        )

    def small_models(self, fewest: int) -> str:
        """Return which models of fewer than ``fewest`` cases leave a site, and the setting that prevents it."""
        if self.least >= fewest or self.noisy.on:
            return ""
        return (
            "cfft trains a model of every cluster, and a cluster may have a single case here (with algorithm.least = "
            f"{fewest} in the study, a site would not train clusters with fewer cases)"
        )

    def case_clusters(self, got: Payload) -> CaseClusters | None:
        """Return the clusters in a payload, once they are fitted."""
        if "mixture" not in got:
            return None
        mixture = Mixture.of({k: plain(v) for k, v in got["mixture"].items()})
        models = tuple(got.get(f"cluster_{c}", got["model"]) for c in range(len(mixture.weights)))
        about = self.fit, self.bin_width, self.settings, self.splits
        return CaseClusters(mixture, *about, cases=float(got.get("fitted", 0.0)), models=models, start=got["model"])

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits whose cases the clusters are fitted to."""
        return tuple(self.cases.split("+"))

    @property
    def settings(self) -> Settings:
        """Settings of the Gaussian mixture."""
        return Settings(
            dimensions=self.dimensions, components=self.components, restarts=self.restarts,
            iterations=self.iterations, seed=self.seed, starts=self.starts,
        )  # fmt: skip

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        if self.noisy.on:
            return State(params, noisy_mixture.begin(self.noisy, self.components[0], NAMES, self.seed))
        return State(params, federated_mixture.State(self.settings) if self.fit == "federated" else None)

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        if state.mixture is None:
            asked: dict[str, Any] = {"features": {}}
            if isinstance(state.fit, noisy_mixture.State):
                asked = {"sums": noisy_mixture.ask(_plainly(state.fit))}
            elif state.fit:
                asked = {"sums": federated_mixture.ask(_plainly(state.fit))}
            return {i: Payload(**asked) for i in cohort}
        if self.together:
            task = self._task(state, ALL) if ALL in state.train else Payload()
            return dict.fromkeys(cohort, Payload(mixture=state.mixture, **task))
        return {i: self._task(state, i) if i in state.train else Payload(mixture=state.mixture) for i in cohort}

    def serving_payloads(self, state: State, sites: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        """Return the best models of all clusters, and the clusters by which a site assigns its patients."""
        models = {f"cluster_{c}": model for c, model in state.best.items()}
        clusters: dict[str, Any] = {}
        if state.mixture is not None:
            clusters = {"mixture": state.mixture, "fitted": state.fitted}
        return {i: Payload(model=state.start, **clusters, **models) for i in sites}

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        if "features" in got:
            return Payload(features={"cases": self._vectors(site)}), memory
        if "sums" in got:
            asked = {k: plain(v) for k, v in got["sums"].items()}
            if self.noisy.on:
                patients = [site.patient_of(name) for split in self.splits for name in site.cases(split)]
                return Payload(sums=noisy_mixture.answer(asked, self._vectors(site), patients)), memory
            return Payload(sums=federated_mixture.answer(asked, self._vectors(site))), memory
        if "mixture" in got and "round" in got:
            return self._products(got, site), memory
        if "mixture" in got:
            known = Payload(mixture=got["mixture"])
            train, judge = self._trained(known, site), self._members(known, site, site.cases("validation"))
            sizes = {"train": self._told(got, site, train), "judge": _sizes(judge)}
            if self.together:
                return Payload(**_counted(**{word: _of_all(got, counts) for word, counts in sizes.items()})), memory
            return Payload(**_counted(**sizes)), known
        return self._tuned(got, memory, site), memory

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        if state.mixture is None:
            return self._clustered(state, replies)
        if self.together:
            step = self._merged_together if ALL in state.train else self._counted_together
            return step(state, replies)
        new = [i for i in sorted(replies) if i not in state.train]
        if new:
            counts = {i: _counts(replies[i]) for i in new}
            train, judges = ({i: _named(counts[i], word) for i in new} for word in ("train", "judge"))
            state = replace(state, train={**state.train, **train}, judges={**state.judges, **judges})
            state = _with_models(state)
        heard = {i: p for i, p in replies.items() if i not in new}
        return self._merged(state, heard) if heard else state

    def objections(self, state: State, replies: Mapping[SiteId, Payload]) -> Mapping[SiteId, str]:
        """Return the sites with impossible numbers: not asked for, unlike those of other sites, or scores above one."""
        if state.mixture is None:
            noisy = isinstance(state.fit, noisy_mixture.State)  # sums under noise may be below zero
            return {} if noisy else _unlike(replies, "sums" if state.fit else "features")
        clusters = {f"{c}" for c in range(len(state.mixture["weights"]))}
        if self.together:
            return _odd_counts(state, replies, clusters)
        problems = {}
        for i, p in replies.items():
            words = ("judge", "score") if i in state.train else ("train", "judge")
            counts = _counts(p)
            odd = next((k for k in counts if k.split(" ")[0] not in words or k.split(" ")[-1] not in clusters), None)
            high = next((c for c in clusters if counts.get(f"score {c}", 0) > counts.get(f"judge {c}", 0) + 1e-6), None)
            if i in state.train and any(
                state.train[i].get(f.removeprefix("cluster_")) is None for f in p if f != "counts"
            ):
                problems[i] = "it sends the model of a cluster that it has no case of"
            elif odd is not None or high is not None:
                problems[i] = f"it counts {odd!r}" if odd is not None else f"its scores in cluster {high} are above one"
            elif any(n < 1 or n % 1 for k, n in counts.items() if not k.startswith("score ")):
                problems[i] = "it counts cases that are none"
            elif i in state.train and not self._judges(state, i, _named(counts, "judge")):
                problems[i] = "it judges with other cases than it said it has"
        return problems

    def _judges(self, state: State, site: SiteId, counts: Counts) -> bool:
        """Return whether a site scored the right number of validation cases for every cluster: those of the cluster, or
        all of the site's if no site has any in that cluster."""
        own, unjudged = state.judges[site], _unjudged(state)
        return all(n == (fsum(own.values()) if c in unjudged else own.get(c)) for c, n in counts.items())

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        if "mixture" not in got:
            yield got["model"], cases
            return
        members = self._members(got, site, cases)
        for c in range(len(got["mixture"]["weights"])):
            yield got.get(f"cluster_{c}", got["model"]), members.get(f"{c}", ())

    def is_finished(self, state: State) -> bool:
        return state.judged > self.rounds

    def diagnostics(self, state: State) -> Mapping[str, float]:
        if self.noisy.on:  # numbers of cases are not known
            return {"exchanges of the fit": state.fit.exchanges} if state.fit else {}
        sizes = [fsum(counts.get(c, 0.0) for counts in state.train.values()) for c in state.models]
        clusters: dict[str, float] = {}
        if sizes:
            clusters = {"clusters with cases": len(sizes), "cases of the smallest": min(sizes)}
            clusters |= {"variance kept": state.kept, "agreement of restarts": state.agreement}
            clusters |= {} if self.together else {"agreement with hospitals": sites_index(state.train)}
        return {"exchanges of the fit": state.fit.exchanges, **clusters} if state.fit else clusters

    def remarks(self, state: State) -> Sequence[str]:
        """Return remarks on the clusters; none before the sites have counted their cases."""
        if state.mixture is None or not state.train:
            return ()
        if self.noisy.on:
            about = ", ".join(f"{w * state.fitted:.0f}" for w in state.mixture["weights"])
            doubt = self.noisy.release.noise * 3**0.5
            return (
                f"clusters were fitted under noise for epsilon = {self.noisy.epsilon:g}: about {about} patients each, "
                f"with a standard error of {doubt:.1f} or more",
            )
        return remarks(state.train, len(state.mixture["weights"]), state.agreement)

    def _vectors(self, site: Site) -> np.ndarray:
        """Return the features of the cases that the clusters are fitted to."""
        parts = [site.radiomics(site.cases(split), self.bin_width) for split in self.splits if site.cases(split)]
        return np.concatenate(parts)

    def _members(self, known: Payload, site: Site, cases: Cases) -> dict[str, Cases]:
        """Return the given cases by cluster; clusters without a case are left out."""
        if not cases:
            return {}
        mixture = Mixture.of({k: plain(v) for k, v in known["mixture"].items()})
        labels = mixture.assign(site.radiomics(cases, self.bin_width))
        return {f"{c}": tuple(n for n, k in zip(cases, labels, strict=True) if k == c) for c in sorted(set(labels))}

    def _trained(self, known: Payload, site: Site) -> dict[str, Cases]:
        """Return the training cases of every cluster with at least ``least`` of them at this site."""
        members = self._members(known, site, site.cases("train"))
        if self.noisy.on:
            return self._patients(members, len(known["mixture"]["weights"]), site)
        return {c: cases for c, cases in members.items() if len(cases) >= self.least}

    def _patients(self, members: Mapping[str, Cases], clusters: int, site: Site) -> dict[str, Cases]:
        """Return the training cases of all clusters; those of a patient go to the cluster of the first case."""
        cluster = {case: c for c, cases in members.items() for case in cases}
        first: dict[str, str] = {}
        for case in sorted(site.cases("train")):
            first.setdefault(site.patient_of(case), cluster[case])
        whole = {f"{c}": () for c in range(clusters)}
        return {c: tuple(n for n in site.cases("train") if first[site.patient_of(n)] == c) for c in whole}

    def _told(self, got: Payload, site: Site, train: Mapping[str, Cases]) -> Counts:
        """Return the weights of a site in the clusters: its cases in each or, under noise, all its training cases."""
        if not self.noisy.on:
            return _sizes(train)
        return {f"{c}": float(site.size) for c in range(len(got["mixture"]["weights"]))}

    def _task(self, state: State, site: SiteId) -> Payload:
        """Return the models that a site trains or scores, and the clusters that it scores on all validation cases."""
        unjudged = _unjudged(state)
        clusters = [c for c in state.models if c in state.train[site] or c in state.judges[site] or c in unjudged]
        models = {f"cluster_{c}": state.models[c] for c in clusters}
        marks = {"all": {c: np.ones(1) for c in unjudged}} if unjudged else {}
        last = {"last": 1.0} if state.judged == self.rounds else {}
        return Payload(**models, **marks, **last, round=float(state.judged))

    def _tuned(self, got: Payload, memory: Payload, site: Site) -> Payload:
        train, judges = self._trained(memory, site), self._members(memory, site, site.cases("validation"))
        cases: dict[str, float] = {}
        scores: dict[str, float] = {}
        models: dict[str, Tree] = {}
        for name in (name for name in got if name.startswith("cluster_")):
            c = name.removeprefix("cluster_")
            asked = site.cases("validation") if c in got.get("all", {}) else judges.get(c, ())
            if asked and (self.choose or "last" in got):
                means = [s.mean for s in site.score(got[name], asked).values()]
                cases[c], scores[c] = float(len(means)), fsum(means)
            if c in train and "last" not in got:
                budget = Budget(self.lr, self.epochs, self.steps, round=int(got["round"]))
                fit = site.fit(got[name], budget=budget, keep=train[c])
                models[name] = fit.params
        return Payload(**_counted(judge=cases, score=scores), **models)

    def _products(self, got: Payload, site: Site) -> Payload:
        """Return n_ck w_ck of all clusters, zeros without cases, with n_ck, scores, and 1 for the site."""
        tuned = self._tuned(got, got, site)
        train, counts = self._told(got, site, self._trained(got, site)), _counts(tuned)
        words = {word: _of_all(got, _named(counts, word)) for word in ("judge", "score")}
        words |= {"train": _of_all(got, train), "site": {"*": 1.0}}
        models = {} if "last" in got else {name: got[name] for name in got if name.startswith("cluster_")}
        scaled = {
            name: tree.scale(tuned[name], train[name.removeprefix("cluster_")]) if name in tuned else tree.zeros(model)
            for name, model in models.items()
        }
        return Payload(**_counted(**words), **scaled)

    def _counted_together(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        """Keep the numbers of cases of all sites together."""
        counts = _summed_counts(replies)
        train, judges = ({c: n for c, n in _named(counts, word).items() if n} for word in ("train", "judge"))
        return _with_models(replace(state, train={ALL: train}, judges={ALL: judges}))

    def _merged_together(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        """Do as ``_merged`` does, from products: a reply is the mean over as many sites as it counts."""
        counts = _summed_counts(replies)
        best, scores, models = self._judged(state, counts)
        for c, n in _named(counts, "train").items():
            tuned = [replies[i] for i in sorted(replies) if f"cluster_{c}" in replies[i]]
            if c in models and n and tuned:
                parts = [tree.scale(p[f"cluster_{c}"], _counts(p)["site *"] / n) for p in tuned]
                models[c] = reduce(tree.add, parts)
        return replace(state, best=best, scores=scores, models=models, judged=state.judged + 1)

    def _judged(self, state: State, counts: Counts) -> tuple[dict[str, Tree], dict[str, float], dict[str, Tree]]:
        """Return the best models and their scores after these, and the models to go on from."""
        best, scores = dict(state.best), dict(state.scores)
        for c, model in state.models.items():
            judges = counts.get(f"judge {c}", 0.0)
            score = counts.get(f"score {c}", 0.0) / judges if judges else -1.0
            if score > scores.get(c, -1.0) or not self.choose:
                best[c], scores[c] = model, score
        return best, scores, dict(state.models)

    def _clustered(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        """Fit the clusters, or advance their federated fit."""
        if state.fit is None:
            rows = [plain(replies[i]["features"]["cases"]) for i in sorted(replies)]
            return _fitted(state, pooled(np.concatenate(rows), self.settings))
        sums = {i: {k: plain(v) for k, v in p["sums"].items()} for i, p in replies.items()}
        if isinstance(state.fit, noisy_mixture.State):
            noisy = noisy_mixture.learn(_plainly(state.fit), [sums[i] for i in sorted(sums)])
            return _fitted(replace(state, fit=replace(noisy, mixture=None)), noisy)
        fit = federated_mixture.learn(_plainly(state.fit), sums)
        return _fitted(replace(state, fit=replace(fit, mixture=None)), fit)

    def _merged(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        """Keep the scored models that beat the best so far, and average the fine-tuned ones."""
        best, scores, models = self._judged(state, _summed_counts(replies))
        for c in state.models:
            tuned = {i: p for i, p in replies.items() if f"cluster_{c}" in p}
            if tuned:
                models[c] = mean(tuned, f"cluster_{c}", {i: state.train[i][c] for i in tuned})
        return replace(state, best=best, scores=scores, models=models, judged=state.judged + 1)


def _with_models(state: State) -> State:
    """Return the state with the initial model of every cluster that has training cases and no model yet."""
    own = {c for sizes in state.train.values() for c in sizes}
    more = {c: state.start for c in sorted(own, key=int) if c not in state.models}
    return replace(state, models={**state.models, **more}, best={**state.best, **more})


def _fitted(state: State, fit: federated_mixture.State | noisy_mixture.State) -> State:
    """Return the state with the clusters of a fit, if it is finished."""
    mixture = fit.mixture
    if mixture is None:
        return state
    return replace(state, mixture=mixture.arrays(), kept=fit.kept, agreement=fit.agreement, fitted=fit.cases)


def _plainly(x: Any) -> Any:
    """Return the value with all arrays as NumPy arrays, because a checkpoint restores them on the server's device."""
    if hasattr(x, "dtype"):
        return plain(x)
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{f.name: _plainly(getattr(x, f.name)) for f in fields(x)})
    if isinstance(x, Mapping):
        return {k: _plainly(v) for k, v in x.items()}
    return tuple(map(_plainly, x)) if isinstance(x, tuple) else x


def _unlike(replies: Mapping[SiteId, Payload], asked: str) -> dict[SiteId, str]:
    """Return the sites with missing arrays, other shapes than most sites, or absurdly large values."""
    whole = asked == "sums"  # features have one row per case
    shapes = {
        i: {k: tuple(x.shape)[None if whole else 1 :] for k, x in p.get(asked, {}).items()} for i, p in replies.items()
    }
    layouts = [repr(sorted(s.items())) for s in shapes.values() if s]
    usual = max(sorted(set(layouts)), key=layouts.count, default="")
    problems = {i: f"it does not answer what it was asked, {asked!r}" for i, p in replies.items() if set(p) != {asked}}
    odd = {i for i, s in shapes.items() if s and repr(sorted(s.items())) != usual}
    problems |= {
        i: f"its {asked} are of other names or shapes than those of most sites" for i in odd if i not in problems
    }
    if not whole:
        problems |= {
            i: f"it has no {asked}" for i, p in replies.items() if i not in problems and "cases" not in p[asked]
        }
    rest = {i: p[asked] for i, p in replies.items() if i not in problems and p[asked]}
    for i, arrays in rest.items():
        never = [k for k in ("cases", "counts", "squares") if whole and k in arrays and plain(arrays[k]).min() < 0]
        if never or ("products" in arrays and whole and np.diagonal(plain(arrays["products"])).min() < 0):
            problems[i] = f"its {asked} have {(never or ['products'])[0]!r} below zero, which cannot be"
    rest = {i: arrays for i, arrays in rest.items() if i not in problems}
    for name in next(iter(rest.values()), {}):
        sizes = {i: float(abs(plain(arrays[name])).max()) for i, arrays in rest.items() if arrays[name].size}
        for i, size in sizes.items():
            others = sorted(v for j, v in sizes.items() if j != i)
            if others and size > ABSURD * max(others[(len(others) - 1) // 2], 1.0):
                problems[i] = f"its {asked} have {name!r} up to {size:.0e}, far beyond all others"
    return problems


def _odd_counts(state: State, replies: Mapping[SiteId, Payload], clusters: set[str]) -> dict[SiteId, str]:
    """Return the sites with other counts than are asked for with ``together``, or scores above one."""
    words = ("judge", "score", "train") if ALL in state.train else ("train", "judge")
    asked = {f"{word} {c}" for word in words for c in clusters} | ({"site *"} if ALL in state.train else set())
    problems = {}
    for i, p in replies.items():
        counts = _counts(p)
        if counts.keys() != asked or counts.get("site *", 1.0) != 1:
            problems[i] = "it does not count the cases of every cluster"
        elif any(counts.get(f"score {c}", 0.0) > counts[f"judge {c}"] + 1e-6 for c in clusters):
            problems[i] = "its scores in a cluster are above one"
    return problems


def _of_all(got: Payload, counts: Counts) -> Counts:
    """Return the counts of all clusters, 0 where there are none."""
    return {f"{c}": counts.get(f"{c}", 0.0) for c in range(len(got["mixture"]["weights"]))}


def _summed_counts(replies: Mapping[SiteId, Payload]) -> Counts:
    """Return the sums of all counts over the replies."""
    counts = [_counts(p) for p in replies.values()]
    return {k: fsum(n.get(k, 0.0) for n in counts) for k in sorted({k for n in counts for k in n})}


def _sizes(members: Mapping[str, Cases]) -> Counts:
    return {c: float(len(cases)) for c, cases in members.items()}


def _counted(**named: Counts) -> dict[str, Tree]:
    """Return the field ``counts`` of a reply, or nothing if there is nothing to count."""
    counts = {f"{word} {c}": np.array([float(n)]) for word, sizes in named.items() for c, n in sizes.items()}
    return {"counts": counts} if counts else {}


def _unjudged(state: State) -> list[str]:
    """Return the clusters without validation cases at any site."""
    return [c for c in state.models if not any(counts.get(c) for counts in state.judges.values())]


def _counts(reply: Payload) -> Counts:
    return {k: float(v[0]) for k, v in reply.get("counts", {}).items()}


def _named(counts: Counts, word: str) -> Counts:
    return {k.removeprefix(f"{word} "): n for k, n in counts.items() if k.startswith(f"{word} ")}
