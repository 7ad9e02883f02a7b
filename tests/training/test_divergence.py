"""FedDiv with real networks: its loss against NumPy, what sites count, and whole studies of both tasks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import polysite as ps
from polysite.config import dump, parse
from polysite.data.case import Case
from polysite.data.federation import LabelRatio
from polysite.errors import ConfigError
from polysite.payload import Payload
from polysite.site import Divergence
from polysite.training.losses import ExtraLosses, divergence
from polysite.training.network import Network
from polysite.training.tasks import Classify, Exclusive, Outline
from polysite.training.torch_site import TorchSite
from studies import SHAPE, clinics

UNET, DENSE = ps.UNetSub(filters=(2, 4, 4)), ps.DenseNetSub(blocks=(2, 2), growth=4, features=8)
TRAIN = ps.Train(patch=(16, 16, 16), batch=4, device="cpu", augment="light")
SEGMENTING = ps.Study(
    algorithm=ps.FedDiv(),
    model=UNET,
    data=ps.Phantom(SHAPE, clinics("east", "west")),
    train=TRAIN,
    run=ps.Plan(rounds=5, wire=True, checkpoint_every=3),
)
CLASSIFYING = replace(
    SEGMENTING,
    model=DENSE,
    data=ps.PhantomClasses(shape=SHAPE, sites={"all": ps.Hospital(cases=48, healthy=0.33, low_grade=0.33)}),
    train=replace(TRAIN, patch=(16, 16)),
    federation=LabelRatio(delta=2.0, sites=2),
)


def pooled(mask, size):
    """Average pooling by hand: the mean of every block."""
    for axis, length in enumerate(size, start=1):
        mask = mask.reshape(*mask.shape[:axis], length, mask.shape[axis] // length, *mask.shape[axis + 1 :])
        mask = mask.mean(axis + 1)
    return mask


def by_hand(net, x, truth, focus, edges=1.0):
    """L_e in NumPy, from what the encoders say."""
    total = 0.0
    for i, encoder in enumerate(net.encoders):
        found = []
        for maps in encoder(x):
            maps, mine = maps.detach().numpy().astype(np.float64), truth[:, i].numpy()
            for j in range(maps.shape[1]):
                if mine.ndim == 1:
                    beta = np.where(mine == 1, np.exp(focus), np.exp(-focus))
                    weighted = [b * f for b, f in zip(beta, maps[:, j], strict=True)]
                else:
                    weighted = focus * np.exp(-(pooled(mine, maps.shape[2:]) ** edges)) * maps[:, j]
                found.append(np.std(weighted, axis=0).mean())
        total += np.mean(found)
    return total


def network(model, dims, outputs, train=TRAIN):
    return Network(model.build(dims=dims, modalities=2, outputs=outputs, seed=1), train)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(("focus", "edges"), [(0.6, 1.0), (2.0, 1.0), (0.6, 10.0)])
def test_the_divergence_of_a_segmentation_against_numpy(dims, focus, edges):
    """A power of the mask itself, as printed, changes nothing; one of its average does."""
    net, rng = network(UNET, dims, 3), torch.Generator().manual_seed(0)
    x = torch.randn(4, 2, *[16] * dims, generator=rng)
    truth = (torch.rand(4, 3, *[16] * dims, generator=rng) < 0.3).float()
    (logits,), more = ExtraLosses(net, [Divergence(0.7, focus, edges)])(x, truth)
    assert more.item() == pytest.approx(0.7 * by_hand(net.module, x, truth, focus, edges), rel=1e-5)
    assert torch.equal(logits, net(x)) and more.item() > 0
    _, usual = ExtraLosses(net, [Divergence(None, focus, edges)])(x, truth)
    assert usual.item() == pytest.approx(0.4 / 0.7 * more.item(), rel=1e-6)


@pytest.mark.parametrize("focus", [0.0, 1.5])
def test_the_divergence_of_a_classification_against_numpy(focus):
    net, rng = network(DENSE, 2, 3), torch.Generator().manual_seed(0)
    net.module.eval()
    x, truth = torch.randn(5, 2, 32, 32, generator=rng), torch.eye(3)[[0, 2, 1, 2, 2]]
    _, more = ExtraLosses(net, [Divergence(None, focus)])(x, truth)
    assert more.item() == pytest.approx(0.2 * by_hand(net.module, x, truth, focus), rel=1e-5)


def test_the_divergence_acts_on_encoders_and_a_lone_case_has_none():
    net, x = network(UNET, 2, 2), torch.randn(3, 2, 16, 16)
    truth = (torch.rand(3, 2, 16, 16) < 0.5).float()
    _, more = ExtraLosses(net, [Divergence(1.0, 1.0)])(x, truth)
    more.backward()
    moved = {k for k, p in net.parameters.items() if p.grad is not None and p.grad.abs().max() > 0}
    assert all(".class" in k for k in moved) and {k.split(".")[0] for k in moved} == {"stem", "encoder", "bottleneck"}
    net.module.zero_grad()
    _, none = ExtraLosses(net, [Divergence(1.0, 1.0)])(x[:1], truth[:1])
    none.backward()
    assert none.item() == 0 and all(p.grad is None or p.grad.isfinite().all() for p in net.parameters.values())
    flat = [[torch.full((4, 2, 8, 8), 3.0, requires_grad=True)]]  # all alike, and nothing labelled
    assert divergence(flat, torch.zeros(4, 1, 16, 16), Divergence(None, 1.0)).item() == 0


def cases(*labels):
    shape = labels[0].shape[1:] if labels[0].ndim > 1 else (16, 16, 16)
    image = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    return [Case("s", str(k), image, y.astype(np.uint8), (1.0,) * len(shape)) for k, y in enumerate(labels)]


def test_sites_count_cases_or_voxels_of_every_channel():
    first, second = np.zeros((2, 2, 16, 16, 16))
    first[0, :2], first[1, 8], second[0, 0, 0] = 1, 1, 1
    for task, model, given, wanted in (
        (Outline(), UNET, (first, second), [528, 256]),
        (Exclusive(), UNET, (first, second), [2 * 16**3 - 784, 528, 256]),  # the background first
        (Classify(), DENSE, np.eye(3)[[0, 2, 2, 2]], [1, 0, 3]),
    ):
        splits = {"train": cases(*given), "validation": cases(given[0])}
        site = TorchSite("s", network(model, 3, len(wanted)), splits, "xyz"[: given[0].shape[0]], TRAIN, 0, task)
        assert [site.amount(k) for k in range(len(wanted))] == wanted


def test_a_round_of_encoders_leaves_the_decoder_and_a_round_of_the_decoder_the_encoders():
    """Running statistics of the encoders stand still too, while the decoder trains."""
    net, algorithm = network(DENSE, 3, 2), ps.FedDiv()
    site = TorchSite("s", net, {"train": cases(*np.eye(2)[[0, 1, 0, 1]])}, "ab", TRAIN, 0, Classify())
    state, memory = algorithm.init(net.start, ["s"]), Payload()
    for part in ("encoder", "decoder"):
        got = algorithm.send(state, ["s"])["s"]
        before = {**memory.get("rest", {}), **got["model"]}
        reply, memory = algorithm.local(got, memory, site)
        after, names = site.fits[-1].params, set(getattr(state, part))
        assert reply["model"].keys() == names and memory["rest"].keys() == net.start.keys() - names
        changed = {k for k in after if not torch.equal(after[k], before[k])}
        assert changed and changed <= names
        assert any("running" in k for k in changed) == (part == "encoder")
        state = algorithm.merge(state, {"s": reply})


@pytest.mark.parametrize("study", [SEGMENTING, CLASSIFYING], ids=["segmentation", "classification"])
def test_a_study_trains_tells_and_resumes_to_the_same_end(study, tmp_path):
    run = ps.train(study, tmp_path / "run")
    records = run.folder.records()
    assert parse(dump(study)) == study and not any(r.refused for r in records) and run.mean > 0
    assert [bool(r.diagnostics) for r in records] == [False, True, True, True, True]
    assert [r.diagnostics["personal share of the decoders"] for r in records[1:]] == pytest.approx([0.1] * 4, abs=0.01)
    assert [bool(r.shares) for r in records] == [True, False] * 2 + [True]
    before = {p.name: p.read_bytes() for p in (tmp_path / "run" / "models").iterdir()}
    assert sum(name.startswith("last.") for name in before) == len(run.dice()) == 2  # a decoder for every hospital
    (tmp_path / "run" / "result.json").unlink()
    (tmp_path / "run" / "checkpoints" / "round-000004.safetensors").unlink()
    assert ps.resume(tmp_path / "run").dice() == run.dice()
    assert {p.name: p.read_bytes() for p in (tmp_path / "run" / "models").iterdir()} == before


def test_a_network_without_encoders_for_its_classes_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="feddiv needs a network with an encoder for every class"):
        ps.train(replace(SEGMENTING, model=ps.UNet(filters=(2, 4, 4))), tmp_path / "run")
