"""A study in TOML: what goes in comes out, and comes from the dataclasses themselves."""

import pydoc
import re
from dataclasses import fields, replace

import pytest

import polysite as ps
from polysite.algorithms import ALGORITHMS, SERVER_OPTIMISERS, describe, find
from polysite.config import dump, explain, field_docs, parse, preset, presets, vary
from polysite.costs.speeds import SPEEDS
from polysite.data.federation import FEDERATIONS, ByLabelSize, HideModalities, Iid, Limited, Natural, Steps
from polysite.data.phantom import four_hospitals
from polysite.data.sources import SOURCES
from polysite.errors import ConfigError
from polysite.models import MODELS
from polysite.models.encoders import ENCODERS

FEW, TRONDHEIM = ps.Hospital(missing=("t1", "t2")), "St. Olavs hospital, Trondheim"
NAMES = ("ü", "server", "data", "inner", TRONDHEIM, 'ward "B" [north]', "a = b")
STUDIES = {
    "algorithm": ps.Study(seed=7, algorithm=ps.Scaffold(uniform=False), run=ps.Plan(patience=3, best="site")),
    "no hyper-parameters": ps.Study(algorithm=ps.Local()),
    "network": ps.Study(model=ps.UNet(filters=(4, 8, 12), bias=False), train=ps.Train(patch=(20, 16, 12), steps=5)),
    "hospitals": ps.Study(data=ps.Phantom(sites={"a b": FEW, **dict.fromkeys(NAMES, ps.Hospital(gamma=0.5))})),
    "inner of an inner algorithm": ps.Study(
        algorithm=ps.Weighted({}, ps.Weighted({"a b": 0.5, "inner": 2.0, "server": 0.1}, ps.FedAvg(server=ps.Adam())))
    ),
    "groups": ps.Study(algorithm=ps.Clustered({"a b": ("x  y", "]\n["), "inner": ("ü",)}, ps.FedAvg(server=ps.Yogi()))),
    "files": ps.Study(data=ps.Files(path="x", labels={"WT": (1, 2), "TC": (1,)}, exclude=("EZ",), allow=("missing",))),
    "folds": ps.Study(split=ps.Split(folds=5, fold=4, by_group=True, seed=3), federation=ByLabelSize("WT")),
    "kept sizes": ps.Study(split=ps.Split(keep="sizes"), data=ps.Files(path="x", sites=("6",), classes=("a", "b"))),
    "steps": ps.Study(federation=Steps((Limited(), ByLabelSize("a+b"), Iid(3, "all"), HideModalities(2), Natural()))),
    "prepared": ps.Study(
        prepare=ps.Prepare(orientation="LPS", spacing=(1.0, 1.5, 2.0), clip=(-200.0, 1e3), crop=False)
    ),
    "assessment": ps.Study(assess=ps.Assess(take=2, levels=16, modalities="mean"), encoder=ps.MedicalNet("w.pth")),
    "literal": ps.Study(assess=ps.Assess(take="literal")),
    "classes": ps.Study(model=ps.DenseNet(blocks=(2, 2), growth=4)),
    **{name: ps.Study(federation=federation()) for name, federation in FEDERATIONS.items()},
}


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES.keys())
def test_what_is_written_is_read_back(study):
    assert parse(dump(study)) == study
    assert dump(parse(dump(study))) == dump(study)
    assert parse(dump(study, notes=True)) == study


TWO = 'federation = [{ name = "iid", sites = 5 }, { name = "hide_modalities", count = 1 }]'


def test_a_federation_of_steps():
    study, tables = parse(TWO), '[[federation]]\nname = "iid"\n[[federation]]\nname = "hide_modalities"'
    assert study.federation == parse(tables).federation == Steps((Iid(5), HideModalities(1)))
    assert parse('federation = ["iid", "hide_modalities"]').federation == study.federation
    assert parse("federation = [{ count = 1 }]").federation == HideModalities(1)  # one step is that federation
    for sets, expected in (
        ({"federation": "[{ name = 'iid', sites = 3 }, 'hide_modalities']"}, Steps((Iid(3), HideModalities(1)))),
        ({"federation": "natural"}, Natural()),
        ({"federation.name": "limited", "federation.cases": "9"}, Limited(9)),
    ):
        assert parse(TWO, sets).federation == expected
    for changes, expected in (
        ({"name": "iid"}, Iid()),
        (["iid", {"name": "limited", "cases": 9}], Steps((Iid(), Limited(9)))),
    ):
        assert vary(study, {"federation": changes}).federation == expected
    with pytest.raises(ConfigError, match="changes one step of several"):
        vary(study, {"federation": {"count": 2}})


