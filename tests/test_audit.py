"""The audit: attacks that work where something leaks and fail where nothing does; and what is said about it."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import polysite as ps
from browser import browse
from polysite import cli, config
from polysite import study as studies
from polysite.audit import numbers as audits
from polysite.audit.numbers import audit, rescanned
from polysite.data.case import Case, CaseRef
from polysite.errors import ConfigError, RunError
from polysite.heterogeneity.exchange import directions
from polysite.models import MODELS
from polysite.report import audit_page
from polysite.report.audit_page import AttackedNumbers, Finding, Ratio
from polysite.training.attack import Scans, Settings, attack, average, errors, hospital, matched, settings_of
from polysite.training.decoders import residual
from studies import SHAPE, text

QUICK = Settings(side=16, epochs=40, restarts=1)
TINY = text({"north": 8, "south": "cases = 8, tumour = 0.7"}, patch=8)


def heads(cases=60, side=16, seed=0):
    """Balls with a bright spot somewhere inside: (spots, volumes, masks)."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, side)] * 3, indexing="ij"))
    inside = (np.square(grid).sum(0) < 1).astype(np.float32)
    spots = rng.uniform(-0.55, 0.55, (cases, 3))
    away = np.square(grid[None] - spots[:, :, None, None, None]).sum(1)
    volumes = inside * (3 * np.exp(-away / 0.1) + 0.1 * rng.standard_normal(away.shape))
    return spots, volumes[:, None].astype(np.float32), np.repeat(inside[None, None], cases, 0)


def attacked(vectors, volumes, inside, settings=QUICK, seed=0):
    """Of 60 cases: 40 to learn from, 10 to choose by, 10 to be judged by."""
    known = Scans(tuple("ab"[k % 2] for k in range(len(vectors))), np.asarray(vectors, float), volumes, inside)
    parts = (known.part(range(*ends)) for ends in ((0, 40), (40, 50), (50, 60)))
    return attack(*parts, settings, seed, torch.device("cpu"))


def ratio(outcome, name=None):
    return outcome.errors[name or outcome.chosen].mean() / outcome.errors["average"].mean()


def test_where_the_vector_is_the_shrunk_scan_or_the_place_of_the_tumour_attacks_succeed():
    spots, volumes, inside = heads()
    blocks = volumes.reshape(60, 4, 4, 4, 4, 4, 4).mean((2, 4, 6)).reshape(60, -1)
    found = attacked(blocks, volumes, inside)
    assert ratio(found) < 0.4 and ratio(found, "network") < 0.4 and ratio(found, "linear") < 0.6
    assert ratio(found, "compressed") < 0.5  # the yardstick: as many numbers of the scan itself
    found = attacked(np.hstack([spots, np.zeros((60, 1))]), volumes, inside)  # and a number that never varies
    assert found.chosen == "network" and ratio(found) < 0.5 < ratio(found, "linear")
    assert ratio(found, "nearest") < 1 and found.coefficients == 4


def test_random_vectors_tell_nothing():
    _, volumes, inside = heads()
    found = attacked(np.random.default_rng(1).standard_normal((60, 30)), volumes, inside)
    assert 0.95 <= ratio(found) < 1.1 and ratio(found, "nearest") > 1.3
    assert np.isclose(ratio(found, "hospital"), 1, atol=0.1)  # hospitals are alike here


def test_errors_and_means_count_the_inside_only():
    volumes = np.array([[[1.0, 2.0]], [[3.0, 9.0]]], np.float32)
    scans = Scans(("a", "b"), np.zeros((2, 1)), volumes, np.array([[[1, 1]], [[1, 0]]], np.float32))
    np.testing.assert_allclose(average(scans), [[2.0, 2.0]])  # the 9 is outside
    np.testing.assert_allclose(errors(np.zeros((2, 1, 2)), scans), [2.5, 9.0])
    np.testing.assert_allclose(hospital(scans, "b"), [[3.0, 0.0]])
    np.testing.assert_allclose(hospital(scans, "a stranger"), average(scans))


def test_patients_are_found_by_what_is_steady_in_them():
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((50, 6))
    learn, probe = list(range(30)), list(range(30, 50))
    assert matched(vectors, vectors + 5.0, learn, probe).all()  # all move alike, which is learned
    assert matched(vectors, rng.permutation(vectors), learn, probe).mean() < 0.2
    noisy, again = (np.hstack([vectors, 20 * rng.standard_normal((50, 40))]) for _ in range(2))
    assert matched(noisy, again, learn, probe).all()  # six steady numbers among forty that are not
    same = np.ones((50, 3))
    assert matched(same, same, learn, probe).mean() <= 0.1


