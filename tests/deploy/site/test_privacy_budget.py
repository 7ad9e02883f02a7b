"""The privacy budget of a hospital: kept over studies and restarts, and out of reach of the coordinator."""

import json
import shutil
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest

from consortium import FAST, NAMES, Impatient, Inside, Stop, ask, go, states, wanted, worker, workers
from polysite import assessment, config, study
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.protocol import Subject, effort_header, parse_response
from polysite.deploy.site.policy import Intent, SitePolicy
from polysite.deploy.site.privacy_budget import PrivacyBudget, for_patients
from polysite.engines.messages import Failed, Train, Trained
from polysite.errors import DataError, Paused, RunError
from polysite.heterogeneity.bounds import PrivateSums
from polysite.payload import Payload, encode
from polysite.privacy import Private, Release, epsilon
from polysite.report.page import build
from polysite.report.runs import methods, read
from polysite.site import Fit
from polysite.training.torch_site import TorchSite

USE = Release(2.0, 2 / 5, 3)  # of site a: five training cases, two in a step, one epoch
ONCE = {"rounds": 1, "validate_every": 1}
SPENT = "the privacy budget of this hospital is spent"


def noisy(unit="patient", **run):
    private = {"unit": unit, "clip": 1.0, "noise": 2.0}
    return config.vary(wanted("fedavg"), {"train": {"private": private}, "run": run})


def spent(tmp_path, site="a"):
    return PrivacyBudget(tmp_path / "sites" / site).entries()


def bounded(tmp_path, limit, **policy):
    """Workers of which that of site a has a budget."""
    return {i: worker(tmp_path, i, epsilon=limit if i == "a" else 0.0, **policy) for i in NAMES}


def first(wire, kind, site="a"):
    """Header and body of a question, and the answer to it."""
    return next((header, body, got) for i, header, body, got, _ in wire.left if (i, header["kind"]) == (site, kind))


def test_a_deployed_study_reports_epsilon_and_the_hospital_keeps_account_also_after_a_pause(tmp_path):
    wire = Impatient(workers(tmp_path))
    with pytest.raises(Paused):
        go(tmp_path, noisy(), wire, until=1, evaluate=False)
    run = coordinator.resume(tmp_path / "deployed", wire, deadlines=FAST, evaluate=False, paused=True)
    for record in run.folder.records():
        assert record.sites["a"].epsilon == pytest.approx(epsilon([USE] * (record.round + 1), 1e-5))
        assert record.sites["a"].steps == 3 and record.sites["a"].loss is None
    trained = [got for _, header, _, got, _ in wire.left if header["kind"] == "train"]
    assert len(trained) == 6 and all(set(got["fit_loss"]) == {0.0} for got in trained)  # the loss has no noise
    assert [(e.round, e.release) for e in spent(tmp_path)] == [(0, USE), (1, USE)]
    assert (tmp_path / "sites" / "a" / "privacy.jsonl").stat().st_mode & 0o077 == 0
    page = build("run", methods([read(run.folder.path)]))
    assert "every training patient" in page and "each reply" in page and f"{record.sites['a'].epsilon:.2f}" in page
    assert "every reply, under noise" in page and "the common model of every round, under noise" in page
    assert "steps, learning rates, noise" in (tmp_path / "sites" / "a" / "ledger.jsonl").read_text()


def test_noise_at_a_hospital_does_not_follow_from_the_seed(tmp_path, trained):
    chosen = noisy("hospital", **ONCE)
    again = study.train(chosen, tmp_path / "again", evaluate=False)
    deployed = go(tmp_path, chosen, Inside(workers(tmp_path)), evaluate=False)
    models = [next(iter(states(r.folder.path).values())).model for r in (trained(chosen), again, deployed)]
    one, other, real = ([np.asarray(x).tobytes() for x in m.values()] for m in models)
    assert one == other and one != real


def test_the_budget_is_kept_over_studies_restarts_and_deleted_folders(tmp_path):
    """Room for two rounds and not for three: the third is refused, in whatever study and process it comes."""
    limit = (epsilon([USE] * 2, 1e-5) + epsilon([USE] * 3, 1e-5)) / 2
    go(tmp_path, noisy(rounds=2), Impatient(bounded(tmp_path, limit, similar_days=0.0)), evaluate=False)
    shutil.rmtree(tmp_path / "sites" / "a" / "runs")  # a coordinator could ask for that; the account is elsewhere
    again = Impatient(bounded(tmp_path, limit, similar_days=0.0))
    with pytest.raises(Stop):  # the quorum is three
        go(tmp_path, config.vary(noisy(), {"seed": 5}), again, "second", evaluate=False)
    assert f"{SPENT}: policy.toml says epsilon" in first(again, "train")[2]["refused"]
    assert len(spent(tmp_path)) == 2 and "refused" not in first(again, "train", "b")[2]


