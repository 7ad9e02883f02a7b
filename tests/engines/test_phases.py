"""Phases: each goes on from the best model so far; fine-tuning after another algorithm, against answers on paper."""

from dataclasses import replace

import numpy as np
import pytest

from polysite.algorithms.clustered import Clustered
from polysite.algorithms.ditto import Ditto
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.fine_tune import FineTune
from polysite.algorithms.ifca import Ifca
from polysite.algorithms.local import Local
from polysite.costs.model import measured
from polysite.costs.speeds import Speeds
from polysite.engines.phases import Phase, find_best, find_progress, run_phases
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.run_folder import RunFolder
from polysite.engines.simulator import Simulator
from polysite.engines.transport import Served
from polysite.errors import ConfigError
from polysite.report.costs import load_of
from quadratic import Aims, Quadratic, served_models

START = {"w": np.array([3.0])}
A, B, N = np.array([0.5, 1.0, 2.0]), np.array([-1.0, 0.3, 2.0]), np.array([2, 8, 5])
NAMES, ETA, K = ("a", "b", "c"), 0.1, 5
GROUPS = {"one": ("a", "b"), "two": ("c",)}


def sites(goal=None):
    made = {i: Aims(A[k], np.full(N[k], B[k]), lr=ETA, steps=K, start=START) for k, i in enumerate(NAMES)}
    for site in made.values():
        site.goal = goal
    return made


def phases(*parts, goal=None):
    return [Phase(algorithm, Simulator(algorithm, sites(goal)), Plan(**plan)) for algorithm, plan in parts]


def go(path, *parts, goal=None):
    folder = RunFolder.create(path, "", 0)
    return run_phases(phases(*parts, goal=goal), START, 0, folder), folder


def served(folder, name="best"):
    return served_models(folder, NAMES, name)


def tuned(w, b, a, lam, steps, lr=ETA):
    """Descent on a/2 (v - b)^2 + lam/2 (v - w)^2 from w."""
    rest = (a * b + lam * w) / (a + lam)
    return rest + (1 - lr * (a + lam)) ** steps * (w - rest)


def fixed_point():
    """Of FedAvg on these sites, to which its rounds go."""
    pull = 1 - (1 - ETA * A) ** K
    return float((N * pull * B).sum() / (N * pull).sum())


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_fine_tuning_first_round_and_limit(lam):
    """Its own optimum, or as far from the model that it began with as lam lets it; nothing but the choice is told."""
    engine, algorithm = Simulator(FineTune(lam=(lam,)), sites()), FineTune(lam=(lam,))
    engine.begin(0, Served(dict.fromkeys(NAMES, (START,))))
    first, *_, last = run_rounds(algorithm, engine, START, Plan(rounds=200), 0)
    for k, i in enumerate(NAMES):
        (x,) = (p["w"] for p, _ in algorithm.serve(last.sent[i], engine.memories()[i], engine.sites[i], ()))
        assert x == pytest.approx((A[k] * B[k] + lam * 3.0) / (A[k] + lam), rel=1e-6)
        assert first.replies[i].fits[0].params["w"] == pytest.approx(tuned(3.0, B[k], A[k], lam, K))
        assert first.sent[i].nbytes == 0 and set(first.replies[i].payload) == set(FineTune.reply)
        assert first.replies[i].payload["chosen_round"] == 1 and first.replies[i].payload["chosen_lam"] == lam


