"""What privacy costs and what it prevents: test Dice against epsilon, and membership inference on what left.

FedAvg of a small U-Net over four generated hospitals, without noise and with DP-SGD for every patient at several
noises. The attacker knows scans and outlines of patients and wants to know who was among the training cases. It has
what a coordinator has after the last round: the reply of every hospital (open replies), or their mean alone (secure
sums, and any hospital). It ranks patients by their loss under that model (Yeom et al., 2018): training cases of the
hospital against its test cases, which are drawn alike. AUC 0.5 is guessing, 1.0 is certainty; the interval is a
bootstrap over patients. Every line is a mean over the seeds.

    OMP_NUM_THREADS=1 python bench/privacy.py --seeds 0 1 --noise 0.5 1 2
"""

import argparse
import math
import time

import numpy as np
from sklearn.metrics import roc_auc_score

STUDY = """
seed = {seed}
[data]
name = "phantom"
shape = [24, 24, 24]
[data.sites]
a = {{ cases = {cases} }}
b = {{ cases = {cases} }}
c = {{ cases = {cases} }}
d = {{ cases = {cases} }}
[split]
validation = 0.1
test = 0.45
[train]
patch = [24, 24, 24]
batch = {batch}
lr = {lr}
gamma = 1.0
optimiser = "adam"
epochs = {epochs}
augment = "none"
device = "cpu"
[train.private]
unit = "{unit}"
clip = {clip}
noise = {noise}
[model]
name = "unet_small"
filters = [4, 8, 8]
[run]
rounds = {rounds}
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options.add_argument("--noise", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    options.add_argument("--clip", type=float, default=0.1)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument(
        "--cases", type=int, default=40, help="of every hospital, of which a little less than half train"
    )
    options.add_argument("--batch", type=int, default=6)
    options.add_argument("--lr", type=float, default=0.01)
    options.add_argument("--epochs", type=int, default=3, help="of a round")
    given = options.parse_args()
    print("train.private | epsilon | test Dice | AUC of single replies | AUC of their mean | seconds a run")
    for noise in (0.0, *given.noise):
        found = [run(given, seed, noise) for seed in given.seeds]
        members, strangers = ([np.concatenate([f[k][i] for f in found]) for i in (0, 1)] for k in ("each", "mean"))
        print(
            f"{f'noise {noise:g}, clip {given.clip:g}' if noise else 'none'} | {mean(found, 'epsilon'):.1f} | "
            f"{mean(found, 'dice'):.3f} | {shown(*members)} | {shown(*strangers)} | {mean(found, 'seconds'):.0f}",
            flush=True,
        )


def mean(found: list[dict], name: str) -> float:
    return float(np.mean([f[name] for f in found]))


def run(given: argparse.Namespace, seed: int, noise: float) -> dict:
    from polysite import config, study
    from polysite.engines.rounds import run_rounds
    from polysite.privacy import epsilon

    began = time.perf_counter()
    settings = {k: getattr(given, k) for k in ("cases", "batch", "lr", "rounds", "clip", "epochs")}
    unit = "patient" if noise else "none"
    chosen = config.parse(STUDY.format(**settings, seed=seed, noise=noise or 1.0, unit=unit))
    engine, start = study.simulator(chosen), study.initial_params(chosen)
    spent: dict[str, list] = {i: [] for i in engine.sites}
    for r in run_rounds(chosen.algorithm, engine, start, chosen.run, seed):
        for site, reply in r.replies.items():
            spent[site].extend(reply.releases)
    each = {i: reply.payload["model"] for i, reply in r.replies.items()}
    shared = dict.fromkeys(each, r.state.model)
    cost = [epsilon(s, 1e-5) for s in spent.values()] if noise else [math.inf]
    return {
        "each": ranked(engine, each),
        "mean": ranked(engine, shared),
        "dice": np.mean([score.mean for i, m in shared.items() for score in scores(engine, i, m, "test").values()]),
        "epsilon": max(cost),
        "seconds": time.perf_counter() - began,
    }


def scores(engine, site: str, model: dict, split: str) -> dict:
    host = engine.sites[site]
    return host.score(host.lift(model), host.cases(split))


def ranked(engine, models: dict) -> tuple[np.ndarray, np.ndarray]:
    """Whether patients trained, and how the attacker ranks them: by minus their loss, less the mean of the hospital."""
    truth, rank = [], []
    for site, model in models.items():
        losses = [[s.loss for s in scores(engine, site, model, split).values()] for split in ("train", "test")]
        middle = np.mean(losses[0] + losses[1])
        truth += [1] * len(losses[0]) + [0] * len(losses[1])
        rank += [middle - loss for loss in losses[0] + losses[1]]
    return np.array(truth), np.array(rank)


def shown(truth: np.ndarray, rank: np.ndarray) -> str:
    rng = np.random.default_rng(0)
    drawn = [rng.integers(len(truth), size=len(truth)) for _ in range(1000)]
    low, high = np.quantile([roc_auc_score(truth[d], rank[d]) for d in drawn], (0.025, 0.975))
    return f"{roc_auc_score(truth, rank):.2f} ({low:.2f}–{high:.2f})"


if __name__ == "__main__":
    main()
