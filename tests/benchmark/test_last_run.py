"""Cases and networks kept from one run to the next: the same objects where nothing changed, else new ones."""

import os
from dataclasses import replace

import numpy as np
import pytest

import polysite as ps
from polysite import study
from polysite.benchmark.last_run import LastRun
from polysite.data.phantom import write
from polysite.errors import DataError
from polysite.training.gpu_passes import GpuPasses
from polysite.training.gpu_steps import GpuSteps
from polysite.training.network import Network

FEW = {"east": ps.Hospital(cases=4), "west": ps.Hospital(cases=3)}
PHANTOM = ps.Phantom(shape=(24, 24, 24), sites=FEW)
TRAIN = ps.Train(patch=(16, 16, 16), device="cpu")


@pytest.fixture
def files(tmp_path):
    write([ref.open() for refs in PHANTOM.case_refs(0).values() for ref in refs], tmp_path / "scans")
    return ps.Study(data=ps.Files(path=str(tmp_path / "scans")), train=TRAIN)


def cases(last, chosen):
    ready = last.cases(chosen, study.deal_cases(chosen))
    return {(s, c.name): c for s, splits in ready.items() for k in splits for c in splits[k]}, ready


def test_another_method_or_fold_has_the_same_cases(files):
    last = LastRun()
    first, _ = cases(last, files)
    again, ready = cases(last, replace(files, split=replace(files.split, seed=5), run=ps.Plan(rounds=7)))
    assert len(first) == 7 and all(again[key] is case for key, case in first.items())
    fresh = study.load_cases(files, study.deal_cases(replace(files, split=replace(files.split, seed=5))))
    for site, splits in fresh.items():
        for k, listed in splits.items():
            assert [c.name for c in listed] == [c.name for c in ready[site][k]]
            assert all(np.array_equal(a.image, b.image) for a, b in zip(listed, ready[site][k], strict=True))


def test_another_preparation_or_a_changed_file_is_loaded_anew(files, tmp_path):
    last = LastRun()
    first, _ = cases(last, files)
    other, _ = cases(last, replace(files, train=replace(TRAIN, patch=(24, 24, 24))))
    assert not any(other[key] is case for key, case in first.items())
    first, _ = cases(last, files)
    ref = study.deal_cases(files)["east"]["train"][0]
    os.utime(ref.files[0], ns=(1, 1))
    again, _ = cases(last, files)
    assert [key for key, case in first.items() if again[key] is not case] == [(ref.site, ref.name)]


def test_phantoms_of_another_seed_are_drawn_anew():
    last, chosen = LastRun(), ps.Study(data=PHANTOM, train=TRAIN)
    first, _ = cases(last, chosen)
    assert all(cases(last, chosen)[0][key] is case for key, case in first.items())
    assert not any(cases(last, replace(chosen, seed=1))[0][key] is case for key, case in first.items())


def test_a_scan_that_appears_twice_is_noticed_when_only_one_of_them_is_new(files, tmp_path):
    last = LastRun()
    cases(last, files)
    dealt = study.deal_cases(files)
    ref = dealt["east"]["train"][0]
    twin = replace(ref, name="twin")
    with pytest.raises(DataError, match="is the same scan as"):
        last.cases(files, {**dealt, "west": {**dealt["west"], "test": [twin]}})


def test_a_network_on_a_gpu_is_used_again_with_the_initial_parameters_of_the_next_run(monkeypatch):
    chosen = ps.Study(data=PHANTOM, train=TRAIN, model=ps.UNet(filters=(4, 4, 4)))
    monkeypatch.setattr(Network, "__init__", as_on_a_gpu(Network.__init__))
    last = LastRun()
    last.runs = 5
    first = last.network(chosen, {"east": 4})
    steps = study.expected_steps(chosen, {"east": 4})
    assert (first.gpu_steps.expected, first.gpu_steps.later) == (steps, 4 * steps)
    other = replace(chosen, seed=1, algorithm=ps.Scaffold())
    assert last.network(other, {}) is first
    for key, value in study.initial_params(other).items():
        assert np.array_equal(first.start[key], value) and np.array_equal(first.leaves[key].detach(), value)
    assert last.network(replace(chosen, model=ps.UNet(filters=(4, 4, 8))), {}) is not first
    assert last.network(chosen, {}) is first  # a method with a network of its own does not displace the common one


def test_the_steps_of_a_run_on_a_gpu_serve_the_next_run(monkeypatch):
    chosen = ps.Study(data=PHANTOM, train=replace(TRAIN, steps=1), model=ps.UNet(filters=(4, 4, 4)))
    monkeypatch.setattr(Network, "__init__", as_on_a_gpu(Network.__init__))
    last, kinds = LastRun(), []
    for seed in (0, 1):
        network = last.network(replace(chosen, seed=seed), {"east": 4})
        site = study.build_sites(replace(chosen, seed=seed), network=network)["east"]
        site.fit(site.start)
        kinds.append(len(network.gpu_steps._steps))
    assert kinds == [1, 1]  # a step of its own would not be compiled again


def as_on_a_gpu(init):
    def build(self, module, train, expected=0, later=0):
        init(self, module, train, expected)
        self.gpu_steps = GpuSteps(self.module, False, "auto", expected, later)
        self.passes = GpuPasses(self.gpu_steps, train.batch)

    return build


def test_a_network_on_a_cpu_is_built_anew():
    chosen, last = ps.Study(data=PHANTOM, train=TRAIN, model=ps.UNet(filters=(4, 4, 4))), LastRun()
    assert last.network(chosen, {}) is not last.network(chosen, {})
