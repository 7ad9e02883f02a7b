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
from polysite.payload import Payload
from polysite.site import Balanced, Budget, Objective, OneVsAll
from polysite.training.gpu_passes import GpuPasses
from polysite.training.gpu_steps import GpuSteps
from polysite.training.losses import one_vs_all
from polysite.training.network import Network
from polysite.training.patches import shares
from polysite.training.tasks import Classify, Exclusive, Outline
from polysite.training.torch_site import TorchSite
from quadratic import play

PLAIN = ps.Train(lr=0.05, gamma=1.0, weight_decay=0.01, patch=(16, 16, 16), augment="none", batch=2, device="cpu")
SMALL, CLASSES = ps.UNet(filters=(2, 4, 4)), ps.DenseNet((2, 2), 4, 4)
TASKS = pytest.mark.parametrize("task", [Outline(), Exclusive(), Classify()], ids=lambda t: type(t).__name__)


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


def differ(one, other):
    return {k for k in one if not torch.equal(one[k], other[k])}


def batches(s):
    return [(x.clone(), y.clone()) for x, y in s._batches((1, None), None)]


def slopes(s, params, loss, batch, training=True):
    """A loss of (logits, truth) and its gradient by name, as torch finds them."""
    s.network.write(params)
    s.network.module.train(training).requires_grad_(True).zero_grad()
    value = loss(s.network.module(batch[0]), batch[1])
    value.backward()
    return value.item(), {k: p.grad for k, p in s.network.parameters.items()}


def own_loss(s):
    return lambda logits, truth: s.task.loss(s._loss.name, logits, truth).mean()


def own_head(s, scale=1.0):
    """A personal head, drawn at random."""
    torch.manual_seed(0)
    return {k: scale * torch.randn_like(v) for k, v in tree.select(s.start, ("head.*",)).items()}


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


def test_a_frozen_layer_goes_by_its_statistics():
    """Training the head alone is training it on what the body makes of a patch when it is asked, not when it learns."""
    s = site(task=Classify(), train=replace(PLAIN, batch=4))
    start = s.fit(s.start).params
    fit = s.fit(start, only=("head.*",))
    _, gradients = slopes(s, start, own_loss(s), *batches(s), training=False)
    k = "head.out.weight"
    assert torch.allclose(fit.params[k], start[k] - 0.05 * (gradients[k] + 0.01 * start[k]), atol=1e-6)


@pytest.mark.parametrize("patch", [(2, 3), (4, 5), (1, 5)])
def test_the_share_of_a_label_is_the_mean_over_all_places_of_a_patch(patch):
    label = torch.from_numpy(np.random.default_rng(0).random((3, 4, 5)) < 0.3)
    places = itertools.product(*(range(s - p + 1) for s, p in zip((4, 5), patch, strict=True)))
    seen = [label[:, a : a + patch[0], b : b + patch[1]].float().mean((1, 2)) for a, b in places]
    assert torch.allclose(shares(label, patch), torch.stack(seen).mean(0), atol=1e-6)


def test_how_often_a_label_occurs_is_counted_where_training_looks():
    s = site(train=replace(PLAIN, patch=(8, 8, 8)))
    each = {n: shares(s._volumes[n][1], (8, 8, 8)) for n in s.cases("train")}
    (found, count), (one, fewer) = s._shares(None), s._shares({"1"})
    assert count == 4 * 8**3 and torch.allclose(found, torch.stack([*each.values()]).mean(0))
    assert fewer == 8**3 and torch.allclose(one, each["1"])
    classes, cases = site(task=Classify())._shares(None)
    assert cases == 4 and classes.tolist() == [0.5, 0.5, 0.0]


def test_shifts():
    pi = (20 + 1) / 102
    for task, part, count, clip, wanted in (
        (Outline(), [0.2, 0.0, 1.0], 100, 4.0, [np.log(pi / (1 - pi)), -4.0, 4.0]),
        (Classify(), [0.2, 0.0, 1.0], 100, 7.0, [np.log(0.2), -7.0, 0.0]),
        (Exclusive(), [0.2, 0.0], 100, 7.0, [np.log(0.8), np.log(0.2), -7.0]),
    ):
        assert task.shift(torch.tensor(part), count, clip).tolist() == pytest.approx(wanted, abs=1e-6)


