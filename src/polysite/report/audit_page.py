"""The page of an audit, in plain words first: what an attacker made of the numbers of a case, or of models."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from polysite.metrics.membership import Auc
from polysite.metrics.statistics import interval
from polysite.report.assess_figures import drawing
from polysite.report.drawing import COLOURS, WIDE, name_axes, name_rows, new, panels, pictures
from polysite.report.grid import Cell, Grid, Line, name, number
from polysite.report.names import listed
from polysite.report.page import Folded, Picture, Section, layout
from polysite.storage import draft_folder
from polysite.training.attack import Curve
from polysite.training.leaks import Membership, Rebuilt

BESIDE = {  # what an attack is compared with: marker, colour, name and description
    "nearest": ("s", 1, "nearest case", "the scan of the known case with the most similar numbers"),
    "hospital": ("D", 3, "hospital's average", "the average scan of the hospital"),
    "compressed": ("v", 2, "scan itself, compressed", "the scan itself, compressed to as many numbers"),
}
Attack = TypeVar("Attack", Membership, Rebuilt)
FEWEST = 5  # training patients of a hospital, below which the page says what a policy would have prevented


@dataclass(frozen=True)
class Ratio:
    """Ratio of a mean error to that of the average scan, with its 95 % interval over the test cases."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, errors: np.ndarray, average: np.ndarray) -> "Ratio":
        """Return the ratio of two mean errors; the interval is a bootstrap of the cases' influence on it.

        >>> Ratio.of(np.array([1.0, 2.0]), np.array([2.0, 4.0]))
        Ratio(value=0.5, low=0.5, high=0.5)
        """
        value = float(errors.mean() / average.mean())
        return cls(value, *interval(value + (errors - value * average) / average.mean()))

    @property
    def words(self) -> str:
        """The ratio and its interval as text."""
        return f"error ratio {self.value:.3f}, 95 % interval {self.low:.3f}–{self.high:.3f}"


