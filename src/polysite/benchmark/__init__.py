"""Benchmarks: every method on every fold with every seed, then a comparison.

A benchmark is a TOML file::

    title = "..."                       title of the page
    about = "..."                       description of the benchmark
    reference = "fedavg"                the method that all others are compared with
    folds = 5                           folds of a cross-validation; none by default
    seeds = [0, 1, 2]                   a run for every seed; [0] by default
    budget = "steps"                    rounds of every method such that local steps, or bytes, are the reference's;
                                        "rounds" by default: the rounds of the studies
    preset = "fets_benchmark"           settings that all methods share: a preset,
    [study]                             and sections of a study, which override the preset
    [methods.NAME]                      settings of one method; two keys use the result of an assessment:
    outlier = { distance = "emd", weight = 0.3 }     a lower weight for the outlier by this distance, or
    clusters = "euclidean"                           one model for every cluster by this distance
    [[federations]]                     every method in every federation, besides folds and seeds: keys of a
    title = "dirichlet 0.1"             federation, with a title of its own; or "federation" with a list of
    name = "dirichlet"                  federations that follow one another; "study" has other changes, as of a split
    [sweep]                             methods with every combination of values of settings
    "algorithm.lam" = [0, 1, 10]
    sweep_methods = ["feddiv"]          methods that are swept; all that have the key by default
    needs = "..."                       the data that it is made for
    sizes = "B_sizes"                   published number of cases of every site, for a plan without the data
    [published_folds]                   where --folds FOLDER finds the folds that were published
    [published]                         published tables, and the names of the methods there
    [compare]                           tests, policy for empty masks, figures
    [radiomics]                         instead of methods: features and clusters of the cases, without training
    [small]                             changes for --scale small (phantoms), with the same keys
    [tiny]                              changes for --scale tiny (the data themselves, one or two rounds)

The folder that a benchmark writes::

    bench.toml                          methods, seeds, folds and settings
    assess/fold0-seed0/                 the assessment, where a method needs one
    studies/METHOD/fold0-seed0.toml     every single study, ready for ``polysite train``
    runs/METHOD/fold0-seed0/            its run folder; its output is beside it, fold0-seed0.txt
    radiomics/                          features and clusters, in a benchmark without methods
    comparison/                         tables, figures and page, with published numbers beside the measured ones

With federations, ``fold0-seed0`` of ``assess/``, ``studies/`` and ``runs/`` lie in a folder with the federation's
title, ``federations/TITLE/`` has the comparison of the methods in each, and ``comparison/`` has all federations:
scores, and whether the distance between sites predicts what a method loses. Pooled training runs once for all
federations that have the same cases. A method with a swept value is called ``feddiv, lam = 10``.

A benchmark that is started again continues where it stopped. Every study is checked before the first one trains. Runs
take turns in worker processes. The first runs alone, to measure how much memory a run needs; then as many run in
parallel as fit into memory.
"""

from polysite.benchmark.bench import SCALES, Bench, load, names
from polysite.benchmark.jobs import Step, silent, variants
from polysite.benchmark.plan import plan
from polysite.benchmark.radiomics import describe
from polysite.benchmark.run import Results, options, publish, run

__all__ = [
    "SCALES", "Bench", "Results", "Step", "describe", "load", "names", "options", "plan", "publish", "run", "silent",
    "variants",
]  # fmt: skip
