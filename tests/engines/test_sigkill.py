"""A run killed at any moment, again and again, ends exactly where an undisturbed one does."""

import random
import signal
import subprocess
import sys
import time

import pytest

from studies import text

RUN = "rounds = 10\ncheckpoint_every = 2\n[algorithm]\nname = 'scaffold'"
CONFIG = text({"north": 6, "south": 4}, "steps = 5", RUN, filters=(4, 8, 8))


def polysite(*words):
    return subprocess.Popen([sys.executable, "-m", "polysite.cli", "train", "--quiet", "--no-page", *map(str, words)])


def appears(run, process):
    """Wait for the run folder, past the imports; the moment it is there."""
    while not run.exists():
        assert process.poll() is None
        time.sleep(0.01)
    return time.monotonic()


@pytest.mark.slow
@pytest.mark.parametrize("most", [2, pytest.param(10, marks=pytest.mark.soak)])
def test_a_run_killed_at_random_moments_resumes_to_the_same_bits(tmp_path, most):
    config = tmp_path / "study.toml"
    config.write_text(CONFIG)
    process = polysite(config, "--out", tmp_path / "whole")
    began = appears(tmp_path / "whole", process)
    assert process.wait() == 0
    whole = time.monotonic() - began

    run, kills, seed = tmp_path / "killed", 0, random.randrange(10**6)
    clock = random.Random(seed)
    process = polysite(config, "--out", run)
    appears(run, process)
    for _ in range(most):
        try:
            process.wait(clock.uniform(0, 0.8 / most * whole))
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        said = (run / "log.txt").read_text().count(" over ") if (run / "log.txt").exists() else 0
        process = polysite("--resume", run)
        while process.poll() is None and (run / "log.txt").read_text().count(" over ") == said:
            time.sleep(0.01)  # past its imports: it is training again
    assert process.wait() == 0 and kills >= most // 2, (kills, seed)

    same = ("models/last", "models/best", "checkpoints/round-000007", "checkpoints/round-000009")
    for file in (*(f"{name}.safetensors" for name in same), "result.json"):
        assert (run / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), (file, kills, seed)
    assert (run / "rounds.jsonl").read_text().count("\n") == 10
