"""FedPer, LG-FedAvg, FedRep, FedBN, FedRoD and FedABC against answers on paper: first rounds, limit."""

from dataclasses import replace

import numpy as np
import pytest

import polysite as ps
from polysite import tree
from polysite.algorithms.fedrep import HEAD_EPOCHS
from polysite.payload import Payload
from polysite.site import Balanced, Objective, OneVsAll
from quadratic import ETA, NAMES, A, B, K, P, Quadratic, bed, play
from table import same

SPLITS = {"body.w": np.array([0.7]), "head.w": np.array([-0.2])}
NORMS = {"stem.weight": np.array([[0.7]]), "norm.weight": np.array([-0.2]), "norm.running_var": np.array([16.0])}
EQUAL = np.full(4, 0.25)


@pytest.mark.parametrize(
    ("algorithm", "p", "start", "shared", "private"),
    [
        (ps.FedPer(), P, SPLITS, "body.w", "head.w"),
        (ps.LGFedAvg(("body.*",)), P, SPLITS, "head.w", "body.w"),
        (ps.FedBN(), P, NORMS, "stem.weight", "norm.weight"),
        (ps.FedBN(uniform=True), EQUAL, NORMS, "stem.weight", "norm.weight"),
    ],
    ids=["fedper", "lg-fedavg", "fedbn", "fedbn, uniform"],
)
def test_private_layers_first_two_rounds_and_limit(algorithm, p, start, shared, private):
    """F_k = a/2 (u + v - b)^2: u and v move alike, and u - sum p v never changes, so that it tells the limit."""
    run = play(algorithm, bed(start=start), 150)
    u, v, pull = start[shared].item(), np.full(4, start[private].item()), (1 - (1 - 2 * ETA * A) ** K) / 2
    constant = u - sum(p * v)
    for k in range(2):
        off = u + v - B
        u, v = u - sum(p * pull * off), v - pull * off
        assert run.models(shared)[k] == pytest.approx(u, abs=1e-12)
        assert run.own("private", private, round=k) == pytest.approx(v, abs=1e-12)
        if start is NORMS:
            seen = 0.9 ** (k + 1) * 16 + (1 - 0.9 ** (k + 1)) * A**2
            assert run.own("private", "norm.running_var", round=k) == pytest.approx(seen)
    limit = (constant + sum(p * B)) / 2
    assert run.models(shared)[-1] == pytest.approx(limit, abs=1e-9)
    assert run.own("private", private) == pytest.approx(B - limit, abs=1e-9)
    assert {k for payload in run.crossed for k in payload["model"]} == {shared}


@pytest.mark.parametrize("pattern", ["head.*", "head.norm.weight"])
def test_running_statistics_stay_with_the_parameters_of_their_layer(pattern):
    shared, private = "stem.norm.running_var", "head.norm.running_var"
    start = {"stem.w": np.array([1.0]), "head.norm.weight": np.array([0.5])}
    start |= {shared: np.array([16.0]), private: np.array([16.0])}
    run = play(ps.FedPer((pattern,)), bed(np.array([1.0, 3.0]), np.ones(2), [1, 1], start=start), 2)
    assert run.state.model.keys() == {"stem.w", shared}
    assert run.models(shared)[-1] == pytest.approx(0.81 * 16 + 0.19 * (1 + 9) / 2)
    assert run.own("private", private) == pytest.approx([0.81 * 16 + 0.19, 0.81 * 16 + 0.19 * 9])


