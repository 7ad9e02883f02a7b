"""The torch site against answers on paper and against a loop written by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from monai.inferers import sliding_window_inference
from monai.losses.dice import DiceLoss
from monai.metrics import compute_dice

import polysite as ps
from polysite.data.case import Case
from polysite.errors import ConfigError, DataError, RunError
from polysite.models import MODELS
from polysite.models.names import GROUPS
from polysite.site import Budget, CaseScore, Contrast, Objective, Tilt
from polysite.training.losses import ExtraLosses
from polysite.training.network import Network
from polysite.training.tasks import Classify, Exclusive, Outline, check_loss, tallied, tally
from polysite.training.torch_site import TorchSite
from polysite.tree import matches
from quadratic import play
from tiny import PLAIN, TINY_DENSENET, TINY_UNET, cases, site

EXCLUSIVE = {"softmax": True, "include_background": False}


class Line(torch.nn.Module):
    """w times the input: with half the squared error a quadratic whose curvature is the mean square of the input."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([3.0]))

    def forward(self, x):
        return self.w * x


class Square(Outline):
    """Half the squared distance of the output from one number; without one, the output itself."""

    def __init__(self, target):
        self.target = target

    def loss(self, name, logits, truth):
        return (logits if self.target is None else 0.5 * (logits - self.target) ** 2).flatten(1).mean(1)


def quadratic_site(target, scale, **settings):
    one = Case("a", "only", np.full((1, 8, 8, 8), scale, np.float32), np.zeros((1, 8, 8, 8), np.uint8))
    train = replace(PLAIN, **settings)
    return TorchSite("a", Network(Line(), train), {"train": [one]}, ["L"], train, 0, Square(target))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 3 - 0.05 * (4 * 2 + 0.7 + 0.3 * 2)),
        ({"weight_decay": 0.1}, 3 - 0.05 * (4 * 2 + 0.7 + 0.3 * 2 + 0.1 * 3)),
        ({"clip_gradients": 5.0}, 3 - 0.05 * (5 + 0.7 + 0.3 * 2)),
        ({"clip_gradients": 8.1}, 3 - 0.05 * (4 * 2 + 0.7 + 0.3 * 2)),
    ],
    ids=["plain", "weight decay belongs to F", "the gradient of F is clipped", "a shorter gradient is not"],
)
def test_a_tilted_step_is_the_step_on_paper(settings, expected):
    s = quadratic_site(2.0, 2.0, **settings)  # F = 4/2 (w - 1)^2
    tilt = Tilt(linear={"w": torch.tensor([0.7])}, anchor={"w": torch.tensor([1.0])}, weight=0.3)
    fit = s.fit(s.start, Objective(tilt=tilt))
    assert fit.params["w"].item() == pytest.approx(expected, abs=1e-6)
    assert fit.loss == pytest.approx(0.5 * 4 * 2**2) and fit.steps == 1 and fit.lr_sum == pytest.approx(0.05)


def test_a_tilt_holds_what_its_anchor_names_and_nothing_else():
    s = site()
    head = {k: v + 1 for k, v in s.start.items() if k.startswith("head.")}
    free, held, unheld = (
        s.fit(s.start, Objective(tilt=tilt), Budget(steps=1)).params
        for tilt in (None, Tilt(anchor=head, weight=0.3), Tilt(anchor={}, weight=0.3))
    )
    for k in s.start:
        pull = 0.05 * 0.3 if k in head else 0.0  # lr weight (anchor - w)
        assert torch.allclose(held[k], free[k] + pull, atol=1e-6), k
        assert k in head or torch.equal(held[k], free[k])
    assert head and all(torch.equal(unheld[k], free[k]) for k in free)


@pytest.mark.parametrize("cases_on", ["device", "disk"])
def test_a_sketch_is_the_mean_over_cases_of_what_numpy_finds(cases_on):
    s, given = site(replace(PLAIN, cases=cases_on)), cases(5)
    shares = np.mean([c.label.mean(axis=(1, 2, 3)) for c in given], axis=0)
    found = s.sketch("labels", s.cases("train"))
    assert found.dtype == np.float64 and found == pytest.approx(shares, abs=1e-12)
    flat = [c.image.reshape(2, -1).astype(float) for c in given[:2]]
    moments = [[*x.mean(1), *np.cov(x, bias=True)[np.triu_indices(2)]] for x in flat]
    assert s.sketch("images", ["s0", "s1"]) == pytest.approx(np.mean(moments, axis=0), abs=1e-9)


