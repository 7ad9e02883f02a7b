"""From scans to a table of radiomics: what is in it, that it goes on where it was, who is told of outliers, and whether
scanners are found again."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from browser import browse
from polysite import cli, extract
from polysite.cluster.mixture import Mixture
from polysite.cluster.mixture import Settings as MixtureSettings
from polysite.config import Study
from polysite.data import layouts, manifest
from polysite.data.files import Files
from polysite.data.phantom import Hospital, draw, write
from polysite.data.prepare import Prepare
from polysite.data.sources import Phantom, PhantomClasses
from polysite.errors import ConfigError, DataError, RunError
from polysite.radiomics import NAMES, Settings, comparable, features
from polysite.report import clusters
from polysite.study import build_sites
from polysite.training.settings import Train

SIDE = (24, 24, 24)
WIDE = Settings(bin_width=0.15)


def study(data=None, **changes):
    return Study(data=data or Phantom(SIDE, {"north": Hospital(2), "south": Hospital(1, missing=("t2",))}), **changes)


@pytest.fixture
def scans(tmp_path):
    """Two hospitals of drawn scans as files, seven and five cases."""
    for site, count in {"north": 7, "south": 5}.items():
        write((draw(Hospital(), site=site, index=i, seed=0, shape=SIDE) for i in range(count)), tmp_path / "scans")
    labels = {"WT": (1, 2, 4), "TC": (1, 4), "ET": (4,)}
    manifest.write(layouts.scan(tmp_path / "scans", labels=labels).manifest, tmp_path / "manifest.csv")
    return tmp_path / "manifest.csv"


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def by_hand(case, settings=extract.PAPER, region=None):
    """Modalities x 93, of a prepared case."""
    region = (case.image != 0).any(0) if region is None else region
    return [list(features(m, region, spacing=case.spacing, settings=settings).values()) for m in case.image if m.any()]


def prepared(hospital, site, index):
    return Prepare().apply(draw(hospital, site=site, index=index, seed=0, shape=SIDE), [1, 1, 1])


def rewrite(file, change):
    """Change the voxels of a NIfTI file."""
    image = nibabel.load(file)
    voxels = change(np.asarray(image.dataobj).copy())
    nibabel.save(nibabel.Nifti1Image(voxels, image.affine, image.header), file)


def test_the_table_is_what_the_features_of_prepared_cases_are(tmp_path):
    """Of drawn hospitals; a modality that was not acquired has empty cells."""
    done = extract.run(study(), tmp_path / "out", settings=WIDE)
    assert done.table.columns[0] == "t1_firstorder_10Percentile" and len(done.table.columns) == 4 * len(NAMES) == 372
    listed, cases = rows(tmp_path / "out" / "features.csv"), [("north", 0), ("north", 1), ("south", 0)]
    for row, (site, index) in zip(listed, cases, strict=True):
        assert (row["site"], row["case"]) == (site, f"{site}-00{index}")
        hospital = study().data.sites[site]
        acquired = [m for m in ("t1", "t1ce", "t2", "flair") if m not in hospital.missing]
        for modality, values in zip(acquired, by_hand(prepared(hospital, site, index), WIDE), strict=True):
            assert [float(row[f"{modality}_{n}"]) for n in NAMES] == values  # to the last bit
        assert all(row[f"{m}_{n}"] == "" for m in hospital.missing for n in NAMES)
    assert done.about["remarks"][0] == "t2 was not acquired in 1 case of south: empty cells."


def test_a_second_run_opens_no_scan_and_other_settings_do(scans, tmp_path, monkeypatch):
    of = study(Files(str(scans)))
    extract.run(of, tmp_path / "one", settings=WIDE)
    monkeypatch.setattr("polysite.data.files.open_case", lambda *_: pytest.fail("a scan was opened"))
    extract.run(of, tmp_path / "two", settings=WIDE)
    assert (tmp_path / "one" / "features.csv").read_bytes() == (tmp_path / "two" / "features.csv").read_bytes()
    resampled = replace(of, prepare=Prepare(spacing=(2.0, 2.0, 2.0)))
    for asked, settings, label in ((of, Settings(bin_width=0.2), None), (of, WIDE, "WT"), (resampled, WIDE, None)):
        with pytest.raises(pytest.fail.Exception):
            extract.run(asked, tmp_path / "more", settings=settings, label=label)


def test_an_interrupted_run_goes_on_and_leaves_no_half_table(scans, tmp_path, monkeypatch):
    calls, stop = [], 4 * 5 + 2  # in the middle of the sixth case

    def counted(image, mask, **given):
        calls.append(1)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return features(image, mask, **given)

    monkeypatch.setattr(extract, "features", counted)
    with pytest.raises(KeyboardInterrupt):
        extract.run(study(Files(str(scans))), tmp_path / "out", settings=WIDE, jobs=1)
    assert not list(tmp_path.glob("*out*"))
    calls, stop = [], 0
    done = extract.run(study(Files(str(scans))), tmp_path / "out", settings=WIDE, jobs=1)
    # five were kept; perhaps a seventh, too, if the thread was faster than its end
    assert len(done.table.cases) == 12 and len(calls) in (4 * 6, 4 * 7)


def test_a_label_is_the_region_where_asked_for(scans, tmp_path):
    rewrite(scans.parent / "scans" / "north" / "north-001" / "seg.nii.gz", np.zeros_like)
    done = extract.run(study(Files(str(scans))), tmp_path / "out", label="TC")
    case = prepared(Hospital(), "north", 0)
    flair = done.table.values[0].reshape(4, -1)[done.table.modalities.index("flair")]
    np.testing.assert_array_equal(flair, by_hand(case, region=case.label[1] > 0)[3])
    assert np.isnan(done.table.values[1]).all() and not done.table.shares[1].any()
    assert done.about["remarks"] == ["1 case with fewer than two voxels of TC: empty cells."]
    grouped = extract.cluster(done.table, MixtureSettings(components=2, dimensions=3))
    assert len(grouped.names) == 11 and "north-001" not in grouped.table.cases


@pytest.mark.parametrize("how", ["nonzero", "all", "padded"])
def test_the_table_has_the_numbers_of_cfft(how):
    """Padded to the patch at the sites, and still the same brain."""
    heads = Phantom(SIDE, {"north": Hospital(3), "south": Hospital(2, missing=("t2",))})
    of = study(heads, prepare=Prepare(normalise=how), train=Train(patch=(32, 24, 40), device="cpu"))
    table, sites = extract.extract(of, WIDE), build_sites(of)
    for site, case, values in zip(table.sites, table.cases, comparable(table.values), strict=True):
        (own,) = sites[site].radiomics([case], WIDE.bin_width)
        np.testing.assert_allclose(values, own, rtol=1e-6, atol=1e-6)  # sums in another order, in single precision
        assert sites[site].shares(case) == pytest.approx(table.shares[table.cases.index(case)])
    plain = extract.extract(replace(of, prepare=Prepare()), WIDE)
    same = np.isclose(comparable(table.values), comparable(plain.values), rtol=0.05).mean()
    assert same == 1 if how == "nonzero" else same < 0.6  # other z-scores, other grey levels


def test_an_outlying_scan_is_told_to_its_own_site_alone(scans, tmp_path):
    """As in the paper: intensities toward the eye balls that are out of all proportion."""

    def bright(voxels):
        voxels[np.unravel_index(np.argsort(voxels, axis=None)[-6:], voxels.shape)] *= 40
        return voxels

    rewrite(scans.parent / "scans" / "south" / "south-002" / "flair.nii.gz", bright)
    groups, out = MixtureSettings(components=2, dimensions=3), tmp_path / "out"
    done = extract.run(study(Files(str(scans))), out, settings=WIDE, clusters=groups)
    assert {(o.site, o.case) for o in done.outliers} == {("south", "south-002")}
    assert "flair_glcm_ClusterProminence" in {o.feature for o in done.outliers}
    assert rows(out / "outliers.csv") == rows(out / "sites" / "south" / "outliers.csv") != []
    others = [f for f in out.rglob("*") if f.suffix in (".html", ".json")] + [out / "sites" / "north" / "outliers.csv"]
    assert len(others) == 4 and not any("south-002" in f.read_text() for f in others)
    (grid,) = [g for g in extract.tables(done) if g.name == "outliers"]
    assert [c.text for c in grid.lines[0].cells[:2]] == ["south", "south-002"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Six planted scanners of five hospitals, clustered; two pairs differ in noise, as 1.5 and 3 tesla do."""
    thick = {"thickness": 2.0, "scanner": 1, "contrast": 0.3}
    sites = {
        "harbour": Hospital(10, noise=0.02),
        "hill": Hospital(10, noise=0.08),
        "lake": Hospital(10, noise=0.02, **thick),
        "moor": Hospital(10, noise=0.08, **thick),
        "city": Hospital(20, noise=0.04, gamma=0.7, scanner=7, second=11, contrast=0.8),
    }
    groups = MixtureSettings(components=6, dimensions=10)
    out = tmp_path_factory.mktemp("six") / "out"
    return extract.run(Study(data=Phantom((32, 32, 32), sites)), out, settings=WIDE, clusters=groups, repeats=2)


