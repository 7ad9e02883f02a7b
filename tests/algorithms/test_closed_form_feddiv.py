"""FedDiv on quadratic sites with two encoders and a decoder that add up: u = e_0 + e_1, s = u + d.

K steps on the encoders alone go (1 - 2 eta a)^K of the way in s, each encoder half of it; K steps on the decoder alone
go (1 - eta a)^K.
"""

from dataclasses import replace

import numpy as np
import pytest

from polysite.algorithms.base import diagnostics, shares
from polysite.algorithms.feddiv import FedDiv
from polysite.costs.rehearsal import rehearse
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError
from polysite.payload import Payload
from quadratic import Quadratic, play
from table import same, screen

ZERO, ONE, HEAD = "encoder.class0.w", "encoder.class1.w", "head.w"
START = {ZERO: np.array([2.0]), ONE: np.array([1.5]), HEAD: np.array([0.5])}
KINDS = {"a": (0, 0, 0, 1), "b": (0, 1, 1, 1, 1, 1, 1, 1), "c": (1, 1, 1), "d": (0, 0, 0, 0, 1)}
CURVES = {"a": 1.0, "b": 2.0, "c": 1.0, "d": 3.0}
PLACES = {"a": -1.0, "b": 0.0, "c": 1.0, "d": 2.0}
PRIVATE = 1e12


def sites(curves=CURVES, kinds=KINDS):
    rng = np.random.default_rng(3)
    return {
        i: Quadratic(a, rng.normal(PLACES[i], 0.3, len(kinds[i])), start=START, kinds=kinds[i])
        for i, a in curves.items()
    }


def value(x):
    return x.item()


def having(everyone):
    """How many of all cases of either class a site has."""
    return [{i: q.amount(c) / sum(o.amount(c) for o in everyone.values()) for i, q in everyone.items()} for c in (0, 1)]


def reference(everyone, rounds):
    """FedDiv without divergence loss and personal decoders, written down once more."""
    e, d = [value(START[ZERO]), value(START[ONE])], value(START[HEAD])
    for t in range(rounds):
        s = sum(e) + d
        if t % 2:
            d = np.mean([d - (1 - (1 - q.lr * q.a) ** q.steps) * (s - q.b.mean()) for q in everyone.values()])
            continue
        half = {i: 0.5 * (1 - (1 - 2 * q.lr * q.a) ** q.steps) * (s - q.b.mean()) for i, q in everyone.items()}
        e = [old - sum(share[i] * half[i] for i in half) for old, share in zip(e, having(everyone), strict=True)]
    return e, d


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_without_personal_decoders_it_is_class_weighted_averaging_in_turns(rounds):
    everyone = sites()
    last = play(FedDiv(alpha=0.0, lam=0.0), everyone, rounds).last
    e, d = reference(everyone, rounds)
    assert [value(last.state.encoder[k]) for k in (ZERO, ONE)] == pytest.approx(e, abs=1e-12)
    assert value(last.state.decoder[HEAD]) == pytest.approx(d, abs=1e-12)
    assert len({value(own[HEAD]) for own in last.state.decoders.values()}) <= 1


def test_the_first_round_with_divergence():
    """S = s - b goes to -alpha sum sigma / 2a, e_0 - e_1 moves by eta K alpha (sigma_1 - sigma_0)."""
    everyone, alpha, focus, ends = sites(), 0.3, 0.7, {}
    for i, q in everyone.items():
        sigma = [np.std(np.exp(focus * (2 * (np.array(q.kinds) == c) - 1)) * q.b) for c in (0, 1)]
        rest = q.b.mean() - alpha * sum(sigma) / (2 * q.a)  # where it would come to rest
        s = rest + (1 - 2 * q.lr * q.a) ** q.steps * (4.0 - rest)
        gap = 0.5 - q.lr * q.steps * alpha * (sigma[0] - sigma[1])
        ends[i] = (s - 0.5 + gap) / 2, (s - 0.5 - gap) / 2
    want = [sum(share[i] * ends[i][c] for i in ends) for c, share in enumerate(having(everyone))]
    encoder = play(FedDiv(alpha=alpha, focus=focus), everyone, 1).state.encoder
    assert [value(encoder[ZERO]), value(encoder[ONE])] == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("rounds", [4, 200])
