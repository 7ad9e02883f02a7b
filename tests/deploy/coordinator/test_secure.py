"""Secure sums over sites: the bits of the simulator, drop-outs, restarts, and what a hospital refuses."""

import json
from contextlib import suppress
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest

from consortium import (
    FAST,
    NAMES,
    Impatient,
    Inside,
    Recording,
    Stop,
    equal_states,
    go,
    site_of,
    states,
    wanted,
    worker,
    workers,
)
from polysite import config
from polysite.deploy.certificates import issue, public_line
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.enrolment import fingerprint
from polysite.deploy.site.policy import Intent, SitePolicy
from polysite.deploy.site.worker import Worker
from polysite.engines.run_folder import RunFolder
from polysite.errors import ConfigError, Paused, RunError
from polysite.payload import Payload, decode, encode
from polysite.report.page import build
from polysite.report.runs import methods, read

ON = {"run": {"secure": {"use": "on"}, "guard": {"use": "auto"}}}
FIVE = ("a", "b", "c", "d", "e")
CASES = {"data": {"name": "phantom", "shape": [24, 24, 24], "sites": {i: {"cases": 5} for i in FIVE}}}
AT_ONCE = replace(FAST, quorum=3, grace=0)  # waits for no site that has disconnected


def secured(name="fedavg", **more):
    return config.vary(wanted(name), {"run": {**ON["run"], **more}})


def of_five(**more):
    return config.vary(secured(**more), CASES)


def deployed(tmp_path, chosen, wire, names=NAMES, quorum=3, **more):
    deadlines = replace(FAST, quorum=quorum)
    return coordinator.run(chosen, wire, names, tmp_path / "deployed", deadlines=deadlines, assess=False, **more)


@pytest.mark.parametrize("name", ["fedavg", "fedper", pytest.param("ditto", marks=pytest.mark.soak)])
def test_sites_come_to_the_bits_of_the_simulator_and_the_server_sees_no_reply(name, tmp_path, trained):
    chosen = secured(name)
    wire = Recording(workers(tmp_path))
    run = go(tmp_path, chosen, wire, evaluate=False)
    assert equal_states(trained(chosen), run)
    replies = [decode(out) for _, header, _, _, out in wire.left if header["kind"] == "train"]
    assert len(replies) == 6 and all(
        x.dtype == np.uint64 for p in replies for tree in p.values() for x in tree.values()
    )
    record = run.folder.records()[0]
    assert not record.shares and not record.incidents and not any(s.numbers for s in record.sites.values())
    assert config.parse(run.folder.config).run.guard.use == "off"
    page = build("run", methods([read(run.folder.path)]))
    assert "the sum over the hospitals" in page and "nobody" in page
    assert "Who saw what" in page and "the sum of all replies of a round" in page and "sizes and times" in page
    ledger = (tmp_path / "sites" / "a" / "ledger.jsonl").read_text()
    assert (
        '"model": "model, masked, ' in ledger
        and "keys of a secure sum" in ledger
        and '"model": "model, 2' not in ledger
    )


def test_the_result_is_that_of_open_replies_within_rounding(trained):
    one, other = (states(trained(chosen).folder.path) for chosen in (wanted("fedavg"), secured()))
    assert one.keys() == other.keys()
    arrays = [(np.asarray(x), np.asarray(other[k].model[n])) for k in one for n, x in one[k].model.items()]
    assert arrays and max(float(np.abs(a - b).max()) for a, b in arrays) < 1e-5


def test_a_round_goes_on_with_two_of_five_gone_and_has_the_mean_of_the_rest(tmp_path):
    silent = {"b": "train", "d": "members"}
    everyone = {i: worker(tmp_path, i) for i in FIVE}
    run = deployed(tmp_path, of_five(rounds=1, validate_every=1), Recording(everyone, silent), FIVE, evaluate=False)
    record = run.folder.records()[0]
    assert sorted(record.sites) == ["a", "c", "e"] and not record.refused
    twin = config.vary(wanted("fedavg"), {"run": {"rounds": 1, "validate_every": 1}})
    twin = config.vary(
        twin, {"data": {"name": "phantom", "shape": [24, 24, 24], "sites": {i: {"cases": 5} for i in FIVE}}}
    )
    plain = Recording({i: worker(tmp_path / "plain", i) for i in FIVE}, {"b": "train", "d": "train"})
    other = coordinator.run(
        twin, plain, FIVE, tmp_path / "open", deadlines=replace(FAST, quorum=3), assess=False, evaluate=False
    )
    (one,), (two,) = (
        [s.model for k, s in states(r.folder.path).items() if "round" in str(k)][:1] for r in (run, other)
    )
    assert max(float(np.abs(np.asarray(one[k]) - np.asarray(two[k])).max()) for k in one) < 1e-6