@pytest.mark.parametrize(
    ("algorithm", "p", "head", "body"),
    [
        (ps.FedRep(head_steps=4, steps=2), EQUAL, (ETA, 4), (ETA, 2)),
        (ps.FedRep(head_steps=4, steps=2, uniform=False), P, (ETA, 4), (ETA, 2)),
        (ps.FedRep(lr=0.05), EQUAL, (0.05, HEAD_EPOCHS * K), (0.05, K)),
        (ps.FedRep(head_lr=0.03, head_epochs=2, epochs=3), EQUAL, (0.03, 2 * K), (ETA, 3 * K)),
    ],
    ids=["uniform", "by size", "the paper's epochs", "epochs and rates"],
)
def test_fedrep_first_two_rounds_and_limit(algorithm, p, head, body):
    """The head goes first: v <- v - (1 - alpha)(u + v - b), then the body by what is left of the error."""
    run = play(algorithm, bed(start=SPLITS), 150)
    alpha, beta = ((1 - lr * A) ** steps for lr, steps in (head, body))
    u, v = 0.7, np.full(4, -0.2)
    for k in range(2):
        off = u + v - B
        u, v = u - sum(p * alpha * (1 - beta) * off), v - (1 - alpha) * off
        assert run.models("body.w")[k] == pytest.approx(u, abs=1e-12)
        assert run.own("private", "head.w", round=k) == pytest.approx(v, abs=1e-12)
    assert run.models("body.w")[-1] + run.own("private", "head.w") == pytest.approx(B, abs=1e-9)


def test_fedrep_trains_one_part_at_a_time():
    start = {**SPLITS, "body.norm.running_var": np.array([16.0]), "head.norm.running_var": np.array([16.0])}
    head, body = ({k for k in start if k.startswith(part)} for part in ("head", "body"))
    site = Quadratic(2.0, np.array([1.0]), start=start)
    reply, kept = ps.FedRep(head_steps=2).local(Payload(model={k: start[k] for k in body}), Payload(), site)
    assert [set(only) for *_, only in site.asked] == [head, body]
    second, *_ = site.asked[1]
    assert all(second[k] == start[k] for k in body) and not any(second[k] == start[k] for k in head)
    assert kept["private"].keys() == head and all(kept["private"][k] == second[k] for k in head)
    assert reply["model"].keys() == body and reply["model"]["body.norm.running_var"] == 0.9 * 16 + 0.1 * 4


@pytest.mark.parametrize("uniform", [False, True])
def test_fedbn_without_normalisation_is_fedavg_to_the_last_bit(uniform):
    ours, theirs = (play(rule, bed(start=SPLITS), 6, 0.5) for rule in (ps.FedBN(uniform), ps.FedAvg(uniform=uniform)))
    assert same([s.model for s in ours.states], [s.model for s in theirs.states]) and same(ours.crossed, theirs.crossed)


ONE = {"head.w": np.array([0.7])}
STEEP, AIM = np.array([0.8, 1.5, 0.6, 2.2]), np.array([0.2, -0.7, 1.0, 1.4])  # of the sites' own losses


def two_losses():
    """Balanced: a/2 (u - b)^2; the site's own: C/2 (u + v - d)^2."""
    found = bed(STEEP, AIM, start=ONE)
    return {s: replace(site, instead=(A[i], B[i])) for i, (s, site) in enumerate(found.items())}


def test_fedrod_first_two_rounds_and_limit():
    """u is FedAvg of the balanced losses; after each of its steps v takes one on what it leaves of the site's own."""
    run = play(ps.FedRoD(), two_losses(), 100)
    r, q = 1 - ETA * A, 1 - ETA * STEEP
    drift = ETA * STEEP * r * (r**K - q**K) / (r - q)
    u, v = 0.7, np.zeros(4)
    for k in range(2):
        v = (AIM - B) + q**K * (v - (AIM - B)) - drift * (u - B)
        u = sum(P * (B + r**K * (u - B)))
        assert run.models("head.w")[k] == pytest.approx(u, abs=1e-12)
        assert run.own("personal", "head.w", round=k) == pytest.approx(v, abs=1e-12)
    limit = sum(P * (1 - r**K) * B) / sum(P * (1 - r**K))
    assert run.models("head.w")[-1] == pytest.approx(limit, abs=1e-9)
    want = (AIM - B) - drift * (limit - B) / (1 - q**K)
    assert run.own("personal", "head.w") == pytest.approx(want, abs=1e-9)


def test_fedrod_adds_the_personal_head_to_the_generic_one():
    run, site = play(ps.FedRoD(), two_losses(), 8, share=0.5), two_losses()["s0"]
    model, memory = run.state.model, run.memories["s0"]
    for kept, added in ((memory, memory["personal"]["head.w"]), (Payload(), 0.0)):
        ((served, _),) = ps.FedRoD().serve(Payload(model=model), kept, site, ("0",))
        assert served["head.w"] == model["head.w"] + added


