"""Names that fit: of hospitals and methods in figures, legends and the terminal."""

from collections.abc import Sequence

MAX_LETTERS = 40  # of a name in a legend


def cut(name: str, most: int = MAX_LETTERS) -> str:
    """Shorten a long name in the middle, because names often differ at their ends.

    >>> cut("hospital-of-the-north-17", 11)
    'hospit…h-17'
    """
    return name if len(name) <= most else f"{name[: most - most // 3 - 2]}…{name[-(most // 3 + 1) :]}"


def shorten(names: Sequence[str], most: int) -> dict[str, str]:
    """Return short names that differ from each other; those that would be equal get a number.

    >>> shorten(["Hospital A, Northern Wing", "Hospital B, Northern Wing"], 12)
    {'Hospital A, Northern Wing': 'Hospit… Wing', 'Hospital B, Northern Wing': 'Hospi…Wing 2'}
    """
    short: dict[str, str] = {}
    for name in names:
        chosen, count = cut(name, most), 1
        while chosen in short.values() and name not in short:
            count += 1
            chosen = f"{cut(name, max(4, most - len(str(count)) - 1))} {count}"
        short[name] = chosen
    return short
