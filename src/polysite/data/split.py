"""Splits of every site's cases: train, validation (chooses the best round) and test.

Each site is split by itself, deterministically in (seed, site), so that every hospital appears in every split. All
cases of a patient stay in one split. Federated cross-validation makes folds inside every site; the test fold of the
federation is the union of the sites' test folds, and every case is in one test fold. Published folds are read from
files as they are: a case may be in two test folds, and a site in none.
"""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zlib import crc32

import numpy as np

from polysite.data.case import SPLITS, CaseRef
from polysite.errors import ConfigError, DataError
from polysite.spreadsheets import csv_text
from polysite.spreadsheets import rows as csv_rows

SiteSplit = Mapping[str, list[CaseRef]]  # train, validation, test
PatientCases = tuple[CaseRef, ...]  # all cases of one patient

SUBJECT, PARTITION, SPLIT = "Subject_ID", "Partition_ID", "Split"  # columns: the first two as in the files of FeTS
OPEN = ("test fold", "rest")  # where a published fold puts a case
FOLD = "{fold}"  # stands for the number of the fold in the name of a file


@dataclass(frozen=True)
class Split:
    """Settings that split the cases of every site into train, validation and test.

    Splits that the manifest fixes for cases are used unless ``folds`` or ``file`` is set.

    Args:
        validation: Share of a site's cases (with folds or a file, of those not tested); at least one case. 0, with a
            ``split.csv`` as ``file``: no case but those that the file names.
        test: Share of a site's cases; at least one if the site has three or more.
        folds: Number of folds of a cross-validation, instead of the share ``test``; 0 for none.
        fold: The fold that is tested, from 0.
        by_group: Spread every group (grade, scanner, class) evenly over the splits.
        seed: None for the study's seed. Set it to repeat a study with other seeds on the same split.
        file: ``split.csv`` of an earlier run, or a published ``NAME_test_fold_K.csv`` beside ``NAME_train_fold_K.csv``.
            ``NAME_test_fold_{fold}.csv`` with ``folds`` reads the published fold number ``fold``.
        rounding: Numbers of validation and test cases among n: "nearest" to share * n; "down", int(share * n); or
            "up", n - int((1 - share) * n).
        validation_of: Cases of a site that ``validation`` is a share of: "all", or the "rest" that is not tested.
        marked_test: Part of the cases that the data mark as test cases: "test", or "validation" for a study that
            reports its validation cases and has no test cases.
        keep: Whether a case that a federation moves keeps the part that it has at its own hospital. true: always, so
            that all federations test the same cases (but a site without training or validation cases gets one of the
            other part). "sizes": as far as every site has as many cases in each part as in a new split.
        inner: Number of folds of the cases that are not tested, instead of the share ``validation``; 0 for none.
            Test cases are left out altogether, so that settings can be chosen without seeing them.
        inner_fold: The inner fold that validates, from 0.
    """

    validation: float = 0.2
    test: float = 0.2
    folds: int = 0
    fold: int = 0
    by_group: bool = False
    seed: int | None = None
    file: str = ""
    rounding: Literal["nearest", "up", "down"] = "nearest"
    validation_of: Literal["all", "rest"] = "all"
    marked_test: Literal["test", "validation"] = "test"
    keep: bool | Literal["sizes"] = False
    inner: int = 0
    inner_fold: int = 0

    def __post_init__(self) -> None:
        shared = self.test if self.validation_of == "all" else 0.0
        if self.validation == 0 and (not self.file or self.folds):
            raise ConfigError("split.validation = 0 goes with split.file alone, which names all validation cases")
        if not (0 <= self.validation < 1 and 0 <= self.test < 1 and self.validation + shared < 1):
            raise ConfigError(
                f"split.validation = {self.validation} and split.test = {self.test} must leave cases to train on: "
                "both below 1, validation above 0, their sum below 1"
            )
        for several, one in (("folds", "fold"), ("inner", "inner_fold")):
            count, fold = getattr(self, several), getattr(self, one)
            if count == 1 or count < 0:
                raise ConfigError(f"split.{several} = {count}: at least two, or 0 for none")
            if not 0 <= fold < max(1, count):
                raise ConfigError(f"split.{one} = {fold}: with split.{several} = {count} it lies below {count}")
        if self.file and bool(self.folds) != (FOLD in self.file):
            raise ConfigError(
                f"split.file = {self.file!r} and split.folds = {self.folds} contradict one another: published folds "
                f"need their number in split.folds and {FOLD} in split.file; otherwise leave out one of them"
            )

    def seed_of(self, study: int) -> int:
        """Return the seed of the split: its own, or the study's."""
        return study if self.seed is None else self.seed

    def apply(self, sites: Mapping[str, Sequence[CaseRef]], seed: int) -> Mapping[str, SiteSplit]:
        """Return every site's cases as ``train``, ``validation`` and ``test``."""
        seed = self.seed_of(seed)
        fixed = _find(self._rows(self.fold), sites) if self.file else None
        absent = _absent(sites, fixed) if fixed is not None else ()
        return {site: self._site(site, cases, seed, fixed) for site, cases in sites.items() if site not in absent}

    def check(self, sites: Mapping[str, Sequence[CaseRef]]) -> None:
        """Refuse a file that names unknown cases, and ``by_group`` without groups."""
        rows = self._rows(self.fold) if self.file else []
        known = {case.source for cases in sites.values() for case in cases}
        names = {name for _, name in known}
        for site, name, split in rows:
            if (site, name) not in known and (split not in OPEN or name not in names):
                file = self._path(self.fold)
                raise DataError(f"{file} names the case {name!r} of site {site!r}, which is not in the data")
        if self.by_group and not any(case.group or case.category for cases in sites.values() for case in cases):
            raise DataError("split.by_group spreads groups or classes, but the data name none; set it to false")

    def remarks(self, sites: Mapping[str, Sequence[CaseRef]]) -> list[str]:
        """Return a sentence on sites that the file leaves out, and one on cases that several published folds test."""
        if not self.file:
            return []
        found, absent = [], _absent(sites, _find(self._rows(self.fold), sites))
        if absent:
            one = len(absent) == 1
            who = f"site{'s' * (not one)} {', '.join(absent)} {'has no case and is' if one else 'have no case and are'}"
            found.append(f"{who} left out: {self._path(self.fold).name} names none")
        tested = Counter(name for k in range(self.folds) for _, name, split in self._rows(k) if split == OPEN[0])
        twice = sorted(name for name, times in tested.items() if times > 1)
        if twice:
            found.append(
                f"{len(twice)} case{'s' * (len(twice) > 1)} in the test set of more than one of these {self.folds} "
                f"folds: {', '.join(twice)}; a comparison uses the mean of the scores of such a case"
            )
        return found

    def _path(self, fold: int) -> Path:
        """Return the file of a fold."""
        return Path(self.file.replace(FOLD, str(fold)))

    def _rows(self, fold: int) -> list[tuple[str, str, str]]:
        return _read(self._path(fold))

    def _count(self, share: float, cases: int) -> int:
        """Return a share of a number of cases as a whole number."""
        if self.rounding == "nearest":
            return round(share * cases)
        down = share if self.rounding == "down" else 1 - share
        count = int(down * cases + 1e-9)  # a product may lie a rounding error below a whole number
        return count if self.rounding == "down" else cases - count

    def _site(self, site: str, cases: Sequence[CaseRef], seed: int, fixed: Mapping[CaseRef, str] | None) -> SiteSplit:
        twice = [name for name, count in Counter(case.name for case in cases).items() if count > 1]
        if twice:
            raise DataError(f"site {site!r} has two cases called {twice[0]!r}; names of cases must be unique in a site")
        patients = by_patient([case for case in cases if fixed is None or case in fixed])
        dealt = [patients[i] for i in np.random.default_rng([seed, crc32(site.encode())]).permutation(len(patients))]
        if self.by_group:  # neighbours in this order go to different splits
            dealt.sort(key=lambda patient: (patient[0].group, patient[0].category))
        if fixed is not None:
            splits = self._splits(site, dealt, [_split_of(site, patient, fixed) for patient in dealt], 0.0)
        elif self.folds:
            splits = self._splits(site, dealt, self._tested(site, dealt), 0.0)
        else:
            marks = {case: self.marked_test if case.split == "test" else case.split for p in dealt for case in p}
            splits = self._splits(site, dealt, [_split_of(site, patient, marks) for patient in dealt], self.test)
        if self.inner:
            splits = self._inside(site, [p for p in dealt if p not in splits["test"]])
        return {k: sorted((c for patient in v for c in patient), key=lambda c: c.name) for k, v in splits.items()}

    def _inside(self, site: str, known: Sequence[PatientCases]) -> dict[str, list[PatientCases]]:
        """Return the inner fold as validation cases, the others as training cases. A small site may validate none."""
        first = crc32(site.encode())
        here = [(i + first) % self.inner == self.inner_fold for i in range(len(known))]
        if all(here):
            here = [False] * len(known)
        validation, train = ([p for p, mine in zip(known, here, strict=True) if mine == k] for k in (True, False))
        return {"train": train, "validation": validation, "test": []}

    def _tested(self, site: str, dealt: Sequence[PatientCases]) -> list[str]:
        """Mark the patients of the test fold. Sites begin at different folds, so that folds have similar sizes."""
        if len(dealt) < 3:
            raise DataError(
                f"site {site!r} has {len(dealt)} cases; cross-validation takes three, one each to train, to validate "
                "and to test: add cases or leave the site out with data.exclude"
            )
        first = crc32(site.encode())
        return ["test" if (i + first) % self.folds == self.fold else "" for i in range(len(dealt))]

    def _splits(
        self, site: str, dealt: Sequence[PatientCases], fixed: Sequence[str], test_share: float
    ) -> dict[str, list[PatientCases]]:
        """Return the fixed splits, filled up with shares of the other patients. A site may have test cases only."""
        if not dealt:
            raise DataError(f"site {site!r} has no cases; add cases or leave the site out with data.exclude")
        train, validation, test = ([p for p, split in zip(dealt, fixed, strict=True) if split == k] for k in SPLITS)
        free = [p for p, split in zip(dealt, fixed, strict=True) if not split]
        if test_share and not test and len(free) >= 3:
            test, free = self._take(free, min(max(1, self._count(test_share, len(dealt))), len(free) - 2))
        if (free or train) and not validation and self.validation:
            rest = len(free) + len(train)
            if rest == 1:
                raise DataError(
                    f"site {site!r} has one case{' besides those to test' if test else ''}, "
                    f"{(*free, *train)[0][0].name!r}; it takes two, one to train and one to validate: "
                    "add a case or leave the site out with data.exclude"
                )
            whole = len(dealt) if test_share and self.validation_of == "all" else rest
            count = min(max(1, self._count(self.validation, whole)), rest - 1)
            validation, free = self._take(free, min(count, len(free)))
            if not validation:  # no patient is free, so some training patients must choose the best round
                validation, train = self._take(train, count)
        return {"train": [*train, *free], "validation": validation, "test": test}

    def _take(self, dealt: Sequence[PatientCases], count: int) -> tuple[list[PatientCases], list[PatientCases]]:
        """Return ``count`` patients and the others; evenly spaced if the order is by group."""
        taken = {i * len(dealt) // count if self.by_group else i for i in range(count)}
        return [p for i, p in enumerate(dealt) if i in taken], [p for i, p in enumerate(dealt) if i not in taken]


def by_patient(cases: Sequence[CaseRef]) -> list[PatientCases]:
    """Group the cases by patient, in the order of their names."""
    patients: dict[str, list[CaseRef]] = {}
    for case in sorted(cases, key=lambda c: c.name):
        patients.setdefault(f"patient {case.patient}" if case.patient else f"case {case.name}", []).append(case)
    return [tuple(together) for together in patients.values()]


def _split_of(site: str, patient: PatientCases, fixed: Mapping[CaseRef, str]) -> str:
    """Return the split that is fixed for a patient's cases, or an empty string."""
    splits = sorted({fixed[case] for case in patient} - {""})
    if len(splits) > 1:
        raise DataError(
            f"site {site!r}: the cases of patient {patient[0].patient!r} are in {' and '.join(splits)}; choose one"
        )
    return splits[0] if splits else ""


def table(splits: Mapping[str, SiteSplit]) -> str:
    """Return the CSV that ``split.file`` reads: site and name of every case in the data, its split and its site now.

    A volume that is cut into slices has one row.
    """
    rows = (
        [name, origin, split, site]
        for site, each in splits.items()
        for split in SPLITS
        for origin, name in dict.fromkeys(case.source for case in each.get(split, ()))
    )
    return csv_text([SUBJECT, PARTITION, SPLIT, "Site"], rows)


def _find(rows: Sequence[tuple[str, str, str]], sites: Mapping[str, Sequence[CaseRef]]) -> dict[CaseRef, str]:
    """Return the split of every case that a file names.

    Published files may use other names of sites. Cases that a federation leaves out may be in the file and not here.
    """
    by_source = {case.source: case for cases in sites.values() for case in cases}
    by_name = {case.source[1]: case for case in by_source.values()}
    unique = len(by_name) == len(by_source)
    splits: dict[CaseRef, str] = {}
    for site, name, split in rows:
        case = by_source.get((site, name)) or (by_name.get(name) if unique and split in OPEN else None)
        if case is not None:
            splits[case] = "" if split == "rest" else split.removesuffix(" fold")
    return splits


def _absent(sites: Mapping[str, Sequence[CaseRef]], fixed: Mapping[CaseRef, str]) -> list[str]:
    """Return the sites that have cases, but none in the file."""
    return [site for site, cases in sites.items() if cases and not any(case in fixed for case in cases)]


def _read(file: Path) -> list[tuple[str, str, str]]:
    """Return (site, case, split) of every row of a file. A published fold fixes the test cases alone."""
    rows = _rows(file)
    if SPLIT in rows[0]:
        odd = next((r for r in rows if r[SPLIT] not in SPLITS), None)
        if odd:
            raise DataError(f"{file}: {odd[SUBJECT]!r} is in the split {odd[SPLIT]!r}; splits are {', '.join(SPLITS)}")
        cases = [(r[PARTITION], r[SUBJECT], r[SPLIT]) for r in rows]
    elif "_test_" in file.name:
        rest = _rows(file.with_name(file.name.replace("_test_", "_train_")))
        cases = [
            (r[PARTITION], r[SUBJECT], split) for split, group in zip(OPEN, (rows, rest), strict=True) for r in group
        ]
    else:
        raise DataError(
            f"{file} has no column {SPLIT!r}, and its name is not that of a test fold, NAME_test_fold_K.csv"
        )
    twice = [who for who, count in Counter((site, name) for site, name, _ in cases).items() if count > 1]
    if twice:
        raise DataError(f"{file} names the case {twice[0][1]!r} of site {twice[0][0]!r} twice")
    return cases


def _rows(file: Path) -> list[dict[str, str]]:
    try:
        rows = list(csv_rows(io.StringIO(file.read_text(encoding="utf-8-sig"))))
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise DataError(f"the split {file} cannot be read: {problem}") from problem
    if not rows or any(not r.get(SUBJECT) or not r.get(PARTITION) for r in rows):
        raise DataError(f"{file}: every row needs a {SUBJECT} and a {PARTITION}")
    return rows
