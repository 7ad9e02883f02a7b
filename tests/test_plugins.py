"""Algorithms, networks and layouts from outside of polysite: trained, killed, resumed, evaluated, used."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import polysite as ps
from consortium import Inside, ask, environment, go, until, worker, workers
from polysite import config, plugins
from polysite.cli import app
from polysite.data import layouts
from polysite.errors import ConfigError, PolysiteError
from polysite.export.serve import serve_model
from studies import SMALL

LAB = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from polysite import tree
from polysite.algorithms.average import average, send_model, serve_received
from polysite.data.manifest import Row
from polysite.payload import Payload


@dataclass(frozen=True)
class State:
    model: dict


@dataclass(frozen=True)
class HalfStep:
    """Federated averaging that goes only a part of the way.

    Args:
        share: Part of the way.
    """

    share: float = 0.5
    reply: ClassVar[dict] = {"model": "model", "weight": "count"}
    needs: ClassVar[str] = "sum"
    plain_sgd: ClassVar[bool] = False
    strangers: ClassVar[bool] = True
    send, serve = send_model, serve_received

    def init(self, params, sites):
        return State(params)

    def local(self, got, memory, site):
        return Payload(model=site.fit(got["model"]).params, weight=site.size), memory

    def merge(self, state, replies):
        return State(tree.mean([state.model, average(replies)], [1 - self.share, self.share]))


@dataclass(frozen=True)
class Net:
    width: int = 4  # channels
    task: ClassVar[str] = "segmentation"
    divisor: ClassVar[int] = 1

    def build(self, *, dims, modalities, outputs, seed):
        torch.manual_seed(seed)
        conv = torch.nn.Conv3d if dims == 3 else torch.nn.Conv2d
        first, last = conv(modalities, self.width, 3, padding=1), conv(self.width, outputs, 1)
        return torch.nn.Sequential(first, torch.nn.ReLU(), last)


def pairs_by_letter(root) -> list[Row]:
    return [Row("all", f.name[1:-7], {"t1": f.name}, "b" + f.name[1:]) for f in sorted(root.glob("a*.nii.gz"))]
'''
TOML = """
algorithm = { name = "my_lab.parts:HalfStep", share = 0.7 }
model = { name = "my_lab.parts:Net", width = 3 }
data = { name = "files", path = "%s" }
train = { patch = [16, 16, 16], device = "cpu", augment = "none" }
run = { rounds = 20, checkpoint_every = 1 }
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A package that is installed nowhere but on the path."""
    home = tmp_path / "lab"
    (home / "my_lab").mkdir(parents=True)
    (home / "my_lab" / "__init__.py").touch()
    (home / "my_lab" / "parts.py").write_text(LAB)
    monkeypatch.syspath_prepend(str(home))
    yield home
    for name in [n for n in sys.modules if n.split(".")[0] == "my_lab"]:
        del sys.modules[name]


@pytest.fixture
def data(tmp_path):
    rows = ["site,case,t1,label,labels"]
    for k in range(10):
        rng, file = np.random.default_rng(k), f"s{k}.nii.gz"
        image, truth = rng.normal(100, 10, (18, 17, 16)).astype(np.float32), np.zeros((18, 17, 16), np.uint8)
        truth[4:12, 5:12, 3:10] = 1
        for name, array in ((file, image + 50 * truth), (f"m{k}.nii.gz", truth)):
            nibabel.save(nibabel.Nifti1Image(array, np.diag([1, 1, 2, 1.0])), tmp_path / name)
        rows.append(f"{('east', 'north')[k % 2]},c{k},{file},m{k}.nii.gz,box=1")
    (tmp_path / "manifest.csv").write_text("\n".join(rows))
    return tmp_path / "manifest.csv"


def process(lab, *words):
    """Start Python with these words, where the package is on the path."""
    path = os.pathsep.join([str(Path(ps.__file__).parents[1]), str(lab)])
    command, streams = [sys.executable, *map(str, words)], {"stdout": subprocess.DEVNULL}
    return subprocess.Popen(command, **streams, env={**environment(), "PYTHONPATH": path})


def polysite(*words):
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.slow
def test_own_algorithm_and_network_from_training_to_predictions(lab, data, tmp_path):
    """Killed after its first round, resumed in another process, evaluated, and used to predict."""
    study, run = tmp_path / "study.toml", tmp_path / "run"
    study.write_text(TOML % data)
    begun = process(lab, "-m", "polysite.cli", "train", study, "--out", run, "--quiet")
    until(lambda: (run / "rounds.jsonl").exists() and (run / "rounds.jsonl").read_text().count("\n"), 120)
    begun.kill()
    begun.wait()
    assert not (run / "result.json").exists()
    polysite("train", "--resume", run, "--quiet", "--no-page")
    assert all(word in (run / "config.toml").read_text() for word in ("my_lab.parts:HalfStep", "share = 0.7"))
    assert len((run / "rounds.jsonl").read_text().splitlines()) == 20
    again = ps.train(replace(config.load(run / "config.toml"), data=ps.Files(str(data))), tmp_path / "again")
    folder = again.folder.open(run)
    assert again.result.test == ps.Run(folder, folder.result).result.test
    polysite("evaluate", run, "--split", "validation", "--quiet")
    polysite("compare", run, "--out", tmp_path / "page", "--quiet")
    polysite("predict", run, data, "--out", tmp_path / "masks", "--quiet")
    assert len((tmp_path / "masks" / "volumes.csv").read_text().splitlines()) == 11


def test_a_hospital_runs_a_package_that_it_installed_and_named(lab, tmp_path):
    """Its policy names package and digest; without, or with other files, it refuses before the code is imported."""
    data = ps.Phantom(shape=(24, 24, 24), sites={n: ps.Hospital(cases=6) for n in "abc"})
    changes = {"algorithm": {"name": "my_lab.parts:HalfStep"}, "run": {"rounds": 2, "guard": {"use": "off"}}}
    chosen = config.vary(replace(SMALL, data=data), changes)
    digest = plugins.digest("my_lab")
    done = go(tmp_path, chosen, Inside(workers(tmp_path, packages=(f"my_lab {digest}",))))
    simulated = ps.train(chosen, tmp_path / "simulated", evaluate=False)
    assert done.result.best_round == simulated.result.best_round
    losses = [[[v.loss for v in r.validation.values()] for r in run.folder.records()] for run in (done, simulated)]
    assert len(losses[0]) == 2 and np.allclose(*losses, rtol=0, atol=1e-6)
    wicked = replace(chosen, data=ps.Files(str(tmp_path), format="my_lab.parts:pairs_by_letter"))
    host = worker(tmp_path / "wicked", "a", packages=(f"my_lab {digest}",))
    refused = ask(host, "hello", config=config.dump(wicked))[0]["refused"]
    assert "names code of the coordinator's choice" in refused
    for policy, why in (((), "policy.toml does not name"), ((f"my_lab {'0' * 64}",), "are not those that policy.toml")):
        with pytest.raises(PolysiteError, match=why):
            go(tmp_path / why[:3], chosen, Inside(workers(tmp_path / why[:3], packages=policy)), wait=1)
    (lab / "my_lab" / "more.py").write_text("x = 1")
    changed = pytest.raises(ConfigError, match="the files of the package 'my_lab' are not those")
    with changed, plugins.only({"my_lab": digest}):
        config.parse(config.dump(chosen))


def test_nothing_is_imported_that_may_not_be(lab):
    with plugins.only({}), pytest.raises(ConfigError, match=r"'my_lab', which policy\.toml does not name"):
        config.parse('algorithm.name = "my_lab.parts:HalfStep"')
    assert "my_lab.parts" not in sys.modules
    with plugins.only({"sys": "0"}), pytest.raises(ConfigError, match="'sys' has no files of its own"):
        config.parse('algorithm.name = "sys:exit"')


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("my_lib.parts:HalfStep", "there is no module 'my_lib' here; install its package"),
        ("my_lab.parts:HalfSteps", "my_lab.parts has no 'HalfSteps'; did you mean 'HalfStep'"),
        ("my_lab.parts:State", "must be a frozen dataclass with init, send"),
        ("fedavgg", "there is no algorithm called 'fedavgg'; did you mean 'fedavg'"),
        (f"my_lab{'.a' * 2000}:HalfStep", "cannot be imported|there is no module"),
    ],
)
def test_names_that_cannot_be_found_are_explained(lab, name, why):
    with pytest.raises(ConfigError, match=why):
        config.parse(f'algorithm.name = "{name}"')


def test_what_cannot_be_read_back_is_refused_before_training(lab, tmp_path):
    half = config.parse('algorithm.name = "my_lab.parts:HalfStep"').algorithm

    @dataclass(frozen=True)
    class Local(type(half)):
        pass

    with pytest.raises(ConfigError, match="Local is defined in a function, so the run could not be resumed"):
        ps.train(replace(SMALL, algorithm=Local()), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_own_layout(lab, tmp_path):
    for k in range(3):
        for letter, array in (("a", np.random.rand(5, 5, 5)), ("b", np.eye(5, dtype=np.uint8)[None].repeat(5, 0))):
            nibabel.save(nibabel.Nifti1Image(array.astype(np.float32), np.eye(4)), tmp_path / f"{letter}{k}.nii.gz")
    found = layouts.scan(tmp_path, "my_lab.parts:pairs_by_letter").manifest
    assert [r.case for r in found.rows] == ["0", "1", "2"]
    assert ps.Files(str(tmp_path), format="my_lab.parts:pairs_by_letter").label_names == ("label_1",)
    for odd in ("shutil:rmtree", "my_lab.parts:HalfStep"):
        with pytest.raises(ConfigError, match=r"a function of a folder, annotated to return list\[Row\]"):
            layouts.scan(tmp_path, odd)
    assert (tmp_path / "a0.nii.gz").exists()
    with pytest.raises(ConfigError, match="there is no format called 'letterz'"):
        layouts.scan(tmp_path, "letterz")


def test_any_network_of_monai(tmp_path):
    arguments = {"init_filters": 8, "blocks_down": [1, 2], "blocks_up": [1]}
    text = config.dump(replace(SMALL, model=ps.Monai("SegResNet", arguments)))
    study = config.parse(text)
    assert study.model.arguments == arguments and 'network = "SegResNet"' in text
    run = ps.train(study, tmp_path / "run", evaluate=False)
    assert len(run.folder.records()) == 2
    bundle = serve_model(tmp_path / "run")
    about = json.loads((bundle / "configs" / "metadata.json").read_text())
    assert set(about["required_packages_version"]) == {"nibabel"}
    shown = json.loads((bundle / "configs" / "inference.json").read_text())["network_def"]
    assert shown["_target_"] == "monai.networks.nets.SegResNet" and shown["in_channels"] == 4


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (torch.nn.Conv3d(1, 1, 1), "model is of the type Conv3d, which is no model of polysite"),
        (ps.UNet, r"model is the class UNet, .* give an instance such as ps.UNet\(\)"),
        (ps.Monai("SegResnet"), "MONAI has no network called 'SegResnet'; did you mean 'SegResNet'"),
        (
            ps.Monai("SegResNet", {"init_filter": 8}),
            "MONAI's SegResNet has no argument 'init_filter'; did you mean 'init_f",
        ),
        (ps.Monai("UNETR"), r"MONAI's UNETR\(.*\) cannot be built: .*img_size"),
        (
            ps.Monai("DenseNet", {"block_config": [1, 1], "init_features": 4}),
            r"16\] with \[1, 3\] instead of logits of",
        ),
    ],
)
def test_a_wrong_model_is_a_sentence(model, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        ps.train(replace(SMALL, model=model), tmp_path / "run")
    assert not (tmp_path / "run").exists()
