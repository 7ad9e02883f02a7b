"""Instance normalisation in channels-last memory on a GPU, as Triton kernels; a compiler is not needed.

Torch's own becomes a batch normalisation of a reshaped tensor, which is a copy of all values in channels-last. Here,
the rows of a tile are voxels and its columns are channels. Programs write partial sums, and the next kernel adds these
up in a fixed order, so results do not depend on the order of programs. Sums are taken in float32, of differences from
the first voxel of the image, so that a large mean does not cancel the variance.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from polysite.training import convolution

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for a CPU comes without it
    triton = None

TILE = 4096  # values of a tile
PARTS = 64  # partial sums of an image, at most
WIDEST = 512  # channels
MOST = 2**31  # elements that the 32-bit places of the kernels reach
_FUSED = ContextVar("fused", default=False)


@contextmanager
def fused() -> Iterator[None]:
    """Let networks that are built for it use the kernels of this module, and convolutions those of ``convolution``."""
    token = _FUSED.set(True)
    try:
        yield
    finally:
        _FUSED.reset(token)


def in_use() -> bool:
    """Return whether the code runs inside ``fused``."""
    return _FUSED.get()


def suits(device: torch.device) -> bool:
    """Return whether steps on a device can use the kernels of this module and of ``convolution``."""
    return triton is not None and convolution.suits(device)


def applies(x: torch.Tensor) -> bool:
    """Return whether the kernels can normalise a tensor: on a GPU, in channels-last, 2^n channels."""
    channels = x.shape[1]
    return (
        triton is not None
        and x.device.type == "cuda"
        and x.ndim == 5
        and channels & (channels - 1) == 0
        and channels <= WIDEST
        and x.numel() < MOST
        and x.is_contiguous(memory_format=torch.channels_last_3d)
    )


def normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the instance normalisation of a tensor, in its precision and memory format."""
    return _Normalised.apply(x, eps)  # type: ignore[no-any-return, no-untyped-call]


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _total(sums, n, c, C: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Both sums of an image over all parts."""
        at = sums + (n * PARTS + tl.arange(0, PARTS))[:, None] * (2 * C) + c[None, :]
        return tl.sum(tl.load(at), 0), tl.sum(tl.load(at + C), 0)

    @triton.jit  # type: ignore[untyped-decorator]
    def _scale(image, sums, n, c, eps, V: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Mean of every channel, and the factor that gives it a variance of one."""
        first, second = _total(sums, n, c, C, PARTS)
        mean = first / V
        return tl.load(image + c).to(tl.float32) + mean, 1 / tl.sqrt(second / V - mean * mean + eps)

    @triton.jit  # type: ignore[untyped-decorator]
    def _moments(x, sums, V: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Partial sums of the values and of their squares."""
        part = tl.program_id(0)
        n = tl.program_id(1)
        c = tl.arange(0, C)
        image = x + n * V * C
        origin = tl.load(image + c).to(tl.float32)
        first = tl.zeros((C,), tl.float32)
        second = tl.zeros((C,), tl.float32)
        for step in range((V + PARTS * ROWS - 1) // (PARTS * ROWS)):
            row = (step * PARTS + part) * ROWS + tl.arange(0, ROWS)
            there = (row < V)[:, None]
            value = tl.load(image + row[:, None] * C + c[None, :], mask=there, other=0.0).to(tl.float32)
            value = tl.where(there, value - origin[None, :], 0.0)
            first += tl.sum(value, 0)
            second += tl.sum(value * value, 0)
        at = sums + (n * PARTS + part) * (2 * C) + c
        tl.store(at, first)
        tl.store(at + C, second)

    @triton.jit  # type: ignore[untyped-decorator]
    def _apply(x, sums, y, eps, V: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Normalised values of one tile."""
        n = tl.program_id(1)
        c = tl.arange(0, C)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        there = (row < V)[:, None]
        mean, factor = _scale(x + n * V * C, sums, n, c, eps, V, C, PARTS)
        at = n * V * C + row[:, None] * C + c[None, :]
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        tl.store(y + at, ((value - mean[None, :]) * factor[None, :]).to(y.dtype.element_ty), mask=there)

    @triton.jit  # type: ignore[untyped-decorator]
    def _moments_back(  # type: ignore[no-untyped-def]
        x, dy, sums, back, eps, V: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr
    ):
        """Partial sums of the gradient of the output, and of its product with the output."""
        part = tl.program_id(0)
        n = tl.program_id(1)
        c = tl.arange(0, C)
        mean, factor = _scale(x + n * V * C, sums, n, c, eps, V, C, PARTS)
        first = tl.zeros((C,), tl.float32)
        second = tl.zeros((C,), tl.float32)
        for step in range((V + PARTS * ROWS - 1) // (PARTS * ROWS)):
            row = (step * PARTS + part) * ROWS + tl.arange(0, ROWS)
            there = (row < V)[:, None]
            at = n * V * C + row[:, None] * C + c[None, :]
            value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
            g = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
            first += tl.sum(g, 0)
            second += tl.sum(g * (value - mean[None, :]) * factor[None, :], 0)
        at = back + (n * PARTS + part) * (2 * C) + c
        tl.store(at, first)
        tl.store(at + C, second)

    @triton.jit  # type: ignore[untyped-decorator]
    def _apply_back(  # type: ignore[no-untyped-def]
        x, dy, sums, back, dx, eps, V: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr
    ):
        """Gradients of the input of one tile."""
        n = tl.program_id(1)
        c = tl.arange(0, C)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        there = (row < V)[:, None]
        mean, factor = _scale(x + n * V * C, sums, n, c, eps, V, C, PARTS)
        first, second = _total(back, n, c, C, PARTS)
        at = n * V * C + row[:, None] * C + c[None, :]
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        g = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
        out = (value - mean[None, :]) * factor[None, :]
        g = factor[None, :] * (g - (first / V)[None, :] - out * (second / V)[None, :])
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=there)


class _Normalised(torch.autograd.Function):
    """Instance normalisation whose backward pass reads its input again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float) -> torch.Tensor:
        y = torch.empty_like(x)
        sizes, parts, tiles = _plan(x)
        sums = torch.empty((len(x), parts[0], 2, x.shape[1]), dtype=torch.float32, device=x.device)
        _moments[parts](x, sums, **sizes)
        _apply[tiles](x, sums, y, eps, **sizes)
        ctx.eps = eps
        ctx.save_for_backward(x, sums)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, sums = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last_3d)
        dx, back = torch.empty_like(x), torch.empty_like(sums)
        sizes, parts, tiles = _plan(x)
        _moments_back[parts](x, dy, sums, back, ctx.eps, **sizes)
        _apply_back[tiles](x, dy, sums, back, dx, ctx.eps, **sizes)
        return dx, None


def _plan(x: torch.Tensor) -> tuple[dict[str, int], tuple[int, int], tuple[int, int]]:
    """Return the constants of the kernels, and the grids of those that sum and of those that apply."""
    channels, voxels = x.shape[1], x[0, 0].numel()
    rows = TILE // channels
    tiles = -(-voxels // rows)
    parts = min(PARTS, 1 << (tiles - 1).bit_length())
    return {"V": voxels, "C": channels, "ROWS": rows, "PARTS": parts}, (parts, len(x)), (tiles, len(x))
