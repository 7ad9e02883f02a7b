"""Plans: runs, hours and disk from published sizes, before any data are here."""

from importlib import import_module

import pytest
from typer.testing import CliRunner

from polysite import benchmark
from polysite.benchmark.jobs import studies
from polysite.cli import app
from polysite.report.published import sizes

plan = import_module("polysite.benchmark.plan")  # the package has a function of this name
TINY = ["--set", "model.name=unet_small", "--set", "model.filters=[2, 4, 4]", "--set", "train.patch=[16, 16, 16]"]


def test_without_data_a_benchmark_prints_its_plan_and_says_what_to_name():
    words = ["bench", "paper_b", "--only", "fedavg", "--only", "local fine-tuning", "--set", "train.device=cpu", *TINY]
    planned = CliRunner().invoke(app, [*words, "--plan"])
    assert planned.exit_code == 0 and "Plan of paper_b" in planned.output and "after fedavg" in planned.output
    assert "CPU hours" in planned.output and "23 sites, 1251 cases" in " ".join(planned.output.split())
    refused = CliRunner().invoke(app, words)
    assert "Plan of paper_b" in refused.output and "name them with --data" in str(refused.exception)
    assert "partitioning_1.csv" in str(refused.exception) and refused.exit_code


def test_a_plan_counts_what_table_2_counts():
    every = studies(plan._counted(benchmark.load("paper_b")), {})
    chosen = {n: every[n] for n in ("fedavg", "fedavg, fixed iterations")}
    found = {n: plan._Rehearsed.of(s) for n, s in chosen.items()}
    assert found["fedavg"].rounds == 300 and found["fedavg, fixed iterations"].rounds == 720
    assert found["fedavg, fixed iterations"].steps == 165600  # Table 2
    assert found["fedavg"].steps == pytest.approx(59400, rel=0.07)  # every site rounds up its last batch
    model = 4 * 22_577_987
    assert found["fedavg"].checkpoint == pytest.approx(model, rel=0.01)
    tuned = plan._Rehearsed.of(every["local fine-tuning"])
    left = tuned.after(found["fedavg"])
    assert left.rounds == 30 and left.steps == 6 * 30 * found["fedavg"].steps // 300  # six rates


def test_a_plan_without_training_lists_the_scans():
    grid = benchmark.plan(benchmark.load("paper_c_cc359"), {}, absent=True)
    assert sum(sizes("C_sizes_cc359").values()) == 359 and "359" in grid.markdown()


def test_seconds_on_a_cpu_are_scaled_by_voxels_batch_and_windows(monkeypatch):
    monkeypatch.setattr(plan, "_timed", lambda call, network: 1.0)
    given = {"train.device": "cpu", "model.name": "unet_small", "model.filters": "[2, 4, 4]"}
    pace = plan.measure(studies(benchmark.load("paper_b"), given)["fedavg"])
    assert (pace.step, pace.case) == (8 * 4, 8 * 8)  # 128 against 64 voxels a side; four patches; eight windows
    assert pace.device == "cpu" and "scaled by the number of voxels" in pace.how