def test_private_decoders_reach_every_sites_own_optimum(rounds):
    """r_k = s_k - b_k: encoders shift all by one amount, decoders shrink each; in the limit nothing is left."""
    everyone = sites()
    state = play(FedDiv(alpha=0.0, lam=PRIVATE), everyone, rounds).state
    weight = [sum(share[i] for share in having(everyone)) / 2 for i in everyone]
    both = [1 - (1 - 2 * q.lr * q.a) ** q.steps for q in everyone.values()]
    shrink = np.diag([(1 - q.lr * q.a) ** q.steps for q in everyone.values()])
    step = shrink @ (np.eye(4) - np.outer(np.ones(4), np.multiply(weight, both)))
    want = np.linalg.matrix_power(step, rounds // 2) @ [4.0 - q.b.mean() for q in everyone.values()]
    u = sum(value(v) for v in state.encoder.values())
    found = [u + value(state.decoders[i][HEAD]) - q.b.mean() for i, q in everyone.items()]
    assert found == pytest.approx(list(want), abs=1e-10)
    assert rounds < 100 or np.abs(found).max() < 1e-6
    stranger = FedDiv().send(state, ["stranger"])["stranger"]["model"]  # who never trained has the mean decoder
    assert value(stranger[HEAD]) == pytest.approx(np.mean([value(d[HEAD]) for d in state.decoders.values()]))
    assert value(stranger[ZERO]) == value(state.encoder[ZERO])


def decoded(algorithm, state=None, **decoders):
    """The state after a round in which these decoders came."""
    decoders = {i: np.atleast_1d(d) for i, d in decoders.items()}
    counts, encoders = {"class0": np.ones(1), "class1": np.ones(1)}, {ZERO: np.ones(1), ONE: np.ones(1)}
    state = state or algorithm.init({**encoders, HEAD: 0 * next(iter(decoders.values()))}, sorted(decoders))
    state = algorithm.merge(state, {i: Payload(model=encoders, counts=counts) for i in decoders})
    return algorithm.merge(state, {i: Payload(model={HEAD: d}, counts=counts) for i, d in decoders.items()})


@pytest.mark.parametrize("lam", [0.0, 3.0, PRIVATE])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_decoders_are_a_fixed_point(lam, dtype):
    mine = np.array([0.3, -7.0, 1e-3, 0.0], dtype)
    state = decoded(FedDiv(lam=lam), a=mine, b=mine, c=mine)
    for own in (*state.decoders.values(), state.decoder):
        assert own[HEAD].tobytes() == mine.tobytes()
    assert state.personal == state.spread == 0.0


def test_every_number_goes_by_its_own_deviation():
    """phi* - (phi* - m) exp(-(lam s)^gamma), number by number: agreed, in between, disagreed."""
    a, b = np.array([0.0, 0.0, 0.0]), np.array([0.02, 2 / 3.2, 40.0])
    state = decoded(FedDiv(lam=3.2, gamma=10.0), a=a, b=b)
    m, s = (a + b) / 2, np.abs(b - a) / 2
    g = np.exp(-((3.2 * s) ** 10))
    assert g == pytest.approx([1.0, np.exp(-1.0), 0.0], abs=1e-9)
    for own, mine in ((a, "a"), (b, "b")):
        assert state.decoders[mine][HEAD] == pytest.approx(own - (own - m) * g, abs=1e-12)
    assert state.decoders["b"][HEAD][2] == 40.0  # to the last bit
    assert state.personal == pytest.approx(1 / 3) and state.spread == pytest.approx(s.mean())
    assert state.decoder[HEAD] == pytest.approx((state.decoders["a"][HEAD] + state.decoders["b"][HEAD]) / 2)
    soft = decoded(FedDiv(lam=3.2, gamma=1.0), a=a, b=b)
    assert soft.decoders["a"][HEAD] == pytest.approx(m * np.exp(-3.2 * s), abs=1e-12)


def test_a_share_of_the_numbers_stays_personal_whatever_their_scale():
    """1 / lam is the largest deviation that is shared: g = 1/e there, and the hard selection of lam elsewhere."""
    a, b = np.zeros(40), 2.0 ** np.random.default_rng(0).permutation(40)
    for scale, share, personal in ((1e-6, 0.1, 4), (1.0, 0.5, 20), (1e3, 0.9, 36)):
        state = decoded(FedDiv(share=share), a=a, b=scale * b)
        s = scale * b / 2
        limit = np.sort(s)[39 - personal]
        assert state.personal == personal / 40 and state.lam == pytest.approx(1 / limit)
        g = np.exp(-((s / limit) ** 10))
        assert state.decoders["b"][HEAD] == pytest.approx(scale * b - (scale * b - s) * g, rel=1e-12)
        assert (state.decoders["b"][HEAD][s > limit] == scale * b[s > limit]).all()  # to the last bit
        given = decoded(FedDiv(lam=state.lam), a=a, b=scale * b)
        assert all(same(given.decoders[i], state.decoders[i]) for i in "ab")
    two = decoded(
        FedDiv(share=0.5, nearest=2), a=np.array([0.0, 0.0]), b=np.array([1.0, 3.0]), c=np.array([90.0, 80.0])
    )
    assert two.personal == 0.5  # of every decoder, among its own neighbours
    assert FedDiv().diagnostics(two)["lam"] == two.lam and "lam" not in FedDiv(lam=1.0).diagnostics(two)


@pytest.mark.parametrize("rounds", [2, 7])
def test_no_share_is_plain_averaging_and_all_of_it_a_private_decoder_to_the_last_bit(rounds):
    for share, lam in ((0.0, 0.0), (1.0, PRIVATE)):
        mine, theirs = (play(FedDiv(alpha=0.0, **x), sites(), rounds).state for x in ({"share": share}, {"lam": lam}))
        assert same(mine.decoders, theirs.decoders) and same(mine.encoder, theirs.encoder)
        assert mine.personal == theirs.personal == share


def test_equal_numbers_have_nothing_personal():
    a, b = (np.r_[own, np.ones(9)] for own in np.random.default_rng(1).normal(size=(2, 9)))
    half, more = (decoded(FedDiv(share=share), a=a, b=b, c=np.ones(18)) for share in (0.5, 0.8))
    assert half.personal == more.personal == 0.5 and more.lam == PRIVATE


@pytest.mark.parametrize(
    ("nearest", "want"), [(1, [0, 1, 9]), (2, [0.5, 0.5, 5]), (3, [10 / 3] * 3), (None, [10 / 3] * 3)]
)
def test_decoders_are_compared_with_those_of_the_nearest_sites(nearest, want):
    state = decoded(FedDiv(lam=0.0, nearest=nearest), a=0.0, b=1.0, c=9.0)
    assert [value(own[HEAD]) for own in state.decoders.values()] == pytest.approx(want)


def test_a_round_moves_half_of_what_fedavg_does():
    """The one part down, the other up, with a few counts; the first exchange brings the whole model."""
    crossed = [(r.sent["a"].nbytes, r.replies["a"].payload.nbytes) for r in play(FedDiv(), sites(), 3).rounds]
    assert crossed == [(24, 16 + 2 * 8), (16, 8 + 2 * 8), (8, 16 + 2 * 8)]  # both encoders: 16 bytes; the decoder: 8
    *_, later = rehearse(FedDiv(), {k: np.zeros((10, 10)) for k in START}, {"a": 1, "b": 1}, rounds=2)
    assert (later["a"].down, later["a"].up) == (1600, 800 + 2 * 8)


@pytest.mark.parametrize("algorithm", [FedDiv(), FedDiv(alpha=0.0, lam=0.0), FedDiv(lam=PRIVATE, nearest=2)], ids=str)
def test_a_site_holds_what_the_server_believes_it_holds(algorithm):
    """Also where half of the sites are asked, and one is refused."""

    class Moody(Simulator):
        def train(self, round, sent):
            for site, reply in super().train(round, sent):
                broken = Payload(**{**reply.payload, "counts": {"class0": np.array([-1.0])}})
                yield site, replace(reply, payload=broken) if site == "b" and round % 3 == 1 else reply

    run = play(algorithm, sites(), 12, 0.5, engine=Moody(algorithm, sites(), wire=True))
    for r, memories in zip(run.rounds, run.kept, strict=True):
        for i, got in algorithm.send(r.state, [*"abcd", "stranger"]).items():
            ((model, _),) = algorithm.serve(got, memories.get(i, Payload()), None, ())
            own = r.state.decoders.get(i, r.state.decoder)
            assert same(dict(sorted(model.items())), dict(sorted({**r.state.encoder, **own}.items())))
            assert i in r.state.holders or len(got["model"]) == 3
    assert any(r.refused for r in run.rounds) and 0 < len(run.state.holders) < 4


def test_an_absent_site_keeps_its_decoder_and_counts_in_no_mean():
    rule = FedDiv(lam=0.0)
    new = decoded(rule, decoded(rule, a=1.0, b=3.0, c=8.0), a=1.0, b=5.0)
    assert [value(new.decoders[i][HEAD]) for i in "abc"] == pytest.approx([3.0, 3.0, 4.0])
    assert new.holders == ("a", "b") and value(new.decoder[HEAD]) == pytest.approx(10 / 3)


def test_an_encoder_of_a_class_that_nobody_has_stays_as_it_is():
    everyone = {i: q for i, q in sites(kinds={**KINDS, "b": (1,) * 8, "a": (1,) * 4}).items() if i in "abc"}
    last = play(FedDiv(alpha=0.0), everyone, 1).last
    assert value(last.state.encoder[ZERO]) == 2.0 and value(last.state.encoder[ONE]) != 1.5
    assert sum(last.shares.values()) == pytest.approx(1.0)


def test_shares_are_the_mean_over_the_classes_and_decoders_have_none():
    algorithm, (first, second) = FedDiv(), play(FedDiv(), sites(), 2).rounds
    assert first.shares == pytest.approx(
        {"a": (3 / 8 + 1 / 12) / 2, "b": (1 / 8 + 7 / 12) / 2, "c": 3 / 24, "d": 0.5 * (0.5 + 1 / 12)}
    )
    assert second.shares == {} and first.diagnostics == {}
    assert second.diagnostics.keys() == {"personal share of the decoders", "deviation between decoders", "lam"}
    assert shares(algorithm, second.state, {}) == {} and diagnostics(algorithm, first.state) == {}


def test_a_network_without_sub_encoders_is_refused_unless_there_is_no_divergence_loss():
    plain = {"stem.w": np.ones(1), "encoder.0.w": np.ones(1), HEAD: np.ones(1)}
    for rule, network, sentence in (
        (FedDiv(), plain, r"an encoder for every class, model\.name = 'unet_sub' or 'densenet_sub'; with"),
        (FedDiv(alpha=0.0), {HEAD: np.ones(1)}, "into encoder and decoder"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            rule.init(network, "ab")
    assert FedDiv().init({}, "ab").encoder == {}  # no network is known yet
    one = {i: Quadratic(q.a, q.b, start=plain) for i, q in sites().items()}
    last = play(FedDiv(alpha=0.0, lam=0.0), one, 1, start=plain).last
    n = sum(q.size for q in one.values())
    want = sum(q.size / n * (1 - 0.5 * (1 - (1 - 2 * q.lr * q.a) ** 5) * (3 - q.b.mean())) for q in one.values())
    assert value(last.state.encoder["stem.w"]) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ({"class0": np.array([3.0]), "class1": np.array([0.0])}, None),
        ({"class0": np.array([-1.0])}, "'counts' has 'class0' = -1"),
        ({"class0": np.array([np.nan])}, "'counts' is not finite"),
        ({"class0": np.array([1, 2])}, "'counts' has 'class0' of type int64 and shape (2,)"),
        ({"class0": np.array([1e6])}, "'counts' is 3e+05 times as large as is usual"),
        ({}, "'counts' is empty"),
    ],
)
def test_counts_are_held_to_what_hospitals_have(counts, says):
    algorithm = FedDiv()
    sent = algorithm.send(algorithm.init(START, "abc"), "abc")
    model, usual = {k: START[k] for k in (ZERO, ONE)}, {"class0": np.array([3.0]), "class1": np.array([1.0])}
    came = {i: Payload(model=model, counts=counts if i == "a" else usual) for i in "abc"}
    assert screen(algorithm.reply, START, sent, came) == ({"a": says} if says else {})
    more = {**came, "b": Payload(model=dict(START), counts=usual)}  # the decoder was not asked for
    assert screen(algorithm.reply, START, sent, more)["b"] == "'model' has an unknown 'head.w'"
