"""A study over sites that remember for themselves gives what the simulator gives, whatever happens on the way.

The wire here is a handful of lines, the workers are real; over Flower itself, see test_deployment.py.
"""

import json
from dataclasses import dataclass

import pytest
from safetensors.numpy import load_file

from consortium import NAMES, same, states, wanted
from polysite import study
from polysite.algorithms import ALGORITHMS
from polysite.deploy import server
from polysite.deploy.policy import SitePolicy
from polysite.deploy.project import SiteConfig
from polysite.deploy.worker import Worker
from polysite.engines.flower import Terms
from polysite.payload import Payload

FAST = Terms(quorum=3, deadline=30, grace=0.2, again=0.1, poll=0.001)


@dataclass(frozen=True)
class Answer:
    id: str
    header: dict
    body: bytes
    error: str = ""


class Inside:
    """A wire without a network: sites answer at once, unless a test has them do otherwise."""

    def __init__(self, workers):
        self.workers, self.tokens, self.waiting, self.count = workers, dict.fromkeys(workers, "1"), {}, 0
        self.sent = []  # (site, header, bytes)

    def online(self):
        return dict(self.tokens)

    def send_all(self, messages, ttl, group):
        found = {}
        for site, (header, body) in messages.items():
            self.count += 1
            found[site] = str(self.count)
            self.sent.append((site, header, len(body)))
            answer = self.answer(site, json.loads(json.dumps(dict(header))), body)
            if answer is not None:
                self.waiting[found[site]] = Answer(found[site], *answer)
        return found

    def answer(self, site, header, body):
        got, out = self.workers[site].answer(header, body)
        return json.loads(json.dumps(got)), out

    def collect(self, ids):
        return [self.waiting.pop(i) for i in list(ids) if i in self.waiting]

    def forget(self, ids):
        for i in ids:
            self.waiting.pop(i, None)

    def incidents(self):
        return []


def site_of(tmp_path, name):
    folder = tmp_path / "sites" / name
    files = dict.fromkeys(("key", "certificate", "ca", "policy"), folder)
    return SiteConfig(folder / "site.toml", name, "localhost:1", **files, state=folder, device="cpu")


def worker(tmp_path, name, **policy):
    return Worker(site_of(tmp_path, name), SitePolicy(fewest=1, **policy))


def workers(tmp_path, **policy):
    return {name: worker(tmp_path, name, **policy) for name in NAMES}


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_comes_to_the_state_of_the_simulator(name, tmp_path):
    chosen = wanted(name)
    simulated = study.run(chosen, tmp_path / "simulated")
    deployed = server.run(chosen, Inside(workers(tmp_path)), NAMES, tmp_path / "deployed", terms=FAST, assess=False)
    one, other = states(simulated.folder.path), states(deployed.folder.path)
    assert one.keys() == other.keys() and one and all(same(one[k], other[k]) for k in one)
    assert deployed.result["best_round"] == simulated.result["best_round"]
    for site, scores in simulated.result["test"].items():  # under other names
        assert sorted(map(str, scores.values())) == sorted(map(str, deployed.result["test"][site].values()))
    for path in (simulated.folder.path / "models").glob("*.safetensors"):
        there = deployed.folder.path / "models" / path.name
        kind, _, rest = path.stem.partition(".")
        if not there.exists():  # a personal model, which stays at the hospital
            there = next((tmp_path / "sites" / rest / "runs").glob(f"*/models/{kind}.safetensors"))
        assert Payload(model=load_file(path)) == Payload(model=load_file(there))
