"""A study in TOML: what goes in comes out, and comes from the dataclasses themselves."""

import pydoc
import re
from dataclasses import fields, replace

import pytest

from polysite.algorithms import ALGORITHMS, SERVER_OPTIMISERS, describe, find
from polysite.algorithms.clustered import Clustered
from polysite.algorithms.cost_weighted import FedPIDAvg
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.fednova import FedNova
from polysite.algorithms.fedprox import FedProx
from polysite.algorithms.local import Local
from polysite.algorithms.moon import Moon
from polysite.algorithms.pfedme import PFedMe
from polysite.algorithms.qfedavg import QFedAvg
from polysite.algorithms.scaffold import Scaffold
from polysite.algorithms.server_optimisers import Adam, Sgd, Yogi
from polysite.algorithms.weighted import Weighted
from polysite.config import Study, dump, explain, field_docs, parse, preset, presets, vary
from polysite.costs.speeds import SPEEDS
from polysite.data.federation import FEDERATIONS, ByLabelSize, HideModalities, Iid, Limited, Natural, Steps
from polysite.data.files import Files
from polysite.data.phantom import Hospital, four_hospitals
from polysite.data.prepare import Prepare
from polysite.data.sources import SOURCES, Phantom
from polysite.data.split import Split
from polysite.engines.plan import Plan
from polysite.errors import ConfigError
from polysite.heterogeneity.exchange import Assess
from polysite.models import MODELS
from polysite.models.densenet import DenseNet
from polysite.models.encoders import ENCODERS, DeepBet, MedicalNet
from polysite.models.unet import UNet
from polysite.training.settings import Train

STUDIES = {
    "default": Study(),
    "server optimiser": Study(algorithm=FedAvg(steps=10, server=Adam(lr=0.001, b2=0.999))),
    "another algorithm": Study(seed=7, algorithm=Scaffold(uniform=False), run=Plan(patience=3, best="site")),
    "no hyper-parameters": Study(algorithm=Local()),
    "own network": Study(model=UNet(filters=(4, 8, 12), bias=False), train=Train(patch=(20, 16, 12), steps=5)),
    "hospitals": Study(
        data=Phantom(
            sites={
                "a b": Hospital(missing=("t1", "t2")),
                "ü": Hospital(gamma=0.5),
                "server": Hospital(),
                "data": Hospital(),
                "inner": Hospital(),
            }
        )
    ),
    "inner algorithm": Study(algorithm=Weighted({"a b": 0.3, "inner": 2.0, "server": 0.1}, FedProx(mu=0.1))),
    "server of an inner algorithm": Study(algorithm=Weighted({"x": 0.3}, FedAvg(steps=3, server=Adam(lr=0.001)))),
    "inner of an inner algorithm": Study(algorithm=Weighted({}, Weighted({"x": 0.5}, FedAvg(server=Sgd(lr=0.5))))),
    "groups of sites": Study(algorithm=Clustered({"a b": ("x  y", "]\n["), "inner": ("ü",)}, FedAvg(server=Yogi()))),
    "groups and factors": Study(algorithm=Weighted({"y": 0.3}, Clustered({"all": ("x", "y")}, Scaffold()))),
    "files": Study(data=Files(path="x", labels={"WT": (1, 2), "TC": (1,)}, exclude=("EZ",), allow=("missing",))),
    "folds": Study(split=Split(folds=5, fold=4, by_group=True, seed=3), federation=ByLabelSize("WT")),
    "kept parts": Study(split=Split(keep=True)),
    "kept sizes": Study(split=Split(keep="sizes"), data=Files(path="x", sites=("6",), classes=("a", "b"))),
    "steps": Study(federation=Steps((Iid(3, parts="all"), HideModalities(2)))),
    "many steps": Study(federation=Steps((Limited(), ByLabelSize("a+b"), Iid(3), HideModalities(2), Natural()))),
    "prepared": Study(prepare=Prepare(orientation="LPS", spacing=(1.0, 1.5, 2.0), clip=(-200.0, 300.0), crop=False)),
    "assessment": Study(assess=Assess(take=2, levels=16, modalities="mean"), encoder=MedicalNet("weights.pth")),
    "literal": Study(assess=Assess(take="literal"), encoder=DeepBet()),
    "classes": Study(model=DenseNet(blocks=(2, 2), growth=4)),
}


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES.keys())
def test_what_is_written_is_read_back(study):
    assert parse(dump(study)) == study
    assert dump(parse(dump(study))) == dump(study)
    assert parse(dump(study, notes=True)) == study