def test_a_section_can_be_chosen_by_its_name_alone():
    whole = parse("", {"algorithm.name": "weighted", "algorithm.inner.name": "scaffold", "algorithm.weights.a": "2"})
    sets = {"algorithm": "weighted", "algorithm.weights.a": "2.0", "algorithm.inner": "scaffold"}
    assert parse("", sets) == parse("", dict(reversed(sets.items()))) == whole
    odd = parse("", {"algorithm": "weighted", "algorithm.weights.server": "0.5", "algorithm.weights.inner": "2.0"})
    assert odd.algorithm.weights == {"server": 0.5, "inner": 2.0}
    assert parse('algorithm = "fedprox"') == parse("", {"algorithm": "fedprox", "algorithm.mu": "0.01"})
    assert parse('algorithm = "fedprox"', {"algorithm.mu": "2.0"}).algorithm.mu == 2.0
    short = parse('preset = "fets_benchmark"\nalgorithm = "scaffold"')
    assert short == parse('preset = "fets_benchmark"\n[algorithm]\nname = "scaffold"')
    assert short.algorithm.uniform is False  # as the preset has it


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_a_base_that_a_file_varies_and_its_methods_exist(name):
    study = parse(f'preset = "{name}"\n[train]\nlr = 7\n[model]\nname = "unet_small"', {"run.rounds": "3"})
    base = parse("", {"preset": name})
    assert base == parse(f'preset = "{name}"') and base != ps.Study()
    assert study.train == replace(base.train, lr=7.0) and study.run == replace(base.run, rounds=3)
    assert study.model == MODELS["unet_small"] and study.prepare == base.prepare
    for method in preset(name).get("methods", {}):
        chosen = {"run.pooled": "true"} if method == "pooled" else {"algorithm.name": method}
        assert parse(dump(study := parse("", {"preset": name, **chosen}))) == study
    if name.startswith("distance_aware"):
        assert parse("", {"preset": name, "algorithm.name": "fedprox"}) == replace(base, algorithm=ps.FedProx(mu=0.1))


FETS = 'preset = "fets_benchmark"\n'
TABLE_A4 = {  # of the FeTS 2022 benchmark, challenge setup: (learning rate, decay, algorithm)
    "local": (0.1, 0.995, ps.Local()),
    "fedavg": (0.4, 0.995, ps.FedAvg()),
    "scaffold": (0.4, 0.995, ps.Scaffold(uniform=False)),
    "fednova": (0.2, 0.995, ps.FedNova(tau="sizes")),
    "fedadam": (0.1, 0.995, ps.FedAvg(server=ps.Adam(lr=0.001, b1=0.9, b2=0.999, tau=1e-8))),
    "qfedavg": (0.4, 1.0, ps.QFedAvg(q=1.0, augmented=True)),
    "fedpidavg": (0.4, 0.995, ps.FedPIDAvg(alpha=0.45, beta=0.45, gamma=0.1)),
    "moon": (0.4, 0.995, ps.Moon()),  # not in the table
}


@pytest.mark.parametrize("name", TABLE_A4)
def test_a_method_brings_the_values_that_the_paper_chose_for_it(name):
    lr, gamma, algorithm = TABLE_A4[name]
    study, base = parse(f'{FETS}[algorithm]\nname = "{name}"'), parse(FETS)
    run = replace(base.run, best="own") if name == "local" else base.run
    assert study == replace(base, algorithm=algorithm, train=replace(study.train, lr=lr, gamma=gamma), run=run)
    assert study == parse("", {"preset": "fets_benchmark", "algorithm.name": name})
    assert study.train.patch == (128, 128, 128) and study.run.rounds == 300


def test_values_of_the_file_come_before_those_of_the_method():
    text = f'{FETS}[algorithm]\nname = "fedadam"\n'
    study = parse(text + "server.lr = 0.5\n[train]\nlr = 7", {"algorithm.server.tau": "0.1"})
    assert study.algorithm == ps.FedAvg(server=ps.Adam(lr=0.5, b2=0.999, tau=0.1)) and study.train.lr == 7
    assert parse(text + "steps = 10").algorithm.server == parse(text).algorithm.server
    assert parse(text + 'server.name = "adam"').algorithm == parse(text).algorithm
    assert parse(text + 'server.name = "yogi"').algorithm == ps.FedAvg(server=ps.Yogi())  # another name starts anew


def test_pooled_training_and_an_algorithm_that_its_keys_name_are_methods_too():
    study = parse(f"{FETS}[algorithm]\nq = 0.1")
    assert study.algorithm == ps.QFedAvg(q=0.1, augmented=True) and (study.train.lr, study.train.gamma) == (0.4, 1.0)
    for text in ("", "[algorithm]\nuniform = true"):
        study = parse(FETS + text, {"run.pooled": "true"})
        assert study.train.lr == 0.1 and isinstance(study.algorithm, ps.FedAvg) and study.run.rounds == 300
    assert parse(f"{FETS}[run]\npooled = false").train.lr == 0.4


