"""DP-SGD: the gradient of every patient is limited, the noise and the draws are those that the accountant assumes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from polysite import config, study
from polysite.data.case import Case
from polysite.errors import ConfigError
from polysite.models import MODELS
from polysite.privacy import Private, Release
from polysite.site import Budget, Objective, Tilt
from polysite.training.network import Network
from polysite.training.private_steps import Draws, PrivateStep, refuse_batch_norm
from polysite.training.settings import Train
from polysite.training.tasks import CaseLoss, Outline
from polysite.training.torch_site import TorchSite
from studies import text

SMALL = replace(MODELS["unet_small"], filters=(2, 4, 4))
TRAIN = Train(patch=(16, 16, 16), batch=2, lr=0.1, weight_decay=0.0, device="cpu", augment="none")
PRIVATE = Private("patient", clip=0.5, noise=1.5)


def case(name, seed, patient=""):
    rng = np.random.default_rng(seed)
    label = (rng.random((1, 16, 16, 16)) < 0.3).astype(np.uint8)
    return Case("s", name, rng.normal(size=(1, 16, 16, 16)).astype(np.float32), label, patient=patient)


def network():
    return Network(SMALL.build(dims=3, modalities=1, outputs=1, seed=0), TRAIN)


def site(private=PRIVATE, cases=None, **settings):
    train = replace(TRAIN, private=private, **settings)
    made = cases or [case(f"c{k}", k) for k in range(6)]
    return TorchSite("s", network(), {"train": made}, ["L"], train, seed=3)


def gradient(net, x, y):
    """The gradient of one patient, by a plain backward pass."""
    net.module.zero_grad()
    CaseLoss(Outline(), "dice")(net(x), y).mean().backward()
    return [p.grad.clone() for p in net.parameters.values()]


def length(gradients):
    return float(torch.stack([g.norm() for g in gradients]).norm())


def stepped(net, pairs, clip, noise=1e-12):
    """The gradients of a step over patients; nearly without noise, unless it is given."""
    weights = list(net.parameters.values())
    private = Private("patient", clip, 0.1)
    object.__setattr__(private, "noise", noise)
    step = PrivateStep(net, CaseLoss(Outline(), "dice"), weights, private, 4, np.random.default_rng(0))
    step.begin()
    for x, y in pairs:
        step.add(x, y)
    step.finish()
    return [p.grad.clone() for p in weights]


def pairs(count):
    made = [case(f"c{k}", k) for k in range(count)]
    return [(torch.tensor(c.image)[None], torch.tensor(c.label)[None].float()) for c in made]


@pytest.mark.parametrize("clip", [1e3, 0.01])
def test_a_step_is_the_sum_of_shortened_gradients_over_the_expected_number(clip):
    net, some = network(), pairs(3)
    each = [gradient(net, x, y) for x, y in some]
    lengths = [length(grads) for grads in each]
    assert all(0.011 < n < 100 for n in lengths)
    found = stepped(net, some, clip)
    for k, g in enumerate(found):
        expected = sum(min(1, clip / n) * grads[k] for n, grads in zip(lengths, each, strict=True)) / 4
        assert torch.allclose(g, expected, atol=1e-6, rtol=1e-3)
    assert length(found) <= 3 * clip / 4 + 1e-4


def test_one_patient_changes_a_step_by_at_most_the_limit():
    net, some = network(), pairs(4)
    with_all, without = stepped(net, some, 0.01), stepped(net, some[:-1], 0.01)
    assert 0.009 / 4 < length([a - b for a, b in zip(with_all, without, strict=True)]) <= 0.01 / 4 * 1.001


def test_a_patient_whose_gradient_is_not_finite_counts_as_none():
    net, (one, other) = network(), pairs(2)
    broken = (one[0] * float("nan"), one[1])
    for a, b in zip(stepped(net, [broken, other], 0.1), stepped(net, [other], 0.1), strict=True):
        assert torch.equal(a, b)


def test_the_noise_of_a_step_is_normal_with_the_stated_spread():
    values = torch.cat([g.reshape(-1) for g in stepped(network(), [], clip=0.5, noise=1.5)]).numpy()
    assert len(values) > 1000
    assert stats.kstest(values, "norm", args=(0, 0.5 * 1.5 / 4)).pvalue > 1e-4
    assert stats.kstest(values, "norm", args=(0, 0.5 * 1.5 / 4 * 1.2)).pvalue < 1e-3


def test_patients_are_drawn_independently_at_the_rate_of_the_accountant():
    """Numbers of drawn patients are binomial, and every patient is drawn equally often; a fixed number would not be."""
    patients = {f"p{k}": [f"p{k}"] for k in range(10)}
    draws = Draws(patients, patches=1, batch=3, rng=np.random.default_rng(0))
    assert draws.rate == 0.3 and draws.expected == 3 and draws.steps(2) == 8
    seen = [[names[0] for names in draws.draw()] for _ in range(4000)]
    counts = np.bincount([min(len(s), 6) for s in seen])
    expected = stats.binom.pmf(np.arange(6), 10, 0.3)
    assert stats.chisquare(counts, 4000 * np.append(expected, 1 - expected.sum())).pvalue > 1e-4
    times = np.array([sum(p in s for s in seen) for p in patients])
    assert np.abs(times - 1200).max() < 5 * np.sqrt(4000 * 0.3 * 0.7)


def test_a_patient_is_one_unit_however_many_cases_there_are():
    made = [case("a1", 0, "anna"), case("a2", 1, "anna"), case("b", 2), case("c", 3)]
    draws = site(cases=made, patches=3, batch=6).private_draws(np.random.default_rng(0))
    assert draws.patients == {"anna": ["a1", "a2"], "b": ["b"], "c": ["c"]} and draws.rate == 2 / 3
    drawn = [names for _ in range(50) for names in draws.draw()]
    assert all(len(names) == 3 for names in drawn)
    assert {n for names in drawn if names[0].startswith("a") for n in names} == {"a1", "a2"}
    assert all(len(set(names)) == 1 for names in drawn if not names[0].startswith("a"))


def test_slices_of_a_volume_are_one_patient():
    sets = {"slices.axis": "axial", "train.patch": "[24, 24]", "train.private.unit": "patient"}
    chosen = config.parse(text({"a": 4}), {**sets, "split.validation": "0.25", "split.test": "0.25"})
    built = study.build_sites(chosen)["a"]
    draws = built.private_draws(np.random.default_rng(0))
    assert len(draws.patients) == 2 and sum(map(len, draws.patients.values())) == built.size > 20


def test_a_fit_reports_what_it_cost_and_what_is_behind_it():
    fit = site().fit(network().start)
    assert fit.release == Release(1.5, 2 / 6, 3) and fit.steps == 3 and fit.cases == {f"c{k}" for k in range(6)}
    assert site().fit(network().start, budget=Budget(steps=5)).release == Release(1.5, 2 / 6, 5)
    assert site(Private()).fit(network().start).release is None


def moved(home, *given):
    """All that a fit changes."""
    fit = home.fit(network().start, *given)
    return torch.cat([(fit.params[k] - x).reshape(-1) for k, x in network().start.items()])


def test_the_change_of_a_fit_without_signal_is_the_noise_of_its_steps():
    """With a limit near zero the gradients vanish beside the noise: a sum of three steps of SGD."""
    change = moved(site(Private("patient", clip=1e-3, noise=1000.0))).numpy()
    spread = 0.1 * 1e-3 * 1000 / 2 * np.sqrt(3)
    assert stats.kstest(change, "norm", args=(0, spread)).pvalue > 1e-4


def test_a_simulation_can_be_repeated_and_a_hospital_cannot_be_predicted():
    twice = site().at(4)
    one = moved(twice)
    assert torch.equal(one, moved(site().at(4))) and not torch.equal(one, moved(site().at(5)))
    assert not torch.equal(one, moved(twice))  # a second fit has other noise
    hidden = site()
    hidden.unpredictable = True
    assert not torch.equal(moved(hidden.at(4)), moved(hidden.at(4)))


def test_a_tilt_is_added_after_the_noise():
    anchor = {k: x + 1 for k, x in network().start.items()}
    plain, tilted = (
        moved(site().at(0), Objective(tilt), Budget(steps=1)) for tilt in (None, Tilt(anchor=anchor, weight=0.5))
    )
    assert torch.allclose(tilted - plain, torch.full_like(plain, 0.05), atol=1e-6)


def test_what_noise_does_not_cover_is_refused():
    """Running statistics are means over patients, which would leave without noise."""
    with pytest.raises(ConfigError, match="covers fits of the task's own loss"):
        site().fit(network().start, budget=Budget(steps=1, minibatch=0))
    mixing = torch.nn.Sequential(torch.nn.Conv3d(1, 1, 1), torch.nn.BatchNorm3d(1))
    train = replace(TRAIN, private=PRIVATE)
    with pytest.raises(ConfigError, match="batch normalisation mixes the patients"):
        TorchSite("s", Network(mixing, train), {"train": [case("c", 0)]}, ["L"], train, 0)
    module = network().module
    refuse_batch_norm(module)
    module.add_module("norm", torch.nn.InstanceNorm3d(1, track_running_stats=True))
    with pytest.raises(ConfigError, match="running statistics leave without noise"):
        refuse_batch_norm(module)


def test_cases_that_are_kept_change_neither_draws_nor_cost():
    """A cluster of patients is drawn from all of them, so that its size does not show; of none, noise alone comes."""
    patients = {f"p{k}": [f"c{k}"] for k in range(200)}
    some = {f"c{k}" for k in range(50)}
    whole, part, none = (Draws(patients, 1, 20, np.random.default_rng(1)) for _ in range(3))
    drawn = {n for names in whole.draw() for n in names}
    assert {n for names in part.draw(some) for n in names} == drawn & some and none.draw(()) == []
    assert part.rate == whole.rate and part.steps(3) == whole.steps(3)
    home = site()
    all_cases, none_kept = home.fit(home.start), home.fit(home.start, keep=())
    assert none_kept.release == all_cases.release and none_kept.steps == all_cases.steps
    assert any(not torch.equal(none_kept.params[k], home.start[k]) for k in home.start)