@TASKS
def test_a_replaced_loss_is_trained_and_the_sites_own_is_told(task):
    s = site(task=task, train=replace(PLAIN, batch=4, loss="auto" if isinstance(task, Classify) else "dice_ce"))
    plain, mined = s.fit(s.start), OneVsAll(0.5, 2.0, 1.0, 0.0, 3.0)

    def shifted(logits, truth):
        shift = task.shift(*s._shares(None), 7.0)
        return own_loss(s)(logits + shift.view(1, -1, *[1] * (logits.ndim - 2)), truth)

    def all_against_one(logits, truth):
        dice = 0 if isinstance(task, Classify) else Outline().loss("dice", logits[:, -2:], truth).mean()
        return one_vs_all(logits, task.channels(truth), mined) + dice

    for loss, goal in ((Balanced(7.0), shifted), (mined, all_against_one)):
        fit = s.fit(s.start, Objective(loss=loss))
        assert fit.loss == plain.loss and differ(fit.params, plain.params)
        for k, gradient in slopes(s, s.start, goal, *batches(s))[1].items():
            assert torch.allclose(fit.params[k], s.start[k] - 0.05 * (gradient + 0.01 * s.start[k]), atol=1e-6), k


@TASKS
def test_a_personal_head_takes_its_steps_after_those_of_the_network_and_moves_nothing_else(task):
    s = site(task=task, train=replace(PLAIN, momentum=0.9))
    own = own_head(s, 0.1)
    given = {k: v.clone() for k, v in own.items()}
    balanced = Objective(loss=Balanced(7.0))
    fit, alone = s.fit(s.start, replace(balanced, personal=own)), s.fit(s.start, balanced)
    assert not differ(fit.params, alone.params) and alone.personal == {} and not differ(own, given)
    one, told = dict(own), []
    speed = {k: torch.zeros_like(v) for k, v in own.items()}
    for steps, batch in enumerate(batches(s), start=1):
        there = s.fit(s.start, balanced, Budget(steps=steps)).params
        both = {**there, **tree.add(tree.select(there, ("head.*",)), one)}  # one network, its head the sum
        loss, gradients = slopes(s, both, own_loss(s), batch)
        told.append(loss)
        speed = {k: 0.9 * speed[k] + gradients[k] + 0.01 * v for k, v in one.items()}
        one = {k: v - 0.05 * speed[k] for k, v in one.items()}
    assert len(told) == 2 and fit.loss == pytest.approx(np.mean(told), abs=1e-5)
    assert all(torch.allclose(fit.personal[k], one[k], atol=1e-5) for k in one)
    assert differ(fit.personal, own) == set(own)
    with pytest.raises(ConfigError, match="of the form of the network's own; they differ in"):
        s.fit(s.start, Objective(personal={"head.w": torch.zeros(1)}))


@pytest.mark.parametrize("name", MODELS)
def test_every_network_has_a_head_that_adds_up_and_a_bias_in_it(name):
    net = Network(MODELS[name].build(dims=2, modalities=2, outputs=3, seed=1), PLAIN)
    head = tree.select(net.start, ("head.*",))
    assert {k.rpartition(".")[2] for k in head} == {"weight", "bias"}
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


@pytest.mark.parametrize(("task", "compiled"), [(Outline(), True), (Exclusive(), True), (Outline(), False)], ids=str)
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
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    assert len(shared.network.gpu_steps._steps) == 2 * 4  # two sizes of: two shifts, mined, the personal head


def lost(z, y, weight=0.5, gamma=2.0, below=1.0, above=0.0, ratio=None):
    """The loss of one channel and its gradient."""
    logits, truth = (torch.tensor(v, dtype=torch.float64)[:, None] for v in (z, y))
    loss = one_vs_all(logits.requires_grad_(True), truth, OneVsAll(weight, gamma, below, above, ratio))
    loss.backward()
    return loss.item(), logits.grad[:, 0]


def lose(*given, **settings):
    return lost(*given, **settings)[0]


