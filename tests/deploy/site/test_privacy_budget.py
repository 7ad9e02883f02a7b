"""The privacy budget of a hospital: kept over studies and restarts, and out of reach of the coordinator."""

import json
import shutil
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest

from consortium import FAST, NAMES, Impatient, Inside, Stop, go, states, wanted, worker, workers
from polysite import assessment, config, study
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.protocol import Trained
from polysite.deploy.site.policy import Intent, SitePolicy
from polysite.deploy.site.privacy_budget import PrivacyBudget, for_patients
from polysite.errors import ConfigError, DataError, Paused, PayloadError, RunError
from polysite.payload import Payload, encode
from polysite.privacy import Private, Release, epsilon
from polysite.report.page import build
from polysite.report.runs import methods, read
from polysite.site import Fit
from polysite.training.torch_site import TorchSite


def noisy(unit="patient", **run):
    private = {"unit": unit, "clip": 1.0, "noise": 2.0}
    return config.vary(wanted("fedavg"), {"train": {"private": private}, "run": run})


USE = Release(2.0, 2 / 5, 3)  # of site a: five training cases, two in a step, one epoch


def test_a_deployed_study_reports_epsilon_and_the_hospital_keeps_account(tmp_path):
    wire = Impatient(workers(tmp_path))
    run = go(tmp_path, noisy(), wire, evaluate=False)
    for record in run.folder.records():
        assert record.sites["a"].epsilon == pytest.approx(epsilon([USE] * (record.round + 1), 1e-5))
        assert record.sites["a"].steps == 3 and record.sites["a"].loss is None
    trained = [got for _, header, _, got, _ in wire.left if header["kind"] == "train"]
    assert len(trained) == 6 and all(set(got["fit_loss"]) == {0.0} for got in trained)  # the loss has no noise
    entries = PrivacyBudget(tmp_path / "sites" / "a").entries()
    assert [e.round for e in entries] == [0, 1] and {e.release for e in entries} == {USE}
    assert (tmp_path / "sites" / "a" / "privacy.jsonl").stat().st_mode & 0o077 == 0
    page = build("run", methods([read(run.folder.path)]))
    assert "<h2" in page and "every training patient" in page and "each reply" in page
    assert "every reply, under noise" in page and "the common model of every round, under noise" in page
    assert f"{record.sites['a'].epsilon:.2f}" in page
    assert "steps, learning rates, noise" in (tmp_path / "sites" / "a" / "ledger.jsonl").read_text()


def test_noise_at_a_hospital_does_not_follow_from_the_seed(tmp_path, trained):
    chosen = noisy("hospital", rounds=1, validate_every=1)
    simulated = trained(chosen)
    again = study.train(chosen, tmp_path / "again", evaluate=False)
    deployed = go(tmp_path, chosen, Inside(workers(tmp_path)), evaluate=False)
    models = [next(iter(states(r.folder.path).values())).model for r in (simulated, again, deployed)]
    one, other, real = ([np.asarray(x).tobytes() for x in m.values()] for m in models)
    assert one == other and one != real


def spent_after(*releases, delta=1e-5):
    return epsilon(releases, delta)


def test_the_budget_is_kept_over_studies_restarts_and_deleted_folders(tmp_path):
    """Room for two rounds and not for three: the third is refused, in whatever study and process it comes."""
    limit = (spent_after(USE, USE) + spent_after(USE, USE, USE)) / 2
    everyone = {i: worker(tmp_path, i, epsilon=limit if i == "a" else 0.0, similar_days=0.0) for i in NAMES}
    go(tmp_path, noisy(rounds=2), Impatient(everyone), evaluate=False)
    shutil.rmtree(tmp_path / "sites" / "a" / "runs")  # a coordinator could ask for that; the account is elsewhere
    again = Impatient({i: worker(tmp_path, i, epsilon=limit if i == "a" else 0.0, similar_days=0.0) for i in NAMES})
    with pytest.raises(Stop):  # the quorum is three
        go(tmp_path, config.vary(noisy(), {"seed": 5}), again, name="second", evaluate=False)
    asked = [(site, got) for site, header, _, got, _ in again.left if header["kind"] == "train"]
    refused = [got.get("refused", "") for site, got in asked if site == "a"]
    assert len(refused) == 1 and "the privacy budget of this hospital is spent: policy.toml says epsilon" in refused[0]
    assert len(PrivacyBudget(tmp_path / "sites" / "a").entries()) == 2
    others = [got for site, got in asked if site == "b"]
    assert others and "refused" not in others[0]


