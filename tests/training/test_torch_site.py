"""The torch site against answers on paper and against a loop written by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from monai.inferers import sliding_window_inference
from monai.metrics import compute_dice

import polysite as ps
from polysite.data.case import Case
from polysite.errors import ConfigError, DataError, RunError
from polysite.models import MODELS
from polysite.models.names import GROUPS
from polysite.site import Budget, CaseScore, Contrast, Objective, Tilt
from polysite.training.losses import ExtraLosses, contrast
from polysite.training.network import Network
from polysite.training.tasks import Classify, Exclusive, Outline, check_loss
from polysite.training.torch_site import TorchSite
from polysite.tree import matches
from quadratic import play
from tiny import PLAIN, TINY_DENSENET, TINY_UNET, cases, site


class Line(torch.nn.Module):
    """w times the input: with half the squared error a quadratic whose curvature is the mean square of the input."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([3.0]))

    def forward(self, x):
        return self.w * x


class Square(Outline):
    """Half the squared distance of the output from one number."""

    def __init__(self, target):
        self.target = target

    def loss(self, name, logits, truth):
        return 0.5 * ((logits - self.target) ** 2).flatten(1).mean(1)


def quadratic_site(name, slope, scale, train, task=None):
    one = Case(name, "only", np.full((1, 8, 8, 8), scale, np.float32), np.zeros((1, 8, 8, 8), np.uint8))
    return TorchSite(name, Network(Line(), train), {"train": [one]}, ["L"], train, 0, task or Square(slope * scale))


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (PLAIN, 3 - 0.05 * (4 * 2 + 0.7 + 0.3 * 2)),
        (replace(PLAIN, weight_decay=0.1), 3 - 0.05 * (4 * 2 + 0.7 + 0.3 * 2 + 0.1 * 3)),
        (replace(PLAIN, clip_gradients=5.0), 3 - 0.05 * (5 + 0.7 + 0.3 * 2)),
        (replace(PLAIN, clip_gradients=8.1), 3 - 0.05 * (4 * 2 + 0.7 + 0.3 * 2)),
    ],
    ids=["plain", "weight decay belongs to F", "the gradient of F is clipped", "a shorter gradient is not"],
)
def test_a_tilted_step_is_the_step_on_paper(train, expected):
    s = quadratic_site("a", 1.0, 2.0, train)  # F = 4/2 (w - 1)^2
    tilt = Tilt(linear={"w": torch.tensor([0.7])}, anchor={"w": torch.tensor([1.0])}, weight=0.3)
    fit = s.fit(s.start, Objective(tilt=tilt))
    assert fit.params["w"].item() == pytest.approx(expected, abs=1e-6)
    assert fit.loss == pytest.approx(0.5 * 4 * 2**2) and fit.steps == 1 and fit.lr_sum == pytest.approx(0.05)


def test_a_tilt_holds_what_its_anchor_names_and_nothing_else():
    s = site()
    head = {k: v + 1 for k, v in s.start.items() if k.startswith("head.")}
    free, held = (
        s.fit(s.start, Objective(tilt=tilt), Budget(steps=1)).params for tilt in (None, Tilt(anchor=head, weight=0.3))
    )
    for k in s.start:
        pull = 0.05 * 0.3 if k in head else 0.0  # lr weight (anchor - w)
        assert torch.allclose(held[k], free[k] + pull, atol=1e-6), k
        assert k in head or torch.equal(held[k], free[k])
    unheld = s.fit(s.start, Objective(tilt=Tilt(anchor={}, weight=0.3)), Budget(steps=1)).params
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


def test_a_sketch_of_classes_and_of_one_modality():
    kinds, train = np.eye(2, dtype=np.uint8)[[0, 1, 1, 1]], replace(PLAIN, patch=(16, 16))
    images = [Case("s", str(i), np.full((1, 16, 16), i, np.float32), kinds[i], (1.0, 1.0)) for i in range(4)]
    net = Network(TINY_DENSENET.build(dims=2, modalities=1, outputs=2, seed=1), train)
    s = TorchSite("s", net, {"train": images}, ["a", "b"], train, 0, Classify())
    assert s.sketch("labels", s.cases("train")).tolist() == [0.25, 0.75]
    assert s.sketch("images", s.cases("train")) == pytest.approx([1.5, 0.0])


