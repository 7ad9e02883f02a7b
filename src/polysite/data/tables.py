"""Tables beside the images, with the site, group and split of the cases."""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from polysite.data.manifest import Row, natural
from polysite.errors import DataError
from polysite.spreadsheets import rows as csv_rows

Facts = Mapping[str, Mapping[str, str]]  # case -> its columns in a table: site, group, split

SPLITS = {"train": "train", "training": "train", "test": "test"} | dict.fromkeys(
    ("val", "valid", "validation"), "validation"
)
PARTITIONS = ("partitioning_1.csv", "partitioning_2.csv")
TABLES = (*PARTITIONS, "thresholded_sites.csv", "anony_sites.csv", "name_mapping.csv", "participants.tsv")
COLUMN = {
    "case": re.compile(r"(subject|case|participant|patient)(_ids?)?|seriesuid|brats_?\d+(_subject)?_?id"),
    "site": re.compile(r"partition_id|site(_ids?|_no)?|institution|cent(er|re)|hospital"),
    "group": re.compile(r"group|(tumou?r_)?grade|scanner"),
    "split": re.compile(r"(train_test_)?split"),
}
INSTITUTION = re.compile(r"brats1[789]_([^_]+)_", re.IGNORECASE)  # names of later years have no institution


def find_facts(root: Path, given: Sequence[Path], known: set[str], remarks: list[str]) -> Facts:
    """Read the given tables; the first takes precedence. Without any, use a known table in, above or below the root."""
    places = ("", "../", "*/")
    nearby = [f for name in TABLES for place in places for f in sorted(root.glob(place + name)) if f.is_file()]
    merged: dict[str, Mapping[str, str]] = {}
    for file in given or nearby:
        facts = _facts(file, known)
        if not known & facts.keys():
            if given:
                raise DataError(f"{file} names none of the cases on disk, such as {min(known)!r}; call them alike")
            remarks.append(f"{file.name} names none of the cases on disk and was not used")
            continue
        remark(remarks, facts.keys() - known, f"of {file.name} are not on disk")
        merged = {k: {**facts.get(k, {}), **merged.get(k, {})} for k in (*merged, *facts)}
        if not given:
            other = [f.name for f in nearby if f.name in PARTITIONS and f.name != file.name and file.name in PARTITIONS]
            remarks += [f"the sites are those of {file.name}; use --table {n} for the others" for n in other[:1]]
            break
    return merged


def joined(rows: list[Row], facts: Facts, remarks: list[str]) -> list[Row]:
    """Add site, group and split from the tables to the cases. Tables with sites also select the cases."""
    if not facts:
        return rows
    sites = {f["site"] for f in facts.values() if f.get("site")}
    width = max(map(len, sites), default=0) if all(map(str.isdecimal, sites)) else 0  # 01 to 23 sort, 1 to 23 do not
    kept, unlisted, without_site = [], [], []
    for row in rows:
        own = next((facts[k] for k in keys(row.case) if k in facts), {})
        if sites and "site" not in own:
            unlisted.append(row.case)
            continue
        without_site += [row.case] if sites and not own["site"] else []
        site = (own["site"].zfill(width) if own["site"] else "unknown") if sites else row.site
        kept.append(replace(row, site=site, group=own.get("group", row.group), split=own.get("split", row.split)))
    remark(remarks, unlisted, "on disk are in no table and were left out")
    remark(remarks, without_site, "have no site in the table and were put into the site 'unknown'")
    return kept


def _facts(file: Path, known: set[str]) -> Facts:
    """Return site, group and split of every case in a table."""
    lines = read_rows(file)
    former = [next((m[1] for v in reversed(line.values()) if (m := INSTITUTION.match(v))), "") for line in lines]
    if any(former):  # names of earlier years of BraTS, which include the institution
        lines = [
            line | {"institution": line.get("institution", site)} for line, site in zip(lines, former, strict=True)
        ]
    columns = {k: [c for c in (lines[0] if lines else ()) if COLUMN[k].fullmatch(c)] for k in COLUMN}
    if not columns["case"]:
        raise DataError(f"{file} has no rows, or no column that names the cases; call it 'case'")
    case = max(columns.pop("case"), key=lambda c: sum(line[c] in known for line in lines))
    by_case: dict[str, Mapping[str, str]] = {}
    for line in (line for line in lines if line[case]):
        cells = {k: line[names[0]] for k, names in columns.items() if names}
        facts = {k: SPLITS.get(v.lower(), v) if k == "split" else v for k, v in cells.items() if v or k == "site"}
        if by_case.setdefault(line[case], facts) != facts:
            raise DataError(f"{file}: case {line[case]!r} is in two rows that differ; keep one of them")
    return by_case


def read_rows(file: Path) -> list[dict[str, str]]:
    """Return the rows of a table; names of columns in lower case, without parentheses."""
    with sensible(file):
        lines = file.read_text(encoding="utf-8-sig").splitlines()
        rows = list(csv_rows(lines, delimiter=max(",;\t", key="".join(lines[:1]).count)))
    heads = {k: re.sub(r"\W+", "_", k.partition("(")[0].strip().lower()) for k in (rows[0] if rows else ()) if k}
    clean = {"na": "", "n/a": "", "nan": ""}
    return [{h: clean.get(v.lower(), v) for k, h in heads.items() for v in [(r[k] or "").strip()]} for r in rows]


def keys(case: str) -> tuple[str, ...]:
    """Return the names that a table may use for a case: its own, or without session (BIDS) or candidate (LUNA)."""
    plain = re.sub(r"_ses-.*|-\d{5}$", "", case)
    return case, plain, plain.removeprefix("sub-")


def remark(remarks: list[str], cases: Iterable[str], what: str) -> None:
    """Add a sentence about some cases, if there are any; ``what`` is in the plural."""
    if names := natural({*cases}):
        one = {"are": "is", "were": "was", "have": "has"}
        what = re.sub(r"\b(are|were|have)\b", lambda m: one[m[0]], what) if len(names) == 1 else what
        shown = ", ".join(names[:5]) + ", …" * (len(names) > 5)
        remarks.append(f"{len(names)} case{'s' * (len(names) > 1)} {what}: {shown}")


@contextmanager
def sensible(file: Path) -> Iterator[None]:
    """Turn any error about a file or its content into a DataError that names the file."""
    try:
        yield
    except (OSError, csv.Error, AttributeError, LookupError, TypeError, ValueError, RecursionError) as problem:
        why = f"{type(problem).__name__}: {problem}"
        raise DataError(f"{file} cannot be used as it is; correct it or move it away ({why})") from problem
