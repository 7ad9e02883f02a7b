"""Commands that are killed at random leave nothing unreadable; ``scripts/kills.py`` kills more of them."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "kills.py"


@pytest.mark.soak
@pytest.mark.slow
def test_commands_killed_at_random_come_to_the_end_of_undisturbed_ones(tmp_path):
    command = [sys.executable, str(SCRIPT), "--kills", "24", "--seed", "1", "--out", str(tmp_path / "kills")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