@pytest.mark.parametrize("name", FEDERATIONS)
def test_every_federation_can_be_configured(name):
    study = parse(f'[federation]\nname = "{name}"')
    assert study.federation == FEDERATIONS[name]() and parse(dump(study)) == study


TWO = 'federation = [{ name = "iid", sites = 5 }, { name = "hide_modalities", count = 1 }]'


def test_a_federation_of_steps():
    both = Steps((Iid(5), HideModalities(1)))
    tables = '[[federation]]\nname = "iid"\n[[federation]]\nname = "hide_modalities"'
    assert parse(TWO).federation == parse(tables).federation == both
    assert parse('federation = ["iid", "hide_modalities"]').federation == both
    assert parse("federation = [{ count = 1 }]").federation == HideModalities(1)  # one step is that federation
    assert parse(TWO, {"federation.0.sites": "3", "federation.1.count": "2"}).federation == Steps(
        (Iid(3), HideModalities(2))
    )
    assert parse(TWO, {"federation.1": "natural"}).federation == Steps((Iid(5), Natural()))
    assert parse(TWO, {"federation": "natural"}).federation == Natural()
    assert parse(TWO, {"federation.name": "limited", "federation.cases": "9"}).federation == Limited(9)
    study = parse(TWO)
    with pytest.raises(ConfigError, match="several steps"):
        vary(study, {"federation": {"count": 2}})
    assert vary(study, {"federation": {"1": {"count": 3}}}).federation == Steps((Iid(5), HideModalities(3)))
    assert vary(study, {"federation": {"name": "iid"}}).federation == Iid()
    assert vary(Study(), {"federation": ["iid", {"name": "limited", "cases": 9}]}).federation == Steps(
        (Iid(), Limited(9))
    )


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("federation = []", {}, "must have a step"),
        ('federation = ["iidd"]', {}, "no federation called 'iidd'; did you mean 'iid'"),
        ('federation = [{ name = "iid", site = 3 }]', {}, r"unknown key 'federation\[0\].site'; did you mean 'sites'"),
        ("federation = [3]", {}, r"federation\[0\] = 3 must be a section"),
        (TWO, {"federation.2.sites": "3"}, r"federation\[2\]"),
        (TWO, {"federation.4": "natural"}, "numbered from 0 without gaps"),
        (TWO, {"federation.sites": "3"}, "federation.sites: the federation has several steps"),
        ('split.keep = "size"', {}, "split.keep = 'size' must be one of 'sizes'"),
        ("split.keep = 1", {}, "must be true or false"),
    ],
)
def test_steps_that_are_none(text, overrides, message):
    with pytest.raises(ConfigError, match=message):
        parse(text, overrides)


def test_a_section_can_be_chosen_by_its_name_alone():
    whole = parse("", {"algorithm.name": "weighted", "algorithm.inner.name": "scaffold", "algorithm.weights.a": "2"})
    sets = {"algorithm": "weighted", "algorithm.weights.a": "2.0", "algorithm.inner": "scaffold"}
    assert parse("", sets) == parse("", dict(reversed(sets.items()))) == whole
    odd = parse("", {"algorithm": "weighted", "algorithm.weights.server": "0.5", "algorithm.weights.inner": "2.0"})
    assert odd.algorithm.weights == {"server": 0.5, "inner": 2.0}
    assert parse('algorithm = "fedprox"') == parse("", {"algorithm": "fedprox", "algorithm.mu": "0.01"})
    assert parse('algorithm = "fedprox"', {"algorithm.mu": "2.0"}).algorithm.mu == 2.0
    with pytest.raises(ConfigError, match="no algorithm called 'scafold'; did you mean 'scaffold'"):
        parse("", {"algorithm": "weighted", "algorithm.inner": "scafold"})


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_a_base_that_a_file_varies(name):
    study = parse(f'preset = "{name}"\n[train]\nlr = 7\n[model]\nname = "unet_small"', {"run.rounds": "3"})
    base = parse("", {"preset": name})
    assert base == parse(f'preset = "{name}"') and base != Study()
    assert study.train == replace(base.train, lr=7.0) and study.run == replace(base.run, rounds=3)
    assert study.model == MODELS["unet_small"] and study.prepare == base.prepare


