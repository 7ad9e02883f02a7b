"""What holds on a GPU: models stay there, half precision and compilation train, a study runs to its end."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import polysite as ps
from polysite import study
from polysite.config import parse
from polysite.engines.rounds import run_rounds
from polysite.models.encoders import Embedder
from polysite.site import Budget
from polysite.training.gpu_steps import GpuSteps
from polysite.training.patches import Patches, blur, contrast
from polysite.training.tasks import CaseLoss, Outline

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


@pytest.mark.parametrize("algorithm", [ps.FedAvg(server=ps.Adam()), ps.Scaffold()], ids=["fedadam", "scaffold"])
def test_models_never_leave_the_device(algorithm):
    chosen = replace(parse(STUDY), algorithm=algorithm)
    engine = study.simulator(chosen)
    for r in run_rounds(algorithm, engine, engine.sites["a"].start, chosen.run, 0):
        memory = [x for m in engine.memories().values() for x in leaves(m)]
        crossed = [x for p in (*r.sent.values(), *(a.payload for a in r.replies.values())) for x in leaves(p)]
        assert all(x.is_cuda for x in (*crossed, *memory, *r.state.model.values()))
        assert all(torch.isfinite(x).all() for x in r.state.model.values())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.compile imports it
@pytest.mark.parametrize(
    "sets", [{"train.autocast": "false"}, {"train.autocast": "true"}, {"train.compile": "true"}], ids=str
)
def test_training_learns(sets):
    site = study.build_sites(parse(STUDY, {**sets, "train.lr": "0.3", "train.momentum": "0.9"}))["a"]
    first = site.at(0).fit(site.start)
    later = site.at(1).fit(site.start, budget=Budget(steps=60))
    assert later.loss < first.loss - 0.05 and next(iter(later.params.values())).dtype == torch.float32


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
    for augment, seed in (("none", 0), ("none", 1), *(("light", k) for k in range(8))):
        (x, y), (u, v) = (
            Patches(torch.device(place)).batch(
                [(image.to(place), label.to(place))], (16, 16, 32), np.random.default_rng(seed), augment
            )
            for place in ("cpu", "cuda")
        )
        assert torch.allclose(x, u.cpu(), atol=1e-6) and torch.equal(y, v.cpu())
    x, u = image.clone(), image.cuda()
    for f in (lambda i: blur(i, [0.5, 0.8, 1.0], torch.empty_like(i)), lambda i: contrast(i, 1.7)):
        f(x), f(u)
        assert torch.allclose(x, u.cpu(), atol=1e-4)


def test_embeddings_are_those_of_the_cpu():
    """In batches and one by one, of equal and of different sizes."""
    rng = np.random.default_rng(0)
    volumes = [rng.normal(size=s).astype(np.float32) for s in [(40, 40, 40)] * 5 + [(24, 50, 30), (3, 4, 5), (60, 60)]]
    there, here = Embedder(ps.Bundled(), "cuda", 4), Embedder(ps.Bundled(), "cpu")
    together = there(volumes)
    scale = np.abs(together).max()
    np.testing.assert_allclose(together, here(volumes), atol=2e-3 * scale)
    np.testing.assert_allclose(together, np.concatenate([there([v]) for v in volumes]), atol=2e-3 * scale)
