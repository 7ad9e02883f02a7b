"""What privacy costs and what it prevents: test Dice, epsilon, and two attacks on what left, side by side.

FedAvg of a small U-Net over generated hospitals, or over the hospitals of real data (``--data``): without noise, and
with DP-SGD for every patient at several epsilons. The attacks are those of ``polysite audit RUN``:

    membership    the attacker has scans and outlines of patients and ranks them by their loss under a model of the last
                  round, less the loss under the replies of other hospitals (or, for the mean, under the model two
                  rounds before): training cases of a hospital against its test cases. AUC 0.5 is guessing, 1 certainty;
                  the interval is Newcombe's, over the patients of all seeds; the larger AUC of the loss alone and of
                  the calibrated loss counts
    inversion     the attacker searches for the image behind a gradient. Error ratio 1 is nothing learnt, 0 a copy. Once
                  for one step on one patient with a small patch (the worst case), and once for the change by a hospital
                  in the last round

Open replies: the coordinator has the reply of every hospital. Secure sums: it has their mean alone, as every hospital
has anyway. The mean is taken without masks here; that masks do not change it is shown by the tests. Rows are means over
seeds. No package beyond torch, MONAI, NumPy, SciPy, scikit-learn and dp-accounting is needed.

    OMP_NUM_THREADS=1 python bench/privacy.py --seeds 0 1 2 --epsilons 0 100 30 10
    python bench/privacy.py --data shared/data/tcga_lgg --exclude EZ --patch 64 64 16 --device cuda --filters 16 32 64
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", help="a manifest or a folder of images; phantoms by default")
    options.add_argument("--exclude", nargs="*", default=[], help="hospitals of the data to leave out")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--epsilons", type=float, nargs="+", default=[0.0, 100.0, 30.0, 10.0], help="0: no noise")
    options.add_argument("--clip", type=float, default=0.1)
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--cases", type=int, default=16, help="of a phantom hospital; a little less than half train")
    options.add_argument("--hospitals", type=int, default=4, help="phantom hospitals")
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--lr", type=float, default=0.01)
    options.add_argument("--epochs", type=int, default=8, help="of a round")
    options.add_argument("--patch", type=int, nargs="+", default=[16, 16, 16])
    options.add_argument("--filters", type=int, nargs="+", default=[8, 16, 16])
    options.add_argument("--iterations", type=int, default=200, help="of gradient inversion; 0 leaves it out")
    options.add_argument("--patients", type=int, default=2, help="whose gradients are inverted, of every seed")
    options.add_argument("--device", default="cpu")
    options.add_argument("--json", help="also write every number to this file")
    given = options.parse_args()
    rows = []
    print(
        "what leaves | epsilon (noise) | test Dice | AUC, who was trained on | error ratio, one patient | error ratio, "
        "last round | seconds a run",
        flush=True,
    )
    for target in given.epsilons:
        runs = [Run(given, seed, target or None) for seed in given.seeds]
        for surface in ("replies", "mean"):
            row = measured(given, runs, surface)
            rows.append(row)
            print(shown(row), flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps({"settings": vars(given), "rows": rows}, indent=1) + "\n")


def settings(given: argparse.Namespace, seed: int, private: dict) -> dict:
    if given.data:
        data = {"name": "files", "path": given.data, "exclude": given.exclude}
    else:
        sites = {f"h{k}": {"cases": given.cases} for k in range(given.hospitals)}
        data = {"name": "phantom", "shape": [24, 24, 24], "sites": sites}
    return {
        "seed": seed,
        "data": data,
        "split": {"validation": 0.1, "test": 0.45},
        "train": {
            "patch": given.patch, "batch": given.batch, "lr": given.lr, "gamma": 1.0, "optimiser": "adam",
            "epochs": given.epochs, "augment": "none", "device": given.device, "private": private,
        },
        "model": {"name": "unet_small", "filters": given.filters},
        "run": {"rounds": given.rounds},
    }  # fmt: skip


class Run:
    """One training: what left in its last round, and the hospitals with their cases."""

    def __init__(self, given: argparse.Namespace, seed: int, target: float | None):
        from polysite import config, study
        from polysite.engines.rounds import run_rounds
        from polysite.privacy import epsilon

        began = time.perf_counter()
        chosen = config.build(settings(given, seed, {}))
        if target is not None:
            noise = noise_for(target, chosen, study.simulator(chosen).sites)
            chosen = config.build(settings(given, seed, {"unit": "patient", "clip": given.clip, "noise": noise}))
        engine, start = study.simulator(chosen), study.initial_params(chosen)
        self.study, self.sites, self.start, self.seed = chosen, engine.sites, start, seed
        spent: dict[str, list] = {i: [] for i in engine.sites}
        self.earlier = start
        for r in run_rounds(chosen.algorithm, engine, start, chosen.run, seed):
            for site, reply in r.replies.items():
                spent[site].extend(reply.releases)
            if r.index == given.rounds - 3:
                self.earlier = dict(r.state.model)
        self.sent = {i: dict(p["model"]) for i, p in r.sent.items()}
        self.replies = {i: dict(reply.payload["model"]) for i, reply in sorted(r.replies.items())}
        self.mean = dict(r.state.model)
        self.noise = chosen.train.private.noise if target is not None else 0.0
        self.epsilon = max(epsilon(s, 1e-5) for s in spent.values()) if target is not None else None
        self.seconds = time.perf_counter() - began


def noise_for(target: float, chosen, sites) -> float:
    """Return the least noise at which no hospital spends more than epsilon, by bisection."""
    from polysite.privacy import Release, epsilon

    draws = [s.private_draws(np.random.default_rng(0)) for s in sites.values() if s.size]
    steps = [d.steps(chosen.train.epochs) * chosen.run.rounds for d in draws]

    def cost(noise: float) -> float:
        return max(epsilon([Release(noise, d.rate, n)], 1e-5) for d, n in zip(draws, steps, strict=True))

    low, high = 0.1, 1000.0
    if cost(low) <= target:
        return low
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if cost(middle) <= target else (middle, high)
    return float(f"{high:.4g}")


def measured(given: argparse.Namespace, runs: list, surface: str) -> dict:
    """Return a row of the table: one kind of training, seen as single replies or as their mean."""
    from polysite.training.leaks import infer_members

    sites, models, references, patients = {}, {}, {}, {}
    for run in runs:
        for i, site in run.sites.items():
            name = f"{run.seed}/{i}"
            sites[name] = site
            models[name] = run.replies[i] if surface == "replies" else run.mean
            others = [m for j, m in run.replies.items() if j != i]
            references[name] = others if surface == "replies" else [run.earlier]
            patients |= {n: site.patient_of(n) for k in ("train", "test") for n in site.cases(k)}
    found = infer_members(sites, models, references, patients)
    dice = [
        float(np.mean([s.mean for i, site in run.sites.items() for s in score(site, run.mean).values()]))
        for run in runs
    ]
    one, last = inverted(given, runs, surface)
    return {
        "surface": surface,
        "epsilon": None if runs[0].epsilon is None else float(np.mean([r.epsilon for r in runs])),
        "noise": float(np.mean([r.noise for r in runs])),
        "dice": float(np.mean(dice)),
        "dice_by_seed": dice,
        "auc": words(found.strongest),
        "auc_loss": words(found.loss),
        "auc_calibrated": words(found.calibrated),
        "one_patient": one,
        "last_round": last,
        "seconds": float(np.mean([r.seconds for r in runs])),
    }


def words(auc) -> list[float]:
    return [round(x, 4) for x in (auc.value, auc.low, auc.high)]


def score(site, model: dict) -> dict:
    return site.score(site.lift(model), site.cases("test"))


def inverted(given: argparse.Namespace, runs: list, surface: str) -> tuple[float | None, float | None]:
    """Return the error ratios of one step on one patient, and of the change in the last round, as means over seeds."""
    if not given.iterations:
        return None, None
    from polysite import study
    from polysite.training.inversion import Effort, Inverter
    from polysite.training.leaks import invert_patients, invert_reply, mean_scan, smallest_patch
    from polysite.training.network import device_of

    effort = Effort(iterations=given.iterations, patients=given.patients)
    ones, lasts = [], []
    for run in runs:
        site = next(iter(run.sites.values()))
        inverter = Inverter(study.build_module(run.study), site.loss, device_of(given.device))
        private = run.study.train.private
        protection = "sum" if surface == "mean" else "noise" if private.on else "none"
        small = mean_scan(run.sites, smallest_patch(given.patch, run.study.model.divisor))
        if surface == "mean" and private.on:  # noise alone hides as much already
            continue
        found = invert_patients(inverter, run.sites, run.start, small, effort, protection, private, run.seed)
        ones.append(found.ratio)
        few = min(run.sites, key=lambda i: (run.sites[i].size, i))
        whole = mean_scan(run.sites, given.patch)
        behind = [run.sites[few]] if surface == "replies" else list(run.sites.values())
        after = run.replies[few] if surface == "replies" else run.mean
        lasts.append(invert_reply(inverter, behind, run.sent[few], after, whole, effort).ratio)
    return (float(np.mean(ones)), float(np.mean(lasts))) if ones else (None, None)


def shown(row: dict) -> str:
    left = "every reply" if row["surface"] == "replies" else "the mean alone (secure sums)"
    spent = "–" if row["epsilon"] is None else f"{row['epsilon']:.1f} ({row['noise']:.3g})"
    auc = "{:.2f} ({:.2f}–{:.2f})".format(*row["auc"])
    ratios = " | ".join("–" if row[k] is None else f"{row[k]:.2f}" for k in ("one_patient", "last_round"))
    return f"{left} | {spent} | {row['dice']:.3f} | {auc} | {ratios} | {row['seconds']:.0f}"


if __name__ == "__main__":
    main()
