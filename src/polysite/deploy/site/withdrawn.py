"""What a hospital has withdrawn from: studies that it has left, and cases that no study may see any more."""

from pathlib import Path

from polysite.storage import write_file

LEFT = "left"  # file in the folder of a study that was left, and in the state folder if the federation was
CASES = "withdrawn.txt"  # file in the state folder: names of cases, one a line


def why_left(state: Path, study: Path) -> str:
    """Return a sentence if a hospital has left the federation or a study, else an empty text."""
    if (state / LEFT).exists():
        return "this hospital has left the federation"
    return "this hospital has left this study" if (study / LEFT).exists() else ""


def withdrawn_cases(state: Path) -> frozenset[str]:
    """Return the names of the cases that were withdrawn."""
    file = state / CASES
    return frozenset(file.read_text(encoding="utf-8").splitlines()) if file.exists() else frozenset()


def withdraw_case(state: Path, case: str) -> None:
    """Add a case to those that were withdrawn."""
    names = sorted({*withdrawn_cases(state), case})
    write_file(state / CASES, lambda p: p.write_text("".join(f"{name}\n" for name in names), encoding="utf-8"))
