"""The benchmarks of papers A and D: every value of their protocols, and whole runs on generated datasets."""

import csv
import tomllib
from dataclasses import replace
from functools import cache
from importlib import import_module, resources
from math import prod
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

import trees
from polysite import benchmark, config, study
from polysite.algorithms import name_of
from polysite.benchmark.jobs import studies
from polysite.engines.run_folder import file_name
from polysite.report.published import numbers, sizes
from tiny_bench import rows

SHARED = Path(__file__).parents[3] / "shared" / "data"
A = {"paper_a_fets": "FeTS", "paper_a_prostate": "Prostate", "paper_a_kits": "Fed-KITS2019"}
D = {
    "paper_d_luna": "D_table1",
    "paper_d_dfuc": "D_table2",
    "paper_d_brats_two": "D_table3",
    "paper_d_brats": "D_table4",
}
SWEEPS = {"paper_d_luna_sweep": "LUNA16", "paper_d_brats_sweep": "BraTS2017"}
TREES = {  # the generated dataset of every benchmark
    "paper_a_fets": lambda folder: trees.fets22(folder, {"6": 5, "13": 5, "20": 5, "21": 5, "1": 2}),
    "paper_a_prostate": trees.prostate,
    "paper_a_kits": trees.fed_kits,
    "paper_d_luna": trees.luna16,
    "paper_d_dfuc": trees.dfuc2021,
    "paper_d_brats": trees.brats17,
    "paper_d_brats_two": trees.brats17,
    "paper_d_luna_sweep": trees.luna16,
    "paper_d_brats_sweep": trees.brats17,
}


def printed(table, measure, setting="all datasets", method=None, where="all"):
    """The values that a paper prints for a quantity."""
    rows = [n for n in numbers(table) if (n.measure, n.setting, n.where) == (measure, setting, where)]
    found = [n.value for n in rows if method in (None, n.method)]
    assert found, (table, measure, setting, method, where)
    return found


def axes(measure, setting):
    """The three numbers that paper A prints for the axes of a volume."""
    return tuple(printed("A_text", measure, setting, where=f"axis {k}")[0] for k in (1, 2, 3))


def given(bench):
    """The file of a benchmark."""
    return tomllib.loads(resources.files("polysite").joinpath("benches", f"{bench}.toml").read_text(encoding="utf-8"))


@cache
def every(bench):
    """Return the study of every method of a benchmark; its data folder does not exist and is not opened."""
    return studies(benchmark.load(bench), {"data.name": "files", "data.path": "absent"})


A_VALUES = {  # key of a study -> what paper A prints for a dataset
    "train.lr": lambda _: printed("A_text", "learning rate")[0],
    "train.momentum": lambda _: printed("A_text", "momentum")[0],
    "run.rounds": lambda _: printed("A_text", "global epochs (rounds)")[0],
    "split.validation": lambda _: printed("A_text", "validation share")[0] / 100,
    "train.patches": lambda _: printed("A_text", "patches per volume")[0],
    "train.batch": lambda d: printed("A_text", "batch size", d)[0] * printed("A_text", "patches per volume")[0],
    "train.patch": lambda d: axes("cropping size", d),
    "train.window": lambda d: axes("sliding window size", d),
    "prepare.spacing": lambda d: axes("spacing", d)[:: -1 if d == "Fed-KITS2019" else 1],  # printed slices first
    "train.optimiser": lambda _: "sgd",
    "train.loss": lambda _: "dice",
    "split.test": lambda _: 0.0,
    "split.keep": lambda _: "sizes",
    "split.rounding": lambda d: "down" if d == "Prostate" else "up",
    "split.marked_test": lambda d: "validation" if d == "Fed-KITS2019" else "test",
    "prepare.crop": lambda _: False,
    "train.augment": lambda _: "light",
    "assess.cases": lambda _: "all",
    "assess.scale": lambda _: "first",
    "assess.positions": lambda _: "sum",
    "assess.combine": lambda d: "mean" if d == "Fed-KITS2019" else "max",
}


@pytest.mark.parametrize("key", A_VALUES)
def test_a_value_of_paper_a(key):
    for bench, data in A.items():
        found = {m: attrgetter(key)(s) for m, s in every(bench).items()}
        assert found == dict.fromkeys(found, A_VALUES[key](data)), bench


