"""Tables of an advice: what every hospital gets, and how the strategies compare."""

from polysite import study
from polysite.advice.decide import RATE, Comparison, Gain
from polysite.advice.exceptions import PROMISING
from polysite.advice.personal import Choice
from polysite.advice.result import Advice, plain
from polysite.report.grid import Cell, Grid, Line, name, number
from polysite.report.names import cut, joined

WIDE = 64  # letters of a strategy's title in a table


def decision(found: Advice) -> str:
    """Return the advice in a sentence."""
    if not found.changes:
        text = "One model for all hospitals."
        others = len(found.compared)
        if others:
            text += f" None of {others} other strateg{'ies' if others > 1 else 'y'} was shown to be better."
    else:
        best = next(c for c in found.compared if c.contender.name == found.chosen.name)
        shown = f"It was shown to be better than one model for all: {best.gain}, p = {best.p:.2g}."
        text = f"{found.chosen.title}. {shown}"
    return " ".join([text, *_exceptions(found)])


def _exceptions(found: Advice) -> list[str]:
    """Return a sentence for every strategy that only some hospitals should use."""
    said = []
    for recipe in found.exceptions:
        strategy = recipe.played.contender
        sites = [site for site, used in found.strategies.items() if used.name == strategy.name]
        what = f"another strategy: {strategy.title}"
        if strategy.share:
            what = "models of their own" if len(sites) > 1 else "a model of its own"
        elif strategy.name == found.trained.reference.name:
            what = "one model of all hospitals"
        said.append(f"{joined(sites)} should use {what} ({recipe.file('study')}.toml).")
    return said


def against_given(found: Advice) -> str:
    """Return the comparison of the advised study with FedAvg as the study has it, in a sentence."""
    sure = f"p = {found.p:.2g}" if found.p <= 0.05 else f"no difference shown, p = {found.p:.2g}"
    times = found.effort.times
    longer = found.models is not None and times > 1
    long = f" The models were trained for {times:g} times as many rounds." if longer else ""
    return (
        f"On {found.gain.cases} cases that the models had not seen, its mean score is {found.final.mean:.3f}; FedAvg "
        f"with the settings of the study has {found.given.mean:.3f}: {found.gain} ({sure}). The best of several is "
        f"partly luck, so the gain for new patients is usually smaller.{long}"
    )


def models(found: Advice) -> str:
    """Return in a sentence what the delivered models are; empty if there are none."""
    if found.models is None:
        return ""
    count, times = found.models.members, found.effort.times
    again = f"{count} times with different seeds; their predictions are averaged" if count > 1 else "once"
    long = f", for {times:g} times the rounds that were compared" if times > 1 else ""
    norm = found.recipe.study.train.clip_gradients
    clipped = f", with gradients clipped to a norm of {norm:g}" if norm else ""
    return f"the advised study, trained on the cases that are not tested{long}{clipped}, {again}."


def tested(found: Advice) -> str:
    """Return the test score of the delivered models in a sentence; empty without test cases."""
    scores = plain(found)["test"]
    if scores is None:
        return ""
    return f"On the test cases, which nothing was chosen by, the mean score is {scores['mean']:.3f}."


def hospitals(found: Advice) -> Grid:
    """Return what every hospital gets: its score before and after, its model, and what else was tried for it."""
    given = found.given.by_site()
    after = found.final.by_site()
    lines = []
    for site, gain in found.sites.items():
        cells = (
            number(gain.cases, "d"),
            number(given[site]),
            number(after[site]),
            _gain(gain),
            name(_used(found, site)),
        )
        lines.append(Line((name(site), *cells, *_tried(found.hospitals[site]))))
    whole, every = found.gain, found.given.mean
    total = (number(whole.cases, "d"), number(every), number(found.final.mean), _gain(whole), *[name("")] * 4)
    lines.append(Line((name("all"), *total), "total"))
    note = (
        "Scores are means over cases that the models had not seen, each left out in one inner fold. The interval of a "
        "gain is 95 %, from resampled cases. The last columns are about what looked best for the hospital beside the "
        "strategy for all, another strategy or its own model (of those that cannot be told from the best, the "
        "simplest): the probability that it is better, by one training, and p after a second training, times the "
        f"number of hospitals and strategies. From {PROMISING:g} on it is trained again, unless the second training "
        "would not confirm it even with the same gains as the first one; it is used if p is at most "
        f"{RATE:g} and both trainings gain."
    )
    head = ("hospital", "cases", "FedAvg as given", "advised", "gain", "model", "looked best", "P(better)", "p")
    return Grid("hospitals", "What every hospital gets", head, tuple(lines), note)


