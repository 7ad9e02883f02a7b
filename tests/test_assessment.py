"""An assessment from files to the page: what is measured of a case, what is kept, what is refused, what is written."""

import json
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image

import polysite as ps
from polysite import assessment, config
from polysite.config import Study
from polysite.data.cache import Cache, place
from polysite.data.case import Case, CaseRef
from polysite.data.files import Files
from polysite.data.phantom import Hospital, draw, write
from polysite.data.prepare import Prepare
from polysite.data.slices import Slices
from polysite.data.sources import Phantom
from polysite.errors import ConfigError, DataError, PolysiteError, RunError
from polysite.heterogeneity.assessment import random_case_angles
from polysite.heterogeneity.exchange import Assess
from polysite.models.encoders import Bundled, Embedder
from polysite.payload import Payload
from polysite.training.assessed_site import TorchAssessedSite

SIDE = (24, 24, 24)
HOSPITALS = {"north": Hospital(5), "south": Hospital(5, scanner=3, contrast=0.8), "west": Hospital(4, tumour=0.7)}
FAST = Assess(cases="all", permutations=99, resamples=100)
LABELS = "WT=1,2,4; TC=1,4; ET=4"


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Three hospitals of drawn scans as files, with their manifest."""
    from polysite.data import layouts, manifest

    root = tmp_path_factory.mktemp("scans")
    for site, h in HOSPITALS.items():
        write((draw(h, site=site, index=i, seed=0, shape=SIDE) for i in range(h.cases)), root)
    manifest.write(layouts.scan(root, labels=manifest.parse_labels(LABELS)).manifest, root / "manifest.csv")
    return root


def of(scans, **changes):
    return Study(data=Files(str(scans / "manifest.csv")), assess=FAST, **changes)


def site(*cases, embedder=None, labels=("WT",), dims=3, cache=None):
    """A hospital that holds these cases."""
    patients = [CaseRef(c.site, c.name, lambda c=c: c, dict) for c in cases]
    names = tuple(f"m{k}" for k in range(len(cases[0].image)))
    return TorchAssessedSite("a", patients, names, labels, dims, False, Prepare(), embedder, cache)


class NoCache:
    def recall(self, patient, how):
        return None

    def keep(self, patient, how, made):
        pass


def case(name="1", unit="mm", spacing=(1.0, 2.0, 3.0), seed=0):
    rng = np.random.default_rng(seed)
    label = np.zeros((1, 8, 9, 10), np.uint8)
    label[0, 2:4, 3:6, 4:5] = 1
    return Case("a", name, rng.normal(100, 9, (2, 8, 9, 10)).astype(np.float32), label, spacing, unit=unit)


def test_what_is_measured_of_a_case():
    """The largest intensity as stored, and the volume in millilitres by the voxel size of the header."""
    one, two = case("1"), case("2", spacing=(2.0, 2.0, 2.0), seed=1)
    found = site(one, two, cache=NoCache()).features("metadata")
    assert list(found) == ["intensity m0", "intensity m1", "volume WT", "metric"]
    np.testing.assert_array_equal(found["intensity m1"], [one.image[1].max(), two.image[1].max()])
    np.testing.assert_allclose(found["volume WT"], [6 * 6 / 1000, 6 * 8 / 1000])
    assert (found["metric"] == 3).all()


def test_one_case_without_a_voxel_size_and_all_count_voxels():
    found = site(case("1"), case("2", unit=""), cache=NoCache()).features("metadata")
    np.testing.assert_allclose(found["volume WT"], [0.006, 0.006])
    assert (found["metric"] == 0).all()


def test_every_modality_is_embedded_by_itself_and_a_missing_one_is_zero():
    embedder = Embedder(Bundled())
    full, lacking = case("1"), case("2")
    lacking.image[1] = 0
    found = site(full, lacking, embedder=embedder, cache=NoCache()).features("embedding")["embedding"]
    assert found.shape == (2, 2, embedder.channels, 2)
    assert not found[1, 1].any() and found[0, 1].any()
    prepared = Prepare().apply(full, (1, 1, 1)).image
    np.testing.assert_allclose(found[0], embedder(list(prepared)), rtol=1e-4, atol=1e-5)


def test_a_case_without_any_signal_is_refused():
    dark = replace(case("9"), image=np.zeros((2, 8, 9, 10), np.float32))
    with pytest.raises(DataError, match="case '9' of site 'a': every voxel of every modality is zero"):
        site(dark, embedder=Embedder(Bundled()), cache=NoCache()).features("metadata")


def test_without_an_encoder_no_embedding():
    with pytest.raises(DataError, match="'a' was not given an encoder"):
        site(case(), cache=NoCache()).features("embedding")


@pytest.mark.page
def test_what_an_assessment_leaves_behind(tmp_path):
    data = Phantom(SIDE, HOSPITALS)
    done = ps.assess(Study(data=data, assess=FAST, run=ps.Plan(pooled=True)), tmp_path / "found")
    inside = {p.name for p in done.folder.iterdir()}
    assert inside == {"index.html", "figures", "strategies", "assessment.json", "distances.csv"}
    assert [p.name for p in tmp_path.iterdir()] == ["found"]
    numbers = json.loads((done.folder / "assessment.json").read_text())
    assert numbers["sites"] == ["north", "south", "west"] and set(numbers["distances"]) == set(
        done.assessment.distances
    )
    assert numbers["distances"]["emd"]["matrix"] == done.assessment.distances["emd"].matrix.tolist()
    assert numbers["verdict"]["summary"] == done.verdict.summary
    files = {file for strategy in done.verdict.strategies for file in strategy.files}
    assert {p.name for p in (done.folder / "strategies").iterdir()} == files
    for file in files:
        ready = config.load(done.folder / "strategies" / file)
        assert ready.data == data and ready.seed == 0 and not ready.run.pooled
    shows_angles_between_random_cases(done, Study(data=data, assess=FAST))
    with pytest.raises(RunError, match="no assessment overwrites anything"):
        ps.assess(Study(data=data, assess=FAST), tmp_path / "found")


def shows_angles_between_random_cases(done, given):
    """Those of the seed, named as such on the page; the angles between means stay."""
    found, hosts = done.assessment, assessment.assessed_sites(given).sites
    cases = {s: given.assess.vectors(hosts[s].features("embedding")["embedding"]) for s in found.sites}
    again = random_case_angles(cases, given.seed)
    assert all((again[n] == m).all() for n, m in found.case_angles.items()) and found.angles.keys() == again.keys()
    text = (done.folder / "index.html").read_text()
    assert "Between random cases" in text and "between the means of two hospitals" in text
    assert (done.folder / "figures" / "case-angles-component-2.png").is_file()


class Sideways(Bundled):
    """An encoder of other features: the bundled one's channels, the sign of the volume reversed."""

    fingerprint = "sideways"

    def build(self):
        network = super().build()
        network.register_forward_pre_hook(lambda module, given: (-given[0],))
        return network


