"""The benchmarks of papers A to D: every value of their protocols, and whole runs on generated datasets."""

import csv
import tomllib
from collections import Counter
from functools import cache
from importlib import resources
from math import prod
from operator import attrgetter

import pytest
import torch
from typer.testing import CliRunner

import fets
import trees
from fets import rows
from polysite import benchmark, config, study
from polysite.algorithms import name_of
from polysite.benchmark.jobs import studies
from polysite.cli import app
from polysite.data.sources import Counted
from polysite.engines.run_folder import file_name
from polysite.report.published import numbers, sizes

B, LIMITED, C = "challenge setup", "limited setup", "FeTS2022"


def published(table, method, measure, setting):
    """The published value of a hyper-parameter, or the values that were searched."""
    rows = [n for n in numbers(table) if (n.method, n.setting) == (method, setting) and n.measure == measure]
    assert rows, (table, method, measure, setting)
    return rows[0].value if len(rows) == 1 else tuple(n.value for n in rows)


@cache
def every(bench):
    """The study of every method of a benchmark; its data folder does not exist and is not opened."""
    return studies(benchmark.load(bench), {"data.name": "files", "data.path": "absent"})


@cache
def printed(bench, method):
    """The phases of a method's study as its file has them."""
    return config.phases(config.parse(config.dump(every(bench)[method])))


FEDAVG, ALONE, PRIOR = "FedAvg and variations, SCAFFOLD, CFL", "Centralized, institution 1 local", "HGG/LGG CFL"
VARIANTS = ("fedavg", "fedavg, fixed iterations", "fedavg, uniform", "scaffold", "cfl")
IID = {f"fedavg, IID {n}": n for n in (23, 10, 5)}
SELECTED = [  # bench, methods, phase, name in Table A.4, {quantity there: how a study has it}
    ("paper_b", ("centralised", "local"), 0, ALONE, {"learning rate": "train.lr"}),
    ("paper_b", (*VARIANTS, "prior cfl", "local fine-tuning"), 0, FEDAVG, {"learning rate": "train.lr"}),
    ("paper_b", ("fednova",), 0, "FedNova", {"learning rate": "train.lr"}),
    ("paper_b", ("fedadam",), 0, "FedAdam", {
        "local learning rate": "train.lr", "server learning rate": "algorithm.server.lr",
        "beta_1": "algorithm.server.b1", "beta_2": "algorithm.server.b2", "tau": "algorithm.server.tau",
    }),
    ("paper_b", ("q-fedavg",), 0, "q-FedAvg", {"learning rate": "train.lr", "q": "algorithm.q"}),
    ("paper_b", ("fedpidavg",), 0, "FedPIDAvg", {
        "learning rate": "train.lr", "alpha": "algorithm.alpha", "beta": "algorithm.beta", "gamma": "algorithm.gamma",
    }),
    ("paper_b", ("fedper",), 0, "FedPer", {"learning rate": "train.lr"}),
    ("paper_b", ("lg_fedavg",), 0, "LG-FedAvg", {"learning rate": "train.lr"}),
    ("paper_b", ("prior cfl",), 1, PRIOR, {"learning rate": "train.lr"}),
    ("paper_b", tuple(IID), 0, "FedAvg IID", {"learning rate": "train.lr"}),
    ("paper_b_limited", ("centralised",), 0, ALONE, {"learning rate": "train.lr"}),
    ("paper_b_limited", ("fedavg", "scaffold"), 0, "FedAvg and SCAFFOLD", {"learning rate": "train.lr"}),
    ("paper_b_limited", ("prior cfl",), 1, PRIOR, {"learning rate": "train.lr"}),
]  # fmt: skip
SEARCHED = [  # chosen by every institution on its validation cases
    ("paper_b", "local fine-tuning", "Local finetuning", "learning rate", "lr"),
    ("paper_b", "ditto", "Ditto", "learning rate", "lr"),
    ("paper_b", "ditto", "Ditto", "lambda", "lam"),
    ("paper_b_limited", "local fine-tuning", "Local finetuning", "learning rate", "lr"),
]


