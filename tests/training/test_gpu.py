"""What holds on a GPU: models stay there, half precision and compilation train, a study runs to its end."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import polysite as ps
from polysite import assessment, study
from polysite.config import parse
from polysite.data.case import Case
from polysite.engines.rounds import run_rounds
from polysite.errors import DataError
from polysite.metrics.measures import measure
from polysite.metrics.surface import surfaces
from polysite.models import MODELS
from polysite.models.encoders import Embedder
from polysite.models.resnet3d import ResNet18
from polysite.payload import Payload
from polysite.site import Budget
from polysite.training.gpu_steps import GpuSteps
from polysite.training.network import Network
from polysite.training.patches import Patches, blur, contrast
from polysite.training.surface import surfaces as tensor_surfaces
from polysite.training.tasks import CaseLoss, Classify, Outline
from polysite.training.torch_site import TorchSite

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
    "algorithm", [ps.FedAvg(), ps.FedAvg(server=ps.Adam()), ps.Scaffold()], ids=["fedavg", "fedadam", "scaffold"]
)
def test_models_never_leave_the_device(algorithm):
    chosen = replace(parse(STUDY), algorithm=algorithm)
    engine = study.simulator(chosen)
    start = next(iter(engine.sites.values())).start
    for r in run_rounds(algorithm, engine, start, chosen.run, 0):
        memory = [x for m in engine.memories().values() for x in leaves(m)]
        crossed = [x for p in (*r.sent.values(), *(a.payload for a in r.replies.values())) for x in leaves(p)]
        assert all(x.is_cuda for x in (*crossed, *memory, *r.state.model.values()))
        assert all(torch.isfinite(x).all() for x in r.state.model.values())


def test_the_wire_goes_through_the_host_and_back():
    chosen = parse(STUDY)
    states = []
    for wire in (False, True):
        engine = study.simulator(replace(chosen, run=replace(chosen.run, wire=wire)))
        states.append(next(run_rounds(chosen.algorithm, engine, engine.sites["a"].start, chosen.run, 0)).state.model)
    for k in states[0]:
        assert states[1][k].is_cuda and torch.allclose(states[0][k], states[1][k], atol=1e-3)
    assert Payload(model=states[0]).nbytes == Payload(model=states[1]).nbytes


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.compile imports it
@pytest.mark.parametrize(
    "sets", [{"train.autocast": "false"}, {"train.autocast": "true"}, {"train.compile": "true"}], ids=str
)
def test_training_learns(sets):
    site = study.build_sites(parse(STUDY, {**sets, "train.lr": "0.3", "train.momentum": "0.9"}))["a"]
    first = site.at(0).fit(site.start)
    later = site.at(1).fit(site.start, budget=Budget(steps=60))
    assert later.loss < first.loss - 0.05 and next(iter(later.params.values())).dtype == torch.float32


def test_a_study_runs_and_resumes(tmp_path):
    done = study.train(parse(STUDY, {"run.checkpoint_every": "1"}), tmp_path / "run")
    assert 0 <= done.mean <= 1
    for late in (tmp_path / "run" / "result.json", done.folder.checkpoints()[0]):
        late.unlink()
    assert study.resume(tmp_path / "run").result.rounds == 3


def test_a_step_that_is_captured_in_one_run_and_compiled_in_the_next_keeps_its_loss():
    net = ps.UNet(filters=(16, 32, 32)).build(dims=3, modalities=2, outputs=1, seed=1).cuda()
    loss = CaseLoss(Outline(), "dice")
    x = torch.randn(4, 2, 32, 32, 32, generator=torch.Generator().manual_seed(0)).cuda()
    y = (x[:, :1] > 0.5).float()
    with torch.no_grad():
        wanted = float(loss(net(x), y).mean())
    steps = GpuSteps(net, True, "auto", 12)
    first = [float(steps.backward(x, y, loss, 4)) for _ in range(12)]
    steps.begin(10**9, 0)
    second = [float(steps.backward(x, y, loss, 4)) for _ in range(12)]
    assert [*first, *second] == pytest.approx([wanted] * 24, abs=0.01)
    assert steps.compiled or steps.problem


def test_patches_on_the_gpu_are_those_of_the_cpu():
    image, label = torch.randn(2, 40, 36, 33), (torch.rand(1, 40, 36, 33) > 0.5).to(torch.uint8)
    for augment, seeds in (("none", range(3)), ("light", range(8))):
        for seed in seeds:
            x, y = Patches(torch.device("cpu")).batch(
                [(image, label)], (16, 16, 32), np.random.default_rng(seed), augment
            )
            u, v = Patches(torch.device("cuda")).batch(
                [(image.cuda(), label.cuda())], (16, 16, 32), np.random.default_rng(seed), augment
            )
            assert torch.allclose(x, u.cpu(), atol=1e-6) and torch.equal(y, v.cpu())
    x, u = image.clone(), image.cuda()
    for f in (lambda i: blur(i, [0.5, 0.8, 1.0], torch.empty_like(i)), lambda i: contrast(i, 1.7)):
        f(x), f(u)
        assert torch.allclose(x, u.cpu(), atol=1e-4)


def test_cases_left_in_host_memory_train_as_those_on_the_gpu():
    results = []
    for place in ("device", "disk"):
        chosen = parse(STUDY, {"train.cases": place, "train.augment": "light"})
        site = study.simulator(chosen).sites["a"]
        assert site._volumes[site.cases("train")[0]][0].is_cuda == (place == "device")
        results.append(site.fit(site.start, budget=Budget(epochs=2)).loss)
    assert results[0] == pytest.approx(results[1], rel=1e-3)


@pytest.mark.parametrize("exclusive", [False, True])
def test_volumes_are_segmented_and_classified_on_the_gpu(exclusive, tmp_path):
    chosen = parse(STUDY, {"train.exclusive": str(exclusive).lower(), "data.sites.a.low_grade": "0"})
    if exclusive:
        with pytest.raises(DataError, match="labels overlap"):
            study.simulator(chosen)
        return
    assert study.train(chosen, tmp_path / "run").mean >= 0
    rng = np.random.default_rng(0)
    shades = [rng.normal(2.0 * (k % 2), 1, (1, 32, 32, 32)).astype(np.float32) for k in range(8)]
    cases = [Case("s", f"{k}", x, np.array([k % 2 == 0, k % 2 == 1], np.uint8)) for k, x in enumerate(shades)]
    net = Network(MODELS["densenet_small"].build(dims=3, modalities=1, outputs=2, seed=0), chosen.train)
    site = TorchSite("s", net, {"train": cases, "validation": cases}, ["x", "y"], chosen.train, 0, Classify())
    scores = site.score(site.fit(site.start, budget=Budget(epochs=20)).params, site.cases("validation"))
    assert np.mean([c.labels["accuracy"] for c in scores.values()]) > 0.8


@pytest.mark.parametrize("name", ["bundled", "medicalnet"])
def test_embeddings_are_those_of_the_cpu(name, tmp_path):
    """In batches and one by one, of equal and of different sizes."""
    encoder = ps.Bundled()
    if name == "medicalnet":
        torch.manual_seed(0)
        torch.save({"state_dict": {f"module.{k}": v for k, v in ResNet18().state_dict().items()}}, tmp_path / "r.pth")
        encoder = ps.MedicalNet(str(tmp_path / "r.pth"))
    rng = np.random.default_rng(0)
    volumes = [rng.normal(size=s).astype(np.float32) for s in [(40, 40, 40)] * 5 + [(24, 50, 30), (3, 4, 5), (60, 60)]]
    there, here = Embedder(encoder, "cuda", 4), Embedder(encoder, "cpu")
    together = there(volumes)
    scale = np.abs(together).max()
    np.testing.assert_allclose(together, here(volumes), atol=2e-3 * scale)
    np.testing.assert_allclose(together, np.concatenate([there([v]) for v in volumes]), atol=2e-3 * scale)


def test_an_assessment_runs(tmp_path):
    found = assessment.assess(parse(STUDY, {"assess.cases": "all"}), tmp_path / "gpu").assessment
    beside = assessment.assess(
        parse(STUDY, {"assess.cases": "all", "train.device": "cpu"}), tmp_path / "cpu"
    ).assessment
    for kind, d in found.distances.items():
        np.testing.assert_allclose(d.matrix, beside.distances[kind].matrix, rtol=0.01)


@pytest.mark.parametrize("shape", [(40,), (30, 50), (40, 36, 33)], ids=len)
def test_surface_distances_are_those_of_the_cpu(shape):
    rng = np.random.default_rng(0)
    spacing = (0.9, 1.0, 2.5)[: len(shape)]
    for share in (0.0, 0.001, 0.02, 0.5, 1.0):
        predicted, truth = rng.random(shape) < share, rng.random(shape) < max(share, 0.05)
        there = tensor_surfaces(torch.from_numpy(predicted).cuda(), torch.from_numpy(truth).cuda(), spacing)
        here = surfaces(predicted, truth, spacing)
        for a, b in ((there.to_truth, here.to_truth), (there.to_predicted, here.to_predicted)):
            np.testing.assert_allclose(np.sort(a), np.sort(b), rtol=0, atol=1e-9)


def test_measures_are_those_of_the_cpu():
    corners = np.indices((60, 64, 50)).sum(0)
    masks = {"small": corners < 40, "large": corners < 90, "far": corners > 150, "none": corners < 0}
    for predicted in masks.values():
        for truth in masks.values():
            tensors = torch.from_numpy(predicted).cuda(), torch.from_numpy(truth).cuda()
            there = measure(*tensors, (1.0, 0.8, 3.0), surfaces=tensor_surfaces)
            assert there == pytest.approx(measure(predicted, truth, (1.0, 0.8, 3.0)), abs=1e-9, nan_ok=True)