def test_another_encoder_may_name_another_outlier(tmp_path, monkeypatch):
    monkeypatch.setitem(assessment.ENCODERS, "sideways", Sideways)
    base = Study(data=Phantom(SIDE, HOSPITALS), assess=replace(FAST, other_encoders=("sideways",)))
    found = assessment.assess(base, tmp_path / "1").assessment
    own = assessment.assess(replace(base, encoder=Sideways()), tmp_path / "2").assessment
    assert found.alternatives["euclidean"] == {'encoder.name = "sideways"': own.distances["euclidean"].outlier}
    assert own.alternatives["euclidean"] == {}  # it is the study's own


def test_other_encoders_are_checked_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(assessment, "assessed_sites", lambda *given: pytest.fail("measured"))
    base = Study(data=Phantom(SIDE, HOSPITALS), assess=FAST)
    for names, text in ((("deepbett",), "did you mean 'deepbet'"), (("medicalnet",), "encoder.path is missing")):
        with pytest.raises(ConfigError, match=text):
            assessment.assess(replace(base, assess=replace(FAST, other_encoders=names)), tmp_path / "found")


def test_components_summed_over_positions_have_the_paper_s_size():
    """sqrt(P) times the mean's: two positions a side of 16 voxels make eight."""
    volume = np.random.default_rng(0).normal(size=(16, 16, 16)).astype(np.float32)
    mean, total = Embedder(Bundled()), Embedder(Bundled(), positions="sum")
    np.testing.assert_allclose(total([volume]), mean([volume]) * np.sqrt(8), rtol=1e-5)
    assert total.fingerprint != mean.fingerprint
    base = Study(data=Phantom(SIDE, HOSPITALS), assess=replace(FAST, positions="sum"))
    assert assessment.assessed_sites(base).sites["north"].embedder.positions == "sum"


