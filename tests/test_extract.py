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
LABELS = "WT=1,2,4; TC=1,4; ET=4"
WIDE = Settings(bin_width=0.15)


def study(data=None, **changes):
    return Study(data=data or Phantom(SIDE, {"north": Hospital(2), "south": Hospital(1, missing=("t2",))}), **changes)


@pytest.fixture
def scans(tmp_path):
    """Two hospitals of drawn scans as files, seven and five cases."""
    for site, count in {"north": 7, "south": 5}.items():
        write((draw(Hospital(), site=site, index=i, seed=0, shape=SIDE) for i in range(count)), tmp_path / "scans")
    found = layouts.scan(tmp_path / "scans", labels=manifest.parse_labels(LABELS)).manifest
    manifest.write(found, tmp_path / "manifest.csv")
    return tmp_path / "manifest.csv"


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def by_hand(case, settings=extract.PAPER, region=None):
    """Modalities x 93, of a prepared case."""
    region = (case.image != 0).any(0) if region is None else region
    return [list(features(m, region, spacing=case.spacing, settings=settings).values()) for m in case.image if m.any()]


def test_the_table_is_what_the_features_of_prepared_cases_are(tmp_path):
    """Of drawn hospitals; a modality that was not acquired has empty cells."""
    done = extract.run(study(), tmp_path / "out", settings=WIDE, parquet=True)
    assert done.table.columns[0] == "t1_firstorder_10Percentile" and len(done.table.columns) == 4 * len(NAMES) == 372
    listed = rows(tmp_path / "out" / "features.csv")
    assert [(r["site"], r["case"]) for r in listed] == [
        ("north", "north-000"), ("north", "north-001"), ("south", "south-000")
    ]  # fmt: skip
    for row, (site, index) in zip(listed, [("north", 0), ("north", 1), ("south", 0)], strict=True):
        hospital = study().data.sites[site]
        case = Prepare().apply(draw(hospital, site=site, index=index, seed=0, shape=SIDE), [1, 1, 1])
        acquired = [m for m in ("t1", "t1ce", "t2", "flair") if m not in hospital.missing]
        for modality, values in zip(acquired, by_hand(case, WIDE), strict=True):
            assert [float(row[f"{modality}_{n}"]) for n in NAMES] == values  # to the last bit
        assert all(row[f"{m}_{n}"] == "" for m in hospital.missing for n in NAMES)
    assert done.about["remarks"][0] == "t2 was not acquired in 1 case of south: empty cells."
    parquet = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "out" / "features.parquet").to_pylist()
    assert parquet[0]["t1_glcm_Id"] == float(listed[0]["t1_glcm_Id"]) and parquet[2]["t2_glcm_Id"] is None


def test_files_give_what_the_same_scans_give_when_drawn(scans, tmp_path):
    drawn = extract.extract(study(Phantom(SIDE, {"north": Hospital(7), "south": Hospital(5)})), jobs=1)
    read = extract.extract(study(Files(str(scans))), jobs=2)
    order = [read.modalities.index(m) for m in drawn.modalities]
    np.testing.assert_array_equal(read.values.reshape(12, 4, -1)[:, order], drawn.values.reshape(12, 4, -1))
    np.testing.assert_array_equal(read.shares, drawn.shares)
    assert (read.shares > 0).all() and (read.shares.sum(1) < 1).all()


