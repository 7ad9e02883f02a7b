"""The evidence bank: what methods scored in which federations, of this user and of polysite's own results.

Every finished simulated run adds a line to a local table, and so does every assessment, with the distances between the
hospitals. ``similar`` finds the federations that are most like a given one, with the gain of every method over FedAvg
there. The lines hold numbers and settings: no names of hospitals, patients or cases, and no paths.

    lines.py       the two kinds of lines and their JSON
    table.py       the local table and the table that comes with polysite
    anonymous.py   digests of the cases, and settings without names
    keep.py        adds the line of a finished run or assessment
    federations.py lines of the same cases together, with gains over FedAvg
    similar.py     the federations that are most like a given one
    show.py        tables for the terminal
"""

from polysite.evidence.federations import Federation, Gain, federations
from polysite.evidence.keep import keep_assessment, keep_run
from polysite.evidence.lines import DistanceLine, RunLine
from polysite.evidence.similar import Description, Match, describe, describe_study, similar
from polysite.evidence.table import is_off, place, read, shipped

__all__ = [
    "Description",
    "DistanceLine",
    "Federation",
    "Gain",
    "Match",
    "RunLine",
    "describe",
    "describe_study",
    "federations",
    "is_off",
    "keep_assessment",
    "keep_run",
    "place",
    "read",
    "shipped",
    "similar",
]