def test_every_site_chooses_rate_pull_and_round_by_its_own_validation_cases(tmp_path):
    """Against all of them tried by hand; what the site had before is one of them."""
    rates, pulls, goal = (0.02, 0.1), (0.0, 0.5, 4.0), 0.45
    algorithm = FineTune(lr=rates, lam=pulls, steps=1)
    _, folder = go(tmp_path / "run", (FedAvg(), {"rounds": 40}), (algorithm, {"rounds": 30}), goal=goal)
    (w,) = set(served(RunFolder(go(tmp_path / "alone", (FedAvg(), {"rounds": 40}), goal=goal)[1].path)).values())
    said = folder.records()[-1].sites
    for k, i in enumerate(NAMES):
        tried = {
            (t, lr, lam): tuned(w, B[k], A[k], lam, t, lr) for lr in rates for lam in pulls for t in range(1, 31)
        } | {(0, 0.0, 0.0): w}
        best = min(tried, key=lambda choice: abs(tried[choice] - goal))
        assert served(folder)[i] == pytest.approx(tried[best])
        assert said[i].numbers == dict(zip(("chosen_round", "chosen_lr", "chosen_lam"), best, strict=True))
    assert len({tuple(said[i].numbers.values()) for i in NAMES}) == 3  # each in its own way


def test_ditto_after_training_is_the_limit_of_ditto_with_a_model_that_rests(tmp_path):
    """Where the shared model stands still, both minimise the same (comparators, section 12)."""
    parts = (FedAvg(), {"rounds": 300}), (FineTune(lam=(0.8,)), {"rounds": 300})
    _, after = go(tmp_path / "after", *parts, goal=fixed_point())
    at = find_progress(after, phases(*parts))
    _, beside = go(tmp_path / "beside", (Ditto(lam=0.8), {"rounds": 600}))
    assert {i: at.memories[i]["trial_0"]["w"].item() for i in NAMES} == pytest.approx(served(beside, "last"), rel=1e-9)


def test_a_site_without_validation_cases_stays_with_what_it_had():
    class Mute(Quadratic):
        def cases(self, split):
            return () if split == "validation" else super().cases(split)

    algorithm, site = FineTune(), Mute(1.0, np.zeros(2), start=START)
    _, memory = algorithm.local({}, {}, site)
    assert next(iter(algorithm.serve({}, memory, site, ())))[0] == START


def test_a_phase_of_groups_goes_on_from_the_shared_model(tmp_path):
    w = fixed_point()
    result, folder = go(tmp_path / "run", (FedAvg(), {"rounds": 300}), (Clustered(GROUPS), {"rounds": 1}), goal=w)
    moved = {i: B[k] + (1 - ETA * A[k]) ** K * (w - B[k]) for k, i in enumerate(NAMES)}
    one = (N[0] * moved["a"] + N[1] * moved["b"]) / (N[0] + N[1])
    assert served(folder, "last") == pytest.approx({"a": one, "b": one, "c": moved["c"]})
    assert result.rounds == 301 and result.best_phase == 0
    assert [r.phase for r in folder.records()] == [0] * 300 + [1]


def test_the_same_algorithm_twice_is_the_algorithm_for_longer(tmp_path):
    w = fixed_point()  # every round comes nearer to it
    _, once = go(tmp_path / "once", (FedAvg(), {"rounds": 20}), goal=w)
    _, twice = go(tmp_path / "twice", (FedAvg(), {"rounds": 12}), (FedAvg(), {"rounds": 8}), goal=w)
    assert served(once, "last") == served(twice, "last")


def test_a_phase_that_does_not_help_changes_nothing_and_the_next_goes_on_from_the_best(tmp_path):
    """The model is as it should be after the first phase; the second only leads away."""
    w = fixed_point()
    first, away = (FedAvg(), {"rounds": 300}), (Clustered(GROUPS), {"rounds": 5, "patience": 2})
    result, folder = go(tmp_path / "run", first, away, (FineTune(), {"rounds": 4}), goal=w)
    assert result.best_phase == 0 and served(folder) == pytest.approx(dict.fromkeys(NAMES, w))
    assert [r.phase for r in folder.records()][300:] == [1, 1, 2, 2, 2, 2]  # patience ends the phase, not the study
    assert result.best_round == folder.records()[-1].best_round < 300
    moved = {i: tuned(w, B[k], A[k], 0, 4 * K) for k, i in enumerate(NAMES)}
    again = phases(first, away, (FineTune(), {"rounds": 4}), goal=w)
    at = find_progress(folder, again)
    assert {i: at.memories[i]["trial_0"]["w"].item() for i in NAMES} == pytest.approx(
        moved
    )  # from w, not from the groups


