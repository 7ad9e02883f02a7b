"""The demonstration: four simulated hospitals, one of them an outlier, trained alone, federated and pooled."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from polysite import config, study
from polysite.config import Study
from polysite.engines.run_folder import RunFolder
from polysite.engines.watch import Watch
from polysite.errors import RunError
from polysite.report import publish, tables
from polysite.report.page import Options
from polysite.report.runs import Method, read
from polysite.storage import write_file

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
gamma = 0.94
epochs = 2
batch = 2
[run]
rounds = 30
validate_every = 5
"""
METHODS = ("local", "fedavg", "centralised")
# Of five learning rates, that with the highest mean validation Dice on seeds 100 to 102 (bench/demo.py --tune).
RATES = {"local": 0.08, "fedavg": 0.04, "centralised": 0.02}
OUTLIER = "island"


def studies(base: Study) -> dict[str, Study]:
    """Return the studies of the three ways to train one federation."""
    changes: dict[str, dict[str, Any]] = {
        "local": {"algorithm": "local"}, "fedavg": {}, "centralised": {"run.pooled": True},
    }  # fmt: skip
    return {name: config.vary(base, {**changes[name], "train.lr": RATES[name]}) for name in METHODS}


def run(out: Path | None, seed: int, watch: Watch) -> Path:
    """Train and evaluate the three studies of the demonstration, write the page, and return the path of the page."""
    root = out or RunFolder.fresh(Path("demo"), f"seed{seed}")
    if root.exists():
        raise RunError(f"{root} exists already; name a new folder")
    for name, each in studies(config.parse(STUDY, {"seed": str(seed)})).items():
        study.train(each, root / name, watch, page=False)
    methods = _methods(root)
    options, title = Options(reference="local"), "Four hospitals, one model?"
    return publish.page(root / "index.html", methods, options, title=title, lead=_lead(methods))


def run_over_flare(out: Path | None, seed: int, say: Callable[[str], None]) -> Path:
    """Train the demonstration's federated study over processes of NVIDIA FLARE on this computer; return its page."""
    from polysite.deploy.flare import job, rehearsal, site_folder

    root = out or RunFolder.fresh(Path("demo"), f"flare-seed{seed}")
    if root.exists():
        raise RunError(f"{root} exists already; name a new folder")
    chosen = studies(config.parse(STUDY, {"seed": str(seed)}))["fedavg"]
    sites = sorted(chosen.data.case_refs(seed))
    made = job.export(chosen, root / "job", sites=sites, quorum=len(sites))
    policy = site_folder.admit(root / "workspace") / "policy.toml"
    drawn = policy.read_text(encoding="utf-8").replace("fewest = 5", "fewest = 1")  # they are no patients
    write_file(policy, lambda path: path.write_text(drawn, encoding="utf-8"))
    say(f"{len(sites)} hospitals train over processes of FLARE; their rounds appear in {root / 'workspace'}")
    (run,) = rehearsal.simulate(made, root / "workspace", sites)
    return run / "index.html"


def show(root: Path) -> None:
    """Print the table of a finished demonstration."""
    tables.show(_methods(root))


def _methods(root: Path) -> list[Method]:
    return [Method(name, (read(root / name, name),)) for name in METHODS]


def _lead(methods: list[Method]) -> str:
    """Return the main results as sentences."""
    alone, federated, pooled = (fmean(m.of(None, "dice")) for m in methods)
    local, fedavg, _ = methods
    gain = {s: fmean(fedavg.of(s, "dice")) - fmean(local.of(s, "dice")) for s in local.sites}
    most, least = max(gain, key=gain.__getitem__), min(gain, key=gain.__getitem__)
    return (
        f"Trained alone, the hospitals reach a mean Dice of {alone:.2f} on their own test cases; with federated "
        f"averaging {federated:.2f}, without any scan leaving a hospital; with all scans in one place {pooled:.2f}. "
        f"Compared with training alone, federated averaging helps {most} most ({gain[most]:+.2f}) and {least} least "
        f"({gain[least]:+.2f}). The scanner of {OUTLIER} was drawn to differ from the others. The learning rate "
        "of each method was chosen by the same rule, on other simulated hospitals."
    )
