"""Which patients train, which choose the best round, which are kept for the final examination.

Every site is split by itself, deterministically in (seed, site), so that every hospital appears in every part.
Federated cross-validation: folds inside every site, the test fold of the federation is the union of the sites'.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from polysite.data.case import Patient
from polysite.errors import ConfigError, DataError

Parts = Mapping[str, list[Patient]]  # train, validation, test

PARTS = ("train", "validation", "test")
SUBJECT, PARTITION, PART = "Subject_ID", "Partition_ID", "Split"  # as the FeTS files call them; the last is ours


@dataclass(frozen=True)
class Split:
    """A patient whose part the manifest fixes stays there, unless folds are asked for or a file says otherwise."""

    validation: float = 0.2  # share of a site's cases (with folds: of those not tested); at least one case
    test: float = 0.2  # share of a site's cases; at least one where three or more are there
    folds: int = 0  # cross-validation with this many folds instead of the share above; 0: none
    fold: int = 0  # which of them is tested, from 0
    by_group: bool = False  # spread every group (grade, scanner, class) evenly over the parts
    seed: int | None = None  # None: the study's; fix it to repeat a study with other seeds on the same patients
    file: str = ""  # split.csv of an earlier run, or a published NAME_test_fold_K.csv (NAME_train_fold_K.csv beside it)

    def __post_init__(self) -> None:
        if not (0 < self.validation < 1 and 0 <= self.test < 1 and self.validation + self.test < 1):
            raise ConfigError(
                f"split.validation = {self.validation} and split.test = {self.test} must leave cases to train on: "
                "both below 1, validation above 0, their sum below 1"
            )
        if self.folds == 1 or self.folds < 0:
            raise ConfigError(f"split.folds = {self.folds}: at least two, or 0 for none")
        if not 0 <= self.fold < max(1, self.folds):
            raise ConfigError(f"split.fold = {self.fold}: with split.folds = {self.folds} it lies below {self.folds}")

    def apply(self, sites: Mapping[str, Sequence[Patient]], seed: int) -> Mapping[str, Parts]:
        """Every site's cases as ``train``, ``validation`` and ``test``."""
        seed = seed if self.seed is None else self.seed
        fixed = _find(_read(Path(self.file)), sites, self.file) if self.file else None
        return {site: self._site(site, patients, seed, fixed) for site, patients in sites.items()}

    def _site(self, site: str, patients: Sequence[Patient], seed: int, fixed: Mapping[Patient, str] | None) -> Parts:
        names = [p.name for p in patients]
        if len(set(names)) < len(names):
            twice = next(c for c in names if names.count(c) > 1)
            raise DataError(f"site {site!r} has two cases called {twice!r}; names of cases must be unique in a site")
        ordered = sorted(patients, key=lambda p: p.name)
        dealt = [ordered[i] for i in np.random.default_rng([seed, crc32(site.encode())]).permutation(len(ordered))]
        if self.by_group:  # neighbours in this order go to different parts
            dealt.sort(key=lambda p: (p.group, p.category))
        if fixed is not None:
            dealt = [p for p in dealt if p in fixed]
            parts = self._parts(site, dealt, fixed, 0.0)
        elif self.folds:
            parts = self._parts(site, dealt, self._tested(site, dealt), 0.0)
        else:
            parts = self._parts(site, dealt, {p: p.split for p in dealt}, self.test)
        return {k: sorted(v, key=lambda p: p.name) for k, v in parts.items()}

    def _tested(self, site: str, dealt: Sequence[Patient]) -> Mapping[Patient, str]:
        """Every case is tested in exactly one fold. Sites begin at different folds, so that folds have like sizes."""
        if len(dealt) < 3:
            raise DataError(
                f"site {site!r} has {len(dealt)} cases; cross-validation takes three, one each to train, to validate "
                "and to test: add cases or leave the site out with data.exclude"
            )
        first = crc32(site.encode())
        return {p: "test" if (i + first) % self.folds == self.fold else "" for i, p in enumerate(dealt)}

    def _parts(self, site: str, dealt: Sequence[Patient], fixed: Mapping[Patient, str], test_share: float) -> Parts:
        """The parts that are fixed, and shares of the rest. A site whose cases are all tested does not train."""
        test, validation = ([p for p in dealt if fixed[p] == k] for k in ("test", "validation"))
        free = [p for p in dealt if not fixed[p]]
        if test_share and not test and len(free) >= 3:
            test, _ = self._take(free, min(max(1, round(test_share * len(dealt))), len(free) - 2))
        rest = [p for p in dealt if p not in test and p not in validation]
        if not dealt:
            raise DataError(f"site {site!r} has no cases; add cases or leave the site out with data.exclude")
        if rest and not validation:
            if len(rest) == 1:
                but = " besides those to test" if test else ""
                raise DataError(
                    f"site {site!r} has one case{but}, {rest[0].name!r}; it takes two, one to train and one to "
                    "validate: add a case or leave the site out with data.exclude"
                )
            of = len(dealt) if test_share else len(rest)
            validation, rest = self._take(rest, min(max(1, round(self.validation * of)), len(rest) - 1))
        return {"train": rest, "validation": validation, "test": test}

    def _take(self, dealt: Sequence[Patient], count: int) -> tuple[list[Patient], list[Patient]]:
        """``count`` of them, and the others; evenly over the order where it is sorted by group."""
        taken = {i * len(dealt) // count if self.by_group else i for i in range(count)}
        return [p for i, p in enumerate(dealt) if i in taken], [p for i, p in enumerate(dealt) if i not in taken]


def table(parts: Mapping[str, Parts]) -> str:
    """Who is in which part, as the CSV that ``split.file`` reads."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow([SUBJECT, PARTITION, PART])
    rows.writerows([p.name, site, part] for site, each in parts.items() for part in PARTS for p in each.get(part, ()))
    return out.getvalue()


def _find(
    rows: Sequence[tuple[str, str, str]], sites: Mapping[str, Sequence[Patient]], file: str
) -> dict[Patient, str]:
    """The patients that a file means. It may call the sites otherwise, as long as names of cases are unique."""
    by_site = {(site, p.name): p for site, patients in sites.items() for p in patients}
    by_name = {p.name: p for p in by_site.values()}
    unique = len(by_name) == len(by_site)
    found: dict[Patient, str] = {}
    for site, name, part in rows:
        patient = by_site.get((site, name)) or (by_name.get(name) if unique else None)
        if patient is None:
            raise DataError(f"{file} names the case {name!r} of site {site!r}, which is not in the data")
        if patient in found:
            raise DataError(f"{file} names the case {name!r} of site {site!r} twice")
        found[patient] = part
    return found


def _read(file: Path) -> list[tuple[str, str, str]]:
    """(site, case, part); the part is empty where train and validation are left to us."""
    rows = _rows(file)
    if PART in rows[0]:
        odd = next((r for r in rows if r[PART] not in PARTS), None)
        if odd:
            raise DataError(f"{file}: {odd[SUBJECT]!r} is in the part {odd[PART]!r}; parts are {', '.join(PARTS)}")
        return [(r[PARTITION], r[SUBJECT], r[PART]) for r in rows]
    if "_test_" not in file.name:
        raise DataError(f"{file} has no column {PART!r}, and its name is not that of a test fold, NAME_test_fold_K.csv")
    rest = _rows(file.with_name(file.name.replace("_test_", "_train_")))
    return [(r[PARTITION], r[SUBJECT], part) for part, group in (("test", rows), ("", rest)) for r in group]


def _rows(file: Path) -> list[dict[str, str]]:
    try:
        rows = list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8-sig"))))
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise DataError(f"the split {file} cannot be read: {problem}") from problem
    if not rows or any(not r.get(SUBJECT) or not r.get(PARTITION) for r in rows):
        raise DataError(f"{file}: every row needs a {SUBJECT} and a {PARTITION}")
    return rows
