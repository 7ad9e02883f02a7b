"""The audit: attacks that work where something leaks and fail where nothing does; and what is said about it."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from browser import browse
from polysite import cli, config
from polysite import study as studies
from polysite.audit import numbers as audits
from polysite.audit.numbers import audit, rescanned
from polysite.config import Study
from polysite.data.case import Case, CaseRef
from polysite.data.phantom import Hospital
from polysite.data.sources import Phantom, PhantomClasses
from polysite.errors import ConfigError, RunError
from polysite.heterogeneity.exchange import directions
from polysite.models import MODELS
from polysite.report import audit_page
from polysite.report.audit_page import AttackedNumbers, Finding, Ratio
from polysite.training import decoders
from polysite.training.attack import Scans, Settings, attack, average, errors, hospital, matched, settings_of, shrunk
from polysite.training.decoders import residual
from polysite.training.settings import Train

CPU = torch.device("cpu")
QUICK = Settings(side=16, epochs=40, restarts=1)
TINY = """
[model]
filters = [2, 4, 4]
[data]
shape = [24, 24, 24]
[data.sites.north]
cases = 8
[data.sites.south]
cases = 8
tumour = 0.7
[train]
patch = [8, 8, 8]
device = "cpu"
"""


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
    return attack(*parts, settings, seed, CPU)


def ratio(outcome, name=None):
    return outcome.errors[name or outcome.chosen].mean() / outcome.errors["average"].mean()


def test_where_the_vector_is_the_shrunk_scan_both_attacks_succeed():
    _, volumes, inside = heads()
    blocks = volumes.reshape(60, 4, 4, 4, 4, 4, 4).mean((2, 4, 6)).reshape(60, -1)
    found = attacked(blocks, volumes, inside)
    assert ratio(found) < 0.4 and ratio(found, "network") < 0.4 and ratio(found, "linear") < 0.6
    assert ratio(found, "compressed") < 0.5  # the yardstick: as many numbers of the scan itself


def test_where_the_vector_tells_the_place_of_the_tumour_the_decoder_finds_it():
    spots, volumes, inside = heads()
    found = attacked(np.hstack([spots, np.zeros((60, 1))]), volumes, inside)  # and a number that never varies
    assert found.chosen == "network" and ratio(found) < 0.5 < ratio(found, "linear")
    assert ratio(found, "nearest") < 1 and found.coefficients == 4


def test_random_vectors_tell_nothing():
    _, volumes, inside = heads()
    found = attacked(np.random.default_rng(1).standard_normal((60, 30)), volumes, inside)
    assert 0.95 <= ratio(found) < 1.1 and ratio(found, "nearest") > 1.3
    assert np.isclose(ratio(found, "hospital"), 1, atol=0.1)  # hospitals are alike here


def test_the_same_seed_gives_the_same_numbers():
    spots, volumes, inside = heads()
    short = replace(QUICK, epochs=2)
    first, second, other = (attacked(spots, volumes, inside, short, seed) for seed in (3, 3, 4))
    for name, each in first.errors.items():
        np.testing.assert_array_equal(each, second.errors[name])
    assert (first.errors["network"] != other.errors["network"]).any()


def test_flat_images_and_several_modalities_are_rebuilt_too():
    rng = np.random.default_rng(0)
    flat = np.broadcast_to(rng.standard_normal((60, 2, 1, 1)), (60, 2, 16, 16)).astype(np.float32)
    found = attacked(flat[:, :, 0, 0], flat, np.ones((60, 1, 16, 16), np.float32))
    assert found.rebuilt["network"].shape == (10, 2, 16, 16) and ratio(found) < 0.1


def test_errors_and_means_count_the_inside_only():
    volumes = np.array([[[1.0, 2.0]], [[3.0, 9.0]]], np.float32)
    scans = Scans(("a", "b"), np.zeros((2, 1)), volumes, np.array([[[1, 1]], [[1, 0]]], np.float32))
    np.testing.assert_allclose(average(scans), [[2.0, 2.0]])  # the 9 is outside
    np.testing.assert_allclose(errors(np.zeros((2, 1, 2)), scans), [2.5, 9.0])
    np.testing.assert_allclose(hospital(scans, "b"), [[3.0, 0.0]])
    np.testing.assert_allclose(hospital(scans, "a stranger"), average(scans))


def test_shrinking_takes_means_and_keeps_constants():
    image, mask = shrunk(np.arange(64.0).reshape(1, 8, 8), np.arange(64).reshape(8, 8) >= 32, 4)
    np.testing.assert_allclose(image[0, 0], [4.5, 6.5, 8.5, 10.5])
    np.testing.assert_array_equal(mask[0, :, 0], [0, 0, 1, 1])
    grown, _ = shrunk(np.full((1, 3, 5, 4), 7.0), np.ones((3, 5, 4), bool), 16)
    assert grown.shape == (1, 16, 16, 16) and np.allclose(grown, 7)


def test_patients_are_found_by_what_is_steady_in_them():
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((50, 6))
    learn, probe = list(range(30)), list(range(30, 50))
    assert matched(vectors, vectors, learn, probe).all()
    assert matched(vectors, vectors + 5.0, learn, probe).all()  # all move alike, which is learned
    assert matched(vectors, rng.permutation(vectors), learn, probe).mean() < 0.2
    noisy = np.hstack([vectors, 20 * rng.standard_normal((50, 40))])
    again = np.hstack([vectors, 20 * rng.standard_normal((50, 40))])
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


def test_a_ratio_of_means_with_its_interval():
    """Against resampled ratios, drawn one by one."""
    rng = np.random.default_rng(0)
    below = rng.uniform(1, 3, 40)
    above = 0.3 * below**2 * rng.normal(1, 0.1, 40)  # hard cases are rebuilt worse: no mean of single ratios
    found = Ratio.of(above, below)
    drawn = rng.integers(0, 40, (4000, 40))
    low, high = np.quantile(above[drawn].sum(1) / below[drawn].sum(1), [0.025, 0.975])
    assert found.value == pytest.approx(above.sum() / below.sum())
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.01)


def finding(value=0.98, low=0.93, high=1.02, found=18, probes=20):
    near = Ratio(1.5, 1.4, 1.6)
    ratios = dict.fromkeys(("linear", "nearest", "hospital", "compressed"), near) | {"network": Ratio(value, low, high)}
    return Finding("radiomics", "<b>features", 372, "It stays.", ratios, "network", 10, 9, 10**6, found, probes, 50)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            finding(),
            "not significantly better, with 10 test cases, than by guessing the average scan (error ratio 0.98",
        ),
        (finding(0.77, 0.7, 0.84), "removes 23 % of the error of guessing the average scan (error ratio 0.770, 95 %"),
        (finding(0.996, 0.99, 0.999), "removes less than 1 % of the error"),
        (finding(1.2, 1.1, 1.3), "rebuilds the scan worse than by guessing the average scan (error ratio 1.200, "),
    ],
)
def test_verdicts_in_plain_words(made, words):
    assert (
        made.verdict.startswith("From the 372 numbers of a case (<b>features), an attacker ") and words in made.verdict
    )
    assert "18 of 20" in made.recognition and "(90 %, 95 % interval 70–97 %)" in made.recognition
    assert replace(made, found=0).recognition.startswith("The numbers do not identify patients: 0 of 20")
    assert AttackedNumbers([made]).summary.endswith("not a proof of privacy.")


def test_tables_mark_the_chosen_attack_and_say_what_chance_is():
    one, other = finding(), replace(finding(), kind="embedding", chosen="linear")
    marked = [[cell.best for cell in line.cells] for line in audit_page.ratios([one, other]).lines]
    assert [row.index(True) for row in marked] == [2, 3] and sum(map(sum, marked)) == 2
    assert [c.text for c in audit_page.matches([one]).lines[0].cells[1:]] == ["18 of 20", "0.90 (0.70–0.97)", "0.020"]


def test_words_are_letters_never_markup(tmp_path):
    cases = {"train": 30, "validation": 10, "test": 10}
    about = {"cases": cases, "modalities": ["<i>t1"], "noise": 0.1, "gain": 0.1, "side": 16, "epochs": 1, "restarts": 1}
    about["decoder"] = "small"
    views = [("$x_1$ <b>", {"scan": np.eye(16), "average": np.zeros((16, 16))})]
    more = {"config": "<script>", "versions": {"polysite": "0"}}
    found = AttackedNumbers([replace(finding(), leaves="<script>")], views)
    page = audit_page.write(tmp_path / "audit", found, {**about, **more}).folder / "index.html"
    text = page.read_text(encoding="utf-8")
    assert "<b>features" not in text and "<i>t1" not in text and "&lt;b&gt;features" in text
    assert text.count("<script>") == 1 and "$x_1$" in re.sub(r"<[^>]+>", "", text)  # that of the sorting


def test_the_summary_names_the_worst():
    weak, strong = finding(0.9, 0.85, 0.95, found=0), replace(finding(0.5, 0.4, 0.6, found=20), words="embedding")
    assert "on the embedding, removes 50 %" in AttackedNumbers([weak, strong]).summary
    assert "From none of these" in AttackedNumbers([finding()]).summary
    assert "None of them matched second scans" in AttackedNumbers([weak]).summary


def test_the_papers_decoder_has_the_papers_layers_and_size():
    net = residual(93, (1, 128, 128, 128))
    assert sum(p.numel() for p in net.parameters()) == 19_262_817  # 19.3 million
    kinds = [type(layer).__name__ for layer in net]
    assert kinds == ["Linear", "Unflatten", "BatchNorm3d", "LeakyReLU", *6 * ["Block"], *kinds[-4:]]
    assert kinds[-4:] == ["Conv3d", "BatchNorm3d", "LeakyReLU", "Conv3d"]
    assert net[0].out_features == 4096 and net[1].unflattened_size == (512, 2, 2, 2)
    assert {m.negative_slope for m in net.modules() if isinstance(m, torch.nn.LeakyReLU)} == {0.2}
    x, shapes = net[:4](torch.randn(2, 93)), []
    for block in list(net[4:10])[:3]:
        x = block(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(256, 4, 4, 4), (128, 8, 8, 8), (64, 16, 16, 16)]
    assert residual(5, (2, 16, 16))(torch.randn(3, 5)).shape == (3, 2, 16, 16)  # flat images, too


def test_the_settings_of_the_papers_decoder():
    paper = settings_of("paper")
    assert (paper.side, paper.epochs, paper.batch, paper.rate, paper.restarts) == (128, 300, 2, 1e-4, 1)
    assert settings_of("paper", rate=1e-5, side=None).rate == 1e-5 and settings_of("small") == Settings()
    with pytest.raises(ConfigError, match="take 16, 32, 64 or 128"):
        settings_of("paper", side=48)
    with pytest.raises(ConfigError, match=r"--decoder papre: .*paper"):
        settings_of("papre")


def test_the_papers_decoder_learns_and_its_best_epoch_counts(monkeypatch):
    """It rebuilds whole volumes, so that what is outside counts in its loss; it is judged like the small one."""
    monkeypatch.setattr(decoders, "WIDEST", 32)
    rng = np.random.default_rng(0)
    bright = rng.uniform(-1, 1, 60)
    volumes = np.broadcast_to(bright[:, None, None, None], (60, 1, 16, 16)).astype(np.float32)
    settings = replace(settings_of("paper", side=16, epochs=6, rate=1e-3), batch=8)
    found = attacked(bright[:, None], volumes, np.ones((60, 1, 16, 16), np.float32), settings)
    (curve,) = found.curves
    assert len(curve.training) == len(curve.validation) == 6  # without patience
    assert curve.training[-1] < 0.5 * curve.training[0] and min(curve.validation) < 0.5 * curve.validation[0]
    assert ratio(found, "network") < 0.5


def test_loss_curves_of_all_restarts_are_kept():
    spots, volumes, inside = heads()
    found = attacked(spots, volumes, inside, Settings(side=16, epochs=3, restarts=2))
    assert [len(c.validation) for c in found.curves] == [3, 3]
    assert all(0 < v < 10 for c in found.curves for v in (*c.training, *c.validation))
    text = audit_page.curves_csv([replace(finding(), curves=found.curves)]).splitlines()
    assert text[0] == "kind,decoder,epoch,training,validation" and len(text) == 7
    assert text[4].startswith("radiomics,2,1,") and float(text[4].split(",")[4]) == pytest.approx(
        found.curves[1].validation[0], rel=1e-5
    )


@pytest.fixture
def polysite(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["polysite", "audit", *map(str, words)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def test_the_papers_attack_from_the_command_line(polysite, tmp_path, monkeypatch):
    """On the features of the modality that it rebuilds, with its losses as a figure and as numbers."""
    monkeypatch.setattr(decoders, "WIDEST", 16)
    words = ("--decoder", "paper", "--side", 16, "--epochs", 2, "--modality", "t2", "--no-scans", "--out", "found")
    code, _, err = polysite("tiny.toml", *words)
    assert code == 0, err
    saved = json.loads((tmp_path / "found" / "audit.json").read_text())
    (only,) = saved["findings"]
    assert (only["kind"], only["numbers"], saved["about"]["modalities"]) == ("modality", 93, ["t2"])
    assert saved["about"]["rate"] == 1e-4 and len(only["curves"][0]["validation"]) == 2
    assert {"curves.svg", "curves.png"} <= {p.name for p in (tmp_path / "found" / "figures").iterdir()}
    assert len((tmp_path / "found" / "curves.csv").read_text().splitlines()) == 3
    text = (tmp_path / "found" / "index.html").read_text(encoding="utf-8")
    assert "Loss curves" in text and "1 decoder of appendix F" in text and "whole volumes" in text


def test_an_audit_from_the_command_line(polysite, tmp_path):
    code, out, err = polysite("tiny.toml", "--side", 16, "--epochs", 2, "--restarts", 1, "--out", "found")
    assert code == 0, err
    assert "372" in out and "not a proof of privacy" in out and "found/index.html" in out
    assert {p.name for p in (tmp_path / "found").iterdir()} == {"index.html", "audit.json", "curves.csv", "figures"}
    saved = json.loads((tmp_path / "found" / "audit.json").read_text())
    sizes = {f["kind"]: f["numbers"] for f in saved["findings"]}
    assert sizes.pop("components") <= 30
    assert sizes == {"radiomics": 372, "embedding": 1024, "directions": 64, "quantities": 7}
    for f in saved["findings"]:
        mean = {
            name: np.mean([c["errors"][f["kind"]][name] for c in saved["test"]]) for name in (f["chosen"], "average")
        }
        assert f["ratios"][f["chosen"]]["value"] == pytest.approx(mean[f["chosen"]] / mean["average"])
        assert f["gallery"] == 16 and f["probes"] == 8
    page = tmp_path / "found" / "index.html"
    text = page.read_text(encoding="utf-8")
    assert all(f["verdict"] in text and f["leaves"] in text for f in saved["findings"]) and saved["summary"] in text
    assert set(re.findall(r'https?://[^"]*', text)) <= set(re.findall(r'xmlns(?::xlink)?="(https?://[^"]*)"', text))
    for width in (1280, 390):
        seen = browse(page, "return document.documentElement.scrollWidth <= innerWidth", width=width)
        assert seen.result and not seen.errors
    cut = "return [...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth).length"
    assert browse(page, cut).result == 0  # on a desk, no table is cut
    assert polysite("tiny.toml", "--out", "found")[0] == 2  # never overwrites


def test_json_and_quiet_and_without_scans(polysite, tmp_path):
    few = ("tiny.toml", "--what", "quantiles", "--set", "assess.projections=0", "--side", 16, "--epochs", 1)
    code, out, _ = polysite(*few, "--json", "--modality", "all", "--out", "a")
    saved = json.loads(out)
    assert code == 0 and [f["kind"] for f in saved["findings"]] == ["quantities"]
    assert saved["about"]["modalities"] == ["t1", "t1ce", "t2", "flair"]
    assert polysite(*few, "--quiet", "--no-scans", "--out", "b")[:2] == (0, "")
    assert (tmp_path / "a" / "figures" / "pictures.png").exists()
    assert not (tmp_path / "b" / "figures" / "pictures.png").exists()
    assert "images of patients" not in (tmp_path / "b" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--what", "radiomic"), "did you mean 'radiomics'?"),
        (("--what", "embedding", "--set", "assess.projections=0"), "this study sends no embeddings"),
        (("--modality", "flar"), "did you mean 'flair'?"),
        (("--side", "30"), "side = 30: a multiple of 8"),
        (("--epochs", "0"), "epochs = 0 must be at least 1"),
        (
            ("--set", "data.sites.south.cases=2"),
            "at least 8 train, 2 validation, 2 test cases with t1, and there are",
        ),
        (("--out", "tiny.toml/below"), "is no folder that can be written to"),
    ],
)
def test_what_is_refused_is_refused_in_one_sentence(polysite, tmp_path, words, said):
    code, out, err = polysite("tiny.toml", *words)
    assert code == 2 and not out and said in err and err.count("\n") == 1
    assert not (tmp_path / "audits").exists()


def test_an_audit_that_fails_leaves_nothing(monkeypatch, tmp_path):
    def fail(*given):
        raise OSError("the disk is full")

    monkeypatch.setattr(audit_page, "curves_csv", fail)
    study = replace(config.parse(TINY), assess=replace(Study().assess, projections=0))
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
    np.testing.assert_allclose(found["directions"], found["embedding"] @ _sorted_directions(found["embedding"]).T)
    last = patients[-1].open()
    np.testing.assert_allclose(found["quantities"][-1][:4], last.image.max((1, 2, 3)))
    np.testing.assert_allclose(found["quantities"][-1][4:], last.label.sum((1, 2, 3)) / 1000)


def _sorted_directions(embedding):
    """The directions of an assessment, for embeddings in which one component follows the other."""
    size = embedding.shape[1]
    return directions(size, 64).reshape(64, size // 2, 2).transpose(0, 2, 1).reshape(64, size)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (None, "none of them."),
        ({}, "sums and counts over the cases of a site and of its cases in every cluster, which may be"),
        ({"fewest": 5}, "sums and counts over the cases of a site, at least 5, "),
        ({"fit": "pooled"}, "the features of every case"),
    ],
)
def test_what_really_leaves_depends_on_the_study(settings, said):
    phase = {"algorithm": {"name": "cfft", **(settings or {})}, "run": {"rounds": 200}}
    changes, said = {} if settings is None else {"then": (phase,)}, f"This study sends {said}"
    assert audits._leaves("components", Study(**changes)).startswith(said)
    assert "never that of one case" in audits._leaves("embedding", Study(**changes))
    alone = replace(Study(**changes), assess=replace(Study().assess, fewest=1))
    assert "never" not in audits._leaves("embedding", alone)  # the mean of one case is that case


def test_cases_without_the_modality_are_not_rebuilt_but_may_be_found(tmp_path):
    sites = {"a": Hospital(14), "b": Hospital(3, missing=("t1",))}
    study = replace(config.parse(TINY), data=Phantom((24, 24, 24), sites))
    done = audit(study, "quantiles", tmp_path / "found", settings=replace(QUICK, epochs=1))
    saved = json.loads((done.folder / "audit.json").read_text())
    assert {c["site"] for c in saved["test"]} == {"a"} and sum(saved["about"]["cases"].values()) == 14
    assert done.found.findings[0].gallery == 17


def test_flat_images_of_a_classification(tmp_path):
    data = PhantomClasses((24, 24, 24), sites={"a": Hospital(10, healthy=0.5), "b": Hospital(10, healthy=0.4)})
    study = Study(data=data, model=MODELS["densenet_small"], train=Train(patch=(16, 16), window=(16, 16), device="cpu"))
    done = audit(study, out=tmp_path / "found", settings=replace(QUICK, epochs=1))
    assert {f.kind for f in done.found.findings} == set(audits.OF["all"]) == set(audits.KINDS) - {"modality"}
    assert done.found.findings[0].numbers == 372 and (done.folder / "figures" / "pictures.svg").exists()
