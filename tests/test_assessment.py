"""An assessment from files to the page: what is measured of a case, what is kept, what is refused, what is written."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest
from PIL import Image

import polysite as ps
from polysite import assessment, config
from polysite.config import Study
from polysite.data import layouts, manifest
from polysite.data.cache import Cache, place
from polysite.data.case import Case, CaseRef
from polysite.data.files import Files
from polysite.data.phantom import draw, write
from polysite.data.prepare import Prepare
from polysite.data.slices import Slices
from polysite.errors import ConfigError, DataError, PolysiteError, RunError
from polysite.heterogeneity.analysis import random_case_angles
from polysite.heterogeneity.exchange import Assess
from polysite.models.encoders import Bundled, Embedder
from polysite.payload import Payload
from polysite.training.assessed_site import TorchAssessedSite
from studies import SHAPE, tiny

HOSPITALS = {
    "north": ps.Hospital(5),
    "south": ps.Hospital(5, scanner=3, contrast=0.8),
    "west": ps.Hospital(4, tumour=0.7),
}
FAST = Assess(cases="all", permutations=99, resamples=100)
DRAWN = Study(data=ps.Phantom(SHAPE, HOSPITALS), assess=FAST)


def written(root, hospitals):
    """Hospitals of drawn scans as files, with their manifest."""
    for site, h in hospitals.items():
        write((draw(h, site=site, index=i, seed=0, shape=SHAPE) for i in range(h.cases)), root)
    found = layouts.scan(root, labels=manifest.parse_labels("WT=1,2,4; TC=1,4; ET=4")).manifest
    manifest.write(found, root / "manifest.csv")
    return root


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    return written(tmp_path_factory.mktemp("scans"), HOSPITALS)


def of(scans, **changes):
    return Study(data=Files(str(scans / "manifest.csv")), assess=FAST, **changes)


def found(given, folder):
    return assessment.assess(given, folder).assessment


def site(*cases, embedder=None, dims=3, prepare=None):
    """A hospital that holds these cases, and no cache."""
    patients = [CaseRef(c.site, c.name, lambda c=c: c, dict) for c in cases]
    names = tuple(f"m{k}" for k in range(len(cases[0].image)))
    return TorchAssessedSite("a", patients, names, ("WT",), dims, False, prepare or Prepare(), embedder, NO_CACHE)


NO_CACHE = SimpleNamespace(recall=lambda *_: None, keep=lambda *_: None)


def case(name="1", unit="mm", spacing=(1.0, 2.0, 3.0), seed=0):
    rng = np.random.default_rng(seed)
    label = np.zeros((1, 8, 9, 10), np.uint8)
    label[0, 2:4, 3:6, 4:5] = 1
    return Case("a", name, rng.normal(100, 9, (2, 8, 9, 10)).astype(np.float32), label, spacing, unit=unit)


def test_what_is_measured_of_a_case():
    """The largest intensity as stored, and the volume in millilitres by the voxel size of the header."""
    one, two = case("1"), case("2", spacing=(2.0, 2.0, 2.0), seed=1)
    measured = site(one, two).features("metadata")
    assert list(measured) == ["intensity m0", "intensity m1", "volume WT", "metric"]
    np.testing.assert_array_equal(measured["intensity m1"], [one.image[1].max(), two.image[1].max()])
    np.testing.assert_allclose(measured["volume WT"], [6 * 6 / 1000, 6 * 8 / 1000])
    voxels = site(case("1"), case("2", unit="")).features("metadata")  # of one the size is not known
    np.testing.assert_allclose(voxels["volume WT"], [0.006, 0.006])
    assert (measured["metric"] == 3).all() and (voxels["metric"] == 0).all()


def test_every_modality_is_embedded_by_itself_and_a_missing_one_is_zero():
    embedder, full, lacking = Embedder(Bundled()), case("1"), case("2")
    lacking.image[1] = 0
    embedded = site(full, lacking, embedder=embedder).features("embedding")["embedding"]
    assert embedded.shape == (2, 2, embedder.channels, 2) and not embedded[1, 1].any() and embedded[0, 1].any()
    prepared = Prepare().apply(full, (1, 1, 1)).image
    np.testing.assert_allclose(embedded[0], embedder(list(prepared)), rtol=1e-4, atol=1e-5)
    dark = replace(full, name="9", image=np.zeros((2, 8, 9, 10), np.float32))
    with pytest.raises(DataError, match="case '9' of site 'a': every voxel of every modality is zero"):
        site(dark, embedder=embedder).features("metadata")


def test_flat_cases_dark_ones_and_what_is_not_acquired():
    flat = Case("a", "1", np.full((2, 8, 9), -3.0, np.float32), np.ones((1, 8, 9), np.uint8), (1.0, 2.0))
    flat.image[0, 0, 0], flat.image[1] = -1, 0
    host = site(flat, dims=2, prepare=Prepare(normalise="none"))
    measured, absent = host.features("metadata"), host.features("absent")
    assert measured["volume WT"] == pytest.approx(72 * 2 / 100)  # square centimetres
    assert measured["intensity m0"] == -1 and measured["intensity m1"] == 0
    assert [bool(absent[k]) for k in ("intensity m0", "intensity m1", "volume WT")] == [False, True, False]
    assert host.prepare.normalise == "nonzero"  # the encoder knows nothing else


@pytest.mark.page
def test_what_an_assessment_leaves_behind(tmp_path):
    done = ps.assess(replace(DRAWN, run=ps.Plan(pooled=True)), tmp_path / "found")
    inside = {p.name for p in done.folder.iterdir()}
    assert inside == {"index.html", "figures", "strategies", "assessment.json", "distances.csv"}
    assert [p.name for p in tmp_path.iterdir()] == ["found"]
    numbers, distances = json.loads((done.folder / "assessment.json").read_text()), done.assessment.distances
    assert numbers["sites"] == ["north", "south", "west"] and numbers["distances"].keys() == distances.keys()
    assert numbers["distances"]["emd"]["matrix"] == distances["emd"].matrix.tolist()
    assert numbers["verdict"]["summary"] == done.verdict.summary
    files = {file for strategy in done.verdict.strategies for file in strategy.files}
    assert {p.name for p in (done.folder / "strategies").iterdir()} == files
    for file in files:
        ready = config.load(done.folder / "strategies" / file)
        assert ready.data == DRAWN.data and ready.seed == 0 and not ready.run.pooled
    hosts = assessment.assessed_sites(DRAWN).known
    cases = {s: FAST.vectors(hosts[s].features("embedding")["embedding"]) for s in hosts}
    again = random_case_angles(cases, DRAWN.seed)
    assert all((again[n] == m).all() for n, m in done.assessment.case_angles.items())
    text = (done.folder / "index.html").read_text()
    assert "Between random cases" in text and "between the means of two hospitals" in text
    with pytest.raises(RunError, match="no assessment overwrites anything"):
        ps.assess(DRAWN, tmp_path / "found")


def test_under_secure_sums_an_assessment_needs_noise(tmp_path):
    """Each hospital's own sums leave under noise, so the masks change nothing of it."""
    masked = {"run": {"secure": {"use": "on"}}}
    with pytest.raises(ConfigError, match=r"set assess\.private\.epsilon"):
        ps.assess(config.vary(DRAWN, masked), tmp_path / "open")
    noisy = config.vary(DRAWN, {"assess": {"private": {"epsilon": 8.0}}})
    plain = ps.assess(noisy, tmp_path / "plain")
    found = ps.assess(config.vary(noisy, masked), tmp_path / "masked")
    for name, distance in plain.assessment.distances.items():
        np.testing.assert_array_equal(found.assessment.distances[name].matrix, distance.matrix)
    assert found.verdict == plain.verdict
    assert any('use = "on"' in file.read_text() for file in (tmp_path / "masked" / "strategies").iterdir())


