"""Phases: each goes on from the best model so far; fine-tuning after another algorithm, against answers on paper."""

import numpy as np
import pytest

import polysite as ps
from phased import START, interrupted, phases, play, timeless
from polysite.engines.phase_sites import Served
from polysite.engines.phases import find_progress
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError
from polysite.payload import Payload
from quadratic import Aims, Quadratic, served_models

A, B, N = np.array([0.5, 1.0, 2.0]), np.array([-1.0, 0.3, 2.0]), np.array([2, 8, 5])
NAMES, ETA, K = ("a", "b", "c"), 0.1, 5
GROUPS = {"one": ("a", "b"), "two": ("c",)}


def sites(goal=None):
    made = {i: Aims(A[k], np.full(N[k], B[k]), lr=ETA, steps=K, start=START) for k, i in enumerate(NAMES)}
    for site in made.values():
        site.goal = goal
    return made


def made(*parts, goal=None, **guests):
    return phases(parts, lambda: sites(goal), guests={**sites(goal), **guests} if guests else None)


def go(path, *parts, **more):
    return play(path, made(*parts, **more))


def served(folder, name="best"):
    return served_models(folder, NAMES, name)


def trials(folder, *parts, goal=None):
    """What sites that tune had in the end, whatever they chose."""
    at = find_progress(folder, made(*parts, goal=goal))
    return {i: at.memories[i]["trial_0"]["w"].item() for i in NAMES}


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
    engine, algorithm = Simulator(ps.FineTune(lam=(lam,)), sites()), ps.FineTune(lam=(lam,))
    engine.begin(0, Served(dict.fromkeys(NAMES, (START,))))
    first, *_, last = run_rounds(algorithm, engine, START, Plan(rounds=200), 0)
    for k, i in enumerate(NAMES):
        (x,) = (
            p["w"] for p, _ in algorithm.serve(last.sent[i], engine.memories().get(i, Payload()), engine.known[i], ())
        )
        assert x == pytest.approx((A[k] * B[k] + lam * 3.0) / (A[k] + lam), rel=1e-6)
        assert first.replies[i].fits[0].params["w"] == pytest.approx(tuned(3.0, B[k], A[k], lam, K))
        assert first.sent[i].nbytes == 0 and set(first.replies[i].payload) == set(ps.FineTune.reply)
        assert first.replies[i].payload["chosen_round"] == 1 and first.replies[i].payload["chosen_lam"] == lam


def test_every_site_chooses_rate_pull_and_round_by_its_own_validation_cases(tmp_path):
    """Against all of them tried by hand; what the site had before is one of them."""
    rates, pulls, goal = (0.02, 0.1), (0.0, 0.5, 4.0), 0.45
    algorithm = ps.FineTune(lr=rates, lam=pulls, steps=1)
    shared = (ps.FedAvg(), {"rounds": 40})
    _, folder = go(tmp_path / "run", shared, (algorithm, {"rounds": 30}), goal=goal)
    (w,) = set(served(go(tmp_path / "alone", shared, goal=goal)[1]).values())
    said = folder.records()[-1].sites
    for k, i in enumerate(NAMES):
        tried = {(t, lr, lam): tuned(w, B[k], A[k], lam, t, lr) for lr in rates for lam in pulls for t in range(1, 31)}
        tried[0, 0.0, 0.0] = w
        best = min(tried, key=lambda choice: abs(tried[choice] - goal))
        assert served(folder)[i] == pytest.approx(tried[best])
        assert said[i].numbers == dict(zip(("chosen_round", "chosen_lr", "chosen_lam"), best, strict=True))
    assert len({tuple(said[i].numbers.values()) for i in NAMES}) == 3  # each in its own way


def test_ditto_after_training_is_the_limit_of_ditto_with_a_model_that_rests(tmp_path):
    """Where the shared model stands still, both minimise the same (comparators, section 12)."""
    parts = (ps.FedAvg(), {"rounds": 60}), (ps.FineTune(lam=(0.8,)), {"rounds": 60})
    _, after = go(tmp_path / "after", *parts, goal=fixed_point())
    _, beside = go(tmp_path / "beside", (ps.Ditto(lam=0.8), {"rounds": 120}))
    assert trials(after, *parts) == pytest.approx(served(beside, "last"), rel=1e-9)


def test_a_site_without_validation_cases_stays_with_what_it_had():
    class Mute(Quadratic):
        def cases(self, split):
            return () if split == "validation" else super().cases(split)

    algorithm, site = ps.FineTune(), Mute(1.0, np.zeros(2), start=START)
    _, memory = algorithm.local({}, {}, site)
    assert next(iter(algorithm.serve({}, memory, site, ())))[0] == START