@pytest.mark.parametrize("bench", A)
def test_the_methods_of_tables_3_and_4_of_paper_a(bench):
    chosen, file = every(bench), given(bench)["methods"]
    assert chosen["fedprox"].algorithm.mu == printed("A_text", "mu", method="FedProx")[0]
    assert name_of(chosen["ditto"].algorithm) == "ditto" and chosen["ditto"].algorithm.lam == 1.0
    weights = printed("A_text", "weight omega of most distant client", method="FedAvg_w")
    outliers = [(m["outlier"]["distance"], m["outlier"]["weight"]) for m in file.values() if "outlier" in m]
    assert outliers == [(distance, w) for distance in ("emd", "euclidean") for w in weights]
    assert [m["clusters"] for m in file.values() if "clusters" in m] == ["emd", "euclidean"]
    titles = {n.setting.removeprefix(f"{A[bench]} ").replace("Tumor", "Tumour") for n in numbers("A_table1")
              if n.setting.startswith(f"{A[bench]} ")}  # fmt: skip
    assert titles == {f["title"] for f in given(bench)["federations"]}
    for each in chosen.values():
        assert type(each.encoder).__name__ == "MedicalNet"


@pytest.mark.parametrize("bench", A)
def test_the_sizes_of_table_5_of_paper_a(bench):
    """Of FeTS and prostate the paper prints all cases as training samples, of Fed-KiTS2019 the training cases."""
    base = {"preset": f"distance_aware_{bench.rpartition('_')[2]}"}
    counted = config.build({**base, "data": {"name": "counted", "sizes": sizes(given(bench)["sizes"])}})
    dealt = study.deal_cases(counted)
    for client, splits in enumerate(dealt.values(), start=1):
        counts = {part: len(splits[part]) for part in splits}
        theirs = {
            k: printed("A_table5", f"{k} samples", A[bench], where=str(client))[0] for k in ("training", "validation")
        }
        assert counts["validation"] == theirs["validation"] and counts["test"] == 0
        trained = theirs["training"] - (0 if bench == "paper_a_kits" else theirs["validation"])
        assert counts["train"] == trained
    assert list(dealt) == list(sizes(given(bench)["sizes"]))


@pytest.mark.skipif(not (SHARED / "fed_kits").is_dir(), reason=f"the volumes of Fed-KiTS2019 are not in {SHARED}")
def test_fed_kits_is_split_as_in_table_5():
    with (SHARED / "fed_kits" / "volumes.csv").open(newline="") as stream:
        rows = [r for r in csv.DictReader(stream) if r["site"] in sizes("A_sizes_kits")]
    for client, site in enumerate(sizes("A_sizes_kits"), start=1):
        parts = [r["split"] for r in rows if r["site"] == site]
        assert parts.count("test") == printed("A_table5", "validation samples", A["paper_a_kits"], where=str(client))[0]
        assert parts.count("train") == printed("A_table5", "training samples", A["paper_a_kits"], where=str(client))[0]


@pytest.mark.skipif(not (SHARED / "fets_partitions").is_dir(), reason=f"the partitions of FeTS are not in {SHARED}")
def test_the_hospitals_of_paper_a_are_those_of_fets_2022():
    counts = {}
    for year in (2021, 2022):
        with (SHARED / "fets_partitions" / f"fets{year}_partitioning_1.csv").open(newline="") as stream:
            listed = [r["Partition_ID"].zfill(2) for r in csv.DictReader(stream)]
        counts[year] = {site: listed.count(site) for site in sizes("A_sizes_fets")}
    assert counts[2022] == sizes("A_sizes_fets") != counts[2021]


@pytest.mark.parametrize("bench", [*D, *SWEEPS])
def test_values_of_paper_d(bench):
    data = "BraTS2017" if "brats" in bench else "LUNA16"
    for name, each in every(bench).items():
        found = each.train.loss, each.run.peek, each.run.validate_every, each.train.momentum
        assert found == ("ce", True, 1, 0.0)  # what paper D prints, or our choice
        if name.startswith("feddiv"):
            assert each.algorithm.gamma == printed("D_text", "gamma of g(x), eq. 6", method="FedDiv")[0]
        if name.startswith("feddiv") and bench in D:
            assert each.algorithm.alpha == printed("D_text", "optimal alpha", data, "FedDiv")[0]