@pytest.mark.slow
def test_every_study_that_is_advised_runs(tmp_path):
    """On hospitals of which one is far out: weights, groups and the yardstick train as they are written."""
    hospitals = {"a": 6, "b": 6, "c": 6, "e": ps.Hospital(6, tumour=0.4, missing=("t1", "t2"))}
    train = {"patch": (8, 8, 8), "window": SHAPE, "overlap": 0.0}
    base = tiny(hospitals, train=train, run={"rounds": 1}, assess=replace(FAST, permutations=1999))
    done = ps.assess(base, tmp_path / "found")
    assert [s.name for s in done.verdict.strategies][:2] == ["weighted", "clustered"]
    for strategy in done.verdict.strategies:
        run = ps.train(config.load(done.folder / "strategies" / strategy.file), tmp_path / f"run {strategy.rank}")
        assert set(run.dice()) == set(hospitals)


def test_files_are_described_once_and_as_drawn_cases(scans, tmp_path, monkeypatch):
    """A second assessment opens no scan and embeds nothing."""
    first, drawn = found(of(scans), tmp_path / "1"), found(DRAWN, tmp_path / "drawn")
    with monkeypatch.context() as patched:
        patched.setattr(Embedder, "__call__", lambda self, volumes: pytest.fail("embedded again"))
        patched.setattr("polysite.data.files.open_case", lambda *a, **k: pytest.fail("opened again"))
        again = found(of(scans), tmp_path / "2")
    for name, d in first.distances.items():
        assert (again.distances[name].matrix == d.matrix).all()
        np.testing.assert_allclose(d.matrix, drawn.distances[name].matrix, rtol=1e-4, atol=1e-5)
    assert drawn.quantities["volume WT"].unit == "mL"


def test_another_preparation_or_encoder_is_described_anew(scans, monkeypatch):
    def embedded(given):
        return assessment.assessed_sites(given).known["north"].features("embedding")["embedding"]

    first = embedded(of(scans))
    assert not np.allclose(first, embedded(of(scans, prepare=Prepare(normalise="all"))))
    np.testing.assert_array_equal(first, embedded(of(scans)))
    monkeypatch.setattr(Bundled, "fingerprint", "another")
    monkeypatch.setattr(Embedder, "__call__", lambda self, volumes: np.ones((len(volumes), self.channels, 2)))
    assert (embedded(of(scans)) == 1).all()