def test_a_second_run_opens_no_scan_and_other_settings_do(scans, tmp_path, monkeypatch):
    of = study(Files(str(scans)))
    extract.run(of, tmp_path / "one", settings=WIDE)
    monkeypatch.setattr("polysite.data.files.open_case", lambda *_: pytest.fail("a scan was opened"))
    extract.run(of, tmp_path / "two", settings=WIDE)
    assert (tmp_path / "one" / "features.csv").read_bytes() == (tmp_path / "two" / "features.csv").read_bytes()
    changed = [
        {"settings": Settings(bin_width=0.2)}, {"settings": WIDE, "label": "WT"},
        {"study": replace(of, prepare=Prepare(spacing=(2.0, 2.0, 2.0))), "settings": WIDE},
    ]  # fmt: skip
    for n, change in enumerate(changed):
        with pytest.raises(pytest.fail.Exception):
            extract.run(change.pop("study", of), tmp_path / f"more-{n}", **change)


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
    seg = scans.parent / "scans" / "north" / "north-001" / "seg.nii.gz"
    image = nibabel.load(seg)
    nibabel.save(nibabel.Nifti1Image(np.zeros(image.shape, np.uint8), image.affine, image.header), seg)
    done = extract.run(study(Files(str(scans))), tmp_path / "out", label="TC")
    case = Prepare().apply(draw(Hospital(), site="north", index=0, seed=0, shape=SIDE), [1, 1, 1])
    flair = done.table.values[0].reshape(4, -1)[done.table.modalities.index("flair")]
    np.testing.assert_array_equal(flair, by_hand(case, region=case.label[1] > 0)[3])
    assert np.isnan(done.table.values[1]).all() and not done.table.shares[1].any()
    assert done.about["remarks"] == ["1 case with fewer than two voxels of TC: empty cells."]
    grouped = extract.cluster(done.table, MixtureSettings(components=2, dimensions=3))
    assert len(grouped.names) == 11 and "north-001" not in grouped.table.cases


HEADS = {"north": Hospital(3), "south": Hospital(2, missing=("t2",))}


@pytest.mark.parametrize("how", ["nonzero", "all", "padded"])
def test_the_table_has_the_numbers_of_cfft(how):
    """Padded to the patch at the sites, and still the same brain."""
    of = study(Phantom(SIDE, HEADS), prepare=Prepare(normalise=how), train=Train(patch=(32, 24, 40), device="cpu"))
    table, sites = extract.extract(of, WIDE), build_sites(of)
    for site, case, values in zip(table.sites, table.cases, comparable(table.values), strict=True):
        (own,) = sites[site].radiomics([case], WIDE.bin_width)
        np.testing.assert_allclose(values, own, rtol=1e-6, atol=1e-6)  # sums in another order, in single precision
        assert sites[site].shares(case) == pytest.approx(table.shares[table.cases.index(case)])
    plain = extract.extract(replace(of, prepare=Prepare()), WIDE)
    same = np.isclose(comparable(table.values), comparable(plain.values), rtol=0.05).mean()
    assert same == 1 if how == "nonzero" else same < 0.6  # other z-scores, other grey levels


def test_padding_to_a_patch_of_other_dimensions_is_refused():
    with pytest.raises(ConfigError, match=r"train.patch = \[8, 8\] has 2 sides for 3D data"):
        extract.extract(study(prepare=Prepare(normalise="padded"), train=Train(patch=(8, 8))))


def test_flat_images_and_classes(tmp_path):
    done = extract.run(study(PhantomClasses(SIDE, sites={"a": Hospital(4), "b": Hospital(4)})), tmp_path / "out")
    assert done.table.labels == ("low", "high") and (done.table.shares.sum(1) == 1).all()
    assert np.isfinite(done.table.values).all()


def planted(count=20, column="flair_glcm_ClusterProminence", times=150.0, case=3):
    """A table of random numbers in which one is far outside; sites a and b take turns."""
    rng = np.random.default_rng(0)
    columns = [f"flair_{n}" for n in NAMES]
    values = rng.uniform(1, 2, (count, len(columns)))
    values[:, columns.index("flair_firstorder_Mean")] = rng.normal(0, 1e-8, count)  # of z-scores
    k = columns.index(column)
    others = np.sort(np.delete(values[:, k], case))
    values[case, k] = others[-1] + times * (others[-1] - others[0])
    names = tuple("ab"[i % 2] for i in range(count)), tuple(f"case-{i}" for i in range(count))
    return extract.Table(("flair",), ("WT",), *names, values, np.zeros((count, 1)))


@pytest.mark.parametrize(("count", "times", "found"), [(20, 150, 1), (200, 150, 1), (20, 50, 0), (9, 1e6, 0)])
def test_two_orders_of_magnitude_outside(count, times, found):
    far = extract.outliers(planted(count, times=times))
    assert [(o.site, o.case, o.feature) for o in far] == [("b", "case-3", "flair_glcm_ClusterProminence")] * found


