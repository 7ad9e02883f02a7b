"""Cleaning of masks: hand-made masks against SciPy, scores of cleaned masks, and the choice on validation cases."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from scipy import ndimage

import polysite as ps
from polysite.algorithms.base import serving_payloads
from polysite.config import dump, parse
from polysite.data.case import Case
from polysite.engines.phases import Models, Phase
from polysite.engines.record import Result
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError, DataError
from polysite.postprocessing import chooser, decide, refuse_remote, resolved
from polysite.training import tasks
from polysite.training.cleaning import OPTIONS, cleaned
from polysite.training.network import Network
from polysite.training.torch_site import TorchSite

ONE = (1.0, 1.0, 1.0)


@pytest.fixture(params=[2, 3])
def noise(request):
    """A mask of random blobs, some of which touch by a corner only or enclose background."""
    smooth = ndimage.gaussian_filter(np.random.default_rng(0).normal(size=(24,) * request.param), 1.0)
    mask = smooth > np.quantile(smooth, 0.8)
    mask[(slice(4, 12),) * request.param] = True
    mask[(slice(6, 9),) * request.param] = False
    return mask[None]


def components(mask):
    marks, count = ndimage.label(mask, np.ones((3,) * mask.ndim))
    return [marks == k for k in range(1, count + 1)]


def test_cleaning_is_that_of_scipy(noise):
    spacing = (1.0,) * (noise.ndim - 1)
    parts = components(noise[0])
    assert len(parts) > 3
    largest = max(parts, key=np.sum)
    assert (cleaned(noise, ps.Clean(largest=True), spacing)[0] == largest).all()
    few = sum((part for part in parts if part.sum() >= 20), np.zeros_like(noise[0]))
    assert (cleaned(noise, ps.Clean(smallest=20), spacing)[0] == few).all() and few.sum() < noise.sum()
    filled = ndimage.binary_fill_holes(noise[0])
    assert (cleaned(noise, ps.Clean(fill=True), spacing)[0] == filled).all() and filled.sum() > noise.sum()
    both = cleaned(noise, ps.Clean(largest=True, fill=True), spacing)[0]
    assert (both == ndimage.binary_fill_holes(largest)).all()


def test_sizes_in_millimetres_need_a_known_spacing():
    masks = np.zeros((1, 8, 8, 8), bool)
    masks[0, 1:3, 1:3, 1:3] = masks[0, 5:7, 5:7, 5] = True
    clean = ps.Clean(smallest=3.0, unit="mm")
    assert cleaned(masks, clean, (1.0, 1.0, 1.0)).sum() == 12  # 8 and 4 mm3
    assert cleaned(masks, clean, (1.0, 1.0, 0.5)).sum() == 8  # 4 and 2 mm3
    with pytest.raises(DataError, match="in millimetres; give the size in voxels instead"):
        cleaned(masks, clean, ONE, "")


def test_exclusive_labels_stay_exclusive():
    core = np.zeros((7, 7), bool)
    core[3, 3] = True
    ring = np.zeros((7, 7), bool)
    ring[1:6, 1:6], ring[2:5, 2:5] = True, False
    found = cleaned(np.stack([ring, core]), ps.Clean(fill=True), (1, 1), exclusive=True)
    assert (found[1] == core).all() and found[0].sum() == 24 and not (found[0] & found[1]).any()
    apart = cleaned(np.stack([ring, core]), ps.Clean(fill=True), (1, 1))
    assert apart[0].sum() == 25


class Given(torch.nn.Module):
    """A network whose logits are its input."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


def site_of(predicted, truth, clean, exclusive=False):
    train = ps.Train(patch=(8, 8, 8), device="cpu", clean=clean, exclusive=exclusive, overlap=0.0)
    case = Case("a", "x", np.where(predicted, 1.0, -1.0).astype(np.float32), truth.astype(np.uint8))
    return TorchSite("a", Network(Given(), train), {"test": [case]}, ("L",), train, 0, tasks.Outline())


def test_scores_and_measures_are_those_of_cleaned_masks():
    truth = np.zeros((1, 8, 8, 8), bool)
    truth[0, 1:4, 1:4, 1:4] = True
    predicted = truth.copy()
    predicted[0, 6, 6, 6] = True  # a false island
    raw, clean = (site_of(predicted, truth, c) for c in (ps.Clean(), ps.Clean(largest=True)))
    assert raw.score(raw.start, ["x"])["x"].labels["L"] == 54 / 55
    score = clean.score(clean.start, ["x"])["x"]
    assert score.labels["L"] == 1.0 and score.counts["L"] == (27, 0, 0, 485)
    assert score.loss == raw.score(raw.start, ["x"])["x"].loss  # the loss is of logits
    (found,) = clean.examine(clean.start, ["x"], 1.0)
    assert found.measures["L"]["hd95"] == 0.0 and found.prediction.sum() == 27
    together = clean._score_together(clean.predictions(clean.start, ["x"]))  # as on a GPU
    assert together == clean.score(clean.start, ["x"])
    tried = raw.try_cleaning(raw.start, ["x"], OPTIONS)["x"]
    assert tried[0] == 54 / 55 and tried[1 + OPTIONS.index(ps.Clean(largest=True))] == 1.0