@dataclass(frozen=True)
class Finding:
    """The outcome of the attack on one kind of numbers."""

    kind: str
    words: str  # description of the numbers
    numbers: int  # per case
    leaves: str  # which part of them leaves a hospital
    ratios: Mapping[str, Ratio]  # of the attacks (network, linear) and of the baselines
    chosen: str  # attack with the lower error on the validation cases
    tested: int  # cases
    coefficients: int  # of the compressed scan
    weights: int  # of a decoder
    found: int  # second scans that were matched with their patient
    probes: int  # number of second scans
    gallery: int  # number of first scans
    curves: tuple[Curve, ...] = ()  # losses of the decoders

    @property
    def attack(self) -> Ratio:
        """Error ratio of the chosen attack."""
        return self.ratios[self.chosen]

    @property
    def leaks(self) -> bool:
        """Whether the attack is significantly better than the average scan."""
        return self.attack.high < 1

    @property
    def rate(self) -> Ratio:
        """Rate of matched second scans, with Wilson's 95 % interval."""
        from scipy.stats import binomtest

        low, high = binomtest(self.found, self.probes).proportion_ci(method="wilson")
        return Ratio(self.found / self.probes, float(low), float(high))

    @property
    def recognises(self) -> bool:
        """Whether second scans are matched significantly more often than by chance."""
        return self.rate.low > 1 / self.gallery

    @property
    def verdict(self) -> str:
        """The result of rebuilding scans, as a sentence."""
        start, ratio = (
            f"From the {self.numbers} numbers of a case ({self.words}), an attacker",
            f"({self.attack.words})",
        )
        if self.leaks:
            return (
                f"{start} removes {percent(1 - self.attack.value)} of the error of guessing the average scan {ratio}. "
                f"The average scan of the hospital alone {_removes(self.ratios['hospital'])}."
            )
        than = "worse than" if self.attack.low > 1 else f"not significantly better, with {self.tested} test cases, than"
        return f"{start} rebuilds the scan {than} by guessing the average scan {ratio}."

    @property
    def recognition(self) -> str:
        """The result of matching second scans, as a sentence."""
        chance = f"by chance, 1 in {self.gallery} would be matched"
        matched = f"{self.found} of {self.probes} second scans were matched with the first scan of the same patient"
        if not self.recognises:
            return f"The numbers do not identify patients: {matched}, among {self.gallery}; {chance}."
        return (
            f"The numbers identify patients: {matched}, among {self.gallery} ({100 * self.rate.value:.0f} %, 95 % "
            f"interval {100 * self.rate.low:.0f}–{100 * self.rate.high:.0f} %); {chance}."
        )

    def plain(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return {**asdict(self), "rate": asdict(self.rate), "verdict": self.verdict, "recognition": self.recognition}


def percent(share: float) -> str:
    """Format a fraction as a percentage.

    >>> percent(0.234), percent(0.003)
    ('23 %', 'less than 1 %')
    """
    return "less than 1 %" if share < 0.01 else f"{100 * share:.0f} %"


def _removes(ratio: Ratio) -> str:
    return f"removes {percent(1 - ratio.value)}" if ratio.value < 1 else "removes nothing"


@dataclass(frozen=True, eq=False)
class AttackedNumbers:
    """All that an audit of the numbers of a study's cases found.

    Args:
        findings: What the attack made of every kind of numbers.
        views: Titles and middle slices of test cases: the scan and its reconstructions.
        cases: The errors of every test case.
    """

    findings: Sequence[Finding]
    views: Sequence[tuple[str, Mapping[str, np.ndarray]]] = ()
    cases: Sequence[Mapping[str, Any]] = ()
    title: ClassVar[str] = "What an attacker can learn from the numbers that describe a case"
    beside: ClassVar[str] = ", the losses in curves.csv"
    caution: ClassVar[str] = "It is one attack with the cases at hand, not a proof of privacy."

    @property
    def summary(self) -> str:
        """The strongest result of each kind, as three sentences."""
        worst = min(self.findings, key=lambda f: f.attack.value if f.leaks else 1 + f.attack.value)
        first = "From none of these numbers did the attack rebuild scans better than by guessing the average scan."
        if worst.leaks:
            first = (
                f"The strongest attack, on the {worst.words}, removes {percent(1 - worst.attack.value)} of the error "
                f"that guessing the average scan makes ({worst.attack.words})."
            )
        known = max(self.findings, key=lambda f: f.rate.value)
        again = "None of them matched second scans with their patient more often than by chance."
        if known.recognises:
            again = (
                f"By the {known.words}, {known.found} of {known.probes} second scans were matched with their patient "
                f"among {known.gallery}."
            )
        return f"{first} {again} {self.caution}"

    def plain(self) -> dict[str, Any]:
        """Return everything but the slices, as JSON values."""
        return {"summary": self.summary, "findings": [f.plain() for f in self.findings], "test": self.cases}

    def tables(self) -> list[Grid]:
        """Return the tables of the results."""
        return [ratios(self.findings), matches(self.findings)]

    def sentences(self) -> list[str]:
        """Return the results in words."""
        return [*(f"{f.verdict} {f.recognition}\n" for f in self.findings), self.caution]

    def limits(self, about: Mapping[str, Any]) -> list[str]:
        """Return the limits of the audit, as sentences."""
        cases = about["cases"]
        return [
            f"Limits. The attacker was trained on {cases['train']} cases, validated on {cases['validation']} and "
            f"tested on {cases['test']}: with more cases, a larger decoder or another method, an attack may do better. "
            "Intervals are over test cases, not over attackers, and are not corrected for their number: one of several "
            "may miss 1 by chance.",
            f"Scans were rebuilt with {about['side']} voxels a side; finer details were not attacked.",
            f"The second scans are made from the first: fresh noise of {100 * about['noise']:.0f} % of the standard "
            f"deviation, up to {100 * about['gain']:.0f} % more or less signal, slightly wider or tighter outlines. A "
            "real second scan differs more.",
            "Models and updates, which leave a hospital in every round of training, are attacked by 'polysite audit "
            "RUN'.",
        ]

    def sections(self, about: Mapping[str, Any]) -> Iterator[Section]:
        """Yield the sections of the page."""
        findings, (rebuilt, matched) = self.findings, self.tables()
        looks: dict[str, Look] = {
            label: (mark, colour, 0.0, False, [f.ratios[key] for f in findings])
            for key, (mark, colour, label, _) in BESIDE.items()
        }
        looks["attack"] = ("o", 0, 0.0, True, [f.attack for f in findings])
        beside = "mean squared error relative to the average scan"
        dots = _picture(
            _points([f.kind for f in findings], looks, 1, beside, None), "ratios", "Error ratios of all attacks",
            "Blue: the chosen attack with its 95 % interval. Further left is a better copy; the line at 1 is the "
            "average scan.",
        )  # fmt: skip
        yield Section("ratios", "How well are scans rebuilt?", (dots, rebuilt))
        yield Section("again", "Are patients identified?", (matched,))
        words = Markup("<p><b>{}.</b> {} {} {}</p>")
        paragraphs = (words.format(f.kind.capitalize(), f.verdict, f.recognition, f.leaves) for f in findings)
        yield Section("kinds", "Results in words", tuple(paragraphs))
        if self.views:
            shown = _picture(
                pictures(self.views, 1.15, 1.16), "pictures", "Test cases and what was rebuilt of them",
                f"Middle slices of {about['modalities'][0]}: the test cases that the strongest attack rebuilt best, at "
                "the median and worst, relative to the average scan. These are images of patients; --no-scans makes a "
                "page without them.",
            )  # fmt: skip
            yield Section("look", "Rebuilt scans", (shown,))
        if any(f.curves for f in findings):
            what = "whole volumes" if about["decoder"] == "paper" else "voxels inside the head"
            curves = _picture(
                _curves(findings), "curves", "Training and validation losses of the decoders",
                f"Mean squared error of {what} after each epoch: training cases (dashed) and validation cases (solid), "
                "a pair of lines per decoder. The dot is the epoch that counts. The numbers are in curves.csv.",
            )  # fmt: skip
            yield Section("curves", "Loss curves", (curves,))
        yield Section("how", "How the attack works", tuple(_method(findings, about)))


def ratios(findings: Sequence[Finding]) -> Grid:
    """Return a table of the errors of rebuilt scans, by attack and baseline."""

    def cell(f: Finding, key: str) -> Cell:
        ratio = f.ratios[key]
        return Cell(f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f})", ratio.value, key == f.chosen)

    order = ("network", "linear", *BESIDE)
    lines = [Line((name(f.kind), number(f.numbers, "d"), *(cell(f, key) for key in order))) for f in findings]
    head = ("", "numbers", "decoder", "linear", "nearest", "hospital", "compressed")
    note = (
        "Ratios of the mean squared error inside the head to that of the average scan: 1 is no better than guessing, "
        "0 would be a perfect copy. In brackets the 95 % interval, by bootstrap over the test cases. Attacks: a "
        "decoder and a linear map; the one with the lower error on the validation cases is marked. Baselines: the "
        "nearest known case, the average scan of the hospital, and the scan itself compressed to as many numbers."
    )
    return Grid("ratios", "Errors of rebuilt scans", head, tuple(lines), note)


