"""A folder like FeTS 2022, made of tiny scans: real names, sites and published folds, drawn brains and tumours.

The names come from the real partition and folds in ``shared/data``, which the package does not hold.
"""

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

PARTITION = Path("fets_partitions/fets2022_partitioning_1.csv")
FOLDS = {  # folder beside the cases -> folder of the published files
    "folds": Path("fets_folds/partitioning_1_folds"),
    "folds_limited": Path("fets_folds/partitioning_1_homogeneous_known_tumor_folds"),
}
NAME = "partitioning_1_{part}_fold_{fold}.csv"
# brightness of grey matter, oedema (2), necrosis (1) and enhancing tumour (4)
TISSUES = {"flair": (40, 90, 60, 70), "t1": (60, 50, 30, 55), "t1ce": (60, 55, 35, 110), "t2": (45, 85, 95, 75)}


def write(folder: Path, shared: Path, share: float = 1.0, size: int = 16, cases: Sequence[str] = ()) -> Path:
    """Write the fake dataset into a new folder and return it.

    It holds ``FeTS2022_xxxxx/FeTS2022_xxxxx_{flair,t1,t1ce,t2,seg}.nii.gz``, ``partitioning_1.csv``, and the published
    folds of these cases, ``folds/partitioning_1_test_fold_0.csv`` and so on, and ``folds_limited/``. Of a share of the
    cases, every site keeps one in every fold where it has one, and those that two folds test; ``cases`` are kept
    whatever the share.
    """
    from trees import glioma  # which draws with the tissues of this module

    site_of = {r["Subject_ID"]: r["Partition_ID"] for r in rows(shared / PARTITION)}
    folds = {name: _published(shared / place) for name, place in FOLDS.items()}
    selected = _selected(site_of, folds, share)
    kept = dict.fromkeys(c for c in site_of if c in selected or c in cases)
    folder.mkdir(parents=True)
    _table(folder / "partitioning_1.csv", [{"Partition_ID": site_of[c], "Subject_ID": c} for c in kept])
    for name, parts in folds.items():
        (folder / name).mkdir()
        for (part, fold), found in parts.items():
            _table(folder / name / NAME.format(part=part, fold=fold), [r for r in found if r["Subject_ID"] in kept])
    for case in kept:
        glioma(folder / case, case, int(case.rpartition("_")[2]), size)
    return folder


def _selected(site_of, folds, share: float) -> set[str]:
    """Return the names of the cases to write."""
    tested = {name: {k: found for (part, k), found in parts.items() if part == "test"} for name, parts in folds.items()}
    kept: set[str] = set()
    for name in reversed(tested):  # the limited folds first: all their cases are in the full ones as well
        where, times = defaultdict(list), defaultdict(int)
        for k, found in tested[name].items():
            for row in found:
                where[site_of[row["Subject_ID"]], k].append(row["Subject_ID"])
                times[row["Subject_ID"]] += 1
        for cases in where.values():
            ordered = sorted(cases, key=lambda c: (times[c] == 1, c not in kept, c))
            kept.update(ordered[: max(1, round(share * len(cases)))])
    return kept


def _published(folder: Path) -> dict[tuple[str, int], list[dict[str, str]]]:
    """Return the rows of the published files, by part (test or train) and fold."""
    return {(p, k): rows(folder / NAME.format(part=p, fold=k)) for p in ("test", "train") for k in range(5)}


def rows(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def _table(file: Path, rows: list[dict[str, str]]) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
