"""The benchmarks of papers B and C: every value of their protocols, and whole runs on a fake FeTS 2022."""

from functools import cache
from math import prod
from operator import attrgetter
from pathlib import Path

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner

import fets
from polysite import benchmark, config, study
from polysite.algorithms import name_of
from polysite.benchmark.jobs import studies
from polysite.cli import app
from polysite.data.sources import Counted
from polysite.engines.run_folder import file_name
from polysite.report.published import numbers, sizes
from tiny_bench import rows

SHARED = Path(__file__).parents[3] / "shared" / "data"
B, LIMITED, C = "challenge setup", "limited setup", "FeTS2022"
VARIANTS = ("fedavg", "fedavg, fixed iterations", "fedavg, uniform", "scaffold", "cfl")


def published(table, method, measure, setting):
    """The published value of a hyper-parameter, or the values that were searched."""
    rows = [n for n in numbers(table) if (n.method, n.setting) == (method, setting) and n.measure == measure]
    assert rows, (table, method, measure, setting)
    return rows[0].value if len(rows) == 1 else tuple(n.value for n in rows)


every = cache(lambda bench: studies(benchmark.load(bench), {}))


@cache
def printed(bench, method):
    """The phases of a method's study as its file has them."""
    return config.phases(config.parse(config.dump(every(bench)[method])))


SELECTED = [  # bench, methods, phase, name in Table A.4, quantity there, how a study has it
    ("paper_b", ("centralised", "local"), 0, "Centralized, institution 1 local", "learning rate", "train.lr"),
    ("paper_b", VARIANTS, 0, "FedAvg and variations, SCAFFOLD, CFL", "learning rate", "train.lr"),
    ("paper_b", ("prior cfl",), 0, "FedAvg and variations, SCAFFOLD, CFL", "learning rate", "train.lr"),
    ("paper_b", ("local fine-tuning",), 0, "FedAvg and variations, SCAFFOLD, CFL", "learning rate", "train.lr"),
    ("paper_b", ("fednova",), 0, "FedNova", "learning rate", "train.lr"),
    ("paper_b", ("fedadam",), 0, "FedAdam", "local learning rate", "train.lr"),
    ("paper_b", ("fedadam",), 0, "FedAdam", "server learning rate", "algorithm.server.lr"),
    ("paper_b", ("fedadam",), 0, "FedAdam", "beta_1", "algorithm.server.b1"),
    ("paper_b", ("fedadam",), 0, "FedAdam", "beta_2", "algorithm.server.b2"),
    ("paper_b", ("fedadam",), 0, "FedAdam", "tau", "algorithm.server.tau"),
    ("paper_b", ("q-fedavg",), 0, "q-FedAvg", "learning rate", "train.lr"),
    ("paper_b", ("q-fedavg",), 0, "q-FedAvg", "q", "algorithm.q"),
    ("paper_b", ("fedpidavg",), 0, "FedPIDAvg", "learning rate", "train.lr"),
    ("paper_b", ("fedpidavg",), 0, "FedPIDAvg", "alpha", "algorithm.alpha"),
    ("paper_b", ("fedpidavg",), 0, "FedPIDAvg", "beta", "algorithm.beta"),
    ("paper_b", ("fedpidavg",), 0, "FedPIDAvg", "gamma", "algorithm.gamma"),
    ("paper_b", ("fedper",), 0, "FedPer", "learning rate", "train.lr"),
    ("paper_b", ("lg_fedavg",), 0, "LG-FedAvg", "learning rate", "train.lr"),
    ("paper_b", ("prior cfl",), 1, "HGG/LGG CFL", "learning rate", "train.lr"),
    ("paper_b", tuple(f"fedavg, IID {n}" for n in (23, 10, 5)), 0, "FedAvg IID", "learning rate", "train.lr"),
    ("paper_b_limited", ("centralised",), 0, "Centralized, institution 1 local", "learning rate", "train.lr"),
    ("paper_b_limited", ("fedavg", "scaffold"), 0, "FedAvg and SCAFFOLD", "learning rate", "train.lr"),
    ("paper_b_limited", ("prior cfl",), 1, "HGG/LGG CFL", "learning rate", "train.lr"),
]
SEARCHED = [  # chosen by every institution on its validation cases
    ("paper_b", "local fine-tuning", "Local finetuning", "learning rate", "lr"),
    ("paper_b", "ditto", "Ditto", "learning rate", "lr"),
    ("paper_b", "ditto", "Ditto", "lambda", "lam"),
    ("paper_b_limited", "local fine-tuning", "Local finetuning", "learning rate", "lr"),
]