def setting_of(bench):
    return LIMITED if bench == "paper_b_limited" else B


@pytest.mark.parametrize(("bench", "methods", "phase", "title", "keys"), SELECTED)
def test_a_selected_value_of_table_a4(bench, methods, phase, title, keys):
    setting = "IID setup" if title == "FedAvg IID" else setting_of(bench)
    for quantity, key in keys.items():
        wanted = published("B_tableA4", title, f"{quantity} (selected)", setting)
        assert {m: attrgetter(key)(printed(bench, m)[phase]) for m in methods} == dict.fromkeys(methods, wanted)


@pytest.mark.parametrize(("bench", "method", "title", "quantity", "key"), SEARCHED)
def test_a_searched_value_of_table_a4(bench, method, title, quantity, key):
    last = printed(bench, method)[-1]
    wanted = published("B_tableA4", title, f"{quantity} (search space)", setting_of(bench))
    assert name_of(last.algorithm) == "fine_tune" and getattr(last.algorithm, key) == wanted


def test_table_a4_has_no_other_value():
    covered = {(title, f"{q} (selected)") for _, _, _, title, keys in SELECTED for q in keys}
    covered |= {(title, f"{q} (selected)") for _, _, title, q, _ in SEARCHED}
    rows = {(n.method, n.measure) for n in numbers("B_tableA4") if "(selected)" in n.measure}
    assert rows - covered == {(m, "number of private layers (selected)") for m in ("FedPer", "LG-FedAvg")}
    for method, parts in {"fedper": ["decoder.3.*", "head.*"], "lg_fedavg": ["stem.*", "encoder.0.*"]}.items():
        assert list(printed("paper_b", method)[0].algorithm.private) == parts  # eight tensors: four layers


DECAY = "learning rate decay per epoch or round"
B_TEXT = {  # quantity of B's text -> where a study has it, for every method but those named
    ("all", "all setups", "batch size"): ("train.batch", ()),
    ("all", "all setups", "weight decay"): ("train.weight_decay", ()),
    ("all but q-FedAvg", "all setups", DECAY): ("train.gamma", ("q-fedavg", "fedavg, fixed iterations")),
    ("all federated methods", B, "local epochs per round"): ("train.epochs", ()),
    ("cross-validation", "all setups", "folds"): ("split.folds", ()),
    ("inference", "all setups", "sliding window overlap"): ("train.overlap", ()),
    ("Centralized, Institution 1 local", B, "epochs"): ("run.rounds", ("fedavg, fixed iterations", "prior cfl")),
}


@pytest.mark.parametrize("quantity", B_TEXT)
@pytest.mark.parametrize("bench", ["paper_b", "paper_b_limited"])
def test_a_value_of_the_text_of_paper_b(bench, quantity):
    method, setting, measure = quantity
    wanted, (key, others) = published("B_text", method, measure, setting), B_TEXT[quantity]
    found = {m: attrgetter(key)(s) for m, s in every(bench).items() if m not in others}
    assert found == dict.fromkeys(found, wanted)


def test_the_rounds_of_paper_b_that_differ():
    iterations = printed("paper_b", "fedavg, fixed iterations")[0]
    title = "FedAvg w/ fixed local iterations"
    assert iterations.train.steps == published("B_text", title, "local iterations per round", B)
    assert iterations.run.rounds == published("B_text", title, "communication rounds", B)
    assert printed("paper_b", "q-fedavg")[0].train.gamma == 1.0
    assert iterations.train.gamma == 0.998  # 0.995 in the text: over 720 rounds this ends where that does over 300
    assert iterations.train.gamma**720 == pytest.approx(0.995**300, rel=0.1)
    for bench in ("paper_b", "paper_b_limited"):
        before, after = printed(bench, "prior cfl")
        title = "Prior CFL HGG/LGG"
        assert before.run.rounds == published("B_text", title, "FedAvg rounds before clustering", B)
        assert after.run.rounds == published("B_text", title, "communication rounds per cluster", B)
        assert (after.run.best, after.run.best_from) == ("own", 1)  # the model before the first round is not scored
        tuned = printed(bench, "local fine-tuning")[1]
        assert tuned.run.rounds == published("B_text", "Local finetuning, Ditto", "local epochs", B)


