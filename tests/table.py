"""Every algorithm once, on four quadratic sites: the table that the tests of all algorithms go through."""

from dataclasses import fields, is_dataclass

import numpy as np
import pytest

from polysite.algorithms import ALGORITHMS
from polysite.algorithms.averaged import Averaged
from polysite.algorithms.cfft import Cfft
from polysite.algorithms.cfl import Cfl
from polysite.algorithms.clustered import Clustered
from polysite.algorithms.cost_weighted import FedCostWAvg, FedPIDAvg, TopK
from polysite.algorithms.ditto import Ditto
from polysite.algorithms.fedabc import FedABC
from polysite.algorithms.fedamp import FedAMP
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.fedbn import FedBN
from polysite.algorithms.feddiv import FedDiv
from polysite.algorithms.feddyn import FedDyn
from polysite.algorithms.fedexp import FedExP
from polysite.algorithms.fednova import FedNova
from polysite.algorithms.fedper import FedPer, LGFedAvg
from polysite.algorithms.fedprox import FedProx
from polysite.algorithms.fedrep import FedRep
from polysite.algorithms.fedrod import FedRoD
from polysite.algorithms.fine_tune import FineTune
from polysite.algorithms.fpfc import Fpfc
from polysite.algorithms.ifca import Ifca
from polysite.algorithms.interpolated import Interpolated
from polysite.algorithms.l2gd import L2gd
from polysite.algorithms.local import Local
from polysite.algorithms.moon import Moon
from polysite.algorithms.pfedme import PFedMe
from polysite.algorithms.pfednet import PFedNet
from polysite.algorithms.qfedavg import QFedAvg
from polysite.algorithms.robust import GeometricMedian, Krum, Median, TrimmedMean
from polysite.algorithms.robust_rules import Robust
from polysite.algorithms.scaffold import Scaffold
from polysite.algorithms.server_optimisers import Adagrad, Adam, Sgd, Yogi
from polysite.algorithms.superfed import SuPerFed
from polysite.algorithms.weighted import Weighted
from polysite.engines import checkpoint
from polysite.payload import Payload
from quadratic import Quadratic

