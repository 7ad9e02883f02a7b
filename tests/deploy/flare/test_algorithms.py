"""Real processes of NVIDIA FLARE, a server and three sites, against polysite's own simulator."""

import pytest
from safetensors.numpy import load_file

from consortium import NAMES, same, states, values, wanted
from flare_jobs import several, workspace
from polysite import config
from polysite.algorithms import ALGORITHMS
from polysite.deploy.flare.rehearsal import simulate
from polysite.deploy.site import ledger
from polysite.engines.run_folder import RunFolder
from polysite.payload import Payload
from polysite.study import Run

pytestmark = pytest.mark.slow

# one with shared and personal models and a memory in every full run
SLICE = ("ditto",)
REST = tuple(sorted(ALGORITHMS.keys() - set(SLICE)))


def secured(name):
    """An algorithm whose replies are under masks: steps of a secure sum cross FLARE, too."""
    return config.vary(wanted(name), {"run": {"secure": {"use": "on"}}})


@pytest.mark.parametrize(
    "names", [pytest.param(SLICE, id="one"), pytest.param(REST, id="all others", marks=pytest.mark.soak)]
)
def test_algorithms_over_flare_come_to_the_state_of_the_simulator(names, tmp_path, trained):
    studies = {name: wanted(name) for name in names}
    if names is REST:
        studies["masked"] = secured("fedavg")
    job, ids = several(tmp_path, studies)
    place = workspace(tmp_path / "ws")
    assert len(simulate(job, place, NAMES)) == len(studies)
    differs = {}
    for name, chosen in studies.items():
        differs[name] = list(differences(trained(chosen), place, ids[name]))
    assert differs == {name: [] for name in studies}
    for name in NAMES:  # what left is on record at every site, as with any engine
        entries = ledger.check(place / name / "polysite" / "ledger.jsonl")
        assert {e["study"] for e in entries} == set(ids.values())
        assert {e["from"] for e in entries} == {"FLARE"}


def differences(simulated, place, id):
    """Yield what is not bit for bit as in the simulation: states, scores, models."""
    folder = RunFolder(place / "server" / "polysite" / id)
    deployed = Run(folder, folder.result)
    one, other = states(simulated.folder.path), states(folder.path)
    yield from one.keys() ^ other.keys()
    yield from (k for k in one.keys() & other.keys() if not same(one[k], other[k]))
    if not one or deployed.result.best_round != simulated.result.best_round:
        yield "best round"
    if values(deployed) != values(simulated):
        yield "scores"
    for path in (simulated.folder.path / "models").glob("*.safetensors"):
        there = folder.path / "models" / path.name
        kind, _, site = path.stem.partition(".")
        if not there.exists():  # what the server could not tell from what it sent: it stays at the hospital
            there = place / (site or "a") / "polysite" / "runs" / id / "models" / f"{kind}.safetensors"
        if Payload(model=load_file(path)) != Payload(model=load_file(there)):
            yield path.name