def test_rounding_is_no_outlier_but_a_mean_that_is_not_zero_is():
    assert not extract.outliers(planted(times=-0.5))
    table = planted(times=-0.5)
    table.values[5, NAMES.index("firstorder_Mean")] = 1e-6  # hundred times as much, but nothing beside z-scores
    assert not extract.outliers(table)
    table.values[5, NAMES.index("firstorder_Mean")] = 0.1
    assert [(o.case, o.feature) for o in extract.outliers(table)] == [("case-5", "flair_firstorder_Mean")]


def test_an_outlying_scan_is_told_to_its_own_site_alone(scans, tmp_path):
    """As in the paper: intensities toward the eye balls that are out of all proportion."""
    flair = scans.parent / "scans" / "south" / "south-002" / "flair.nii.gz"
    image = nibabel.load(flair)
    voxels = np.asarray(image.dataobj).copy()
    voxels[np.unravel_index(np.argsort(voxels, axis=None)[-6:], voxels.shape)] *= 40
    nibabel.save(nibabel.Nifti1Image(voxels, image.affine, image.header), flair)
    groups = MixtureSettings(components=2, dimensions=3)
    done = extract.run(study(Files(str(scans))), tmp_path / "out", settings=WIDE, clusters=groups)
    assert {(o.site, o.case) for o in done.outliers} == {("south", "south-002")}
    assert "flair_glcm_ClusterProminence" in {o.feature for o in done.outliers}
    assert rows(tmp_path / "out" / "outliers.csv") == rows(tmp_path / "out" / "sites" / "south" / "outliers.csv") != []
    others = [f for f in (tmp_path / "out").rglob("*") if f.suffix in (".html", ".json")]
    others.append(tmp_path / "out" / "sites" / "north" / "outliers.csv")
    assert len(others) == 4 and not any("south-002" in f.read_text() for f in others)
    (grid,) = [g for g in extract.tables(done) if g.name == "outliers"]
    assert [c.text for c in grid.lines[0].cells[:2]] == ["south", "south-002"]