def matches(findings: Sequence[Finding]) -> Grid:
    """Return a table of matched second scans."""

    def line(f: Finding) -> Line:
        rate = Cell(f"{f.rate.value:.2f} ({f.rate.low:.2f}–{f.rate.high:.2f})", f.rate.value)
        return Line((name(f.kind), name(f"{f.found} of {f.probes}"), rate, number(1 / f.gallery)))

    head = ("", "matched", "rate", "by chance")
    note = (
        f"Second scans whose numbers are nearest to those of the same patient, among {findings[0].gallery}. In "
        "brackets Wilson's 95 % interval."
    )
    return Grid("matches", "Matched second scans", head, tuple(map(line, findings)), note)


def _method(findings: Sequence[Finding], about: Mapping[str, Any]) -> Iterator[str]:
    first, sizes = findings[0], sorted(f.weights for f in findings)
    paper = " of appendix F of Manthe et al. 2023" if about["decoder"] == "paper" else ""
    decoders = f"{about['restarts']} decoder{'' if about['restarts'] == 1 else 's'}{paper}"
    millions = " to ".join(dict.fromkeys(f"{n / 1e6:.1f}" for n in (sizes[0], sizes[-1])))
    yield (
        "The attacker knows more than a real one would: numbers and scans of all training cases of all hospitals, and "
        f"the numbers of the other cases. It trains {decoders} with {millions} million weights, for "
        f"at most {about['epochs']} epochs, and a linear map, from the numbers to the scans "
        f"({' and '.join(about['modalities'])}, prepared as for training, then downsampled). Stopping and the choice "
        "of the attack use the validation cases; the errors are those of the test cases."
    )
    yield (
        f"Errors are relative to the average scan of the training cases. Baselines: {BESIDE['nearest'][-1]}; "
        f"{BESIDE['hospital'][-1]}, which a recipient who knows the sender may know; and {BESIDE['compressed'][-1]} by "
        "principal components, at most as many as training cases. The last is no limit: a decoder may do better."
    )
    yield (
        f"To identify patients, the numbers of a second scan of the {first.probes} validation and test cases are "
        f"compared with those of the first scans of all {first.gallery}. Which numbers are stable between scans is "
        "learned from the training cases."
    )


