"""A tiny benchmark on phantoms as TOML, of which tests change what they are about."""

import csv

import tomli_w

from polysite import benchmark, config

SITES = {"east": {"cases": 8}, "north": {"cases": 8, "scanner": 2}, "west": {"cases": 9, "scanner": 9}}
HEAD = 'title = "Tiny"\nreference = "fedavg"\n'


def study(sites=SITES, **sections):
    """The study that all methods share."""
    base = {
        "model": {"filters": [2, 4, 4]},
        "data": {"name": "phantom", "shape": [24, 24, 24], "sites": sites},
        "train": {"patch": [16, 16, 16], "device": "cpu", "augment": "none"},
        "run": {"rounds": 1},
    }
    return config.merge(base, sections)


def text(methods="fedavg = {}\n", head=HEAD, **changes):
    """The file; ``methods`` is the text of its last section, ``changes`` are those of the study."""
    return f"{head}{tomli_w.dumps({'study': study(**changes)})}\n[methods]\n{methods}"


def load(folder, text):
    """The benchmark of a file."""
    (folder / "tiny.toml").write_text(text)
    return benchmark.load(str(folder / "tiny.toml"))


def rows(file):
    """The rows of a CSV file."""
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))