def six_scanners(cases=10):
    """Five hospitals, one with two scanners of other contrasts; two pairs differ in noise, as 1.5 and 3 tesla do."""
    thick = {"thickness": 2.0, "scanner": 1, "contrast": 0.3}
    return {
        "harbour": Hospital(cases, noise=0.02),
        "hill": Hospital(cases, noise=0.08),
        "lake": Hospital(cases, noise=0.02, **thick),
        "moor": Hospital(cases, noise=0.08, **thick),
        "city": Hospital(2 * cases, noise=0.04, gamma=0.7, scanner=7, second=11, contrast=0.8),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Six planted scanners, clustered."""
    of = Study(data=Phantom((32, 32, 32), six_scanners()))
    groups = MixtureSettings(components=6, dimensions=10)
    return extract.run(of, tmp_path_factory.mktemp("six") / "out", settings=WIDE, clusters=groups, repeats=2)


@pytest.mark.slow
def test_six_planted_scanners_are_found_again(found):
    """Two of them inside one hospital; as CC359's six scanners in the paper (bin width 0.15)."""
    table, groups = found.table, found.clusters
    truth = [s if s != "city" else f"city-{int(c[-3:]) % 2}" for s, c in zip(table.sites, table.cases, strict=True)]
    assert adjusted_rand_score(truth, groups.names) >= 0.9
    assert adjusted_rand_score(truth, groups.pooled.assign(groups.vectors)) >= 0.9
    inside = [(t, c) for t, c in zip(truth, groups.names, strict=True) if t.startswith("city")]
    assert adjusted_rand_score(*zip(*inside, strict=True)) >= 0.9
    said = [w for w in extract.words(found) if "kinds" in w]
    assert len(said) == 1 and said[0].startswith("The scans of city are of 2 kinds")
    assert groups.agreement["rand"] >= 0.9


@pytest.mark.slow
def test_what_is_written_of_clusters(found):
    listed = rows(found.folder / "clusters.csv")
    assert [r["case"] for r in listed] == list(found.table.cases)
    assert [r["cluster"] for r in listed] == list(found.clusters.names)
    assert all(0.1 < float(r["probability"]) <= 1 for r in listed)
    with np.load(found.folder / "mixture.npz") as arrays:
        again = Mixture.of(dict(arrays))
    np.testing.assert_array_equal(again.assign(found.clusters.vectors) + 1, list(map(int, found.clusters.names)))
    np.testing.assert_array_equal(again.transform(found.clusters.vectors)[:, 0], [float(r["pc1"]) for r in listed])
    (total,) = [r for r in rows(found.folder / "cluster_sites.csv") if r["hospital"] == "all"]
    assert total["cases"] == "60"
    about = json.loads((found.folder / "radiomics.json").read_text())
    assert about["clusters"]["components"] == 6 and about["clusters"]["agreement"]["rand"] >= 0.9
    assert {k: len(v) for k, v in about["clusters"]["variability"].items()} == {"seeds": 2, "bootstraps": 2}
    assert about["clusters"]["bic"]["6"] == pytest.approx(about["clusters"]["pooled_bic"]["6"], rel=0.05)
    assert any("coincide with the hospitals" in remark for remark in about["remarks"])  # five scanners of six


def test_scans_are_drawn_for_their_own_hospital(tmp_path):
    """The most typical case of every cluster that a hospital has, and those asked for; names of no other hospital."""
    two = {"north": Hospital(6, scanner=5, second=11, contrast=1.0), "south": Hospital(4, scanner=5, contrast=1.0)}
    of = Study(data=Phantom(SIDE, two))
    groups = MixtureSettings(components=2, dimensions=3)
    options = {"settings": WIDE, "clusters": groups, "examples": True, "named": ["south-003"]}
    done = extract.run(of, tmp_path / "out", **options)
    kinds = {(s, c) for s, c in zip(done.table.sites, done.clusters.names, strict=True)}
    for site in of.data.sites:
        files = sorted((tmp_path / "out" / "sites" / site / "figures").iterdir())
        captions = json.loads((tmp_path / "out" / "sites" / site / "figures" / "captions.json").read_text())
        assert all(case.startswith(site) for case in captions) and all(file.stat().st_size for file in files)
        assert len(files) == 3 * len(captions) + 1
        typical = [c for c in captions.values() if "typical of cluster" in c["caption"]]
        assert len(typical) == sum(s == site for s, _ in kinds)
    asked = json.loads((tmp_path / "out" / "sites" / "south" / "figures" / "captions.json").read_text())
    assert "asked for by name" in asked["south-003"]["caption"]
    assert any("for their own hospital only" in word for word in extract.words(done))
    maps = {p.name for p in (tmp_path / "out" / "figures").iterdir()}
    assert any("t-sne" in name and name.endswith(".png") for name in maps)
    with pytest.raises(ConfigError, match="there is no case 'south-03' to draw; did you mean 'south-"):
        extract.run(of, tmp_path / "no", settings=WIDE, named=["south-03"])
    assert not (tmp_path / "no").exists()


LOOK = """
const text = document.body.textContent;
return {
  figures: [...document.querySelectorAll("figure svg")].map((f) => f.getBoundingClientRect().width),
  titles: [...document.querySelectorAll("h2")].map((h) => h.textContent), text,
  wide: document.documentElement.scrollWidth, sorted: document.querySelectorAll("table.sortable thead button").length,
};
"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_the_page_in_a_browser(found, width):
    seen, errors = browse(found.folder / "index.html", LOOK, width)
    assert errors == [] and seen["wide"] <= width and seen["sorted"]
    assert len(seen["figures"]) == 3 and min(seen["figures"]) > 300
    assert "Cases that look alike" in seen["titles"] and "Federated and pooled" in seen["titles"]
    assert "The scans of city are of 2 kinds" in seen["text"]
    assert not any(case in seen["text"] for case in found.table.cases)


def test_names_are_nothing_but_names_on_the_page(tmp_path):
    nasty = ["<img src=x onerror=alert(1)>", "$\\frac{1}$", "_hidden", "=1+1"] * 5
    rng = np.random.default_rng(0)
    shown = clusters.Shown(nasty, list("12345") * 4, rng.normal(size=(20, 3)), ["_a", "$b"], rng.uniform(size=(20, 2)))
    groups = {"agreement": dict.fromkeys(("rand", "explained", "other_explained", "percentiles"), 1.0)}
    groups |= {"dimensions": 3, "exchanges": 9, "components": 5, "bic": {"5": 1.0}, "settings": {}}
    groups |= {"pooled_bic": {"5": 1.0}, "restarts": 1.0, "variability": {"seeds": [1.0], "bootstraps": [0.5]}}
    counts = dict.fromkeys(nasty, 5)
    about = {
        "seed": 0,
        "perplexity": 30.0,
        "region": "",
        "settings": {},
        "prepare": {},
        "remarks": [],
        "versions": {"polysite": "1"},
    }
    page = tmp_path / "page.html"
    page.write_text(clusters.page(shown, {**about, "clusters": groups, "cases": counts, "outlying": counts}))
    seen, errors = browse(page, "return document.querySelectorAll('img').length")
    assert (seen, errors) == (0, [])
    assert clusters.page(shown, {**about, "clusters": groups, "cases": counts, "outlying": counts}) == page.read_text()
    assert "read them with care" not in page.read_text()
    groups["agreement"] |= {"rand": 0.36}
    doubtful = clusters.page(shown, {**about, "clusters": groups, "cases": counts, "outlying": counts})
    assert "are not those of their pooled features (adjusted Rand index 0.36" in doubtful


@pytest.mark.parametrize(
    ("sites", "groups", "said"),
    [
        ("aaaabbbb", "11112222", ["Every hospital has its own cluster"]),
        ("aaaabbbb", "11111111", ["Cluster 1 holds scans of a and b"]),
        ("aaaaaabbbb", "1112221112", ["The scans of a are of 2 kinds: 3 cases in cluster 1", "Cluster 1 holds"]),
        ("aaaa", "1112", []),
        ("a" * 9 + "bbb", "111222333111", ["The scans of a are of 3 kinds", "Cluster 1 holds"]),
    ],
)
def test_what_clusters_say_in_words(sites, groups, said):
    found = clusters.words(clusters.Shown(list(sites), list(groups), np.zeros((len(sites), 2))))
    assert len(found) == len(said) and all(f.startswith(s) for f, s in zip(found, said, strict=True))


def test_maps_of_few_cases_and_of_one_component():
    one = clusters.Shown(list("aabb"), list("1122"), np.arange(4.0)[:, None])
    assert clusters.tsne(one.points) is None and len(list(clusters.sections(one))) == 3
    assert clusters.tsne(np.arange(7.0)[:, None]).shape == (7, 2)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"label": "wt"}, ConfigError, "no label 'wt'"),
        ({"settings": Settings(bin_width=1e-6)}, ConfigError, "case 'north-000' of site 'north', t1: bin_width"),
        ({"clusters": MixtureSettings(components=10, fewest=0)}, DataError, "3 cases cannot be 10 clusters"),
        ({"clusters": MixtureSettings(components=2, fewest=5)}, DataError, "none of 2 sites has 5 cases"),
    ],
)
def test_what_is_refused(tmp_path, change, error, words):
    with pytest.raises(error, match=words.replace("(", r"\(")):
        extract.run(study(), tmp_path / "out", **change)
    assert not list(tmp_path.glob("*out*"))


def test_a_folder_is_never_overwritten_and_bad_scans_are_named(scans, tmp_path):
    with pytest.raises(RunError, match="exists already"):
        extract.run(study(), tmp_path)
    blank = scans.parent / "scans" / "south" / "south-001"
    for modality in ("t1", "t1ce", "t2", "flair"):
        image = nibabel.load(blank / f"{modality}.nii.gz")
        nibabel.save(nibabel.Nifti1Image(np.zeros(SIDE, np.float32), image.affine), blank / f"{modality}.nii.gz")
    with pytest.raises(DataError, match=r"south-001.*every voxel is 0.*polysite data check"):
        extract.run(study(Files(str(scans))), tmp_path / "out")
    with pytest.raises(ConfigError, match="these images have classes only"):
        extract.run(study(PhantomClasses(SIDE)), tmp_path / "out", label="low")


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
    printed = json.loads(call("--json", "--bin-count", "32").out)
    assert printed["settings"]["bin_count"] == 32 and (Path(printed["radiomics"]) / "features.csv").exists()
    printed = json.loads(call("--json", "--bin-width", "0.15", "--bin-range", "-1.01", "10.81").out)
    assert printed["settings"]["bin_range"] == [-1.01, 10.81]
    assert call("--quiet").out == ""
    assert "--clusters two" in call("--clusters", "two").err
    assert "exists already" in call("--out", "out").err