def test_what_the_code_of_paper_b_decides():
    found = every("paper_b")
    for each in found.values():
        assert each.prepare.normalise == "padded" and each.prepare.crop and not each.train.autocast
        assert each.train.contrast == "image" and each.train.augment == "full" and each.split.rounding == "up"
        assert each.train.patch == (128, 128, 128) and each.train.momentum == 0 and each.train.optimiser == "sgd"
    own = {m for m, each in found.items() if config.phases(each)[-1].run.best == "own"}
    assert own == {"local", "fedper", "lg_fedavg", "cfl", "prior cfl"}
    assert found["fednova"].algorithm.tau == "sizes" and found["scaffold"].algorithm.uniform is False
    assert found["q-fedavg"].algorithm.augmented
    cfl = found["cfl"]
    assert cfl.algorithm.split_at == (201,) and cfl.algorithm.split_first and cfl.run.best_from == 201
    assert {m: found[m].federation.sites for m in IID} == IID
    groups = config.phases(found["prior cfl"])[1].algorithm.groups
    assert groups["low"] == ("12", "13", "14", "15")
    assert sorted(s for g in groups.values() for s in g) == [f"{n:02d}" for n in range(1, 24)]


TUNED, CLUSTERED = ("local fine-tuning",), ("cfft", "cfft, ideal", "cfft, federated fit")
BOTH, EVERY = ("centralised", "fedavg"), ("fedavg", "local fine-tuning", *CLUSTERED)
FITTED, POOLED = ("cfft", "cfft, federated fit"), ("cfft", "cfft, ideal")
C_PRINTED = [  # methods, phase, name in C's text, {quantity there: how a study has it}
    (BOTH, 0, "3D U-Net", {"batch size": "train.batch"}),
    (BOTH, 0, "all methods", {"weight decay": "train.weight_decay"}),
    (("centralised",), 0, "Centralized", {"learning rate": "train.lr", "epochs": "run.rounds"}),
    (EVERY, 0, "FedAvg", {"learning rate": "train.lr", "communication rounds": "run.rounds"}),
    (("fedavg",), 0, "FedAvg", {"local epochs per round": "train.epochs"}),
    (("fedavg",), 0, "3D U-Net", {"sliding window overlap": "train.overlap"}),
    (TUNED, 1, "Local Finetuning", {"local epochs": "run.rounds"}),
    (FITTED, 1, "CFFT", {"learning rate": "train.lr", "communication rounds": "algorithm.rounds"}),
    (("cfft",), 1, "CFFT", {"local epochs per round": "train.epochs"}),
    (("cfft, ideal",), 1, "CFFT_ideal", {"learning rate": "train.lr", "epochs": "algorithm.rounds"}),
    (POOLED, 1, "radiomic features", {"histogram bin size": "algorithm.bin_width"}),
    (POOLED, 1, "PCA", {"components": "algorithm.dimensions"}),
]
FIRST = {"augment": "full", "momentum": 0.0, "loss": "dice", "autocast": False}
FIT = {
    "components": (10,), "fit": "pooled", "restarts": 20, "iterations": 100, "cases": "train+validation",
    "starts": "kmeans", "seed": 6,
}  # fmt: skip
C_DECIDED = [  # methods, phase, section of a study, what the code of paper C decides or we chose
    (BOTH, 0, "train", {"augment": "full", "gamma": 1.0}),
    ((*TUNED, *CLUSTERED), 0, "train", FIRST),
    (TUNED, 1, "train", {"augment": "full"}),
    (TUNED, 1, "algorithm", {"lr": (0.02,)}),
    (POOLED, 1, "train", {"augment": "none", "gamma": 1.0}),
    (POOLED, 1, "algorithm", FIT),
    (("cfft, ideal",), 1, "run", {"pooled": True}),
    (("cfft, federated fit",), 1, "algorithm", {"fit": "federated", "seed": 6}),
]


