"""CFFT under secure sums: the clusters and models of open sums, with nothing withheld at any site."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

import studies
from polysite import config, study
from polysite.algorithms import cfft
from polysite.algorithms.base import facts, is_finished
from polysite.algorithms.cfft import Cfft
from polysite.cluster.mixture import Mixture, Settings
from polysite.cluster.noisy_mixture import NoisyClusters
from polysite.cluster.pooled_mixture import pooled
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.secure.settings import Secure
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError
from polysite.payload import plain
from table import START, sites

ON = Secure("on")
TWO = Cfft(components=(2,), rounds=3, dimensions=2, restarts=2)


def played(algorithm, until=is_finished, secure=Secure(), hospitals=None, start=START):
    """The exchanges of a phase, until something is true of the algorithm and its state; and the last state."""
    left, engine = [], Simulator(algorithm, hospitals or sites(), secure=secure)
    for r in run_rounds(algorithm, engine, start, Plan(rounds=80, secure=secure), seed=0):
        assert not r.refused and not any("secure" in remark for remark in r.remarks)
        left.append(r)
        if until(algorithm, r.state):
            return left, r.state
    raise AssertionError("the phase has not ended")


def test_the_clusters_and_their_models_are_those_of_open_sums():
    _, apart = played(TWO)
    _, together = played(replace(TWO, together=True))
    rounds, secure = played(replace(TWO, together=True), secure=ON)
    for state in (together, secure):
        assert state.judged == apart.judged and state.best.keys() == apart.best.keys()
        assert state.mixture == {k: pytest.approx(x, abs=1e-9) for k, x in apart.mixture.items()}
        for found, expected in ((state.models, apart.models), (state.best, apart.best)):
            assert all(found[c] == {k: pytest.approx(x, abs=1e-7) for k, x in t.items()} for c, t in expected.items())
        assert state.scores == pytest.approx(apart.scores, abs=1e-9)
        assert {c: sum(n.get(c, 0) for n in apart.train.values()) for c in apart.models} == state.train["*"]
    assert all(not reply.payload for r in rounds for reply in r.replies.values())


def fitted(*given):
    """The exchanges of the fit of clusters alone, and the clusters."""
    left, state = played(given[0], lambda _, state: state.mixture is not None, *given[1:])
    return left, state.mixture


def test_noise_that_fades_leaves_the_clusters_of_open_sums(monkeypatch):
    """With next to no noise, the clusters are those without any, within rounding, open or secure; with noise not."""
    monkeypatch.setattr(cfft, "NAMES", ("optimum", "size", "width"))
    ranges = {"optimum": (-4.0, 4.0), "size": (0.0, 4.0)}
    faint = replace(TWO, together=True, noisy=NoisyClusters(9e8, features=ranges, exchanges=3))
    with monkeypatch.context() as bare:
        bare.setattr(Cfft, "release_of", lambda self, got: None)
        (_, without), (_, masked) = fitted(faint), fitted(faint, ON)
    assert masked == {k: pytest.approx(x, abs=1e-12) for k, x in without.items()}
    for secure in (Secure(), ON):
        left, found = fitted(faint, secure)
        releases = [[reply.releases for reply in r.replies.values()] for r in left]
        assert found == {k: pytest.approx(x, abs=1e-3) for k, x in without.items()}
        assert releases == [[(faint.noisy.release,)] * len(sites())] * 3
    loud = replace(faint, noisy=NoisyClusters(1.0, features=ranges, exchanges=3))
    assert fitted(loud, ON)[1]["weights"] != pytest.approx(without["weights"], abs=1e-3)


def test_what_is_pooled_does_not_go_together():
    with pytest.raises(ConfigError, match="nothing is pooled"):
        Cfft(together=True, fit="pooled")
    assert facts(Cfft(together=True)).needs == "sum" and facts(Cfft()).needs == "each"
    with pytest.raises(ConfigError, match=r"cfft needs the reply of each site unless algorithm\.together = true"):
        config.parse('run.secure.use = "on"\n[[then]]\nalgorithm.name = "cfft"\nrun.rounds = 200\n')


SITES = {"a": 8, "b": "cases = 8, gamma = 1.6", "c": "cases = 8, noise = 0.2"}
THEN = """[[then]]
algorithm = { name = "cfft", components = [3], rounds = 1, dimensions = 4, restarts = 2%s }
run.rounds = 60
"""
PHANTOMS = studies.text(SITES, "batch = 2", "rounds = 1%s", model="unet_small") + THEN


@pytest.mark.slow
def test_phantoms_have_the_same_clusters_under_secure_sums(tmp_path):
    """The adjusted Rand index of the clusters of open and of secure sums, and of a pooled fit, is 1; the distances of
    the cases from the centres agree within the rounding of fixed point."""
    found = {}
    secure = PHANTOMS % ('\nsecure.use = "on"', ", together = true")
    for name, text in (("open", PHANTOMS % ("", "")), ("secure", secure)):
        chosen = config.parse(text)
        hospitals, (_, phase) = study.simulator(chosen).known, config.phases(chosen)
        _, mixture = fitted(phase.algorithm, phase.run.secure, hospitals, study.initial_params(chosen))
        found[name] = Mixture.of({k: plain(v) for k, v in mixture.items()})
    rows = np.concatenate([s.radiomics(s.cases("train"), 0.09) for _, s in sorted(hospitals.items())])
    labels = {name: mixture.assign(rows) for name, mixture in found.items()}
    reference = pooled(rows, Settings(dimensions=4, components=(3,), restarts=2, iterations=30)).mixture
    assert len(set(labels["open"])) == 3
    assert adjusted_rand_score(labels["open"], labels["secure"]) == 1.0
    assert adjusted_rand_score(reference.assign(rows), labels["secure"]) == 1.0
    order = [int(labels["secure"][list(labels["open"]).index(c)]) for c in range(3)]  # equal restarts number them anew
    for k, x in found["open"].arrays().items():
        same = found["secure"].arrays()[k]
        assert (same[order] if k in ("weights", "means") else same) == pytest.approx(x, rel=1e-6, abs=1e-8)
