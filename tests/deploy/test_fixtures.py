"""What 0.1.0 wrote for a deployment still opens: a stopped one continues to the end that 0.1.0 had.

What is trained anew may differ in the last digits on another processor, so models are compared closely, not exactly.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from consortium import FAST, NAMES, Inside, same, site_of
from polysite import foreign, payload
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.project import SiteConfig
from polysite.deploy.site import ledger
from polysite.deploy.site.policy import SitePolicy
from polysite.deploy.site.worker import Worker
from polysite.engines import checkpoint
from polysite.engines.run_folder import RunFolder

FIXTURES = Path(__file__).parents[1] / "fixtures" / "v0.1.0"
DEPLOYED = FIXTURES / "deployed"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())["deployed"]
STUDY = "runs/289ae5311fa38082"


def test_a_deployment_that_0_1_0_stopped_goes_on_to_its_end(tmp_path):
    shutil.copytree(DEPLOYED / "stopped", tmp_path, dirs_exist_ok=True)
    hosts = {}
    for name in NAMES:
        site = replace(site_of(tmp_path, name), state=tmp_path / name / "state", policy=tmp_path / name / "policy.toml")
        hosts[name] = Worker(site, SitePolicy.load(site.policy))
    run = coordinator.resume(tmp_path / "run", Inside(hosts), deadlines=FAST)
    for name in ("rounds", "best_round", "best_phase"):
        assert getattr(run.result, name) == EXPECTED[name]
    assert run.mean == pytest.approx(EXPECTED["mean"], abs=1e-3)
    assert run.dice() == pytest.approx(EXPECTED["by_site"], abs=1e-3)
    before = RunFolder.open(DEPLOYED / "finished" / "run").result
    for split in ("validation", "test"):
        for site, scores in getattr(before, split).items():
            assert getattr(run.result, split)[site].keys() == scores.keys()  # the pseudonyms of then
            for case, score in scores.items():
                assert getattr(run.result, split)[site][case].labels == pytest.approx(score.labels, abs=1e-3)
    assert [r.round for r in run.folder.records()] == [0, 1, 2, 3]
    assert (run.folder.path / "evaluation" / "test" / "cases.csv").is_file()  # which 0.1.0 did not have

    mine, there = tmp_path / "a" / "state" / STUDY, DEPLOYED / "finished" / "a" / "state" / STUDY
    for path in (there / "models").iterdir():
        one, other = load_file(mine / "models" / path.name), load_file(path)
        assert one.keys() == other.keys() and all(np.allclose(one[k], other[k], atol=1e-4) for k in one)
    for path in (there / "memory").iterdir():
        one, other = checkpoint.load(mine / "memory" / path.name), checkpoint.load(path)
        assert (one.site, one.algorithm, one.version, one.format) == (other.site, other.algorithm, other.version, 1)
        one, other = ({k: payload.plain(x) for k, x in m.content["model"].items()} for m in (one, other))
        assert one.keys() == other.keys() and all(np.allclose(one[k], other[k], atol=1e-4) for k in one)

    entries = ledger.check(tmp_path / "a" / "state" / "ledger.jsonl")
    old = ledger.check(DEPLOYED / "stopped" / "a" / "state" / "ledger.jsonl")
    assert same(entries[: len(old)], old) and len(entries) > len(old)
    assert not any("refused" in e or "error" in e for e in entries)


def test_a_finished_deployment_is_returned_as_it_is_and_its_ledger_is_read():
    run = coordinator.resume(DEPLOYED / "finished" / "run", Inside({}))
    assert (run.mean, run.dice()) == (EXPECTED["mean"], EXPECTED["by_site"])
    entries = ledger.check(DEPLOYED / "finished" / "a" / "state" / "ledger.jsonl")
    assert len(entries) == EXPECTED["entries_in_ledger_of_a"]
    kinds = {total.kind: total.requests for total in ledger.summary(entries)}
    assert kinds["train"] == 4 and kinds["assess"] == 1


def test_removed_keys_of_a_site_and_its_policy_are_ignored_and_reported_once(tmp_path, monkeypatch, caplog):
    for key in ("site.proxy.haste", "policy.zeal"):
        monkeypatch.setitem(foreign.REMOVED, key, foreign.Removed("leave it out"))
    policy, site = tmp_path / "policy.toml", tmp_path / "site.toml"
    for path, more in ((policy, "zeal = 3\n"), (site, "[proxy]\nhaste = 1\n")):
        path.write_text((DEPLOYED / "finished" / "a" / path.name).read_text() + more)
    for _ in range(2):
        assert SitePolicy.load(policy) == SitePolicy.load(DEPLOYED / "finished" / "a" / "policy.toml")
        assert SiteConfig.load(site, check=False).server == "localhost:60653"
    assert caplog.messages == [
        f"{policy}: policy.zeal no longer exists and is ignored; leave it out",
        f"{site}: site.proxy.haste no longer exists and is ignored; leave it out",
    ]
