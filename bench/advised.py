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
import csv
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev

from polysite.metrics.statistics import signed_rank

Scores = dict[tuple[str, str], float]  # by hospital and case


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
    print(f"{given.runs}: {fmean(mine.values()):.3f} over {len(mine)} cases; {means(mine)}")
    for pattern, theirs in others.items():
        compare(pattern, mine, theirs)


def scores(pattern: str, folds: int) -> Scores:
    """Return the Dice of every test case, the mean over its labels."""
    found: dict[tuple[str, str], list[float]] = {}
    for k in range(folds):
        file = Path(pattern.format(k=k)) / "evaluation" / "test" / "cases.csv"
        with file.open(encoding="utf-8", newline="") as rows:
            for row in csv.DictReader(rows):
                found.setdefault((row["site"], row["case"]), []).append(float(row["dice"]))
    return {key: fmean(values) for key, values in found.items()}


def compare(pattern: str, mine: Scores, theirs: Scores) -> None:
    """Print the gain over all cases with its p, and that at every hospital with its standard error."""
    if mine.keys() != theirs.keys():
        raise SystemExit(f"{pattern} has other test cases: the splits differ")
    gains = {key: mine[key] - theirs[key] for key in sorted(mine)}
    sites = {site: [gain for (s, _), gain in gains.items() if s == site] for site, _ in gains}
    each = ", ".join(f"{s} {fmean(g):+.3f} ± {stdev(g) / len(g) ** 0.5:.3f}" for s, g in sites.items())
    mean, p = fmean(gains.values()), signed_rank(list(gains.values()))
    print(f"against {pattern} ({fmean(theirs.values()):.3f}): {mean:+.3f}, p {p:.2g}; {each}")


def means(given: Mapping[tuple[str, str], float]) -> str:
    """Return the mean score of every hospital in words."""
    sites = {site: [score for (s, _), score in given.items() if s == site] for site, _ in sorted(given)}
    return ", ".join(f"{site} {fmean(values):.3f}" for site, values in sites.items())


if __name__ == "__main__":
    main()