def _curves(findings: Sequence[Finding]) -> Figure:
    """Draw the losses of all decoders, a panel per kind of numbers."""
    shown = {f.kind: f.curves for f in findings if f.curves}
    figure, made = panels(list(shown), 2.2)
    for kind, axes in made:
        for curve in shown[kind]:
            epochs = range(1, len(curve.validation) + 1)
            axes.plot(epochs, curve.training, "--", color=COLOURS[1], lw=1)
            axes.plot(epochs, curve.validation, "-", color=COLOURS[0], lw=1)
        best = min((curve.validation for curve in shown[kind]), key=min)
        axes.plot([best.index(min(best)) + 1], [min(best)], "o", color=COLOURS[0], ms=5)
    name_axes(made, "epoch", "loss")
    return figure


@dataclass(frozen=True, eq=False)
class Attacked(Generic[Attack]):
    """What an attacker may have, and what an attack made of it.

    Args:
        name: Short name.
        words: What it is.
        seen: Whether anybody but the hospital itself had it in this run.
        found: What the attack found: who was trained on, or rebuilt images.
        who: Who has it in this run.
    """

    name: str
    words: str
    seen: bool
    found: Attack
    who: str = ""


@dataclass(frozen=True)
class Protections:
    """What protected the hospitals of the run.

    Args:
        secure: Replies left under masks.
        unit: What noise protects; empty without noise.
        epsilon: What every hospital has spent; empty without noise.
        delta: Probability with which the guarantee may fail.
        patients: Training patients of every hospital.
        summable: Whether the algorithm could do with the sum of the replies.
    """

    secure: bool
    unit: str
    epsilon: Mapping[str, float]
    delta: float
    patients: Mapping[str, int]
    summable: bool

    @property
    def words(self) -> str:
        """The protections as a sentence."""
        sums = "Secure sums were on" if self.secure else "Secure sums were off"
        if not self.unit:
            return f"{sums}, and no noise was added (no differential privacy)."
        most = max(self.epsilon.values(), default=float("nan"))
        return (
            f"{sums}, and noise protected every {self.unit} (differential privacy: epsilon {most:.2f} at delta "
            f"{self.delta:g}, of the hospital that spent most)."
        )


