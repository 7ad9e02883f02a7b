"""The weights and layouts of the fast convolutions; on a GPU with triton, their results and gradients."""

import pytest
import torch
from torch.nn.functional import conv3d, pad

from polysite.training import convolution
from polysite.training.convolution import LAYOUT, Blocking, taps_first, transposed, widened

BLOCKINGS = [Blocking(1, 64, 64, 2), Blocking(1, 128, 32, 1, 4, 1, 1), Blocking(3, 64, 16, 2, 4, 2)]


def by_taps(x, matrix):
    """A convolution as the kernels compute it: a sum over 27 shifted inputs, channels last."""
    x = pad(widened(x), (1, 1, 1, 1, 1, 1)).movedim(1, -1)
    d, h, w = (s - 2 for s in x.shape[1:4])
    taps = [x[:, i : i + d, j : j + h, k : k + w] for i in range(3) for j in range(3) for k in range(3)]
    return (torch.cat(taps, -1) @ matrix).movedim(-1, 1)


@pytest.mark.parametrize("ins", [3, 16])
def test_weights_are_ordered_by_tap(ins):
    x, weight = torch.randn(2, ins, 4, 5, 3), torch.randn(8, ins, 3, 3, 3)
    got = by_taps(x, taps_first(weight, torch.float32))
    assert torch.allclose(got, conv3d(x, weight, padding=1), atol=1e-4)


def test_gradient_of_the_input_is_a_convolution_with_transposed_weights():
    x, weight = torch.randn(1, 4, 3, 5, 4, requires_grad=True), torch.randn(8, 4, 3, 3, 3)
    y = conv3d(x, weight, padding=1)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert torch.allclose(by_taps(dy, taps_first(transposed(weight), torch.float32)), x.grad, atol=1e-4)


def test_only_listed_layers_on_a_gpu_change():
    layer, x = torch.nn.Conv3d(16, 16, 3, padding=1), torch.zeros(1, 16, 4, 4, 4)
    assert not convolution.applies(layer, x)
    assert not convolution.applies(torch.nn.Conv3d(16, 16, 3, padding=1, stride=2), x)


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
    return (got.float() - truth).abs().max() < error * truth.abs().max()


@gpu
@pytest.mark.parametrize("blocking", BLOCKINGS, ids=str)
@pytest.mark.parametrize("ins", [3, 16, 32])
def test_kernels_agree_with_float32(ins, blocking):
    x, weight, dy, y, dx, dw = drawn(ins, 16)
    assert close(convolution.launch(x, weight, blocking), y, 5e-3)
    assert close(convolution.launch_weight(x, dy, blocking._replace(columns=64, depth=4)), dw, 1e-4)
    if ins >= 16:
        assert close(convolution.launch(dy, transposed(weight), blocking), dx, 5e-3)


@gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.compile imports it
@pytest.mark.parametrize("listed", [("forward",), ("input",), ("weight",), ("forward", "input", "weight")], ids=str)
def test_a_compiled_layer_has_the_gradients_of_cudnn(listed, monkeypatch):
    x, weight, dy, y, dx, dw = drawn(16, 16)
    monkeypatch.setattr(convolution, "BLOCKINGS", {(part, 16, 16, False): BLOCKINGS[0] for part in listed})
    x.requires_grad_()
    weight.requires_grad_()
    got = torch.compile(convolution.convolve, dynamic=False)(x, weight)
    got.backward(dy)
    assert got.is_contiguous(memory_format=LAYOUT) and weight.grad.dtype == torch.float32
    assert close(got.detach(), y, 5e-3) and close(x.grad, dx, 5e-3) and close(weight.grad, dw, 5e-3)