def test_a_request_that_comes_again_with_other_numbers_is_paid_again(tmp_path):
    wire = Impatient(workers(tmp_path))
    go(tmp_path, noisy(rounds=1, validate_every=1), wire, evaluate=False)
    budget = PrivacyBudget(tmp_path / "sites" / "a")
    site, header, body, _, _ = next(x for x in wire.left if x[0] == "a" and x[1]["kind"] == "train")
    assert len(budget.entries()) == 1
    fresh = worker(tmp_path, site)
    one, other = fresh.answer(header, body), fresh.answer(header, body)
    assert bytes(one[1]) == bytes(other[1]) and len(budget.entries()) == 2  # the same reply again costs nothing


def test_a_damaged_account_stops_training(tmp_path):
    wire = Impatient(workers(tmp_path, epsilon=100.0))
    (tmp_path / "sites" / "a" / "privacy.jsonl").write_text('{"study": "x"}\n')
    with pytest.raises(Stop):
        go(tmp_path, noisy(rounds=1, validate_every=1), wire, evaluate=False)
    got = next(x[3] for x in wire.left if x[0] == "a" and x[1]["kind"] == "train")
    assert "its data or its disk are not in order" in got["error"]
    with pytest.raises(DataError, match="restore it from a backup"):
        PrivacyBudget(tmp_path / "sites" / "a").entries()


def test_with_a_budget_only_noise_leaves(tmp_path):
    with pytest.raises(RunError, match=r"replies leave here only under differential privacy.*epsilon = 8"):
        go(tmp_path, wanted("fedavg"), Inside(workers(tmp_path, epsilon=8.0)))
    intent = Intent("assess", cases=100)
    policy, now = SitePolicy(epsilon=8.0), datetime.now()
    assert "epsilon = 8, and this assessment has no noise (assess.private)" in policy.refuse(intent, now)
    assert policy.refuse(replace(intent, noisy=True), now) is None
    for wrong in ({"epsilon": -1.0}, {"delta": 0.5}):
        with pytest.raises(ConfigError, match="must"):
            SitePolicy(**wrong)


def test_noise_for_a_hospital_counts_half_for_a_patient(tmp_path):
    assert for_patients(Private("hospital"), [Release(2.0)]) == [Release(1.0)]
    assert for_patients(Private("patient"), [USE]) == [USE]
    go(tmp_path, noisy("hospital", rounds=1, validate_every=1), Inside(workers(tmp_path)), evaluate=False)
    (only,) = PrivacyBudget(tmp_path / "sites" / "b").entries()
    assert only.release == Release(1.0)


def test_the_coordinator_checks_what_sites_say_about_noise():
    header = Trained((Fit({}, 1.0, 3, 0.3, 0.3),), releases=(USE,)).header()
    assert Trained.parse(json.loads(json.dumps(header))).releases == (USE,)
    for wrong in ({"release_noise": [0.0]}, {"release_rate": []}, {"release_steps": ["x"]}, {"release_delta": 3}):
        with pytest.raises(PayloadError):
            Trained.parse({**header, **wrong})


def test_a_study_resumes_with_what_it_has_spent(tmp_path):
    wire = Inside(workers(tmp_path))
    with pytest.raises(Paused):
        go(tmp_path, noisy(rounds=3, validate_every=3), wire, until=2, evaluate=False)
    run = coordinator.resume(tmp_path / "deployed", wire, deadlines=FAST, evaluate=False, paused=True)
    assert run.folder.records()[-1].sites["a"].epsilon == pytest.approx(epsilon([USE] * 3, 1e-5))