def test_a_preset_starts_from_another():
    base, limited = parse(FETS), {"preset": "fets_benchmark_limited"}
    assert parse("", limited) == replace(base, federation=Limited(35), train=replace(base.train, lr=0.8))
    for name, lr in {"scaffold": 0.8, "local": 0.1, "fednova": 0.2, "fedprox": 0.8}.items():
        assert parse("", {**limited, "algorithm.name": name}).train.lr == lr
    assert parse("", {**limited, "algorithm.name": "scaffold"}).algorithm.uniform is False
    assert parse("", {**limited, "run.pooled": "true"}).train.lr == 0.1
    assert parse("", {**limited, "federation.name": "natural"}).federation == Natural()
    train, run = replace(base.train, lr=0.4, steps=10, gamma=0.998), replace(base.run, rounds=720)
    assert parse('preset = "fets_benchmark_iterations"') == replace(base, train=train, run=run)


GROUPS = '[algorithm]\nname = "clustered"\n[algorithm.groups]\nnorth = ["a", "b"]\nsouth = "c"'
REFUSED = [
    ("federation = []", {}, "must have a step"),
    ('federation = [{ name = "iid", site = 3 }]', {}, r"unknown key 'federation\[0\].site'; did you mean 'sites'"),
    ("federation = [3]", {}, r"federation\[0\] = 3 must be a section"),
    (TWO, {"federation.sites": "3"}, "--set federation.sites=3: 'federation' is a list: set all of it"),
    ('split.keep = "size"', {}, "split.keep = 'size' must be one of 'sizes'"),
    ("split.keep = 1", {}, "must be true or false"),
    ("", {"algorithm": "weighted", "algorithm.inner": "scafold"}, "no algorithm called 'scafold'; did you mean"),
    ("", {"algorithm": "weighted", "algorithm.inner": "2"}, "algorithm.inner = 2 must be a section"),
    ("", {"algorithm": "pfedme", "algorithm.inner": "two"}, "algorithm.inner = {.*} must be|no algorithm called 'two'"),
    ('[data]\npaht = "x.csv"', {}, r"unknown key 'data\.paht'"),
    (GROUPS, {"algorithm.groups.south": "[]"}, "algorithm: the group 'south' has no sites"),
    (GROUPS, {"algorithm.groups.south": "3"}, r"groups.south = 3 must be a list|algorithm.groups.south\[0\] = 3"),
    (f"{FETS}[methods.fedavg.train]\nlr = 1", {}, "unknown key 'methods'"),
    (f"{FETS}algorithm = 3", {}, "algorithm = 3 must be"),  # a preset hides no mistake
    (f"{FETS}run = true", {}, "run = True must be a section"),
    (f"{FETS}algorithm.name = 3", {}, "no algorithm called 3"),
    (f'{FETS}algorithm.name = "pooled"', {}, "no algorithm called 'pooled'"),
    (f'{FETS}run.pooled = "yes"', {}, "run.pooled = 'yes' must be true or false"),
]


@pytest.mark.parametrize(("text", "overrides", "message"), REFUSED)
def test_what_makes_no_sense_is_refused(text, overrides, message):
    with pytest.raises(ConfigError, match=message):
        parse(text, overrides)


def test_a_section_changes_only_what_it_names():
    assert parse("[train]\nlr = 1") == replace(ps.Study(), train=replace(ps.Train(), lr=1.0))
    assert parse('[model]\nname = "unet"').model == ps.UNet()
    assert parse("[model]\nbias = false").model == ps.UNet(filters=(16, 32, 64, 128), bias=False)
    given = parse('[algorithm.server]\nname = "sgd"\nmomentum = 0.9')
    assert given.algorithm == ps.FedAvg(server=ps.Sgd(momentum=0.9))
    assert parse('[data]\npath = "x.csv"').data == ps.Files(path="x.csv")  # without a name: what its keys say


def test_overrides_reach_everything():
    study = parse("", {"algorithm.name": "scaffold", "algorithm.server_lr": "0.5", "train.loss": "dice_ce"})
    assert study.algorithm == ps.Scaffold(server_lr=0.5) and study.train.loss == "dice_ce"
    four = four_hospitals()
    for key, text, sites in (
        ("data.sites.x.missing", '["t1", "t2"]', {**four, "x": FEW}),
        ("data.sites.island.noise", "0.5", {**four, "island": replace(four["island"], noise=0.5)}),
        ("data.sites", "{y={}}", {"y": ps.Hospital()}),
        (f'data.sites."{TRONDHEIM}".cases', "9", {**four, TRONDHEIM: ps.Hospital(cases=9)}),
    ):
        assert parse("", {key: text}).data.sites == sites


