"""Runs of one phase or several in run folders: made, resumed, interrupted, compared."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from polysite.engines.phases import Phase, find_progress, run_phases
from polysite.engines.plan import Plan
from polysite.engines.run_folder import RunFolder
from polysite.engines.simulator import Simulator

START = {"w": np.array([3.0])}


def phases(parts, sites, **engine):
    """A phase for every (algorithm, plan); ``sites`` makes the sites of each."""
    made, before = [], None
    for algorithm, plan in parts:
        before = Simulator(algorithm, sites(), after=before, **engine)
        made.append(Phase(algorithm, before, Plan(**plan)))
    return made


def play(path, made, start=START, until=None):
    """The result and the folder of a run, which goes on where it was interrupted."""
    folder = RunFolder.open(path) if path.exists() else RunFolder.create(path, "seed = 0\n", 0)
    return run_phases(made, start, 0, folder, resume=find_progress(folder, made), until=until), folder


def timeless(folder):
    """The records without what differs from run to run."""
    return [replace(r, elapsed=0, sites={}) for r in folder.records()]


@contextmanager
def interrupted(after):
    """Interrupt a run after a round was recorded and before its checkpoint is written."""

    def fail(self, record, append=RunFolder.append):
        append(self, record)
        if record.round == after:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunFolder, "append", fail)
        yield
