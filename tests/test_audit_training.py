"""The audit of training: attacks that work where something leaks and fail where nothing does, on what really left."""

import json
import sys

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from browser import browse
from polysite import cli, config
from polysite import study as studies
from polysite.audit.training import audit_run, is_run
from polysite.engines.replay import replay
from polysite.errors import RunError
from polysite.metrics.membership import area
from polysite.privacy import Private
from polysite.report import audit_page as page
from polysite.report.audit_page import Attacked, AttackedModels, Protections
from polysite.site import Budget
from polysite.training.inversion import Effort, Inverter, middle, under_noise
from polysite.training.leaks import Membership, invert_patients, mean_scan, member_scores, membership_of
from studies import text

TRAIN = 'batch = 2\nlr = 0.01\noptimiser = "adam"\naugment = "none"'
RUN = "rounds = 3\ncheckpoint_every = 2\n[split]\nvalidation = 0.1\ntest = 0.45\n"
STUDY = text(dict.fromkeys("abc", 8), TRAIN, RUN, patch=8, model="unet_small")


def trained(folder, changes=None, study=STUDY):
    return studies.train(config.parse(study, changes or {}), folder, evaluate=False).folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("audit") / "run")


def test_the_area_is_that_of_scikit_learn_within_one_hospital_and_a_mean_over_pairs_between_several():
    rng = np.random.default_rng(0)
    groups = [
        (rng.normal(0.8, 1, 9).round(1), rng.normal(0, 1, 7).round(1)),
        (rng.normal(0, 1, 4), rng.normal(0, 1, 5)),
    ]
    each = [roc_auc_score([1] * len(m) + [0] * len(o), [*m, *o]) for m, o in groups]
    assert [area([g]).value for g in groups] == pytest.approx(each)
    assert area(groups).value == pytest.approx((63 * each[0] + 20 * each[1]) / 83)


def test_the_interval_covers_the_true_area_and_has_a_width_where_all_are_told_apart():
    rng, hits = np.random.default_rng(1), 0
    for _ in range(400):
        found = area([(rng.normal(1, 1, 10), rng.normal(0, 1, 8)), (rng.normal(1, 1, 6), rng.normal(0, 1, 9))])
        hits += found.low <= 0.7602 <= found.high  # Phi(1 / sqrt(2))
    assert 0.92 <= hits / 400 <= 0.99
    perfect = area([(np.array([3.0, 4.0, 5.0]), np.array([0.0, 1.0, 2.0]))])
    assert perfect.value == perfect.high == 1 and perfect.low < 0.75


@pytest.fixture(scope="module")
def wide():
    """A network with many weights for few voxels, and hospitals of phantoms."""
    chosen = config.parse(STUDY, {"model.filters": "[16, 32, 64]"})
    sites = studies.build_sites(chosen)
    inverter = Inverter(studies.build_module(chosen), sites["a"].loss, torch.device("cpu"))
    return sites, inverter, sites["a"].start


def test_the_image_of_one_patient_is_rebuilt_from_its_gradient_and_not_under_noise(wide):
    sites, inverter, start = wide
    given = inverter, sites, start, mean_scan(sites, [8, 8, 8]), Effort(iterations=60, rate=0.05, patients=1)
    alone, together = invert_patients(*given), invert_patients(*given, "sum")
    noisy = invert_patients(*given, "noise", Private("patient", clip=1.0, noise=1.0))
    assert alone.ratio <= alone.plain_ratio < 0.9
    assert noisy.ratio > 0.97, noisy.ratio
    assert alone.ratio + 0.02 < together.ratio <= 1, together.ratio
    assert alone.images["rebuilt"].shape == alone.images["trained on"].shape == (1, 4, 8, 8, 8)


def test_the_gradient_is_that_of_autograd_and_a_change_of_one_step_has_its_direction(wide):
    sites, inverter, start = wide
    inverter.at(start)
    x, y = (middle(t.float(), [8, 8, 8])[None] for t in sites["a"].volume(sites["a"].cases("train")[0]))
    gradient = inverter.gradient(x, y)
    stepped = {**start, **{k: start[k] - 0.1 * g for k, g in zip(inverter.weights, gradient, strict=True)}}
    for g, change in zip(gradient, inverter.change(start, stepped), strict=True):
        torch.testing.assert_close(change, 0.1 * g, atol=1e-6, rtol=1e-3)
    inverter.module.zero_grad()
    inverter.loss(inverter.module(x), y).mean().backward()
    for weight, g in zip(inverter.weights.values(), gradient, strict=True):
        torch.testing.assert_close(torch.zeros_like(g) if weight.grad is None else weight.grad, g, atol=1e-5, rtol=1e-3)


def test_noise_on_a_gradient_has_the_promised_size_after_it_was_shortened():
    gradient = [torch.full((20_000,), 3.0)]
    found = under_noise(gradient, Private("patient", clip=2.0, noise=0.5), np.random.default_rng(0))[0]
    assert float(found.std()) == pytest.approx(1.0, rel=0.03)
    assert float(found.mean()) == pytest.approx(2.0 / 20_000**0.5, abs=0.03)


def replayed(folder):
    chosen = config.parse(folder.config)
    sites = studies.build_sites(chosen)
    return replay(folder, studies.build_phases(chosen, sites), sites["a"].start, 0)


def test_the_last_rounds_are_replayed_to_the_bit(run):
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    found = replayed(run)
    assert found.difference == 0 and found.last.index == 2 and sorted(found.last.replies) == ["a", "b", "c"]
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before


