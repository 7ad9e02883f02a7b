"""``polysite evidence``: the list of federations, the methods of one, and those most like a study."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from evidence_lines import FAR, RUN
from polysite.cli import app
from polysite.errors import ConfigError
from polysite.evidence import table


def run(*arguments):
    result = CliRunner().invoke(app, ["evidence", *arguments])
    if result.exception:
        raise result.exception
    return result.output


@pytest.fixture(autouse=True)
def lines():
    for line in (RUN, replace(RUN, method="ditto", score=0.75, settings={"lam": 0.5}), FAR):
        table.append(line)


def test_the_list_has_own_and_shipped_federations():
    found = run()
    assert "a1: 3 hospitals, 4 to 9 training cases" in found
    assert "TCGA-LGG: four real hospitals" in found
    assert str(table.place()) in found.replace("\n", "")
    assert "TCGA" not in run("--own")


def test_methods_of_a_federation():
    found = run("a1")
    assert [line.split()[:3] for line in found.splitlines() if "Dice" not in line and "0.7" in line] == [
        ["ditto", "0.750", "+0.050"],
        ["fedavg", "0.700", "–"],
    ]
    assert "lam 0.5" in found
    (plain,) = map(json.loads, run("a1", "--json").splitlines())
    assert plain["distances"]["differing"] == 1
    assert [m["gain"] for m in plain["methods"]] == [pytest.approx(0.05), None]


def test_federations_like_a_study(tmp_path):
    study = tmp_path / "study.toml"
    study.write_text("")
    found = [json.loads(line) for line in run("--like", str(study), "--count", "2", "--json").splitlines()]
    assert len(found) == 2
    assert found[0]["title"].startswith("Phantoms")
    assert found[0]["distance"] <= found[1]["distance"]
    assert "four hospitals with unlike scanners" in run("--like", str(study))
    assert "a1" not in run("--like", str(study), "--set", "data.sites.island.cases=40")


@pytest.mark.parametrize("wrong", [("nobody",), ("a1", "--like", "study.toml"), ("--set", "seed=1")])
def test_refusals(wrong):
    with pytest.raises(ConfigError, match=r"evidence|--like"):
        run(*wrong)