def test_a_clipped_step_keeps_its_direction_and_has_the_largest_norm():
    free, clipped = (
        s.fit(s.start, budget=Budget(steps=1)).params for s in (site(), site(replace(PLAIN, clip_gradients=0.01)))
    )
    start = site().start
    moved, less = ({k: each[k] - start[k] for k in start} for each in (free, clipped))
    norm = sum(float(v.double().square().sum()) for v in moved.values()) ** 0.5
    assert norm > 0.05 * 0.01  # else nothing is clipped
    for k, v in moved.items():  # by one factor for all parameters
        assert torch.allclose(less[k], v * (0.05 * 0.01 / norm), atol=1e-7), k


def test_momentum_takes_the_tilt_into_its_buffer():
    s, w, velocity = quadratic_site("a", 1.0, 2.0, replace(PLAIN, momentum=0.9)), 3.0, 0.0
    for _ in range(4):
        velocity = 0.9 * velocity + 4 * (w - 1) + 0.3 * (w - 2)
        w -= 0.05 * velocity
    fit = s.fit(s.start, Objective(tilt=Tilt(anchor={"w": torch.tensor([2.0])}, weight=0.3)), Budget(steps=4))
    assert fit.params["w"].item() == pytest.approx(w, abs=1e-5)


def test_the_rate_is_computed_from_the_round():
    s = quadratic_site("a", 1.0, 2.0, replace(PLAIN, gamma=0.5))
    for r in (0, 3):
        fit, rate = s.at(r).fit(s.start, budget=Budget(steps=2)), 0.05 * 0.5**r
        assert fit.lr_sum == pytest.approx(2 * rate)
        assert fit.params["w"].item() == pytest.approx(1 + (1 - 4 * rate) ** 2 * 2, abs=1e-5)


