"""Steps and forward passes that a GPU shares between sites: the logits and gradients of plain ones, in any batch."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch._dynamo  # before tests patch torch.compiler, whose functions it keeps

from polysite.models.densenet import DenseNet
from polysite.models.names import head_of
from polysite.models.unet import UNet
from polysite.training import gpu_steps
from polysite.training.gpu_passes import GpuPasses
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
    return {n: p.grad.clone() for n, p in net.named_parameters() if p.requires_grad}


def plain(net, x, y):
    net.zero_grad(set_to_none=True)
    loss = LOSS(net(x), y).mean()
    loss.backward()
    return loss.detach(), gradients(net)


def take(steps, times):
    return [float(steps.backward(*batch(2), LOSS, 2)) for _ in range(times)]


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)


@pytest.mark.usefixtures("compiled")
def test_compiled_steps_have_the_gradients_of_plain_ones_also_of_incomplete_batches(net, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    expected = [plain(net, *batch(count, seed)) for seed, count in enumerate((4, 3, 4, 1))]
    steps = GpuSteps(net, False, True, 0)
    for seed, (count, (loss, wanted)) in enumerate(zip((4, 3, 4, 1), expected, strict=True)):
        assert steps.backward(*batch(count, seed), LOSS, 4) == pytest.approx(float(loss), abs=1e-6)
        close(gradients(net), wanted)
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
        assert take(steps, 12) == pytest.approx([float(loss)] * 12, abs=1e-6)
        (step,) = steps._steps.values()
        assert bool(step.compiled) == later and (later or step.run is not None)
    close(gradients(net), wanted)


def test_steps_are_captured_again_when_the_parameters_have_moved(net):
    steps = GpuSteps(net, False, "auto", 20)
    take(steps, 1)
    (step,) = steps._steps.values()
    step.run = lambda: pytest.fail("this would read memory that is free")
    steps.lay_out(torch.contiguous_format)
    assert step.run is not None  # nothing moved
    steps.lay_out(torch.channels_last_3d)
    assert step.run is None and step.due == step.taken
    assert take(steps, 1) == pytest.approx([float(plain(net, *batch(2))[0])], abs=1e-6)


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
    mixing = DenseNet(blocks=(2,), growth=4, features=8).build(dims=2, modalities=1, outputs=2, seed=0)
    assert can_accelerate(net) and not can_accelerate(mixing)
    assert not can_accelerate(torch.nn.Dropout3d(0.1)) and can_accelerate(torch.nn.Dropout3d(0.0))


def mixed(net, logits, complete=lambda: None):
    """Logits, and the gradients of a loss that mixes the cases of a batch."""
    net.zero_grad(set_to_none=True)
    logits.std(0, correction=0).mean().backward()
    complete()
    return logits.detach(), gradients(net)


def passed(net, passes, count, wanted, modules=()):
    """Compare a pass with a plain one, and return its logits, what went into modules and what came out of them."""
    (logits,), inputs, outputs = passes(batch(count)[0], modules)
    found = mixed(net, logits, passes.steps.complete)
    torch.testing.assert_close(found[0], wanted[0], atol=1e-5, rtol=1e-4)
    close(found[1], wanted[1])
    return found[0], inputs, outputs


def test_passes_traced_by_the_compiler_equal_plain_ones_in_incomplete_batches_too(net, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    head = head_of(name for name, _ in net.named_modules())
    wanted = {count: mixed(net, net(batch(count)[0])) for count in (4, 3, 2)}
    passes = GpuPasses(GpuSteps(net, False, True, 0), 4)
    for count, expected in wanted.items():
        logits, inputs, outputs = passed(net, passes, count, expected, [head])
        assert len(inputs[head][0]) == count
        torch.testing.assert_close(outputs[head][0], logits)
    assert passes.steps.compiled and not passes.steps.problem and passes.steps.setup_seconds > 0
    assert not passes.taps.inputs and not passes.taps.outputs  # no features are kept


def test_frozen_parameters_get_no_gradient_and_a_pass_without_gradients_is_another_kind(net, monkeypatch, compiled):
    every = mixed(net, net(batch(4)[0]))
    for name, p in net.named_parameters():
        p.requires_grad_("output_block" in name)
    expected = mixed(net, net(batch(3)[0]))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # biases without effect are left out
    passes = GpuPasses(GpuSteps(net, False, True, 0), 4)
    passed(net, passes, 3, expected)
    with torch.no_grad():
        (logits,), _, _ = passes(batch(3)[0])
    torch.testing.assert_close(logits, expected[0], atol=1e-5, rtol=1e-4)
    assert compiled and len(passes._kinds) == 2 and passes.steps.taken == 1
    net.requires_grad_(True)
    passed(net, passes, 4, every)


def test_without_a_compiler_a_run_goes_on_uncompiled_unless_compiling_was_wanted(net, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no compiler\nmany lines")

    monkeypatch.setattr(torch, "compile", broken)
    (loss, wanted), pass_wanted = plain(net, *batch(2)), mixed(net, net(batch(3)[0]))
    for expected, problem in ((20, ""), (10**9, "RuntimeError: no compiler")):  # a short run does not try
        steps = GpuSteps(net, False, "auto", expected)
        assert take(steps, 12) == [float(loss)] * 12
        assert all(torch.equal(g, wanted[n]) for n, g in gradients(net).items())
        passes = GpuPasses(GpuSteps(net, False, "auto", expected), 4)
        for _ in range(12):
            passed(net, passes, 3, pass_wanted)
        assert steps.problem == passes.steps.problem == problem and not steps.compiled and not passes.steps.compiled
    with pytest.raises(RuntimeError, match="no compiler"):
        take(GpuSteps(net, False, True, 0), 1)