@pytest.mark.slow
def test_every_study_that_is_advised_runs(tmp_path):
    """On hospitals of which one is far out: weights, groups and the yardstick train as they are written."""
    hospitals = {**{s: Hospital(6) for s in ("a", "b", "c")}, "e": Hospital(6, tumour=0.4, missing=("t1", "t2"))}
    base = Study(data=Phantom(SIDE, hospitals), assess=replace(FAST, permutations=1999))
    train = ps.Train(patch=(8, 8, 8), window=(24, 24, 24), overlap=0.0, device="cpu")
    base = replace(base, model=ps.UNet(filters=(2, 4, 4)), train=train)
    done = ps.assess(replace(base, run=ps.Plan(rounds=1)), tmp_path / "found")
    assert [s.name for s in done.verdict.strategies][:2] == ["weighted", "clustered"]
    for strategy in done.verdict.strategies:
        run = ps.train(config.load(done.folder / "strategies" / strategy.file), tmp_path / f"run {strategy.rank}")
        assert set(run.dice()) == set(hospitals)


def test_files_are_described_once(scans, tmp_path, monkeypatch):
    """A second assessment opens no scan and embeds nothing."""
    first = assessment.assess(of(scans), tmp_path / "1").assessment
    with monkeypatch.context() as patched:
        patched.setattr(Embedder, "__call__", lambda self, volumes: pytest.fail("embedded again"))
        patched.setattr("polysite.data.files.open_case", lambda *a, **k: pytest.fail("opened again"))
        again = assessment.assess(of(scans), tmp_path / "2").assessment
    assert (again.distances["energy"].matrix == first.distances["energy"].matrix).all()


def test_another_preparation_or_encoder_is_described_anew(scans, monkeypatch):
    def embedded(given):
        return assessment.assessed_sites(given).sites["north"].features("embedding")["embedding"]

    first = embedded(of(scans))
    assert not np.allclose(first, embedded(of(scans, prepare=Prepare(normalise="all"))))
    np.testing.assert_array_equal(first, embedded(of(scans)))
    monkeypatch.setattr(Bundled, "fingerprint", "another")
    monkeypatch.setattr(Embedder, "__call__", lambda self, volumes: np.ones((len(volumes), self.channels, 2)))
    assert (embedded(of(scans)) == 1).all()


def test_a_damaged_description_is_made_again(scans):
    first = assessment.assessed_sites(of(scans)).sites["north"].features("metadata")
    (entries,) = [[p for p in Cache(place()).root.iterdir() if p.is_file()]]
    for entry in entries:
        content = bytearray(entry.read_bytes())
        content[-9] ^= 0xFF
        entry.write_bytes(content)
    again = assessment.assessed_sites(of(scans)).sites["north"].features("metadata")
    assert all((first[k] == again[k]).all() for k in first) and len(entries) == 5


def test_flat_cases_dark_ones_and_what_is_not_acquired():
    flat = Case("a", "1", np.full((2, 8, 9), -3.0, np.float32), np.ones((1, 8, 9), np.uint8), (1.0, 2.0))
    flat.image[0, 0, 0], flat.image[1] = -1, 0
    host = site(flat, dims=2, cache=NoCache())
    found, absent = host.features("metadata"), host.features("absent")
    assert found["volume WT"] == pytest.approx(72 * 2 / 100)  # square centimetres
    assert found["intensity m0"] == -1 and found["intensity m1"] == 0
    assert [bool(absent[k]) for k in ("intensity m0", "intensity m1", "volume WT")] == [False, True, False]
    raw = TorchAssessedSite(
        "a", host.refs, host.modalities, ("WT",), 2, False, Prepare(normalise="none"), None, NoCache()
    )
    assert raw.prepare.normalise == "nonzero"  # the encoder knows nothing else