@pytest.mark.parametrize(("momentum", "steps"), [(0.0, 7), (0.9, 9), (0.5, 1)])
def test_the_reach_of_a_fit_is_what_a_constant_gradient_moves(momentum, steps):
    """With momentum b it is eta (K - b (1 - b^K)/(1 - b)) / (1 - b), the normaliser of FedNova."""

    class Slope(Square):
        def loss(self, name, logits, truth):
            return logits.flatten(1).mean(1)

    s = quadratic_site("a", 1.0, 1.0, replace(PLAIN, momentum=momentum), Slope(0.0))
    fit = s.fit(s.start, budget=Budget(steps=steps))
    paper = 0.05 * (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    assert fit.reach == pytest.approx(paper) and 3 - fit.params["w"].item() == pytest.approx(fit.reach, abs=1e-5)


def test_fednova_in_torch_forgets_how_often_a_site_stepped():
    """Small steps, ten times as many at b: FedNova rests at the optimum of the mean, FedAvg is drawn to b."""
    train = replace(PLAIN, lr=1e-3, momentum=0.9)
    a, b = quadratic_site("a", 0.0, 1.0, train), quadratic_site("b", 1.0, 2.0, replace(train, epochs=10))
    nova, plain = (play(algorithm, {"a": a, "b": b}, 150).models()[-1] for algorithm in (ps.FedNova(), ps.FedAvg()))
    assert nova == pytest.approx(0.8, abs=0.02) and plain > 0.95


def test_the_contrast_is_the_one_on_paper():
    torch.manual_seed(0)
    z, near, far = torch.randn(3, 6, 4, dtype=torch.float64)
    z.requires_grad_(True)
    term = Contrast({}, {}, 1.0, 0.5)

    def cos(x, y):
        return (x * y).sum(1) / x.norm(dim=1) / y.norm(dim=1)

    def slope(x, y):
        return y / x.norm(dim=1, keepdim=True) / y.norm(dim=1, keepdim=True) - (cos(x, y) / (x * x).sum(1))[:, None] * x

    found = contrast(z, near, far, term)
    assert torch.allclose(found, torch.log1p(torch.exp((cos(z, far) - cos(z, near)) / 0.5)))
    assert torch.allclose(contrast(near, near, far, term), torch.log1p(torch.exp((cos(near, far) - 1) / 0.5)))
    assert torch.allclose(contrast(z, near, near, term), torch.full((6,), np.log(2.0), dtype=torch.float64))
    found.sum().backward()
    q = 1 / (1 + torch.exp((cos(z, far) - cos(z, near)) / 0.5))
    assert torch.allclose(z.grad, -((1 - q) / 0.5)[:, None] * (slope(z, near) - slope(z, far)))


def test_the_extra_loss_is_weight_times_the_mean_contrast_of_pooled_features():
    def net(seed):
        return Network(TINY_UNET.build(dims=3, modalities=2, outputs=1, seed=seed), PLAIN)

    mine, near, far = net(1), net(2), net(3)
    x = torch.randn(3, 2, 8, 8, 8, generator=torch.Generator().manual_seed(0))

    def features(network):
        seen = []
        hook = network.module.bottleneck.register_forward_hook(lambda m, given, out: seen.append(out))
        network.module(x)
        hook.remove()
        return seen[0].mean((2, 3, 4))

    term = Contrast(near.start, far.start, 3.0, 0.7)
    (logits,), more = ExtraLosses(mine, [term])(x, x[:, :1])
    z = features(mine)
    alike = [torch.nn.functional.cosine_similarity(z, features(other)) / 0.7 for other in (near, far)]
    want = 3.0 * torch.log1p(torch.exp(alike[1] - alike[0])).mean()
    assert torch.allclose(more, want, atol=1e-6) and torch.equal(logits, mine.module(x))
    more.backward()
    assert mine.module.input_block.conv1.conv.weight.grad.abs().max() > 0
    assert all(torch.equal(v, near.start[k]) for k, v in near.read().items())


def test_the_loss_that_is_trained_is_the_sum_and_the_one_that_is_told_is_the_sites_own():
    """One step against autograd: gradient of loss + term, while Fit.loss is that of the task alone."""
    s = site(replace(PLAIN, batch=5))
    far = s.at(0).fit(s.start, budget=Budget(epochs=3)).params
    term = Contrast(s.start, far, 20.0, 0.5)
    plain, fit = s.at(1).fit(far), s.at(1).fit(far, Objective(extra=[term]))
    s.network.write(far)
    s.network.module.train()
    ((x, y),) = s.at(1)._batches((1, None), None)
    (logits,), more = ExtraLosses(s.network, [term])(x, y)
    s.network.module.zero_grad()
    (Outline().loss("dice", logits, y).mean() + more).backward()
    for k, p in s.network.parameters.items():
        assert torch.allclose(fit.params[k], far[k] - 0.05 * p.grad, atol=1e-6), k
    assert fit.loss == plain.loss and any(not torch.equal(plain.params[k], fit.params[k]) for k in far)


@pytest.mark.parametrize(
    ("model", "task", "labels"), [(TINY_UNET, Outline(), ["L"]), (TINY_DENSENET, Classify(), ["no", "yes"])]
)
def test_a_contrast_moves_the_features_and_nothing_else(model, task, labels):
    """Weight zero changes no bit; a large weight brings the features nearer; near and far stay as they were."""
    train, rng = replace(PLAIN, patch=(16, 16, 16)), np.random.default_rng(0)
    shown = [rng.normal(size=(2, 16, 16, 16)).astype(np.float32) for _ in range(4)]
    truth = [(x[:1] > 0.5) if len(labels) == 1 else np.eye(2)[i % 2] for i, x in enumerate(shown)]
    made = [Case("s", str(i), x, y.astype(np.uint8)) for i, (x, y) in enumerate(zip(shown, truth, strict=True))]
    net = Network(model.build(dims=3, modalities=2, outputs=len(labels), seed=1), train)
    s = TorchSite("s", net, {"train": made}, labels, train, 0, task)
    far = s.at(0).fit(s.start, budget=Budget(epochs=3)).params
    kept = {k: v.clone() for k, v in far.items()}
    plain = s.at(1).fit(s.start)
    none, much = (s.at(1).fit(s.start, Objective(extra=[Contrast(s.start, far, w, 0.5)])) for w in (0.0, 50.0))
    assert all(torch.equal(plain.params[k], none.params[k]) for k in kept) and plain.loss == none.loss
    assert any(not torch.equal(plain.params[k], much.params[k]) for k in kept)
    assert all(torch.equal(far[k], kept[k]) for k in kept)


def test_moon_in_torch_begins_as_fedavg():
    def model(algorithm, rounds):
        model = play(algorithm, {n: site(name=n, seed=k) for k, n in enumerate("ab")}, rounds).state.model
        return torch.cat([v.flatten() for v in model.values()])

    plain = model(ps.FedAvg(), 3)
    assert torch.equal(model(ps.Moon(5.0), 1), model(ps.FedAvg(), 1))
    assert torch.equal(model(ps.Moon(0.0), 3), plain) and not torch.equal(model(ps.Moon(5.0), 3), plain)


def test_scaffold_in_torch_reaches_the_pooled_optimum():
    train = replace(PLAIN, epochs=5)
    a = quadratic_site("a", 0.0, 1.0, train)  # curvature 1, optimum 0
    b = quadratic_site("b", 1.0, 2.0, train)  # curvature 4, optimum 1
    assert play(ps.Scaffold(), {"a": a, "b": b}, 100).models()[-1] == pytest.approx(0.8, abs=1e-4)


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
    train = replace(PLAIN, augment="full")

    def weights(s, r):
        return torch.cat([v.flatten() for v in s.at(r).fit(s.start).params.values()])

    first = weights(site(train), 1)
    torch.manual_seed(99), np.random.seed(99)
    again = site(train)
    again.at(7).fit(again.start)
    assert torch.equal(weights(again, 1), first)
    assert not torch.equal(weights(again, 2), first)
    assert not torch.equal(weights(site(train, seed=4), 1), first)
    assert not torch.equal(weights(site(train, name="t"), 1), first)


def test_only_trains_what_it_says_and_keep_what_it_names():
    s = site()
    fit = s.fit(s.start, only=("head.*",))
    moved = {k for k, v in fit.params.items() if not torch.equal(v, s.start[k])}
    assert moved and all(matches(k, ("head.*",)) for k in moved)
    assert s.fit(s.start, keep={"s0", "s1", "s2"}).steps == 2
    assert s.fit(s.start, budget=Budget(steps=7)).steps == 7 and s.fit(s.start, budget=Budget(epochs=2)).steps == 6


def test_fit_and_score_leave_their_inputs_alone():
    s = site()
    before = {k: v.clone() for k, v in s.start.items()}
    s.score(s.fit(s.start).params, s.cases("validation"))
    assert all(torch.equal(before[k], s.start[k]) for k in before)


def test_losses_are_repeatable_and_per_case_and_those_on_augmented_patches_differ_by_round():
    s = site(replace(PLAIN, augment="full"))
    fixed, drawn = s.at(1).losses(s.start), s.at(1).losses(s.start, augmented=True)
    assert set(fixed) == set(s.cases("train")) and all(0 < v <= 1 for v in fixed.values())
    assert fixed == s.at(2).losses(s.start) and drawn == s.at(1).losses(s.start, augmented=True)
    assert fixed != drawn != s.at(2).losses(s.start, augmented=True)


def test_scores_are_those_of_monais_own_sliding_window_and_metric():
    s = site()
    scores = s.score(s.start, s.cases("validation"))
    assert set(scores) == {"v0", "v1"}
    net = TINY_UNET.build(dims=3, modalities=2, outputs=1, seed=1).eval()
    for case in cases(2, 1, "v"):
        truth = torch.tensor(case.label)[None].float()
        with torch.inference_mode():
            logits = sliding_window_inference(torch.tensor(case.image)[None], (8, 8, 8), 1, net, 0.5, mode="gaussian")
        expected = compute_dice((logits > 0).float(), truth).item()
        assert scores[case.name].labels["L"] == pytest.approx(expected, abs=1e-3)
        assert scores[case.name].loss == pytest.approx(Outline().loss("dice", logits, truth).item(), abs=1e-5)


def test_flat_images_train_and_are_scored_like_volumes():
    train = replace(PLAIN, patch=(8, 8))
    flat = [Case("s", c.name, c.image[..., 0], c.label[..., 0], (1.0, 1.0)) for c in cases(4)]
    net = Network(TINY_UNET.build(dims=2, modalities=2, outputs=1, seed=1), train)
    s = TorchSite("s", net, {"train": flat[:3], "validation": flat[3:]}, ["L"], train, 0)
    assert s.fit(s.start, budget=Budget(epochs=20)).loss < s.fit(s.start).loss
    assert 0 <= s.score(s.start, s.cases("validation"))["s3"].labels["L"] <= 1


def test_a_lone_case_trains_as_it_would_without_its_copy():
    alone, doubled = site(n=1), site(n=1)
    alone.network.doubles = False
    assert doubled.network.doubles
    a, b = (s.fit(s.start, budget=Budget(steps=3)).params for s in (alone, doubled))
    assert all(torch.allclose(a[k], b[k], atol=1e-6) for k in a)


@pytest.mark.parametrize("optimiser", ["adam", "adamw"])
def test_adam_where_allowed(optimiser):
    train = replace(PLAIN, optimiser=optimiser, lr=0.01)
    s = site(train)
    assert s.fit(s.start, budget=Budget(epochs=10)).loss < s.fit(s.start).loss
    train.allow(ps.FedAvg(), "fedavg")
    for wrong, says in ((train, "plain SGD"), (ps.Train(momentum=0.9), "would be wrong with train.momentum = 0.9")):
        with pytest.raises(ConfigError, match=says):
            wrong.allow(ps.Scaffold(), "scaffold")


def test_divergence_is_said():
    s = site(replace(PLAIN, lr=1e30))
    with pytest.raises(RunError, match="diverged at site 's' in round 0"):
        s.fit(s.start, budget=Budget(steps=5))


def test_a_site_without_training_cases_judges_but_does_not_train():
    s = site(n=0)
    assert s.size == 0 and set(s.score(s.start, s.cases("validation"))) == {"v0", "v1"}
    with pytest.raises(DataError, match="'s' has no training case"):
        s.fit(s.start)


def test_a_device_that_is_not_there_is_said():
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
    parts = {"stem", "encoder", "head"} if classifies else set(GROUPS)
    assert all(len(g) == 1 for g in groups) and {g for (g,) in groups} == parts
    side = MODELS[name].divisor
    with torch.inference_mode():
        space = () if classifies else [2 * side] * dims
        assert net.eval()(torch.zeros(1, 4, *[2 * side] * dims)).shape == (1, 3, *space)


def test_the_same_seed_builds_the_same_network():
    a, b, c = (MODELS["unet_small"].build(dims=3, modalities=1, outputs=1, seed=s) for s in (0, 0, 1))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(a.parameters(), c.parameters(), strict=True))


