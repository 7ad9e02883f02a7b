"""Real processes of NVIDIA FLARE, a server and three sites, against polysite's own simulator."""

import pytest

from consortium import NAMES, wanted
from flare_jobs import several, workspace
from flare_simulation import simulate
from polysite import config
from polysite.algorithms import ALGORITHMS
from polysite.deploy.site import ledger
from polysite.engines.run_folder import RunFolder
from polysite.study import Run

pytestmark = pytest.mark.slow

# one with shared and personal models and a memory in every full run
SLICE = ("ditto",)
REST = tuple(sorted(ALGORITHMS.keys() - set(SLICE)))


@pytest.mark.parametrize(
    "names", [pytest.param(SLICE, id="one"), pytest.param(REST, id="all others", marks=pytest.mark.soak)]
)
def test_algorithms_over_flare_come_to_the_state_of_the_simulator(names, tmp_path, trained, differences):
    studies = {name: wanted(name) for name in names}
    if names is REST:  # steps of a secure sum cross FLARE, too
        studies["masked"] = config.vary(wanted("fedavg"), {"run": {"secure": {"use": "on"}}})
    job, ids = several(tmp_path, studies)
    place = workspace(tmp_path / "ws")
    assert len(simulate(job, place, NAMES)) == len(studies)

    def compared(name):
        folder = RunFolder(place / "server" / "polysite" / ids[name])
        kept = f"polysite/runs/{ids[name]}/models"
        return differences(
            trained(studies[name]), Run(folder, folder.result), lambda site, file: place / site / kept / file
        )

    assert {name: compared(name) for name in studies} == {name: [] for name in studies}
    for name in NAMES:  # what left is on record at every site, as with any engine
        entries = ledger.check(place / name / "polysite" / "ledger.jsonl")
        assert {e["study"] for e in entries} == set(ids.values())
        assert {e["from"] for e in entries} == {"FLARE"}
