"""The benchmarks of papers A and D: every value of their protocols, and whole runs on generated datasets."""

import csv
import tomllib
from importlib import resources
from math import prod
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import trees
from polysite import benchmark, config, study
from polysite.algorithms import name_of
from polysite.benchmark.jobs import studies
from polysite.cli import app
from polysite.engines.run_folder import file_name
from polysite.report.published import numbers, sizes

SHARED = Path(__file__).parents[3] / "shared" / "data"
A = {"paper_a_fets": "FeTS", "paper_a_prostate": "Prostate", "paper_a_kits": "Fed-KITS2019"}
D = {"paper_d_luna": "D_table1", "paper_d_dfuc": "D_table2", "paper_d_brats_two": "D_table3", "paper_d_brats": "D_table4"}
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


def every(bench):
    """The study of every method of a benchmark, with data that nobody opens."""
    return studies(benchmark.load(bench), {"data.name": "files", "data.path": "absent"})


def reach(value, path):
    for name in path.split("."):
        value = getattr(value, name)
    return value


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
@pytest.mark.parametrize("bench", A)
def test_a_value_of_paper_a(bench, key):
    wanted, found = A_VALUES[key](A[bench]), {m: reach(s, key) for m, s in every(bench).items()}
    assert found == dict.fromkeys(found, wanted)


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
        assert config.parse(config.dump(each)) == each


@pytest.mark.parametrize("bench", A)
def test_the_sizes_of_table_5_of_paper_a(bench):
    """Of FeTS and prostate the paper prints all cases as training samples, of Fed-KiTS2019 the training cases."""
    base = {"preset": f"distance_aware_{bench.rpartition('_')[2]}"}
    counted = config.build({**base, "data": {"name": "counted", "sizes": sizes(given(bench)["sizes"])}})
    dealt = study.deal_cases(counted)
    for client, splits in enumerate(dealt.values(), start=1):
        counts = {part: len(splits[part]) for part in splits}
        theirs = {k: printed("A_table5", f"{k} samples", A[bench], where=str(client))[0] for k in ("training", "validation")}
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


D_VALUES = {  # key of a study -> the value; what paper D prints, or "our choice" of its preset
    "train.loss": "ce",
    "run.peek": True,
    "run.validate_every": 1,
    "train.momentum": 0.0,
}


@pytest.mark.parametrize("key", D_VALUES)
@pytest.mark.parametrize("bench", [*D, *SWEEPS])
def test_a_value_of_paper_d(bench, key):
    found = {m: reach(s, key) for m, s in every(bench).items()}
    assert found == dict.fromkeys(found, D_VALUES[key])


@pytest.mark.parametrize("bench", [*D, *SWEEPS])
def test_feddiv_as_paper_d_prints_it(bench):
    for name, each in every(bench).items():
        if not name.startswith("feddiv"):
            continue
        assert each.algorithm.gamma == printed("D_text", "gamma of g(x), eq. 6", method="FedDiv")[0]
        data = "BraTS2017" if "brats" in bench else "LUNA16"
        if bench in D:
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
    sizes_of = {}
    for name, each in every(bench).items():
        shapes = [x.shape for x in _weights(each.model, dims, modalities, classes)]
        sizes_of[name] = sum(prod(s) for s in shapes)
    whole = sizes_of.pop("fedavg")
    assert sizes_of["feddiv"] == pytest.approx(whole, rel=0.01)
    assert {n for name, n in sizes_of.items() if name != "feddiv"} == {whole}


def _weights(model, dims, modalities, classes):
    import torch

    with torch.device("meta"):
        return list(model.build(dims=dims, modalities=modalities, outputs=classes, seed=0).parameters())
