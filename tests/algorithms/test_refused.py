"""Settings that make no sense, networks and sites that an algorithm cannot work with: each is refused in a sentence."""

from math import inf, nan

import pytest

import polysite as ps
from polysite.errors import ConfigError
from table import START

SETTINGS = [
    (ps.FedProx, {"mu": nan}, "mu = nan"),
    (ps.FedProx, {"mu": inf}, "mu = inf must be finite"),
    (ps.FedDyn, {"alpha": 0.0}, "alpha = 0.0 must be more than 0"),
    (ps.QFedAvg, {"q": -0.5}, "q = -0.5"),
    (ps.Moon, {"mu": 1.0, "temperature": 0.0}, "temperature = 0.0"),
    (ps.Adam, {"lr": 0.0}, "lr = 0.0"),
    (ps.FedPIDAvg, {"window": 1}, "window = 1 must be at least 2"),
    (ps.TrimmedMean, {"beta": 0.5}, "less than half"),
    (ps.Robust, {"beta": 0.5}, "less than half"),
    (ps.Robust, {"inner": ps.Local()}, "no mean over all sites that a robust rule could replace"),
    (ps.Robust, {"inner": ps.Clustered({"one": ("a",)})}, "no mean over all sites that a robust rule could replace"),
    (ps.Averaged, {"decay": 1.0}, "must be at least 0 and less than 1"),
    (ps.Averaged, {"inner": ps.Ditto()}, "has no single model that all sites use"),
    (ps.Averaged, {"inner": ps.Weighted({}, ps.Clustered({"x": ("a",)}))}, "has no single model that all sites use"),
    (ps.Weighted, {"weights": {"a": inf}}, "factor of 'a' must lie between"),
    (ps.Weighted, {"weights": {"a": 0.0}}, "factor of 'a' must lie between"),
    (ps.Weighted, {"inner": ps.Median()}, "Median does not average by weights"),
    (ps.Weighted, {"inner": ps.Clustered({"all": ("a",)}, ps.Median())}, "does not average by weights"),
    (ps.Weighted, {"inner": ps.Fpfc()}, "Fpfc does not average by weights of its sites"),
    (ps.Clustered, {"groups": {"north": ("a",), "south": ()}}, "group 'south' has no sites"),
    (ps.Clustered, {"groups": {"a": ("x", "b"), "c": ("b", "z")}}, "'b' is named twice, in the groups 'a' and 'c'"),
    (ps.Clustered, {"groups": {"north": ("a", "a")}}, "'a' is named twice, in the groups 'north' a"),
    (ps.Ditto, {"lam": -0.1}, "lam = -0.1 must be at least 0"),
    (ps.Ditto, {"epochs": 1, "steps": 2}, r"not both \(epochs = 1, steps = 2\)"),
    (ps.Ditto, {"own_epochs": 1, "own_steps": 2}, r"\(own_epochs = 1, own_steps = 2\)"),
    (ps.Cfl, {"split_at": (0, 200)}, r"split_at = \[0, 200\] counts rounds from 1"),
    (ps.Cfl, {"gamma_max": 1.5}, "gamma_max = 1.5 must be between 0 and 1"),
    (ps.Cfl, {"least": 1}, "least = 1 must be at least 2"),
    (ps.Cfl, {"quorum": 0.0}, "quorum = 0.0"),
    (ps.FedPer, {"private": ()}, "names nothing that stays at a site"),
    (ps.FedRep, {"head_epochs": 1, "head_steps": 2}, r"\(head_epochs = 1, head_steps = 2\)"),
    (ps.FedRep, {"head_epochs": 0}, "head_epochs = 0 must be at least 1"),
    (ps.FedRoD, {"clip": -1.0}, "clip = -1.0 must be at least 0"),
    (ps.FedABC, {"lam": 1.5}, "lam = 1.5 must be between 0 and 1"),
    (ps.FedABC, {"ratio": 0.0}, "ratio = 0.0 must be more than 0"),
    (ps.Ifca, {"k": 0}, "k = 0 must be at least 1"),
    (ps.Ifca, {"spread": 1.5}, "spread = 1.5 must be between 0 and 1"),
    (ps.Ifca, {"starts": "noise", "spread": 0.0}, "with spread = 0 all k = 2 models start alike"),
    (ps.Ifca, {"starts": "sites", "warmup": 0}, "starts = 'sites' takes models that sites have trained; set warmup"),
    (ps.Ifca, {"clustered": ()}, "clustered names nothing that clusters differ in"),
    (ps.Fpfc, {"lam": 0.1, "xi": 0.1}, "xi = 0.1 must be less than lam = 0.1"),
    (ps.Fpfc, {"a": 2.0}, "a = 2.0 must be at least 2"),
    (ps.Fpfc, {"a": 3.0, "rho": 0.5}, "rho = 0.5 must be more than 1 / .a - 1. = 0.5"),
    (ps.Fpfc, {"fused": ()}, "fused names nothing that is personal"),
    (ps.PFedNet, {"lam": -1.0}, "lam = -1.0 must be at least 0"),
    (ps.PFedNet, {"neighbours": 0}, "neighbours = 0 must be at least 1"),
    (ps.PFedNet, {"personal": ()}, "personal names nothing that sites have of their own"),
    (ps.PFedMe, {"lam": 0.0}, "lam = 0.0 must be more than 0"),
    (ps.PFedMe, {"outer": 0}, "outer = 0 must be at least 1"),
    (ps.FedAMP, {"alpha": 0.5}, "measures alpha = 0.5 against sigma; give sigma too, or leave alpha out"),
    (ps.FedAMP, {"own": 0.5}, "own = 0.5 is of HeurFedAMP"),
    (ps.FedAMP, {"sigma": 1.0, "cosine": 1.0}, "knows no sigma and no alpha"),
    (ps.L2gd, {"p": 1.0}, "p = 1.0 must be between 0.001 and 0.999"),
    (ps.L2gd, {"lam": 2.0, "p": 0.1, "lr": 0.1}, "theta = 1.8 of the way to their mean, beyond it; lower lam or lr"),
    (ps.SuPerFed, {"choices": (0.5, 1.5)}, "at least one mixture, each between 0 and 1"),
    (ps.FedDiv, {"alpha": -1}, "alpha = -1"),
    (ps.FedDiv, {"focus": -1}, "focus = -1"),
    (ps.FedDiv, {"lam": -1}, "lam = -1"),
    (ps.FedDiv, {"lam": inf}, "lam = inf"),
    (ps.FedDiv, {"gamma": 0.5}, "gamma = 0.5"),
    (ps.FedDiv, {"nearest": 0}, "nearest = 0"),
    (ps.FedDiv, {"share": 1.5}, "share = 1.5"),
    (ps.FedDiv, {"edges": 0.5}, "edges = 0.5"),
    (ps.Interpolated, {"alphas": ()}, "give at least one"),
    (ps.Interpolated, {"alphas": (0.0, 1.0)}, "more than 0"),
    (ps.Interpolated, {"sure": 1.0}, "never reached"),
    (ps.Interpolated, {"lam": -1.0}, "at least 0"),
    (ps.Cfft, {"rounds": 0}, "rounds = 0"),
    (ps.Cfft, {"bin_width": 0.0}, "bin_width = 0.0"),
    (ps.Cfft, {"components": ()}, "components"),
    (ps.Cfft, {"starts": "kmeans"}, "use starts = 'shared', or fit = 'pooled'"),
]