def test_a_choice_is_applied_at_all_sites_and_by_what_follows():
    truth = np.zeros((1, 8, 8, 8), bool)
    truth[0, 1:4, 1:4, 1:4] = True
    train = ps.Train(patch=(8, 8, 8), device="cpu", clean=ps.Clean(auto=True), overlap=0.0)
    network, sites = Network(Given(), train), {}
    for k, name in enumerate(("a", "b")):
        cases = []
        for n in range(4):
            predicted = truth.copy()
            predicted[0, 5:7, 5:7, 5 : 6 + n % 2] = True  # a false island of 4 or 8 voxels
            predicted[0, 2, 2, 2 : 2 + k] = False
            cases.append(Case(name, f"{n}", np.where(predicted, 1.0, -1.0).astype(np.float32), truth.astype(np.uint8)))
        sites[name] = TorchSite(name, network, {"validation": cases}, ("L",), train, 0, tasks.Outline())
    algorithm = ps.FedAvg()
    phase = Phase(algorithm, Simulator(algorithm, sites), ps.Plan())
    state = algorithm.init(network.start, ["a", "b"])
    models = Models(phase, 0, lambda asked: serving_payloads(algorithm, state, asked))
    before = phase.transport.score(0, models.payloads(["a", "b"]), "validation")
    assert all(s.labels["L"] < 1 for cases in before.values() for s in cases.values())
    record = chooser([phase])(models)
    assert record["chosen"] == asdict(ps.Clean(smallest=10.0, fill=True)) and record["cases"] == 8
    after = phase.transport.score(0, models.payloads(["a", "b"]), "validation")
    assert all(s.labels["L"] == 1 for cases in after.values() for s in cases.values())
    study = replace(ps.Study(), train=ps.Train(clean=ps.Clean(auto=True)))
    empty = Result("segmentation", ("L",), ("x",), 1, 0, 0, {}, {})
    assert resolved(study, replace(empty, cleaning=record)).train.clean == ps.Clean(smallest=10.0, fill=True)
    assert resolved(study, empty).train.clean == ps.Clean() and resolved(ps.Study(), empty) == ps.Study()


def test_an_option_is_taken_only_beyond_chance():
    rng = np.random.default_rng(0)
    base = rng.uniform(0.5, 0.8, 10)
    scores = np.repeat(base[:, None], 1 + len(OPTIONS), 1)
    assert decide(scores)[0] == ps.Clean()  # nothing changes
    best = 1 + OPTIONS.index(ps.Clean(largest=True))
    scores[:, best] += rng.uniform(0.01, 0.1, 10)
    chosen, record = decide(scores)
    assert chosen == ps.Clean(largest=True) and record["cases"] == 10
    row = next(r for r in record["options"] if r["option"] == "largest component kept")
    assert row["p"] == 2**-10 and row["changed"] == 10 and row["gain"] > 0
    assert decide(scores[:4])[0] == ps.Clean()  # four cases cannot show it
    scores[:, best + 1] = scores[:, best]  # no hole to fill: the same masks, and so the same test
    assert decide(scores)[0] == ps.Clean(largest=True) and decide(scores)[1]["options"][best]["p"] == 2**-10
    scores[:, best + 1] += 0.001 * np.arange(1, 11)
    chosen, record = decide(scores)
    assert chosen == ps.Clean(largest=True, fill=True) and record["options"][best]["p"] == 2 * 2**-10
    scores[:5, best : best + 2] -= 0.2
    assert decide(scores)[0] == ps.Clean() == decide(scores[:0])[0]


def test_settings_are_refused_where_they_mean_nothing():
    study = parse("[train]\nclean = { largest = true, smallest = 5, unit = 'mm' }")
    assert study.train.clean == ps.Clean(largest=True, smallest=5.0, unit="mm") and parse(dump(study)) == study
    assert not ps.Study().train.clean.does
    with pytest.raises(ConfigError, match="leave out largest, smallest and fill"):
        ps.Clean(fill=True, auto=True)
    with pytest.raises(ConfigError, match="smallest = -1"):
        ps.Clean(smallest=-1.0)
    with pytest.raises(ConfigError, match="this model classifies images"):
        parse("model = 'densenet_small'\n[train]\nclean = { fill = true }")
    automatic = replace(ps.Study(), train=ps.Train(clean=ps.Clean(auto=True)))
    with pytest.raises(ConfigError, match="does not work over real hospitals: choose in a simulation"):
        refuse_remote(automatic, "over real hospitals")