def test_replies_under_masks_are_replayed_without(tmp_path):
    folder = trained(tmp_path / "run", {"run.secure.use": "on"})
    done = audit_run(folder.path, tmp_path / "audit", images=False)
    single, total = done.found.surface("single replies"), done.found.surface("sum")
    assert not single.seen and total.seen and done.found.protections.secure
    assert "masked = true was met" in " ".join(page.prevented(done.found))
    assert done.found.replayed.count("those of the run") == 1


def test_a_run_with_noise_says_its_epsilon(tmp_path):
    folder = trained(tmp_path / "run", {"train.private.unit": "patient"})
    found = audit_run(folder.path, tmp_path / "audit", images=False).found
    spent = {i: s.epsilon for i, s in folder.records()[-1].sites.items()}
    assert found.protections.epsilon == spent and found.protections.unit == "patient"
    assert "epsilon" in found.summary and all(0 < e < 1000 for e in spent.values())


def test_an_overfitted_reply_gives_its_patients_away_and_an_untrained_network_nobody():
    chosen = config.parse(STUDY, {"train.lr": "0.02", "model.filters": "[8, 16, 16]", "train.patch": "[16, 16, 16]"})
    sites = studies.build_sites(chosen)
    models = {name: site.at(0).fit(site.start, budget=Budget(epochs=25)).params for name, site in sites.items()}
    patients = {n: n for site in sites.values() for k in ("train", "test") for n in site.cases(k)}
    others = {i: [m for j, m in models.items() if j != i] for i in models}
    found = membership_of(*member_scores(sites, models, others, patients))
    assert found.calibrated.succeeds and found.calibrated.value > 0.8
    start = dict.fromkeys(models, sites["a"].start)
    assert not membership_of(*member_scores(sites, start, {}, patients)).loss.succeeds
    one = dict.fromkeys(patients, "the same patient")
    found = membership_of(*member_scores(sites, start, {}, one))
    assert found.loss.members == len(sites)  # a patient counts once, however many scans


def test_the_folder_has_every_number_and_a_page_that_says_who_learns_what(run, tmp_path):
    effort = Effort(iterations=3, patients=2)
    done = audit_run(run.path, tmp_path / "audit", effort=effort)
    numbers = json.loads((done.folder / "audit.json").read_text())
    assert [s["name"] for s in numbers["membership"]] == ["single replies", "sum", "released model"]
    assert [(i["name"], i["seen"]) for i in numbers["inversion"]] == [
        ("one patient", False), ("one patient, sum", False), ("one patient, noise", False), ("reply", True),
        ("sum", True),
    ]  # fmt: skip
    assert all(0 < i["ratio"] <= 1 for i in numbers["inversion"])
    shown = (done.folder / "index.html").read_text()
    for words in ("who had it", "What a policy would have prevented", "all their losses are those of the run"):
        assert words in shown
    assert (done.folder / "figures" / "rebuilt.png").exists() and (done.folder / "figures" / "membership.svg").exists()
    assert not (run.path / "audit.json").exists()
    for width in (390, 1280):
        narrow = "return document.documentElement.scrollWidth <= innerWidth"
        seen = browse(done.folder / "index.html", narrow, width=width)
        assert seen.result and not seen.errors, seen
    with pytest.raises(RunError, match="exists already"):
        audit_run(run.path, tmp_path / "audit", effort=effort)


def test_the_command_attacks_a_run_folder_and_shows_no_scan_if_asked(run, tmp_path, monkeypatch, capsys):
    words = ["audit", run.path, "--iterations", "2", "--no-scans", "--out", tmp_path / "audit"]
    monkeypatch.setattr(sys, "argv", ["polysite", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert "single replies" in printed and "masked = true would have refused this run" in printed
    assert not (tmp_path / "audit" / "figures" / "rebuilt.png").exists()


def test_runs_that_cannot_be_attacked_are_refused_in_one_sentence(run, tmp_path):
    assert is_run(run.path) and not is_run(tmp_path) and not is_run(None)
    pooled, alone = (trained(tmp_path / k, {k: v}) for k, v in (("run.pooled", "true"), ("algorithm", "local")))
    for folder, said in (
        (tmp_path, "not a run folder"),
        (pooled.path, "centralised training"),
        (alone.path, "no model left the sites"),
    ):
        with pytest.raises(RunError, match=said):
            audit_run(folder, tmp_path / "audit")


def attacked(single, total, **about):
    """Findings with these losses' areas."""
    one, every = (Membership(area([(np.array(v), np.zeros(4))])) for v in (single, total))
    surfaces = Attacked("single replies", "", True, one), Attacked("sum", "", True, every)
    settings = {"secure": False, "unit": "", "epsilon": {}, "delta": 1e-5, "patients": {"a": 9, "b": 3}}
    return AttackedModels(surfaces, every, (), Protections(**{**settings, "summable": True, **about}), "")


def test_the_page_says_what_a_policy_would_have_prevented():
    said = " ".join(page.prevented(attacked([1.0] * 9, [1.0, -1.0] * 4)))
    assert "would have had the sum alone: AUC 0.50" in said and "instead of 1.00" in said
    assert "fewest = 5 would have kept b out" in said and "epsilon = 8" in said
    private = attacked([0.0] * 9, [0.0] * 9, unit="patient", epsilon={"a": 3.0, "b": 7.25}, summable=False)
    said = " ".join(page.prevented(private))
    assert "its algorithm needs the reply of each hospital" in said
    assert "epsilon = 7.2 or more would have allowed" in said and "epsilon 7.25" in private.summary
