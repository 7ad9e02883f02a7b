"""The benchmarks of papers B and C: every value of their protocols, and whole runs on a fake FeTS 2022."""

import csv
from pathlib import Path

import fets
import pytest
from typer.testing import CliRunner

from polysite import benchmark, config, study
from polysite.algorithms import name_of
from polysite.benchmark.jobs import studies
from polysite.cli import app
from polysite.data.sources import Counted
from polysite.report.published import numbers, sizes

SHARED = Path(__file__).parents[3] / "shared" / "data"
B, LIMITED, C = "challenge setup", "limited setup", "FeTS2022"
VARIANTS = ("fedavg", "fedavg, fixed iterations", "fedavg, uniform", "scaffold", "cfl")


def published(table, method, measure, setting):
    """The published value of a hyper-parameter, or the values that were searched."""
    rows = [n for n in numbers(table) if (n.method, n.setting) == (method, setting) and n.measure == measure]
    assert rows, (table, method, measure, setting)
    return rows[0].value if len(rows) == 1 else tuple(n.value for n in rows)


def printed(bench, method):
    """The study of a method as ``polysite train --print-config`` prints it, with its phases."""
    chosen = studies(benchmark.load(bench), {})[method]
    return config.phases(config.parse(config.dump(chosen, notes=True)))


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


def reach(value, path):
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("bench", "methods", "phase", "title", "quantity", "key"), SELECTED)
def test_a_selected_value_of_table_a4(bench, methods, phase, title, quantity, key):
    setting = "IID setup" if title == "FedAvg IID" else LIMITED if bench == "paper_b_limited" else B
    wanted = published("B_tableA4", title, f"{quantity} (selected)", setting)
    assert {m: reach(printed(bench, m)[phase], key) for m in methods} == dict.fromkeys(methods, wanted)


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
    found = {m: reach(s, key) for m, s in studies(benchmark.load(bench), {}).items() if m not in others}
    assert found == dict.fromkeys(found, wanted)


def test_the_rounds_of_paper_b_that_differ():
    iterations = printed("paper_b", "fedavg, fixed iterations")[0]
    title = "FedAvg w/ fixed local iterations"
    assert iterations.train.steps == published("B_text", title, "local iterations per round", B)
    assert iterations.run.rounds == published("B_text", title, "communication rounds", B)
    assert printed("paper_b", "q-fedavg")[0].train.gamma == 1.0
    for bench in ("paper_b", "paper_b_limited"):
        before, after = printed(bench, "prior cfl")
        title = "Prior CFL HGG/LGG"
        assert before.run.rounds == published("B_text", title, "FedAvg rounds before clustering", B)
        assert after.run.rounds == published("B_text", title, "communication rounds per cluster", B)
        tuned = printed(bench, "local fine-tuning")[1]
        assert tuned.run.rounds == published("B_text", "Local finetuning, Ditto", "local epochs", B)


def test_what_the_code_of_paper_b_decides():
    every = studies(benchmark.load("paper_b"), {})
    for each in every.values():
        assert each.prepare.normalise == "padded" and each.prepare.crop and not each.train.autocast
        assert each.train.contrast == "image" and each.train.augment == "full" and each.split.rounding == "up"
        assert each.train.patch == (128, 128, 128) and each.train.momentum == 0 and each.train.optimiser == "sgd"
    own = {m for m, each in every.items() if config.phases(each)[-1].run.best == "own"}
    assert own == {"local", "fedper", "lg_fedavg", "cfl", "prior cfl"}
    assert every["fednova"].algorithm.steps == "sizes" and every["scaffold"].algorithm.uniform is False
    assert every["q-fedavg"].algorithm.augmented
    cfl = every["cfl"]
    assert cfl.algorithm.split_at == (201,) and cfl.algorithm.split_first and cfl.run.best_from == 201
    assert [every[f"fedavg, IID {n}"].federation.sites for n in (23, 10, 5)] == [23, 10, 5]
    groups = config.phases(every["prior cfl"])[1].algorithm.groups
    assert groups["low"] == ("12", "13", "14", "15") and sorted(s for g in groups.values() for s in g) == [
        f"{n:02d}" for n in range(1, 24)
    ]


