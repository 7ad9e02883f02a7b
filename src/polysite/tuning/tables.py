"""Tables of a search: its plan, and its result."""

from polysite.report.grid import Cell, Grid, Line, name, number
from polysite.tuning.search import Plan, Tuned

MANY_SITES = 6  # of more hospitals the table has the lowest and the highest score


def plan_table(plan: Plan) -> Grid:
    """Return the rungs of a search, with the number of candidates and their cost."""
    lines, before = [], 0.0
    for k, rung in enumerate(plan.rungs, start=1):
        more = rung.candidates * (rung.share - before) * plan.inner
        cells = (number(rung.candidates, "d"), Cell(f"{rung.share:.0%}", rung.share), Cell(f"{more:.1f}", more))
        lines.append(Line((name(f"rung {k}"), *cells)))
        before = rung.share
    note = (
        f"Candidates train on {plan.inner} inner folds; the better third goes on from its checkpoints, and the "
        f"reference in any case. All together: at most {plan.trainings:.1f} whole trainings."
    )
    return Grid("plan", "Plan of the search", ("", "candidates", "of a training", "trainings"), tuple(lines), note)


def table(found: Tuned) -> Grid:
    """Return the candidates of a search, best first; of many hospitals, the lowest and the highest score."""
    sites = sorted(found.best.sites)
    many = len(sites) > MANY_SITES
    lines = []
    for row in found.rows:
        score = name(row.failed) if row.score is None else Cell(f"{row.score:.3f}", row.score, row is found.best)
        ends = [f(row.sites.values()) if row.sites else None for f in (min, max)]
        each = [_score(x) for x in (ends if many else [row.sites.get(s) for s in sites])]
        lines.append(Line((name(row.candidate.name), Cell(f"{row.share:.0%}", row.share), score, *each)))
    head = ("candidate", "of a training", "score", *(("lowest hospital", "highest hospital") if many else sites))
    return Grid("candidates", "Candidates", head, tuple(lines), note(found))


def _score(value: float | None) -> Cell:
    return name("") if value is None else Cell(f"{value:.3f}", value)


def note(found: Tuned) -> str:
    """Return what the scores of a search are, and what they are not."""
    gain = (found.best.score or 0.0) - (found.reference.score or 0.0)
    return (
        "Scores are means over the validation cases of all inner folds; no test case was used. The best is "
        f"{gain:+.3f} above {found.reference.candidate.name} with its own values. The best of many is partly luck: "
        "its score on test cases is usually lower."
    )