@pytest.mark.parametrize(("algorithm", "settings", "sentence"), SETTINGS)
def test_settings_that_make_no_sense(algorithm, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        algorithm(**settings)


def test_the_least_that_makes_sense():
    assert ps.FedPIDAvg(window=2).window == 2 and ps.Cfft(starts="kmeans", fit="pooled").starts == "kmeans"


NORTH = ("a", "b", "c")
UNFIT = [  # of the network with a body, a head and a running variance, or of these sites
    (ps.TrimmedMean(0.3), "ab", "it takes three or more"),
    (ps.TrimmedMean(0.33), "abc", "set it to 0.34 or more"),
    (ps.TrimmedMean(0.1), "abcd", "cuts nothing from 4 sites; set it to 0.25"),
    (ps.Krum(f=1), "abcd", "among 5 or more, and there are 4"),
    (ps.Krum(f=1, keep=6), "abcdef", "cannot keep 6 of 6"),
    (ps.Robust("krum", f=2), "abcd", "2 bad sites among 7"),
    (ps.Robust("krum", f=0, keep=5), "abc", "cannot keep 5"),
    (ps.Robust("trimmed_mean", beta=0.1), "abcd", "cuts nothing from 4 sites"),
    (ps.Weighted({"A": 0.3}), "abcd", "'A', which is no site that trains"),
    (ps.Clustered({"all": tuple("abcd")}, ps.Weighted({"e": 0.3})), "abcd", "weights names 'e', which is no s"),
    (ps.Clustered(), "abcd", r"takes groups of sites; set them in \[algorithm.groups\]"),
    (ps.Clustered({"north": NORTH}), "abcd", "'d' is in none of the groups 'north'; every site that trains has one"),
    (ps.Clustered({"all": ("easy", "west")}), ["east", "west"], "group 'all' names 'easy', .*; did you mean 'east'?"),
    (ps.Clustered({"north": NORTH, "south": ("d",)}, ps.Krum(f=0)), "abcd", "in the group 'south', .* and there are 1"),
    (ps.FedPer(("head.*", "decoder.9.*")), "abcd", "private names 'decoder.9.*', .* its parts are body, head, norm"),
    (ps.FedPer(("*",)), "abcd", r"private = \['\*'\] keeps every parameter"),
    (ps.FedRep(("tail.*",)), "abcd", "private names 'tail.*', and no parameter"),
    (ps.FedRep(("*",)), "abcd", "keeps every parameter at the sites"),
    (ps.FedABC(), "abcd", "personal names 'head.*bias', and no parameter"),
    (ps.Ifca(clustered=("hat.*",)), "a", "clustered names 'hat"),
    (ps.Fpfc(fused=("hat.*",)), "a", "fused names 'hat"),
    (ps.PFedNet(personal=("*",)), "a", "leaves nothing to share"),
    (ps.FedAMP(sigma=1.0, alpha=0.5), "abcd", "lower alpha to at most 0.333333, or raise sigma"),
    (ps.FedAMP(on=("tail.*",)), "abcd", "names no trained parameter of this network"),
    (ps.SuPerFed(shared=("*",)), "abcd", "leaves no parameter that could have a twin; name fewer"),
]


@pytest.mark.parametrize(("algorithm", "sites", "sentence"), UNFIT)
def test_networks_and_sites_that_do_not_fit(algorithm, sites, sentence):
    with pytest.raises(ConfigError, match=sentence):
        algorithm.init(START, list(sites))
