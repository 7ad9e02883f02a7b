"""Fast 3x3x3 convolutions of few channels on a GPU, as Triton kernels: stride 1, padding 1, no bias, channels last.

The finest resolutions of a U-Net have most of its voxels but only 16 or 32 channels. The kernels here are exactly as
wide as the output. A row of a tile is a voxel; a column is an input channel at one of 27 taps.

- ``_gather``: a box of output voxels times all taps.
- ``_march``: a box in a plane moves along the first axis; an input plane is loaded for 9 taps and used for three output
  planes.
- ``_correlate``: gradient of the weights, as partial sums over boxes and runs of planes. The caller adds these up, so
  that results do not depend on the order of programs.

``BLOCKINGS`` lists the shapes at which a kernel is faster than cuDNN, by measurement (``bench/convolution.py``). The
forward pass and the two gradients are chosen apart; cuDNN computes the others.
"""

from typing import Any, Literal, NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for a CPU comes without it
    triton = None

Part = Literal["forward", "input", "weight"]
LAYOUT = torch.channels_last_3d
MOST = 2**31  # elements that the 32-bit places of the kernels reach
LARGE = 2**20  # voxels of a batch: few boxes of a smaller one would leave multiprocessors idle


class Blocking(NamedTuple):
    """How a convolution is divided among programs.

    Args:
        planes: 1: columns are 27 taps (``_gather``). 3: columns are 9 taps of a plane, used for three planes of the
            output (``_march``); the gradient of the weights has both forms.
        voxels: Rows of a tile; a power of two.
        columns: Taps times input channels of a tile; a power of two.
        depth: Planes of a box in ``_gather``; in the other kernels, planes that a program goes through.
        warps: Warps of a program.
        stages: Tiles in flight; these bypass the L1 cache. 1 loads through it.
        ahead: 1: ``_gather`` keeps the next tile in registers.
    """

    planes: int
    voxels: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3
    ahead: int = 0


CAPABILITY = 9  # major number of the GPUs that the blockings were measured on; others have less shared memory
# (part, channels of x, channels of y, LARGE) -> blocking that is faster than cuDNN, by measurement on an H200
BLOCKINGS: dict[tuple[Part, int, int, bool], Blocking] = {
    ("forward", 3, 16, False): Blocking(1, 128, 128, 1, 4, 2, 0),  # 0.27 of cuDNN's time
    ("weight", 3, 16, False): Blocking(3, 128, 64, 24, 4, 3, 0),  # 0.26 of cuDNN's time
    ("forward", 16, 16, False): Blocking(3, 64, 16, 12, 4, 2, 0),  # 0.43 of cuDNN's time
    ("input", 16, 16, False): Blocking(3, 64, 16, 12, 4, 2, 0),  # 0.39 of cuDNN's time
    ("weight", 16, 16, False): Blocking(3, 128, 64, 24, 4, 3, 0),  # 0.40 of cuDNN's time
    ("forward", 32, 16, False): Blocking(3, 64, 32, 12, 4, 2, 0),  # 0.87 of cuDNN's time
    ("input", 32, 16, False): Blocking(3, 64, 16, 12, 4, 2, 0),  # 0.42 of cuDNN's time
    ("weight", 32, 16, False): Blocking(3, 128, 64, 24, 4, 3, 0),  # 0.33 of cuDNN's time
    ("forward", 32, 32, False): Blocking(1, 64, 64, 1, 4, 4, 0),  # 0.93 of cuDNN's time
    ("input", 32, 32, False): Blocking(1, 64, 64, 1, 4, 4, 0),  # 0.84 of cuDNN's time
    ("weight", 32, 32, False): Blocking(3, 128, 64, 12, 4, 3, 0),  # 0.44 of cuDNN's time
    ("forward", 64, 32, False): Blocking(1, 128, 64, 1, 4, 3, 0),  # 0.91 of cuDNN's time
    ("weight", 64, 32, False): Blocking(3, 128, 64, 12, 4, 3, 0),  # 0.84 of cuDNN's time
    ("forward", 4, 32, True): Blocking(1, 128, 128, 1, 4, 2, 0),  # 0.31 of cuDNN's time
    ("weight", 4, 32, True): Blocking(3, 128, 64, 128, 4, 3, 0),  # 0.28 of cuDNN's time
    ("weight", 32, 32, True): Blocking(3, 128, 64, 128, 4, 3, 0),  # 0.54 of cuDNN's time
    ("weight", 64, 32, True): Blocking(3, 128, 64, 128, 4, 3, 0),  # 0.62 of cuDNN's time
}


