"""One turn of a site, its outgoing steps, and the server's inverse of them."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from polysite import tree
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.robust import Krum
from polysite.engines.compress import Compress
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.simulator import Simulator
from polysite.engines.site_turn import check_steps, restore_reply, take_turn
from polysite.errors import ConfigError, PayloadError
from polysite.payload import Payload
from quadratic import Quadratic

START = {"w": np.array([3.0], np.float32)}


class Single(Quadratic):
    """A quadratic site whose parameters have single precision, as those of networks do."""

    def fit(self, *args, **keywords):
        fit = super().fit(*args, **keywords)
        return replace(fit, params=tree.map(lambda x: x.astype(np.float32), fit.params))


def site(b=1.0):
    return Single(a=1.0, b=np.array([b, b]), start=START)


@dataclass(frozen=True)
class Scaled:
    """Send the model multiplied by a factor; the server divides."""

    factor: float
    reveals: str = "each"

    def apply(self, kinds, got, reply):
        assert kinds == {"model": "model", "weight": "count"}
        return Payload(**{**reply, "model": tree.scale(reply["model"], self.factor)})

    def restore(self, kinds, sent, reply):
        return Payload(**{**reply, "model": tree.scale(reply["model"], 1 / self.factor)})


@dataclass(frozen=True)
class Shifted(Scaled):
    """Add a number to the model; the server subtracts it. It does not commute with scaling."""

    def apply(self, kinds, got, reply):
        return Payload(**{**reply, "model": tree.map(lambda x: x + self.factor, reply["model"])})

    def restore(self, kinds, sent, reply):
        return Payload(**{**reply, "model": tree.map(lambda x: x - self.factor, reply["model"])})


def test_steps_are_applied_in_order_and_reversed_in_the_opposite_order():
    got = Payload(model=START)
    plain = take_turn(FedAvg(), got, Payload(), site())
    turn = take_turn(FedAvg(), got, Payload(), site(), [Scaled(2.0), Shifted(5.0)])
    assert turn.reply["model"]["w"] == 2 * plain.reply["model"]["w"] + 5
    restored = restore_reply(FedAvg(), got, turn.reply, [Scaled(2.0), Shifted(5.0)])
    assert restored["model"]["w"] == pytest.approx(plain.reply["model"]["w"], rel=1e-6)
    assert turn.memory == plain.memory and len(turn.fits) == 1 and turn.kinds == {"model": "model", "weight": "count"}


def test_the_plan_chooses_the_steps_and_the_simulator_applies_them():
    assert Plan().outgoing == () and Plan(compress="int8").outgoing == (Compress("int8"),)
    algorithm, plan = FedAvg(), replace(Plan(rounds=1), compress="half")
    engine = Simulator(algorithm, {"a": site(1.0), "b": site(2.0)}, outgoing=plan.outgoing)
    exact = Simulator(algorithm, {"a": site(1.0), "b": site(2.0)})
    (rounded,), (true,) = (
        list(run_rounds(algorithm, e, START, p, seed=0)) for e, p in ((engine, plan), (exact, Plan(rounds=1)))
    )
    assert rounded.replies["a"].nbytes < true.replies["a"].nbytes  # bytes that crossed, not those of the restored reply
    error = abs(rounded.state.model["w"] - true.state.model["w"])
    assert 0 < error < 1e-3


def test_a_reply_that_cannot_be_restored_is_refused_and_the_round_goes_on():
    class Broken(Simulator):
        def train(self, round, sent):
            for name, reply in super().train(round, sent):
                wrong = Payload(model={"w": np.zeros(7, np.float16)}, weight=2)
                yield name, replace(reply, payload=wrong) if name == "a" else reply

    algorithm, plan = FedAvg(), Plan(rounds=1, compress="half")
    engine = Broken(algorithm, {"a": site(1.0), "b": site(2.0)}, outgoing=plan.outgoing)
    (only,) = run_rounds(algorithm, engine, START, plan, seed=0)
    assert "does not fit what was sent" in only.refused["a"] and set(only.shares) == {"b"}
    assert only.record(0, {}, False).sites["a"].numbers == {}
    with pytest.raises(PayloadError):
        restore_reply(algorithm, Payload(model=START), Payload(model={"w": np.zeros(7, np.float16)}), plan.outgoing)


def test_an_algorithm_that_needs_each_reply_refuses_steps_that_reveal_only_the_sum():
    mask = Scaled(1.0, reveals="sum")
    check_steps(FedAvg(), "fedavg", [mask])
    check_steps(Krum(), "krum", [Compress("half")])
    with pytest.raises(ConfigError, match="krum needs the reply of each site"):
        check_steps(Krum(), "krum", [Compress("half"), mask])


def test_compiling_is_no_training_time_and_is_logged(caplog):
    class Compiles(Single):
        setup = (7.0, "")

        def fit(self, *args, **keywords):
            type(self).setup = (1007.0, "no compiler")
            return super().fit(*args, **keywords)

    compiling = Compiles(a=1.0, b=np.array([1.0, 1.0]), start=START)
    with caplog.at_level("INFO", "polysite"):
        turn = take_turn(FedAvg(), Payload(model=START), Payload(), compiling)
    assert turn.seconds < -900  # 1000 of the seconds do not count
    assert "took 1000 s" in caplog.text and "is not compiled, which makes training slower: no compiler" in caplog.text