def test_a_damaged_description_is_made_again(scans):
    first = assessment.assessed_sites(of(scans)).known["north"].features("metadata")
    entries = [p for p in Cache(place()).root.iterdir() if p.is_file()]
    for entry in entries:
        content = bytearray(entry.read_bytes())
        content[-9] ^= 0xFF
        entry.write_bytes(content)
    again = assessment.assessed_sites(of(scans)).known["north"].features("metadata")
    assert all((first[k] == again[k]).all() for k in first) and len(entries) == 5


def test_only_training_cases_unless_all_are_wanted(tmp_path):
    few = found(replace(DRAWN, assess=replace(FAST, cases="train", fewest=1)), tmp_path / "1")
    assert few.cases == {"north": 3, "south": 3, "west": 2}


def test_a_modality_that_was_not_acquired_is_a_finding(scans, tmp_path):
    """Not an error: it is told, and the studies that are written let it in."""
    head, *rows = ((line.split(",")) for line in (scans / "manifest.csv").read_text().splitlines())
    column = head.index("t2")
    rows = [[*r[:column], "", *r[column + 1 :]] if "west" in r else r for r in rows]
    lacking = scans / "lacking.csv"
    lacking.write_text("\n".join(map(",".join, [head, *rows])) + "\n")
    done = assessment.assess(replace(of(scans), data=Files(str(lacking))), tmp_path / "x")
    assert "t2 was never acquired at west" in [f.text for f in done.verdict.findings]
    common = next(s for s in done.verdict.strategies if s.name == "common-modalities")
    ready = config.load(done.folder / "strategies" / common.file)
    assert ready.data.allow == ("missing",) and "t2" not in ready.data.modalities
    assert ready.data.path == str(lacking)


def holed(path):
    image = nibabel.load(path)
    values = image.get_fdata().astype(np.float32)
    values[3, 3, 3] = np.nan
    nibabel.save(nibabel.nifti1.Nifti1Image(values, image.affine), path)


@pytest.mark.parametrize("harm", [lambda p: p.write_bytes(p.read_bytes()[:100]), holed, Path.unlink])
def test_bad_files_are_named_and_nothing_is_written(harm, tmp_path):
    root = written(tmp_path / "scans", {"north": ps.Hospital(3), "south": ps.Hospital(3)})
    harm(root / "south" / "south-001" / "t2.nii.gz")
    with pytest.raises(PolysiteError, match=r"south-001"):
        assessment.assess(of(root), tmp_path / "found")
    assert not list(tmp_path.glob("*found*"))


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*given, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("polysite.assessment.assess_page.write", full)
    with pytest.raises(RunError, match=r"could not be written: .*No space left"):
        assessment.assess(DRAWN, tmp_path / "found")
    assert list(tmp_path.iterdir()) == []


def test_flat_images_and_classes(tmp_path):
    """2D pictures of two classes: their shares are compared like volumes, and pictures are embedded like volumes."""
    rng, rows = np.random.default_rng(0), ["site,case,image,class"]
    for name, ill in (("north", 6), ("south", 2)):
        for k in range(8):
            file = tmp_path / f"{name}{k}.png"
            Image.fromarray(rng.integers(1, 255, (20, 24), np.uint8)).save(file)
            rows.append(f"{name},{k},{file},{'ill' if k < ill else 'well'}")
    (tmp_path / "m.csv").write_text("\n".join(rows) + "\n")
    given = {"data.name": "files", "data.path": str(tmp_path / "m.csv"), "train.patch": "[16, 16]"}
    base = config.parse("", {**given, "model.name": "densenet_small", "assess.cases": "all"})
    flat = found(base, tmp_path / "found")
    ill = flat.quantities["class ill"]
    assert ill.mean * ill.divisors["north"] == pytest.approx(0.5)
    assert list(flat.distances) == ["emd", "euclidean", "energy"]


def test_nothing_but_the_reply_leaves(scans):
    """What crosses is what was declared: no array has the size of a scan, none is of a single case."""
    engine = assessment.assessed_sites(of(scans))
    sent = engine.algorithm.send(engine.algorithm.init({}, []), engine.names)
    assert all(p == Payload() for p in sent.values())
    for name, reply in engine.train(0, sent):
        assert reply.payload.keys() == FAST.reply.keys()
        assert reply.payload.nbytes < 60_000, name


def test_slices_are_assessed_as_whole_volumes(scans):
    """A study of slices measures what the study of its volumes does, and its strategies keep the slices."""
    train = ps.Train(patch=(16, 16), device="cpu")
    cut = of(scans, slices=Slices("axial", most=2), train=train, prepare=Prepare(spacing=(2.0, 1.0, 1.0)))
    whole = of(scans, prepare=Prepare(orientation="SPL", spacing=(2.0, 1.0, 1.0)))
    for name, host in assessment.assessed_sites(cut).known.items():
        other = assessment.assessed_sites(whole).known[name]
        assert host.size == other.size == HOSPITALS[name].cases and host.dims == 3
        for kind in ("metadata", "embedding"):
            one, two = host.features(kind), other.features(kind)
            assert all(np.array_equal(one[k], two[k]) for k in two)
