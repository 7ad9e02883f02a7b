"""Plans: runs, hours and disk from published sizes, before any data are here."""

import json
import os
from importlib import import_module

import pytest
from typer.testing import CliRunner

from polysite import benchmark, study
from polysite.benchmark.jobs import studies
from polysite.cli import app
from polysite.costs.model import total
from polysite.report.published import sizes

plan, pace = (import_module(f"polysite.benchmark.{name}") for name in ("plan", "pace"))  # functions have these names
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
    found = {n: plan._Work.of(s) for n, s in chosen.items()}
    assert found["fedavg"].rounds == 300 and found["fedavg, fixed iterations"].rounds == 720
    assert found["fedavg, fixed iterations"].steps == 165600  # Table 2
    assert found["fedavg"].steps == pytest.approx(59400, rel=0.07)  # every site rounds up its last batch
    model = 4 * 22_577_987
    tested = [len(splits["test"]) for splits in study.deal_cases(chosen["fedavg"]).values()]
    files = 3e4 * sum(tested) + 3e6 * sum(min(3, n) for n in tested)
    assert found["fedavg"].stored - files == pytest.approx(5 * model, rel=0.01)  # three checkpoints, two models
    tuned = plan._Work.of(every["local fine-tuning"])
    left = tuned.after(found["fedavg"])
    assert left.rounds == 30 and left.steps == 6 * 30 * found["fedavg"].steps // 300  # six rates


def test_rounds_that_are_not_validated_are_not_counted_as_validated():
    chosen = studies(benchmark.load("phantoms"), {"run.rounds": "20", "run.validate_every": "5"})["fedavg"]
    cases = sum(len(splits["validation"]) for splits in study.deal_cases(chosen).values())
    assert plan._Work.of(chosen).cases == 4 * cases == total(study.loads(chosen)).cases


def test_a_plan_without_training_lists_the_scans():
    grid = benchmark.plan(benchmark.load("paper_c_cc359"), {}, absent=True)
    assert sum(sizes("C_sizes_cc359").values()) == 359 and "359" in grid.markdown()


def test_seconds_on_a_cpu_are_scaled_by_voxels_batch_and_windows(monkeypatch):
    monkeypatch.setattr(pace, "_timed", lambda call, network: 1.0)
    given = {"train.device": "cpu", "model.name": "unet_small", "model.filters": "[2, 4, 4]"}
    found = pace.measure(studies(plan._counted(benchmark.load("paper_b")), given)["fedavg"])
    assert (found.step, found.case) == (8 * 4, 8 * 8)  # 128 against 64 voxels a side; four patches; eight windows
    assert found.device == "cpu" and "scaled by the number of voxels" in found.how


def test_phantoms_are_as_large_as_they_say_and_are_not_cached(monkeypatch):
    monkeypatch.setattr(pace, "_timed", lambda call, network: 1.0)
    given = {"train.device": "cpu", "data.shape": "[32, 48, 32]", "train.patch": "[16, 16, 16]", "train.overlap": "0"}
    bench = benchmark.load("phantoms").only(["local", "fedavg"])
    assert pace.measure(studies(bench, given)["fedavg"]).case == 2 * 3 * 2
    assert "cache" not in benchmark.plan(bench, given).note


def record(index, elapsed, seconds, steps, cases):
    site = {"loss": 1.0, "steps": steps, "lr_sum": 0.1, "seconds": seconds, "bytes_down": 0, "bytes_up": 0}
    validation = {"a": {"cases": cases, "loss": 1.0, "score": {"L": 0.5}}}
    return json.dumps(
        {"round": index, "phase": 0, "sites": {"a": site, "b": site}, "validation": validation, "elapsed": elapsed}
    )


def finished(out, method, began, ended, lines):
    run = out / "runs" / method / "fold0-seed0"
    run.mkdir(parents=True)
    for name, text in (("config.toml", ""), ("versions.json", "{}"), ("result.json", "{}")):
        (run / name).write_text(text)
    (run / "rounds.jsonl").write_text("\n".join(lines))
    os.utime(run / "versions.json", (began, began))
    os.utime(run / "result.json", (ended, ended))


def test_speeds_are_those_of_finished_runs_in_the_folder(tmp_path):
    chosen = studies(benchmark.load("phantoms"), {"train.device": "cpu"})
    # two turns of 2 s for 10 steps each; the rest of a round, 1 s, is spent on 5 validated cases; resumed after round 1
    finished(tmp_path, "fedavg", 0, 100, [record(0, 5, 2, 10, 5), record(1, 10, 2, 10, 5), record(2, 5, 2, 10, 5)])
    finished(tmp_path, "ditto", 0, 100, [record(0, 9, 4, 10, 5)])
    found = pace.recorded(tmp_path, list(chosen), next(iter(chosen.values())))
    assert (found.of("fedavg").step, found.of("fedavg").case) == pytest.approx((0.2, 0.2))
    assert (found.of("ditto").step, found.of("ditto").case) == pytest.approx((0.4, 0.2))
    assert found.of("local").step == found.step == pytest.approx(20 / 80) and found.parallel == pytest.approx(2)
    assert "Speeds of 2 finished runs" in found.how and found.device == "cpu"
    assert pace.recorded(tmp_path / "none", list(chosen), next(iter(chosen.values()))) is None


def test_a_plan_says_where_its_speeds_come_from(tmp_path):
    bench = benchmark.load("paper_b").only(["fedavg"])
    given = {"train.device": "cpu", "model.name": "unet_small", "model.filters": "[2, 4, 4]", "run.rounds": "4"}
    finished(tmp_path, "fedavg", 0, 100, [record(0, 50, 20, 10, 5)])
    grid = benchmark.plan(bench, given, absent=True, out=tmp_path)
    whole = plan._Work.of(plan._dealable(studies(plan._counted(bench), given)["fedavg"]))
    hours = len(bench.places) * (2 * whole.steps + 2 * (whole.cases + whole.tested)) / 3600
    assert "Speeds of 1 finished runs in" in grid.note and "within a round" not in grid.note
    assert grid.lines[-1].cells[4].value == pytest.approx(hours)
