"""Memory and disk space, estimated before a run: against sizes on paper."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

import polysite as ps
from polysite import config, machine, study
from polysite.errors import ConfigError
from polysite.machine import Memory
from polysite.study import estimate
from studies import tiny

TINY = tiny({"east": 4, "west": 4})
GB = 10**9


@pytest.fixture(scope="module")
def params():
    return study.initial_params(TINY)


@pytest.fixture(scope="module")
def model(params):
    return 4 * sum(prod(v.shape) for v in params.values())


def phase(name, **more):
    return config.build({"algorithm": {"name": name, **more}})


def sites(count):
    return {f"s{k:03d}": 4 for k in range(count)}


@pytest.mark.parametrize(
    ("name", "state", "memories", "replies"),
    [("fedavg", 1, 0, 0), ("ditto", 1, 20, 0), ("scaffold", 2, 20, 40), ("fedamp", 21, 20, 20)],
)
def test_models_that_the_server_and_twenty_sites_keep_and_send(name, state, memories, replies, params, model):
    found = estimate.exchanged(phase(name), params, sites(20))
    assert [x / model for x in found] == pytest.approx([state, memories, replies], rel=0.02)
    half = estimate.exchanged(replace(phase(name), run=ps.Plan(share=0.5)), params, sites(20))
    assert half == (*found[:2], found[2] // 2)  # in the end every site has a memory


def test_parts_of_a_step_are_those_on_paper(model):
    sizes = {}
    for name, changes in {"sgd": {}, "momentum": {"momentum": 0.9}, "adam": {"optimiser": "adam"}}.items():
        chosen = replace(TINY, train=replace(TINY.train, **changes))
        sizes[name] = estimate.step_bytes(chosen, study.build_module(chosen))
    assert [sizes[k].parameters / sizes[k].model for k in sizes] == [3, 4, 5]
    twice = replace(TINY, train=replace(TINY.train, batch=2 * TINY.train.batch))
    assert estimate.step_bytes(twice, study.build_module(twice)).layers == 2 * sizes["sgd"].layers
    assert sizes["sgd"].model == model
    voxels = 16**3 * TINY.train.batch
    assert sizes["sgd"].layers > 4 * 2 * 2 * voxels  # at least two layers of two channels at full size


def made(**parts):
    first = estimate.Peak("cuda:0", Memory(80 * GB, 70 * GB), {}, 0, 100, 100 * GB, GB, 50 * GB, 20 * GB)
    return replace(first, **parts)


def test_memories_go_to_the_device_then_to_main_memory_then_to_disk():
    found = made(parts={estimate.STEP: 10 * GB}, memories=90 * GB)
    assert found.spread == {"cuda:0": 30 * GB, "main memory": 50 * GB, "disk": 10 * GB}  # half of 60, half of 100
    assert "memories of 100 sites 90.0 GB (30.0 GB in cuda:0, 50.0 GB in main memory, 10.0 GB in disk)" in found.line
    assert replace(found, device="this machine").spread == {"main memory": 45 * GB, "disk": 45 * GB}


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"parts": {estimate.STEP: GB, estimate.LAYERS: 90 * GB}}, "smaller train.batch or train.patch"),
        ({"parts": {estimate.LAYERS: GB, estimate.CASES: 90 * GB}}, "train.cases = 'disk'"),
        ({"parts": {estimate.REPLIES: 90 * GB}}, "needs = 'sum'"),
        ({"memories": 200 * GB}, "set TMPDIR to a folder with more"),
        ({"disk": 60 * GB}, "choose another --out"),
    ],
)
def test_a_run_that_cannot_fit_is_refused_with_what_to_change(changes, advice):
    assert made(parts={estimate.STEP: GB}).check()
    with pytest.raises(ConfigError, match="the run does not fit: at its peak the run takes at least") as refused:
        made(**{"parts": {estimate.STEP: GB}, **changes}).check()
    assert advice in str(refused.value)


def test_nothing_is_written_before_a_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda: Memory(1000, 1000))
    with pytest.raises(ConfigError, match="this machine has 0 MB in all"):
        ps.train(TINY, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_estimate_is_the_first_line_of_a_runs_log(tmp_path):
    ps.train(replace(TINY, run=ps.Plan(rounds=1)), tmp_path / "run", evaluate=False)
    lines = Path(tmp_path / "run" / "log.txt").read_text().splitlines()
    assert "at its peak the run takes at least" in lines[1] and "cases" in lines[1]