def test_a_second_scan_is_another_of_the_same_patient():
    image = np.zeros((2, 12, 12, 12), np.float32)
    image[0, 2:10, 2:10, 2:10] = np.random.default_rng(0).normal(100, 10, (8, 8, 8))
    label = (image[:1] > 0).astype(np.uint8)
    patient = CaseRef("a", "1", lambda: Case("a", "1", image.copy(), label), dict, files=(Path("x"),))
    again = rescanned(patient, 0)
    scan = again.open()
    assert not again.files and scan.name == "1"
    np.testing.assert_array_equal(scan.image != 0, image != 0)  # outside, and what was not acquired, stays zero
    gain = scan.image[0].sum() / image[0].sum()
    off = (scan.image[0] / gain - image[0])[image[0] != 0]
    assert 0.89 < gain < 1.11 and off.std() == pytest.approx(1.0, rel=0.1)  # a tenth of the deviation
    np.testing.assert_array_equal(scan.image, again.open().image)
    assert (rescanned(patient, 1).open().image != scan.image).any()
    assert 0.6 < scan.label.sum() / label.sum() < 1.2


def finding(value=0.98, low=0.93, high=1.02, found=18, probes=20, words="<b>features"):
    near = Ratio(1.5, 1.4, 1.6)
    ratios = dict.fromkeys(("linear", "nearest", "hospital", "compressed"), near) | {"network": Ratio(value, low, high)}
    return Finding("radiomics", words, 372, "It stays.", ratios, "network", 10, 9, 10**6, found, probes, 50)


def test_verdicts_in_plain_words():
    """Whether an attack is better than guessing, and what the worst of them made of it."""
    for given, said in (
        ((0.98, 0.93, 1.02), "not significantly better, with 10 test cases, than by guessing the average scan"),
        ((0.77, 0.7, 0.84), "removes 23 % of the error of guessing the average scan (error ratio 0.770, 95 %"),
        ((1.2, 1.1, 1.3), "rebuilds the scan worse than by guessing the average scan (error ratio 1.200, "),
    ):
        assert said in finding(*given).verdict
    weak, strong = finding(0.9, 0.85, 0.95, found=0), finding(0.5, 0.4, 0.6, found=20, words="embedding")
    assert "(90 %, 95 % interval 70–97 %)" in finding().recognition
    assert weak.recognition.startswith("The numbers do not identify patients: 0 of 20")
    assert "on the embedding, removes 50 %" in AttackedNumbers([weak, strong]).summary
    assert AttackedNumbers([finding()]).summary.endswith("not a proof of privacy.")


def test_words_are_letters_never_markup(tmp_path):
    cases = {"train": 30, "validation": 10, "test": 10}
    about = {"cases": cases, "modalities": ["<i>t1"], "noise": 0.1, "gain": 0.1, "side": 16, "epochs": 1, "restarts": 1}
    about |= {"decoder": "small", "config": "<script>", "versions": {"polysite": "0"}}
    views = [("$x_1$ <b>", {"scan": np.eye(16), "average": np.zeros((16, 16))})]
    found = AttackedNumbers([replace(finding(), leaves="<script>")], views)
    page = audit_page.write(tmp_path / "audit", found, about).folder / "index.html"
    shown = page.read_text(encoding="utf-8")
    assert "<b>features" not in shown and "<i>t1" not in shown and "&lt;b&gt;features" in shown
    assert shown.count("<script>") == 1 and "$x_1$" in re.sub(r"<[^>]+>", "", shown)  # that of the sorting


def test_the_papers_decoder_has_the_papers_layers_size_and_settings():
    net = residual(93, (1, 128, 128, 128))
    assert sum(p.numel() for p in net.parameters()) == 19_262_817  # 19.3 million
    kinds = [type(layer).__name__ for layer in net]
    assert kinds == ["Linear", "Unflatten", "BatchNorm3d", "LeakyReLU", *6 * ["Block"],
                     "Conv3d", "BatchNorm3d", "LeakyReLU", "Conv3d"]  # fmt: skip
    assert net[0].out_features == 4096 and net[1].unflattened_size == (512, 2, 2, 2)
    assert {m.negative_slope for m in net.modules() if isinstance(m, torch.nn.LeakyReLU)} == {0.2}
    assert net[:7](torch.randn(2, 93)).shape[1:] == (64, 16, 16, 16)
    paper = settings_of("paper")
    assert (paper.side, paper.epochs, paper.batch, paper.rate, paper.restarts) == (128, 300, 2, 1e-4, 1)
    assert settings_of("paper", rate=1e-5, side=None).rate == 1e-5 and settings_of("small") == Settings()
    with pytest.raises(ConfigError, match="take 16, 32, 64 or 128"):
        settings_of("paper", side=48)
    with pytest.raises(ConfigError, match=r"--decoder papre: .*paper"):
        settings_of("papre")


