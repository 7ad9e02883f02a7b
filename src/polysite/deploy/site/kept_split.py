"""The split of a hospital's cases within a study, kept so that a change of the data does not move a case.

A study splits cases by the seed and their number, so one case more would deal all of them anew, and a case that was
tested could train. The hospital therefore writes down the part of every case when it agrees to a study, under keyed
digests instead of names. Later, a known case stays in its part, a case that is gone is left out, and a new case trains,
unless it is of a patient who has a known case: then it joins that case.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polysite.data.case import SPLITS, CaseRef
from polysite.data.split import SiteSplit, by_patient
from polysite.deploy.site.pseudonyms import Pseudonyms
from polysite.errors import DataError
from polysite.foreign import parse_json
from polysite.storage import write_private

FORMAT = 1  # of the file
OUT = "out"  # part of a case that the study leaves out
HELD_OUT = ("test", OUT, "validation")  # parts that a new case of a patient joins, in this order; else it trains


@dataclass(frozen=True)
class KeptSplit:
    """The split to use.

    ``write`` keeps it; a study that is refused leaves nothing behind.
    """

    splits: SiteSplit
    parts: Mapping[str, str]  # of every case that was ever known, by digest
    changed: bool = False  # the cases are not those of the agreement

    def write(self, file: Path) -> None:
        """Write down the part of every case."""
        text = json.dumps({"format": FORMAT, "cases": dict(sorted(self.parts.items()))}, indent=0)
        write_private(file, text + "\n")


def keep_split(file: Path, cases: Sequence[CaseRef], dealt: SiteSplit, pseudonyms: Pseudonyms) -> KeptSplit:
    """Return the split in which every known case has its part: that of the study, if nothing is written yet.

    Args:
        file: Where the parts are kept.
        cases: All cases of the hospital; a study may leave some of them out.
        dealt: Their split by the settings of the study.
        pseudonyms: The hospital's digests.
    """
    digests = {case: pseudonyms.digest(case.name) for case in cases}
    if not file.exists():
        parts = {**dict.fromkeys(digests.values(), OUT), **_parts(dealt, digests)}
        return KeptSplit(dealt, parts)
    known = _read(file)
    placed: dict[str, list[CaseRef]] = {part: [] for part in (*SPLITS, OUT)}
    for patient in by_patient(cases):
        theirs = [known[digests[case]] for case in patient if digests[case] in known]
        joined = next((part for part in HELD_OUT if part in theirs), SPLITS[0])
        for case in patient:
            placed[known.get(digests[case], joined)].append(case)
    changed = known.keys() != set(digests.values())
    splits = {part: sorted(placed[part], key=lambda case: case.name) for part in SPLITS}
    return KeptSplit(splits, {**known, **_parts(placed, digests)}, changed)


def _parts(placed: SiteSplit, digests: Mapping[CaseRef, str]) -> dict[str, str]:
    return {digests[case]: part for part, cases in placed.items() for case in cases}


def _read(file: Path) -> dict[str, str]:
    try:
        found = parse_json(file.read_bytes())
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']!r:.20} is not {FORMAT}")
        parts = {str(digest): str(part) for digest, part in found["cases"].items()}
        odd = next((part for part in parts.values() if part not in (*SPLITS, OUT)), None)
        if odd is not None or not parts:
            raise ValueError(f"{odd!r:.20} is no part of a split" if parts else "it names no case")
        return parts
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise DataError(
            f"{file}, which has the part of every case in this study, cannot be read ({problem}): without it test "
            "cases could train; restore it from a backup, or leave this study"
        ) from problem
