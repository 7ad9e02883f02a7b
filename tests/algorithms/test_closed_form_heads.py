"""FedPer, LG-FedAvg, FedRep, FedBN, FedRoD and FedABC against answers on paper: first rounds, limit."""

from dataclasses import replace

import numpy as np
import pytest

import polysite as ps
from polysite import tree
from polysite.algorithms.fedrep import HEAD_EPOCHS
from polysite.payload import Payload
from polysite.site import Balanced, Fit, Objective, OneVsAll
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


class Product(Quadratic):
    """F = (e h - b)^2 / 2, of an encoder and a head."""

    def losses(self, params, *, augmented=False):
        return {"0": float((params["encoder.w"] * params["head.w"] - self.b.mean()).item() ** 2 / 2)}

    def fit(self, params, **kw):
        e, h = params["encoder.w"], params["head.w"]
        for _ in range(self.steps):
            off = e * h - self.b.mean()
            e, h = e - self.lr * h * off, h - self.lr * e * off
        return Fit({"encoder.w": e, "head.w": h}, 0.0, self.steps, self.steps * self.lr, self.steps * self.lr)


def test_which_layers_are_shared():
    """One step from (e, h): FedPer averages e by the slope h, LG-FedAvg averages h by the slope e."""
    e, h = 0.6, 1.1
    start, off = {"encoder.w": np.array([e]), "head.w": np.array([h])}, e * h - sum(P * B)
    for algorithm, shared, private, want in (
        (ps.FedPer(), "encoder.w", "head.w", e - ETA * h * off),
        (ps.LGFedAvg(("encoder.*",)), "head.w", "encoder.w", h - ETA * e * off),
    ):
        run = play(algorithm, bed(a=np.ones(4), kind=Product, steps=1, start=start), 600)
        assert run.models(shared)[0] == pytest.approx(want, abs=1e-12)
        assert run.own("private", private) * run.models(shared)[-1] == pytest.approx(
            B, abs=1e-9
        )  # every site's optimum


def test_running_statistics_stay_with_the_parameters_of_their_layer():
    shared, private = "stem.norm.running_var", "head.norm.running_var"
    start = {"stem.w": np.array([1.0]), "head.norm.weight": np.array([0.5])}
    start |= {shared: np.array([16.0]), private: np.array([16.0])}
    for patterns in (("head.*",), ("head.norm.weight",)):
        run = play(ps.FedPer(patterns), bed(a=np.array([1.0, 3.0]), b=np.ones(2), n=[1, 1], start=start), 2)
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


def test_fedrep_limit_of_sites_of_equal_curvature():
    run = play(ps.FedRep(head_steps=4, steps=2), bed(a=np.full(4, 1.3), start=SPLITS), 100)
    alpha, beta = (1 - ETA * 1.3) ** 4, (1 - ETA * 1.3) ** 2
    q = alpha * (1 - beta)
    want = ((1 - alpha) * 0.7 - q * -0.2 + q * B.mean()) / ((1 - alpha) + q)
    assert run.models("body.w")[-1] == pytest.approx(want, abs=1e-9)
    assert run.own("private", "head.w") == pytest.approx(B - want, abs=1e-9)


def test_fedrep_trains_one_part_at_a_time():
    class Asked(Quadratic):
        def fit(self, params, *, only, **kw):
            asked.append((set(only), {k: v.copy() for k, v in params.items()}))
            return super().fit(params, only=only, **kw)

    start, asked = {**SPLITS, "body.norm.running_var": np.array([16.0]), "head.norm.running_var": np.array([16.0])}, []
    site = Asked(2.0, np.array([1.0]), start=start)
    algorithm = ps.FedRep(head_steps=2)
    got = Payload(model={k: start[k] for k in ("body.w", "body.norm.running_var")})
    reply, kept = algorithm.local(got, Payload(), site)
    head, body = {"head.w", "head.norm.running_var"}, {"body.w", "body.norm.running_var"}
    assert [names for names, _ in asked] == [head, body]
    assert all(asked[1][1][k] == start[k] for k in body) and not any(asked[1][1][k] == start[k] for k in head)
    assert kept["private"].keys() == head and all(kept["private"][k] == asked[1][1][k] for k in head)
    assert reply["model"].keys() == body and reply["model"]["body.norm.running_var"] == 0.9 * 16 + 0.1 * 4


