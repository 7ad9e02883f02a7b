"""Heads, frozen parts and replaced losses in torch: what FedRep, FedBN, FedRoD and FedABC ask of a site."""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import polysite as ps
from polysite import tree
from polysite.algorithms.fedbn import normalisation
from polysite.data.case import Case
from polysite.errors import ConfigError
from polysite.models import MODELS
from polysite.models.names import canonical
from polysite.models.resnet3d import ResNet18
from polysite.payload import Payload
from polysite.site import Balanced, Budget, Objective, OneVsAll
from polysite.training.gpu_passes import GpuPasses
from polysite.training.gpu_steps import GpuSteps
from polysite.training.losses import one_vs_all, one_vs_all_masked, replacement
from polysite.training.network import Network
from polysite.training.patches import shares
from polysite.training.tasks import Classify, Exclusive, Outline
from polysite.training.torch_site import TorchSite
from quadratic import play

PLAIN = ps.Train(lr=0.05, gamma=1.0, weight_decay=0.01, patch=(16, 16, 16), augment="none", batch=2, device="cpu")
SMALL, CLASSES = ps.UNet(filters=(2, 4, 4)), ps.DenseNet((2, 2), 4, 4)


def site(name="s", task=None, train=PLAIN, seed=0):
    """Four cases: two labels that overlap or exclude one another, or three classes, the last of them absent."""
    task, rng = task or Outline(), np.random.default_rng(seed)
    shown = [rng.normal(size=(2, 18, 17, 16)).astype(np.float32) for _ in range(4)]
    if isinstance(task, Classify):
        truth, labels, model = [np.eye(3)[int(i % 3 == 0)] for i in range(4)], ["a", "b", "c"], CLASSES
    else:
        inner = [x[:1] > 1.5 for x in shown]
        apart = isinstance(task, Exclusive)
        outer = [(x[:1] > 0) & ~i if apart else x[:1] > 0 for x, i in zip(shown, inner, strict=True)]
        truth, labels, model = [np.concatenate(p) for p in zip(outer, inner, strict=True)], ["outer", "inner"], SMALL
    cases = [Case(name, str(i), x, y.astype(np.uint8)) for i, (x, y) in enumerate(zip(shown, truth, strict=True))]
    net = Network(model.build(dims=3, modalities=2, outputs=task.outputs(labels), seed=1), train)
    return TorchSite(name, net, {"train": cases, "validation": cases[:2], "test": cases[:1]}, labels, train, seed, task)


TASKS = pytest.mark.parametrize("task", [Outline(), Exclusive(), Classify()], ids=lambda t: type(t).__name__)


def differ(one, other):
    return {k for k in one if not torch.equal(one[k], other[k])}


def test_what_is_not_trained_stands_still_running_statistics_included():
    s = site(task=Classify())
    statistics = set(tree.statistics(s.start))
    body = tuple(k for k in s.start if not k.startswith("head."))
    assert differ(s.fit(s.start, only=("head.*",)).params, s.start) == {"head.out.weight", "head.out.bias"}
    moved = differ(s.fit(s.start, only=body).params, s.start)
    assert statistics <= moved and not any(k.startswith("head.") for k in moved)
    first = differ(s.fit(s.start, only=("stem.*",)).params, s.start)
    assert first == {k for k in s.start if k.startswith("stem.")}
    assert differ(s.fit(s.start).params, s.start) >= statistics | {"head.out.weight"}  # and nothing is left frozen


def test_the_gradient_of_a_personal_head_is_clipped_by_itself():
    free, clipped = site(), site(train=replace(PLAIN, clip_gradients=0.01))
    head = {k: torch.zeros_like(v) for k, v in free.start.items() if k.startswith("head.")}
    fits = [s.fit(s.start, Objective(personal=head), Budget(steps=1)) for s in (free, clipped)]
    norms = [sum(float(v.double().square().sum()) for v in fit.personal.values()) ** 0.5 for fit in fits]
    assert norms[0] > 0.05 * 0.01 and norms[1] == pytest.approx(0.05 * 0.01, rel=1e-4)