@pytest.mark.parametrize(("methods", "phase", "title", "keys"), C_PRINTED)
def test_a_value_of_the_text_of_paper_c(methods, phase, title, keys):
    for quantity, key in keys.items():
        found = {m: attrgetter(key)(printed("paper_c", m)[phase]) for m in methods}
        assert found == dict.fromkeys(methods, published("C_text", title, quantity, C))


@pytest.mark.parametrize(("methods", "phase", "section", "wanted"), C_DECIDED)
def test_what_paper_c_does_not_print(methods, phase, section, wanted):
    for method in methods:
        given = getattr(printed("paper_c", method)[phase], section)
        assert {key: getattr(given, key) for key in wanted} == wanted, method


def test_the_network_and_the_split_of_paper_c():
    chosen = every("paper_c")["fedavg"]
    assert chosen.model.filters == (16, 32, 64, 128) and chosen.prepare.normalise == "padded"
    counted = config.build({"preset": "radiomics_clusters", "data": {"name": "counted", "sizes": sizes("B_sizes")}})
    assert isinstance(counted.data, Counted)
    dealt = study.deal_cases(counted)
    for split, title in {"train": "training", "validation": "validation", "test": "test"}.items():
        assert sum(len(s[split]) for s in dealt.values()) == published("C_text", "", f"{title} samples", C)
    tested = {n.where: n.value for n in numbers("C_table3") if n.measure == "test size"}
    assert {f"institution {int(site)}": len(s["test"]) for site, s in dealt.items()} == tested
    parameters = sum(prod(x.shape) for x in study.initial_params(counted).values())
    assert 1.35e6 < parameters < 1.45e6


def on_fets(name, fake, out, *words):
    """Run a benchmark at tiny scale on the fake FeTS 2022, and return what it printed."""
    done = CliRunner().invoke(app, ["bench", name, "--scale", "tiny", "--data", str(fake), "--out", str(out), *words])
    assert done.exit_code == 0, done.output + str(done.exception)
    return " ".join(done.output.split())


def check_comparison(name, out, folds, methods):
    """Every run, table and figure of a benchmark is there, and its methods are joined over the folds."""
    chosen = benchmark.load(name, "tiny")
    for method in methods:
        assert len(list((out / "runs" / file_name(method)).glob("fold*/result.json"))) == folds, method
    written = {f.name for f in (out / "comparison").iterdir()}
    tables = ("overview", "hospitals_dice", "hospitals_hd95", "tests_dice", "cost")
    assert {"index.html", *(f"{t}.csv" for t in tables)} <= written
    assert {f"published_{table}.csv" for table in chosen.published.tables} <= written
    drawn = {f.name for f in (out / "comparison" / "figures").iterdir()}
    for figure in chosen.compare.figures:
        kinds = {n.rpartition(".")[2] for n in drawn if n.startswith(figure)}
        assert {"svg", "png"} <= kinds, (figure, drawn)
    for table in (t for t in chosen.published.tables if not t.endswith("_text")):
        listed = rows(out / "comparison" / f"published_{table}.csv")
        printed_there = {n.method for n in numbers(table)}
        wanted = {m for m in methods if printed_there & set(chosen.published.methods.get(m, ()))}
        assert wanted and wanted <= {r["method"] for r in listed}
        assert all(r["measured (value)"] for r in listed if r["measure"].startswith("Dice"))


