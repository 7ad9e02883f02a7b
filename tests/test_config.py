"""A study in TOML: what goes in comes out, and comes from the dataclasses themselves."""

from dataclasses import replace

import pytest

from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.local import Local
from polysite.algorithms.scaffold import Scaffold
from polysite.algorithms.server import Adam, Sgd
from polysite.config import Study, dump, parse
from polysite.data.folder import Folder
from polysite.data.phantom import Hospital, four_hospitals
from polysite.data.sources import Phantom
from polysite.engines.rounds import Plan
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
    "folder": Study(data=Folder(path="x", labels={"WT": (1, 2), "TC": (1,)}, exclude=("EZ",))),
}


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES.keys())
def test_what_is_written_is_read_back(study):
    assert parse(dump(study)) == study
    assert dump(parse(dump(study))) == dump(study)


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
