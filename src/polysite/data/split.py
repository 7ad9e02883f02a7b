"""Which patients train, which choose the best round, which are kept for the final examination.

Every site is split by itself, deterministically in (seed, site), so that every hospital appears in every part. All
cases of one patient are in one part.
Federated cross-validation: folds inside every site, the test fold of the federation is the union of the sites'.
"""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from polysite.data.case import SPLITS, CaseRef
from polysite.errors import ConfigError, DataError

SiteSplit = Mapping[str, list[CaseRef]]  # train, validation, test
PatientCases = tuple[CaseRef, ...]  # all cases of one

SUBJECT, PARTITION, PART = "Subject_ID", "Partition_ID", "Split"  # as the FeTS files call them; the last is ours
OPEN = ("test fold", "rest")  # what a published fold says of a case


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
        if self.folds and self.file:
            raise ConfigError("split.folds and split.file contradict one another; leave out one of them")
        if not 0 <= self.fold < max(1, self.folds):
            raise ConfigError(f"split.fold = {self.fold}: with split.folds = {self.folds} it lies below {self.folds}")

    def seed_of(self, study: int) -> int:
        """What decides who is where: the split's own seed, or the study's."""
        return study if self.seed is None else self.seed

    def apply(self, sites: Mapping[str, Sequence[CaseRef]], seed: int) -> Mapping[str, SiteSplit]:
        """Every site's cases as ``train``, ``validation`` and ``test``."""
        seed = self.seed_of(seed)
        fixed = _find(_read(Path(self.file)), sites) if self.file else None
        return {site: self._site(site, patients, seed, fixed) for site, patients in sites.items()}

    def check(self, sites: Mapping[str, Sequence[CaseRef]]) -> None:
        """Refuse a file that names cases which the data do not have."""
        rows = _read(Path(self.file)) if self.file else []
        known = {p.source for patients in sites.values() for p in patients}
        names = {name for _, name in known}
        for site, name, part in rows:
            if (site, name) not in known and (part not in OPEN or name not in names):
                raise DataError(f"{self.file} names the case {name!r} of site {site!r}, which is not in the data")
        if self.by_group and not any(p.group or p.category for patients in sites.values() for p in patients):
            raise DataError("split.by_group spreads groups or classes, but the data name none; set it to false")

    def _site(
        self, site: str, patients: Sequence[CaseRef], seed: int, fixed: Mapping[CaseRef, str] | None
    ) -> SiteSplit:
        twice = [name for name, count in Counter(p.name for p in patients).items() if count > 1]
        if twice:
            raise DataError(f"site {site!r} has two cases called {twice[0]!r}; names of cases must be unique in a site")
        people = _people([p for p in patients if fixed is None or p in fixed])
        dealt = [people[i] for i in np.random.default_rng([seed, crc32(site.encode())]).permutation(len(people))]
        if self.by_group:  # neighbours in this order go to different parts
            dealt.sort(key=lambda patient: (patient[0].group, patient[0].category))
        if fixed is not None:
            parts = self._parts(site, dealt, [_part(site, patient, fixed) for patient in dealt], 0.0)
        elif self.folds:
            parts = self._parts(site, dealt, self._tested(site, dealt), 0.0)
        else:
            marks = {p: p.split for patient in dealt for p in patient}
            parts = self._parts(site, dealt, [_part(site, patient, marks) for patient in dealt], self.test)
        return {k: sorted((p for patient in v for p in patient), key=lambda p: p.name) for k, v in parts.items()}

    def _tested(self, site: str, dealt: Sequence[PatientCases]) -> list[str]:
        """Everyone is tested in exactly one fold. Sites begin at different folds, so that folds have like sizes."""
        if len(dealt) < 3:
            raise DataError(
                f"site {site!r} has {len(dealt)} cases; cross-validation takes three, one each to train, to validate "
                "and to test: add cases or leave the site out with data.exclude"
            )
        first = crc32(site.encode())
        return ["test" if (i + first) % self.folds == self.fold else "" for i in range(len(dealt))]

    def _parts(
        self, site: str, dealt: Sequence[PatientCases], fixed: Sequence[str], test_share: float
    ) -> dict[str, list[PatientCases]]:
        """The parts that are fixed, and shares of the rest. A site whose cases are all tested does not train."""
        if not dealt:
            raise DataError(f"site {site!r} has no cases; add cases or leave the site out with data.exclude")
        train, validation, test = ([p for p, part in zip(dealt, fixed, strict=True) if part == k] for k in SPLITS)
        free = [p for p, part in zip(dealt, fixed, strict=True) if not part]
        if test_share and not test and len(free) >= 3:
            test, free = self._take(free, min(max(1, round(test_share * len(dealt))), len(free) - 2))
        if (free or train) and not validation:
            rest = len(free) + len(train)
            if rest == 1:
                raise DataError(
                    f"site {site!r} has one case{' besides those to test' if test else ''}, "
                    f"{(*free, *train)[0][0].name!r}; it takes two, one to train and one to validate: "
                    "add a case or leave the site out with data.exclude"
                )
            count = min(max(1, round(self.validation * (len(dealt) if test_share else rest))), rest - 1)
            validation, free = self._take(free, min(count, len(free)))
            if not validation:  # nothing is free: some of what was meant to train must choose the best round
                validation, train = self._take(train, count)
        return {"train": [*train, *free], "validation": validation, "test": test}

    def _take(self, dealt: Sequence[PatientCases], count: int) -> tuple[list[PatientCases], list[PatientCases]]:
        """``count`` of them, and the others; evenly over the order where it is sorted by group."""
        taken = {i * len(dealt) // count if self.by_group else i for i in range(count)}
        return [p for i, p in enumerate(dealt) if i in taken], [p for i, p in enumerate(dealt) if i not in taken]


def _people(patients: Sequence[CaseRef]) -> list[PatientCases]:
    """The cases of each patient together, in the order of their names."""
    found: dict[str, list[CaseRef]] = {}
    for p in sorted(patients, key=lambda p: p.name):
        found.setdefault(f"patient {p.patient}" if p.patient else f"case {p.name}", []).append(p)
    return [tuple(cases) for cases in found.values()]


def _part(site: str, patient: PatientCases, fixed: Mapping[CaseRef, str]) -> str:
    """Where a patient belongs, if any of the cases says so."""
    said = sorted({fixed[p] for p in patient} - {""})
    if len(said) > 1:
        raise DataError(
            f"site {site!r}: the cases of patient {patient[0].patient!r} are in {' and '.join(said)}; choose one"
        )
    return said[0] if said else ""


def table(parts: Mapping[str, SiteSplit]) -> str:
    """Who is in which part, as the CSV that ``split.file`` reads: as the data call them, and where they are now."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow([SUBJECT, PARTITION, PART, "Site"])
    for site, each in parts.items():
        for part in SPLITS:
            rows.writerows([p.source[1], p.source[0], part, site] for p in each.get(part, ()))
    return out.getvalue()


def _find(rows: Sequence[tuple[str, str, str]], sites: Mapping[str, Sequence[CaseRef]]) -> dict[CaseRef, str]:
    """The patients that a file means. A published one may call the sites otherwise; what a federation left out may be
    in the file and not here."""
    by_source = {p.source: p for patients in sites.values() for p in patients}
    by_name = {p.source[1]: p for p in by_source.values()}
    unique = len(by_name) == len(by_source)
    found: dict[CaseRef, str] = {}
    for site, name, part in rows:
        patient = by_source.get((site, name)) or (by_name.get(name) if unique and part in OPEN else None)
        if patient is not None:
            found[patient] = "" if part == "rest" else part.removesuffix(" fold")
    return found


def _read(file: Path) -> list[tuple[str, str, str]]:
    """(site, case, part) of a file; a published fold leaves train and validation of the rest to us."""
    rows = _rows(file)
    if PART in rows[0]:
        odd = next((r for r in rows if r[PART] not in SPLITS), None)
        if odd:
            raise DataError(f"{file}: {odd[SUBJECT]!r} is in the part {odd[PART]!r}; parts are {', '.join(SPLITS)}")
        found = [(r[PARTITION], r[SUBJECT], r[PART]) for r in rows]
    elif "_test_" in file.name:
        rest = _rows(file.with_name(file.name.replace("_test_", "_train_")))
        found = [
            (r[PARTITION], r[SUBJECT], part) for part, group in zip(OPEN, (rows, rest), strict=True) for r in group
        ]
    else:
        raise DataError(f"{file} has no column {PART!r}, and its name is not that of a test fold, NAME_test_fold_K.csv")
    twice = [who for who, count in Counter((site, name) for site, name, _ in found).items() if count > 1]
    if twice:
        raise DataError(f"{file} names the case {twice[0][1]!r} of site {twice[0][0]!r} twice")
    return found


def _rows(file: Path) -> list[dict[str, str]]:
    try:
        rows = list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8-sig"))))
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise DataError(f"the split {file} cannot be read: {problem}") from problem
    if not rows or any(not r.get(SUBJECT) or not r.get(PARTITION) for r in rows):
        raise DataError(f"{file}: every row needs a {SUBJECT} and a {PARTITION}")
    return rows
