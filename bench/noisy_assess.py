"""How often an assessment under differential privacy finds a hospital that differs, and says so of equal ones.

Four simulated hospitals with three quantities and an embedding; one of them differs by a standard deviation in one
quantity (shift), in the embedding (look), or in nothing. Printed: the share of draws in which that hospital, or any of
equal ones, is said to differ, and the same without noise, as the reference.
"""

import argparse
from collections.abc import Mapping

import numpy as np

from polysite.engines.noise import SumNoise
from polysite.heterogeneity.analysis import analyse
from polysite.heterogeneity.bounds import PrivateSums
from polysite.heterogeneity.exchange import Assess
from polysite.heterogeneity.verdict import differ
from polysite.payload import Payload

CHANNELS = 32
RANGES = {"intensity": (0.0, 600.0), "volume": (0.0, 100.0), "length": 5.0}
NONE = 1e6  # an epsilon at which the noise cannot be seen


class Hospital:
    """Patients with normal intensities, skewed volumes and an embedding with one wide direction."""

    def __init__(self, patients: int, seed: list[int], shift: float = 0.0, look: float = 0.0):
        rng = np.random.default_rng(seed)
        self.size, self.fits = patients, ()
        self.quantities = {
            "intensity t1": rng.normal(300 + 40 * shift, 40, patients),
            "intensity t2": rng.normal(200, 30, patients),
            "volume WT": rng.gamma(2, 10, patients),
        }
        widths = np.r_[3.0, np.ones(CHANNELS - 1)] / np.sqrt(CHANNELS)
        self.embedding = rng.normal(0, 1, (patients, 2, CHANNELS, 2)) * widths[None, None, :, None]
        self.embedding[:, :, 0] += look

    def features(self, kind: str) -> Mapping[str, np.ndarray]:
        """Return what an assessment asks a site for."""
        if kind == "patients":
            return {"patients": np.arange(self.size)}
        if kind == "absent":
            return {name: values == 0 for name, values in self.quantities.items()}
        if kind == "embedding":
            return {"embedding": self.embedding, "encoder": np.array(1.0)}
        return self.quantities


def found(hospitals: Mapping[str, Hospital], settings: Assess, seed: int) -> set[str]:
    """Return the hospitals that are said to differ."""
    replies = {}
    for name, hospital in hospitals.items():
        sent, _ = settings.local(Payload(), Payload(), hospital)
        rng = np.random.default_rng([seed, ord(name)])
        replies[name] = SumNoise(settings.release, rng).apply({"sums": "statistics"}, Payload(), sent)
    return set(differ(analyse(replies, settings)))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--epsilons", type=float, nargs="+", default=[NONE, 8.0, 2.0])
    options.add_argument("--patients", type=int, nargs="+", default=[30, 100, 300])
    options.add_argument("--draws", type=int, default=40)
    given = options.parse_args()
    print(
        "| epsilon | noise | patients each | equal: any differs | shift found | look found |\n|---|---|---|---|---|---|"
    )
    for epsilon in given.epsilons:
        settings = Assess(private=PrivateSums(epsilon=epsilon, **RANGES), resamples=100, projections=8)
        for patients in given.patients:
            counts = np.zeros(3)
            for seed in range(given.draws):
                three = {c: Hospital(patients, [seed, k]) for k, c in enumerate("abc")}
                others = (
                    Hospital(patients, [seed, 3]),
                    Hospital(patients, [seed, 9], shift=1),
                    Hospital(patients, [seed, 9], look=0.6),
                )
                named = [found({**three, "d": other}, settings, seed) for other in others]
                counts += [bool(named[0]), "d" in named[1], "d" in named[2]]
            shares = " | ".join(f"{c / given.draws:.3f}" for c in counts)
            name = "none" if epsilon >= NONE else f"{epsilon:g}"
            print(f"| {name} | {settings.private.release.noise:g} | {patients} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