def suits(device: torch.device) -> bool:
    """Return whether a device is a GPU of the kind that the blockings were measured on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == CAPABILITY


def choices(x: torch.Tensor, weight: torch.Tensor) -> list[list[int]]:
    """Return the blockings for the forward pass and the gradients of input and weights; empty where cuDNN is faster."""
    large = x.shape[0] * x.shape[2] * x.shape[3] * x.shape[4] >= LARGE
    ins, outs = weight.shape[1], weight.shape[0]
    parts: tuple[Part, ...] = ("forward", "input", "weight")
    return [list(BLOCKINGS.get((part, ins, outs, large), ())) for part in parts]


def applies(layer: torch.nn.Module, x: torch.Tensor) -> bool:
    """Return whether a kernel of this module can compute a layer in training, and a part of it faster than cuDNN."""
    if triton is None or not BLOCKINGS or not isinstance(layer, torch.nn.Conv3d) or x.device.type != "cuda":
        return False
    if layer.kernel_size != (3, 3, 3) or layer.stride != (1, 1, 1) or layer.padding != (1, 1, 1):
        return False
    if layer.groups != 1 or layer.dilation != (1, 1, 1) or not torch.is_grad_enabled():
        return False
    widest = max(padded(layer.in_channels), layer.out_channels)
    if x.shape[0] * x.shape[2] * x.shape[3] * x.shape[4] * widest >= MOST:
        return False
    return torch.is_autocast_enabled("cuda") and any(choices(x, layer.weight))


def taps_first(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return weights (out, in, 3, 3, 3) as a matrix of (tap, padded input channel) by output channel."""
    outs, ins = weight.shape[:2]
    first = weight.to(dtype).permute(2, 3, 4, 1, 0).reshape(27, ins, outs)
    more = padded(ins) - ins
    return (torch.nn.functional.pad(first, (0, 0, 0, more)) if more else first).reshape(-1, outs).contiguous()


def transposed(weight: torch.Tensor) -> torch.Tensor:
    """Return the weights of the convolution that computes the gradient of the input."""
    return weight.flip(2, 3, 4).transpose(0, 1)