def test_a_study_under_noise_has_no_assessment_without_whatever_the_policy_allows(tmp_path):
    """Its statistics would be outside of the epsilon that the study reports."""
    wire = Impatient(workers(tmp_path))
    run = coordinator.run(noisy(rounds=1, validate_every=1), wire, NAMES, tmp_path / "run", deadlines=FAST,
                          evaluate=False)  # fmt: skip
    assert not (run.folder.path / "assessment").exists()
    assert "not be covered by the epsilon of this study" in str(run.folder.records()[0].incidents)
    _, header, body, _, _ = next(x for x in wire.left if x[1]["kind"] == "train")
    got, out = wire.workers["a"].answer({**header, "kind": "assess"}, body)
    assert "an assessment without noise (assess.private) does not leave" in got["refused"] and not out
    greeted = next(got for _, header, _, got, _ in wire.left if header["kind"] == "hello")
    assert greeted["may_assess"] is False


def assessed(target=2.0, **more):
    """A study under noise with an assessment under noise."""
    private = {"epsilon": target, "intensity": [0.0, 2000.0], "volume": [0.0, 50.0]}
    return config.vary(noisy(rounds=1, validate_every=1), {"assess": {"private": private, "projections": 0}, **more})


def take(tmp_path, chosen, wire, name="run"):
    return coordinator.run(chosen, wire, NAMES, tmp_path / name, deadlines=FAST, evaluate=False)


@pytest.mark.page
@pytest.mark.parametrize("secure", ["off", "on"])
def test_assessment_and_training_share_the_budget_and_the_epsilon_of_the_study(tmp_path, secure):
    chosen = assessed(run={"secure": {"use": secure}})
    run = take(tmp_path, chosen, Impatient(workers(tmp_path, epsilon=50.0)))
    share = chosen.assess.release
    entries = PrivacyBudget(tmp_path / "sites" / "a").entries()
    assert [e.release for e in entries] == [share, USE] and epsilon([share], 1e-5) <= 2
    (record,) = run.folder.records()
    assert record.sites["a"].epsilon == pytest.approx(epsilon([share, USE], 1e-5))
    known = json.loads((run.folder.path / "assessment" / "assessment.json").read_text())
    assert known["noise"]["epsilon"] == 2 and set(known["distances"]) == {"shift"}
    assert known["distances"]["shift"]["error"][0][1] > 0
    page = (run.folder.path / "assessment" / "index.html").read_text()
    assert "error by noise" in page and "ε = 2" in page
    assert "under noise for epsilon = 2" in build("run", methods([read(run.folder.path)]))


def test_noise_on_the_assessment_does_not_follow_from_the_seed(tmp_path):
    means = []
    for name in ("one", "two"):
        run = take(tmp_path / name, assessed(), Inside(workers(tmp_path / name)), name)
        known = json.loads((run.folder.path / "assessment" / "assessment.json").read_text())
        means.append(known["quantities"]["intensity t1"]["values"])
    assert means[0] != means[1]


def test_an_assessment_that_the_budget_does_not_reach_is_refused_before_a_case_is_opened(tmp_path, monkeypatch):
    everyone = {i: worker(tmp_path, i, epsilon=1.0 if i == "a" else 0.0) for i in NAMES}
    wire, opened = Impatient(everyone), []
    monkeypatch.setattr(assessment, "assessed_sites", lambda *_, **__: opened.append(1))
    hello = {**_hello(tmp_path, assessed()), "kind": "hello"}
    assert "refused" not in wire.workers["a"].answer(hello, b"")[0]
    got, out = wire.workers["a"].answer({**hello, "kind": "assess", "round": 0, "phase": 0}, bytes(encode(Payload())))
    assert "the privacy budget of this hospital is spent" in got["refused"] and not out and not opened
    assert not PrivacyBudget(tmp_path / "sites" / "a").entries()


