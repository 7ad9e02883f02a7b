"""Secure sums over sites: the bits of the simulator, drop-outs, restarts, and what a hospital refuses."""

import json
from contextlib import suppress
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest

import consortium
from consortium import FAST, NAMES, Impatient, Inside, Recording, Stop, equal_states, go, wanted, worker, workers
from polysite import config
from polysite.deploy.certificates import issue, public_line
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.enrolment import fingerprint
from polysite.deploy.site.policy import Intent, SitePolicy
from polysite.deploy.site.worker import Worker
from polysite.errors import Paused, RunError
from polysite.heterogeneity.bounds import PrivateSums
from polysite.payload import Payload, decode, encode
from polysite.report.page import build
from polysite.report.runs import methods, read

FIVE = ("a", "b", "c", "d", "e")
ONCE = {"rounds": 1, "validate_every": 1}


def secured(name="fedavg", use="on", **run):
    return config.vary(wanted(name), {"run": {"secure": {"use": use}, "guard": {"use": "auto"}, **run}})


def of_five(use="on"):
    data = {"name": "phantom", "shape": [24, 24, 24], "sites": {i: {"cases": 5} for i in FIVE}}
    return config.vary(secured(use=use, **ONCE), {"data": data})


def last(wire, kind, site="a"):
    """Header and body of the last question of a kind or step, and both of the answer."""
    found = (x for x in reversed(wire.left) if x[0] == site and kind in (x[1]["kind"], x[1].get("step")))
    return next(found)[1:]


def given_up(tmp_path, wire):
    """Run a study that cannot go on; return why site a does not take a step of the sum."""
    with pytest.raises(Stop):
        go(tmp_path, secured(**ONCE), wire, evaluate=False)
    return last(wire, "mask")[2].get("refused", "")


def restarted(host, **site):
    """A new process of a hospital."""
    return Worker(replace(host.hospital.site, **site), host.hospital.policy)


@pytest.mark.parametrize("name", ["fedavg", "fedper", pytest.param("ditto", marks=pytest.mark.soak)])
def test_sites_come_to_the_bits_of_the_simulator_and_the_server_sees_no_reply(name, tmp_path, trained):
    wire = Recording(workers(tmp_path))
    run = go(tmp_path, secured(name), wire, evaluate=False)
    assert equal_states(trained(secured(name)), run)
    replies = [decode(out) for _, header, _, _, out in wire.left if header["kind"] == "train"]
    arrays = [x for reply in replies for tree in reply.values() for x in tree.values()]
    assert len(replies) == 6 and all(x.dtype == np.uint64 for x in arrays)
    record = run.folder.records()[0]
    assert not record.shares and not record.incidents and not any(s.numbers for s in record.sites.values())
    assert config.parse(run.folder.config).run.guard.use == "off"
    page = build("run", methods([read(run.folder.path)]))
    assert "the sum over the hospitals" in page and "nobody" in page
    assert "Who saw what" in page and "the sum of all replies of a round" in page and "sizes and times" in page
    ledger = (tmp_path / "sites" / "a" / "ledger.jsonl").read_text()
    assert '"model": "model, masked, ' in ledger and '"model": "model, 2' not in ledger
    assert "keys of a secure sum" in ledger


def test_a_round_goes_on_with_two_of_five_gone_and_has_the_mean_of_the_rest(tmp_path):
    wire = Recording(workers(tmp_path, FIVE), {"b": "train", "d": "members"})
    run = go(tmp_path, of_five(), wire, names=FIVE, evaluate=False)
    record = run.folder.records()[0]
    assert sorted(record.sites) == ["a", "c", "e"] and not record.refused
    plain = Recording(workers(tmp_path / "open", FIVE), {"b": "train", "d": "train"})
    twin = config.vary(of_five(use="off"), {"run": {"guard": {"use": "off"}}})
    other = go(tmp_path, twin, plain, "open-run", FIVE, evaluate=False)
    one, two = (list(consortium.states(r.folder.path).values())[-1].model for r in (run, other))
    assert one.keys() == two.keys() and all(np.allclose(one[k], two[k], rtol=0, atol=1e-6) for k in one)


def test_a_worker_that_is_killed_between_the_steps_goes_on_with_its_keys(tmp_path, trained):
    class Restarting(Inside):
        def answer(self, site, header, body):
            if site == "a":
                self.workers["a"] = restarted(self.workers["a"])
            return super().answer(site, header, body)

    run = go(tmp_path, secured(), Restarting(workers(tmp_path)), evaluate=False)
    assert equal_states(trained(secured()), run)