C_VALUES = [  # method, phase, key of a study, value; or the row of C's text
    *((m, 0, "train.batch", ("3D U-Net", "batch size")) for m in ("centralised", "fedavg")),
    *((m, 0, "train.weight_decay", ("all methods", "weight decay")) for m in ("centralised", "fedavg")),
    ("centralised", 0, "train.lr", ("Centralized", "learning rate")),
    ("centralised", 0, "run.rounds", ("Centralized", "epochs")),
    ("centralised", 0, "train.augment", "full"),
    ("centralised", 0, "train.gamma", 1.0),
    ("fedavg", 0, "train.lr", ("FedAvg", "learning rate")),
    ("fedavg", 0, "run.rounds", ("FedAvg", "communication rounds")),
    ("fedavg", 0, "train.epochs", ("FedAvg", "local epochs per round")),
    ("fedavg", 0, "train.augment", "full"),
    ("fedavg", 0, "train.gamma", 1.0),
    ("fedavg", 0, "train.overlap", ("3D U-Net", "sliding window overlap")),
    ("local fine-tuning", 1, "algorithm.lr", (0.02,)),
    ("local fine-tuning", 1, "run.rounds", ("Local Finetuning", "local epochs")),
    ("local fine-tuning", 1, "train.augment", "full"),
    ("cfft", 1, "train.lr", ("CFFT", "learning rate")),
    ("cfft", 1, "algorithm.rounds", ("CFFT", "communication rounds")),
    ("cfft", 1, "train.epochs", ("CFFT", "local epochs per round")),
    ("cfft, ideal", 1, "train.lr", ("CFFT_ideal", "learning rate")),
    ("cfft, ideal", 1, "algorithm.rounds", ("CFFT_ideal", "epochs")),
    ("cfft, ideal", 1, "run.pooled", True),
    *(
        (m, 1, key, value)
        for m in ("cfft", "cfft, ideal")
        for key, value in {
            "train.augment": "none",
            "train.gamma": 1.0,
            "algorithm.components": (10,),
            "algorithm.bin_width": ("radiomic features", "histogram bin size"),
            "algorithm.dimensions": ("PCA", "components"),
            "algorithm.fit": "pooled",
            "algorithm.restarts": 20,
            "algorithm.iterations": 100,
            "algorithm.seed": 6,
            "algorithm.cases": "train+validation",
        }.items()
    ),
]


@pytest.mark.parametrize(("method", "phase", "key", "value"), C_VALUES)
def test_a_value_of_paper_c(method, phase, key, value):
    text = isinstance(value, tuple) and isinstance(value[0], str)
    wanted = published("C_text", *value, C) if text else value
    assert reach(printed("paper_c", method)[phase], key) == wanted


def test_the_network_and_the_split_of_paper_c():
    chosen = config.vary(studies(benchmark.load("paper_c"), {})["fedavg"], {})
    assert chosen.model.filters == (16, 32, 64, 128) and chosen.prepare.normalise == "padded"
    counted = config.build({"preset": "radiomics_clusters", "data": {"name": "counted", "sizes": sizes("B_sizes")}})
    assert isinstance(counted.data, Counted)
    dealt = study.deal_cases(counted)
    for split, title in {"train": "training", "validation": "validation", "test": "test"}.items():
        assert sum(len(s[split]) for s in dealt.values()) == published("C_text", "", f"{title} samples", C)
    tested = {n.where: n.value for n in numbers("C_table3") if n.measure == "test size"}
    assert {f"institution {int(site)}": len(s["test"]) for site, s in dealt.items()} == tested
    parameters = sum(x.size for x in study.initial_params(counted).values())
    assert 1.35e6 < parameters < 1.45e6
