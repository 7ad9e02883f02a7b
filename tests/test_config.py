"""A study in TOML: what goes in comes out, and comes from the dataclasses themselves."""

from dataclasses import replace

import pytest

from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.local import Local
from polysite.algorithms.scaffold import Scaffold
from polysite.algorithms.server import Adam, Sgd
from polysite.config import Study, dump, parse, presets
from polysite.data.federation import FEDERATIONS, ByLabelSize
from polysite.data.files import Files
from polysite.data.phantom import Hospital, four_hospitals
from polysite.data.prepare import Prepare
from polysite.data.sources import Phantom
from polysite.data.split import Split
from polysite.engines.rounds import Plan
from polysite.errors import ConfigError
from polysite.models import MODELS
from polysite.models.densenet import DenseNet
from polysite.models.unet import UNet
from polysite.train.settings import Train

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
            }
        )
    ),
    "files": Study(data=Files(path="x", labels={"WT": (1, 2), "TC": (1,)}, exclude=("EZ",), allow=("missing",))),
    "folds": Study(split=Split(folds=5, fold=4, by_group=True, seed=3), federation=ByLabelSize("WT")),
    "prepared": Study(prepare=Prepare(orientation="LPS", spacing=(1.0, 1.5, 2.0), clip=(-200.0, 300.0), crop=False)),
    "classes": Study(model=DenseNet(blocks=(2, 2), growth=4)),
}


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES.keys())
def test_what_is_written_is_read_back(study):
    assert parse(dump(study)) == study
    assert dump(parse(dump(study))) == dump(study)


@pytest.mark.parametrize("name", FEDERATIONS)
def test_every_federation_can_be_configured(name):
    study = parse(f'[federation]\nname = "{name}"')
    assert study.federation == FEDERATIONS[name]() and parse(dump(study)) == study


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_a_base_that_a_file_varies(name):
    study = parse(f'preset = "{name}"\n[train]\nlr = 7\n[model]\nname = "unet_small"', {"run.rounds": "3"})
    base = parse("", {"preset": name})
    assert base == parse(f'preset = "{name}"') and base != Study()
    assert study.train == replace(base.train, lr=7.0) and study.run == replace(base.run, rounds=3)
    assert study.model == MODELS["unet_small"] and study.prepare == base.prepare


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
            "algorithm.lr": "0.5",
            "data.sites.x.missing": '["t2"]',
            "train.loss": "dice_ce",
        },
    )
    assert study.algorithm == Scaffold(lr=0.5)
    assert study.data.sites == {**four_hospitals(), "x": Hospital(missing=("t2",))}
    one = parse("", {"data.sites.island.noise": "0.5"}).data.sites
    assert one == {**four_hospitals(), "island": replace(four_hospitals()["island"], noise=0.5)}
    assert parse("", {"data.sites": "{y={}}"}).data.sites == {"y": Hospital()}
    assert study.train.loss == "dice_ce"


def test_a_section_without_a_name_is_what_its_keys_say():
    assert parse('[data]\npath = "x.csv"').data == Files(path="x.csv")
    with pytest.raises(ConfigError, match=r"unknown key 'data\.paht'"):
        parse('[data]\npaht = "x.csv"')


def test_lists_may_be_one_word_or_words_without_quotes():
    for text in ("EZ", '["EZ"]', "[EZ]", "[ EZ ]"):
        assert parse("", {"data.path": "x", "data.exclude": text}).data.exclude == ("EZ",)
    assert parse("", {"data.path": "x", "data.modalities": "[t1, flair]"}).data.modalities == ("t1", "flair")
    assert parse("", {"data.path": "x", "data.labels.core": "1"}).data.labels == {"core": (1,)}
