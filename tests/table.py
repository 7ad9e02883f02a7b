"""Every algorithm once, on four quadratic sites: the table that the tests of all algorithms go through."""

from dataclasses import fields, is_dataclass

import numpy as np
import pytest

import polysite as ps
from polysite.algorithms import ALGORITHMS
from polysite.engines import checkpoint
from polysite.engines.reply_checks import judge, look
from polysite.payload import Payload
from quadratic import Quadratic

CASES = {
    "averaged fedavg": ps.Averaged(0.5),
    "averaged scaffold, by size": ps.Averaged(0.8, ps.Scaffold(uniform=False)),
    "averaged, weighted": ps.Averaged(0.5, ps.Weighted({"b": 0.3})),
    "clustered averages": ps.Clustered({"north": ("a", "c"), "south": ("b", "d")}, ps.Averaged(0.5)),
    "cfft": ps.Cfft(components=(2,), rounds=3, dimensions=2),
    "cfft, together": ps.Cfft(components=(2,), rounds=3, dimensions=2, together=True),
    "cfft, pooled": ps.Cfft(components=(2,), rounds=3, fit="pooled", dimensions=2, steps=2),
    "cfl": ps.Cfl(eps1=0.4, eps2=0.3, after=1),
    "cfl, at fixed rounds": ps.Cfl(split_at=(2, 4), least=2, linkage="complete"),
    "cfl, split before the mean": ps.Cfl(split_at=(2,), least=2, split_first=True),
    "cfl, half suffices": ps.Cfl(relative=True, eps1=0.9, eps2=0.01, after=0, quorum=0.5, least=2),
    "clustered fedavg": ps.Clustered({"north": ("a", "c"), "south": ("b", "d")}),
    "clustered scaffold": ps.Clustered({"north": ("a", "c", "d"), "south": ("b",)}, ps.Scaffold()),
    "ditto": ps.Ditto(lam=0.5),
    "ditto, longer for its own": ps.Ditto(lam=0.5, steps=3, own_steps=7, own_lr=0.02),
    "fedabc": ps.FedABC(personal=("head.*",)),
    "fedamp": ps.FedAMP(),
    "fedamp, as given": ps.FedAMP(0.5, sigma=3.0, alpha=0.5, decay=0.99, every=2, on=("body.*",)),
    "fedamp, by direction": ps.FedAMP(cosine=3.0, own=0.4),
    "fedavg, fixed epochs": ps.FedAvg(epochs=2),
    "fedavg, fixed iterations": ps.FedAvg(steps=3),
    "fedavg, uniform": ps.FedAvg(uniform=True),
    "fedavg, server momentum": ps.FedAvg(server=ps.Sgd(0.5, momentum=0.9)),
    "fedadagrad": ps.FedAvg(server=ps.Adagrad(lr=0.1)),
    "fedadam": ps.FedAvg(server=ps.Adam(lr=0.01)),
    "fedyogi": ps.FedAvg(server=ps.Yogi(lr=0.01)),
    "fedbn": ps.FedBN(),
    "fedbn, uniform": ps.FedBN(uniform=True),
    "fedcostwavg": ps.FedCostWAvg(),
    "feddiv": ps.FedDiv(alpha=0.0, lam=2.0),
    "feddiv, of the nearest": ps.FedDiv(alpha=0.0, lam=0.0, nearest=2),
    "feddiv, a share": ps.FedDiv(alpha=0.0, share=0.6),
    "feddyn": ps.FedDyn(alpha=0.7),
    "fedexp": ps.FedExP(),
    "fedexp, uniform": ps.FedExP(uniform=True),
    "fednova": ps.FedNova(),
    "fednova, by sizes": ps.FedNova("sizes"),
    "fedper": ps.FedPer(),
    "fedpidavg": ps.FedPIDAvg(),
    "fedpidavg, no cost before the first": ps.FedPIDAvg(start="size"),
    "fedprox": ps.FedProx(mu=0.5),
    "fedrep": ps.FedRep(head_epochs=2),
    "fedrep, by size": ps.FedRep(steps=3, head_steps=4, head_lr=0.02, uniform=False),
    "fedrod": ps.FedRoD(),
    "fine-tuning": ps.FineTune(),
    "fine-tuning, searched": ps.FineTune(lr=(0.01, 0.05), lam=(0.0, 0.5), steps=3),
    "fpfc": ps.Fpfc(lam=0.2, nu=0.05),
    "fpfc, relative after a warm-up": ps.Fpfc(relative=True, lam=0.3, warmup=2, nu=0.1),
    "geometric median": ps.GeometricMedian(),
    "ifca": ps.Ifca(k=3, starts="noise", warmup=0, seed=1),
    "ifca, starts of groups": ps.Ifca(k=3, warmup=1, settle=2),
    "ifca, starts of sites": ps.Ifca(starts="sites", warmup=1, uniform=True),
    "ifca, gradients of the head after a warm-up": ps.Ifca(
        starts="noise", averaged="gradients", warmup=1, clustered=("head.*",)
    ),
    "interpolated": ps.Interpolated(),
    "interpolated, held and less sure": ps.Interpolated((0.5, 1.0), 0.5, lam=0.5, lr=0.02, steps=3),
    "krum": ps.Krum(f=0),
    "multi-krum": ps.Krum(f=0, keep=2),
    "l2gd": ps.L2gd(lam=0.4, p=0.3),
    "lg-fedavg": ps.LGFedAvg(private=("head.*", "norm.*")),
    "local": ps.Local(),
    "median": ps.Median(),
    "moon": ps.Moon(),
    "pfedme": ps.PFedMe(outer=1),
    "pfedme, beyond the mean of several steps": ps.PFedMe(2.0, 0.1, 3, None, 7, warm=False, beta=1.5, uniform=False),
    "pfednet": ps.PFedNet(lam=0.02, neighbours=1),
    "pfednet, by cases": ps.PFedNet(lam=0.05, eta=2.0, uniform=False, sketch="images"),
    "q-fedavg": ps.QFedAvg(q=2.0),
    "robust, centred clipping of scaffold": ps.Robust("centred_clipping", inner=ps.Scaffold()),
    "robust, geometric median of fedprox": ps.Robust("geometric_median", inner=ps.FedProx(mu=0.5)),
    "robust, krum": ps.Robust("krum", f=0, keep=2),
    "robust, median of fedper": ps.Robust("median", inner=ps.FedPer()),
    "robust, trimmed mean": ps.Robust(),
    "scaffold": ps.Scaffold(),
    "scaffold, by size": ps.Scaffold(uniform=False),
    "superfed": ps.SuPerFed(after=2),
    "superfed, layer by layer": ps.SuPerFed(0.3, 0.5, 0, "layer", shared=("head.*",)),
    "top-k": ps.TopK(keep=2),
    "trimmed mean": ps.TrimmedMean(),
    "weighted cfl": ps.Weighted({"b": 0.3}, ps.Cfl(split_at=(1, 3), quorum=0.5, least=2)),
    "weighted clusters": ps.Weighted(
        {"b": 0.3}, ps.Clustered({"north": ("a", "b"), "south": ("c", "d")}, ps.FedProx(mu=0.5))
    ),
    "weighted fedadam": ps.Weighted({"b": 0.3}, ps.FedAvg(server=ps.Adam(lr=0.01))),
    "weighted fedper": ps.Weighted({"b": 0.3}, ps.FedPer()),
    "weighted fednova": ps.Weighted({"b": 0.3}, ps.FedNova()),
    "weighted q-fedavg": ps.Weighted({"b": 0.3}, ps.QFedAvg()),
    "weighted scaffold": ps.Weighted({"b": 0.3, "c": 2.0}, ps.Scaffold(uniform=False)),
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


def screen(expected, params, sent, replies):
    """The sites whose reply is refused, with the reason."""
    return judge(params, sent, {i: look(expected, params, sent.get(i), replies[i]) for i in sorted(replies)})


def exchange(algorithm, asked="abcd", start=START):
    """(state, sent, replies) of the first round."""
    s = sites()
    state = algorithm.init(start, sorted(s))
    sent = algorithm.send(state, list(asked))
    return state, sent, {i: algorithm.local(sent[i], Payload(), s[i])[0] for i in asked}


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
