"""What pFedMe and SuPerFed ask of the torch site: one mini-batch, a twin, other initial values, measured statistics."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import polysite as ps
from polysite import tree
from polysite.data.case import Case
from polysite.payload import Payload
from polysite.site import Budget, Mix, Objective, Tilt
from polysite.training.network import Network
from polysite.training.tasks import Classify
from polysite.training.torch_site import _MIXING, TorchSite
from tiny import PLAIN, TINY_DENSENET, site


def pictures():
    """A site with a batch-normalised network."""
    rng, train = np.random.default_rng(0), replace(PLAIN, patch=(16, 16), batch=4)
    drawn = [rng.normal(k % 2, 1 + k % 3, (1, 16, 16)).astype(np.float32) for k in range(6)]
    found = [Case("s", str(k), x, np.eye(2, dtype=np.uint8)[k % 2], (1.0, 1.0)) for k, x in enumerate(drawn)]
    net = Network(TINY_DENSENET.build(dims=2, modalities=1, outputs=2, seed=0), train)
    return TorchSite("s", net, {"train": found[:4], "validation": found[4:]}, ["a", "b"], train, 0, Classify())


def watched(s, monkeypatch, **budget):
    """The batches that a training saw."""
    seen, forward = [], s.network.forward
    with monkeypatch.context() as patch:
        patch.setattr(s.network, "forward", lambda x: seen.append(x.detach().clone()) or forward(x))
        s.fit(s.start, budget=Budget(**budget))
    return seen


def test_a_minibatch_is_the_same_in_all_steps_and_another_with_every_number(monkeypatch):
    s = site(replace(PLAIN, augment="full"), n=6)
    first, second = (watched(s, monkeypatch, steps=4, minibatch=k) for k in (0, 1))
    assert len(first) == 4 and all(torch.equal(x, first[0]) for x in first) and not torch.equal(first[0], second[0])
    (again,), (later,) = (watched(x, monkeypatch, steps=1, minibatch=k) for x, k in ((s, 1), (s.at(1), 0)))
    assert torch.equal(again, second[0]) and not torch.equal(later, first[0])  # found without the one before it
    assert s.fit(s.start, budget=Budget(minibatch=0, epochs=3)).steps == 3
    lone = site(replace(PLAIN, augment="full"), n=1)
    one, other = (watched(lone, monkeypatch, steps=1, minibatch=k)[0] for k in (0, 1))
    assert not torch.equal(one, other)  # other patches of the same case


def test_pfedme_in_torch_descends_the_envelope():
    """One inner step from w: v = w - inner_lr g, so w_k = w - lr lam inner_lr g, with g of the first mini-batch."""
    s, w = site(), site().start
    reply, memory = ps.PFedMe(lam=2.0, lr=0.1, outer=1, inner_lr=0.3, inner=1).local(Payload(model=w), Payload(), s)
    v = s.fit(w, budget=Budget(minibatch=0, steps=1, lr=0.3)).params
    for k in w:
        assert torch.allclose(memory["model"][k], v[k], atol=1e-7)
        assert torch.allclose(reply["model"][k], w[k] + 0.2 * (v[k] - w[k]), atol=1e-7)


@pytest.mark.parametrize(("by", "momentum"), [("model", 0.0), ("layer", 0.9)])
def test_two_mixed_steps_are_those_of_automatic_differentiation(by, momentum):
    """The same objective written down as it stands, differentiated by torch through the mixture itself."""
    train = replace(PLAIN, momentum=momentum, weight_decay=0.01)
    s, nu, mu = site(train), 7.0, 0.3
    s.fit(s.start)  # leaves gradients behind that are not to be felt
    anchor = {k: v * 0.5 for k, v in s.start.items()}
    both = {k: v + s.start[k] for k, v in s.fresh.items()}  # at 45 degrees
    twin = tree.drop(both, ["head.*"])
    fit = s.fit(s.start, Objective(tilt=Tilt(anchor=anchor, weight=2 * mu), mix=Mix(twin, nu, by)), Budget(steps=2))
    net, rng = s.network, s._rng(None, _MIXING)
    f, v = ({k: x.clone().requires_grad_() for k, x in half.items()} for half in (s.start, twin))
    optimiser = torch.optim.SGD([*f.values(), *v.values()], train.lr, momentum=momentum, weight_decay=0.01)
    part = {k: k.rpartition(".")[0] if by == "layer" else "" for k in v}
    drawn = []
    for x, y in s._batches((2, 2), None):
        drawn.append({p: rng.random() for p in dict.fromkeys(part.values())})
        at = {k: drawn[-1][p] for k, p in part.items()}
        point = {k: (1 - at[k]) * f[k] + at[k] * v[k] if k in v else f[k] for k in f}
        net.write({k: p.detach() for k, p in point.items()})
        names = list(net.parameters)
        slopes = torch.autograd.grad(s._loss(net(x), y).mean(), [net.parameters[k] for k in names])
        dot = sum((f[k] * v[k]).sum() for k in v)
        square = dot**2 / sum((f[k] ** 2).sum() for k in v) / sum((v[k] ** 2).sum() for k in v)
        near = sum(((f[k] - anchor[k]) ** 2).sum() for k in f)
        linear = sum((point[k] * g).sum() for k, g in zip(names, slopes, strict=True))  # carries g through the mixture
        optimiser.zero_grad()
        (linear + mu * near + nu * square).backward()
        optimiser.step()
    for found, want in ((fit.params, f), (fit.twin, v)):
        torch.testing.assert_close(found, {k: x.detach() for k, x in want.items()}, atol=1e-6, rtol=1e-5)
    assert fit.steps == 2 and (len(drawn[0]) > 3 if by == "layer" else len(drawn[0]) == 1) and drawn[0] != drawn[1]


def test_a_mixed_training_is_repeated_by_seed_site_and_round_and_spares_its_inputs():
    s, mix = site(), Mix(site().fresh, 2.0, "layer")
    before = Payload(a={k: v.clone() for k, v in s.start.items()}, b={k: v.clone() for k, v in mix.twin.items()})
    one, again, other = (s.at(round).fit(s.start, Objective(mix=mix)) for round in (1, 1, 2))
    assert Payload(a=one.params, b=one.twin) == Payload(a=again.params, b=again.twin)
    assert Payload(a=one.params) != Payload(a=other.params) and before == Payload(a=s.start, b=mix.twin)
    plain = s.at(1).fit(s.start)
    assert plain.twin == {} and Payload(a=plain.params) == Payload(a=site().at(1).fit(s.start).params)


def test_fresh_values_are_a_sites_own_and_the_same_in_every_round():
    s, t = site(), site(name="t")
    for k, v in s.start.items():
        assert torch.equal(s.fresh[k].flatten().sort().values, v.flatten().sort().values)
    assert Payload(w=s.fresh) == Payload(w=s.at(4).fresh) != Payload(w=t.fresh)
    alike = [tree.dot(x, y) / tree.norm(x) / tree.norm(y) for x, y in ((s.fresh, s.start), (s.fresh, t.fresh))]
    assert max(map(abs, alike)) < 0.1  # as of networks from different seeds
    p = pictures()
    assert Payload(w=tree.statistics(p.fresh)) == Payload(w=tree.statistics(p.start))


def test_calibrated_statistics_are_those_of_the_training_cases():
    s = pictures()
    w = s.fit(s.start, budget=Budget(epochs=3)).params
    found = s.calibrate(w)
    x = torch.stack([s._volumes[n][0] for n in s.cases("train")])
    name = next(k for k in w if k.endswith("running_mean"))
    first = torch.nn.functional.conv2d(x, w["stem.conv0.weight"], stride=2, padding=3)
    assert torch.allclose(found[name], first.mean((0, 2, 3)), atol=1e-5) and not torch.allclose(found[name], w[name])
    assert Payload(w=tree.trained(found)) == Payload(w=tree.trained(w))
    assert Payload(w=s.calibrate(found)) == Payload(w=found)
    assert Payload(w=s.fit(s.start, budget=Budget(epochs=3)).params) == Payload(w=w)  # training is as before


def test_superfed_serves_a_batch_normalised_network_with_statistics_of_its_mixture():
    s = pictures()
    reply, memory = ps.SuPerFed(after=0).local(Payload(model=s.start, twins=1), Payload(), s)
    assert set(memory["twin"]) == set(tree.trained(s.start))
    ((served, _),) = ps.SuPerFed(choices=(0.5,)).serve(Payload(model=reply["model"], twins=1), memory, s, ("4",))
    middle = {k: (reply["model"][k] + v) / 2 for k, v in memory["twin"].items()}
    assert all(torch.allclose(served[k], v, atol=1e-6) for k, v in middle.items())
    assert Payload(w=served) == Payload(w=s.calibrate(served))
    assert Payload(w=tree.statistics(served)) != Payload(w=tree.statistics(reply["model"]))