@pytest.mark.slow
def test_a_tenth_of_the_cases_and_two_methods_over_the_published_limited_folds(tmp_path, shared, in_process):
    fake, out = fets.write(tmp_path / "fets", shared, share=0.1, size=8), tmp_path / "out"
    small, methods = ("--set", "train.patch=[8,8,8]", "--set", "run.rounds=1"), ("fedavg", "prior cfl")
    only = [word for method in methods for word in ("--only", method)]
    said = on_fets("paper_b_limited", fake, out, "--folds", str(fake / "folds_limited"), "--jobs", "2", *small, *only)
    check_comparison("paper_b_limited", out, 5, methods)
    assert "The folds are the published ones" in said
    folds = (fake / "folds_limited" / f"partitioning_1_test_fold_{k}.csv" for k in range(5))
    tested = {r["Subject_ID"] for fold in folds for r in rows(fold)}
    overview = (out / "comparison" / "tables.md").read_text()
    assert f"over the {len(tested)} test cases" in overview and "count once" in overview
    sites = {r["hospital"] for r in rows(out / "comparison" / "hospitals_dice.csv")} - {"all"}
    assert sites == set(sizes("B_sizes_limited"))  # 18 institutions: five have no patient of known grade


@pytest.mark.slow
def test_clusters_of_paper_c_on_a_few_cases(tmp_path, shared, in_process):
    out, shown = tmp_path / "out", ("FeTS2022_01172", "FeTS2022_01441")
    fake = fets.write(tmp_path / "fets", shared, share=0.05, size=8, cases=shown)
    words = ("--only", "fedavg", "--only", "cfft", "--set", "train.patch=[8,8,8]", "--jobs", "1")
    assert "Not in the data, so not shown: FeTS2022_01195." in on_fets("paper_c", fake, out, *words)
    check_comparison("paper_c", out, 1, ["fedavg", "cfft"])
    assert (out / "comparison" / "figures" / "scans-fets2022-01441.svg").exists()
    (variance,) = rows(out / "comparison" / "published_C_text.csv")
    assert (variance["measure"], variance["published"]) == ("variance preserved (%)", "96.58")
    assert 0 < float(variance["measured"]) <= 100


@pytest.mark.soak
def test_papers_b_and_c_from_end_to_end(tmp_path, shared, in_process):
    fake = fets.write(tmp_path / "fets", shared)
    for name, place, tested in (("paper_b", "folds", 1251), ("paper_b_limited", "folds_limited", 278)):
        on_fets(name, fake, tmp_path / name, "--folds", str(fake / place))
        check_comparison(name, tmp_path / name, 5, list(benchmark.load(name).methods))
        assert f"over the {tested} test cases" in (tmp_path / name / "comparison" / "tables.md").read_text()
    on_fets("paper_c", fake, tmp_path / "paper_c")
    check_comparison("paper_c", tmp_path / "paper_c", 1, list(benchmark.load("paper_c").methods))
    split = rows(tmp_path / "paper_c" / "runs" / "fedavg" / "fold0-seed0" / "split.csv")
    assert [sum(r["Split"] == k for r in split) for k in ("train", "validation", "test")] == [833, 218, 200]


def test_sites_and_folds_are_checked_before_any_training(tmp_path, shared, in_process):
    fake = fets.write(tmp_path / "fets", shared, share=0.01, size=4)
    words = ["bench", "paper_b", "--scale", "tiny", "--data", str(fake), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*words, "--folds", str(tmp_path)])
    assert "partitioning_1_test_fold_0.csv is missing; name the folder of these files" in str(done.exception)
    table = (fake / "partitioning_1.csv").read_text().splitlines()
    (fake / "partitioning_1.csv").write_text("\n".join(line for line in table if not line.startswith("13,")) + "\n")
    done = CliRunner().invoke(app, [*words, "--only", "fedavg", "--only", "prior cfl"])
    assert "prior cfl, fold 0, seed 0: " in str(done.exception) and "'13'" in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_scanners_of_cc359_without_training(tmp_path, in_process):
    words = ["--data", str(trees.cc359(tmp_path / "cc")), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["bench", "paper_c_cc359", *words, "--set", "prepare.size=[0, 12, 12]"])
    assert done.exit_code == 0, done.output + str(done.exception)
    listed = {r["measure"]: r for r in rows(tmp_path / "out" / "comparison" / "published_C_text.csv")}
    assert listed["variance preserved (%)"]["published"] == "99.96"
    assert listed["scans (samples)"]["measured (value)"] == "18.0"
    assert any((tmp_path / "out" / "comparison" / "figures").glob("*t-sne*.svg"))