class Restarting(Recording):
    """Site a is a new process after every request."""

    def answer(self, site, header, body):
        if site == "a":
            self.workers["a"] = Worker(self.workers["a"].site, self.workers["a"].policy)
        return super().answer(site, header, body)


def test_a_worker_that_is_killed_between_the_steps_goes_on_with_its_keys(tmp_path, trained):
    run = go(tmp_path, secured(), Restarting(workers(tmp_path)), evaluate=False)
    assert equal_states(trained(secured()), run)


def answered(tmp_path, **policy):
    """A finished run of one round, its wire and the workers."""
    wire = Recording(workers(tmp_path, **policy))
    go(tmp_path, secured(rounds=1, validate_every=1), wire, evaluate=False)
    return wire


def last(wire, kind, site="a"):
    return next(x for x in reversed(wire.left) if x[0] == site and x[1]["kind"] == kind)


def test_one_masked_reply_leaves_in_a_sum_and_the_same_request_gets_the_same(tmp_path):
    wire = Impatient(workers(tmp_path), {"c": "reveal"})
    with pytest.raises(Stop):
        go(tmp_path, secured(rounds=1, validate_every=1), wire, evaluate=False)
    _, header, body, _, out = last(wire, "train", "c")
    again = Worker(wire.workers["c"].site, wire.workers["c"].policy)  # after a restart
    assert bytes(again.answer(header, body)[1]) == bytes(out)
    model = {k: x + np.float32(0.5) for k, x in decode(body)["model"].items()}
    other, nothing = again.answer(header, encode(Payload(model=model)))
    assert "another one would reveal the difference" in other["refused"] and not nothing


def test_a_second_sum_of_a_round_with_one_hospital_less_is_refused(tmp_path):
    """The difference of the two sums would be that hospital's reply. The same hospitals may repeat a round."""
    everyone = {i: worker(tmp_path, i) for i in FIVE}
    first = Recording(everyone)
    chosen = of_five(rounds=1, validate_every=1)
    run = deployed(tmp_path, chosen, first, FIVE, evaluate=False)
    facts = json.loads((run.folder.path / "deployment.json").read_text())

    def repeat(name, silent):
        wire = Impatient(everyone, silent)
        with suppress(Stop):
            coordinator.run(chosen, wire, FIVE, tmp_path / name, deadlines=AT_ONCE, assess=False,
                            evaluate=False, id=facts["study"])  # fmt: skip
        return [got for _, header, _, got, _ in wire.left if header.get("step") == "reveal"]

    assert not any("refused" in got for got in repeat("again", {}))
    refused = repeat("less", {"e": "train"})
    assert len(refused) == 4 and all("differs from it by 1 hospitals" in got["refused"] for got in refused)


def test_in_a_round_replies_leave_for_sums_of_the_same_hospitals_alone(tmp_path):
    """Sums over a, b, c and over all five differ by d and e: with more hospitals such sums single one out, so the first
    hospitals of a round are the only ones."""
    everyone = {i: worker(tmp_path, i) for i in FIVE}
    chosen = of_five(rounds=1, validate_every=1)

    def summed(name, wire):
        with suppress(Stop):
            coordinator.run(chosen, wire, FIVE, tmp_path / name, deadlines=AT_ONCE, assess=False,
                            evaluate=False, id="one-study")  # fmt: skip
        return [(site, got) for site, header, _, got, _ in wire.left if header["kind"] == "train"]

    first = summed("three", Recording(everyone, {"d": "shares", "e": "shares"}))
    assert sorted(site for site, _ in first) == ["a", "b", "c"] and not any("refused" in got for _, got in first)
    second = dict(summed("five", Impatient(everyone)))
    assert {i for i, got in second.items() if "a sum of other hospitals" in got.get("refused", "")} == {"a", "b", "c"}


def test_a_hospital_that_allows_only_masked_replies_refuses_an_open_study_and_the_assessment(tmp_path):
    with pytest.raises(RunError, match=r"policy\.toml says masked = true"):
        go(tmp_path, wanted("fedavg"), Inside(workers(tmp_path, masked=True)))
    open_to_it = go(tmp_path, secured(), Inside(workers(tmp_path / "two", masked=True)), name="masked", evaluate=False)
    assert open_to_it.result.best_round >= 0
    intent = Intent("assess", cases=100)
    assert "policy.toml says masked = true" in SitePolicy(masked=True).refuse(intent, datetime.now())
    assert SitePolicy().refuse(intent, datetime.now()) is None


