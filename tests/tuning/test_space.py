"""Search spaces: values from the papers' grids, multiples of the study's, and what is refused."""

import tomllib
from importlib.resources import files

import pytest

import polysite as ps
from polysite import config
from polysite.errors import ConfigError
from polysite.tuning.space import Candidate, load

BASE = ps.Study(train=ps.Train(lr=0.2))


def test_every_method_that_polysite_knows_can_be_built_with_each_of_its_values():
    text = files("polysite.tuning").joinpath("space.toml").read_text(encoding="utf-8")
    known = load(methods=list(tomllib.loads(text)["methods"]))
    tried = known.candidates(BASE, max(method.points for method in known.methods.values()) + 1, 0)
    assert {candidate.method for candidate in tried} == known.methods.keys()
    for candidate in tried:
        built = known.study(BASE, candidate)
        assert config.parse(config.dump(built)) == built


def test_candidates_are_equally_many_different_and_begin_with_the_methods_own_values():
    space = load(methods=["fedprox", "fedadam"])
    assert space.study(BASE, Candidate("fedavg")) == BASE  # as it is
    with pytest.raises(ConfigError, match="did you mean 'fedprox'"):
        load(methods=["fedprx"])
    drawn = space.candidates(BASE, 6, seed=0)
    by_method = {m: [c for c in drawn if c.method == m] for m in space.methods}
    assert list(by_method) == ["fedavg", "fedprox", "fedadam"]
    assert [len(c) for c in by_method.values()] == [5, 6, 6]  # fedavg has five rates, one of which is its own
    assert all(mine[0].values == {} for mine in by_method.values())
    assert all(len({c.name for c in mine}) == len(mine) for mine in by_method.values())
    assert drawn == space.candidates(BASE, 6, seed=0) != space.candidates(BASE, 6, seed=1)


def test_values_are_multiples_of_the_studys_or_as_they_are(tmp_path):
    file = tmp_path / "space.toml"
    file.write_text(
        'reference = "plain"\n[search]\n"train.lr" = ["x0.5", 3.0]\n[methods.plain]\nalgorithm = "fedavg"\n'
        '[methods.near]\nalgorithm = "fedprox"\nsearch = { "algorithm.mu" = [0.7] }\n'
    )
    space = load(file)
    assert list(space.methods) == ["plain", "near"]
    studies = [space.study(BASE, c) for c in space.candidates(BASE, 9, 0)]
    assert sorted(s.train.lr for s in studies if isinstance(s.algorithm, ps.FedAvg)) == [0.1, 0.2, 3.0]
    own, *others = [s for s in studies if isinstance(s.algorithm, ps.FedProx)]
    assert own == config.vary(BASE, {"algorithm": {"name": "fedprox"}})
    assert {(s.algorithm.mu, s.train.lr) for s in others} == {(0.7, 0.1), (0.7, 3.0)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[methods.a]\nalgorithm = 'fedprox'\nsearch = { 'algorithm.mu' = 0.1 }", "write a list of values"),
        ("[methods.a]\nsplit = { validation = 0.1 }", "chooses the cases"),
        ("[methods.a]\nsearch = { 'seed' = [1] }", "chooses the cases"),
        ("[method.a]\n", "did you mean 'methods'"),
        ("reference = 'fedavgg'", "did you mean 'fedavg'"),
        ("[methods]\na = 3", "must be a table"),
        ("not toml", "not valid TOML"),
        (
            "[methods.a]\nalgorithm = 'ditto'\nsearch = { 'algorithm.own_lr' = ['x2'] }",
            r"no number 'algorithm\.own_lr' to multiply by 2",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, text, words):
    file = tmp_path / "space.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load(file).candidates(BASE, 3, 0)