def test_costs_add_up(tmp_path):
    """What brings the sites the model to go on from is one more model to each."""
    _, shared = go(tmp_path / "shared", (FedAvg(), {"rounds": 3}))
    _, both = go(tmp_path / "both", (FedAvg(), {"rounds": 3}), (FineTune(), {"rounds": 4}))
    before, total = (measured(((load_of(r), r.pooled) for r in f.records()), Speeds(), 1) for f in (shared, both))
    assert total.down == {i: n + 8 for i, n in before.down.items()}
    assert total.up == {i: n + 4 * 24 for i, n in before.up.items()}
    assert total.steps == before.steps + 4 * 3 * K and total.rounds == 7 and total.seconds > before.seconds
    assert [bool(r.handed) for r in both.records()] == [False] * 3 + [True] + [False] * 3


PHASES = (
    (FedAvg(), {"rounds": 5}),
    (Clustered(GROUPS), {"rounds": 4, "validate_every": 2}),
    (FineTune(lam=(0.0, 1.0)), {"rounds": 3}),
)


@pytest.mark.parametrize("after", range(12))
def test_a_study_of_phases_resumes_wherever_it_was_interrupted(tmp_path, after, monkeypatch):
    parts = tuple((algorithm, {**plan, "checkpoint_every": 2}) for algorithm, plan in PHASES)
    result, whole = go(tmp_path / "whole", *parts)
    folder, append, seen = RunFolder.create(tmp_path / "half", "", 0), RunFolder.append, []

    def fail(self, record):
        append(self, record)
        seen.append(record.round)
        if record.round == after and seen.count(after) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "append", fail)
    with pytest.raises(KeyboardInterrupt):
        run_phases(phases(*parts), START, 0, folder)
    again = phases(*parts)
    assert run_phases(again, START, 0, folder, resume=find_progress(folder, again)) == result
    assert served(folder) == served(whole) and served(folder, "last") == served(whole, "last")

    def timeless(f):
        return [replace(r, elapsed=0, sites={}) for r in f.records()]

    assert timeless(folder) == timeless(whole)


def test_a_damaged_beginning_of_a_phase_is_noticed_and_made_again(tmp_path, caplog):
    result, folder = go(tmp_path / "run", *PHASES[:1], PHASES[2])
    (folder.path / "result.json").unlink()
    folder.phase(1).write_bytes(b"x")
    again = phases(*PHASES[:1], PHASES[2])
    at = find_progress(folder, again)
    assert at.phase == 0 and "phase-1.safetensors cannot be read" in caplog.text
    assert run_phases(again, START, 0, folder, resume=at) == result


def test_the_best_model_is_found_again_with_the_phase_that_made_it(tmp_path):
    result, folder = go(tmp_path / "run", *PHASES)
    again = phases(*PHASES)
    phase, best = find_best(folder, again, result.best_round)
    sent = phase.algorithm.send(best.state, NAMES)
    found = {i: t["w"].item() for i, (t,) in phase.transport.serve(best.round, sent).models.items()}
    assert found == served(folder) and best.phase == result.best_phase == 2


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        (Ditto(), FedAvg(), "phase 2 trains a model that sites share, but after phase 1 every site has its own"),
        (Ditto(), Clustered(GROUPS), "let it be fine_tune or local"),
    ],
    ids=str,
)
def test_a_server_needs_a_model_to_go_on_from(tmp_path, first, second, sentence):
    with pytest.raises(ConfigError, match=sentence):
        go(tmp_path / "run", (first, {"rounds": 2}), (second, {"rounds": 2}))


