"""The steps in the record are those that the optimiser took, whatever part of the network an algorithm trains."""

from collections import Counter

import numpy as np
import pytest

import polysite as ps
from polysite.data.case import Case
from polysite.training.network import Network
from polysite.training.torch_site import TorchSite
from quadratic import play

TRAIN = ps.Train(lr=0.05, patch=(8, 8), augment="none", batch=2, device="cpu")
SIZES, ROUNDS = {"a": 5, "b": 2}, 3
EPOCH = {"a": 3, "b": 1}  # steps
COIN = ps.L2gd(p=0.4)


class Counting(TorchSite):
    """Counts every step of every optimiser, by site and round."""

    def _optimiser(self, weights, rate):
        optimiser = super()._optimiser(weights, rate)
        optimiser.register_step_post_hook(lambda *_: self.taken.update([(self.name, self.round)]))
        return optimiser


def hospital(name, network, taken):
    rng = np.random.default_rng(ord(name))
    images = [rng.normal(size=(1, 8, 8)).astype(np.float32) for _ in range(SIZES[name])]
    cases = [Case(name, f"{name}{k}", x, (x > 0).astype(np.uint8), (1.0, 1.0)) for k, x in enumerate(images)]
    site = Counting(name, network, {"train": cases, "validation": cases[:1]}, ["L"], TRAIN, 0)
    site.taken = taken
    return site


def in_epochs(times):
    return lambda name, round: times * EPOCH[name]


STEPS = {
    "fedavg": (ps.FedAvg(), in_epochs(1)),
    "feddiv, encoders or decoder": (ps.FedDiv(alpha=0.0), in_epochs(1)),
    "fedrep, head and body": (ps.FedRep(head_epochs=2), in_epochs(2 + 1)),
    "fedrod, two heads": (ps.FedRoD(), in_epochs(1)),
    "ifca, chosen by losses": (ps.Ifca(settle=0), in_epochs(1)),
    "ifca, gradients": (ps.Ifca(averaged="gradients"), lambda name, round: 1),
    "l2gd, by its coin": (COIN, lambda name, round: COIN.tosses(round)[1]),
    "pfedme, outer and inner": (ps.PFedMe(outer=3, inner=4), lambda name, round: 12),
    "pfednet, shared or personal part": (ps.PFedNet(), in_epochs(1)),
    "superfed, with twins": (ps.SuPerFed(after=1), in_epochs(1)),
}


@pytest.mark.parametrize(("algorithm", "want"), STEPS.values(), ids=STEPS.keys())
def test_recorded_steps_are_those_of_the_optimiser(algorithm, want):
    network = Network(ps.UNet(filters=(2, 4, 4)).build(dims=2, modalities=1, outputs=1, seed=0), TRAIN)
    taken = Counter()
    for r in play(algorithm, {name: hospital(name, network, taken) for name in SIZES}, ROUNDS).rounds:
        for name, did in r.record(0, False).sites.items():
            beside = 2 if isinstance(algorithm, ps.FedRoD) else 1  # each head has an optimiser; both step on one batch
            assert did.steps == want(name, r.index) == taken[name, r.index] / beside
            assert did.lr_sum > 0