def test_a_clipped_step_keeps_its_direction_and_has_the_largest_norm():
    free, clipped = (site(replace(PLAIN, clip_gradients=limit)) for limit in (0.0, 0.01))
    moved, less = (
        {k: v - s.start[k] for k, v in s.fit(s.start, budget=Budget(steps=1)).params.items()} for s in (free, clipped)
    )
    norm = sum(float(v.double().square().sum()) for v in moved.values()) ** 0.5
    assert norm > 0.05 * 0.01  # else nothing is clipped
    for k, v in moved.items():  # by one factor for all parameters
        assert torch.allclose(less[k], v * (0.05 * 0.01 / norm), atol=1e-7), k


def test_momentum_takes_the_tilt_into_its_buffer():
    s, w, velocity = quadratic_site(2.0, 2.0, momentum=0.9), 3.0, 0.0
    for _ in range(4):
        velocity = 0.9 * velocity + 4 * (w - 1) + 0.3 * (w - 2)
        w -= 0.05 * velocity
    fit = s.fit(s.start, Objective(tilt=Tilt(anchor={"w": torch.tensor([2.0])}, weight=0.3)), Budget(steps=4))
    assert fit.params["w"].item() == pytest.approx(w, abs=1e-5)


def test_the_rate_is_computed_from_the_round():
    s = quadratic_site(2.0, 2.0, gamma=0.5)
    for r in (0, 3):
        fit, rate = s.at(r).fit(s.start, budget=Budget(steps=2)), 0.05 * 0.5**r
        assert fit.lr_sum == pytest.approx(2 * rate)
        assert fit.params["w"].item() == pytest.approx(1 + (1 - 4 * rate) ** 2 * 2, abs=1e-5)