def test_a_request_that_comes_again_with_other_numbers_is_paid_again(tmp_path):
    wire = Impatient(workers(tmp_path))
    go(tmp_path, noisy(**ONCE), wire, evaluate=False)
    header, body, _ = first(wire, "train")
    assert len(spent(tmp_path)) == 1
    fresh = worker(tmp_path, "a")
    one, other = fresh.answer(header, body), fresh.answer(header, body)
    assert bytes(one[1]) == bytes(other[1]) and len(spent(tmp_path)) == 2  # the same reply again costs nothing


def test_a_damaged_account_stops_training(tmp_path):
    wire = Impatient(workers(tmp_path, epsilon=100.0))
    (tmp_path / "sites" / "a" / "privacy.jsonl").write_text('{"study": "x"}\n')
    with pytest.raises(Stop):
        go(tmp_path, noisy(**ONCE), wire, evaluate=False)
    assert "its data or its disk are not in order" in first(wire, "train")[2]["error"]
    with pytest.raises(DataError, match="restore it from a backup"):
        spent(tmp_path)


def test_with_a_budget_only_noise_leaves(tmp_path):
    with pytest.raises(RunError, match=r"replies leave here only under differential privacy.*epsilon = 8"):
        go(tmp_path, wanted("fedavg"), Inside(workers(tmp_path, epsilon=8.0)))
    intent, policy, now = Intent("assess", cases=100), SitePolicy(epsilon=8.0), datetime.now()
    assert "epsilon = 8, and this assessment has no noise (assess.private)" in policy.refuse(intent, now)
    assert policy.refuse(replace(intent, noise=PrivateSums(9.0)), now) is None


def test_noise_for_a_hospital_counts_half_for_a_patient(tmp_path):
    assert for_patients(Private("hospital"), [Release(2.0)]) == [Release(1.0)]
    assert for_patients(Private("patient"), [USE]) == [USE]
    go(tmp_path, noisy("hospital", **ONCE), Inside(workers(tmp_path)), evaluate=False)
    assert [e.release for e in spent(tmp_path, "b")] == [Release(1.0)]


def test_the_coordinator_checks_what_sites_say_about_noise():
    header = effort_header(Trained(fits=(Fit({}, 1.0, 3, 0.3, 0.3),), releases=(USE,)))

    def parsed(**wrong):
        text = json.dumps({**header, **wrong})
        return parse_response(Train(), json.loads(text), lambda: encode(Payload()), {}, Subject())

    assert parsed().releases == (USE,)
    for wrong in ({"release_noise": [0.0]}, {"release_rate": []}, {"release_steps": ["x"]}, {"release_delta": 3}):
        assert isinstance(parsed(**wrong), Failed)


def test_a_study_under_noise_has_no_assessment_without_whatever_the_policy_allows(tmp_path):
    """Its statistics would be outside of the epsilon that the study reports."""
    wire = Impatient(workers(tmp_path))
    run = go(tmp_path, noisy(**ONCE), wire, assess=True, evaluate=False)
    assert not (run.folder.path / "assessment").exists()
    assert "or the noise (train.private) of this study" in str(run.folder.records()[0].incidents)
    header, body, _ = first(wire, "train")
    got, out = wire.workers["a"].answer({**header, "kind": "assess"}, body)
    assert "the statistics of an assessment would leave without the masks" in got["refused"] and not out
    assert first(wire, "hello")[2]["may_assess"] is False


def assessed(**more):
    """A study under noise with an assessment under noise."""
    private = {"epsilon": 2.0, "intensity": [0.0, 2000.0], "volume": [0.0, 50.0]}
    return config.vary(noisy(**ONCE), {"assess": {"private": private, "projections": 0}, **more})