def test_dice_ce_adds_cross_entropy():
    z, y = torch.zeros(2, 1, 4, 4, 4), torch.ones(2, 1, 4, 4, 4)
    soft = 1 - (2 * 32 + 1) / (32 + 64 + 1)
    assert Outline().loss("dice_ce", z, y).tolist() == pytest.approx([soft + np.log(2)] * 2, abs=1e-6)


def test_exclusive_labels_are_a_softmax_with_background():
    """Uniform logits give every channel 1/3; the loss leaves the background out."""
    task, logits = Exclusive(), torch.zeros(1, 3, 4, 4, 4)
    truth = torch.zeros(1, 2, 4, 4, 4)
    truth[0, 0, :2], truth[0, 1, 2] = 1, 1  # 32 and 16 of 64 voxels
    soft = np.mean([1 - (2 * n / 3 + 1) / (64 / 3 + n + 1) for n in (32, 16)])
    assert task.outputs(["a", "b"]) == 3
    assert task.loss("dice", logits, truth).tolist() == pytest.approx([soft])
    assert task.loss("dice_ce", logits, truth).tolist() == pytest.approx([soft + np.log(3)])
    sure = torch.cat([1 - truth.sum(1, keepdim=True), truth], 1)[0] * 9
    counts = {"background": (16, 0, 0, 48), "a": (32, 0, 0, 32), "b": (16, 0, 0, 48)}
    assert task.score(["a", "b"], sure, truth[0], 0.5) == CaseScore({"a": 1.0, "b": 1.0}, 0.5, counts=counts)
    sure[1] -= 20  # never a
    found = task.score(["a", "b"], sure, truth[0], 0.5)
    assert found.labels == {"a": 0.0, "b": 1.0}
    assert found.counts == {"background": (16, 32, 0, 16), "a": (0, 0, 32, 32), "b": (16, 0, 0, 48)}