@pytest.mark.parametrize(("momentum", "steps"), [(0.0, 7), (0.9, 9), (0.5, 1)])
def test_the_reach_of_a_fit_is_what_a_constant_gradient_moves(momentum, steps):
    """With momentum b it is eta (K - b (1 - b^K)/(1 - b)) / (1 - b), the normaliser of FedNova."""
    s = quadratic_site(None, 1.0, momentum=momentum)
    fit = s.fit(s.start, budget=Budget(steps=steps))
    paper = 0.05 * (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    assert fit.reach == pytest.approx(paper) and 3 - fit.params["w"].item() == pytest.approx(fit.reach, abs=1e-5)


def test_the_extra_loss_is_weight_times_the_mean_contrast_of_pooled_features():
    """log(1 + exp((cos(z, far) - cos(z, near)) / T)), of what the deepest layer says."""
    nets = [Network(TINY_UNET.build(dims=3, modalities=2, outputs=1, seed=seed), PLAIN) for seed in (1, 2, 3)]
    mine, near, far = nets
    x = torch.randn(3, 2, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    (logits,), more = ExtraLosses(mine, [Contrast(near.start, far.start, 3.0, 0.7)])(x, x[:, :1])
    seen = []
    for net in nets:
        net.module.bottleneck.register_forward_hook(lambda module, given, out: seen.append(out.mean((2, 3, 4))))
        net.module(x)
    alike = [torch.nn.functional.cosine_similarity(seen[0], other) / 0.7 for other in seen[1:]]
    want = 3.0 * torch.log1p(torch.exp(alike[1] - alike[0])).mean()
    assert torch.allclose(more, want, atol=1e-6) and torch.equal(logits, mine.module(x))
    more.backward()
    assert mine.module.input_block.conv1.conv.weight.grad.abs().max() > 0
    assert all(torch.equal(v, near.start[k]) for k, v in near.read().items())


def pictures(dims, **settings):
    """Bright against dark, of sizes that differ."""
    train, rng = replace(PLAIN, patch=(16,) * dims, batch=4, **settings), np.random.default_rng(0)

    def picture(k):
        image = rng.normal(2.0 * (k % 2), 1, (1, *[16 + k % 3] * dims)).astype(np.float32)
        return Case("s", f"{k}", image, np.array([k % 2 == 0, k % 2 == 1], np.uint8), (1.0,) * dims)

    splits = {"train": [picture(k) for k in range(8)], "validation": [picture(k) for k in range(8, 16)]}
    net = Network(TINY_DENSENET.build(dims=dims, modalities=1, outputs=2, seed=0), train)
    return TorchSite("s", net, splits, ["dark", "bright"], train, 0, Classify())


@pytest.mark.parametrize("s", [site(replace(PLAIN, batch=8)), pictures(3)], ids=["segmentation", "classification"])
def test_the_loss_that_is_trained_is_the_sum_and_the_one_that_is_told_is_the_sites_own(s):
    """One step against autograd: gradient of loss + term, while Fit.loss is that of the task alone."""
    far, one = s.at(0).fit(s.start, budget=Budget(epochs=3)).params, Budget(steps=1)
    kept = {k: v.clone() for k, v in far.items()}
    term, nothing = (Contrast(s.start, far, weight, 0.5) for weight in (20.0, 0.0))
    plain, fit, none = (s.at(1).fit(far, Objective(extra=extra), one) for extra in ([], [term], [nothing]))
    s.network.write(far)
    s.network.module.train().zero_grad()
    x, y = next(iter(s.at(1)._batches((1, 1), None)))
    (logits,), more = ExtraLosses(s.network, [term])(x, y)
    (s._loss(logits, y).mean() + more).backward()
    for k, p in s.network.parameters.items():
        assert torch.allclose(fit.params[k], far[k] - 0.05 * p.grad, atol=1e-6), k
    assert fit.loss == plain.loss and any(not torch.equal(plain.params[k], fit.params[k]) for k in far)
    assert all(torch.equal(plain.params[k], none.params[k]) and torch.equal(far[k], kept[k]) for k in far)


def test_scaffold_in_torch_reaches_the_pooled_optimum():
    sites = {"a": quadratic_site(0.0, 1.0, epochs=5), "b": quadratic_site(2.0, 2.0, epochs=5)}  # optima 0 and 1
    assert play(ps.Scaffold(), sites, 100).models()[-1] == pytest.approx(0.8, abs=1e-4)


def test_fit_equals_a_loop_written_by_hand():
    s = site()
    fit = s.at(2).fit(s.start, budget=Budget(epochs=2))
    net = TINY_UNET.build(dims=3, modalities=2, outputs=1, seed=1)
    optimiser = torch.optim.SGD(net.parameters(), 0.05)
    for x, y in s.at(2)._batches((2, None), None):
        optimiser.zero_grad()
        p = net(x).sigmoid()
        soft = 1 - (2 * (p * y).sum((2, 3, 4)) + 1) / (p.sum((2, 3, 4)) + y.sum((2, 3, 4)) + 1)
        soft.mean().backward()
        optimiser.step()
    for (name, mine), theirs in zip(fit.params.items(), net.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6), name
    assert fit.steps == 6


def test_randomness_is_seed_site_and_round_alone():
    def weights(r, train=replace(PLAIN, augment="full"), before=None, **about):
        s = site(train, **about)
        if before is not None:
            s.at(before).fit(s.start)
        return torch.cat([v.flatten() for v in s.at(r).fit(s.start).params.values()])

    first = weights(1)
    torch.manual_seed(99), np.random.seed(99)
    assert torch.equal(weights(1, before=7), first)
    for other in (weights(2), weights(1, seed=4), weights(1, name="t")):
        assert not torch.equal(other, first)


def test_only_trains_what_it_says_and_keep_what_it_names():
    s = site()
    before = {k: v.clone() for k, v in s.start.items()}
    fit = s.fit(s.start, only=("head.*",))
    moved = {k for k, v in fit.params.items() if not torch.equal(v, s.start[k])}
    assert moved and all(matches(k, ("head.*",)) for k in moved)
    assert s.fit(s.start, keep={"s0", "s1", "s2"}).steps == 2
    assert s.fit(s.start, budget=Budget(steps=7)).steps == 7 and s.fit(s.start, budget=Budget(epochs=2)).steps == 6
    assert site(replace(PLAIN, patches=4)).fit(s.start).steps == 10
    s.score(fit.params, s.cases("validation"))
    assert all(torch.equal(before[k], s.start[k]) for k in before)


def test_losses_are_repeatable_and_per_case_and_those_on_augmented_patches_differ_by_round():
    s = site(replace(PLAIN, augment="full"))
    fixed, drawn = s.at(1).losses(s.start), s.at(1).losses(s.start, augmented=True)
    assert set(fixed) == set(s.cases("train")) and all(0 < v <= 1 for v in fixed.values())
    assert fixed == s.at(2).losses(s.start) and drawn == s.at(1).losses(s.start, augmented=True)
    assert fixed != drawn != s.at(2).losses(s.start, augmented=True)


@pytest.mark.parametrize("window", [None, (8, 8, 4)])
def test_scores_are_those_of_monais_own_sliding_window_and_metric(window):
    s = site(replace(PLAIN, window=window) if window else PLAIN)
    scores = s.score(s.start, s.cases("validation"))
    assert set(scores) == {"v0", "v1"}
    net = TINY_UNET.build(dims=3, modalities=2, outputs=1, seed=1).eval()
    for case in cases(2, 1, "v"):
        truth, image = torch.tensor(case.label)[None].float(), torch.tensor(case.image)[None]
        with torch.inference_mode():
            logits = sliding_window_inference(image, window or (8, 8, 8), 1, net, 0.5, mode="gaussian")
        expected = compute_dice((logits > 0).float(), truth).item()
        assert scores[case.name].labels["L"] == pytest.approx(expected, abs=1e-3)
        assert scores[case.name].loss == pytest.approx(Outline().loss("dice", logits, truth).item(), abs=1e-5)


def test_adam_where_allowed():
    train = replace(PLAIN, optimiser="adamw", lr=0.01)
    s = site(train)
    assert s.fit(s.start, budget=Budget(epochs=10)).loss < s.fit(s.start).loss
    train.allow(ps.FedAvg(), "fedavg")
    for wrong, says in ((train, "plain SGD"), (ps.Train(momentum=0.9), "would be wrong with train.momentum = 0.9")):
        with pytest.raises(ConfigError, match=says):
            wrong.allow(ps.Scaffold(), "scaffold")


def test_what_cannot_train_is_said():
    s = site(replace(PLAIN, lr=1e30))
    with pytest.raises(RunError, match="diverged at site 's' in round 0"):
        s.fit(s.start, budget=Budget(steps=5))
    s = site(n=0)
    assert s.size == 0 and set(s.score(s.start, s.cases("validation"))) == {"v0", "v1"}
    with pytest.raises(DataError, match="'s' has no training case"):
        s.fit(s.start)
    for name in ("cuda:63", "toaster"):
        with pytest.raises(ConfigError, match=r"train\.device"):
            Network(Line(), ps.Train(device=name))


@pytest.mark.parametrize(
    ("name", "dims", "parameters"),
    [
        *(("unet", 3, 22.58e6), ("unet_small", 3, 1.40e6), ("unet_small", 2, None)),
        *(("densenet", 2, 6.96e6), ("densenet_small", 3, None)),
    ],
)
def test_networks_have_the_published_size_and_one_naming(name, dims, parameters):
    net = MODELS[name].build(dims=dims, modalities=4, outputs=3, seed=0)
    count = sum(p.numel() for p in net.parameters())
    assert parameters is None or count == pytest.approx(parameters, rel=2e-3)
    tree = Network(net, PLAIN).start
    statistics = sum(b.numel() for b in net.buffers() if b.is_floating_point())
    assert sum(v.numel() for v in tree.values()) == count + statistics  # nothing twice
    groups = [[g for g, pattern in GROUPS.items() if matches(k, (pattern,))] for k in tree]
    classifies = MODELS[name].task == "classification"
    assert all(len(g) == 1 for g in groups)
    assert {g for (g,) in groups} == ({"stem", "encoder", "head"} if classifies else set(GROUPS))
    size = [2 * MODELS[name].divisor] * dims
    with torch.inference_mode():
        assert net.eval()(torch.zeros(1, 4, *size)).shape == (1, 3, *(() if classifies else size))


@pytest.mark.parametrize("shape", [(3, 2, 9, 8, 7), (1, 3, 16, 5)], ids=str)
@pytest.mark.parametrize(("task", "form"), [(Outline(), {"sigmoid": True}), (Exclusive(), EXCLUSIVE)], ids=str)
def test_soft_dice_and_its_gradient_are_monais_to_the_last_bit(shape, task, form):
    torch.manual_seed(0)
    logits = torch.randn(shape[0], task.outputs(range(shape[1])), *shape[2:])
    labels = torch.randint(0, shape[1] + 1, (shape[0], *shape[2:]))
    truth = torch.stack([labels == k for k in range(1, shape[1] + 1)], 1).float()
    oracle = DiceLoss(smooth_nr=1.0, smooth_dr=1.0, reduction="none", **form)
    results = []
    for loss in (lambda z: task.loss("dice", z, truth), lambda z: oracle(z, task.channels(truth)).flatten(1).mean(1)):
        z = logits.clone().requires_grad_()
        value = loss(z)
        results += [value, *torch.autograd.grad(value.mean(), z)]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


def score_of(task, logits, truth):
    rows = [tuple(row) for row in tally(task.masks(logits), truth.bool()).tolist()]
    return tallied(["a", "b"], rows, truth[0].numel(), 0.5)


def test_the_background_of_a_single_label_is_counted_too():
    predicted, truth = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0, 0, 0]]), torch.tensor([[1, 1, 1, 0, 1, 0, 0, 0, 0, 0]])
    assert tally(predicted.bool(), truth.bool()).tolist() == [[5, 6, 6], [3, 4, 4]]


