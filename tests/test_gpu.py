"""What holds on a GPU: models stay there, half precision and compilation train, a study runs to its end."""

from dataclasses import replace

import pytest
import torch

from polysite import study
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.scaffold import Scaffold
from polysite.algorithms.server import Adam
from polysite.config import parse
from polysite.engines.rounds import run
from polysite.payload import Payload

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can see")

STUDY = """
[model]
filters = [8, 16, 32]
[data]
shape = [32, 32, 32]
[data.sites.a]
cases = 6
[data.sites.b]
cases = 5
[train]
lr = 0.05
device = "cuda"
[run]
rounds = 3
"""


def leaves(payload):
    return [x for v in payload.values() if not isinstance(v, float) for x in v.values()]


@pytest.mark.parametrize(
    "algorithm", [FedAvg(), FedAvg(server=Adam()), Scaffold()], ids=["fedavg", "fedadam", "scaffold"]
)
def test_models_never_leave_the_device(algorithm):
    chosen = replace(parse(STUDY), algorithm=algorithm)
    engine = study.simulator(chosen)
    start = next(iter(engine.sites.values())).start
    for r in run(algorithm, engine, start, chosen.run, 0):
        memory = [x for m in engine.memories().values() for x in leaves(m)]
        crossed = [x for p in (*r.sent.values(), *(a.payload for a in r.replies.values())) for x in leaves(p)]
        assert all(x.is_cuda for x in (*crossed, *memory, *r.state.model.values()))
        assert all(torch.isfinite(x).all() for x in r.state.model.values())


def test_the_wire_goes_through_the_host_and_back():
    chosen = parse(STUDY)
    states = []
    for wire in (False, True):
        engine = study.simulator(replace(chosen, run=replace(chosen.run, wire=wire)))
        states.append(next(run(chosen.algorithm, engine, engine.sites["a"].start, chosen.run, 0)).state.model)
    for k in states[0]:
        assert states[1][k].is_cuda and torch.allclose(states[0][k], states[1][k], atol=1e-3)
    assert Payload(model=states[0]).nbytes == Payload(model=states[1]).nbytes


@pytest.mark.parametrize(
    "sets", [{"train.autocast": "false"}, {"train.autocast": "true"}, {"train.compile": "true"}], ids=str
)
def test_training_learns(sets):
    site = study.hospitals(parse(STUDY, {**sets, "train.lr": "0.3", "train.momentum": "0.9"}))["a"]
    first = site.at(0).fit(site.start)
    later = site.at(1).fit(site.start, steps=60)
    assert later.loss < first.loss - 0.05 and next(iter(later.params.values())).dtype == torch.float32


def test_a_study_runs_and_resumes(tmp_path):
    done = study.run(parse(STUDY, {"run.checkpoint_every": "1"}), tmp_path / "run")
    assert 0 <= done.mean <= 1
    for late in (tmp_path / "run" / "result.json", done.folder.checkpoints()[0]):
        late.unlink()
    assert study.resume(tmp_path / "run").result["rounds"] == 3