def test_one_masked_reply_leaves_in_a_sum_and_the_same_request_gets_the_same(tmp_path):
    wire = Impatient(workers(tmp_path), {"c": "reveal"})
    given_up(tmp_path, wire)
    header, body, _, out = last(wire, "train", "c")
    again = restarted(wire.workers["c"])
    assert bytes(again.answer(header, body)[1]) == bytes(out)
    model = {k: x + np.float32(0.5) for k, x in decode(body)["model"].items()}
    other, nothing = again.answer(header, encode(Payload(model=model)))
    assert "another one would reveal the difference" in other["refused"] and not nothing


def repeated(tmp_path, name, wire):
    """Run a round of the same study again, as a coordinator could; return what left."""
    with suppress(Stop):  # which waits for no site that has disconnected
        go(tmp_path, of_five(), wire, name, FIVE, deadlines=replace(FAST, grace=0), evaluate=False, id="one-study")
    return wire.left


def test_a_second_sum_of_a_round_with_one_hospital_less_is_refused(tmp_path):
    """The difference of the two sums would be that hospital's reply. The same hospitals may repeat a round."""
    everyone = workers(tmp_path, FIVE)

    def revealed(name, silent):
        left = repeated(tmp_path, name, Impatient(everyone, silent))
        return [got.get("refused", "") for _, header, _, got, _ in left if header.get("step") == "reveal"]

    assert revealed("first", {}) == revealed("again", {}) == [""] * 5
    refused = revealed("less", {"e": "train"})
    assert len(refused) == 4 and all("differs from it by 1 hospitals" in why for why in refused)


def test_in_a_round_replies_leave_for_sums_of_the_same_hospitals_alone(tmp_path):
    """Sums over a, b, c and over all five differ by d and e: with more hospitals such sums single one out, so the first
    hospitals of a round are the only ones."""
    everyone = workers(tmp_path, FIVE)

    def summed(name, wire):
        left = repeated(tmp_path, name, wire)
        return {site: got.get("refused", "") for site, header, _, got, _ in left if header["kind"] == "train"}

    assert summed("three", Recording(everyone, {"d": "shares", "e": "shares"})) == dict.fromkeys("abc", "")
    refused = summed("five", Impatient(everyone))
    assert {i for i, why in refused.items() if "a sum of other hospitals" in why} == {"a", "b", "c"}


def test_a_hospital_that_allows_only_masked_replies_refuses_an_open_study_and_the_assessment(tmp_path):
    with pytest.raises(RunError, match=r"policy\.toml says masked = true"):
        go(tmp_path, wanted("fedavg"), Inside(workers(tmp_path, masked=True)))
    intent = Intent("assess", cases=100)
    assert "policy.toml says masked = true" in SitePolicy(masked=True).refuse(intent, datetime.now())
    assert SitePolicy().refuse(intent, datetime.now()) is None


@pytest.mark.parametrize(
    ("noise", "policy", "allowed"),
    [
        (PrivateSums(8.0), SitePolicy(masked=True), True),
        (PrivateSums(8.5), SitePolicy(masked=True), False),
        (PrivateSums(8.0, delta=1e-3), SitePolicy(masked=True), False),
        (PrivateSums(8.5), SitePolicy(masked=True, epsilon=20.0), True),  # the budget decides
        (PrivateSums(9e8), SitePolicy(), True),
        (PrivateSums(8.0), SitePolicy(masked=True, assess=False), False),
    ],
)
def test_where_replies_are_masked_an_assessment_needs_noise_that_hides_a_patient(noise, policy, allowed):
    """Noise for any epsilon would be none: a coordinator could choose a large one, and read the sums of a hospital."""
    assert (policy.refuse(Intent("assess", cases=100, noise=noise), datetime.now()) is None) == allowed


@pytest.mark.page
def test_masked_hospitals_are_assessed_by_sums_under_noise(tmp_path):
    chosen = config.vary(secured(**ONCE), {"assess": {"private": {"epsilon": 8.0}, "projections": 8}})
    wire = Recording(workers(tmp_path, masked=True))
    run = go(tmp_path, chosen, wire, assess=True, evaluate=False)
    found = json.loads((run.folder.path / "assessment" / "assessment.json").read_text())
    assert found["sites"] == list(NAMES) and set(found["distances"]) == {"shift", "centre"} and found["noise"]
    assert found["verdict"]["strategies"] and run.result.best_round == 0
    left = [decode(out) for _, header, _, _, out in wire.left if header["kind"] == "assess"]
    assert all(set(reply) == {"cases", "patients", "encoder", "sums"} for reply in left) and len(left) == 3
    assert "under noise for epsilon = 8" in build("run", methods([read(run.folder.path)]))