def test_a_frozen_layer_goes_by_its_statistics():
    """Training the head alone is training it on what the body makes of a patch when it is asked, not when it learns."""
    s = site(task=Classify(), train=replace(PLAIN, batch=4))
    start = s.fit(s.start).params
    fit = s.fit(start, only=("head.*",))
    s.network.write(start)
    s.network.module.eval()
    ((x, y),) = s._batches((1, None), None)
    s.network.module.zero_grad()
    s.network.module.requires_grad_(True)
    Classify().loss("ce", s.network.module(x), y).mean().backward()
    head = s.network.parameters["head.out.weight"]
    want = start["head.out.weight"] - 0.05 * (head.grad + 0.01 * start["head.out.weight"])
    assert torch.allclose(fit.params["head.out.weight"], want, atol=1e-6)


@pytest.mark.parametrize("patch", [(2, 3), (4, 5), (1, 5)])
def test_the_share_of_a_label_is_the_mean_over_all_places_of_a_patch(patch):
    label = torch.from_numpy(np.random.default_rng(0).random((3, 4, 5)) < 0.3)
    places = itertools.product(*(range(s - p + 1) for s, p in zip((4, 5), patch, strict=True)))
    seen = [label[:, a : a + patch[0], b : b + patch[1]].float().mean((1, 2)) for a, b in places]
    assert torch.allclose(shares(label, patch), torch.stack(seen).mean(0), atol=1e-6)


def test_how_often_a_label_occurs_is_counted_where_training_looks():
    s = site(train=replace(PLAIN, patch=(8, 8, 8)))
    found, count = s._shares(None)
    assert count == 4 * 8**3
    rng = np.random.default_rng(0)
    drawn = torch.stack([s._batch(["0", "1", "2", "3"], rng, "light")[1].mean((0, 2, 3, 4)) for _ in range(400)])
    assert torch.allclose(found, drawn.mean(0), atol=2e-3)
    one, fewer = s._shares({"1"})
    assert fewer == 8**3 and torch.allclose(one, shares(s._volumes["1"][1], (8, 8, 8)))
    classes, cases = site(task=Classify())._shares(None)
    assert cases == 4 and classes.tolist() == [0.5, 0.5, 0.0]


def test_shifts():
    part = torch.tensor([0.2, 0.0, 1.0])
    pi = (20 + 1) / 102
    found = Outline().shift(part, 100, 4.0)
    assert found.tolist() == pytest.approx([np.log(pi / (1 - pi)), -4.0, 4.0], abs=1e-6)
    assert Classify().shift(part, 100, 7.0).tolist() == pytest.approx([np.log(0.2), -7.0, 0.0])
    assert Exclusive().shift(torch.tensor([0.2, 0.0]), 100, 7.0).tolist() == pytest.approx(
        [np.log(0.8), np.log(0.2), -7.0], abs=1e-6
    )


def test_balanced_softmax_is_the_one_on_paper():
    counts, z = torch.tensor([6.0, 3.0, 1.0]), torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    truth = torch.eye(3)[[0, 2, 1, 1, 0]]
    loss = replacement(Balanced(7.0), Classify(), "ce", lambda: (counts / 10, 10.0))
    weighed = counts * z.exp()
    assert loss(z, truth) == pytest.approx(-(weighed / weighed.sum(1, keepdim=True))[truth.bool()].log().mean().item())


