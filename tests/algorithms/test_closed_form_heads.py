"""FedRep, FedBN, FedRoD and FedABC against answers on paper: the first rounds, the limit, and what they become."""

from dataclasses import replace

import numpy as np
import pytest

from polysite import tree
from polysite.algorithms.fedabc import FedABC
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.fedbn import FedBN
from polysite.algorithms.fedper import FedPer
from polysite.algorithms.fedrep import HEAD_EPOCHS, FedRep
from polysite.algorithms.fedrod import FedRoD
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError
from polysite.payload import Payload
from polysite.site import Balanced, Fit, Objective, OneVsAll
from quadratic import Quadratic
from table import same

A, B, N = np.array([0.5, 1.0, 2.0, 3.0]), np.array([-1.0, 0.3, 2.0, 0.9]), np.array([2, 8, 5, 5])
P, ETA, K = N / N.sum(), 0.1, 5
NAMES = [f"s{i}" for i in range(4)]
SPLITS = {"body.w": np.array([0.7]), "head.w": np.array([-0.2])}


def bed(start, a=A, b=B, **kw):
    return {s: Quadratic(a[i], np.full(N[i], b[i]), lr=ETA, steps=K, start=start, **kw) for i, s in enumerate(NAMES)}


def played(algorithm, sites, start, rounds, share=1.0):
    """(the models, what the sites remember, all that crossed), round by round."""
    engine, models, kept, crossed = Simulator(algorithm, sites), [], [], []
    for r in run_rounds(algorithm, engine, start, Plan(rounds=rounds, share=share), seed=0):
        models.append(r.state.model)
        kept.append(engine.memories())
        crossed += [*r.sent.values(), *(x.payload for x in r.replies.values())]
    return models, kept, crossed


def of(memories, field, name):
    return np.array([memories[i][field][name].item() for i in NAMES])


@pytest.mark.parametrize(
    ("algorithm", "p", "head", "body"),
    [
        (FedRep(head_steps=4, steps=2), np.full(4, 0.25), (ETA, 4), (ETA, 2)),
        (FedRep(head_steps=4, steps=2, uniform=False), P, (ETA, 4), (ETA, 2)),
        (FedRep(lr=0.05), np.full(4, 0.25), (0.05, HEAD_EPOCHS * K), (0.05, K)),
        (FedRep(head_lr=0.03, head_epochs=2, epochs=3), np.full(4, 0.25), (0.03, 2 * K), (ETA, 3 * K)),
    ],
    ids=["uniform", "by size", "the paper's epochs", "epochs and rates"],
)
def test_fedrep_first_two_rounds_and_limit(algorithm, p, head, body):
    """The head goes first: v <- v - (1 - alpha)(u + v - b), then the body by what is left of the error."""
    models, kept, _ = played(algorithm, bed(SPLITS), SPLITS, 400)
    alpha, beta = ((1 - lr * A) ** steps for lr, steps in (head, body))
    u, v = 0.7, np.full(4, -0.2)
    for k in range(2):
        off = u + v - B
        u, v = u - sum(p * alpha * (1 - beta) * off), v - (1 - alpha) * off
        assert models[k].keys() == {"body.w"} and models[k]["body.w"] == pytest.approx(u, abs=1e-12)
        assert of(kept[k], "private", "head.w") == pytest.approx(v, abs=1e-12)
    assert models[-1]["body.w"] + of(kept[-1], "private", "head.w") == pytest.approx(B, abs=1e-9)


def test_fedrep_limit_of_sites_of_equal_curvature():
    a, p = 1.3, np.full(4, 0.25)
    algorithm = FedRep(head_steps=4, steps=2)
    models, kept, _ = played(algorithm, bed(SPLITS, np.full(4, a)), SPLITS, 200)
    alpha, beta = (1 - ETA * a) ** 4, (1 - ETA * a) ** 2
    q = alpha * (1 - beta)
    want = ((1 - alpha) * 0.7 - q * -0.2 + q * sum(p * B)) / ((1 - alpha) + q)
    assert models[-1]["body.w"] == pytest.approx(want, abs=1e-9)
    assert of(kept[-1], "private", "head.w") == pytest.approx(B - want, abs=1e-9)