def assessed(tmp_path, chosen, wire, names=NAMES):
    run = coordinator.run(chosen, wire, names, tmp_path / "run", deadlines=FAST, evaluate=False)
    return run, json.loads((run.folder.path / "assessment" / "assessment.json").read_text())


@pytest.mark.page
def test_an_assessment_under_secure_sums_is_that_of_open_statistics_and_shows_no_list_of_a_hospital(tmp_path):
    once = {"run": {"rounds": 1, "validate_every": 1}, "assess": {"projections": 8}}
    _, plain = assessed(tmp_path / "open", config.vary(wanted("fedavg"), once), Inside(workers(tmp_path / "open")))
    wire = Recording(workers(tmp_path / "masked", masked=True))
    run, found = assessed(tmp_path / "masked", config.vary(secured(), once), wire)
    for name, distance in plain["distances"].items():
        assert found["distances"][name] == distance, name  # to the last bit: matrices, p, groups
    for key in ("verdict", "sites", "cases", "angles", "unlabelled", "alternatives"):
        assert found[key] == plain[key], key
    assert all(not q["values"] for q in found["quantities"].values()) and not found["alignment"]
    assert all(q["values"] for q in plain["quantities"].values())
    page = (run.folder.path / "assessment" / "index.html").read_text()
    whole = build("run", methods([read(run.folder.path)]))
    assert "distances between hospitals, tests, groups" in whole and "the first hospital by name" in whole
    assert "encrypted for a" in page and "went, encrypted, to the hospital that compared them" in page
    replies = {site: bytes(out) for site, header, _, _, out in wire.left if header["kind"] == "assess"}
    assert sorted(replies) == list(NAMES)
    for value in next(iter(plain["quantities"].values()))["values"]["b"]:
        assert not any(np.float64(value).tobytes() in blob for blob in replies.values())
    ledger = (tmp_path / "masked" / "sites" / "b" / "ledger.jsonl").read_text()
    assert "encrypted for another hospital" in ledger and "comparison of all hospitals" not in ledger
    assert "comparison of all hospitals" in (tmp_path / "masked" / "sites" / "a" / "ledger.jsonl").read_text()


def test_statistics_leave_encrypted_alone_in_a_study_of_secure_sums(tmp_path):
    wire = Recording(workers(tmp_path))
    go(tmp_path, secured(rounds=1, validate_every=1), wire, evaluate=False)
    _, header, _, _, _ = last(wire, "train")
    asked = {k: header[k] for k in ("protocol", "study")} | {"kind": "assess", "phase": 0, "round": 3}
    got, out = wire.workers["a"].answer({**header, **asked}, encode(Payload()))
    assert "no keys were agreed on for this round" in got["refused"] and not out


def test_too_few_hospitals_for_a_secure_comparison_are_an_incident(tmp_path):
    everyone = workers(tmp_path)
    everyone["c"].policy = SitePolicy(fewest=1, assess=False)
    run = coordinator.run(secured(rounds=1, validate_every=1), Inside(everyone), NAMES, tmp_path / "run",
                          deadlines=FAST, evaluate=False)  # fmt: skip
    assert not (run.folder.path / "assessment").exists()
    assert "no assessment: 2 sites take part" in str(run.folder.records()[0].incidents)


@pytest.mark.slow
def test_clusters_of_patients_are_fitted_and_tuned_under_secure_sums(tmp_path, trained):
    """No hospital has to allow small sums: a sum is over all hospitals."""
    text = config.dump(wanted("cfft"))
    chosen = config.vary(config.parse(text), {"run": {"secure": {"use": "on"}}, "then": [{
        "algorithm": {"name": "cfft", "components": 2, "rounds": 1, "dimensions": 2, "restarts": 1, "iterations": 2,
                      "together": True}, "run": {"rounds": 40}}]})  # fmt: skip
    assert not SitePolicy().small_sums
    wire = Recording(workers(tmp_path))
    run = go(tmp_path, chosen, wire, evaluate=False)
    assert equal_states(trained(chosen), run)
    replies = [decode(out) for _, header, _, _, out in wire.left if header["kind"] == "train"]
    assert any("sums" in p for p in replies) and any("cluster_0" in p for p in replies)
    assert all(x.dtype == np.uint64 for p in replies for tree in p.values() for x in tree.values())


