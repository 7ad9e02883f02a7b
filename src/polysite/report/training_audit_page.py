"""The page of an audit of training: what attackers made of the models that left, in plain words first."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from polysite.metrics.membership import Auc
from polysite.report import assess_figures
from polysite.report.drawing import COLOURS, pictures
from polysite.report.grid import Cell, Grid, Line, name, number
from polysite.report.page import Folded, Picture, Section, layout
from polysite.training.leaks import Membership, Rebuilt

TITLE = "What an attacker can learn from the models of a run"
CAUTION = "These are two attacks with the cases at hand, not a proof of privacy."
FEWEST = 5  # training patients of a hospital, below which the page says what a policy would have prevented


@dataclass(frozen=True)
class Surface:
    """A model that an attacker may have, and how well it tells who was trained on.

    Args:
        name: Short name.
        words: What the model is.
        who: Who has it in this run.
        seen: Whether anybody but the hospital itself had it in this run.
        found: What the attack found.
    """

    name: str
    words: str
    who: str
    seen: bool
    found: Membership


@dataclass(frozen=True, eq=False)
class Inverted:
    """A gradient or change of a model from which images were rebuilt.

    Args:
        name: Short name.
        words: What it is.
        seen: Whether it left a hospital in this run.
        found: What the attack found.
    """

    name: str
    words: str
    seen: bool
    found: Rebuilt


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
class Attacked:
    """All that an audit of a run found."""

    surfaces: tuple[Surface, ...]
    control: Membership  # the untrained network
    inverted: tuple[Inverted, ...]
    protections: Protections
    replayed: str  # how exactly the rounds were replayed

    def surface(self, name: str) -> Surface | None:
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
        return f"{self.protections.words} {first}{second} {CAUTION}"

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


def _cell(auc: Auc | None) -> Cell:
    return Cell("–") if auc is None else Cell(auc.words, auc.value, auc.succeeds)


def membership(found: Attacked) -> Grid:
    """Return a table of the areas by model, over all hospitals."""
    rows = [(s.name, "yes" if s.seen else "no", s.found) for s in found.surfaces]
    rows.append(("untrained network", "–", found.control))
    lines = [
        Line((name(what), name(seen), _cell(m.loss), _cell(m.calibrated), number(m.loss.members, "d"),
              number(m.loss.others, "d")))
        for what, seen, m in rows
    ]  # fmt: skip
    head = ("", "seen in this run", "AUC by loss", "AUC calibrated", "trained on", "others")
    note = (
        "Areas under the ROC curve: 0.5 is guessing, 1 certainty; in brackets the 95 % interval (Newcombe's). Marked: "
        "significantly above 0.5. Patients are compared within hospitals. The untrained network has seen no patient: "
        "what it shows is chance in the split."
    )
    return Grid("membership", "Who was trained on?", head, tuple(lines), note)


def by_site(found: Attacked) -> Grid:
    """Return a table of the areas of every hospital."""
    sites = sorted({site for s in found.surfaces for site in s.found.sites})
    lines = [
        Line((name(site), *(_cell(_best(s.found, site)) for s in found.surfaces), number(_epsilon(found, site), ".2f")))
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


def _epsilon(found: Attacked, site: str) -> float | None:
    return found.protections.epsilon.get(site)


def inversion(found: Attacked) -> Grid:
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


def audience(found: Attacked) -> Grid:
    """Return who had what in this run, with the measured attack beside it."""
    secure = found.protections.secure
    released = found.surface("released model")
    rows = [
        ("the coordinator", "the sum of the replies of every round" if secure else "every reply of every round",
         found.surface("sum" if secure else "single replies")),
        ("another hospital", "the common model of every round", found.surface("sum")),
        ("who gets the released model", "the model of the best round", released),
        ("who reads the wire", "sizes and times: the connection is encrypted", None),
    ]  # fmt: skip
    lines = [Line((name(who), name(what), _cell(s.found.strongest if s else None))) for who, what, s in rows]
    note = (
        "AUC of the stronger attack on who was trained on. Scores of validation and test cases leave besides, as the "
        "policy allows; docs/protection.md lists all that leaves."
    )
    return Grid("audience", "", ("", "has", "AUC"), tuple(lines), note)


def prevented(found: Attacked) -> Iterator[str]:
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
        who = ", ".join(small)
        if len(small) > 4:
            who = f"{len(small)} of {len(p.patients)} hospitals ({', '.join(small[:3])} and {len(small) - 3} more)"
        yield f"fewest = {FEWEST} would have kept {who} out, with fewer training patients than that."
    else:
        yield f"fewest = {FEWEST} was met: every hospital trained on at least {FEWEST} patients."
    one = next((i for i in found.inverted if i.name == "one patient"), None)
    if one is not None:
        yield (
            f"fewest = 2 or more prevents what the row 'one patient' shows (error ratio {one.found.ratio:.2f}): the "
            "gradient of a single patient does not leave."
        )


def write(folder: Path, found: Attacked, about: Mapping[str, Any], scans: bool) -> Path:
    """Write the self-contained ``index.html`` and its figures."""
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    sections = list(_sections(figures, found, about, scans))
    text = layout(TITLE, found.summary, sections, about["versions"]["polysite"], remarks=limits(found))
    page = folder / "index.html"
    page.write_text(text, encoding="utf-8")
    return page


def limits(found: Attacked) -> list[str]:
    """Return the limits of the audit, as sentences."""
    return [
        found.replayed,
        "An attack that fails is no proof that none succeeds: with shadow models, more rounds, other priors or longer "
        "searches an attacker may do better. Intervals are over patients, not over trainings, and the stronger of two "
        "attacks was chosen after both were known.",
    ]


def _sections(folder: Path, found: Attacked, about: Mapping[str, Any], scans: bool) -> Iterator[Section]:
    yield Section("who", "Who had what", (found.protections.words, audience(found)))
    drawn = assess_figures.save(_areas(found), folder, "membership", "Areas of membership inference")
    caption = (
        "Points: AUC of the attack by loss (blue) and calibrated (orange), with 95 % intervals; the line is chance."
    )
    sites = by_site(found)
    blocks = (Picture("", drawn, caption), membership(found), *([sites] if sites.lines else []))
    yield Section("members", "Are training patients recognised?", blocks)
    parts: tuple[Any, ...] = (inversion(found),)
    if scans and found.inverted:
        svg = assess_figures.save(_pictures(found.inverted), folder, "rebuilt", "Images and what was rebuilt of them")
        note = (
            "Middle slices of the first modality. These are images of patients; --no-scans makes a page without them."
        )
        parts += (Picture("", svg, note),)
    if found.inverted:
        yield Section("images", "Are images rebuilt?", parts)
    yield Section("prevented", "What a policy would have prevented", tuple(prevented(found)))
    yield Section("knows", "What the attacker knows", tuple(_knows(found, about)))
    versions = "\n".join(f"{k}: {v}" for k, v in about["versions"].items())
    where = "Every number is in audit.json, every figure in figures/, as SVG and PNG."
    yield Section("made", "Configuration and versions",
                  (where, Folded("Configuration", about["config"]), Folded("Versions", versions)))  # fmt: skip


def _knows(found: Attacked, about: Mapping[str, Any]) -> Iterator[str]:
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


def _areas(found: Attacked) -> Figure:
    """Draw a row per model: both attacks with their intervals."""
    rows = [*((s.name, s.found) for s in found.surfaces), ("untrained", found.control)]
    figure = Figure((7.2, 1.1 + 0.45 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(0.5, color="#5b6675", lw=1)
    heights = list(range(len(rows) - 1, -1, -1))
    for shift, kind in ((0.12, "loss"), (-0.12, "calibrated")):
        known = [(h + shift, getattr(m, kind)) for h, (_, m) in zip(heights, rows, strict=True) if getattr(m, kind)]
        if known:
            at = [a.value for _, a in known]
            reach = [[a.value - a.low for _, a in known], [a.high - a.value for _, a in known]]
            mark, colour = ("o", COLOURS[0]) if kind == "loss" else ("s", COLOURS[1])
            axes.errorbar(at, [h for h, _ in known], xerr=reach, fmt=mark, color=colour, ms=6, capsize=3, label=kind)
    axes.set_yticks(heights, [what for what, _ in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(0, 1)
    axes.set_xlabel("AUC: probability that a training patient ranks above another")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    return figure


def _pictures(inverted: Sequence[Inverted]) -> Figure:
    """Draw a row per attack: the first image, the guess and what was rebuilt."""
    rows = [(each.name, {what: _slice(x[0, 0]) for what, x in each.found.images.items()}) for each in inverted]
    return pictures(rows, 1.9, 1.5)


def _slice(volume: np.ndarray) -> np.ndarray:
    """Return the middle slice of a volume along its last axis, or an image as it is."""
    return volume if volume.ndim == 2 else volume[..., volume.shape[-1] // 2]