TABLE_A4 = {  # of the FeTS 2022 benchmark, challenge setup: (learning rate, decay, algorithm)
    "local": (0.1, 0.995, Local()),
    "fedavg": (0.4, 0.995, FedAvg()),
    "scaffold": (0.4, 0.995, Scaffold(uniform=False)),
    "fednova": (0.2, 0.995, FedNova(tau="sizes")),
    "fedadam": (0.1, 0.995, FedAvg(server=Adam(lr=0.001, b1=0.9, b2=0.999, tau=1e-8))),
    "qfedavg": (0.4, 1.0, QFedAvg(q=1.0, augmented=True)),
    "fedpidavg": (0.4, 0.995, FedPIDAvg(alpha=0.45, beta=0.45, gamma=0.1)),
    "moon": (0.4, 0.995, Moon()),  # not in the table
}


@pytest.mark.parametrize("name", TABLE_A4)
def test_a_method_brings_the_values_that_the_paper_chose_for_it(name):
    lr, gamma, algorithm = TABLE_A4[name]
    study = parse(f'preset = "fets_benchmark"\n[algorithm]\nname = "{name}"')
    base = parse('preset = "fets_benchmark"')
    run = replace(base.run, best="own") if name == "local" else base.run
    assert study == replace(base, algorithm=algorithm, train=replace(study.train, lr=lr, gamma=gamma), run=run)
    assert study == parse("", {"preset": "fets_benchmark", "algorithm.name": name})
    assert study.train.patch == (128, 128, 128) and study.run.rounds == 300


def test_values_of_the_file_come_before_those_of_the_method():
    text = 'preset = "fets_benchmark"\n[algorithm]\nname = "fedadam"\n'
    study = parse(text + "server.lr = 0.5\n[train]\nlr = 7", {"algorithm.server.tau": "0.1"})
    assert study.algorithm == FedAvg(server=Adam(lr=0.5, b2=0.999, tau=0.1)) and study.train.lr == 7
    assert parse(text + "steps = 10").algorithm.server == parse(text).algorithm.server
    assert parse(text + 'server.name = "adam"').algorithm == parse(text).algorithm
    assert parse(text + 'server.name = "yogi"').algorithm == FedAvg(server=Yogi())  # another name starts anew


def test_an_algorithm_that_its_keys_name_is_a_method_too():
    study = parse('preset = "fets_benchmark"\n[algorithm]\nq = 0.1')
    assert study.algorithm == QFedAvg(q=0.1, augmented=True) and (study.train.lr, study.train.gamma) == (0.4, 1.0)


def test_pooled_training_is_a_method():
    for text in ("", "[algorithm]\nuniform = true"):
        study = parse(f'preset = "fets_benchmark"\n{text}', {"run.pooled": "true"})
        assert study.train.lr == 0.1 and isinstance(study.algorithm, FedAvg) and study.run.rounds == 300
    assert parse('preset = "fets_benchmark"\n[run]\npooled = false').train.lr == 0.4


@pytest.mark.parametrize("name", [n for n in presets() if n.startswith("distance_aware")])
def test_fedprox_of_the_distance_aware_protocol(name):
    study = parse("", {"preset": name, "algorithm.name": "fedprox"})
    assert study == replace(parse("", {"preset": name}), algorithm=FedProx(mu=0.1))


def test_a_preset_starts_from_another():
    base, limited = parse('preset = "fets_benchmark"'), parse('preset = "fets_benchmark_limited"')
    assert limited == replace(base, federation=Limited(35), train=replace(base.train, lr=0.8))
    for name, lr in {"scaffold": 0.8, "local": 0.1, "fednova": 0.2, "fedprox": 0.8}.items():
        assert parse("", {"preset": "fets_benchmark_limited", "algorithm.name": name}).train.lr == lr
    assert parse("", {"preset": "fets_benchmark_limited", "algorithm.name": "scaffold"}).algorithm.uniform is False
    assert parse("", {"preset": "fets_benchmark_limited", "run.pooled": "true"}).train.lr == 0.1
    assert parse("", {"preset": "fets_benchmark_limited", "federation.name": "natural"}).federation == Natural()
    fixed = parse('preset = "fets_benchmark_iterations"')
    assert fixed == replace(
        base, train=replace(base.train, lr=0.4, steps=10, gamma=0.998), run=replace(base.run, rounds=720)
    )


@pytest.mark.parametrize("name", presets())
def test_the_methods_of_a_preset_exist(name):
    for method in preset(name).get("methods", {}):
        assert method in ALGORITHMS or method == "pooled"
        chosen = {"run.pooled": "true"} if method == "pooled" else {"algorithm.name": method}
        study = parse("", {"preset": name, **chosen})
        assert parse(dump(study)) == study