@dataclass(frozen=True, eq=False)
class AttackedModels:
    """All that an audit of a run found."""

    surfaces: tuple[Attacked[Membership], ...]
    control: Membership  # the untrained network
    inverted: tuple[Attacked[Rebuilt], ...]
    protections: Protections
    replayed: str  # how exactly the rounds were replayed
    scans: bool = True  # whether the page shows slices of patients
    title: ClassVar[str] = "What an attacker can learn from the models of a run"
    beside: ClassVar[str] = ""
    caution: ClassVar[str] = "These are two attacks with the cases at hand, not a proof of privacy."

    def surface(self, name: str) -> Attacked[Membership] | None:
        """Return a surface by its name."""
        return next((s for s in self.surfaces if s.name == name), None)

    @property
    def summary(self) -> str:
        """The strongest results, as sentences."""
        seen = [s for s in self.surfaces if s.seen]
        worst = max(seen, key=lambda s: s.found.strongest.value)
        auc = worst.found.strongest
        if auc.succeeds:
            first = (
                f"By {worst.words}, which {worst.who} had, training patients were told from others with an AUC of "
                f"{auc.words}: 0.5 is guessing, 1 certainty."
            )
        else:
            first = (
                "From no model that left its hospital were training patients told from others significantly better "
                f"than by guessing (largest AUC {auc.words}, by {worst.words})."
            )
        left = [i for i in self.inverted if i.seen]
        best = min(left, key=lambda i: i.found.ratio) if left else None
        second = ""
        if best is not None:
            better = f"with {best.found.ratio:.2f} times the error of guessing the mean scan (1: nothing was rebuilt)"
            second = f" From {best.words}, images were rebuilt {better}."
        return f"{self.protections.words} {first}{second} {self.caution}"

    def plain(self) -> dict[str, Any]:
        """Return everything but the images, as JSON values."""
        return {
            "summary": self.summary,
            "protections": asdict(self.protections),
            "membership": [asdict(s) for s in self.surfaces],
            "untrained": asdict(self.control),
            "inversion": [
                {
                    "name": i.name, "words": i.words, "seen": i.seen, "ratio": i.found.ratio,
                    "plain_ratio": i.found.plain_ratio, "matches": [asdict(m) for m in i.found.matches],
                    "cosine": 1 - i.found.apart,
                }
                for i in self.inverted
            ],
            "replayed": self.replayed,
            "prevented": list(prevented(self)),
        }  # fmt: skip

    def tables(self) -> list[Grid]:
        """Return the tables of the results; those without lines are left out."""
        return [grid for grid in (membership(self), by_site(self), inversion(self)) if grid.lines]

    def sentences(self) -> list[str]:
        """Return the results in words."""
        return [f"{self.summary}\n", *prevented(self), ""]

    def limits(self, about: Mapping[str, Any]) -> list[str]:
        """Return the limits of the audit, as sentences."""
        return [
            self.replayed,
            "An attack that fails is no proof that none succeeds: with shadow models, more rounds, other priors or "
            "longer searches an attacker may do better. Intervals are over patients, not over trainings, and the "
            "stronger of two attacks was chosen after both were known.",
        ]

    def sections(self, about: Mapping[str, Any]) -> Iterator[Section]:
        """Yield the sections of the page."""
        rows = [*((s.name, s.found) for s in self.surfaces), ("untrained", self.control)]
        looks: dict[str, Look] = {
            "loss": ("o", 0, 0.12, True, [m.loss for _, m in rows]),
            "calibrated": ("s", 1, -0.12, True, [m.calibrated for _, m in rows]),
        }
        beside = "AUC: probability that a training patient ranks above another"
        areas = _picture(
            _points([what for what, _ in rows], looks, 0.5, beside, 1), "membership", "Areas of membership inference",
            "Points: AUC of the attack by loss (blue) and calibrated (orange), with 95 % intervals; the line is "
            "chance.",
        )  # fmt: skip
        told = (membership(self), by_site(self))
        blocks = (self.protections.words, areas, *(grid for grid in told if grid.lines))
        yield Section("members", "Are training patients recognised?", blocks)
        if self.inverted:
            drawn = [(i.name, {k: _slice(x[0, 0]) for k, x in i.found.images.items()}) for i in self.inverted]
            shown = _picture(
                pictures(drawn, 1.9, 1.5), "rebuilt", "Images and what was rebuilt of them",
                "Middle slices of the first modality. These are images of patients; --no-scans makes a page without "
                "them.",
            )  # fmt: skip
            yield Section("images", "Are images rebuilt?", (inversion(self), *([shown] if self.scans else [])))
        yield Section("prevented", "What a policy would have prevented", tuple(prevented(self)))
        yield Section("knows", "What the attacker knows", tuple(_knows(about)))


def _cell(auc: Auc | None) -> Cell:
    return Cell("–") if auc is None else Cell(auc.words, auc.value, auc.succeeds)


def membership(found: AttackedModels) -> Grid:
    """Return a table of the areas by model, over all hospitals, and who had the model."""
    rows = [(s.name, s.who if s.seen else "nobody else", s.found) for s in found.surfaces]
    rows.append(("untrained network", "–", found.control))
    lines = [
        Line((name(what), name(who), _cell(m.loss), _cell(m.calibrated), number(m.loss.members, "d"),
              number(m.loss.others, "d")))
        for what, who, m in rows
    ]  # fmt: skip
    head = ("", "who had it", "AUC by loss", "AUC calibrated", "trained on", "others")
    note = (
        "Areas under the ROC curve: 0.5 is guessing, 1 certainty; in brackets the 95 % interval (Newcombe's). Marked: "
        "significantly above 0.5. Patients are compared within hospitals. The untrained network has seen no patient: "
        "what it shows is chance in the split. Scores of validation and test cases leave besides, as the policy "
        "allows; docs/protection.md lists all that leaves."
    )
    return Grid("membership", "Who was trained on?", head, tuple(lines), note)