@TASKS
def test_a_replaced_loss_is_trained_and_the_sites_own_is_told(task):
    s = site(task=task, train=replace(PLAIN, batch=4, loss="auto" if isinstance(task, Classify) else "dice_ce"))
    plain, name = s.fit(s.start), s._loss.name
    for loss in (Balanced(7.0), OneVsAll(0.5, 2.0, 1.0, 0.0, 3.0)):
        fit = s.fit(s.start, Objective(loss=loss))
        assert fit.loss == plain.loss and differ(fit.params, plain.params)
        s.network.write(s.start)
        s.network.module.train()
        ((x, y),) = s._batches((1, None), None)
        s.network.module.zero_grad()
        logits = s.network.module(x)
        if isinstance(loss, Balanced):
            shift = task.shift(*s._shares(None), 7.0)
            goal = task.loss(name, logits + shift.view(1, -1, *[1] * (logits.ndim - 2)), y).mean()
        else:
            goal = one_vs_all(logits, task.channels(y), loss)
            if not isinstance(task, Classify):
                goal = goal + Outline().loss("dice", logits[:, -2:], y).mean()
        goal.backward()
        for k, p in s.network.parameters.items():
            assert torch.allclose(fit.params[k], s.start[k] - 0.05 * (p.grad + 0.01 * s.start[k]), atol=1e-6), k


@TASKS
def test_a_shift_of_at_most_nothing_is_the_sites_own_loss_to_the_last_bit(task):
    s = site(task=task)
    assert not differ(s.fit(s.start, Objective(loss=Balanced(0.0))).params, s.fit(s.start).params)
    assert differ(s.fit(s.start, Objective(loss=Balanced(7.0))).params, s.fit(s.start).params)


def logits_of(s, params, x):
    s.network.write(params)
    s.network.module.eval()
    return s.network.module(x)


@TASKS
def test_a_personal_head_is_served_as_one_network_with_the_sum_of_both(task):
    s = site(task=task)
    torch.manual_seed(0)
    own = {k: torch.randn_like(v) for k, v in tree.select(s.start, ("head.*",)).items()}
    ((served, _),) = ps.FedRoD().serve(Payload(model=s.start), Payload(personal=own), s, ("0",))
    x = torch.randn(2, 2, 16, 16, 16)
    generic, both = logits_of(s, s.start, x), logits_of(s, served, x)
    added = logits_of(s, {**s.start, **own}, x)  # the personal head in the place of the other
    assert torch.allclose(both, generic + added, atol=1e-5)
    assert not differ({k: v for k, v in served.items() if k not in own}, s.start)


@TASKS
def test_a_personal_head_takes_its_steps_after_those_of_the_network_and_moves_nothing_else(task):
    s = site(task=task, train=replace(PLAIN, momentum=0.9))
    torch.manual_seed(0)
    own = {k: 0.1 * torch.randn_like(v) for k, v in tree.select(s.start, ("head.*",)).items()}
    given = {k: v.clone() for k, v in own.items()}
    balanced = Objective(loss=Balanced(7.0))
    fit, alone = s.fit(s.start, replace(balanced, personal=own)), s.fit(s.start, balanced)
    assert not differ(fit.params, alone.params) and alone.personal == {} and not differ(own, given)
    one, told = {k: v.clone() for k, v in own.items()}, []
    speed = {k: torch.zeros_like(v) for k, v in own.items()}
    for steps, (x, y) in enumerate([(x.clone(), y.clone()) for x, y in s._batches((1, None), None)], start=1):
        there = s.fit(s.start, balanced, Budget(steps=steps)).params
        s.network.write({**there, **tree.add(tree.select(there, ("head.*",)), one)})  # one network, its head the sum
        s.network.module.train()
        s.network.module.requires_grad_(True)
        s.network.module.zero_grad()
        loss = task.loss(s._loss.name, s.network.module(x), y).mean()
        loss.backward()
        told.append(loss.item())
        for k, v in one.items():
            speed[k] = 0.9 * speed[k] + s.network.parameters[k].grad + 0.01 * v
            one[k] = v - 0.05 * speed[k]
    assert len(told) == 2 and fit.loss == pytest.approx(np.mean(told), abs=1e-5)
    assert all(torch.allclose(fit.personal[k], one[k], atol=1e-5) for k in one)
    assert differ(fit.personal, own) == set(own)