@pytest.mark.slow
def test_six_planted_scanners_are_found_again(found):
    """Two of them inside one hospital; as CC359's six scanners in the paper (bin width 0.15)."""
    table, groups = found.table, found.clusters
    truth = [s if s != "city" else f"city-{int(c[-3:]) % 2}" for s, c in zip(table.sites, table.cases, strict=True)]
    inside = [k for k, t in enumerate(truth) if t.startswith("city")]
    for names in (groups.names, groups.pooled.assign(groups.vectors)):
        assert adjusted_rand_score(truth, names) >= 0.9
        assert adjusted_rand_score([truth[k] for k in inside], [names[k] for k in inside]) >= 0.9
    (said,) = [w for w in extract.words(found) if "kinds" in w]
    assert said.startswith("The scans of city are of 2 kinds") and groups.agreement["rand"] >= 0.9


@pytest.mark.slow
def test_what_is_written_of_clusters(found):
    """No case is named on the page."""
    listed, groups = rows(found.folder / "clusters.csv"), found.clusters
    assert [(r["case"], r["cluster"]) for r in listed] == list(zip(found.table.cases, groups.names, strict=True))
    assert all(0.1 < float(r["probability"]) <= 1 for r in listed)
    with np.load(found.folder / "mixture.npz") as arrays:
        again = Mixture.of(dict(arrays))
    np.testing.assert_array_equal(again.assign(groups.vectors) + 1, list(map(int, groups.names)))
    np.testing.assert_array_equal(again.transform(groups.vectors)[:, 0], [float(r["pc1"]) for r in listed])
    assert [r["cases"] for r in rows(found.folder / "cluster_sites.csv") if r["hospital"] == "all"] == ["60"]
    about = json.loads((found.folder / "radiomics.json").read_text())
    written = about["clusters"]
    assert written["components"] == 6 and written["agreement"]["rand"] >= 0.9
    assert {k: len(v) for k, v in written["variability"].items()} == {"seeds": 2, "bootstraps": 2}
    assert written["bic"]["6"] == pytest.approx(written["pooled_bic"]["6"], rel=0.05)
    assert any("coincide with the hospitals" in remark for remark in about["remarks"])  # five scanners of six
    page = (found.folder / "index.html").read_text()
    assert "Cases that look alike" in page and "The scans of city are of 2 kinds" in page
    assert not any(case in page for case in found.table.cases)
    assert any("t-sne" in f.name and f.suffix == ".png" for f in (found.folder / "figures").iterdir())