A = {"paper_a_fets": "FeTS", "paper_a_prostate": "Prostate", "paper_a_kits": "Fed-KITS2019"}
D = {"paper_d_luna": "D_table1", "paper_d_dfuc": "D_table2", "paper_d_brats_two": "D_table3",
     "paper_d_brats": "D_table4"}  # fmt: skip
SWEEPS = {"paper_d_luna_sweep": "LUNA16", "paper_d_brats_sweep": "BraTS2017"}
TREES = {  # the generated dataset of every benchmark
    "paper_a_fets": lambda folder: trees.fets22(folder, {"6": 5, "13": 5, "20": 5, "21": 5, "1": 2}),
    "paper_a_prostate": trees.prostate,
    "paper_a_kits": trees.fed_kits,
    "paper_d_dfuc": trees.dfuc2021,
    **dict.fromkeys(("paper_d_luna", "paper_d_luna_sweep"), trees.luna16),
    **dict.fromkeys(("paper_d_brats", "paper_d_brats_two", "paper_d_brats_sweep"), trees.brats17),
}


def stated(table, measure, setting="all datasets", method=None, where="all"):
    """The values that a paper prints for a quantity."""
    rows = [n for n in numbers(table) if (n.measure, n.setting, n.where) == (measure, setting, where)]
    found = [n.value for n in rows if method in (None, n.method)]
    assert found, (table, measure, setting, method, where)
    return found


def axes(measure, setting):
    """The three numbers that paper A prints for the axes of a volume."""
    return tuple(stated("A_text", measure, setting, where=f"axis {k}")[0] for k in (1, 2, 3))


def given(bench):
    """The file of a benchmark."""
    return tomllib.loads(resources.files("polysite").joinpath("benches", f"{bench}.toml").read_text(encoding="utf-8"))