class Shifted(Quadratic):
    """One set of data, seen by every site on a scale of its own; u (g norm(x) + b) and half the squared error."""

    def losses(self, params, *, augmented=False):
        return {"0": 0.0}

    def fit(self, params, **kw):
        h = (self.x - self.x.mean()) / self.x.std()
        u, g, b = (params[k].item() for k in ("line.weight", "norm.weight", "norm.bias"))
        e = u * (g * h + b) - self.y
        moved = [np.mean(e * (g * h + b)), np.mean(e * u * h), np.mean(e * u)]
        u, g, b = (w - ETA * m for w, m in zip((u, g, b), moved, strict=True))
        found = {"line.weight": np.array([[u]]), "norm.weight": np.array([g]), "norm.bias": np.array([b])}
        seen = {"norm.running_mean": np.array([self.x.mean()]), "norm.running_var": np.array([self.x.var()])}
        return Fit({**found, **seen}, 0.0, 1, ETA, ETA)


def test_fedbn_undoes_a_shift_and_a_scale_of_the_data_exactly():
    """All sites move as one on the common data would, to least squares; an average of statistics fits nobody."""
    z = np.random.default_rng(0).normal(size=50)
    z = (z - z.mean()) / z.std()
    start = {
        "line.weight": np.array([[0.8]]), "norm.weight": np.array([1.0]), "norm.bias": np.array([0.0]),
        "norm.running_mean": np.array([0.0]), "norm.running_var": np.array([1.0]),
    }  # fmt: skip
    sites = {}
    for name, scale, shift in (("plain", 1.0, 0.0), ("wide", 5.0, -3.0), ("narrow", 0.2, 8.0)):
        sites[name] = Shifted(1.0, np.zeros(3), start=start)
        sites[name].x, sites[name].y = scale * z + shift, 1.7 * z - 0.4
    run, alone = play(ps.FedBN(), sites, 250), play(ps.FedBN(), {"plain": sites["plain"]}, 250)
    assert run.models("line.weight") == pytest.approx(alone.models("line.weight"), abs=1e-12)
    for k in ("norm.weight", "norm.bias"):
        assert run.own("private", k) == pytest.approx([alone.own("private", k).item()] * 3, abs=1e-12)
    seen = [sites[i].x.mean() for i in sorted(sites)]
    assert run.own("private", "norm.running_mean") == pytest.approx(seen)
    u, own = run.models("line.weight")[-1], run.memories["wide"]["private"]
    assert [u * own["norm.weight"].item(), u * own["norm.bias"].item()] == pytest.approx([1.7, -0.4], abs=1e-6)
    averaged = tree.statistics(play(ps.FedAvg(), sites, 20).state.model)
    seen = (sites["wide"].x - averaged["norm.running_mean"]) / averaged["norm.running_var"] ** 0.5
    assert abs(seen.mean()) > 0.5


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("uniform", [False, True])
def test_fedbn_without_normalisation_is_fedavg_to_the_last_bit(share, uniform):
    ours, theirs = (play(rule, bed(start=SPLITS), 6, share) for rule in (ps.FedBN(uniform), ps.FedAvg(uniform=uniform)))
    assert same([s.model for s in ours.states], [s.model for s in theirs.states]) and same(ours.crossed, theirs.crossed)
    assert all(not m.get("private") for memories in ours.kept for m in memories.values())


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


def test_fedrods_personal_heads_never_leave_and_are_added_to_the_generic_one():
    run = play(ps.FedRoD(), two_losses(), 8, share=0.5)
    own = {m["personal"]["head.w"].item() for memories in run.kept for m in memories.values() if m}
    seen = {p["model"]["head.w"].item() for p in run.crossed}
    assert len(own) == 16 and not own & seen and all(p.keys() <= {"model", "weight"} for p in run.crossed)
    model, memory, site = run.state.model, run.memories["s0"], two_losses()["s0"]
    for kept, added in ((memory, memory["personal"]["head.w"]), (Payload(), 0.0)):
        ((served, _),) = ps.FedRoD().serve(Payload(model=model), kept, site, ("0",))
        assert served["head.w"] == model["head.w"] + added


def test_the_body_hears_nothing_of_a_personal_head():
    """Whatever the sites' own losses are, what is shared is FedAvg of the balanced ones, to the last bit."""
    other = {s: replace(x, a=9.0, b=np.full(x.size, 7.0)) for s, x in two_losses().items()}
    first, second = (play(ps.FedRoD(), sites, 5).models("head.w") for sites in (two_losses(), other))
    assert first == second == play(ps.FedAvg(), bed(start=ONE), 5).models("head.w")