@pytest.mark.parametrize(("bench", "methods", "phase", "title", "quantity", "key"), SELECTED)
def test_a_selected_value_of_table_a4(bench, methods, phase, title, quantity, key):
    setting = "IID setup" if title == "FedAvg IID" else LIMITED if bench == "paper_b_limited" else B
    wanted = published("B_tableA4", title, f"{quantity} (selected)", setting)
    assert {m: attrgetter(key)(printed(bench, m)[phase]) for m in methods} == dict.fromkeys(methods, wanted)


@pytest.mark.parametrize(("bench", "method", "title", "quantity", "key"), SEARCHED)
def test_a_searched_value_of_table_a4(bench, method, title, quantity, key):
    setting = LIMITED if bench == "paper_b_limited" else B
    last = printed(bench, method)[-1]
    wanted = published("B_tableA4", title, f"{quantity} (search space)", setting)
    assert name_of(last.algorithm) == "fine_tune" and getattr(last.algorithm, key) == wanted


def test_table_a4_has_no_other_value():
    covered = {(t, f"{q} (selected)") for _, _, _, t, q, _ in SELECTED}
    covered |= {(t, f"{q} ({k})") for _, _, t, q, _ in SEARCHED for k in ("search space", "selected")}
    rows = {(n.method, n.measure) for n in numbers("B_tableA4") if "(selected)" in n.measure}
    layers = {(m, "number of private layers (selected)") for m in ("FedPer", "LG-FedAvg")}
    assert rows - covered == layers
    for method, parts in {"fedper": ["decoder.3.*", "head.*"], "lg_fedavg": ["stem.*", "encoder.0.*"]}.items():
        assert list(printed("paper_b", method)[0].algorithm.private) == parts  # eight tensors: four layers