def test_under_masks_no_assessment_without_noise_leaves_whatever_the_policy_allows(tmp_path):
    wire = Recording(workers(tmp_path))
    run = go(tmp_path, secured(**ONCE), wire, assess=True, evaluate=False)
    assert not (run.folder.path / "assessment").exists()
    assert "no assessment: a distance between two hospitals is no sum" in str(run.folder.records()[0].incidents)
    got, out = consortium.ask(wire.workers["a"], "assess", encode(Payload()), study=last(wire, "hello")[0]["study"])
    assert "the statistics of an assessment would leave without the masks" in got["refused"] and not out


def test_without_keys_no_training_leaves(tmp_path):
    host = worker(tmp_path, "a")
    consortium.ask(host, "hello", config=config.dump(secured()))
    got, out = consortium.ask(host, "train", encode(Payload(model=consortium.start_of(host))))
    assert "no keys were agreed on for this round" in got["refused"] and not out


def test_a_policy_that_wants_more_hospitals_in_a_sum_refuses_to_reveal_less(tmp_path):
    assert "a secure sum needs 4" in given_up(tmp_path, Impatient(workers(tmp_path, masked_sites=4)))


def keyed(tmp_path, unknown=""):
    """Workers with keys of their own, each of which accepts those of the others but for an unknown one."""
    signed = {i: issue(i, None, 10) for i in NAMES}
    known = {i: fingerprint(public_line(s.key.public_key())) for i, s in signed.items()}
    found = {}
    for i, s in signed.items():
        place = consortium.site_of(tmp_path, i)
        place.path.parent.mkdir(parents=True)
        (place.path.parent / "site.key").write_bytes(s.key_pem)
        policy = SitePolicy(fewest=1, masked_peers=tuple(known[j] for j in NAMES if j not in (i, unknown)))
        found[i] = Worker(replace(place, key=place.path.parent / "site.key"), policy)
    return found


def test_only_keys_of_the_named_hospitals_are_accepted(tmp_path):
    assert go(tmp_path, secured(**ONCE), Inside(keyed(tmp_path)), evaluate=False).result.best_round == 0
    refused = given_up(tmp_path / "two", Impatient(keyed(tmp_path / "two", unknown="c")))
    assert "the keys of 'c' are not signed by a hospital of masked_peers" in refused


def test_one_hospital_under_two_names_counts_once(tmp_path):
    """A colluding hospital signs for an invented one: with both, the third would be alone among them."""
    everyone = keyed(tmp_path)
    twin = restarted(everyone["c"], key=everyone["b"].hospital.site.key)
    twin.policy = SitePolicy(fewest=1)
    refused = given_up(tmp_path, Impatient({**everyone, "c": twin}))
    assert "the keys of 'c' and 'b' are signed by one hospital" in refused


def test_a_coordinator_that_replaces_keys_is_noticed_by_named_peers(tmp_path):
    class Impostor(Impatient):
        """Replaces the keys of site c by its own, with c's signature."""

        def answer(self, site, header, body):
            if header.get("step") == "shares" and site != "c":
                got = decode(body)
                body = encode(Payload(**{**got, "mask_keys": {**got["mask_keys"], "c": got["mask_keys"]["c"] ^ 1}}))
            return super().answer(site, header, body)

    assert "the keys of 'c' are not signed" in given_up(tmp_path, Impostor(keyed(tmp_path)))


def test_a_resumed_run_makes_new_keys(tmp_path):
    def keys():
        return [bytes(out) for _, header, _, _, out in wire.left if header.get("step") == "keys"]

    wire = Recording(workers(tmp_path))
    with pytest.raises(Paused):
        go(tmp_path, secured(rounds=3, validate_every=3), wire, until=2, evaluate=False)
    before = keys()
    run = coordinator.resume(tmp_path / "deployed", wire, deadlines=FAST, evaluate=False, paused=True)
    assert len(set(keys())) == len(keys()) == 9 and set(before) < set(keys())
    assert len(run.folder.records()) == 3
