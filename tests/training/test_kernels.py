"""Fast convolutions and instance normalisation: weights and steps; on a GPU with triton, results and gradients."""

import pytest
import torch
from torch.nn.functional import conv3d, instance_norm, pad

from polysite.models.unet import UNet
from polysite.training import convolution, gpu_steps, normalisation
from polysite.training.convolution import LAYOUT, Blocking, taps_first, transposed, widened
from polysite.training.gpu_steps import GpuSteps
from polysite.training.tasks import CaseLoss, Outline

BLOCKINGS = [Blocking(1, 64, 64, 2), Blocking(1, 128, 32, 1, 4, 1, 1), Blocking(3, 64, 16, 2, 4, 2)]
LOSS = CaseLoss(Outline(), "dice")


def by_taps(x, matrix):
    """A convolution as the kernels compute it: a sum over 27 shifted inputs, channels last."""
    x = pad(widened(x), (1, 1, 1, 1, 1, 1)).movedim(1, -1)
    d, h, w = (s - 2 for s in x.shape[1:4])
    taps = [x[:, i : i + d, j : j + h, k : k + w] for i in range(3) for j in range(3) for k in range(3)]
    return (torch.cat(taps, -1) @ matrix).movedim(-1, 1)


@pytest.mark.parametrize("ins", [3, 4, 16])
def test_weights_are_ordered_by_tap(ins):
    """The gradient of the input is a convolution with transposed weights."""
    x, weight = torch.randn(2, ins, 4, 5, 3, requires_grad=True), torch.randn(8, ins, 3, 3, 3)
    y = conv3d(x, weight, padding=1)
    assert torch.allclose(by_taps(x, taps_first(weight, torch.float32)), y, atol=1e-4)
    dy = torch.randn_like(y)
    y.backward(dy)
    if ins > 3:
        assert torch.allclose(by_taps(dy, taps_first(transposed(weight), torch.float32)), x.grad, atol=1e-4)


def test_a_step_without_cancelled_biases_has_the_gradients_of_a_plain_one():
    """As a GPU computes it, with torch's normalisation and convolutions."""
    net = UNet(filters=(4, 8, 8)).build(dims=3, modalities=2, outputs=1, seed=1)
    x, y = torch.randn(2, 2, 8, 8, 8), (torch.rand(2, 1, 8, 8, 8) > 0.7).float()
    LOSS(net(x), y).mean().backward()
    wanted = [p.grad.clone() for p in net.parameters()]
    steps = GpuSteps(net, False, False, 0)
    steps.fuses = True
    step = gpu_steps._Step(steps, lambda x, y, w: (LOSS(steps.logits(x), y) * w).sum(), steps.weights, "")
    step._hold(x, y, 2, LAYOUT)
    step._eager()
    assert any(not p.grad.any() for p in steps.idle) and not normalisation.in_use()
    torch.testing.assert_close([p.grad for p in net.parameters()], wanted, atol=1e-6, rtol=1e-4)


gpu = pytest.mark.skipif(
    convolution.triton is None or not torch.cuda.is_available(), reason="needs triton and a GPU that torch can see"
)


def drawn(ins, outs):
    torch.manual_seed(0)
    x = torch.randn(2, ins, 6, 5, 19, device="cuda").bfloat16().contiguous(memory_format=LAYOUT)
    weight = torch.randn(outs, ins, 3, 3, 3, device="cuda").bfloat16().float().contiguous(memory_format=LAYOUT)
    dy = torch.randn(2, outs, 6, 5, 19, device="cuda").bfloat16().contiguous(memory_format=LAYOUT)
    wide, w = x.float().requires_grad_(), weight.clone().requires_grad_()
    with torch.backends.cudnn.flags(allow_tf32=False):
        y = conv3d(wide, w, padding=1)
        y.backward(dy.float())
    return x, weight, dy, y.detach(), wide.grad, w.grad


def close(got, truth, error):
    return (got.double() - truth).abs().max() < error * truth.abs().max()


@gpu
@pytest.mark.parametrize("blocking", BLOCKINGS, ids=str)
@pytest.mark.parametrize("ins", [3, 16, 32])
def test_convolutions_agree_with_float32(ins, blocking):
    x, weight, dy, y, dx, dw = drawn(ins, 16)
    assert close(convolution.launch(x, weight, blocking), y, 5e-3)
    assert close(convolution.launch_weight(x, dy, blocking._replace(columns=64, depth=4)), dw, 1e-4)
    if ins >= 16:
        assert close(convolution.launch(dy, transposed(weight), blocking), dx, 5e-3)


@gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.compile imports it
def test_a_compiled_layer_has_the_gradients_of_cudnn(monkeypatch):
    x, weight, dy, y, dx, dw = drawn(16, 16)
    listed = {(part, 16, 16, False): BLOCKINGS[0] for part in ("forward", "input", "weight")}
    monkeypatch.setattr(convolution, "BLOCKINGS", listed)
    got = torch.compile(convolution.convolve, dynamic=False)(x.requires_grad_(), weight.requires_grad_())
    got.backward(dy)
    assert got.is_contiguous(memory_format=LAYOUT) and weight.grad.dtype == torch.float32
    assert close(got.detach(), y, 5e-3) and close(x.grad, dx, 5e-3) and close(weight.grad, dw, 5e-3)


@gpu
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("shape", [(2, 16, 6, 5, 19), (3, 128, 3, 3, 1), (2, 32, 40, 40, 16), (1, 1, 4, 4, 4)], ids=str)
def test_normalisation_agrees_with_float64(shape, half):
    torch.manual_seed(0)
    dtype, error = (torch.bfloat16, 1e-2) if half else (torch.float32, 1e-5)
    x = (0.3 * torch.randn(shape, device="cuda") + 2).to(dtype).contiguous(memory_format=LAYOUT)
    dy = torch.randn(shape, device="cuda").to(dtype)
    mine, truth = x.clone().requires_grad_(), x.double().requires_grad_()
    y, wanted = normalisation.normalise(mine, 1e-5), instance_norm(truth, eps=1e-5)
    y.backward(dy)
    wanted.backward(dy.double())
    assert y.is_contiguous(memory_format=LAYOUT) and y.dtype == dtype
    assert close(y, wanted, error) and close(mine.grad, truth.grad, error)


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

    def apart():
        return sum(float((p.grad - t).pow(2).sum()) for p, t in zip(net.parameters(), wanted, strict=True)) ** 0.5

    steps = GpuSteps(net, True, False, 0)
    for _ in range(gpu_steps.PROBE):
        steps.backward(x, y, LOSS, 4)
    plain = apart()
    steps.backward(x, y, LOSS, 4)
    captured = next(iter(steps._steps.values())).run
    assert captured is not None and steps.weights[0].is_contiguous(memory_format=LAYOUT) and not steps.problem
    assert apart() < 1.5 * plain  # the error of bfloat16
    three = steps.backward(x[:3], y[:3], LOSS, 4)
    with torch.no_grad():
        assert float(three) == pytest.approx(float(LOSS(net(x[:3]), y[:3]).mean()), abs=5e-3)
