"""Forward passes that a GPU compiles: the logits, features and gradients of plain ones."""

from functools import partial

import pytest
import torch
import torch._dynamo  # before tests patch torch.compiler, whose functions it keeps

from polysite.models.names import head_of
from polysite.models.unet import UNet
from polysite.training.gpu_passes import GpuPasses
from polysite.training.gpu_steps import GpuSteps

BATCH = 4


@pytest.fixture(autouse=True)
def no_kernels(tmp_path, monkeypatch):
    """Torch has compiled nothing here before."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.fixture
def net():
    return UNet(filters=(4, 8, 8)).build(dims=3, modalities=2, outputs=1, seed=1)


def images(count, seed=0):
    return torch.randn(count, 2, 8, 8, 8, generator=torch.Generator().manual_seed(seed))


def plain(net, x):
    """Return logits and gradients of a loss that mixes the cases of a batch."""
    net.zero_grad(set_to_none=True)
    logits = net(x)
    logits.std(0, correction=0).mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in net.named_parameters() if p.requires_grad}


def passed(net, passes, x, modules=()):
    net.zero_grad(set_to_none=True)
    (logits,), inputs, outputs = passes(x, modules)
    logits.std(0, correction=0).mean().backward()
    passes.steps.complete()
    return logits.detach(), {n: p.grad.clone() for n, p in net.named_parameters() if p.requires_grad}, inputs, outputs


def same(mine, wanted):
    torch.testing.assert_close(mine[0], wanted[0], atol=1e-5, rtol=1e-4)
    assert mine[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(mine[1][name], gradient, atol=1e-6, rtol=1e-4)


def test_passes_traced_by_the_compiler_equal_plain_ones_in_incomplete_batches_too(net, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    head = head_of(name for name, _ in net.named_modules())
    wanted = [plain(net, images(count, count)) for count in (4, 3, 2)]
    passes = GpuPasses(GpuSteps(net, False, True, 0), BATCH)
    for count, expected in zip((4, 3, 2), wanted, strict=True):
        *mine, inputs, outputs = passed(net, passes, images(count, count), [head])
        same(mine, expected)
        assert len(inputs[head][0]) == count
        torch.testing.assert_close(outputs[head][0], mine[0])
    assert passes.steps.compiled and not passes.steps.problem and passes.steps.setup_seconds > 0
    assert not passes.taps.inputs and not passes.taps.outputs  # no features are kept


def test_frozen_parameters_get_no_gradient_and_a_pass_without_gradients_is_another_kind(net, monkeypatch):
    every = plain(net, images(4))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for name, p in net.named_parameters():
        p.requires_grad_("output_block" in name)
    expected = plain(net, images(3))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # biases without effect are left out
    passes = GpuPasses(GpuSteps(net, False, True, 0), BATCH)
    same(passed(net, passes, images(3))[:2], expected)
    with torch.no_grad():
        (logits,), _, _ = passes(images(3))
    torch.testing.assert_close(logits, expected[0], atol=1e-5, rtol=1e-4)
    assert len(passes._kinds) == 2 and passes.steps.taken == 1
    for p in net.parameters():
        p.requires_grad_(True)
    same(passed(net, passes, images(4))[:2], every)


def test_short_runs_and_machines_without_a_compiler_go_on_with_plain_passes(net, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no compiler\nmany lines")

    wanted = plain(net, images(3))
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    short = GpuPasses(GpuSteps(net, False, "auto", 20), BATCH)
    for _ in range(12):
        same(passed(net, short, images(3))[:2], wanted)
    assert not short.steps.compiled
    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    long = GpuPasses(GpuSteps(net, False, "auto", 10**9), BATCH)
    for _ in range(12):
        same(passed(net, long, images(3))[:2], wanted)
    assert long.steps.problem == "RuntimeError: no compiler"