A_VALUES = {  # key of a study -> what paper A prints for a dataset
    "train.lr": lambda _: stated("A_text", "learning rate")[0],
    "train.momentum": lambda _: stated("A_text", "momentum")[0],
    "run.rounds": lambda _: stated("A_text", "global epochs (rounds)")[0],
    "split.validation": lambda _: stated("A_text", "validation share")[0] / 100,
    "train.patches": lambda _: stated("A_text", "patches per volume")[0],
    "train.batch": lambda d: stated("A_text", "batch size", d)[0] * stated("A_text", "patches per volume")[0],
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
def test_the_methods_and_federations_of_paper_a(bench):
    chosen, file = every(bench), given(bench)["methods"]
    assert chosen["fedprox"].algorithm.mu == stated("A_text", "mu", method="FedProx")[0]
    assert name_of(chosen["ditto"].algorithm) == "ditto" and chosen["ditto"].algorithm.lam == 1.0
    weights = stated("A_text", "weight omega of most distant client", method="FedAvg_w")
    outliers = [(m["outlier"]["distance"], m["outlier"]["weight"]) for m in file.values() if "outlier" in m]
    assert outliers == [(distance, w) for distance in ("emd", "euclidean") for w in weights]
    assert [m["clusters"] for m in file.values() if "clusters" in m] == ["emd", "euclidean"]
    settings = {n.setting for n in numbers("A_table1") if n.setting.startswith(f"{A[bench]} ")}
    titles = {f"{A[bench]} {f['title']}".replace("Tumour", "Tumor") for f in given(bench)["federations"]}
    assert titles == settings
    assert {type(each.encoder).__name__ for each in chosen.values()} == {"MedicalNet"}


def samples(bench, part, client):
    """What Table 5 of paper A prints for a client."""
    return stated("A_table5", f"{part} samples", A[bench], where=str(client))[0]


@pytest.mark.parametrize("bench", A)
def test_the_sizes_of_table_5_of_paper_a(bench):
    """Of FeTS and prostate the paper prints all cases as training samples, of Fed-KiTS2019 the training cases."""
    preset = {"preset": f"distance_aware_{bench.rpartition('_')[2]}"}
    counted = config.build({**preset, "data": {"name": "counted", "sizes": sizes(given(bench)["sizes"])}})
    dealt = study.deal_cases(counted)
    for client, splits in enumerate(dealt.values(), start=1):
        training, validation = (samples(bench, part, client) for part in ("training", "validation"))
        assert len(splits["validation"]) == validation and not splits["test"]
        assert len(splits["train"]) == training - (0 if bench == "paper_a_kits" else validation)
    assert list(dealt) == list(sizes(given(bench)["sizes"]))


def listed(shared, file):
    """The rows of a published file, which the package does not hold."""
    with (shared / file).open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_the_hospitals_of_paper_a_are_those_of_fed_kits_and_of_fets_2022(shared):
    found = Counter((r["site"], r["split"]) for r in listed(shared, "fed_kits/volumes.csv"))
    for client, site in enumerate(sizes("A_sizes_kits"), start=1):
        assert found[site, "test"] == samples("paper_a_kits", "validation", client)
        assert found[site, "train"] == samples("paper_a_kits", "training", client)
    counts, fets = {}, sizes("A_sizes_fets")
    for year in (2021, 2022):
        rows = listed(shared, f"fets_partitions/fets{year}_partitioning_1.csv")
        counted = Counter(r["Partition_ID"].zfill(2) for r in rows)
        counts[year] = {site: counted[site] for site in fets}
    assert counts[2022] == fets != counts[2021]


@pytest.mark.parametrize("bench", [*D, *SWEEPS])
def test_values_of_paper_d(bench):
    data = "BraTS2017" if "brats" in bench else "LUNA16"
    for name, each in every(bench).items():
        found = each.train.loss, each.run.peek, each.run.validate_every, each.train.momentum
        assert found == ("ce", True, 1, 0.0)  # what paper D prints, or our choice
        if name.startswith("feddiv"):
            assert each.algorithm.gamma == stated("D_text", "gamma of g(x), eq. 6", method="FedDiv")[0]
            assert bench in SWEEPS or each.algorithm.alpha == stated("D_text", "optimal alpha", data, "FedDiv")[0]


@pytest.mark.parametrize("bench", D)
def test_the_methods_and_federations_of_a_table_of_paper_d(bench):
    file = given(bench)
    listed = [n for n in numbers(D[bench]) if "repeated" not in n.setting]
    ours, settings = file["published"]["methods"], file["published"]["settings"]
    assert list(ours) == list(file["methods"]) and set(ours.values()) == {n.method for n in listed}
    assert len(ours) == 1 + stated("D_text", "strategies compared", method="comparison")[0]
    assert set(settings.values()) == {n.setting for n in listed}
    assert list(settings) == [f["title"] for f in file["federations"]]
    for entry in file["federations"]:
        first, *later = entry.get("federation", [entry])
        wanted = settings[entry["title"]]
        assert first["sites"] == stated("D_text", "clients")[0]
        if later:
            assert first["parts"] == "all"  # every client tests on cases of its own
            assert [later[0]["count"]] == stated("D_text", "hidden modalities per client", wanted.rpartition(" ")[0])
        else:
            ratio = next(n.value for n in numbers("D_text") if n.setting == wanted and "class ratio" in n.measure)
            assert first["delta"] == ratio


@pytest.mark.parametrize("bench", SWEEPS)
def test_the_sweeps_hold_the_values_that_paper_d_prints(bench):
    swept, text = given(bench)["sweep"], numbers("D_text")
    lam = swept["algorithm.lam"]
    ends = {n.value for n in text if n.setting.startswith("LUNA16, BraTS2017 (personalising") and "lambda" in n.measure}
    assert ends == {lam[0], lam[-1]} and stated("D_text", "lambda", "LUNA16 delta=7")[0] in lam
    best = stated("D_text", "optimal alpha", SWEEPS[bench], "FedDiv")[0]
    assert {0.0, best} <= set(swept["algorithm.alpha"])


KINDS = dict(zip(D, ((3, 1, 2), (2, 3, 3), (2, 4, 2), (2, 4, 4)), strict=True))  # dimensions, modalities, classes


@pytest.mark.parametrize("bench", D)
def test_the_networks_of_paper_d_are_equally_large(bench):
    """FedDiv's encoders are narrower, so that its network is as large as that of the others."""
    dims, modalities, classes = KINDS[bench]
    counted = {}
    for name, each in every(bench).items():
        with torch.device("meta"):
            built = each.model.build(dims=dims, modalities=modalities, outputs=classes, seed=0)
        counted[name] = sum(prod(x.shape) for x in built.parameters())
    assert {name for name, count in counted.items() if count != counted["fedavg"]} <= {"feddiv"}
    assert counted["feddiv"] == pytest.approx(counted["fedavg"], rel=0.01)


def run(bench, out, data, jobs=1):
    """Run a benchmark on a folder and write its pages."""
    given = {"data.name": "files", "data.path": f'"{data}"'}
    results = benchmark.run(bench, out, given, jobs)
    assert not results.failed, results.failed
    benchmark.publish(bench, out, results)


def check_federations(bench, out, figure):
    """Every run, table and figure is there, and every method that the paper prints has a measured value beside it."""
    listed = {v.name for v in benchmark.variants(bench, {"data.name": "files", "data.path": "absent"})}
    theirs = {m: {name.partition(" @ ")[0] for name in bench.published.methods.get(m, ())} for m in listed}
    for title in (f.title for f in bench.federations):
        here, runs = out / "federations" / file_name(title), out / "runs"
        assert all(list((runs / file_name(m) / file_name(title)).glob("*/result.json")) for m in listed)
        measured = {r["method"] for f in here.glob("published_*.csv") for r in rows(f) if r["measured (value)"]}
        settings = bench.published.settings.get(title, ())
        known = {n.method for t in bench.published.tables for n in numbers(t) if n.setting in settings}
        wanted = {m for m in listed if known & theirs[m]}
        assert wanted <= measured, (title, wanted - measured)
    assert {"index.html", "federations.csv", "distance.csv"} <= {f.name for f in (out / "comparison").iterdir()}
    drawn = {f.name for place in ("comparison", "federations") for f in (out / place).rglob("figures/*.svg")}
    assert any(name.startswith(figure) for name in drawn), drawn


@pytest.mark.slow
def test_two_federations_of_fed_kits_with_the_published_distances(tmp_path, in_process):
    bench = benchmark.load("paper_a_kits", "tiny").only(["fedavg", "fedavg ω 0.5 (EMD)"])
    data, out = trees.fed_kits(tmp_path / "kits"), tmp_path / "out"
    run(bench, out, data)
    check_federations(bench, out, "bars")
    sorted_there = out / "federations" / file_name("Kidney + Tumour")
    weights = [r for r in rows(sorted_there / "published_A_table3.csv") if r["method"].startswith("fedavg ω")]
    assert [r["published"] for r in weights] == ["0.409 ± 0.030"]  # of the EMD's outlier alone, not the EUC's
    assert len(rows(sorted_there / "published_A_table2.csv")) == 50  # two matrices with their sums
    for title in ("Original", "Kidney + Tumour"):
        split = rows(out / "runs" / "fedavg" / file_name(title) / "fold0-seed0" / "split.csv")
        assert {r["Partition_ID"] for r in split} == set("01234")
        counted = Counter(r["Split"] for r in split)
        assert counted["validation"] == 5 and counted.keys() == {"train", "validation"}


@pytest.mark.soak
@pytest.mark.parametrize("name", TREES)
def test_a_benchmark_from_end_to_end(name, tmp_path, in_process):
    bench, out = benchmark.load(name, "tiny"), tmp_path / "out"
    run(bench, out, TREES[name](tmp_path / "data"), jobs=2)
    check_federations(bench, out, "sweep" if name in SWEEPS else "bars")
