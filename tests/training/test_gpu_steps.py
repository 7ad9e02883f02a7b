"""Steps that a GPU shares between sites: the same gradients as plain ones, whatever the number of cases."""

import weakref
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo  # before tests patch torch.compiler, whose functions it keeps

from polysite.models.densenet import DenseNet
from polysite.models.unet import UNet
from polysite.training import gpu_steps
from polysite.training.gpu_steps import GpuSteps, can_accelerate
from polysite.training.tasks import CaseLoss, Outline

LOSS = CaseLoss(Outline(), "dice")


@pytest.fixture(autouse=True)
def no_kernels(tmp_path, monkeypatch):
    """Torch has compiled nothing here before."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.fixture
def net():
    return UNet(filters=(4, 8, 8)).build(dims=3, modalities=2, outputs=1, seed=1)


@pytest.fixture
def compiled(monkeypatch):
    """What torch is asked to compile, and leaves as it is."""
    found = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: found.append(function) or function)
    return found


def batch(count, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, 8, 8, 8, generator=drawn)
    return x, (torch.rand(count, 1, 8, 8, 8, generator=drawn) > 0.7).float()


def gradients(net):
    return [p.grad.clone() for p in net.parameters()]


def plain(net, x, y):
    net.zero_grad(set_to_none=True)
    loss = LOSS(net(x), y).mean()
    loss.backward()
    return loss.detach(), gradients(net)


def take(steps, times, loss=LOSS):
    for _ in range(times):
        steps.backward(*batch(2), loss, 2)


def close(net, wanted):
    for mine, theirs in zip(gradients(net), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)


@pytest.mark.usefixtures("compiled")
def test_compiled_steps_have_the_gradients_of_plain_ones_also_of_incomplete_batches(net, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    expected = [plain(net, *batch(count, seed)) for seed, count in enumerate((4, 3, 4, 1))]
    steps = GpuSteps(net, False, True, 0)
    for seed, (count, (loss, wanted)) in enumerate(zip((4, 3, 4, 1), expected, strict=True)):
        assert steps.backward(*batch(count, seed), LOSS, 4) == pytest.approx(float(loss), abs=1e-6)
        close(net, wanted)
    assert steps.compiled and len(steps._steps) == 2
    assert all(steps.mark(step.kind).exists() for step in steps._steps.values())
    assert len(steps.idle) == 10 and all(p.grad is zero for p, zero in steps.idle.items())


def pays(net, expected, taken=8, all_taken=8, half=False):
    """Whether a step of 0.1 s is compiled."""
    steps = GpuSteps(net, half, "auto", expected)
    steps.taken, steps.counts["kind"] = all_taken, taken
    return steps.pays(0.1, "kind")


def test_a_run_compiles_if_the_steps_that_are_left_save_more_than_compiling_takes(net):
    enough = round(gpu_steps.COMPILING / gpu_steps.GAIN / 0.1)  # steps that save as much as compiling takes
    assert pays(net, enough + 9) and not pays(net, enough + 7)
    assert pays(net, 4 * enough + 33, 8, 32) and not pays(net, 4 * enough + 31, 8, 32)  # a quarter of the steps is such
    GpuSteps(net, False, "auto", 0).mark("kind").touch()
    assert pays(net, enough // 4)
    assert not pays(net, enough // 4, half=True)  # in the other precision nothing is on disk
    assert GpuSteps(net, False, True, 0).pays(0.0, "kind") and not GpuSteps(net, False, False, 10**9).pays(1.0, "kind")


def test_a_later_run_compiles_a_step_that_earlier_runs_did_not_have(net, compiled, monkeypatch):
    monkeypatch.setattr(gpu_steps, "GAIN", 1e9)  # every step that is left pays
    steps, other = GpuSteps(net, False, "auto", 12, later=12), CaseLoss(Outline(), "dice_ce")
    take(steps, 12)
    assert len(compiled) == 1
    steps.begin(12, 0)
    take(steps, 8, other)
    assert len(compiled) == 1
    take(steps, 1, other)
    assert len(compiled) == 2 and steps.counts.total() == steps.taken == 21


def test_what_did_not_pay_in_one_run_is_reconsidered_in_the_next(net, compiled):
    steps = GpuSteps(net, False, "auto", 12)
    take(steps, 12)
    steps.begin(10**9, 0)
    take(steps, 8)
    assert not compiled
    take(steps, 1)
    assert len(compiled) == 1


@pytest.mark.usefixtures("compiled")
def test_a_captured_step_that_a_later_run_compiles_keeps_its_loss_and_gradients(net, monkeypatch):
    """The memory of the step is allocated twice then; the weights of its cases must be set in both."""
    loss, wanted = plain(net, *batch(2))
    monkeypatch.setattr(gpu_steps, "_captured", lambda weights, run: run)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    steps = GpuSteps(net, False, "auto", 12)
    steps.device = torch.device("cuda")  # where small steps are captured
    for later in (False, True):
        if later:
            steps.begin(10**9, 0)
        for _ in range(12):
            assert steps.backward(*batch(2), LOSS, 2) == pytest.approx(float(loss), abs=1e-6)
        (step,) = steps._steps.values()
        assert bool(step.compiled) == later and (later or step.run is not None)
    close(net, wanted)


def test_steps_are_captured_again_when_the_parameters_have_moved(net):
    steps = GpuSteps(net, False, "auto", 20)
    steps.backward(*batch(2), LOSS, 2)
    (step,) = steps._steps.values()
    step.run = lambda: pytest.fail("this would read memory that is free")
    steps.lay_out(torch.contiguous_format)
    assert step.run is not None  # nothing moved
    steps.lay_out(torch.channels_last_3d)
    assert step.run is None and step.due == step.taken
    loss, _ = plain(net, *batch(2))
    assert steps.backward(*batch(2), LOSS, 2) == pytest.approx(float(loss), abs=1e-6)


def test_the_memory_of_a_step_is_what_its_layers_keep(net):
    steps = GpuSteps(net, False, "auto", 20)
    for count in (2, 4):
        steps.backward(*batch(count), LOSS, count)
    two, four = (step._bytes(*batch(count)) for step, count in zip(steps._steps.values(), (2, 4), strict=True))
    weights = sum(p.nbytes for p in net.parameters())
    assert 1.5 * (two - 2 * weights) < four < 2 * two and two > batch(2)[0].nbytes * 4


def test_measuring_the_memory_of_a_step_keeps_no_tensor_and_so_no_stream_that_would_forbid_a_capture(net):
    steps = GpuSteps(net, False, "auto", 20)
    steps.backward(*batch(2), LOSS, 2)
    (step,) = steps._steps.values()
    made = []
    for layer in net.modules():
        if not list(layer.children()):
            layer.register_forward_hook(lambda *given: made.append(weakref.ref(given[2])))
    assert step._bytes(*batch(2)) > 0
    assert made and not any(ref() is not None for ref in made)


def test_short_runs_are_not_compiled_and_time_their_first_steps(net, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    steps = GpuSteps(net, False, "auto", 20)
    for seed in range(12):
        loss, wanted = plain(net, *batch(2, seed))
        assert steps.backward(*batch(2, seed), LOSS, 2) == loss
        assert all(torch.equal(a, b) for a, b in zip(gradients(net), wanted, strict=True))
    assert not steps.compiled and not steps.problem


def test_without_a_compiler_a_run_goes_on_uncompiled_unless_compiling_was_wanted(net, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no compiler\nmany lines")

    monkeypatch.setattr(torch, "compile", broken)
    steps = GpuSteps(net, False, "auto", 10**9)
    for seed in range(12):
        loss, _ = plain(net, *batch(2, seed))
        assert steps.backward(*batch(2, seed), LOSS, 2) == loss
    assert steps.problem == "RuntimeError: no compiler" and not steps.compiled
    with pytest.raises(RuntimeError, match="no compiler"):
        GpuSteps(net, False, True, 0).backward(*batch(2), LOSS, 2)


def test_one_process_compiles_and_the_others_go_on_until_the_kernels_are_on_disk(net, compiled):
    steps = GpuSteps(net, False, "auto", 10**9)
    take(steps, 1)
    (step,) = steps._steps.values()
    with GpuSteps(net, False, "auto", 10**9).turn(step.kind) as first:  # another process
        assert first
        take(steps, gpu_steps.PROBE + 5)
        assert not compiled
    take(steps, gpu_steps.LATER)
    assert len(compiled) == 1 and steps.compiled
    with GpuSteps(net, False, "auto", 0).turn(step.kind) as one, GpuSteps(net, False, "auto", 0).turn(step.kind) as two:
        assert one and two  # from disk, all at once


def test_networks_whose_cases_influence_each_other_are_left_alone(net):
    assert can_accelerate(net)
    assert not can_accelerate(
        DenseNet(blocks=(2,), growth=4, features=8).build(dims=2, modalities=1, outputs=2, seed=0)
    )
    assert not can_accelerate(torch.nn.Dropout3d(0.1)) and can_accelerate(torch.nn.Dropout3d(0.0))


@pytest.mark.parametrize("dims", [2, 3])
def test_the_normalisation_for_compilers_is_torchs(dims, monkeypatch):
    norm = (torch.nn.InstanceNorm2d if dims == 2 else torch.nn.InstanceNorm3d)(3)
    x = 5 + 3 * torch.randn(2, 3, *(6,) * dims)
    expected = norm(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(gpu_steps._normalise(norm, x), expected, atol=1e-5, rtol=1e-5)
