"""Tables of an advice: what every hospital gets, and how the strategies compare."""

from polysite import study
from polysite.advice.advise import Advice
from polysite.advice.contenders import REFERENCE
from polysite.advice.decide import Comparison, Gain
from polysite.report.figures import cut
from polysite.report.grid import Cell, Grid, Line, name, number

WIDE = 64  # letters of a strategy's title in a table


def decision(found: Advice) -> str:
    """Return the advice in a sentence."""
    trained = f", trained by {found.recipe}" if found.recipe else ""
    if found.chosen.name == REFERENCE:
        text = f"One model for all hospitals{trained}."
        others = len(found.compared)
        if others:
            text += f" None of {others} other strateg{'ies' if others > 1 else 'y'} was shown to be better."
    else:
        best = next(c for c in found.compared if c.name == found.chosen.name)
        shown = f"It was shown to be better than one model for all: {best.gain}, p = {best.p:.2g}."
        text = f"{found.chosen.title}{trained}. {shown}"
    adapted = [site for site, own in found.own.items() if own.alpha]
    if adapted:
        text += f" {', '.join(adapted)} should use {'a model' if len(adapted) == 1 else 'models'} of their own."
    return text


def against_given(found: Advice) -> str:
    """Return the comparison of the advised study with FedAvg as the study has it, in a sentence."""
    if found.final is found.given:
        return "This is the study as it was given: no change of it was shown to be better."
    sure = f"p = {found.p:.2g}" if found.p <= 0.05 else f"no difference shown, p = {found.p:.2g}"
    return (
        f"On {found.gain.cases} cases that the models had not seen, its mean score is {found.final.mean:.3f}; FedAvg "
        f"with the settings of the study has {found.given.mean:.3f}: {found.gain} ({sure}). The best of several is "
        "partly luck, so the gain for new patients is usually smaller."
    )


def hospitals(found: Advice) -> Grid:
    """Return what every hospital gets: its score before and after, and whether it uses a model of its own."""
    given = found.given.by_site()
    after = found.final.by_site()
    lines = []
    for site, gain in found.sites.items():
        own = found.own.get(site)
        cells = (number(gain.cases, "d"), number(given[site]), number(after[site]), _gain(gain))
        lines.append(
            Line((name(site), *cells, name(_own(found, site)), number(own.gain.positive if own else None, ".2f")))
        )
    whole = found.gain
    every = found.given.mean
    total = (number(whole.cases, "d"), number(every), number(found.final.mean), _gain(whole), name(""), name(""))
    lines.append(Line((name("all"), *total), "total"))
    note = (
        "Scores are means over cases that the models had not seen, each left out in one inner fold. The interval of a "
        "gain is 95 %, from resampled cases. The last column is the probability that the hospital's own model would be "
        "better than the shared one; it is used only if that is beyond chance for all hospitals together."
    )
    head = ("hospital", "cases", "FedAvg as given", "advised", "gain", "model", "P(own model better)")
    return Grid("hospitals", "What every hospital gets", head, tuple(lines), note)


def _own(found: Advice, site: str) -> str:
    own = found.own.get(site)
    if own and own.alpha:
        return "its own" if own.alpha == 1 else f"{own.alpha:.0%} its own"
    return {"groups": "of its group", "patients": "of the patient's cluster", "alone": "its own"}.get(
        found.chosen.family, "shared"
    )


def strategies(found: Advice) -> Grid:
    """Return all strategies against one model for all, the best first."""
    by_name = {c.name: c for c in found.contenders}
    lines = []
    for each in found.compared:
        score = number(found.played[each.name].mean)
        cells = (score, _gain(each.gain), _p(each.p), name(verdict(each)))
        lines.append(Line((name(cut(by_name[each.name].title, WIDE)), *cells)))
    score = number(found.played[REFERENCE].mean)
    lines.append(Line((name("One model for all hospitals"), score, name("–"), name("–"), name("reference"))))
    note = (
        "All strategies have the same recipe and equal local steps. p that the strategy is better by chance: "
        "signed-rank test over all cases. Of those that look better, one is trained again, and so is one model for "
        "all, with another seed: the simplest that is not shown to be worse than the best. Its p counts the luck of "
        "trainings and the number of strategies; it is called better only if that p is at most 0.05 and its mean gain "
        "is positive in every inner fold."
    )
    head = ("strategy", "score", "gain", "p", "")
    return Grid("strategies", "Strategies against one model for all", head, tuple(lines), note)


def by_hospital(found: Advice) -> Grid:
    """Return the gain of every strategy over one model for all, hospital by hospital."""
    titles = {c.name: c.title for c in found.contenders}
    lines = []
    for site, score in found.played[REFERENCE].by_site().items():
        gains = [c.sites[site].mean for c in found.compared]
        lines.append(Line((name(site), number(score), *(Cell(f"{gain:+.3f}", gain) for gain in gains))))
    known = "; ".join(f"{c.name}: {cut(titles[c.name], WIDE)}" for c in found.compared)
    head = ("hospital", "one model", *(c.name for c in found.compared))
    return Grid("by-hospital", "Gain of every strategy, by hospital", head, tuple(lines), f"{known}.")


def verdict(each: Comparison) -> str:
    """Return in words what a comparison shows."""
    if each.better:
        return "better"
    if each.looks_better:
        return "looks better in one training"
    return "worse" if each.gain.high < 0 else "no difference shown"


def costs(found: Advice) -> Grid:
    """Return the cost of one training of the advised study, and of FedAvg as given."""
    lines = []
    for title, chosen in (
        ("FedAvg as given", found.given.study),
        ("advised", found.study),
    ):
        cost = study.cost(chosen)
        per_site = max(cost.down[s] + cost.up[s] for s in cost.down)
        cells = (number(cost.rounds, "d"), number(cost.steps, ",d"), number(per_site / 1e6, ",.1f"))
        lines.append(Line((name(title), *cells)))
    note = f"All stages of the advice together take about {found.trainings.total:.1f} trainings of FedAvg as given."
    head = ("training", "rounds", "local steps of all hospitals", "MB of a hospital, at most")
    return Grid("costs", "Cost of a training", head, tuple(lines), note)


def _gain(gain: Gain) -> Cell:
    return Cell(str(gain), gain.mean)


def _p(p: float) -> Cell:
    return Cell(f"{p:.3f}" if p >= 0.001 else f"{p:.1e}", p)
