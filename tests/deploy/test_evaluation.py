"""A deployed run reports what a simulated one reports: the scores, every measure of every case, the page."""

import csv
import json

import pytest
from typer.testing import CliRunner

from consortium import NAMES, Inside, go, wanted, worker, workers
from polysite.cli import app


def rows(folder):
    with (folder / "evaluation" / "test" / "cases.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def renamed(table, names):
    return sorted(tuple({**row, "case": names[row["site"], row["case"]]}.items()) for row in table)


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_a_deployed_run_reports_what_a_simulated_one_reports(name, tmp_path, trained):
    chosen, hosts = wanted(name), workers(tmp_path)
    simulated = trained(chosen)
    deployed = go(tmp_path, chosen, Inside(hosts))
    pseudonyms = {
        (i, case): hosts[i].hospital.pseudonyms.of(case) for i, cases in simulated.result.test.items() for case in cases
    }
    one, other = simulated.result, deployed.result
    for split in ("validation", "test"):
        for site, scores in getattr(one, split).items():
            expected = {hosts[site].hospital.pseudonyms.of(case): score for case, score in scores.items()}
            assert getattr(other, split)[site] == expected
            assert all(bool(score.counts) == (split == "test") for score in scores.values())
    assert (one.best_round, one.rounds, simulated.mean) == (other.best_round, other.rounds, deployed.mean)

    own = [row for row in rows(simulated.folder.path) if row["model"] in ("*", row["site"])]
    there, known = rows(deployed.folder.path), {(i, p): p for (i, _), p in pseudonyms.items()}
    assert len(own) == len(there) and "hd95" in own[0] and list(own[0]) == list(there[0])
    assert renamed(own, pseudonyms) == renamed(there, known)  # as text: equal to the last bit
    assert not list((deployed.folder.path / "evaluation").rglob("*.npz"))
    about = [json.loads((r.folder.path / "evaluation/test/about.json").read_text()) for r in (simulated, deployed)]
    assert all(about[0][k] == about[1][k] for k in ("cases", "trained", "tolerance", "unit", "labels"))

    result = CliRunner().invoke(app, ["report", str(deployed.folder.path)], catch_exceptions=False)
    page = (deployed.folder.path / "index.html").read_text()
    assert result.exit_code == 0 and "HD95" in page and not any(case in page for _, case in pseudonyms)


def test_a_hospital_that_keeps_the_scores_of_its_cases_is_left_out_of_the_evaluation(tmp_path):
    hosts = workers(tmp_path)
    hosts["c"] = worker(tmp_path, "c", case_scores=False)
    deployed = go(tmp_path, wanted("fedavg"), Inside(hosts))
    assert {row["site"] for row in rows(deployed.folder.path)} == {"a", "b"} == set(deployed.result.test)
    assert all(sorted(r.sites) == list(NAMES) for r in deployed.folder.records())
