"""Checkpoints of one round: the same content is one file with several names."""

import os

import numpy as np
import pytest

from polysite.engines import checkpoint
from polysite.engines.run_folder import RunFolder
from polysite.engines.site_memory import Memory
from polysite.errors import RunError
from polysite.payload import Payload
from polysite.storage import link_file, write_file


def state(value):
    return Payload(model={"w": np.full(4, value)})


def memory(value):
    return Memory("a", "ditto", 3, state(value))


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run", "", 0)


def test_the_best_and_the_last_checkpoint_of_a_round_are_one_file(folder):
    best, last = folder.best(3), folder.round(3)
    folder.keep(best, state(1.0), [memory(2.0)])
    folder.keep(last, state(1.0), [memory(2.0)])
    assert best.samefile(last) and folder.memory(best, "a").samefile(folder.memory(last, "a"))
    folder.keep(last, state(5.0), [memory(6.0)])  # the round again, with another outcome
    assert not best.samefile(last) and checkpoint.load(best) == state(1.0) and checkpoint.load(last) == state(5.0)
    assert checkpoint.load(folder.memory(best, "a")).content == state(2.0)
    folder.keep(last, state(1.0), [])
    last.unlink()
    assert checkpoint.load(best) == state(1.0)


def test_different_content_or_a_damaged_twin_is_never_linked(folder):
    folder.keep(folder.best(3), state(1.0), [])
    folder.keep(folder.round(3), state(2.0), [])
    assert checkpoint.load(folder.best(3)) == state(1.0) and checkpoint.load(folder.round(3)) == state(2.0)
    folder.keep(folder.best(4), state(3.0), [])
    folder.best(4).write_bytes(folder.best(4).read_bytes()[:-3])
    folder.keep(folder.round(4), state(3.0), [])
    assert checkpoint.load(folder.round(4)) == state(3.0)
    with pytest.raises(RunError, match="cannot be read"):
        checkpoint.load(folder.best(4))


def test_without_hard_links_the_file_is_copied(folder, monkeypatch):
    def refuse(*_):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    folder.keep(folder.best(3), state(1.0), [memory(2.0)])
    folder.keep(folder.round(3), state(1.0), [memory(2.0)])
    assert not folder.best(3).samefile(folder.round(3))
    assert folder.best(3).read_bytes() == folder.round(3).read_bytes()
    assert not list(folder.path.rglob("*.partial"))


def test_a_run_after_another_shares_its_checkpoints_until_it_replaces_them(folder, tmp_path):
    folder.keep(folder.best(3), state(1.0), [])
    folder.keep(folder.round(3), state(1.0), [])
    after = RunFolder.create(tmp_path / "after", "", 0, after=folder)
    assert after.round(3).samefile(folder.best(3))
    after.keep(after.round(3), state(7.0), [])
    assert checkpoint.load(folder.round(3)) == state(1.0) == checkpoint.load(after.best(3))


def test_linking_a_file_to_another_of_its_names_leaves_no_draft(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    write_file(first, lambda p: p.write_text("1"))
    for _ in range(2):
        link_file(first, second)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "second"] and second.samefile(first)
