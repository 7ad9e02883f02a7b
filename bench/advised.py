"""What an advice is worth on cases that it has not seen: advised models against others, fold by fold.

Every fold of a cross-validation was advised for itself, so its test cases had no part in the advice. Each argument is
a pattern with ``{k}`` for the fold; the runs of all folds together test every case once. Several references, such as
trainings with other seeds, are compared one by one and by the mean of their scores of every case.

    for k in 0 1 2 3 4; do
        polysite advise lgg.toml --set split.folds=5 --set split.fold=$k --inner 2 --trainings 25 --out advised/fold$k
        polysite train lgg.toml --set split.folds=5 --set split.fold=$k --out fedavg/fold$k
        python bench/advised.py --same-steps lgg.toml --inner 2 --trainings 25 --fold $k --out long/fold$k.toml
        polysite train long/fold$k.toml --out long/fold$k
    done
    python bench/advised.py --runs 'advised/fold{k}' --reference 'fedavg/fold{k}'
    python bench/advised.py --runs 'advised/fold{k}' --reference 'long/fold{k}'

A pattern may name the folder of an advice: its models are compared. ``--same-steps`` writes FedAvg with as many local
steps as the whole budget of an advice (tournament and models): more rounds, and a learning rate that ends at
the same value.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean, stdev

from polysite import config
from polysite.advice import file_of
from polysite.advice.deliver import steps_of
from polysite.advice.tournament import Key, grouped
from polysite.benchmark.budget import lengthen
from polysite.engines.run_folder import RunFolder
from polysite.metrics.statistics import signed_rank

Scores = dict[Key, float]  # by hospital and case


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", help="pattern of the run folders, or of advices, such as 'advised/fold{k}'")
    options.add_argument("--reference", nargs="+", help="patterns of what they are compared with")
    options.add_argument("--folds", type=int, default=5)
    options.add_argument("--same-steps", type=Path, metavar="STUDY", help="write FedAvg with the steps of an advice")
    options.add_argument("--trainings", type=float, help="budget of the advice, with --same-steps")
    options.add_argument("--inner", type=int, default=2, help="its inner folds")
    options.add_argument("--fold", type=int, default=0, help="the fold whose study is written")
    options.add_argument("--out", type=Path, help="file of that study")
    given = options.parse_args()
    if given.same_steps and not (given.out and given.trainings):
        options.error("--same-steps takes --trainings and --out")
    if not given.same_steps and not (given.runs and given.reference):
        options.error("--runs and --reference are needed, or --same-steps")
    if given.same_steps:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(config.dump(same_steps(given)), encoding="utf-8")
        return
    mine = scores(given.runs, given.folds)
    others = {pattern: scores(pattern, given.folds) for pattern in given.reference}
    if len(others) > 1:
        others["mean of these"] = {key: fmean(each[key] for each in others.values()) for key in mine}
    each = ", ".join(f"{site} {fmean(values):.3f}" for site, values in sorted(grouped(mine).items()))
    print(f"{given.runs}: {fmean(mine.values()):.3f} over {len(mine)} cases; {each}")
    for pattern, theirs in others.items():
        compare(pattern, mine, theirs)


def same_steps(given: argparse.Namespace) -> config.Study:
    """Return FedAvg of a fold, with the local steps of the budget of an advice."""
    folds = {"folds": given.folds, "fold": given.fold}
    study = config.vary(config.load(given.same_steps), {"split": folds})
    inner = config.vary(study, {"split": {**folds, "inner": given.inner}})
    long = lengthen(study, given.trainings * steps_of(inner) / steps_of(study))
    print(f"{given.out}: {long.run.rounds} rounds, {steps_of(long)} steps; as given {steps_of(study)}")
    return long


def scores(pattern: str, folds: int) -> Scores:
    """Return the score of every test case, the mean over its labels."""
    return {key: score for k in range(folds) for key, score in tested(Path(pattern.format(k=k))).items()}


def tested(path: Path) -> Scores:
    """Return the test scores of a run, or of the models that every hospital uses by an advice."""
    about = path / "advice.json"
    if not about.exists():
        return run_scores(path)
    found = json.loads(about.read_text(encoding="utf-8"))
    used = {site: each["uses"] for site, each in found["hospitals"].items()}
    folders = {name: "models" if name == found["strategy"] else file_of("models", name) for name in used.values()}
    each = {name: run_scores(path / folder) for name, folder in folders.items()}
    return {key: score for name, mine in each.items() for key, score in mine.items() if used[key[0]] == name}


def run_scores(path: Path) -> Scores:
    test = RunFolder.open(path).result.test
    return {(site, case): score.mean for site, cases in test.items() for case, score in cases.items()}


def compare(pattern: str, mine: Scores, theirs: Scores) -> None:
    """Print the gain over all cases with its p, and that at every hospital with its standard error."""
    if mine.keys() != theirs.keys():
        raise SystemExit(f"{pattern} has other test cases: the splits differ")
    gains = {key: mine[key] - theirs[key] for key in sorted(mine)}
    each = ", ".join(f"{s} {fmean(g):+.3f} ± {stdev(g) / len(g) ** 0.5:.3f}" for s, g in grouped(gains).items())
    mean, p = fmean(gains.values()), signed_rank(list(gains.values()))
    print(f"against {pattern} ({fmean(theirs.values()):.3f}): {mean:+.3f}, p {p:.2g}; {each}")


if __name__ == "__main__":
    main()
