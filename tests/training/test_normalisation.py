"""Instance normalisation in channels-last: its results and gradients on a GPU with triton, and those of steps."""

import pytest
import torch
from torch.nn.functional import instance_norm

from polysite.models.unet import UNet
from polysite.training import convolution, gpu_steps, normalisation
from polysite.training.gpu_steps import GpuSteps
from polysite.training.tasks import CaseLoss, Outline

LAYOUT = torch.channels_last_3d
LOSS = CaseLoss(Outline(), "dice")


def test_fused_is_left_also_after_an_error():
    with pytest.raises(ValueError), normalisation.fused():
        assert normalisation.in_use()
        raise ValueError
    assert not normalisation.in_use()


def test_a_step_without_cancelled_biases_has_the_gradients_of_a_plain_one():
    """As a GPU computes it, with torch's normalisation."""
    net = UNet(filters=(4, 8, 8)).build(dims=3, modalities=2, outputs=1, seed=1)
    x, y = torch.randn(2, 2, 8, 8, 8), (torch.rand(2, 1, 8, 8, 8) > 0.7).float()
    LOSS(net(x), y).mean().backward()
    wanted = [p.grad.clone() for p in net.parameters()]
    steps = GpuSteps(net, False, False, 0)
    steps.fuses = True
    step = gpu_steps._Step(steps, lambda x, y, w: (LOSS(steps.logits(x), y) * w).sum(), steps.weights, "")
    step._hold(x, y, 2, LAYOUT)
    step._eager()
    assert any(not p.grad.any() for p in steps.idle)
    for p, truth in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, truth, atol=1e-6, rtol=1e-4)


def test_torch_normalises_what_is_not_on_a_gpu():
    assert not normalisation.applies(torch.zeros(2, 8, 4, 4, 4).contiguous(memory_format=LAYOUT))


gpu = pytest.mark.skipif(
    normalisation.triton is None or not torch.cuda.is_available(), reason="needs triton and a GPU that torch can see"
)


@gpu
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("shape", [(2, 16, 6, 5, 19), (3, 128, 3, 3, 1), (2, 32, 40, 40, 16), (1, 1, 4, 4, 4)], ids=str)
def test_kernels_agree_with_float64(shape, half):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if half else torch.float32
    x = (0.3 * torch.randn(shape, device="cuda") + 2).to(dtype).contiguous(memory_format=LAYOUT)
    dy = torch.randn(shape, device="cuda").to(dtype)
    mine, truth = x.clone().requires_grad_(), x.double().requires_grad_()
    y, wanted = normalisation.normalise(mine, 1e-5), instance_norm(truth, eps=1e-5)
    y.backward(dy)
    wanted.backward(dy.double())
    error = 1e-2 if half else 1e-5
    assert y.is_contiguous(memory_format=LAYOUT) and y.dtype == dtype
    assert (y - wanted).abs().max() < error * wanted.abs().max()
    assert (mine.grad - truth.grad).abs().max() < error * truth.grad.abs().max()


@gpu
def test_only_tensors_in_channels_last_with_a_power_of_two_of_channels():
    x = torch.zeros(2, 8, 4, 4, 4, device="cuda")
    assert normalisation.applies(x.contiguous(memory_format=LAYOUT)) and not normalisation.applies(x)
    for shape in (2, 6, 4, 4, 4), (2, 1024, 2, 2, 2):
        assert not normalisation.applies(torch.zeros(shape, device="cuda").contiguous(memory_format=LAYOUT))


@gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or not convolution.suits(torch.device("cuda")), reason="needs a GPU of this kind"
)
def test_a_captured_step_has_the_gradients_of_float32():
    net = UNet(filters=(16, 32, 64)).build(dims=3, modalities=3, outputs=1, seed=1).cuda()
    x, y = torch.randn(4, 3, 32, 32, 16, device="cuda"), (torch.rand(4, 1, 32, 32, 16, device="cuda") > 0.7).float()
    with torch.backends.cudnn.flags(allow_tf32=False):
        LOSS(net(x), y).mean().backward()
    wanted = [p.grad.clone() for p in net.parameters()]
    steps = GpuSteps(net, True, False, 0)
    for _ in range(gpu_steps.PROBE):
        steps.backward(x, y, LOSS, 4)
    plain = [p.grad.clone() for p in net.parameters()]
    steps.backward(x, y, LOSS, 4)
    captured = next(iter(steps._steps.values())).run
    assert captured is not None and steps.weights[0].is_contiguous(memory_format=LAYOUT) and not steps.problem

    def apart(gradients):
        return sum(float((g - t).pow(2).sum()) for g, t in zip(gradients, wanted, strict=True)) ** 0.5

    assert apart([p.grad for p in net.parameters()]) < 1.5 * apart(plain)  # the error of bfloat16
    three = steps.backward(x[:3], y[:3], LOSS, 4)
    with torch.no_grad():
        assert float(three) == pytest.approx(float(LOSS(net(x[:3]), y[:3]).mean()), abs=5e-3)