def by_site(found: AttackedModels) -> Grid:
    """Return a table of the areas of every hospital."""
    sites, spent = sorted({site for s in found.surfaces for site in s.found.sites}), found.protections.epsilon
    lines = [
        Line((name(site), *(_cell(_best(s.found, site)) for s in found.surfaces), number(spent.get(site), ".2f")))
        for site in sites
    ]
    head = ("hospital", *(s.name for s in found.surfaces), "epsilon spent")
    note = (
        "The larger area of the two attacks; hospitals with fewer than two patients of either kind are left out. With "
        "so few patients each, single hospitals have wide intervals."
    )
    return Grid("hospitals", "By hospital", head, tuple(lines), note)


def _best(found: Membership, site: str) -> Auc | None:
    known = [each[site] for each in (found.sites, found.sites_calibrated) if site in each]
    return max(known, key=lambda a: a.value, default=None)


def inversion(found: AttackedModels) -> Grid:
    """Return a table of the errors of rebuilt images."""
    lines = [
        Line((
            name(i.name), name("yes" if i.seen else "no"), number(i.found.ratio), number(i.found.plain_ratio),
            number(float(np.mean([m.guess for m in i.found.matches]))), number(1 - i.found.apart),
            number(len(i.found.matches), "d"),
        ))
        for i in found.inverted
    ]  # fmt: skip
    head = ("", "left in this run", "error ratio", "as rebuilt", "error of the mean scan", "cosine", "images")
    note = (
        "Error ratio: mean squared error between a rebuilt image and the training image that it resembles most, "
        "relative to that of the mean scan: 1 is nothing learnt, 0 a copy. How far the attacker trusts its search is "
        "chosen afterwards in its favour, so the ratio is at most 1; 'as rebuilt' is without that, and above 1 the "
        "mean scan is the better guess. The error of the mean scan is in squared standard deviations of a prepared "
        "image. The cosine says how well the gradient of the rebuilt image fits."
    )
    return Grid("inversion", "What was rebuilt?", head, tuple(lines), note)


def prevented(found: AttackedModels) -> Iterator[str]:
    """Yield what keys of a hospital's policy would have prevented in this run."""
    p, single, total = found.protections, found.surface("single replies"), found.surface("sum")
    if p.secure:
        yield "masked = true was met: no single reply left without a mask."
    elif single and total and p.summable:
        yield (
            "masked = true would have refused this run. With secure sums the coordinator would have had the sum alone: "
            f"AUC {total.found.strongest.words} instead of {single.found.strongest.words}."
        )
    else:
        yield "masked = true would have refused this run: its algorithm needs the reply of each hospital."
    if p.unit:
        most = max(p.epsilon.values(), default=0.0)
        yield f"epsilon = {most:.1f} or more would have allowed this run, and less would have stopped it at that point."
    else:
        yield "epsilon = 8 (or any other number) would have refused this run: no noise was added."
    small = sorted(site for site, count in p.patients.items() if count < FEWEST)
    if small:
        who = listed(small, len(p.patients))
        yield f"fewest = {FEWEST} would have kept {who} out, with fewer training patients than that."
    else:
        yield f"fewest = {FEWEST} was met: every hospital trained on at least {FEWEST} patients."
    one = next((i for i in found.inverted if i.name == "one patient"), None)
    if one is not None:
        yield (
            f"fewest = 2 or more prevents what the row 'one patient' shows (error ratio {one.found.ratio:.2f}): the "
            "gradient of a single patient does not leave."
        )


