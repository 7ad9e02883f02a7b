"""Deep supervision: heads at coarser resolutions, their loss, and what algorithms make of them."""

import numpy as np
import pytest
import torch

import polysite as ps
from polysite import tree
from polysite.data.case import Case
from polysite.errors import ConfigError
from polysite.training.gpu_steps import GpuSteps, can_accelerate
from polysite.training.network import Network
from polysite.training.supervision import supervised
from polysite.training.tasks import CaseLoss, Exclusive, Outline
from polysite.training.torch_site import TorchSite
from quadratic import play

FILTERS = (2, 4, 4, 4)
TRAIN = ps.Train(lr=0.1, patch=(16, 16, 16), augment="none", batch=2, device="cpu")


def build(heads, outputs=1, dims=3):
    return ps.UNet(FILTERS, deep_supervision=heads).build(dims=dims, modalities=2, outputs=outputs, seed=1)


def batch(count=2, dims=3):
    drawn = torch.Generator().manual_seed(count)
    x = torch.randn(count, 2, *(16,) * dims, generator=drawn)
    return x, (torch.rand(count, 1, *(16,) * dims, generator=drawn) > 0.7).float()


@pytest.mark.parametrize("dims", [2, 3])
def test_the_main_head_is_the_network_without_the_others(dims):
    plain, deep, (x, _) = build(0, dims=dims), build(2, dims=dims), batch(dims=dims)
    main, half, quarter = deep.train()(x)
    assert torch.equal(main, plain(x)) and torch.equal(deep.eval()(x), plain.eval()(x))
    assert half.shape == (2, 1, *(8,) * dims) and quarter.shape == (2, 1, *(4,) * dims)
    names, more = (Network(net, TRAIN).start.keys() for net in (plain, deep))
    assert len(more) == len(names) + 4 and all(tree.matches(k, ["decoder.*"]) for k in more - names)


@pytest.mark.parametrize("name", ["dice", "dice_ce"])
def test_the_loss_has_the_weights_of_nnu_net(name):
    loss, (x, y) = CaseLoss(Outline(), name), batch()
    heads = build(2).train()(x)
    parts = [loss(h, t) for h, t in zip(heads, (y, y[..., 1::2, 1::2, 1::2], y[..., 2::4, 2::4, 2::4]), strict=True)]
    torch.testing.assert_close(supervised(loss, heads, y), (4 * parts[0] + 2 * parts[1] + parts[2]) / 7)
    assert torch.equal(supervised(loss, heads[:1], y), parts[0])


def test_steps_that_a_gpu_shares_have_the_gradients_of_all_heads(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    net, loss = build(2).train(), CaseLoss(Outline(), "dice")
    assert can_accelerate(net)
    expected = []
    for count in (4, 3):
        x, y = batch(count)
        net.zero_grad()
        supervised(loss, net(x), y).mean().backward()
        expected.append([p.grad.clone() for p in net.parameters()])
    assert all(g.abs().sum() > 0 for g in expected[0][-4:])
    steps = GpuSteps(net, False, True, 0)
    for count, wanted in zip((4, 3), expected, strict=True):
        steps.backward(*batch(count), loss, 4)
        for p, gradient in zip(net.parameters(), wanted, strict=True):
            if p not in steps.idle:
                torch.testing.assert_close(p.grad, gradient, atol=1e-6, rtol=1e-4)
    assert steps.compiled
    net.eval()
    assert steps.infer(batch(3)[0]).shape == (3, 1, 16, 16, 16)


def site(name, task):
    drawn = np.random.default_rng(len(name))
    shown = [drawn.normal(size=(2, 16, 16, 18)).astype(np.float32) for _ in range(3)]
    cases = [Case(name, str(k), x, (x[:1] > 0.8).astype(np.uint8)) for k, x in enumerate(shown)]
    net = Network(build(2, task.outputs(["L"])), TRAIN)
    return TorchSite(name, net, {"train": cases, "validation": cases[:1]}, ["L"], TRAIN, 0, task)


@pytest.mark.parametrize(
    ("algorithm", "task"), [(ps.FedRoD(), Outline()), (ps.FedABC(), Exclusive()), (ps.Moon(), Outline())], ids=str
)
def test_personalised_algorithms_train_all_heads(algorithm, task):
    sites = {name: site(name, task) for name in ("a", "bb")}
    start, model = sites["a"].start, play(algorithm, sites, 2).state.model
    more = [k for k in model if k.startswith("decoder.supervision.")]
    assert len(more) == 4 and not any(torch.equal(model[k], start[k]) for k in more)
    assert set(sites["a"].score(start, ["0"])) == {"0"}


def test_as_many_heads_as_the_decoder_has_coarser_levels():
    with pytest.raises(ConfigError, match=r"model\.deep_supervision = 3: a U-Net of 4 resolutions has room for 0 to 2"):
        ps.UNet(FILTERS, deep_supervision=3)