def test_scores_of_exclusive_labels_are_of_a_softmax_with_background():
    task, truth = Exclusive(), torch.zeros(1, 2, 4, 4, 4)
    truth[0, 0, :2], truth[0, 1, 2] = 1, 1  # 32 and 16 of 64 voxels
    sure = task.channels(truth)[0] * 9
    counts = {"background": (16, 0, 0, 48), "a": (32, 0, 0, 32), "b": (16, 0, 0, 48)}
    assert score_of(task, sure, truth[0]) == CaseScore({"a": 1.0, "b": 1.0}, 0.5, counts=counts)
    sure[1] -= 20  # never a
    found = score_of(task, sure, truth[0])
    assert found.labels == {"a": 0.0, "b": 1.0}
    assert found.counts == {"background": (16, 32, 0, 16), "a": (0, 0, 32, 32), "b": (16, 0, 0, 48)}


def test_cross_entropy_of_exclusive_labels():
    """Logits log(q) cost -log q of the true channel in every voxel; the gradient is (q - truth) over the voxels."""
    task, truth = Exclusive(), torch.zeros(1, 2, 2, 4)
    truth[0, 0, 0], truth[0, 1, 1, 0] = 1, 1  # 4 voxels of a, 1 of b, 3 of the background
    shares = torch.tensor([0.375, 0.5, 0.125])
    logits = shares.log().view(1, 3, 1, 1).repeat(1, 1, 2, 4).requires_grad_()
    loss = task.loss("ce", logits, truth)
    assert loss.tolist() == pytest.approx([-(shares * shares.log()).sum().item()])  # the entropy of the shares
    (slope,) = torch.autograd.grad(loss.sum(), logits)
    assert torch.allclose(slope, (shares.view(1, 3, 1, 1) - task.channels(truth)) / 8, atol=1e-7)
    assert torch.allclose(task.loss("dice_ce", logits, truth), task.loss("dice", logits, truth) + loss)
    with pytest.raises(ConfigError, match=r"set train\.exclusive = true"):
        check_loss(Outline(), "ce")