def test_names_are_nothing_but_names_on_the_page(tmp_path):
    nasty = ["<img src=x onerror=alert(1)>", "$\\frac{1}$", "_hidden", "=1+1"] * 5
    rng = np.random.default_rng(0)
    shown = clusters.Shown(nasty, list("12345") * 4, rng.normal(size=(20, 3)), ["_a", "$b"], rng.uniform(size=(20, 2)))
    groups = {"agreement": dict.fromkeys(("rand", "explained", "other_explained", "percentiles"), 1.0)}
    groups |= {"dimensions": 3, "exchanges": 9, "components": 5, "bic": {"5": 1.0}, "settings": {}}
    groups |= {"pooled_bic": {"5": 1.0}, "restarts": 1.0, "variability": {"seeds": [1.0], "bootstraps": [0.5]}}
    counts = dict.fromkeys(nasty, 5)
    about = {"seed": 0, "region": "", "settings": {}, "prepare": {}, "remarks": []}
    about |= {"versions": {"polysite": "1"}, "clusters": groups, "cases": counts, "outlying": counts}
    page = tmp_path / "page.html"
    page.write_text(clusters.page(shown, about))
    look = "return [document.querySelectorAll('img').length, document.documentElement.scrollWidth <= 390]"
    assert browse(page, look, 390) == ([0, True], []) and "read them with care" not in page.read_text()
    groups["agreement"]["rand"] = 0.36
    assert "not those of their pooled features (adjusted Rand index 0.36" in clusters.page(shown, about)
    assert clusters.tsne(np.arange(4.0)[:, None]) is None  # too few cases for a map