def test_one_against_all_on_paper():
    z, y = np.random.default_rng(0).normal(size=12), np.arange(12) < 3
    yes, no, p = np.log1p(np.exp(-z[:3])), np.log1p(np.exp(z[3:])), 1 / (1 + np.exp(-z))
    assert lose(z, y, 0.3, 0.0) == pytest.approx(0.3 * yes.mean() + 0.7 * no.mean())
    focal = 0.5 * np.mean((1 - p[:3]) ** 1.5 * yes) + 0.5 * np.mean(p[3:] ** 1.5 * no)
    assert lose(z, y, gamma=1.5) == pytest.approx(focal)
    easy = np.r_[z, np.full(500, -9.0)], np.r_[y, np.zeros(500)]
    assert lose(*easy, above=0.01) == pytest.approx(lose(z, y, above=0.01))
    sure = np.r_[z, np.full(500, 9.0)], np.r_[y, np.ones(500)]
    assert lose(*sure, below=0.99) == pytest.approx(lose(z, y, below=0.99))
    assert lose(z, np.zeros(12), gamma=0.0, ratio=3.0) == pytest.approx(0.5 * np.log1p(np.exp(z)).mean())
    assert lose(z, np.ones(12), gamma=0.0) == pytest.approx(0.5 * np.log1p(np.exp(-z)).mean())
    for far in ([900.0, -900.0], [-900.0, 900.0]):  # nothing is left, or all of it
        loss, slope = lost(far, [1, 0], gamma=0.5)
        assert slope.isfinite().all() and loss == pytest.approx(max(far[1], 0), abs=1e-6)
    two = OneVsAll(0.5, 2.0, 1.0, 0.0, None)
    a, b = torch.randn(2, 4, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    parts = [one_vs_all(a[:, [c]], (b[:, [c]] > 0).float(), two) for c in range(3)]
    assert one_vs_all(a, (b > 0).float(), two) == pytest.approx(sum(parts).item(), abs=1e-6)


def test_no_more_negatives_than_were_asked_for_and_those_the_hardest():
    z, y = [2.0, -1.0, 3.0, 0.5, -4.0, 1.0, 0.2], [1, 0, 0, 0, 0, 0, 0]
    loss, slope = lost(z, y, gamma=0.0, ratio=3.0)
    hardest = np.log1p(np.exp([3.0, 1.0, 0.5])).mean()
    assert loss == pytest.approx(0.5 * np.log1p(np.exp(-2.0)) + 0.5 * hardest)
    assert (slope != 0).tolist() == [True, False, True, True, False, True, False]


def test_fedbn_keeps_every_normalisation_of_a_batch_normalised_network():
    sites, algorithm = {n: site(n, Classify(), seed=k) for k, n in enumerate("ab")}, ps.FedBN()
    run, s = play(algorithm, sites, 2, wire=True), sites["a"]
    kept, model = run.memories, run.state.model
    norms = [n for n, m in s.network.module.named_modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    own = {canonical(f"{n}.{p}") for n in norms for p in ("weight", "bias", "running_mean", "running_var")}
    assert own and kept["a"]["private"].keys() == own and model.keys() == s.start.keys() - own
    assert all(p["model"].keys() == model.keys() for p in run.crossed)
    assert differ(kept["a"]["private"], kept["b"]["private"]) == own
    for name, memory, private in (("stranger", Payload(), s.start), ("b", kept["b"], kept["b"]["private"])):
        ((served, _),) = algorithm.serve(algorithm.send(run.state, [name])[name], memory, s, ())
        assert not differ({k: served[k] for k in own}, private)


NORMS = [torch.nn.GroupNorm(2, 4), torch.nn.InstanceNorm3d(4, affine=True), torch.nn.LayerNorm((4, 3)),
         torch.nn.BatchNorm3d(4, affine=False), torch.nn.BatchNorm3d(4)]  # fmt: skip


@pytest.mark.parametrize("layer", NORMS, ids=str)
def test_normalisation_is_found_by_its_form(layer):
    around = torch.nn.Sequential(torch.nn.Conv3d(2, 4, 3), layer, torch.nn.PReLU(4), torch.nn.Linear(4, 4))
    values = dict(Network(around, PLAIN).start)
    assert {k.partition(".")[0] for k in normalisation(values)} == {"1"} and "3.weight" in values