def _tried(choice: Choice) -> tuple[Cell, Cell, Cell]:
    """Return what looked best for a hospital, with the evidence of one training and of two."""
    if choice.promise is None:
        return name("–"), number(None), number(None)
    sure = choice.confirmation
    p = _p(sure.p) if sure else name("–")
    return name(choice.promise.contender.name), number(choice.promise.expected.positive, ".2f"), p


def _used(found: Advice, site: str) -> str:
    """Return in words what a hospital uses."""
    used = found.used(site)
    if used.share:
        return "its own" if used.share == 1 else f"{used.share:.0%} its own"
    words = {"groups": "of its group", "patients": "of the patient's cluster", "alone": "its own"}
    return words.get(used.family, "shared" if used.family == "one model" else used.name)


def strategies(found: Advice) -> Grid:
    """Return all strategies against one model for all, the best first."""
    lines = []
    for each in found.compared:
        one = found.trained.both(each.contender.name)
        score = number(one.mean if len(one.scores) == len(found.one_model.scores) else None)
        cells = (score, _gain(each.gain), _p(each.p), name(verdict(each)))
        lines.append(Line((name(cut(each.contender.title, WIDE)), *cells)))
    score = number(found.one_model.mean)
    lines.append(Line((name("One model for all hospitals"), score, name("–"), name("–"), name("reference"))))
    note = (
        "All strategies have the same settings and equal local steps. p that the strategy is better by chance: "
        "signed-rank test over all cases. Of those that look better, one is trained again, and so is one model for "
        "all, with another seed: the simplest that is not shown to be worse than the best, by a difference beyond "
        "the chance of the cases and the luck of one training. Simplest is less weight for a hospital, or one apart; "
        "then come groups of hospitals, own models, training alone and clusters of patients. Its p counts the luck of "
        f"trainings and the number of strategies; it is called better only if that p is at most {RATE:g} and its mean "
        "gain is positive in every inner fold. A strategy without a score ended after the first inner fold, in which "
        "it gained neither over all cases nor at any hospital."
    )
    head = ("strategy", "score", "gain", "p", "result")
    return Grid("strategies", "Strategies against one model for all", head, tuple(lines), note)


def by_hospital(found: Advice) -> Grid:
    """Return the gain of every strategy over one model for all, hospital by hospital."""
    lines = []
    for site, score in found.one_model.by_site().items():
        gains = [c.sites[site].mean if site in c.sites else None for c in found.compared]
        cells = (name("–") if gain is None else Cell(f"{gain:+.3f}", gain) for gain in gains)
        lines.append(Line((name(site), number(score), *cells)))
    known = "; ".join(f"{c.contender.name}: {cut(c.contender.title, WIDE)}" for c in found.compared)
    head = ("hospital", "one model", *(c.contender.name for c in found.compared))
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
    others = ((f"{recipe.file('study')}.toml", recipe.study) for recipe in found.exceptions)
    for title, chosen in (("FedAvg as given", found.given.study), ("advised", found.recipe.study), *others):
        cost = study.cost(chosen)
        per_site = max(cost.down[s] + cost.up[s] for s in cost.down)
        cells = (number(cost.rounds, "d"), number(cost.steps, ",d"), number(per_site / 1e6, ",.1f"))
        lines.append(Line((name(title), *cells)))
    together = f"{'' if found.effort.members else 'at most '}{found.trainings:.1f}"
    note = f"All stages of the advice together take {together} trainings of FedAvg as given without an inner fold."
    head = ("training", "rounds", "local steps of all hospitals", "MB of a hospital, at most")
    return Grid("costs", "Cost of a training", head, tuple(lines), note)


def _gain(gain: Gain) -> Cell:
    return Cell(str(gain), gain.mean)


def _p(p: float) -> Cell:
    return Cell(f"{p:.3f}" if p >= 0.001 else f"{p:.1e}", p)
