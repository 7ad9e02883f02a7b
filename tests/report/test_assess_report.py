"""The report of an assessment: a page that stands alone, figures in files, and a table for the terminal."""

import re
from dataclasses import dataclass
from html import escape
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from polysite.assess.assessment import analyse
from polysite.assess.exchange import Assess
from polysite.assess.verdict import judge
from polysite.payload import Payload
#from polysite.report import assess_figures, assess_page, tables

ODD = ("<b>&", "$x_1$ [red]", "Sankt-Marien-Krankenhaus der Barmherzigen Schwestern", "東京")
QUICK = {"permutations": 99, "resamples": 100, "projections": 4}
EMBEDDED = ("euclidean", "energy", "mmd", "frechet")


@dataclass(frozen=True)
class Hospital:
    """A site that makes its numbers up."""

    size: int
    seed: int
    shift: float = 0.0
    classes: bool = False

    def features(self, kind):
        rng = np.random.default_rng(self.seed)
        if kind == "embedding":
            cases = rng.normal(2 + self.shift, 1.0, (self.size, 16, 2))
            return {"embedding": cases, "encoder": np.array(7.0)}
        values = {f"intensity {m}": rng.lognormal(6.5 + 0.2 * k, 0.25, self.size) for k, m in enumerate(("t1", "flair"))}
        if self.classes:
            values["class tumour"] = (rng.random(self.size) < 0.3 + self.shift / 5).astype(float)
        else:
            whole = rng.lognormal(3.5 + self.shift, 0.5, self.size)
            values |= {"volume WT": whole, "volume ET": whole * rng.uniform(0, 0.5, self.size)}
        return {**values, "metric": np.full(self.size, 3.0)}


def assess(sites, settings=None):
    settings = settings or Assess(**QUICK)
    replies = {name: settings.local(Payload(), Payload(), site)[0] for name, site in sites.items()}
    return analyse(replies, settings, "a network of 18 layers")


def federation(count, names=(), **more):
    """So many hospitals, the last of them unlike the others."""
    names = [*names, *(f"hospital {k}" for k in range(count))][:count]
    sizes = [12 + 5 * (k % 4) for k in range(count)]
    return {n: Hospital(s, k, 1.5 * (k == count - 1), **more) for k, (n, s) in enumerate(zip(names, sizes, strict=True))}