def _knows(about: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "Membership inference. The attacker has scans and outlines of patients, the network and its settings, and the "
        "model named in the table; it does not know who was trained on, and has no models of its own making. It ranks "
        f"patients by their loss under the model: training patients against {about['others']} patients of the same "
        "hospital, who are drawn alike. Calibrated, it subtracts the loss that the patient has under models that have "
        "not seen the patient in this round (the replies of other hospitals), or have seen less (an earlier model)."
    )
    yield (
        "Gradient inversion. The attacker knows the network, the model that the hospital was sent, what came back, the "
        f"outlines of as many patients as it rebuilds, and other scans ({about['others']} cases), whose mean is its "
        "first guess. It searches for images whose gradient has the direction of what came back (Geiping et al. 2020), "
        f"for {about['iterations']} steps."
    )
    yield (
        "The rows 'one patient' do not show what left in this run but what could leave if a hospital trained one step "
        "on one patient: they show that the attack works where there is something to find."
    )


def _slice(volume: np.ndarray) -> np.ndarray:
    """Return the middle slice of a volume along its last axis, or an image as it is."""
    return volume if volume.ndim == 2 else volume[..., volume.shape[-1] // 2]


Found = TypeVar("Found", AttackedNumbers, AttackedModels)


@dataclass(frozen=True)
class Audit(Generic[Found]):
    """A finished audit."""

    folder: Path
    found: Found


def write(folder: Path, found: Found, about: Mapping[str, Any]) -> Audit[Found]:
    """Write the folder of an audit: ``audit.json``, a self-contained ``index.html`` and its figures."""
    versions = "\n".join(f"{k}: {v}" for k, v in about["versions"].items())
    where = f"Every number is in audit.json{found.beside}, every figure in figures/, as SVG, PDF and PNG."
    blocks = (where, Folded("Configuration", about["config"]), Folded("Versions", versions))
    sections = [*found.sections(about), Section("made", "Configuration and versions", blocks)]
    page = layout(found.title, found.summary, sections, about["versions"]["polysite"], remarks=found.limits(about))
    with draft_folder(folder, "audit") as draft:
        text = json.dumps({**found.plain(), "about": about}, indent=1)
        (draft / "audit.json").write_text(f"{text}\n", encoding="utf-8")
        if isinstance(found, AttackedNumbers):
            (draft / "curves.csv").write_text(curves_csv(found.findings), encoding="utf-8")
        page.write(draft)
    return Audit(folder, found)


def curves_csv(findings: Sequence[Finding]) -> str:
    """Return the losses of all decoders as CSV, a line per epoch."""
    lines = ["kind,decoder,epoch,training,validation"]
    for f in findings:
        for k, curve in enumerate(f.curves, start=1):
            both = zip(curve.training, curve.validation, strict=True)
            lines += [f"{f.kind},{k},{epoch},{a:.6g},{b:.6g}" for epoch, (a, b) in enumerate(both, start=1)]
    return "\n".join(lines) + "\n"


def _picture(figure: Figure, file: str, title: str, caption: str) -> Picture:
    """Return a figure with the name of its files and a title for screen readers."""
    return Picture("", drawing(figure, file, title), caption, name=file)


Look = tuple[str, int, float, bool, Sequence[Ratio | Auc | None]]  # marker, colour, shift, intervals or not, values


def _points(
    names: Sequence[str], looks: Mapping[str, Look], guess: float, label: str, end: float | None = None
) -> Figure:
    """Draw a row of points per name; the line at ``guess`` is what an attacker has who knows nothing."""
    figure, axes = new(WIDE, 1.2 + 0.44 * len(names))
    axes.axvline(guess, color="#5b6675", lw=1)
    rows = range(len(names) - 1, -1, -1)
    for entry, (mark, colour, shift, sure, values) in looks.items():
        known = [(row + shift, v) for row, v in zip(rows, values, strict=True) if v]
        if known:
            at, low, high = np.array([(v.value, v.value - v.low, v.high - v.value) for _, v in known]).T
            axes.errorbar(
                at, [row for row, _ in known], xerr=np.abs([low, high]) if sure else None, fmt=mark,
                color=COLOURS[colour], ms=6, capsize=3, label=entry,
            )  # fmt: skip
    name_rows(axes, names[::-1])
    axes.set_xlim(0, end)
    axes.set_xlabel(label)
    figure.legend(loc="outside upper center", ncols=len(looks), frameon=False, fontsize=9)
    return figure