@pytest.mark.parametrize("bench", D)
def test_the_methods_and_federations_of_a_table_of_paper_d(bench):
    file, table = given(bench), D[bench]
    listed = [n for n in numbers(table) if "repeated" not in n.setting]
    ours = file["published"]["methods"]
    assert list(ours) == list(file["methods"]) and set(ours.values()) == {n.method for n in listed}
    assert len(ours) == 1 + printed("D_text", "strategies compared", method="comparison")[0]
    settings = file["published"]["settings"]
    assert set(settings.values()) == {n.setting for n in listed}
    assert list(settings) == [f["title"] for f in file["federations"]]
    clients = printed("D_text", "clients")[0]
    for entry in file["federations"]:
        first, *later = entry.get("federation", [entry])
        wanted = settings[entry["title"]]
        assert first["sites"] == clients
        if later:
            assert first["parts"] == "all"  # every client tests on cases of its own
            setting = wanted.rpartition(" ")[0]
            assert later[0]["count"] == printed("D_text", "hidden modalities per client", setting)[0]
        else:
            ratio = next(n.value for n in numbers("D_text") if n.setting == wanted and "class ratio" in n.measure)
            assert first["delta"] == ratio


@pytest.mark.parametrize("bench", SWEEPS)
def test_the_sweeps_hold_the_values_that_paper_d_prints(bench):
    file, text = given(bench), numbers("D_text")
    ends = {n.value for n in text if n.setting.startswith("LUNA16, BraTS2017 (personalising") and "lambda" in n.measure}
    swept = file["sweep"]["algorithm.lam"]
    assert ends == {swept[0], swept[-1]} and printed("D_text", "lambda", "LUNA16 delta=7")[0] in swept
    best = printed("D_text", "optimal alpha", SWEEPS[bench], "FedDiv")[0]
    assert {0.0, best} <= set(file["sweep"]["algorithm.alpha"])


@pytest.mark.parametrize("bench", D)
def test_the_networks_of_paper_d_are_equally_large(bench):
    """FedDiv's encoders are narrower, so that its network is as large as that of the others."""
    dims, modalities, classes = {"paper_d_luna": (3, 1, 2), "paper_d_dfuc": (2, 3, 3), "paper_d_brats": (2, 4, 4),
                                 "paper_d_brats_two": (2, 4, 2)}[bench]  # fmt: skip
    models = {name: each.model for name, each in every(bench).items()}
    counted = {model: _parameters(model, dims, modalities, classes) for model in set(models.values())}
    whole = counted[models["fedavg"]]
    assert {name for name, model in models.items() if counted[model] != whole} <= {"feddiv"}
    assert counted[models["feddiv"]] == pytest.approx(whole, rel=0.01)


def _parameters(model, dims, modalities, classes):
    import torch

    with torch.device("meta"):
        built = model.build(dims=dims, modalities=modalities, outputs=classes, seed=0)
    return sum(prod(x.shape) for x in built.parameters())


def run(bench, out, data, jobs=1):
    """Run a benchmark on a folder and write its pages."""
    given = {"data.name": "files", "data.path": f'"{data}"'}
    results = benchmark.run(bench, out, given, jobs)
    assert not results.failed, results.failed
    benchmark.publish(bench, out, results)


def check_folder(bench, out, figure):
    """Every run, table and figure is there, and every method that the paper prints has a measured value beside it."""
    listed = {v.name for v in benchmark.variants(bench, {"data.name": "files", "data.path": "absent"})}
    for title in (f.title for f in bench.federations):
        here = out / "federations" / file_name(title)
        assert {
            m for m in listed if list((out / "runs" / file_name(m) / file_name(title)).glob("*/result.json"))
        } == listed
        measured = {r["method"] for f in here.glob("published_*.csv") for r in rows(f) if r["measured (value)"]}
        settings = bench.published.settings.get(title, ())
        known = {n.method for t in bench.published.tables for n in numbers(t) if n.setting in settings}
        wanted = {
            m for m in listed if known & {name.partition(" @ ")[0] for name in bench.published.methods.get(m, ())}
        }
        assert wanted <= measured, (title, wanted - measured)
    assert {"index.html", "federations.csv", "distance.csv"} <= {f.name for f in (out / "comparison").iterdir()}
    drawn = {f.name for place in ("comparison", "federations") for f in (out / place).rglob("figures/*.svg")}
    assert any(name.startswith(figure) for name in drawn), drawn