TINY_BINS, TOO_MANY = Settings(bin_width=1e-6), MixtureSettings(components=10)
SQUARE = {"prepare": Prepare(normalise="padded"), "train": Train(patch=(8, 8))}


@pytest.mark.parametrize(
    ("of", "change", "error", "words"),
    [
        (study(), {"label": "wt"}, ConfigError, "no label 'wt'"),
        (study(PhantomClasses(SIDE)), {"label": "low"}, ConfigError, "these images have classes only"),
        (study(), {"settings": TINY_BINS}, ConfigError, "case 'north-000' of site 'north', t1: bin_width"),
        (study(**SQUARE), {}, ConfigError, r"train.patch = \[8, 8\] has 2 sides for 3D data"),
        (study(), {"clusters": TOO_MANY}, DataError, "3 cases cannot be 10 clusters"),
    ],
)
def test_what_is_refused(tmp_path, of, change, error, words):
    with pytest.raises(error, match=words):
        extract.run(of, tmp_path / "out", **change)
    assert not list(tmp_path.glob("*out*"))
    with pytest.raises(RunError, match="exists already"):  # no folder is overwritten
        extract.run(of, tmp_path, **change)


def test_the_command(scans, tmp_path, capsys, monkeypatch):
    def call(*words):
        monkeypatch.setattr(sys, "argv", ["polysite", "radiomics", str(scans), *words])
        try:
            cli.main()
        except SystemExit as end:
            assert end.code in (0, 2)
        return capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    said = call("--clusters", "2,3", "--dimensions", "3", "--out", "out").out
    assert "12 cases of 2 sites, 4 x 93 features each." in said and "BIC of 3 clusters" in said
    assert "out/features.csv" in said and (tmp_path / "out" / "index.html").exists()
    printed = json.loads(call("--json", "--bin-width", "0.15", "--bin-range", "-1.01", "10.81").out)
    assert printed["settings"]["bin_range"] == [-1.01, 10.81]
    assert (Path(printed["radiomics"]) / "features.csv").exists()
    assert call("--quiet").out == "" and "--clusters two" in call("--clusters", "two").err
    assert "exists already" in call("--out", "out").err
