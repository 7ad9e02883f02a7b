"""What privacy costs and what it prevents: test Dice, epsilon, and two attacks on what left, side by side.

FedAvg of a small U-Net over generated hospitals, or over the hospitals of real data (``--data``): without noise, and
with DP-SGD for every patient at several epsilons. The attacks are those of ``polysite audit RUN``:

    membership    the attacker has scans and outlines of patients and ranks them by their loss under a model of the last
                  round, less the loss under the replies of other hospitals (or, for the mean, under the model two
                  rounds before): training cases of a hospital against its test cases. AUC 0.5 is guessing, 1 certainty;
                  the interval is Newcombe's, over the patients of all seeds
    inversion     the attacker searches for the image behind a gradient. Error ratio 1 is nothing learnt, 0 a copy. Once
                  for one step on one patient with a small patch (the worst case), and once for the change by a hospital
                  in the last round, or by all together

Open replies: the coordinator has the reply of every hospital. Secure sums: it has their mean alone, as every hospital
has anyway. The mean is taken without masks here; that masks do not change it is shown by the tests. Rows are means over
seeds.

A cell is one training (an epsilon and a seed) with its attacks, and one line of ``--out``; a cell with the same
settings that is there already is not computed again. ``--jobs`` processes share the cells. The packages besides torch,
NumPy, SciPy, scikit-learn, Numba and Pillow are MONAI, nibabel, safetensors, psutil, rich, tomli_w, packaging,
typing_extensions, and for noise dp_accounting, absl-py and attrs.

    OMP_NUM_THREADS=1 python bench/privacy.py --seeds 0 1 2 --epsilons 0 100 30 10
    python bench/privacy.py --data tcga_lgg --exclude EZ --spacing 2 2 1 --patch 32 32 16 --window 64 64 16 \
        --overlap 0 --iterations 150 --filters 8 16 32 --rounds 6 --epochs 40 --lr 0.005 --jobs 2 --threads 1 \
        --out privacy.jsonl
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np

ASIDE = ("seeds", "epsilons", "jobs", "out", "threads")  # options that do not change a cell
SURFACES = ("replies", "mean")


def main() -> None:
    given = parsed()
    cells = [(target, seed) for target in given.epsilons for seed in given.seeds]
    done = finished(given)
    left = [cell for cell in cells if cell not in done]
    print(f"{len(cells)} cells, {len(cells) - len(left)} of them known", flush=True)
    began = time.perf_counter()
    for line in computed(given, left):
        done[line["epsilon_target"], line["seed"]] = line
        if given.out:
            with Path(given.out).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        name = f"epsilon {line['epsilon_target']:g}, seed {line['seed']}"
        seconds = ", ".join(f"{k} {v:.0f}" for k, v in line["seconds"].items())
        print(f"{time.perf_counter() - began:5.0f} s: {name}: {line['steps']} steps; seconds: {seconds}", flush=True)
    print(
        "what leaves | epsilon (noise) | test Dice | AUC, who was trained on | error ratio, one patient | error ratio, "
        "last round | seconds a cell",
        flush=True,
    )
    for target in given.epsilons:
        lines = [done[target, seed] for seed in given.seeds]
        for surface in SURFACES:
            print(shown(row(lines, surface)), flush=True)


def parsed() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", help="a manifest or a folder of images; phantoms by default")
    options.add_argument("--exclude", nargs="*", default=[], help="hospitals of the data to leave out")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--epsilons", type=float, nargs="+", default=[0.0, 100.0, 30.0, 10.0], help="0: no noise")
    options.add_argument("--clip", type=float, default=0.1)
    options.add_argument("--rounds", type=int, default=6, help="at least 3")
    options.add_argument("--cases", type=int, default=16, help="of a phantom hospital; a little less than half train")
    options.add_argument("--hospitals", type=int, default=4, help="phantom hospitals")
    options.add_argument("--side", type=int, default=24, help="voxels of a phantom's side")
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--lr", type=float, default=0.01)
    options.add_argument("--epochs", type=int, default=8, help="of a round")
    options.add_argument("--patch", type=int, nargs="+", default=[16, 16, 16])
    options.add_argument("--spacing", type=float, nargs="*", default=[], help="voxel size of real data; as stored")
    options.add_argument("--window", type=int, nargs="*", default=[], help="in which cases are scored; the patch")
    options.add_argument("--overlap", type=float, default=0.5, help="of the windows in which cases are scored")
    options.add_argument("--filters", type=int, nargs="+", default=[8, 16, 16])
    options.add_argument("--iterations", type=int, default=200, help="of gradient inversion; 0 leaves it out")
    options.add_argument("--patients", type=int, default=2, help="whose gradients are inverted, of every seed")
    options.add_argument("--device", default="cpu")
    options.add_argument("--jobs", type=int, default=1, help="processes")
    options.add_argument("--threads", type=int, default=0, help="of a process on the CPU; 0: all cores, shared")
    options.add_argument("--out", help="keep every cell in this file, a JSON line each, and continue from it")
    given = options.parse_args()
    if given.rounds < 3:
        options.error("--rounds must be at least 3: a model two rounds before the last one calibrates losses")
    return given


def kept(given: argparse.Namespace) -> dict:
    """Return the options that a cell depends on."""
    return {k: v for k, v in vars(given).items() if k not in ASIDE}


def finished(given: argparse.Namespace) -> dict[tuple[float, int], dict]:
    """Return the cells in the file that have these settings; a last line that was cut off is left out."""
    if not given.out or not Path(given.out).exists():
        return {}
    found = {}
    for text in Path(given.out).read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line["settings"] == kept(given) and "scores" in line:  # earlier versions kept scores of two attacks
            found[line["epsilon_target"], line["seed"]] = line
    return found


def computed(given: argparse.Namespace, cells: list[tuple[float, int]]) -> Iterator[dict]:
    """Yield the cells as they are finished; the slowest kind, under noise, begins first."""
    order = sorted(cells, key=lambda cell: (cell[0] == 0, cell))
    threads = given.threads or max(1, (os.cpu_count() or 1) // given.jobs)
    if given.jobs == 1:
        for cell in order:
            yield computed_cell(given, threads, *cell)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, mp_context=spawn) as pool:
        waiting = [pool.submit(computed_cell, given, threads, *cell) for cell in order]
        for future in as_completed(waiting):
            yield future.result()


def computed_cell(given: argparse.Namespace, threads: int, target: float, seed: int) -> dict:
    """Return a cell: what a training and the attacks on it came to."""
    import torch

    torch.set_num_threads(threads)
    run = Run(given, seed, target or None)
    clock = time.perf_counter()
    scores = {surface: scored(run, surface) for surface in SURFACES}
    dice = float(np.mean([s.mean for site in run.sites.values() for s in score(site, run.mean).values()]))
    attacked = time.perf_counter()
    images = {surface: inverted(given, run, surface) for surface in SURFACES}
    return {
        "epsilon_target": target,
        "seed": seed,
        "settings": kept(given),
        "epsilon": run.epsilon,
        "noise": run.noise,
        "dice": dice,
        "scores": scores,
        "images": images,
        "steps": run.steps,
        "seconds": {
            "data": run.prepared,
            "training": run.seconds,
            "membership": attacked - clock,
            "images": time.perf_counter() - attacked,
        },
    }


def settings(given: argparse.Namespace, seed: int, private: dict) -> dict:
    if given.data:
        data = {"name": "files", "path": given.data, "exclude": given.exclude}
    else:
        sites = {f"h{k}": {"cases": given.cases} for k in range(given.hospitals)}
        data = {"name": "phantom", "shape": [given.side] * 3, "sites": sites}
    return {
        "seed": seed,
        "data": data,
        "split": {"validation": 0.1, "test": 0.45},
        "train": {
            "patch": given.patch, "batch": given.batch, "lr": given.lr, "gamma": 1.0, "optimiser": "adam",
            "epochs": given.epochs, "augment": "none", "device": given.device, "private": private,
            "overlap": given.overlap, "window": given.window,
        },
        "prepare": {"spacing": given.spacing},
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
        engine = study.simulator(chosen)
        if target is not None:
            noise = noise_for(target, chosen, engine.known)
            chosen = config.build(settings(given, seed, {"unit": "patient", "clip": given.clip, "noise": noise}))
            engine = study.simulator(chosen)
        start = study.initial_params(chosen)
        self.study, self.sites, self.start, self.seed = chosen, engine.known, start, seed
        self.prepared = time.perf_counter() - began
        spent: dict[str, list] = {i: [] for i in engine.known}
        self.earlier, self.steps = start, 0
        for r in run_rounds(chosen.algorithm, engine, start, chosen.run, seed):
            for site, reply in r.replies.items():
                spent[site].extend(reply.releases)
                self.steps += sum(fit.steps for fit in reply.fits)
            if r.index == given.rounds - 3:
                self.earlier = dict(r.state.model)
        self.sent = {i: dict(p["model"]) for i, p in r.sent.items()}
        self.replies = {i: dict(reply.payload["model"]) for i, reply in sorted(r.replies.items())}
        self.mean = dict(r.state.model)
        self.noise = chosen.train.private.noise if target is not None else 0.0
        self.epsilon = max(epsilon(s, 1e-5) for s in spent.values()) if target is not None else None
        self.seconds = time.perf_counter() - began - self.prepared


def noise_for(target: float, chosen, sites) -> float:
    """Return the least noise at which no hospital spends more than epsilon."""
    from polysite.privacy import Release, epsilon, least_noise

    draws = [s.private_draws(np.random.default_rng(0)) for s in sites.values() if s.size]
    steps = [d.steps(chosen.train.epochs) * chosen.run.rounds for d in draws]

    def cost(noise: float) -> float:
        return max(epsilon([Release(noise, d.rate, n)], 1e-5) for d, n in zip(draws, steps, strict=True))

    return least_noise(cost, target)


def scored(run: Run, surface: str) -> dict:
    """Return the scores by which patients are ranked, seen as single replies or as their mean, by hospital."""
    from polysite.audit.models import member_scores

    patients = {n: site.patient_of(n) for site in run.sites.values() for k in ("train", "test") for n in site.cases(k)}
    models = {i: run.replies[i] if surface == "replies" else run.mean for i in run.sites}
    others = {i: [m for j, m in run.replies.items() if j != i] for i in run.sites}
    references = others if surface == "replies" else {i: [run.earlier] for i in run.sites}
    groups = member_scores(run.sites, models, references, patients)
    return {i: [scores.tolist() for scores in group] for i, group in groups.items()}


def score(site, model: dict) -> dict:
    return site.score(site.lift(model), site.cases("test"))


def inverted(given: argparse.Namespace, run: Run, surface: str) -> list[float] | None:
    """Return the error ratios of one step on one patient, and of the change in the last round."""
    if not given.iterations:
        return None
    from polysite import study
    from polysite.audit.inversion import Inverter, invert_patients, invert_reply, mean_scan, smallest_patch
    from polysite.training.network import device_of

    site, patients = next(iter(run.sites.values())), given.patients
    inverter = Inverter(study.build_module(run.study), site.loss, device_of(given.device), given.iterations)
    inverter.at(run.start)
    private = run.study.train.private
    protection = "noise" if private.on else "sum" if surface == "mean" else "none"
    small = mean_scan(run.sites, smallest_patch(given.patch, run.study.model.divisor))
    one = invert_patients(inverter, run.sites, small, protection, private, run.seed, patients)
    few = min(run.sites, key=lambda i: (run.sites[i].size, i))
    behind = [run.sites[few]] if surface == "replies" else list(run.sites.values())
    after = run.replies[few] if surface == "replies" else run.mean
    last = invert_reply(inverter, behind, run.sent[few], after, mean_scan(run.sites, given.patch), patients)
    return [sum(m.error for m in found) / sum(m.usual for m in found) for found in (one, last)]


def row(lines: list[dict], surface: str) -> dict:
    """Return a row of the table from the cells of all seeds."""
    from polysite.metrics.membership import area

    groups = [group for cell in lines for group in cell["scores"][surface].values()]
    found = area([(np.array(members), np.array(others)) for members, others in groups])
    images = [c["images"][surface] for c in lines if c["images"]]
    return {
        "surface": surface,
        "epsilon": None if lines[0]["epsilon"] is None else float(np.mean([c["epsilon"] for c in lines])),
        "noise": float(np.mean([c["noise"] for c in lines])),
        "dice": float(np.mean([c["dice"] for c in lines])),
        "auc": [found.value, found.low, found.high],
        "images": np.mean(images, axis=0).tolist() if images else None,
        "seconds": float(np.mean([sum(c["seconds"].values()) for c in lines])),
    }


def shown(row: dict) -> str:
    left = "every reply" if row["surface"] == "replies" else "the mean alone (secure sums)"
    spent = "–" if row["epsilon"] is None else f"{row['epsilon']:.1f} ({row['noise']:.3g})"
    auc = "{:.2f} ({:.2f}–{:.2f})".format(*row["auc"])
    ratios = " | ".join(f"{x:.2f}" for x in row["images"]) if row["images"] else "– | –"
    return f"{left} | {spent} | {row['dice']:.3f} | {auc} | {ratios} | {row['seconds']:.0f}"


if __name__ == "__main__":
    main()