def test_cross_entropy_of_exclusive_labels():
    """Logits log(q) cost -log q of the true channel in every voxel; the gradient is (q - truth) over the voxels."""
    task, truth = Exclusive(), torch.zeros(1, 2, 2, 4)
    truth[0, 0, 0], truth[0, 1, 1, 0] = 1, 1  # 4 voxels of a, 1 of b, 3 of the background
    assert task.loss("ce", torch.zeros(1, 3, 2, 4), truth).tolist() == pytest.approx([np.log(3)])
    shares = torch.tensor([0.375, 0.5, 0.125])
    logits = shares.log().view(1, 3, 1, 1).repeat(1, 1, 2, 4).requires_grad_()
    loss = task.loss("ce", logits, truth)
    assert loss.tolist() == pytest.approx([-(shares * shares.log()).sum().item()])  # the entropy of the shares
    (slope,) = torch.autograd.grad(loss.sum(), logits)
    assert torch.allclose(slope, (shares.view(1, 3, 1, 1) - task.channels(truth)) / 8, atol=1e-7)
    both = task.loss("dice", logits, truth) + loss
    assert torch.allclose(task.loss("dice_ce", logits, truth), both)
    with pytest.raises(ConfigError, match=r"set train\.exclusive = true"):
        check_loss(Outline(), "ce")


