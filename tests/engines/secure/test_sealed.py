"""Statistics that are encrypted for the hospital that compares: who can open them, and what comes of it."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

import polysite as ps
from polysite import assessment, config
from polysite.engines.secure.member import Mask, open_session, packed, take_step, unpacked
from polysite.engines.secure.sealed import Seal, analysed, analyst_of, protecting
from polysite.errors import DataError, PayloadError
from polysite.heterogeneity import hidden
from polysite.heterogeneity.assessment import analyse
from polysite.heterogeneity.exchange import Assess
from polysite.heterogeneity.verdict import judge
from polysite.payload import Payload
from studies import tiny

ASSESS = Assess(projections=0, permutations=99, resamples=100)
FOUR = ("anna", "bonn", "carl", "dora")


def statistics(seed, shift=0.0, cases=12):
    rng = np.random.default_rng(seed)
    lists = {"intensity t1": np.sort(rng.normal(5 + shift, 1, cases)), "volume WT": np.sort(rng.gamma(2, 3, cases))}
    absent = {name: np.zeros(1) for name in lists}
    return Payload(cases=cases, metric=3, unlabelled=0, quantiles=lists, absent=absent)


REPLIES = {i: statistics(k, 2.5 * (i == "dora")) for k, i in enumerate(FOUR)}
TOLD = Payload(session=packed({"id": bytes(16)}))


def sessions(names=FOUR):
    """Sessions of hospitals that have exchanged keys."""
    opened = {i: open_session(TOLD, i, 3) for i in names}
    keys = {i: unpacked(answer["keys"]) for i, (_, answer) in opened.items()}
    fields = (("mask", "mask_keys"), ("share", "share_keys"), ("digest", "digests"))
    every = {field: packed({i: k[name] for i, k in keys.items()}) for name, field in fields}
    return {i: take_step("shares", Payload(**TOLD, **every), s)[0] for i, (s, _) in opened.items()}


def sealed(known):
    return {i: Seal(known[i]).apply({}, Payload(), REPLIES[i])["sealed"]["statistics"] for i in known}


def compared(blobs, session):
    """What a hospital answers that is asked to compare."""
    return analysed(Payload(**TOLD, sealed=blobs, can_change=1.0, unseen=0.0), session, ASSESS)


def test_the_first_hospital_comes_to_the_results_of_open_statistics():
    known = sessions()
    text = compared(sealed(known), known["anna"])["comparison"]["json"].tobytes()
    found, verdict = hidden.read(text, ASSESS, FOUR)
    plain = analyse(REPLIES, ASSESS)
    for name, distance in plain.distances.items():
        other = found.distances[name]
        for field in ("matrix", "low", "high", "p", "adjusted", "chance"):
            np.testing.assert_array_equal(getattr(other, field), getattr(distance, field))
        assert (other.outlier, other.clusters, other.linked) == (distance.outlier, distance.clusters, distance.linked)
        assert other.alone == distance.alone and other.sums == distance.sums
    assert plain.distances["emd"].outlier == "dora"
    assert asdict(verdict) == asdict(judge(plain)) and verdict.strategies
    values = [v for reply in REPLIES.values() for numbers in reply["quantiles"].values() for v in numbers]
    assert not any(repr(float(v)) in text.decode() for v in values)


def test_only_the_hospital_that_compares_can_open_the_statistics():
    known = sessions()
    blobs = sealed(known)
    assert analyst_of(FOUR) == "anna" and analyst_of(["site 10", "site 9"]) == "site 9"
    with pytest.raises(PayloadError, match="another hospital compares"):
        compared(blobs, known["bonn"])
    with pytest.raises(PayloadError, match="the statistics of 'anna' cannot be opened"):
        compared(blobs, replace(known["bonn"], site="anna"))  # with the keys of bonn it opens nothing
    text = blobs["bonn"].tobytes()
    assert not any(numbers.tobytes()[:16] in text for numbers in REPLIES["bonn"]["quantiles"].values())
    assert sealed(known)["bonn"].tobytes() != text  # encrypted anew every time


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda b: {i: b[i] for i in ("anna", "bonn")}, "2 hospitals are described, and 3 are needed"),
        (lambda b: {**b, "bonn": b["carl"]}, "the statistics of 'bonn' cannot be opened"),
        (lambda b: {**b, "carl": b["carl"] ^ 1}, "the statistics of 'carl' cannot be opened"),
        (lambda b: {**b, "eve": b["carl"]}, "'eve' has sent no keys"),
        (lambda b: {**b, "carl": np.zeros(3)}, "not short lists of bytes"),
    ],
)
def test_statistics_that_are_missing_swapped_changed_or_invented_are_refused(change, sentence):
    known = sessions()
    with pytest.raises(PayloadError, match=sentence):
        compared(change(sealed(known)), known["anna"])


def test_a_reply_of_which_the_sum_is_enough_is_masked_and_any_other_encrypted():
    known = sessions()["bonn"]
    assert isinstance(protecting(ps.FedAvg(), known, 32), Mask) and isinstance(protecting(ASSESS, known, 32), Seal)
    with pytest.raises(PayloadError, match="no keys were exchanged"):
        Seal(replace(known, share_keys={})).apply({}, Payload(), REPLIES["bonn"])


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.pop("verdict"),
        lambda p: p["assessment"].update(sites=["anna", "eve"]),
        lambda p: p["assessment"]["distances"]["emd"].update(matrix=[[0.0]]),
        lambda p: p["assessment"]["distances"]["emd"].update(outlier="eve"),
        lambda p: p["assessment"]["quantities"]["volume WT"].update(p=[[float("nan")] * 4] * 4),
        lambda p: p.update(assessment=7),
    ],
)
def test_a_comparison_that_is_none_is_refused(change):
    plain = json.loads(hidden.compared(REPLIES, ASSESS, True, False))
    assert hidden.read(json.dumps(plain).encode(), ASSESS, FOUR)[0].sites == FOUR
    change(plain)
    with pytest.raises(DataError, match="cannot be read"):
        hidden.read(json.dumps(plain).encode(), ASSESS, FOUR)


@pytest.mark.parametrize("scale", ["pooled", "first"])
def test_a_simulated_assessment_gives_the_same_either_way(tmp_path, scale):
    settings = replace(ASSESS, projections=8, other_encoders=(), scale=scale)
    chosen = tiny({"a": 6, "b": 6, "c": ps.Hospital(cases=6, gamma=1.6)}, assess=settings)
    plain = assessment.assess(chosen, tmp_path / "plain")
    masked = assessment.assess(config.vary(chosen, {"run": {"secure": {"use": "on"}}}), tmp_path / "masked")
    assert asdict(plain.verdict) == asdict(masked.verdict)
    for name, distance in plain.assessment.distances.items():
        np.testing.assert_array_equal(masked.assessment.distances[name].matrix, distance.matrix)
        assert masked.assessment.distances[name].linked == distance.linked
    assert not any(q.values for q in masked.assessment.quantities.values())
    divisors = [q.divisors for q in masked.assessment.quantities.values()]
    assert all(divisors) if scale == "pooled" else not any(divisors)  # those of single hospitals stay
    assert (tmp_path / "masked" / "index.html").exists()
    strategies = [p.read_text() for p in (tmp_path / "masked" / "strategies").iterdir()]
    assert any('use = "on"' in text for text in strategies)