def test_a_varied_study_keeps_what_is_not_named_and_keys_alone_never_choose_another_algorithm():
    study = ps.Study(data=ps.Phantom(sites={"x": FEW}), algorithm=ps.Weighted({"x": 0.5}, ps.FedAvg(lr=0.2)))
    varied = vary(study, {"data.sites.x.noise": 0.5, "algorithm.weights.y": 0.1, "algorithm.inner": {"uniform": True}})
    assert varied.data.sites == {"x": replace(FEW, noise=0.5)}
    assert varied.algorithm == ps.Weighted({"x": 0.5, "y": 0.1}, ps.FedAvg(lr=0.2, uniform=True))
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm\.mu'"):
        vary(study, {"algorithm.mu": 0.5})
    with pytest.raises(ConfigError, match=r"then\[0\]: unknown key 'algorithm\.mu'"):
        replace(study, then=({"algorithm": {"mu": 0.5}},))
    tuned = ps.Study(then=({"algorithm": {"lr": 0.1}, "run": {"rounds": 2}},), algorithm=ps.FedAvg(uniform=True))
    assert tuned.then[0].algorithm == ps.FedAvg(lr=0.1, uniform=True) and tuned.then[0].run.rounds == 2
    assert vary(tuned, {"train.lr": 0.7}).then == tuned.then and parse(dump(tuned)) == tuned


def test_groups_of_sites_are_lists_by_name_and_lists_may_be_words_without_quotes():
    whole = ps.Clustered({"north": ("a", "b"), "south": ("c",)})
    assert parse(GROUPS).algorithm == parse(GROUPS.replace('name = "clustered"', "")).algorithm == whole
    sets = {"algorithm": "clustered", "algorithm.groups.north": "[a, b]", "algorithm.groups.south": "c"}
    assert parse("", sets).algorithm == whole and list(parse(GROUPS).algorithm.groups) == ["north", "south"]
    assert parse("", {**sets, "algorithm.inner": "scaffold"}).algorithm == replace(whole, inner=ps.Scaffold())
    assert parse("", {"algorithm": "pfedme", "algorithm.inner": "2"}).algorithm == ps.PFedMe(inner=2)  # a number here
    for text in ("EZ", '["EZ"]', "[EZ]", "[ EZ ]"):
        assert parse("", {"data.path": "x", "data.exclude": text}).data.exclude == ("EZ",)
    assert parse("", {"data.path": "x", "data.labels.core": "1"}).data.labels == {"core": (1,)}


def test_every_key_is_documented_in_its_class():
    """In the ``Args:`` section, and nowhere else."""
    algorithms = [find(n, ALGORITHMS, "algorithm") for n in ALGORITHMS]
    optimisers = [find(n, SERVER_OPTIMISERS, "server optimiser") for n in SERVER_OPTIMISERS]
    choices = [c for each in (MODELS, SOURCES, FEDERATIONS, ENCODERS, SPEEDS) for c in each.values()]
    sections = [ps.Study, ps.Prepare, ps.Split, ps.Train, ps.Plan, ps.Assess, ps.Hospital]
    for kind in {c if isinstance(c, type) else type(c) for c in (*algorithms, *optimisers, *choices, *sections)}:
        assert list(field_docs(kind)) == [f.name for f in fields(kind) if f.init], kind


def test_the_same_text_is_in_help_in_the_list_of_algorithms_and_in_a_configuration():
    text, noted = field_docs(ps.FedProx)["mu"], dump(ps.Study(algorithm=ps.FedProx()), notes=True)
    for page in (pydoc.render_doc(ps.FedProx, renderer=pydoc.plaintext), explain("fedprox"), noted):
        assert text in re.sub(r"\s+# ", " ", page)  # wrapped in a configuration
    assert "Needs: each (the server must see each reply)\nLocal optimiser: plain SGD only" in explain("scaffold")
    assert "A site that never trained: is served no trained model" in explain("clustered")
    known = {name: needs for name, _, _, needs in describe()}
    assert known["fedadam"] == "sum" and known["clustered"] == known["krum"] == "each"


def test_a_proximal_term_that_sgd_cannot_follow_is_refused():
    """A step of size lr on rho/2 |w|^2 multiplies w by 1 - lr rho: it grows if lr rho is more than 2."""
    text = '[algorithm]\nname = "fpfc"\nrho = {}\n[train]\nlr = 3.2\noptimiser = "{}"'
    with pytest.raises(ConfigError, match=r"fpfc diverges: train.lr = 3.2 times the weight 1 of its proximal term"):
        parse(text.format("1.0", "sgd")).check()
    for fine in (("0.5", "sgd"), ("1.0", "adam")):
        parse(text.format(*fine)).check()
    with pytest.raises(ConfigError, match="fedprox diverges"):
        parse('[[then]]\nalgorithm = {name = "fedprox", mu = 30.0}').check()