@pytest.mark.page
@pytest.mark.parametrize("secure", ["off", "on"])
def test_assessment_and_training_share_the_budget_and_the_epsilon_of_the_study(tmp_path, secure):
    chosen = assessed(run={"secure": {"use": secure}})
    run = go(tmp_path, chosen, Impatient(workers(tmp_path, epsilon=50.0)), assess=True, evaluate=False)
    share = chosen.assess.release
    assert [e.release for e in spent(tmp_path)] == [share, USE] and epsilon([share], 1e-5) <= 2
    (record,) = run.folder.records()
    assert record.sites["a"].epsilon == pytest.approx(epsilon([share, USE], 1e-5))
    known = json.loads((run.folder.path / "assessment" / "assessment.json").read_text())
    assert known["noise"]["epsilon"] == 2 and set(known["distances"]) == {"shift"}
    assert known["distances"]["shift"]["error"][0][1] > 0
    page = (run.folder.path / "assessment" / "index.html").read_text()
    assert "standard error by noise" in page and "ε = 2" in page
    assert "under noise for epsilon = 2" in build("run", methods([read(run.folder.path)]))


def test_noise_on_the_assessment_does_not_follow_from_the_seed(tmp_path):
    means = []
    for name in ("one", "two"):
        run = go(tmp_path / name, assessed(), Inside(workers(tmp_path / name)), assess=True, evaluate=False)
        known = json.loads((run.folder.path / "assessment" / "assessment.json").read_text())
        means.append(known["quantities"]["intensity t1"]["values"])
    assert means[0] != means[1]


def test_an_assessment_that_the_budget_does_not_reach_is_refused_before_a_case_is_opened(tmp_path, monkeypatch):
    host, opened = worker(tmp_path, "a", epsilon=1.0), []
    monkeypatch.setattr(assessment, "assessed_sites", lambda *_, **__: opened.append(1))
    assert "refused" not in ask(host, "hello", config=config.dump(assessed()))[0]
    got, out = ask(host, "assess", encode(Payload()))
    assert SPENT in got["refused"] and not out and not opened and not spent(tmp_path)


RADIOMICS = {"firstorder_Entropy": [0.0, 8.0], "glcm_Contrast": [0.0, 400.0]}


def clustered(secure):
    """Two clusters of patients by radiomics, fitted and tuned under noise, after a round of FedAvg under noise."""
    noisy_fit = {"epsilon": 20.0, "features": RADIOMICS, "modalities": 4, "exchanges": 2}
    cfft = {"name": "cfft", "components": 2, "rounds": 1, "together": True, "noisy": noisy_fit}
    private = {"unit": "patient", "clip": 1.0, "noise": 2.0}
    then = [{"algorithm": cfft, "run": {"rounds": 10}}]
    return config.vary(
        wanted("cfft"), {"train": {"private": private}, "run": {"secure": {"use": secure}}, "then": then}
    )


@pytest.mark.parametrize("secure", ["off", "on"])
def test_radiomics_and_training_share_the_budget(tmp_path, secure, caplog):
    """Every exchange of the fit is one release, and a round of tuning as much as one fit, whatever the clusters."""
    chosen = clustered(secure)
    fit = config.phases(chosen)[1].algorithm.noisy.release
    run = go(tmp_path, chosen, Inside(workers(tmp_path, epsilon=1000.0)), evaluate=False)
    entries = [e.release for e in spent(tmp_path)]
    assert entries == [*[USE] * chosen.run.rounds, fit, fit, USE] and epsilon([fit, fit], 1e-5) <= 20
    assert run.folder.records()[-1].sites["a"].epsilon == pytest.approx(epsilon(entries, 1e-5))
    state = list(states(run.folder.path).values())[-1]
    assert len(state.mixture["weights"]) == 2 and set(state.models) == {"0", "1"}
    assert "clusters were fitted under noise for epsilon = 20: about" in caplog.text


def test_sums_of_radiomics_that_the_budget_does_not_reach_are_refused_before_they_are_computed(tmp_path, monkeypatch):
    chosen = clustered("off")
    fit = config.phases(chosen)[1].algorithm.noisy.release
    limit = epsilon([*[USE] * chosen.run.rounds, fit], 1e-5) * 1.001  # the second exchange is one too many
    seen, plain = [], TorchSite.radiomics
    monkeypatch.setattr(TorchSite, "radiomics", lambda site, *a: seen.append(site.name) or plain(site, *a))
    wire = Impatient(bounded(tmp_path, limit))
    with pytest.raises(Stop):  # the quorum is three
        go(tmp_path, chosen, wire, evaluate=False)
    assert seen.count("a") == 1 < seen.count("b")
    refused = [got["refused"] for *_, got, _ in wire.left if "refused" in got]
    assert refused and all(SPENT in text for text in refused)
    assert len(spent(tmp_path)) == chosen.run.rounds + 1