def test_overlapping_labels_are_refused_where_they_exclude_one_another():
    net = Network(TINY_UNET.build(dims=3, modalities=2, outputs=3, seed=1), PLAIN)
    both = Case("s", "c", np.zeros((2, 8, 8, 8), np.float32), np.ones((2, 8, 8, 8), np.uint8))
    with pytest.raises(DataError, match="case 'c' of site 's': labels overlap"):
        TorchSite("s", net, {"train": [both]}, ["a", "b"], PLAIN, 0, Exclusive())


@pytest.mark.parametrize("dims", [2, 3])
def test_images_are_classified(dims):
    """Bright against dark: learnt in a few steps, whatever the size of the image."""
    s = pictures(dims, augment="full")
    scores = s.score(s.fit(s.start, budget=Budget(epochs=25)).params, s.cases("validation"))
    assert np.mean([c.labels["accuracy"] for c in scores.values()]) >= 0.9
    assert all(c.labels["accuracy"] == (c.predicted == c.true) and c.true == int(n) % 2 for n, c in scores.items())
    assert s.sketch("labels", s.cases("train")[:3]) == pytest.approx([2 / 3, 1 / 3])
    with pytest.raises(ConfigError, match="choose ce"):
        pictures(dims, loss="dice")


def test_cases_on_disk_train_as_those_in_memory(tmp_path):
    def mapped(*given):
        for c in cases(*given):
            np.save(tmp_path / f"{c.name}.npy", c.image)
            yield replace(c, image=np.load(tmp_path / f"{c.name}.npy", mmap_mode="c"))

    a, b = site(), site(replace(PLAIN, cases="disk"), made=mapped)
    assert b._volumes["s0"][0].data_ptr() != a._volumes["s0"][0].data_ptr()
    one, two = (s.at(1).fit(s.start, budget=Budget(epochs=2)).params for s in (a, b))
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert a.score(one, a.cases("validation")) == b.score(two, b.cases("validation"))
