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
from polysite.audit import findings
from polysite.audit import numbers as audits
from polysite.audit.decoders import residual
from polysite.audit.findings import Estimate, Finding, Row
from polysite.audit.numbers import audit, rescanned
from polysite.audit.vectors import Rebuilt, Scans, Settings, average, errors, matched, rebuild, settings_of
from polysite.data.case import Case, CaseRef
from polysite.errors import ConfigError, RunError
from polysite.heterogeneity.exchange import directions
from polysite.models import MODELS
from polysite.report.drawing import pictures
from studies import SHAPE, text

QUICK = Settings(side=16, epochs=40)
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
    known = Scans(np.asarray(vectors, float), volumes, inside)
    parts = (known.part(range(*ends)) for ends in ((0, 40), (40, 50), (50, 60)))
    return rebuild(*parts, settings, seed, torch.device("cpu"))


def ratio(outcome):
    return outcome.errors.mean() / outcome.usual.mean()


def test_where_the_vector_is_the_shrunk_scan_or_the_place_of_the_tumour_attacks_succeed():
    spots, volumes, inside = heads()
    blocks = volumes.reshape(60, 4, 4, 4, 4, 4, 4).mean((2, 4, 6)).reshape(60, -1)
    assert ratio(attacked(blocks, volumes, inside)) < 0.4
    assert ratio(attacked(np.hstack([spots, np.zeros((60, 1))]), volumes, inside)) < 0.5  # and one that never varies


def test_the_papers_decoder_is_trained_by_whole_volumes():
    spots, volumes, inside = heads(8)
    known = Scans(spots, volumes + 1, 0 * inside)  # no voxel is inside a head, and yet there is an error
    parts = known.part(range(4)), known.part(range(4, 6)), replace(known.part(range(6, 8)), inside=inside[6:])
    found = rebuild(*parts, settings_of("paper", side=16, epochs=2, rate=1e-3), 0, torch.device("cpu"))
    assert len(found.training) == 2 and np.isfinite([found.training, found.validation]).all()
    assert found.volumes.shape == (2, 1, 16, 16, 16) and np.isfinite(found.errors).all()


def test_random_vectors_tell_nothing():
    _, volumes, inside = heads()
    found = attacked(np.random.default_rng(1).standard_normal((60, 30)), volumes, inside)
    assert 0.95 <= ratio(found) < 1.1
    assert int(np.argmin(found.validation)) < 40 == len(found.training)


def test_errors_and_means_count_the_inside_only():
    volumes = np.array([[[1.0, 2.0]], [[3.0, 9.0]]], np.float32)
    scans = Scans(np.zeros((2, 1)), volumes, np.array([[[1, 1]], [[1, 0]]], np.float32))
    np.testing.assert_allclose(average(scans), [[2.0, 2.0]])  # the 9 is outside
    np.testing.assert_allclose(errors(np.zeros((2, 1, 2)), scans), [2.5, 9.0])


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


def row(name, value, low, high, chance=1.0, leaks=False):
    return Row(name, "<b>numbers", Estimate(value, low, high), chance, leaks)


def finding(*rows, id="scans", **more):
    return Finding(id, "Are scans <i>rebuilt?", "They <script> are not.", "error ratio", "what", rows, "", (), **more)


def test_estimates_have_intervals():
    assert Estimate.rate(np.array([True] * 18 + [False] * 2)).words == "0.90 (0.70–0.97)"
    errors = np.random.default_rng(0).uniform(0.5, 1.5, 40)
    found = Estimate.ratio(errors, np.ones(40))
    assert found.low < found.value < found.high and found.value == pytest.approx(errors.mean())


def test_answers_name_the_strongest_attack():
    """Whether patients are identified and scans rebuilt, and by what."""
    words = {"radiomics": "372 numbers: x", "assessment": "7 numbers: y"}
    hits = {"radiomics": np.array([True] * 20), "assessment": np.array([False] * 20)}
    found = audits._recognised(hits, words, 50)
    assert found.answer.startswith(
        "The numbers identify patients: by the radiomic features of all modalities, 20 of 20"
    )
    assert [r.leaks for r in found.rows] == [True, False] and found.rows[0].chance == 1 / 50
    assert "a cfft phase sends sums and counts" in found.method[1] and "an assessment sends" in found.method[2]
    nobody = audits._recognised({"assessment": hits["assessment"]}, words, 50)
    assert nobody.answer.startswith("The numbers do not identify patients: ")
    about = {"decoder": "small", "modality": "t1", "epochs": 9}
    usual = np.random.default_rng(0).uniform(0.9, 1.1, 30)
    made = [Rebuilt(np.zeros(1), np.zeros(1), share * usual, usual, [1.0], [1.0]) for share in (0.5, 1.0)]
    found = audits._rebuilt(dict(zip(words, made, strict=True)), words, about, ())
    assert "Something of the scans is rebuilt: from the radiomic features of all modalities, with 0.50" in found.answer
    assert [r.leaks for r in found.rows] == [True, False]
    found = audits._rebuilt({"assessment": made[1]}, words, about, ())
    assert found.answer.startswith("Scans are not rebuilt better than by guessing: ")


