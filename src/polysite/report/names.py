"""Names that fit: of hospitals and methods in figures, legends and the terminal."""

from collections.abc import Collection, Sequence
from os.path import commonprefix

MAX_LETTERS = 40  # of a name in a legend


def cut(name: str, most: int = MAX_LETTERS) -> str:
    """Shorten a long name in the middle, because names often differ at their ends.

    >>> cut("hospital-of-the-north-17", 11)
    'hospit…h-17'
    """
    return name if len(name) <= most else f"{name[: most - most // 3 - 2]}…{name[-(most // 3 + 1) :]}"


def joined(names: Sequence[str]) -> str:
    """Join names as in a sentence.

    >>> joined(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def shorten(names: Sequence[str], most: int) -> dict[str, str]:
    """Return short names that differ from each other.

    Names that would look the same show what differs between them; if that is too long, they get a number.

    >>> list(shorten(["Hospital 1, Northern Wing", "Hospital 2, Northern Wing", "Clinic"], 14).values())
    ['Hospital…1…', 'Hospital…2…', 'Clinic']
    >>> list(shorten(["St. Mary of the Northern Hills", "St. Mary under the Northern Hills"], 8).values())
    ['St. …lls', 'St…lls 2']
    >>> two = [f"A model for each of {{{first}… of the North and 7 more}}" for first in ("Anna", "Emma")]
    >>> list(shorten(two, 30).values())
    ['A model for each of…{Anna…', 'A model for each of…{Emma…']
    """
    alike: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        alike.setdefault(cut(name, most), []).append(name)
    short: dict[str, str] = {}
    for text, same in alike.items():
        short |= {same[0]: text} if len(same) == 1 else _told_apart(same, most, set(short.values()))
    return {name: short[name] for name in names}


def listed(sites: Sequence[str], count: int) -> str:
    """Return the names of some of so many hospitals; of more than four, their number and three names.

    >>> listed(["a", "b"], 9), listed(["a", "b", "c", "d", "e"], 9)
    ('a, b', '5 of 9 hospitals (a, b, c and 2 more)')
    """
    if len(sites) <= 4:
        return ", ".join(sites)
    return f"{len(sites)} of {count} hospitals ({', '.join(sites[:3])} and {len(sites) - 3} more)"


def _told_apart(names: Sequence[str], most: int, taken: Collection[str]) -> dict[str, str]:
    """Return names that show the words in which they differ, or else names with a number."""
    shared, end = (commonprefix(x) for x in (names, [n[::-1] for n in names]))  # noqa: RUF071  (of letters)
    end = end[::-1]
    start = shared.rfind(" ") + 1
    end = end[end.find(" ") :] if " " in end else ""
    middles = [n[start : len(n) - len(end)].strip(" ,;…") for n in names]
    room = most - max(map(len, middles)) - 2
    made = [f"{shared[: min(room, start)].rstrip(' ,;')}…{middle}{'…' if end else ''}" for middle in middles]
    if room >= 3 and all(middles) and len({*made, *taken}) == len(made) + len(taken):
        return dict(zip(names, made, strict=True))
    chosen: dict[str, str] = {}
    for name in names:
        text, count = cut(name, most), 1
        while text in chosen.values() or text in taken:
            count += 1
            text = f"{cut(name, max(4, most - len(str(count)) - 1))} {count}"
        chosen[name] = text
    return chosen