def _hello(tmp_path, chosen):
    """The greeting that a coordinator sends for a study."""
    wire = Deaf(workers(tmp_path / "elsewhere"))
    with pytest.raises(Stop):
        take(tmp_path / "elsewhere", chosen, wire)
    return wire.seen


class Deaf(Inside):
    """Keeps the first greeting and ends."""

    def answer(self, site, header, body):
        self.seen = dict(header)
        raise Stop


RADIOMICS = {"firstorder_Entropy": [0.0, 8.0], "glcm_Contrast": [0.0, 400.0]}


def clustered(secure):
    """Two clusters of patients by radiomics, fitted and tuned under noise, after a round of FedAvg under noise."""
    noisy_fit = {"epsilon": 20.0, "features": RADIOMICS, "modalities": 4, "exchanges": 2}
    cfft = {"name": "cfft", "components": 2, "rounds": 1, "together": True, "noisy": noisy_fit}
    private = {"unit": "patient", "clip": 1.0, "noise": 2.0}
    return config.vary(config.parse(config.dump(wanted("cfft"))), {
        "train": {"private": private}, "run": {"secure": {"use": secure}},
        "then": [{"algorithm": cfft, "run": {"rounds": 10}}]})  # fmt: skip


@pytest.mark.parametrize("secure", ["off", "on"])
def test_radiomics_and_training_share_the_budget(tmp_path, secure, caplog):
    """Every exchange of the fit is one release, and a round of tuning as much as one fit, whatever the clusters."""
    chosen = clustered(secure)
    fit = config.phases(chosen)[1].algorithm.noisy.release
    run = go(tmp_path, chosen, Inside(workers(tmp_path, epsilon=1000.0)), evaluate=False)
    before = chosen.run.rounds
    entries = [e.release for e in PrivacyBudget(tmp_path / "sites" / "a").entries()]
    assert entries == [*[USE] * before, fit, fit, USE] and epsilon([fit, fit], 1e-5) <= 20
    last = run.folder.records()[-1].sites["a"].epsilon
    assert last == pytest.approx(epsilon(entries, 1e-5))
    state = list(states(run.folder.path).values())[-1]
    assert len(state.mixture["weights"]) == 2 and set(state.models) == {"0", "1"}
    assert "clusters were fitted under noise for epsilon = 20: about" in caplog.text


class Bored(Inside):
    """Ends when it has waited after a refusal."""

    def __init__(self, workers):
        super().__init__(workers)
        self.refused = []

    def answer(self, site, header, body):
        got, out = super().answer(site, header, body)
        self.refused += [got["refused"]] if "refused" in got else []
        return got, out

    def wait(self, seconds):
        if self.refused:
            raise Stop


def test_sums_of_radiomics_that_the_budget_does_not_reach_are_refused_before_they_are_computed(tmp_path, monkeypatch):
    chosen = clustered("off")
    fit = config.phases(chosen)[1].algorithm.noisy.release
    limit = epsilon([*[USE] * chosen.run.rounds, fit], 1e-5) * 1.001  # the second exchange is one too many
    seen, plain = [], TorchSite.radiomics
    monkeypatch.setattr(TorchSite, "radiomics", lambda site, *a: seen.append(site.name) or plain(site, *a))
    everyone = {i: worker(tmp_path, i, epsilon=limit if i == "a" else 0.0) for i in NAMES}
    wire = Bored(everyone)
    with pytest.raises(Stop):  # the quorum is three
        go(tmp_path, chosen, wire, evaluate=False)
    assert seen.count("a") == 1 < seen.count("b")
    assert wire.refused and all("the privacy budget of this hospital is spent" in text for text in wire.refused)
    assert len(PrivacyBudget(tmp_path / "sites" / "a").entries()) == chosen.run.rounds + 1