def test_fedrep_trains_one_part_at_a_time():
    class Asked(Quadratic):
        def fit(self, params, *, only, **kw):
            asked.append((set(only), {k: v.copy() for k, v in params.items()}))
            return super().fit(params, only=only, **kw)

    start, asked = {**SPLITS, "body.norm.running_var": np.array([16.0]), "head.norm.running_var": np.array([16.0])}, []
    site = Asked(2.0, np.array([1.0]), start=start)
    algorithm = FedRep(head_steps=2)
    got = Payload(model={k: start[k] for k in ("body.w", "body.norm.running_var")})
    reply, kept = algorithm.local(got, Payload(), site)
    head, body = {"head.w", "head.norm.running_var"}, {"body.w", "body.norm.running_var"}
    assert [names for names, _ in asked] == [head, body]
    assert all(asked[1][1][k] == start[k] for k in body) and not any(asked[1][1][k] == start[k] for k in head)
    assert kept["private"].keys() == head and all(kept["private"][k] == asked[1][1][k] for k in head)
    assert reply["model"].keys() == body and reply["model"]["body.norm.running_var"] == 0.9 * 16 + 0.1 * 4


NORMS = {
    "stem.weight": np.array([[0.7]]),
    "norm.weight": np.array([-0.2]),
    "norm.running_var": np.array([16.0]),
}


@pytest.mark.parametrize(("algorithm", "p"), [(FedBN(), P), (FedBN(uniform=True), np.full(4, 0.25))], ids=str)
def test_fedbn_first_two_rounds_and_limit(algorithm, p):
    """F_k = a/2 (u + v - b)^2, v the scale of a normalisation: as with any other private layer."""
    models, kept, crossed = played(algorithm, bed(NORMS), NORMS, 250)
    u, v, pull = 0.7, np.full(4, -0.2), (1 - (1 - 2 * ETA * A) ** K) / 2
    constant = u - sum(p * v)
    for k in range(2):
        off = u + v - B
        u, v = u - sum(p * pull * off), v - pull * off
        assert models[k].keys() == {"stem.weight"} and models[k]["stem.weight"] == pytest.approx(u, abs=1e-12)
        assert of(kept[k], "private", "norm.weight") == pytest.approx(v, abs=1e-12)
        want = 0.9 ** (k + 1) * 16 + (1 - 0.9 ** (k + 1)) * A**2
        assert of(kept[k], "private", "norm.running_var") == pytest.approx(want)
    limit = (constant + sum(p * B)) / 2
    assert models[-1]["stem.weight"] == pytest.approx(limit, abs=1e-9)
    assert of(kept[-1], "private", "norm.weight") == pytest.approx(B - limit, abs=1e-9)
    assert {k for payload in crossed for k in payload["model"]} == {"stem.weight"}


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
    rng = np.random.default_rng(0)
    z = rng.normal(size=50)
    z = (z - z.mean()) / z.std()
    start = {
        "line.weight": np.array([[0.8]]), "norm.weight": np.array([1.0]), "norm.bias": np.array([0.0]),
        "norm.running_mean": np.array([0.0]), "norm.running_var": np.array([1.0]),
    }  # fmt: skip
    sites = {}
    for name, scale, shift in (("plain", 1.0, 0.0), ("wide", 5.0, -3.0), ("narrow", 0.2, 8.0)):
        sites[name] = Shifted(1.0, np.zeros(3), start=start)
        sites[name].x, sites[name].y = scale * z + shift, 1.7 * z - 0.4
    alone = {"plain": sites["plain"]}
    for rounds in (1, 250):
        models, kept, _ = played(FedBN(), sites, start, rounds)
        one, mine, _ = played(FedBN(), alone, start, rounds)
        assert models[-1]["line.weight"] == pytest.approx(one[-1]["line.weight"], abs=1e-12)
        for site in sites:
            for k in ("norm.weight", "norm.bias"):
                assert kept[-1][site]["private"][k] == pytest.approx(mine[-1]["plain"]["private"][k], abs=1e-12)
            assert kept[-1][site]["private"]["norm.running_mean"] == pytest.approx(sites[site].x.mean())
    u, own = models[-1]["line.weight"].item(), kept[-1]["wide"]["private"]
    assert [u * own["norm.weight"].item(), u * own["norm.bias"].item()] == pytest.approx([1.7, -0.4], abs=1e-6)
    averaged, _, _ = played(FedAvg(), sites, start, 20)
    statistics = tree.statistics(averaged[-1])
    seen = (sites["wide"].x - statistics["norm.running_mean"]) / statistics["norm.running_var"] ** 0.5
    assert abs(seen.mean()) > 0.5


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("uniform", [False, True])
def test_fedbn_without_normalisation_is_fedavg_to_the_last_bit(share, uniform):
    ours, kept, crossed = played(FedBN(uniform), bed(SPLITS), SPLITS, 6, share)
    theirs, _, others = played(FedAvg(uniform=uniform), bed(SPLITS), SPLITS, 6, share)
    assert same(ours, theirs) and same(crossed, others)
    assert all(not m.get("private") for memories in kept for m in memories.values())