def test_a_training_request_without_keys_is_refused(tmp_path):
    wire = answered(tmp_path)
    _, header, body, _, _ = last(wire, "train")
    got, _ = wire.workers["a"].answer({**header, "round": 7}, body)
    assert "no keys were agreed on for this round" in got["refused"]


def test_a_policy_that_wants_more_hospitals_in_a_sum_refuses_to_reveal_less(tmp_path):
    wire = Impatient(workers(tmp_path, masked_sites=4))
    with pytest.raises(Stop):
        go(tmp_path, secured(), wire, evaluate=False)
    assert "a secure sum needs 4" in last(wire, "mask")[3]["refused"]
    with pytest.raises(ConfigError, match="masked_sites = 2 must be at least 3"):
        SitePolicy(masked_sites=2)


def keyed(tmp_path, peers):
    """Workers with keys of their own, and the fingerprints that each accepts."""
    signed = {i: issue(i, None, 10) for i in NAMES}
    known = {i: fingerprint(public_line(s.key.public_key())) for i, s in signed.items()}
    found = {}
    for i, s in signed.items():
        place = site_of(tmp_path, i)
        place.path.parent.mkdir(parents=True)
        (place.path.parent / "site.key").write_bytes(s.key_pem)
        policy = SitePolicy(fewest=1, masked_peers=tuple(peers(i, known)))
        found[i] = Worker(replace(place, key=place.path.parent / "site.key"), policy)
    return found


def test_only_keys_of_the_named_hospitals_are_accepted(tmp_path):
    everyone = keyed(tmp_path, lambda i, known: [known[j] for j in NAMES if j != i])
    run = go(tmp_path, secured(), Inside(everyone), evaluate=False)
    assert run.result.best_round >= 0
    missing = Impatient(keyed(tmp_path / "two", lambda i, known: [known[j] for j in NAMES if j not in (i, "c")]))
    with pytest.raises(Stop):
        go(tmp_path / "two", secured(), missing, evaluate=False)
    assert "the keys of 'c' are not signed by a hospital of masked_peers" in last(missing, "mask")[3]["refused"]
    with pytest.raises(ConfigError, match="which is no fingerprint"):
        SitePolicy(masked_peers=("north",))


def test_one_hospital_under_two_names_counts_once(tmp_path):
    """A colluding hospital signs for an invented one: with both, the third would be alone among them."""
    everyone = keyed(tmp_path, lambda i, known: [known[j] for j in NAMES if j != i])
    place = everyone["c"].site
    twin = replace(place, key=everyone["b"].site.key)
    everyone["c"] = Worker(twin, SitePolicy(fewest=1))
    wire = Impatient(everyone)
    with pytest.raises(Stop):
        go(tmp_path, secured(), wire, evaluate=False)
    assert "the keys of 'c' and 'b' are signed by one hospital" in last(wire, "mask")[3]["refused"]


class Impostor(Impatient):
    """The coordinator replaces the keys of site c by its own, with c's signature."""

    def answer(self, site, header, body):
        if header.get("step") == "shares" and site != "c":
            got = decode(body)
            body = encode(Payload(**{**got, "mask_keys": {**got["mask_keys"], "c": got["mask_keys"]["c"] ^ 1}}))
        return super().answer(site, header, body)


def test_a_coordinator_that_replaces_keys_is_noticed_by_named_peers(tmp_path):
    wire = Impostor(keyed(tmp_path, lambda i, known: [known[j] for j in NAMES if j != i]))
    with pytest.raises(Stop):
        go(tmp_path, secured(), wire, evaluate=False)
    assert "the keys of 'c' are not signed" in last(wire, "mask")[3]["refused"]


def test_two_hospitals_are_too_few_before_anything_is_written(tmp_path):
    two = {i: worker(tmp_path, i) for i in "ab"}
    with pytest.raises(ConfigError, match="2 sites take part in a round, and a secure sum needs 3"):
        coordinator.run(secured(), Inside(two), ("a", "b"), tmp_path / "run", deadlines=replace(FAST, quorum=2))
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_makes_new_keys(tmp_path):
    wire = Recording(workers(tmp_path))
    with pytest.raises(Paused):
        go(tmp_path, secured(rounds=3, validate_every=3), wire, until=2, evaluate=False)
    before = {bytes(out) for _, h, _, _, out in wire.left if h.get("step") == "keys"}
    run = coordinator.resume(tmp_path / "deployed", wire, deadlines=FAST, evaluate=False, paused=True)
    after = [bytes(out) for _, h, _, _, out in wire.left if h.get("step") == "keys"]
    assert len(set(after)) == len(after) == 9 and before < set(after)
    assert len(RunFolder.open(run.folder.path).records()) == 3