CASES = {
    "averaged fedavg": Averaged(0.5),
    "averaged scaffold, by size": Averaged(0.8, Scaffold(uniform=False)),
    "averaged, weighted": Averaged(0.5, Weighted({"b": 0.3})),
    "clustered averages": Clustered({"north": ("a", "c"), "south": ("b", "d")}, Averaged(0.5)),
    "cfft": Cfft(components=(2,), rounds=3, fewest=0, dimensions=2),
    "cfft, together": Cfft(components=(2,), rounds=3, dimensions=2, together=True),
    "cfft, pooled": Cfft(components=(2,), rounds=3, fit="pooled", dimensions=2, steps=2),
    "cfl": Cfl(eps1=0.4, eps2=0.3, after=1),
    "cfl, at fixed rounds": Cfl(split_at=(2, 4), least=2, linkage="complete"),
    "cfl, split before the mean": Cfl(split_at=(2,), least=2, split_first=True),
    "cfl, half suffices": Cfl(relative=True, eps1=0.9, eps2=0.01, after=0, quorum=0.5, least=2),
    "clustered fedavg": Clustered({"north": ("a", "c"), "south": ("b", "d")}),
    "clustered scaffold": Clustered({"north": ("a", "c", "d"), "south": ("b",)}, Scaffold()),
    "ditto": Ditto(lam=0.5),
    "ditto, longer for its own": Ditto(lam=0.5, steps=3, own_steps=7, own_lr=0.02),
    "fedabc": FedABC(personal=("head.*",)),
    "fedamp": FedAMP(),
    "fedamp, as given": FedAMP(0.5, sigma=3.0, alpha=0.5, decay=0.99, every=2, on=("body.*",)),
    "fedamp, by direction": FedAMP(cosine=3.0, own=0.4),
    "fedamp, frozen": FedAMP(1.0, freeze=True),
    "fedavg, fixed epochs": FedAvg(epochs=2),
    "fedavg, fixed iterations": FedAvg(steps=3),
    "fedavg, uniform": FedAvg(uniform=True),
    "fedavg, server momentum": FedAvg(server=Sgd(0.5, momentum=0.9)),
    "fedadagrad": FedAvg(server=Adagrad(lr=0.1)),
    "fedadam": FedAvg(server=Adam(lr=0.01)),
    "fedyogi": FedAvg(server=Yogi(lr=0.01)),
    "fedbn": FedBN(),
    "fedbn, uniform": FedBN(uniform=True),
    "fedcostwavg": FedCostWAvg(),
    "feddiv": FedDiv(alpha=0.0, lam=2.0),
    "feddiv, of the nearest": FedDiv(alpha=0.0, lam=0.0, nearest=2),
    "feddiv, a share": FedDiv(alpha=0.0, share=0.6),
    "feddyn": FedDyn(alpha=0.7),
    "fedexp": FedExP(),
    "fedexp, uniform": FedExP(uniform=True),
    "fednova": FedNova(),
    "fednova, by sizes": FedNova("sizes"),
    "fedper": FedPer(),
    "fedpidavg": FedPIDAvg(),
    "fedpidavg, no cost before the first": FedPIDAvg(start="size"),
    "fedprox": FedProx(mu=0.5),
    "fedrep": FedRep(head_epochs=2),
    "fedrep, by size": FedRep(steps=3, head_steps=4, head_lr=0.02, uniform=False),
    "fedrod": FedRoD(),
    "fine-tuning": FineTune(),
    "fine-tuning, searched": FineTune(lr=(0.01, 0.05), lam=(0.0, 0.5), steps=3),
    "fpfc": Fpfc(lam=0.2, nu=0.05),
    "fpfc, relative after a warm-up": Fpfc(relative=True, lam=0.3, warmup=2, nu=0.1),
    "geometric median": GeometricMedian(),
    "ifca": Ifca(k=3, starts="noise", warmup=0, seed=1),
    "ifca, starts of groups": Ifca(k=3, warmup=1, settle=2),
    "ifca, starts of sites": Ifca(starts="sites", warmup=1, uniform=True),
    "ifca, gradients of the head after a warm-up": Ifca(
        starts="noise", averaged="gradients", warmup=1, clustered=("head.*",)
    ),
    "interpolated": Interpolated(),
    "interpolated, held and less sure": Interpolated((0.5, 1.0), 0.5, lam=0.5, lr=0.02, steps=3),
    "krum": Krum(f=0),
    "multi-krum": Krum(f=0, keep=2),
    "l2gd": L2gd(lam=0.4, p=0.3),
    "lg-fedavg": LGFedAvg(private=("head.*", "norm.*")),
    "local": Local(),
    "median": Median(),
    "moon": Moon(),
    "pfedme": PFedMe(outer=1),
    "pfedme, beyond the mean of several steps": PFedMe(2.0, 0.1, 3, None, 7, warm=False, beta=1.5, uniform=False),
    "pfednet": PFedNet(lam=0.02, neighbours=1),
    "pfednet, by cases": PFedNet(lam=0.05, eta=2.0, uniform=False, sketch="images"),
    "q-fedavg": QFedAvg(q=2.0),
    "robust, centred clipping of scaffold": Robust("centred_clipping", inner=Scaffold()),
    "robust, geometric median of fedprox": Robust("geometric_median", inner=FedProx(mu=0.5)),
    "robust, krum": Robust("krum", f=0, keep=2),
    "robust, median of fedper": Robust("median", inner=FedPer()),
    "robust, trimmed mean": Robust(),
    "scaffold": Scaffold(),
    "scaffold, by size": Scaffold(uniform=False),
    "superfed": SuPerFed(after=2),
    "superfed, layer by layer": SuPerFed(0.3, 0.5, 0, "layer", shared=("head.*",)),
    "top-k": TopK(keep=2),
    "trimmed mean": TrimmedMean(),
    "weighted cfl": Weighted({"b": 0.3}, Cfl(split_at=(1, 3), quorum=0.5, least=2)),
    "weighted clusters": Weighted({"b": 0.3}, Clustered({"north": ("a", "b"), "south": ("c", "d")}, FedProx(mu=0.5))),
    "weighted fedadam": Weighted({"b": 0.3}, FedAvg(server=Adam(lr=0.01))),
    "weighted fedper": Weighted({"b": 0.3}, FedPer()),
    "weighted fednova": Weighted({"b": 0.3}, FedNova()),
    "weighted q-fedavg": Weighted({"b": 0.3}, QFedAvg()),
    "weighted scaffold": Weighted({"b": 0.3, "c": 2.0}, Scaffold(uniform=False)),
}
START = {"body.w": np.array([3.0]), "head.w": np.array([0.5]), "norm.running_var": np.array([16.0])}
SITES = (("a", 1, -1, 4), ("b", 2, 0, 8), ("c", 1, 1, 6), ("d", 3, 2, 5))


def sites():
    rng = np.random.default_rng(1)
    return {i: Quadratic(a, rng.normal(b, 0.1, n), start=START) for i, a, b, n in SITES}


def arrays(x):
    if isinstance(x, np.ndarray):
        yield x
    elif is_dataclass(x):
        for f in fields(x):
            yield from arrays(getattr(x, f.name))
    elif hasattr(x, "values"):
        for v in x.values():
            yield from arrays(v)
    elif isinstance(x, tuple | list):
        for v in x:
            yield from arrays(v)


def same(x, y):
    """Equal to the last bit, whatever the nesting: compared through the disk codec's own view of a value."""
    left, right = {}, {}
    return checkpoint._flatten(x, "", left) == checkpoint._flatten(y, "", right) and Payload(v=left) == Payload(v=right)


every = pytest.mark.parametrize("algorithm", CASES.values(), ids=CASES.keys())


# engines carry one case of each kind in every full run, and every case in ``make soak``
OF_EACH_KIND = (
    "averaged scaffold, by size", "cfft", "cfft, together", "cfl", "clustered scaffold", "ditto", "fedadam",
    "fedavg, server momentum", "fedbn", "feddiv", "fedper", "fedrod", "fine-tuning, searched", "fpfc", "ifca", "krum",
    "l2gd", "moon", "pfedme", "robust, trimmed mean", "scaffold", "superfed", "top-k", "weighted scaffold",
)  # fmt: skip


def one_of_each_kind(names=CASES):
    return [pytest.param(name, marks=() if name in OF_EACH_KIND else pytest.mark.soak) for name in names]


# a network is trained by one algorithm of each kind in every full run, and by every algorithm in ``make soak``
KINDS = (
    "cfft", "clustered", "ditto", "fedabc", "fedadam", "fedavg", "fedbn", "feddiv", "fedper", "fedrod", "fine_tune",
    "ifca", "moon", "pfedme", "scaffold", "superfed", "weighted",
)  # fmt: skip
EVERY = [pytest.param(name, marks=() if name in KINDS else pytest.mark.soak) for name in ALGORITHMS]
