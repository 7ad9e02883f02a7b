"""Figures as SVG text, drawn without a screen. Colours are told apart by colour-blind readers and in print."""

import io
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polysite.report.runs import Summary

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#555555")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def bars(runs: Sequence[Summary]) -> str:
    """Mean Dice of every hospital under every run, with the standard error over its patients."""
    figure, axes = _new(7.2, 3.2)
    width = 0.8 / len(runs)
    for k, run in enumerate(runs):
        groups = [run.cases(s) for s in run.sites] + [run.cases()]
        x = np.arange(len(groups)) + (k - (len(runs) - 1) / 2) * width
        error = [stdev(g) / len(g) ** 0.5 if len(g) > 1 else 0 for g in groups]
        means = [fmean(g) if g else 0 for g in groups]
        lines = {"lw": 1, "capsize": 2, "ecolor": "#444"}
        axes.bar(x, means, width * 0.92, yerr=error, label=run.name, color=COLOURS[k % len(COLOURS)], error_kw=lines)
    axes.set_xticks(range(len(runs[0].sites) + 1), [*runs[0].sites, "all"])
    axes.set_ylim(0, 1)
    axes.set_ylabel(f"{runs[0].measure}, {runs[0].split} patients")
    axes.legend(frameon=False, ncols=len(runs), loc="lower center", bbox_to_anchor=(0.5, 1))
    return _svg(figure)


def curves(runs: Sequence[Summary]) -> str:
    """Validation Dice round by round; the chosen round is marked."""
    figure, axes = _new(7.2, 3.0)
    for k, run in enumerate(runs):
        rounds, dice = run.curve
        axes.plot(rounds, dice, color=COLOURS[k % len(COLOURS)], lw=1.8, label=run.name)
        at = rounds.index(run.best_round + 1)
        axes.plot(rounds[at], dice[at], MARKERS[k % len(MARKERS)], color=COLOURS[k % len(COLOURS)], ms=7, mec="white")
    axes.set_xlabel("round")
    axes.set_ylabel(f"{runs[0].measure}, validation patients")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower right")
    return _svg(figure)


def matrix(values: Mapping[str, Mapping[str, float]]) -> str:
    """Whose model on whose patients: rows trained at, columns tested at."""
    rows, columns = list(values), list(next(iter(values.values())))
    table = np.array([[values[r][c] for c in columns] for r in rows])
    figure, axes = _new(1.0 * len(columns) + 2.2, 0.62 * len(rows) + 1.1)
    axes.imshow(table, cmap="cividis", vmin=0, vmax=max(0.9, float(table.max())), aspect="auto")
    for i, j in np.ndindex(*table.shape):
        axes.text(j, i, f"{table[i, j]:.2f}", ha="center", va="center", color="white" if table[i, j] < 0.5 else "black")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel("tested at")
    axes.set_ylabel("trained at")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return _svg(figure)


def scans(
    volumes: Mapping[str, tuple[np.ndarray, np.ndarray]], modalities: Sequence[str], labels: Sequence[str]
) -> str:
    """One axial slice a hospital, through the largest extent of the first label, its labels outlined."""
    rows = len(volumes)
    figure = Figure(figsize=(1.75 * len(modalities) + 0.6, 1.75 * rows + 0.5), layout="constrained")
    for i, (site, (image, label)) in enumerate(volumes.items()):
        z = int(label[0].sum((0, 1)).argmax())
        for j, modality in enumerate(modalities):
            axes = figure.add_subplot(rows, len(modalities), i * len(modalities) + j + 1)
            axes.imshow(image[j, :, :, z].T, cmap="gray", origin="lower", interpolation="bilinear")
            for k in range(len(labels)):
                if label[k, :, :, z].any():
                    axes.contour(label[k, :, :, z].T, levels=[0.5], colors=COLOURS[(4, 1, 5)[k % 3]], linewidths=1.1)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
            if i == 0:
                axes.set_title(modality, fontsize=10)
            if j == 0:
                axes.set_ylabel(site, fontsize=10)
    handles = [
        figure.axes[0].plot([], [], color=COLOURS[(4, 1, 5)[k % 3]], label=name)[0] for k, name in enumerate(labels)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return _svg(figure)


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Figure) -> str:
    """The figure as SVG that scales with the page and says nothing about when it was drawn."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    return text.getvalue()[text.getvalue().index("<svg") :]