def test_files_and_drawn_cases_give_the_same_answer(scans, tmp_path):
    drawn = Study(data=Phantom(SIDE, HOSPITALS), assess=FAST)
    one, other = (
        assessment.assess(drawn, tmp_path / "1").assessment,
        assessment.assess(of(scans), tmp_path / "2").assessment,
    )
    for name, d in one.distances.items():
        np.testing.assert_allclose(d.matrix, other.distances[name].matrix, rtol=1e-4, atol=1e-5)
    assert one.quantities["volume WT"].unit == "mL"


def test_the_wire_changes_nothing(scans, tmp_path):
    plain = assessment.assess(of(scans), tmp_path / "1").assessment
    wired = assessment.assess(of(scans, run=ps.Plan(wire=True)), tmp_path / "2").assessment
    assert all((d.matrix == wired.distances[n].matrix).all() for n, d in plain.distances.items())


def test_only_training_cases_unless_all_are_wanted(scans, tmp_path):
    found = assessment.assess(
        replace(of(scans), assess=replace(FAST, cases="train", fewest=1)), tmp_path / "1"
    ).assessment
    assert found.cases == {"north": 3, "south": 3, "west": 2}


def test_a_modality_that_was_not_acquired_is_a_finding(scans, tmp_path):
    """Not an error: it is told, and the studies that are written let it in."""
    table = (scans / "manifest.csv").read_text().splitlines()
    column = table[0].split(",").index("t2")

    def blank(line):
        cells = line.split(",")
        cells[column] = "" if "west" in line else cells[column]
        return ",".join(cells)

    (scans / "lacking.csv").write_text("\n".join([table[0], *map(blank, table[1:])]) + "\n")
    done = assessment.assess(replace(of(scans), data=Files(str(scans / "lacking.csv"))), tmp_path / "x")
    assert "t2 was never acquired at west" in [f.text for f in done.verdict.findings]
    common = next(s for s in done.verdict.strategies if s.name == "common-modalities")
    ready = config.load(done.folder / "strategies" / common.file)
    assert ready.data.allow == ("missing",) and "t2" not in ready.data.modalities
    assert ready.data.path == str(scans / "lacking.csv")


def damaged(path):
    path.write_bytes(path.read_bytes()[:100])


def holed(path):
    image = nibabel.load(path)
    values = image.get_fdata().astype(np.float32)
    values[3, 3, 3] = np.nan
    nibabel.save(nibabel.nifti1.Nifti1Image(values, image.affine), path)


@pytest.mark.parametrize("harm", [damaged, holed, lambda p: p.unlink()])
def test_bad_files_are_named_and_nothing_is_written(harm, tmp_path):
    from polysite.data import layouts, manifest

    root = tmp_path / "scans"
    for name in ("north", "south"):
        write((draw(Hospital(), site=name, index=i, seed=0, shape=SIDE) for i in range(3)), root)
    manifest.write(layouts.scan(root, labels=manifest.parse_labels(LABELS)).manifest, root / "manifest.csv")
    harm(root / "south" / "south-001" / "t2.nii.gz")
    with pytest.raises(PolysiteError, match=r"south-001"):
        assessment.assess(of(root), tmp_path / "found")
    assert not list(tmp_path.glob("*found*"))


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*given, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("polysite.assessment.assess_page.write", full)
    with pytest.raises(RunError, match=r"could not be written: .*No space left"):
        assessment.assess(Study(data=Phantom(SIDE, HOSPITALS), assess=FAST), tmp_path / "found")
    assert list(tmp_path.iterdir()) == []