def test_words_are_letters_never_markup(tmp_path):
    about = {"config": "<script>", "versions": {"polysite": "0"}}
    views = [("$x_1$ <b>", {"scan": np.eye(16), "average": np.zeros((16, 16))})]
    drawn = findings.picture(pictures(views, 1.15, 1.16), "pictures", "<i>Cases", "<i>Slices")
    found = finding(row("<b>features", 0.9, 0.8, 1.0), pictures=(drawn,))
    page = findings.write(tmp_path / "audit", "An audit", [found], ["<script>"], about).folder / "index.html"
    shown = page.read_text(encoding="utf-8")
    assert "<b>features" not in shown and "<i>" not in shown and "&lt;b&gt;features" in shown
    assert shown.count("<script>") == 1 and "$x_1$" in re.sub(r"<[^>]+>", "", shown)  # that of the sorting


def test_the_papers_decoder_has_the_papers_layers_size_and_settings():
    net = residual(93, (1, 128, 128, 128))
    assert sum(p.numel() for p in net.parameters()) == 19_275_185  # 19.3 million, as its authors' program
    kinds = [type(layer).__name__ for layer in net]
    assert kinds == ["Linear", "LeakyReLU", "Unflatten", *6 * ["Block"],
                     "Conv3d", "BatchNorm3d", "LeakyReLU", "Conv3d"]  # fmt: skip
    assert net[0].out_features == 4096 and net[2].unflattened_size == (512, 2, 2, 2)
    assert net[:6](torch.randn(2, 93)).shape[1:] == (64, 16, 16, 16)
    paper = settings_of("paper")
    assert (paper.side, paper.epochs, paper.batch, paper.rate) == (128, 300, 2, 1e-4)
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
    code, out, err = polysite("--side", 16, "--epochs", 2, "--out", "found")
    assert code == 0, err
    assert "372" in out and "not a proof of privacy" in out and "found/index.html" in out
    assert {p.name for p in (tmp_path / "found").iterdir()} == {"index.html", "audit.json", "figures"}
    saved = json.loads((tmp_path / "found" / "audit.json").read_text())
    known, rebuilt = saved["findings"]
    for r in rebuilt["rows"]:
        size = {"radiomics": 372, "assessment": 1024 + 64 + 7}[r["name"]]
        of = rebuilt["errors"][r["name"]]
        assert r["words"].startswith(f"{size} numbers: ") and len(rebuilt["curves"][r["name"]]["validation"]) == 2
        assert r["estimate"]["value"] == pytest.approx(np.mean(of["attack"]) / np.mean(of["average"]))
    assert [r["chance"] for r in known["rows"]] == [1 / 16] * 2 and "of 8 second scans" in known["answer"]
    page = tmp_path / "found" / "index.html"
    shown = page.read_text(encoding="utf-8")
    assert all(f["answer"] in shown for f in saved["findings"]) and saved["summary"] in shown
    assert set(re.findall(r'https?://[^"]*', shown)) <= set(re.findall(r'xmlns(?::xlink)?="(https?://[^"]*)"', shown))
    for width in (1280, 390):
        seen = browse(page, "return document.documentElement.scrollWidth <= innerWidth", width=width)
        assert seen.result and not seen.errors
    assert polysite("--out", "found")[0] == 2  # never overwrites


REFUSED = {
    "--what radiomic": "did you mean 'radiomics'?",
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
    def fail(*given, **options):
        raise OSError("the disk is full")

    monkeypatch.setattr(findings.json, "dumps", fail)
    with pytest.raises(RunError, match="the disk is full"):
        findings.write(tmp_path / "found", "", [], [], {"config": "", "versions": {"polysite": "0"}})
    assert list(tmp_path.iterdir()) == []


def test_the_numbers_are_those_that_are_sent():
    """Radiomics as a site extracts them, and the rest as an assessment tells it, case by case."""
    study = config.parse(TINY)
    dealt = {s: {k: v[:1] for k, v in parts.items()} for s, parts in studies.deal_cases(study).items()}
    found = audits._vectors(study, dealt, tuple(audits.KINDS), 2, lambda words: None)
    patients = [p for parts in dealt.values() for k in ("train", "validation", "test") for p in parts[k]]
    sites = studies.build_sites(study, dealt)
    own = sites[patients[0].site].radiomics([patients[0].name], 0.09)
    np.testing.assert_array_equal(found["radiomics"][0], own[0])
    np.testing.assert_array_equal(found["modality"][0], own[0][2 * 93 : 3 * 93])
    last, (quantities, mean, along) = patients[-1].open(), np.split(found["assessment"], [7, 7 + 1024], 1)
    np.testing.assert_allclose(quantities[-1][:4], last.image.max((1, 2, 3)))
    np.testing.assert_allclose(quantities[-1][4:], last.label.sum((1, 2, 3)) / 1000)
    # of both components of the embedding, one after the other
    axes = directions(1024, 64).reshape(64, 512, 2).transpose(0, 2, 1).reshape(64, 1024)
    np.testing.assert_allclose(along, mean @ axes.T)
    bare = replace(study, assess=replace(study.assess, projections=0))
    assert audits._vectors(bare, dealt, ("assessment",), 0, lambda words: None)["assessment"].shape == (
        len(patients),
        7,
    )


def test_flat_images_of_a_classification(tmp_path):
    data = ps.PhantomClasses(SHAPE, sites={"a": ps.Hospital(10, healthy=0.5), "b": ps.Hospital(10, healthy=0.4)})
    train = ps.Train(patch=(16, 16), window=(16, 16), device="cpu")
    study = ps.Study(data=data, model=MODELS["densenet_small"], train=train)
    done = audit(study, out=tmp_path / "found", settings=replace(QUICK, epochs=1))
    rows = done.findings[1].rows
    assert [r.name for r in rows] == ["radiomics", "assessment"]
    assert rows[0].words.startswith("372 numbers") and (done.folder / "figures" / "pictures.svg").exists()
