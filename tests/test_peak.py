"""The peak of memory and disk, estimated before a run: against sizes on paper."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

import polysite as ps
from polysite import config, machine, peak, study
from polysite.errors import ConfigError
from polysite.machine import Memory
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
    [("fedavg", 1, 0, 0), ("ditto", 1, 100, 0), ("scaffold", 2, 100, 200), ("fedamp", 101, 100, 100)],
)
def test_models_of_a_hundred_sites_are_counted_from_a_few(name, state, memories, replies, params, model):
    found = peak.exchanged(phase(name), params, sites(100))
    counts = [x / model for x in (found.state, found.memories, found.replies)]
    assert counts == pytest.approx([state, memories, replies], rel=0.02)


def test_an_algorithm_that_needs_more_sites_or_all_by_name_is_rehearsed_with_all(params):
    assert peak.exchanged(phase("krum", f=3), params, sites(12)).replies  # eight would be too few
    groups = {"a": ["s000", "s001"], "b": [f"s{k:03d}" for k in range(2, 12)]}
    assert peak.exchanged(phase("clustered", groups=groups), params, sites(12)).state


def test_parts_of_a_step_are_those_on_paper(model):
    sizes = {}
    for name, changes in {"sgd": {}, "momentum": {"momentum": 0.9}, "adam": {"optimiser": "adam"}}.items():
        chosen = replace(TINY, train=replace(TINY.train, **changes))
        sizes[name] = peak.step_bytes(chosen, study.build_module(chosen))
    assert [sizes[k].parameters / sizes[k].model for k in sizes] == [3, 4, 5]
    twice = replace(TINY, train=replace(TINY.train, batch=2 * TINY.train.batch))
    assert peak.step_bytes(twice, study.build_module(twice)).layers == 2 * sizes["sgd"].layers > 0


def made(**parts):
    first = peak.Peak("cuda:0", Memory(80 * GB, 70 * GB), {}, 0, 100, 100 * GB, GB, 50 * GB, 20 * GB)
    return replace(first, **parts)


def test_memories_go_to_the_device_then_to_main_memory_then_to_disk():
    found = made(parts={peak.STEP: 10 * GB}, memories=90 * GB)
    assert found.spread == {"cuda:0": 30 * GB, "main memory": 50 * GB, "disk": 10 * GB}  # half of 60, half of 100
    assert "memories of 100 sites 90.0 GB (30.0 GB in cuda:0, 50.0 GB in main memory, 10.0 GB in disk)" in found.line
    assert replace(found, device="this machine").spread == {"main memory": 45 * GB, "disk": 45 * GB}


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"parts": {peak.STEP: GB, peak.LAYERS: 90 * GB}}, "smaller train.batch or train.patch"),
        ({"parts": {peak.LAYERS: GB, peak.CASES: 90 * GB}}, "train.cases = 'disk'"),
        ({"parts": {peak.REPLIES: 90 * GB}}, "needs = 'sum'"),
        ({"memories": 200 * GB}, "set TMPDIR to a folder with more"),
        ({"disk": 60 * GB}, "choose another --out"),
    ],
)
def test_a_run_that_cannot_fit_is_refused_with_what_to_change(changes, advice):
    assert made(parts={peak.STEP: GB}).check()
    with pytest.raises(ConfigError, match="the run does not fit: at its peak the run takes at least") as refused:
        made(**{"parts": {peak.STEP: GB}, **changes}).check()
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