@pytest.fixture
def polysite(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["polysite", "audit", "tiny.toml", *map(str, words)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def test_an_audit_from_the_command_line(polysite, tmp_path):
    code, out, err = polysite("--side", 16, "--epochs", 2, "--restarts", 1, "--out", "found")
    assert code == 0, err
    assert "372" in out and "not a proof of privacy" in out and "found/index.html" in out
    assert {p.name for p in (tmp_path / "found").iterdir()} == {"index.html", "audit.json", "curves.csv", "figures"}
    saved = json.loads((tmp_path / "found" / "audit.json").read_text())
    sizes = {f["kind"]: f["numbers"] for f in saved["findings"]}
    assert sizes.pop("components") <= 30
    assert sizes == {"radiomics": 372, "embedding": 1024, "directions": 64, "quantities": 7}
    for f in saved["findings"]:
        of = [[c["errors"][f["kind"]][name] for c in saved["test"]] for name in (f["chosen"], "average")]
        assert f["ratios"][f["chosen"]]["value"] == pytest.approx(np.mean(of[0]) / np.mean(of[1]))
        assert f["gallery"] == 16 and f["probes"] == 8
    page = tmp_path / "found" / "index.html"
    shown = page.read_text(encoding="utf-8")
    assert all(f["verdict"] in shown and f["leaves"] in shown for f in saved["findings"]) and saved["summary"] in shown
    assert set(re.findall(r'https?://[^"]*', shown)) <= set(re.findall(r'xmlns(?::xlink)?="(https?://[^"]*)"', shown))
    for width in (1280, 390):
        seen = browse(page, "return document.documentElement.scrollWidth <= innerWidth", width=width)
        assert seen.result and not seen.errors
    assert polysite("--out", "found")[0] == 2  # never overwrites


REFUSED = {
    "--what radiomic": "did you mean 'radiomics'?",
    "--what embedding --set assess.projections=0": "this study sends no embeddings",
    "--modality flar": "did you mean 'flair'?",
    "--side 30": "side = 30: a multiple of 8",
    "--epochs 0": "epochs = 0 must be at least 1",
    "--set data.sites.south.cases=2": "at least 8 train, 2 validation, 2 test cases with t1, and there are",
    "--out tiny.toml/below": "is no folder that can be written to",
}


@pytest.mark.parametrize(("words", "said"), REFUSED.items())
def test_what_is_refused_is_refused_in_one_sentence(polysite, tmp_path, words, said):
    code, out, err = polysite(*words.split())
    assert code == 2 and not out and said in err and err.count("\n") == 1 and not (tmp_path / "audits").exists()


def test_an_audit_that_fails_leaves_nothing(monkeypatch, tmp_path):
    def fail(*given):
        raise OSError("the disk is full")

    monkeypatch.setattr(audit_page, "curves_csv", fail)
    study = config.parse(TINY, {"assess.projections": "0"})
    with pytest.raises(RunError, match="the disk is full"):
        audit(study, "quantiles", tmp_path / "found", settings=replace(QUICK, epochs=1))
    assert list(tmp_path.iterdir()) == []


def test_the_numbers_are_those_that_are_sent():
    """Radiomics as a site extracts them, and the rest as an assessment tells it, case by case."""
    study = config.parse(TINY)
    dealt = {s: {k: v[:1] for k, v in parts.items()} for s, parts in studies.deal_cases(study).items()}
    found = audits._vectors(study, dealt, tuple(audits.KINDS), lambda words: None)
    patients = [p for parts in dealt.values() for k in ("train", "validation", "test") for p in parts[k]]
    sites = studies.build_sites(study, dealt)
    own = sites[patients[0].site].radiomics([patients[0].name], 0.09)
    np.testing.assert_array_equal(found["radiomics"][0], own[0])
    size = found["embedding"].shape[1]  # of both components, one after the other
    along = directions(size, 64).reshape(64, size // 2, 2).transpose(0, 2, 1).reshape(64, size)
    np.testing.assert_allclose(found["directions"], found["embedding"] @ along.T)
    last = patients[-1].open()
    np.testing.assert_allclose(found["quantities"][-1][:4], last.image.max((1, 2, 3)))
    np.testing.assert_allclose(found["quantities"][-1][4:], last.label.sum((1, 2, 3)) / 1000)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({}, "sums and counts over the cases of a site and of"), ({"fit": "pooled"}, "the features of every case")],
)
def test_what_really_leaves_depends_on_the_study(settings, said):
    study = ps.Study(then=({"algorithm": {"name": "cfft", **settings}, "run": {"rounds": 200}},))
    assert audits._leaves("components", study).startswith(f"This study sends {said}")
    assert "never that of one case" in audits._leaves("embedding", study)
    alone = replace(study, assess=replace(study.assess, fewest=1))
    assert "never" not in audits._leaves("embedding", alone)  # the mean of one case is that case


def test_flat_images_of_a_classification(tmp_path):
    data = ps.PhantomClasses(SHAPE, sites={"a": ps.Hospital(10, healthy=0.5), "b": ps.Hospital(10, healthy=0.4)})
    train = ps.Train(patch=(16, 16), window=(16, 16), device="cpu")
    study = ps.Study(data=data, model=MODELS["densenet_small"], train=train)
    done = audit(study, out=tmp_path / "found", settings=replace(QUICK, epochs=1))
    assert {f.kind for f in done.found.findings} == set(audits.OF["all"]) == set(audits.KINDS) - {"modality"}
    assert done.found.findings[0].numbers == 372 and (done.folder / "figures" / "pictures.svg").exists()