def test_flat_images_and_classes(tmp_path):
    """2D pictures of two classes: their shares are compared like volumes, and pictures are embedded like volumes."""
    rng = np.random.default_rng(0)
    for name, ill in (("north", 6), ("south", 2)):
        for k in range(8):
            folder = tmp_path / "scans" / name / ("ill" if k < ill else "well")
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(1, 255, (20, 24), np.uint8)).save(folder / f"{name}{k}.png")
    rows = [f"{p.parts[-3]},{p.stem},{p},{p.parts[-2]}" for p in sorted(tmp_path.glob("scans/*/*/*.png"))]
    (tmp_path / "m.csv").write_text("\n".join(["site,case,image,class", *rows]) + "\n")
    given = {"data.name": "files", "data.path": str(tmp_path / "m.csv"), "train.patch": "[16, 16]"}
    base = config.parse("", {**given, "model.name": "densenet_small", "assess.cases": "all"})
    found = assessment.assess(base, tmp_path / "found").assessment
    ill = found.quantities["class ill"]
    assert ill.mean * ill.divisors["north"] == pytest.approx(0.5)
    assert list(found.distances) == ["emd", "euclidean", "energy", "mmd", "frechet"]


def test_nothing_but_the_reply_leaves(scans):
    """What crosses is what was declared: no array has the size of a scan, none is of a single case."""
    engine = assessment.assessed_sites(of(scans))
    sent = engine.algorithm.send(engine.algorithm.init({}, []), engine.names)
    assert all(p == Payload() for p in sent.values())
    for name, reply in engine.train(0, sent):
        assert reply.payload.keys() == FAST.reply.keys()
        assert reply.payload.nbytes < 60_000, name


def test_sorted_kidneys(shared):
    """Fed-KiTS: dealt out by size, client 5 is the most distant and goes with client 4; the distance has risen."""
    from runpy import run_path

    bench = run_path(str(Path(__file__).parents[1] / "bench" / "assess.py"))
    natural, by_size = bench["kits"](False), bench["kits"](True)
    distance = by_size.distances["emd"]
    assert distance.outlier == "client-5" and distance.named["client-5"] == 1
    assert distance.clusters == (("client-1", "client-2", "client-3"), ("client-4", "client-5"))
    (before,), (after,) = natural.quantities.values(), by_size.quantities.values()
    assert after.mean > 2 * before.mean
    assert [after.values[f"client-{k}"].size for k in range(1, 6)] == [12, 14, 12, 12, 16]


@pytest.mark.page
@pytest.mark.slow
@pytest.mark.soak
def test_real_hospitals(shared, tmp_path):
    """TCGA-LGG: CS looks unlike the others to the encoder, by more than chance; no millimetres are made up."""
    base = Study(data=Files(str(shared / "tcga_lgg"), exclude=("EZ",)), assess=replace(FAST, permutations=1999))
    done = assessment.assess(base, tmp_path / "found")
    found = done.assessment
    assert found.cases == {"CS": 14, "DU": 14, "FG": 12, "HT": 14}
    assert found.distances["energy"].outlier == "CS" and found.distances["energy"].alone["CS"] < 0.01
    assert {q.unit for q in found.quantities.values()} == {"as stored", "1000 voxels"}
    assert "mL" not in (done.folder / "index.html").read_text()


def test_slices_are_assessed_as_whole_volumes(scans):
    """A study of slices measures what the study of its volumes does, and its strategies keep the slices."""
    train = ps.Train(patch=(16, 16), device="cpu")
    cut = of(scans, slices=Slices("axial", most=2), train=train, prepare=Prepare(spacing=(2.0, 1.0, 1.0)))
    whole = of(scans, prepare=Prepare(orientation="SPL", spacing=(2.0, 1.0, 1.0)))
    for name, host in assessment.assessed_sites(cut).sites.items():
        other = assessment.assessed_sites(whole).sites[name]
        assert host.size == other.size == HOSPITALS[name].cases and host.dims == 3
        for kind in ("metadata", "embedding"):
            one, two = host.features(kind), other.features(kind)
            assert all(np.array_equal(one[k], two[k]) for k in two)