def shortened(name, methods, federations):
    """A benchmark at tiny scale with some of its methods and federations."""
    whole = benchmark.load(name, "tiny").only(methods)
    return replace(whole, federations=tuple(f for f in whole.federations if f.title in federations))


@pytest.mark.slow
def test_two_federations_of_fed_kits_with_the_published_distances(tmp_path, in_process):
    bench = benchmark.load("paper_a_kits", "tiny").only(["fedavg", "fedavg ω 0.5 (EMD)"])
    data, out = trees.fed_kits(tmp_path / "kits"), tmp_path / "out"
    run(bench, out, data)
    check_folder(bench, out, "bars")
    sorted_there = out / "federations" / file_name("Kidney + Tumour")
    weights = [r for r in rows(sorted_there / "published_A_table3.csv") if r["method"].startswith("fedavg ω")]
    assert [r["published"] for r in weights] == ["0.409 ± 0.030"]  # of the EMD's outlier alone, not the EUC's
    distances = rows(sorted_there / "published_A_table2.csv")
    assert len(distances) == 50 and all(r["measured (value)"] for r in distances)  # two matrices with their sums
    parts = {}
    for title in ("Original", "Kidney + Tumour"):
        split = rows(out / "runs" / "fedavg" / file_name(title) / "fold0-seed0" / "split.csv")
        parts[title] = {r["Subject_ID"] for r in split if r["Split"] == "validation"}
        assert {r["Partition_ID"] for r in split} == {"0", "1", "2", "3", "4"}
        assert {r["Split"] for r in split} == {"train", "validation"} and len(parts[title]) == 5
    assert len(parts["Original"] & parts["Kidney + Tumour"]) > 1


@pytest.mark.slow
def test_feddiv_and_fedavg_on_two_ratios_of_dfuc(tmp_path, in_process):
    bench = shortened("paper_d_dfuc", ["fedavg", "feddiv"], ("delta 1", "delta 4"))
    data, out = trees.dfuc2021(tmp_path / "dfuc"), tmp_path / "out"
    run(bench, out, data)
    check_folder(bench, out, "bars")
    listed = rows(out / "federations" / "delta 4" / "published_D_table2.csv")
    found = {(r["method"], r["measure"]): r for r in listed}
    assert len(found) == len(listed) == 8  # two methods, four measures
    assert found["feddiv", "BMACC (%)"]["published"] == "87.81 ± 0.09"
    assert all(0 <= float(r["measured (value)"]) <= 100 and r["honest (value)"] for r in listed)


@pytest.mark.soak
@pytest.mark.parametrize("name", TREES)
def test_a_benchmark_from_end_to_end(name, tmp_path, in_process):
    bench, out = benchmark.load(name, "tiny"), tmp_path / "out"
    run(bench, out, TREES[name](tmp_path / "data"), jobs=2)
    check_folder(bench, out, "sweep" if name in SWEEPS else "bars")


@pytest.mark.parametrize("name", TREES)
def test_data_that_are_not_here_are_asked_for(name):
    bench = benchmark.load(name)
    assert bench.needs in (asked := bench.lacks_data({}, "full")) and "name them with --data" in asked
    assert not bench.lacks_data({"data.name": "files", "data.path": '"here"'}, "full")


@pytest.mark.parametrize("name", ["paper_a_kits", "paper_d_dfuc", "paper_d_brats"])
def test_a_plan_without_data_counts_every_federation(name, monkeypatch):
    plan = import_module("polysite.benchmark.plan")
    monkeypatch.setattr(plan, "measure", lambda *_: plan.Pace(1.0, 1.0, "cpu", "Measured."))
    monkeypatch.setattr(study, "initial_params", lambda chosen: {"w": np.zeros(1, np.float32)})  # steps need no network
    bench = benchmark.load(name).only(["fedavg", "ditto"])
    lines = {line.cells[0].text: line.cells for line in benchmark.plan(bench, {}, absent=True).lines}
    runs = len(bench.federations) * len(bench.seeds)
    assert lines["fedavg"][1].value == runs and lines["all"][1].value == 2 * runs
    cases = sum(sizes(bench.sizes).values()) if name == "paper_a_kits" else None
    if cases:  # a step has the four patches of a volume; all cases but 16 train
        assert lines["fedavg"][3].value == runs * 25 * (cases - 16)
    assert lines["ditto"][3].value == 2 * lines["fedavg"][3].value