@pytest.mark.parametrize("text", ["", 'preset = "fets_benchmark"\n'])
def test_methods_are_for_presets(text):
    with pytest.raises(ConfigError, match="unknown key 'methods'"):
        parse(text + "[methods.fedavg.train]\nlr = 1")


@pytest.mark.parametrize(
    ("text", "message"),
    {
        "algorithm = 3": "algorithm = 3 must be",
        "run = true": "run = True must be a section",
        "algorithm.name = 3": "no algorithm called 3",
        'algorithm.name = ["fedavg"]': "no algorithm called",
        'algorithm.name = "pooled"': "no algorithm called 'pooled'",
        'run.pooled = "yes"': "run.pooled = 'yes' must be true or false",
    }.items(),
)
def test_a_preset_hides_no_mistake(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(f'preset = "fets_benchmark"\n{text}')


def test_a_section_changes_only_what_it_names():
    assert parse("[train]\nlr = 1") == replace(Study(), train=replace(Train(), lr=1.0))
    assert parse('[model]\nname = "unet"').model == UNet()
    assert parse("[model]\nbias = false").model == UNet(filters=(16, 32, 64, 128), bias=False)
    given = parse('[algorithm.server]\nname = "sgd"\nmomentum = 0.9')
    assert given.algorithm == FedAvg(server=Sgd(momentum=0.9))


def test_overrides_reach_everything():
    study = parse(
        "",
        {
            "algorithm.name": "scaffold",
            "algorithm.server_lr": "0.5",
            "data.sites.x.missing": '["t2"]',
            "train.loss": "dice_ce",
        },
    )
    assert study.algorithm == Scaffold(server_lr=0.5)
    assert study.data.sites == {**four_hospitals(), "x": Hospital(missing=("t2",))}
    one = parse("", {"data.sites.island.noise": "0.5"}).data.sites
    assert one == {**four_hospitals(), "island": replace(four_hospitals()["island"], noise=0.5)}
    assert parse("", {"data.sites": "{y={}}"}).data.sites == {"y": Hospital()}
    assert study.train.loss == "dice_ce"


def test_a_section_without_a_name_is_what_its_keys_say():
    assert parse('[data]\npath = "x.csv"').data == Files(path="x.csv")
    with pytest.raises(ConfigError, match=r"unknown key 'data\.paht'"):
        parse('[data]\npaht = "x.csv"')


def test_groups_of_sites_are_lists_by_name():
    text = '[algorithm]\nname = "clustered"\n[algorithm.groups]\nnorth = ["a", "b"]\nsouth = "c"'
    whole = Clustered({"north": ("a", "b"), "south": ("c",)})
    assert parse(text).algorithm == parse(text.replace('name = "clustered"', "")).algorithm == whole
    sets = {"algorithm": "clustered", "algorithm.groups.north": "[a, b]", "algorithm.groups.south": "c"}
    assert parse("", sets).algorithm == whole and list(parse(text).algorithm.groups) == ["north", "south"]
    assert parse("", {**sets, "algorithm.inner": "scaffold"}).algorithm == replace(whole, inner=Scaffold())
    with pytest.raises(ConfigError, match="algorithm: the group 'south' has no sites"):
        parse(text, {"algorithm.groups.south": "[]"})
    with pytest.raises(ConfigError, match=r"algorithm.groups.south = 3 must be a list|algorithm.groups.south\[0\] = 3"):
        parse(text, {"algorithm.groups.south": "3"})


def test_lists_may_be_one_word_or_words_without_quotes():
    for text in ("EZ", '["EZ"]', "[EZ]", "[ EZ ]"):
        assert parse("", {"data.path": "x", "data.exclude": text}).data.exclude == ("EZ",)
    assert parse("", {"data.path": "x", "data.modalities": "[t1, flair]"}).data.modalities == ("t1", "flair")
    assert parse("", {"data.path": "x", "data.labels.core": "1"}).data.labels == {"core": (1,)}


def test_a_preset_knows_a_method_that_is_given_by_its_name_alone():
    short, long = (
        parse(f'preset = "fets_benchmark"\n{text}')
        for text in ('algorithm = "scaffold"', '[algorithm]\nname = "scaffold"')
    )
    assert short == long and short.algorithm.uniform is False
    assert parse('preset = "fets_benchmark"\nalgorithm = "fednova"').train.lr == 0.2


def test_an_inner_value_that_is_no_algorithm_can_be_set():
    """pFedMe has a number called inner, combinators an algorithm."""
    text = '[algorithm]\nname = "pfedme"\ninner = 2'
    sets = {"algorithm": "pfedme", "algorithm.inner": "2"}
    assert parse(text).algorithm == parse("", sets).algorithm == PFedMe(inner=2)
    with pytest.raises(ConfigError, match=r"algorithm.inner = 2 must be a section"):
        parse("", {"algorithm": "weighted", "algorithm.inner": "2"})
    with pytest.raises(ConfigError, match=r"algorithm.inner = \{'name': 'two'\} must be|no algorithm called 'two'"):
        parse("", {"algorithm": "pfedme", "algorithm.inner": "two"})


def kinds(choices):
    """The classes among the choices of a section."""
    return {c if isinstance(c, type) else type(c) for c in choices.values()}


TRAINED_BY = kinds({n: find(n, ALGORITHMS, "algorithm") for n in ALGORITHMS})
OPTIMISERS = kinds({n: find(n, SERVER_OPTIMISERS, "server optimiser") for n in SERVER_OPTIMISERS})
SECTIONS = {Study, Prepare, Split, Train, Plan, Assess, Hospital}.union(
    *map(kinds, (MODELS, SOURCES, FEDERATIONS, ENCODERS, SPEEDS))
)


# Every hyper-parameter and every setting is documented in the ``Args:`` section of its class, and nowhere else.
@pytest.mark.parametrize("kind", sorted(TRAINED_BY | OPTIMISERS | SECTIONS, key=str), ids=lambda k: k.__name__)
def test_every_key_is_documented_in_its_class(kind):
    assert list(field_docs(kind)) == [f.name for f in fields(kind) if f.init]


def test_the_same_text_is_in_help_in_the_list_of_algorithms_and_in_a_configuration():
    text = field_docs(FedProx)["mu"]
    assert (
        text
        == "Weight of the proximal term (mu in the paper), at least 0; 0 is FedAvg. Default: docs/results/defaults.md."
    )
    assert text in pydoc.render_doc(FedProx, renderer=pydoc.plaintext)
    for page in (explain("fedprox"), dump(Study(algorithm=FedProx()), notes=True)):
        assert text in re.sub(r"\s+# ", " ", page)  # wrapped in a configuration
    long = field_docs(PFedMe)["inner"]
    assert long in re.sub(r"\s+# ", " ", explain("pfedme")) and max(map(len, explain("pfedme").splitlines())) <= 120


def test_an_algorithm_says_what_it_requires():
    assert "Needs: sum (a sum of the replies is enough)\nLocal optimiser: any\n" in explain("fedavg")
    assert "Needs: each (the server must see each reply)\nLocal optimiser: plain SGD only" in explain("scaffold")
    assert "A site that never trained: is served no trained model" in explain("clustered")
    assert "Args:" not in explain("krum")
    known = {name: (paper, summary, needs) for name, paper, summary, needs in describe()}
    assert known.keys() == ALGORITHMS.keys() and all(summary for _, summary, _ in known.values())
    assert known["fedadam"][2] == "sum" and known["clustered"][2] == known["krum"][2] == "each"


def test_a_proximal_term_that_sgd_cannot_follow_is_refused():
    """A step of size lr on rho/2 |w|^2 multiplies w by 1 - lr rho: it grows if lr rho is more than 2."""
    text = '[algorithm]\nname = "fpfc"\nrho = {}\n[train]\nlr = 3.2\noptimiser = "{}"'
    with pytest.raises(ConfigError, match=r"fpfc diverges: train.lr = 3.2 times the weight 1 of its proximal term"):
        parse(text.format("1.0", "sgd")).check()
    for fine in (("0.5", "sgd"), ("1.0", "adam")):
        parse(text.format(*fine)).check()
    phase = '[[then]]\nalgorithm = {name = "fedprox", mu = 30.0}'
    with pytest.raises(ConfigError, match="fedprox diverges"):
        parse(phase).check()


def test_names_with_dots_and_brackets_are_explained_and_set():
    names = ["St. Olavs hospital, Trondheim", 'ward "B" [north]', "a = b"]
    study = Study(data=Phantom(sites={name: Hospital(cases=6) for name in names}))
    assert parse(dump(study, notes=True)) == study
    changed = parse(dump(study), {'data.sites."St. Olavs hospital, Trondheim".cases': "9"})
    assert [changed.data.sites[name].cases for name in names] == [9, 6, 6]
