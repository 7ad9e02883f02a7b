"""Whole studies on image files: federations, tasks and folds, from the folder to the result."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image as Pillow

import polysite as ps
from consortium import config_of
from polysite.config import dump, parse
from polysite.data.federation import HideModalities, Iid, LeaveOut, Steps
from polysite.errors import ConfigError, DataError, RunError
from polysite.metrics.averages import WAYS, averaged
from polysite.models.densenet import DenseNet
from polysite.report import averages, tables
from polysite.report.costs import cost
from polysite.report.page import build
from polysite.report.runs import methods, read
from polysite.study import build_sites, deal_cases, simulator
from polysite.study.training import _described
from studies import SMALL
from table import EVERY


def test_an_unseen_hospital_judges_and_does_not_train(tmp_path):
    run = ps.train(replace(SMALL, federation=LeaveOut("west")), tmp_path / "run")
    first = run.folder.records()[0]
    assert set(first.sites) == {"east", "north"} == set(first.validation) - {"west"}
    assert len(run.result.test["west"]) == 5 and run.result.validation["west"] == {}
    assert set(run.dice()) == {"east", "north", "west"}


@pytest.mark.parametrize("name", EVERY)
def test_every_algorithm_trains_a_network_and_resumes(name, tmp_path):
    twins = {"algorithm.after": "1", "algorithm.choices": "[0, 0.5, 1]"} if name == "superfed" else {}
    study = parse(config_of(name), {"run.wire": "true", **twins})
    run = ps.train(study, tmp_path / name)
    assert all(0 <= d <= 1 for d in run.dice().values()) and parse(dump(study)) == study
    assert not any(r.refused for r in run.folder.records())
    ps.evaluate(tmp_path / name, others=False, pictures=False, again=True)  # what was served then is served again
    found = read(tmp_path / name)
    own = found.evaluation.own
    assert {key: {label: row["dice"] for label, row in own[key].items()} for key in own} == {
        (site, case): score.labels for site, cases in found.scores.items() for case, score in cases.items()
    }
    before = {p.name: p.read_bytes() for p in (tmp_path / name / "models").iterdir()}
    (tmp_path / name / "result.json").unlink()
    run.folder.checkpoints()[0].unlink()
    assert ps.resume(tmp_path / name).dice() == run.dice()
    assert {p.name: p.read_bytes() for p in (tmp_path / name / "models").iterdir()} == before


GROUPS = {"coast": ("east", "west"), "inland": ("north",)}
TWO = replace(SMALL, run=ps.Plan(rounds=2, checkpoint_every=1), train=replace(SMALL.train, gamma=0.5, lr=1.0))
PHASES = (
    {"algorithm": ps.Clustered(GROUPS), "run": {"rounds": 2}},
    {"algorithm": {"name": "fine_tune", "lam": [0.0, 0.1]}, "train": {"lr": 0.25, "augment": "none"}},
)


def test_a_study_in_phases_is_the_same_after_a_run_of_the_first(tmp_path):
    study = replace(TWO, then=PHASES)
    whole = ps.train(study, tmp_path / "whole")
    rates = [r.sites["east"].lr_sum / r.sites["east"].steps for r in whole.folder.records()]
    assert rates == [1.0, 0.5, 1.0, 0.5, 0.25, 0.125]  # schedules start anew
    one = ps.train(TWO, tmp_path / "one").folder.path
    first = ps.train(replace(study, then=PHASES[:1]), tmp_path / "first", after=one).folder.path
    after = ps.train(study, tmp_path / "after", after=first)
    assert after.result == whole.result and len(after.folder.records()) == 6
    for path in (tmp_path / "whole" / "models").iterdir():
        assert (tmp_path / "after" / "models" / path.name).read_bytes() == path.read_bytes()
    found = read(tmp_path / "after")
    assert found.groups == {name: list(sites) for name, sites in GROUPS.items()} and found.evaluation is not None
    counted, foreseen = cost(found, study.cost), ps.cost(study)
    assert (counted.rounds, counted.steps, counted.down) == (foreseen.rounds, foreseen.steps, foreseen.down)
    assert {i: n - after.result.bytes_up[i] for i, n in counted.up.items()} == foreseen.up  # without the last measures
    assert found.begins == [3, 5] and "A dotted line is the start of a phase" in build("phases", methods([found]))


def test_only_the_beginning_of_a_study_is_taken_over(tmp_path):
    one, other = ps.train(TWO, tmp_path / "one"), "is not the beginning of this study"

    def refused(study, sentence):
        with pytest.raises(RunError, match=sentence):
            ps.train(study, tmp_path / "two", after=tmp_path / "one")

    refused(TWO, other)
    refused(replace(TWO, seed=1, then=PHASES), other)
    refused(replace(TWO, then=PHASES, algorithm=ps.FedProx()), other)
    for path in one.folder.checkpoints():
        path.unlink()
    refused(replace(TWO, then=PHASES), "lacks checkpoints or records")
    (tmp_path / "one" / "result.json").unlink()
    refused(replace(TWO, then=PHASES), "has not finished, so nothing can come after it")
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    ("then", "sentence"),
    [
        ({"model": {"name": "unet"}}, r"then\[0\]: a phase does not change 'model'"),
        ({"train": {"batch": 2}}, r"then\[0\]: a phase does not change 'train\.batch'"),
        ({"run": {"wire": True}}, "a phase does not change 'run.wire'"),
        ({"algorithm": "cfft"}, "run.rounds = 2 may end before cfft has tuned"),
        ({"algorithm": {"name": "fedprx"}}, r"then\[0\]: there is no algorithm called 'fedprx'"),
        ({"algorithm": {"name": "scaffold"}, "train": {"momentum": 0.9}}, "scaffold is derived for plain SGD"),
    ],
    ids=str,
)
def test_a_phase_changes_how_sites_train_and_nothing_else(then, sentence):
    with pytest.raises(ConfigError, match=sentence):
        replace(SMALL, then=(then,))


@pytest.mark.parametrize(("fit", "ideal"), [("federated", False), ("pooled", False), ("federated", True)])
def test_the_rate_of_the_first_tuning_round_is_that_of_the_phase_however_clusters_are_fitted(fit, ideal, tmp_path):
    """The exchanges that fit the clusters are no rounds of training: at a decay of 0.5 the rates are 1, 1/2, 1/4."""
    own = {"name": "cfft", "components": 2, "rounds": 3, "dimensions": 3, "fit": fit}
    then = {"algorithm": own, "run": {"rounds": 80, "pooled": ideal}}
    run = ps.train(replace(TWO, then=(then,)), tmp_path / "run", evaluate=False)
    tuned = [r.sites["pooled" if ideal else "east"] for r in run.folder.records() if r.phase]
    assert [site.lr_sum / site.steps for site in tuned if site.steps] == [1.0, 0.5, 0.25]


def test_what_cannot_stand_where_it_does_is_refused_before_anything_is_trained(tmp_path):
    last = {"algorithm": {"name": "cfft", "rounds": 1}, "run": {"rounds": 60}}
    with pytest.raises(ConfigError, match="nothing comes after cfft"):
        replace(TWO, then=(last, PHASES[1]))
    with pytest.raises(ConfigError, match=r"needs prepare\.normalise = 'nonzero', 'padded' or 'all'"):
        replace(TWO, prepare=ps.Prepare(normalise="none"), then=(last,))
    with pytest.raises(ConfigError, match="cfft wants 10 clusters, and the sites have 9 cases in all to fit them to"):
        ps.train(replace(TWO, then=(last,)), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"write \[\[then\]\], with two brackets"):
        parse('[then]\nalgorithm = "fine_tune"')
    alone, unseen = ps.Clustered({"coast": ("east",), "inland": ("north",)}), LeaveOut("west")
    with pytest.raises(ConfigError, match="clustered has no model for 'west'"):
        ps.train(replace(TWO, federation=unseen, then=({"algorithm": alone}, PHASES[1])), tmp_path / "run")
    with pytest.raises(ConfigError, match="let it come after another algorithm"):
        ps.train(replace(SMALL, algorithm=ps.FineTune()), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_looking_at_the_test_changes_nothing_and_is_told_apart(tmp_path):
    study = replace(SMALL, run=ps.Plan(rounds=4))
    honest = ps.train(study, tmp_path / "honest")
    peeking = ps.train(replace(study, run=ps.Plan(rounds=4, peek=True)), tmp_path / "peeking")
    assert honest.result == peeking.result
    plain, peeked = (m.first for m in methods([read(tmp_path / "honest"), read(tmp_path / "peeking")]))
    seen = [r.peeked for r in peeking.folder.records()]
    assert np.isnan(averages.best_mean(plain, "iou"))
    for way in WAYS:
        each = [averaged((s.counts for s in sites.values()), "iou", way) for sites in seen]
        assert averages.best_mean(peeked, "iou", way) == max(each)
        assert averages.honest(peeked, "iou", way) == each[peeking.result.best_round]  # in memory and from files


def test_hidden_modalities_reach_the_network_as_zeros():
    sites = build_sites(replace(SMALL, federation=HideModalities(3)))
    seen = {s: site._volumes[site.cases("train")[0]][0].flatten(1).any(1).tolist() for s, site in sites.items()}
    assert {s: v.index(True) for s, v in seen.items()} == {"east": 3, "north": 0, "west": 1}
    assert all(sum(v) == 1 for v in seen.values())


def test_who_was_where_is_saved_and_watched_over(tmp_path):
    run = ps.train(replace(SMALL, split=ps.Split(folds=3, fold=1)), tmp_path / "run")
    lines = (tmp_path / "run" / "split.csv").read_text().splitlines()
    assert lines[0] == "Subject_ID,Partition_ID,Split,Site" and len(lines) == 16
    assert {n for s in run.result.test.values() for n in s} == {x.split(",")[0] for x in lines if ",test," in x}
    again = replace(SMALL, split=ps.Split(file=str(tmp_path / "run" / "split.csv")), seed=9)
    assert [len(p["test"]) for p in deal_cases(again).values()] == [len(v) for v in run.result.test.values()]
    (tmp_path / "run" / "result.json").unlink()
    (tmp_path / "run" / "split.csv").write_text("\n".join([*lines[:-1], "someone,west,test,west"]))
    with pytest.raises(RunError, match="names other cases or parts"):
        ps.resume(tmp_path / "run")


@pytest.fixture
def pictures(tmp_path):
    """Bright discs and dark ones, as SITE/CLASS/x.png."""
    rng = np.random.default_rng(0)
    for site in ("A", "B"):
        for kind, shade in (("healthy", 60), ("ulcer", 200)):
            folder = tmp_path / "pictures" / site / kind
            folder.mkdir(parents=True)
            for k in range(8):
                array = rng.integers(1, 40, (20, 22, 3)) + [shade, 30, 30] * (rng.random((20, 22, 1)) < 0.5)
                Pillow.fromarray(array.astype(np.uint8)).save(folder / f"{kind}{k}.png")
    return ps.Files(path=str(tmp_path / "pictures"))


def classification(pictures, **settings):
    train = ps.Train(patch=(16, 16), batch=4, device="cpu", augment="light", epochs=3)
    return ps.Study(
        data=pictures,
        prepare=ps.Prepare(normalise="none", crop=False),
        split=ps.Split(by_group=True, test=0.25, validation=0.25),
        run=ps.Plan(rounds=8),
        **{"model": DenseNet(blocks=(2, 2), growth=4, features=8), "train": train, **settings},
    )


def test_a_folder_of_pictures_is_classified_from_end_to_end(tmp_path, pictures, capsys):
    run = ps.train(classification(pictures), tmp_path / "run")
    assert run.mean >= 0.75 and set(run.dice()) == {"A", "B"}
    case = next(iter(run.result.test["A"].values()))
    assert set(case.labels) == {"accuracy"} and case.labels["accuracy"] == (case.predicted == case.true)
    assert run.folder.records()[-1].measure == "accuracy"
    tables.show(methods([read(tmp_path / "run")]))
    shown = capsys.readouterr().out
    assert "balanced accuracy" in shown and f"{run.mean:.3f}" in shown
    assert run.result.labels == ("healthy", "ulcer") and run.result.task == "classification"
    assert "A: 8 train, 4 validation, 4 test" in (tmp_path / "run" / "log.txt").read_text()


def test_a_network_that_does_not_fit_and_the_same_scan_twice_are_refused(pictures, tmp_path):
    with pytest.raises(ConfigError, match="the data are for classification, the model for segmentation"):
        deal_cases(classification(pictures, model=ps.UNet(filters=(2, 4, 4))))
    with pytest.raises(ConfigError, match="has 3 sides for 2D data"):
        deal_cases(classification(pictures, train=ps.Train(patch=(16, 16, 16))))
    a, b = (tmp_path / "pictures" / site / "ulcer" for site in "AB")
    (b / "more.png").write_bytes((a / "ulcer3.png").read_bytes())
    with pytest.raises(DataError, match="case 'more' of site 'B' is the same scan as case 'ulcer3' of site 'A'"):
        build_sites(classification(ps.Files(path=pictures.path)))


@pytest.mark.parametrize("algorithm", [ps.Local(), ps.Clustered(), ps.Weighted({}, ps.Clustered())])
def test_an_algorithm_without_a_model_for_strangers_is_refused_where_they_judge(algorithm):
    name = type(algorithm).__name__.lower()
    for chosen in (LeaveOut("west"), Iid(2)):
        with pytest.raises(ConfigError, match=rf"{name} has no model for '(west|east)', which does not train"):
            simulator(replace(SMALL, algorithm=algorithm, federation=chosen))


def test_a_site_may_be_called_anything(tmp_path, capsys):
    sites = {"../[/b]": ps.Hospital(cases=3), "Zürich (a/b)": ps.Hospital(cases=3, scanner=1)}
    run = ps.train(replace(SMALL, algorithm=ps.Local(), data=replace(SMALL.data, sites=sites)), tmp_path / "run")
    assert len(list((tmp_path / "run" / "models").iterdir())) == 4 and set(run.dice()) == set(sites)
    found = methods([read(tmp_path / "run")])
    tables.show(found)
    assert "../[/b]" in capsys.readouterr().out
    assert "Zürich (a/b)" in build("any", found) and set(found[0].matrix()) == set(sites)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_a_federation_of_steps_trains_and_is_evaluated_again(tmp_path):
    """Two equal synthetic sites, each without another modality: paper D's clients."""
    study = replace(SMALL, federation=Steps((Iid(2, parts="all"), HideModalities(1))), run=ps.Plan(rounds=1))
    run = ps.train(study, tmp_path / "run")
    assert set(run.folder.records()[0].sites) == set(run.dice()) == {"iid-1", "iid-2"}
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "iid-1: 4 train, 2 validation, 2 test; hidden in all of them: t1\n" in log
    assert "iid-2: 5 train, 1 validation, 1 test; hidden in all of them: t1ce\n" in log
    assert (ps.evaluate(tmp_path / "run", split="validation") / "cases.csv").is_file()
    mixed = replace(study, federation=Steps((HideModalities(1), Iid(2, parts="all"))))
    assert any("; hidden in some of them: t1" in line for line in _described(mixed, deal_cases(mixed)))


def test_all_patches_of_one_case_train_a_batch_normalised_network(pictures):
    """A last batch of one case must not be too small for the statistics of the batch."""
    study = classification(pictures, train=ps.Train(patch=(16, 16), batch=7, device="cpu"))
    site = simulator(study).known["A"]
    assert site.fit(site.start).steps == 2
