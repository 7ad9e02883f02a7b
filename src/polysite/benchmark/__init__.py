"""Benchmarks: every method on every fold with every seed, then a comparison.

A benchmark is a TOML file::

    title = "..."                       title of the page
    about = "..."                       description of the benchmark
    reference = "fedavg"                the method that all others are compared with
    folds = 5                           folds of a cross-validation; none by default
    seeds = [0, 1, 2]                   a run for every seed; [0] by default
    budget = "steps"                    sets the rounds of every method so that its local steps ("bytes": its traffic)
                                        equal the reference's; "rounds", the default, leaves them as they are
    preset = "fets_benchmark"           settings that all methods share: a preset,
    [study]                             and sections of a study, which override the preset
    [methods.NAME]                      settings of one method; two keys use the result of an assessment:
    outlier = { distance = "emd", weight = 0.3 }     a lower weight for the outlier by this distance, or
    clusters = "euclidean"                           one model for every cluster by this distance
    [tuning]                            every method tries these settings in every fold, each for a share of its rounds,
    share = 0.2                         and goes on with the best on validation cases; methods.NAME.tuning names other
    settings = { "train.lr" = [0.1, 0.3] }   settings, equally many
    [[federations]]                     a federation that every method runs in, for every fold and seed: its title and
    title = "dirichlet 0.1"             its keys, or "federation" with a list of steps; "study" has other sections that
    name = "dirichlet"                  change with it, such as split
    [sweep]                             settings, each with a list of values; every combination is run
    "algorithm.lam" = [0, 1, 10]
    sweep_methods = ["feddiv"]          methods to sweep; by default all that have a swept key
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
    tuning/                             the trials of [tuning], and their scores
    runs/METHOD/fold0-seed0/            its run folder; its output is beside it, fold0-seed0.txt
    radiomics/                          features and clusters, in a benchmark without methods
    comparison/                         tables, figures and page, with published numbers beside the measured ones

With federations, ``assess/``, ``studies/`` and ``runs/`` have a folder per federation, named by its title;
``federations/TITLE/`` compares the methods in one federation, and ``comparison/`` has all of them: scores, and whether
the distance between sites predicts the loss of a method. Pooled training runs once for all
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
from polysite.benchmark.workers import Workers

__all__ = [
    "SCALES", "Bench", "Results", "Step", "Workers", "describe", "load", "names", "options", "plan", "publish", "run",
    "silent", "variants",
]  # fmt: skip