ONE = {"head.w": np.array([0.7])}
STEEP, AIM = np.array([0.8, 1.5, 0.6, 2.2]), np.array([0.2, -0.7, 1.0, 1.4])  # of the sites' own losses


def two_losses():
    """Balanced: a/2 (u - b)^2; the site's own: C/2 (u + v - d)^2."""
    found = bed(ONE, STEEP, AIM)
    return {s: replace(site, instead=(A[i], B[i])) for i, (s, site) in enumerate(found.items())}


def test_fedrod_first_two_rounds_and_limit():
    """u is FedAvg of the balanced losses; after each of its steps v takes one on what it leaves of the site's own."""
    models, kept, _ = played(FedRoD(), two_losses(), ONE, 150)
    r, q = 1 - ETA * A, 1 - ETA * STEEP
    drift = ETA * STEEP * r * (r**K - q**K) / (r - q)
    u, v = 0.7, np.zeros(4)
    for k in range(2):
        v = (AIM - B) + q**K * (v - (AIM - B)) - drift * (u - B)
        u = sum(P * (B + r**K * (u - B)))
        assert models[k]["head.w"] == pytest.approx(u, abs=1e-12)
        assert of(kept[k], "personal", "head.w") == pytest.approx(v, abs=1e-12)
    limit = sum(P * (1 - r**K) * B) / sum(P * (1 - r**K))
    assert models[-1]["head.w"] == pytest.approx(limit, abs=1e-9)
    want = (AIM - B) - drift * (limit - B) / (1 - q**K)
    assert of(kept[-1], "personal", "head.w") == pytest.approx(want, abs=1e-9)


def test_fedrods_personal_heads_never_leave_and_are_added_to_the_generic_one():
    models, kept, crossed = played(FedRoD(), two_losses(), ONE, 8, share=0.5)
    own = {m["personal"]["head.w"].item() for memories in kept for m in memories.values() if m}
    seen = {p["model"]["head.w"].item() for p in crossed}
    assert len(own) == 16 and not own & seen and all(p.keys() <= {"model", "weight"} for p in crossed)
    algorithm, site = FedRoD(), two_losses()["s0"]
    for memory, added in ((kept[-1]["s0"], kept[-1]["s0"]["personal"]["head.w"]), (Payload(), 0.0)):
        ((served, _),) = algorithm.serve(Payload(model=models[-1]), memory, site, ("0",))
        assert served["head.w"] == models[-1]["head.w"] + added


def test_the_body_hears_nothing_of_a_personal_head():
    """Whatever the sites' own losses are, what is shared is FedAvg of the balanced ones, to the last bit."""
    other = {s: replace(x, a=9.0, b=np.full(x.size, 7.0)) for s, x in two_losses().items()}
    first, second = (played(FedRoD(), sites, ONE, 5)[0] for sites in (two_losses(), other))
    assert same(first, second) and same(first, played(FedAvg(), bed(ONE), ONE, 5)[0])


