"""Folders and files that are whole after a kill, and that only their owner can open, whatever the umask is."""

import itertools
import os
import signal
import stat
import sys

import numpy as np
import pytest

from polysite.engines.record import Result, RoundRecord
from polysite.engines.run_folder import RunFolder
from polysite.engines.site_memory import Memory
from polysite.payload import Payload
from polysite.report.page import Page
from polysite.storage import Journal, draft_folder, private_folder, set_aside, write_file, write_private


def test_a_journal_keeps_what_a_crash_cut_short_and_names_a_damaged_line(tmp_path):
    path = tmp_path / "j.jsonl"
    known = {skip: Journal(path, lambda found: found["n"], skip) for skip in ("none", "last", "any")}
    assert known["none"].read() == []
    known["none"].append('{"n": 0}', '{"n": 1}')
    assert known["none"].read() == [0, 1] and path.read_text() == '{"n": 0}\n{"n": 1}\n'
    with path.open("ab") as file:
        file.write(b'{"n": 2, "\xc3')
    assert known["last"].read() == known["any"].read() == [0, 1]
    with pytest.raises(ValueError, match=r"line 3 of .*j\.jsonl is damaged"):
        known["none"].read()
    known["any"].append('{"n": 3}', sync=False)
    assert known["any"].read() == [0, 1, 3]
    with pytest.raises(ValueError, match="line 3 of"):
        known["last"].read()
    known["any"].replace(['{"n": 4}', '{"m": 5}'])
    with pytest.raises(ValueError, match=r"line 2 of .*j\.jsonl is damaged: KeyError\('n'\)"):
        known["any"].read()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder):
    """The modes of all files below a folder, and those of all folders."""
    found = [(p.is_dir(), stat.S_IMODE(p.stat().st_mode)) for p in (folder, *folder.rglob("*"))]
    return [m for is_dir, m in found if not is_dir], [m for is_dir, m in found if is_dir]


def test_a_run_folder_is_private(tmp_path, umask):
    folder = RunFolder.create(tmp_path / "runs" / "a", "seed = 1", 1, "", more={"deployment.json": "{}"})
    folder.append(RoundRecord(0, 0, {}))
    folder.save_model("best", {"w": np.ones(3)})
    folder.keep(folder.round(0), 3, [Memory("north", "fedavg", 0, Payload(n=1.0))])
    folder.finish(Result("segmentation", ("WT",), ("t1",), 1, 0, 0, {}, {}))
    files, folders = modes(tmp_path / "runs" / "a")
    assert len(files + folders) > 12 and set(files) == {0o600} and set(folders) == {0o700}


def test_what_is_published_follows_the_umask_and_what_is_private_does_not(tmp_path, umask):
    with draft_folder(tmp_path / "page", "page", private=False) as draft:
        (draft / "index.html").write_text("x")
    write_file(tmp_path / "page" / "more.html", lambda p: p.write_text("x"))
    assert modes(tmp_path / "page") == ([0o666 & ~umask] * 2, [0o777 & ~umask])
    private = private_folder(tmp_path / "a" / "b")
    write_private(tmp_path / "a" / "secret", b"x")
    assert modes(private)[1] == [0o700] and modes(tmp_path / "a")[0] == [0o600]
    for _ in range(2):  # the second time it is gone already
        set_aside(tmp_path / "a" / "secret")
    assert (tmp_path / "a" / "secret.damaged").read_bytes() == b"x"


OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.link"}


def killed_at(number, act):
    """Do something in a process that is killed before one of its file operations; return whether it was."""
    pid = os.fork()
    if not pid:
        count = itertools.count(1)

        def hook(event, _):
            if event in OPERATIONS and next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def write_folder(folder, text):
    with draft_folder(folder, "folder") as draft:
        (draft / "index.html").write_text(text)


def write_page(folder, text):
    folder.mkdir(exist_ok=True)
    Page(text, ()).write(folder)


@pytest.mark.parametrize("write", [write_folder, write_page])
def test_what_is_replaced_is_there_at_any_moment(write, tmp_path):
    file = tmp_path / "a" / "index.html"
    write(file.parent, "old")
    for number in itertools.count(1):
        if not killed_at(number, lambda: write(file.parent, "new")):
            break
        assert file.read_text() in ("old", "new"), number
    assert number > 3 and file.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]  # drafts of the killed processes are gone


def test_a_folder_is_also_replaced_where_names_cannot_be_exchanged(tmp_path, monkeypatch):
    monkeypatch.setattr("polysite.storage._exchange", lambda one, other: False)
    write_folder(tmp_path / "a", "old")
    write_folder(tmp_path / "a", "new")
    assert (tmp_path / "a" / "index.html").read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_draft_of_a_living_process_is_left_alone(tmp_path):
    with draft_folder(tmp_path / "a", "folder") as draft:
        write_folder(tmp_path / "a", "other")
        (draft / "index.html").write_text("mine")
    assert (tmp_path / "a" / "index.html").read_text() == "mine"