def test_overlapping_labels_are_refused_where_they_exclude_one_another():
    train = replace(PLAIN, exclusive=True)
    net = Network(TINY_UNET.build(dims=3, modalities=2, outputs=3, seed=1), train)
    image = np.zeros((2, 8, 8, 8), np.float32)
    both = Case("s", "c", image, np.ones((2, 8, 8, 8), np.uint8))
    with pytest.raises(DataError, match="case 'c' of site 's': labels overlap"):
        TorchSite("s", net, {"train": [both]}, ["a", "b"], train, 0, Exclusive())
    apart = Case("s", "c", image, np.stack([np.ones((8, 8, 8)), np.zeros((8, 8, 8))]).astype(np.uint8))
    s = TorchSite("s", net, {"train": [apart], "validation": [apart]}, ["a", "b"], train, 0, Exclusive())
    assert s.fit(s.start, budget=Budget(steps=8)).loss < s.fit(s.start, budget=Budget(steps=1)).loss
    assert set(s.score(s.start, ["c"])["c"].labels) == {"a", "b"}


@pytest.mark.parametrize("dims", [2, 3])
def test_images_are_classified(dims):
    """Bright against dark: learnt in a few steps, whatever the size of the image."""
    train, rng = replace(PLAIN, patch=(16,) * dims, augment="full", batch=4), np.random.default_rng(0)

    def picture(k):
        image = rng.normal(2.0 * (k % 2), 1, (1, *[16 + k % 3] * dims)).astype(np.float32)
        return Case("s", f"{k}", image, np.array([k % 2 == 0, k % 2 == 1], np.uint8), (1.0,) * dims)

    splits = {"train": [picture(k) for k in range(8)], "validation": [picture(k) for k in range(8, 16)]}
    net = Network(TINY_DENSENET.build(dims=dims, modalities=1, outputs=2, seed=0), train)
    s = TorchSite("s", net, splits, ["dark", "bright"], train, 0, Classify())
    scores = s.score(s.fit(s.start, budget=Budget(epochs=25)).params, s.cases("validation"))
    assert np.mean([c.labels["accuracy"] for c in scores.values()]) >= 0.9
    assert all(c.labels["accuracy"] == (c.predicted == c.true) and c.true == int(n) % 2 for n, c in scores.items())
    assert Classify().loss("ce", torch.zeros(1, 2), torch.tensor([[0.0, 1.0]])).item() == pytest.approx(np.log(2))
    with pytest.raises(ConfigError, match="choose ce"):
        TorchSite("s", net, {}, ["a", "b"], replace(train, loss="dice"), 0, Classify())


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


def test_several_patches_a_case_make_longer_epochs():
    assert site(replace(PLAIN, patches=4), n=5).fit(site().start).steps == 10


def test_a_window_of_its_own_for_whole_volumes():
    s = site(replace(PLAIN, window=(8, 8, 4)))
    other = site().score(s.start, s.cases("validation"))
    assert s.score(s.start, s.cases("validation")) != other


@pytest.mark.parametrize("task", [Outline(), Exclusive()], ids=["overlapping", "exclusive"])
def test_scores_that_cross_together_are_those_of_single_cases(task):
    """On a GPU the numbers of all cases cross to the host at once; here both ways are compared on a CPU."""
    labels = ["x", "y"]
    net = Network(ps.UNet(filters=(4, 4, 4)).build(dims=3, modalities=2, outputs=task.outputs(labels), seed=1), PLAIN)
    images = [c.image for c in cases(3)]
    masks = [np.stack([x[0] > 0.5, (x[0] <= 0.5) & (x[1] > 0.5)]).astype(np.uint8) for x in images]
    held = [Case("s", str(k), x, y) for k, (x, y) in enumerate(zip(images, masks, strict=True))]
    here = TorchSite("s", net, {"validation": held}, labels, PLAIN, 0, task)
    names = here.cases("validation")
    assert here._score_together(here.predictions(here.start, names)) == here.score(here.start, names)
    assert here._score_together([]) == {}