def test_a_personal_head_of_another_form_is_refused():
    s = site()
    with pytest.raises(ConfigError, match="of the form of the network's own; they differ in"):
        s.fit(s.start, Objective(personal={"head.w": torch.zeros(1)}))


@pytest.mark.parametrize("name", MODELS)
def test_every_network_has_a_head_that_adds_up_and_a_bias_in_it(name):
    net = Network(MODELS[name].build(dims=2, modalities=2, outputs=3, seed=1), PLAIN)
    head = tree.select(net.start, ("head.*",))
    assert {k.rpartition(".")[2] for k in head} == {"weight", "bias"}
    ps.FedABC().init(net.start, "ab"), ps.FedRoD().init(net.start, "ab")
    side = 2 * MODELS[name].divisor
    x, own = torch.randn(2, 2, side, side), {k: torch.randn_like(v) for k, v in head.items()}
    net.module.eval()
    with torch.no_grad():
        logits, features = net.before_head(x)
        beside = copy.deepcopy(net.module)
        net.write({**net.start, **own})
        added = net(x)
        net.write({**net.start, **tree.add(head, own)})
        assert torch.allclose(net(x), logits + added, atol=1e-4) and len(features) == 2
        assert torch.equal(beside(x), logits)


def as_on_a_gpu(s, monkeypatch, compiled):
    """Let a site on the CPU take the steps that fits share on a GPU; compiled ones fill incomplete batches up."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    net = s.network
    net.gpu_steps = GpuSteps(net.module, False, compiled, 0)
    net.passes = GpuPasses(net.gpu_steps, PLAIN.batch)
    return s


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("task", [Outline(), Exclusive()], ids=lambda t: type(t).__name__)
def test_steps_that_fits_share_on_a_gpu_are_those_of_a_cpu(task, compiled, monkeypatch):
    train = replace(PLAIN, batch=3)  # the last batch has one case
    plain, shared = site(task=task, train=train), as_on_a_gpu(site(task=task, train=train), monkeypatch, compiled)
    own = {k: torch.full_like(v, 0.1) for k, v in tree.select(plain.start, ("head.*",)).items()}
    mined = OneVsAll(0.4, 2.0, 0.99, 0.01, 3.0)
    for replaced in ({"loss": Balanced(7.0), "personal": own}, {"loss": mined}, {"loss": Balanced(2.0)}):
        objective = Objective(**replaced)
        for round in (0, 1):  # the second fit starts with another head in the same memory
            a, b = (s.at(round).fit(s.start, objective) for s in (plain, shared))
            assert b.loss == pytest.approx(a.loss, abs=1e-5)
            for mine, theirs in ((b.params, a.params), (b.personal, a.personal)):
                assert mine.keys() == theirs.keys()
                for k, v in theirs.items():
                    torch.testing.assert_close(mine[k], v, atol=1e-5, rtol=1e-4)
    assert len(shared.network.gpu_steps._steps) == 2 * 4  # two sizes of: two shifts, mined, the personal head


def test_one_against_all_by_fixed_shapes_has_the_same_value_and_gradient():
    drawn = torch.Generator().manual_seed(0)
    z, y = torch.randn(4, 2, 6, 6, generator=drawn), (torch.rand(4, 2, 6, 6, generator=drawn) > 0.9).float()
    y[:, 1] = 0  # a label without positives
    real = torch.tensor([True, True, True, False])
    for settings in ((0.5, 2.0, 1.0, 0.0, 3.0), (0.3, 0.0, 0.7, 0.4, None), (0.5, 1.0, 1.0, 0.0, 0.2)):
        loss = OneVsAll(*settings)
        a, b = z[:3].clone().requires_grad_(True), z.clone().requires_grad_(True)
        one, other = one_vs_all(a, y[:3], loss), one_vs_all_masked(b, y, loss, real)
        one.backward(), other.backward()
        torch.testing.assert_close(other, one)
        torch.testing.assert_close(b.grad[:3], a.grad)
        assert not b.grad[3].any()


def numbers(z, y):
    return torch.tensor(z, dtype=torch.float64)[:, None], torch.tensor(y, dtype=torch.float64)[:, None]


def lose(z, y, weight=0.5, gamma=2.0, below=1.0, above=0.0, ratio=None):
    return one_vs_all(*numbers(z, y), OneVsAll(weight, gamma, below, above, ratio)).item()


def test_one_against_all_on_paper():
    z, y = np.random.default_rng(0).normal(size=12), np.arange(12) < 3
    yes, no = np.log1p(np.exp(-z[:3])), np.log1p(np.exp(z[3:]))
    assert lose(z, y, gamma=0.0) == pytest.approx(0.5 * yes.mean() + 0.5 * no.mean())
    assert lose(z, y, 0.3, 0.0) == pytest.approx(0.3 * yes.mean() + 0.7 * no.mean())
    p = 1 / (1 + np.exp(-z))
    assert lose(z, y, gamma=1.5) == pytest.approx(
        0.5 * np.mean((1 - p[:3]) ** 1.5 * yes) + 0.5 * np.mean(p[3:] ** 1.5 * no)
    )
    easy = np.r_[z, np.full(500, -9.0)], np.r_[y, np.zeros(500)]
    assert lose(*easy, above=0.01) == pytest.approx(lose(z, y, above=0.01))
    sure = np.r_[z, np.full(500, 9.0)], np.r_[y, np.ones(500)]
    assert lose(*sure, below=0.99) == pytest.approx(lose(z, y, below=0.99))
    assert lose(np.zeros(6), [1, 1, 0, 0, 0, 0]) == pytest.approx(np.log(2) / 4)
    assert lose(z, np.zeros(12), gamma=0.0, ratio=3.0) == pytest.approx(0.5 * np.log1p(np.exp(z)).mean())
    assert lose(z, np.ones(12), gamma=0.0) == pytest.approx(0.5 * np.log1p(np.exp(-z)).mean())
    for far in ([900.0, -900.0], [-900.0, 900.0]):  # nothing is left, or all of it
        z, y = numbers(far, [1, 0])
        loss = one_vs_all(z.requires_grad_(True), y, OneVsAll(0.5, 0.5, 1.0, 0.0, None))
        loss.backward()
        assert z.grad.isfinite().all() and loss.item() == pytest.approx(max(far[1], 0), abs=1e-6)
    two = OneVsAll(0.5, 2.0, 1.0, 0.0, None)
    a, b = torch.randn(2, 4, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    parts = [one_vs_all(a[:, [c]], (b[:, [c]] > 0).float(), two) for c in range(3)]
    assert one_vs_all(a, (b > 0).float(), two) == pytest.approx(sum(parts).item(), abs=1e-6)


def test_no_more_negatives_than_were_asked_for_and_those_the_hardest():
    z, y = [2.0, -1.0, 3.0, 0.5, -4.0, 1.0, 0.2], [1, 0, 0, 0, 0, 0, 0]
    hardest = np.log1p(np.exp([3.0, 1.0, 0.5])).mean()
    assert lose(z, y, gamma=0.0, ratio=3.0) == pytest.approx(0.5 * np.log1p(np.exp(-2.0)) + 0.5 * hardest)
    logits, truth = numbers(z, y)
    logits.requires_grad_(True)
    one_vs_all(logits, truth, OneVsAll(0.5, 2.0, 1.0, 0.0, 3.0)).backward()
    assert (logits.grad[:, 0] != 0).tolist() == [True, False, True, True, False, True, False]


def played(algorithm, task):
    """(the shared model, what the sites remember, all that crossed, what every site and a stranger are served)."""
    sites, served = {n: site(n, task, seed=k) for k, n in enumerate("ab")}, {}
    run = play(algorithm, sites, 2, wire=True)
    for i in (*"ab", "stranger"):
        got = algorithm.send(run.state, [i])[i]
        ((served[i], _),) = algorithm.serve(got, run.memories.get(i, Payload()), sites["a"], ())
    return run.state.model, run.memories, run.crossed, served


@pytest.mark.parametrize("task", [Outline(), Exclusive()], ids=lambda t: type(t).__name__)
def test_fedbn_is_fedavg_on_a_network_without_scales_and_statistics(task):
    ours, theirs = played(ps.FedBN(), task), played(ps.FedAvg(), task)
    assert not normalisation(ours[0]) and not differ(ours[0], theirs[0]) and ours[2] == theirs[2]
    for i in (*"ab", "stranger"):
        assert not differ(ours[3][i], theirs[3][i])


def test_fedbn_keeps_every_normalisation_of_a_batch_normalised_network():
    model, kept, crossed, served = played(ps.FedBN(), Classify())
    s = site(task=Classify())
    net = s.network.module
    norms = [n for n, m in net.named_modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    parts = ("weight", "bias", "running_mean", "running_var")
    own = {canonical(f"{n}.{p}") for n in norms for p in parts}
    assert own and kept["a"]["private"].keys() == own and model.keys() == s.start.keys() - own
    assert all(p["model"].keys() == model.keys() for p in crossed)
    assert differ(kept["a"]["private"], kept["b"]["private"]) == own
    assert not differ({k: served["stranger"][k] for k in own}, s.start)
    assert not differ({k: served["b"][k] for k in own}, kept["b"]["private"])


@pytest.mark.parametrize(
    "layer",
    [torch.nn.GroupNorm(2, 4), torch.nn.InstanceNorm3d(4, affine=True), torch.nn.LayerNorm((4, 3)),
     torch.nn.BatchNorm3d(4, affine=False), torch.nn.BatchNorm3d(4)],
    ids=str,
)  # fmt: skip
def test_normalisation_is_found_by_its_form(layer):
    around = torch.nn.Sequential(torch.nn.Conv3d(2, 4, 3), layer, torch.nn.PReLU(4), torch.nn.Linear(4, 4))
    values = dict(Network(around, PLAIN).start)
    assert {k.partition(".")[0] for k in normalisation(values)} == {"1"} and "3.weight" in values


def test_normalisation_in_shortcuts_is_found():
    net = ResNet18("B")
    found = normalisation(Network(net, PLAIN).start)
    assert "layer2.0.downsample.1.weight" in found
    assert {k.rpartition(".")[0] for k in found} == {
        n for n, m in net.named_modules() if isinstance(m, torch.nn.BatchNorm3d)
    }


def test_fedrod_without_a_shift_shares_what_fedavg_does():
    ours, theirs = played(ps.FedRoD(clip=0.0), Exclusive()), played(ps.FedAvg(), Exclusive())
    assert not differ(ours[0], theirs[0]) and not differ(ours[3]["stranger"], theirs[0])
    assert differ(ours[3]["a"], ours[3]["b"]) == differ(ours[3]["a"], theirs[0]) == set(ours[1]["a"]["personal"])
    assert differ(played(ps.FedRoD(), Exclusive())[0], theirs[0])


@pytest.mark.parametrize(
    ("algorithm", "task"),
    [(ps.FedRep(head_epochs=2), Classify()), (ps.FedRoD(), Exclusive()), (ps.FedABC(), Outline())],
    ids=lambda x: type(x).__name__,
)
def test_sites_are_served_heads_of_their_own(algorithm, task):
    model, kept, crossed, served = played(algorithm, task)
    own = differ(served["a"], served["b"])
    assert own and all(k.startswith("head.") for k in own)
    assert own == {k for field in kept["a"].values() for k in field}
    if isinstance(algorithm, ps.FedRep):
        assert not any(k in p["model"] for p in crossed for k in own)
        assert not differ({k: served["stranger"][k] for k in own}, site(task=task).start)
    else:
        assert not differ(served["stranger"], model)