def test_a_phase_that_does_not_help_changes_nothing_and_the_next_goes_on_from_the_best(tmp_path):
    """The model is as it should be after the first phase; the second only leads away."""
    w = fixed_point()
    parts = (
        (ps.FedAvg(), {"rounds": 60}),
        (ps.Clustered(GROUPS), {"rounds": 5, "patience": 2}),
        (ps.FineTune(), {"rounds": 4}),
    )
    result, folder = go(tmp_path / "run", *parts, goal=w)
    assert result.best_phase == 0 and served(folder) == pytest.approx(dict.fromkeys(NAMES, w))
    assert [r.phase for r in folder.records()][60:] == [1, 1, 2, 2, 2, 2]  # patience ends the phase, not the study
    assert result.best_round == folder.records()[-1].best_round < 60
    moved = {i: tuned(w, B[k], A[k], 0, 4 * K) for k, i in enumerate(NAMES)}
    assert trials(folder, *parts, goal=w) == pytest.approx(moved)  # from w, not from the groups


PHASES = (
    (ps.FedAvg(), {"rounds": 5}),
    (ps.Clustered(GROUPS), {"rounds": 4, "validate_every": 2}),
    (ps.FineTune(lam=(0.0, 1.0)), {"rounds": 3}),
)


@pytest.mark.parametrize("after", [0, 3, 4, 5, 7, 8, 9, 11])
def test_a_study_of_phases_resumes_wherever_it_was_interrupted(tmp_path, after):
    parts = tuple((algorithm, {**plan, "checkpoint_every": 2}) for algorithm, plan in PHASES)
    result, whole = go(tmp_path / "whole", *parts)
    with interrupted(after):
        go(tmp_path / "half", *parts)
    again, folder = go(tmp_path / "half", *parts)
    assert again == result and timeless(folder) == timeless(whole)
    assert served(folder) == served(whole) and served(folder, "last") == served(whole, "last")


def test_a_damaged_beginning_of_a_phase_is_noticed_and_made_again(tmp_path, caplog):
    parts = PHASES[0], PHASES[2]
    result, folder = go(tmp_path / "run", *parts)
    (folder.path / "result.json").unlink()
    folder.phase(1).write_bytes(b"x")
    assert go(tmp_path / "run", *parts)[0] == result and "phase-1.safetensors cannot be read" in caplog.text


def test_a_server_needs_a_model_to_go_on_from(tmp_path):
    sentence = "phase 2 trains a model that sites share, but after phase 1 every site has its own; let it be fine_tune"
    with pytest.raises(ConfigError, match=sentence):
        go(tmp_path / "run", (ps.Ditto(), {"rounds": 2}), (ps.FedAvg(), {"rounds": 2}))


def test_models_for_different_patients_are_no_beginning(tmp_path):
    class Splits(ps.Ifca):
        def serve(self, got, memory, site, cases):
            for params, _ in super().serve(got, memory, site, cases):
                yield params, cases[:1]
                yield params, cases[1:]

    with pytest.raises(ConfigError, match="phase 2 starts from one model at every site, but in phase 1 'a' has 2"):
        go(tmp_path / "run", (Splits(k=2), {"rounds": 1}), (ps.FineTune(), {"rounds": 1}))


def test_settings_that_make_no_sense_are_refused():
    for keys, sentence in (
        ({"lam": ()}, "lam is an empty list"),
        ({"lam": (0.1, -1.0)}, "lam holds -1.0; every one must be at least 0"),
        ({"lr": (0.0,)}, "lr holds 0.0; every one must be more than 0"),
        ({"lr": (float("inf"),)}, "lr holds inf"),
        ({"steps": 0}, "steps = 0 must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            ps.FineTune(**keys)


def test_what_sites_go_on_from_is_what_they_had_in_the_best_round(tmp_path):
    """Their own models pass by where they should be; the next phase does not start from where they ended."""
    first = (ps.Ditto(lam=0.05), {"rounds": 30})
    result, before = go(tmp_path / "before", first, goal=1.2)
    own = served(before)
    assert result.best_round < 29 and own != served(before, "last")
    parts = first, (ps.FineTune(), {"rounds": 1})
    _, folder = go(tmp_path / "run", *parts, goal=1.2)
    moved = {i: tuned(own[i], B[k], A[k], 0, K) for k, i in enumerate(NAMES)}
    assert trials(folder, *parts, goal=1.2) == pytest.approx(moved)


def test_a_hospital_that_never_trains_gets_the_same_after_a_restart(tmp_path):
    """In the third phase it is served what it was in the second, where that was what the first had made."""
    each = {"checkpoint_every": 1}
    then = (ps.FineTune(), {"rounds": 2, **each}), (ps.FineTune(lam=(0.3,)), {"rounds": 2, **each})
    parts = (ps.FedAvg(), {"rounds": 4, **each}), *then

    new = Aims(1.0, np.array([0.9]), start=START)
    result, folder = go(tmp_path / "run", *parts, goal=0.9, new=new)
    (folder.path / "result.json").unlink()
    for path in folder.checkpoints()[:-1]:
        path.unlink()
    assert go(tmp_path / "run", *parts, goal=0.9, new=new)[0] == result
    _, first = go(tmp_path / "first", parts[0], goal=0.9)
    assert result.test["new"]["0"].loss == pytest.approx(abs(served(first)["a"] - 0.9))
