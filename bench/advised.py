"""What an advice is worth on cases that it has not seen: advised models against others, fold by fold.

Every fold of a cross-validation was advised for itself, so its test cases had no part in the advice. Each argument is
a pattern with ``{k}`` for the fold; the runs of all folds together test every case once. Several references, such as
trainings with other seeds, are compared one by one and by the mean of their scores of every case.

    for k in 0 1 2 3 4; do
        polysite advise lgg.toml --set split.folds=5 --set split.fold=$k --inner 2 --trainings 34 --out advised/fold$k
        polysite train advised/fold$k/study.toml --out advised/fold$k-trained
    done
    python bench/advised.py --runs 'advised/fold{k}-trained' --reference 'bench/runs/fedavg/fold{k}-seed0'
"""

import argparse
from pathlib import Path
from statistics import fmean, stdev

from polysite.advice.tournament import Key, grouped
from polysite.engines.run_folder import RunFolder
from polysite.metrics.statistics import signed_rank

Scores = dict[Key, float]  # by hospital and case


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", required=True, help="pattern of the run folders, such as 'advised/fold{k}-trained'")
    options.add_argument("--reference", nargs="+", required=True, help="patterns of what they are compared with")
    options.add_argument("--folds", type=int, default=5)
    given = options.parse_args()
    mine = scores(given.runs, given.folds)
    others = {pattern: scores(pattern, given.folds) for pattern in given.reference}
    if len(others) > 1:
        others["mean of these"] = {key: fmean(each[key] for each in others.values()) for key in mine}
    each = ", ".join(f"{site} {fmean(values):.3f}" for site, values in sorted(grouped(mine).items()))
    print(f"{given.runs}: {fmean(mine.values()):.3f} over {len(mine)} cases; {each}")
    for pattern, theirs in others.items():
        compare(pattern, mine, theirs)


def scores(pattern: str, folds: int) -> Scores:
    """Return the score of every test case, the mean over its labels."""
    tests = [RunFolder.open(Path(pattern.format(k=k))).result.test for k in range(folds)]
    return {(site, case): score.mean for t in tests for site, cases in t.items() for case, score in cases.items()}


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