B_TEXT = {  # quantity of B's text -> where a study has it, for every method but those named
    ("all", "all setups", "batch size"): ("train.batch", ()),
    ("all", "all setups", "weight decay"): ("train.weight_decay", ()),
    ("all but q-FedAvg", "all setups", "learning rate decay per epoch or round"): (
        "train.gamma",
        ("q-fedavg", "fedavg, fixed iterations"),
    ),
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
    assert [found[f"fedavg, IID {n}"].federation.sites for n in (23, 10, 5)] == [23, 10, 5]
    groups = config.phases(found["prior cfl"])[1].algorithm.groups
    assert groups["low"] == ("12", "13", "14", "15") and sorted(s for g in groups.values() for s in g) == [
        f"{n:02d}" for n in range(1, 24)
    ]


C_FIRST = {"train.lr": ("FedAvg", "learning rate"), "run.rounds": ("FedAvg", "communication rounds")}
C_VALUES = {  # methods and phase -> key of a study: its value, or the row of C's text
    (("centralised", "fedavg"), 0): {
        "train.batch": ("3D U-Net", "batch size"),
        "train.weight_decay": ("all methods", "weight decay"),
        "train.augment": "full",
        "train.gamma": 1.0,
    },
    (("centralised",), 0): {"train.lr": ("Centralized", "learning rate"), "run.rounds": ("Centralized", "epochs")},
    (("fedavg",), 0): {
        **C_FIRST,
        "train.epochs": ("FedAvg", "local epochs per round"),
        "train.overlap": ("3D U-Net", "sliding window overlap"),
    },
    (("local fine-tuning", "cfft", "cfft, ideal", "cfft, federated fit"), 0): {
        **C_FIRST,
        "train.augment": "full",
        "train.momentum": 0.0,
        "train.loss": "dice",
        "train.autocast": False,
    },
    (("local fine-tuning",), 1): {
        "algorithm.lr": (0.02,),
        "run.rounds": ("Local Finetuning", "local epochs"),
        "train.augment": "full",
    },
    (("cfft", "cfft, federated fit"), 1): {
        "train.lr": ("CFFT", "learning rate"),
        "algorithm.rounds": ("CFFT", "communication rounds"),
        "algorithm.seed": 6,
    },
    (("cfft",), 1): {"train.epochs": ("CFFT", "local epochs per round")},
    (("cfft, ideal",), 1): {
        "train.lr": ("CFFT_ideal", "learning rate"),
        "algorithm.rounds": ("CFFT_ideal", "epochs"),
        "run.pooled": True,
        "algorithm.seed": 6,
    },
    (("cfft", "cfft, ideal"), 1): {
        "train.augment": "none",
        "train.gamma": 1.0,
        "algorithm.components": (10,),
        "algorithm.bin_width": ("radiomic features", "histogram bin size"),
        "algorithm.dimensions": ("PCA", "components"),
        "algorithm.fit": "pooled",
        "algorithm.restarts": 20,
        "algorithm.iterations": 100,
        "algorithm.cases": "train+validation",
        "algorithm.starts": "kmeans",
    },
    (("cfft, federated fit",), 1): {"algorithm.fit": "federated", "algorithm.fewest": 0},
}


@pytest.mark.parametrize(("methods", "phase"), C_VALUES)
def test_values_of_paper_c(methods, phase):
    for key, value in C_VALUES[methods, phase].items():
        text = isinstance(value, tuple) and isinstance(value[0], str)
        wanted = published("C_text", *value, C) if text else value
        found = {m: attrgetter(key)(printed("paper_c", m)[phase]) for m in methods}
        assert found == dict.fromkeys(methods, wanted), key


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


def bench(name, fake, out, *words):
    """Run a benchmark at tiny scale on the fake FeTS 2022, and return what it printed."""
    done = CliRunner().invoke(app, ["bench", name, "--scale", "tiny", "--data", str(fake), "--out", str(out), *words])
    assert done.exit_code == 0, done.output + str(done.exception)
    return " ".join(done.output.split())


def check_folder(name, out, folds, methods):
    """Every run, table and figure of a benchmark is there, and its methods are joined over the folds."""
    chosen = benchmark.load(name, "tiny")
    for method in methods:
        assert len(list((out / "runs" / file_name(method)).glob("fold*/result.json"))) == folds, method
    written = {f.name for f in (out / "comparison").iterdir()}
    assert {
        "index.html",
        "overview.csv",
        "hospitals_dice.csv",
        "hospitals_hd95.csv",
        "tests_dice.csv",
        "cost.csv",
    } <= written
    assert {f"published_{table}.csv" for table in chosen.published.tables} <= written
    drawn = {f.name for f in (out / "comparison" / "figures").iterdir()}
    for figure in chosen.compare.figures:
        assert any(n.startswith(figure) and n.endswith(".svg") for n in drawn), (figure, drawn)
        assert any(n.startswith(figure) and n.endswith(".png") for n in drawn), (figure, drawn)
    for table in (t for t in chosen.published.tables if not t.endswith("_text")):
        listed = rows(out / "comparison" / f"published_{table}.csv")
        printed_there = {n.method for n in numbers(table)}
        wanted = {m for m in methods if printed_there & set(chosen.published.methods.get(m, ()))}
        assert wanted and wanted <= {r["method"] for r in listed}
        assert all(r["measured (value)"] for r in listed if r["measure"].startswith("Dice"))
        for row in (r for r in listed if r["measured (value)"]):  # a distance may be undefined in all cases of a site
            gap = float(row["measured (value)"]) - float(row["published (value)"])
            assert float(row["difference (value)"]) == pytest.approx(gap, abs=1e-9)
            assert row["within ±"] == ("" if "±" not in row["published"] else _within(row["published"], gap)), row


def _within(published, gap):
    return "yes" if abs(gap) <= float(published.partition(" ± ")[2]) else "no"


needs_fets = pytest.mark.skipif(
    not (SHARED / "fets_partitions").is_dir(), reason=f"the names and folds of FeTS 2022 are not in {SHARED}"
)


@needs_fets
@pytest.mark.slow
def test_a_tenth_of_the_cases_and_two_methods_over_the_published_limited_folds(tmp_path, in_process):
    fake, out = fets.write(tmp_path / "fets", SHARED, share=0.1, size=8), tmp_path / "out"
    small, methods = ("--set", "train.patch=[8,8,8]", "--set", "run.rounds=1"), ("fedavg", "prior cfl")
    only = [word for method in methods for word in ("--only", method)]
    said = bench("paper_b_limited", fake, out, "--folds", str(fake / "folds_limited"), "--jobs", "2", *small, *only)
    check_folder("paper_b_limited", out, 5, methods)
    assert "The folds are the published ones" in said
    tested = {
        r["Subject_ID"] for k in range(5) for r in rows(fake / "folds_limited" / f"partitioning_1_test_fold_{k}.csv")
    }
    overview = (out / "comparison" / "tables.md").read_text()
    assert f"over the {len(tested)} test cases" in overview and "count once" in overview
    sites = {r["hospital"] for r in rows(out / "comparison" / "hospitals_dice.csv")} - {"all"}
    assert sites == set(sizes("B_sizes_limited"))  # 18 institutions: five have no patient of known grade


@needs_fets
@pytest.mark.slow
def test_clusters_of_paper_c_on_a_few_cases(tmp_path, in_process):
    out, shown = tmp_path / "out", ("FeTS2022_01172", "FeTS2022_01441")
    fake = fets.write(tmp_path / "fets", SHARED, share=0.05, size=8, cases=shown)
    words = ("--only", "fedavg", "--only", "cfft", "--set", "train.patch=[8,8,8]", "--jobs", "1")
    assert "Not in the data, so not shown: FeTS2022_01195." in bench("paper_c", fake, out, *words)
    check_folder("paper_c", out, 1, ["fedavg", "cfft"])
    assert (out / "comparison" / "figures" / "scans-fets2022-01441.svg").exists()
    (variance,) = rows(out / "comparison" / "published_C_text.csv")
    assert (variance["measure"], variance["published"]) == ("variance preserved (%)", "96.58")
    assert 0 < float(variance["measured"]) <= 100


@needs_fets
@pytest.mark.soak
def test_papers_b_and_c_from_end_to_end(tmp_path, in_process):
    fake = fets.write(tmp_path / "fets", SHARED)
    folds = {"paper_b": "folds", "paper_b_limited": "folds_limited"}
    for name, place in folds.items():
        bench(name, fake, tmp_path / name, "--folds", str(fake / place))
        check_folder(name, tmp_path / name, 5, list(benchmark.load(name).methods))
        overview = (tmp_path / name / "comparison" / "tables.md").read_text()
        tested = {"paper_b": 1251, "paper_b_limited": 278}[name]
        assert f"over the {tested} test cases" in overview and "count once" in overview
    bench("paper_c", fake, tmp_path / "paper_c")
    check_folder("paper_c", tmp_path / "paper_c", 1, list(benchmark.load("paper_c").methods))
    split = rows(tmp_path / "paper_c" / "runs" / "fedavg" / "fold0-seed0" / "split.csv")
    assert [sum(r["Split"] == k for r in split) for k in ("train", "validation", "test")] == [833, 218, 200]


@needs_fets
def test_sites_and_folds_are_checked_before_any_training(tmp_path, in_process):
    fake = fets.write(tmp_path / "fets", SHARED, share=0.01, size=4)
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
    rng, grid = np.random.default_rng(0), np.stack(np.meshgrid(*[np.linspace(-1, 1, 12)] * 3))
    brain = (np.linalg.norm(grid, axis=0) < 0.8).astype(np.uint8)
    for k, (scanner, _) in enumerate(3 * list(sizes("C_sizes_cc359").items())):
        case, level = f"CC{k:04d}_{scanner}_50_M", 50 + 20 * k % 6
        image = np.where(brain, level + 10 * rng.standard_normal(brain.shape), rng.random(brain.shape))
        for place, name, array in (("Original", case, image.astype("f4")), ("Silver-standard", f"{case}_ss", brain)):
            (tmp_path / "cc" / place).mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), tmp_path / "cc" / place / f"{name}.nii.gz")
    words = ["--data", str(tmp_path / "cc"), "--out", str(tmp_path / "out"), "--set", "prepare.size=[0, 12, 12]"]
    done = CliRunner().invoke(app, ["bench", "paper_c_cc359", *words])
    assert done.exit_code == 0, done.output + str(done.exception)
    listed = {r["measure"]: r for r in rows(tmp_path / "out" / "comparison" / "published_C_text.csv")}
    assert listed["variance preserved (%)"]["published"] == "99.96" and "t-SNE" in (
        tmp_path / "out" / "comparison" / "index.html"
    ).read_text(encoding="utf-8")
    assert listed["scans (samples)"]["measured (value)"] == "18.0"
    assert any((tmp_path / "out" / "comparison" / "figures").glob("*t-sne*.svg"))