def test_models_of_their_own_go_on_at_their_sites(tmp_path):
    for name, second in (("local", Local()), ("tuned", FineTune())):
        _, folder = go(tmp_path / name, (Ditto(lam=0.8), {"rounds": 50}), (second, {"rounds": 1}))
        own = served(go(tmp_path / f"{name} before", (Ditto(lam=0.8), {"rounds": 50}))[1])
        assert served(folder, "last") == pytest.approx(
            {i: tuned(own[i], B[k], A[k], 0, K) for k, i in enumerate(NAMES)}
        )


def test_models_for_different_patients_are_no_beginning(tmp_path):
    class Splits(Ifca):
        def serve(self, got, memory, site, cases):
            for params, _ in super().serve(got, memory, site, cases):
                yield params, cases[:1]
                yield params, cases[1:]

    with pytest.raises(ConfigError, match="phase 2 starts from one model at every site, but in phase 1 'a' has 2"):
        go(tmp_path / "run", (Splits(k=2), {"rounds": 1}), (FineTune(), {"rounds": 1}))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"lam": ()}, "lam is an empty list"),
        ({"lam": (0.1, -1.0)}, "lam holds -1.0; every one must be at least 0"),
        ({"lr": (0.0,)}, "lr holds 0.0; every one must be more than 0"),
        ({"lr": (float("inf"),)}, "lr holds inf"),
        ({"steps": 0}, "steps = 0 must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        FineTune(**keys)


def test_what_sites_go_on_from_is_what_they_had_in_the_best_round(tmp_path):
    """Their own models pass by where they should be; the next phase does not start from where they ended."""
    first = (Ditto(lam=0.05), {"rounds": 30})
    result, before = go(tmp_path / "before", first, goal=1.2)
    own = served(before)
    assert result.best_round < 29 and own != served(before, "last")
    parts = first, (FineTune(), {"rounds": 1})
    _, folder = go(tmp_path / "run", *parts, goal=1.2)
    at = find_progress(folder, phases(*parts, goal=1.2))
    moved = {i: tuned(own[i], B[k], A[k], 0, K) for k, i in enumerate(NAMES)}
    assert {i: at.memories[i]["trial_0"]["w"].item() for i in NAMES} == pytest.approx(moved)


def test_a_run_interrupted_at_its_very_end_exports_the_same_models(tmp_path):
    parts = (FedAvg(), {"rounds": 3}), (Local(), {"rounds": 3})
    result, folder = go(tmp_path / "run", *parts)
    before = served(folder), served(folder, "last")
    (folder.path / "result.json").unlink()
    again = phases(*parts)
    assert run_phases(again, START, 0, folder, resume=find_progress(folder, again)) == result
    assert (served(folder), served(folder, "last")) == before


def test_a_hospital_that_never_trains_gets_the_same_after_a_restart(tmp_path):
    """In the third phase it is served what it was in the second, where that was what the first had made."""
    parts = (FedAvg(), {"rounds": 4}), (FineTune(), {"rounds": 2}), (FineTune(lam=(0.3,)), {"rounds": 2})

    def made():
        found = []
        for algorithm, plan in parts:
            hosts = sites(goal=0.9)
            guests = {**hosts, "new": Aims(1.0, np.array([0.9]), start=START)}
            found.append(Phase(algorithm, Simulator(algorithm, hosts, guests=guests), Plan(**plan, checkpoint_every=1)))
        return found

    folder = RunFolder.create(tmp_path / "run", "", 0)
    result = run_phases(made(), START, 0, folder)
    (folder.path / "result.json").unlink()
    folder.checkpoints()[0].unlink()
    again = made()
    assert run_phases(again, START, 0, folder, resume=find_progress(folder, again)) == result
    _, first = go(tmp_path / "first", parts[0], goal=0.9)
    shared = served(first)["a"]
    assert result.test["new"]["0"].loss == pytest.approx(abs(shared - 0.9))
