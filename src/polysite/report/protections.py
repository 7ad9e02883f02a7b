"""What protected the hospitals of a run, and who saw what: secure sums (``run.secure``) and differential privacy
(``train.private``)."""

from collections.abc import Iterator, Sequence

from polysite.report.grid import Grid, Line, name, number
from polysite.report.runs import Method, Summary

UNITS = {"patient": "every training patient", "hospital": "every hospital"}


def table(methods: Sequence[Method]) -> Grid:
    """Return a table of protections by site; without lines if no run had any."""
    lines = []
    for method, run in ((m, run) for m in methods for run in m.runs if is_secure(run) or unit_of(run)):
        saw = "the sum over the hospitals" if is_secure(run) else "each reply"
        delta = float(run.settings["train"]["private"]["delta"]) if unit_of(run) else None
        for site in sorted(run.trained):
            words = (method.name, site, saw, UNITS.get(unit_of(run), "nobody"))
            lines.append(Line((*map(name, words), number(epsilon_of(run, site), ".2f"), number(delta, "g"))))
    head = ("method", "hospital", "the coordinator saw", "noise protects", "epsilon spent", "delta")
    note = (
        "Epsilon is that of all rounds of this study at the hospital, and of its assessment if that has noise; "
        "scores of validation and test cases are not covered by it. docs/protection.md says what each protection "
        "promises."
    )
    return Grid("privacy", "", head, tuple(lines), note)


def audience(methods: Sequence[Method]) -> Grid:
    """Return who saw what; without lines if no run had protections or real hospitals."""
    lines = []
    for method in methods:
        run = method.runs[0]
        if not (is_secure(run) or unit_of(run) or (run.path / "deployment.json").is_file()):
            continue
        lines += [Line((name(method.name), name(who), name(what))) for who, what in _seen(run)]
    note = (
        "Scores of validation and test cases leave for each hospital besides, as its policy allows. 'polysite audit "
        "RUN' measures what attackers make of the models; docs/protection.md states what each can learn."
    )
    return Grid("audience", "Who saw what", ("method", "who", "saw"), tuple(lines), note)


def _seen(run: Summary) -> Iterator[tuple[str, str]]:
    noise = ", under noise" if unit_of(run) else ""
    yield "the coordinator", ("the sum of all replies of a round" if is_secure(run) else "every reply") + noise
    if (run.path / "assessment" / "assessment.json").is_file():
        epsilon = float(run.settings.get("assess", {}).get("private", {}).get("epsilon", 0.0))
        under = f", under noise for epsilon = {epsilon:g}" if epsilon else ""
        yield "the coordinator", f"of the assessment: the statistics of every hospital{under}"
    yield "a hospital", f"the common model of every round{noise}"
    yield "who gets the final model", f"that model{noise}"
    if (run.path / "deployment.json").is_file():
        yield "who reads the wire", "sizes and times"


def is_secure(run: Summary) -> bool:
    """Return whether replies left under masks."""
    return bool(run.settings["run"].get("secure", {}).get("use") == "on")


def unit_of(run: Summary) -> str:
    """Return what noise protects; empty without noise."""
    unit = str(run.settings.get("train", {}).get("private", {}).get("unit", "none"))
    return "" if unit == "none" else unit


def epsilon_of(run: Summary, site: str) -> float | None:
    """Return what the last round of a site says that it has spent."""
    known = [r.sites[site].epsilon for r in run.records if site in r.sites]
    return next((value for value in reversed(known) if value is not None), None)
