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
from polysite.audit.inversion import Inverter, invert_patients, invert_reply, mean_scan, middle, under_noise
from polysite.audit.models import audit_run, is_run, member_scores
from polysite.audit.replay import replay
from polysite.errors import RunError
from polysite.metrics.membership import area
from polysite.privacy import Private
from polysite.site import Budget
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
    inverter = Inverter(studies.build_module(chosen), sites["a"].loss, torch.device("cpu"), 100)
    inverter.at(sites["a"].start)
    return sites, inverter, sites["a"].start


def test_the_image_of_one_patient_is_rebuilt_from_its_gradient_and_not_under_noise(wide):
    sites, inverter, start = wide
    given = inverter, sites, mean_scan(sites, [8, 8, 8])
    alone, together = (invert_patients(*given, protection, patients=1) for protection in ("none", "sum"))
    noisy = invert_patients(*given, "noise", Private("patient", clip=1.0, noise=1.0), patients=1)
    one, several, hidden = (found[0].error / found[0].usual for found in (alone, together, noisy))
    assert one < 0.9 and hidden > 0.97, (one, hidden)
    assert one + 0.02 < several <= 1, several
    reply = {**start, **{k: start[k] - 0.1 * g for k, g in _step(sites["a"], inverter).items()}}
    stepped = invert_reply(inverter, [sites["a"]], start, reply, given[2], patients=1)
    assert stepped[0].error / stepped[0].usual < 0.9  # a reply of one step on one patient
    assert alone[0].rebuilt.shape == alone[0].original.shape == (4, 8, 8, 8)


def _step(site, inverter):
    x, y = (middle(t.float(), [8, 8, 8])[None] for t in site.volume(site.cases("train")[0]))
    return dict(zip(inverter.weights, inverter.gradient(x, y), strict=True))


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
    return replay(folder, chosen, sites)


def test_the_last_rounds_are_replayed_to_the_bit(run):
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    found = replayed(run)
    assert found.difference == 0 and found.rounds == 3 and sorted(found.replied) == ["a", "b", "c"]
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before


def test_replies_under_masks_are_replayed_without(tmp_path):
    folder = trained(tmp_path / "run", {"run.secure.use": "on"})
    done = audit_run(folder.path, tmp_path / "audit", iterations=0)
    single, total = done.findings[0].rows[:2]
    assert single.words.startswith("nobody: secure sums") and total.words.startswith(
        "the coordinator and every hospital"
    )
    assert "single replies" not in done.findings[0].answer
    shown = (done.folder / "index.html").read_text()
    assert "the sum over the hospitals" in shown and "their losses are those of the run" in shown


def test_a_run_with_noise_says_its_epsilon(tmp_path):
    folder = trained(tmp_path / "run", {"train.private.unit": "patient"})
    shown = (audit_run(folder.path, tmp_path / "audit", iterations=0).folder / "index.html").read_text()
    spent = [s.epsilon for s in folder.records()[-1].sites.values()]
    assert "every training patient" in shown and all(f"{e:.2f}" in shown and 0 < e < 1000 for e in spent)


def test_an_overfitted_reply_gives_its_patients_away_and_an_untrained_network_nobody():
    chosen = config.parse(STUDY, {"train.lr": "0.02", "model.filters": "[8, 16, 16]", "train.patch": "[16, 16, 16]"})
    sites = studies.build_sites(chosen)
    models = {name: site.at(0).fit(site.start, budget=Budget(epochs=25)).params for name, site in sites.items()}
    patients = {n: n for site in sites.values() for k in ("train", "test") for n in site.cases(k)}
    others = {i: [m for j, m in models.items() if j != i] for i in models}
    found = area(list(member_scores(sites, models, others, patients).values()))
    assert found.succeeds and found.value > 0.8
    start = dict.fromkeys(models, sites["a"].start)
    assert not area(list(member_scores(sites, start, {}, patients).values())).succeeds
    one = dict.fromkeys(patients, "the same patient")
    found = area(list(member_scores(sites, start, {}, one).values()))
    assert found.members == len(sites)  # a patient counts once, however many scans


def test_the_folder_has_every_number_and_a_page_that_says_who_learns_what(run, tmp_path):
    done = audit_run(run.path, tmp_path / "audit", iterations=3)
    members, images = json.loads((done.folder / "audit.json").read_text())["findings"]
    assert [r["name"] for r in members["rows"]] == [
        "single replies", "mean of the replies", "untrained network", "reply of a", "reply of b", "reply of c",
    ]  # fmt: skip
    assert [r["name"] for r in images["rows"]] == ["one patient", "one patient, sum", "one patient, noise", "reply"]
    assert all(0 < r["estimate"]["value"] <= 1 for r in images["rows"])
    shown = (done.folder / "index.html").read_text()
    for words in (
        "who had it",
        "What a hospital's policy prevents".replace("'", "&#39;"),
        "their losses are those of the run",
    ):
        assert words in shown
    assert (done.folder / "figures" / "rebuilt.png").exists() and (done.folder / "figures" / "members.svg").exists()
    assert not (run.path / "audit.json").exists()
    for width in (390, 1280):
        narrow = "return document.documentElement.scrollWidth <= innerWidth"
        seen = browse(done.folder / "index.html", narrow, width=width)
        assert seen.result and not seen.errors, seen
    with pytest.raises(RunError, match="exists already"):
        audit_run(run.path, tmp_path / "audit", iterations=3)


def test_the_command_attacks_a_run_folder_and_shows_no_scan_if_asked(run, tmp_path, monkeypatch, capsys):
    words = ["audit", run.path, "--iterations", "2", "--no-scans", "--out", tmp_path / "audit"]
    monkeypatch.setattr(sys, "argv", ["polysite", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert "single replies" in printed and "Are images rebuilt?" in printed and "not a proof of privacy" in printed
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