def test_which_losses_replace_the_sites_own():
    class Asked(Quadratic):
        def fit(self, params, objective):
            asked.append(objective)
            return super().fit(params, objective)

    asked, site = [], Asked(1.0, np.array([0.0]), start=SPLITS)
    FedRoD(clip=3.0).local(Payload(model=SPLITS), Payload(), site)
    assert asked[0] == Objective(loss=Balanced(3.0), personal={"head.w": 0.0})
    FedABC(0.3, 1.5, 0.9, 0.1, 4.0, ("head.*",)).local(Payload(model=SPLITS), Payload(), site)
    assert asked[1] == Objective(loss=OneVsAll(0.3, 1.5, 0.9, 0.1, 4.0))


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_fedabc_where_all_is_shared_is_fedavg(share):
    """First round and limit are FedAvg's, of the loss that is trained."""
    sites = {s: replace(x, instead=(STEEP[i], AIM[i])) for i, (s, x) in enumerate(bed(ONE).items())}
    ours = played(FedABC(personal=()), sites, ONE, 100, share)[0]
    assert same(ours, played(FedAvg(), bed(ONE, STEEP, AIM), ONE, 100, share)[0])
    if share == 1:
        r = (1 - ETA * STEEP) ** K
        assert ours[0]["head.w"] == pytest.approx(sum(P * (AIM + r * (0.7 - AIM))), abs=1e-12)
        assert ours[-1]["head.w"] == pytest.approx(sum(P * (1 - r) * AIM) / sum(P * (1 - r)), abs=1e-9)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_fedabc_trains_as_fedper_and_has_the_mean_of_the_personal_parts_for_strangers(share):
    algorithm = FedABC(personal=("head.*",))
    models, kept, crossed = played(algorithm, bed(SPLITS), SPLITS, 5, share)
    if share == 1:  # otherwise who comes later begins from the mean of the personal parts, and in FedPer from the first
        theirs, private, _ = played(FedPer(), bed(SPLITS), SPLITS, 5)
        assert same([m["body.w"] for m in models], [m["body.w"] for m in theirs])
        for mine, other in zip(kept, private, strict=True):
            assert same([m["personal"] for m in mine.values()], [m["private"] for m in other.values()])
    got, site = Payload(model=models[-1]), bed(SPLITS)["s0"]
    ((served, _),) = algorithm.serve(got, Payload(), site, ("0",))
    last = [p for p in crossed if "weight" in p][-int(4 * share) :]
    total = sum(p["weight"] for p in last)
    assert served["head.w"] == pytest.approx(sum(p["weight"] * p["model"]["head.w"] for p in last) / total)
    ((served, _),) = algorithm.serve(got, kept[-1]["s0"], site, ("0",))
    assert served == {**models[-1], **kept[-1]["s0"]["personal"]}


@pytest.mark.parametrize(
    ("algorithm", "field", "private"),
    [(FedRep(head_steps=2), "private", "head.w"), (FedBN(), "private", "norm.weight"),
     (FedRoD(), "personal", "head.w"), (FedABC(personal=("head.*",)), "personal", "head.w")],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_who_is_absent_keeps_what_is_its_own(algorithm, field, private):
    start = {**SPLITS, **NORMS}
    sites, memory = bed(start), {}
    state = algorithm.init(start, NAMES)
    for cohort in (["s0", "s1"], ["s1", "s2"]):
        before, sent, replies = dict(memory), algorithm.send(state, cohort), {}
        for i in cohort:
            replies[i], memory[i] = algorithm.local(sent[i], memory.get(i, Payload()), sites[i])
        state = algorithm.merge(state, replies)
    assert memory["s0"] is before["s0"] and memory["s1"][field][private] != before["s1"][field][private]


@pytest.mark.parametrize("algorithm", [FedRep(head_steps=2), FedBN()], ids=str)
def test_a_server_that_sends_what_is_private_is_not_listened_to_and_not_answered(algorithm):
    start = {**SPLITS, **NORMS}
    state = algorithm.init(start, NAMES)
    own = {k: np.full_like(v, 99.0) for k, v in start.items() if k not in state.model}
    fair = algorithm.local(Payload(model=state.model), Payload(), bed(start)["s0"])
    assert own and same(algorithm.local(Payload(model={**state.model, **own}), Payload(), bed(start)["s0"]), fair)


REFUSED = {
    "a head of nothing": (lambda: FedRep(()), "names nothing that stays at a site"),
    "an unknown head": (lambda: FedRep(("tail.*",)).init(SPLITS, NAMES), "private names 'tail.*', and no parameter"),
    "all in the head": (lambda: FedRep(("*",)).init(SPLITS, NAMES), "keeps every parameter at the sites"),
    "epochs and steps": (lambda: FedRep(epochs=1, steps=2), r"not both \(epochs = 1, steps = 2\)"),
    "both for the head": (lambda: FedRep(head_epochs=1, head_steps=2), r"\(head_epochs = 1, head_steps = 2\)"),
    "a head that does not train": (lambda: FedRep(head_epochs=0), "head_epochs = 0 must be at least 1"),
    "no head": (lambda: FedRoD().init({"w": np.ones(1)}, NAMES), "names 'head.*', and no parameter of this network"),
    "a negative clip": (lambda: FedRoD(-1.0), "clip = -1.0 must be at least 0"),
    "more than all": (lambda: FedABC(lam=1.5), "lam = 1.5 must be between 0 and 1"),
    "no negatives": (lambda: FedABC(ratio=0.0), "ratio = 0.0 must be more than 0"),
    "no bias": (lambda: FedABC().init(SPLITS, NAMES), "personal names 'head.*bias', and no parameter"),
}


@pytest.mark.parametrize(("make", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_what_makes_no_sense_is_refused(make, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make()