def widened(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in channels-last, padded with channels of zeros up to a power of two."""
    more = padded(x.shape[1]) - x.shape[1]
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 0, 0, more)) if more else x
    return x.contiguous(memory_format=LAYOUT)


def padded(channels: int) -> int:
    """Return the next power of two."""
    return 1 << (channels - 1).bit_length()


def box(blocking: Blocking, height: int, width: int, deep: int = 1) -> tuple[int, int]:
    """Return the height and width of a box of output voxels that has ``deep`` planes."""
    wide = min(16, padded(width), blocking.voxels // deep)
    return blocking.voxels // deep // wide, wide


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _plane_bits(py, px, H: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
        """Bit 3 * ky + kx: the tap (ky, kx) of a voxel is within the plane."""
        line = (px > 0).to(tl.int32) | 2 | ((px < W - 1).to(tl.int32) << 2)
        bits = tl.where(py > 0, line, 0) | (line << 3) | tl.where(py < H - 1, line << 6, 0)
        return tl.where((py < H) & (px < W), bits, 0)

    @triton.jit  # type: ignore[untyped-decorator]
    def _tile(x, row, bits, k, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, TAPS: tl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip
        """Pointers to the inputs of voxels (rows) at taps and channels (columns), and which of them exist."""
        tap = k // C
        c = k % C
        flat = (tap // 3 % 3 - 1) * W + (tap % 3 - 1)
        if TAPS == 27:
            flat += (tap // 9 - 1) * (H * W)
        there = ((bits[:, None] >> tap[None, :]) & 1) != 0
        if TAPS * C % BK != 0:
            there = there & (tap < TAPS)[None, :]
        return x + row[:, None] * C + (flat * C + c)[None, :], there

    @triton.jit  # type: ignore[untyped-decorator]
    def _gather(  # type: ignore[no-untyped-def]
        x, w, y,
        D: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CO: tl.constexpr,
        BD: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr,
    ):  # fmt: skip
        """Output of one box: for every tile of columns, gather the inputs and multiply them with the weights."""
        NW: tl.constexpr = (W + BW - 1) // BW
        NH: tl.constexpr = (H + BH - 1) // BH
        ND: tl.constexpr = (D + BD - 1) // BD
        STEPS: tl.constexpr = (27 * C + BK - 1) // BK
        program = tl.program_id(0)
        m = tl.arange(0, BD * BH * BW)
        px = program % NW * BW + m % BW
        py = program // NW % NH * BH + m // BW % BH
        pz = program // (NW * NH) % ND * BD + m // (BW * BH)
        row = ((program // (NW * NH * ND) * D + pz) * H + py) * W + px
        bits = _plane_bits(py, px, H, W)
        bits = tl.where(pz > 0, bits, 0) | (bits << 9) | tl.where(pz < D - 1, bits << 18, 0)
        bits = tl.where(pz < D, bits, 0)
        column = tl.arange(0, BK)
        out = tl.arange(0, CO)
        total = tl.zeros((BD * BH * BW, CO), tl.float32)
        if AHEAD:
            at, there = _tile(x, row, bits, column, H, W, C, BK, 27)
            a = tl.load(at, mask=there, other=0.0)
            for step in range(STEPS):
                k = step * BK + column
                b = tl.load(w + k[:, None] * CO + out[None, :], mask=(k < 27 * C)[:, None], other=0.0)
                at, there = _tile(x, row, bits, tl.minimum(step + 1, STEPS - 1) * BK + column, H, W, C, BK, 27)
                following = tl.load(at, mask=there & (step + 1 < STEPS), other=0.0)
                total = tl.dot(a, b, total)
                a = following
        else:
            for step in range(STEPS):
                k = step * BK + column
                at, there = _tile(x, row, bits, k, H, W, C, BK, 27)
                a = tl.load(at, mask=there, other=0.0)
                b = tl.load(w + k[:, None] * CO + out[None, :], mask=(k < 27 * C)[:, None], other=0.0)
                total = tl.dot(a, b, total)
        inside = (pz < D) & (py < H) & (px < W)
        tl.store(y + row[:, None] * CO + out[None, :], total.to(y.dtype.element_ty), mask=inside[:, None])

    @triton.jit  # type: ignore[untyped-decorator]
    def _march(  # type: ignore[no-untyped-def]
        x, w, y,
        D: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CO: tl.constexpr,
        BD: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BK: tl.constexpr,
    ):  # fmt: skip
        """Output of a box in BD planes: every input plane adds to the output planes before, at and after it."""
        NW: tl.constexpr = (W + BW - 1) // BW
        NH: tl.constexpr = (H + BH - 1) // BH
        ND: tl.constexpr = (D + BD - 1) // BD
        STEPS: tl.constexpr = (9 * C + BK - 1) // BK
        program = tl.program_id(0)
        m = tl.arange(0, BH * BW)
        px = program % NW * BW + m % BW
        py = program // NW % NH * BH + m // BW
        first = program // (NW * NH) % ND * BD
        plane = program // (NW * NH * ND) * D
        inside = (py < H) & (px < W)
        bits = _plane_bits(py, px, H, W)
        row = py * W + px
        column = tl.arange(0, BK)
        out = tl.arange(0, CO)
        before = tl.zeros((BH * BW, CO), tl.float32)
        here = tl.zeros((BH * BW, CO), tl.float32)
        weights = ()
        for step in tl.static_range(STEPS):
            k = step * BK + column
            for kz in tl.static_range(3):
                of = w + (kz * 9 * C + k[:, None]) * CO + out[None, :]
                weights = weights + (tl.load(of, mask=(k < 9 * C)[:, None], other=0.0),)  # type: ignore[assignment] # noqa: RUF005
        for i in range(BD + 2):
            z = first + i - 1
            after = tl.zeros((BH * BW, CO), tl.float32)
            within = (z >= 0) & (z < D)
            for step in tl.static_range(STEPS):
                k = step * BK + column
                at, there = _tile(x, (plane + z) * (H * W) + row, bits, k, H, W, C, BK, 9)
                a = tl.load(at, mask=there & within, other=0.0)
                after = tl.dot(a, weights[step * 3], after)
                here = tl.dot(a, weights[step * 3 + 1], here)
                before = tl.dot(a, weights[step * 3 + 2], before)
            done = y + ((plane + z - 1) * (H * W) + row)[:, None] * CO + out[None, :]
            complete = inside & (z > first) & (z <= D)
            tl.store(done, before.to(y.dtype.element_ty), mask=complete[:, None])
            before = here
            here = after

    @triton.jit  # type: ignore[untyped-decorator]
    def _correlate(  # type: ignore[no-untyped-def]
        x, dy, sums,
        D: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CO: tl.constexpr,
        BD: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BK: tl.constexpr, PLANES: tl.constexpr,
    ):  # fmt: skip
        """Sums over a box in BD planes of inputs at some taps and channels times gradients of the output.

        With PLANES = 3 a column is one of 9 taps in a plane, which is multiplied with three planes of the gradient.
        """
        NW: tl.constexpr = (W + BW - 1) // BW
        NH: tl.constexpr = (H + BH - 1) // BH
        ND: tl.constexpr = (D + BD - 1) // BD
        TAPS: tl.constexpr = 27 // PLANES
        group = tl.program_id(0)
        program = tl.program_id(1)
        m = tl.arange(0, BH * BW)
        px = program % NW * BW + m % BW
        py = program // NW % NH * BH + m // BW
        first = program // (NW * NH) % ND * BD
        plane = program // (NW * NH * ND) * D
        inside = (py < H) & (px < W)
        k = group * BK + tl.arange(0, BK)
        out = tl.arange(0, CO)
        bits = _plane_bits(py, px, H, W)
        if PLANES == 1:
            bits = bits | (bits << 9) | (bits << 18)
        row = py * W + px
        total = tl.zeros((BK, CO), tl.float32)
        if PLANES == 3:
            before = tl.zeros((BK, CO), tl.float32)
            after = tl.zeros((BK, CO), tl.float32)
        for i in range(BD):
            z = first + i
            at, there = _tile(x, (plane + z) * (H * W) + row, bits, k, H, W, C, BK, TAPS)
            if PLANES == 1:
                source = z + k // C // 9 - 1
                there = there & ((source >= 0) & (source < D))[None, :]
            else:
                there = there & (z < D)
            a = tl.trans(tl.load(at, mask=there, other=0.0))
            g = dy + ((plane + z) * (H * W) + row)[:, None] * CO + out[None, :]
            total = tl.dot(a, tl.load(g, mask=(inside & (z < D))[:, None], other=0.0), total)
            if PLANES == 3:  # tap kz of the output plane z - kz + 1
                late = tl.load(g + H * W * CO, mask=(inside & (z + 1 < D))[:, None], other=0.0)
                after = tl.dot(a, late, after)
                early = tl.load(g - H * W * CO, mask=(inside & (z > 0) & (z < D))[:, None], other=0.0)
                before = tl.dot(a, early, before)
        at = sums + (program * (27 * C) + k[:, None]) * CO + out[None, :]
        fits = (k < TAPS * C)[:, None]
        if PLANES == 3:
            tl.store(at, after, mask=fits)
            tl.store(at + 9 * C * CO, total, mask=fits)
            tl.store(at + 18 * C * CO, before, mask=fits)
        else:
            tl.store(at, total, mask=fits)


def forward_plan(blocking: Blocking, x: torch.Size, outs: int) -> tuple[Any, tuple[int, ...], dict[str, int]]:
    """Return the kernel, grid and constants for an input of shape ``x``, whose channels are a power of two."""
    n, c, d, h, w = x
    march = blocking.planes == 3
    bh, bw = box(blocking, h, w, 1 if march else blocking.depth)
    sizes = {"D": d, "H": h, "W": w, "C": c, "CO": outs, "BD": blocking.depth, "BH": bh, "BW": bw}
    sizes |= {"BK": blocking.columns} if march else {"BK": blocking.columns, "AHEAD": blocking.ahead}
    grid = (n * -(-d // blocking.depth) * -(-h // bh) * -(-w // bw),)
    return _march if march else _gather, grid, sizes | {"num_warps": blocking.warps, "num_stages": blocking.stages}


def weight_plan(blocking: Blocking, x: torch.Size, outs: int) -> tuple[Any, tuple[int, ...], dict[str, int]]:
    """Return the kernel, grid and constants for the gradient of the weights; the grid is (groups of columns, sums)."""
    n, c, d, h, w = x
    bh, bw = box(blocking, h, w)
    sizes = {"D": d, "H": h, "W": w, "C": c, "CO": outs, "BD": blocking.depth, "BH": bh, "BW": bw}
    sizes |= {"BK": blocking.columns, "PLANES": blocking.planes}
    grid = (
        -(-(27 // blocking.planes * c) // blocking.columns),
        n * -(-d // blocking.depth) * -(-h // bh) * -(-w // bw),
    )
    return _correlate, grid, sizes | {"num_warps": blocking.warps, "num_stages": blocking.stages}


def launch(x: torch.Tensor, weight: torch.Tensor, blocking: Blocking, *wrapped: Any) -> torch.Tensor:
    """Return a convolution in the precision of ``x``.

    Args:
        x: Input.
        weight: Weights (out, in, 3, 3, 3).
        blocking: How to divide the work.
        wrapped: ``_gather`` and ``_march`` for a compiler.
    """
    x, matrix = widened(x), taps_first(weight, x.dtype)
    y = torch.empty((len(x), matrix.shape[1], *x.shape[2:]), dtype=x.dtype, device=x.device, memory_format=LAYOUT)
    kernel, grid, constants = forward_plan(blocking, x.shape, matrix.shape[1])
    (wrapped[blocking.planes // 3] if wrapped else kernel)[grid](x, matrix, y, **constants)
    return y


def launch_weight(x: torch.Tensor, dy: torch.Tensor, blocking: Blocking, *wrapped: Any) -> torch.Tensor:
    """Return the gradient of the weights (out, in, 3, 3, 3) in float32, given input and gradient of the output."""
    ins, outs = x.shape[1], dy.shape[1]
    x, dy = widened(x), dy.contiguous(memory_format=LAYOUT)
    kernel, grid, constants = weight_plan(blocking, x.shape, outs)
    sums = torch.empty((grid[1], 27, x.shape[1], outs), dtype=torch.float32, device=x.device)
    (wrapped[0] if wrapped else kernel)[grid](x, dy, sums, **constants)
    return sums.sum(0)[:, :ins].reshape(3, 3, 3, ins, outs).permute(4, 3, 0, 1, 2)


def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the convolution of ``x`` in bfloat16; every part by the faster of the kernels here and cuDNN."""
    forward, of_input, of_weight = choices(x, weight)
    return _convolve(x.to(torch.bfloat16), weight, forward, of_input, of_weight)  # type: ignore[no-any-return]


if triton is not None:
    from torch.library import triton_op, wrap_triton  # a compiler looks for wrap_triton(name) in the operators

    @triton_op("polysite::convolve", mutates_args={})
    def _convolve(
        x: torch.Tensor, weight: torch.Tensor, forward: list[int], of_input: list[int], of_weight: list[int]
    ) -> torch.Tensor:
        if forward:
            return launch(x, weight, Blocking(*forward), wrap_triton(_gather), wrap_triton(_march))
        return torch.ops.aten.convolution(  # type: ignore[no-any-return]
            x, weight.to(x.dtype), None, [1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1
        )

    @triton_op("polysite::convolve_input", mutates_args={})
    def _convolve_input(dy: torch.Tensor, weight: torch.Tensor, blocking: list[int]) -> torch.Tensor:
        return launch(dy, transposed(weight), Blocking(*blocking), wrap_triton(_gather), wrap_triton(_march))

    @triton_op("polysite::convolve_weight", mutates_args={})
    def _convolve_weight(x: torch.Tensor, dy: torch.Tensor, blocking: list[int]) -> torch.Tensor:
        dw = launch_weight(x, dy, Blocking(*blocking), wrap_triton(_correlate))
        return dw.contiguous(memory_format=LAYOUT)  # as the weights, so that an optimiser can fuse its updates

    def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, weight, _, ctx.of_input, ctx.of_weight = inputs
        ctx.save_for_backward(x, weight)

    def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad[:2]
        left = [for_x and not ctx.of_input, for_weight and not ctx.of_weight, False]
        dx = dw = None
        if any(left):
            dx, dw, _ = torch.ops.aten.convolution_backward(
                dy, x, weight.to(x.dtype), None, [1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1, left
            )
            dw = None if dw is None else dw.to(weight.dtype)
        if for_x and ctx.of_input:
            dx = _convolve_input(dy, weight, ctx.of_input)
        if for_weight and ctx.of_weight:
            dw = _convolve_weight(x, dy, ctx.of_weight).to(weight.dtype)
        return dx, dw, None, None, None

    _convolve.register_autograd(_gradients, setup_context=_remember)
