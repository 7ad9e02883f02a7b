"""How often are wrong claims made where all strategies are equal? The rules of `polysite advise` on simulated scores.

Every score is the sum of the luck of its case, which both trainings share, of the training, by hospital and inner fold,
and of both together. No strategy differs from FedAvg, so each claim is wrong. Printed for several kinds of luck: the
share of federations in which something is trained again for a hospital, in which a hospital is said to be an exception,
and in which a strategy is said to be better for all. Target: at most 5 % for each of the last two. In brackets: the
same for exceptions if all that is likely to gain after one training were trained again, also what a second training
with the same gains would not confirm.

With ``--gain`` one strategy truly gains at one hospital, so exceptions are right: how many of them are found?
"""

import argparse
from dataclasses import replace

import numpy as np

import polysite as ps
from polysite.advice.contenders import Contender
from polysite.advice.decide import candidate, compare, confirmed
from polysite.advice.exceptions import confirm, promises
from polysite.advice.tournament import Played

STRATEGIES, FOLDS = 6, 2
KINDS = {
    "normal": {},
    "few cases": {"cases": 9},
    "rare failures": {"failures": True},
    "few cases, rare failures": {"cases": 9, "failures": True},
    "luck of trainings": {"site": 0.03, "whole": 0.015},
    "eight hospitals": {"hospitals": 8, "cases": 12},
    "noisy cases": {"case": 0.15, "both": 0.08},
}


def trainings(random, hospitals=4, cases=16, case=0.04, both=0.03, site=0.014, whole=0.007, failures=False):
    """Return the scores of all strategies in two trainings; "0" is FedAvg."""
    keys = [(f"{k}", f"{k}-{i}") for k in range(hospitals) for i in range(cases)]
    at, fold = np.repeat(np.arange(hospitals), cases), np.arange(len(keys)) % FOLDS

    def luck(size):
        if not failures:
            return random.normal(0, size, len(keys))
        return size * (np.exp(0.5) - random.lognormal(0, 1, len(keys))) / 2.16  # of mean 0 and deviation 1

    names = [f"{k}" for k in range(STRATEGIES + 1)]
    shared = {name: luck(case) for name in names}
    found = []
    for _ in range(2):
        scores = {}
        for name in names:
            trained = random.normal(0, site, (hospitals, FOLDS))[at, fold] + random.normal(0, whole, FOLDS)[fold]
            values = (shared[name] + trained + luck(both)).tolist()
            folds = dict(zip(keys, fold.tolist(), strict=True))
            scores[name] = Played(
                Contender(name, name, "one model", ps.Study()), (), dict(zip(keys, values, strict=True)), folds
            )
        found.append(scores)
    return found


def better(played, gain):
    """Return scores with a gain at the first hospital."""
    return replace(played, scores={key: score + gain * (key[0] == "0") for key, score in played.scores.items()})


def claims(one, two):
    """Return whether something is trained again for a hospital, whether a hospital is an exception, the same for all
    that is likely to gain, and whether a strategy is better for all."""
    others = [each for name, each in one.items() if name != "0"]
    count = len({site for site, _ in one["0"].scores}) * len(others)

    def pairs(found):
        return ((trained[found.contender.name], trained["0"]) for trained in (one, two))

    promised = promises(others, one["0"], FOLDS, count)
    likely = {site: promise for site, promise in promised.items() if promise.likely}
    sure = {site: confirm(site, *pairs(promise), count).better for site, promise in likely.items()}
    hopes = [site for site, promise in likely.items() if promise.promising]
    best = candidate(compare(others, one["0"]), one)
    both = best and confirmed(*pairs(best), len(others)).better
    return bool(hopes), any(sure[s] for s in hopes), bool(likely), any(sure.values()), bool(both)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=300)
    options.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), metavar="KIND")
    options.add_argument("--gain", type=float, default=0.0, help="of one strategy at one hospital")
    given = options.parse_args()
    for kind in given.kinds:
        random = np.random.default_rng(1)
        found = []
        for _ in range(given.repeats):
            trained = trainings(random, **KINDS[kind])
            found.append(claims(*({**each, "1": better(each["1"], given.gain)} for each in trained)))
        again, sites, likely, others, every = (f"{np.mean(x):.3f}" for x in zip(*found, strict=True))
        print(
            f"{kind:26s} trained again {again} ({likely})   exceptions {sites} ({others})   for all {every}", flush=True
        )


if __name__ == "__main__":
    main()