def test_which_losses_replace_the_sites_own():
    class Asked(Quadratic):
        def fit(self, params, objective):
            asked.append(objective)
            return super().fit(params, objective)

    asked, site = [], Asked(1.0, np.array([0.0]), start=SPLITS)
    ps.FedRoD(clip=3.0).local(Payload(model=SPLITS), Payload(), site)
    assert asked[0] == Objective(loss=Balanced(3.0), personal={"head.w": 0.0})
    ps.FedABC(0.3, 1.5, 0.9, 0.1, 4.0, ("head.*",)).local(Payload(model=SPLITS), Payload(), site)
    assert asked[1] == Objective(loss=OneVsAll(0.3, 1.5, 0.9, 0.1, 4.0))


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_fedabc_where_all_is_shared_is_fedavg(share):
    """First round and limit are FedAvg's, of the loss that is trained."""
    sites = {s: replace(x, instead=(STEEP[i], AIM[i])) for i, (s, x) in enumerate(bed(start=ONE).items())}
    ours = play(ps.FedABC(personal=()), sites, 40, share).models("head.w")
    assert ours == play(ps.FedAvg(), bed(STEEP, AIM, start=ONE), 40, share).models("head.w")
    if share == 1:
        r = (1 - ETA * STEEP) ** K
        assert ours[0] == pytest.approx(sum(P * (AIM + r * (0.7 - AIM))), abs=1e-12)
        assert ours[-1] == pytest.approx(sum(P * (1 - r) * AIM) / sum(P * (1 - r)), abs=1e-9)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_fedabc_trains_as_fedper_and_has_the_mean_of_the_personal_parts_for_strangers(share):
    algorithm = ps.FedABC(personal=("head.*",))
    run = play(algorithm, bed(start=SPLITS), 5, share)
    if share == 1:  # otherwise who comes later begins from the mean of the personal parts, and in FedPer from the first
        theirs = play(ps.FedPer(), bed(start=SPLITS), 5)
        assert run.models("body.w") == theirs.models("body.w")
        for round in range(5):
            mine = run.own("personal", "head.w", round)
            assert mine.tolist() == theirs.own("private", "head.w", round).tolist()
    got, site = Payload(model=run.state.model), bed(start=SPLITS)["s0"]
    ((served, _),) = algorithm.serve(got, Payload(), site, ("0",))
    last = [x.payload for x in run.last.replies.values()]
    total = sum(p["weight"] for p in last)
    assert served["head.w"] == pytest.approx(sum(p["weight"] * p["model"]["head.w"] for p in last) / total)
    ((served, _),) = algorithm.serve(got, run.memories["s0"], site, ("0",))
    assert served == {**run.state.model, **run.memories["s0"]["personal"]}


OWN = {
    "fedper": (ps.FedPer(), "private", "head.w"),
    "lg-fedavg": (ps.LGFedAvg(("body.*",)), "private", "body.w"),
    "fedrep": (ps.FedRep(head_steps=2), "private", "head.w"),
    "fedbn": (ps.FedBN(), "private", "norm.weight"),
    "fedrod": (ps.FedRoD(), "personal", "head.w"),
    "fedabc": (ps.FedABC(personal=("head.*",)), "personal", "head.w"),
}
BOTH = {**SPLITS, **NORMS}


@pytest.mark.parametrize(("algorithm", "field", "name"), OWN.values(), ids=OWN.keys())
def test_who_is_absent_keeps_what_is_its_own_and_who_is_new_gets_the_first_one(algorithm, field, name):
    sites, memory, state = bed(start=BOTH), {}, algorithm.init(BOTH, NAMES)
    for cohort in (["s0", "s1"], ["s1", "s2"]):
        before, sent, replies = dict(memory), algorithm.send(state, cohort), {}
        for i in cohort:
            replies[i], memory[i] = algorithm.local(sent[i], memory.get(i, Payload()), sites[i])
        state = algorithm.merge(state, replies)
    assert memory["s0"] is before["s0"] and memory["s1"][field][name] != before["s1"][field][name]
    if field == "private":
        got = algorithm.send(state, ["new"])["new"]
        for kept, own in ((Payload(), BOTH[name]), (memory["s0"], memory["s0"]["private"][name])):
            ((served, _),) = algorithm.serve(got, kept, sites["s0"], ("0",))
            assert served[name] == own and all(served[k] == v for k, v in state.model.items())


@pytest.mark.parametrize("algorithm", [ps.FedPer(), ps.FedRep(head_steps=2), ps.FedBN()], ids=str)
def test_a_server_that_sends_what_is_private_is_not_listened_to_and_not_answered(algorithm):
    state, site = algorithm.init(BOTH, NAMES), bed(start=BOTH)["s0"]
    own = {k: np.full_like(v, 99.0) for k, v in BOTH.items() if k not in state.model}
    fair = algorithm.local(Payload(model=state.model), Payload(), site)
    assert own and same(algorithm.local(Payload(model={**state.model, **own}), Payload(), site), fair)
    assert fair[0]["model"].keys() == state.model.keys()