def test_which_losses_replace_the_sites_own():
    site = Quadratic(1.0, np.array([0.0]), start=SPLITS)
    for rule in (ps.FedRoD(clip=3.0), ps.FedABC(0.3, 1.5, 0.9, 0.1, 4.0, ("head.*",))):
        rule.local(Payload(model=SPLITS), Payload(), site)
    balanced = Objective(loss=Balanced(3.0), personal={"head.w": 0.0})
    assert [asked[1] for asked in site.asked] == [balanced, Objective(loss=OneVsAll(0.3, 1.5, 0.9, 0.1, 4.0))]


def test_fedabc_where_all_is_shared_is_fedavg():
    """First round and limit are FedAvg's, of the loss that is trained."""
    sites = {s: replace(x, instead=(STEEP[i], AIM[i])) for i, (s, x) in enumerate(bed(start=ONE).items())}
    first, *_, last = play(ps.FedABC(personal=()), sites, 40).models("head.w")
    r = (1 - ETA * STEEP) ** K
    assert first == pytest.approx(sum(P * (AIM + r * (0.7 - AIM))), abs=1e-12)
    assert last == pytest.approx(sum(P * (1 - r) * AIM) / sum(P * (1 - r)), abs=1e-9)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_fedabc_trains_as_fedper_and_has_the_mean_of_the_personal_parts_for_strangers(share):
    algorithm, site = ps.FedABC(personal=("head.*",)), bed(start=SPLITS)["s0"]
    run = play(algorithm, bed(start=SPLITS), 5, share)
    if share == 1:  # otherwise who comes later begins from the mean of the personal parts, and in FedPer from the first
        theirs = play(ps.FedPer(), bed(start=SPLITS), 5)
        assert run.models("body.w") == theirs.models("body.w")
        for round in range(5):
            mine = run.own("personal", "head.w", round)
            assert mine.tolist() == theirs.own("private", "head.w", round).tolist()
    last = [x.payload for x in run.last.replies.values()]
    mean = tree.mean([p["model"] for p in last], [p["weight"] for p in last])["head.w"]
    for memory, head in ((Payload(), mean), (run.memories["s0"], run.memories["s0"]["personal"]["head.w"])):
        ((served, _),) = algorithm.serve(Payload(model=run.state.model), memory, site, ("0",))
        assert served == {**run.state.model, "head.w": pytest.approx(head)}


BOTH = {**SPLITS, "norm.weight": np.array([-0.2]), "norm.running_var": np.array([16.0])}


PRIVATE = {
    "fedper": (ps.FedPer(), "head.w"),
    "lg-fedavg": (ps.LGFedAvg(("body.*",)), "body.w"),
    "fedrep": (ps.FedRep(head_steps=2), "head.w"),
    "fedbn": (ps.FedBN(), "norm.weight"),
}


@pytest.mark.parametrize(("algorithm", "name"), PRIVATE.values(), ids=PRIVATE.keys())
def test_who_is_new_gets_the_first_private_part_and_others_have_their_own(algorithm, name):
    run = play(algorithm, bed(start=BOTH), 4, 0.5)
    got, own = algorithm.send(run.state, ["new"])["new"], run.memories["s0"]["private"][name]
    for memory, part in ((Payload(), BOTH[name]), (run.memories["s0"], own)):
        ((served, _),) = algorithm.serve(got, memory, bed(start=BOTH)["s0"], ("0",))
        assert served[name] == part and all(served[k] == v for k, v in run.state.model.items())
    assert own != BOTH[name]


@pytest.mark.parametrize("algorithm", [ps.FedPer(), ps.FedRep(head_steps=2), ps.FedBN()], ids=str)
def test_a_server_that_sends_what_is_private_is_not_listened_to_and_not_answered(algorithm):
    state, site = algorithm.init(BOTH, NAMES), bed(start=BOTH)["s0"]
    own = {k: np.full_like(v, 99.0) for k, v in BOTH.items() if k not in state.model}
    fair = algorithm.local(Payload(model=state.model), Payload(), site)
    assert own and same(algorithm.local(Payload(model={**state.model, **own}), Payload(), site), fair)
    assert fair[0]["model"].keys() == state.model.keys()
