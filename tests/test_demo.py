"""The demonstration, small: it trains, it shows, its page stands alone."""

import re
from html.parser import HTMLParser

import pytest

from polysite import demo, study
from polysite.config import parse
from polysite.engines.rounds import Watch
from polysite.report.runs import read
from studies import text

TINY = text({"capital": 5, "island": 4}, run="rounds = 2", patch=24)


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [
            v for k, v in attributes if k in ("src", "href", "xlink:href") and v and not v.startswith(("#", "data:"))
        ]


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "STUDY", TINY)
    return demo.run(tmp_path / "demo", 0, Watch()).parent


def test_the_page_stands_alone_and_shows_everything(root, capsys):
    shown = (root / "index.html").read_text()
    page = Page()
    page.feed(shown)
    assert page.tags.count("svg") >= 6 and page.tags.count("table") >= 8
    assert page.links == []  # nothing is fetched
    for name in (*demo.METHODS, "capital", "island", "WT", "TC", "ET"):
        assert name in shown
    demo.show(root)
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*demo.METHODS, "capital", "island"))


def test_pooled_training_takes_the_cases_of_all_and_the_hospitals_judge():
    chosen = demo.studies(parse(TINY))
    pooled, apart = study.simulator(chosen["centralised"]), study.simulator(chosen["fedavg"])
    assert pooled.names == ("pooled",) and pooled.audience == apart.names == ("capital", "island")
    assert pooled.sites["pooled"].size == sum(s.size for s in apart.sites.values())
    train = {n for s in apart.sites.values() for n in s.cases("train")}
    assert {n.partition("/")[2] for n in pooled.sites["pooled"].cases("train")} == train


def test_no_patient_is_in_two_splits():
    for site in study.build_sites(parse(TINY)).values():
        names = [n for split in ("train", "validation", "test") for n in site.cases(split)]
        assert len(names) == len(set(names)) and all(site.cases(s) for s in ("train", "validation", "test"))


def test_the_table_is_the_mean_of_the_cases(root):
    run = read(root / "fedavg")
    cases = [list(c.labels.values()) for site in run.scores.values() for c in site.values()]
    found = list(run.values("dice").values())
    assert sorted(found) == pytest.approx(sorted(sum(c) / len(c) for c in cases))
    page = (root / "index.html").read_text()
    assert f"{sum(found) / len(found):.3f}" in re.sub(r"\s+", " ", page)
