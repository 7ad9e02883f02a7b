"""The whole idea in one command: four drawn hospitals, one of them an outlier, alone, federated and pooled."""

from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file

from polysite import config, study
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.local import Local
from polysite.config import Study
from polysite.engines.folder import RunFolder
from polysite.engines.rounds import Watch, mean_score
from polysite.errors import RunError
from polysite.report import figures, page, tables
from polysite.report.runs import Summary, read

STUDY = """
[model]
filters = [8, 16, 32]
[data]
shape = [32, 32, 32]
[split]
validation = 0.25
test = 0.5
[train]
optimiser = "adam"
lr = 0.01
gamma = 0.94
epochs = 2
batch = 2
[run]
rounds = 30
validate_every = 5
"""
METHODS = ("local", "fedavg", "centralised")
OUTLIER = "island"


def studies(base: Study) -> dict[str, Study]:
    """The three ways to train one federation."""
    return {
        "local": replace(base, algorithm=Local()),
        "fedavg": replace(base, algorithm=FedAvg(lr=2 * base.train.lr)),  # a mean of steps is shorter than a step
        "centralised": replace(base, algorithm=FedAvg(), run=replace(base.run, pooled=True)),
    }


def run(out: Path | None, seed: int, watch: Watch) -> Path:
    """Train all three, write the page; returns its path."""
    root = out or RunFolder.fresh(Path("demo"), f"seed{seed}")
    if root.exists():
        raise RunError(f"{root} exists already; name a new folder")
    chosen = studies(config.parse(STUDY, {"seed": str(seed)}))
    for name, each in chosen.items():
        study.run(each, root / name, watch)
    runs = [read(root / name, name) for name in METHODS]
    text = page.build("Four hospitals, one model?", _lead(runs), runs, _figures(runs, chosen["local"], root))
    (root / "index.html").write_text(text, encoding="utf-8")
    return root / "index.html"


def show(root: Path) -> None:
    """The table of a finished demonstration, in the terminal."""
    tables.show([root / name for name in METHODS], METHODS)


def matrix(local: Study, models: Path) -> dict[str, dict[str, float]]:
    """Every hospital's own model on the test patients of every hospital."""
    sites = study.hospitals(local)
    found = {}
    for trained in sorted(sites):
        params = load_file(models / f"best.{trained}.safetensors")
        found[trained] = {
            t: mean_score({t: s.score(s.lift(params), s.cases("test"))}, "site") for t, s in sorted(sites.items())
        }
    return found


def _lead(runs: list[Summary]) -> str:
    """What came out, in words."""
    alone, federated, pooled = (sum(r.cases()) / len(r.cases()) for r in runs)
    gain = {
        s: sum(runs[1].cases(s)) / len(runs[1].cases(s)) - sum(runs[0].cases(s)) / len(runs[0].cases(s))
        for s in runs[0].sites
    }
    most, least = max(gain, key=gain.__getitem__), min(gain, key=gain.__getitem__)
    return (
        f"Trained alone, the hospitals reach a mean Dice of {alone:.2f} on their own test patients; with federated "
        f"averaging {federated:.2f}, without any scan leaving; with all scans in one place {pooled:.2f}. "
        f"Federation changes most for {most} ({gain[most]:+.2f}) and does least for {least} ({gain[least]:+.2f}). "
        f"The scanner of {OUTLIER} was drawn to differ from the others."
    )


def _figures(runs: list[Summary], local: Study, root: Path) -> list[page.Shown]:
    first = {site: patients[0].open() for site, patients in local.data.patients(local.seed).items()}
    scans = figures.scans(
        {site: (c.image, c.label) for site, c in sorted(first.items())},
        local.data.modality_names,
        local.data.label_names,
    )
    return [
        page.Shown(
            "Hospital by hospital",
            figures.bars(runs),
            "Error bars: standard error over patients. FedAvg trains with twice the learning rate of the other two.",
        ),
        page.Shown("Round by round", figures.curves(runs), "The mark is the round chosen on the validation patients."),
        page.Shown(
            "Whose model works on whose patients?",
            figures.matrix(matrix(local, root / "local" / "models")),
            "Mean Dice of the model that each hospital trained alone, on the test patients of every hospital.",
            narrow=True,
        ),
        page.Shown(
            "What the hospitals see",
            scans,
            "One patient of each hospital: four MRI sequences with the tumour outlined.",
        ),
    ]
